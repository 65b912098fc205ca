"""``select_experts``: routing of every row, then the remap, the pad mask and the shared experts.

Legend: T rows (real, then pads), E logical experts, P physical experts, K routed experts of a row,
F fused shared experts. After SGLang 0.5.17, ``layers/moe/topk.py``.

Nothing here reads a tensor's value on the host, so that all of it can be captured in a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from repro._expert_location import ExpertLocationDispatchInfo, topk_ids_logical_to_physical
from repro._scoring import ScoringFunc, biased_grouped_topk, grouped_topk, plain_topk, renormalized, row_sum
from repro.errors import FieldError

__all__ = [
    "FIXED",
    "PREFIX",
    "Branch",
    "ExpertLocationDispatchInfo",
    "Platform",
    "ScoringFunc",
    "TopKConfig",
    "TopKOutput",
    "TopKRules",
    "select_experts",
    "topk_ids_logical_to_physical",
]

Platform = Literal["cuda", "hip", "cpu"]
Branch = Literal["grouped", "biased_grouped", "torch_native", "custom_routing_function", "fused"]


@dataclass(frozen=True)
class TopKRules:
    """Which of the branches that ever refused ``num_token_non_padded`` take it."""

    custom_takes_count: bool
    torch_native_takes_count: bool


PREFIX = TopKRules(custom_takes_count=False, torch_native_takes_count=False)
"""SGLang 0.5.16: fault A."""
FIXED = TopKRules(custom_takes_count=True, torch_native_takes_count=False)
"""SGLang 0.5.17."""


@dataclass(frozen=True, eq=False)
class TopKConfig:
    """How a layer routes, in upstream's names.

    ``top_k`` counts routed experts alone, where upstream's has the shared ones in it. ``correction_bias`` [E]
    moves the choice and not the weights; grouped top-k with one always scores by sigmoid, and upstream's
    fused softmax kernel ignores it, which is not done here. ``apply_routed_scaling_factor_on_output``
    multiplies renormalised weights, and no others.

    Raises:
        FieldError: a value out of range, or two that contradict each other.
    """

    top_k: int
    use_grouped_topk: bool = False
    topk_group: int | None = None
    num_expert_group: int | None = None
    renormalize: bool = True
    num_fused_shared_experts: int = 0
    custom_routing_function: Callable[..., tuple[Tensor, Tensor]] | None = None
    correction_bias: Tensor | None = None
    torch_native: bool = False
    routed_scaling_factor: float | None = None
    apply_routed_scaling_factor_on_output: bool = False
    scoring_func: ScoringFunc = "softmax"

    def __post_init__(self) -> None:
        _at_least("top_k", self.top_k, 1)
        _at_least("num_fused_shared_experts", self.num_fused_shared_experts, 0)
        _one_of("scoring_func", self.scoring_func, get_args(ScoringFunc))
        if self.use_grouped_topk:
            self._check_grouped()
        factor = self.routed_scaling_factor
        if factor is not None and not (math.isfinite(factor) and factor > 0):
            raise FieldError(
                "routed_scaling_factor", f"{factor} is out of range; give a finite number above 0"
            )
        if self.apply_routed_scaling_factor_on_output:
            field = "apply_routed_scaling_factor_on_output"
            if factor is None:
                raise FieldError(field, "True needs a routed_scaling_factor")
            if not self.use_grouped_topk and (self.branch != "fused" or self.scoring_func == "softmax"):
                raise FieldError(
                    field, f"True, but the {self.branch} branch has no such step with {self.scoring_func}"
                )

    def _check_grouped(self) -> None:
        if self.num_expert_group is None or self.topk_group is None:
            field = "num_expert_group" if self.num_expert_group is None else "topk_group"
            raise FieldError(field, "None, but use_grouped_topk needs a number")
        _at_least("num_expert_group", self.num_expert_group, 1)
        _at_least("topk_group", self.topk_group, 1)
        if self.topk_group > self.num_expert_group:
            raise FieldError(
                "topk_group", f"{self.topk_group} is more than the {self.num_expert_group} groups"
            )
        if self.scoring_func == "sqrtsoftplus":
            raise FieldError("scoring_func", "'sqrtsoftplus' has no grouped form; give softmax or sigmoid")
        if self.custom_routing_function is not None:
            raise FieldError(
                "use_grouped_topk", "True, so that custom_routing_function would never be called"
            )

    @property
    def branch(self) -> Branch:
        """The branch of ``select_experts`` that runs, in upstream's order of precedence."""
        if self.use_grouped_topk:
            return "grouped" if self.correction_bias is None else "biased_grouped"
        if self.custom_routing_function is not None:
            return "custom_routing_function"
        return "torch_native" if self.torch_native else "fused"


