"""select_experts: against what released code did, against a plain derivation, and the laws of its masks.

Legend: T rows, E logical experts, P physical experts, K routed experts of a row, F shared experts.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from repro import topk
from repro.errors import FieldError
from repro.routers import ROUTER_NAMES, load_router
from repro.topk import FIXED, PREFIX, ExpertLocationDispatchInfo, TopKConfig, TopKRules, select_experts

DATA = Path(__file__).parents[1] / "data" / "topk.jsonl"
TRUTH = [json.loads(line) for line in DATA.read_text().splitlines()]
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.int32, torch.int64, torch.float32)}
DTYPES |= {"bfloat16": torch.bfloat16, "float16": torch.float16}
ALL_TAKE = TopKRules(custom_takes_count=True, torch_native_takes_count=True)
GROUPS = {"num_expert_group": 4, "topk_group": 2}
BRANCHES = ("custom", "grouped", "biased_grouped", "softmax", "sigmoid", "sqrtsoftplus", "torch_native")
E, P = 8, 11


def count_of(rows: int) -> Tensor:
    return torch.tensor([rows], dtype=torch.int32)


def bits(tensor: Tensor) -> list[Any]:
    """The values as integers, so that -0.0, 0.0 and every NaN are told apart."""
    views = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
    return tensor.contiguous().view(views.get(tensor.dtype, tensor.dtype)).tolist()


# What released code did


def truth_inputs(row: dict[str, Any]) -> tuple[Tensor, TopKConfig, ExpertLocationDispatchInfo | None]:
    kind, seen = row["kind"], row["reference"]
    settings_: dict[str, Any] = {"top_k": row["top_k"], "renormalize": row["renormalize"]}
    if kind in ("grouped", "biased_grouped"):
        # The file does not say how the experts were grouped; 4 groups of which 2 explain all ten rows, and
        # no other pair does.
        settings_ |= {"use_grouped_topk": True, **GROUPS}
    if kind == "biased_grouped":
        settings_["correction_bias"] = torch.tensor(row["correction_bias"])
    if kind == "torch_native":
        settings_["torch_native"] = True
    if kind.startswith("custom"):
        answer = (
            torch.tensor(row["router_weights"], dtype=DTYPES[seen["weights_dtype"]]),
            torch.tensor(row["router_ids"], dtype=DTYPES[seen["ids_dtype"]]),
        )
        settings_["custom_routing_function"] = lambda **_: answer
    info = None
    if kind == "custom_eplb":
        physical = torch.tensor(row["logical_to_physical"])
        info = ExpertLocationDispatchInfo("static", physical, None, None, row["experts"])
    logits = torch.tensor(row["logits"]) if "logits" in row else torch.zeros(row["rows"], row["experts"])
    return logits, TopKConfig(**settings_), info


def routed(
    ids: list[list[int]], weights: list[list[float]], *, ordered: bool
) -> list[list[tuple[int, float]]]:
    rows = [list(zip(i, w, strict=True)) for i, w in zip(ids, weights, strict=True)]
    return rows if ordered else [sorted(row) for row in rows]


@pytest.mark.parametrize("row", TRUTH, ids=lambda r: f"{r['version']}-{r['cfg']}-{r['kind']}-{r['platform']}")
def test_agrees_with_what_released_code_did(row: dict[str, Any]) -> None:
    logits, config, info = truth_inputs(row)
    rules = {"0.5.16": PREFIX, "0.5.17": FIXED}[row["version"]]
    answers = [("reference", None)]
    if "error" in row:
        with pytest.raises(AssertionError, match=rf"{config.branch}.*num_token_non_padded"):
            select_experts(
                torch.zeros(len(logits), 4),
                logits,
                config,
                rules=rules,
                platform=row["platform"],
                num_token_non_padded=count_of(row["valid"]),
                expert_location_dispatch_info=info,
            )
    else:
        answers.append(("result", count_of(row["valid"])))
    for name, count in answers:
        out = select_experts(
            torch.zeros(len(logits), 4),
            logits,
            config,
            rules=rules,
            platform=row["platform"],
            num_token_non_padded=count,
            expert_location_dispatch_info=info,
        )
        seen = row[name]
        assert (out.topk_ids.dtype, out.topk_weights.dtype) == (
            DTYPES[seen["ids_dtype"]],
            DTYPES[seen["weights_dtype"]],
        )
        # Upstream's grouped branches ask torch.topk for an unsorted answer; which order comes is not defined.
        ordered = row["kind"] not in ("grouped", "biased_grouped")
        ours = routed(out.topk_ids.tolist(), out.topk_weights.tolist(), ordered=ordered)
        theirs = routed(seen["ids"], seen["weights"], ordered=ordered)
        assert [[i for i, _ in r] for r in ours] == [[i for i, _ in r] for r in theirs]
        tolerance = 0.0 if row["kind"].startswith("custom") else 1e-6
        for our_row, their_row in zip(ours, theirs, strict=True):
            assert [w for _, w in our_row] == pytest.approx([w for _, w in their_row], abs=tolerance, rel=0.0)


def test_the_data_hold_every_kind_platform_and_refusal() -> None:
    assert len(TRUTH) == 52
    assert {row["kind"] for row in TRUTH} == {
        "custom",
        "custom_eplb",
        "custom_top1",
        "grouped",
        "biased_grouped",
        "softmax",
        "torch_native",
    }
    refused = [(row["version"], row["kind"].split("_")[0]) for row in TRUTH if "error" in row]
    assert sorted(set(refused)) == [("0.5.16", "custom"), ("0.5.16", "torch"), ("0.5.17", "torch")]


# Scenarios for the laws below


def make_config(branch: str, router: str, **settings_: Any) -> TopKConfig:
    if branch == "custom":
        dtypes = {"id_dtype": settings_.pop("id_dtype"), "weight_dtype": settings_.pop("weight_dtype")}
        return TopKConfig(custom_routing_function=load_router(router, **GROUPS, **dtypes), **settings_)
    settings_ = {k: v for k, v in settings_.items() if k not in ("id_dtype", "weight_dtype")}
    bias = torch.linspace(-0.3, 0.3, E)
    match branch:
        case "grouped":
            return TopKConfig(use_grouped_topk=True, **GROUPS, **settings_)
        case "biased_grouped":
            return TopKConfig(use_grouped_topk=True, **GROUPS, correction_bias=bias, **settings_)
        case "torch_native":
            return TopKConfig(torch_native=True, **settings_)
        case "softmax":
            return TopKConfig(**settings_)
        case _:
            return TopKConfig(scoring_func=branch, correction_bias=bias, **settings_)


def make_info(eplb: str) -> ExpertLocationDispatchInfo | None:
    """11 physical experts for 8 logical ones; experts 0 to 2 have two replicas, and 0 is not at 0."""
    if eplb == "none":
        return None
    replicas = torch.tensor([[3, 8], [4, 9], [5, 10], [0, -1], [1, -1], [2, -1], [6, -1], [7, -1]])
    num_valid = torch.tensor([2, 2, 2, 1, 1, 1, 1, 1])
    return ExpertLocationDispatchInfo(eplb, replicas[:, 0], replicas, num_valid, P)


def fill_rows(rows: int, fill: str, seed: int) -> Tensor:
    values = {"zeros": 0.0, "nan": math.nan, "inf": math.inf}
    if fill in values:
        return torch.full((rows, E), values[fill])
    return 5 * torch.randn(rows, E, generator=torch.Generator().manual_seed(seed))


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    branch = draw(st.sampled_from(BRANCHES))
    router = draw(st.sampled_from(ROUTER_NAMES))
    top_k = {"sigmoid-top1": 1, "sparse-mixer": 2}.get(router) if branch == "custom" else None
    config = make_config(
        branch,
        router,
        top_k=top_k or draw(st.integers(1, 4)),
        renormalize=draw(st.booleans()),
        num_fused_shared_experts=draw(st.integers(0, 2)),
        routed_scaling_factor=draw(st.sampled_from([None, 2.5])),
        id_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        weight_dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )
    real = fill_rows(draw(st.integers(0, 9)), "noise", draw(st.integers(0, 2**31)))
    if draw(st.booleans()):
        real = real.round()  # equal logits in a row
    pads = fill_rows(draw(st.integers(0, 9)), draw(st.sampled_from(["zeros", "noise", "nan", "inf"])), 1)
    return {
        "config": config,
        "real": real,
        "pads": pads,
        "eplb": draw(st.sampled_from(["none", "static", "dynamic"])) if branch != "torch_native" else "none",
    }


def run(s: dict[str, Any], logits: Tensor, platform: str, count: int | None) -> topk.TopKOutput:
    return select_experts(
        torch.zeros(len(logits), 4),
        logits,
        s["config"],
        rules=ALL_TAKE,
        platform=platform,
        num_token_non_padded=None if count is None else count_of(count),
        expert_location_dispatch_info=make_info(s["eplb"]),
    )


# The laws


@pytest.mark.parametrize("platform", ["cuda", "hip", "cpu"])
@given(s=scenarios())
@settings(deadline=None, max_examples=100)
def test_real_rows_are_bit_equal_with_and_without_pads(platform: str, s: dict[str, Any]) -> None:
    real, pads = s["real"], s["pads"]
    alone = run(s, real, platform, None)
    padded = run(s, torch.cat([real, pads]), platform, len(real))
    assert bits(padded.topk_ids[: len(real)]) == bits(alone.topk_ids)
    assert bits(padded.topk_weights[: len(real)]) == bits(alone.topk_weights)


@given(s=scenarios())
@settings(deadline=None, max_examples=100)
def test_on_cuda_every_id_of_a_pad_row_is_minus_one_and_weights_stay_as_routed(s: dict[str, Any]) -> None:
    logits = torch.cat([s["real"], s["pads"]])
    routed_, masked = run(s, logits, "cuda", None), run(s, logits, "cuda", len(s["real"]))
    assert (masked.topk_ids[len(s["real"]) :] == -1).all()
    assert bits(masked.topk_weights) == bits(routed_.topk_weights)


@given(s=scenarios())
@settings(deadline=None, max_examples=100)
def test_on_hip_pad_rows_have_no_weight_and_ids_in_range(s: dict[str, Any]) -> None:
    rows, config = len(s["real"]), s["config"]
    out = run(s, torch.cat([s["real"], s["pads"]]), "hip", rows)
    pad_ids = out.topk_ids[rows:]
    assert bits(out.topk_weights[rows:]) == bits(torch.zeros_like(out.topk_weights[rows:]))
    experts = E if s["eplb"] == "none" else P
    assert ((pad_ids >= 0) & (pad_ids < experts + config.num_fused_shared_experts)).all()
    if s["eplb"] == "none":
        assert (pad_ids[:, : config.top_k] == 0).all()
    else:
        assert torch.isin(pad_ids[:, : config.top_k], torch.tensor([3, 8])).all()  # replicas of expert 0


@given(s=scenarios())
@settings(deadline=None, max_examples=50)
def test_on_cpu_pads_stay_as_routed(s: dict[str, Any]) -> None:
    logits = torch.cat([s["real"], s["pads"]])
    with_count, without = run(s, logits, "cpu", len(s["real"])), run(s, logits, "cpu", None)
    assert bits(with_count.topk_ids) == bits(without.topk_ids)
    assert bits(with_count.topk_weights) == bits(without.topk_weights)


@given(
    ids=st.lists(st.lists(st.integers(0, 7), min_size=3, max_size=3), max_size=9),
    count=st.integers(-1, 12),
    fill=st.sampled_from([-1, 0]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
@settings(deadline=None, max_examples=100)
def test_masks_are_idempotent(ids: list[list[int]], count: int, fill: int, dtype: torch.dtype) -> None:
    topk_ids = torch.tensor(ids, dtype=dtype).reshape(-1, 3)
    weights = topk_ids.float().masked_fill(topk_ids == 3, math.nan)
    once = topk._mask_topk_ids_padded_region(topk_ids, count_of(count), fill)
    assert torch.equal(topk._mask_topk_ids_padded_region(once, count_of(count), fill), once)
    zeroed = topk._zero_topk_weights_padded_region(weights, count_of(count))
    assert bits(topk._zero_topk_weights_padded_region(zeroed, count_of(count))) == bits(zeroed)
    real = min(max(count, 0), len(topk_ids))
    assert once.tolist() == [*ids[:real], *[[fill] * 3] * (len(ids) - real)]
    assert bits(zeroed) == bits(torch.cat([weights[:real], torch.zeros(len(ids) - real, 3)]))


class RefuseHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a tensor's value was read on the host")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("platform", ["cuda", "hip", "cpu"])
@pytest.mark.parametrize("eplb", ["none", "static", "dynamic"])
@pytest.mark.parametrize("branch", BRANCHES)
def test_nothing_is_read_on_the_host(branch: str, eplb: str, platform: str) -> None:
    for router in ROUTER_NAMES if branch == "custom" else ("",):
        top_k = 1 if router == "sigmoid-top1" else 2
        config = make_config(
            branch,
            router,
            top_k=top_k,
            num_fused_shared_experts=1,
            id_dtype=torch.int32,
            weight_dtype=torch.float32,
        )
        s = {"config": config, "eplb": "none" if branch == "torch_native" else eplb}
        logits, count = fill_rows(5, "noise", 0), count_of(3)
        info = make_info(s["eplb"])
        with RefuseHostReads():
            output = select_experts(
                torch.zeros(5, 4),
                logits,
                config,
                rules=ALL_TAKE,
                platform=platform,
                num_token_non_padded=count,
                expert_location_dispatch_info=info,
            )
        assert output.topk_ids.shape == (5, top_k + 1)


def test_the_refusal_of_host_reads_sees_one() -> None:
    with RefuseHostReads(), pytest.raises(RuntimeError, match="read on the host"):
        count_of(3).item()


# The custom branch and its count: the fix's own cases


def degenerate_output(platform: str, count: int | None, rules: TopKRules = FIXED) -> topk.TopKOutput:
    config = TopKConfig(top_k=2, custom_routing_function=load_router("degenerate"))
    return select_experts(
        torch.zeros(5, 4),
        torch.zeros(5, E),
        config,
        rules=rules,
        platform=platform,
        num_token_non_padded=None if count is None else count_of(count),
    )


def test_a_degenerate_router_given_a_count_leaves_pads_at_minus_one() -> None:
    out = degenerate_output("cuda", 3)
    assert out.topk_ids.tolist() == [[0, 1]] * 3 + [[-1, -1]] * 2
    assert out.topk_weights.tolist() == [[0.5, 0.5]] * 5


def test_a_degenerate_router_given_a_count_on_hip_leaves_pads_at_zero_without_weight() -> None:
    out = degenerate_output("hip", 3)
    assert out.topk_ids.tolist() == [[0, 1]] * 3 + [[0, 0]] * 2
    assert out.topk_weights.tolist() == [[0.5, 0.5]] * 3 + [[0.0, 0.0]] * 2


@pytest.mark.parametrize("rules", [PREFIX, FIXED])
@pytest.mark.parametrize("platform", ["cuda", "hip", "cpu"])
def test_a_degenerate_router_given_no_count_leaves_all_rows_as_routed(
    platform: str, rules: TopKRules
) -> None:
    out = degenerate_output(platform, None, rules)
    assert out.topk_ids.tolist() == [[0, 1]] * 5
    assert out.topk_weights.tolist() == [[0.5, 0.5]] * 5


@pytest.mark.parametrize("platform", ["cuda", "hip", "cpu"])
def test_before_the_fix_the_custom_branch_refuses_a_count_without_calling_the_function(platform: str) -> None:
    def never(**_: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("called")

    config = TopKConfig(top_k=2, custom_routing_function=never)
    with pytest.raises(AssertionError, match=r"custom_routing_function branch .* num_token_non_padded"):
        select_experts(
            torch.zeros(5, 4),
            torch.zeros(5, E),
            config,
            rules=PREFIX,
            platform=platform,
            num_token_non_padded=count_of(3),
        )


def test_the_custom_function_is_called_with_upstreams_keywords_and_its_tensors_are_not_written() -> None:
    weights, ids = torch.ones(5, 2), torch.ones(5, 2, dtype=torch.int64)
    calls = []

    def function(**keywords: Any) -> tuple[Tensor, Tensor]:
        calls.append(keywords)
        return weights, ids

    hidden_states, logits = torch.zeros(5, 4), torch.zeros(5, E)
    config = TopKConfig(top_k=2, renormalize=False, custom_routing_function=function)
    for platform in ("cuda", "hip"):
        select_experts(hidden_states, logits, config, platform=platform, num_token_non_padded=count_of(3))
    assert [sorted(call) for call in calls] == [["gating_output", "hidden_states", "renormalize", "topk"]] * 2
    assert calls[0]["hidden_states"] is hidden_states
    assert calls[0]["gating_output"] is logits
    assert (calls[0]["topk"], calls[0]["renormalize"]) == (2, False)
    assert (weights.tolist(), ids.tolist()) == ([[1.0, 1.0]] * 5, [[1, 1]] * 5)


# The remap and the shared experts, by hand


def fixed_router(ids: list[list[int]], weights: list[list[float]]) -> TopKConfig:
    answer = (torch.tensor(weights), torch.tensor(ids, dtype=torch.int32))
    return TopKConfig(top_k=2, custom_routing_function=lambda **_: answer)


@pytest.mark.parametrize(
    ("eplb", "platform", "expected"),
    [
        ("static", "cuda", [[3, 0], [3, 7], [-1, -1], [-1, -1]]),
        ("static", "hip", [[3, 0], [3, 7], [3, 3], [3, 3]]),
        ("static", "cpu", [[3, 0], [3, 7], [4, 3], [4, 3]]),
        ("dynamic", "cuda", [[3, 0], [8, 7], [-1, -1], [-1, -1]]),
        ("dynamic", "hip", [[3, 0], [8, 7], [3, 3], [8, 8]]),
        ("dynamic", "cpu", [[3, 0], [8, 7], [4, 3], [9, 8]]),
    ],
)
def test_the_remap_comes_before_the_cuda_mask_and_after_the_hip_mask(
    eplb: str, platform: str, expected: list[list[int]]
) -> None:
    config = fixed_router([[0, 3], [0, 7], [1, 0], [1, 0]], [[0.5, 0.5]] * 4)
    s = {"config": config, "eplb": eplb}
    assert run(s, torch.zeros(4, E), platform, 2).topk_ids.tolist() == expected


@pytest.mark.parametrize(("eplb", "first"), [("none", E), ("static", P)])
def test_shared_experts_come_last_and_weigh_the_rows_routed_sum_over_the_factor(
    eplb: str, first: int
) -> None:
    config = fixed_router([[4, 5], [6, 3]], [[0.75, 0.5], [0.25, 0.25]])
    config = replace(config, num_fused_shared_experts=2, routed_scaling_factor=2.0)
    out = run({"config": config, "eplb": eplb}, torch.zeros(2, E), "cuda", None)
    assert out.topk_ids[:, 2:].tolist() == [[first, first + 1]] * 2
    assert out.topk_weights.tolist() == [[0.75, 0.5, 0.625, 0.625], [0.25, 0.25, 0.25, 0.25]]
    masked = run({"config": config, "eplb": eplb}, torch.zeros(2, E), "cuda", 1)
    assert masked.topk_ids.tolist() == [out.topk_ids[0].tolist(), [-1] * 4]
    zeroed = run({"config": config, "eplb": eplb}, torch.zeros(2, E), "hip", 1)
    assert zeroed.topk_weights.tolist() == [out.topk_weights[0].tolist(), [0.0] * 4]


# The mathematics, derived again in plain Python


SCORES = {
    "softmax": lambda row: [math.exp(x) / sum(map(math.exp, row)) for x in row],
    "sigmoid": lambda row: [1 / (1 + math.exp(-x)) for x in row],
    "sqrtsoftplus": lambda row: [math.sqrt(math.log1p(math.exp(x))) for x in row],
}


def best_of(values: list[float], k: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def derive(row: list[float], config: TopKConfig) -> tuple[list[int], list[float]]:
    bias = config.correction_bias.tolist() if config.correction_bias is not None else [0.0] * len(row)
    biased_grouped = config.branch == "biased_grouped"
    scores = SCORES["sigmoid" if biased_grouped else config.scoring_func](row)
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    if config.use_grouped_topk:
        size = len(row) // GROUPS["num_expert_group"]
        groups = [sorted(choice[i : i + size], reverse=True) for i in range(0, len(row), size)]
        kept = best_of([g[0] + (g[1] if biased_grouped else 0.0) for g in groups], GROUPS["topk_group"])
        choice = [c if i // size in kept else -math.inf for i, c in enumerate(choice)]
    ids = best_of(choice, config.top_k)
    weights = [scores[i] for i in ids]
    if config.renormalize:
        factor = config.routed_scaling_factor if config.apply_routed_scaling_factor_on_output else 1.0
        weights = [w / sum(weights) * factor for w in weights]
    return ids, weights


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {branch: (branch, {}) for branch in BRANCHES[1:]}
VARIANTS |= {
    "grouped by sigmoid": ("grouped", {"scoring_func": "sigmoid"}),
    "sigmoid without bias": ("sigmoid", {"correction_bias": None}),
    "softmax with bias": ("softmax", {"correction_bias": torch.linspace(-0.3, 0.3, E)}),
}
SCALABLE = [name for name, (branch, _) in VARIANTS.items() if branch not in ("softmax", "torch_native")]


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("variant", "scaled"), [(name, False) for name in VARIANTS] + [(name, True) for name in SCALABLE]
)
def test_each_branch_agrees_with_a_plain_derivation(variant: str, scaled: bool, renormalize: bool) -> None:
    branch, changes = VARIANTS[variant]
    if scaled:
        changes = changes | {"routed_scaling_factor": 2.5, "apply_routed_scaling_factor_on_output": True}
    config = replace(make_config(branch, "", top_k=3, renormalize=renormalize), **changes)
    logits = fill_rows(20, "noise", 3) / 3
    out = select_experts(torch.zeros(20, 4), logits, config)
    expected = [derive(row, config) for row in logits.double().tolist()]
    assert out.topk_ids.tolist() == [ids for ids, _ in expected]
    for ours, (_, weights) in zip(out.topk_weights.tolist(), expected, strict=True):
        assert ours == pytest.approx(weights, rel=1e-6)
    assert out.topk_weights.dtype == torch.float32
    assert out.topk_ids.dtype == (torch.int64 if branch == "torch_native" else torch.int32)
    assert out.router_logits is logits


def test_equal_scores_go_to_the_lower_id_and_rows_of_nan_to_distinct_experts() -> None:
    logits = torch.stack(
        [torch.zeros(E), torch.full((E,), math.nan), torch.tensor([0.0, 1, 0, 1, 0, 1, 0, 1])]
    )
    out = select_experts(torch.zeros(3, 4), logits, TopKConfig(top_k=3))
    assert out.topk_ids.tolist() == [[0, 1, 2], [0, 1, 2], [1, 3, 5]]


def test_weights_that_all_underflow_are_renormalised_to_zero_and_not_to_nan() -> None:
    config = TopKConfig(top_k=2, scoring_func="sigmoid", correction_bias=torch.zeros(E))
    out = select_experts(torch.zeros(1, 4), torch.full((1, E), -1e4), config)
    assert out.topk_weights.tolist() == [[0.0, 0.0]]


# Wrong settings


def branch_of(**settings_: Any) -> str:
    return TopKConfig(top_k=1, **settings_).branch


def test_branches_take_precedence_as_upstream_has_it() -> None:
    def router(**_: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError

    bias = torch.zeros(E)
    assert branch_of() == "fused"
    assert branch_of(torch_native=True) == "torch_native"
    assert branch_of(torch_native=True, custom_routing_function=router) == "custom_routing_function"
    assert branch_of(torch_native=True, use_grouped_topk=True, **GROUPS) == "grouped"
    assert branch_of(use_grouped_topk=True, correction_bias=bias, **GROUPS) == "biased_grouped"


@pytest.mark.parametrize(
    ("settings_", "text"),
    [
        ({"top_k": 0}, "top_k: 0 is out of range; give 1 or more"),
        ({"num_fused_shared_experts": -1}, "num_fused_shared_experts: -1 is out of range; give 0 or more"),
        ({"scoring_func": "tanh"}, "scoring_func: 'tanh' is not one of softmax, sigmoid, sqrtsoftplus"),
        ({"use_grouped_topk": True}, "num_expert_group: None, but use_grouped_topk needs a number"),
        (
            {"use_grouped_topk": True, "num_expert_group": 4},
            "topk_group: None, but use_grouped_topk needs a number",
        ),
        ({"use_grouped_topk": True, **GROUPS, "topk_group": 5}, "topk_group: 5 is more than the 4 groups"),
        (
            {"use_grouped_topk": True, **GROUPS, "topk_group": 0},
            "topk_group: 0 is out of range; give 1 or more",
        ),
        (
            {"use_grouped_topk": True, **GROUPS, "scoring_func": "sqrtsoftplus"},
            "scoring_func: 'sqrtsoftplus' has no grouped form; give softmax or sigmoid",
        ),
        (
            {"use_grouped_topk": True, **GROUPS, "custom_routing_function": print},
            "use_grouped_topk: True, so that custom_routing_function would never be called",
        ),
        (
            {"routed_scaling_factor": math.nan},
            "routed_scaling_factor: nan is out of range; give a finite number above 0",
        ),
        (
            {"apply_routed_scaling_factor_on_output": True, "scoring_func": "sigmoid"},
            "apply_routed_scaling_factor_on_output: True needs a routed_scaling_factor",
        ),
        (
            {"apply_routed_scaling_factor_on_output": True, "routed_scaling_factor": 2.0},
            "apply_routed_scaling_factor_on_output: True, but the fused branch has no such step with softmax",
        ),
    ],
)
def test_a_wrong_configuration_is_refused_by_field_and_value(settings_: dict[str, Any], text: str) -> None:
    with pytest.raises(FieldError) as caught:
        TopKConfig(**{"top_k": 2, **settings_})
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("settings_", "keywords", "text"),
    [
        ({"top_k": 9}, {}, "top_k: 9 is more than the 8 experts"),
        ({}, {"platform": "xpu"}, "platform: 'xpu' is not one of cuda, hip, cpu"),
        (
            {"correction_bias": torch.zeros(7)},
            {},
            "correction_bias: shape (7,); give one value an expert (8)",
        ),
        (
            {},
            {"num_token_non_padded": torch.zeros(2, dtype=torch.int32)},
            "num_token_non_padded: torch.int32 of shape (2,); give one int32 element",
        ),
        (
            {},
            {"num_token_non_padded": torch.zeros(1)},
            "num_token_non_padded: torch.float32 of shape (1,); give one int32 element",
        ),
        (
            {},
            {"hidden_states": torch.zeros(3, 4)},
            "router_logits: shape (2, 8) beside hidden states (3, 4); give [T, E] and [T, H]",
        ),
        (
            {"torch_native": True},
            {"expert_location_dispatch_info": make_info("static")},
            "expert_location_dispatch_info: given, but the torch_native branch takes no remap",
        ),
        (
            {"use_grouped_topk": True, "num_expert_group": 3, "topk_group": 1},
            {},
            "num_expert_group: 8 experts cannot be cut into 3 equal groups",
        ),
        (
            {"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 1},
            {},
            "top_k: 2 is more than the 1 experts of 1 groups",
        ),
        (
            {
                "use_grouped_topk": True,
                "num_expert_group": 8,
                "topk_group": 2,
                "correction_bias": torch.zeros(8),
            },
            {},
            "num_expert_group: 8 leaves one expert a group; biased grouped top-k needs two",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_field_and_value(
    settings_: dict[str, Any], keywords: dict[str, Any], text: str
) -> None:
    arguments = {"hidden_states": torch.zeros(2, 4), "router_logits": torch.zeros(2, 8), **keywords}
    with pytest.raises(FieldError) as caught:
        select_experts(topk_config=TopKConfig(**{"top_k": 2, **settings_}), **arguments)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (("fake", None, None, None, 8), "ep_dispatch_algorithm: 'fake' is not static or dynamic"),
        (
            ("static", torch.zeros(8), None, None, 0),
            "num_physical_experts: 0 is out of range; give 1 or more",
        ),
        (
            ("static", None, None, None, 8),
            "partial_logical_to_rank_dispatch_physical_map: None, but static dispatch reads it",
        ),
        (
            ("dynamic", None, torch.zeros(8, 1), None, 8),
            "partial_logical_to_all_physical_map_num_valid: None, but dynamic dispatch reads it",
        ),
    ],
)
def test_a_map_that_dispatch_cannot_use_is_refused(values: tuple[Any, ...], text: str) -> None:
    with pytest.raises(FieldError) as caught:
        ExpertLocationDispatchInfo(*values)
    assert str(caught.value) == text
