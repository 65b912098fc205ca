"""Suites: named lists of cases, kept with the package as TOML. No torch."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from repro.scenario import Scenario, scenario_from_values

SUITES = ("default", "full")


@dataclass(frozen=True)
class SuiteCase:
    """One scenario and the fault that is looked for in it."""

    name: str
    fault: Literal["mask", "count"]
    scenario: Scenario


def load_suite(name: str) -> tuple[SuiteCase, ...]:
    """The cases of ``default``, or of ``full``, which has those and more."""
    parts = SUITES[: SUITES.index(name) + 1]
    return tuple(case for part in parts for case in _read(part))


def _read(name: str) -> list[SuiteCase]:
    text = files("repro").joinpath("suites", f"{name}.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    shared: dict[str, Any] = document["scenario"]
    cases = []
    for entry in document["case"]:
        title, fault = entry.pop("name"), entry.pop("fault")
        values = shared | entry
        if "buckets" in entry:
            values.pop("bucket", None)
        cases.append(SuiteCase(title, fault, scenario_from_values(values)))
    return cases
