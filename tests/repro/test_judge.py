"""The judge finds faults that are planted in the fixed engine, and explains the counts it sees."""

from dataclasses import dataclass, replace

import pytest
import torch

from repro import topk
from repro.case import make_case
from repro.engines import Observation, RankObservation
from repro.engines.builtin import FIXED, BuiltinEngine
from repro.errors import NotVerifiedError
from repro.hypotheses import explain_counts
from repro.judge import judge, row_ranges
from repro.runs import run_case
from repro.scenario import Scenario
from repro.truth import find_truth

SCENARIO = Scenario(tokens=(20, 13), bucket=64, attn_tp=4)


def codes_of(engine, scenario: Scenario = SCENARIO, fault: str = "mask") -> set[str]:
    run = run_case(scenario, fault, before=FIXED, after=engine)
    assert run.before.judgement.findings == ()
    return {finding.code for finding in run.after.judgement.findings}


# Mutants of the mask. Each replaces one function of repro.topk, or one answer of select_experts.


def plant(monkeypatch: pytest.MonkeyPatch, scenario: Scenario, **mutants) -> set[str]:
    """Codes found once the functions of ``repro.topk`` are replaced, where nothing was found before."""
    assert codes_of(FIXED, scenario) == set()
    for name, mutant in mutants.items():
        monkeypatch.setattr(topk, name, mutant)
    run = run_case(scenario, "mask", before=FIXED, after=FIXED)
    return {finding.code for finding in run.after.judgement.findings}


def masked(ids, rows, fill_value):
    return ids.masked_fill(rows.unsqueeze(-1), fill_value)


def row_numbers(ids):
    return torch.arange(ids.shape[0], device=ids.device)


def test_a_mask_that_begins_a_row_late_leaks_pads(monkeypatch):
    def mutant(ids, count, fill_value=-1):
        return masked(ids, row_numbers(ids) >= count + 1, fill_value)

    assert plant(monkeypatch, SCENARIO, _mask_topk_ids_padded_region=mutant) == {"PAD001"}


def test_a_mask_that_begins_a_row_early_loses_real_rows(monkeypatch):
    def mutant(ids, count, fill_value=-1):
        return masked(ids, row_numbers(ids) >= count - 1, fill_value)

    assert plant(monkeypatch, SCENARIO, _mask_topk_ids_padded_region=mutant) == {"PAD002"}


def test_greater_in_place_of_greater_or_equal_leaks_one_pad_a_shard(monkeypatch):
    def mutant(ids, count, fill_value=-1):
        return masked(ids, row_numbers(ids) > count, fill_value)

    assert plant(monkeypatch, SCENARIO, _mask_topk_ids_padded_region=mutant) == {"PAD001"}


def test_one_column_left_unmasked_leaks_pads(monkeypatch):
    def mutant(ids, count, fill_value=-1):
        out = masked(ids, row_numbers(ids) >= count, fill_value)
        out[:, -1] = ids[:, -1]
        return out

    assert plant(monkeypatch, SCENARIO, _mask_topk_ids_padded_region=mutant) == {"PAD001"}


def test_no_mask_at_all_leaks_pads(monkeypatch):
    def mutant(ids, _count, fill_value=-1):
        return ids

    assert plant(monkeypatch, SCENARIO, _mask_topk_ids_padded_region=mutant) == {"PAD001"}


def test_a_mask_before_the_remap_sends_pads_to_whatever_expert_minus_one_finds(monkeypatch):
    scenario = replace(SCENARIO, eplb="static", redundant_experts=3)
    remap, mask = topk.topk_ids_logical_to_physical, topk._mask_topk_ids_padded_region
    counts = iter([shard.count_bucket for shard in scenario.plan().shards] * 2)

    def mask_then_remap(ids, info):
        # -1 indexes the map's last entry, in every column.
        return remap(mask(ids, torch.tensor([next(counts)])), info)

    mutants = {
        "topk_ids_logical_to_physical": mask_then_remap,
        "_mask_topk_ids_padded_region": lambda ids, _count, fill_value=-1: ids,
    }
    assert plant(monkeypatch, scenario, **mutants) == {"PAD001", "PAD009"}


