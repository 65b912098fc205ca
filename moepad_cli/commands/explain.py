"""``moepad explain``: the catalogue of finding codes."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from moepad_cli.environment import environment
from moepad_cli.errors import UsageError, did_you_mean
from moepad_cli.options import with_output
from repro.findings import CATALOGUE, FindingKind
from repro.report import Report, Row, Verdict, View


def register(app: typer.Typer) -> None:
    app.command("explain")(explain)


@with_output(main_table="catalogue", checks=False)
def explain(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="CODE",
            help="A code or its name, such as PAD001 or pad-row-routed.",
            autocompletion=lambda incomplete: [c for c in CATALOGUE if c.startswith(incomplete.upper())],
            show_default=False,
        ),
    ] = None,
) -> Report:
    """Explain a finding code, or list them all."""
    kinds = list(CATALOGUE.values()) if code is None else [_find(code)]
    return Report(
        command="explain",
        scenario={},
        environment=environment(),
        findings=(),
        tables={"catalogue": [_row(kind) for kind in kinds]},
        main_table="catalogue",
        verdict=Verdict("ok", 0),
        views=(_list(kinds),) if code is None else (),
        page="" if code is None else kinds[0].page.rstrip("\n"),
    )


def _find(text: str) -> FindingKind:
    for kind in CATALOGUE.values():
        if text.casefold() in (kind.code.casefold(), kind.name.casefold()):
            return kind
    names = [*CATALOGUE, *(kind.name for kind in CATALOGUE.values())]
    word = text.upper() if text[:3].casefold() == "pad" and "-" not in text else text.casefold()
    hint = did_you_mean(word, names) or "; moepad explain lists them"
    raise UsageError(f"CODE: {text!r} is not a finding code{hint}")


def _row(kind: FindingKind) -> Row:
    return {
        "code": kind.code,
        "name": kind.name,
        "severity": kind.severity,
        "summary": kind.summary,
        "checked_by": ", ".join(kind.checked_by),
        "page": kind.page,
    }


def _list(kinds: list[FindingKind]) -> View:
    rows = [
        (kind.code, kind.name, "yes" if kind.checked_by else "no", textwrap.fill(kind.summary, 34))
        for kind in kinds
    ]
    note = "moepad explain CODE tells more of one. This version looks for those with yes."
    return View("", ("code", "name", "looked\nfor", "what it says"), rows, note)
