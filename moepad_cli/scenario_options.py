"""Every field of a scenario as an option of the same name, and ``--scenario FILE``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from moepad_cli import parse
from moepad_cli.errors import UsageError, option_name
from moepad_cli.options import add_parameters, completer, option
from repro.errors import ScenarioFileError
from repro.scenario import Scenario
from repro.scenario_file import read_scenario_values

FAULTS = ("mask", "count", "both")
FaultOption = Annotated[
    str,
    typer.Option(help="Which fault to look for.", metavar="|".join(FAULTS), autocompletion=completer(FAULTS)),
]
AllExpertsOption = Annotated[bool, typer.Option("--all-experts", help="Show every expert, not the worst 12.")]

_METAVARS = {
    "int": "INT",
    "int | None": "INT",
    "tuple[int, ...]": "INT[,INT...]",
    "float": "NUMBER",
    "float | None": "NUMBER",
}


def with_scenario(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the scenario's options; ``function`` gets those that were set, file first, as ``scenario_values``."""

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        path = values.pop("scenario")
        given = {parameter.name: values.pop(parameter.name) for parameter in parameters}
        return function(scenario_values=_scenario_values(path, given), **values)

    parameters = [parameter for field in fields(Scenario) for parameter in _parameters(field)]
    own = inspect.signature(function, eval_str=True)
    shown = [p for p in own.parameters.values() if p.name != "scenario_values"]
    command.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
    file = option(
        "scenario", help="Read the scenario from a TOML or JSON file; options override it.", metavar="FILE"
    )
    add_parameters(command, [file, *parameters])
    return command


def chosen_faults(text: str) -> tuple[Literal["mask", "count"], ...]:
    parse.choice(text, "--fault", FAULTS)
    return tuple(fault for fault in ("mask", "count") if text in (fault, "both"))


def _parameters(field: Field[Any]) -> list[inspect.Parameter]:
    choices, help_text, panel = (field.metadata[key] for key in ("choices", "help", "panel"))
    if field.type == "bool":
        # Two flags and no default: one that was not given must not override the file's. Help shows the one
        # that changes something.
        on = bool(field.default)
        return [
            _flag(field.name, help_text, panel, hidden=on),
            _flag(f"no_{field.name}", field.metadata["off_help"], panel, hidden=not on),
        ]
    if choices:
        help_text = f"{help_text} One of {', '.join(choices)}."
    if default := _default_text(field):
        help_text = f"{help_text} (default: {default})"
    metavar = "NAME" if choices else _METAVARS.get(str(field.type))
    return [option(field.name, help=help_text, metavar=metavar, panel=panel, choices=choices)]


def _flag(name: str, help_text: str, panel: str, *, hidden: bool) -> inspect.Parameter:
    info = typer.Option(
        option_name(name), help=help_text, rich_help_panel=panel, hidden=hidden, show_default=False
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, info]
    )


def _default_text(field: Field[Any]) -> str:
    if isinstance(field.default, tuple):
        return ",".join(map(str, field.default))
    return "" if field.default is None else str(field.default)


def _scenario_values(path: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = read_scenario_values(Path(path))
        except ScenarioFileError as err:
            raise UsageError(f"--scenario: {err}") from err
    options: dict[str, Any] = {}
    for field in fields(Scenario):
        if field.type == "bool":
            on, off = given[field.name], given[f"no_{field.name}"]
            flag = option_name(field.name)
            if on and off:
                raise UsageError(f"{flag}: given together with --no-{flag[2:]}; give one of them")
            if on or off:
                options[field.name] = on
        elif given[field.name] is not None:
            options[field.name] = _read(field, given[field.name])
    if options.keys() & {"bucket", "buckets"}:
        # They are two ways to say one thing: an option of either overrides the file's other.
        values = {name: value for name, value in values.items() if name not in ("bucket", "buckets")}
    return values | options


def _read(field: Field[Any], text: Any) -> Any:
    """An option's text as the field's value; what is out of range is left to the scenario to refuse."""
    flag = option_name(field.name)
    kind = str(field.type).removesuffix(" | None")
    if field.metadata["choices"]:
        return parse.choice(text, flag, field.metadata["choices"])
    match kind:
        case "int":
            return parse.whole_number(text, flag)
        case "tuple[int, ...]":
            return parse.whole_numbers(text, flag)
        case "float":
            return parse.decimal(text, flag, least=0, example=2)
        case _:
            return text
