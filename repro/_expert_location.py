"""EPLB's map from logical to physical experts, after SGLang 0.5.17, ``eplb/expert_location_dispatch.py``.

Legend: T rows, K routed experts of a row, E logical experts, X most replicas of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from repro.errors import FieldError


@dataclass(frozen=True, eq=False)
class ExpertLocationDispatchInfo:
    """Where the physical replicas of one layer's logical experts are. Integer tensors.

    static: ``partial_logical_to_rank_dispatch_physical_map`` [E] names the one replica that this rank uses.
    dynamic: ``partial_logical_to_all_physical_map`` [E, X] lists all replicas, filled with -1 beyond
    ``partial_logical_to_all_physical_map_num_valid`` [E]; a row takes replica ``row % num_valid``. That is
    upstream's rank-invariant form; its other one draws at random, which no oracle could follow.

    Raises:
        FieldError: an unknown algorithm, one without the maps it reads, or no physical experts.
    """

    ep_dispatch_algorithm: Literal["static", "dynamic"]
    partial_logical_to_rank_dispatch_physical_map: Tensor | None
    partial_logical_to_all_physical_map: Tensor | None
    partial_logical_to_all_physical_map_num_valid: Tensor | None
    num_physical_experts: int

    def __post_init__(self) -> None:
        if self.ep_dispatch_algorithm not in ("static", "dynamic"):
            raise FieldError(
                "ep_dispatch_algorithm", f"{self.ep_dispatch_algorithm!r} is not static or dynamic"
            )
        if self.num_physical_experts < 1:
            raise FieldError(
                "num_physical_experts", f"{self.num_physical_experts} is out of range; give 1 or more"
            )
        needed = (
            ("partial_logical_to_rank_dispatch_physical_map",)
            if self.ep_dispatch_algorithm == "static"
            else ("partial_logical_to_all_physical_map", "partial_logical_to_all_physical_map_num_valid")
        )
        for field in needed:
            if getattr(self, field) is None:
                raise FieldError(field, f"None, but {self.ep_dispatch_algorithm} dispatch reads it")


def topk_ids_logical_to_physical(topk_ids: Tensor, info: ExpertLocationDispatchInfo) -> Tensor:
    """Physical ids [T, K] of logical ids [T, K], in the same dtype; every id must be in [0, E)."""
    if info.ep_dispatch_algorithm == "static":
        assert info.partial_logical_to_rank_dispatch_physical_map is not None  # noqa: S101
        return info.partial_logical_to_rank_dispatch_physical_map[topk_ids].to(topk_ids.dtype)
    replicas = info.partial_logical_to_all_physical_map
    num_valid = info.partial_logical_to_all_physical_map_num_valid
    assert replicas is not None  # noqa: S101
    assert num_valid is not None  # noqa: S101
    row = torch.arange(topk_ids.shape[0], device=topk_ids.device).unsqueeze(-1)
    return replicas[topk_ids, row % num_valid[topk_ids]].to(topk_ids.dtype)
