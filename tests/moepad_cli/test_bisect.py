"""``moepad bisect`` as a caller meets it, over histories whose versions are built-in engines."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from moepad_cli.app import main
from moepad_cli.schema import schema_text
from repro.case import Case
from repro.engines import Observation
from repro.engines.builtin import BUILTIN_ENGINES
from repro.engines.sglang import locate
from repro.errors import EngineSpecError, NotVerifiedError

CASE = ("--tokens", "20", "--bucket", "64", "--attn-tp", "4")


class Version:
    """One version: a built-in engine under another name, which may fail at a fault."""

    def __init__(self, name: str, kind: str, log: list[str]) -> None:
        self.name = name
        self.loaded: dict[str, dict[str, Any]] = {}
        self._engine, _, self._unverified = kind.partition(" without ")
        self._log = log

    def observe(self, case: Case) -> Observation:
        if self._engine == "interrupted":
            raise KeyboardInterrupt
        if self._unverified in (case.fault, "both"):
            raise NotVerifiedError(f"{self.name}: cannot verify: a kernel of {self.name}")
        self.loaded["cuda"] = {
            "mode": "isolated",
            "real": ["layers.moe.topk"],
            "shims": {"is_cuda": "the platform asked for"},
            "stubs": ["flashinfer"],
        }
        return BUILTIN_ENGINES[self._engine].observe(case)

    def stop(self) -> None:
        self._log.append(f"stop {self.name}")


Play = Callable[[Mapping[str, str | Exception]], list[str]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Play:
    """Puts up a history, ``{version: engine}``; gives the log of what is loaded and stopped."""

    def put_up(history: Mapping[str, str | Exception]) -> list[str]:
        log: list[str] = []

        def start_workers(specs: list[str], *, python: str | None, time_limit: float) -> list[None]:
            assert (python, time_limit) == (None, 60)
            return [None for _ in specs]

        def load_engine(spec: str, *, side: str, worker: None) -> Version:
            assert side == "after"
            log.append(f"load {spec}")
            kind = history[spec.split("==")[-1].split("#")[-1]]
            if isinstance(kind, Exception):
                raise kind
            return Version(spec, kind, log)

        monkeypatch.setattr("repro.engines.load_engine", load_engine)
        monkeypatch.setattr("repro.engines.start_workers", start_workers)
        # Others are listed too, and the newest of them comes last.
        monkeypatch.setattr(locate, "released_versions", lambda: ["0.1.0", *history, "9.0"])
        return log

    monkeypatch.chdir(tmp_path)
    return put_up


def run(*arguments: str) -> int:
    return main(["bisect", *arguments, "--device", "cpu"])


def expect_report(capsys: pytest.CaptureFixture[str], *arguments: str, exit_code: int = 0) -> dict[str, Any]:
    """The one document on standard output, held to the schema."""
    assert run(*arguments, "--format", "json") == exit_code
    out, err = capsys.readouterr()
    assert err == ""
    document: dict[str, Any] = json.loads(out)
    jsonschema.validate(document, json.loads(schema_text()))
    return document


def expect_line(capsys: pytest.CaptureFixture[str], exit_code: int, line: str, *arguments: str) -> None:
    assert run(*arguments) == exit_code
    assert capsys.readouterr() == ("", f"moepad bisect: {line}\n")


def status_of(document: Mapping[str, Any]) -> dict[str, tuple[str, str | None]]:
    return {row["version"]: (row["status"], row["verdict"]) for row in document["tables"]["bisected"]}


def failures_and_errors() -> tuple[str | None, str | None]:
    """Of ``report.xml``."""
    suite = ElementTree.parse("report.xml").getroot()[0]  # noqa: S314
    return suite.get("failures"), suite.get("errors")


HISTORY: dict[str, str | Exception] = {
    "0.5.11": "prefix",
    "0.5.12": "prefix",
    "0.5.12.post1": "prefix",
    "0.5.13": "prefix",
    "0.5.14": "fixed-mask",
    "0.5.15": "fixed-mask",
    "0.5.16": "fixed-mask",
    "0.5.17": "fixed-mask",
}

TABLE = """\
sglang   good: 0.5.11   bad: 0.5.17
before: 0.5.13   after: 0.5.14   2 cases   device: cpu

versions: 8, from good to bad
version       status  verdict  safe  findings  not verified
------------  ------  -------  ----  --------  ------------
0.5.11        loaded  alike       0         2             0
0.5.12.post1  loaded  alike       0         2             0
0.5.13        loaded  alike       0         2             0
0.5.14        loaded  changed     1         1             0
0.5.17        loaded  changed     1         1             0
3 more not needed, if the verdict changes once

