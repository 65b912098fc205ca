"""Findings, and the catalogue of their codes. Every claim that the program prints is a Finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One claim with its evidence.

    ``rows`` are row numbers of the DP rank's padded batch, as ranges (``"5-15,20"``), or None where the
    finding is not about rows. ``expected`` and ``seen`` are JSON values; what they hold depends on the code.
    """

    code: str
    name: str
    severity: Severity
    engine: str
    fault: str
    dp_rank: int | None
    attn_tp_rank: int | None
    rows: str | None
    expected: Any
    seen: Any
    message: str
