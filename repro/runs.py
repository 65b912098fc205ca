"""Whole runs: cases observed on two engines, judged, and put into a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from repro.case import Case, Fault, make_case, not_tried, route_alone, with_ids_in_range
from repro.engines import Engine, Observation
from repro.errors import NotVerifiedError
from repro.findings import Finding
from repro.judge import Judgement, judge, row_ranges, rows_of
from repro.plan import compute_local_num_token_non_padded_cpu
from repro.report import Row, Status, Verdict
from repro.routers import RouterError
from repro.scenario import Scenario
from repro.truth import Truth, find_truth

# What shows that a fault happened, beside other findings that a scenario may have.
_SIGNS: dict[str, tuple[frozenset[str], ...]] = {
    "mask": (frozenset({"PAD004", "PAD001"}),),
    "count": (frozenset({"PAD003"}), frozenset({"PAD001", "PAD002"})),
}


# Branches of select_experts that refused the count before the fix; the fix reached the first of them.
REFUSING_BRANCHES = ("custom", "torch-native")


@dataclass(frozen=True)
class Side:
    """One engine's part of a case. ``label`` tells it from the other side where both are of one ``name``."""

    name: str
    label: str
    observation: Observation
    judgement: Judgement


@dataclass(frozen=True)
class CaseRun:
    """One case on two engines, judged by the same truth."""

    case: Case
    truth: Truth
    before: Side
    after: Side

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.before, self.after


@dataclass(frozen=True)
class Change:
    """A finding that the after side lost, gained or kept: ``fixed``, ``introduced`` or ``remaining``."""

    change: str
    finding: Finding


def run_case(
    scenario: Scenario, fault: Fault, *, before: Engine, after: Engine, device: str = "cpu"
) -> CaseRun:
    """Observe one case on both engines and judge both.

    Raises:
        RouterError: the scenario's router cannot be loaded, or cannot route a real row on its own.
        NotVerifiedError: an engine gave nothing that could be judged.
    """
    case = make_case(scenario, fault, device)
    truth = find_truth(case.scenario, case.plan, case.batches, case.layer, route_alone(case))
    # A remap looks ids up: with one that no expert has, an engine may give no answer at all.
    remaps = scenario.eplb != "none"
    given = with_ids_in_range(case) if remaps and truth.out_of_range else case
    same = before.name == after.name
    sides = []
    for engine, when in ((before, "before"), (after, "after")):
        try:
            observation = engine.observe(given)
        except RouterError as err:
            raise NotVerifiedError(
                f"{engine.name}: the router gave every real row a route of its own, but not the padded batch: "
                f"{err.problem}"
            ) from err
        label = f"{engine.name} ({when})" if same else engine.name
        sides.append(Side(engine.name, label, observation, judge(case, truth, observation, label)))
    return CaseRun(case, truth, *sides)


def find_changes(runs: Sequence[CaseRun]) -> tuple[Change, ...]:
    """Findings of both sides, matched by fault, code and rank; fixed ones first, then introduced, remaining."""
    changes = []
    for run in runs:
        before = {_key(f): f for f in run.before.judgement.findings}
        after = {_key(f): f for f in run.after.judgement.findings}
        changes += [Change("fixed", f) for key, f in before.items() if key not in after]
        changes += [
            Change("remaining" if _no_worse(f, before.get(key)) else "introduced", f)
            for key, f in after.items()
        ]
    order = ("fixed", "introduced", "remaining")
    return tuple(sorted(changes, key=lambda change: order.index(change.change)))


def _no_worse(after: Finding, before: Finding | None) -> bool:
    """Whether a finding was there already, on all of its rows."""
    return before is not None and rows_of(after.rows) <= rows_of(before.rows)


def _key(finding: Finding) -> tuple[str, str, int | None, int | None]:
    return finding.fault, finding.code, finding.dp_rank, finding.attn_tp_rank


def run_tables(runs: Sequence[CaseRun]) -> dict[str, list[Row]]:
    """``local_counts``, ``masked_rows`` and ``expert_counts`` of all cases."""
    tables: dict[str, list[Row]] = {"local_counts": [], "masked_rows": [], "expert_counts": []}
    for run in runs:
        fault = run.case.fault
        tables["local_counts"] += _local_counts(run)
        for side in run.sides:
            for outcome in side.judgement.outcomes:
                for kind, rows in (("lost", outcome.lost), ("leaked", outcome.leaked)):
                    if rows:
                        tables["masked_rows"].append(
                            {
                                "fault": fault,
                                "engine": side.label,
                                "dp_rank": outcome.dp_rank,
                                "attn_tp_rank": outcome.attn_tp_rank,
                                "kind": kind,
                                "rows": row_ranges(rows),
                            }
                        )
        counts = zip(
            run.truth.expert_counts(run.case.scenario.experts),
            run.before.judgement.expert_counts,
            run.after.judgement.expert_counts,
            strict=True,
        )
        tables["expert_counts"] += [
            {"fault": fault, "expert": expert, "truth": truth, "before": before, "after": after}
            for expert, (truth, before, after) in enumerate(counts)
        ]
    return tables


