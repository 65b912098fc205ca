"""Options that are added to a command, as Typer and a caller see them."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import jsonschema
import pytest
import typer
from typer.testing import CliRunner

from moepad_cli.device import DEVICES, DeviceOption
from moepad_cli.errors import NotVerified, UsageError
from moepad_cli.options import SavedReport, add_parameters, completer, option, with_output
from moepad_cli.scenario_options import FAULTS, FaultOption
from moepad_cli.schema import schema_text
from repro.report import Report, Verdict

RUNNER = CliRunner()


def report(exit_code: int = 0) -> Report:
    verdict = Verdict("findings" if exit_code else "ok", exit_code, "as seen", ("seen",))
    return Report("try", {}, {}, (), {"masked_rows": []}, "masked_rows", verdict)


def app_of(command: Any) -> typer.Typer:
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return app


def test_added_parameters_arrive_by_name_after_the_commands_own() -> None:
    def command(count: Annotated[int, typer.Option()] = 1, **more: Any) -> None:
        typer.echo(f"{count} {more}")

    add_parameters(command, [option("attn_tp", help="size"), option("uneven", help="cut", default=False)])
    assert list(inspect.signature(command).parameters) == ["count", "attn_tp", "uneven"]
    result = RUNNER.invoke(app_of(command), ["--count", "2", "--attn-tp", "x", "--uneven"])
    assert result.output == "2 {'attn_tp': 'x', 'uneven': True}\n"


def test_parameters_can_be_added_twice() -> None:
    def command(**more: Any) -> None:
        typer.echo(str(more))

    add_parameters(command, [option("first", help="1")])
    add_parameters(command, [option("second", help="2", default="b")])
    assert RUNNER.invoke(app_of(command), ["--first", "a"]).output == "{'first': 'a', 'second': 'b'}\n"


@with_output(main_table="masked_rows", save=True)
def saving(text: Annotated[str, typer.Option()] = "kept") -> SavedReport:
    """Try."""
    return report(), lambda: text


@with_output(main_table="masked_rows", checks=False, formats=("table", "json"))
def telling() -> Report:
    return report(1)


def test_a_command_exits_with_the_code_of_its_verdict() -> None:
    result = RUNNER.invoke(app_of(telling), [])
    assert (result.exit_code, result.output) == (1, "verdict: as seen\n  seen\n")


def test_only_the_options_that_were_asked_for_are_there() -> None:
    assert list(inspect.signature(telling).parameters) == ["format", "output", "no_color", "debug"]
    assert list(inspect.signature(saving).parameters) == [
        *("text", "format", "output", "junit_xml", "html", "save", "no_color", "debug")
    ]


def test_save_writes_what_the_command_gives(tmp_path: Path) -> None:
    result = RUNNER.invoke(app_of(saving), ["--text", "run", "--save", str(tmp_path / "run.json"), "--debug"])
    assert result.exit_code == 0
    assert (tmp_path / "run.json").read_text() == "run"


def test_a_format_that_the_command_lacks_is_refused_before_the_work() -> None:
    with pytest.raises(UsageError) as raised:
        RUNNER.invoke(app_of(telling), ["--format", "csv"], catch_exceptions=False)
    assert raised.value.message == "--format: 'csv' is not one of table, json"


def test_an_unwritable_file_is_refused_before_the_work(tmp_path: Path) -> None:
    worked = []

    @with_output(main_table="masked_rows")
    def working() -> Report:
        worked.append("yes")
        return report()

    with pytest.raises(UsageError, match=r"^--html: cannot write"):
        RUNNER.invoke(app_of(working), ["--html", str(tmp_path / "no" / "page.html")], catch_exceptions=False)
    assert worked == []


def test_the_help_has_a_panel_for_output() -> None:
    result = RUNNER.invoke(app_of(saving), ["--help"], env={"COLUMNS": "100", "NO_COLOR": "1"})
    assert result.exit_code == 0
    assert "─ Output ─" in result.output
    for flag in ("--format", "-f", "table|markdown|json|csv", "--output", "--junit-xml", "--save", "--debug"):
        assert flag in result.output


def test_no_color_sets_the_variable_that_everything_honours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    RUNNER.invoke(app_of(telling), ["--no-color"])
    assert os.environ["NO_COLOR"] == "1"


@with_output(main_table="masked_rows", save=True)
def not_verifying() -> SavedReport:
    raise NotVerified("--device: none of that kind")


def unverified(*arguments: str) -> str:
    """What is on standard output where the work could not verify."""
    result = RUNNER.invoke(app_of(not_verifying), list(arguments))
    assert isinstance(result.exception, NotVerified)
    return result.output


def test_what_could_not_be_verified_is_said_in_every_format_for_machines() -> None:
    document = json.loads(unverified("--format", "json"))
    jsonschema.validate(document, json.loads(schema_text()), jsonschema.Draft202012Validator)
    assert (document["command"], document["tables"], document["findings"]) == (
        "not-verifying",
        {"masked_rows": []},
        [],
    )
    assert document["verdict"] == {
        "status": "not-verified",
        "exit_code": 3,
        "summary": "not verified",
        "lines": [],
        "not_checked": ["--device: none of that kind"],
    }
    assert unverified("--format", "markdown") == (
        "## moepad not-verifying\n\n**Verdict: not verified**\n\n- not checked: --device: none of that kind\n"
    )
    assert unverified("--format", "csv") == "fault,engine,dp_rank,attn_tp_rank,kind,rows\n"


def test_the_table_of_what_could_not_be_verified_leaves_standard_output_empty() -> None:
    assert unverified() == ""


def test_files_of_an_earlier_run_do_not_stand_for_one_that_could_not_verify(tmp_path: Path) -> None:
    names = ("output", "junit-xml", "html", "save")
    for name in names:
        (tmp_path / name).write_text("of an earlier run")
    assert unverified(*(word for name in names for word in (f"--{name}", str(tmp_path / name)))) == ""
    written = {name: (tmp_path / name).read_text() for name in names}
    assert written["save"] == "of an earlier run"
    assert written["output"] == "verdict: not verified\nnot checked: --device: none of that kind\n"
    assert "<strong>not verified</strong>" in written["html"]
    suite = ElementTree.fromstring(written["junit-xml"]).find("testsuite")  # noqa: S314
    assert suite is not None
    assert [suite.get(name) for name in ("failures", "errors", "skipped")] == ["0", "1", "1"]


@pytest.mark.parametrize("error", [UsageError("--n: odd"), TypeError("odd")])
def test_no_file_is_touched_where_the_work_ends_in_another_error(tmp_path: Path, error: Exception) -> None:
    @with_output(main_table="masked_rows")
    def failing() -> Report:
        raise error

    (tmp_path / "result.txt").write_text("of an earlier run")
    result = RUNNER.invoke(app_of(failing), ["--output", str(tmp_path / "result.txt")])
    assert result.exception is error
    assert (tmp_path / "result.txt").read_text() == "of an earlier run"


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), SystemExit(0)])
def test_what_main_takes_for_a_quiet_end_is_an_internal_error_of_the_work(error: BaseException) -> None:
    @with_output(main_table="masked_rows")
    def ending() -> Report:
        raise error

    with pytest.raises(RuntimeError, match=f"^{type(error).__name__}: "):
        RUNNER.invoke(app_of(ending), [], catch_exceptions=False)


def test_the_work_keeps_standard_output_clean_and_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    @with_output(main_table="masked_rows")
    def noisy() -> Report:
        os.chdir("elsewhere")
        print("printed")  # noqa: T201
        os.write(1, b"written\n")
        return report()

    with contextlib.suppress(SystemExit):
        app_of(noisy)(["--output", "result.txt"])
    assert (tmp_path / "result.txt").read_text() == "verdict: as seen\n  seen\n"
    out, err = capfd.readouterr()
    assert out == ""
    assert sorted(err.split()) == ["printed", "written"]


def test_completion_gives_the_choices_that_begin_so() -> None:
    assert completer(("mask", "count", "match"))("ma") == ["mask", "match"]


@pytest.mark.parametrize(("annotation", "choices"), [(FaultOption, FAULTS), (DeviceOption, DEVICES)])
def test_faults_and_devices_are_completed(annotation: Any, choices: tuple[str, ...]) -> None:
    (info,) = annotation.__metadata__
    assert info.autocompletion("") == list(choices)
