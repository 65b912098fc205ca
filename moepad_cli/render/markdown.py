"""Markdown as GitHub shows it, for a pull request or an issue."""

from __future__ import annotations

import re

from moepad_cli.render.text import alignments, cell, finding_lines, has_verdict, on_one_line, printable
from repro.report import Report, View


def render(report: Report) -> str:
    blocks = [f"## moepad {report.command}", *map(_escaped, report.heading), printable(report.page)]
    for view in report.views:
        blocks += _view(view)
    if report.findings:
        blocks += ["### Findings", _bullets(finding_lines(report.findings))]
    if has_verdict(report):
        blocks.append(f"**Verdict: {_escaped(report.verdict.summary)}**")
        blocks.append(_bullets(report.verdict.lines))
    blocks.append(_bullets([f"not checked: {reason}" for reason in report.verdict.not_checked]))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _view(view: View) -> list[str]:
    import tabulate

    tabulate.MIN_PADDING = 0
    table = "(none)"
    if view.rows:
        table = tabulate.tabulate(
            [[_escaped(cell(value)) for value in row] for row in view.rows],
            headers=[_escaped(heading) for heading in view.headings],
            tablefmt="github",
            disable_numparse=True,
            colalign=alignments(view),
        )
    title = f"### {_escaped(view.title)}" if view.title else ""
    return [title, table, _bullets(printable(view.note).splitlines())]


def _bullets(lines: tuple[str, ...] | list[str]) -> str:
    return "\n".join(f"- {_escaped(line)}" for line in lines)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", on_one_line(text))
