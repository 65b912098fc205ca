"""Many cases: which to run, and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moepad_cli import parse
from moepad_cli.errors import UsageError, option_name
from repro.report import Cell, Row, View
from repro.scenario import Scenario
from repro.suite import SUITES, SuiteCase, load_suite

if TYPE_CHECKING:
    from repro.checks import CaseResult, SuiteChange
    from repro.runs import Change


def case_rows(rows: Sequence[tuple[CaseResult, ...]], columns: Sequence[str]) -> list[Row]:
    """One row a case: ``columns`` are the names of its verdict for each engine."""
    table: list[Row] = []
    for results in rows:
        case = results[0].case
        row: dict[str, Cell] = {
            "case": case.name,
            "fault": case.fault,
            "platform": case.scenario.platform,
            "branch": case.scenario.branch,
            "options": _options(case.scenario),
        }
        for column, result in zip(columns, results, strict=True):
            row[column] = result.verdict
            row["why" if column == "verdict" else f"why_{column}"] = result.reason
        table.append(row)
    return table


def _options(scenario: Scenario) -> str:
    """What makes this scenario out of the default one, on the command line."""
    parts = []
    default = Scenario().to_dict()
    for name, value in scenario.to_dict().items():
        flag = option_name(name)
        if value == default[name] or value is None:
            continue
        if isinstance(value, bool):
            parts.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list):
            parts.append(f"{flag} {','.join(map(str, value))}")
        else:
            parts.append(f"{flag} {value}")
    return " ".join(parts)


def cases_view(rows: Sequence[tuple[CaseResult, ...]], columns: Sequence[str] = ("verdict",)) -> View:
    cells: list[list[Cell]] = []
    for results in rows:
        case = results[0].case
        cells.append([case.fault, case.name, *(result.verdict for result in results)])
    moved = any(r[0].case.fault == "count" and r[0].case.scenario.branch == "custom" for r in rows)
    note = "count cases on branch custom route by branch grouped, which takes a count in every release"
    return View("cases", ("fault", "case", *columns), cells, note if moved else "")


def change_rows(changes: Sequence[SuiteChange | Change]) -> list[Row]:
    """One row a finding that was lost, gained or kept."""
    return [
        {
            "change": change.change,
            "code": change.finding.code,
            "name": change.finding.name,
            "engine": change.finding.engine,
            "fault": change.finding.fault,
            "dp_rank": change.finding.dp_rank,
            "attn_tp_rank": change.finding.attn_tp_rank,
            "rows": change.finding.rows,
            "message": change.finding.message,
            "case": change.finding.case,
        }
        for change in changes
    ]


def suite_changes_view(changes: Sequence[SuiteChange]) -> View:
    """Like findings on one line, with the number of cases that have them."""
    groups: dict[tuple[str, str, str, str], set[str | None]] = {}
    for change in changes:
        finding = change.finding
        groups.setdefault((change.change, finding.fault, finding.code, finding.name), set()).add(finding.case)
    rows: list[list[Cell]] = [[*key, len(cases)] for key, cases in groups.items()]
    return View("findings, before against after", ("change", "fault", "code", "name", "cases"), rows)


def chosen_cases(suite: str | None, scenario_values: dict[str, Any]) -> Sequence[SuiteCase]:
    """The suite's, or both faults of the one scenario that the options describe."""
    if suite is not None:
        parse.choice(suite, "--suite", SUITES)
    if not scenario_values:
        return load_suite(suite or SUITES[0])
    if suite is not None:
        raise UsageError("--suite: given together with a scenario; give one of them")
    scenario = Scenario(**scenario_values)
    return [SuiteCase(fault, fault, scenario) for fault in ("mask", "count")]