class TopKOutput(NamedTuple):
    """``topk_weights`` and ``topk_ids`` are [T, K + F], ``router_logits`` [T, E]."""

    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Tensor


def select_experts(
    hidden_states: Tensor,
    router_logits: Tensor,
    topk_config: TopKConfig,
    *,
    rules: TopKRules = FIXED,
    platform: Platform = "cuda",
    num_token_non_padded: Tensor | None = None,
    expert_location_dispatch_info: ExpertLocationDispatchInfo | None = None,
) -> TopKOutput:
    """Weights and ids of every row of hidden states [T, H] and logits [T, E].

    ``num_token_non_padded`` has one element, int32: rows from there on are pads. ``platform`` says what
    becomes of them, on whatever device the tensors are:

    cuda: every id of a pad row becomes -1, after the remap; weights stay as routed.
    hip: ids become 0 before the remap (so the replica of expert 0), every weight 0 at the very end.
    cpu: pads stay as routed, as in SGLang 0.5.10 to 0.5.22 (which leaves out the remap too; here it is done).

    Weights are float32 and ids int32; torch-native ids are int64; a custom function's dtypes are kept.

    Raises:
        AssertionError: a count for a branch that refuses it under ``rules``, as upstream refuses it.
        FieldError: inputs that don't fit each other or the configuration.
    """
    _one_of("platform", platform, get_args(Platform))
    _check_inputs(hidden_states, router_logits, topk_config, num_token_non_padded)
    branch = topk_config.branch
    if branch == "torch_native" and expert_location_dispatch_info is not None:
        raise FieldError("expert_location_dispatch_info", "given, but the torch_native branch takes no remap")
    refuses = (branch == "custom_routing_function" and not rules.custom_takes_count) or (
        branch == "torch_native" and not rules.torch_native_takes_count
    )
    if refuses and num_token_non_padded is not None:
        raise AssertionError(f"the {branch} branch cannot be given num_token_non_padded")
    topk_weights, topk_ids = _route(hidden_states, router_logits, topk_config)
    topk_weights, topk_ids = _post_process_topk_ids(
        topk_weights,
        topk_ids,
        topk_config,
        platform=platform,
        num_experts=router_logits.shape[1],
        num_token_non_padded=num_token_non_padded,
        info=expert_location_dispatch_info,
    )
    return TopKOutput(topk_weights, topk_ids, router_logits)


def _route(hidden_states: Tensor, router_logits: Tensor, config: TopKConfig) -> tuple[Tensor, Tensor]:
    """Weights and logical ids [T, K] out of the configured branch."""
    if config.custom_routing_function is not None:
        return config.custom_routing_function(
            hidden_states=hidden_states,
            gating_output=router_logits,
            topk=config.top_k,
            renormalize=config.renormalize,
        )
    weights, ids = _choose_experts(router_logits, config)
    if config.renormalize:
        weights = renormalized(weights)
        if config.apply_routed_scaling_factor_on_output and config.routed_scaling_factor is not None:
            weights = weights * config.routed_scaling_factor
    return weights, ids if config.branch == "torch_native" else ids.int()


def _choose_experts(router_logits: Tensor, config: TopKConfig) -> tuple[Tensor, Tensor]:
    if not config.use_grouped_topk:
        return plain_topk(
            router_logits,
            config.top_k,
            scoring_func=config.scoring_func,
            correction_bias=config.correction_bias,
        )
    assert config.num_expert_group is not None  # noqa: S101
    assert config.topk_group is not None  # noqa: S101
    groups = {"num_expert_group": config.num_expert_group, "topk_group": config.topk_group}
    if config.correction_bias is not None:
        return biased_grouped_topk(router_logits, config.correction_bias, config.top_k, **groups)
    return grouped_topk(router_logits, config.top_k, scoring_func=config.scoring_func, **groups)


