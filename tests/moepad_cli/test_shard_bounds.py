"""``moepad shard-bounds``: figures, words, findings, and every way to call it wrongly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from moepad_cli.app import main
from moepad_cli.commands._shard_strips import draw_strips
from moepad_cli.schema import schema_text
from repro.report import Report, Verdict

TABLE = """\
20 real tokens, DP 1, attention TP 4

Rows and counts of each rank
  DP  attn-TP  rows   real   pad  bucket    raw  lost  leaked
rank     rank  owned  rows  rows   count  count
----  -------  -----  ----  ----  ------  -----  ----  ------
   0        0  0-15     16     0      16      5    11       0
   0        1  16-31     4    12       4      5     0       1
   0        2  32-47     0    16       0      5     0       5
   0        3  48-63     0    16       0      5     0       5
bucket count: cut from the bucket, as the fix does; raw count: from the raw length
lost, leaked: real rows masked, pad rows routed, where a graph reads the raw count

Sums of each DP rank
  DP    real     raw  padded  eager  bucket     raw  lost  leaked     no
rank  tokens  length    rows         counts  counts                owner
----  ------  ------  ------  -----  ------  ------  ----  ------  -----
   0      20      20      64  no         20      20    11      11      0
DP0: pre-fix counts 5,5,5,5 where 16,4,0,0 are real: 11 real rows masked, 11 pads routed

verdict: every row has one owner
  a prefill graph of a pre-fix engine reads wrong counts on 1 of 1 DP ranks
