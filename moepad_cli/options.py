"""Options that many commands share, added to a Typer command without repeating them in its signature."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from moepad_cli import errors, output, parse
from moepad_cli.environment import environment
from moepad_cli.output import Drawing, OutputOptions
from repro.report import Report, Verdict

FORMATS = ("table", "markdown", "json", "csv")
_PANEL = "Output"
_FILE: dict[str, Any] = {"metavar": "FILE", "panel": _PANEL}

SavedReport = tuple[Report, Callable[[], str]]
"""What a command with ``save=True`` returns: the report, and what gives the text for ``--save``."""


def option(
    name: str,
    *flags: str,
    help: str,
    metavar: str | None = None,
    panel: str | None = None,
    default: Any = None,
    choices: Sequence[str] = (),
    callback: Callable[..., Any] | None = None,
) -> inspect.Parameter:
    """A Typer option as a signature parameter, for ``add_parameters``.

    The value arrives as text, or as a bool where ``default`` is one. ``choices`` are shown and completed, and
    left to the command to check (``parse.choice``).
    """
    is_flag = isinstance(default, bool)
    info = typer.Option(
        *(flags or (f"--{name.replace('_', '-')}",)),
        help=help,
        metavar=None if is_flag else metavar or "|".join(choices) or "TEXT",
        rich_help_panel=panel,
        callback=callback,
        is_eager=callback is not None,
        autocompletion=completer(choices) if choices else None,
    )
    annotation: Any = Annotated[bool if is_flag else str | None, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def add_parameters(function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> None:
    """Shows Typer more parameters than ``function`` spells out; they arrive as keyword arguments.

    ``function`` takes them by ``**``, which Typer itself could not read. Annotations are resolved, so that
    they may be text (``from __future__ import annotations``).
    """
    own = inspect.signature(function, eval_str=True)
    kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    everything = [*kept, *parameters]
    function.__signature__ = own.replace(parameters=everything)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in everything}


def common_parameters() -> list[inspect.Parameter]:
    """``--no-color`` and ``--debug``, which every command takes before or after its name."""
    return [
        option(
            "no_color",
            help="No colour, even on a terminal (so does the environment variable NO_COLOR).",
            panel=_PANEL,
            default=False,
            callback=_set_no_color,
        ),
        option("debug", help="Show the traceback of an error.", panel=_PANEL, default=False),
    ]


def with_output(
    formats: Sequence[str] = FORMATS,
    *,
    main_table: str,
    save: bool = False,
    checks: bool = True,
    drawing: Drawing | None = None,
) -> Callable[[Callable[..., Report | SavedReport]], Callable[..., None]]:
    """Turns a function that returns a Report into a command that writes it and exits with its verdict.

    Where the function could not verify, the formats for machines and all files say so; ``main_table`` is theirs.
    ``save`` adds ``--save``; the function then returns a ``SavedReport``. ``checks`` is False for a command
    that judges nothing, which writes no ``--junit-xml`` and no ``--html``.
    """

    def decorate(function: Callable[..., Report | SavedReport]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**values: Any) -> None:
            for parameter in common_parameters():
                values.pop(parameter.name)
            taken = {
                p.name: values.pop(p.name) for p in parameters if p.name in OutputOptions.__annotations__
            }
            options = OutputOptions(**taken)
            parse.choice(options.format, "--format", formats)
            output.check(options)
            try:
                with output.kept_for_results():
                    result = function(**values)
            except (OSError, SystemExit) as err:
                # To main these are standard output's and completion's own, which may end in exit code 0.
                raise RuntimeError(f"{type(err).__name__}: {err}") from err
            except Exception as err:
                problem = errors.as_moepad_error(err)
                if problem is not None and problem.exit_code == errors.NOT_VERIFIED:
                    # Machines read files: one of an earlier run must not stand for this one.
                    report = _unverified(function.__name__, main_table, problem.message)
                    output.emit(report, options, on_stdout=options.format != "table")
                raise
            report, saved = result if isinstance(result, tuple) else (result, None)
            if options.save is not None and saved is None:
                raise errors.UsageError("--save: a suite cannot be saved; give the options of one scenario")
            output.emit(report, options, saved=saved, drawing=drawing)
            raise typer.Exit(report.verdict.exit_code)

        parameters = [*_output_parameters(formats, save=save, checks=checks), *common_parameters()]
        add_parameters(command, parameters)
        return command

    return decorate


def _unverified(command: str, main_table: str, reason: str) -> Report:
    return Report(
        command=command.replace("_", "-"),
        scenario={},
        environment=environment(),
        findings=(),
        tables={main_table: []},
        main_table=main_table,
        verdict=Verdict("not-verified", errors.NOT_VERIFIED, "not verified", not_checked=(reason,)),
    )


def _output_parameters(formats: Sequence[str], *, save: bool, checks: bool) -> list[inspect.Parameter]:
    shown = [
        option(
            "format",
            "--format",
            "-f",
            help="Format of the result.",
            panel=_PANEL,
            default="table",
            choices=formats,
        ),
        option("output", "--output", "-o", help="Write the result there, not to standard output.", **_FILE),
    ]
    if checks:
        shown.append(option("junit_xml", help="Write a JUnit report, for a CI server.", **_FILE))
        shown.append(option("html", help="Write one self-contained page.", **_FILE))
    if save:
        shown.append(option("save", help="Save the run, for moepad compare to read back.", **_FILE))
    return shown


def _set_no_color(value: bool) -> bool:
    if value:
        os.environ["NO_COLOR"] = "1"
    return value


def completer(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """Shell completion of a value out of ``choices``."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in choices if name.startswith(incomplete)]

    return complete
