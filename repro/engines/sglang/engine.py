"""A real SGLang as an engine: a case goes to the worker as items, and comes back as an observation.

torch is imported where it is needed only, so that a worker is under way before its caller has loaded it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from repro.engines.sglang.locate import Tree, locate
from repro.engines.sglang.process import Worker
from repro.errors import NotVerifiedError
from repro.plan import DpRankPlan, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from repro.case import Case
    from repro.engines.protocol import Observation
_SCORING = {"sigmoid": "sigmoid", "sqrt-softplus": "sqrtsoftplus"}


class SglangEngine:
    """One SGLang tree in a worker process. ``without`` names shims to take away: nothing is called safe then."""

    def __init__(self, tree: Tree, worker: Worker, without: Sequence[str] = ()) -> None:
        self.name = tree.label
        self.version = tree.version
        self.loaded: dict[str, dict[str, Any]] = {}
        self._tree, self._worker, self._without = tree, worker, tuple(without)
        self._platform: str | None = None
        self._failed: dict[str, str] = {}
        if tree.root is not None:
            worker.prepare(str(tree.root))

    def observe(self, case: Case) -> Observation:
        """Run the case on every rank, in the worker.

        Raises:
            NotVerifiedError: the tree does not load, or gave no answer that could be judged.
        """
        from repro.engines.protocol import Observation, RankObservation

        items: list[dict[str, Any]] = []
        tensors: dict[str, Tensor] = {}
        for batch in case.batches:
            tensors[f"hidden_states.{batch.dp_rank}"] = batch.hidden_states.cpu()
            tensors[f"router_logits.{batch.dp_rank}"] = batch.router_logits.cpu()
        for rank in case.plan.ranks:
            for shard in rank.shards:
                items.append(_item(case, rank, shard, len(items), tensors))
        try:
            self._open(case.scenario.platform)
            results, given = self._worker.observe(items, tensors)
        except NotVerifiedError as err:
            self._platform = None
            raise NotVerifiedError(f"{self.name}: cannot verify: {err}") from err
        self.loaded[case.scenario.platform] = results[-1].get("described", {})
        ranks = []
        for number, (shard, result) in enumerate(zip(case.plan.shards, results, strict=True)):
            if result.get("cannot_verify"):
                raise NotVerifiedError(f"{self.name}: cannot verify: {result['cannot_verify']}")
            count, error = result.get("count"), result.get("error")
            ids, weights = given.get(f"ids.{number}"), given.get(f"weights.{number}")
            if (
                not isinstance(count, int | None)
                or not isinstance(error, str | None)
                or ids is None
                or weights is None
            ):
                # A tree may write to the worker's pipe what it likes.
                raise NotVerifiedError(
                    f"{self.name}: cannot verify: its worker gave no count, ids and weights"
                )
            ranks.append(RankObservation(shard.dp_rank, shard.attn_tp_rank, count, ids, weights, error))
        return Observation(self.name, tuple(ranks))

    def _open(self, platform: str) -> None:
        if platform == self._platform:
            return
        if platform in self._failed:
            # Another try would cost as much as this one, up to the time limit.
            raise NotVerifiedError(self._failed[platform])
        self._worker.close()
        root = str(self._tree.root) if self._tree.root is not None else None
        try:
            self.loaded[platform] = self._worker.open(tree=root, platform=platform, without=self._without)
        except NotVerifiedError as err:
            self._failed[platform] = str(err)
            raise
        self._platform = platform

    def log(self) -> str:
        """What the worker wrote to standard error, its last 64 KiB."""
        return self._worker.log()

    def stop(self) -> None:
        """Ends the worker process."""
        self._worker.stop()


def start(spec: str, worker: Worker | None) -> SglangEngine:
    """The engine of ``sglang``, ``sglang==VERSION``, ``sglang@PATH`` or ``sglang@PATH#REVISION`` in that worker,
    or in one of its own.

    Raises:
        EngineSpecError, NotVerifiedError: as ``locate``.
    """
    worker = worker or Worker()
    try:
        return SglangEngine(locate(spec), worker)
    except BaseException:
        worker.stop()
        raise


def _item(
    case: Case, rank: DpRankPlan, shard: Shard, number: int, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    return {
        "rank": {"attn_tp_size": case.plan.attn_tp_size, "attn_tp_rank": shard.attn_tp_rank},
        "count": _count(case, rank, shard),
        "route": _route(case, shard, number, tensors),
    }


def _count(case: Case, rank: DpRankPlan, shard: Shard) -> int | dict[str, Any]:
    scenario = case.scenario
    if case.fault == "mask":
        return shard.count_bucket
    if rank.eager:
        localised = scenario.gathered and not scenario.replicated
        return {
            "eager": {"global": rank.num_tokens, "raw_num_tokens": rank.raw_length, "localised": localised}
        }
    full, shortest = rank.padded_num_tokens, case.plan.attn_tp_size * scenario.tokens_per_request
    # The replay comes after others, shorter and longer, whose counts must not stay behind.
    earlier = [(full, full), (scenario.tokens_per_request, min(shortest, full)), (full, full)]
    fills = [
        {"global": num_tokens, "carried": None, "raw_num_tokens": raw_num_tokens}
        for num_tokens, raw_num_tokens in (*earlier, (rank.num_tokens, rank.raw_length))
    ]
    return {
        "replay": {
            "mode": scenario.mode,
            "require_gathered_buffer": scenario.require_gathered_buffer,
            "enable_prefill_cp": scenario.enable_prefill_cp,
            "sharded": not scenario.replicated,
            "tokens_per_request": scenario.tokens_per_request,
            "bucket": full,
            "fills": fills,
        }
    }


def _route(case: Case, shard: Shard, number: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
    import torch

    from repro.engines.builtin import dispatch_info
    from repro.routers import call_router

    scenario, bias = case.scenario, case.layer.correction_bias
    dispatch = dispatch_info(case, shard)
    route: dict[str, Any] = {
        "branch": scenario.branch,
        "scoring_func": _SCORING.get(scenario.branch, "softmax"),
        "top_k": scenario.top_k,
        "num_fused_shared_experts": scenario.num_fused_shared_experts,
        "renormalize": scenario.renormalize,
        "num_expert_group": scenario.num_expert_group,
        "topk_group": scenario.topk_group,
        "routed_scaling_factor": scenario.routed_scaling_factor,
        "hidden_states": f"hidden_states.{shard.dp_rank}",
        "router_logits": f"router_logits.{shard.dp_rank}",
        "rows": [shard.row_start, shard.row_end],
        "router": None,
        "correction_bias": None,
        "dispatch": None,
    }
    if case.routing_function is not None:
        batch, rows = case.batches[shard.dp_rank], slice(shard.row_start, shard.row_end)
        weights, ids = call_router(
            case.routing_function,
            # Copies: a user's routing function may write into what it is given, and give the same buffer twice.
            batch.hidden_states[rows].clone(),
            batch.router_logits[rows].clone(),
            scenario.top_k,
            scenario.renormalize,
            name=scenario.router,
        )
        route["router"] = _named(tensors, f"router.{number}", weights=weights.clone(), ids=ids.clone())
    if bias is None and scenario.branch in _SCORING:
        # The router kernel refuses these scores without a bias; zeros choose as none does.
        bias = (0.0,) * scenario.experts
    if bias is not None:
        tensors["correction_bias"] = torch.tensor(bias)
        route["correction_bias"] = "correction_bias"
    if dispatch is not None:
        maps = _named(
            tensors,
            f"dispatch.{number}",
            rank_map=dispatch.partial_logical_to_rank_dispatch_physical_map,
            all_map=dispatch.partial_logical_to_all_physical_map,
            num_valid=dispatch.partial_logical_to_all_physical_map_num_valid,
        )
        route["dispatch"] = {
            "ep_dispatch_algorithm": dispatch.ep_dispatch_algorithm,
            "num_physical_experts": dispatch.num_physical_experts,
            **maps,
        }
    return route


def _named(tensors: dict[str, Tensor], prefix: str, **values: Tensor | None) -> dict[str, str]:
    """Puts tensors among those to send; gives their names."""
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        tensors[f"{prefix}.{name}"] = value.detach().cpu()
    return {name: f"{prefix}.{name}" for name in given}
