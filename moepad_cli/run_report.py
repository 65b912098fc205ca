"""The report of a run on two engines, as ``repro`` and ``compare`` give it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moepad_cli.environment import environment
from moepad_cli.options import SavedReport
from moepad_cli.views import run_heading, run_views
from repro.report import Report, Row, Verdict, View

if TYPE_CHECKING:
    from repro.runs import CaseRun
    from repro.scenario import Scenario


def run_report(
    command: str,
    scenario: Scenario,
    runs: Sequence[CaseRun],
    verdict: Verdict,
    *,
    device_name: str,
    all_experts: bool,
    more_tables: Mapping[str, Sequence[Row]] | None = None,
    more_views: Sequence[View] = (),
) -> SavedReport:
    """The report, and what gives the text of a saved run."""
    from repro.engines import run_document
    from repro.runs import run_tables

    tables = run_tables(runs)
    report = Report(
        command=command,
        scenario=scenario.to_dict(),
        environment=environment(device_name),
        findings=tuple(finding for run in runs for side in run.sides for finding in side.judgement.findings),
        tables={**tables, **(more_tables or {})},
        main_table="local_counts",
        verdict=verdict,
        views=(*run_views(runs, tables, all_experts=all_experts), *more_views),
        heading=run_heading(runs, scenario, device_name),
        blamed=tuple(finding for run in runs for finding in run.after.judgement.findings),
    )
    cases = [(run.case, run.before.observation, run.after.observation) for run in runs]
    return report, lambda: json.dumps(run_document(scenario, cases)) + "\n"
