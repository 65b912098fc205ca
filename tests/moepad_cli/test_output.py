"""Files are written whole or not at all, and standard output only when all of them could be."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from moepad_cli import output
from moepad_cli.errors import UsageError
from moepad_cli.output import OutputOptions
from repro.report import Report, Verdict

REPORT = Report(
    command="shard-bounds",
    scenario={},
    environment={"device": "cpu"},
    findings=(),
    tables={"masked_rows": []},
    main_table="masked_rows",
    verdict=Verdict("ok", 0, "as it should be", ("all well",)),
)
TEXT = "verdict: as it should be\n  all well\n"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not list(tmp_path.rglob(".moepad-*"))


def test_without_files_the_result_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit(REPORT, OutputOptions())
    assert capsys.readouterr() == (TEXT, "")


def test_output_takes_the_result_and_leaves_standard_output_empty(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output.emit(REPORT, OutputOptions(output=str(folder / "result.txt")))
    assert (folder / "result.txt").read_text() == TEXT
    assert capsys.readouterr() == ("", "")


def test_every_file_is_written_beside_the_result(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = OutputOptions(
        format="csv",
        junit_xml=str(folder / "a.xml"),
        html=str(folder / "a.html"),
        save=str(folder / "run.json"),
    )
    output.check(options)
    assert list(folder.iterdir()) == []
    output.emit(REPORT, options, saved=lambda: "{}\n")
    assert capsys.readouterr().out == "fault,engine,dp_rank,attn_tp_rank,kind,rows\n"
    assert {path.name: path.read_text()[:9] for path in folder.iterdir()} == {
        "a.xml": "<?xml ver",
        "a.html": "<!DOCTYPE",
        "run.json": "{}\n",
    }


def test_one_unwritable_file_leaves_all_others_as_they_were(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "old.xml").write_text("old")
    missing = str(folder / "no such folder" / "page.html")
    with pytest.raises(UsageError) as raised:
        output.emit(REPORT, OutputOptions(junit_xml=str(folder / "old.xml"), html=missing))
    assert raised.value.message == f"--html: cannot write '{missing}': No such file or directory"
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("old.xml", "old")]
    assert capsys.readouterr().out == ""


def test_an_interrupt_while_writing_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(text: str) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(output, "_encoded", interrupted)
    with pytest.raises(KeyboardInterrupt):
        output.emit(REPORT, OutputOptions(output=str(folder / "result.txt")))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (OutputOptions(output=""), "--output: '' is not a file name"),
        (OutputOptions(output="{folder}"), "--output: cannot write '{folder}': it is a directory"),
        (OutputOptions(html="{folder}/new/"), "--html: cannot write '{folder}/new/': it is a directory"),
        (
            OutputOptions(save="{folder}/a/b"),
            "--save: cannot write '{folder}/a/b': No such file or directory",
        ),
        (
            OutputOptions(output="{folder}/a", html="{folder}/./a"),
            "--html: '{folder}/./a' is given to --output too; give each its own file",
        ),
    ],
)
def test_what_cannot_be_written_is_told_before_the_work(
    folder: Path, options: OutputOptions, message: str
) -> None:
    given = {name: value.format(folder=folder) for name, value in vars(options).items() if value is not None}
    with pytest.raises(UsageError) as raised:
        output.check(OutputOptions(**given))
    assert raised.value.message == message.format(folder=folder)
    assert raised.value.exit_code == 2


def test_a_file_without_write_permission_is_not_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "kept.txt"
    path.write_text("kept")
    monkeypatch.setattr(os, "access", lambda name, mode: False)
    with pytest.raises(UsageError, match=r"cannot write '.*kept\.txt': Permission denied"):
        output.check(OutputOptions(output=str(path)))
    assert path.read_text() == "kept"


def test_a_missing_jinja2_is_one_sentence_with_the_install_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError) as raised:
        output.check(OutputOptions(html=str(folder / "page.html")))
    assert raised.value.message == "--html: jinja2 is not installed; run: pip install 'moepad[html]'"


def test_a_replaced_file_keeps_its_permissions_and_its_link(folder: Path) -> None:
    target, link = folder / "target.txt", folder / "link.txt"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    output.emit(REPORT, OutputOptions(output=str(link)))
    assert link.is_symlink()
    assert target.read_text() == TEXT
    assert target.stat().st_mode & 0o777 == 0o640


def test_a_device_is_written_to_and_not_replaced() -> None:
    options = OutputOptions(output=os.devnull, html=os.devnull)
    output.check(options)
    output.emit(REPORT, options)
    assert not os.path.isfile(os.devnull)


@pytest.fixture
def appended(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A descriptor that a file is appended through, and the file."""
    path = tmp_path / "log.txt"
    path.write_text("kept\n")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    yield descriptor, path
    os.close(descriptor)


