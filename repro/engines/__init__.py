"""Engines under test, by name."""

from __future__ import annotations

import difflib
from pathlib import Path

from repro.engines.builtin import FIXED, FIXED_COUNT, FIXED_MASK, PREFIX
from repro.engines.protocol import Engine, Observation, RankObservation
from repro.engines.saved import SavedEngine, read_run, run_document
from repro.errors import EngineSpecError, shown

__all__ = [
    "BUILTIN_ENGINES",
    "Engine",
    "Observation",
    "RankObservation",
    "SavedEngine",
    "load_engine",
    "run_document",
]

BUILTIN_ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (PREFIX, FIXED_MASK, FIXED_COUNT, FIXED)
}


def load_engine(spec: str, *, side: str) -> Engine:
    """The engine that ``spec`` names.

    A built-in name; or ``FILE.json``, the same ``side`` (``before`` or ``after``) of a saved run; or
    ``FILE.json#ENGINE``, that engine of it.

    Raises:
        EngineSpecError: no engine of that name; the text lists those that there are.
        RunFileError: the saved run cannot be read.
    """
    if spec in BUILTIN_ENGINES:
        return BUILTIN_ENGINES[spec]
    if not spec.isprintable():
        raise EngineSpecError(f"{shown(spec)} is no engine; give a name of printable characters")
    path, _, engine = spec.partition("#")
    if path.endswith(".json") or Path(path).is_file():
        return read_run(Path(path), engine=engine or None, side=side)
    close = difflib.get_close_matches(spec, BUILTIN_ENGINES, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"give {', '.join(BUILTIN_ENGINES)}, or a saved run"
    raise EngineSpecError(f"{shown(spec)} is no engine; {hint}")
