"""``moepad compare``: any two engines, or saved runs, on one scenario; what the second fixed and what it broke."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from moepad_cli.device import DeviceOption, resolve_device
from moepad_cli.errors import UsageError, option_name
from moepad_cli.options import SavedReport, with_output
from moepad_cli.run_report import run_report
from moepad_cli.scenario_options import AllExpertsOption, FaultOption, chosen_faults, with_scenario
from moepad_cli.views import changes_view
from repro.scenario import Scenario, scenario_from_values

if TYPE_CHECKING:
    from repro.engines import Engine


def register(app: typer.Typer) -> None:
    app.command("compare")(compare)


_ENGINE_HELP = "prefix, fixed-mask, fixed-count, fixed, or a saved run: FILE.json, FILE.json#ENGINE."


@with_output(main_table="local_counts", save=True)
@with_scenario
def compare(
    *,
    before: Annotated[str, typer.Option(help=f"Engine before: {_ENGINE_HELP}", metavar="ENGINE")],
    after: Annotated[str, typer.Option(help=f"Engine after: {_ENGINE_HELP}", metavar="ENGINE")],
    fault: FaultOption = "both",
    device: DeviceOption = "auto",
    all_experts: AllExpertsOption = False,
    scenario_values: dict[str, Any],
) -> SavedReport:
    """Judge two engines on one scenario: what the second fixed, introduced and kept.

    A saved run stands for the engine that it was made with, and brings its scenario; it is judged anew.

    Exit code 0: the after side has no finding.
    """
    faults = chosen_faults(fault)
    device, device_name = resolve_device(device)
    from repro.runs import compare_verdict, find_changes, run_case

    engines = _load("--before", before, "before"), _load("--after", after, "after")
    scenario = _scenario(engines, scenario_values)
    runs = [run_case(scenario, fault, before=engines[0], after=engines[1], device=device) for fault in faults]
    changes = find_changes(runs)
    rows = [
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
        }
        for change in changes
    ]
    return run_report(
        "compare",
        scenario,
        runs,
        compare_verdict(runs),
        device_name=device_name,
        all_experts=all_experts,
        more_tables={"finding_changes": rows},
        more_views=(changes_view(changes),),
    )


def _load(option: str, spec: str, side: str) -> Engine:
    from repro.engines import load_engine
    from repro.errors import EngineSpecError, RunFileError

    try:
        return load_engine(spec, side=side)
    except (EngineSpecError, RunFileError) as err:
        raise UsageError(f"{option}: {err}") from err


def _scenario(engines: tuple[Engine, Engine], given: dict[str, Any]) -> Scenario:
    """The scenario asked for, or else the saved run's; the two may not disagree."""
    from repro.engines import SavedEngine
    from repro.routers import ROUTER_NAMES

    saved = [engine for engine in engines if isinstance(engine, SavedEngine)]
    if not saved:
        return Scenario(**given)
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
