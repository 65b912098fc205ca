"""The oracle: which rows are real, and what their routing is, row by row in plain Python.

It shares no code with any engine, nor with the plan's arithmetic: rows are walked one by one, and scores are
computed in float64 from each row's own logits. It may be slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from repro.batch import MoeLayer, PaddedBatch
from repro.plan import DpRankPlan, PaddingPlan
from repro.scenario import Scenario

# Routing of one real row by the routing function alone: (ids, weights). Given for a user's own function only,
# of which no other description exists.
RouteAlone = Callable[[PaddedBatch, int], tuple[Sequence[int], Sequence[float]]]


# Two scores closer than this, relative to their size, may fall either way in float32.
TIE = 2e-6


@dataclass(frozen=True)
class RowTruth:
    """Routing of one real row: logical ``ids`` with their ``weights``, shared experts (id E + j) last.

    ``tied`` are the experts, chosen or not, whose scores are at the cut within rounding: another choice among
    them is as right, with the weights that ``scores`` (by expert, empty where nothing is tied) then give.
    ``ambiguous`` is a row where rounding decides more than that, so that nothing can be said of its routing.
    ``out_of_range`` is a row to which a user's own function gives an id outside 0..E-1: no routing is right.
    """

    ids: tuple[int, ...]
    weights: tuple[float, ...]
    tied: frozenset[int] = frozenset()
    scores: tuple[float, ...] = ()
    ambiguous: bool = False
    renormalize: bool = False
    out_of_range: bool = False


@dataclass(frozen=True)
class ShardTruth:
    """One rank's shard: its rows of the DP rank's padded batch, and which of them hold a token."""

    dp_rank: int
    attn_tp_rank: int
    rows: tuple[int, ...]
    real: tuple[bool, ...]

    @property
    def num_token_non_padded(self) -> int:
        return sum(self.real)


@dataclass(frozen=True)
class Truth:
    """``routing[d][i]`` is row i of DP rank d, for its real rows; ``unowned[d]`` are rows of no shard."""

    shards: tuple[ShardTruth, ...]
    routing: tuple[tuple[RowTruth, ...], ...]
    unowned: tuple[tuple[int, ...], ...]

    @property
    def out_of_range(self) -> bool:
        """Whether any row is."""
        return any(row.out_of_range for rows in self.routing for row in rows)

    def expert_counts(self, num_experts: int) -> list[int]:
        """Routes of each logical expert, real rows only, each row counted once however many ranks hold it."""
        counts = [0] * num_experts
        for rows in self.routing:
            for row in rows:
                for expert in row.ids:
                    if 0 <= expert < num_experts:
                        counts[expert] += 1
        return counts


def find_truth(
    scenario: Scenario,
    plan: PaddingPlan,
    batches: Sequence[PaddedBatch],
    layer: MoeLayer,
    route_alone: RouteAlone | None = None,
) -> Truth:
    """The truth of a scenario. ``route_alone`` replaces the built-in description of the routing function."""
    routing = []
    for batch in batches:
        logits = batch.router_logits[: batch.num_token_non_padded_cpu].tolist()
        rows = []
        for number, row_logits in enumerate(logits):
            if route_alone is None:
                row = _route(scenario, layer, row_logits)
            else:
                ids, weights = route_alone(batch, number)
                outside = not all(0 <= expert < scenario.experts for expert in ids)
                row = RowTruth(tuple(ids), tuple(weights), out_of_range=outside)
            rows.append(_with_shared_experts(row, scenario))
        routing.append(tuple(rows))
    shards, unowned = _owners(plan)
    return Truth(shards, tuple(routing), unowned)


def _owners(plan: PaddingPlan) -> tuple[tuple[ShardTruth, ...], tuple[tuple[int, ...], ...]]:
    shards = []
    unowned = []
    for rank in plan.ranks:
        owned: list[list[int]] = [[] for _ in range(plan.attn_tp_size)]
        nobody = []
        for row in range(rank.padded_num_tokens):
            owners = _owners_of(row, rank, plan)
            for attn_tp_rank in owners:
                owned[attn_tp_rank].append(row)
            if not owners:
                nobody.append(row)
        for attn_tp_rank, rows in enumerate(owned):
            real = tuple(row < rank.num_tokens for row in rows)
            shards.append(ShardTruth(rank.dp_rank, attn_tp_rank, tuple(rows), real))
        unowned.append(tuple(nobody))
    return tuple(shards), tuple(unowned)


def _owners_of(row: int, rank: DpRankPlan, plan: PaddingPlan) -> Sequence[int]:
    if not plan.sharded:
        return range(plan.attn_tp_size)
    rows_of_a_shard = rank.padded_num_tokens // plan.attn_tp_size
    if rows_of_a_shard == 0 or row // rows_of_a_shard >= plan.attn_tp_size:
        return ()
    return (row // rows_of_a_shard,)


def _route(scenario: Scenario, layer: MoeLayer, logits: Sequence[float]) -> RowTruth:
    k = scenario.top_k
    method = scenario.router if scenario.branch == "custom" else scenario.branch
    match method:
        case "softmax" | "torch-native":
            scores = _softmax(logits)
            return _pick(scores, scores, k, renormalize=scenario.renormalize)
        case "softcap":
            scores = _softmax([30 * math.tanh(x / 30) for x in logits])
            return _pick(scores, scores, k, renormalize=scenario.renormalize)
        case "sigmoid":
            scores = [_sigmoid(x) for x in logits]
            return _pick(scores, scores, k, renormalize=scenario.renormalize)
        case "sigmoid-top1":
            return _pick(logits, [_sigmoid(x) for x in logits], 1, renormalize=False)
        case "sqrt-softplus":
            scores = [math.sqrt(max(x, 0.0) + math.log1p(math.exp(-abs(x)))) for x in logits]
            return _pick(scores, scores, k, renormalize=scenario.renormalize)
        case "grouped":
            scores = _softmax(logits)
            allowed, tie = _best_groups(scores, scenario, best_of=1)
            choice = [x if expert in allowed else -math.inf for expert, x in enumerate(scores)]
            return _pick(choice, scores, k, renormalize=scenario.renormalize, ambiguous=tie)
        case "biased-grouped":
            scores = [_sigmoid(x) for x in logits]
            biased = [x + b for x, b in zip(scores, layer.correction_bias or (), strict=True)]
            allowed, tie = _best_groups(biased, scenario, best_of=2)
            choice = [x if expert in allowed else -math.inf for expert, x in enumerate(biased)]
            return _pick(choice, scores, k, renormalize=scenario.renormalize, ambiguous=tie)
        case "sparse-mixer":
            return _sparse_mixer(logits, renormalize=scenario.renormalize)
        case "degenerate":
            return RowTruth(tuple(range(k)), (1 / k,) * k)
    raise ValueError(f"no description of the routing {method!r}; pass route_alone")


def _softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    exps = [math.exp(x - top) for x in logits]
    total = sum(exps)
    return [x / total for x in exps]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _gap(better: float, worse: float) -> float:
    """Relative distance of two scores, infinite where the second is no choice at all."""
    if worse == -math.inf:
        return math.inf
    return (better - worse) / max(abs(better), abs(worse), 1e-30)


def _pick(
    choice: Sequence[float],
    scores: Sequence[float],
    k: int,
    *,
    renormalize: bool,
    ambiguous: bool = False,
) -> RowTruth:
    """The k experts of highest ``choice``, weighted by ``scores``."""
    order = sorted(range(len(choice)), key=lambda expert: -choice[expert])
    ids = order[:k]
    weights = tuple(_weights(ids, scores, renormalize=renormalize))
    if k == len(order) or _gap(choice[order[k - 1]], choice[order[k]]) >= TIE:
        return RowTruth(tuple(ids), weights, ambiguous=ambiguous)
    cut = choice[order[k - 1]]
    tied = frozenset(e for e in order if _gap(max(choice[e], cut), min(choice[e], cut)) < TIE)
    return RowTruth(tuple(ids), weights, tied, tuple(scores), ambiguous, renormalize)


def _weights(ids: Sequence[int], scores: Sequence[float], *, renormalize: bool) -> list[float]:
    total = sum(scores[expert] for expert in ids) if renormalize else 1.0
    return [scores[expert] / total for expert in ids]


def another_choice(row: RowTruth, ids: Sequence[int], scenario: Scenario) -> RowTruth | None:
    """The row as it is right with ``ids`` for its routed experts; None where they are no choice of equals."""
    routed = set(row.ids[: scenario.top_k])
    chosen = set(ids)
    if len(chosen) != len(ids) or len(ids) != len(routed) or not chosen ^ routed <= row.tied:
        return None
    weights = tuple(_weights(ids, row.scores, renormalize=row.renormalize))
    return _with_shared_experts(RowTruth(tuple(ids), weights), scenario)


def _best_groups(scores: Sequence[float], scenario: Scenario, *, best_of: int) -> tuple[set[int], bool]:
    """The experts of the best groups, and whether another group is as good as the last of them.

    A group is as good as the sum of its ``best_of`` best experts.
    """
    size = len(scores) // scenario.num_expert_group
    members = [range(g * size, (g + 1) * size) for g in range(scenario.num_expert_group)]
    worth = [sum(sorted((scores[e] for e in group), reverse=True)[:best_of]) for group in members]
    order = sorted(range(len(members)), key=lambda group: -worth[group])
    cut = scenario.topk_group
    tie = cut < len(order) and _gap(worth[order[cut - 1]], worth[order[cut]]) < TIE
    return {expert for group in order[:cut] for expert in members[group]}, tie


def _sparse_mixer(logits: Sequence[float], *, renormalize: bool) -> RowTruth:
    """Phi's sparse mixer at inference: two rounds of arg-max, each weighted within its own neighbourhood.

    In a round, experts further than 2 x 0.01 below the best, relative to the larger of |logit| and the best
    logit, are left out of the softmax that weighs the winner.
    """
    ids: list[int] = []
    weights: list[float] = []
    ambiguous = False
    for _ in range(2):
        left = [e for e in range(len(logits)) if e not in ids]
        order = sorted(left, key=lambda expert: -logits[expert])
        best = logits[order[0]]
        ambiguous |= len(order) > 1 and _gap(best, logits[order[1]]) < TIE
        near = []
        for expert in left:
            scale = max(abs(logits[expert]), best)
            distance = (best - logits[expert]) / scale if scale else 0.0
            ambiguous |= abs(distance - 0.02) < TIE
            if distance <= 0.02:
                near.append(expert)
        ids.append(order[0])
        weights.append(1 / sum(math.exp(logits[expert] - best) for expert in near))
    total = sum(weights) if renormalize else 1.0
    return RowTruth(tuple(ids), tuple(w / total for w in weights), ambiguous=ambiguous)


def _with_shared_experts(row: RowTruth, scenario: Scenario) -> RowTruth:
    shared = scenario.num_fused_shared_experts
    weight = sum(row.weights) / scenario.routed_scaling_factor
    return replace(
        row,
        ids=row.ids + tuple(scenario.experts + j for j in range(shared)),
        weights=row.weights + (weight,) * shared,
    )