"""


@pytest.fixture
def shard_bounds(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(options: str, *more: str) -> tuple[int, str]:
        code = main(["shard-bounds", *options.split(), *more])
        out, err = capsys.readouterr()
        assert err == ""
        return code, out

    return call


def test_the_table_shows_each_rank_and_what_the_raw_count_would_do(shard_bounds: Any) -> None:
    assert shard_bounds("--tokens 20 --bucket 64 --attn-tp 4") == (0, TABLE)


def test_the_tables_fit_80_columns(shard_bounds: Any) -> None:
    notes = ("DP0:", "DP1:", "DP2:", "bucket count:", "lost, leaked:")
    _, out = shard_bounds("--tokens 2700,16256,0 --raw-length 16384 --bucket 16384 --attn-tp 8")
    assert max(len(line) for line in out.splitlines() if not line.startswith(notes)) <= 80


def test_json_holds_the_counts_and_fits_the_schema(shard_bounds: Any) -> None:
    code, out = shard_bounds("--tokens 20,13 --buckets 16,32,64 --attn-tp 4 --format json")
    document = json.loads(out)
    jsonschema.validate(document, json.loads(schema_text()), jsonschema.Draft202012Validator)
    assert code == document["verdict"]["exit_code"] == 0
    assert document["scenario"] == {
        "tokens": [20, 13],
        "attn_tp": 4,
        "buckets": [16, 32, 64],
        "raw_length": None,
        "align": 1,
        "dp_padding": "max-len",
        "max_padding_factor": None,
        "replicated": False,
        "uneven": False,
    }
    rows = document["tables"]["shard_bounds"]
    assert [row["count_bucket"] for row in rows] == [8, 8, 4, 0, 8, 5, 0, 0]
    assert [row["count_raw"] for row in rows] == [5, 5, 5, 5, 5, 5, 3, 0]
    assert rows[2] == {
        "dp_rank": 0,
        "attn_tp_rank": 2,
        "row_start": 16,
        "row_end": 24,
        "real_rows": 4,
        "pad_rows": 4,
        "count_bucket": 4,
        "count_raw": 5,
        "real_rows_masked": 0,
        "pads_routed": 1,
    }


def test_csv_is_the_table_with_its_header(shard_bounds: Any) -> None:
    assert shard_bounds("--tokens 10 --bucket 16 --attn-tp 2 --format csv") == (
        0,
        "dp_rank,attn_tp_rank,row_start,row_end,real_rows,pad_rows,count_bucket,count_raw,"
        "real_rows_masked,pads_routed\n"
        "0,0,0,8,8,0,8,5,3,0\n"
        "0,1,8,16,2,6,2,5,0,3\n",
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            "--tokens 2700 --raw-length 2704 --bucket 2816 --attn-tp 8",
            "DP0: pre-fix counts 338,338,338,338,338,338,338,334 where 352,352,352,352,352,352,352,236 "
            "are real: 98 real rows masked, 98 pads routed",
        ),
        (
            "--tokens 7 --bucket 8 --attn-tp 2",
            "DP0: pre-fix counts 4,3 are the real rows of every shard",
        ),
        (
            "--tokens 6 --raw-length 6 --bucket 6 --attn-tp 4 --uneven",
            "DP0: floor counts 1,1,1,1 where 2,2,1,1 are real: 2 real rows masked, 0 pads routed",
        ),
        (
            "--tokens 10 --bucket 64 --attn-tp 4 --max-padding-factor 2",
            "DP0: runs eagerly on its raw length, so that both counts are cut from the same rows",
        ),
        (
            "--tokens 1000 --bucket 2048 --attn-tp 16",
            "DP0: pre-fix counts 63 x15,55 where 128 x7,104,0 x8 are real: "
            "496 real rows masked, 496 pads routed",
        ),
        ("--tokens 8,8,8,8,8,8,8,8,8,8 --bucket 8 --attn-tp 1", "and 2 more DP ranks"),
    ],
)
def test_words_under_the_table_say_what_a_count_would_do(shard_bounds: Any, options: str, line: str) -> None:
    code, out = shard_bounds(options)
    assert code == 0
    assert line in out.splitlines()


@pytest.mark.parametrize(
    ("options", "summary", "line"),
    [
        (
            "--tokens 7,8 --bucket 8 --attn-tp 2",
            "every row has one owner",
            "pre-fix counts are right too, for this length and bucket",
        ),
        (
            "--tokens 20,8,64 --bucket 64 --attn-tp 4 --dp-padding sum-len",
            "every row has one owner",
            "a prefill graph of a pre-fix engine reads wrong counts on 2 of 3 DP ranks",
        ),
        (
            "--tokens 6 --raw-length 6 --bucket 64 --attn-tp 4 --uneven --max-padding-factor 2",
            "every row has one owner",
            "an eager prefill of a pre-fix engine reads wrong counts on 1 of 1 DP ranks",
        ),
        (
            "--tokens 20 --bucket 64 --attn-tp 4 --replicated",
            "every attention-TP rank holds all rows",
            "a prefill graph of a pre-fix engine reads wrong counts on 1 of 1 DP ranks",
        ),
        (
            "--tokens 26,3 --raw-length 26 --bucket 28 --attn-tp 8",
            "rows without an owner on 2 of 2 DP ranks",
            "pre-fix counts are right too, for this length and bucket",
        ),
    ],
)
def test_the_verdict_is_about_owners_and_says_what_a_pre_fix_engine_reads(
    shard_bounds: Any, options: str, summary: str, line: str
) -> None:
    _, out = shard_bounds(options)
    assert out[out.index("verdict:") :] == f"verdict: {summary}\n  {line}\n"


def test_replicated_ranks_hold_all_rows_and_a_pre_fix_engine_counts_them_as_if_they_did_not(
    shard_bounds: Any,
) -> None:
    code, out = shard_bounds("--tokens 20 --bucket 64 --attn-tp 4 --replicated --format json")
    document = json.loads(out)
    names = (
        *("row_start", "row_end", "real_rows", "count_bucket", "count_raw"),
        *("real_rows_masked", "pads_routed"),
    )
    rows = [tuple(row[name] for name in names) for row in document["tables"]["shard_bounds"]]
    assert rows == [(0, 64, 20, 20, 5, 15, 0)] * 4
    assert document["verdict"]["summary"] == "every attention-TP rank holds all rows"
    assert code == 0


def test_rows_without_an_owner_are_a_finding_and_exit_code_1(shard_bounds: Any) -> None:
    code, out = shard_bounds("--tokens 26,3 --raw-length 26 --bucket 28 --attn-tp 8 --format json")
    document = json.loads(out)
    jsonschema.validate(document, json.loads(schema_text()), jsonschema.Draft202012Validator)
    assert code == document["verdict"]["exit_code"] == 1
    assert document["findings"] == [
        {
            "code": "PAD005",
            "name": "bucket-not-divisible",
            "severity": severity,
            "case": None,
            "engine": "plan",
            "fault": "count",
            "dp_rank": dp_rank,
            "attn_tp_rank": None,
            "rows": "24-27",
            "expected": 0,
            "seen": 4,
            "message": "28 rows are not a multiple of attention TP 8: no shard owns rows 24-27, "
            f"{real} real and {4 - real} pad",
        }
        for dp_rank, severity, real in ((0, "error", 2), (1, "warning", 0))
    ]


def test_one_row_without_an_owner_is_written_as_one_number(shard_bounds: Any) -> None:
    code, out = shard_bounds("--tokens 4 --raw-length 4 --bucket 5 --attn-tp 4")
    assert code == 1
    assert "no shard owns rows 4, 0 real and 1 pad" in out


def test_the_largest_numbers_and_most_ranks_are_answered(shard_bounds: Any) -> None:
    code, out = shard_bounds("--tokens 1000000000 --bucket 2147418112 --attn-tp 65536 --format csv")
    assert code == 0
    assert len(out.splitlines()) == 65_537


WRONG = [
    ("", "--tokens: missing"),
    ("--tokens 20 --bucket 64", "--attn-tp: missing"),
    ("--tokens 20 --attn-tp 4", "--bucket: missing"),
    ("--tokens -1 --bucket 64 --attn-tp 4", "--tokens: '-1' is out of range"),
    ("--tokens 1.5 --bucket 64 --attn-tp 4", "--tokens: '1.5' is not a whole number"),
    ("--tokens 1e3 --bucket 64 --attn-tp 4", "--tokens: '1e3' is not a whole number"),
    ("--tokens 1,,2 --bucket 64 --attn-tp 4", "--tokens: '1,,2' has an empty item"),
    ("--tokens ٣ --bucket 64 --attn-tp 4", "--tokens: '٣' is not a whole number"),
    ("--tokens 99999999999 --bucket 64 --attn-tp 4", "--tokens: '99999999999' is out of range"),
    ("--tokens 20 --bucket 12x --attn-tp 4", "--bucket: '12x' is not a whole number; give e.g. --bucket 64"),
    ("--tokens 20 --bucket 0 --attn-tp 4", "--bucket: '0' is out of range"),
    ("--tokens 20 --bucket 16 --attn-tp 4", "--bucket: 16 is smaller than the 20 rows"),
    ("--tokens 20 --buckets 16 --attn-tp 4", "--buckets: 16 is smaller than the 20 rows"),
    ("--tokens 20 --buckets 8,16 --attn-tp 4", "--buckets: 16 is smaller than the 20 rows"),
    ("--tokens 20 --bucket 64 --buckets 64 --attn-tp 4", "--bucket: cannot be given together with --buckets"),
    ("--tokens 20 --bucket 64 --attn-tp 0", "--attn-tp: '0' is out of range"),
    ("--tokens 20 --bucket 64 --attn-tp 4,4", "--attn-tp: '4,4' is not a whole number"),
    (
        "--tokens 1 --bucket 64 --attn-tp 1000000",
        "--attn-tp: 1 DP ranks of 1000000 attention-TP ranks are more",
    ),
    ("--tokens 20 --bucket 64 --attn-tp 4 --raw-length 16", "--raw-length: 16 is smaller than the 20 tokens"),
    ("--tokens 20 --bucket 64 --attn-tp 4 --raw-length 0", "--raw-length: '0' is out of range"),
    ("--tokens 20 --bucket 64 --attn-tp 4 --raw-length 20 --align 2", "--align: works out the length"),
    ("--tokens 20 --bucket 64 --attn-tp 4 --align 0", "--align: '0' is out of range"),
    ("--tokens 20 --bucket 64 --attn-tp 4 --align=", "--align: '' is not a whole number"),
    (
        "--tokens 20 --bucket 64 --attn-tp 4 --dp-padding max",
        "--dp-padding: 'max' is not one of max-len, sum-len",
    ),
    ("--tokens 20 --bucket 64 --attn-tp 4 --max-padding-factor 0.5", "--max-padding-factor: '0.5' is out of"),
    (
        "--tokens 20 --bucket 64 --attn-tp 4 --max-padding-factor nan",
        "--max-padding-factor: 'nan' is not a number",
    ),
    ("--tokens 20 --bucket 64 --attn-tp 4 --uneven --replicated", "--uneven: a --replicated forward"),
    (
        "--tokens 20 --bucket 64 --attn-tp 4 --format xml",
        "--format: 'xml' is not one of table, markdown, json, csv",
    ),
    ("--tokens 20 --bucket 64 --attn-tp 4 --save a.json", "--save: no such option"),
    ("--tokens 20 --bucket 64 --attn-tp 4 --junit-xml no/such/folder/a", "--junit-xml: cannot write"),
]


@pytest.mark.parametrize(("options", "start"), WRONG)
def test_a_wrong_call_is_one_line_that_names_the_option(
    options: str, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["shard-bounds", *options.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"moepad shard-bounds: {start}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["", " 7 "])
def test_blank_numbers_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shard-bounds", "--tokens", "20", "--attn-tp", "4", "--bucket", text]) == 2
    line = f"moepad shard-bounds: --bucket: {text!r} is not a whole number; give e.g. --bucket 64\n"
    assert capsys.readouterr() == ("", line)


def test_a_wrong_call_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--tokens", "20", "--bucket", "16", "--attn-tp", "4", "--output", str(tmp_path / "out.txt")]
    assert main(["shard-bounds", *given]) == 2
    assert list(tmp_path.iterdir()) == []


def strips(rows: Sequence[tuple[int, int, int, int]], width: int, *, blocks: bool = False) -> list[str]:
    """Drawn for ``(row_start, row_end, real_rows, count_raw)`` of the attention-TP ranks of one DP rank."""
    names = ("row_start", "row_end", "real_rows", "count_raw")
    table = [
        {"dp_rank": 0, "attn_tp_rank": rank, **dict(zip(names, row, strict=True))}
        for rank, row in enumerate(rows)
    ]
    report = Report("shard-bounds", {}, {}, (), {"shard_bounds": table}, "shard_bounds", Verdict("ok", 0))
    return draw_strips(report, width, blocks).split("\n")


def test_a_strip_shows_what_the_raw_count_would_do_to_each_row() -> None:
    assert strips([(0, 16, 16, 5), (16, 32, 4, 5), (32, 48, 0, 5), (48, 64, 0, 0)], 80) == [
        "DP0 TP0  #####xxxxxxxxxxx",
        "DP0 TP1  ####!...........",
        "DP0 TP2  !!!!!...........",
        "DP0 TP3  ................",
        ". pad",
        "# real",
        "! pad, but routed by the raw count",
        "x real, but masked by the raw count",
    ]


def test_blocks_are_drawn_where_the_terminal_has_them() -> None:
    assert strips([(0, 4, 3, 2), (4, 8, 1, 2)], 80, blocks=True) == [
        "DP0 TP0  ██▄░",
        "DP0 TP1  █▚░░",
        "░ pad",
        "█ real",
        "▚ pad, but routed by the raw count",
        "▄ real, but masked by the raw count",
    ]


def test_a_strip_is_scaled_to_the_terminal_and_keeps_a_single_faulty_row_in_sight() -> None:
    assert strips([(0, 1000, 500, 499)], 29) == [
        "DP0 TP0  #########x..........",
        ". pad",
        "# real",
        "x real, but masked by the raw count",
        "one cell is 50 rows",
    ]


def test_ranks_without_rows_and_ranks_beyond_32_draw_no_strip() -> None:
    lines = strips([(0, 0, 0, 0)] * 40, 80)
    assert lines[0] == "DP0 TP0"
    assert lines[32:] == ["and 8 more ranks"]
