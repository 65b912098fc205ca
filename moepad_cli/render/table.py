"""Plain text for a terminal. Nothing is ever cut: a table may be wider than the terminal."""

from __future__ import annotations

from moepad_cli.render.text import (
    alignments,
    cell,
    finding_lines,
    findings_title,
    has_verdict,
    on_one_line,
    printable,
)
from repro.report import Report, View

_COLOURS = {"ok": "32", "findings": "31", "not-verified": "33"}


def render(report: Report, *, colour: bool = False, drawing: str = "") -> str:
    """``drawing`` stands under the tables; ``colour`` paints the verdict's summary."""
    blocks = [
        "\n".join(map(on_one_line, report.heading)),
        printable(report.page),
        *(_view(view) for view in report.views),
        drawing.rstrip("\n"),
    ]
    if report.findings:
        blocks.append("\n".join([findings_title(report.findings), *finding_lines(report.findings)]))
    blocks.append(_verdict(report, colour=colour))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _view(view: View) -> str:
    import tabulate

    tabulate.MIN_PADDING = 0  # headings as wide as they are: tables of ten columns fit 80
    parts = [on_one_line(view.title)]
    if view.rows:
        parts.append(
            tabulate.tabulate(
                [[cell(value) for value in row] for row in view.rows],
                headers=[printable(heading) for heading in view.headings],
                tablefmt="simple",
                disable_numparse=True,
                colalign=alignments(view),
            )
        )
    else:
        parts.append("(none)")
    parts.append(printable(view.note))
    return "\n".join(part for part in parts if part)


def _verdict(report: Report, *, colour: bool) -> str:
    lines = []
    if has_verdict(report):
        word = on_one_line(report.verdict.summary)
        if colour:
            word = f"\x1b[{_COLOURS[report.verdict.status]}m{word}\x1b[0m"
        lines += [f"verdict: {word}", *(f"  {on_one_line(line)}" for line in report.verdict.lines)]
    lines += [f"not checked: {on_one_line(reason)}" for reason in report.verdict.not_checked]
    return "\n".join(lines)
