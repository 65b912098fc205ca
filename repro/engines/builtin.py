"""The built-in twins: SGLang's behaviour before and after the fix, and after each half of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from repro import topk
from repro.case import Case
from repro.engines.protocol import Engine, Observation, RankObservation
from repro.errors import NotVerifiedError, one_line
from repro.plan import DpRankPlan, Shard, compute_local_num_token_non_padded_cpu
from repro.registry import ForwardBatch, build_decode_registry, build_prefill_registry
from repro.routers import call_router
from repro.topk import ExpertLocationDispatchInfo, ScoringFunc, TopKConfig, TopKOutput, TopKRules

_SCORING: dict[str, ScoringFunc] = {"sigmoid": "sigmoid", "sqrt-softplus": "sqrtsoftplus"}


@dataclass(frozen=True)
class BuiltinEngine:
    """``rules`` are the mask's half of the fix, ``recompute_num_token_non_padded`` the count's half."""

    name: str
    rules: TopKRules
    recompute_num_token_non_padded: bool

    def observe(self, case: Case) -> Observation:
        ranks = tuple(
            self._observe_shard(case, rank, shard) for rank in case.plan.ranks for shard in rank.shards
        )
        return Observation(self.name, ranks)

    def _observe_shard(self, case: Case, rank: DpRankPlan, shard: Shard) -> RankObservation:
        count = self.local_count(case, rank, shard)
        error = None
        try:
            output = self.route(case, shard, count)
        except AssertionError as err:
            # A pre-fix caller could only leave the count out, which is how pads came to be routed.
            error = one_line(err)
            output = self.route(case, shard, None)
        return RankObservation(
            shard.dp_rank,
            shard.attn_tp_rank,
            int(count.item()) if error is None else None,
            # Copies: a routing function may hand out the same buffer at every call.
            output.topk_ids.cpu().clone(),
            output.topk_weights.cpu().clone(),
            error,
        )

    def local_count(self, case: Case, rank: DpRankPlan, shard: Shard) -> Tensor:
        """``num_token_non_padded`` of one shard, [1] int32: the true one in a ``mask`` case, else the engine's."""
        if case.fault == "mask":
            return torch.tensor([shard.count_bucket], dtype=torch.int32, device=case.device)
        if rank.eager:
            # No graph, no buffer: the forward reads the batch's own count, cut from the length it runs at.
            return self._carried_count(case, rank.num_tokens, rank.raw_length, shard.attn_tp_rank)
        return self._replayed_count(case, rank, shard)

    def _is_sharded(self, case: Case) -> bool:
        """Whether the engine takes a gathered forward for sharded: before the fix it knew no other."""
        return not (self.recompute_num_token_non_padded and case.scenario.replicated)

    def _carried_count(self, case: Case, num_tokens: int, raw_length: int, attn_tp_rank: int) -> Tensor:
        """What a batch carries into replay: localised against the raw length where the forward gathers."""
        count = compute_local_num_token_non_padded_cpu(
            num_tokens,
            raw_length,
            attn_tp_size=case.plan.attn_tp_size,
            attn_tp_rank=attn_tp_rank,
            sharded=case.scenario.gathered and self._is_sharded(case),
        )
        return torch.tensor([count], dtype=torch.int32, device=case.device)

    def _replayed_count(self, case: Case, rank: DpRankPlan, shard: Shard) -> Tensor:
        """What the graph's buffer holds at the replay of this batch, which comes after one that was full."""
        scenario = case.scenario
        parameters: dict[str, Any] = {
            "device": torch.device(case.device),
            "max_bs": rank.padded_num_tokens // scenario.tokens_per_request,
            "max_num_token": rank.padded_num_tokens,
            "cache_loc_dtype": torch.int64,
            "attn_tp_size": case.plan.attn_tp_size,
            "attn_tp_rank": shard.attn_tp_rank,
            "enable_num_token_non_padded": True,
            "require_gathered_buffer": scenario.require_gathered_buffer,
            "enable_prefill_cp": scenario.enable_prefill_cp,
            "attn_tp_sharded_fn": lambda _rows: self._is_sharded(case),
        }
        if scenario.mode == "decode":
            registry = build_decode_registry(seq_len_fill_value=1, **parameters)
        else:
            registry = build_prefill_registry(
                recompute_num_token_non_padded=self.recompute_num_token_non_padded, **parameters
            )
        full = rank.padded_num_tokens
        for num_tokens, raw_length in ((full, full), (rank.num_tokens, rank.raw_length)):
            batch = self._forward_batch(case, num_tokens, raw_length, shard.attn_tp_rank)
            registry.fill_from(
                batch,
                raw_bs=batch.batch_size,
                padded_bs=parameters["max_bs"],
                raw_num_tokens=raw_length,
                padded_num_tokens=full,
            )
        slot = registry.get_slot("num_token_non_padded")
        return slot.slice_for(bs=parameters["max_bs"], num_tokens=full)

    def _forward_batch(self, case: Case, num_tokens: int, raw_length: int, attn_tp_rank: int) -> ForwardBatch:
        if case.scenario.mode == "decode":
            carried = torch.tensor([num_tokens], dtype=torch.int32, device=case.device)
        else:
            carried = self._carried_count(case, num_tokens, raw_length, attn_tp_rank)
        positions = torch.arange(raw_length, device=case.device)
        return ForwardBatch(
            batch_size=-(-raw_length // case.scenario.tokens_per_request),
            input_ids=positions,
            positions=positions,
            out_cache_loc=positions,
            num_token_non_padded=carried,
            num_token_non_padded_cpu=num_tokens,
        )

    def route(self, case: Case, shard: Shard, count: Tensor | None) -> TopKOutput:
        """``select_experts`` on the rows of one shard."""
        batch = case.batches[shard.dp_rank]
        rows = slice(shard.row_start, shard.row_end)
        try:
            return topk.select_experts(
                # Copies: a user's routing function may write into what it is given.
                batch.hidden_states[rows].clone(),
                batch.router_logits[rows].clone(),
                topk_config(case),
                rules=self.rules,
                platform=case.scenario.platform,
                num_token_non_padded=count,
                expert_location_dispatch_info=dispatch_info(case, shard),
            )
        except (IndexError, RuntimeError) as err:
            # The remap, met by an id that a user's routing function made up for a pad row.
            raise NotVerifiedError(f"engine {self.name}: {one_line(err)}") from err


def topk_config(case: Case) -> TopKConfig:
    """The layer's routing, as ``select_experts`` takes it."""
    scenario = case.scenario
    custom, bias = None, None
    if case.routing_function is not None:
        custom = partial(call_router, case.routing_function, name=scenario.router)
    if case.layer.correction_bias is not None:
        bias = torch.tensor(case.layer.correction_bias, device=case.device)
    return TopKConfig(
        top_k=scenario.top_k,
        use_grouped_topk=scenario.branch in ("grouped", "biased-grouped"),
        num_expert_group=scenario.num_expert_group,
        topk_group=scenario.topk_group,
        renormalize=scenario.renormalize,
        num_fused_shared_experts=scenario.num_fused_shared_experts,
        custom_routing_function=custom,
        correction_bias=bias,
        torch_native=scenario.branch == "torch-native",
        routed_scaling_factor=scenario.routed_scaling_factor,
        scoring_func=_SCORING.get(scenario.branch, "softmax"),
    )


def dispatch_info(case: Case, shard: Shard) -> ExpertLocationDispatchInfo | None:
    """The EPLB maps of the layer as this rank holds them; None where experts are not remapped."""
    if case.scenario.eplb == "none":
        return None
    copies = case.layer.logical_to_all_physical
    most = max(map(len, copies))
    global_rank = shard.dp_rank * case.plan.attn_tp_size + shard.attn_tp_rank
    return ExpertLocationDispatchInfo(
        ep_dispatch_algorithm=case.scenario.eplb,
        partial_logical_to_rank_dispatch_physical_map=torch.tensor(
            [physical[global_rank % len(physical)] for physical in copies], device=case.device
        ),
        partial_logical_to_all_physical_map=torch.tensor(
            [physical + (-1,) * (most - len(physical)) for physical in copies], device=case.device
        ),
        partial_logical_to_all_physical_map_num_valid=torch.tensor(
            list(map(len, copies)), device=case.device
        ),
        num_physical_experts=len(case.layer.physical_to_logical),
    )


PREFIX = BuiltinEngine("prefix", topk.PREFIX, recompute_num_token_non_padded=False)
FIXED_MASK = BuiltinEngine("fixed-mask", topk.FIXED, recompute_num_token_non_padded=False)
FIXED_COUNT = BuiltinEngine("fixed-count", topk.PREFIX, recompute_num_token_non_padded=True)
FIXED = BuiltinEngine("fixed", topk.FIXED, recompute_num_token_non_padded=True)

BUILTIN_ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (PREFIX, FIXED_MASK, FIXED_COUNT, FIXED)
}
