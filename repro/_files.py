"""Files that strangers wrote, read with a bound."""

from __future__ import annotations

from pathlib import Path

from repro.errors import MoepadError


def read_bounded(path: Path, most_bytes: int, error: type[MoepadError]) -> bytes:
    """The whole file.

    Raises:
        error: it cannot be read, or is larger than ``most_bytes``.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except (OSError, ValueError) as err:  # ValueError: a NUL in the name
        raise error(f"{path}: {getattr(err, 'strerror', None) or err}") from err
    if len(data) > most_bytes:
        raise error(f"{path}: larger than {most_bytes:,} bytes")
    return data