def _local_counts(run: CaseRun) -> list[Row]:
    rows: list[Row] = []
    for planned, shard, before, after in zip(
        run.case.plan.shards,
        run.truth.shards,
        run.before.judgement.outcomes,
        run.after.judgement.outcomes,
        strict=True,
    ):
        rows.append(
            {
                "fault": run.case.fault,
                "dp_rank": shard.dp_rank,
                "attn_tp_rank": shard.attn_tp_rank,
                "row_start": planned.row_start,
                "row_end": planned.row_end,
                "real_rows": shard.num_token_non_padded,
                "before_count": before.num_token_non_padded,
                "after_count": after.num_token_non_padded,
                "before_real_masked": len(before.lost),
                "before_pads_routed": len(before.leaked),
                "after_real_masked": len(after.lost),
                "after_pads_routed": len(after.leaked),
            }
        )
    return rows


def shows_fault(fault: Fault, side: Side) -> bool:
    """Whether a side's findings have what the fault is known by."""
    codes = {finding.code for finding in side.judgement.findings}
    return all(codes & signs for signs in _SIGNS[fault])


def repro_verdict(runs: Sequence[CaseRun]) -> Verdict:
    """0 where every fault shows before and nothing is found after; else 1."""
    lines: list[str] = []
    shown = [shows_fault(run.case.fault, run.before) and not _blind(run) for run in runs]
    clean = [not run.after.judgement.findings for run in runs]
    for run, was_shown, is_clean in zip(runs, shown, clean, strict=True):
        fault = run.case.fault
        state = "reproduced" if was_shown else f"did not reproduce, {_why_not(run)}"
        lines.append(f"fault {fault}: before, {run.before.name}: {state}: {_seen(run, run.before)}")
        if is_clean:
            state = "gone" if was_shown else "not there either"
        else:
            state = "still there" if shows_fault(fault, run.after) else "gone, but something else is found"
        lines.append(f"fault {fault}: after, {run.after.name}: {state}: {_seen(run, run.after)}")
    if all(shown) and all(clean):
        return _verdict("reproduced before the fix, gone after it", 0, lines, runs)
    missing = [run.case.fault for run, was_shown in zip(runs, shown, strict=True) if not was_shown]
    dirty = [run.case.fault for run, is_clean in zip(runs, clean, strict=True) if not is_clean]
    parts = [f"not reproduced: {', '.join(missing)}"] if missing else []
    parts += [f"findings after the fix: {', '.join(dirty)}"] if dirty else []
    return _verdict("; ".join(parts), 1, lines, runs)


def compare_verdict(runs: Sequence[CaseRun]) -> Verdict:
    """0 where the after side has no finding, 3 where it has none and no case could have shown one; else 1."""
    changes = find_changes(runs)
    number = {kind: sum(c.change == kind for c in changes) for kind in ("fixed", "introduced", "remaining")}
    lines = [
        f"fault {run.case.fault}: {when}, {side.name}: {_seen(run, side)}"
        for run in runs
        for when, side in zip(("before", "after"), run.sides, strict=True)
    ]
    lines.append("findings: " + ", ".join(f"{count} {kind}" for kind, count in number.items()))
    left = number["introduced"] + number["remaining"]
    after = runs[0].after.label
    summary = (
        f"{after} has {left} findings in this scenario"
        if left
        else f"{after} has no finding in this scenario"
    )
    return _verdict(summary, 1 if left else 0, lines, runs)


def _verdict(summary: str, exit_code: int, lines: Sequence[str], runs: Sequence[CaseRun]) -> Verdict:
    not_checked = [
        f"{text} ({side.label})" for run in runs for side in run.sides for text in side.judgement.not_checked
    ]
    blind = [f"fault {run.case.fault}: {text}" for run in runs if (text := _blind(run))]
    not_checked += blind
    not_checked += [text for run in runs for text in not_tried(run.case)]
    unread = [text for run in runs for side in run.sides if (text := _counts_not_given(run.case, side))]
    not_checked += unread
    status: Status = "findings" if exit_code else "ok"
    if not exit_code and (unread or all(map(_tells_nothing, runs))):
        status, exit_code, summary = "not-verified", 3, "not verified"
    return Verdict(status, exit_code, summary, tuple(lines), tuple(dict.fromkeys(not_checked)))


