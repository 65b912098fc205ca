"""A case: one fault looked for in one scenario, with everything that an engine is given."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from repro.batch import MoeLayer, PaddedBatch, make_batches, make_layer
from repro.plan import PaddingPlan
from repro.routers import ROUTER_NAMES, RoutingFunction, call_router, load_router
from repro.scenario import Scenario

Fault = Literal["mask", "count"]
FAULTS: tuple[Fault, ...] = ("mask", "count")

# Ids and weights of one real row.
Route = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Case:
    """``scenario`` is what runs: ``asked_scenario``, or that on another branch (see ``make_case``).

    ``routing_function`` is None unless the branch that runs is ``custom``. ``routes_alone[d][i]`` is what a
    user's own gave when asked for row i of DP rank d alone, so that no other row could have a say; None where
    the routing is built in, which the oracle knows of itself.
    """

    fault: Fault
    asked_scenario: Scenario
    scenario: Scenario
    plan: PaddingPlan
    batches: tuple[PaddedBatch, ...]
    layer: MoeLayer
    routing_function: RoutingFunction | None
    device: str
    routes_alone: tuple[tuple[Route, ...], ...] | None


def make_case(scenario: Scenario, fault: Fault, device: str = "cpu") -> Case:
    """The case that shows ``fault`` alone.

    ``mask``: ``select_experts`` is given the true local counts, so that only the mask can fail. ``count``: the
    engine's own graph buffers supply the count; on the ``custom`` branch a pre-fix engine refuses any count,
    which would hide what its count does, so the case runs on the ``grouped`` branch instead, with one group:
    softmax top-k, on a branch that real engines run without a compiled kernel.

    Raises:
        RouterError: the scenario's router cannot be loaded, or cannot route a real row on its own.
    """
    asked_scenario = scenario
    if fault == "count" and scenario.branch == "custom":
        scenario = replace(
            scenario, branch="grouped", router=ROUTER_NAMES[0], num_expert_group=1, topk_group=1
        )
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
    batches = make_batches(scenario, plan, device)
    routes_alone = None
    if routing_function is not None and scenario.router not in ROUTER_NAMES:
        routes_alone = tuple(
            tuple(
                _ask_alone(scenario, routing_function, batch, row)
                for row in range(batch.num_token_non_padded_cpu)
            )
            for batch in batches
        )
    return Case(
        fault,
        asked_scenario,
        scenario,
        plan,
        batches,
        make_layer(scenario),
        routing_function,
        device,
        routes_alone,
    )


def _ask_alone(scenario: Scenario, function: RoutingFunction, batch: PaddedBatch, row: int) -> Route:
    weights, ids = call_router(
        function,
        # Copies: the function may write into what it is given.
        batch.hidden_states[row : row + 1].clone(),
        batch.router_logits[row : row + 1].clone(),
        scenario.top_k,
        scenario.renormalize,
        name=f"{scenario.router}, asked for one real row alone,",
    )
    return ids[0].tolist(), weights[0].tolist()


def route_alone(case: Case) -> Callable[[PaddedBatch, int], Route] | None:
    """``case.routes_alone`` by batch and row, as ``find_truth`` takes it."""
    routes = case.routes_alone
    return None if routes is None else lambda batch, row: routes[batch.dp_rank][row]


def with_ids_in_range(case: Case) -> Case:
    """The case with rows that a user's own function gives an id outside 0..E-1 sent to experts 0..K-1 instead.

    A remap can look those up, and they are distinct.
    """
    function, scenario = case.routing_function, case.scenario
    assert function is not None  # noqa: S101

    def in_range(
        hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        weights, ids = call_router(
            function, hidden_states, gating_output, topk, renormalize, name=scenario.router
        )
        outside = ((ids < 0) | (ids >= scenario.experts)).any(dim=1, keepdim=True)
        first = torch.arange(topk, device=ids.device, dtype=ids.dtype)
        return weights, torch.where(outside, first, ids)

    return replace(case, routing_function=in_range)


def inputs_digest(case: Case) -> str:
    """SHA-256 of the real rows and the placement of experts: two cases of one digest ask the same question."""
    digest = hashlib.sha256(repr((case.layer.physical_to_logical, case.layer.correction_bias)).encode())
    for batch in case.batches:
        real = slice(0, batch.num_token_non_padded_cpu)
        for tensor in (batch.hidden_states, batch.router_logits):
            digest.update(tensor[real].cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def not_tried(case: Case) -> list[str]:
    """What a user's own routing function was not asked in this case."""
    router, fill = case.asked_scenario.router, case.scenario.pad_fill
    if router in ROUTER_NAMES:
        return []
    if case.scenario.branch != "custom":
        return [
            f"fault {case.fault}: runs on branch {case.scenario.branch}, where router {router} is not called"
        ]
    others = [other for other in ("nan", "inf") if other != fill]
    return [f"router {router} with pads that hold {' or '.join(others)} (--pad-fill)"]
