"""The report's main table as CSV, without the columns that none of its rows has.

The header row is there even where the table is empty.
"""

from __future__ import annotations

import io

from moepad_cli.schema import columns
from repro.report import Report


def render(report: Report) -> str:
    import csv

    rows = report.tables[report.main_table]
    names = [name for name in columns(report.main_table) if not rows or any(name in row for row in rows)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(dict(row) for row in rows)
    return text.getvalue()
