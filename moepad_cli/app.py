"""The Typer app, and ``main``: the one place where results and exceptions become exit codes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from moepad_cli import engine_options, errors, output
from moepad_cli.commands import bisect, check, compare, explain, repro, schema, shard_bounds
from moepad_cli.environment import version
from moepad_cli.options import add_parameters, common_parameters

PROGRAM = "moepad"
MAX_LINE = 2000
EXIT_CODES = (
    "Exit codes: 0 as it should be, 1 findings, 2 a wrong call, 3 could not be verified, 4 an internal error."
)
COMPLETE_VARIABLE = "_MOEPAD_COMPLETE"


class _Commands(TyperGroup):
    """Not every version of Typer has a did-you-mean for commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and not ctx.resilient_parsing:
            hint = errors.did_you_mean(args[0], self.commands) or f"; {PROGRAM} --help lists them"
            raise errors.UsageError(f"{args[0]!r}: no such command{hint}")
        return super().resolve_command(ctx, args)


def _print_version(value: bool) -> None:
    if value:
        output.write_stdout(f"{PROGRAM} {version()}\n")
        raise typer.Exit


def _root(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
    **_common: bool,
) -> None:
    """Show whether a Mixture-of-Experts server routes its pad rows or loses its real ones."""
    if context.invoked_subcommand is None:
        output.write_stdout(context.get_help())
        raise errors.UsageError(f"no command given; {PROGRAM} --help lists them")


def _build() -> typer.Typer:
    built = typer.Typer(name=PROGRAM, cls=_Commands, epilog=EXIT_CODES, pretty_exceptions_enable=False)
    add_parameters(_root, common_parameters())
    built.callback(invoke_without_command=True)(_root)
    for command in (repro, check, compare, bisect, shard_bounds, explain, schema):
        command.register(built)
    return built


app = _build()


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line; gives the exit code."""
    arguments = list(sys.argv[1:] if args is None else args)
    code = _run(arguments)
    return errors.BISECT_CODES.get(code, code) if "--bisect" in arguments else code


def _run(arguments: list[str]) -> int:
    context: Any = None
    handlers = _stop_by_exception()
    try:
        group: Any = typer.main.get_command(app)
        if os.environ.get(COMPLETE_VARIABLE):
            group.main(arguments, prog_name=PROGRAM)
        # Not group.main here: it turns a closed pipe into exit code 1 and Ctrl-C, by version, into 1 or 130.
        context = group.make_context(PROGRAM, list(arguments))
        code = _invoke(group, context)
        output.write_stdout("")
    except BaseException as err:
        output.settle_stdout()
        command = context.invoked_subcommand if context else None
        return _exit_code(err, f"{PROGRAM} {command}" if command else PROGRAM, debug="--debug" in arguments)
    finally:
        if "--debug" in arguments:
            _complain("".join(engine_options.ENGINE_LOGS))
        engine_options.ENGINE_LOGS.clear()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code


class _Stopped(BaseException):
    """A signal that asks to end; raised, so that files half written are cleared away."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _stop_by_exception() -> dict[signal.Signals, Any]:
    """Handles the signals that nobody handles yet; gives what to put back."""

    def stop(number: int, _frame: object) -> None:
        raise _Stopped(number)

    if threading.current_thread() is not threading.main_thread():
        return {}
    wanted = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    return {
        number: signal.signal(number, stop) for number in wanted if signal.getsignal(number) is signal.SIG_DFL
    }


def _invoke(group: Any, context: Any) -> int:
    try:
        with context:
            group.invoke(context)
    except typer.Exit as err:
        return err.exit_code
    return errors.OK


def _exit_code(error: BaseException, name: str, *, debug: bool) -> int:
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return errors.INTERRUPTED
    if isinstance(error, _Stopped):
        return 128 + error.number
    if isinstance(error, SystemExit):
        return _code_of_exit(error)
    if isinstance(error, BrokenPipeError):
        return errors.OK
    if isinstance(error, OSError) and error.filename is None:
        # Not the work's, which with_output has wrapped, and no file's: Typer could not print.
        error = errors.UsageError(f"standard output: cannot be written: {error.strerror}")
    if debug:
        import traceback

        _complain("".join(traceback.format_exception(error)))
    known = errors.as_moepad_error(error) if isinstance(error, Exception) else None
    if known is not None:
        _complain(f"{name}: {errors.one_line(known.message)[:MAX_LINE]}\n")
        return known.exit_code
    said = errors.one_line(": ".join(filter(None, (type(error).__name__, str(error)))))
    hint = "" if debug else " (run again with --debug for the traceback)"
    _complain(f"{PROGRAM}: internal error: {said[:MAX_LINE]}{hint}\n")
    return errors.INTERNAL


def _code_of_exit(error: SystemExit) -> int:
    """Only two things exit by themselves: Typer's completion, and rich where its reader has gone away."""
    if isinstance(error.__context__, BrokenPipeError) or not error.code:
        return errors.OK
    return errors.USAGE


def _complain(text: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
