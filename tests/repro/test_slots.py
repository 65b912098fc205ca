from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from repro.registry import (
    CudaGraphBufferRegistry,
    FillContext,
    ForwardBatch,
    GraphSlot,
    PaddingPolicy,
    build_decode_registry,
)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def registry_of(
    *slots: GraphSlot, device: str = "cpu", max_bs: int = 8, max_tokens: int = 8
) -> CudaGraphBufferRegistry:
    registry = CudaGraphBufferRegistry(device=device, max_bs=max_bs, max_num_tokens=max_tokens)
    for slot in slots:
        registry.register_slot(slot)
    return registry


def slot_of(name: str, **options: Any) -> GraphSlot:
    given_or_default = {"shape_fn": lambda _bs, tokens: (tokens,), "dtype": torch.int64, **options}
    return GraphSlot(name, **given_or_default)


def buffer_of(registry: CudaGraphBufferRegistry, name: str) -> Tensor:
    buffer = registry.get_slot(name).buffer
    assert buffer is not None
    return buffer


def fill(registry: CudaGraphBufferRegistry, raw: int, padded: int, **fields: Any) -> None:
    """One request a token, so that both axes have the same sizes."""
    registry.fill_from(
        ForwardBatch(batch_size=raw, **fields),
        raw_bs=raw,
        padded_bs=padded,
        raw_num_tokens=raw,
        padded_num_tokens=padded,
    )


