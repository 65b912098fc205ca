"""An engine for moepad that does softmax top-k, and masks what is past its count."""

from __future__ import annotations

from repro.case import Case
from repro.engines import Engine, Observation, RankObservation
from repro.errors import EngineSpecError, NotVerifiedError
from repro.plan import Shard


def make_engine(spec: str) -> Engine:
    """``spec`` is what the caller typed: the name, and what follows it (``example@v2``)."""
    if spec != "example":
        raise EngineSpecError(f"{spec}: this engine has one version; give example")
    return ExampleEngine()


class ExampleEngine:
    name = "example"

    def observe(self, case: Case) -> Observation:
        scenario = case.scenario
        one_group = scenario.branch == "grouped" and scenario.num_expert_group == 1
        if scenario.branch != "softmax" and not one_group:
            raise NotVerifiedError(f"{self.name}: does softmax top-k only, not {scenario.branch}")
        if scenario.eplb != "none" or scenario.num_fused_shared_experts:
            raise NotVerifiedError(f"{self.name}: has neither a remap of experts nor shared ones")
        return Observation(self.name, tuple(self._rank(case, shard) for shard in case.plan.shards))

    def _rank(self, case: Case, shard: Shard) -> RankObservation:
        """What one attention-TP rank does with its rows of the padded batch."""
        scenario, batch = case.scenario, case.batches[shard.dp_rank]
        count = shard.count_bucket  # a mask case gives the true count
        if case.fault == "count":  # a count case asks for the engine's own
            count = min(max(batch.num_token_non_padded_cpu - shard.row_start, 0), shard.rows)
        router_logits = batch.router_logits[shard.row_start : shard.row_end]
        weights, ids = router_logits.softmax(dim=1).topk(scenario.top_k, dim=1)
        if scenario.renormalize:
            weights = weights / weights.sum(dim=1, keepdim=True)
        if scenario.platform == "hip":
            ids[count:], weights[count:] = 0, 0.0
        else:
            ids[count:] = -1
        return RankObservation(shard.dp_rank, shard.attn_tp_rank, count, ids.cpu(), weights.cpu())
