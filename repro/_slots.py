"""Slots, and the registry that fills them from a batch; ``repro.registry`` says which slots a graph has.

Names, policies and phases are those of SGLang's ``cuda_graph_buffer_registry.py`` (0.5.17).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Axis = Literal["bs", "tokens", "none"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBatch:
    """The part of a batch that slots mirror: bs requests, T token rows, D entries of a DP gather.

    int64 unless said otherwise; a field that is None is not carried by this batch.

    Attributes:
        input_ids, positions, out_cache_loc: ``[T]``; ``out_cache_loc`` in the cache's own index dtype.
        mrope_positions: ``[3, T]``.
        input_embeds: ``[T, H]``, in the model's dtype.
        req_pool_indices, seq_lens, seq_lens_cpu: ``[bs]``; the last one on the host.
        encoder_lens: ``[bs]``, int32.
        num_token_non_padded: int32, one element. Before prefill already localised to this attention-TP rank,
            before decode the whole count of this DP rank.
        num_token_non_padded_cpu: the whole count of this DP rank, n, never localised.
        global_num_tokens_gpu, global_num_tokens_for_logprob_gpu: ``[D]``, int32, padded rows of each DP rank.
    """

    batch_size: int
    input_ids: Tensor | None = None
    positions: Tensor | None = None
    out_cache_loc: Tensor | None = None
    mrope_positions: Tensor | None = None
    input_embeds: Tensor | None = None
    req_pool_indices: Tensor | None = None
    seq_lens: Tensor | None = None
    seq_lens_cpu: Tensor | None = None
    encoder_lens: Tensor | None = None
    num_token_non_padded: Tensor | None = None
    num_token_non_padded_cpu: int | None = None
    global_num_tokens_gpu: Tensor | None = None
    global_num_tokens_for_logprob_gpu: Tensor | None = None


class PaddingPolicy(Enum):
    """What a replay does to a slot's tail, the entries ``[raw:padded]``, before the batch is copied in."""

    KEEP_PAD = "keep_pad"
    """Left as it is: whoever registers the slot says that nobody reads the tail."""
    FILL_SENTINEL = "fill_sentinel"
    """Reset to ``pad_value``, which the whole buffer holds from its allocation on."""
    ZERO = "zero"
    """Reset to 0."""
    FOREACH_COPY = "foreach_copy"
    """Left as the last replay wrote it; zeros at first."""
    FILL_ONCE = "fill_once"
    """Filled with ``pad_value`` (None: zeros) at allocation, never again: longer batches show through."""


@dataclass(frozen=True)
class FillContext:
    """Sizes of one replay, and what comes beside the batch. ``padded_num_tokens`` is the bucket, B."""

    raw_bs: int
    padded_bs: int
    raw_num_tokens: int
    padded_num_tokens: int
    pp_proxy_tensors: Mapping[str, Tensor] | None = None


PostFill = Callable[[Tensor, ForwardBatch, FillContext], None]


