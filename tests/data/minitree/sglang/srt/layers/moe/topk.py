"""Which experts a row goes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from sglang.kernels.ops.moe.fill_padded_rows import _fill_padded_rows
from sglang.srt.configs.shared_experts import SharedExpertsConfig
from sglang.srt.environ import envs
from sglang.srt.eplb import expert_location_dispatch
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo
from sglang.srt.layers.moe.utils import get_moe_runner_backend
from sglang.srt.layers.utils import MultiPlatformOp
from sglang.srt.runtime_context import get_server_args
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from sglang.srt.utils import (
    cpu_has_amx_support,
    get_compiler_backend,
    is_cpu,
    is_cuda,
    is_gfx95_supported,
    is_hip,
    is_musa,
    is_npu,
    is_xpu,
)

try:
    from flashinfer import fused_topk_deepseek
except ImportError:
    fused_topk_deepseek = None

try:
    from triton_kernels.routing import routing
except ImportError:
    routing = None

_is_cuda, _is_hip, _is_cpu = is_cuda(), is_hip(), is_cpu()
_is_other = is_npu() or is_xpu() or is_musa()
_use_amx = cpu_has_amx_support() and _is_cpu
_use_aiter = _is_hip and is_gfx95_supported()

if _is_cuda:
    from sgl_kernel import topk_softmax

    @torch.library.register_fake("sgl_kernel::mini_topk_softmax")
    def _(weights, ids, scores):
        return


@dataclass
class TopKConfig:
    top_k: int
    use_grouped_topk: bool = False
    topk_group: int | None = None
    num_expert_group: int | None = None
    renormalize: bool = True
    custom_routing_function: Callable | None = None
    correction_bias: torch.Tensor | None = None
    torch_native: bool = False
    routed_scaling_factor: float | None = None
    scoring_func: str = "softmax"
    shared_experts: SharedExpertsConfig = field(default_factory=SharedExpertsConfig)


class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


class TopK(MultiPlatformOp):
    def forward_cuda(self, hidden_states, router_logits):
        topk_softmax(hidden_states, router_logits)


@torch.compile(dynamic=True, backend=get_compiler_backend())
def _grouped(choice: torch.Tensor, groups: int, kept: int, best_of: int) -> torch.Tensor:
    """The scores of the best groups, -inf for the others."""
    grouped = choice.unflatten(1, (groups, -1))
    worth = grouped.topk(best_of, dim=-1).values.sum(dim=-1)
    keep = torch.zeros_like(worth, dtype=torch.bool).scatter(1, worth.topk(kept, dim=-1).indices, True)
    return grouped.masked_fill(~keep[:, :, None], float("-inf")).flatten(1)


def _scored(logits: torch.Tensor, config: TopKConfig) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.float()
    if config.scoring_func == "sigmoid" or config.correction_bias is not None:
        scores = logits.sigmoid()
    elif config.scoring_func == "sqrtsoftplus":
        scores = torch.nn.functional.softplus(logits).sqrt()
    else:
        scores = logits.softmax(dim=-1)
    choice = scores if config.correction_bias is None else scores + config.correction_bias
    if config.use_grouped_topk:
        best_of = 1 if config.correction_bias is None else 2
        choice = _grouped(choice, config.num_expert_group, config.topk_group, best_of)
    routed = config.top_k - config.shared_experts.num_fused_shared_experts
    ids = choice.topk(routed, dim=-1).indices
    weights = scores.gather(1, ids)
    return weights, ids.to(torch.int32)


def _append_shared(weights, ids, config: TopKConfig, num_experts: int):
    shared = config.shared_experts.num_fused_shared_experts
    if not shared:
        return weights, ids
    total = weights.sum(dim=-1, keepdim=True) / (config.routed_scaling_factor or 1.0)
    further = torch.arange(num_experts, num_experts + shared, dtype=ids.dtype)
    return (
        torch.cat([weights, total.expand(-1, shared)], dim=1),
        torch.cat([ids, further.expand(len(ids), -1)], dim=1),
    )


def select_experts(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    topk_config: TopKConfig,
    *,
    layer_id: int | None = None,
    num_token_non_padded: torch.Tensor | None = None,
    expert_location_dispatch_info: ExpertLocationDispatchInfo | None = None,
) -> StandardTopKOutput:
    assert fused_topk_deepseek is None, "a fast path that is not installed"
    assert routing is None, "another one"
    config = topk_config
    if config.custom_routing_function is not None:
        weights, ids = config.custom_routing_function(
            hidden_states=hidden_states,
            gating_output=router_logits,
            topk=config.top_k,
            renormalize=config.renormalize,
        )
    else:
        weights, ids = _scored(router_logits, config)
        if config.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights, ids = _append_shared(weights, ids, config, router_logits.shape[1])
    ids, weights = _post_process_topk_ids(
        ids, weights, router_logits, num_token_non_padded, expert_location_dispatch_info
    )
    get_global_experts_capturer().capture(layer_id=layer_id, topk_ids=ids)
    get_global_expert_distribution_recorder().on_select_experts(topk_ids=ids)
    get_moe_runner_backend()
    return StandardTopKOutput(weights, ids, router_logits)


def _post_process_topk_ids(ids, weights, router_logits, num_token_non_padded, info):
    masked = num_token_non_padded is not None and not envs.SGLANG_MINI_SKIP_MASK.get()
    if masked and _is_hip:
        _mask_topk_ids_padded_region(ids, num_token_non_padded, 0)
    if info is not None:
        ids = expert_location_dispatch.topk_ids_logical_to_physical(ids, info)
    if masked and not _is_hip:
        _mask_topk_ids_padded_region(ids, num_token_non_padded, -1)
    if masked and _is_hip and not _keeps_weights():
        _zero_topk_weights_padded_region(weights, num_token_non_padded)
    return ids, weights


def _keeps_weights() -> bool:
    """Whether AMD kernels of this server bear -1, so that nothing needs to be zeroed."""
    try:
        return get_server_args().enable_eplb and _use_aiter
    except ValueError:
        return False


def _mask_topk_ids_padded_region(topk_ids, num_token_non_padded, sentinel: int) -> None:
    _fill_padded_rows(topk_ids, num_token_non_padded, sentinel)


def _zero_topk_weights_padded_region(topk_weights, num_token_non_padded) -> None:
    _fill_padded_rows(topk_weights, num_token_non_padded, 0)
