"""The frame around every command: exit codes, one-line errors, pipes, interrupts, completion, start-up."""

from __future__ import annotations

import json
import os
import shlex
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
    for command in ("repro", "check", "compare", "bisect", "shard-bounds", "explain", "schema"):
        assert f"│ {command} " in done.stdout
    assert "Exit codes: 0 as it should be, 1 findings, 2 a wrong call" in done.stdout


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


def interrupt(number: signal.Signals, code: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error after the first line of ``code``, then the signal."""
    with subprocess.Popen(
        [*python(code), *arguments],
        cwd=ROOT,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "at work\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_that_asks_to_end_is_quiet_and_leaves_no_file(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    waiting = (
        "import moepad_cli.output as output, sys, time\n"
        "from moepad_cli.app import main\n"
        "def replace(*paths):\n"
        "    print('at work', file=sys.stderr, flush=True)\n"
        "    time.sleep(60)\n"
        "output.os.replace = replace\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    assert interrupt(number, waiting, *SHARDS, "-o", str(tmp_path / "result.txt")) == (code, "", "")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_during_the_work_is_quiet() -> None:
    code = with_plan("print('at work', flush=True); time.sleep(60)")
    assert interrupt(signal.SIGINT, code, *SHARDS) == (130, "", "")


def test_ctrl_c_during_the_imports_is_quiet() -> None:
    done = run(
        code="import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from moepad_cli.__main__ import main\n"
        "sys.exit(main())\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_main_puts_the_handlers_of_signals_back(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert main(["--version"]) == 0
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_an_ignored_hangup_stays_ignored() -> None:
    body = "import signal; signal.raise_signal(signal.SIGHUP); raise TypeError('went on')"
    code = f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{with_plan(body)}"
    assert run(*SHARDS, code=code).returncode == 4


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("BrokenPipeError(32, 'Broken pipe')", "BrokenPipeError: [Errno 32] Broken pipe"),
        ("OSError(28, 'No space left on device')", "OSError: [Errno 28] No space left on device"),
        ("SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_an_end_of_the_work_that_is_not_its_own_is_never_exit_code_0(raised: str, said: str) -> None:
    done = run(*SHARDS, "--format", "json", code=with_plan(f"raise {raised}"))
    line = f"moepad: internal error: RuntimeError: {said} (run again with --debug for the traceback)\n"
    assert (done.returncode, done.stdout, done.stderr) == (4, "", line)


def test_a_long_error_line_is_cut() -> None:
    for raised, code in (("repro.errors.FieldError('n', 'x' * 9000)", 2), ("TypeError('x' * 9000)", 4)):
        done = run(*SHARDS, code=with_plan(f"import repro.errors; raise {raised}"))
        assert done.returncode == code
        assert 2000 <= len(done.stderr) <= 2100
        assert done.stderr.count("\n") == 1


def test_what_could_not_be_verified_is_json_too() -> None:
    body = "import repro.errors; raise repro.errors.NotVerifiedError('no answer')"
    done = run(*SHARDS, "--format", "json", code=with_plan(body))
    assert (done.returncode, done.stderr) == (3, "moepad shard-bounds: no answer\n")
    verdict = json.loads(done.stdout)["verdict"]
    assert (verdict["status"], verdict["not_checked"]) == ("not-verified", ["no answer"])


@pytest.mark.parametrize(
    "body", ["print('noise')", "import os; os.write(1, b'noise')", "import os; os.system('echo noise')"]
)
@pytest.mark.parametrize("redirected", ["2>/dev/null", "2>&-"])
def test_what_the_work_writes_to_standard_output_is_kept_out_of_the_result(
    body: str, redirected: str
) -> None:
    code = with_plan(f"{body}; from repro.plan import plan_padding as plan; return plan(*args, **kwargs)")
    command = shlex.join([*python(code), *SHARDS, "--format", "csv"])
    done = subprocess.run(
        ["/bin/sh", "-c", f"{command} {redirected}"],
        cwd=ROOT,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout == run(*SHARDS, "--format", "csv").stdout.encode()


def test_a_standard_output_that_the_work_closes_is_opened_again() -> None:
    body = "sys.__stdout__.close(); from repro.plan import plan_padding as plan; return plan(*args, **kwargs)"
    done = run(*SHARDS, code=with_plan(body))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run(*SHARDS).stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (SHARDS, 0),
        ((*SHARDS, "--format", "json"), 0),
        (("shard-bounds", "--tokens", "20", "--bucket", "30", "--attn-tp", "4"), 1),
        (("--help",), 0),
        (("shard-bounds", "--help"), 0),
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


@pytest.mark.parametrize(
    ("place", "code", "line"),
    [
        ("closed pipe", 0, ""),
        ("/dev/full", 2, "moepad: standard output: cannot be written: No space left on device\n"),
    ],
)
@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (("--show-completion", "bash"), {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}),
        ((), {"_MOEPAD_COMPLETE": "complete_bash", "COMP_WORDS": "moepad ", "COMP_CWORD": "1"}),
    ],
)
def test_completion_that_cannot_be_written_is_quiet_or_one_line(
    arguments: Sequence[str], variables: dict[str, str], place: str, code: int, line: str
) -> None:
    if place == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(place, os.O_WRONLY)
    try:
        done = subprocess.run(
            [*python(None), *arguments],
            cwd=ROOT,
            env={**clean_environment(), **variables},
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (code, line)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(SHARDS, "moepad shard-bounds"), (("--help",), "moepad"), (("--version",), "moepad")],
)
@pytest.mark.parametrize(
    ("place", "mode", "problem"),
    [(os.devnull, "r", "Bad file descriptor"), ("/dev/full", "w", "No space left on device")],
)
def test_a_standard_output_that_cannot_be_written_is_one_line(
    arguments: Sequence[str], name: str, place: str, mode: str, problem: str
) -> None:
    with open(place, mode) as stream:
        done = subprocess.run(
            [*python(None), *arguments],
            cwd=ROOT,
            env=clean_environment(),
            stdout=stream,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == f"{name}: standard output: cannot be written: {problem}\n"


def test_completion_gives_the_names_of_commands_and_the_values_of_options() -> None:
    def complete(words: str) -> list[str]:
        number = str(len(words.split(" ")) - 1)
        done = run(_MOEPAD_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=number)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    assert complete("moepad ") == ["repro", "check", "compare", "bisect", "shard-bounds", "explain", "schema"]
    assert complete("moepad sh") == ["shard-bounds"]
    assert complete("moepad shard-bounds --format ") == ["table", "markdown", "json", "csv"]
    assert complete("moepad repro --fault ") == ["mask", "count", "both"]
    assert complete("moepad compare --device c") == ["cpu", "cuda"]
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
