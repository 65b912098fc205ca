"""The report as one strict JSON document."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from repro.report import Report


def render(report: Report) -> str:
    import json

    return json.dumps(_strict(report.to_dict()), indent=2, allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become the texts ``nan``, ``inf`` and ``-inf``."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
