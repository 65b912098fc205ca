"""The judge finds faults that are planted in the fixed engine, and explains the counts it sees."""

from dataclasses import dataclass, replace

import pytest
import torch

from repro import topk
from repro.case import make_case
from repro.engines import Observation, RankObservation
from repro.engines.builtin import FIXED, PREFIX, BuiltinEngine
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


EARLY = with_count(lambda case, rank, shard: max(shard.real_rows - 1, 0))


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
        "count 6, real rows 16: counts [6, 0, 0, 0] are what counting 6 requests where 24 tokens are meant gives"
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
        "count 5, real rows 16: counts [5, 5, 5, 5] are what localising against the raw length 20 gives"
    )


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([5, 5, 5, 5], "localising against the raw length 20 gives"),
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
        ([None, 5, None, 5], "localising against the raw length 20 gives"),
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
        judge(case, truth, observe(change), "odd")


def test_a_rank_that_did_not_answer_is_not_judged():
    case = make_case(SCENARIO, "mask")
    truth = find_truth(case.scenario, case.plan, case.batches, case.layer)
    observation = FIXED.observe(case)
    with pytest.raises(NotVerifiedError, match="once for every rank"):
        judge(case, truth, replace(observation, ranks=observation.ranks[1:]), "fixed")


def judge_ids(logits: list[float], ids: list[int], weights: list[float], **values):
    """The judgement of one row of these logits that went to these ids."""
    scenario = Scenario(**{"tokens": (1,), "bucket": 1, "attn_tp": 1, "experts": len(logits), **values})
    case = make_case(scenario, "mask")
    case.batches[0].router_logits.copy_(torch.tensor([logits]))
    truth = find_truth(case.scenario, case.plan, case.batches, case.layer)
    seen = RankObservation(0, 0, 1, torch.tensor([ids], dtype=torch.int32), torch.tensor([weights]))
    return judge(case, truth, Observation("other", (seen,)), "other")


def test_any_choice_among_tied_experts_is_right_and_no_other_is():
    tied = [2.0, 1.0, 1.0, 0.0]
    share = [0.7310586, 0.2689414]
    assert judge_ids(tied, [0, 1], share).findings == judge_ids(tied, [0, 2], share).findings == ()
    for ids, weights in (([0, 3], share), ([1, 2], share), ([0, 2], share[::-1]), ([0, 2], [0.74, 0.26])):
        assert [finding.code for finding in judge_ids(tied, ids, weights).findings] == ["PAD019"]


def test_a_row_that_rounding_decides_is_reported_as_not_checked():
    judgement = judge_ids(
        [1.0, 0.0, 1.0, 0.0], [2, 3], [0.7, 0.3], branch="grouped", num_expert_group=2, topk_group=1
    )
    assert judgement.findings == ()
    assert judgement.not_checked == ("the routing of 1 real rows, which rounding decides",)


def test_a_gap_well_beyond_rounding_is_no_tie():
    judgement = judge_ids([2.0, 1.0, 1.0001, 0.0], [0, 1], [0.7310788, 0.2689212])
    assert [finding.code for finding in judgement.findings] == ["PAD019"]


@pytest.mark.parametrize(
    ("dtype", "factor", "told"),
    [
        ("float32", 1.0001, True),
        ("float32", 1.000001, False),
        ("bfloat16", 1.03, True),
        ("float16", 1.005, True),
    ],
)
def test_weights_may_be_off_by_rounding_and_no_more(monkeypatch, dtype, factor, told):
    route = topk._route

    def mutant(*arguments):
        weights, ids = route(*arguments)
        return (weights.double() * factor).to(weights.dtype), ids

    scenario = replace(SCENARIO, weight_dtype=dtype, renormalize=False)
    assert plant(monkeypatch, scenario, _route=mutant) == ({"PAD019"} if told else set())


def test_weights_of_less_precision_than_promised_are_told(monkeypatch):
    route = topk._route

    def mutant(*arguments):
        weights, ids = route(*arguments)
        return (weights * 1.2).bfloat16(), ids

    assert plant(monkeypatch, SCENARIO, _route=mutant) == {"PAD019"}


def change_rank(change, scenario: Scenario = SCENARIO, fault: str = "mask"):
    """The judgement of the fixed engine with every rank's observation changed."""
    case = make_case(scenario, fault)
    truth = find_truth(case.scenario, case.plan, case.batches, case.layer)
    seen = Observation("odd", tuple(change(rank) for rank in FIXED.observe(case).ranks))
    return judge(case, truth, seen, "odd")


