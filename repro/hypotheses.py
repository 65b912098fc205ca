"""Known ways in which the counts of a DP rank come out wrong, and which of them gives the counts seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from repro.plan import DpRankPlan, PaddingPlan, compute_local_num_token_non_padded_cpu
from repro.scenario import Scenario


def explain_counts(
    scenario: Scenario, plan: PaddingPlan, rank: DpRankPlan, counts: Sequence[int | None]
) -> str:
    """One sentence on ``counts``, one a attention-TP rank (None: that rank read none)."""
    shown = "[" + ", ".join("-" if count is None else str(count) for count in counts) + "]"
    fits = [
        way
        for way, values in _ways(scenario, plan, rank)
        if all(got is None or got == value for got, value in zip(counts, values, strict=True))
    ]
    true = [shard.real_rows for shard in rank.shards]
    if sorted(count for count in counts if count is not None) == sorted(true) and list(counts) != true:
        fits.append("giving the right counts to the wrong ranks")
    if not fits:
        return f"no known way of being wrong gives the counts {shown}"
    also = f" (as does {'; '.join(fits[1:])})" if fits[1:] else ""
    return f"counts {shown} are what {fits[0]} gives{also}"


def _ways(scenario: Scenario, plan: PaddingPlan, rank: DpRankPlan) -> Iterator[tuple[str, list[int]]]:
    size, n, rows = plan.attn_tp_size, rank.num_tokens, rank.padded_num_tokens

    def localised(count: int, cut_from: int) -> list[int]:
        return [
            compute_local_num_token_non_padded_cpu(count, cut_from, attn_tp_size=size, attn_tp_rank=r)
            for r in range(size)
        ]

    true = [shard.real_rows for shard in rank.shards]
    shard_rows = [shard.rows for shard in rank.shards]
    if not plan.sharded:
        yield "localising a forward that is not sharded", localised(n, rows)
    if rank.raw_length != rows:
        yield f"localising against the raw length {rank.raw_length}", localised(n, rank.raw_length)
    yield f"the DP rank's whole count {n} used on every shard", [n] * size
    total = sum(other.num_tokens for other in plan.ranks)
    if len(plan.ranks) > 1:
        yield f"the count {total} of all DP ranks, not localised at all", [total] * size
    yield "a capture-time value, every row of the shard real,", shard_rows
    yield "a capture-time value, every row of the bucket real,", [rows] * size
    if scenario.tokens_per_request > 1:
        requests = n // scenario.tokens_per_request
        yield f"counting {requests} requests where {n} tokens are meant", localised(requests, rows)
        yield f"counting {requests} requests, not localised,", [requests] * size
    yield "dropping the rank offset", [min(n, rows_owned) for rows_owned in shard_rows]
    for other in plan.ranks:
        if other.num_tokens != n:
            yield f"taking the count of DP rank {other.dp_rank}", localised(other.num_tokens, rows)
    for step in (1, -1):
        yield f"being off by {step:+d} on every rank", [count + step for count in true]
        yield f"being off by {step:+d} before localising", localised(n + step, rows)
