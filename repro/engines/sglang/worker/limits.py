"""What binds a worker's processes: who is whose, what they may use, and with whom they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time

LIBC = ctypes.CDLL(None)
MAX_FILE = 1 << 30
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def limit_worker() -> None:
    """No core dumps; what a tree starts stays among this process's descendants, whoever its parents were."""
    _limit(resource.RLIMIT_CORE, 0)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def limit_child(worker: int, memory_limit: int) -> None:
    """For a child of ``worker``: ends with it, writes files up to 1 GiB, takes ``memory_limit`` bytes more.

    Memory is limited where /proc tells what is in use, the end with the worker on Linux.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != worker:
        os._exit(1)
    _limit(resource.RLIMIT_FSIZE, MAX_FILE)
    in_use = _data_in_use()
    if in_use is not None:
        _limit(resource.RLIMIT_DATA, in_use + memory_limit)


def ending(code: int) -> str:
    """An exit code in words; a negative one is a signal's number."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def end_descendants(root: int) -> None:
    """Kill what descends from a process or belongs to its session, but not the process itself.

    Where there is no /proc this does nothing.
    """
    for _ in range(100):
        pids = _descendants(root)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _descendants(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    alive, found = set(), {root}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                state, parent, _, session = file.read().rpartition(b")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        pid = int(entry)
        children.setdefault(int(parent), []).append(pid)
        if state not in b"ZX":
            alive.add(pid)
        if int(session) == root:
            found.add(pid)
    queue = list(found)
    while queue:
        fresh = [pid for pid in children.get(queue.pop(), ()) if pid not in found]
        found.update(fresh)
        queue += fresh
    return (found & alive) - {root}


def _limit(kind: int, value: int) -> None:
    """Set a limit for good, never above what was set from outside."""
    values = [value, *(outer for outer in resource.getrlimit(kind) if outer != resource.RLIM_INFINITY)]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (min(values), min(values)))


def _data_in_use() -> int | None:
    """Bytes that RLIMIT_DATA counts by now, None where no such count is kept."""
    try:
        with open("/proc/self/status") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        return int(fields["VmData"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        LIBC.prctl(option, value, 0, 0, 0)