@dataclass(frozen=True)
class GraphSlot:
    """One fixed buffer that a graph reads, named after the batch's field that it mirrors.

    A dotted name (``"pp_proxy_tensors.residual"``) mirrors something that is not a field of the batch.

    Attributes:
        shape_fn: ``(max_bs, max_num_tokens) -> shape`` of the whole buffer.
        axis: what the sliced dimension counts; ``"none"``: no tail, the whole buffer at every replay.
        device: None is the registry's; ``"cpu"`` makes a host slot.
        enabled: False keeps the name known, with no buffer behind it.
        copy_from_fb: False where the value is not the batch's, but a hook's or the graph's own.
        post_fill: ``(buffer, forward_batch, ctx)``, called after all copies.
        slice_fn: ``(buffer, n) -> view`` of the first n entries, where they do not lie along dimension 0.
        source_fn: ``(forward_batch, ctx)`` gives what is copied in place of the field of that name, to the
            buffer's first ``len(source)`` entries; None copies nothing this time.
        buffer: set by ``CudaGraphBufferRegistry.register_slot``.

    Raises:
        ValueError: an unknown axis, or FILL_SENTINEL without a ``pad_value``.
    """

    name: str
    shape_fn: Callable[[int, int], tuple[int, ...]]
    dtype: torch.dtype
    axis: Axis = "tokens"
    device: torch.device | str | None = None
    padding_policy: PaddingPolicy = PaddingPolicy.FOREACH_COPY
    pad_value: int | float | bool | None = None
    enabled: bool = True
    copy_from_fb: bool = True
    post_fill: PostFill | None = None
    slice_fn: Callable[[Tensor, int], Tensor] | None = None
    source_fn: Callable[[ForwardBatch, FillContext], Tensor | None] | None = None
    buffer: Tensor | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.axis not in get_args(Axis):
            raise ValueError(f"slot {self.name!r}: axis {self.axis!r} is none of {', '.join(get_args(Axis))}")
        if self.padding_policy is PaddingPolicy.FILL_SENTINEL and self.pad_value is None:
            raise ValueError(f"slot {self.name!r}: FILL_SENTINEL has no pad_value to fill with")

    @property
    def computed(self) -> bool:
        """Whether the value stands in the buffer even when the batch carries nothing of that name."""
        return self.post_fill is not None or self.source_fn is not None or not self.copy_from_fb

    def slice_for(self, *, bs: int, num_tokens: int) -> Tensor:
        """The view that a batch of that size uses.

        Raises:
            LookupError: the slot has no buffer (disabled, or not registered).
        """
        return self._first({"bs": bs, "tokens": num_tokens, "none": None}[self.axis])

    def _first(self, length: int | None) -> Tensor:
        if self.buffer is None:
            raise LookupError(f"slot {self.name!r} has no buffer (enabled={self.enabled})")
        if length is None:
            return self.buffer
        return self.buffer[:length] if self.slice_fn is None else self.slice_fn(self.buffer, length)

    def reset_padding(self, ctx: FillContext) -> None:
        """Overwrite the tail where the policy is FILL_SENTINEL or ZERO."""
        value = 0 if self.padding_policy is PaddingPolicy.ZERO else self.pad_value
        if self.padding_policy not in (PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL) or value is None:
            return
        head = self.slice_for(bs=ctx.raw_bs, num_tokens=ctx.raw_num_tokens)
        whole = self.slice_for(bs=ctx.padded_bs, num_tokens=ctx.padded_num_tokens)
        for dim, (kept, length) in enumerate(zip(head.shape, whole.shape, strict=True)):
            if kept < length:
                whole.narrow(dim, kept, length - kept).fill_(value)

    def copy_pair(self, forward_batch: ForwardBatch, ctx: FillContext) -> tuple[Tensor, Tensor] | None:
        """``(destination view, source)`` of this replay's copy, or None where there is nothing to copy.

        Raises:
            ValueError: a source that is no tensor, or not of the destination's shape (0-dim counts as
                ``[1]``); a copy would broadcast it.
        """
        if not self.copy_from_fb:
            return None
        carried: object = getattr(forward_batch, self.name, None)
        if self.source_fn is not None:
            carried = self.source_fn(forward_batch, ctx)
        if carried is None:
            return None
        if not isinstance(carried, Tensor):
            raise ValueError(
                f"slot {self.name!r}: the batch carries a {type(carried).__name__}, not a tensor"
            )
        source = carried if carried.dim() else carried.reshape(1)
        if self.source_fn is None:
            target = self.slice_for(bs=ctx.raw_bs, num_tokens=ctx.raw_num_tokens)
        else:
            target = self._first(source.shape[0])
        if source.shape != target.shape:
            raise ValueError(
                f"slot {self.name!r}: the batch's shape {tuple(source.shape)} does not fit "
                f"{tuple(target.shape)}, for raw_bs={ctx.raw_bs} and raw_num_tokens={ctx.raw_num_tokens}"
            )
        return target, source


