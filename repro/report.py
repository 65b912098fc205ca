"""The report: what a command found, in one object that every output format reads. Plain data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from repro.findings import Finding

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1

Cell = str | int | float | bool | None
Row = Mapping[str, Cell]
Status = Literal["ok", "findings", "not-verified"]


@dataclass(frozen=True)
class Verdict:
    """``status`` and the exit code that goes with it, in a few words (``summary``) and in lines."""

    status: Status
    exit_code: int
    summary: str = ""
    lines: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()


@dataclass(frozen=True)
class View:
    """One table as a person reads it: a selection of a report table, with short headings.

    ``headings`` may hold line breaks. ``note`` stands under the table, e.g. what was left out of it.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True)
class Report:
    """``tables`` is the whole data, keyed by table name; ``views`` is what the text formats print.

    ``main_table`` names the table that ``--format csv`` writes. ``blamed`` are the findings that count against
    the verdict: not those of the side before a fix. ``page`` is text in Markdown, all that there is to print.
    """

    command: str
    scenario: Mapping[str, Any]
    environment: Mapping[str, str]
    findings: tuple[Finding, ...]
    tables: Mapping[str, Sequence[Row]]
    main_table: str
    verdict: Verdict
    views: tuple[View, ...] = ()
    heading: tuple[str, ...] = ()
    page: str = ""
    blamed: tuple[Finding, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of ``--format json``: DESIGN section 5's keys, tables whole."""
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "scenario": dict(self.scenario),
            "environment": dict(self.environment),
            "findings": [asdict(finding) for finding in self.findings],
            "tables": {name: [dict(row) for row in rows] for name, rows in self.tables.items()},
            "verdict": asdict(self.verdict),
        }

    def frame(self, table: str) -> pd.DataFrame:
        """One table as a pandas DataFrame, for notebooks.

        Raises:
            KeyError: the report has no such table.
        """
        import pandas as pd

        return pd.DataFrame([dict(row) for row in self.tables[table]])
