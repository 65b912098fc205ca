"""From logical to physical experts."""

from dataclasses import dataclass
from typing import Literal

import torch
from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
from sglang.srt.runtime_context import get_exec


@dataclass
class ExpertLocationDispatchInfo:
    ep_dispatch_algorithm: Literal["static", "dynamic"]
    partial_logical_to_rank_dispatch_physical_map: torch.Tensor | None
    partial_logical_to_all_physical_map: torch.Tensor
    partial_logical_to_all_physical_map_num_valid: torch.Tensor
    num_physical_experts: int

    @classmethod
    def init_new(cls, layer_id: int):
        return get_global_expert_location_metadata().dispatch_info_of(layer_id)


def topk_ids_logical_to_physical(
    topk_ids: torch.Tensor,
    info: ExpertLocationDispatchInfo | None,
    log2phy_prob: torch.Tensor | None = None,
) -> torch.Tensor:
    if info is None:
        return topk_ids
    if not get_exec().moe.enable_eplb:
        raise ValueError("a remap of experts without EPLB")
    if info.ep_dispatch_algorithm == "static":
        return info.partial_logical_to_rank_dispatch_physical_map[topk_ids].to(topk_ids.dtype)
    rows = torch.arange(topk_ids.shape[0])[:, None]
    replica = rows % info.partial_logical_to_all_physical_map_num_valid[topk_ids]
    return info.partial_logical_to_all_physical_map[topk_ids, replica].to(topk_ids.dtype)
