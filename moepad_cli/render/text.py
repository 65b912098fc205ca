"""What the text formats share: cells, finding lines, verdict words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from repro.findings import Finding
from repro.report import Cell, Report, View

MAX_FINDING_LINES = 12


def printable(text: str) -> str:
    """``text`` with control characters and lone surrogates as escapes; line breaks stay."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def on_one_line(text: str) -> str:
    """``printable``, with line breaks as spaces: text of a user must not look like a line of the report."""
    return printable(text).replace("\n", " ")


def cell(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return printable(str(value))


def alignments(view: View) -> list[str]:
    """``right`` for the columns that hold numbers only, else ``left``."""
    columns = zip(*view.rows, strict=True) if view.rows else [[""]] * len(view.headings)
    return ["right" if all(_is_number(value) for value in column) else "left" for column in columns]


def _is_number(value: Cell) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """At most ``MAX_FINDING_LINES`` lines: a finding each, or else a line for each code, engine and fault."""
    groups = [[finding] for finding in findings]
    if len(findings) > MAX_FINDING_LINES:
        by_kind: dict[tuple[str, str, str], list[Finding]] = {}
        for finding in findings:
            by_kind.setdefault((finding.code, finding.engine, finding.fault), []).append(finding)
        groups = list(by_kind.values())
    lines = [finding_line(group[0], len(group) - 1) for group in groups[:MAX_FINDING_LINES]]
    left_out = sum(len(group) for group in groups[MAX_FINDING_LINES:])
    if len(lines) < len(findings):
        lines.append(
            (f"and {left_out} more; " if left_out else "") + f"--format json lists all {len(findings)}"
        )
    return lines


def findings_title(findings: Sequence[Finding]) -> str:
    """``findings: 29 (28 prefix, 1 fixed)``"""
    engines = Counter(finding.engine for finding in findings)
    parts = ", ".join(f"{count} {engine}" for engine, count in engines.items())
    return on_one_line(f"findings: {len(findings)} ({parts})")


def finding_line(finding: Finding, alike: int = 0) -> str:
    """``PAD001 pad-row-routed  fixed/mask DP0 TP1 rows 4-15: message``"""
    more = f" (and {alike} more like it)" if alike else ""
    place = [f"{finding.engine}/{finding.case or finding.fault}", place_of(finding)]
    where = " ".join(part for part in place if part)
    return on_one_line(f"{finding.code} {finding.name}  {where}: {finding.message}{more}")


def place_of(finding: Finding) -> str:
    """``DP0 TP1 rows 4-15``, as far as the finding has them."""
    parts = (("DP", finding.dp_rank), ("TP", finding.attn_tp_rank), ("rows ", finding.rows))
    return " ".join(f"{label}{value}" for label, value in parts if value is not None)


def has_verdict(report: Report) -> bool:
    """False for a report that only tells something and judges nothing."""
    return bool(report.verdict.summary)
