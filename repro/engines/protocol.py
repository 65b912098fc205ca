"""What an engine is, and what was seen of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from repro.case import Case


@dataclass(frozen=True)
class RankObservation:
    """What one attention-TP rank did with its shard of R rows, by the CUDA or HIP convention of the scenario.

    ``num_token_non_padded`` is the count that the routing read, None where it read none. ``topk_ids`` [R, K]
    int32 or int64 are physical ids, ``topk_weights`` [R, K] floating; both on the CPU. ``error`` is what the
    engine raised when it was given the count; ids and weights are then those of the call without one, which is
    what its callers fell back to.
    """

    dp_rank: int
    attn_tp_rank: int
    num_token_non_padded: int | None
    topk_ids: Tensor
    topk_weights: Tensor
    error: str | None = None


@dataclass(frozen=True)
class Observation:
    """One observation a shard, in the order of ``case.plan.shards``."""

    engine: str
    ranks: tuple[RankObservation, ...]


class Engine(Protocol):
    """An implementation under test."""

    @property
    def name(self) -> str: ...

    def observe(self, case: Case) -> Observation:
        """Run the case on every rank.

        Raises:
            NotVerifiedError: the engine gave no ids and weights that could be judged.
        """
        ...
