"""Writes the parts of docs/engines.md that are made, not written: between its "begin" and "end" comments.

    python docs/make_engines_table.py lists
    python docs/make_engines_table.py versions [--from VERSION]

``lists`` tells what is real and what stands in for the rest, by the lists that the worker itself goes by.
``versions`` runs the default suite over every released SGLang from VERSION on. That takes minutes, and a network
for releases that are not in the cache yet.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from repro.checks import NOT_VERIFIED, SAFE, CaseResult, check_cases
from repro.engines import load_engine, stop_engine
from repro.engines.sglang.locate import released_versions
from repro.engines.sglang.worker import kernels, loader, shims
from repro.suite import load_suite

DOCUMENT = Path(__file__).with_name("engines.md")
SUITE, FIRST = "default", "0.5.9"
MOST_NAMES = 4
# (fault, platform) -> head of its column.
COLUMNS = {
    ("mask", "cuda"): "mask on CUDA",
    ("mask", "hip"): "mask on HIP",
    ("count", "cuda"): "count on CUDA",
    ("count", "hip"): "count on HIP",
}
# What the loader itself puts in, beside the shims of names.
LOADER_SHIMS = {
    loader.TORCH_COMPILE: ("torch", "compiles nothing"),
    loader.REGISTER_FAKE: ("torch", "passes over operators of compiled packages that are not here"),
    loader.STRUCT: ("msgspec", "a frozen struct in plain Python, where msgspec is not installed"),
    loader.TRITON: ("triton", "jit gives emulated kernels; next_power_of_2 is one line"),
}

Results = Sequence[CaseResult]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


# Lists


def modules_list() -> list[str]:
    return [f"- `{name}`" for name in loader.REAL_MODULES]


def shims_list() -> list[str]:
    """What the tree reads of packages that are not loaded."""
    named = [(f"`{shim.name}`", code(shim.modules), shim.reason) for shim in shims.SHIMS]
    others = [(f"`{name}`", f"`{package}`", reason) for name, (package, reason) in LOADER_SHIMS.items()]
    return [
        *table(("name", "taken from", "what it gives"), [*named, *others]),
        "",
        f"Importing any of these fails, and the tree's own branch for that runs: {code(shims.OPTIONAL_PACKAGES)}.",
    ]


def kernels_list() -> list[str]:
    """The compiled kernels that have an emulation."""
    rows = [
        (f"`{kernel.name}`", kernel.reason, ", ".join(sorted(kernel.known.values(), key=Version)))
        for kernel in kernels.EMULATIONS.values()
    ]
    return table(
        ("kernel", "what runs in its place", "releases whose source was compared (the first of each)"), rows
    )


LISTS = {"modules": modules_list, "shims": shims_list, "kernels": kernels_list}


# Versions


@dataclass(frozen=True)
class Release:
    """One release's results in the suite, and the modes that it was loaded in."""

    version: str
    results: Results
    modes: frozenset[str]

    def of(self, key: tuple[str, str]) -> Results:
        """The results of one column."""
        return [r for r in self.results if (r.case.fault, r.case.scenario.platform) == key]

    @property
    def unverified(self) -> Results:
        return [result for result in self.results if result.verdict == NOT_VERIFIED]


def versions_part(releases: Sequence[Release]) -> list[str]:
    """``releases`` are in order, oldest first."""
    newest, versions = releases[-1], [release.version for release in releases]
    modes = " and ".join(sorted(frozenset.union(*(release.modes for release in releases))))
    heads = [f"{title} ({len(newest.of(key))})" for key, title in COLUMNS.items()]
    rows = [[release.version, *(cell(release.of(key)) for key in COLUMNS)] for release in releases]
    none_found = [release for release in releases if not any(r.findings for r in release.results)]
    safe = [release.version for release in none_found if not release.unverified]
    partly = [release.version for release in none_found if 0 < len(release.unverified) < len(release.results)]
    return [
        f"Suite `{SUITE}` on a CPU, {modes} mode, torch {version('torch')}; the numbers are of cases.",
        "",
        *table(("SGLang", *heads), rows),
        "",
        f"- Safe in every case: {ranges(safe, versions)}; {safe[0]} is the first."
        if safe
        else "- None is safe.",
        *([f"- Safe as far as it could be verified: {ranges(partly, versions)}."] if partly else []),
        *(f"- The newest, {newest.version}, has {text}." for text in found(newest)),
        "",
        *table(("not verified", "why", "SGLang"), unverified(releases)),
    ]


