"""Whole runs: cases observed on two engines, judged, and put into a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from repro.batch import PaddedBatch
from repro.case import Case, Fault, make_case
from repro.engines import Engine, Observation
from repro.findings import Finding
from repro.judge import Judgement, judge, row_ranges
from repro.report import Row, Verdict
from repro.routers import ROUTER_NAMES, call_router
from repro.scenario import Scenario
from repro.truth import RouteAlone, Truth, find_truth

# What shows that a fault happened, beside other findings that a scenario may have.
_SIGNS: dict[str, tuple[frozenset[str], ...]] = {
    "mask": (frozenset({"PAD004", "PAD001"}),),
    "count": (frozenset({"PAD003"}), frozenset({"PAD001", "PAD002"})),
}


@dataclass(frozen=True)
class Side:
    """One engine's part of a case."""

    observation: Observation
    judgement: Judgement

    @property
    def engine(self) -> str:
        return self.observation.engine


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
        RouterError: the scenario's router cannot be loaded, raises, or breaks its contract.
        NotVerifiedError: an engine gave nothing that could be judged.
    """
    case = make_case(scenario, fault, device)
    truth = find_truth(case.scenario, case.plan, case.batches, case.layer, _route_alone(case))
    sides = []
    for engine in (before, after):
        observation = engine.observe(case)
        sides.append(Side(observation, judge(case, truth, observation)))
    return CaseRun(case, truth, *sides)


def _route_alone(case: Case) -> RouteAlone | None:
    """A user's own routing function asked for one row at a time, so that no other row can have a say."""
    function = case.routing_function
    if function is None or case.scenario.router in ROUTER_NAMES:
        return None

    def one_row(batch: PaddedBatch, row: int) -> tuple[list[int], list[float]]:
        weights, ids = call_router(
            function,
            batch.hidden_states[row : row + 1].clone(),
            batch.router_logits[row : row + 1].clone(),
            case.scenario.top_k,
            case.scenario.renormalize,
            name=case.scenario.router,
        )
        return ids[0].tolist(), weights[0].tolist()

    return one_row


def find_changes(runs: Sequence[CaseRun]) -> tuple[Change, ...]:
    """Findings of both sides, matched by fault, code and rank; fixed ones first, then introduced, remaining."""
    changes = []
    for run in runs:
        before = {_key(f): f for f in run.before.judgement.findings}
        after = {_key(f): f for f in run.after.judgement.findings}
        changes += [Change("fixed", f) for key, f in before.items() if key not in after]
        changes += [Change("remaining" if key in before else "introduced", f) for key, f in after.items()]
    order = ("fixed", "introduced", "remaining")
    return tuple(sorted(changes, key=lambda change: order.index(change.change)))


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
                                "engine": side.engine,
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


def reproduced(run: CaseRun) -> bool:
    """Whether the before side shows the fault that the case looks for."""
    codes = {finding.code for finding in run.before.judgement.findings}
    return all(codes & signs for signs in _SIGNS[run.case.fault])


def repro_verdict(runs: Sequence[CaseRun]) -> Verdict:
    """0 where every fault shows before and nothing is found after; else 1."""
    lines: list[str] = []
    good = True
    for run in runs:
        shown, gone = reproduced(run), not run.after.judgement.findings
        good &= shown and gone
        state = "reproduced" if shown else f"did not reproduce: {_why_not(run)}"
        lines.append(f"fault {run.case.fault}: before, {run.before.engine}: {state}: {_seen(run.before)}")
        state = "gone" if gone else "did not hold"
        lines.append(f"fault {run.case.fault}: after, {run.after.engine}: {state}: {_seen(run.after)}")
    headline = (
        "every fault shows before the fix, and nothing is found after it"
        if good
        else "a fault does not show before the fix, or something is found after it"
    )
    return _verdict(good, [headline, *lines], runs)


def compare_verdict(runs: Sequence[CaseRun]) -> Verdict:
    """0 where the after side has no finding; else 1."""
    changes = find_changes(runs)
    number = {kind: sum(c.change == kind for c in changes) for kind in ("fixed", "introduced", "remaining")}
    good = not (number["introduced"] or number["remaining"])
    headline = f"{runs[0].after.engine}: {'no finding' if good else 'findings'} in this scenario"
    lines = [f"fault {run.case.fault}: {side.engine}: {_seen(side)}" for run in runs for side in run.sides]
    numbers = ", ".join(f"{count} {kind}" for kind, count in number.items())
    return _verdict(good, [f"{headline} ({numbers})", *lines], runs)


def _verdict(good: bool, lines: Sequence[str], runs: Sequence[CaseRun]) -> Verdict:
    not_checked = [text for run in runs for side in run.sides for text in side.judgement.not_checked]
    not_checked += [f"fault {run.case.fault}: {text}" for run in runs if (text := _blind(run.case))]
    return Verdict(
        "ok" if good else "findings", 0 if good else 1, tuple(lines), tuple(dict.fromkeys(not_checked))
    )


def _blind(case: Case) -> str:
    """Why this scenario cannot tell an engine that has the fault from one that has not; empty where it can."""
    plan = case.plan
    replays = case.fault == "count" and plan.sharded and case.scenario.mode == "prefill"
    if replays and all(rank.eager for rank in plan.ranks):
        return "every DP rank runs eagerly, so that no graph replays a count"
    if not any(shard.pad_rows for shard in plan.shards):
        return "the scenario has no pad rows, so that none can leak"
    if replays and all(shard.count_raw == shard.count_bucket for shard in plan.shards):
        return "raw length and bucket give every rank the same count here, so that either looks right"
    return ""


def _seen(side: Side) -> str:
    """What happened to one engine, in one line."""
    judgement = side.judgement
    lost = sum(len(outcome.lost) for outcome in judgement.outcomes)
    leaked = sum(len(outcome.leaked) for outcome in judgement.outcomes)
    codes = dict.fromkeys(finding.code for finding in judgement.findings)
    found = f" ({', '.join(codes)})" if codes else ", no finding"
    return f"{lost} real rows masked, {leaked} pads routed{found}"


def _why_not(run: CaseRun) -> str:
    if reason := _blind(run.case):
        return reason
    if run.case.fault == "count" and run.case.scenario.mode == "decode":
        return "the decode registry localised against the bucket all along"
    return f"{run.before.engine} does not have it in this scenario"
