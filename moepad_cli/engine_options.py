"""Options and loading of engines, shared by the commands that take one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moepad_cli import parse
from moepad_cli.errors import UsageError
from moepad_cli.options import completer
from repro.report import Row, Verdict, View
from repro.suite import SUITES

if TYPE_CHECKING:
    from repro.engines import Engine

ENGINES = (
    "sglang==VERSION, sglang@PATH (a checkout), sglang@PATH#REVISION, sglang (installed), "
    "prefix, fixed-mask, fixed-count or fixed (built in)"
)
PythonOption = Annotated[
    str | None,
    typer.Option(
        "--python", help="Interpreter that real engines run in. (default: this one)", metavar="FILE"
    ),
]
TimeLimitOption = Annotated[
    str,
    typer.Option("--time-limit", help="Seconds that a real engine may take for one step.", metavar="NUMBER"),
]
VerboseOption = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", help="Show what of an engine was loaded, and what stands in for the rest."
    ),
]
SuiteOption = Annotated[
    str | None,
    typer.Option(
        help="Which cases to run. (default: default)",
        metavar="|".join(SUITES),
        autocompletion=completer(SUITES),
    ),
]
BisectOption = Annotated[
    bool,
    typer.Option(
        "--bisect",
        help="For git bisect run: exit 125 (skip) where nothing could be verified, 128 (stop) on errors.",
    ),
]
DEFAULT_TIME_LIMIT = "60"

# What engines wrote to standard error, for --debug.
ENGINE_LOGS: list[str] = []


@contextmanager
def loaded_engines(
    specs: Mapping[str, str], sides: Sequence[str], *, python: str | None, time_limit: str
) -> Iterator[list[Engine]]:
    """The engines of ``{option: spec}``, ended when the block is left."""
    from repro.engines import load_engine, start_workers, stop_engine
    from repro.errors import EngineSpecError, RunFileError

    if python == "":
        raise UsageError("--python: '' is no file; give a Python interpreter")
    limit = parse.decimal(time_limit, "--time-limit", least=0.1, example=DEFAULT_TIME_LIMIT)
    engines: list[Engine] = []
    workers = start_workers(list(specs.values()), python=python, time_limit=limit)
    try:
        for (option, spec), side, worker in zip(specs.items(), sides, workers, strict=True):
            try:
                engines.append(load_engine(spec, side=side, worker=worker))
            except (EngineSpecError, RunFileError) as err:
                raise UsageError(f"{option}: {err}") from err
        yield engines
    finally:
        for engine in engines:
            log = getattr(engine, "log", None)
            if callable(log) and (text := log()):
                ENGINE_LOGS.append(f"standard error of {engine.name}:\n{text}")
            stop_engine(engine)
        for worker in workers:
            if worker is not None:
                worker.stop()


def loaded_rows(engines: Sequence[Engine]) -> list[Row]:
    """One row for each thing that an engine loaded, stood in for faithfully (shim), or only named (stub)."""
    rows: list[Row] = []
    for engine in engines:
        loaded: dict[str, dict[str, Any]] = getattr(engine, "loaded", {})
        for platform, told in loaded.items():
            common = {"engine": engine.name, "platform": platform, "mode": told["mode"]}
            rows += [{**common, "kind": "real", "name": name, "reason": ""} for name in told["real"]]
            rows += [
                {**common, "kind": "shim", "name": name, "reason": reason}
                for name, reason in sorted(told["shims"].items())
            ]
            rows += [{**common, "kind": "stub", "name": name, "reason": ""} for name in told["stubs"]]
    return rows


def with_unchecked(verdict: Verdict, engines: Sequence[Engine]) -> Verdict:
    """The verdict, with what it says nothing of: the engines' callers, and kernels that were emulated."""
    lines = []
    for engine in engines:
        loaded: dict[str, dict[str, Any]] = getattr(engine, "loaded", {})
        names = sorted({name for told in loaded.values() for name in told.get("kernels", ())})
        lines += [f"{told['note']} ({engine.name})" for told in loaded.values() if told.get("note")]
        if loaded:
            lines.append(
                f"what calls them (model, TopK, batch, runner), capture and dispatch ({engine.name})"
            )
        if names:
            lines.append(
                f"compiled kernels, which plain formulas stood in for: {', '.join(names)} ({engine.name})"
            )
    return replace(verdict, not_checked=tuple(dict.fromkeys([*verdict.not_checked, *lines])))


def loaded_views(rows: Sequence[Mapping[str, Any]]) -> list[View]:
    """Two views an engine and platform: what ran for real and by shims, and the names that were only named."""
    views = []
    keys = dict.fromkeys((row["engine"], row["platform"], row["mode"]) for row in rows)
    for engine, platform, mode in keys:
        mine = [r for r in rows if (r["engine"], r["platform"]) == (engine, platform)]
        shown = [[r["kind"], r["name"], r["reason"]] for r in mine if r["kind"] != "stub"]
        stubs = sum(r["kind"] == "stub" for r in mine)
        views.append(
            View(
                f"{engine} on {platform}, {mode}: what was loaded",
                ("kind", "name", "reason"),
                shown,
                f"{stubs} more names have stand-ins that no verdict rests on (--format json lists them)",
            )
        )
    return views