cases
fault  case  before         after
-----  ----  -------------  -----
mask   mask  PAD001 PAD004  safe
more cases: 1 alike (--format json lists them)

findings, before against after
change     fault  code    name               cases
---------  -----  ------  -----------------  -----
fixed      mask   PAD001  pad-row-routed         1
fixed      mask   PAD004  mask-rejected          1
remaining  count  PAD001  pad-row-routed         1
remaining  count  PAD002  real-row-masked        1
remaining  count  PAD003  local-count-wrong      1

"""


def test_the_version_that_changed_the_verdict_is_found_by_few_loads_one_at_a_time(
    play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    log = play(HISTORY)
    assert run("sglang", "--good", "0.5.11", "--bad", "0.5.17", *CASE) == 0
    out, err = capsys.readouterr()
    assert (out[: len(TABLE)], err) == (TABLE, "")
    assert out[out.index("verdict: ") :] == (
        "verdict: first changed: sglang==0.5.14 (5 of 8 versions loaded)\n"
        "  before, sglang==0.5.13: 0 safe, 2 with findings (PAD001, PAD002, PAD003, PAD004), 0 not verified\n"
        "  after, sglang==0.5.14: 1 safe, 1 with findings (PAD001, PAD002, PAD003), 0 not verified\n"
        "  findings: 7 fixed, 0 introduced, 8 remaining\n"
    )
    order = ["0.5.11", "0.5.17", "0.5.14", "0.5.12.post1", "0.5.13"]
    assert log == [f"{what} sglang=={version}" for version in order for what in ("load", "stop")]


def test_the_report_as_data_holds_every_version_and_both_neighbours(
    play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    play(HISTORY)
    document = expect_report(capsys, "sglang", "--good", "0.5.11", "--bad", "0.5.17", *CASE)
    counts = {"safe": 0, "with_findings": 2, "not_verified": 0}
    not_run = dict.fromkeys(counts)
    rows = document["tables"]["bisected"]
    assert [row["version"] for row in rows] == list(HISTORY)
    assert rows[0] == {"version": "0.5.11", "status": "loaded", "verdict": "alike", **counts, "why": ""}
    assert rows[1] == {"version": "0.5.12", "status": "not needed", "verdict": None, **not_run, "why": ""}
    assert status_of(document)["0.5.14"] == ("loaded", "changed")
    common = {"platform": "cuda", "options": "--tokens 20", "why_before": "", "why_after": ""}
    count = "PAD001 PAD002 PAD003"
    assert document["tables"]["cases"] == [
        {"case": "mask", "fault": "mask", "branch": "custom", "before": "PAD001 PAD004", "after": "safe"}
        | common,
        {"case": "count", "fault": "count", "branch": "custom", "before": count, "after": count} | common,
    ]
    changes = document["tables"]["finding_changes"]
    assert {(row["change"], row["fault"]) for row in changes} == {("fixed", "mask"), ("remaining", "count")}
    assert {(found["engine"], found["case"]) for found in document["findings"]} == {
        ("sglang==0.5.14", "count")
    }
    assert {row["engine"] for row in document["tables"]["loaded"]} == {"sglang==0.5.13", "sglang==0.5.14"}
    chosen = {key: document["scenario"][key] for key in ("engine", "good", "bad", "fault", "tokens")}
    assert chosen == {"engine": "sglang", "good": "0.5.11", "bad": "0.5.17", "fault": "both", "tokens": [20]}


def test_going_from_new_to_old_finds_the_last_version_that_had_the_fault(
    play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    play(HISTORY)
    document = expect_report(
        capsys, "sglang", "--good", "0.5.17", "--bad", "0.5.11", "--fault", "mask", *CASE
    )
    assert document["verdict"]["summary"] == "first changed: sglang==0.5.13 (5 of 8 versions loaded)"
    assert [row["version"] for row in document["tables"]["bisected"]] == list(HISTORY)[::-1]
    (case,) = document["tables"]["cases"]
    assert (case["case"], case["before"], case["after"]) == ("mask", "safe", "PAD001 PAD004")
    assert {finding["code"] for finding in document["findings"]} == {"PAD001", "PAD004"}
    assert document["verdict"]["exit_code"] == 0


def test_without_a_scenario_a_suite_is_run(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    play({"0.5.16": "prefix", "0.5.17": "fixed-count"})
    document = expect_report(capsys, "sglang", "--good", "0.5.16", "--bad", "0.5.17", "--fault", "count")
    assert document["scenario"]["suite"] == "default"
    cases = document["tables"]["cases"]
    assert len(cases) == 16
    assert {row["after"] for row in cases} == {"safe"}
    assert {row["before"] for row in cases} == {"safe", "PAD001 PAD002 PAD003", "PAD002 PAD003"}
    assert document["verdict"]["summary"] == "first changed: sglang==0.5.17 (2 of 2 versions loaded)"


def test_versions_that_cannot_be_run_are_stepped_over(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    missing = NotVerifiedError("sglang==0.5.14: pip could not download it: no route")
    play({**HISTORY, "0.5.14": missing, "0.5.15": "fixed-mask without mask"})
    document = expect_report(capsys, "sglang", "--good", "0.5.11", "--bad", "0.5.17", *CASE, exit_code=3)
    assert document["verdict"]["status"] == "not-verified"
    assert document["verdict"]["summary"] == (
        "first changed is one of: sglang==0.5.14, sglang==0.5.15, sglang==0.5.16 "
        "(4 of 8 versions loaded, 2 stepped over)"
    )
    assert document["verdict"]["not_checked"] == [
        "sglang==0.5.14, stepped over: pip could not download it: no route",
        "sglang==0.5.15, stepped over: mask: a kernel of sglang==0.5.15",
    ]
    assert status_of(document) == {
        "0.5.11": ("loaded", "alike"),
        "0.5.12": ("not needed", None),
        "0.5.12.post1": ("not needed", None),
        "0.5.13": ("loaded", "alike"),
        "0.5.14": ("skipped", None),
        "0.5.15": ("skipped", None),
        "0.5.16": ("loaded", "changed"),
        "0.5.17": ("loaded", "changed"),
    }
    counts = [
        [row[key] for key in ("safe", "with_findings", "not_verified")]
        for row in document["tables"]["bisected"]
    ]
    assert counts[4:6] == [[None, None, None], [0, 1, 1]]


def test_a_version_in_between_that_is_no_sglang_is_stepped_over_too(
    play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = EngineSpecError("sglang==0.5.14: that release has no topk.py; give a later one")
    play({**HISTORY, "0.5.14": foreign, "0.5.16": "fixed"})
    arguments = ("sglang", "--good", "0.5.12.post1", "--bad", "0.5.15", "--fault", "mask", *CASE)
    assert run(*arguments, "--junit-xml", "report.xml") == 3
    out, err = capsys.readouterr()
    assert err == ""
    assert out[out.index("verdict: ") :].splitlines()[0] == (
        "verdict: first changed is one of: sglang==0.5.14, sglang==0.5.15 (3 of 4 versions loaded, 1 stepped over)"
    )
    assert "not checked: sglang==0.5.14, stepped over: that release has no topk.py; give a later one\n" in out
    assert failures_and_errors() == ("0", "1")


def test_a_change_that_was_found_fails_no_case_of_the_junit_report(play: Play) -> None:
    play({"0.5.16": "fixed", "0.5.17": "prefix"})
    assert run("sglang", "--good", "0.5.16", "--bad", "0.5.17", *CASE, "--junit-xml", "report.xml") == 0
    assert failures_and_errors() == ("0", "0")


def test_not_verified_that_turns_safe_is_no_change(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    play({"0.5.16": "fixed without count", "0.5.17": "fixed"})
    expect_line(
        capsys,
        3,
        "--bad: sglang==0.5.17 has the verdict of --good in the 1 of 2 cases that are verified at both; "
        "not verified: count: a kernel of sglang==0.5.16",
        *("sglang", "--good", "0.5.16", "--bad", "0.5.17", *CASE),
    )


def test_only_verified_cases_are_shown_as_changed(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    play({"0.5.16": "prefix without count", "0.5.17": "fixed"})
    assert run("sglang", "--good", "0.5.16", "--bad", "0.5.17", *CASE) == 0
    out, _ = capsys.readouterr()
    assert out[out.index("\ncases\n") : out.index("\nfindings, before")] == (
        "\ncases\n"
        "fault  case  before         after\n"
        "-----  ----  -------------  -----\n"
        "mask   mask  PAD001 PAD004  safe\n"
        "more cases: 1 not compared (--format json lists them)\n"
    )
    assert "not checked: sglang==0.5.16: a kernel of sglang==0.5.16: count\n" in out


@pytest.mark.parametrize(
    ("history", "exit_code", "line"),
    [
        (
            {"1.0": "prefix", "2.0": "prefix"},
            2,
            "--bad: sglang==2.0 has the verdict of --good in all 2 cases; give a version with another",
        ),
        (
            {"1.0": "prefix without both", "2.0": "fixed"},
            3,
            "--good: sglang==1.0: no case could be verified: a kernel of sglang==1.0",
        ),
        (
            {"1.0": "prefix", "2.0": "fixed without both"},
            3,
            "--bad: sglang==2.0: no case could be verified: a kernel of sglang==2.0",
        ),
        (
            {"1.0": NotVerifiedError("sglang==1.0: pip took longer than 600 s; try again"), "2.0": "fixed"},
            3,
            "--good: sglang==1.0: pip took longer than 600 s; try again",
        ),
        (
            {"1.0": "prefix", "2.0": NotVerifiedError("sglang==2.0: its wheel is damaged")},
            3,
            "--bad: sglang==2.0: its wheel is damaged",
        ),
        (
            {"1.0": EngineSpecError("sglang==1.0: there is no wheel of that version; the newest is 2.0")},
            2,
            "--good: sglang==1.0: there is no wheel of that version; the newest is 2.0",
        ),
        (
            {"1.0": "prefix", "2.0": EngineSpecError("sglang==2.0: there is no wheel of that version")},
            2,
            "--bad: sglang==2.0: there is no wheel of that version",
        ),
    ],
)
def test_ends_between_which_nothing_can_be_found_are_one_line(
    history: dict[str, str | Exception],
    exit_code: int,
    line: str,
    play: Play,
    capsys: pytest.CaptureFixture[str],
) -> None:
    play(history)
    expect_line(capsys, exit_code, line, "sglang", "--good", "1.0", "--bad", "2.0", *CASE)


def test_machines_are_told_of_an_end_that_is_not_verified(
    play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    play({"1.0": NotVerifiedError("sglang==1.0: no network"), "2.0": "fixed"})
    assert run("sglang", "--good", "1.0", "--bad", "2.0", "--format", "json") == 3
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, json.loads(schema_text()))
    assert (document["tables"], document["verdict"]["not_checked"]) == (
        {"bisected": []},
        ["--good: sglang==1.0: no network"],
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("fixed", "--good", "1.0", "--bad", "2.0"),
            "ENGINE: 'fixed' has no versions to search; give sglang for releases, or sglang@PATH for the "
            "commits of a checkout",
        ),
        (
            ("sglang==0.5.16", "--good", "1.0", "--bad", "2.0"),
            "ENGINE: 'sglang==0.5.16' has no versions to search; give sglang for releases, or sglang@PATH for the "
            "commits of a checkout",
        ),
        (
            ("sglang", "--good", "newest", "--bad", "2.0"),
            "--good: 'newest' is no version; give one such as 0.5.16",
        ),
        (("sglang", "--good", "1.0", "--bad", ""), "--bad: '' is no version; give one such as 0.5.16"),
        (
            ("sglang", "--good", "1.0", "--bad", "1.0.0"),
            "--bad: '1.0.0' is the same version as --good; give another",
        ),
        (
            ("sglang", "--good", "1.0", "--bad", "2.0", "--suite", "fll"),
            "--suite: 'fll' is not one of default, full; did you mean full?",
        ),
        (
            ("sglang", "--good", "1.0", "--bad", "2.0", "--time-limit", "0"),
            "--time-limit: '0' is out of range; give 0.1 or more",
        ),
        (("sglang", "--good", "1.0"), "--bad: missing"),
        (
            ("sglang@no such folder", "--good", "a", "--bad", "b"),
            "sglang@no such folder: 'no such folder' does not exist; give the folder of an SGLang",
        ),
    ],
)
def test_mistakes_are_one_line_and_load_nothing(
    arguments: tuple[str, ...], line: str, play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    log = play(HISTORY)
    expect_line(capsys, 2, line, *arguments)
    assert log == []


def test_an_end_may_be_a_version_that_is_not_listed(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    play({"0.5.17": "fixed-mask", "0.5.17rc1": "prefix", "0.5.16": "prefix"})
    arguments = ("sglang", "--good", "0.5.17.rc1", "--bad", "0.5.17", *CASE)
    document = expect_report(capsys, *arguments)
    assert list(status_of(document)) == ["0.5.17rc1", "0.5.17"]


def git(folder: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = ["/usr/bin/env", "git", *who, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_commits_of_a_checkout_are_searched(
    play: Play, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    git(tmp_path, "init", "--quiet", "--initial-branch=main", "checkout")
    checkout = tmp_path / "checkout"
    kinds = ["prefix", "prefix", "fixed-count", "fixed-count", "fixed"]
    history: dict[str, str | Exception] = {}
    for kind in kinds:
        git(checkout, "commit", "--quiet", "--allow-empty", "--message", kind)
        history[git(checkout, "rev-parse", "HEAD")] = kind
    git(checkout, "tag", "old", "HEAD~4")
    shas = list(history)
    log = play(history)
    assert run("sglang@checkout", "--good", "old", "--bad", "HEAD~1", *CASE) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out[: out.index("\ncases\n")] == (
        "sglang@checkout   good: old   bad: HEAD~1\n"
        f"before: {shas[1][:12]}   after: {shas[2][:12]}   2 cases   device: cpu\n"
        "\n"
        "versions: 4, from good to bad\n"
        "version       status  verdict  safe  findings  not verified\n"
        "------------  ------  -------  ----  --------  ------------\n"
        f"{shas[0][:12]}  loaded  alike       0         2             0\n"
        f"{shas[1][:12]}  loaded  alike       0         2             0\n"
        f"{shas[2][:12]}  loaded  changed     1         1             0\n"
        f"{shas[3][:12]}  loaded  changed     1         1             0\n"
    )
    assert f"verdict: first changed: sglang@checkout#{shas[2]} (4 of 4 versions loaded)\n" in out
    assert log[::2] == [f"load sglang@checkout#{shas[number]}" for number in (0, 3, 2, 1)]


def test_a_revision_that_is_not_there_is_one_line(
    play: Play, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "first")
    play({})
    line = "sglang@.: 'v9' names no commit there; give a branch, a tag or a commit's sha"
    expect_line(capsys, 2, line, "sglang@.", "--good", "HEAD", "--bad", "v9")


def test_the_versions_are_the_csv_file(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    play({"0.5.16": "prefix", "0.5.17": "fixed"})
    assert run("sglang", "--good", "0.5.16", "--bad", "0.5.17", *CASE, "--format", "csv") == 0
    assert list(csv.reader(io.StringIO(capsys.readouterr().out))) == [
        ["version", "status", "verdict", "safe", "with_findings", "not_verified", "why"],
        ["0.5.16", "loaded", "alike", "0", "2", "0", ""],
        ["0.5.17", "loaded", "changed", "2", "0", "0", ""],
    ]


def test_verbose_tells_what_was_loaded_of_both_neighbours(
    play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    play({"0.5.16": "prefix", "0.5.17": "fixed"})
    assert run("sglang", "--good", "0.5.16", "--bad", "0.5.17", *CASE, "-v") == 0
    out, _ = capsys.readouterr()
    for version in ("0.5.16", "0.5.17"):
        assert f"\nsglang=={version} on cuda, isolated: what was loaded\n" in out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_which_version_is_run_and_is_left_as_it_was(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(HISTORY)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((40, 24)))
    monkeypatch.setenv("TERM", "xterm")
    seen, dumb = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stderr", seen)
    assert run("sglang", "--good", "0.5.15", "--bad", "0.5.13", *CASE) == 0
    lines = (
        "moepad bisect: running 0.5.15, 1 of abo",
        "moepad bisect: running 0.5.13, 2 of abo",
        "moepad bisect: running 0.5.14, 3 of abo",
        "",
    )
    assert seen.getvalue() == "".join(f"\r\x1b[K{line}" for line in lines)
    monkeypatch.setattr(sys, "stderr", dumb)
    monkeypatch.setenv("TERM", "dumb")
    assert run("sglang", "--good", "0.5.15", "--bad", "0.5.13", *CASE) == 0
    assert dumb.getvalue() == ""


def test_an_interrupt_ends_the_version_that_is_running(
    play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    log = play({"0.5.16": "prefix", "0.5.17": "interrupted"})
    assert run("sglang", "--good", "0.5.16", "--bad", "0.5.17", *CASE) == 130
    assert capsys.readouterr().out == ""
    assert set(log[2:]) == {"load sglang==0.5.17", "stop sglang==0.5.17"}


@pytest.mark.network
def test_released_versions_changed_at_0_5_17(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("sglang", "--good", "0.5.15", "--bad", "0.5.18", *CASE)
    document = expect_report(capsys, *arguments)
    assert document["verdict"]["summary"].startswith("first changed: sglang==0.5.17 (4 of ")
    assert {(row["case"], row["before"], row["after"]) for row in document["tables"]["cases"]} == {
        ("mask", "PAD001 PAD004", "safe"),
        ("count", "PAD001 PAD002 PAD003", "safe"),
    }
    assert {row["change"] for row in document["tables"]["finding_changes"]} == {"fixed"}