class CopiesSeen(TorchDispatchMode):
    """Names of the copying operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("axis", ["bs", "tokens"])
@pytest.mark.parametrize(
    ("policy", "allocated", "after_long", "after_short"),
    [
        (PaddingPolicy.KEEP_PAD, 0, [1, 2, 3, 4, 5, 6, 0, 0], [7, 8, 3, 4, 5, 6, 0, 0]),
        (PaddingPolicy.FOREACH_COPY, 0, [1, 2, 3, 4, 5, 6, 0, 0], [7, 8, 3, 4, 5, 6, 0, 0]),
        (PaddingPolicy.ZERO, 0, [1, 2, 3, 4, 5, 6, 0, 0], [7, 8, 0, 0, 5, 6, 0, 0]),
        (PaddingPolicy.FILL_SENTINEL, -9, [1, 2, 3, 4, 5, 6, -9, -9], [7, 8, -9, -9, 5, 6, -9, -9]),
        (PaddingPolicy.FILL_ONCE, -9, [1, 2, 3, 4, 5, 6, -9, -9], [7, 8, 3, 4, 5, 6, -9, -9]),
    ],
)
def test_a_policy_decides_what_a_short_batch_finds_in_the_tail_of_a_long_one(
    axis: str, policy: PaddingPolicy, allocated: int, after_long: list[int], after_short: list[int]
) -> None:
    registry = registry_of(slot_of("input_ids", axis=axis, padding_policy=policy, pad_value=-9))
    assert buffer_of(registry, "input_ids").tolist() == [allocated] * 8
    fill(registry, 6, 8, input_ids=int64(1, 2, 3, 4, 5, 6))
    assert buffer_of(registry, "input_ids").tolist() == after_long
    fill(registry, 2, 4, input_ids=int64(7, 8))
    assert buffer_of(registry, "input_ids").tolist() == after_short


def test_fill_once_without_a_pad_value_starts_from_zeros() -> None:
    registry = registry_of(slot_of("input_ids", padding_policy=PaddingPolicy.FILL_ONCE))
    assert buffer_of(registry, "input_ids").tolist() == [0] * 8


def test_a_slot_without_an_axis_has_no_tail_and_is_copied_whole() -> None:
    registry = registry_of(slot_of("input_ids", axis="none", padding_policy=PaddingPolicy.ZERO))
    fill(registry, 2, 4, input_ids=torch.arange(8))
    assert buffer_of(registry, "input_ids").tolist() == list(range(8))


def test_the_two_axes_take_their_own_sizes() -> None:
    registry = registry_of(
        slot_of("seq_lens", axis="bs", padding_policy=PaddingPolicy.FILL_SENTINEL, pad_value=-1),
        slot_of("input_ids", padding_policy=PaddingPolicy.FILL_SENTINEL, pad_value=-1),
    )
    batch = ForwardBatch(batch_size=1, seq_lens=int64(4), input_ids=int64(1, 2, 3, 4))
    registry.fill_from(batch, raw_bs=1, padded_bs=2, raw_num_tokens=4, padded_num_tokens=6)
    view = registry.extract_buffer(padded_bs=2, padded_num_tokens=6, forward_batch_template=batch)
    assert view.seq_lens is not None
    assert view.input_ids is not None
    assert (view.batch_size, view.seq_lens.tolist()) == (2, [4, -1])
    assert view.input_ids.tolist() == [1, 2, 3, 4, -1, -1]


def test_an_idle_rank_fills_nothing_but_its_tail() -> None:
    registry = registry_of(slot_of("input_ids", padding_policy=PaddingPolicy.ZERO))
    fill(registry, 8, 8, input_ids=torch.arange(1, 9))
    fill(registry, 0, 4, input_ids=int64())
    assert buffer_of(registry, "input_ids").tolist() == [0, 0, 0, 0, 5, 6, 7, 8]


def test_a_field_that_the_batch_lacks_leaves_the_buffer_and_stays_none_in_the_view() -> None:
    registry = registry_of(slot_of("input_ids"), slot_of("positions"))
    fill(registry, 2, 2, input_ids=int64(1, 2), positions=int64(3, 4))
    batch = ForwardBatch(batch_size=2, input_ids=int64(5, 6))
    fill(registry, 2, 2, input_ids=batch.input_ids)
    assert buffer_of(registry, "positions").tolist() == [3, 4, 0, 0, 0, 0, 0, 0]
    view = registry.extract_buffer(padded_bs=2, padded_num_tokens=2, forward_batch_template=batch)
    assert view.positions is None


def test_what_no_slot_mirrors_is_carried_from_the_template_and_the_template_is_left_alone() -> None:
    registry = registry_of(slot_of("input_ids"))
    positions, input_ids = int64(3, 4), int64(1, 2)
    batch = ForwardBatch(batch_size=2, input_ids=input_ids, positions=positions, num_token_non_padded_cpu=2)
    view = registry.extract_buffer(padded_bs=4, padded_num_tokens=4, forward_batch_template=batch)
    assert view.positions is positions
    assert view.num_token_non_padded_cpu == 2
    assert batch.input_ids is input_ids
    assert batch.batch_size == 2


def test_addresses_stay_fixed_through_fills_and_views() -> None:
    registry = build_decode_registry(
        device="cpu",
        max_bs=8,
        max_num_token=8,
        seq_len_fill_value=1,
        cache_loc_dtype=torch.int64,
        attn_tp_size=1,
        attn_tp_rank=0,
    )
    addresses = {name: buffer_of(registry, name).data_ptr() for name in registry.slot_names()}
    for size in (8, 3, 5):
        fields = {name: torch.ones(size, dtype=torch.int64) for name in registry.slot_names()[:6]}
        batch = ForwardBatch(
            batch_size=size, mrope_positions=torch.ones(3, size, dtype=torch.int64), **fields
        )
        registry.fill_from(batch, raw_bs=size, padded_bs=8, raw_num_tokens=size, padded_num_tokens=8)
        view = registry.extract_buffer(padded_bs=8, padded_num_tokens=8, forward_batch_template=batch)
        assert {name: getattr(view, name).data_ptr() for name in registry.slot_names()} == addresses
    assert len(addresses) == 9


def test_a_slot_sliced_along_another_dimension_is_reset_and_copied_along_it() -> None:
    registry = registry_of(
        slot_of(
            "mrope_positions",
            shape_fn=lambda _bs, tokens: (3, tokens),
            slice_fn=lambda buffer, length: buffer[:, :length],
            padding_policy=PaddingPolicy.FILL_SENTINEL,
            pad_value=-1,
        )
    )
    fill(registry, 8, 8, mrope_positions=torch.arange(24).reshape(3, 8))
    batch = ForwardBatch(batch_size=2, mrope_positions=torch.full((3, 2), 50))
    fill(registry, 2, 5, mrope_positions=batch.mrope_positions)
    assert buffer_of(registry, "mrope_positions").tolist() == [
        [50, 50, -1, -1, -1, start + 5, start + 6, start + 7] for start in (0, 8, 16)
    ]
    view = registry.extract_buffer(padded_bs=5, padded_num_tokens=5, forward_batch_template=batch)
    assert view.mrope_positions is not None
    assert view.mrope_positions.tolist() == [[50, 50, -1, -1, -1]] * 3


def test_a_source_beside_the_batch_fills_its_own_length_and_none_fills_nothing() -> None:
    def residual(_batch: ForwardBatch, ctx: FillContext) -> Tensor | None:
        return None if ctx.pp_proxy_tensors is None else ctx.pp_proxy_tensors["residual"]

    registry = registry_of(
        slot_of("pp_proxy_tensors.residual", padding_policy=PaddingPolicy.KEEP_PAD, source_fn=residual)
    )
    batch = ForwardBatch(batch_size=4)
    sizes = {"raw_bs": 4, "padded_bs": 8, "raw_num_tokens": 4, "padded_num_tokens": 8}
    registry.fill_from(batch, **sizes, pp_proxy_tensors={"residual": int64(1, 2, 3)})
    registry.fill_from(batch, **sizes)
    assert buffer_of(registry, "pp_proxy_tensors.residual").tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    view = registry.extract_buffer(padded_bs=8, padded_num_tokens=8, forward_batch_template=batch)
    assert not hasattr(view, "pp_proxy_tensors.residual")
    with pytest.raises(ValueError, match=r"'pp_proxy_tensors.residual'.*shape \(9,\) does not fit \(8,\)"):
        registry.fill_from(batch, **sizes, pp_proxy_tensors={"residual": torch.arange(9)})


def test_tails_are_reset_before_the_copies_so_a_longer_source_stands() -> None:
    slot = slot_of(
        "input_ids", padding_policy=PaddingPolicy.ZERO, source_fn=lambda _batch, _ctx: int64(1, 2, 3)
    )
    registry = registry_of(slot)
    fill(registry, 2, 8)
    assert buffer_of(registry, "input_ids").tolist() == [1, 2, 3, 0, 0, 0, 0, 0]


def test_copies_go_in_one_call_for_each_pair_of_dtypes_and_host_slots_alone() -> None:
    registry = registry_of(
        slot_of("input_ids"),
        slot_of("positions"),
        slot_of("out_cache_loc", dtype=torch.int32),
        slot_of("seq_lens", axis="bs"),
        slot_of("seq_lens_cpu", axis="bs", device="cpu"),
        device="meta",
    )
    with CopiesSeen() as copies:
        fill(
            registry,
            2,
            2,
            input_ids=torch.zeros(2, dtype=torch.int64, device="meta"),
            positions=torch.zeros(2, dtype=torch.int64, device="meta"),
            out_cache_loc=torch.zeros(2, dtype=torch.int64, device="meta"),
            seq_lens=torch.zeros(2, dtype=torch.int32, device="meta"),
            seq_lens_cpu=int64(8, 9),
        )
    assert copies.names == ["aten.copy_.default", *["aten._foreach_copy_.default"] * 3]
    assert buffer_of(registry, "seq_lens_cpu")[:2].tolist() == [8, 9]


def test_grouped_copies_of_mixed_dtypes_convert_to_the_slots_dtype() -> None:
    registry = registry_of(
        slot_of("input_ids"),
        slot_of("positions"),
        slot_of("out_cache_loc", dtype=torch.int32),
        slot_of("input_embeds", dtype=torch.bfloat16),
    )
    embeds = torch.tensor([0.5, 1.5])
    fill(
        registry,
        2,
        2,
        input_ids=int64(1, 2),
        positions=int32(3, 4),
        out_cache_loc=int64(5, 6),
        input_embeds=embeds,
    )
    seen = {name: buffer_of(registry, name)[:2] for name in registry.slot_names()}
    assert {name: (head.dtype, head.tolist()) for name, head in seen.items()} == {
        "input_ids": (torch.int64, [1, 2]),
        "positions": (torch.int64, [3, 4]),
        "out_cache_loc": (torch.int32, [5, 6]),
        "input_embeds": (torch.bfloat16, [0.5, 1.5]),
    }


def test_hooks_run_after_all_copies_and_see_the_sizes_of_the_replay() -> None:
    seen: list[FillContext] = []

    def negate_the_other(buffer: Tensor, _batch: ForwardBatch, ctx: FillContext) -> None:
        seen.append(ctx)
        buffer.copy_(-buffer_of(registry, "positions"))

    registry = registry_of(
        slot_of("input_ids", copy_from_fb=False, post_fill=negate_the_other),
        slot_of("positions", padding_policy=PaddingPolicy.ZERO),
    )
    fill(registry, 8, 8, input_ids=torch.full((8,), 99), positions=torch.arange(8))
    fill(registry, 2, 4, positions=int64(5, 6))
    assert buffer_of(registry, "input_ids").tolist() == [-5, -6, 0, 0, -4, -5, -6, -7]
    assert seen == [FillContext(8, 8, 8, 8), FillContext(2, 4, 2, 4)]


def test_a_disabled_slot_is_known_by_name_and_nothing_else() -> None:
    registry = registry_of(slot_of("input_ids", enabled=False), slot_of("positions"))
    batch = ForwardBatch(batch_size=1, input_ids=int64(1), positions=int64(2))
    fill(registry, 1, 1, input_ids=batch.input_ids, positions=batch.positions)
    view = registry.extract_buffer(padded_bs=1, padded_num_tokens=1, forward_batch_template=batch)
    assert registry.get_slot("input_ids").buffer is None
    assert (registry.has_slot("input_ids"), registry.has_slot("positions")) == (False, True)
    assert registry.slot_names() == ["positions"]
    assert view.input_ids is batch.input_ids
    with pytest.raises(LookupError, match=r"'input_ids' has no buffer \(enabled=False\)"):
        registry.get_slot("input_ids").slice_for(bs=1, num_tokens=1)
    with pytest.raises(ValueError, match="'input_ids' is registered already"):
        registry.register_slot(slot_of("input_ids"))


def test_a_bound_tensor_is_adopted_with_its_values_and_its_address() -> None:
    registry = registry_of()
    mine = torch.full((8,), 7)
    slot = registry.register_slot(
        slot_of("input_ids", padding_policy=PaddingPolicy.FILL_ONCE, pad_value=1), mine
    )
    assert slot is registry.get_slot("input_ids")
    assert slot.buffer is mine
    fill(registry, 2, 4, input_ids=int64(1, 2))
    assert mine.tolist() == [1, 2, 7, 7, 7, 7, 7, 7]


def test_one_description_serves_two_registries_with_a_buffer_each() -> None:
    description = slot_of("input_ids")
    first, second = registry_of(description), registry_of(description)
    fill(first, 2, 2, input_ids=int64(1, 2))
    assert buffer_of(second, "input_ids").tolist() == [0] * 8


@pytest.mark.parametrize("bound", [torch.zeros(7, dtype=torch.int64), torch.zeros(8, dtype=torch.int32)])
def test_a_bound_tensor_of_another_shape_or_dtype_is_refused(bound: Tensor) -> None:
    registry = registry_of()
    with pytest.raises(
        ValueError, match=rf"'input_ids'.*{bound.dtype}.*\({len(bound)},\).*torch.int64.*\(8,\)"
    ):
        registry.register_slot(slot_of("input_ids"), bound)
    assert registry.slot_names() == []


def test_a_slot_is_refused_for_its_axis_its_missing_pad_value_or_its_name() -> None:
    with pytest.raises(ValueError, match="'input_ids': axis 'rows' is none of bs, tokens, none"):
        slot_of("input_ids", axis="rows")
    with pytest.raises(ValueError, match="'input_ids': FILL_SENTINEL has no pad_value"):
        slot_of("input_ids", padding_policy=PaddingPolicy.FILL_SENTINEL)
    registry = registry_of(slot_of("input_ids"))
    with pytest.raises(ValueError, match="'input_ids' is registered already"):
        registry.register_slot(slot_of("input_ids"))
    with pytest.raises(LookupError, match="no slot 'positions'; registered: input_ids"):
        registry.get_slot("positions")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((5, 4, 4, 4), "raw_bs=5 is not within 0 to padded_bs=4"),
        ((4, 4, 5, 4), "raw_num_tokens=5 is not within 0 to padded_num_tokens=4"),
        ((-1, 4, 4, 4), "raw_bs=-1 is not within 0 to padded_bs=4"),
        ((4, 9, 4, 4), "padded_bs=9 is more than the 8 that the buffers hold"),
        ((4, 4, 4, 17), "padded_num_tokens=17 is more than the 16 that the buffers hold"),
    ],
)
def test_a_batch_that_the_buffers_cannot_hold_is_refused(sizes: tuple[int, ...], message: str) -> None:
    registry = registry_of(slot_of("input_ids"), max_tokens=16)
    names = ("raw_bs", "padded_bs", "raw_num_tokens", "padded_num_tokens")
    with pytest.raises(ValueError, match=message):
        registry.fill_from(ForwardBatch(batch_size=1), **dict(zip(names, sizes, strict=True)))


def test_a_view_larger_than_the_buffers_is_refused() -> None:
    registry = registry_of(slot_of("input_ids"))
    batch = ForwardBatch(batch_size=1)
    with pytest.raises(ValueError, match="padded_num_tokens=9 is more than the 8"):
        registry.extract_buffer(padded_bs=1, padded_num_tokens=9, forward_batch_template=batch)
    with pytest.raises(ValueError, match="padded_bs=9 is more than the 8"):
        registry.extract_buffer(padded_bs=9, padded_num_tokens=1, forward_batch_template=batch)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (int64(1), r"'positions': the batch's shape \(1,\) does not fit \(3,\), for raw_bs=3"),
        (torch.tensor(1), r"'positions': the batch's shape \(1,\) does not fit \(3,\)"),
        (int64(1, 2, 3, 4), r"'positions': the batch's shape \(4,\) does not fit \(3,\)"),
        ([1, 2, 3], "'positions': the batch carries a list, not a tensor"),
    ],
)
def test_a_field_of_another_shape_is_refused_before_any_buffer_changes(field: Any, message: str) -> None:
    registry = registry_of(
        slot_of("input_ids", padding_policy=PaddingPolicy.FILL_SENTINEL, pad_value=-1), slot_of("positions")
    )
    fill(registry, 8, 8, input_ids=torch.arange(8), positions=torch.arange(8))
    with pytest.raises(ValueError, match=message):
        fill(registry, 3, 4, input_ids=int64(9, 9, 9), positions=field)
    assert buffer_of(registry, "input_ids").tolist() == list(range(8))
    assert buffer_of(registry, "positions").tolist() == list(range(8))
