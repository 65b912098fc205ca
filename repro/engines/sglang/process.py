"""The parent's side of a worker process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from repro.engines.sglang.worker.frames import EndOfStreamError, FrameError, pack, read_frame, write_pieces
from repro.engines.sglang.worker.limits import end_descendants, ending
from repro.engines.sglang.worker.serve import MEMORY_LIMIT
from repro.errors import MAX_TEXT, NotVerifiedError

if TYPE_CHECKING:
    from torch import Tensor

MAX_STARTS = 4
LOG_TAIL = 64 << 10
_GRACE = 0.3
_STOPPED = "the worker was stopped"
_MAIN = Path(__file__).parent / "worker" / "__main__.py"
# Settings of engines and compilers, which would change what a tree does.
_DROPPED = ("SGLANG_", "SGL_", "VLLM_", "TRITON_", "TORCHINDUCTOR_", "TORCH_COMPILE", "FLASHINFER_")
# Where Python finds packages; its other variables change how it runs (asserts, warnings, buffering).
_KEPT = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONPLATLIBDIR")


class Worker:
    """A process that loads SGLang trees and asks them, in place of the caller's own process.

    It starts at once, in the background: nothing is waited for before the first ``open``. Use it from one thread;
    ``stop`` may come from any. After a death or a time-out the next ``open`` starts another, three times at most.

    Every method but ``close``, ``stop`` and ``log`` raises ``NotVerifiedError`` with the reason in one line.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        *,
        python: str | None = None,
        time_limit: float = 60.0,
        memory_limit: int = MEMORY_LIMIT,
        _process: _Process | None = None,
    ) -> None:
        """
        Args:
            command: what to start instead of the worker; the two descriptors' numbers are appended.
            python: the interpreter to start the worker with, this one by default.
            time_limit: seconds a call, the first including the import of torch; may be changed between calls.
            memory_limit: bytes of a tree's process, on top of what torch takes.
        """
        self._command = list(command or _command(python))
        self.time_limit = time_limit
        self._memory_limit = memory_limit
        self._lock = threading.RLock()
        self._started: list[_Process] = []
        self._process: _Process | None = None
        self._starts = self._number = 0
        self._is_open = self._stopped = False
        self._last = "no tree is open"
        if _process is not None:
            self._starts += 1
            self._take(_process)
            return
        with contextlib.suppress(NotVerifiedError):
            self._start()

    @classmethod
    def pair(cls, *, python: str | None = None, time_limit: float = 60.0) -> tuple[Worker, Worker]:
        """Two workers that import torch once between them, which is most of what it costs to start them."""
        command = _command(python)
        try:
            processes: tuple[_Process | None, _Process | None] = _Process.pair(command)
        except (OSError, ValueError):
            processes = (None, None)  # each will say why
        first, second = (cls(python=python, time_limit=time_limit, _process=process) for process in processes)
        return first, second

    def prepare(self, tree: str) -> None:
        """Have a tree compiled while the caller is busy; whatever is wrong shows when it is opened."""
        with self._lock:
            if self._process is None or self._is_open:
                return
            self._number += 1
            pieces = pack({"op": "prepare", "id": self._number, "tree": tree}, {})
            with contextlib.suppress(OSError, TimeoutError):
                write_pieces(self._process.requests, pieces, time.monotonic() + self.time_limit)

    def open(self, *, tree: str | None, platform: str, without: Sequence[str] = ()) -> dict[str, Any]:
        """Load a tree, after closing the one that is open; gives what its session says of itself."""
        with self._lock:
            self.close()
            if self._process is None:
                self._start()
            request = {"tree": tree, "platform": platform, "without": list(without)}
            self._is_open = True  # before the answer, after which Ctrl-C may come
            try:
                answer, _ = self._ask("open", {**request, "memory_limit": self._memory_limit}, {})
            except NotVerifiedError:
                self._is_open = False
                raise
            opened = answer.get("opened")
            if not isinstance(opened, dict):
                raise self._end("answered to 'open' with something else")
            return opened

    def observe(
        self, items: Sequence[dict[str, Any]], tensors: Mapping[str, Tensor]
    ) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """Ask the open tree. There are as many results as items."""
        with self._lock:
            if not self._is_open:
                raise NotVerifiedError(self._last)
            answer, seen = self._ask("observe", {"items": list(items)}, tensors)
            results = answer.get("results")
            if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
                raise self._end("answered to 'observe' with something else")
            if len(results) != len(items):
                raise self._end(f"gave {len(results)} results for {len(items)} items")
            return results, seen

    def close(self) -> None:
        """End the open tree's process, if there is one; the worker stays."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                with contextlib.suppress(NotVerifiedError):
                    self._ask("close", {}, {})
                self._last = "no tree is open"

    def stop(self) -> None:
        """End everything, for good. A call that another thread waits in fails at once."""
        self._stopped = True
        in_use = False
        while not self._lock.acquire(timeout=0.05 if in_use else 0):
            in_use = True
            if self._process is not None:
                self._process.kill()
        try:
            self._is_open, self._last = False, _STOPPED
            if self._process is not None:
                self._process.end(grace=not in_use)
                self._process = None
        finally:
            self._lock.release()

    def log(self) -> str:
        """The last 64 KiB of what came to standard error."""
        return b"".join(process.tail() for process in self._started)[-LOG_TAIL:].decode(errors="replace")

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        if self._stopped or self._starts == MAX_STARTS:
            raise NotVerifiedError(self._last)
        self._starts += 1
        try:
            process = _Process(self._command)
        except (OSError, ValueError) as err:
            self._last = f"{self._command[0]}: could not be started: {getattr(err, 'strerror', None) or err}"
            raise NotVerifiedError(self._last) from err
        self._take(process)

    def _take(self, process: _Process) -> None:
        self._process = process
        self._started.append(process)
        weakref.finalize(self, process.end, grace=False)

    def _ask(
        self, op: str, request: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        process = self._process
        if process is None or self._stopped:
            raise NotVerifiedError(_STOPPED if self._stopped else self._last)
        self._number += 1
        try:
            pieces = pack({"op": op, "id": self._number, **request}, tensors)
        except FrameError as err:
            raise NotVerifiedError(f"the request cannot be sent: {_plain(str(err))}") from err
        deadline = time.monotonic() + self.time_limit
        try:
            write_pieces(process.requests, pieces, deadline)
            process.greet(deadline)
            answer, seen = read_frame(process.answers, deadline)
        except TimeoutError as err:
            raise self._end(f"took longer than {self.time_limit:g} s") from err
        except (EndOfStreamError, OSError) as err:
            raise self._end(None) from err
        except FrameError as err:
            raise self._end(f"sent no message that can be read: {_plain(str(err))}") from err
        except BaseException:  # Ctrl-C: the answer would be taken for the next call's
            self._end("was interrupted")
            raise
        if self._stopped:
            raise self._end(None)
        if answer.get("id") != self._number:
            raise self._end("sent a message that answers nothing")
        if isinstance(answer.get("cannot_verify"), str):
            self._last = _plain(answer["cannot_verify"])
            raise NotVerifiedError(self._last)
        return answer, seen

    def _end(self, reason: str | None) -> NotVerifiedError:
        """Kill the process; gives the error for it. Without a reason it had ended by itself."""
        process, self._process, self._is_open = self._process, None, False
        if process is not None:
            process.end(grace=False)
            reason = reason or f"the worker process of {self._command[0]} {process.ended()}"
        self._last = _STOPPED if self._stopped else str(reason)
        return NotVerifiedError(self._last)


class _Channel:
    """Two pipes and the files that take standard output and error: our ends, and those of the other side."""

    def __init__(self) -> None:
        with contextlib.ExitStack() as on_failure:
            self.errors = on_failure.enter_context(tempfile.TemporaryFile(buffering=0))
            self.output = on_failure.enter_context(tempfile.TemporaryFile(buffering=0))
            self.its_requests, self.requests = os.pipe()
            on_failure.callback(os.close, self.its_requests)
            on_failure.callback(os.close, self.requests)
            self.answers, self.its_answers = os.pipe()
            on_failure.callback(os.close, self.answers)
            on_failure.callback(os.close, self.its_answers)
            os.set_blocking(self.requests, False)
            os.set_blocking(self.answers, False)
            on_failure.pop_all()

    def hand_over(self) -> None:
        """Close the other side's ends, which it has by now."""
        os.close(self.its_requests)
        os.close(self.its_answers)
        self.output.close()

    def close(self) -> None:
        self.hand_over()
        os.close(self.requests)
        os.close(self.answers)
        self.errors.close()


