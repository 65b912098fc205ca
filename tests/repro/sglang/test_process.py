"""Workers that meet hostile trees: every end is one reason, and no process stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.engines.sglang import process
from repro.engines.sglang.process import MAX_STARTS, Worker
from repro.errors import NotVerifiedError

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "repro" / "engines" / "sglang" / "worker"
MARK = "MOEPAD_TEST_MARK"
STOPPED = "the worker was stopped"

# Loads the worker as its own __main__ does, with sessions that do what an item's key "do" says. Unless "torch" is
# among the arguments an empty module stands in for torch, which saves two seconds.
SCRIPT = f"""
import ctypes, importlib.util, os, resource, signal, subprocess, sys, threading, time, types

spec = importlib.util.spec_from_file_location(
    "moepad_worker", {str(FOLDER / "__init__.py")!r}, submodule_search_locations=[{str(FOLDER)!r}]
)
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
if "no-torch" in sys.argv:
    sys.modules["torch"] = None
elif "torch" not in sys.argv:
    sys.modules["torch"] = types.ModuleType("torch")
    sys.modules["torch"].set_num_threads = lambda number: None
from moepad_worker import serve
from moepad_worker.stubs import CannotVerify

ANSWERS = int(sys.argv[-1])
libc = ctypes.CDLL(None)


class Unprintable(Exception):
    def __str__(self):
        raise ValueError


def spin():
    while True:
        pass


def hoard():
    kept = []
    while True:
        kept.append(bytearray(1 << 20))


def sleeper(start_new_session=False):
    code = "import time; time.sleep(600)"
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=start_new_session)


def forked():
    if os.fork() == 0:
        time.sleep(600)


def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(600)
    os.wait()


def later(seconds, work):
    threading.Timer(seconds, work).start()


def result(**values):
    return [values], {{}}


class Session:
    def __init__(self, tree, platform, without):
        self.opened = dict(tree=tree, platform=platform, without=without, pid=os.getpid())
        if platform.startswith("do "):
            exec(platform[3:], globals())

    def describe(self):
        return self.opened

    def observe(self, items, tensors):
        scope = dict(globals(), tensors=tensors, given=result(pid=os.getpid()))
        exec(items[0]["do"], scope)
        return scope["given"]


serve.run(int(sys.argv[-2]), ANSWERS, session_factory=Session)
"""

START = """
import os, sys, time
from repro.engines.sglang.process import Worker
worker = Worker(sys.argv[1:])
worker.open(tree=None, platform="cuda")
worker.observe([{"do": "forked()"}], {})
"""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """In the environment of whatever a test starts; nothing that has it may outlive the test."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield value
    assert left(value) == []


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    path = tmp_path / "worker.py"
    path.write_text(SCRIPT)
    return [sys.executable, str(path)]


@pytest.fixture
def worker(script: list[str], mark: str) -> Iterator[Worker]:
    with Worker(script, time_limit=20) as worker:
        worker.open(tree=None, platform="cuda")
        yield worker


