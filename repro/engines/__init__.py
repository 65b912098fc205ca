"""Engines under test, by name. Importing this package loads no torch; its names load it when they are needed."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.errors import EngineSpecError, NotVerifiedError, one_line, shown

if TYPE_CHECKING:
    from repro.engines.builtin import BUILTIN_ENGINES
    from repro.engines.protocol import Engine, Observation, RankObservation
    from repro.engines.saved import SavedEngine, run_document
    from repro.engines.sglang.process import Worker

__all__ = [
    "BUILTIN_ENGINES",
    "BUILTIN_NAMES",
    "ENTRY_POINTS",
    "Engine",
    "Observation",
    "RankObservation",
    "SavedEngine",
    "load_engine",
    "run_document",
    "start_workers",
    "stop_engine",
]

BUILTIN_NAMES = ("prefix", "fixed-mask", "fixed-count", "fixed")
OWN_NAMES = (*BUILTIN_NAMES, "sglang")
ENTRY_POINTS = "moepad.engines"
TIME_LIMIT = 60.0

_HOMES = {
    "BUILTIN_ENGINES": "builtin",
    "Engine": "protocol",
    "Observation": "protocol",
    "RankObservation": "protocol",
    "SavedEngine": "saved",
    "run_document": "saved",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def start_workers(
    specs: Sequence[str], *, python: str | None = None, time_limit: float = TIME_LIMIT
) -> list[Worker | None]:
    """Worker processes for ``load_engine``, one a spec, None where a spec needs none.

    ``python`` is the interpreter to start them with, by default this one; ``time_limit`` is in seconds, for one
    case. They are under way at once, and torch is not loaded for them here. Two import it once between them.
    """
    from repro.engines.sglang.process import Worker

    real = [spec for spec in specs if _name_of(spec) == "sglang"]
    if len(real) == 2:
        started = list(Worker.pair(python=python, time_limit=time_limit))
    else:
        started = [Worker(python=python, time_limit=time_limit) for _ in real]
    return [started.pop(0) if spec in real else None for spec in specs]


def load_engine(spec: str, *, side: str, worker: Worker | None = None) -> Engine:
    """The engine that ``spec`` names.

    A built-in name; a real SGLang, ``sglang``, ``sglang==VERSION``, ``sglang@PATH`` or ``sglang@PATH#REVISION``;
    ``FILE.json``, the same ``side`` (``before`` or ``after``) of a saved run, or ``FILE.json#ENGINE``, that engine
    of it; or the name of an installed plugin, see ``ENTRY_POINTS``.

    A real engine runs in ``worker``, one of ``start_workers``, or in one of its own. ``stop_engine`` ends it.

    Raises:
        EngineSpecError: no engine of that name; the text lists those that there are.
        RunFileError: the saved run cannot be read.
        NotVerifiedError: the code could not be brought here, or a plugin failed.
    """
    if spec in BUILTIN_NAMES:
        return importlib.import_module(f"{__name__}.builtin").BUILTIN_ENGINES[spec]  # type: ignore[no-any-return]
    if not spec.isprintable():
        raise EngineSpecError(f"{shown(spec)} is no engine; give a name of printable characters")
    name = _name_of(spec)
    if name == "sglang":
        from repro.engines.sglang import start

        return start(spec, worker)
    path, _, engine = spec.partition("#")
    if path.endswith(".json") or Path(path).is_file():
        from repro.engines.saved import read_run

        return read_run(Path(path), engine=engine or None, side=side)
    plugins = {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in OWN_NAMES}
    if name in plugins:
        return _load_plugin(plugins[name], spec)
    known = [*OWN_NAMES, *plugins]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else _choices(plugins)
    raise EngineSpecError(f"{shown(spec)} is no engine; {hint}")


def _name_of(spec: str) -> str:
    return re.split(r"[=@#]", spec, maxsplit=1)[0]


def _choices(plugins: dict[str, EntryPoint]) -> str:
    own = ", ".join([*BUILTIN_NAMES, "sglang==VERSION", "sglang@PATH", *sorted(plugins)])
    return f"give {own}, or a saved run"


def _load_plugin(point: EntryPoint, spec: str) -> Engine:
    from repro.engines.plugin import PluginEngine

    try:
        engine = point.load()(spec)
        if not (isinstance(engine.name, str) and callable(engine.observe)):
            raise TypeError("its factory gave no engine: a name and a method observe(case)")
    except (EngineSpecError, NotVerifiedError):
        raise
    except (Exception, SystemExit) as err:
        raise NotVerifiedError(f"engine plugin {point.name} ({point.value}): {one_line(err)}") from err
    return PluginEngine(engine)


def stop_engine(engine: Engine) -> None:
    """Ends what an engine started; does nothing for one that started nothing."""
    stop = getattr(engine, "stop", None)
    if callable(stop):
        stop()
