"""The catalogue of finding codes, its pages, and the findings made from it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.resources import files

import pytest

from repro.findings import CATALOGUE, Finding, FindingKind, make_finding

RUNS = ("repro", "check", "compare")
COMMANDS = {"repro", "check", "shard-bounds", "compare", "explain"}

# Code, name, severity, checked_by: the contract with whoever filters or greps findings. Append only.
CODES = [
    ("PAD001", "pad-row-routed", "error", RUNS),
    ("PAD002", "real-row-masked", "error", RUNS),
    ("PAD003", "local-count-wrong", "error", RUNS),
    ("PAD004", "mask-rejected", "error", RUNS),
    ("PAD005", "bucket-not-divisible", "error", (*RUNS, "shard-bounds")),
    ("PAD006", "expert-buffer-overflow", "error", ()),
    ("PAD007", "expert-load-skewed-by-pads", "warning", ()),
    ("PAD008", "expert-id-out-of-range", "error", RUNS),
    ("PAD009", "duplicate-expert-id", "error", RUNS),
    ("PAD010", "non-finite-weight", "error", RUNS),
    ("PAD011", "router-not-row-wise", "error", ()),
    ("PAD012", "pad-value-leak", "error", ()),
    ("PAD013", "observer-counts-pads", "warning", ()),
    ("PAD014", "expert-id-dtype", "error", ()),
    ("PAD015", "host-value-in-capture", "error", ()),
    ("PAD016", "stale-count-in-replay", "error", ()),
    ("PAD017", "count-exceeds-rows", "error", RUNS),
    ("PAD018", "idle-rank-counted", "error", RUNS),
    ("PAD019", "real-row-rerouted", "error", RUNS),
]

SECTIONS = [
    "What it means",
    "What users see",
    "How it comes about",
    "How engines fixed it",
    "How to look for it with moepad",
    "References",
]

# The public reports by class of fault, from the survey that the catalogue is built on.
REPORTS = {
    "A": "sglang#31838 sglang#30895 sglang#25852 vllm#50759 vllm#56079 Megatron-LM#5542",
    "B": "sglang#31838 sglang#9107 sglang#33200 Megatron-LM#4922 Megatron-LM#6457",
    "C": "sglang#22404 sglang#35588 sglang#36404 vllm#47066",
    "D": "vllm#42034 vllm#57036 vllm#57946 aiter#4839 aiter#5295",
    "E": "vllm#39391 vllm#39593 sglang#30079",
    "F": "vllm#38128 sglang#36404",
    "G": "sglang#26133 flashinfer#3057 vllm#57094",
    "H": "sglang#35766 sglang#33871 sglang#39899",
    "I": "DeepEP#165 TensorRT-LLM#14605",
    "J": "vllm#55147 vllm#40862 sglang#25380",
}

each_kind = pytest.mark.parametrize("kind", CATALOGUE.values(), ids=CATALOGUE.keys())


def section(kind: FindingKind, title: str) -> str:
    return re.split(r"^## .*\n", kind.page, flags=re.MULTILINE)[1 + SECTIONS.index(title)]


def references(kind: FindingKind) -> Iterator[tuple[str, str]]:
    """(class letter, reference) of every ``project#number`` in the page's last section."""
    letter = ""
    for line in section(kind, "References").splitlines():
        heading = re.match(r"Class ([A-J]) \(.+\)", line)
        if heading:
            letter = heading[1]
        for reference in re.findall(r"[A-Za-z-]+#\d+", line):
            yield letter, reference


def test_the_catalogue_has_exactly_these_codes_names_severities_and_commands_in_order() -> None:
    listed = [(kind.code, kind.name, kind.severity, kind.checked_by) for kind in CATALOGUE.values()]
    assert listed == CODES
    assert list(CATALOGUE) == [code for code, *_ in CODES]


def test_no_code_and_no_name_is_used_twice() -> None:
    assert len({code for code, *_ in CODES}) == len({name for _, name, *_ in CODES}) == len(CODES)


@each_kind
def test_summary_and_evidence_are_one_sentence_each(kind: FindingKind) -> None:
    for text in (kind.summary, kind.evidence):
        assert text.endswith(".")
        assert ". " not in text
    assert kind.evidence.startswith("rows: ")
    assert "expected" in kind.evidence
    assert "seen" in kind.evidence


def test_every_page_belongs_to_a_code_and_every_code_has_a_page() -> None:
    pages = sorted(entry.name for entry in files("repro").joinpath("catalogue").iterdir())
    assert pages == [f"{code}.md" for code in CATALOGUE]


@each_kind
def test_a_page_has_the_title_and_the_sections_in_order_and_none_is_empty(kind: FindingKind) -> None:
    assert kind.page.startswith(f"# {kind.code} {kind.name}\n")
    assert re.findall(r"^## (.*)$", kind.page, flags=re.MULTILINE) == SECTIONS
    assert all(section(kind, title).strip() for title in SECTIONS)


