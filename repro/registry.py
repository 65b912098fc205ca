"""Fixed buffers that CUDA graphs read, and how each replay fills them: SGLang's registry, as of 0.5.17.

Symbols are those of ``repro.plan``. The slot that decides which rows are masked is ``num_token_non_padded``.
Only it differs between pre-fix (0.5.16) and fixed (0.5.17) prefill: see ``build_prefill_registry``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from repro._slots import (
    CudaGraphBufferRegistry,
    FillContext,
    ForwardBatch,
    GraphSlot,
    PaddingPolicy,
    PostFill,
)
from repro.plan import attn_tp_local_shard_bounds, compute_local_num_token_non_padded_cpu

__all__ = [
    "CudaGraphBufferRegistry",
    "FillContext",
    "ForwardBatch",
    "GraphSlot",
    "PaddingPolicy",
    "build_decode_registry",
    "build_prefill_registry",
    "compute_local_num_token_non_padded",
]


def compute_local_num_token_non_padded(
    global_num_token_non_padded: Tensor,
    num_tokens_per_dp: int,
    *,
    attn_tp_size: int,
    attn_tp_rank: int,
    sharded: bool = True,
) -> Tensor:
    """``repro.plan.compute_local_num_token_non_padded_cpu`` on a tensor; the result keeps shape and dtype."""
    tokens_per_rank, rank_offset = attn_tp_local_shard_bounds(
        num_tokens_per_dp, attn_tp_size=attn_tp_size, attn_tp_rank=attn_tp_rank, sharded=sharded
    )
    return torch.clamp(global_num_token_non_padded - rank_offset, min=0, max=tokens_per_rank)


@dataclass(frozen=True)
class _AttnTp:
    """This rank's place in attention TP, and the two ``post_fill`` hooks that localise the count to it.

    ``sharded_fn(padded_num_tokens)`` says whether the forward is cut into shards; None: always.
    """

    size: int
    rank: int
    sharded_fn: Callable[[int], bool] | None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"attn_tp_rank={self.rank} is not within 0 to {self.size - 1} (attn_tp_size={self.size})"
            )

    def is_sharded(self, padded_num_tokens: int) -> bool:
        return self.sharded_fn is None or self.sharded_fn(padded_num_tokens)

    def post_fill_from_host(self, buffer: Tensor, forward_batch: ForwardBatch, ctx: FillContext) -> None:
        """Writes this rank's count, worked out from the batch's host int: nothing is copied to the device."""
        if forward_batch.num_token_non_padded_cpu is None:
            raise LookupError(
                "slot 'num_token_non_padded': the batch has no num_token_non_padded_cpu to localise"
            )
        rows = ctx.padded_num_tokens
        buffer.fill_(
            compute_local_num_token_non_padded_cpu(
                forward_batch.num_token_non_padded_cpu,
                rows,
                attn_tp_size=self.size,
                attn_tp_rank=self.rank,
                sharded=self.is_sharded(rows),
            )
        )

    def post_fill_from_device(self, buffer: Tensor, forward_batch: ForwardBatch, ctx: FillContext) -> None:
        """Writes this rank's count, worked out on the device from the batch's whole count [1] int32."""
        if forward_batch.num_token_non_padded is None:
            raise LookupError(
                "slot 'num_token_non_padded': the batch has no num_token_non_padded to localise"
            )
        rows = ctx.padded_num_tokens
        buffer.copy_(
            compute_local_num_token_non_padded(
                forward_batch.num_token_non_padded,
                rows,
                attn_tp_size=self.size,
                attn_tp_rank=self.rank,
                sharded=self.is_sharded(rows),
            )
        )


def _token_slot(name: str, dtype: torch.dtype, policy: PaddingPolicy = PaddingPolicy.ZERO) -> GraphSlot:
    return GraphSlot(name, lambda _bs, tokens: (tokens,), dtype, "tokens", padding_policy=policy)


def _request_slot(
    name: str, policy: PaddingPolicy, pad_value: int = 0, dtype: torch.dtype = torch.int64
) -> GraphSlot:
    return GraphSlot(name, lambda bs, _tokens: (bs,), dtype, "bs", padding_policy=policy, pad_value=pad_value)


def _scalar_slot(
    name: str, post_fill: PostFill | None, *, length: int = 1, copy_from_fb: bool = True
) -> GraphSlot:
    return GraphSlot(
        name,
        lambda _bs, _tokens: (length,),
        torch.int32,
        "none",
        copy_from_fb=copy_from_fb,
        post_fill=post_fill,
    )


_MROPE_POSITIONS = GraphSlot(
    "mrope_positions",
    lambda _bs, tokens: (3, tokens),
    torch.int64,
    "tokens",
    padding_policy=PaddingPolicy.ZERO,
    slice_fn=lambda buffer, length: buffer[:, :length],
)


def _register_all(
    registry: CudaGraphBufferRegistry, slots: Iterable[GraphSlot], source: object | None
) -> CudaGraphBufferRegistry:
    for slot in slots:
        bind = None if source is None else getattr(source, slot.name, None)
        if source is not None and bind is None:
            raise LookupError(f"slot {slot.name!r}: the source of buffers has none of that name")
        registry.register_slot(slot, bind)
    return registry


def build_decode_registry(
    *,
    device: torch.device | str,
    max_bs: int,
    max_num_token: int,
    seq_len_fill_value: int,
    cache_loc_dtype: torch.dtype,
    attn_tp_size: int,
    attn_tp_rank: int,
    is_encoder_decoder: bool = False,
    encoder_len_fill_value: int = 0,
    enable_num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    enable_prefill_cp: bool = False,
    require_mlp_tp_gather: bool = False,
    dp_size: int = 1,
    attn_tp_sharded_fn: Callable[[int], bool] | None = None,
    source: object | None = None,
) -> CudaGraphBufferRegistry:
    """The buffers of decode graphs. Rows are requests times tokens per request.

    ``num_token_non_padded`` is localised on the device where gathered and not CP, against the padded rows.
    The two ``global_num_tokens`` slots hold the padded rows where gathered, in ``dp_size`` entries if
    ``require_mlp_tp_gather``, else in one. ``source`` has the buffers to adopt, one attribute a slot.

    Raises:
        ValueError: a rank outside of attention TP, or a ``source`` whose buffer has another shape or dtype.
        LookupError: a ``source`` without a slot's buffer.
    """
    attn_tp = _AttnTp(attn_tp_size, attn_tp_rank, attn_tp_sharded_fn)
    slots = [
        _token_slot("input_ids", torch.int64, PaddingPolicy.FOREACH_COPY),
        _token_slot("positions", torch.int64),
        _token_slot("out_cache_loc", cache_loc_dtype),
        _request_slot("req_pool_indices", PaddingPolicy.ZERO),
        _request_slot("seq_lens", PaddingPolicy.FILL_SENTINEL, seq_len_fill_value),
        replace(_request_slot("seq_lens_cpu", PaddingPolicy.FILL_SENTINEL, seq_len_fill_value), device="cpu"),
        _MROPE_POSITIONS,
    ]
    if is_encoder_decoder:
        slots.append(
            _request_slot("encoder_lens", PaddingPolicy.FILL_ONCE, encoder_len_fill_value, torch.int32)
        )
    if enable_num_token_non_padded:
        recompute = require_gathered_buffer and not enable_prefill_cp
        slots.append(
            _scalar_slot("num_token_non_padded", attn_tp.post_fill_from_device if recompute else None)
        )
    padded_rows = _fill_padded_num_tokens if require_gathered_buffer else None
    length = dp_size if require_mlp_tp_gather else 1
    for name in ("global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"):
        slots.append(_scalar_slot(name, padded_rows, length=length, copy_from_fb=False))
    registry = CudaGraphBufferRegistry(device=device, max_bs=max_bs, max_num_tokens=max_num_token)
    return _register_all(registry, slots, source)


def _fill_padded_num_tokens(buffer: Tensor, _forward_batch: ForwardBatch, ctx: FillContext) -> None:
    buffer.fill_(ctx.padded_num_tokens)


def build_prefill_registry(
    *,
    device: torch.device | str,
    max_bs: int,
    max_num_token: int,
    cache_loc_dtype: torch.dtype,
    attn_tp_size: int,
    attn_tp_rank: int,
    is_multimodal: bool = False,
    hidden_size: int = 0,
    embed_dtype: torch.dtype | None = None,
    enable_num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    enable_prefill_cp: bool = False,
    attn_tp_sharded_fn: Callable[[int], bool] | None = None,
    recompute_num_token_non_padded: bool = True,
    source: object | None = None,
) -> CudaGraphBufferRegistry:
    """The token-axis buffers of prefill graphs.

    ``num_token_non_padded``, where enabled, is the batch's own tensor, localised against L before the bucket
    was known. ``recompute_num_token_non_padded`` is the fix: where gathered and not CP, ``post_fill`` writes
    the host int ``num_token_non_padded_cpu``, localised against B. False is pre-fix: the copy stands.
    ``input_embeds`` (multimodal only) is written inside the graph, so a replay only zeroes its tail.
    ``source`` has the buffers to adopt, one attribute a slot.

    Raises:
        ValueError: a rank outside of attention TP, a multimodal registry without ``embed_dtype``, or a
            ``source`` whose buffer has another shape or dtype.
        LookupError: a ``source`` without a slot's buffer.
    """
    attn_tp = _AttnTp(attn_tp_size, attn_tp_rank, attn_tp_sharded_fn)
    slots = [
        _token_slot("input_ids", torch.int64),
        _token_slot("positions", torch.int64),
        _token_slot("out_cache_loc", cache_loc_dtype),
    ]
    if is_multimodal:
        if embed_dtype is None:
            raise ValueError("slot 'input_embeds': embed_dtype is None; a multimodal registry needs one")
        slots.append(_MROPE_POSITIONS)
        embeds = _token_slot("input_embeds", embed_dtype)
        slots.append(replace(embeds, shape_fn=lambda _bs, rows: (rows, hidden_size), copy_from_fb=False))
    if enable_num_token_non_padded:
        recompute = recompute_num_token_non_padded and require_gathered_buffer and not enable_prefill_cp
        slots.append(_scalar_slot("num_token_non_padded", attn_tp.post_fill_from_host if recompute else None))
    registry = CudaGraphBufferRegistry(device=device, max_bs=max_bs, max_num_tokens=max_num_token)
    return _register_all(registry, slots, source)
