"""docs/engines.md: its made parts are what would be made now, its examples are those that the tests run."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

from moepad_cli.app import main
from repro.checks import CaseResult, check_cases
from repro.engines import BUILTIN_ENGINES
from repro.findings import CATALOGUE
from repro.suite import load_suite

TOP = Path(__file__).parents[1]
DOCUMENT = TOP / "docs" / "engines.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```console\n\$ moepad (.*)\n((?s:.*?))```\n", TEXT)


def load_maker() -> ModuleType:
    """The script that makes the parts."""
    spec = importlib.util.spec_from_file_location(
        "make_engines_table", DOCUMENT.with_name("make_engines_table.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


MAKER = load_maker()


def part(name: str) -> list[str]:
    """What stands between the two comments."""
    found = re.findall(f"<!-- {name}: begin -->\n\n((?s:.*?))\n\n<!-- {name}: end -->\n", TEXT)
    assert len(found) == 1
    return str(found[0]).split("\n")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n((?s:.*?))```\n", TEXT)


@pytest.mark.parametrize("name", list(MAKER.LISTS))
def test_a_list_is_what_the_worker_goes_by_now(name: str) -> None:
    assert part(name) == MAKER.LISTS[name](), "run: python docs/make_engines_table.py lists"


def test_the_table_of_releases_has_a_verdict_a_column_oldest_first() -> None:
    lines = part("versions")
    start = next(number for number, line in enumerate(lines) if line.startswith("| SGLang |"))
    rows = [line.strip("| ").split(" | ") for line in lines[start + 2 :][: lines[start:].index("") - 2]]
    numbers = [row[0] for row in rows]
    assert numbers == sorted(set(numbers), key=Version)
    assert numbers[0] == MAKER.FIRST
    for row in rows:
        for cell in row[1:]:
            verdict = re.fullmatch(
                r"(safe|(?:PAD\d{3} )+in \d+|not verified)(?: \(\d+ not verified\))?", cell
            )
            assert verdict, cell
            assert set(re.findall(r"PAD\d{3}", cell)) <= CATALOGUE.keys()
        assert len(row) == 1 + len(MAKER.COLUMNS)


def test_a_cell_counts_cases_of_each_kind() -> None:
    cases = [
        case
        for case in load_suite("default")
        if case.name in ("custom", "grouped", "one token, an idle rank")
    ]
    results = [result for (result,) in check_cases(cases, [BUILTIN_ENGINES["prefix"]])]
    unverified = CaseResult(cases[0], "prefix", None, "stand-in x was called at sglang/a.py:12")
    assert MAKER.cell(results) == "PAD001 PAD004 PAD018 in 2"
    assert MAKER.cell([*results, unverified]) == "PAD001 PAD004 PAD018 in 2 (1 not verified)"
    assert MAKER.cell([unverified, *(r for r in results if not r.findings)]) == "safe (1 not verified)"
    assert MAKER.cell([unverified]) == "not verified"
    release = MAKER.Release("1.0", [*results, unverified], frozenset({"isolated"}))
    assert MAKER.found(release) == [
        'PAD001 PAD004 in "custom"',
        'PAD001 PAD004 PAD018 in "one token, an idle rank"',
    ]
    assert MAKER.unverified([release]) == [('"custom"', "`stand-in x was called at sglang/a.py`", "1.0")]


def test_neighbours_of_a_list_are_told_as_a_range() -> None:
    assert MAKER.ranges([], "abc") == ""
    assert MAKER.ranges(["a", "b", "c"], "abc") == "a to c"
    assert MAKER.ranges(["b", "d", "e", "g"], "abcdefg") == "b, d to e, g"


def test_a_part_is_replaced_and_all_else_left() -> None:
    text = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n<!-- y: begin -->\n<!-- y: end -->\n"
    once = MAKER.replaced(text, "x", ["new", "lines"])
    assert once == text.replace("old\n", "\nnew\nlines\n\n")
    assert MAKER.replaced(once, "x", ["new", "lines"]) == once
    with pytest.raises(SystemExit, match="must have <!-- z: begin -->"):
        MAKER.replaced(text, "z", [])


def test_the_example_engine_is_the_one_that_the_tests_install() -> None:
    folder = TOP / "tests" / "data" / "example_engine"
    for language, name in (("toml", "pyproject.toml"), ("python", "example_engine.py")):
        assert blocks(language) == [(folder / name).read_text(encoding="utf-8")]


def test_commands_and_options_that_are_shown_exist(capsys: pytest.CaptureFixture[str]) -> None:
    lines = "\n".join([*blocks("bash"), *blocks("console")])
    shown = re.findall(r"^(?:\$ )?moepad (\w+)(.*)$", lines, re.MULTILINE)
    assert {command for command, _ in shown} == {"check", "compare"}
    for command, rest in shown:
        main([command, "--help"])
        known = capsys.readouterr().out
        for option in re.findall(r" (--[\w-]+)", rest):
            assert f"{option} " in known


def test_files_and_headings_that_are_named_exist() -> None:
    for path in re.findall(r"`((?:repro|tests|docs)/[\w./-]+)`|python ((?:tests|docs)/[\w./-]+)", TEXT):
        assert TOP.joinpath(*filter(None, path)).is_file(), path
    headings = {
        re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", TEXT, re.M)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) <= headings


@pytest.mark.network
@pytest.mark.parametrize(("arguments", "shown"), EXAMPLES, ids=[arguments for arguments, _ in EXAMPLES])
def test_an_example_prints_what_the_page_shows(
    capsys: pytest.CaptureFixture[str], arguments: str, shown: str
) -> None:
    main(shlex.split(arguments))
    printed = re.sub("device: .*", "device: cpu", capsys.readouterr().out)
    assert printed == shown