def test_a_real_row_masked_in_one_column_is_lost():
    def change(rank):
        ids = rank.topk_ids.clone()
        ids[0, 1] = -1
        return replace(rank, topk_ids=ids)

    lost = [outcome.lost for outcome in change_rank(change).outcomes]
    assert lost == [(0,), (16,), (), (), (0,), (), (), ()]


def test_a_real_hip_row_with_one_zero_weight_is_rerouted_and_not_lost():
    def change(rank):
        weights = rank.topk_weights.clone()
        weights[0, 1] = 0
        return replace(rank, topk_weights=weights)

    judgement = change_rank(change, replace(SCENARIO, platform="hip"))
    assert {finding.code for finding in judgement.findings} == {"PAD019"}


def test_masked_hip_rows_are_held_to_the_range_of_ids_too():
    def change(rank):
        return replace(rank, topk_ids=torch.where(rank.topk_weights == 0, 99, rank.topk_ids))

    judgement = change_rank(change, replace(SCENARIO, platform="hip", eplb="static"))
    assert {finding.code for finding in judgement.findings} == {"PAD008"}
    assert judgement.not_checked == (
        "which ids in range masked rows hold (hip, with a remap or shared experts)",
    )


def test_the_replica_that_a_row_goes_to_is_said_to_be_unchecked():
    judgement = change_rank(lambda rank: rank, replace(SCENARIO, eplb="dynamic", redundant_experts=2))
    assert judgement.not_checked == ("which replica of an expert a row goes to",)


def test_evidence_of_a_rerouted_row_has_both_sides_in_logical_ids_with_weights():
    scenario = Scenario(tokens=(1,), bucket=4, attn_tp=1, eplb="static", redundant_experts=4)
    judgement = change_rank(lambda rank: replace(rank, topk_weights=rank.topk_weights * 1.1), scenario)
    (finding,) = judgement.findings
    (expected,), (seen,) = finding.expected, finding.seen
    assert (finding.code, expected["row"], expected["ids"]) == ("PAD019", 0, seen["ids"])
    assert seen["weights"] == pytest.approx([1.1 * weight for weight in expected["weights"]])


def test_an_error_without_text_is_an_error():
    judgement = change_rank(lambda rank: replace(rank, error=""))
    assert {finding.code for finding in judgement.findings} == {"PAD004"}


def write_router(folder, body: str) -> str:
    path = folder / "mine.py"
    path.write_text(f"import torch\n\ndef route(hidden_states, gating_output, topk, renormalize):\n{body}")
    return f"{path}:route"


HALVES = "torch.full((len(gating_output), topk), 0.5)"
OUT_OF_RANGE = {
    "minus one": f"    return {HALVES}, torch.full((len(gating_output), topk), -1)\n",
    "minus a hundred": f"    return {HALVES}, torch.full((len(gating_output), topk), -100)\n",
    "one too many": f"    return {HALVES}, torch.tensor([[16, 3]]).repeat(len(gating_output), 1)\n",
    "far off": f"    return {HALVES}, torch.tensor([[90, 91]]).repeat(len(gating_output), 1)\n",
}
BODIES = {
    **{name: (body, {"PAD008"}) for name, body in OUT_OF_RANGE.items()},
    "nan": ("    w, i = gating_output.topk(topk)\n    return w * float('nan'), i\n", {"PAD010"}),
    "duplicates": ("    w, i = gating_output.topk(topk)\n    return w, i * 0\n", {"PAD009"}),
    "zero weights": ("    w, i = gating_output.topk(topk)\n    return w * 0, i\n", set()),
}