@each_kind
def test_a_page_fits_a_terminal(kind: FindingKind) -> None:
    lines = kind.page.splitlines()
    assert 25 <= len(lines) <= 47
    assert max(map(len, lines)) <= 80
    assert kind.page.isascii()
    assert kind.page.endswith("\n")


@each_kind
def test_a_page_names_the_commands_that_look_for_its_code_and_no_others(kind: FindingKind) -> None:
    named = set(re.findall(r"moepad ([a-z][a-z-]*)", kind.page))
    assert named <= COMMANDS
    assert set(kind.checked_by) <= named
    assert not named - set(kind.checked_by) or kind.code == "PAD003"  # shard-bounds calculates its counts


@each_kind
def test_a_page_says_so_where_this_version_does_not_look(kind: FindingKind) -> None:
    said = (
        section(kind, "How to look for it with moepad").strip().startswith("Not looked for by this version")
    )
    assert said == (kind.checked_by == ())
    assert kind.page.count("Not looked for by this version") == said


@each_kind
def test_a_page_mentions_only_codes_that_exist(kind: FindingKind) -> None:
    assert set(re.findall(r"PAD\d+", kind.page)) <= set(CATALOGUE)


@each_kind
def test_a_page_cites_known_reports_under_their_own_class(kind: FindingKind) -> None:
    cited = list(references(kind))
    assert cited
    assert [pair for pair in cited if pair[1] not in REPORTS.get(pair[0], "").split()] == []


@each_kind
def test_reports_are_cited_by_number_in_the_last_section_only(kind: FindingKind) -> None:
    assert len(re.findall(r"#\d", kind.page)) == len(list(references(kind)))


def test_every_report_of_the_survey_is_cited_somewhere() -> None:
    cited = {reference for kind in CATALOGUE.values() for _, reference in references(kind)}
    assert cited == set(" ".join(REPORTS.values()).split())


def test_importing_the_catalogue_reads_no_page_and_no_heavy_library() -> None:
    script = (
        "import sys; opened = []; "
        "sys.addaudithook(lambda event, args: event == 'open' and opened.append(str(args[0]))); "
        "import repro.findings; "
        "print([name for name in opened if name.endswith('.md')], "
        "[name for name in ('torch', 'pandas', 'numpy') if name in sys.modules]); "
        "repro.findings.CATALOGUE['PAD001'].page; "
        "print(len([name for name in opened if name.endswith('PAD001.md')]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[] []\n1\n"


def test_make_finding_fills_name_and_severity_from_the_catalogue() -> None:
    finding = make_finding(
        "PAD003",
        engine="prefix",
        fault="count",
        message="counts [5, 5, 5, 5] are what localising against the raw length gives",
        dp_rank=0,
        expected=[16, 4, 0, 0],
        seen=[5, 5, 5, 5],
    )
    assert finding == Finding(
        code="PAD003",
        name="local-count-wrong",
        severity="error",
        engine="prefix",
        fault="count",
        dp_rank=0,
        attn_tp_rank=None,
        rows=None,
        expected=[16, 4, 0, 0],
        seen=[5, 5, 5, 5],
        message="counts [5, 5, 5, 5] are what localising against the raw length gives",
    )


def test_make_finding_keeps_ranks_and_rows_even_where_they_are_zero() -> None:
    finding = make_finding(
        "PAD018",
        engine="e",
        fault="mask",
        message="m",
        dp_rank=0,
        attn_tp_rank=0,
        rows="0",
        expected=0,
        seen=0,
    )
    assert asdict(finding) == {
        "code": "PAD018",
        "name": "idle-rank-counted",
        "severity": "error",
        "engine": "e",
        "fault": "mask",
        "dp_rank": 0,
        "attn_tp_rank": 0,
        "rows": "0",
        "expected": 0,
        "seen": 0,
        "message": "m",
        "case": None,
    }


def test_severity_can_be_lowered_and_raised_for_one_finding() -> None:
    lowered = make_finding("PAD005", engine="e", fault="count", message="m", rows="24-27", severity="warning")
    raised = make_finding("PAD007", engine="e", fault="mask", message="m", severity="error")
    assert (lowered.severity, raised.severity) == ("warning", "error")
    assert (CATALOGUE["PAD005"].severity, CATALOGUE["PAD007"].severity) == ("error", "warning")


@pytest.mark.parametrize("code", ["PAD000", "PAD020", "pad001", "PAD1", "pad-row-routed", ""])
def test_an_unknown_code_is_refused_by_name(code: str) -> None:
    with pytest.raises(ValueError, match=rf"^'{code}' is not a finding code; known are PAD001 to PAD019$"):
        make_finding(code, engine="e", fault="mask", message="m")
