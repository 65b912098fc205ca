"""Two workers that import torch once between them are two all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from repro.engines.sglang.process import Worker
from repro.errors import NotVerifiedError

MINITREE = Path(__file__).parents[2] / "data" / "minitree"
MARK = "MOEPAD_TEST_MARK"


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """In the environment of whatever a test starts; nothing that has it may outlive the test."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield value
    assert left(value) == 0


@pytest.fixture
def pair() -> Iterator[tuple[Worker, Worker]]:
    first, second = Worker.pair(time_limit=20)
    with first, second:
        yield first, second


def left(mark: str) -> int:
    """How many living processes have the mark, this one apart; they get a second to go."""
    for _ in range(20):
        found = 0
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            found += marked and int(entry.name) != os.getpid()
        if not found:
            break
        time.sleep(0.05)
    return found


def tree(folder: Path, source: str) -> str:
    path = folder / "sglang" / "srt" / "layers" / "moe" / "topk.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    return str(folder)


def mode_of(worker: Worker) -> str:
    return str(worker.open(tree=str(MINITREE), platform="cuda")["mode"])


def test_both_answer_from_two_threads(pair: tuple[Worker, Worker]) -> None:
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda worker=worker: answers.append(mode_of(worker))) for worker in pair
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["isolated", "isolated"]


@pytest.mark.parametrize("stopped", [0, 1])
def test_one_that_is_stopped_leaves_the_other(pair: tuple[Worker, Worker], stopped: int) -> None:
    assert [mode_of(worker) for worker in pair] == ["isolated", "isolated"]
    pair[stopped].stop()
    assert mode_of(pair[1 - stopped]) == "isolated"


@pytest.mark.parametrize("hung", [0, 1])
def test_one_that_hangs_is_killed_and_leaves_the_other(
    pair: tuple[Worker, Worker], hung: int, tmp_path: Path
) -> None:
    assert [mode_of(worker) for worker in pair] == ["isolated", "isolated"]
    pair[hung].time_limit = 0.5
    with pytest.raises(NotVerifiedError, match=r"^took longer than 0.5 s$"):
        pair[hung].open(tree=tree(tmp_path, "while True:\n    pass\n"), platform="cuda")
    assert mode_of(pair[1 - hung]) == "isolated"
    pair[hung].time_limit = 20
    assert mode_of(pair[hung]) == "isolated"


@pytest.mark.parametrize("killed", [0, 1])
def test_one_that_is_killed_says_so_and_leaves_the_other(
    pair: tuple[Worker, Worker], killed: int, tmp_path: Path
) -> None:
    kill = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nsignal.pause()\n"
    assert [mode_of(worker) for worker in pair] == ["isolated", "isolated"]
    with pytest.raises(NotVerifiedError, match=r"^the worker process of .* ended(: signal SIGKILL)?$"):
        pair[killed].open(tree=tree(tmp_path, kill), platform="cuda")
    assert mode_of(pair[1 - killed]) == "isolated"


def test_what_one_tree_prints_is_not_the_others(pair: tuple[Worker, Worker], tmp_path: Path) -> None:
    for number, worker in enumerate(pair):
        source = tree(tmp_path / str(number), f"print('from {number}')\n")
        with pytest.raises(NotVerifiedError, match=f"^wrote to standard output: 'from {number}"):
            worker.open(tree=source, platform="cuda")
        assert mode_of(pair[1 - number]) == "isolated"
    for number, worker in enumerate(pair):
        with pytest.raises(NotVerifiedError):
            worker.open(
                tree=tree(tmp_path / f"raises {number}", f"raise ValueError('of {number}')\n"),
                platform="cuda",
            )
        assert f"ValueError: of {number}" in worker.log()
        assert f"ValueError: of {1 - number}" not in worker.log()


def test_stopping_before_the_first_call_leaves_nothing(mark: str) -> None:
    for worker in Worker.pair():
        worker.stop()
    assert left(mark) == 0


def test_stopping_the_second_first_leaves_nothing(mark: str) -> None:
    for worker in reversed(Worker.pair()):
        worker.stop()
    assert left(mark) == 0


def test_an_interpreter_that_cannot_be_started_is_named_by_both(tmp_path: Path) -> None:
    missing = str(tmp_path / "python")
    for worker in Worker.pair(python=missing):
        with pytest.raises(NotVerifiedError, match=f"^{missing}: could not be started: No such file"):
            worker.open(tree=str(MINITREE), platform="cuda")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_caller_that_is_killed_leaves_nothing(number: signal.Signals) -> None:
    code = (
        "import sys, time\nfrom repro.engines.sglang.process import Worker\npair = Worker.pair()\n"
        f"for worker in pair:\n    worker.open(tree={str(MINITREE)!r}, platform='cuda')\n"
        "print('open', flush=True)\ntime.sleep(600)\n"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert caller.stdout is not None
    assert caller.stdout.readline() == b"open\n"
    caller.send_signal(number)
    caller.wait(20)
    caller.stdout.close()