def test_hip_weights_left_as_they_were_leak_pads_to_expert_zero(monkeypatch):
    scenario = replace(SCENARIO, platform="hip")
    mutants = {"_zero_topk_weights_padded_region": lambda weights, _count: weights}
    assert plant(monkeypatch, scenario, **mutants) == {"PAD001", "PAD009"}


def test_hip_ids_of_minus_one_are_out_of_range_for_kernels_that_index_with_them(monkeypatch):
    scenario = replace(SCENARIO, platform="hip")

    def mutant(ids, count, fill_value=-1):
        return masked(ids, row_numbers(ids) >= count, -1)

    assert plant(monkeypatch, scenario, _mask_topk_ids_padded_region=mutant) == {"PAD001", "PAD008"}


def test_hip_weights_zeroed_a_row_early_lose_real_rows(monkeypatch):
    scenario = replace(SCENARIO, platform="hip")

    def mutant(weights, count):
        return masked(weights, row_numbers(weights) >= count - 1, 0.0)

    assert plant(monkeypatch, scenario, _zero_topk_weights_padded_region=mutant) == {"PAD002"}


def test_a_remap_that_is_wrong_for_real_rows_is_told(monkeypatch):
    scenario = replace(SCENARIO, eplb="static")
    assert plant(monkeypatch, scenario, topk_ids_logical_to_physical=lambda ids, _info: ids) == {"PAD019"}


@pytest.mark.parametrize("platform", ["cuda", "hip"])
def test_weights_of_the_wrong_rows_are_told(monkeypatch, platform):
    route = topk._route

    def mutant(hidden_states, router_logits, config):
        weights, ids = route(hidden_states, router_logits, config)
        return weights.roll(1, dims=0), ids

    assert "PAD019" in plant(monkeypatch, replace(SCENARIO, platform=platform), _route=mutant)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda weights, ids: (weights, torch.zeros_like(ids)), "PAD009"),
        (lambda weights, ids: (weights, torch.full_like(ids, 129)), "PAD008"),
        (lambda weights, ids: (weights * float("nan"), ids), "PAD010"),
    ],
    ids=["zeros", "out-of-range", "nan"],
)
def test_rows_that_break_the_contract_of_ids_and_weights_are_told(monkeypatch, change, code):
    """A row of NaN logits has given eight zeros, and id 129 of 128 experts."""
    scenario = Scenario(tokens=(20,), experts=128, top_k=8)
    route = topk._route
    assert code in plant(monkeypatch, scenario, _route=lambda *arguments: change(*route(*arguments)))


# Mutants of the count.


@dataclass(frozen=True)
class WrongCount(BuiltinEngine):
    """The fixed engine with another count in its buffer: ``wrong(case, rank, shard)``."""

    wrong: object = None

    def local_count(self, case, rank, shard):
        return torch.tensor([self.wrong(case, rank, shard)], dtype=torch.int32)


def with_count(wrong) -> WrongCount:
    return WrongCount(FIXED.name, FIXED.rules, FIXED.recompute_num_token_non_padded, wrong)


def shard_of(case, dp_rank, attn_tp_rank):
    return case.plan.ranks[dp_rank].shards[attn_tp_rank]


