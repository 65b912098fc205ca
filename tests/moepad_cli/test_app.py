"""The frame around every command: exit codes, one-line errors, pipes, interrupts, completion, start-up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from moepad_cli import environment
from moepad_cli.app import main

ROOT = Path(__file__).parents[2]
SHARDS = ("shard-bounds", "--tokens", "20", "--bucket", "64", "--attn-tp", "4")


def run(*arguments: str, code: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python -m moepad_cli``, or ``code`` with the arguments."""
    return subprocess.run(
        [*python(code), *arguments],
        cwd=ROOT,
        env={**clean_environment(), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def python(code: str | None) -> list[str]:
    return [sys.executable, *(("-m", "moepad_cli") if code is None else ("-c", code))]


def clean_environment() -> dict[str, str]:
    dropped = ("NO_COLOR", "COLUMNS", "PYTHONUNBUFFERED")
    return {name: value for name, value in os.environ.items() if name not in dropped}


def with_plan(body: str) -> str:
    """A program that runs the command line with ``plan_padding`` replaced."""
    return (
        "import sys, time, moepad_cli.commands.shard_bounds as command\n"
        "from moepad_cli.app import main\n"
        f"def plan_padding(*args, **kwargs):\n    {body}\n"
        "command.plan_padding = plan_padding\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )


def test_the_version_is_the_installed_distributions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"moepad": "0.1.0"}[name])
    assert main(["--version"]) == 0
    assert capsys.readouterr() == ("moepad 0.1.0\n", "")


def test_the_environment_names_torch_only_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert list(environment.environment()) == ["moepad", "python", "platform", "device"]
    monkeypatch.setitem(sys.modules, "torch", type(sys)("torch"))
    sys.modules["torch"].__version__ = "2.13.0"  # type: ignore[attr-defined]
    found = environment.environment("cuda:0")
    assert (found["torch"], found["device"]) == ("2.13.0", "cuda:0")


def test_the_help_is_formatted_by_rich_and_lists_every_command() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "╭─ Commands ─" in done.stdout
    for command in ("repro", "shard-bounds", "compare", "explain", "schema"):
        assert f"│ {command} " in done.stdout


def test_no_command_shows_the_help_and_is_a_mistake() -> None:
    done = run()
    assert done.returncode == 2
    assert "╭─ Commands ─" in done.stdout
    assert done.stderr == "moepad: no command given; moepad --help lists them\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["shard-bonds"], "moepad: 'shard-bonds': no such command; did you mean shard-bounds?"),
        (["zzz"], "moepad: 'zzz': no such command; moepad --help lists them"),
        (["--zzz"], "moepad: --zzz: no such option; moepad --help lists them"),
        (["--tokens", "20", "shard-bounds"], "moepad: --tokens: no such option; moepad --help lists them"),
        (
            ["shard-bounds", "--bukcet=64"],
            "moepad shard-bounds: --bukcet: no such option; did you mean --bucket or --buckets?",
        ),
        (["shard-bounds", "--tokens"], "moepad shard-bounds: --tokens: needs a value"),
        (["shard-bounds", "--uneven=1"], "moepad shard-bounds: --uneven: takes no value"),
        (
            [*SHARDS, "--output", "no such folder/" + "deep/" * 40 + "result.txt"],
            f"moepad shard-bounds: --output: cannot write 'no such folder/{'deep/' * 40}result.txt': "
            "No such file or directory",
        ),
    ],
)
def test_a_usage_error_is_one_line_that_is_never_wrapped(
    arguments: Sequence[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr() == ("", f"{line}\n")


def test_an_argument_too_many_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHARDS, "thirteen\nfourteen"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("moepad shard-bounds: got unexpected extra argument")
    assert "thirteen" in err
    assert err.count("\n") == 1


def test_an_uncaught_exception_is_one_line_and_exit_code_4() -> None:
    done = run(*SHARDS, code=with_plan(r"raise TypeError('two\nlines')"))
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == (
        "moepad: internal error: TypeError: two\\nlines (run again with --debug for the traceback)\n"
    )


@pytest.mark.parametrize("arguments", [("--debug", *SHARDS), (*SHARDS, "--debug")])
def test_debug_shows_the_traceback(arguments: Sequence[str]) -> None:
    done = run(*arguments, code=with_plan("raise TypeError('seen')"))
    assert done.returncode == 4
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("TypeError: seen\nmoepad: internal error: TypeError: seen\n")


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        ("FieldError('attn_tp', 'too odd; give 4')", 2, "moepad shard-bounds: --attn-tp: too odd; give 4\n"),
        ("ScenarioFileError('a.toml: line 3: odd')", 2, "moepad shard-bounds: a.toml: line 3: odd\n"),
        ("NotVerifiedError('no answer')", 3, "moepad shard-bounds: no answer\n"),
    ],
)
def test_errors_of_the_library_become_one_line_and_an_exit_code(raised: str, code: int, line: str) -> None:
    done = run(*SHARDS, code=with_plan(f"import repro.errors; raise repro.errors.{raised}"))
    assert (done.returncode, done.stdout, done.stderr) == (code, "", line)


