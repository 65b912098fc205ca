"""Options that are added to a command, as Typer and a caller see them."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from moepad_cli.errors import UsageError
from moepad_cli.options import SavedReport, add_parameters, option, with_output
from repro.report import Report, Verdict

RUNNER = CliRunner()


def report(exit_code: int = 0) -> Report:
    verdict = Verdict("findings" if exit_code else "ok", exit_code, ("seen",))
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


@with_output(save=True)
def saving(text: Annotated[str, typer.Option()] = "kept") -> SavedReport:
    """Try."""
    return report(), lambda: text


@with_output(checks=False, formats=("table", "json"))
def telling() -> Report:
    return report(1)


def test_a_command_exits_with_the_code_of_its_verdict() -> None:
    result = RUNNER.invoke(app_of(telling), [])
    assert (result.exit_code, result.output) == (1, "verdict: findings\n  seen\n")


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

    @with_output()
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
