"""The README's examples, run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from moepad_cli.app import main
from repro.scenario_file import read_scenario

README = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```console\n\$ moepad (.*)\n((?s:.*?))```\n", README)


def block(language: str) -> str:
    found = re.findall(rf"```{language}\n((?s:.*?))```\n", README)
    assert len(found) == 1
    return str(found[0])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        pytest.param(
            *example,
            id=example[0],
            marks=[pytest.mark.network] if "sglang" in example[0].split("#")[0] else [],
        )
        for example in EXAMPLES
    ],
)
def test_an_example_prints_what_the_readme_shows(
    capsys: pytest.CaptureFixture[str], arguments: str, shown: str
) -> None:
    main(shlex.split(arguments))
    printed = re.sub("device: .*", "device: cpu", capsys.readouterr().out)
    assert printed == shown


def test_the_readme_has_examples() -> None:
    assert [arguments.split()[0] for arguments, _ in EXAMPLES] == [
        "repro",
        "repro",
        "check",
        "bisect",
        "shard-bounds",
        "compare",
        "compare",
    ]


def test_the_scenario_file_is_one(tmp_path: Path) -> None:
    path = tmp_path / "case.toml"
    path.write_text(block("toml"))
    assert read_scenario(path).tokens == (6, 6)


def test_the_python_example_prints_findings(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block("python"), "README.md", "exec"), {})  # noqa: S102
    assert capsys.readouterr().out.splitlines()[0] == "PAD001 20 1 pad row keeps experts"


def test_the_tables_of_commands_and_exit_codes_are_whole() -> None:
    for command in ("repro", "check", "compare", "bisect", "shard-bounds", "explain", "schema"):
        assert f"| `moepad {command}" in README
    for code in ("0", "1", "2", "3", "4", "130"):
        assert f"| {code} | " in README
