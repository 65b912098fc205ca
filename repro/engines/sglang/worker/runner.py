"""What a tree's own runner hands to the builder of its graph buffers, read off its source; nothing of it is run."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .loader import PACKAGE
from .signatures import parameters_of
from .stubs import CannotVerify

SLOT = "num_token_non_padded"

# What a runner must hand to the registry's builder, where the builder takes it: left out there, the defaults
# rule, whatever this adapter passes.
_RUNNER_ARGUMENTS = (
    "enable_num_token_non_padded",
    "require_gathered_buffer",
    "enable_prefill_cp",
    "attn_tp_sharded_fn",
)

# What it hands over besides, which has no say in the count.
_HARMLESS_ARGUMENTS = (
    *("device", "max_bs", "max_num_token", "cache_loc_dtype", "seq_len_fill_value", "share_pool", "source"),
    *("is_multimodal", "hidden_size", "embed_dtype", "register_input_embeds", "enable_mamba_track"),
    *("is_encoder_decoder", "encoder_len_fill_value", "encoder_lens_dtype"),
    *("require_mlp_tp_gather", "num_dp_ranks", "dp_size", "register_global_num_tokens"),
)


@functools.cache
def check_runner(root: Path, mode: str, builder: Callable[..., Any]) -> None:
    """The tree's own prefill or decode runner must hand over what this adapter does.

    Raises:
        CannotVerify: no runner calls the builder, or one leaves out an argument that the builder takes, or always
            gives it the same value.
    """
    wanted = [name for name in _RUNNER_ARGUMENTS if name in parameters_of(builder)]
    folder = root / PACKAGE / "srt" / "model_executor"
    # Decode's stood in the folder itself before there was a folder of runners.
    runners = sorted(folder.glob(f"runner/*{mode}*runner*.py")) or [folder / "cuda_graph_runner.py"]
    name_of = f"build_{mode}_registry"
    calls = [(path, call) for path in runners if path.is_file() for call in _calls(path, name_of)]
    if not calls:
        raise CannotVerify(f"no {mode} runner of this tree builds the registry")
    for path, call in calls:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        for unknown in given.keys() - {*_RUNNER_ARGUMENTS, *_HARMLESS_ARGUMENTS, None}:
            raise CannotVerify(
                f"{path.name} of this tree passes {unknown} to {name_of}, which moepad does not know"
            )
        for name in wanted:
            value = given.get(name)
            if value is None:
                raise CannotVerify(f"{path.name} of this tree does not pass {name} to {name_of}")
            fixed = value.body if isinstance(value, ast.Lambda) else value
            if isinstance(fixed, ast.Constant) and not (name == f"enable_{SLOT}" and fixed.value is True):
                raise CannotVerify(
                    f"{path.name} of this tree passes {name}={ast.unparse(value)} to {name_of}"
                )


def _calls(path: Path, name: str) -> list[ast.Call]:
    text = path.read_text(encoding="utf-8", errors="replace")
    found = []
    for match in re.finditer(rf"(?<![\w`]){name}\(", text):
        depth, end = 0, match.end() - 1
        while end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
            if not depth:
                break
        try:
            parsed = ast.parse(text[match.start() : end], mode="eval").body
        except SyntaxError:
            continue
        if isinstance(parsed, ast.Call):
            found.append(parsed)
    return found