def left(mark: str) -> list[str]:
    """The command lines of living processes with the mark, this one apart."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def observe(worker: Worker, code: str) -> dict[str, Any]:
    return worker.observe([{"do": code}], {})[0][0]


def refusal(work: Callable[..., object], *arguments: Any, **named: Any) -> str:
    with pytest.raises(NotVerifiedError) as caught:
        work(*arguments, **named)
    return str(caught.value)


def wrote(text: str) -> str:
    return f"wrote to standard output: {text!r}; only standard error is free to print to"


HARMLESS = {
    "raise SystemExit(3)": "SystemExit: 3",
    "raise SystemExit": "SystemExit",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise BaseException('odd\\nlines')": "BaseException: odd lines",
    "raise CannotVerify('a stand-in was\\ncalled')": "a stand-in was called",
    "raise Unprintable": "Unprintable: (its text raised)",
    "raise ValueError('\\x1b[31mred')": "ValueError: ?[31mred",
    "raise ValueError('x' * 9999)": f"ValueError: {'x' * 488}...",
    "int(None)": "TypeError: int() argument must be a string, a bytes-like object or a real number, not 'NoneType'",
    "print('hello')": wrote("hello\n"),
    "print('x' * 100, end='')": wrote("x" * 60),
    "os.write(1, b'raw\\xff')": wrote("raw\ufffd"),
    "libc.puts(b'from C')": wrote("from C\n"),
    "os.system('echo from a shell')": wrote("from a shell\n"),
    "print('hello'); raise ValueError": wrote("hello\n"),
    "given = None": "TypeError: observe() gave NoneType, no pair of results and tensors",
    "given = 1, 2": "TypeError: observe() gave int and int, no list and dict",
    "given = [{'a': {1}}], {}": "FrameError: no JSON: Object of type set is not JSON serializable",
}


def test_what_a_tree_raises_prints_or_gives_is_one_reason_and_the_tree_stays_open(worker: Worker) -> None:
    pid = observe(worker, "pass")["pid"]
    reasons = {code: refusal(observe, worker, code) for code in HARMLESS}
    assert reasons == HARMLESS
    assert observe(worker, "pass") == {"pid": pid}
    assert 'File "<string>", line 1, in <module>\nTypeError: int() argument' in worker.log()


ENDS_THE_TREE = {
    "os._exit(0)": "the process ended: exit status 0",
    "os._exit(3)": "the process ended: exit status 3",
    "ctypes.string_at(0)": "the process ended: signal SIGSEGV",
    "os.abort()": "the process ended: signal SIGABRT",
    "os.kill(os.getpid(), signal.SIGTERM)": "the process ended: signal SIGTERM",
    "os.kill(os.getpid(), signal.SIGRTMIN + 3)": f"the process ended: signal {signal.SIGRTMIN + 3}",
    "print('hello', flush=True); os._exit(0)": "the process ended: exit status 0",
    "signal.setitimer(signal.ITIMER_REAL, 0.05); time.sleep(60)": "the process ended: signal SIGALRM",
}


def test_a_tree_that_ends_its_process_is_reported_and_the_worker_goes_on(worker: Worker) -> None:
    for code, reason in ENDS_THE_TREE.items():
        assert (code, refusal(observe, worker, code)) == (code, reason)
        assert refusal(observe, worker, "pass") == reason
        assert refusal(worker.open, tree=None, platform=f"do {code}") == reason
        worker.open(tree=None, platform="cuda")
        assert observe(worker, "pass").keys() == {"pid"}


def test_a_tree_that_ends_its_process_between_two_calls_is_reported_at_the_next(worker: Worker) -> None:
    pid = observe(worker, "later(0.05, lambda: os._exit(7))")["pid"]
    assert until(lambda: not Path(f"/proc/{pid}").exists())
    assert refusal(observe, worker, "pass") == "the process ended: exit status 7"
    worker.close()
    assert worker.open(tree=None, platform="hip")["platform"] == "hip"


@pytest.mark.parametrize(
    "code", ["spin()", "signal.signal(signal.SIGTERM, signal.SIG_IGN); spin()", "os.setsid(); spin()"]
)
def test_an_endless_loop_is_killed_at_the_time_limit(worker: Worker, mark: str, code: str) -> None:
    worker.time_limit = 0.5
    assert refusal(observe, worker, code) == "took longer than 0.5 s"
    assert left(mark) == []
    worker.time_limit = 20
    assert refusal(observe, worker, "pass") == "took longer than 0.5 s"
    worker.open(tree=None, platform="cuda")
    assert observe(worker, "pass").keys() == {"pid"}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os.write(ANSWERS, b'garbage' * 9)", "sent no message that can be read: wrong magic b'garb'"),
        (
            "os.write(ANSWERS, b'MPAD' + b'\\xff' * 12)",
            "sent no message that can be read: too long: 4,294,967,295 bytes of JSON, "
            "18,446,744,073,709,551,615 of tensors",
        ),
        ("serve.write_frame(ANSWERS, {'id': 0, 'results': [{}]}, {})", "sent a message that answers nothing"),
        ("serve.write_frame(ANSWERS, {'results': [{}]}, {})", "sent a message that answers nothing"),
        ("given = [1], {}", "answered to 'observe' with something else"),
        ("given = [{}, {}], {}", "gave 2 results for 1 items"),
        ("given = [], {}", "gave 0 results for 1 items"),
        (
            "os.close(ANSWERS)",
            "the worker process of PYTHON ended: exit status 1: the process ended: exit status 1, within a message",
        ),
        (
            "os.kill(os.getppid(), signal.SIGKILL); spin()",
            "the worker process of PYTHON ended: signal SIGKILL",
        ),
        ("os.killpg(0, signal.SIGTERM); spin()", "the worker process of PYTHON ended: signal SIGTERM"),
    ],
)
def test_what_breaks_the_protocol_ends_the_worker(worker: Worker, mark: str, code: str, reason: str) -> None:
    reason = reason.replace("PYTHON", sys.executable)
    assert refusal(observe, worker, code) == reason
    assert left(mark) == []
    worker.close()
    worker.open(tree=None, platform="cuda")
    assert observe(worker, "pass").keys() == {"pid"}


def test_a_message_that_never_comes_whole_takes_too_long(worker: Worker) -> None:
    worker.time_limit = 0.5
    code = "os.write(ANSWERS, b'MPAD' + (9999).to_bytes(12, 'little') + b'{'); spin()"
    assert refusal(observe, worker, code) == "took longer than 0.5 s"


def test_an_answer_after_a_process_of_the_trees_own_returned_too_is_still_one(worker: Worker) -> None:
    """A fork of the tree that runs into the worker's own code must not speak for the tree."""
    pid = observe(worker, "pass")["pid"]
    for _ in range(3):
        assert observe(worker, "os.fork(); given = result(pid=os.getpid())") == {"pid": pid}


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_memory_has_an_end(script: list[str], mark: str) -> None:
    with Worker(script, memory_limit=64 << 20) as worker:
        assert refusal(worker.open, tree=None, platform="do hoard()") == "MemoryError"
        worker.open(tree=None, platform="cuda")
        assert refusal(observe, worker, "hoard()") == "MemoryError"
        assert observe(worker, "given = result(size=len(bytearray(8 << 20)))") == {"size": 8 << 20}
        limits = "[resource.getrlimit(k) for k in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE)]"
        assert observe(worker, f"given = result(limits={limits})") == {"limits": [[0, 0], [1 << 30, 1 << 30]]}