@pytest.mark.parametrize(("body", "codes"), BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("platform", ["cuda", "hip"])
def test_what_a_router_of_ones_own_gives_is_no_fault_of_the_mask(tmp_path, platform, body, codes):
    scenario = Scenario(
        tokens=(20,), router=write_router(tmp_path, body), platform=platform, pad_fill="zeros"
    )
    run = run_case(scenario, "mask", before=FIXED, after=FIXED)
    assert {finding.code for finding in run.after.judgement.findings} == codes


@pytest.mark.parametrize("body", OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
@pytest.mark.parametrize("platform", ["cuda", "hip"])
@pytest.mark.parametrize(
    "values",
    [
        {"eplb": "static", "redundant_experts": 3},
        {"eplb": "dynamic", "redundant_experts": 3},
        {"num_fused_shared_experts": 2},
        {"eplb": "dynamic", "num_fused_shared_experts": 1},
    ],
    ids=["static", "dynamic", "shared", "both"],
)
def test_ids_of_a_router_that_no_expert_has_are_told_whatever_becomes_of_them(
    tmp_path, body, platform, values
):
    scenario = Scenario(
        tokens=(20, 2), router=write_router(tmp_path, body), platform=platform, pad_fill="zeros", **values
    )
    run = run_case(scenario, "mask", before=PREFIX, after=FIXED)
    assert [(f.code, f.dp_rank, f.rows, f.message) for f in run.after.judgement.findings] == [
        ("PAD008", dp_rank, rows, f"the router itself gives {number} ids outside 0..15")
        for dp_rank, rows, number in (
            (0, "0-15", "16 real rows"),
            (0, "16-19", "4 real rows"),
            (1, "0-1", "2 real rows"),
        )
    ]
    given = [quote["ids"][:2] for quote in run.after.judgement.findings[0].seen]
    assert given == [list(row.ids[:2]) for row in run.truth.routing[0][:3]]
    assert min(given[0]) < 0 or max(given[0]) > 15
    replaced = "what the remap makes of ids outside 0..15: rows with one went in as experts 0..1"
    assert (replaced in run.after.judgement.not_checked) == ("eplb" in values)
    of_real_rows = [f for f in run.before.judgement.findings if "the router itself" in f.message]
    assert [(f.code, f.dp_rank) for f in of_real_rows] == [("PAD008", 0), ("PAD008", 0), ("PAD008", 1)]
    assert len({(f.code, f.dp_rank, f.attn_tp_rank) for f in run.before.judgement.findings}) == len(
        run.before.judgement.findings
    )


def test_one_id_out_of_range_does_not_hide_what_happens_to_other_rows(tmp_path):
    scenario = Scenario(tokens=(20,), eplb="static", redundant_experts=1)
    first_logit = float(make_case(scenario, "mask").batches[0].router_logits[7, 0])
    body = (
        "    w, i = gating_output.softmax(-1).topk(topk)\n"
        f"    return w, torch.where(gating_output[:, :1] == {first_logit!r}, 99, i)\n"
    )
    run = run_case(replace(scenario, router=write_router(tmp_path, body)), "mask", before=FIXED, after=EARLY)
    assert [(f.code, f.rows, f.message) for f in run.before.judgement.findings] == [
        ("PAD008", "7", "the router itself gives 1 real row ids outside 0..15")
    ]
    assert [(f.code, f.rows) for f in run.after.judgement.findings if f.attn_tp_rank == 0] == [
        ("PAD002", "15"),
        ("PAD003", None),
        ("PAD008", "7"),
    ]


def test_ids_out_of_range_on_pads_alone_are_told_of_the_pads(tmp_path):
    body = (
        "    w, i = gating_output.nan_to_num(0).softmax(-1).topk(topk)\n"
        "    return w, torch.where(gating_output.isnan().any(1, keepdim=True), 129, i)\n"
    )
    scenario = Scenario(tokens=(20,), router=write_router(tmp_path, body), pad_fill="nan")
    run = run_case(scenario, "mask", before=PREFIX, after=FIXED)
    assert run.after.judgement.findings == ()
    assert [(f.rows, f.message) for f in run.before.judgement.findings if f.code == "PAD008"] == [
        ("20-31", "12 rows hold ids outside 0..15"),
        ("32-47", "16 rows hold ids outside 0..15"),
        ("48-63", "16 rows hold ids outside 0..15"),
    ]
    with pytest.raises(NotVerifiedError, match=r"^engine prefix: IndexError"):
        run_case(replace(scenario, eplb="static"), "mask", before=PREFIX, after=FIXED)


def test_a_router_is_given_the_hidden_states_of_its_own_rows(tmp_path):
    body = "    w, i = hidden_states.softmax(-1).topk(topk)\n    return w, i.int()\n"
    run = run_case(Scenario(router=write_router(tmp_path, body)), "mask", before=FIXED, after=FIXED)
    assert run.after.judgement.findings == ()


def test_a_tied_row_of_a_router_that_never_renormalises_is_right():
    values = {"router": "sigmoid-top1", "top_k": 1}
    for expert in (1, 2):
        assert judge_ids([-1.0, 0.3, 0.3], [expert], [0.5744425], **values).findings == ()
    assert judge_ids([-1.0, 0.3, 0.3], [1], [1.0], **values).findings != ()


def test_a_router_that_hands_out_one_buffer_again_and_again_is_right(tmp_path):
    body = (
        "    w, i = gating_output.softmax(-1).topk(topk)\n"
        "    out = BUFFER[: len(w), :topk]\n"
        "    out.copy_(w)\n"
        "    return out, i.int()\n\nBUFFER = torch.empty(64, 8)\n"
    )
    run = run_case(Scenario(router=write_router(tmp_path, body)), "mask", before=FIXED, after=FIXED)
    assert run.after.judgement.findings == ()