@pytest.mark.parametrize("place", ["/dev/fd/{}", "/proc/self/fd/{}"])
def test_an_open_descriptor_is_written_to_and_its_file_not_emptied(
    appended: tuple[int, Path], place: str
) -> None:
    descriptor, path = appended
    options = OutputOptions(output=place.format(descriptor))
    output.check(options)
    assert path.read_text() == "kept\n"
    output.emit(REPORT, options)
    output.emit(REPORT, options)
    assert path.read_text() == f"kept\n{TEXT}{TEXT}"


def test_dev_stdout_and_dev_stderr_are_the_open_ones(capfd: pytest.CaptureFixture[str]) -> None:
    for option, name in (("--output", "/dev/stdout"), ("--html", "/dev/stderr")):
        output.write_files([(option, name, f"{option}\n")])
    assert capfd.readouterr() == ("--output\n", "--html\n")


@pytest.mark.parametrize("flags", [None, os.O_RDONLY])
def test_a_descriptor_that_is_not_open_for_writing_is_told_before_the_work(
    tmp_path: Path, flags: int | None
) -> None:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    if flags is None:
        os.close(descriptor)
    try:
        with pytest.raises(UsageError) as raised:
            output.check(OutputOptions(html=f"/dev/fd/{descriptor}"))
    finally:
        if flags is not None:
            os.close(descriptor)
    assert raised.value.message == f"--html: cannot write '/dev/fd/{descriptor}': Bad file descriptor"


def test_a_name_too_long_is_told_before_the_work(folder: Path) -> None:
    path = str(folder / ("n" * 300))
    with pytest.raises(UsageError) as raised:
        output.check(OutputOptions(output=path))
    assert raised.value.message == f"--output: cannot write '{path}': File name too long"


def test_standard_output_is_given_back_after_the_work(capfd: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with suppress(KeyError), output.kept_for_results():
        os.write(1, b"work\n")
        raise KeyError
    assert sys.stdout is before
    os.write(1, b"result\n")
    assert capfd.readouterr() == ("result\n", "work\n")


def test_work_in_a_folder_that_was_removed_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with output.kept_for_results():
        worked = True
    assert worked


def test_characters_that_standard_output_lacks_become_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output.write_stdout("caf\xe9 \u2588\n")
    assert raw.getvalue() == b"caf\\xe9 \\u2588\n"


class _Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "painted"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colour_and_drawing_are_for_a_terminal(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], painted: bool
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"COLUMNS": "90", **variables}.items():
        monkeypatch.setenv(name, value)
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    output.emit(
        REPORT, OutputOptions(), drawing=lambda report, width, blocks: f"{report.command} {width} {blocks}"
    )
    word = "\x1b[32mas it should be\x1b[0m" if painted else "as it should be"
    assert terminal.getvalue() == f"shard-bounds 90 True\n\nverdict: {word}\n  all well\n"


@pytest.mark.parametrize("options", [OutputOptions(), OutputOptions(format="markdown")])
def test_no_drawing_without_a_terminal_or_in_another_format(
    options: OutputOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    output.emit(REPORT, options, drawing=lambda report, width, blocks: "drawn")
    assert "drawn" not in capsys.readouterr().out