MUTANTS = {
    "off by one upwards": (lambda c, r, s: s.real_rows + 1, {"PAD001", "PAD003", "PAD017"}),
    "off by one downwards": (lambda c, r, s: max(s.real_rows - 1, 0), {"PAD002", "PAD003"}),
    "rank offset dropped": (lambda c, r, s: min(r.num_tokens, s.rows), {"PAD001", "PAD003"}),
    "swapped between ranks": (
        lambda c, r, s: shard_of(c, s.dp_rank, s.attn_tp_rank ^ 1).real_rows,
        {"PAD001", "PAD002", "PAD003"},
    ),
    "of the wrong DP rank": (
        lambda c, r, s: shard_of(c, 1 - s.dp_rank, s.attn_tp_rank).real_rows,
        {"PAD001", "PAD002", "PAD003"},
    ),
    "raw length": (lambda c, r, s: s.count_raw, {"PAD001", "PAD002", "PAD003"}),
    "whole count of the DP rank": (lambda c, r, s: r.num_tokens, {"PAD001", "PAD003", "PAD017"}),
    "value at capture": (lambda c, r, s: s.rows, {"PAD001", "PAD003"}),
    "negative": (lambda c, r, s: -1, {"PAD002", "PAD003", "PAD017"}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_count_is_told_with_what_it_does(name):
    wrong, codes = MUTANTS[name]
    assert codes_of(with_count(wrong), fault="count") == codes


@pytest.mark.parametrize("platform", ["cuda", "hip"])
def test_a_count_that_routes_an_idle_rank_is_told(platform):
    scenario = replace(SCENARIO, tokens=(20, 0), platform=platform)
    engine = with_count(lambda case, rank, shard: shard.real_rows if rank.num_tokens else 1)
    assert codes_of(engine, scenario, "count") == {"PAD001", "PAD003", "PAD018"}


def test_requests_counted_where_tokens_are_meant_are_told():
    scenario = Scenario(mode="decode", tokens=(24,), tokens_per_request=4, bucket=64, attn_tp=4)
    engine = with_count(lambda case, rank, shard: min(max(6 - shard.row_start, 0), shard.rows))
    run = run_case(scenario, "count", before=FIXED, after=engine)
    finding = next(f for f in run.after.judgement.findings if f.code == "PAD003")
    assert finding.message == (
        "count 6 where 16 rows are real; counts [6, 0, 0, 0] are what counting 6 requests where 24 tokens are "
        "meant gives"
    )


def test_rows_that_no_shard_owns_are_an_error_only_where_one_is_real():
    real = run_case(
        Scenario(tokens=(28,), raw_length=28, bucket=28, attn_tp=8), "count", before=FIXED, after=FIXED
    )
    pads = run_case(Scenario(tokens=(20,), bucket=28, attn_tp=8), "count", before=FIXED, after=FIXED)
    found = [
        [(f.code, f.severity, f.rows, f.message) for f in run.after.judgement.findings]
        for run in (real, pads)
    ]
    text = "28 rows over 8 attention-TP ranks leave 4 rows to no rank, {} of them real"
    assert found == [
        [("PAD005", "error", "24-27", text.format(4))],
        [("PAD005", "warning", "24-27", text.format(0))],
    ]


# The evidence.


def test_a_wrong_count_carries_all_counts_and_their_explanation():
    engine = with_count(lambda case, rank, shard: shard.count_raw)
    run = run_case(Scenario(tokens=(20,), bucket=64, attn_tp=4), "count", before=FIXED, after=engine)
    findings = [f for f in run.after.judgement.findings if f.code == "PAD003"]
    assert [(f.attn_tp_rank, f.expected, f.seen) for f in findings] == [
        (rank, [16, 4, 0, 0], [5, 5, 5, 5]) for rank in range(4)
    ]
    assert findings[0].message == (
        "count 5 where 16 rows are real; counts [5, 5, 5, 5] are what localising against the raw length 20 "
        "instead of 64 rows gives"
    )


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([5, 5, 5, 5], "localising against the raw length 20 instead of 64 rows gives"),
        ([20] * 4, "the DP rank's whole count 20 used on every shard gives"),
        ([33] * 4, "the count 33 of all DP ranks, not localised at all gives"),
        ([64] * 4, "a capture-time value, every row of the bucket real, gives"),
        (
            [16, 16, 16, 16],
            "a capture-time value, every row of the shard real, gives (as does dropping the rank offset)",
        ),
        ([13, 0, 0, 0], "taking the count of DP rank 1 gives"),
        ([0, 0, 4, 16], "giving the right counts to the wrong ranks gives"),
        ([17, 5, 1, 1], "being off by +1 on every rank gives"),
        ([16, 3, 0, 0], "being off by -1 before localising gives"),
        ([None, 5, None, 5], "localising against the raw length 20 instead of 64 rows gives"),
    ],
)
def test_counts_are_explained_by_the_way_of_being_wrong_that_gives_exactly_them(counts, text):
    plan = SCENARIO.plan()
    assert explain_counts(SCENARIO, plan, plan.ranks[0], counts).endswith(text)


