"""Tables of a run as a person reads them: selections of the report's tables, with short headings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from repro.report import Cell, View

if TYPE_CHECKING:
    from repro.runs import CaseRun, Change, Side
    from repro.scenario import Scenario

WORST_EXPERTS = 12


def run_heading(runs: Sequence[CaseRun], scenario: Scenario, device_name: str) -> tuple[str, ...]:
    """Which engines, on what."""
    before, after = runs[0].sides
    return (
        f"before: {before.label}   after: {after.label}   device: {device_name}",
        *scenario_heading(scenario),
    )


def scenario_heading(scenario: Scenario) -> tuple[str, str]:
    """What of a scenario is most asked after."""
    tokens, sizes = (",".join(map(str, values)) for values in (scenario.tokens, scenario.captured_sizes))
    rows = ",".join(
        str(rows) for rows in dict.fromkeys(rank.padded_num_tokens for rank in scenario.plan().ranks)
    )
    bucket = f"bucket {rows}" + (f" (of {sizes})" if rows != sizes else "")
    return (
        f"tokens {tokens}   {bucket}   attention TP {scenario.attn_tp}   {scenario.mode}",
        f"{scenario.experts} experts, top-{scenario.top_k}   platform {scenario.platform}",
    )


def run_views(
    runs: Sequence[CaseRun], tables: Mapping[str, Sequence[Any]], *, all_experts: bool
) -> tuple[View, ...]:
    """Three views a case: local counts, rows gone wrong, expert counts."""
    views = []
    for run in runs:
        fault = run.case.fault
        mine = {name: [row for row in rows if row["fault"] == fault] for name, rows in tables.items()}
        views += [
            _local_counts(run, mine["local_counts"]),
            _masked_rows(fault, mine["masked_rows"]),
            _expert_counts(fault, mine["expert_counts"], all_experts=all_experts),
        ]
    return tuple(views)


def changes_view(changes: Sequence[Change]) -> View:
    """Findings sorted into fixed, introduced and remaining, like ones on one line."""
    groups: dict[tuple[str, str, str, str], int] = {}
    for change in changes:
        finding = change.finding
        key = (change.change, finding.fault, finding.code, finding.name)
        groups[key] = groups.get(key, 0) + 1
    rows: list[list[Cell]] = [[*key, number] for key, number in groups.items()]
    return View("findings, before against after", ("change", "fault", "code", "name", "ranks"), rows)


def _local_counts(run: CaseRun, table: Sequence[Mapping[str, Cell]]) -> View:
    scenario = run.case.scenario
    branch = f"branch {scenario.branch}" + (
        f", router {scenario.router}" if scenario.branch == "custom" else ""
    )
    rows: list[list[Cell]] = []
    for number, row in enumerate(table):
        first, end = row["row_start"], row["row_end"]
        assert isinstance(first, int)  # noqa: S101
        assert isinstance(end, int)  # noqa: S101
        rows.append(
            [
                row["dp_rank"],
                row["attn_tp_rank"],
                f"{first}-{end - 1}" if end > first else "-",
                row["real_rows"],
                _count(run.before, number),
                _count(run.after, number),
                row["before_real_masked"],
                row["before_pads_routed"],
                row["after_real_masked"],
                row["after_pads_routed"],
            ]
        )
    headings = (
        "DP",
        "TP",
        "rows",
        "real",
        "count\nbefore",
        "count\nafter",
        "lost\nbefore",
        "leaked\nbefore",
        "lost\nafter",
        "leaked\nafter",
    )
    mask = "ids -1" if scenario.platform == "cuda" else "ids 0 and weights 0"
    note = f"lost: real rows masked ({mask}); leaked: pad rows routed"
    if any(rank.error for side in run.sides for rank in side.observation.ranks):
        note += "\nrefused: the engine raised when given the count, so that rows were routed without one"
    return View(f"fault {run.case.fault}: local counts of each rank ({branch})", headings, rows, note)


def _count(side: Side, number: int) -> Cell:
    """The count that the rank read; a word where it read none."""
    seen = side.observation.ranks[number]
    if seen.num_token_non_padded is not None:
        return seen.num_token_non_padded
    return "refused" if seen.error else "none"


def _masked_rows(fault: str, table: Sequence[Mapping[str, Cell]]) -> View:
    rows = [[row[key] for key in ("engine", "dp_rank", "attn_tp_rank", "kind", "rows")] for row in table]
    return View(f"fault {fault}: rows gone wrong", ("engine", "DP", "TP", "what", "rows"), rows)


def _expert_counts(fault: str, table: Sequence[Mapping[str, Any]], *, all_experts: bool) -> View:
    def off(row: Mapping[str, Any]) -> int:
        return int(max(abs(row["before"] - row["truth"]), abs(row["after"] - row["truth"])))

    shown = list(table) if all_experts else [row for row in table if off(row)]
    if not all_experts:
        shown = sorted(shown, key=lambda row: (-off(row), row["expert"]))[:WORST_EXPERTS]
    rows: list[list[Cell]] = [[row[key] for key in ("expert", "truth", "before", "after")] for row in shown]
    rows.append(["all", *(sum(row[key] for row in table) for key in ("truth", "before", "after"))])
    note = "truth: routes of all real rows, by the oracle"
    if left_out := len(table) - len(shown):
        word = "are off less" if len(shown) == WORST_EXPERTS else "have as many as they should"
        note += f"\n{left_out} more experts {word} (--all-experts)"
    return View(f"fault {fault}: routes of each expert", ("expert", "truth", "before", "after"), rows, note)