STARTERS = [
    "forked()",
    "sleeper()",
    "sleeper(start_new_session=True)",
    "daemon()",
    "os.setpgid(0, 0); sleeper()",
]


@pytest.mark.parametrize("code", STARTERS)
def test_what_a_tree_started_ends_with_the_tree(worker: Worker, mark: str, code: str) -> None:
    observe(worker, code)
    assert until(lambda: len(left(mark)) == 3)
    worker.close()
    assert until(lambda: len(left(mark)) == 1)


@pytest.mark.parametrize("code", STARTERS)
def test_what_a_tree_started_ends_with_the_worker(worker: Worker, mark: str, code: str) -> None:
    observe(worker, code)
    worker.stop()
    assert left(mark) == []


def test_what_a_tree_started_ends_at_the_time_limit(worker: Worker, mark: str) -> None:
    worker.time_limit = 1
    assert refusal(observe, worker, f"{'; '.join(STARTERS)}; spin()") == "took longer than 1 s"
    assert left(mark) == []


def test_the_log_is_the_end_of_standard_error_over_all_starts(worker: Worker) -> None:
    observe(worker, "os.write(2, b'a' * 100_000)")
    assert worker.log() == "a" * (64 << 10)
    observe(worker, "print('b', file=sys.stderr)")
    refusal(observe, worker, "os.kill(os.getppid(), signal.SIGKILL); spin()")
    worker.open(tree=None, platform="cuda")
    observe(worker, "libc.write(2, b'c', 1)")
    assert worker.log() == "a" * ((64 << 10) - 3) + "b\nc"
    worker.stop()
    assert worker.log() == "a" * ((64 << 10) - 3) + "b\nc"


def test_an_interrupt_is_the_callers_business_alone(worker: Worker) -> None:
    pid = observe(worker, "pass")["pid"]
    assert observe(worker, "os.killpg(0, signal.SIGINT)") == {"pid": pid}
    assert observe(worker, "pass") == {"pid": pid}


def test_a_tree_that_spoils_its_log_and_output_is_still_asked(worker: Worker) -> None:
    assert observe(worker, "os.ftruncate(2, 0); os.close(2); os.close(1); given = result(a=1)") == {"a": 1}
    assert observe(worker, "sys.stdout = sys.stderr = sys.__stderr__ = None; given = result(a=2)") == {"a": 2}
    assert worker.log() == ""


