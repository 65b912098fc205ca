"""Real engines' cost, against ``import torch`` measured in the same run.

    python benchmarks/engines.py [--rounds N] [--newest VERSION] [--write FILE]

Each round runs everything once, one after the other, so that a slow moment of the machine meets all alike; the
figures are of the medians. A tree's load is what a process that has torch takes to load the worker's code and all
modules of the tree that are loaded for real, for one platform. The releases come out of the cache, filled first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from repro.engines.sglang.locate import locate, released_versions

BEFORE, AFTER = "0.5.16", "0.5.17"
IMPORT_TORCH = [sys.executable, "-c", "import torch"]
COMPARE = ["compare", "--before", f"sglang=={BEFORE}", "--after", f"sglang=={AFTER}"]
# Prints the seconds.
LOAD = """
import sys, time
import torch
import repro.engines.sglang

start = time.perf_counter()
from repro.engines.sglang.worker.adapter import Session
from repro.engines.sglang.worker.loader import BATCH_INFO, REGISTRY

session = Session(sys.argv[1], "cuda")
session.module(REGISTRY), session.module(BATCH_INFO)
print(time.perf_counter() - start)
"""
MOST_LOAD_SECONDS, MOST_COMPARE_RATIO = 0.5, 2.2
# compare has nothing to find after the change.
VERDICTS = (0,)


def run(command: list[str], codes: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in codes:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def wall(command: list[str], codes: tuple[int, ...] = (0,)) -> float:
    start = time.perf_counter()
    run(command, codes)
    return time.perf_counter() - start


def measure(versions: list[str], rounds: int) -> dict[str, float]:
    """Median seconds: of whole processes, and of the loads alone."""
    trees = {f"load of sglang=={version}": str(locate(f"sglang=={version}").root) for version in versions}
    compare = [sys.executable, "-m", "moepad_cli", *COMPARE]
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        taken = {"import torch": wall(IMPORT_TORCH)}
        taken |= {name: float(run([sys.executable, "-c", LOAD, root])) for name, root in trees.items()}
        taken["moepad compare"] = wall(compare, VERDICTS)
        for name, value in taken.items():
            if number:  # the first round fills the caches
                seconds.setdefault(name, []).append(value)
    return {name: statistics.median(times) for name, times in seconds.items()}


def report(newest: str, rounds: int) -> dict[str, object]:
    versions = list(dict.fromkeys((BEFORE, AFTER, newest)))
    medians = measure(versions, rounds)
    return {
        "rounds": rounds,
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "loads": [
            {
                "engine": f"sglang=={version}",
                "seconds_beyond_import_torch": round(medians[f"load of sglang=={version}"], 3),
                "at_most": MOST_LOAD_SECONDS,
            }
            for version in versions
        ],
        "ratios": [
            {
                "command": f"moepad {' '.join(COMPARE)}",
                "against": "import torch",
                "ratio": round(medians["moepad compare"] / medians["import torch"], 2),
                "at_most": MOST_COMPARE_RATIO,
            }
        ],
        "median_seconds": {name: round(value, 3) for name, value in medians.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--newest", help="the third release to load; by default the newest that pip knows")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    found = report(arguments.newest or released_versions()[-1], arguments.rounds)
    text = json.dumps(found, indent=2) + "\n"
    print(text, end="")
    if arguments.write:
        arguments.write.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
