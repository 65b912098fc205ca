"""The JSON Schema of a report, which is also where the columns of its tables are written down."""

from __future__ import annotations

from pathlib import Path


def schema_text() -> str:
    return Path(__file__).with_name("report.schema.json").read_text(encoding="utf-8")


def columns(table: str) -> list[str]:
    """Column names of a report table, in order.

    Raises:
        KeyError: a report has no such table.
    """
    import json

    rows = json.loads(schema_text())["properties"]["tables"]["properties"][table]["items"]
    return list(rows["properties"])