def test_the_worker_runs_apart_from_the_callers_settings(
    script: list[str], mark: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dropped = [f"{prefix}X" for prefix in process._DROPPED] + [
        "PYTHONWARNINGS",
        "PYTHONOPTIMIZE",
        "PYTHONSTARTUP",
    ]
    for name in dropped:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("KEPT", "ä")
    with Worker(script) as worker:
        worker.open(tree=None, platform="cuda")
        seen = observe(
            worker,
            f"given = result(dropped=[n for n in {dropped} if n in os.environ], kept=os.environ['KEPT'],"
            " path=os.environ['PYTHONPATH'], bytecode=not sys.dont_write_bytecode, input=os.read(0, 1).decode(),"
            " own_session=os.getsid(0) == os.getppid(), fds=sorted(os.listdir('/dev/fd')).__len__(),"
            " core=resource.getrlimit(resource.RLIMIT_CORE)[0])",
        )
    assert seen == {
        "dropped": [],
        "kept": "ä",
        "path": str(tmp_path),
        "bytecode": False,
        "input": "",
        "own_session": True,
        "fds": seen["fds"],
        "core": 0,
    }
    assert seen["fds"] <= 10


def test_descriptors_do_not_pile_up(worker: Worker) -> None:
    count = "given = result(n=len(os.listdir('/dev/fd')))"
    mine = len(os.listdir("/dev/fd"))
    counts = set()
    for _ in range(5):
        worker.open(tree=None, platform="cuda")
        counts.add(observe(worker, count)["n"])
    assert len(counts) == 1
    refusal(observe, worker, "os.write(ANSWERS, b'garbage' * 9)")
    worker.open(tree=None, platform="cuda")
    assert len(os.listdir("/dev/fd")) == mine


def test_opening_gives_what_the_session_says_and_closes_what_was_open(worker: Worker, mark: str) -> None:
    first = worker.open(tree="/a\udcff", platform="cuda", without=("x", "y"))
    second = worker.open(tree=None, platform="hip")
    assert first == {"tree": "/a\udcff", "platform": "cuda", "without": ["x", "y"], "pid": first["pid"]}
    assert second == {"tree": None, "platform": "hip", "without": [], "pid": second["pid"]}
    assert first["pid"] != second["pid"]
    assert observe(worker, "pass") == {"pid": second["pid"]}
    assert until(lambda: len(left(mark)) == 2)
    worker.close()
    worker.close()
    assert until(lambda: len(left(mark)) == 1)
    assert refusal(observe, worker, "pass") == "no tree is open"


def test_what_goes_wrong_in_loading_is_a_reason(worker: Worker) -> None:
    for code, reason in {
        "raise CannotVerify('no such module')": "no such module",
        "raise SystemExit": "SystemExit",
        "1 / 0": "ZeroDivisionError: division by zero",
        "print('banner')": wrote("banner\n"),
        "del Session.describe": "AttributeError: 'Session' object has no attribute 'describe'",
        "Session.describe = lambda self: 5": "answered to 'open' with something else",
    }.items():
        assert (code, refusal(worker.open, tree=None, platform=f"do {code}")) == (code, reason)
        assert refusal(observe, worker, "pass") == reason


def test_what_was_printed_before_a_tree_was_opened_is_not_the_trees(script: list[str], mark: str) -> None:
    path = Path(script[1])
    path.write_text(path.read_text().replace("serve.run(", "print('banner'); serve.run("))
    with Worker(script) as worker:
        worker.open(tree=None, platform="cuda")
        assert refusal(observe, worker, "print('mine')") == wrote("mine\n")


def test_tensors_go_there_and_back(script: list[str], mark: str) -> None:
    with Worker([*script, "torch"]) as worker:
        worker.open(tree=None, platform="cuda")
        sent = {
            "a": torch.arange(90_000).reshape(300, 300).t(),
            "none": torch.empty(0, 4, dtype=torch.bfloat16),
        }
        code = "given = [{}], {name: value * 2 for name, value in tensors.items()}"
        results, came = worker.observe([{"do": code}], sent)
        assert results == [{}]
        assert list(came) == ["a", "none"]
        assert torch.equal(came["a"], sent["a"] * 2)
        assert (came["none"].shape, came["none"].dtype) == ((0, 4), torch.bfloat16)
        threads = "given = [{'n': (sys.modules['torch'].get_num_threads(), threading.active_count())}], {}"
        assert observe(worker, threads) == {"n": [1, 1]}
        assert observe(worker, "given = [{'n': len(os.listdir('/proc/self/task'))}], {}") == {"n": 1}
        with pytest.raises(NotVerifiedError, match=r"^RuntimeError: .*can't allocate memory"):
            observe(worker, "sys.modules['torch'].ones(1 << 40)")
        assert refusal(observe, worker, "given = [{}], {'a': 1}") == "FrameError: 'a': int is no tensor"
        reason = refusal(worker.observe, [], {"a": torch.tensor(1j)})
        assert reason == "the request cannot be sent: 'a': no frame holds complex64, torch.strided"


def test_the_worker_itself_loads_and_refuses_a_folder_that_is_no_tree(tmp_path: Path, mark: str) -> None:
    with Worker() as worker:
        reason = refusal(worker.open, tree=str(tmp_path), platform="cuda")
        assert "\n" not in reason
        assert "process" not in reason, worker.log()
    assert list(tmp_path.iterdir()) == []


def test_an_interpreter_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    text = tmp_path / "text"
    text.write_text("text")
    text.chmod(0o755)
    for python, problem in {
        "/no/python": "No such file or directory",
        str(plain): "Permission denied",
        str(text): "Exec format error",
        str(tmp_path): "Permission denied",
        "a\0b": "embedded null byte",
    }.items():
        with Worker(python=python) as worker:
            for _ in range(MAX_STARTS + 2):
                reason = refusal(worker.open, tree=None, platform="cuda")
                assert reason == f"{python}: could not be started: {problem}"
            assert worker.log() == ""


def test_an_interpreter_without_torch_is_named(script: list[str], mark: str) -> None:
    with Worker([*script, "no-torch"]) as worker:
        for _ in range(2):
            assert refusal(worker.open, tree=None, platform="cuda") == (
                f"{sys.executable}: torch cannot be imported there: "
                "ModuleNotFoundError: import of torch halted; None in sys.modules"
            )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit('too old')", "the worker process of PYTHON ended: exit status 1: too old"),
        ("pass", "the worker process of PYTHON ended: exit status 0"),
        ("import os; os.abort()", "the worker process of PYTHON ended: signal SIGABRT"),
        (
            "import os, sys; os.write(int(sys.argv[2]), b'x' * 100)",
            "sent no message that can be read: wrong magic b'xxxx'",
        ),
    ],
)
def test_a_command_that_is_no_worker_is_told(code: str, reason: str, mark: str) -> None:
    with Worker([sys.executable, "-c", code]) as worker:
        assert refusal(worker.open, tree=None, platform="cuda") == reason.replace("PYTHON", sys.executable)


