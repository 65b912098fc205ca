"""The padding plan against worked figures and against rows walked one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.errors import PlanError
from repro.plan import (
    align_up,
    choose_bucket,
    compute_local_num_token_non_padded_cpu,
    plan_padding,
    raw_lengths,
    uneven_shard_bounds,
)


def localised(n: int, cut_from: int, attn_tp_size: int) -> list[int]:
    return [
        compute_local_num_token_non_padded_cpu(n, cut_from, attn_tp_size=attn_tp_size, attn_tp_rank=r)
        for r in range(attn_tp_size)
    ]


@pytest.mark.parametrize(
    ("n", "bucket", "attn_tp", "bucket_counts", "raw_counts", "masked", "leaked"),
    [
        (10, 16, 2, [8, 2], [5, 5], 3, 3),
        (12, 16, 4, [4, 4, 4, 0], [3, 3, 3, 3], 3, 3),
        (20, 64, 4, [16, 4, 0, 0], [5, 5, 5, 5], 11, 11),
        (100, 128, 4, [32, 32, 32, 4], [25, 25, 25, 25], 21, 21),
        (2700, 2816, 8, [352] * 7 + [236], [338] * 7 + [334], 98, 98),
        (1000, 2048, 8, [256, 256, 256, 232, 0, 0, 0, 0], [125] * 8, 500, 500),
        (7, 8, 2, [4, 3], [4, 3], 0, 0),
    ],
)
def test_counts_against_bucket_and_raw_length_are_the_worked_figures(
    n, bucket, attn_tp, bucket_counts, raw_counts, masked, leaked
):
    shards = plan_padding([n], attn_tp_size=attn_tp, buckets=[bucket]).shards
    assert [shard.count_bucket for shard in shards] == bucket_counts
    assert [shard.count_raw for shard in shards] == raw_counts
    assert [shard.real_rows for shard in shards] == bucket_counts
    assert sum(shard.real_rows_masked for shard in shards) == masked
    assert sum(shard.pads_routed for shard in shards) == leaked


def test_2700_tokens_are_padded_to_2704_before_the_bucket():
    assert plan_padding([2700], attn_tp_size=8, buckets=[2816]).ranks[0].raw_length == 2704


def test_six_of_eight_rows_over_four_ranks_are_2_2_2_0_on_each_of_two_dp_ranks():
    plan = plan_padding([6, 6], attn_tp_size=4, buckets=[8])
    assert [shard.count_bucket for shard in plan.shards] == [2, 2, 2, 0] * 2


@pytest.mark.parametrize(("n", "bucket"), [(5, 8), (7, 8), (3, 4)])
def test_the_smallest_bucket_that_holds_the_length_is_chosen(n, bucket):
    assert choose_bucket(n, [1, 2, 4, 8, 16]) == bucket
    assert plan_padding([n], attn_tp_size=1, buckets=[8, 16, 4, 2, 8]).ranks[0].padded_num_tokens == bucket


def test_one_busy_dp_rank_makes_three_idle_ones_hold_48768_pads_in_max_len_mode():
    plan = plan_padding([16256, 0, 0, 0], attn_tp_size=1, buckets=[16256])
    assert [shard.pad_rows for shard in plan.shards] == [0, 16256, 16256, 16256]
    assert (
        2 * sum(shard.pad_rows for shard in plan.shards) == 97_536
    )  # routes, if every pad keeps two experts


def test_bucket_28_over_eight_ranks_leaves_four_rows_to_nobody():
    rank = plan_padding([20], attn_tp_size=8, buckets=[28]).ranks[0]
    assert rank.unowned_rows == range(24, 28)
    assert [(shard.row_start, shard.row_end) for shard in rank.shards] == [
        (3 * r, 3 * r + 3) for r in range(8)
    ]


def test_tensor_split_cuts_six_rows_over_four_ranks_as_2_2_1_1_where_floor_drops_two():
    uneven = plan_padding([4], attn_tp_size=4, buckets=[6], uneven=True).ranks[0]
    floor = plan_padding([4], attn_tp_size=4, buckets=[6]).ranks[0]
    assert [shard.rows for shard in uneven.shards] == [2, 2, 1, 1]
    assert [shard.real_rows for shard in uneven.shards] == [2, 2, 0, 0]
    assert [shard.rows for shard in floor.shards] == [1, 1, 1, 1]
    assert (uneven.unowned_rows, floor.unowned_rows) == (range(6, 6), range(4, 6))


def test_lengths_are_aligned_to_attention_tp_and_to_the_extra_multiple():
    assert raw_lengths([10, 3], attn_tp_size=4, align=6) == (12, 12)
    assert raw_lengths([10, 3, 0], attn_tp_size=4, dp_padding="sum-len") == (12, 4, 0)


def test_sum_len_ranks_keep_their_own_bucket_and_an_idle_rank_counts_nothing():
    plan = plan_padding([20, 0], attn_tp_size=2, buckets=[8, 16, 32], dp_padding="sum-len")
    assert [(rank.raw_length, rank.padded_num_tokens) for rank in plan.ranks] == [(20, 32), (0, 8)]
    assert [shard.count_bucket for shard in plan.ranks[1].shards] == [0, 0]


def test_a_bucket_beyond_the_padding_factor_means_eager_on_the_raw_length():
    eager = plan_padding([20], attn_tp_size=4, buckets=[64], max_padding_factor=2).ranks[0]
    graph = plan_padding([32], attn_tp_size=4, buckets=[64], max_padding_factor=2).ranks[0]
    assert (eager.eager, eager.padded_num_tokens) == (True, 20)
    assert (graph.eager, graph.padded_num_tokens) == (False, 64)


def test_a_replicated_forward_keeps_every_row_and_the_whole_count_on_every_rank():
    shards = plan_padding([20], attn_tp_size=4, buckets=[64], gathered=False).shards
    assert [(s.row_start, s.row_end, s.real_rows, s.count_bucket, s.count_raw) for s in shards] == [
        (0, 64, 20, 20, 20)
    ] * 4


def test_a_pre_fix_engine_localises_a_replicated_forward_that_gathers():
    shards = plan_padding([20], attn_tp_size=4, buckets=[64], sharded=False).shards
    assert [(s.real_rows, s.count_bucket, s.count_raw, s.real_rows_masked) for s in shards] == [
        (20, 20, 5, 15)
    ] * 4


def test_a_given_raw_length_is_taken_as_it_is():
    rank = plan_padding([20], attn_tp_size=4, buckets=[64], raw_length=30).ranks[0]
    assert [shard.count_raw for shard in rank.shards] == [7, 7, 6, 0]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"tokens": []}, "tokens"),
        ({"tokens": [-1]}, "tokens"),
        ({"attn_tp_size": 0}, "attn_tp"),
        ({"buckets": []}, "bucket"),
        ({"buckets": [0]}, "bucket"),
        ({"buckets": [8]}, "bucket"),
        ({"buckets": [8, 16]}, "buckets"),
        ({"align": 0}, "align"),
        ({"raw_length": 19}, "raw_length"),
        ({"raw_length": 65}, "bucket"),
    ],
)
def test_a_plan_that_cannot_be_made_names_the_field(arguments, field):
    with pytest.raises(PlanError) as caught:
        plan_padding(**{"tokens": [20], "attn_tp_size": 4, "buckets": [64]} | arguments)
    assert caught.value.field == field


lengths = st.integers(0, 5000)


@given(n=lengths, extra=lengths, attn_tp=st.integers(1, 64))
def test_local_counts_sum_to_the_real_rows_that_any_shard_owns(n, extra, attn_tp):
    rows = n + extra
    assert sum(localised(n, rows, attn_tp)) == min(n, attn_tp * (rows // attn_tp))


@given(n=st.integers(0, 300), extra=st.integers(0, 300), attn_tp=st.integers(1, 20))
def test_local_counts_are_those_of_rows_walked_one_by_one(n, extra, attn_tp):
    rows, size = n + extra, (n + extra) // attn_tp
    walked = [sum(r * size <= row < (r + 1) * size for row in range(n)) for r in range(attn_tp)]
    assert localised(n, rows, attn_tp) == walked


@given(n=lengths, attn_tp=st.integers(1, 64), extra=lengths)
def test_totals_cannot_see_the_fault_when_the_raw_length_divides(n, attn_tp, extra):
    raw = align_up(n, attn_tp)
    bucket = align_up(raw + extra, attn_tp)
    assert sum(localised(n, raw, attn_tp)) == sum(localised(n, bucket, attn_tp)) == n


@given(rows=st.integers(0, 500), attn_tp=st.integers(1, 40))
def test_uneven_shards_are_contiguous_and_differ_by_one_row_at_most(rows, attn_tp):
    bounds = [uneven_shard_bounds(rows, attn_tp_size=attn_tp, attn_tp_rank=r) for r in range(attn_tp)]
    sizes = [size for size, _ in bounds]
    assert [start for _, start in bounds] == [sum(sizes[:r]) for r in range(attn_tp)]
    assert sum(sizes) == rows
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
