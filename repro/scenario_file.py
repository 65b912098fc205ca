"""Scenario files: TOML, or JSON where the text begins with ``{``."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from repro._files import read_bounded
from repro.errors import FieldError, ScenarioError, ScenarioFileError, shown
from repro.scenario import Scenario, check_field, scenario_from_values

MAX_FILE_BYTES = 1 << 16


def read_scenario_values(path: Path) -> dict[str, Any]:
    """The fields that a scenario file sets: TOML, or JSON where the text begins with ``{``.

    Raises:
        ScenarioFileError: unreadable, over 64 KiB, malformed, an unknown key, or a value no scenario can have;
            with the line.
    """
    text = _read_text(path)
    try:
        values = (
            json.loads(text, object_pairs_hook=_without_duplicates)
            if text.lstrip().startswith("{")
            else tomllib.loads(text)
        )
    except (ValueError, RecursionError) as err:
        raise ScenarioFileError(f"{path}: {err}") from err
    known = [f.name for f in fields(Scenario)]
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"did you mean '{close[0]}'?"
                if close
                else "a scenario has the options of moepad repro as keys"
            )
            raise ScenarioFileError(f"{path}: {_line_of(text, name)}unknown key {shown(name)}; {hint}")
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if v is not None}
    for name in values:
        # One key at a time first, so that a bad value is told with its own line.
        try:
            check_field(name, values[name])
        except ScenarioError as err:
            raise ScenarioFileError(f"{path}: {_line_of(text, name)}{err}") from err
    return values


def read_scenario(path: Path) -> Scenario:
    """A scenario file as a Scenario; fields that it does not set keep their defaults.

    Raises:
        ScenarioFileError: as ``read_scenario_values``, or fields that contradict each other.
    """
    values = read_scenario_values(path)
    try:
        return scenario_from_values(values)
    except FieldError as err:
        raise ScenarioFileError(f"{path}: {err}") from err


def _read_text(path: Path) -> str:
    data = read_bounded(path, MAX_FILE_BYTES, ScenarioFileError)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise ScenarioFileError(f"{path}: not UTF-8 text (byte {err.start})") from err


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key stands twice")
    return values


def _line_of(text: str, name: str) -> str:
    pattern = re.compile(rf"""^\s*(?:\[+\s*)?["']?{re.escape(name)}["']?\s*[=:\].]""")
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.match(line):
            return f"line {number}: "
    return ""
