"""``moepad compare`` on a suite: a verdict a case for each engine, and what changed between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moepad_cli.engine_options import loaded_rows, loaded_views, with_unchecked
from moepad_cli.environment import environment
from moepad_cli.errors import NotVerified
from moepad_cli.suite_views import case_rows, cases_view, change_rows, suite_changes_view
from repro.report import Report
from repro.suite import load_suite

if TYPE_CHECKING:
    from repro.engines import Engine


def compare_suite(
    engines: Sequence[Engine], suite: str, *, device: str, device_name: str, verbose: bool
) -> Report:
    """Both engines on every case of the suite, side by side."""
    from repro.checks import check_cases, suite_changes, suite_compare_verdict, unverifiable

    cases = load_suite(suite)
    rows = check_cases(cases, engines, device=device)
    if reason := unverifiable(rows):
        raise NotVerified(reason)
    changes, loaded = suite_changes(rows), loaded_rows(engines)
    before, after = (engine.name for engine in engines)
    return Report(
        command="compare",
        scenario={"suite": suite},
        environment=environment(device_name),
        findings=tuple(finding for row in rows for result in row for finding in result.findings),
        tables={
            "cases": case_rows(rows, ("before", "after")),
            "finding_changes": change_rows(changes),
            "loaded": loaded,
        },
        main_table="cases",
        verdict=with_unchecked(suite_compare_verdict(rows), engines),
        views=(
            cases_view(rows, ("before", "after")),
            suite_changes_view(changes),
            *(loaded_views(loaded) if verbose else ()),
        ),
        heading=(f"before: {before}   after: {after}   {len(cases)} cases   device: {device_name}",),
        blamed=tuple(finding for _, result in rows for finding in result.findings),
    )
