"""Where a result was made: versions and the kind of machine, no host names, no paths."""

from __future__ import annotations

import platform
import sys


def version() -> str:
    """The installed distribution's version, or ``unknown`` in a source tree that was not installed."""
    from importlib import metadata

    try:
        return metadata.version("moepad")
    except metadata.PackageNotFoundError:
        return "unknown"


def environment(device: str | None = None) -> dict[str, str]:
    """``environment`` of a report. Torch's version is given only where the command has loaded torch."""
    found = {"moepad": version(), "python": platform.python_version()}
    if torch := sys.modules.get("torch"):
        found["torch"] = str(torch.__version__)
    found["platform"] = f"{platform.system()} {platform.machine()}"
    found["device"] = device or "cpu"
    return found
