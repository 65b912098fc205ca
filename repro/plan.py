"""Which rows each rank owns, and how many of them are real. Integers only: no torch, no numpy.

Symbols, as used in every docstring here:

    n  real tokens of one DP rank          L  raw length: what the batch was padded to before any graph
    a  attention-TP size                   B  bucket: rows that the captured graph was made for
    r  attention-TP rank                   S  rows of one shard, B // a

The formulas are those of SGLang's ``forward_batch_info.py`` (0.5.17), which cuts shards by floor division.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from repro.errors import PlanError

DpPadding = Literal["max-len", "sum-len"]


def align_up(length: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is >= ``length``."""
    return -(-length // multiple) * multiple


def attn_tp_local_shard_bounds(
    num_tokens_per_dp: int, *, attn_tp_size: int, attn_tp_rank: int, sharded: bool = True
) -> tuple[int, int]:
    """``(tokens_per_rank, rank_offset)`` by the floor formula; all rows at offset 0 if not sharded."""
    if not sharded:
        return num_tokens_per_dp, 0
    tokens_per_rank = num_tokens_per_dp // attn_tp_size
    return tokens_per_rank, tokens_per_rank * attn_tp_rank


def compute_local_num_token_non_padded_cpu(
    global_num_token_non_padded: int,
    num_tokens_per_dp: int,
    *,
    attn_tp_size: int,
    attn_tp_rank: int,
    sharded: bool = True,
) -> int:
    """Real rows of one rank's shard: ``clamp(n - r*S, 0, S)``.

    ``global_num_token_non_padded`` is n, the count of the whole DP rank; ``num_tokens_per_dp`` is what the
    shards are cut from: B is right inside a graph, L there is fault B.
    """
    tokens_per_rank, rank_offset = attn_tp_local_shard_bounds(
        num_tokens_per_dp, attn_tp_size=attn_tp_size, attn_tp_rank=attn_tp_rank, sharded=sharded
    )
    return min(max(global_num_token_non_padded - rank_offset, 0), tokens_per_rank)


def uneven_shard_bounds(num_rows: int, *, attn_tp_size: int, attn_tp_rank: int) -> tuple[int, int]:
    """``(tokens_per_rank, rank_offset)`` as ``torch.tensor_split`` cuts: the first ranks get a row more."""
    base, longer = divmod(num_rows, attn_tp_size)
    return base + (attn_tp_rank < longer), base * attn_tp_rank + min(attn_tp_rank, longer)


@dataclass(frozen=True)
class Shard:
    """Rows ``[row_start, row_end)`` of a DP rank's padded batch, owned by one attention-TP rank.

    ``real_rows`` is counted from the bounds. ``count_bucket`` and ``count_raw`` are the floor formula on
    B and on L: what a fixed engine and a pre-fix one write into ``num_token_non_padded``. A replicated forward
    has n for the first; a pre-fix engine knew none, so that the second is localised all the same.
    """

    dp_rank: int
    attn_tp_rank: int
    row_start: int
    row_end: int
    real_rows: int
    count_bucket: int
    count_raw: int

    @property
    def rows(self) -> int:
        return self.row_end - self.row_start

    @property
    def pad_rows(self) -> int:
        return self.rows - self.real_rows

    @property
    def real_rows_masked(self) -> int:
        """Real rows lost if the graph reads ``count_raw``."""
        return max(self.real_rows - self.count_raw, 0)

    @property
    def pads_routed(self) -> int:
        """Pad rows leaked if the graph reads ``count_raw``."""
        return max(min(self.count_raw, self.rows) - self.real_rows, 0)


@dataclass(frozen=True)
class DpRankPlan:
    """One DP rank: n real tokens, padded to ``raw_length`` (L), run on ``padded_num_tokens`` rows.

    ``eager`` says that no graph is replayed, so that ``padded_num_tokens`` is L itself and not a bucket.
    """

    dp_rank: int
    num_tokens: int
    raw_length: int
    padded_num_tokens: int
    eager: bool
    shards: tuple[Shard, ...]

    @property
    def unowned_rows(self) -> range:
        """Rows at the end of the padded batch that no shard owns (B % a of them by the floor formula)."""
        return range(max(shard.row_end for shard in self.shards), self.padded_num_tokens)


@dataclass(frozen=True)
class PaddingPlan:
    attn_tp_size: int
    sharded: bool
    ranks: tuple[DpRankPlan, ...]

    @property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(shard for rank in self.ranks for shard in rank.shards)


def raw_lengths(
    tokens: Sequence[int], *, attn_tp_size: int, align: int = 1, dp_padding: DpPadding = "max-len"
) -> tuple[int, ...]:
    """L of each DP rank: up to a multiple of a and of ``align``; in MAX_LEN mode all take the longest."""
    multiple = math.lcm(attn_tp_size, align)
    aligned = tuple(align_up(n, multiple) for n in tokens)
    return (max(aligned),) * len(aligned) if dp_padding == "max-len" else aligned


def choose_bucket(length: int, buckets: Sequence[int]) -> int | None:
    """The smallest of ``buckets``, ascending, that is >= ``length``; None where all are shorter."""
    place = bisect.bisect_left(buckets, length)
    return buckets[place] if place < len(buckets) else None


def plan_padding(
    tokens: Sequence[int],
    *,
    attn_tp_size: int,
    buckets: Sequence[int],
    raw_length: int | None = None,
    align: int = 1,
    dp_padding: DpPadding = "max-len",
    max_padding_factor: float | None = None,
    gathered: bool = True,
    sharded: bool = True,
    uneven: bool = False,
) -> PaddingPlan:
    """The padding plan of one batch over all DP and attention-TP ranks.

    ``tokens`` holds n of each DP rank (0: idle). ``raw_length`` overrides L of every DP rank.
    ``max_padding_factor`` is the eager fallback: no graph where the bucket is more than that many times L.
    ``gathered`` is False where no count is localised (no gathered buffer, or prefill CP); all ranks then hold
    all rows, as they do where ``sharded`` is False. ``uneven`` cuts the shards as ``torch.tensor_split`` does;
    the two counts stay the floor formula's.

    Raises:
        PlanError: a number out of range, a raw length shorter than a rank's tokens, or no bucket that holds L.
    """
    _check_numbers(tokens, attn_tp_size=attn_tp_size, buckets=buckets, align=align)
    if raw_length is None:
        lengths = raw_lengths(tokens, attn_tp_size=attn_tp_size, align=align, dp_padding=dp_padding)
    else:
        longest = max(tokens)
        if raw_length < longest:
            raise PlanError("raw_length", f"{raw_length} is smaller than the {longest} tokens of a DP rank")
        lengths = (raw_length,) * len(tokens)
    sharded = sharded and gathered
    captured = sorted(set(buckets))
    ranks = []
    for dp_rank, (num_tokens, length) in enumerate(zip(tokens, lengths, strict=True)):
        bucket = choose_bucket(length, captured)
        if bucket is None:
            raise PlanError(
                "buckets" if len(buckets) > 1 else "bucket",
                f"{max(buckets)} is smaller than the {length} rows that DP rank {dp_rank} is padded to "
                f"(its {num_tokens} tokens, aligned with the other ranks); give a bucket of at least {length}",
            )
        eager = max_padding_factor is not None and bucket > max_padding_factor * length
        rows = length if eager else bucket
        shards = tuple(
            _shard(
                dp_rank,
                attn_tp_rank,
                num_tokens,
                length,
                rows,
                attn_tp_size,
                gathered=gathered,
                sharded=sharded,
                uneven=uneven,
            )
            for attn_tp_rank in range(attn_tp_size)
        )
        ranks.append(DpRankPlan(dp_rank, num_tokens, length, rows, eager, shards))
    return PaddingPlan(attn_tp_size, sharded, tuple(ranks))


def _shard(
    dp_rank: int,
    attn_tp_rank: int,
    num_tokens: int,
    raw_length: int,
    rows: int,
    attn_tp_size: int,
    *,
    gathered: bool,
    sharded: bool,
    uneven: bool,
) -> Shard:
    if sharded and uneven:
        size, start = uneven_shard_bounds(rows, attn_tp_size=attn_tp_size, attn_tp_rank=attn_tp_rank)
    else:
        size, start = attn_tp_local_shard_bounds(
            rows, attn_tp_size=attn_tp_size, attn_tp_rank=attn_tp_rank, sharded=sharded
        )
    count_bucket, count_raw = (
        compute_local_num_token_non_padded_cpu(
            num_tokens, cut_from, attn_tp_size=attn_tp_size, attn_tp_rank=attn_tp_rank, sharded=localises
        )
        for cut_from, localises in ((rows, sharded), (raw_length, gathered))
    )
    real_rows = min(max(num_tokens - start, 0), size)
    return Shard(dp_rank, attn_tp_rank, start, start + size, real_rows, count_bucket, count_raw)


def _check_numbers(tokens: Sequence[int], *, attn_tp_size: int, buckets: Sequence[int], align: int) -> None:
    if not tokens:
        raise PlanError("tokens", "no DP rank given; give one number of tokens a DP rank, 0 for an idle one")
    for name, values, least in (
        ("tokens", tokens, 0),
        ("attn_tp", (attn_tp_size,), 1),
        ("buckets" if len(buckets) > 1 else "bucket", buckets, 1),
        ("align", (align,), 1),
    ):
        for value in values:
            if value < least:
                raise PlanError(name, f"{value} is out of range; give {least} or more")
    if not buckets:
        raise PlanError("bucket", "none given; give the captured sizes that the server has")
