"""Start-up of the command line, as ratios against bare programs measured in the same run.

    python benchmarks/startup.py [--rounds N] [--write FILE]

Each round runs every command once, one after the other, so that a slow moment of the machine meets all alike;
the ratio is that of the medians. Wall time of whole processes, output thrown away.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

BARE_TYPER = """
import typer

app = typer.Typer()


@app.command()
def bounds(tokens: int = 20, bucket: int = 64) -> None:
    print(tokens, bucket)


@app.command()
def other() -> None: ...


app()
"""
BOUNDS = ["shard-bounds", "--tokens", "20", "--bucket", "64", "--attn-tp", "4"]
LIMITS = {"moepad --help": 1.5, "moepad shard-bounds": 1.5, "moepad repro": 1.35}


def wall(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def measure(rounds: int) -> dict[str, float]:
    """Median seconds of each command."""
    moepad = [sys.executable, "-m", "moepad_cli"]
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare.py"
        bare.write_text(BARE_TYPER)
        commands = {
            "bare Typer command": [sys.executable, str(bare), "bounds"],
            "bare Typer --help": [sys.executable, str(bare), "--help"],
            "import torch": [sys.executable, "-c", "import torch"],
            "moepad --help": [*moepad, "--help"],
            "moepad shard-bounds": [*moepad, *BOUNDS],
            "moepad repro": [*moepad, "repro"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(rounds + 1):
            for name, command in commands.items():
                taken = wall(command)
                if number:  # the first round fills the caches
                    seconds[name].append(taken)
    return {name: statistics.median(times) for name, times in seconds.items()}


def report(rounds: int) -> dict[str, object]:
    medians = measure(rounds)
    against = {
        "moepad --help": "bare Typer command",
        "moepad shard-bounds": "bare Typer command",
        "moepad repro": "import torch",
    }
    return {
        "rounds": rounds,
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "typer": metadata.version("typer"),
        "machine": f"{platform.system()} {platform.machine()}",
        "ratios": [
            {
                "command": name,
                "against": other,
                "ratio": round(medians[name] / medians[other], 2),
                "at_most": LIMITS[name],
            }
            for name, other in against.items()
        ],
        "median_seconds": {name: round(value, 3) for name, value in medians.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    found = report(arguments.rounds)
    text = json.dumps(found, indent=2) + "\n"
    print(text, end="")
    if arguments.write:
        arguments.write.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
