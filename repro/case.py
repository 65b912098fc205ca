"""A case: one fault looked for in one scenario, with everything that an engine is given."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Literal

import torch

from repro.batch import MoeLayer, PaddedBatch, make_batches, make_layer
from repro.plan import PaddingPlan
from repro.routers import RoutingFunction, load_router
from repro.scenario import Scenario

Fault = Literal["mask", "count"]
FAULTS: tuple[Fault, ...] = ("mask", "count")


@dataclass(frozen=True)
class Case:
    """``routing_function`` is None unless the scenario's branch is ``custom``."""

    fault: Fault
    scenario: Scenario
    plan: PaddingPlan
    batches: tuple[PaddedBatch, ...]
    layer: MoeLayer
    routing_function: RoutingFunction | None
    device: str


def make_case(scenario: Scenario, fault: Fault, device: str = "cpu") -> Case:
    """The case that shows ``fault`` alone.

    ``mask``: ``select_experts`` is given the true local counts, so that only the mask can fail. ``count``: the
    engine's own graph buffers supply the count; on the ``custom`` branch a pre-fix engine refuses any count,
    which would hide what its count does, so the case runs on the ``softmax`` branch instead.

    Raises:
        RouterError: the scenario's router cannot be loaded.
    """
    if fault == "count" and scenario.branch == "custom":
        scenario = replace(scenario, branch="softmax")
    routing_function = None
    if scenario.branch == "custom":
        routing_function = load_router(
            scenario.router,
            num_expert_group=scenario.num_expert_group,
            topk_group=scenario.topk_group,
            id_dtype=getattr(torch, scenario.id_dtype),
            weight_dtype=getattr(torch, scenario.weight_dtype),
        )
    plan = scenario.plan()
    return Case(
        fault,
        scenario,
        plan,
        make_batches(scenario, plan, device),
        make_layer(scenario),
        routing_function,
        device,
    )


def inputs_digest(case: Case) -> str:
    """SHA-256 of the real rows and the placement of experts: two cases of one digest ask the same question."""
    digest = hashlib.sha256(repr((case.layer.physical_to_logical, case.layer.correction_bias)).encode())
    for batch in case.batches:
        real = slice(0, batch.num_token_non_padded_cpu)
        for tensor in (batch.hidden_states, batch.router_logits):
            digest.update(tensor[real].cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
