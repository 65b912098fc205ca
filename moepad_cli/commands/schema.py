"""``moepad schema``: the JSON Schema of what ``--format json`` prints."""

from __future__ import annotations

import typer

from moepad_cli.options import add_parameters, common_parameters
from moepad_cli.output import write_stdout
from moepad_cli.schema import schema_text


def register(app: typer.Typer) -> None:
    add_parameters(schema, common_parameters())
    app.command("schema")(schema)


def schema(**_common: bool) -> None:
    """Print the JSON Schema (draft 2020-12) of the JSON format."""
    write_stdout(schema_text())
