"""Padded batches, and the one MoE layer that they are routed through. Everything is seeded.

Legend: n real tokens of a DP rank, B padded rows, H hidden size, E logical experts, P physical experts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from repro.plan import DpRankPlan, PaddingPlan
from repro.scenario import Scenario

CONSTANT = 1.0
_REAL, _PAD, _EARLIER, _LAYER = range(4)


@dataclass(frozen=True)
class PaddedBatch:
    """The rows of one DP rank: real rows ``[0, n)``, pad rows ``[n, B)``.

    ``hidden_states`` is [B, H] and ``router_logits`` [B, E], both float32. ``num_token_non_padded_cpu`` is n,
    the host int that upstream's batch carries.
    """

    dp_rank: int
    num_token_non_padded_cpu: int
    raw_length: int
    hidden_states: Tensor
    router_logits: Tensor


@dataclass(frozen=True)
class MoeLayer:
    """What routing needs besides the batch.

    ``physical_to_logical`` has P entries; without a remap it is 0..E-1. ``correction_bias`` has E values, for
    the biased grouped branch only.
    """

    num_experts: int
    physical_to_logical: tuple[int, ...]
    correction_bias: tuple[float, ...] | None

    @property
    def logical_to_all_physical(self) -> tuple[tuple[int, ...], ...]:
        """The physical copies of each logical expert, in ascending order."""
        copies: list[list[int]] = [[] for _ in range(self.num_experts)]
        for physical, logical in enumerate(self.physical_to_logical):
            copies[logical].append(physical)
        return tuple(tuple(physical) for physical in copies)


def make_layer(scenario: Scenario) -> MoeLayer:
    """The placement of experts and the correction bias that the scenario's seed gives."""
    rng = random.Random(f"{scenario.seed}/{_LAYER}")  # noqa: S311 - repeatable, not secret
    placement = list(range(scenario.experts))
    if scenario.eplb != "none":
        placement += rng.choices(range(scenario.experts), k=scenario.redundant_experts)
        rng.shuffle(placement)
    bias = None
    if scenario.branch == "biased-grouped":
        bias = tuple(rng.uniform(-0.2, 0.2) for _ in range(scenario.experts))
    return MoeLayer(scenario.experts, tuple(placement), bias)


def make_batches(scenario: Scenario, plan: PaddingPlan, device: str = "cpu") -> tuple[PaddedBatch, ...]:
    """One batch a DP rank. Real rows depend on the seed, the DP rank and the widths only, never on the padding."""
    return tuple(_make_batch(scenario, rank, device) for rank in plan.ranks)


def _make_batch(scenario: Scenario, rank: DpRankPlan, device: str) -> PaddedBatch:
    width = scenario.hidden_size + scenario.experts

    def rows(count: int, stream: int) -> Tensor:
        seed = random.Random(f"{scenario.seed}/{stream}/{rank.dp_rank}").getrandbits(63)  # noqa: S311
        generator = torch.Generator().manual_seed(seed)
        # Mean 0, variance 1, near enough to normal. Unlike randn, which computes logarithms and cosines, sums of
        # uniform numbers are the same bits on every CPU, so that a saved run can be judged on another machine.
        a, b, c, d = (torch.rand(count, width, generator=generator, dtype=torch.float32) for _ in range(4))
        return (a + b + c + d - 2) * 3**0.5

    real = rows(rank.num_tokens, _REAL)
    num_pads = rank.padded_num_tokens - rank.num_tokens
    match scenario.pad_fill:
        case "random":
            pads = 10 * rows(num_pads, _PAD)
        case "stale":
            # The buffer held a batch that filled the bucket; only its head has been overwritten since.
            pads = rows(rank.padded_num_tokens, _EARLIER)[rank.num_tokens :]
        case fill:
            value = {"zeros": 0.0, "constant": CONSTANT, "nan": float("nan"), "inf": float("inf")}[fill]
            pads = torch.full((num_pads, width), value, dtype=torch.float32)
    everything = torch.cat([real, pads])
    hidden_states, router_logits = (
        everything[:, : scenario.hidden_size],
        everything[:, scenario.hidden_size :],
    )
    return PaddedBatch(
        rank.dp_rank,
        rank.num_tokens,
        rank.raw_length,
        hidden_states.contiguous().to(device),
        router_logits.contiguous().to(device),
    )
