"""The worker process: imports torch once, then forks a child for each tree that it is asked to open.

Both take turns at one pair of pipes: from ``open`` on the child reads the requests and answers them, and the
worker only waits for its end. A request and its answer carry the same ``id``.

    {op: prepare, tree}                                 compiles the tree's modules; there is no answer
    {op: open, platform, tree, without, memory_limit}   -> {opened: what the session describes}
    {op: observe, items} and tensors                    -> {results} and tensors
    {op: close}                                         -> {closed: true}; the child ends
    {op: quit}, or the end of the stream                   ends all

Any answer may be ``{cannot_verify: reason}`` instead.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import select
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from .frames import EndOfStreamError, pack, read_frame, write_frame, write_pieces
from .limits import LIBC, end_descendants, ending, limit_child, limit_worker

if TYPE_CHECKING:
    from torch import Tensor

MEMORY_LIMIT = 8 << 30
MAX_REASON = 500
MAX_QUOTE = 60
_NOT_OPEN = "no tree is open"
# What a child is doing.
_WAITING, _READING, _WORKING, _ANSWERING, _CLOSED, _QUITTING = range(6)


class Session(Protocol):
    """One loaded tree, as ``adapter.Session``."""

    def describe(self) -> dict[str, Any]: ...

    def observe(
        self, items: Sequence[dict[str, Any]], tensors: dict[str, Tensor]
    ) -> tuple[list[dict[str, Any]], dict[str, Tensor]]: ...


Reply = tuple[Mapping[str, Any], Mapping[str, "Tensor"]]
# From (tree, platform, without).
SessionFactory = Callable[[Any, Any, Any], Session]


class _Shared:
    """What the worker must know of a child that died: what it was doing, and for which request."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16)
        self._layout = struct.Struct("<QQ")

    def set(self, phase: int, number: int) -> None:
        self._memory[:] = self._layout.pack(phase, number)

    def get(self) -> tuple[int, int]:
        phase, number = self._layout.unpack(self._memory[:])
        return phase, number


def run(requests: int, answers: int, session_factory: SessionFactory | None = None) -> NoReturn:
    """Serve the two descriptors until the stream ends. ``session_factory`` stands for ``adapter.Session``."""
    wakeup = _prepare(requests, answers)
    problem = _import_torch()
    refusal: str | None = problem or _NOT_OPEN
    shared = _Shared()
    with contextlib.suppress(EndOfStreamError):
        while refusal is not None:
            message, _ = read_frame(requests)
            number = int(message["id"])
            if message["op"] == "quit":
                break
            if message["op"] == "prepare":
                _compile(message["tree"])
            elif message["op"] == "close":
                write_frame(answers, {"id": number, "closed": True}, {})
            elif message["op"] == "open" and problem is None:
                shared.set(_WORKING, number)
                child = _fork(_Child(requests, answers, shared), message, session_factory)
                refusal = _after(_wait_for(child, requests, wakeup), answers, shared)
            else:
                write_frame(answers, {"id": number, "cannot_verify": refusal}, {})
    end_descendants(os.getpid())
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def run_twins(first: tuple[int, int], second: tuple[int, int], output: int, errors: int) -> NoReturn:
    """Serve two pairs of descriptors in two processes, which need not import torch twice.

    The second one is nobody's child and leads a session of its own. It tells its process id with a first frame,
    and writes to ``output`` and ``errors`` in place of the standard ones.
    """
    _import_torch()
    if _fork_detached():
        for fd in first:
            os.close(fd)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.close(output)
        os.close(errors)
        write_frame(second[1], {"id": 0, "pid": os.getpid()}, {})
        run(*second)
    for fd in (*second, output, errors):
        os.close(fd)
    run(*first)


def _fork_detached() -> bool:
    """Whether this is the new process."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    if os.fork():
        os._exit(0)
    os.setsid()
    return True


def _after(status: int | None, answers: int, shared: _Shared) -> str | None:
    """Answer in place of a child that died; gives what further requests are told, None if all is to end."""
    phase, number = shared.get()
    if status is None or phase == _QUITTING:
        return None
    end_descendants(os.getpid())
    if phase == _CLOSED:
        return _NOT_OPEN
    refusal = f"the process ended: {ending(os.waitstatus_to_exitcode(status))}"
    if phase in (_READING, _ANSWERING):
        sys.exit(f"{refusal}, within a message")  # nobody knows how much of it went through the pipe
    if phase == _WORKING:
        write_frame(answers, {"id": number, "cannot_verify": refusal}, {})
    return refusal


def _prepare(requests: int, answers: int) -> int:
    """Signals, limits and descriptors; gives a descriptor that can be read when a child has ended."""
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to decide about
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for fd in (requests, answers):
        os.set_inheritable(fd, False)
    limit_worker()
    wakeup, signalled = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(signalled, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    return wakeup


def _import_torch() -> str | None:
    """Why torch cannot be used here, if so. Its threads would not outlive a fork, so there are none."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    gc.disable()  # an import makes much and drops little
    try:
        import torch

        torch.set_num_threads(1)
        gc.freeze()  # else every collection of a child would touch, and so copy, all that torch brought
        gc.enable()
    except Exception as err:
        traceback.print_exc()
        return f"{sys.executable}: torch cannot be imported there: {_one_line(err)}"
    return None


