"""``moepad check``, and ``moepad compare`` on a suite, as a caller meets them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from moepad_cli.app import main
from moepad_cli.schema import schema_text
from repro.suite import SUITES, load_suite

MINITREE = Path(__file__).parents[1] / "data" / "minitree"


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str, exit_code: int) -> dict[str, Any]:
    """The one document on standard output, held to the schema."""
    assert main([*arguments, "--device", "cpu", "--format", "json"]) == exit_code
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, json.loads(schema_text()))
    assert isinstance(document, dict)
    return document


def verdicts(document: dict[str, Any], column: str = "verdict") -> dict[str, str]:
    return {row["case"]: row[column] for row in document["tables"]["cases"]}


def test_the_fixed_engine_is_safe_in_every_case_of_the_default_suite(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = report_of(capsys, "check", "fixed", exit_code=0)
    assert verdicts(document) == {case.name: "safe" for case in load_suite("default")}
    assert document["scenario"] == {"suite": "default"}
    assert document["verdict"]["summary"] == "fixed: safe in all 34 cases"


def test_the_prefix_engine_has_findings_where_the_two_faults_show(capsys: pytest.CaptureFixture[str]) -> None:
    document = report_of(capsys, "check", "prefix", exit_code=1)
    seen = verdicts(document)
    assert seen["custom"] == seen["hip, custom"] == "PAD001 PAD004"
    assert seen["prefill"] == seen["prefill, hip"] == "PAD001 PAD002 PAD003"
    assert seen["grouped"] == seen["decode"] == seen["prefill, no gathered buffer"] == "safe"
    assert {finding["case"] for finding in document["findings"]} == {
        case for case, verdict in seen.items() if verdict != "safe"
    }


def test_half_a_fix_leaves_the_other_half_of_the_suite_with_findings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for engine, fault in (("fixed-mask", "count"), ("fixed-count", "mask")):
        document = report_of(capsys, "check", engine, exit_code=1)
        assert {finding["fault"] for finding in document["findings"]} == {fault}


def test_the_full_suite_holds_the_default_one_and_more(capsys: pytest.CaptureFixture[str]) -> None:
    default, full = (load_suite(name) for name in SUITES)
    assert full[: len(default)] == default
    assert len(full) > len(default)
    document = report_of(capsys, "check", "fixed", "--suite", "full", exit_code=1)
    assert {case: verdict for case, verdict in verdicts(document).items() if verdict != "safe"} == {
        "torch-native": "PAD001 PAD004",
        "hip, torch-native": "PAD001 PAD004",
    }


def test_cases_of_a_suite_have_names_of_their_own() -> None:
    names = [case.name for case in load_suite("full")]
    assert len(set(names)) == len(names)


def test_scenario_options_check_both_faults_of_that_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    document = report_of(
        capsys, "check", "prefix", "--tokens", "20", "--bucket", "64", "--attn-tp", "4", exit_code=1
    )
    assert verdicts(document) == {"mask": "PAD001 PAD004", "count": "PAD001 PAD002 PAD003"}
    assert document["scenario"]["tokens"] == [20]


def test_a_suite_and_a_scenario_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "fixed", "--suite", "full", "--tokens", "20"]) == 2
    assert (
        capsys.readouterr().err == "moepad check: --suite: given together with a scenario; give one of them\n"
    )


def test_the_table_of_cases_is_the_csv(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "prefix", "--tokens", "64", "--device", "cpu", "--format", "csv"]) == 1
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows == [
        {
            "case": "mask",
            "fault": "mask",
            "platform": "cuda",
            "branch": "custom",
            "options": "--tokens 64",
            "verdict": "PAD004",
            "why": "",
        },
        {
            "case": "count",
            "fault": "count",
            "platform": "cuda",
            "branch": "custom",
            "options": "--tokens 64",
            "verdict": "safe",
            "why": "",
        },
    ]


def test_junit_has_a_failing_case_for_each_that_has_findings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "report.xml"
    assert main(["check", "prefix", "--device", "cpu", "--junit-xml", str(file)]) == 1
    capsys.readouterr()
    suite = ElementTree.parse(file).getroot()[0]  # noqa: S314
    failing = {case.get("name") for case in suite if case.find("failure") is not None}
    assert failing == {
        *(case.name for case in load_suite("default") if case.name in _FAILING_ON_PREFIX),
        "verdict",
    }
    assert len(suite) >= 35


_FAILING_ON_PREFIX = {
    "custom",
    "custom, int64 ids, bfloat16 weights",
    "custom, top-1",
    "custom, remapped, 4 redundant experts",
    "NaN in pad rows",
    "hip, custom",
    "hip, custom, int64 ids, bfloat16 weights",
    "hip, custom, remapped",
    "no pad rows",
    "one token, an idle rank",
    "prefill",
    "prefill, hip",
    "prefill, an idle rank",
    "prefill, less than a shard",
    "prefill, one shard full",
    "prefill, 100 tokens in 128",
    "prefill, attention TP 2",
    "prefill, attention TP 8",
    "prefill, each rank its own length",
    "prefill, replicated",
}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("fixed", "--tokens", "20"), 0),
        (("prefix", "--tokens", "20"), 1),
        (("sglang@{tree}", "--branch", "torch-native"), 125),
        (("fixt",), 128),
        (("fixed", "--tokens", "x"), 128),
    ],
)
def test_bisect_turns_exit_codes_into_those_of_git_bisect_run(
    arguments: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    topk = tmp_path / "sglang" / "srt" / "layers" / "moe" / "topk.py"
    topk.parent.mkdir(parents=True)
    topk.write_text("from sglang.elsewhere import limit\nif limit > 3:\n    pass\n")
    given = [argument.format(tree=tmp_path) for argument in arguments]
    assert main(["check", *given, "--bisect", "--device", "cpu"]) == code
    capsys.readouterr()


def test_each_case_tells_the_options_that_make_it(capsys: pytest.CaptureFixture[str]) -> None:
    document = report_of(capsys, "check", "prefix", exit_code=1)
    options = {row["case"]: row["options"] for row in document["tables"]["cases"]}
    assert options["custom"] == ""
    assert options["hip, custom, remapped"] == "--platform hip --eplb static"
    assert options["prefill, no gathered buffer"] == "--tokens 20 --no-require-gathered-buffer"
    again = report_of(capsys, "check", "prefix", *options["prefill, attention TP 8"].split(), exit_code=1)
    first = [finding for finding in document["findings"] if finding["case"] == "prefill, attention TP 8"]
    alike = [finding for finding in again["findings"] if finding["case"] == "count"]
    assert [{**finding, "case": None} for finding in alike] == [
        {**finding, "case": None} for finding in first
    ]


def test_a_saved_run_is_not_checked_on_other_cases(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    assert main(["repro", "--device", "cpu", "--save", str(path)]) == 0
    assert main(["check", str(path)]) == 2
    expected = f"moepad check: ENGINE: '{path}' is a saved run; judge it with moepad compare\n"
    assert capsys.readouterr().err == expected


def test_compare_without_a_scenario_runs_the_suite_on_both_engines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = report_of(capsys, "compare", "--before", "prefix", "--after", "fixed", exit_code=0)
    assert verdicts(document, "before")["custom"] == "PAD001 PAD004"
    assert set(verdicts(document, "after").values()) == {"safe"}
    changes = document["tables"]["finding_changes"]
    assert {row["change"] for row in changes} == {"fixed"}
    assert {row["code"] for row in changes} == {"PAD001", "PAD002", "PAD003", "PAD004", "PAD010", "PAD018"}
    assert document["verdict"]["summary"] == "fixed: safe in all 34 cases"


def test_compare_the_other_way_round_calls_the_findings_introduced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = report_of(capsys, "compare", "--before", "fixed", "--after", "prefix", exit_code=1)
    assert {row["change"] for row in document["tables"]["finding_changes"]} == {"introduced"}


def test_compare_of_half_fixes_keeps_what_both_have_apart_from_what_one_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = report_of(capsys, "compare", "--before", "prefix", "--after", "fixed-mask", exit_code=1)
    kinds = {(row["change"], row["fault"]) for row in document["tables"]["finding_changes"]}
    assert kinds == {("fixed", "mask"), ("remaining", "count")}


def test_compare_with_a_side_that_cannot_be_verified_is_no_safe(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    topk = tmp_path / "sglang" / "srt" / "layers" / "moe" / "topk.py"
    topk.parent.mkdir(parents=True)
    topk.write_text("def select_experts(:\n")
    document = report_of(capsys, "compare", "--before", f"sglang@{tmp_path}", "--after", "fixed", exit_code=3)
    assert set(verdicts(document, "before").values()) == {"not verified"}
    assert {row["why_before"] for row in document["tables"]["cases"]} == {
        "sglang/srt/layers/moe/topk.py does not load: SyntaxError: invalid syntax (topk.py, line 1)"
    }
    assert document["verdict"]["status"] == "not-verified"


def test_what_a_real_engine_loaded_is_told_with_v_and_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"sglang@{MINITREE}", "--branch", "grouped", "--device", "cpu", "-v"]) == 0
    out = capsys.readouterr().out
    assert f"sglang@{MINITREE} on cuda, isolated: what was loaded\n" in out
    assert "real  sglang.srt.layers.moe.topk" in out
    assert "shim  is_cuda" in out
    document = report_of(capsys, "check", f"sglang@{MINITREE}", "--branch", "grouped", exit_code=0)
    kinds = {row["kind"] for row in document["tables"]["loaded"]}
    assert kinds == {"real", "shim", "stub"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("check", "fixt"),
            "moepad check: ENGINE: 'fixt' is no engine; did you mean 'fixed'?",
        ),
        (
            ("check", "fixed", "--time-limit", "0"),
            "moepad check: --time-limit: '0' is out of range; give 0.1 or more",
        ),
        (
            ("check", "fixed", "--suite", "defualt"),
            "moepad check: --suite: 'defualt' is not one of default, full; did you mean default?",
        ),
        (
            ("compare", "--before", "fixed", "--after", "sglang==x"),
            "moepad compare: --after: 'sglang==x': 'x' is no version; give one such as 0.5.16",
        ),
    ],
)
def test_a_wrong_call_is_one_line(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments]) == 2
    assert capsys.readouterr().err == line + "\n"
