"""The rows of each rank as a strip, for a terminal."""

from __future__ import annotations

from repro.report import Report, Row

MAX_STRIPS = 32

# Where a cell stands for several rows it shows the first of these that one of them is.
_KINDS = (
    ("masked", "▄", "x", "real, but masked by the raw count"),
    ("routed", "▚", "!", "pad, but routed by the raw count"),
    ("real", "█", "#", "real"),
    ("pad", "░", ".", "pad"),
)


def draw_strips(report: Report, width: int, blocks: bool) -> str:
    """A line for each rank, a legend, and the scale where a cell stands for more than one row."""
    rows = report.tables["shard_bounds"]
    shown = rows[:MAX_STRIPS]
    labels = [f"DP{row['dp_rank']} TP{row['attn_tp_rank']}" for row in shown]
    label_width = max(map(len, labels))
    longest = max(_number(row, "row_end") - _number(row, "row_start") for row in shown)
    scale = max(-(-longest // max(width - label_width - 2, 8)), 1)
    strips = [_strip(row, scale) for row in shown]
    symbols = {kind: block if blocks else plain for kind, block, plain, _ in _KINDS}
    lines = [
        f"{label:<{label_width}}  {''.join(symbols[kind] for kind in strip)}".rstrip()
        for label, strip in zip(labels, strips, strict=True)
    ]
    if len(rows) > MAX_STRIPS:
        lines.append(f"and {len(rows) - MAX_STRIPS} more ranks")
    seen = {kind for strip in strips for kind in strip}
    lines += [f"{symbols[kind]} {meaning}" for kind, _, _, meaning in reversed(_KINDS) if kind in seen]
    if scale > 1:
        lines.append(f"one cell is {scale} rows")
    return "\n".join(lines)


def _strip(row: Row, scale: int) -> list[str]:
    """The kind of each cell of ``scale`` rows."""
    size = _number(row, "row_end") - _number(row, "row_start")
    real, count = _number(row, "real_rows"), _number(row, "count_raw")
    spans = {
        "masked": (min(count, real), real),
        "routed": (real, max(min(count, size), real)),
        "real": (0, min(count, real)),
        "pad": (max(min(count, size), real), size),
    }
    return [
        next(kind for kind, (start, end) in spans.items() if max(start, cell) < min(end, cell + scale))
        for cell in range(0, size, scale)
    ]


def _number(row: Row, column: str) -> int:
    value = row[column]
    assert isinstance(value, int)  # noqa: S101
    return value
