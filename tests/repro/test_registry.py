import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import repro.registry
from repro.plan import compute_local_num_token_non_padded_cpu
from repro.registry import (
    CudaGraphBufferRegistry,
    FillContext,
    ForwardBatch,
    GraphSlot,
    build_decode_registry,
    build_prefill_registry,
    compute_local_num_token_non_padded,
)

COUNTS = Path(__file__).parents[1] / "data" / "counts.jsonl"
# n = L = 20 tokens, a = 4: shards of 5 rows against L, of 16 rows against B = 64.
CARRIED, BUCKET_COUNTS = (5, 5, 5, 5), (16, 4, 0, 0)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def buffer_of(registry: CudaGraphBufferRegistry, name: str) -> Tensor:
    buffer = registry.get_slot(name).buffer
    assert buffer is not None
    return buffer


class RecordedOps(TorchDispatchMode):
    """Every operator that runs inside, by name, and the storages that its tensors live in."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        tensors = [value for value in (*args, result) if isinstance(value, Tensor)]
        self.storages |= {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return result


def test_the_public_names_are_these() -> None:
    assert sorted(repro.registry.__all__) == [
        "CudaGraphBufferRegistry",
        "FillContext",
        "ForwardBatch",
        "GraphSlot",
        "PaddingPolicy",
        "build_decode_registry",
        "build_prefill_registry",
        "compute_local_num_token_non_padded",
    ]


def prefill(attn_tp_size: int, attn_tp_rank: int, **options: Any) -> CudaGraphBufferRegistry:
    defaults = {"enable_num_token_non_padded": True, "require_gathered_buffer": True, "max_num_token": 64}
    return build_prefill_registry(
        device="cpu",
        max_bs=1,
        cache_loc_dtype=torch.int64,
        attn_tp_size=attn_tp_size,
        attn_tp_rank=attn_tp_rank,
        **{**defaults, **options},
    )


def decode(attn_tp_size: int, attn_tp_rank: int, **options: Any) -> CudaGraphBufferRegistry:
    defaults = {"enable_num_token_non_padded": True, "require_gathered_buffer": True}
    return build_decode_registry(
        device="cpu",
        max_bs=64,
        max_num_token=64,
        seq_len_fill_value=1,
        cache_loc_dtype=torch.int32,
        attn_tp_size=attn_tp_size,
        attn_tp_rank=attn_tp_rank,
        **{**defaults, **options},
    )


def count_after(
    registry: CudaGraphBufferRegistry, carried: int | None, whole: int | None, *, raw: int, bucket: int
) -> int:
    """What ``num_token_non_padded`` holds after one fill of a batch of one request."""
    batch = ForwardBatch(
        batch_size=1,
        num_token_non_padded=None if carried is None else torch.tensor(carried, dtype=torch.int32),
        num_token_non_padded_cpu=whole,
    )
    registry.fill_from(batch, raw_bs=1, padded_bs=1, raw_num_tokens=raw, padded_num_tokens=bucket)
    view = registry.extract_buffer(padded_bs=1, padded_num_tokens=bucket, forward_batch_template=batch)
    assert view.num_token_non_padded is buffer_of(registry, "num_token_non_padded")
    assert (view.num_token_non_padded.dtype, view.num_token_non_padded.shape) == (torch.int32, (1,))
    return int(view.num_token_non_padded)


def layout(registry: CudaGraphBufferRegistry) -> dict[str, tuple[object, ...]]:
    slots = [registry.get_slot(name) for name in registry.slot_names()]
    return {
        slot.name: (
            tuple(buffer_of(registry, slot.name).shape),
            slot.dtype,
            slot.axis,
            slot.padding_policy.name,
            slot.copy_from_fb,
        )
        for slot in slots
    }


def test_prefill_has_these_slots() -> None:
    registry = prefill(1, 0, is_multimodal=True, hidden_size=4, embed_dtype=torch.bfloat16)
    assert layout(registry) == {
        "input_ids": ((64,), torch.int64, "tokens", "ZERO", True),
        "positions": ((64,), torch.int64, "tokens", "ZERO", True),
        "out_cache_loc": ((64,), torch.int64, "tokens", "ZERO", True),
        "mrope_positions": ((3, 64), torch.int64, "tokens", "ZERO", True),
        "input_embeds": ((64, 4), torch.bfloat16, "tokens", "ZERO", False),
        "num_token_non_padded": ((1,), torch.int32, "none", "FOREACH_COPY", True),
    }
    text_only = prefill(1, 0, enable_num_token_non_padded=False)
    assert text_only.slot_names() == ["input_ids", "positions", "out_cache_loc"]
    with pytest.raises(ValueError, match="'input_embeds': embed_dtype is None"):
        prefill(1, 0, is_multimodal=True, hidden_size=4)


def test_decode_has_these_slots() -> None:
    registry = decode(
        1, 0, is_encoder_decoder=True, encoder_len_fill_value=3, require_mlp_tp_gather=True, dp_size=2
    )
    assert layout(registry) == {
        "input_ids": ((64,), torch.int64, "tokens", "FOREACH_COPY", True),
        "positions": ((64,), torch.int64, "tokens", "ZERO", True),
        "out_cache_loc": ((64,), torch.int32, "tokens", "ZERO", True),
        "req_pool_indices": ((64,), torch.int64, "bs", "ZERO", True),
        "seq_lens": ((64,), torch.int64, "bs", "FILL_SENTINEL", True),
        "seq_lens_cpu": ((64,), torch.int64, "bs", "FILL_SENTINEL", True),
        "mrope_positions": ((3, 64), torch.int64, "tokens", "ZERO", True),
        "encoder_lens": ((64,), torch.int32, "bs", "FILL_ONCE", True),
        "num_token_non_padded": ((1,), torch.int32, "none", "FOREACH_COPY", True),
        "global_num_tokens_gpu": ((2,), torch.int32, "none", "FOREACH_COPY", False),
        "global_num_tokens_for_logprob_gpu": ((2,), torch.int32, "none", "FOREACH_COPY", False),
    }
    assert set(buffer_of(registry, "seq_lens").tolist() + buffer_of(registry, "seq_lens_cpu").tolist()) == {1}
    assert set(buffer_of(registry, "encoder_lens").tolist()) == {3}
    assert registry.get_slot("seq_lens_cpu").device == "cpu"


@pytest.mark.parametrize(("gathered", "expected"), [(True, [8]), (False, [0])])
def test_decode_writes_the_padded_rows_into_the_global_counts_only_where_gathered(
    gathered: bool, expected: list[int]
) -> None:
    registry = decode(1, 0, enable_num_token_non_padded=False, require_gathered_buffer=gathered)
    batch = ForwardBatch(batch_size=5, global_num_tokens_gpu=int32(99))
    registry.fill_from(batch, raw_bs=5, padded_bs=8, raw_num_tokens=5, padded_num_tokens=8)
    assert buffer_of(registry, "global_num_tokens_gpu").tolist() == expected
    assert buffer_of(registry, "global_num_tokens_for_logprob_gpu").tolist() == expected


def test_builders_adopt_the_buffers_of_a_source_and_name_the_one_that_it_lacks() -> None:
    own = prefill(1, 0)
    source = SimpleNamespace(**{name: buffer_of(own, name) for name in own.slot_names()})
    adopted = prefill(1, 0, source=source)
    assert all(buffer_of(adopted, name) is getattr(source, name) for name in own.slot_names())
    with pytest.raises(LookupError, match="'req_pool_indices': the source of buffers has none"):
        decode(
            1,
            0,
            source=SimpleNamespace(**vars(source) | {"out_cache_loc": torch.zeros(64, dtype=torch.int32)}),
        )


@pytest.mark.parametrize("build", [prefill, decode])
@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_of_attention_tp_is_refused(build: Any, rank: int) -> None:
    with pytest.raises(ValueError, match=rf"attn_tp_rank={rank} is not within 0 to 1 \(attn_tp_size=2\)"):
        build(2, rank)


def test_fixed_prefill_localises_against_the_bucket() -> None:
    counts = tuple(count_after(prefill(4, rank), CARRIED[rank], 20, raw=20, bucket=64) for rank in range(4))
    assert counts == BUCKET_COUNTS


def test_post_fill_gives_rank_0_a_full_shard_and_rank_1_the_real_rows_that_are_left() -> None:
    raw_localised = compute_local_num_token_non_padded_cpu(10, 10, attn_tp_size=2, attn_tp_rank=0)
    first = count_after(prefill(2, 0), raw_localised, 10, raw=10, bucket=16)
    second = count_after(prefill(2, 1), raw_localised, 10, raw=10, bucket=16)
    assert (raw_localised, first, second) == (5, 16 // 2, 10 - 16 // 2)


@pytest.mark.parametrize("unlocalised", [{"require_gathered_buffer": False}, {"enable_prefill_cp": True}])
@pytest.mark.parametrize("build", [prefill, decode])
def test_the_copied_count_stands_where_not_gathered_and_under_prefill_cp(
    build: Any, unlocalised: dict[str, bool]
) -> None:
    counts = [count_after(build(4, rank, **unlocalised), 7, 20, raw=20, bucket=64) for rank in range(4)]
    assert counts == [7, 7, 7, 7]


def test_pre_fix_prefill_copies_the_count_of_the_batch_as_it_is() -> None:
    registries = [prefill(4, rank, recompute_num_token_non_padded=False) for rank in range(4)]
    counts = [count_after(registry, 5, 20, raw=20, bucket=64) for registry in registries]
    assert counts == [5, 5, 5, 5]


@pytest.mark.parametrize("build", [prefill, decode])
def test_a_replicated_forward_has_every_real_row_on_every_rank(build: Any) -> None:
    asked: list[int] = []

    def sharded(padded_num_tokens: int) -> bool:
        asked.append(padded_num_tokens)
        return padded_num_tokens > 32

    registry = build(4, 3, attn_tp_sharded_fn=sharded)
    assert count_after(registry, 20, 20, raw=20, bucket=32) == 20
    assert count_after(registry, 50, 50, raw=50, bucket=64) == 2
    assert asked == [32, 64]


def test_decode_localises_the_copied_count_against_the_padded_rows() -> None:
    counts = tuple(count_after(decode(4, rank), 20, None, raw=20, bucket=64) for rank in range(4))
    assert counts == BUCKET_COUNTS


def test_a_replay_never_reads_the_count_of_the_one_before() -> None:
    registry = prefill(2, 0)
    assert [count_after(registry, 0, n, raw=n, bucket=16) for n in (16, 3, 0, 10)] == [8, 3, 0, 8]


def test_a_batch_without_the_whole_count_is_refused() -> None:
    with pytest.raises(
        LookupError, match="'num_token_non_padded': the batch has no num_token_non_padded_cpu"
    ):
        count_after(prefill(2, 0), 5, None, raw=10, bucket=16)
    with pytest.raises(LookupError, match="'num_token_non_padded': the batch has no num_token_non_padded to"):
        count_after(decode(2, 0), None, 10, raw=10, bucket=16)


def record_post_fill(slot: GraphSlot, hook: Any) -> RecordedOps:
    batch = ForwardBatch(batch_size=1, num_token_non_padded=int32(5), num_token_non_padded_cpu=20)
    with RecordedOps() as ops:
        hook(slot.buffer, batch, FillContext(1, 1, 20, 64))
    return ops


def test_fixed_post_fill_makes_no_copy_and_no_tensor() -> None:
    slot = prefill(4, 1).get_slot("num_token_non_padded")
    assert slot.buffer is not None
    ops = record_post_fill(slot, slot.post_fill)
    assert ops.names == ["aten.fill_.Scalar"]
    assert ops.storages == {slot.buffer.untyped_storage().data_ptr()}
    assert slot.buffer.tolist() == [4]


def test_a_post_fill_that_stages_a_host_tensor_would_show_as_a_copy_from_another_storage() -> None:
    def staging(buffer: Tensor, batch: ForwardBatch, ctx: FillContext) -> None:
        assert batch.num_token_non_padded_cpu is not None
        local = compute_local_num_token_non_padded_cpu(
            batch.num_token_non_padded_cpu, ctx.padded_num_tokens, attn_tp_size=4, attn_tp_rank=1
        )
        buffer.copy_(torch.tensor([local], dtype=torch.int32))

    slot = prefill(4, 1).get_slot("num_token_non_padded")
    ops = record_post_fill(slot, staging)
    assert "aten.copy_.default" in ops.names
    assert len(ops.storages) > 1
    assert slot.buffer is not None
    assert slot.buffer.tolist() == [4]


@given(
    count=st.integers(0, 5000),
    rows=st.integers(0, 5000),
    attn_tp_size=st.integers(1, 16),
    sharded=st.booleans(),
    data=st.data(),
)
def test_the_tensor_count_is_the_int_count(
    count: int, rows: int, attn_tp_size: int, sharded: bool, data: st.DataObject
) -> None:
    where = {
        "attn_tp_size": attn_tp_size,
        "attn_tp_rank": data.draw(st.integers(0, attn_tp_size - 1)),
        "sharded": sharded,
    }
    local = compute_local_num_token_non_padded(int32(count), rows, **where)
    assert local.dtype == torch.int32
    assert local.tolist() == [compute_local_num_token_non_padded_cpu(count, rows, **where)]


def test_slots_hold_what_released_sglang_left_in_them() -> None:
    """0.5.16 is pre-fix, 0.5.17 fixed; a forward that a version cannot say is replicated ran sharded."""
    rows = 0
    for line in COUNTS.read_text().splitlines():
        case = json.loads(line)
        for rank, carried in enumerate(case["fb_num_token_non_padded"]):
            registry = prefill(
                case["attn_tp_size"],
                rank,
                max_num_token=case["bucket"],
                require_gathered_buffer=case["require_gathered_buffer"],
                enable_prefill_cp=case["enable_prefill_cp"],
                attn_tp_sharded_fn=(lambda _rows: False) if case["replicated_applied"] else None,
                recompute_num_token_non_padded={"0.5.16": False, "0.5.17": True}[case["version"]],
            )
            seen = count_after(registry, carried, case["fb_global"], raw=case["raw"], bucket=case["bucket"])
            assert seen == case["value"][rank], (case, rank)
            rows += 1
    assert rows == 1218