def test_counts_that_fit_nothing_are_said_to_fit_nothing():
    plan = SCENARIO.plan()
    text = explain_counts(SCENARIO, plan, plan.ranks[0], [9, 9, 1, 0])
    assert text == "no known way of being wrong gives the counts [9, 9, 1, 0]"


def test_a_leaked_row_is_quoted_with_its_ids_and_weights():
    engine = with_count(lambda case, rank, shard: shard.count_bucket + (shard.attn_tp_rank == 1))
    run = run_case(Scenario(tokens=(20,), pad_fill="nan"), "count", before=FIXED, after=engine)
    finding = next(f for f in run.after.judgement.findings if f.code == "PAD001")
    assert (finding.rows, finding.expected, finding.message) == ("20", "id -1", "1 pad row keeps experts")
    assert [quote["row"] for quote in finding.seen] == [20]
    assert finding.seen[0]["weights"] == ["nan", "nan"]


@pytest.mark.parametrize(
    ("rows", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2,5,7-8"), ([2, 1], "1-2")]
)
def test_row_numbers_are_written_as_ranges(rows, text):
    assert row_ranges(rows) == text


# What cannot be judged is not judged.


def observe(change) -> Observation:
    case = make_case(SCENARIO, "mask")
    return Observation("odd", tuple(change(rank) for rank in FIXED.observe(case).ranks))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: replace(r, topk_ids=r.topk_ids[:, :1]), r"ids \(16, 1\)"),
        (lambda r: replace(r, topk_weights=r.topk_weights[:-1]), r"weights \(15, 2\)"),
        (lambda r: replace(r, topk_ids=r.topk_ids.short()), "int16"),
        (lambda r: replace(r, topk_ids=r.topk_ids.float()), "float32"),
        (lambda r: replace(r, topk_weights=r.topk_weights.long()), "int64"),
        (lambda r: replace(r, attn_tp_rank=0), "once for every rank"),
    ],
)
def test_an_observation_of_the_wrong_form_is_not_judged(change, message):
    case = make_case(SCENARIO, "mask")
    truth = find_truth(case.scenario, case.plan, case.batches, case.layer)
    with pytest.raises(NotVerifiedError, match=message):
        judge(case, truth, observe(change))


def test_a_rank_that_did_not_answer_is_not_judged():
    case = make_case(SCENARIO, "mask")
    truth = find_truth(case.scenario, case.plan, case.batches, case.layer)
    observation = FIXED.observe(case)
    with pytest.raises(NotVerifiedError, match="once for every rank"):
        judge(case, truth, replace(observation, ranks=observation.ranks[1:]))


def test_a_choice_between_tied_experts_is_reported_as_not_compared():
    case = make_case(Scenario(tokens=(4,), bucket=4, attn_tp=1, experts=4), "mask")
    case.batches[0].router_logits.fill_(1.0)
    truth = find_truth(case.scenario, case.plan, case.batches, case.layer)
    ids = torch.tensor([[2, 3]] * 4, dtype=torch.int32)
    seen = RankObservation(0, 0, 4, ids, torch.full((4, 2), 0.5))
    judgement = judge(case, truth, Observation("other", (seen,)))
    assert judgement.findings == ()
    assert judgement.not_checked == ("4 real rows of other chose between experts that tie within rounding",)
