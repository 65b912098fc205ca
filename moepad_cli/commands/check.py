"""``moepad check``: is this engine safe? A suite of cases, or one scenario, judged by the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from moepad_cli.device import DeviceOption, resolve_device
from moepad_cli.engine_options import (
    DEFAULT_TIME_LIMIT,
    ENGINES,
    BisectOption,
    PythonOption,
    SuiteOption,
    TimeLimitOption,
    VerboseOption,
    loaded_engines,
    loaded_rows,
    loaded_views,
    with_unchecked,
)
from moepad_cli.environment import environment
from moepad_cli.errors import NotVerified, UsageError
from moepad_cli.options import with_output
from moepad_cli.scenario_options import with_scenario
from moepad_cli.suite_views import case_rows, cases_view, chosen_cases
from moepad_cli.views import scenario_heading
from repro.report import Report
from repro.scenario import Scenario
from repro.suite import SUITES

if TYPE_CHECKING:
    pass


def register(app: typer.Typer) -> None:
    app.command("check")(check)


@with_output(main_table="cases")
@with_scenario
def check(
    *,
    engine: Annotated[str, typer.Argument(help=f"{ENGINES}.", metavar="ENGINE")],
    suite: SuiteOption = None,
    device: DeviceOption = "auto",
    python: PythonOption = None,
    time_limit: TimeLimitOption = DEFAULT_TIME_LIMIT,
    verbose: VerboseOption = False,
    bisect: BisectOption = False,
    scenario_values: dict[str, Any],
) -> Report:
    """Tell whether an engine is safe: its own code, on a suite of padded batches or on one scenario.

    Exit code 0: every case was run and has no finding. 3: none has a finding, but some could not be verified.
    """
    del bisect  # main reads it off the command line, for errors as well
    cases = chosen_cases(suite, scenario_values)
    with loaded_engines({"ENGINE": engine}, ("after",), python=python, time_limit=time_limit) as engines:
        device, device_name = resolve_device(device)
        from repro.checks import check_cases, check_verdict, unverifiable
        from repro.engines import SavedEngine

        if isinstance(engines[0], SavedEngine):
            raise UsageError(f"ENGINE: '{engine}' is a saved run; judge it with moepad compare")
        rows = check_cases(cases, engines, device=device)
        if reason := unverifiable(rows):
            raise NotVerified(reason)
        results = [row[0] for row in rows]
        loaded = loaded_rows(engines)
    findings = tuple(finding for result in results for finding in result.findings)
    return Report(
        command="check",
        scenario=Scenario(**scenario_values).to_dict() if scenario_values else {"suite": suite or SUITES[0]},
        environment=environment(device_name),
        findings=findings,
        tables={"cases": case_rows([(result,) for result in results], ("verdict",)), "loaded": loaded},
        main_table="cases",
        verdict=with_unchecked(check_verdict(results), engines),
        views=(cases_view([(result,) for result in results]), *(loaded_views(loaded) if verbose else ())),
        heading=(
            f"engine: {results[0].engine}   {len(cases)} cases   device: {device_name}",
            *(scenario_heading(cases[0].scenario) if scenario_values else ()),
        ),
        blamed=findings,
    )
