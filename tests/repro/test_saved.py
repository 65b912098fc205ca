"""Saved runs: read back bit for bit, judged anew, and never trusted."""

import json
from dataclasses import replace

import pytest
import torch

from repro.case import make_case
from repro.engines import BUILTIN_ENGINES, load_engine, run_document
from repro.errors import EngineSpecError, NotVerifiedError, RunFileError
from repro.runs import run_case
from repro.scenario import Scenario

PREFIX, FIXED = BUILTIN_ENGINES["prefix"], BUILTIN_ENGINES["fixed"]
SCENARIO = Scenario(tokens=(20, 0), pad_fill="nan", weight_dtype="bfloat16", id_dtype="int64")


def document(scenario: Scenario = SCENARIO, faults=("mask", "count")) -> dict:
    runs = [run_case(scenario, fault, before=PREFIX, after=FIXED) for fault in faults]
    return run_document(scenario, [(run.case, run.before.observation, run.after.observation) for run in runs])


def save(path, saved: object):
    path.write_text(saved if isinstance(saved, str) else json.dumps(saved))
    return path


@pytest.mark.parametrize(
    ("spec", "side", "engine"),
    [
        ("run.json", "before", PREFIX),
        ("run.json", "after", FIXED),
        ("run.json#fixed", "before", FIXED),
        ("run.json#prefix", "after", PREFIX),
    ],
)
def test_a_side_reads_back_bit_for_bit(tmp_path, monkeypatch, spec, side, engine):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "run.json", document())
    saved = load_engine(spec, side=side)
    assert (saved.name, saved.scenario.to_dict()) == (f"run.json#{engine.name}", SCENARIO.to_dict())
    for fault in ("mask", "count"):
        case = make_case(SCENARIO, fault)
        seen, again = engine.observe(case), saved.observe(case)
        for one, other in zip(seen.ranks, again.ranks, strict=True):
            assert replace(one, topk_ids=None, topk_weights=None) == replace(
                other, topk_ids=None, topk_weights=None
            )
            assert one.topk_ids.dtype == other.topk_ids.dtype
            assert torch.equal(one.topk_ids, other.topk_ids)
            assert one.topk_weights.dtype == other.topk_weights.dtype
            assert torch.equal(one.topk_weights.view(torch.uint8), other.topk_weights.view(torch.uint8))


def test_a_saved_run_is_judged_as_the_engine_was(tmp_path):
    path = save(tmp_path / "run.json", document())
    saved = load_engine(str(path), side="before")
    for fault in ("mask", "count"):
        live = run_case(SCENARIO, fault, before=PREFIX, after=saved)
        as_live = tuple(replace(finding, engine="prefix") for finding in live.after.judgement.findings)
        assert as_live == live.before.judgement.findings != ()
        assert live.after.judgement.outcomes == live.before.judgement.outcomes
        assert {finding.engine for finding in live.after.judgement.findings} == {f"{path}#prefix"}


def test_a_run_that_was_tampered_with_is_judged_by_what_it_holds(tmp_path):
    saved = document(faults=("mask",))
    ranks = saved["cases"][0]["after"]["ranks"]
    ranks[1]["topk_ids"] = saved["cases"][0]["before"]["ranks"][1]["topk_ids"]
    engine = load_engine(str(save(tmp_path / "run.json", saved)), side="after")
    run = run_case(SCENARIO, "mask", before=FIXED, after=engine)
    assert {finding.code for finding in run.after.judgement.findings} >= {"PAD001"}


def test_a_run_of_other_rows_or_of_another_fault_is_not_verified(tmp_path):
    engine = load_engine(str(save(tmp_path / "run.json", document(faults=("mask",)))), side="after")
    with pytest.raises(NotVerifiedError, match="other rows"):
        engine.observe(make_case(replace(SCENARIO, seed=1), "mask"))
    with pytest.raises(NotVerifiedError, match="no case of fault count"):
        engine.observe(make_case(SCENARIO, "count"))


def damaged(change) -> dict:
    saved = document(faults=("mask",))
    change(saved)
    return saved


def first_rank(saved: dict) -> dict:
    return saved["cases"][0]["after"]["ranks"][0]


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no saved run"),
        ({"format": "other"}, "no saved run"),
        ({"format": "moepad-run"}, "KeyError"),
        (damaged(lambda d: d.update(format_version=2)), "format version 2"),
        (damaged(lambda d: d["scenario"].update(attn_tp="4")), "its scenario is wrong: attn_tp"),
        (damaged(lambda d: d["scenario"].update(evil=1)), "its scenario is wrong: evil"),
        (damaged(lambda d: d.update(cases=[])), "holds no cases"),
        (
            damaged(lambda d: d.update(cases=d["cases"] * 2)),
            "holds two cases of fault 'mask'; make the run again",
        ),
        (damaged(lambda d: d.update(cases=[1])), "damaged"),
        (damaged(lambda d: first_rank(d).update(num_token_non_padded="16")), "no int32"),
        (damaged(lambda d: first_rank(d)["topk_ids"].update(dtype="object")), "KeyError"),
        (damaged(lambda d: first_rank(d)["topk_ids"].update(shape=[10**9, 10**9])), "bytes where"),
        (damaged(lambda d: first_rank(d)["topk_ids"].update(shape=[-16, -2])), "a tensor of shape"),
        (damaged(lambda d: first_rank(d)["topk_ids"].update(data="!")), "data"),
        (damaged(lambda d: first_rank(d)["topk_ids"].update(data=None)), "damaged"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, saved, message):
    path = save(tmp_path / "run.json", saved)
    with pytest.raises(RunFileError, match=message) as caught:
        load_engine(str(path), side="after")
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_an_engine_that_the_run_has_not_and_a_file_that_is_not_there_are_named(tmp_path):
    path = save(tmp_path / "run.json", document(faults=("mask",)))
    with pytest.raises(RunFileError, match=r"no engine 'fixd'; it has prefix, fixed$"):
        load_engine(f"{path}#fixd", side="after")
    with pytest.raises(RunFileError, match="No such file"):
        load_engine(str(tmp_path / "absent.json"), side="after")


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("prefx", "did you mean 'prefix'"),
        ("", "give prefix"),
        ("sgland", "did you mean 'sglang'"),
        ("FIXED", "give prefix"),
    ],
)
def test_a_name_of_no_engine_lists_those_there_are(spec, hint):
    with pytest.raises(EngineSpecError, match=hint):
        load_engine(spec, side="before")
