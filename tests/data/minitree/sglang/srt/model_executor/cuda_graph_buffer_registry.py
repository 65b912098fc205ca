"""Fixed buffers of the graphs, and how a batch comes into them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import (
    ForwardBatch,
    compute_local_num_token_non_padded,
    compute_local_num_token_non_padded_cpu,
)
from sglang.srt.model_executor.input_buffers import GraphInputBuffers
from sglang.srt.runtime_context import get_parallel


class FillContext(NamedTuple):
    raw_bs: int
    padded_bs: int
    raw_num_tokens: int
    padded_num_tokens: int


@dataclass
class GraphSlot:
    buffer: torch.Tensor
    source: Callable[[Any], torch.Tensor] | None
    post_fill: Callable[[torch.Tensor, ForwardBatch, FillContext], None] | None = None

    def slice_for(self, bs: int, num_tokens: int) -> torch.Tensor:
        """What a graph reads."""
        return self.buffer


class GraphBufferRegistry:
    def __init__(self) -> None:
        self._slots: dict[str, GraphSlot] = {}

    def add(self, name: str, slot: GraphSlot) -> None:
        self._slots[name] = slot

    def get_slot(self, name: str) -> GraphSlot:
        return self._slots[name]

    def fill_from(
        self, fb, *, raw_bs, padded_bs, raw_num_tokens, padded_num_tokens, pp_proxy_tensors=None
    ) -> None:
        context = FillContext(raw_bs, padded_bs, raw_num_tokens, padded_num_tokens)
        for slot in self._slots.values():
            if slot.source is not None:
                values = slot.source(fb)
                slot.buffer[: len(values)].copy_(values)
        for slot in self._slots.values():
            if slot.post_fill is not None:
                slot.post_fill(slot.buffer, fb, context)


def _registry(device, max_bs, max_num_token, cache_loc_dtype, share_pool) -> tuple[GraphBufferRegistry, Any]:
    pool = GraphInputBuffers(share_pool)
    registry = GraphBufferRegistry()
    for name, size, dtype in (
        ("input_ids", max_num_token, torch.int64),
        ("positions", max_num_token, torch.int64),
        ("out_cache_loc", max_num_token, cache_loc_dtype),
        ("req_pool_indices", max_bs, torch.int64),
        ("seq_lens", max_bs, torch.int64),
    ):
        registry.add(
            name, GraphSlot(pool.take(name, size, dtype, device), lambda fb, name=name: getattr(fb, name))
        )
    return registry, pool.take("num_token_non_padded", 1, torch.int32, device)


def _replicated(_num_tokens: int) -> bool:
    return False


def build_prefill_registry(
    *,
    device: torch.device,
    max_bs: int,
    max_num_token: int,
    cache_loc_dtype: torch.dtype,
    enable_num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    enable_prefill_cp: bool = False,
    attn_tp_sharded_fn: Callable[[int], bool] = _replicated,
    share_pool: bool = True,
) -> GraphBufferRegistry:
    registry, buffer = _registry(device, max_bs, max_num_token, cache_loc_dtype, share_pool)

    def post_fill(buffer: torch.Tensor, fb: ForwardBatch, context: FillContext) -> None:
        padded = context.padded_num_tokens
        sharded = require_gathered_buffer and not enable_prefill_cp and attn_tp_sharded_fn(padded)
        buffer.fill_(
            compute_local_num_token_non_padded_cpu(
                fb.global_num_token_non_padded_cpu, padded, sharded=sharded
            )
        )

    if enable_num_token_non_padded:
        registry.add("num_token_non_padded", GraphSlot(buffer, None, post_fill))
    return registry


def build_decode_registry(
    *,
    device: torch.device,
    max_bs: int,
    max_num_token: int,
    cache_loc_dtype: torch.dtype,
    seq_len_fill_value: int,
    enable_num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    attn_tp_sharded_fn: Callable[[int], bool] = _replicated,
    share_pool: bool = True,
) -> GraphBufferRegistry:
    registry, buffer = _registry(device, max_bs, max_num_token, cache_loc_dtype, share_pool)
    registry.get_slot("seq_lens").buffer.fill_(seq_len_fill_value)

    def post_fill(buffer: torch.Tensor, fb: ForwardBatch, context: FillContext) -> None:
        padded = context.padded_num_tokens
        sharded = require_gathered_buffer and attn_tp_sharded_fn(padded) and get_parallel().attn_tp_size > 1
        buffer.copy_(
            compute_local_num_token_non_padded(fb.global_num_token_non_padded, padded, sharded=sharded)
        )

    if enable_num_token_non_padded:
        registry.add("num_token_non_padded", GraphSlot(buffer, None, post_fill))
    return registry
