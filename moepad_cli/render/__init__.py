"""One file an output format: ``render(report) -> str``, all from the same report."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moepad_cli.render import csv, html, json, junit, markdown, table
from repro.report import Report

RENDERERS: Mapping[str, Callable[[Report], str]] = {
    "table": table.render,
    "markdown": markdown.render,
    "json": json.render,
    "csv": csv.render,
    "junit": junit.render,
    "html": html.render,
}