def cell(results: Results) -> str:
    """``safe``, the codes and in how many cases, or ``not verified``; with what was not verified beside them."""
    codes = sorted({code for result in results for code in result.codes})
    without = sum(result.verdict == NOT_VERIFIED for result in results)
    if without == len(results):
        return NOT_VERIFIED
    cases = sum(bool(result.findings) for result in results)
    text = f"{' '.join(codes)} in {cases}" if codes else SAFE
    return f"{text} ({without} {NOT_VERIFIED})" if without else text


def found(release: Release) -> list[str]:
    """Codes with the cases that have them."""
    cases: dict[str, list[str]] = {}
    for result in release.results:
        if result.findings:
            cases.setdefault(" ".join(result.codes), []).append(result.case.name)
    return [f"{codes} in {quoted(names)}" for codes, names in cases.items()]


def unverified(releases: Sequence[Release]) -> list[Sequence[str]]:
    """Cases, the reason without its line number, and the releases that share both."""
    shared: dict[tuple[str, str], list[str]] = {}
    for release in releases:
        cases: dict[str, list[str]] = {}
        for result in release.unverified:
            cases.setdefault(re.sub(r":\d+$", "", result.reason), []).append(result.case.name)
        for reason, names in cases.items():
            told = (
                quoted(names) if len(names) <= MOST_NAMES else f"{len(names)} cases: {quoted(names[:2])}, ..."
            )
            shared.setdefault((told, reason), []).append(release.version)
    versions = [release.version for release in releases]
    return [(names, f"`{reason}`", ranges(those, versions)) for (names, reason), those in shared.items()]


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def ranges(some: Sequence[str], all_of_them: Sequence[str]) -> str:
    """Those of a list that are meant, neighbours as ``first to last``."""
    runs: list[list[str]] = []
    for number, item in enumerate(all_of_them):
        if item in some:
            if number and all_of_them[number - 1] in some:
                runs[-1].append(item)
            else:
                runs.append([item])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def run_versions(first: str) -> list[Release]:
    """Every release from ``first`` on.

    Raises:
        NotVerifiedError: a release could not be brought here.
        SystemExit: a worker failed, which says nothing of the release.
    """
    cases, releases = load_suite(SUITE), []
    for number in released_versions():
        if Version(number) < Version(first):
            continue
        engine = load_engine(f"sglang=={number}", side="after")
        try:
            results = [result for (result,) in check_cases(cases, [engine])]
        finally:
            stop_engine(engine)
        if broken := next((r.reason for r in results if "the worker process" in r.reason), None):
            raise SystemExit(f"sglang=={number}: {broken}")
        modes = frozenset(told["mode"] for told in getattr(engine, "loaded", {}).values())
        releases.append(Release(number, results, modes))
        sys.stderr.write(f"{number}: {dict(Counter(result.verdict for result in results))}\n")
    return releases


# The document


def replaced(text: str, name: str, lines: Sequence[str]) -> str:
    """The document's text with another part ``name``."""
    begin, end = (f"<!-- {name}: {edge} -->\n" for edge in ("begin", "end"))
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"{DOCUMENT.name} must have {begin.strip()} and {end.strip()} once each")
    before, rest = text.split(begin)
    return "\n".join([f"{before}{begin}", *lines, "", f"{end}{rest.split(end)[1]}"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", choices=("lists", "versions"))
    parser.add_argument("--from", dest="first", default=FIRST, metavar="VERSION")
    arguments = parser.parse_args()
    if arguments.parts == "lists":
        parts = {name: make() for name, make in LISTS.items()}
    else:
        parts = {"versions": versions_part(run_versions(arguments.first))}
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, lines in parts.items():
        text = replaced(text, name, lines)
    DOCUMENT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
