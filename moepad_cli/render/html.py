"""One self-contained page: no script, nothing from the network."""

from __future__ import annotations

from pathlib import Path

from moepad_cli.render.text import alignments, cell, on_one_line, place_of, printable
from repro.report import Report


def render(report: Report) -> str:
    """Needs jinja2."""
    import json

    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["printable"] = printable
    template = environment.from_string(Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8"))
    views = [
        {
            "title": view.title,
            "columns": list(zip(view.headings, alignments(view), strict=True)),
            "rows": [list(zip(map(cell, row), alignments(view), strict=True)) for row in view.rows],
            "notes": printable(view.note).splitlines(),
        }
        for view in report.views
    ]
    return template.render(
        report=report,
        verdict=on_one_line(report.verdict.summary),
        heading="\n".join(map(on_one_line, report.heading)),
        views=views,
        findings=[(finding, place_of(finding)) for finding in report.findings],
        scenario=[(name, json.dumps(value)) for name, value in report.scenario.items()],
    )
