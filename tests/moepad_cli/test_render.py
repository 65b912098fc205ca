"""Every renderer's whole output for one small report made by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from moepad_cli.render import RENDERERS, table
from moepad_cli.render.text import finding_lines, findings_title
from repro.findings import Finding
from repro.report import Report, Row, Verdict, View

LEAK = Finding(
    code="PAD001",
    name="pad-row-routed",
    severity="error",
    engine="prefix",
    fault="count",
    dp_rank=0,
    attn_tp_rank=1,
    rows="20",
    expected=-1,
    seen=[3, float("nan")],
    message="1 pad row keeps experts",
)
SKEW = replace(
    LEAK,
    code="PAD007",
    name="expert-load-skewed-by-pads",
    severity="warning",
    dp_rank=None,
    attn_tp_rank=None,
    rows=None,
    expected=1.0,
    seen=1.5,
    message="load off | by half",
)
ROWS: list[Row] = [
    dict(zip(("fault", "engine", "dp_rank", "attn_tp_rank", "kind", "rows"), values, strict=True))
    for values in (("count", "prefix", 0, 1, "leaked", "20"), ("count", "prefix", 1, 0, "lost", "5-15"))
]
REPORT = Report(
    command="repro",
    scenario={"tokens": [20, 16], "max_padding_factor": None},
    environment={"moepad": "0.1.0", "python": "3.11.7", "platform": "Linux x86_64", "device": "cpu"},
    findings=(LEAK, SKEW),
    tables={"masked_rows": ROWS},
    main_table="masked_rows",
    verdict=Verdict("findings", 1, "fixed has 1 finding", ("pads were routed",), ("HIP: no such device",)),
    views=(
        View(
            "Rows",
            ("DP\nrank", "kind", "rows"),
            ((0, "leaked", "20"), (10, "lost", None)),
            "an `x` <here>\nsecond",
        ),
        View("Nothing", ("a", "b"), ()),
    ),
    heading=("before: prefix", "after: fixed"),
    blamed=(LEAK,),
)


TABLE = """\
before: prefix
after: fixed

Rows
  DP  kind    rows
rank
----  ------  ----
   0  leaked  20
  10  lost    -
an `x` <here>
second

Nothing
(none)

findings: 2 (2 prefix)
PAD001 pad-row-routed  prefix/count DP0 TP1 rows 20: 1 pad row keeps experts
PAD007 expert-load-skewed-by-pads  prefix/count: load off | by half

verdict: fixed has 1 finding
  pads were routed
not checked: HIP: no such device
"""

MARKDOWN = r"""## moepad repro

before: prefix

after: fixed

### Rows

| DP rank | kind   | rows |
|---------|--------|------|
|       0 | leaked | 20   |
|      10 | lost   | -    |

