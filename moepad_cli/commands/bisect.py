"""``moepad bisect``: the first version of SGLang, or commit of a checkout, at which the verdict changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moepad_cli import parse
from moepad_cli.commands._bisect_search import Search, history
from moepad_cli.device import DeviceOption, resolve_device
from moepad_cli.engine_options import (
    DEFAULT_TIME_LIMIT,
    PythonOption,
    SuiteOption,
    TimeLimitOption,
    VerboseOption,
    loaded_views,
)
from moepad_cli.environment import environment
from moepad_cli.errors import NotVerified, UsageError
from moepad_cli.options import with_output
from moepad_cli.scenario_options import FaultOption, chosen_faults, with_scenario
from moepad_cli.suite_views import case_rows, cases_view, change_rows, chosen_cases, suite_changes_view
from repro.bisect import BisectResult, bisect_versions
from repro.report import Cell, Report, Row, Verdict, View
from repro.scenario import Scenario
from repro.suite import SUITES

if TYPE_CHECKING:
    from repro.checks import CaseResult

    CasePair = tuple[CaseResult, CaseResult]


def register(app: typer.Typer) -> None:
    app.command("bisect")(bisect)


@with_output(main_table="bisected")
@with_scenario
def bisect(
    *,
    engine: Annotated[
        str, typer.Argument(help="sglang: releases; sglang@PATH: commits of a checkout.", metavar="ENGINE")
    ],
    good: Annotated[str, typer.Option(help="Version or git revision to start from.", metavar="VERSION")],
    bad: Annotated[
        str, typer.Option(help="One with another verdict; it may be the older of the two.", metavar="VERSION")
    ],
    fault: FaultOption = "both",
    suite: SuiteOption = None,
    device: DeviceOption = "auto",
    python: PythonOption = None,
    time_limit: TimeLimitOption = DEFAULT_TIME_LIMIT,
    verbose: VerboseOption = False,
    scenario_values: dict[str, Any],
) -> Report:
    """Find the first version, on the way from --good to --bad, whose verdict is not that of --good.

    From an old version with a fault to a new one without, that is where it was fixed. The other way works too.

    Both ends are run, then as few others as a binary search needs: like git bisect, it expects one change.

    Not verified is no change; a version where none of the changing cases could be verified is stepped over.

    Exit code 0: the first changed version was found, whatever its verdict. 2: both ends have the same verdict.

    Exit code 3: it is one of several, since some could not be verified, or the ends could not be compared.
    """
    faults = chosen_faults(fault)
    cases = [case for case in chosen_cases(suite, scenario_values) if case.fault in faults]
    limit = parse.decimal(time_limit, "--time-limit", least=0.1, example=DEFAULT_TIME_LIMIT)
    prefix, versions = history(engine, good, bad)
    search = Search(prefix, versions, cases, device, python, limit)
    with search.progress():
        result = bisect_versions(versions, search.verdict_of)
    _expect_change(search, result)
    _, device_name = resolve_device(device)
    asked = {"engine": engine, "good": good, "bad": bad, "fault": fault}
    given = Scenario(**scenario_values).to_dict() if scenario_values else {"suite": suite or SUITES[0]}
    return _report(search, result, {**asked, **given}, device_name, verbose=verbose)


def _expect_change(search: Search, result: BisectResult) -> None:
    """
    Raises:
        NotVerified: an end could not be verified, or too little of it to say that the verdict is the same.
        UsageError: the verdict is the same.
    """
    if result.changed is not None:
        return
    for option, version in search.ends.items():
        if version in result.failed:
            raise NotVerified(f"{option}: {result.failed[version]}")
        results = search.runs[version].results
        if all(case.judgement is None for case in results):
            why = results[0].reason
            raise NotVerified(f"{option}: {search.name(version)}: no case could be verified: {why}")
    good, bad = (search.runs[version].results for version in search.ends.values())
    name, number = search.name(search.versions[-1]), len(good)
    reasons = [
        f"{side.case.name}: {side.reason}"
        for case in zip(good, bad, strict=True)
        for side in case
        if side.judgement is None
    ]
    compared = sum(None not in (old.judgement, new.judgement) for old, new in zip(good, bad, strict=True))
    if reasons:
        raise NotVerified(
            f"--bad: {name} has the verdict of --good in the {compared} of {number} cases that are verified at "
            f"both; not verified: {reasons[0]}"
        )
    raise UsageError(
        f"--bad: {name} has the verdict of --good in all {number} cases; give a version with another"
    )


def _report(
    search: Search, result: BisectResult, scenario: dict[str, Any], device_name: str, *, verbose: bool
) -> Report:
    from repro.checks import suite_changes

    assert result.alike is not None  # noqa: S101
    assert result.changed is not None  # noqa: S101
    before, after = search.runs[result.alike], search.runs[result.changed]
    pairs = list(zip(before.results, after.results, strict=True))
    changes, bisected = suite_changes(pairs), _bisected_rows(search, result)
    loaded = [*before.loaded, *after.loaded]
    return Report(
        command="bisect",
        scenario=scenario,
        environment=environment(device_name),
        findings=tuple(finding for case in after.results for finding in case.findings),
        tables={
            "cases": case_rows(pairs, ("before", "after")),
            "bisected": bisected,
            "finding_changes": change_rows(changes),
            "loaded": loaded,
        },
        main_table="bisected",
        verdict=_verdict(search, result, pairs, bisected),
        views=(
            _bisected_view(search, bisected),
            _changed_cases_view(pairs),
            suite_changes_view(changes),
            *(loaded_views(loaded) if verbose else ()),
        ),
        heading=(
            f"{scenario['engine']}   good: {scenario['good']}   bad: {scenario['bad']}",
            f"before: {search.short(result.alike)}   after: {search.short(result.changed)}   "
            f"{len(search.cases)} cases   device: {device_name}",
        ),
    )


def _verdict(
    search: Search, result: BisectResult, pairs: Sequence[CasePair], bisected: Sequence[Row]
) -> Verdict:
    from repro.checks import suite_compare_verdict

    compared = suite_compare_verdict(pairs)
    stepped_over = [row for row in bisected if row["status"] == "skipped"]
    loaded = sum(row["status"] == "loaded" for row in bisected)
    loads = f"{loaded} of {len(bisected)} versions loaded"
    loads += f", {len(stepped_over)} stepped over" if stepped_over else ""
    not_checked = [f"{search.name(str(row['version']))}, stepped over: {row['why']}" for row in stepped_over]
    not_checked += compared.not_checked
    names = ", ".join(map(search.name, result.suspects))
    if len(result.suspects) == 1:
        return Verdict("ok", 0, f"first changed: {names} ({loads})", compared.lines, tuple(not_checked))
    summary = f"first changed is one of: {names} ({loads})"
    return Verdict("not-verified", 3, summary, compared.lines, tuple(not_checked))


def _bisected_rows(search: Search, result: BisectResult) -> list[Row]:
    table: list[Row] = []
    for version in search.versions:
        has_changed = result.has_changed(version)
        row: dict[str, Cell] = {"version": version, "status": "loaded", "verdict": None}
        row |= dict.fromkeys(("safe", "with_findings", "not_verified"))
        row["why"] = result.failed.get(version, "").removeprefix(f"{search.name(version)}: ")
        if has_changed is not None:
            row["verdict"] = "changed" if has_changed else "alike"
        elif version in result.asked or version in result.failed:
            row["status"] = "skipped"
        else:
            row["status"] = "not needed"
        if version in search.runs:
            results = search.runs[version].results
            row["not_verified"] = sum(case.judgement is None for case in results)
            row["with_findings"] = sum(bool(case.findings) for case in results)
            row["safe"] = sum(case.judgement is not None and not case.findings for case in results)
            if row["status"] == "skipped":
                case = results[result.moved[0]]
                row["why"] = f"{case.case.name}: {case.reason}"
        table.append(row)
    return table


def _bisected_view(search: Search, bisected: Sequence[Row]) -> View:
    shown = [row for row in bisected if row["status"] != "not needed"]
    columns = ("status", "verdict", "safe", "with_findings", "not_verified")
    cells = [[search.short(str(row["version"])), *(row[name] for name in columns)] for row in shown]
    note = ""
    if left_out := len(bisected) - len(shown):
        note = f"{left_out} more not needed, if the verdict changes once"
    headings = ("version", "status", "verdict", "safe", "findings", "not verified")
    return View(f"versions: {len(bisected)}, from good to bad", headings, cells, note)


def _changed_cases_view(pairs: Sequence[CasePair]) -> View:
    compared = [(old, new) for old, new in pairs if old.judgement is not None and new.judgement is not None]
    changed = [(old, new) for old, new in compared if old.verdict != new.verdict]
    left_out = {
        "alike": len(compared) - len(changed),
        "not compared": len(pairs) - len(compared),
    }
    parts = ", ".join(f"{number} {what}" for what, number in left_out.items() if number)
    note = f"more cases: {parts} (--format json lists them)" if parts else ""
    return replace(cases_view(changed, ("before", "after")), note=note)
