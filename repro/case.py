"""A case: one fault looked for in one scenario, with everything that an engine is given."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from repro.batch import MoeLayer, PaddedBatch, make_batches, make_layer
from repro.plan import PaddingPlan
from repro.routers import ROUTER_NAMES, RoutingFunction, call_router, load_router
from repro.scenario import Scenario

Fault = Literal["mask", "count"]
FAULTS: tuple[Fault, ...] = ("mask", "count")


@dataclass(frozen=True)
class Case:
    """``scenario`` is what runs: ``asked_scenario``, or that on another branch (see ``make_case``).

    ``routing_function`` is None unless the branch that runs is ``custom``.
    """

    fault: Fault
    asked_scenario: Scenario
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
    asked_scenario = scenario
    if fault == "count" and scenario.branch == "custom":
        scenario = replace(scenario, branch="softmax", router=ROUTER_NAMES[0])
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
        asked_scenario,
        scenario,
        plan,
        make_batches(scenario, plan, device),
        make_layer(scenario),
        routing_function,
        device,
    )


def route_alone(case: Case) -> Callable[[PaddedBatch, int], tuple[list[int], list[float]]] | None:
    """A user's own routing function asked for one real row at a time, so that no other row can have a say.

    Gives ``(ids, weights)`` of a row. None where the routing is built in, which the oracle knows of itself.
    """
    function = case.routing_function
    if function is None or case.scenario.router in ROUTER_NAMES:
        return None

    def one_row(batch: PaddedBatch, row: int) -> tuple[list[int], list[float]]:
        weights, ids = call_router(
            function,
            # Copies: the function may write into what it is given.
            batch.hidden_states[row : row + 1].clone(),
            batch.router_logits[row : row + 1].clone(),
            case.scenario.top_k,
            case.scenario.renormalize,
            name=f"{case.scenario.router}, asked for one real row alone,",
        )
        return ids[0].tolist(), weights[0].tolist()

    return one_row


def inputs_digest(case: Case) -> str:
    """SHA-256 of the real rows and the placement of experts: two cases of one digest ask the same question."""
    digest = hashlib.sha256(repr((case.layer.physical_to_logical, case.layer.correction_bias)).encode())
    for batch in case.batches:
        real = slice(0, batch.num_token_non_padded_cpu)
        for tensor in (batch.hidden_states, batch.router_logits):
            digest.update(tensor[real].cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