- an \`x\` \<here\>
- second

### Nothing

(none)

### Findings

- PAD001 pad-row-routed  prefix/count DP0 TP1 rows 20: 1 pad row keeps experts
- PAD007 expert-load-skewed-by-pads  prefix/count: load off \| by half

**Verdict: fixed has 1 finding**

- pads were routed

- not checked: HIP: no such device
"""

CSV = """\
fault,engine,dp_rank,attn_tp_rank,kind,rows
count,prefix,0,1,leaked,20
count,prefix,1,0,lost,5-15
"""

JUNIT = """\
<?xml version='1.0' encoding='UTF-8'?>
<testsuites>
  <testsuite name="moepad repro" failures="2" errors="0" skipped="1" tests="5">
    <testcase classname="moepad.repro.count" name="DP 0">
      <failure type="PAD001" message="PAD001 pad-row-routed: 1 pad row keeps experts">\
PAD001 pad-row-routed  prefix/count DP0 TP1 rows 20: 1 pad row keeps experts</failure>
    </testcase>
    <testcase classname="moepad.repro.count" name="DP 1" />
    <testcase classname="moepad.repro.count" name="all ranks">
      <system-out>PAD007 expert-load-skewed-by-pads  prefix/count: load off | by half</system-out>
    </testcase>
    <testcase classname="moepad.repro" name="verdict">
      <failure type="verdict" message="fixed has 1 finding">pads were routed</failure>
    </testcase>
    <testcase classname="moepad.repro" name="not checked 1">
      <skipped message="HIP: no such device" />
    </testcase>
  </testsuite>
</testsuites>
"""

HTML_BODY = """\
<body>
<h1>moepad repro</h1>
<div class="verdict findings">
<p><strong>fixed has 1 finding</strong></p>
<p>pads were routed</p>
</div>
<p class="note">not checked: HIP: no such device</p>
<pre>before: prefix
after: fixed</pre>
<h2>Rows</h2>
<div class="wide">
<table>
<thead><tr><th class="right">DP
rank</th><th class="left">kind</th><th class="left">rows</th></tr></thead>
<tbody>
<tr><td class="right short">0</td><td class="left short">leaked</td><td class="left short">20</td></tr>
<tr><td class="right short">10</td><td class="left short">lost</td><td class="left short">-</td></tr>
</tbody>
</table>
</div>
<p class="note">an `x` &lt;here&gt;</p>
<p class="note">second</p>
<h2>Nothing</h2>
<div class="wide">
<table>
<thead><tr><th class="left">a</th><th class="left">b</th></tr></thead>
<tbody>
<tr><td colspan="2">none</td></tr>
</tbody>
</table>
</div>
<h2>Findings</h2>
<div class="wide">
<table>
<thead><tr><th>code</th><th>severity</th><th>engine</th><th>case</th><th>where</th>\
<th>what was seen</th></tr></thead>
<tbody>
<tr><td>PAD001 pad-row-routed</td><td>error</td><td>prefix</td><td>count</td><td>DP0 TP1 rows 20</td>\
<td>1 pad row keeps experts</td></tr>
<tr><td>PAD007 expert-load-skewed-by-pads</td><td>warning</td><td>prefix</td><td>count</td><td></td>\
<td>load off | by half</td></tr>
</tbody>
</table>
</div>
<h2>Scenario and environment</h2>
<div class="wide about">
<table>
<tbody>
<tr><td>tokens</td><td>[20, 16]</td></tr>
<tr><td>max_padding_factor</td><td>null</td></tr>
<tr><td>device</td><td>cpu</td></tr>
<tr><td>moepad</td><td>0.1.0</td></tr>
<tr><td>platform</td><td>Linux x86_64</td></tr>
<tr><td>python</td><td>3.11.7</td></tr>
</tbody>
</table>
</div>
</body>
</html>
"""


@pytest.mark.parametrize(
    ("name", "expected"), [("table", TABLE), ("markdown", MARKDOWN), ("csv", CSV), ("junit", JUNIT)]
)
def test_the_whole_text_is_as_written_here(name: str, expected: str) -> None:
    assert RENDERERS[name](REPORT) == expected


def test_the_html_body_is_as_written_here() -> None:
    page = RENDERERS["html"](REPORT)
    assert page[page.index("<body>") :] == HTML_BODY
    assert page.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert "<title>moepad repro: fixed has 1 finding</title>" in page


def test_json_is_the_report_with_nan_as_text() -> None:
    expected = REPORT.to_dict()
    expected["findings"][0]["seen"] = [3, "nan"]
    text = RENDERERS["json"](REPORT)
    assert text == json.dumps(json.loads(text, parse_constant=pytest.fail), indent=2) + "\n"
    assert json.loads(text) == json.loads(json.dumps(expected))


def test_colour_is_on_the_verdicts_summary_only() -> None:
    painted = table.render(REPORT, colour=True)
    assert painted == TABLE.replace("fixed has 1 finding", "\x1b[31mfixed has 1 finding\x1b[0m")


def test_a_drawing_stands_between_the_views_and_the_findings() -> None:
    assert table.render(REPORT, drawing="###.\n") == TABLE.replace("(none)\n", "(none)\n\n###.\n")


def test_a_report_that_judges_nothing_prints_no_verdict() -> None:
    quiet = replace(REPORT, findings=(), views=(), verdict=Verdict("ok", 0))
    assert RENDERERS["table"](quiet) == "before: prefix\nafter: fixed\n"
    assert RENDERERS["markdown"](quiet) == "## moepad repro\n\nbefore: prefix\n\nafter: fixed\n"
    assert "verdict" not in re.sub("(?s)<style>.*</style>", "", RENDERERS["html"](quiet))


def test_twelve_findings_have_a_line_each() -> None:
    lines = finding_lines([replace(LEAK, rows=str(row)) for row in range(12)])
    assert len(lines) == 12
    assert lines[11] == "PAD001 pad-row-routed  prefix/count DP0 TP1 rows 11: 1 pad row keeps experts"


def test_more_findings_have_a_line_for_each_code_engine_and_fault() -> None:
    leaks = [replace(LEAK, rows=str(row)) for row in range(12)]
    assert finding_lines([*leaks, SKEW]) == [
        "PAD001 pad-row-routed  prefix/count DP0 TP1 rows 0: 1 pad row keeps experts (and 11 more like it)",
        "PAD007 expert-load-skewed-by-pads  prefix/count: load off | by half",
        "--format json lists all 13",
    ]


def test_more_kinds_of_finding_than_lines_end_with_the_number_left_out() -> None:
    lines = finding_lines([replace(LEAK, engine=f"engine{n}") for n in range(14)])
    assert len(lines) == 13
    assert lines[-1] == "and 2 more; --format json lists all 14"


def test_an_empty_table_still_has_its_csv_header() -> None:
    empty = replace(REPORT, tables={"masked_rows": []})
    assert RENDERERS["csv"](empty) == "fault,engine,dp_rank,attn_tp_rank,kind,rows\n"


def test_a_csv_row_with_a_column_that_the_schema_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="dict contains fields not in fieldnames"):
        RENDERERS["csv"](replace(REPORT, tables={"masked_rows": [{"fault": "count", "surprise": 1}]}))


def test_junit_has_no_failure_where_the_verdict_is_ok() -> None:
    verdict = Verdict("ok", 0, "as it should be", ("reproduced before, gone after",))
    suite = _suite(replace(REPORT, verdict=verdict, blamed=()))
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0")
    assert suite.findtext("testcase/system-out", "").startswith("PAD001 pad-row-routed")


def test_junit_has_an_error_where_nothing_could_be_verified() -> None:
    verdict = Verdict("not-verified", 3, "not verified", (), ("no engine",))
    suite = _suite(replace(REPORT, findings=(), blamed=(), verdict=verdict))
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("0", "1", "1")
    assert [skipped.get("message") for skipped in suite.iter("skipped")] == ["no engine"]


def test_junit_fails_a_case_only_for_findings_that_count_against_the_verdict() -> None:
    kept, blamed = replace(LEAK, dp_rank=1), replace(LEAK, dp_rank=1, engine="fixed")
    suite = _suite(replace(REPORT, findings=(LEAK, kept, blamed), blamed=(blamed,)))
    texts = {
        case.get("name"): (case.findtext("failure", ""), case.findtext("system-out", ""))
        for case in suite.iter("testcase")
    }
    line = "PAD001 pad-row-routed  {} TP1 rows 20: 1 pad row keeps experts"
    assert texts == {
        "DP 0": ("", line.format("prefix/count DP0")),
        "DP 1": (line.format("fixed/count DP1"), line.format("prefix/count DP1")),
        "verdict": ("pads were routed", ""),
        "not checked 1": ("", ""),
    }


def test_the_findings_title_counts_them_by_engine() -> None:
    findings = [LEAK, SKEW, replace(LEAK, engine="fixed\nfindings: 0")]
    assert findings_title(findings) == "findings: 3 (2 prefix, 1 fixed findings: 0)"


def test_a_page_is_printed_as_it_is() -> None:
    page = replace(
        REPORT, findings=(), views=(), heading=(), verdict=Verdict("ok", 0), page="# PAD001\n\n<b> *x*"
    )
    assert RENDERERS["table"](page) == "# PAD001\n\n<b> *x*\n"
    assert RENDERERS["markdown"](page) == "## moepad repro\n\n# PAD001\n\n<b> *x*\n"
    assert "<pre># PAD001\n\n&lt;b&gt; *x*</pre>" in RENDERERS["html"](page)


FORGED = "a.json\n\nverdict: ok\n# forged\n- forged"
ON_ONE_LINE = FORGED.replace("\n", " ")
FORGING = replace(
    REPORT,
    findings=(replace(LEAK, engine=FORGED, message=FORGED),),
    views=(View(FORGED, ("rows",), (("20",),)),),
    verdict=Verdict("findings", 1, FORGED, (FORGED,), (FORGED,)),
    heading=(FORGED, "second"),
)


def test_a_line_break_in_text_of_a_user_forges_no_line_of_the_table() -> None:
    finding = f"PAD001 pad-row-routed  {ON_ONE_LINE}/count DP0 TP1 rows 20: {ON_ONE_LINE}"
    assert RENDERERS["table"](FORGING).splitlines() == [
        *(ON_ONE_LINE, "second", ""),
        *(ON_ONE_LINE, "rows", "----", "20", ""),
        *(f"findings: 1 (1 {ON_ONE_LINE})", finding, ""),
        *(f"verdict: {ON_ONE_LINE}", f"  {ON_ONE_LINE}", f"not checked: {ON_ONE_LINE}"),
    ]


def test_a_line_break_in_text_of_a_user_forges_no_line_of_markdown() -> None:
    finding = f"- PAD001 pad-row-routed  {ON_ONE_LINE}/count DP0 TP1 rows 20: {ON_ONE_LINE}"
    lines = [line for line in RENDERERS["markdown"](FORGING).splitlines() if line]
    assert lines == [
        *("## moepad repro", ON_ONE_LINE, "second"),
        *(f"### {ON_ONE_LINE}", "| rows |", "|------|", "| 20   |"),
        *("### Findings", finding),
        *(f"**Verdict: {ON_ONE_LINE}**", f"- {ON_ONE_LINE}", f"- not checked: {ON_ONE_LINE}"),
    ]


def test_a_line_break_in_text_of_a_user_forges_no_line_of_the_pages_heading() -> None:
    assert f"<pre>{ON_ONE_LINE}\nsecond</pre>" in RENDERERS["html"](FORGING)


def test_markdown_in_a_heading_is_text() -> None:
    heading = ("before: [x](http://y) *b* <i> `c` | d",)
    text = RENDERERS["markdown"](replace(REPORT, heading=heading))
    assert text.splitlines()[2] == r"before: \[x\](http://y) \*b\* \<i\> \`c\` \| d"


@pytest.mark.parametrize("name", sorted(RENDERERS))
def test_hostile_text_breaks_no_format(name: str) -> None:
    hostile = "\x00\x1b[31m]]><script>alert(1)</script>|\ud800\ufffe"
    report = replace(
        REPORT,
        findings=(replace(LEAK, message=hostile),),
        views=(View(hostile, (hostile,), ((hostile,),), hostile),),
        verdict=Verdict("findings", 1, hostile, (hostile,), (hostile,)),
        heading=(hostile,),
        page=hostile,
    )
    text = RENDERERS[name](report)
    assert "\x00" not in text
    assert "\x1b" not in text
    assert name not in ("html", "junit") or "<script>" not in text
    if name == "junit":
        ElementTree.fromstring(text)  # noqa: S314
    text.encode()


def test_the_page_needs_no_script_and_no_network() -> None:
    page = RENDERERS["html"](REPORT)
    assert "<script" not in page
    assert not re.search(r"https?:|src=|href=|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page


def _suite(report: Report) -> ElementTree.Element:
    suite = ElementTree.fromstring(RENDERERS["junit"](report)).find("testsuite")  # noqa: S314
    assert suite is not None
    return suite
