"""Option values, read from text. Each mistake is one line that names the option."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from moepad_cli.errors import UsageError, did_you_mean

INT32_MAX = 2**31 - 1  # num_token_non_padded is int32


def whole_number(
    text: str, option: str, *, least: int = 0, most: int = INT32_MAX, example: object = 64
) -> int:
    """ASCII digits only: no sign, spaces, exponent or underscores."""
    if not re.fullmatch(r"-?[0-9]+", text):
        raise UsageError(f"{option}: {_quoted(text)} is not a whole number; give e.g. {option} {example}")
    digits = text.lstrip("-0") or "0"
    if text[0] == "-" or len(digits) > len(str(most)) or not least <= int(digits) <= most:
        raise UsageError(f"{option}: {_quoted(text)} is out of range; give {least} to {most}")
    return int(digits)


def whole_numbers(text: str, option: str, *, least: int = 0, example: str = "16,32,64") -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    items = text.split(",")
    if "" in items:
        raise UsageError(
            f"{option}: {_quoted(text)} has an empty item; give whole numbers with commas between them, "
            f"e.g. {option} {example}"
        )
    return tuple(whole_number(item, option, least=least, example=example) for item in items)


def decimal(text: str, option: str, *, least: float, example: object) -> float:
    """A finite number >= ``least``, written with digits and at most one point."""
    if not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text):
        raise UsageError(f"{option}: {_quoted(text)} is not a number; give e.g. {option} {example}")
    value = float(text)
    if not (least <= value and math.isfinite(value)):
        raise UsageError(f"{option}: {_quoted(text)} is out of range; give {least:g} or more")
    return value


def choice(text: str, option: str, choices: Sequence[str]) -> str:
    if text not in choices:
        hint = did_you_mean(text, choices)
        raise UsageError(f"{option}: {_quoted(text)} is not one of {', '.join(choices)}{hint}")
    return text


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