def _compile(tree: Any) -> None:
    """Compiles a tree's modules, which runs none of their code: once for the children of all platforms."""
    from pathlib import Path

    from .loader import prepare

    if isinstance(tree, str):
        prepare(Path(tree))


def _fork(child: _Child, message: Mapping[str, Any], factory: SessionFactory | None) -> int:
    _flush()
    worker = os.getpid()
    pid = os.fork()
    if pid == 0:
        child.serve(worker, message, factory)
    return pid


def _wait_for(child: int, requests: int, wakeup: int) -> int | None:
    """The child's wait status, or None if the other end of ``requests`` was closed before that."""
    poll = select.poll()
    poll.register(requests, 0)
    poll.register(wakeup, select.POLLIN)
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        ready = dict(poll.poll(1000))
        if wakeup in ready:
            os.read(wakeup, 4096)
        elif requests in ready:
            return None


class _Child:
    """What the forked child does; ``serve`` never returns."""

    def __init__(self, requests: int, answers: int, shared: _Shared) -> None:
        self._requests, self._answers, self._shared = requests, answers, shared
        self._output = self._seen = 0

    def serve(self, worker: int, opening: Mapping[str, Any], factory: SessionFactory | None) -> NoReturn:
        status = 1
        try:
            self._confine(worker, int(opening.get("memory_limit", MEMORY_LIMIT)))
            self._requests_of(opening, factory)
            status = 0
        except EndOfStreamError:
            self._shared.set(_QUITTING, 0)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                _flush()
            finally:
                os._exit(status)

    def _confine(self, worker: int, memory_limit: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._output = os.dup(1)
        self._seen = os.fstat(1).st_size
        os.register_at_fork(after_in_child=self._disown)
        limit_child(worker, memory_limit)

    def _disown(self) -> None:
        """A fork that the tree made neither speaks here nor keeps the pipes open."""
        for fd in (self._requests, self._answers, self._output):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._shared = _Shared()

    def _requests_of(self, opening: Mapping[str, Any], factory: SessionFactory | None) -> None:
        sessions: list[Session] = []

        def load() -> Reply:
            make = _adapter_session if factory is None else factory
            sessions.append(make(opening["tree"], opening["platform"], opening["without"]))
            return {"opened": sessions[0].describe()}, {}

        number = int(opening["id"])
        is_open = self._answer(number, load)
        while is_open:
            self._shared.set(_WAITING, number)
            poll = select.poll()
            poll.register(self._requests, select.POLLIN)
            poll.poll()
            self._shared.set(_READING, number)
            message, tensors = read_frame(self._requests)
            number = int(message["id"])
            self._shared.set(_WORKING, number)
            if message["op"] == "observe":
                self._answer(number, partial(_observe, sessions[0], message["items"], tensors))
            elif message["op"] == "close":
                self._answer(number, lambda: ({"closed": True}, {}))
                is_open = False
            elif message["op"] == "quit":
                self._shared.set(_QUITTING, number)
                return
            else:
                raise ValueError(f"a request for {message['op']!r} while a tree is open")
        self._shared.set(_CLOSED, number)

    def _answer(self, number: int, work: Callable[[], Reply]) -> bool:
        """Do the work and tell its outcome; whether there was no reason against it."""
        reason = None
        try:
            reply, tensors = work()
            pieces = pack({**reply, "id": number}, tensors)
        except BaseException as err:
            reason = _reason(err)
            with contextlib.suppress(BaseException):
                traceback.print_exc()
        printed = self._printed()
        if printed:
            reason = f"wrote to standard output: {printed!r}; only standard error is free to print to"
        if reason is not None:
            pieces = pack({"id": number, "cannot_verify": reason}, {})
        self._shared.set(_ANSWERING, number)
        write_pieces(self._answers, pieces)
        return reason is None

    def _printed(self) -> str:
        """The beginning of what came to standard output since this was last asked."""
        _flush()
        seen, self._seen = self._seen, os.fstat(self._output).st_size
        if self._seen <= seen:
            return ""
        return os.pread(self._output, 4 * MAX_QUOTE, seen).decode(errors="replace")[:MAX_QUOTE]


def _adapter_session(tree: Any, platform: Any, without: Any) -> Session:
    from .adapter import Session as AdapterSession

    return AdapterSession(tree, platform, without)


def _observe(session: Session, items: list[dict[str, Any]], tensors: dict[str, Tensor]) -> Reply:
    given = session.observe(items, tensors)
    if not (isinstance(given, tuple) and len(given) == 2):
        raise TypeError(f"observe() gave {type(given).__name__}, no pair of results and tensors")
    results, seen = given
    if not isinstance(results, list) or not isinstance(seen, dict):
        raise TypeError(
            f"observe() gave {type(results).__name__} and {type(seen).__name__}, no list and dict"
        )
    return {"results": results}, seen


def _reason(err: BaseException) -> str:
    from .stubs import CannotVerify

    text = _one_line(err)
    return text.partition(": ")[2] or text if isinstance(err, CannotVerify) else text


def _one_line(err: BaseException) -> str:
    try:
        text = " ".join(str(err).split())
    except Exception:
        text = "(its text raised)"
    text = text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."
    return f"{type(err).__name__}: {text}" if text else type(err).__name__


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
        with contextlib.suppress(Exception):
            if stream is not None:
                stream.flush()
    LIBC.fflush(None)
