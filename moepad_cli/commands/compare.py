"""``moepad compare``: any two engines, or saved runs, on one scenario; what the second fixed and what it broke."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from moepad_cli import parse
from moepad_cli.commands._compare_suite import compare_suite
from moepad_cli.device import DeviceOption, resolve_device
from moepad_cli.engine_options import (
    DEFAULT_TIME_LIMIT,
    ENGINES,
    PythonOption,
    SuiteOption,
    TimeLimitOption,
    VerboseOption,
    loaded_engines,
    loaded_rows,
    loaded_views,
    with_unchecked,
)
from moepad_cli.errors import UsageError, option_name
from moepad_cli.options import SavedReport, with_output
from moepad_cli.run_report import run_report
from moepad_cli.scenario_options import AllExpertsOption, FaultOption, chosen_faults, with_scenario
from moepad_cli.suite_views import change_rows
from moepad_cli.views import changes_view
from repro.report import Report
from repro.scenario import Scenario, scenario_from_values
from repro.suite import SUITES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from repro.case import Fault
    from repro.engines import Engine


def register(app: typer.Typer) -> None:
    app.command("compare")(compare)


_ENGINE_HELP = f"{ENGINES}, or a saved run: FILE.json, FILE.json#ENGINE."


@with_output(main_table="local_counts", save=True)
@with_scenario
def compare(
    *,
    before: Annotated[str, typer.Option(help=f"Engine before: {_ENGINE_HELP}", metavar="ENGINE")],
    after: Annotated[str, typer.Option(help=f"Engine after: {_ENGINE_HELP}", metavar="ENGINE")],
    suite: SuiteOption = None,
    fault: FaultOption = "both",
    device: DeviceOption = "auto",
    python: PythonOption = None,
    time_limit: TimeLimitOption = DEFAULT_TIME_LIMIT,
    verbose: VerboseOption = False,
    all_experts: AllExpertsOption = False,
    scenario_values: dict[str, Any],
) -> Report | SavedReport:
    """Judge two engines: what the second fixed, introduced and kept.

    Without a scenario both run a suite of cases. A saved run stands for the engine that it was made with, and
    brings its scenario; it is judged anew.

    Exit code 0: the after side has no finding. 3: it has none, but something could not be verified.
    """
    faults = chosen_faults(fault)
    if suite is not None:
        parse.choice(suite, "--suite", SUITES)
        if scenario_values or fault != "both":
            raise UsageError("--suite: given together with a scenario or a fault; give one of them")
    specs = {"--before": before, "--after": after}
    with loaded_engines(specs, ("before", "after"), python=python, time_limit=time_limit) as engines:
        device, device_name = resolve_device(device)
        scenario = _scenario(engines, scenario_values)
        if scenario is None and fault == "both":
            return compare_suite(
                engines, suite or SUITES[0], device=device, device_name=device_name, verbose=verbose
            )
        if suite is not None:
            raise UsageError("--suite: a saved run has its own scenario; leave the option out")
        return _compare_scenario(
            engines,
            scenario or Scenario(),
            faults,
            device=device,
            device_name=device_name,
            all_experts=all_experts,
            verbose=verbose,
        )


def _compare_scenario(
    engines: Sequence[Engine],
    scenario: Scenario,
    faults: Sequence[Fault],
    *,
    device: str,
    device_name: str,
    all_experts: bool,
    verbose: bool,
) -> SavedReport:
    from repro.runs import compare_verdict, find_changes, run_case

    runs = [run_case(scenario, fault, before=engines[0], after=engines[1], device=device) for fault in faults]
    changes = find_changes(runs)
    loaded = loaded_rows(engines)
    return run_report(
        "compare",
        scenario,
        runs,
        with_unchecked(compare_verdict(runs), engines),
        device_name=device_name,
        all_experts=all_experts,
        more_tables={"finding_changes": change_rows(changes), "loaded": loaded},
        more_views=(changes_view(changes), *(loaded_views(loaded) if verbose else ())),
    )


def _scenario(engines: Sequence[Engine], given: dict[str, Any]) -> Scenario | None:
    """The scenario asked for, or else the saved run's; the two may not disagree. None where there is neither."""
    from repro.engines import SavedEngine
    from repro.routers import ROUTER_NAMES

    saved = [engine for engine in engines if isinstance(engine, SavedEngine)]
    if not saved:
        return Scenario(**given) if given else None
    first = saved[0].scenario
    if first.router not in ROUTER_NAMES and given.get("router") != first.router:
        # A file that somebody sent must not choose which code of this machine runs.
        raise UsageError(
            f"--router: the saved run '{saved[0].path}' routes through {first.router!r}; "
            "give the same --router to let that code run"
        )
    scenario = scenario_from_values({**first.to_dict(), **given})
    for engine in saved:
        other = engine.scenario.to_dict()
        for name, value in scenario.to_dict().items():
            if other[name] != value:
                raise UsageError(
                    f"{option_name(name)}: {value!r} is not what the saved run '{engine.path}' was made with, "
                    f"{other[name]!r}; leave the option out, or make the run again"
                )
    return scenario
