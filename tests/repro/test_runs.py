"""Whole runs of the built-in engines over random scenarios, against what walking the rows says."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.batch import make_batches, make_layer
from repro.case import make_case, route_alone
from repro.engines import BUILTIN_ENGINES
from repro.runs import compare_verdict, find_changes, repro_verdict, run_case, run_tables, shows_fault
from repro.scenario import BRANCHES, PAD_FILLS, ROUTERS, Scenario

PREFIX, FIXED = BUILTIN_ENGINES["prefix"], BUILTIN_ENGINES["fixed"]
REFUSED_BEFORE = ("custom", "torch-native")
# The fix of 0.5.17 left torch-native as it was: given a count, it still raises, and its pads are still routed.
REFUSED_AFTER = ("torch-native",)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    attn_tp = draw(st.sampled_from([1, 2, 3, 4, 8]))
    mode = draw(st.sampled_from(["prefill", "prefill", "decode"]))
    per_request = draw(st.sampled_from([1, 2, 4])) if mode == "decode" else 1
    unit = per_request
    tokens = tuple(unit * n for n in draw(st.lists(st.integers(0, 40 // unit), min_size=1, max_size=3)))
    align = draw(st.sampled_from([1, 1, 2, 6]))
    longest = -(-max(*tokens, 1) // (attn_tp * align * unit)) * attn_tp * align * unit
    bucket = longest + unit * draw(st.integers(0, 40 // unit))
    branch = draw(st.sampled_from([*BRANCHES, "custom", "custom"]))
    router = draw(st.sampled_from(ROUTERS)) if branch == "custom" else "softmax"
    top_k = {"sigmoid-top1": 1, "sparse-mixer": 2}.get(router, draw(st.integers(1, 4)))
    eplb = draw(st.sampled_from(["none", "static", "dynamic"])) if branch != "torch-native" else "none"
    return Scenario(
        tokens=tokens,
        attn_tp=attn_tp,
        bucket=bucket,
        align=align,
        dp_padding=draw(st.sampled_from(["max-len", "sum-len"])),
        max_padding_factor=draw(st.sampled_from([None, 1.5, 2])),
        replicated=draw(st.booleans()) and draw(st.booleans()),
        require_gathered_buffer=draw(st.booleans()) or draw(st.booleans()),
        enable_prefill_cp=draw(st.booleans()) and draw(st.booleans()),
        mode=mode,
        tokens_per_request=per_request,
        pad_fill=draw(st.sampled_from(PAD_FILLS)),
        platform=draw(st.sampled_from(["cuda", "hip"])),
        branch=branch,
        router=router,
        experts=16,
        top_k=top_k,
        renormalize=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        num_fused_shared_experts=draw(st.sampled_from([0, 0, 1, 2])),
        eplb=eplb,
        redundant_experts=draw(st.integers(0, 5)) if eplb != "none" else 0,
        id_dtype=draw(st.sampled_from(["int32", "int64"])),
        weight_dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        seed=draw(st.integers(0, 1000)),
    )


def walked_codes(scenario: Scenario, fault: str, *, fixed: bool) -> set[str]:
    """The codes that a run must find, from rows walked one by one and the pre-fix formula written out."""
    codes = set()
    a = scenario.attn_tp
    sharded = scenario.gathered and not scenario.replicated
    refused = fault == "mask" and scenario.branch in (REFUSED_AFTER if fixed else REFUSED_BEFORE)
    if fault == "count" and scenario.branch == "torch-native":
        refused = True
    for rank in scenario.plan().ranks:
        n, rows, length = rank.num_tokens, rank.padded_num_tokens, rank.raw_length
        size = rows // a if sharded else rows
        if sharded and rows % a:
            codes.add("PAD005")
        if refused:
            codes.add("PAD004")
        for r in range(a):
            start = r * size if sharded else 0
            real = [row < n for row in range(start, start + size)]
            true = sum(real)
            count = true
            if fault == "count" and not fixed:
                localises = scenario.require_gathered_buffer and not scenario.enable_prefill_cp
                cut_from = (length if scenario.mode == "prefill" else rows) // a
                count = min(max(n - r * cut_from, 0), cut_from) if localises else n
            masked = [False] * size if refused else [row >= count for row in range(size)]
            leaks = any(not m and not is_real for m, is_real in zip(masked, real, strict=True))
            if leaks:
                codes.add("PAD001")
            if any(m and is_real for m, is_real in zip(masked, real, strict=True)):
                codes.add("PAD002")
            if not refused and count != true:
                codes.add("PAD003")
            if not refused and count > size:
                codes.add("PAD017")
            if n == 0 and (leaks or (not refused and count)):
                codes.add("PAD018")
    return codes


def found_codes(side) -> set[str]:
    return {finding.code for finding in side.judgement.findings}


@settings(deadline=None, max_examples=200)
@given(scenario=scenarios(), fault=st.sampled_from(["mask", "count"]))
def test_findings_are_exactly_those_that_walking_the_rows_gives(scenario, fault):
    run = run_case(scenario, fault, before=PREFIX, after=FIXED)
    # NaN pads that a pre-fix engine routes show as bad ids and weights too, by what the router made of them.
    by_contents = {"PAD008", "PAD009", "PAD010"} if found_codes(run.before) & {"PAD001"} else set()
    assert found_codes(run.before) - by_contents == walked_codes(scenario, fault, fixed=False)
    by_contents = {"PAD008", "PAD009", "PAD010"} if found_codes(run.after) & {"PAD001"} else set()
    assert found_codes(run.after) - by_contents == walked_codes(scenario, fault, fixed=True)


@settings(deadline=None, max_examples=100)
@given(scenario=scenarios(), fault=st.sampled_from(["mask", "count"]))
def test_the_fixed_engine_has_no_finding_where_shards_own_all_rows(scenario, fault):
    scenario = replace(
        scenario,
        branch="custom" if scenario.branch == "torch-native" else scenario.branch,
        bucket=scenario.bucket * scenario.attn_tp,
    )
    run = run_case(scenario, fault, before=FIXED, after=FIXED)
    assert run.after.judgement.findings == ()


@settings(deadline=None, max_examples=100)
@given(scenario=scenarios(), fault=st.sampled_from(["mask", "count"]))
def test_the_fixed_engine_routes_every_expert_as_often_as_the_truth(scenario, fault):
    scenario = replace(scenario, branch="grouped" if scenario.branch == "torch-native" else scenario.branch)
    run = run_case(scenario, fault, before=PREFIX, after=FIXED)
    unowned = sum(row < rank.num_tokens for rank in run.case.plan.ranks for row in rank.unowned_rows)
    if unowned == 0:
        assert list(run.after.judgement.expert_counts) == run.truth.expert_counts(scenario.experts)


def tables_of(scenario: Scenario, fault: str):
    run = run_case(scenario, fault, before=PREFIX, after=FIXED)
    return run_tables([run]), run


def test_twenty_tokens_in_a_bucket_of_64_over_four_ranks():
    tables, run = tables_of(Scenario(tokens=(20,), bucket=64, attn_tp=4), "count")
    rows = tables["local_counts"]
    assert [row["before_count"] for row in rows] == [5, 5, 5, 5]
    assert [row["after_count"] for row in rows] == [16, 4, 0, 0]
    assert sum(row["before_real_masked"] for row in rows) == 11
    assert sum(row["before_pads_routed"] for row in rows) == 11
    assert sum(row["after_real_masked"] + row["after_pads_routed"] for row in rows) == 0
    assert tables["masked_rows"] == [
        {"fault": "count", "engine": "prefix", "dp_rank": 0, "attn_tp_rank": rank, "kind": kind, "rows": rows}
        for rank, kind, rows in (
            (0, "lost", "5-15"),
            (1, "leaked", "20"),
            (2, "leaked", "32-36"),
            (3, "leaked", "48-52"),
        )
    ]
    assert repro_verdict([run]).exit_code == 0


@pytest.mark.parametrize(
    ("n", "bucket", "attn_tp", "after", "before", "masked", "leaked"),
    [
        (10, 16, 2, [8, 2], [5, 5], 3, 3),
        (12, 16, 4, [4, 4, 4, 0], [3, 3, 3, 3], 3, 3),
        (20, 64, 4, [16, 4, 0, 0], [5, 5, 5, 5], 11, 11),
        (100, 128, 4, [32, 32, 32, 4], [25, 25, 25, 25], 21, 21),
        (2700, 2816, 8, [352] * 7 + [236], [338] * 7 + [334], 98, 98),
        (1000, 2048, 8, [256, 256, 256, 232, 0, 0, 0, 0], [125] * 8, 500, 500),
        (7, 8, 2, [4, 3], [4, 3], 0, 0),
    ],
)
@pytest.mark.parametrize("platform", ["cuda", "hip"])
def test_the_engines_show_the_worked_figures(platform, n, bucket, attn_tp, after, before, masked, leaked):
    scenario = Scenario(tokens=(n,), bucket=bucket, attn_tp=attn_tp, platform=platform)
    rows = tables_of(scenario, "count")[0]["local_counts"]
    assert [row["after_count"] for row in rows] == after
    assert [row["before_count"] for row in rows] == before
    assert sum(row["before_real_masked"] for row in rows) == masked
    assert sum(row["before_pads_routed"] for row in rows) == leaked
    assert sum(row["after_real_masked"] + row["after_pads_routed"] for row in rows) == 0


def test_four_ep_ranks_of_64_rows_with_48_real_send_512_routes_128_of_them_pads():
    scenario = Scenario(tokens=(48,) * 4, bucket=64, attn_tp=1, top_k=2)
    tables, _ = tables_of(scenario, "mask")
    truth, before, after = (
        sum(row[key] for row in tables["expert_counts"]) for key in ("truth", "before", "after")
    )
    assert (before, before - truth, after) == (512, 128, 384)


@pytest.mark.parametrize(("n", "bucket"), [(5, 8), (7, 8), (3, 4)])
def test_small_buckets_leak_their_pads_before_the_fix_only(n, bucket):
    tables, _ = tables_of(Scenario(tokens=(n,), bucket=bucket, attn_tp=1), "mask")
    assert tables["local_counts"][0]["before_pads_routed"] == bucket - n
    assert tables["local_counts"][0]["after_pads_routed"] == 0


def test_two_dp_ranks_of_four_with_six_of_eight_rows_real_count_2_2_2_0():
    tables, _ = tables_of(Scenario(tokens=(6, 6), bucket=8, attn_tp=4), "count")
    assert [row["after_count"] for row in tables["local_counts"]] == [2, 2, 2, 0] * 2


def test_each_half_of_the_fix_heals_its_own_fault_only():
    def codes(engine: str, fault: str) -> set[str]:
        run = run_case(Scenario(), fault, before=PREFIX, after=BUILTIN_ENGINES[engine])
        return found_codes(run.after)

    assert codes("fixed-mask", "mask") == set()
    assert codes("fixed-mask", "count") == {"PAD001", "PAD002", "PAD003"}
    assert codes("fixed-count", "mask") == {"PAD001", "PAD004"}
    assert codes("fixed-count", "count") == set()


def test_changes_are_sorted_into_fixed_introduced_and_remaining():
    def changes(before: str, after: str) -> set[tuple[str, str]]:
        engines = {"before": BUILTIN_ENGINES[before], "after": BUILTIN_ENGINES[after]}
        runs = [run_case(Scenario(), fault, **engines) for fault in ("mask", "count")]
        verdict = compare_verdict(runs)
        assert verdict.exit_code == (after != "fixed")
        return {(change.change, change.finding.code) for change in find_changes(runs)}

    mask, count = {"PAD001", "PAD004"}, {"PAD001", "PAD002", "PAD003"}
    assert changes("prefix", "fixed") == {("fixed", code) for code in mask | count}
    assert changes("fixed", "prefix") == {("introduced", code) for code in mask | count}
    assert changes("prefix", "prefix") == {("remaining", code) for code in mask | count}
    assert changes("fixed-mask", "fixed-count") == {
        *(("introduced", code) for code in mask),
        *(("fixed", code) for code in count),
    }


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"tokens": (64,)}, "no rank owns a pad row"),
        ({"tokens": (20,), "raw_length": 64}, "the same count"),
        ({"tokens": (20,), "max_padding_factor": 2}, "eagerly"),
        ({"tokens": (20,), "attn_tp": 1}, "the same count"),
        ({"tokens": (0, 0)}, "the same count"),
        ({"tokens": (20, 0), "attn_tp": 1, "replicated": True}, "the count of every rank is the same here"),
        ({"tokens": (0, 0), "replicated": True}, "the count of every rank is the same here"),
        (
            {"tokens": (0, 0), "replicated": True, "mode": "decode"},
            "the count of every rank is the same here",
        ),
        ({"mode": "decode"}, "decode graphs localised against the bucket before the fix too"),
        ({"require_gathered_buffer": False}, "nothing localises the count"),
        ({"enable_prefill_cp": True}, "nothing localises the count"),
    ],
)
def test_a_scenario_that_cannot_show_the_fault_says_why_and_is_no_success(values, reason):
    run = run_case(Scenario(**values), "count", before=PREFIX, after=FIXED)
    verdict = repro_verdict([run])
    assert verdict.exit_code == 1
    assert "did not reproduce" in verdict.lines[0]
    assert reason in verdict.lines[0]
    compared = compare_verdict([run])
    assert [text for text in compared.not_checked if reason in text]
    # Decode differs on no twin, but another engine could localise against the raw length there as well.
    assert (compared.status, compared.exit_code) == (("ok", 0) if "decode" in reason else ("not-verified", 3))


@pytest.mark.parametrize("values", [{}, {"mode": "decode"}, {"max_padding_factor": 1, "bucket": 128}])
def test_a_replicated_forward_without_pads_shows_the_count_fault_by_its_lost_rows(values):
    scenario = Scenario(**{"tokens": (64,), "bucket": 64, "replicated": True, **values})
    run = run_case(scenario, "count", before=PREFIX, after=FIXED)
    assert found_codes(run.before) == {"PAD002", "PAD003"}
    verdict = repro_verdict([run])
    assert (verdict.exit_code, verdict.not_checked) == (0, ())
    assert "reproduced: 192 of 256 real rows masked, 0 of 0 pads routed" in verdict.lines[0]
    assert compare_verdict([run]).not_checked == ()


@settings(deadline=None, max_examples=100)
@given(scenario=scenarios())
def test_a_count_case_is_called_blind_exactly_where_a_pre_fix_engine_reads_what_is_right(scenario):
    scenario = replace(scenario, branch="grouped" if scenario.branch == "torch-native" else scenario.branch)
    run = run_case(scenario, "count", before=PREFIX, after=FIXED)
    wrong = "PAD003" in walked_codes(scenario, "count", fixed=False)
    # The second time without the side that shows the fault, which would settle it.
    for sides in (run, replace(run, before=run.after)):
        not_checked = compare_verdict([sides]).not_checked
        assert any(text.startswith("fault count: ") for text in not_checked) != wrong
    word = "reproduced" if wrong else "did not reproduce"
    assert repro_verdict([run]).lines[0].startswith(f"fault count: before, prefix: {word}")


def test_a_comparison_is_not_verified_only_where_no_case_could_tell_anything_and_nothing_is_found():
    def exit_code(*faults, after=FIXED, **values):
        runs = [run_case(Scenario(**values), fault, before=PREFIX, after=after) for fault in faults]
        verdict = compare_verdict(runs)
        assert (verdict.status == "not-verified") == (verdict.exit_code == 3)
        return verdict.exit_code

    no_rows = {"tokens": (0,), "max_padding_factor": 1.5}
    assert exit_code("mask", "count", **no_rows) == 3
    assert exit_code("mask", "count", tokens=(64,)) == 3
    assert exit_code("mask", "count", mode="decode") == 0
    assert exit_code("mask", "count", branch="softmax") == 0
    # The twins differ in none of these, but another engine could go wrong there.
    assert exit_code("mask", branch="softmax") == 0
    assert exit_code("count", mode="decode") == 0
    assert exit_code("mask", "count", mode="decode", branch="grouped") == 0
    assert exit_code("count", mode="decode", tokens=(28,), bucket=30, after=PREFIX) == 1


def test_a_case_that_showed_the_fault_of_some_other_engine_was_not_blind():
    leaks = run_case(Scenario(), "mask", before=FIXED, after=PREFIX).after
    run = run_case(Scenario(branch="softmax"), "mask", before=FIXED, after=FIXED)
    assert compare_verdict([run]).not_checked == (
        "fault mask: branch softmax took the count before the fix too",
    )
    verdict = compare_verdict([replace(run, before=leaks)])
    assert (verdict.exit_code, verdict.not_checked) == (0, ())


def test_two_sides_of_one_engine_are_told_apart_once():
    run = run_case(Scenario(), "mask", before=PREFIX, after=PREFIX)
    verdict = compare_verdict([run])
    seen = "0 of 33 real rows masked, 95 of 95 pads routed (PAD001, PAD004)"
    assert verdict.lines[:2] == (
        f"fault mask: before, prefix: {seen}",
        f"fault mask: after, prefix: {seen}",
    )
    assert verdict.summary == "prefix (after) has 15 findings in this scenario"
    assert {finding.engine for finding in run.after.judgement.findings} == {"prefix (after)"}


def test_a_branch_that_took_the_count_before_cannot_show_the_mask_fault():
    run = run_case(Scenario(branch="softmax"), "mask", before=PREFIX, after=FIXED)
    verdict = repro_verdict([run])
    assert verdict.exit_code == 1
    assert "branch softmax took the count before the fix too" in verdict.lines[0]


def test_real_rows_are_the_same_whatever_the_bucket_and_the_pads_hold():
    small = make_batches(s := Scenario(tokens=(20, 13), bucket=64), s.plan())
    large = make_batches(s := Scenario(tokens=(20, 13), bucket=256, pad_fill="nan"), s.plan())
    for one, other in zip(small, large, strict=True):
        n = one.num_token_non_padded_cpu
        assert torch.equal(one.router_logits[:n], other.router_logits[:n])
        assert torch.equal(one.hidden_states[:n], other.hidden_states[:n])


def test_no_two_dp_ranks_hold_the_same_rows():
    first, second = make_batches(s := Scenario(tokens=(13, 13), pad_fill="random"), s.plan())
    assert not torch.equal(first.router_logits[:13], second.router_logits[:13])
    assert not torch.equal(first.router_logits[13:], second.router_logits[13:])


def test_the_oracle_knows_built_in_routers_of_itself_and_asks_others_once_a_real_row(tmp_path):
    assert make_case(Scenario(), "mask").routes_alone is None
    assert route_alone(make_case(Scenario(), "mask")) is None
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n\ndef route(hidden_states, gating_output, topk, renormalize):\n"
        "    route.rows += len(gating_output)\n"
        "    return torch.full((len(gating_output), topk), route.rows), torch.tensor([[0, 1]]).repeat(\n"
        "        len(gating_output), 1)\n\nroute.rows = 0.0\n"
    )
    case = make_case(Scenario(tokens=(2, 0, 1), router=f"{path}:route"), "mask")
    assert case.routes_alone == ((([0, 1], [1.0, 1.0]), ([0, 1], [2.0, 2.0])), (), (([0, 1], [3.0, 3.0]),))
    ask = route_alone(case)
    assert ask is not None
    assert ask(case.batches[2], 0) == ask(case.batches[2], 0) == ([0, 1], [3.0, 3.0])


def test_a_fault_of_counts_needs_a_wrong_count_and_rows_gone_wrong():
    run = run_case(Scenario(), "count", before=PREFIX, after=FIXED)
    findings = run.before.judgement.findings
    for kept, shown in (({"PAD003"}, False), ({"PAD001", "PAD002"}, False), ({"PAD003", "PAD002"}, True)):
        judgement = replace(run.before.judgement, findings=tuple(f for f in findings if f.code in kept))
        assert shows_fault("count", replace(run.before, judgement=judgement)) is shown


def test_a_finding_on_more_rows_than_before_is_introduced():
    few, many = (run_case(Scenario(tokens=(n,)), "mask", before=PREFIX, after=PREFIX) for n in (40, 20))
    run = replace(few, after=many.after)
    worse = [change for change in find_changes([run]) if change.finding.code == "PAD001"]
    assert [(c.change, c.finding.rows) for c in worse] == [
        ("introduced", "20-31"),
        ("introduced", "32-47"),
        ("remaining", "48-63"),
    ]


def test_a_stale_count_would_be_seen_since_a_full_batch_was_replayed_before(monkeypatch):
    keep_first = set()

    def once(self, buffer, forward_batch, ctx):
        if id(buffer) not in keep_first:
            keep_first.add(id(buffer))
            buffer.fill_(ctx.padded_num_tokens // self.size)

    monkeypatch.setattr("repro.registry._AttnTp.post_fill_from_host", once)
    run = run_case(Scenario(), "count", before=PREFIX, after=FIXED)
    assert "PAD003" in found_codes(run.after)


@pytest.mark.parametrize(
    ("fill", "holds"),
    [
        ("zeros", lambda pads: bool((pads == 0).all())),
        ("constant", lambda pads: bool((pads == 1).all())),
        ("nan", lambda pads: bool(pads.isnan().all())),
        ("inf", lambda pads: bool((pads == float("inf")).all())),
        ("random", lambda pads: bool(pads.isfinite().all()) and pads.std() > 5),
        ("stale", lambda pads: bool(pads.isfinite().all()) and 0.5 < pads.std() < 2),
    ],
)
def test_pad_rows_hold_what_was_asked_for(fill, holds):
    scenario = Scenario(tokens=(20,), pad_fill=fill)
    batch = make_batches(scenario, scenario.plan())[0]
    assert batch.router_logits.shape == (64, 16)
    assert holds(batch.router_logits[20:])
    assert holds(batch.hidden_states[20:])


def test_stale_pads_are_the_tail_of_an_earlier_batch_that_filled_the_bucket():
    long, short = (Scenario(tokens=(n,), pad_fill="stale") for n in (40, 20))
    earlier = make_batches(short, short.plan())[0].router_logits[40:]
    assert torch.equal(earlier, make_batches(long, long.plan())[0].router_logits[40:])


def test_a_remap_holds_every_logical_expert_and_its_copies():
    layer = make_layer(Scenario(eplb="dynamic", redundant_experts=5))
    assert sorted(set(layer.physical_to_logical)) == list(range(16))
    assert len(layer.physical_to_logical) == 21
    copies = layer.logical_to_all_physical
    assert sorted(physical for logical in copies for physical in logical) == list(range(21))
    assert all(layer.physical_to_logical[p] == logical for logical, ps in enumerate(copies) for p in ps)


def test_the_count_case_leaves_the_custom_branch_since_it_would_hide_the_count():
    ungrouped = {"branch": "grouped", "num_expert_group": 1, "topk_group": 1}
    for router in ("softmax", "sparse-mixer", "grouped"):
        scenario = Scenario(router=router)
        case = make_case(scenario, "count")
        assert (case.asked_scenario, case.scenario) == (scenario, Scenario(**ungrouped))
    assert make_case(Scenario(branch="grouped"), "count").scenario == Scenario(branch="grouped")
    assert make_case(Scenario(), "mask").scenario == Scenario()


@pytest.mark.parametrize("values", [{}, {"experts": 18}, {"num_expert_group": 16, "topk_group": 1}])
def test_the_count_case_of_the_custom_branch_routes_as_softmax_does(values):
    runs = [
        run_case(Scenario(branch=branch, **values), "count", before=PREFIX, after=FIXED)
        for branch in ("custom", "softmax")
    ]
    assert runs[0].truth.routing == runs[1].truth.routing
    for side in zip(runs[0].sides, runs[1].sides, strict=True):
        for one, other in zip(*(s.observation.ranks for s in side), strict=True):
            assert one.num_token_non_padded == other.num_token_non_padded
            assert torch.equal(one.topk_ids, other.topk_ids)
            assert torch.equal(one.topk_weights, other.topk_weights)
    assert run_tables(runs[:1]) == run_tables(runs[1:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("fault", ["mask", "count"])
def test_a_cuda_device_gives_the_same_findings_as_the_cpu(fault):
    on_gpu, on_cpu = (
        run_case(Scenario(), fault, before=PREFIX, after=FIXED, device=d) for d in ("cuda", "cpu")
    )
    assert run_tables([on_gpu]) == run_tables([on_cpu])
