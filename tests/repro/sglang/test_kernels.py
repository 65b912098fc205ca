"""Emulated kernels beside plain loops. What compares them with the real ones is ``kernel_parity.py``."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from repro.engines.sglang.worker.kernels import (
    EMULATIONS,
    FillPaddedRows,
    FusedGate,
    KernelRefused,
    NotEmulated,
    mask_topk_ids,
)

OLDEST, NEWEST = (0, 5, 15), (0, 5, 23)
NAN, INF = float("nan"), float("inf")


class OnDevice(torch.Tensor):
    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def message(error: pytest.ExceptionInfo[RuntimeError]) -> str:
    return str(error.value)


# ------------------------------------------------------------------------------------------- mask_topk_ids


@pytest.mark.parametrize("count", [0, 1, 3, 5, 9])
def test_mask_sets_rows_from_the_count_on_and_no_other(count: int) -> None:
    ids = torch.arange(15, dtype=torch.int32).reshape(5, 3)
    expected = [[-1 if row >= count else 3 * row + column for column in range(3)] for row in range(5)]

    assert mask_topk_ids(ids, int32(count)) is None

    assert ids.tolist() == expected


def test_mask_writes_only_the_columns_of_a_view() -> None:
    memory = torch.zeros(4, 6, dtype=torch.int32)

    mask_topk_ids(memory[:, 1:4], int32(2)[0])

    assert memory.tolist() == [[0] * 6, [0] * 6, [0, -1, -1, -1, 0, 0], [0, -1, -1, -1, 0, 0]]


@pytest.mark.parametrize("count", [-1, -(2**31)])
def test_mask_takes_a_negative_count_for_a_huge_one(count: int) -> None:
    ids = torch.zeros(2, 2, dtype=torch.int32)

    mask_topk_ids(ids, int32(count))

    assert ids.tolist() == [[0, 0], [0, 0]]


def ids_of(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("ids", "count", "reason"),
    [
        (ids_of(4), int32(1), "topk_ids has 1 dimensions, not 2"),
        (ids_of(3, 4).t(), int32(1), "the columns of topk_ids have stride 4, not 1"),
        (ids_of(4, 2, dtype=torch.int64), int32(1), "topk_ids is torch.int64, not torch.int32"),
        (ids_of(4, 2), int32(1, 2), "the count has 2 elements, not 1"),
        (ids_of(4, 33), int32(1), "top-k is 33, more than the 32 threads of a warp"),
        (ids_of(4, 2), torch.tensor([1.0]), "the count is torch.float32, not torch.int32"),
        (ids_of(4, 2), torch.tensor([1]).as_subclass(OnDevice), "the count is torch.int64, not torch.int32"),
        (
            ids_of(0, 2),
            int32(0),
            "topk_ids has no rows, and a launch of no blocks is an invalid configuration",
        ),
    ],
)
def test_mask_refuses_what_the_kernel_refuses(ids: Tensor, count: Tensor, reason: str) -> None:
    with pytest.raises(KernelRefused) as error:
        mask_topk_ids(ids, count)
    assert message(error) == f"mask_topk_ids: {reason}"
    assert not ids.any()


def test_mask_takes_32_columns_and_a_single_column_of_any_stride() -> None:
    wide, narrow, single = ids_of(2, 32), ids_of(1, 6)[:, ::3].t(), ids_of(2).as_strided((1, 2), (0, 1))

    mask_topk_ids(wide, int32(1))
    mask_topk_ids(narrow, int32(1))
    mask_topk_ids(single, int32(0))

    assert wide.tolist() == [[0] * 32, [-1] * 32]
    assert narrow.tolist() == [[0], [-1]]
    assert single.tolist() == [[-1, -1]]


@pytest.mark.parametrize(
    ("ids", "count", "reason"),
    [
        (
            ids_of(4, 2),
            torch.tensor([1]),
            "an int64 count is refused on the device, and this one may stand for such",
        ),
        (ids_of(1, 2).expand(4, 2), int32(1), "rows of topk_ids share memory"),
    ],
)
def test_mask_says_so_where_it_cannot_know(ids: Tensor, count: Tensor, reason: str) -> None:
    with pytest.raises(NotEmulated) as error:
        mask_topk_ids(ids, count)
    assert message(error) == f"mask_topk_ids: {reason}"


# ------------------------------------------------------------------------------- _fill_padded_rows_kernel


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [-2, 0, 2, 4, 7])
@pytest.mark.parametrize("count_dtype", [torch.int32, torch.int64])
def test_fill_writes_rows_from_the_count_on(dtype: torch.dtype, count: int, count_dtype: torch.dtype) -> None:
    memory = torch.arange(24).reshape(4, 6).to(dtype)
    view = memory[:, 2:5]
    expected = [
        [-1 if row >= count and 2 <= column < 5 else 6 * row + column for column in range(6)]
        for row in range(4)
    ]

    FillPaddedRows()[(4,)](view, torch.tensor(count, dtype=count_dtype), 3, -1, view.stride(0), BLOCK_COLS=4)

    assert memory.tolist() == expected


def test_fill_goes_by_the_numbers_of_the_launch_not_by_the_tensor() -> None:
    memory = torch.zeros(3, 4)

    FillPaddedRows()[(5,)](memory, int32(1, 9), 4, 5.0, 2, BLOCK_COLS=1)

    assert memory.flatten().tolist() == [0, 0, 5, 0, 5, 0, 5, 0, 5, 0, 0, 0]


def test_fill_of_no_rows_writes_nothing() -> None:
    memory = torch.zeros(2, 2)

    FillPaddedRows()[(0,)](memory, int32(0), 2, 1.0, 2, BLOCK_COLS=2)

    assert not memory.any()


def test_fill_refuses_a_block_that_is_no_power_of_two() -> None:
    with pytest.raises(KernelRefused) as error:
        FillPaddedRows()[(2,)](torch.zeros(2, 3), int32(0), 3, 0, 3, BLOCK_COLS=3)
    assert message(error) == "_fill_padded_rows_kernel: BLOCK_COLS is 3, not a power of two"


def test_fill_says_so_where_it_would_write_outside_or_is_launched_in_another_way() -> None:
    with pytest.raises(NotEmulated, match=r"^_fill_padded_rows_kernel: setStorage: .* out of bounds"):
        FillPaddedRows()[(3,)](torch.zeros(2, 2), int32(0), 2, 0, 2, BLOCK_COLS=2)
    with pytest.raises(NotEmulated) as error:
        FillPaddedRows()[(2,)](torch.zeros(2, 2), int32(0), 2, 0, 2, BLOCK_COLS=2, num_warps=1)
    assert message(error) == "_fill_padded_rows_kernel: grid (2,), options ['BLOCK_COLS', 'num_warps']"
    with pytest.raises(NotEmulated) as error:
        FillPaddedRows()[(2, 2)](torch.zeros(2, 2), int32(0), 2, 0, 2, BLOCK_COLS=2)
    assert message(error) == "_fill_padded_rows_kernel: grid (2, 2), options ['BLOCK_COLS']"


# ------------------------------------------------------------------------------------------ moe_fused_gate


def loop(
    logits: list[float],
    bias: list[float],
    routed: int,
    scoring: str,
    groups: int,
    kept: int,
) -> tuple[list[int], list[float]]:
    """One row by the formula: the ids in order, and their weights before normalising."""
    experts = range(len(logits))
    if scoring == "softmax":
        ranked = [logits[e] + bias[e] for e in experts]
        exponents = [math.exp(x - max(ranked)) for x in ranked]
        weights = [x / math.fsum(exponents) for x in exponents]
    else:
        if scoring == "sigmoid":
            weights = [1 / (1 + math.exp(-x)) for x in logits]
        else:
            weights = [math.sqrt(math.log1p(math.exp(x))) for x in logits]
        ranked = [weights[e] + bias[e] for e in experts]
    allowed = set(experts)
    if groups > 1:
        size = len(logits) // groups
        worth = {}
        for group in range(groups):
            distinct = sorted(set(ranked[group * size : (group + 1) * size]), reverse=True)
            worth[group] = distinct[0] + (distinct[1] if len(distinct) > 1 else -INF)
        best = sorted(range(groups), key=lambda group: (-worth[group], group))[:kept]
        allowed = {e for e in experts if e // size in best}
    ids = sorted(allowed, key=lambda e: (-ranked[e], e))[:routed]
    return ids, [weights[e] for e in ids]


def whole_row(
    ids: list[int],
    weights: list[float],
    experts: int,
    shared: int,
    renormalize: bool,
    scale: float,
    scale_output: bool,
    release: tuple[int, ...],
) -> tuple[list[int], list[float]]:
    total = math.fsum(weights)
    factor = (1 / total if renormalize else 1.0) * (scale if scale_output else 1.0)
    shared_weight = total / scale * factor
    if release >= (0, 5, 23):
        shared_weight = 1.0 if scale_output else 1 / scale
    return [*ids, *range(experts, experts + shared)], [
        *(w * factor for w in weights),
        *[shared_weight] * shared,
    ]


@pytest.mark.parametrize("release", [OLDEST, (0, 5, 19), (0, 5, 20), (0, 5, 22), NEWEST])
@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus", "softmax"])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (3, 1)])
def test_gate_follows_the_formula(release: tuple[int, ...], scoring: str, groups: int, kept: int) -> None:
    generator = torch.Generator().manual_seed(groups)
    options = product([0, 2], [True, False], [(1.0, False), (2.5, True), (2.5, False)])
    for contents, (shared, renormalize, (scale, scale_output)) in product(("random", "ties"), options):
        scores, bias = torch.randn(6, 24, generator=generator), torch.randn(24, generator=generator) / 2
        if contents == "ties":
            scores, bias = scores.round(), torch.zeros(24)
        weights, ids = FusedGate(release)(
            scores,
            bias,
            3 + shared,
            scoring_func=scoring,
            num_fused_shared_experts=shared,
            renormalize=renormalize,
            routed_scaling_factor=scale,
            apply_routed_scaling_factor_on_output=scale_output,
            num_expert_group=groups,
            topk_group=kept,
        )
        assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
        for row in range(6):
            chosen, scored = loop(scores[row].tolist(), bias.tolist(), 3, scoring, groups, kept)
            expected = whole_row(chosen, scored, 24, shared, renormalize, scale, scale_output, release)
            assert ids[row].tolist() == expected[0]
            assert weights[row].tolist() == pytest.approx(expected[1], rel=1e-5)


def route(
    scores: Any, topk: int, release: tuple[int, ...] = NEWEST, **options: Any
) -> tuple[list[Any], list[Any]]:
    logits = torch.as_tensor(scores)
    bias = options.pop("bias", torch.zeros(logits.shape[1]))
    weights, ids = FusedGate(release)(logits, bias, topk, **options)
    return ids.tolist(), weights.tolist()


def test_gate_gives_a_tie_to_the_lowest_id_of_experts_and_of_groups() -> None:
    assert route([[0.0] * 6], 3)[0] == [[0, 1, 2]]
    assert route([[1.0, 0.0, 1.0, 0.0, 2.0, -9.0]], 2, num_expert_group=3, topk_group=1)[0] == [[0, 1]]


def test_gate_counts_equal_scores_in_a_group_once() -> None:
    """Two experts at 5.0 are worth less than one at 4.0 with one at 3.0."""
    row = [[5.0, 5.0, -9.0, 4.0, 3.0, -9.0]]
    assert route(row, 2, scoring_func="softmax", num_expert_group=2, topk_group=1)[0] == [[3, 4]]


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus", "softmax"])
def test_gate_of_a_row_of_nan_chooses_the_first_ids_with_nan_weights(scoring: str) -> None:
    ids, weights = route([[NAN] * 8], 3, scoring_func=scoring)
    assert ids == [[0, 1, 2]]
    assert all(math.isnan(weight) for weight in weights[0])


def test_gate_ranks_one_nan_last_and_with_log1p_first() -> None:
    row = [[0.5, NAN, -3.0, 2.0]]
    assert route(row, 4, scoring_func="sqrtsoftplus")[0] == [[3, 0, 2, 1]]
    assert route(row, 4, scoring_func="sqrtsoftplus", sqrtsoftplus_log1p=True)[0] == [[1, 3, 0, 2]]
    assert route(row, 4, scoring_func="sigmoid", sqrtsoftplus_log1p=True)[0] == [[3, 0, 2, 1]]


def test_gate_repeats_an_id_where_nothing_finite_is_left_only_before_0_5_21() -> None:
    row = [[-INF, 1.0, -INF, -INF]]
    assert route(row, 3, (0, 5, 20), scoring_func="softmax")[0] == [[1, 0, 0]]
    assert route(row, 3, (0, 5, 21), scoring_func="softmax")[0] == [[1, 0, 2]]


def test_gate_loses_small_scores_to_rounding_only_before_0_5_20() -> None:
    row = [[-20.0, -18.0]]
    assert route(row, 1, (0, 5, 19), scoring_func="sqrtsoftplus") == ([[0]], [[0.0]])
    ids, weights = route(row, 1, (0, 5, 20), scoring_func="sqrtsoftplus", renormalize=False)
    assert ids == [[1]]
    assert weights[0][0] == pytest.approx(math.exp(-9.0), rel=1e-5)


@pytest.mark.parametrize("count", [-1, 0, 1, 2, 3, 8])
def test_gate_masks_rows_from_the_count_on(count: int) -> None:
    scores = torch.randn(3, 8, generator=torch.Generator().manual_seed(3))
    scores[2] = NAN
    without = route(scores, 2, num_fused_shared_experts=1)

    ids, weights = route(scores, 2, num_fused_shared_experts=1, num_token_non_padded=int32(count))

    live = max(min(count, 3), 0)
    assert ids == without[0][:live] + [[-1, -1]] * (3 - live)
    assert str(weights) == str(without[1][:live] + [[0.0, 0.0]] * (3 - live))


def test_gate_takes_halves_strides_and_device_tensors_as_they_are() -> None:
    scores = torch.randn(4, 8, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    bias = torch.linspace(0, 1, 16)
    expected = route(scores.float(), 3, bias=bias[::2].contiguous())

    strided = torch.stack([scores, scores + 1], dim=2)[:, :, 0].as_subclass(OnDevice)
    weights, ids = FusedGate(NEWEST)(strided, bias[::2], 3)

    assert (ids.tolist(), weights.tolist()) == expected
    assert (type(weights), type(ids)) == (OnDevice, OnDevice)


def test_gate_without_a_bias_is_softmax_of_the_logits() -> None:
    ids, weights = route([[0.0, math.log(3.0)]], 2, bias=None, scoring_func="Softmax", renormalize=False)
    assert ids == [[1, 0]]
    assert weights[0] == pytest.approx([0.75, 0.25])


def test_gate_of_no_rows_is_empty() -> None:
    assert route(torch.zeros(0, 8), 2, num_expert_group=2, topk_group=1) == ([], [])


SCORES, BIAS = torch.zeros(2, 6), torch.zeros(6)


@pytest.mark.parametrize(
    ("release", "scores", "bias", "options", "reason"),
    [
        (
            NEWEST,
            SCORES,
            BIAS,
            {"scoring_func": "tanh"},
            "scoring_func 'tanh' is none of sigmoid, sqrtsoftplus, softmax",
        ),
        (NEWEST, SCORES.double(), BIAS, {}, "scores are torch.float64, not float32, float16 or bfloat16"),
        (NEWEST, SCORES[0], BIAS, {}, "scores have 1 dimensions, not 2"),
        (NEWEST, SCORES, None, {}, "sigmoid without a bias"),
        ((0, 5, 19), SCORES, None, {"scoring_func": "softmax"}, "softmax without a bias"),
        ((0, 5, 18), SCORES, BIAS.half(), {}, "the bias is torch.float16, not torch.float32"),
        (
            NEWEST,
            SCORES,
            BIAS.double(),
            {},
            "the bias is torch.float64, not torch.float32 or torch.float16 or torch.bfloat16",
        ),
        (NEWEST, SCORES, BIAS[None], {}, "the bias has 2 dimensions, not 1"),
        (NEWEST, SCORES, BIAS[1:], {}, "6 scores a row, but 5 biases"),
        (
            NEWEST,
            SCORES,
            BIAS,
            {"num_fused_shared_experts": 2},
            "topk 2 is not more than the 2 shared experts",
        ),
        (OLDEST, SCORES, BIAS, {"routed_scaling_factor": None}, "routed_scaling_factor is None"),
        (NEWEST, SCORES, BIAS, {"num_expert_group": 4}, "6 experts do not divide into 4 groups"),
        (NEWEST, SCORES, BIAS, {"num_expert_group": 3, "topk_group": 4}, "topk_group 4 is not 1 to 3"),
    ],
)
def test_gate_refuses_what_the_launcher_refuses(
    release: tuple[int, ...], scores: Tensor, bias: Tensor | None, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(KernelRefused) as error:
        FusedGate(release)(scores, bias, 2, **options)
    assert message(error) == f"moe_fused_gate: {reason}"


@pytest.mark.parametrize(
    ("release", "options", "reason"),
    [
        (NEWEST, {"moe_softcapping": 30.0}, "moe_softcapping"),
        (NEWEST, {"packed_out": torch.zeros(2, 2, dtype=torch.int32)}, "packed_out"),
        (NEWEST, {"renormalize_epsilon": 1e-20}, "renormalize_epsilon"),
        (NEWEST, {"input_ids": torch.zeros(2)}, "input_ids"),
        (NEWEST, {"sorted_ids": False}, "sorted_ids"),
        (NEWEST, {"num_token_non_padded": torch.tensor([1.0])}, "a count of 1 elements, torch.float32"),
        ((0, 5, 20), {"num_token_non_padded": None}, "num_token_non_padded"),
        ((0, 5, 20), {"packed_out": None}, "packed_out"),
        ((0, 5, 20), {"bias": torch.zeros(12)[::2]}, "the kernel does not heed that the bias is strided"),
        (NEWEST, {"num_expert_group": 0}, "num_expert_group 0"),
    ],
)
def test_gate_names_what_it_does_not_know(
    release: tuple[int, ...], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotEmulated) as error:
        route(SCORES, 2, release, **options)
    assert message(error) == f"moe_fused_gate: {reason}"


def test_gate_does_not_know_the_kernel_for_896_experts() -> None:
    wide = torch.zeros(1, 896)
    with pytest.raises(NotEmulated, match=r"^moe_fused_gate: 896 experts with top-16 go to another kernel$"):
        route(wide, 16, (0, 5, 17))
    assert route(wide, 16, (0, 5, 16))[0] == [list(range(16))]


def test_gate_takes_newer_parameters_that_ask_for_nothing() -> None:
    inert = {"bias_alt": None, "input_ids": None, "bias_alt_token_id": None, "packed_out": None}
    plain = route(SCORES, 2)
    assert route(SCORES, 2, **inert, renormalize_epsilon=0.0, num_token_non_padded=None) == plain


def test_gate_takes_no_scaling_factor_for_one_from_0_5_16() -> None:
    options: dict[str, Any] = {"num_fused_shared_experts": 1, "apply_routed_scaling_factor_on_output": True}
    assert route(SCORES, 2, (0, 5, 16), routed_scaling_factor=None, **options) == route(
        SCORES, 2, OLDEST, **options
    )


# ------------------------------------------------------------------------------------------------- the table


def test_every_emulation_is_listed_under_its_name_with_releases_in_order() -> None:
    assert list(EMULATIONS) == ["mask_topk_ids", "_fill_padded_rows_kernel", "moe_fused_gate"]
    for name, emulation in EMULATIONS.items():
        assert emulation.name == name
        releases = [tuple(map(int, release.split("."))) for release in emulation.known.values()]
        assert releases == sorted(set(releases))
        assert all(len(fingerprint) == 64 for fingerprint in emulation.known)
