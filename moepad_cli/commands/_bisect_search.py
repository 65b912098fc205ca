"""The versions that ``moepad bisect`` searches, and what running the cases on one of them gives."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moepad_cli.device import resolve_device
from moepad_cli.engine_options import loaded_rows
from moepad_cli.errors import UsageError
from repro.errors import EngineSpecError, NotVerifiedError, shown
from repro.report import Row
from repro.suite import SuiteCase

if TYPE_CHECKING:
    from packaging.version import Version

    from repro.checks import CaseResult

SHORT_SHA = 12


@dataclass(frozen=True)
class Run:
    """One version's result for each case, and what was loaded of it."""

    results: list[CaseResult]
    loaded: list[Row]


@dataclass(frozen=True)
class Search:
    """``versions`` go from good to bad; ``prefix`` makes an engine's name of one. ``verdict_of`` fills ``runs``."""

    prefix: str
    versions: list[str]
    cases: Sequence[SuiteCase]
    device: str
    python: str | None
    time_limit: float
    runs: dict[str, Run] = field(default_factory=dict)

    @property
    def ends(self) -> dict[str, str]:
        """The options that name the first and the last version."""
        return {"--good": self.versions[0], "--bad": self.versions[-1]}

    def name(self, version: str) -> str:
        return f"{self.prefix}{version}"

    def short(self, version: str) -> str:
        """As a table shows it."""
        return version[:SHORT_SHA] if self.prefix.endswith("#") else version

    def verdict_of(self, version: str) -> list[str | None]:
        """As ``bisect_versions`` takes it.

        Raises:
            NotVerifiedError: the version could not be brought here, or holds nothing that can be loaded.
            UsageError: the latter, of one that an option names.
        """
        from repro.engines import load_engine, start_workers, stop_engine

        self._show(version)
        spec = self.name(version)
        [worker] = start_workers([spec], python=self.python, time_limit=self.time_limit)
        try:
            engine = load_engine(spec, side="after", worker=worker)
        except EngineSpecError as err:
            for option, end in self.ends.items():
                if version == end:
                    raise UsageError(f"{option}: {err}") from err
            raise NotVerifiedError(str(err)) from err
        try:
            # Torch is loaded here, while the engine's worker loads its own.
            device, _ = resolve_device(self.device)
            from repro.checks import NOT_VERIFIED, check_cases

            results = [row[0] for row in check_cases(self.cases, [engine], device=device)]
        finally:
            stop_engine(engine)
        self.runs[version] = Run(results, loaded_rows([engine]))
        return [None if result.verdict == NOT_VERIFIED else result.verdict for result in results]

    @contextmanager
    def progress(self) -> Iterator[None]:
        """On a terminal ``verdict_of`` tells what is running; that is gone afterwards."""
        try:
            yield
        finally:
            self._show(None)

    def _show(self, version: str | None) -> None:
        if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
            return
        text = ""
        if version is not None:
            most = 2 + (len(self.versions) - 2).bit_length()
            text = f"moepad bisect: running {version}, {len(self.runs) + 1} of about {most}"
        sys.stderr.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()


def history(engine: str, good: str, bad: str) -> tuple[str, list[str]]:
    """``prefix`` and ``versions`` of a search.

    Raises:
        UsageError: an engine without versions, no such version, or one version twice.
        NotVerifiedError: they could not be listed.
    """
    from repro.engines.sglang.locate import git_revisions

    if engine.startswith("sglang@"):
        prefix, versions = f"{engine}#", git_revisions(engine.removeprefix("sglang@"), good, bad)
    elif engine == "sglang":
        prefix, versions = "sglang==", _releases(good, bad)
    else:
        raise UsageError(
            f"ENGINE: {shown(engine)} has no versions to search; give sglang for releases, or sglang@PATH for the "
            "commits of a checkout"
        )
    if len(versions) == 1:
        raise UsageError(f"--bad: {shown(bad)} is the same version as --good; give another")
    return prefix, versions


def _releases(good: str, bad: str) -> list[str]:
    from packaging.version import Version

    from repro.engines.sglang.locate import released_versions

    first, last = _version("--good", good), _version("--bad", bad)
    if first == last:
        return [str(first)]
    low, high = sorted((first, last))
    # The ends need not be listed: they may be release candidates.
    between = [version for version in map(Version, released_versions()) if low < version < high]
    versions = [str(version) for version in (low, *between, high)]
    return versions if first < last else versions[::-1]


def _version(option: str, text: str) -> Version:
    from packaging.version import Version

    try:
        return Version(text)
    except ValueError as err:
        raise UsageError(f"{option}: {shown(text)} is no version; give one such as 0.5.16") from err
