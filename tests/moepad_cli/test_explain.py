"""``moepad explain`` and ``moepad schema``."""

from __future__ import annotations

import json

import jsonschema
import pytest

from moepad_cli.app import main
from moepad_cli.schema import columns, schema_text
from repro.findings import CATALOGUE


def test_the_list_names_every_code_and_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:2]] == [["code", "name", "looked", "what", "it", "says"], ["for"]]
    assert [line.split()[:3] for line in lines if line.startswith("PAD")] == [
        [kind.code, kind.name, "yes" if kind.checked_by else "no"] for kind in CATALOGUE.values()
    ]
    assert lines[-1] == "moepad explain CODE tells more of one. This version looks for those with yes."
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("text", ["PAD005", "pad005", "bucket-not-divisible", "Bucket-Not-Divisible"])
def test_a_page_is_found_by_code_or_name_in_any_case(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", text]) == 0
    assert capsys.readouterr() == (CATALOGUE["PAD005"].page, "")


def test_a_page_in_markdown_is_the_page_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "PAD003", "--format", "markdown"]) == 0
    assert capsys.readouterr().out == f"## moepad explain\n\n{CATALOGUE['PAD003'].page}"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("PAD055", "did you mean "),
        ("pad-row-route", "did you mean pad-row-routed"),
        ("zzz", "moepad explain lists them"),
        ("", "moepad explain lists them"),
    ],
)
def test_an_unknown_code_is_one_line_with_a_hint(
    text: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", text]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"moepad explain: CODE: {text!r} is not a finding code; {hint}")
    assert err.count("\n") == 1


def test_the_catalogue_as_json_fits_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, json.loads(schema_text()), jsonschema.Draft202012Validator)
    assert [row["code"] for row in document["tables"]["catalogue"]] == list(CATALOGUE)
    assert document["tables"]["catalogue"][4]["page"] == CATALOGUE["PAD005"].page


def test_schema_prints_a_valid_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert capsys.readouterr() == (schema_text(), "")
    jsonschema.Draft202012Validator.check_schema(json.loads(schema_text()))


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (
            "local_counts",
            "fault dp_rank attn_tp_rank row_start row_end real_rows before_count after_count "
            "before_real_masked before_pads_routed after_real_masked after_pads_routed",
        ),
        ("expert_counts", "fault expert truth before after"),
        ("masked_rows", "fault engine dp_rank attn_tp_rank kind rows"),
        (
            "shard_bounds",
            "dp_rank attn_tp_rank row_start row_end real_rows pad_rows count_bucket count_raw "
            "real_rows_masked pads_routed",
        ),
        ("finding_changes", "change code name engine fault dp_rank attn_tp_rank rows message case"),
        ("catalogue", "code name severity summary checked_by page"),
    ],
)
def test_the_schema_has_exactly_these_columns(table: str, names: str) -> None:
    assert columns(table) == names.split()
    items = json.loads(schema_text())["properties"]["tables"]["properties"][table]["items"]
    assert items["required"] == names.split()
    assert items["additionalProperties"] is False


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"schema_version": 2},
        {"verdict": {"status": "ok", "exit_code": 1, "summary": "", "lines": [], "not_checked": []}},
        {"verdict": {"status": "ok", "exit_code": 0, "lines": [], "not_checked": []}},
        {"findings": [{"code": "PAD001"}]},
        {"tables": {"masked_rows": [{"fault": "mask"}]}},
        {"tables": {"unheard_of": []}},
        {"environment": {}},
    ],
)
def test_the_schema_refuses_what_is_not_a_report(
    change: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            {**document, **change}, json.loads(schema_text()), jsonschema.Draft202012Validator
        )