def _counts_not_given(case: Case, side: Side) -> str:
    """A count case is about counts: a side that raised nothing and yet gave none has not been judged."""
    ranks = [rank for rank in side.observation.ranks if rank.num_token_non_padded is None and not rank.error]
    if case.fault != "count" or not ranks:
        return ""
    return f"fault count: {side.label} gave no count on {len(ranks)} ranks"


def _blind(run: CaseRun) -> str:
    """Why this case cannot tell an engine that has the fault from one that has not; empty where it can.

    It cannot where a pre-fix engine does to the plan's rows what a right one does. If the side before is some
    other engine and shows the fault nevertheless, the case could tell.
    """
    case, plan = run.case, run.case.plan
    no_pads = (
        "" if any(shard.pad_rows for shard in plan.shards) else "no rank owns a pad row in this scenario"
    )
    if case.fault == "mask" and no_pads:
        return f"{no_pads}, so that none can leak"
    if shows_fault(case.fault, run.before):
        return ""
    if case.fault == "mask":
        branch = case.scenario.branch
        return "" if branch in REFUSING_BRANCHES else f"branch {branch} took the count before the fix too"
    if _prefix_counts(case) != [shard.count_bucket for shard in plan.shards]:
        return ""
    return _why_counts_agree(case, no_pads)


def _tells_nothing(run: CaseRun) -> bool:
    """Whether no engine could have gone wrong in a way that this case shows.

    Narrower than ``_blind``, which is about the twins: where both do right, another engine need not.
    """
    shards = run.case.plan.shards
    if run.case.fault == "mask":
        return not any(shard.pad_rows for shard in shards)
    return bool(_blind(run)) and all(shard.count_raw == shard.count_bucket for shard in shards)


def _prefix_counts(case: Case) -> list[int]:
    """What each rank of a pre-fix engine reads: it knew no replicated forward, and cut prefill counts from L."""
    plan, scenario = case.plan, case.scenario
    if scenario.mode == "prefill":
        return [shard.count_raw for shard in plan.shards]
    return [
        compute_local_num_token_non_padded_cpu(
            rank.num_tokens,
            rank.padded_num_tokens,
            attn_tp_size=plan.attn_tp_size,
            attn_tp_rank=shard.attn_tp_rank,
            sharded=scenario.gathered,
        )
        for rank in plan.ranks
        for shard in rank.shards
    ]


def _why_counts_agree(case: Case, no_pads: str) -> str:
    if not case.scenario.gathered:
        return "nothing localises the count here, before the fix or after it"
    if not case.plan.sharded:
        return "localised or whole, the count of every rank is the same here, so that either looks right"
    if case.scenario.mode == "decode":
        return "decode graphs localised against the bucket before the fix too"
    if all(rank.eager for rank in case.plan.ranks):
        return "every DP rank runs eagerly, so that no graph replays a count"
    if no_pads:
        return f"{no_pads}, so that none can leak"
    return "raw length and bucket give every rank the same count here, so that either looks right"


def _seen(run: CaseRun, side: Side) -> str:
    """What happened to one engine, in one line."""
    outcomes, shards = side.judgement.outcomes, run.truth.shards
    real = sum(shard.num_token_non_padded for shard in shards)
    rows = sum(len(shard.rows) for shard in shards)
    lost, leaked = (sum(len(getattr(outcome, kind)) for outcome in outcomes) for kind in ("lost", "leaked"))
    codes = dict.fromkeys(finding.code for finding in side.judgement.findings)
    unowned = sum(
        row < rank.num_tokens
        for rank, rows_of_nobody in zip(run.case.plan.ranks, run.truth.unowned, strict=True)
        for row in rows_of_nobody
    )
    no_rank = f", {unowned} real rows on no rank" if unowned else ""
    found = f" ({', '.join(codes)})" if codes else ", no finding"
    return f"{lost} of {real} real rows masked, {leaked} of {rows - real} pads routed{no_rank}{found}"


def _why_not(run: CaseRun) -> str:
    if reason := _blind(run):
        return f"since {reason}"
    if run.case.fault == "count" and any(rank.error is not None for rank in run.before.observation.ranks):
        return (
            f"since {run.before.label} refused the count on branch {run.case.scenario.branch} and read none"
        )
    return f"since {run.before.label} does not have it in this scenario"
