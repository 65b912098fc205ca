"""Which device a run is on."""

from __future__ import annotations

from typing import Annotated

import typer

from moepad_cli import parse
from moepad_cli.errors import NotVerified
from moepad_cli.options import completer

DEVICES = ("auto", "cpu", "cuda")

DeviceOption = Annotated[
    str,
    typer.Option(
        help="Where to run; auto takes a CUDA device if there is one.",
        metavar="|".join(DEVICES),
        autocompletion=completer(DEVICES),
    ),
]


def resolve_device(text: str) -> tuple[str, str]:
    """``(device, its name in words)`` for ``auto``, ``cpu`` or ``cuda``.

    Raises:
        NotVerified: ``cuda`` where there is none.
    """
    parse.choice(text, "--device", DEVICES)
    if text == "cpu":
        return "cpu", "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda", f"cuda ({torch.cuda.get_device_name()})"
    if text == "cuda":
        raise NotVerified("--device: this torch sees no CUDA device; give cpu or auto")
    return "cpu", "cpu"