class CudaGraphBufferRegistry:
    """Slots by name, in the order of registration; room for ``max_bs`` requests, ``max_num_tokens`` rows."""

    def __init__(self, *, device: torch.device | str, max_bs: int, max_num_tokens: int) -> None:
        self.device = torch.device(device)
        self.max_bs = max_bs
        self.max_num_tokens = max_num_tokens
        self._slots: dict[str, GraphSlot] = {}

    def register_slot(self, slot: GraphSlot, bind: Tensor | None = None) -> GraphSlot:
        """Allocate a buffer, or adopt ``bind`` with the values that it holds; returns the slot that has it.

        A new buffer holds ``pad_value`` under FILL_SENTINEL and FILL_ONCE, and zeros otherwise.

        Raises:
            ValueError: the name is taken, or ``bind`` has another shape or dtype than the slot.
        """
        if slot.name in self._slots:
            raise ValueError(f"slot {slot.name!r} is registered already; each name is one buffer")
        registered = replace(slot, buffer=self._buffer_for(slot, bind) if slot.enabled else None)
        self._slots[slot.name] = registered
        return registered

    def _buffer_for(self, slot: GraphSlot, bind: Tensor | None) -> Tensor:
        shape = tuple(slot.shape_fn(self.max_bs, self.max_num_tokens))
        if bind is not None:
            if tuple(bind.shape) != shape or bind.dtype != slot.dtype:
                raise ValueError(
                    f"slot {slot.name!r}: cannot bind a {bind.dtype} tensor of shape {tuple(bind.shape)}; "
                    f"the slot is {slot.dtype} of shape {shape}"
                )
            return bind
        buffer = torch.zeros(shape, dtype=slot.dtype, device=slot.device or self.device)
        filled = slot.padding_policy in (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.FILL_ONCE)
        return buffer if slot.pad_value is None or not filled else buffer.fill_(slot.pad_value)

    def has_slot(self, name: str) -> bool:
        """Whether the slot is registered and enabled."""
        return name in self._slots and self._slots[name].enabled

    def get_slot(self, name: str) -> GraphSlot:
        """The slot, enabled or not.

        Raises:
            LookupError: no slot of that name.
        """
        if name not in self._slots:
            raise LookupError(f"no slot {name!r}; registered: {', '.join(self._slots) or 'none'}")
        return self._slots[name]

    def slot_names(self) -> list[str]:
        """Names of the enabled slots."""
        return [slot.name for slot in self._enabled()]

    def _enabled(self) -> list[GraphSlot]:
        return [slot for slot in self._slots.values() if slot.enabled]

    def fill_from(
        self,
        forward_batch: ForwardBatch,
        *,
        raw_bs: int,
        padded_bs: int,
        raw_num_tokens: int,
        padded_num_tokens: int,
        pp_proxy_tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Bring the buffers to what a replay of this batch reads: reset tails, copy, call ``post_fill``.

        A slot that the batch does not carry is not copied.

        Raises:
            ValueError: sizes that do not fit (0 <= raw <= padded <= maximum), or a field of another shape;
                every buffer is then as it was.
            LookupError: the batch lacks what a ``post_fill`` computes from.
        """
        self._check_size("bs", raw_bs, padded_bs, self.max_bs)
        self._check_size("num_tokens", raw_num_tokens, padded_num_tokens, self.max_num_tokens)
        ctx = FillContext(raw_bs, padded_bs, raw_num_tokens, padded_num_tokens, pp_proxy_tensors)
        slots = self._enabled()
        pairs = [pair for slot in slots if (pair := slot.copy_pair(forward_batch, ctx)) is not None]
        for slot in slots:
            slot.reset_padding(ctx)
        self._copy(pairs)
        for slot in slots:
            if slot.post_fill is not None and slot.buffer is not None:
                slot.post_fill(slot.buffer, forward_batch, ctx)

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        # One foreach call takes one pair of dtypes and one device.
        groups: defaultdict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]]
        groups = defaultdict(lambda: ([], []))
        for target, source in pairs:
            if target.device.type != self.device.type:
                target.copy_(source)
            else:
                targets, sources = groups[target.dtype, source.dtype]
                targets.append(target)
                sources.append(source)
        for targets, sources in groups.values():
            torch._foreach_copy_(targets, sources)

    def extract_buffer(
        self, *, padded_bs: int, padded_num_tokens: int, forward_batch_template: ForwardBatch
    ) -> ForwardBatch:
        """The template with ``batch_size`` padded and slots in place of its fields: views at fixed addresses.

        A plain slot that the template lacks stays None there: its buffer holds an earlier batch's values.
        Slots with dotted names are left out.

        Raises:
            ValueError: a padded size above the maximum.
        """
        self._check_size("bs", 0, padded_bs, self.max_bs)
        self._check_size("num_tokens", 0, padded_num_tokens, self.max_num_tokens)
        views: dict[str, Any] = {
            slot.name: slot.slice_for(bs=padded_bs, num_tokens=padded_num_tokens)
            for slot in self._enabled()
            if "." not in slot.name
            and (slot.computed or getattr(forward_batch_template, slot.name, None) is not None)
        }
        return replace(forward_batch_template, batch_size=padded_bs, **views)

    @staticmethod
    def _check_size(what: str, raw: int, padded: int, maximum: int) -> None:
        if not 0 <= raw <= padded:
            raise ValueError(f"raw_{what}={raw} is not within 0 to padded_{what}={padded}")
        if padded > maximum:
            raise ValueError(f"padded_{what}={padded} is more than the {maximum} that the buffers hold")