def test_a_command_that_reads_nothing_takes_too_long(mark: str) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with Worker(command, time_limit=0.5) as worker:
        assert refusal(worker.open, tree="x" * 1_000_000, platform="cuda") == "took longer than 0.5 s"
        assert left(mark) == []


def test_a_worker_is_started_four_times_and_no_more(script: list[str], mark: str, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    path = Path(script[1])
    path.write_text(f"open({str(starts)!r}, 'a').write('x')\n" + path.read_text())
    with Worker(script) as worker:
        for _ in range(4):
            worker.open(tree=None, platform="cuda")
            last = refusal(observe, worker, "os.kill(os.getppid(), signal.SIGKILL); spin()")
        for _ in range(2):
            assert refusal(worker.open, tree=None, platform="cuda") == last
            assert refusal(observe, worker, "pass") == last
            worker.close()
    assert starts.read_text() == "xxxx"


def test_stopping_ends_all_and_for_good(script: list[str], mark: str) -> None:
    worker = Worker(script)
    worker.open(tree=None, platform="cuda")
    for _ in range(2):
        worker.stop()
        worker.close()
        assert left(mark) == []
        assert refusal(worker.open, tree=None, platform="cuda") == STOPPED
        assert refusal(observe, worker, "pass") == STOPPED


def test_stopping_before_the_first_call_ends_it_too(mark: str) -> None:
    Worker().stop()
    assert left(mark) == []


@pytest.mark.parametrize("code", ["spin()", "forked(); spin()", "os.write(ANSWERS, b'MPAD'); spin()"])
def test_stopping_from_another_thread_ends_the_call_that_waits(worker: Worker, mark: str, code: str) -> None:
    reasons: list[str] = []
    thread = threading.Thread(
        target=lambda: reasons.append(refusal(observe, worker, f"libc.write(2, b'on', 2); {code}"))
    )
    thread.start()
    assert until(lambda: worker.log() == "on")
    worker.stop()
    assert left(mark) == []
    thread.join(10)
    assert reasons == [STOPPED]


def test_stopping_while_another_thread_opens_ends_that(script: list[str], mark: str) -> None:
    worker = Worker(script)
    reasons: list[str] = []
    thread = threading.Thread(
        target=lambda: reasons.append(
            refusal(worker.open, tree=None, platform="do libc.write(2, b'on', 2); spin()")
        )
    )
    thread.start()
    assert until(lambda: worker.log() == "on")
    worker.stop()
    thread.join(10)
    assert reasons == [STOPPED]


def test_two_workers_answer_two_threads(script: list[str], mark: str) -> None:
    seen: dict[str, list[object]] = {"a": [], "b": []}

    def use(name: str) -> None:
        with Worker(script) as worker:
            for _ in range(10):
                worker.open(tree=name, platform="cuda")
                seen[name] += [observe(worker, f"given = result(n={name!r})")["n"] for _ in range(10)]

    threads = [threading.Thread(target=use, args=(name,)) for name in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"a": ["a"] * 100, "b": ["b"] * 100}


def test_a_thread_that_started_a_worker_may_end(script: list[str], mark: str) -> None:
    workers: list[Worker] = []
    thread = threading.Thread(target=lambda: workers.append(Worker(script)))
    thread.start()
    thread.join()
    with workers[0] as worker:
        worker.open(tree=None, platform="cuda")
        assert observe(worker, "pass").keys() == {"pid"}


def test_a_worker_that_is_dropped_ends(script: list[str], mark: str) -> None:
    worker = Worker(script)
    worker.open(tree=None, platform="cuda")
    assert len(left(mark)) == 2
    del worker
    assert left(mark) == []


def test_ctrl_c_leaves_nothing_that_would_answer_the_next_call(worker: Worker) -> None:
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        observe(worker, "time.sleep(5); given = result(stale=True)")
    assert refusal(observe, worker, "pass") == "was interrupted"
    worker.open(tree=None, platform="cuda")
    assert observe(worker, "given = result(fresh=True)") == {"fresh": True}


def caller(script: Sequence[str], code: str) -> subprocess.Popen[str]:
    """A program that has started a worker, opened a tree and let it start a process, and then runs ``code``."""
    return subprocess.Popen(
        [sys.executable, "-c", START + code, *script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("code", "status"),
    [("", 0), ("sys.exit(5)", 5), ("1 / 0", 1), ("raise KeyboardInterrupt", -signal.SIGINT)],
)
def test_a_caller_that_forgets_to_stop_leaves_nothing(
    script: list[str], mark: str, code: str, status: int
) -> None:
    program = caller(script, code)
    program.communicate(timeout=60)
    assert (program.returncode, left(mark)) == (status, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(
    "what",
    ["print(flush=True); worker.observe([{'do': 'spin()'}], {})", "print(flush=True); time.sleep(600)"],
)
def test_a_caller_that_is_killed_leaves_nothing(
    script: list[str], mark: str, number: signal.Signals, what: str
) -> None:
    program = caller(script, what)
    assert program.stdout is not None
    program.stdout.readline()
    program.send_signal(number)
    program.communicate(timeout=60)
    assert program.returncode == -number
    assert until(lambda: left(mark) == [])


def test_a_fork_of_the_caller_does_not_end_the_callers_worker(script: list[str], mark: str) -> None:
    code = (
        "pid = os.fork()\n"
        "if pid == 0: sys.exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(worker.observe([{'do': 'given = result(a=1)'}], {}))\n"
    )
    output, _ = caller(script, code).communicate(timeout=60)
    assert (output, left(mark)) == ("([{'a': 1}], {})\n", [])
