"""The oracle against figures worked by hand, and against torch where torch has the function."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.batch import PaddedBatch, make_layer
from repro.scenario import Scenario
from repro.truth import RowTruth, another_choice, find_truth


def truth_of(logits, scenario: Scenario):
    batch = PaddedBatch(0, len(logits), len(logits), torch.zeros(len(logits), 4), torch.tensor(logits))
    return find_truth(scenario, scenario.plan(), [batch], make_layer(scenario))


def route(logits, **values) -> RowTruth:
    defaults = {
        "tokens": (1,),
        "bucket": 1,
        "attn_tp": 1,
        "experts": len(logits),
        "top_k": 2,
        "num_expert_group": 2,
    }
    scenario = Scenario(**{**defaults, "topk_group": 1, **values})
    return truth_of([logits], scenario).routing[0][0]


LOG = [math.log(x) for x in (1, 4, 2, 1)]  # softmax: 1/8, 1/2, 1/4, 1/8


@pytest.mark.parametrize(
    ("values", "ids", "weights"),
    [
        ({"branch": "softmax", "renormalize": False}, (1, 2), (1 / 2, 1 / 4)),
        ({"branch": "softmax"}, (1, 2), (2 / 3, 1 / 3)),
        ({"branch": "torch-native"}, (1, 2), (2 / 3, 1 / 3)),
        ({"branch": "sigmoid", "renormalize": False}, (1, 2), (4 / 5, 2 / 3)),
        ({"branch": "grouped", "renormalize": False}, (1, 0), (1 / 2, 1 / 8)),
        (
            {"branch": "sqrt-softplus", "renormalize": False},
            (1, 2),
            (math.sqrt(math.log(5)), math.sqrt(math.log(3))),
        ),
        ({"router": "sigmoid-top1", "top_k": 1}, (1,), (4 / 5,)),
        ({"router": "degenerate"}, (0, 1), (1 / 2, 1 / 2)),
        ({"router": "softmax", "num_fused_shared_experts": 1}, (1, 2, 4), (2 / 3, 1 / 3, 1)),
        (
            {"router": "softmax", "num_fused_shared_experts": 2, "routed_scaling_factor": 2.0},
            (1, 2, 4, 5),
            (2 / 3, 1 / 3, 1 / 2, 1 / 2),
        ),
    ],
)
def test_a_row_is_routed_as_worked_by_hand(values, ids, weights):
    row = route(LOG, **values)
    assert row.ids == ids
    assert row.weights == pytest.approx(weights, rel=1e-6)


def test_softcap_squeezes_large_logits_before_the_softmax():
    row = route([0.0, 1000.0, 29.0, 0.0], router="softcap", renormalize=False)
    capped = [30 * math.tanh(x / 30) for x in (0, 1000, 29, 0)]
    total = sum(math.exp(x) for x in capped)
    assert row.ids == (1, 2)
    assert row.weights == pytest.approx([math.exp(capped[1]) / total, math.exp(capped[2]) / total], rel=1e-6)


def test_sparse_mixer_weighs_each_winner_among_its_close_rivals_only():
    # 2.0 and 1.97 are within 2 % of each other; 1.0 is not.
    row = route([1.0, 2.0, 1.97, -3.0], router="sparse-mixer", renormalize=False)
    assert row.ids == (1, 2)
    assert row.weights == pytest.approx([1 / (1 + math.exp(-0.03)), 1.0], rel=1e-5)


def test_sparse_mixer_survives_logits_of_zero():
    assert route([0.0, -1.0, 0.0, -2.0], router="sparse-mixer").ids == (0, 2)


def test_the_correction_bias_decides_the_choice_and_the_unbiased_score_is_the_weight():
    scenario = Scenario(tokens=(8,), bucket=8, attn_tp=1, branch="biased-grouped", renormalize=False, seed=3)
    bias = torch.tensor(make_layer(scenario).correction_bias, dtype=torch.float64)
    logits = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    scores = logits.double().sigmoid()
    groups = (scores + bias).view(8, 4, 4).topk(2, dim=-1).values.sum(-1).topk(2, dim=-1).indices
    allowed = torch.zeros(8, 4, dtype=torch.bool).scatter_(1, groups, True).repeat_interleave(4, dim=1)
    ids = (scores + bias).masked_fill(~allowed, -math.inf).topk(2, dim=-1).indices
    rows = truth_of(logits.tolist(), scenario).routing[0]
    assert [list(row.ids) for row in rows] == ids.tolist()
    for row, chosen, score in zip(rows, ids, scores, strict=True):
        assert list(row.weights) == pytest.approx(score[chosen].tolist(), rel=1e-6)


def test_only_experts_at_the_cut_are_tied():
    assert route([2.0, 1.0, 1.0, 0.0], branch="softmax").tied == {1, 2}
    assert route([2.0, 1.0, 1.0 + 1e-6, 0.0], branch="softmax").tied == {1, 2}
    assert route([2.0, 1.0, 1.001, 0.0], branch="softmax").tied == frozenset()
    assert route([1.0, 1.0], branch="softmax").tied == frozenset()


def test_another_choice_is_right_among_tied_experts_only():
    scenario = Scenario(
        tokens=(1,), bucket=1, attn_tp=1, branch="softmax", experts=4, num_fused_shared_experts=1
    )
    row = truth_of([[2.0, 1.0, 1.0, 0.0]], scenario).routing[0][0]
    other = another_choice(row, [2, 0], scenario)
    assert other is not None
    assert other.ids == (2, 0, 4)
    assert other.weights == pytest.approx((1 / (1 + math.e), math.e / (1 + math.e), 1.0))
    for wrong in ([0, 3], [1, 2], [0, 0], [0], [0, 1, 2]):
        assert another_choice(row, wrong, scenario) is None


def test_a_row_whose_groups_tie_or_whose_neighbourhood_does_is_ambiguous():
    assert route([1.0, 0.0, 1.0, 0.0], branch="grouped").ambiguous
    assert not route([1.0, 0.0, 1.1, 0.0], branch="grouped").ambiguous
    # 0.98 is 2 % below 1.0: in or out by rounding.
    assert route([1.0, 0.98, 0.5, -1.0], router="sparse-mixer").ambiguous
    assert route([1.0, 1.0, 0.5, -1.0], router="sparse-mixer").ambiguous
    assert not route([1.0, 0.9, 0.5, -1.0], router="sparse-mixer").ambiguous


@settings(deadline=None)
@given(n=st.integers(0, 50), extra=st.integers(0, 50), attn_tp=st.integers(1, 9), replicated=st.booleans())
def test_every_row_is_owned_as_the_scenario_says_and_real_below_the_count_only(n, extra, attn_tp, replicated):
    length = -(-n // attn_tp) * attn_tp
    scenario = Scenario(tokens=(n,), bucket=max(length + extra, 1), attn_tp=attn_tp, replicated=replicated)
    plan = scenario.plan()
    batch = PaddedBatch(0, n, length, torch.zeros(n, 4), torch.zeros(n, 16))
    truth = find_truth(scenario, plan, [batch], make_layer(scenario))
    rows = [row for shard in truth.shards for row in shard.rows] + list(truth.unowned[0])
    bucket = plan.ranks[0].padded_num_tokens
    assert sorted(rows) == sorted(list(range(bucket)) * (attn_tp if replicated else 1))
    assert all(
        real == (row < n) for shard in truth.shards for row, real in zip(shard.rows, shard.real, strict=True)
    )
    # The oracle walks rows, the plan computes: they must agree, and share nothing.
    assert [shard.num_token_non_padded for shard in truth.shards] == [
        shard.real_rows for shard in plan.shards
    ]
    assert truth.unowned[0] == tuple(plan.ranks[0].unowned_rows) or replicated


def test_a_routing_function_of_ones_own_is_taken_at_its_word():
    scenario = Scenario(tokens=(2,), bucket=2, attn_tp=1, router="mine.py:route")
    batch = PaddedBatch(0, 2, 2, torch.zeros(2, 4), torch.zeros(2, 16))
    truth = find_truth(
        scenario, scenario.plan(), [batch], make_layer(scenario), lambda _batch, row: ([row, 7], [0.25, 0.75])
    )
    assert [(row.ids, row.weights) for row in truth.routing[0]] == [
        ((0, 7), (0.25, 0.75)),
        ((1, 7), (0.25, 0.75)),
    ]
    assert not truth.out_of_range
    with pytest.raises(ValueError, match="pass route_alone"):
        find_truth(scenario, scenario.plan(), [batch], make_layer(scenario))


def test_ids_that_no_expert_has_are_marked_and_not_counted():
    scenario = Scenario(tokens=(4,), bucket=4, attn_tp=1, router="mine.py:route", num_fused_shared_experts=1)
    batch = PaddedBatch(0, 4, 4, torch.zeros(4, 4), torch.zeros(4, 16))
    given_ids = [[0, 15], [-1, 3], [16, 3], [-40, 10**12]]
    truth = find_truth(
        scenario,
        scenario.plan(),
        [batch],
        make_layer(scenario),
        lambda _batch, row: (given_ids[row], [0.5, 0.5]),
    )
    assert [row.out_of_range for row in truth.routing[0]] == [False, True, True, True]
    assert truth.out_of_range
    counts = truth.expert_counts(16)
    assert {expert: count for expert, count in enumerate(counts) if count} == {0: 1, 3: 2, 15: 1}
