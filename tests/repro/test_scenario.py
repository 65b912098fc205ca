"""Scenarios: what they refuse, and that their files read back as they were written."""

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.errors import FieldError, ScenarioError, ScenarioFileError
from repro.routers import ROUTER_NAMES
from repro.scenario import ROUTERS, Scenario
from repro.scenario_file import read_scenario, read_scenario_values


def test_the_routers_that_help_lists_are_those_there_are():
    assert ROUTERS == ROUTER_NAMES


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"tokens": ()}, "tokens"),
        ({"tokens": (-1,)}, "tokens"),
        ({"tokens": (True,)}, "tokens"),
        ({"tokens": 20}, "tokens"),
        ({"tokens": (100,)}, "bucket"),
        ({"tokens": (2**31,)}, "tokens"),
        ({"tokens": (2**30,), "bucket": 2**30}, "tokens"),
        ({"attn_tp": 0}, "attn_tp"),
        ({"attn_tp": "4"}, "attn_tp"),
        ({"attn_tp": 4096}, "attn_tp"),
        ({"bucket": 0}, "bucket"),
        ({"bucket": 64, "buckets": (64,)}, "buckets"),
        ({"buckets": (8, 16)}, "buckets"),
        ({"raw_length": 10}, "raw_length"),
        ({"align": 0}, "align"),
        ({"dp_padding": "longest"}, "dp_padding"),
        ({"max_padding_factor": 0.0}, "max_padding_factor"),
        ({"max_padding_factor": float("nan")}, "max_padding_factor"),
        ({"replicated": 1}, "replicated"),
        ({"mode": "extend"}, "mode"),
        ({"tokens_per_request": 2}, "tokens_per_request"),
        ({"mode": "decode", "tokens": (7,), "tokens_per_request": 2}, "tokens"),
        ({"mode": "decode", "tokens": (6,), "bucket": 9, "tokens_per_request": 2}, "bucket"),
        ({"pad_fill": "noise"}, "pad_fill"),
        ({"platform": "cpu"}, "platform"),
        ({"branch": "topk"}, "branch"),
        ({"router": " "}, "router"),
        ({"experts": 0}, "experts"),
        ({"top_k": 17}, "top_k"),
        ({"branch": "grouped", "experts": 18}, "num_expert_group"),
        ({"branch": "grouped", "topk_group": 5}, "topk_group"),
        ({"branch": "grouped", "top_k": 9}, "top_k"),
        ({"branch": "biased-grouped", "num_expert_group": 16}, "num_expert_group"),
        ({"router": "grouped", "experts": 18}, "num_expert_group"),
        ({"router": "sigmoid-top1"}, "top_k"),
        ({"router": "sparse-mixer", "top_k": 1}, "top_k"),
        ({"eplb": "lp"}, "eplb"),
        ({"redundant_experts": 2}, "redundant_experts"),
        ({"branch": "torch-native", "eplb": "static"}, "eplb"),
        ({"id_dtype": "int16"}, "id_dtype"),
        ({"weight_dtype": "float64"}, "weight_dtype"),
        ({"routed_scaling_factor": -1.0}, "routed_scaling_factor"),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_wrong_value_is_refused_by_its_field(values, field):
    with pytest.raises(FieldError) as caught:
        Scenario(**values)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["num_expert_group", "topk_group"])
def test_groups_do_not_matter_where_nothing_is_grouped(name):
    assert getattr(Scenario(experts=18, **{name: 7}), name) == 7


def scenarios() -> st.SearchStrategy[Scenario]:
    return st.builds(
        Scenario,
        tokens=st.lists(st.integers(0, 64), min_size=1, max_size=4).map(tuple),
        buckets=st.sampled_from([(), (64, 128)]),
        raw_length=st.sampled_from([None, 64]),
        max_padding_factor=st.sampled_from([None, 1.5]),
        replicated=st.booleans(),
        router=st.sampled_from(["softmax", "degenerate", 'my "odd" file.py:f', "pfad\\ü.py:λ"]),
        routed_scaling_factor=st.floats(0.01, 1000),
    )


@given(scenario=scenarios(), form=st.sampled_from(["toml", "json"]))
def test_a_scenario_reads_back_as_it_was_written(tmp_path_factory, scenario, form):
    path = tmp_path_factory.mktemp("scenario") / f"case.{form}"
    path.write_text(scenario.to_toml() if form == "toml" else scenario.to_json(), encoding="utf-8")
    assert read_scenario(path).to_dict() == scenario.to_dict()


def test_a_file_sets_only_what_it_says(tmp_path):
    path = tmp_path / "case.toml"
    path.write_text('tokens = [6, 6]\nbucket = 8\nplatform = "hip"\n')
    assert read_scenario_values(path) == {"tokens": (6, 6), "bucket": 8, "platform": "hip"}
    assert read_scenario(path) == Scenario(tokens=(6, 6), bucket=8, platform="hip")


def test_every_field_is_in_the_dictionary():
    assert list(Scenario().to_dict()) == [field.name for field in fields(Scenario)]
    assert Scenario().to_dict()["bucket"] == 64
    assert Scenario(buckets=(64,)).to_dict()["bucket"] is None
    json.dumps(Scenario().to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens = [20\n", "Unclosed array"),
        ("tokens = [20]\n\ntokenz = [1]\n", "line 3: unknown key 'tokenz'; did you mean 'tokens'?"),
        ("[nested]\ntokens = [1]\n", "line 1: unknown key 'nested'"),
        ('\nattn_tp = "four"\n', "line 2: attn_tp: 'four' is not a whole number"),
        ("attn_tp = 4\nattn_tp = 2\n", "line 2"),
        ('{\n "bucket": 64,\n "tokens": "20"\n}', "line 3: tokens: '20' is not a list"),
        ('{\n "bucket": 64,\n', "line 3"),
        ("tokens = [100]\nbucket = 64\n", "64 is smaller than the 100 rows"),
        ("seed = 1" + "0" * 5000 + "\n", "4300 digits"),
        ("[" * 100_000, ""),
    ],
)
def test_a_bad_file_is_one_line_with_the_place(tmp_path, text, message):
    path = tmp_path / "case.toml"
    path.write_text(text)
    with pytest.raises(ScenarioFileError) as caught:
        read_scenario(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_text_or_too_large_or_absent_are_refused(tmp_path):
    binary, large = tmp_path / "binary", tmp_path / "large"
    binary.write_bytes(b"\xff\xfe")
    large.write_bytes(b"#" * (2 << 20))
    for path, message in (
        (binary, "not UTF-8"),
        (large, "larger than"),
        (tmp_path, "directory"),
        (tmp_path / "absent", "No such"),
    ):
        with pytest.raises(ScenarioFileError, match=message):
            read_scenario(path)


def test_scenario_errors_are_field_errors():
    with pytest.raises(ScenarioError, match=r"^top_k: 17 is more than the 16 experts$"):
        Scenario(top_k=17)