class _Process:
    """One process, the leader of its session, with its two pipes and the file that takes its standard error.

    ``popen`` is None for one that somebody else started: its number comes with its first frame, and how it ended
    nobody knows.
    """

    def __init__(self, command: Sequence[str]) -> None:
        channel = _Channel()
        try:
            popen = _start(command, channel)
        except BaseException:
            channel.close()
            raise
        self._own(channel, popen)

    @classmethod
    def pair(cls, command: Sequence[str]) -> tuple[_Process, _Process]:
        """Two at the price of one: the second is forked off the first."""
        channels = _Channel(), _Channel()
        try:
            popen = _start(command, *channels)
        except BaseException:
            for channel in channels:
                channel.close()
            raise
        first, second = cls.__new__(cls), cls.__new__(cls)
        first._own(channels[0], popen)
        second._own(channels[1], None)
        return first, second

    def _own(self, channel: _Channel, popen: subprocess.Popen[bytes] | None) -> None:
        channel.hand_over()
        self.requests, self.answers, self._log = channel.requests, channel.answers, channel.errors
        self._popen = popen
        self._pid = popen.pid if popen is not None else None
        self._owner = os.getpid()
        self._guard = threading.RLock()
        self._is_over = False
        self._tail = b""

    def greet(self, deadline: float) -> None:
        """Read the frame with which a process that somebody else started tells its number."""
        if self._pid is None:
            hello, _ = read_frame(self.answers, deadline)
            number = hello.get("pid")
            if not isinstance(number, int) or number < 2:
                raise FrameError("no process id")
            self._pid = number

    def kill(self) -> None:
        """Kill what belongs to it; from any thread."""
        with self._guard:
            if self._is_over or self._pid is None:
                return
            if self._popen is None and self._is_gone(0):
                return  # the number of one that is not our child may be another's by now
            end_descendants(self._pid)
            self._signal(signal.SIGKILL)

    def end(self, *, grace: bool) -> None:
        """Kill what belongs to it and close all; with grace it may go by itself first."""
        with self._guard:
            if self._is_over or os.getpid() != self._owner:
                return
            requests, self.requests = self.requests, -1
            if requests >= 0:  # else Ctrl-C came in an earlier try
                os.close(requests)
            if grace and not self._is_gone(_GRACE):
                self._signal(signal.SIGTERM)
                self._is_gone(_GRACE)
            self.kill()
            if self._popen is None:
                self._is_gone(10)
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._popen.wait(10)
            self._tail = self.tail()
            self._is_over = True
            os.close(self.answers)
            self._log.close()

    def tail(self) -> bytes:
        with self._guard:
            if self._is_over:
                return self._tail
            size = os.fstat(self._log.fileno()).st_size
            return os.pread(self._log.fileno(), LOG_TAIL, max(0, size - LOG_TAIL))

    def ended(self) -> str:
        """How, once it is over; with the last line that it wrote if its exit status tells of an error."""
        code = self._popen.returncode if self._popen is not None else None
        if code is None and self._popen is not None:
            return "does not end"
        lines = self._tail.decode(errors="replace").split("\n") if code is None or code > 0 else []
        last = next((line for line in reversed(lines) if line.strip()), "")
        parts = [ending(code)] if code is not None else []
        parts += [_plain(last)] if last else []
        return ": ".join(["ended", *parts])

    def _is_gone(self, seconds: float) -> bool:
        """Whether its end of the pipe is closed by then."""
        poll = select.poll()
        poll.register(self.answers, 0)
        return bool(poll.poll(seconds * 1000))

    def _signal(self, number: int) -> None:
        # The group cannot be another's: its leader is waited for after the last signal only.
        if self._pid is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._pid, number)


def _command(python: str | None) -> list[str]:
    return [python or sys.executable, "-X", "utf8", "-B", str(_MAIN)]


def _start(
    command: Sequence[str], channel: _Channel, twin: _Channel | None = None
) -> subprocess.Popen[bytes]:
    handed = [channel.its_requests, channel.its_answers]
    if twin is not None:
        handed += [twin.its_requests, twin.its_answers, twin.output.fileno(), twin.errors.fileno()]
    return subprocess.Popen(  # noqa: S603  the caller's own choice of interpreter
        [*command, *map(str, handed)],
        stdin=subprocess.DEVNULL,
        stdout=channel.output,
        stderr=channel.errors,
        pass_fds=handed,
        env=_environment(),
        start_new_session=True,
    )


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_DROPPED) and (not name.startswith("PYTHON") or name in _KEPT)
    }
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1"}


def _plain(text: str) -> str:
    """One line that a terminal can be given."""
    text = "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
