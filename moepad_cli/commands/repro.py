"""``moepad repro``: both faults before the fix and not after it, rank by rank and row by row."""

from __future__ import annotations

from typing import Any

import typer

from moepad_cli.device import DeviceOption, resolve_device
from moepad_cli.options import SavedReport, with_output
from moepad_cli.run_report import run_report
from moepad_cli.scenario_options import AllExpertsOption, FaultOption, chosen_faults, with_scenario
from repro.scenario import Scenario


def register(app: typer.Typer) -> None:
    app.command("repro")(repro)


@with_output(main_table="local_counts", save=True)
@with_scenario
def repro(
    *,
    fault: FaultOption = "both",
    device: DeviceOption = "auto",
    all_experts: AllExpertsOption = False,
    scenario_values: dict[str, Any],
) -> SavedReport:
    """Show the two faults before the fix and not after it.

    mask: select_experts refuses num_token_non_padded on its custom_routing_function branch: pads keep experts.

    count: prefill replay reads a count cut from the raw length, where its shards are cut from the bucket.

    With no options a built-in scenario runs. Exit code 0: every fault showed before and is gone after.
    """
    faults = chosen_faults(fault)
    scenario = Scenario(**scenario_values)
    device, device_name = resolve_device(device)
    from repro.engines import BUILTIN_ENGINES
    from repro.runs import repro_verdict, run_case

    before, after = BUILTIN_ENGINES["prefix"], BUILTIN_ENGINES["fixed"]
    runs = [run_case(scenario, fault, before=before, after=after, device=device) for fault in faults]
    return run_report(
        "repro", scenario, runs, repro_verdict(runs), device_name=device_name, all_experts=all_experts
    )
