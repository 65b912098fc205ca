"""The report's main table as CSV. The header row is there even where the table is empty."""

from __future__ import annotations

import io

from moepad_cli.schema import columns
from repro.report import Report


def render(report: Report) -> str:
    import csv

    rows = report.tables[report.main_table]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns(report.main_table), lineterminator="\n")
    writer.writeheader()
    writer.writerows(dict(row) for row in rows)
    return text.getvalue()
