"""What ends a command early, and the one place that turns any exception into one line and an exit code.

    MoepadError    message, exit_code
      UsageError   2: the caller's mistake
      NotVerified  3: could not be verified

An exception that ``as_moepad_error`` does not know is an internal error, exit code 4.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import typer

from repro import errors as library

OK, FINDINGS, USAGE, NOT_VERIFIED, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 4, 130
# What git bisect run makes of them: 1 to 127 is bad, save for 125, which skips the commit; 128 ends the search.
BISECT_CODES = {NOT_VERIFIED: 125, USAGE: 128, INTERNAL: 128}

# Typer has its own copy of click in some versions and the real one in others: BadParameter's bases are
# UsageError and ClickException in both.
_CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]


class MoepadError(Exception):
    """``message`` is one line: the option or file, what is wrong with it, what would be right."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


class UsageError(MoepadError):
    def __init__(self, message: str) -> None:
        super().__init__(message, USAGE)


class NotVerified(MoepadError):  # noqa: N818
    def __init__(self, message: str) -> None:
        super().__init__(message, NOT_VERIFIED)


def as_moepad_error(error: Exception) -> MoepadError | None:
    """The error as one line with an exit code, or None where it is nobody's but ours."""
    if isinstance(error, MoepadError):
        return error
    if isinstance(error, _CLICK_ERROR):
        return UsageError(_click_problem(error))
    if isinstance(error, library.FieldError):
        return UsageError(f"{option_name(error.field)}: {error.problem}")
    if isinstance(error, library.NotVerifiedError):
        return NotVerified(str(error))
    if isinstance(error, library.MoepadError):
        return UsageError(str(error))
    return None


def unwritable(option: str, path: str, error: OSError) -> UsageError:
    return UsageError(f"{option}: cannot write '{path}': {error.strerror or error}")


def option_name(field: str) -> str:
    """``attn_tp`` -> ``--attn-tp``"""
    return f"--{field.replace('_', '-')}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean a or b?``, or nothing where no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def one_line(text: str) -> str:
    """``text`` with line breaks, control characters and lone surrogates as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _click_problem(error: Any) -> str:
    option: str | None = getattr(error, "option_name", None)
    param = getattr(error, "param", None)
    if option is not None and hasattr(error, "possibilities"):
        hint = did_you_mean(option, _options_of(error.ctx)) or f"; {error.ctx.command_path} --help lists them"
        return f"{option}: no such option{hint}"
    if option is not None:
        return f"{option}: needs a value" if "requires" in error.message else f"{option}: takes no value"
    if param is not None:
        return f"{_longest(param.opts)}: {error.message or 'missing'}"
    message = str(error.message).rstrip(".")
    return message[:1].lower() + message[1:]


def _options_of(context: Any) -> list[str]:
    return [name for param in context.command.get_params(context) for name in param.opts if name[:1] == "-"]


def _longest(names: Iterable[str]) -> str:
    return max(names, key=len)