def test_ctrl_c_is_quiet_and_exit_code_130() -> None:
    code = with_plan("print('at work', file=sys.__stdout__, flush=True); time.sleep(60)")
    with subprocess.Popen(
        [*python(code), *SHARDS],
        cwd=ROOT,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "")
        assert process.returncode == 130


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (SHARDS, 0),
        ((*SHARDS, "--format", "json"), 0),
        (("shard-bounds", "--tokens", "20", "--bucket", "30", "--attn-tp", "4"), 1),
        (("--help",), 0),
        (("--version",), 0),
        (("schema",), 0),
        (("explain",), 0),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_quiet_and_leaves_the_exit_code_alone(
    arguments: Sequence[str], code: int, unbuffered: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*python(None), *arguments],
            cwd=ROOT,
            env={**clean_environment(), "PYTHONUNBUFFERED": unbuffered},
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (code, b"")


def test_a_standard_output_that_cannot_be_written_is_one_line() -> None:
    with open(os.devnull) as only_readable:
        done = subprocess.run(
            [*python(None), *SHARDS],
            cwd=ROOT,
            env=clean_environment(),
            stdout=only_readable,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "moepad shard-bounds: standard output: cannot be written: Bad file descriptor\n"


def test_completion_gives_the_names_of_commands_and_the_values_of_options() -> None:
    def complete(words: str) -> list[str]:
        number = str(len(words.split(" ")) - 1)
        done = run(_MOEPAD_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=number)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    assert complete("moepad ") == ["repro", "shard-bounds", "compare", "explain", "schema"]
    assert complete("moepad sh") == ["shard-bounds"]
    assert complete("moepad shard-bounds --format ") == ["table", "markdown", "json", "csv"]
    assert complete("moepad explain PAD00")[:2] == ["PAD001", "PAD002"]


def test_the_completion_script_can_be_shown_and_an_unknown_shell_is_a_mistake() -> None:
    shown = run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert shown.returncode == 0
    assert "_MOEPAD_COMPLETE=complete_bash" in shown.stdout
    refused = run("--show-completion", "abacus", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert refused.returncode == 2


LIGHT = """
import sys
from moepad_cli.app import main
code = main(sys.argv[1:])
print(code, sorted(sys.modules.keys() & {"torch", "pandas", "numpy"}), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("shard-bounds", "--help"),
        *((*SHARDS, "--format", name) for name in ("table", "markdown", "json", "csv")),
        (*SHARDS, "--junit-xml", os.devnull, "--html", os.devnull),
        ("explain",),
        ("explain", "PAD003"),
        ("schema",),
    ],
)
def test_torch_pandas_and_numpy_stay_out(arguments: Sequence[str]) -> None:
    done = run(*arguments, code=LIGHT)
    assert done.stderr == "0 []\n"