def _post_process_topk_ids(
    topk_weights: Tensor,
    topk_ids: Tensor,
    config: TopKConfig,
    *,
    platform: Platform,
    num_experts: int,
    num_token_non_padded: Tensor | None,
    info: ExpertLocationDispatchInfo | None,
) -> tuple[Tensor, Tensor]:
    if num_token_non_padded is not None and platform == "hip":
        # Before the remap: AMD kernels index with every id, and so may the remap.
        topk_ids = _mask_topk_ids_padded_region(topk_ids, num_token_non_padded, fill_value=0)
    if info is not None:
        topk_ids = topk_ids_logical_to_physical(topk_ids, info)
        num_experts = info.num_physical_experts
    if config.num_fused_shared_experts:
        topk_weights, topk_ids = _append_shared_experts(topk_weights, topk_ids, config, first_id=num_experts)
    if num_token_non_padded is not None and platform == "cuda":
        topk_ids = _mask_topk_ids_padded_region(topk_ids, num_token_non_padded)
    if num_token_non_padded is not None and platform == "hip":
        # Last: the shared experts' columns have weights too.
        topk_weights = _zero_topk_weights_padded_region(topk_weights, num_token_non_padded)
    return topk_weights, topk_ids


def _append_shared_experts(
    topk_weights: Tensor, topk_ids: Tensor, config: TopKConfig, *, first_id: int
) -> tuple[Tensor, Tensor]:
    """F columns more: ids ``first_id`` + j, weight the row's routed sum / ``routed_scaling_factor``.

    Upstream has one such column and draws its id at random; here every shared expert has its own.
    """
    rows, shared = topk_ids.shape[0], config.num_fused_shared_experts
    ids = torch.arange(first_id, first_id + shared, device=topk_ids.device, dtype=topk_ids.dtype)
    weight = row_sum(topk_weights) / (config.routed_scaling_factor or 1.0)
    return (
        torch.cat([topk_weights, weight.to(topk_weights.dtype).expand(rows, shared)], dim=-1),
        torch.cat([topk_ids, ids.expand(rows, shared)], dim=-1),
    )


def _mask_topk_ids_padded_region(
    topk_ids: Tensor, num_token_non_padded: Tensor, fill_value: int = -1
) -> Tensor:
    """A copy of the ids with every column of the rows >= the count set to ``fill_value``."""
    return topk_ids.masked_fill(_pad_rows(topk_ids, num_token_non_padded), fill_value)


def _zero_topk_weights_padded_region(topk_weights: Tensor, num_token_non_padded: Tensor) -> Tensor:
    """A copy of the weights with every column of the rows >= the count set to 0, NaN too."""
    return topk_weights.masked_fill(_pad_rows(topk_weights, num_token_non_padded), 0.0)


def _pad_rows(rows: Tensor, num_token_non_padded: Tensor) -> Tensor:
    return (torch.arange(rows.shape[0], device=rows.device) >= num_token_non_padded).unsqueeze(-1)


def _check_inputs(
    hidden_states: Tensor, router_logits: Tensor, config: TopKConfig, num_token_non_padded: Tensor | None
) -> None:
    if router_logits.dim() != 2 or hidden_states.shape[:1] != router_logits.shape[:1]:
        raise FieldError(
            "router_logits",
            f"shape {tuple(router_logits.shape)} beside hidden states {tuple(hidden_states.shape)}; "
            "give [T, E] and [T, H]",
        )
    num_experts = router_logits.shape[1]
    if config.top_k > num_experts:
        raise FieldError("top_k", f"{config.top_k} is more than the {num_experts} experts")
    bias = config.correction_bias
    if bias is not None and bias.shape != (num_experts,):
        raise FieldError(
            "correction_bias", f"shape {tuple(bias.shape)}; give one value an expert ({num_experts})"
        )
    count = num_token_non_padded
    if count is not None and (count.numel() != 1 or count.is_floating_point()):
        raise FieldError(
            "num_token_non_padded", f"{count.dtype} of shape {tuple(count.shape)}; give one int32 element"
        )


def _at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise FieldError(field, f"{value} is out of range; give {least} or more")


def _one_of(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise FieldError(field, f"{value!r} is not one of {', '.join(choices)}")
