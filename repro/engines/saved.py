"""Saved runs: what two engines did, kept so that it can be judged again later.

A saved run is JSON. It holds observations, never verdicts: whoever reads one judges it anew against the truth
of its scenario. Ids and weights are base64 of their little-endian bytes with dtype and shape.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro._files import read_bounded
from repro.case import Case, inputs_digest
from repro.engines.protocol import Observation, RankObservation
from repro.errors import FieldError, NotVerifiedError, RunFileError
from repro.scenario import Scenario, scenario_from_values

FORMAT = "moepad-run"
FORMAT_VERSION = 1
MAX_FILE_BYTES = 1 << 29
_DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16)
}


@dataclass(frozen=True)
class SavedEngine:
    """One side of a saved run, asked like any other engine."""

    name: str
    scenario: Scenario
    path: Path
    digests: Mapping[str, str]
    observations: Mapping[str, Observation]

    def observe(self, case: Case) -> Observation:
        """The observation that was saved for this case's fault.

        Raises:
            NotVerifiedError: the run has no such case, or was made on other rows.
        """
        if case.fault not in self.observations:
            raise NotVerifiedError(f"{self.path}: holds no case of fault {case.fault}")
        if self.digests[case.fault] != inputs_digest(case):
            raise NotVerifiedError(
                f"{self.path}: was made on other rows than this scenario has here "
                "(another scenario, or another version of moepad or torch)"
            )
        return self.observations[case.fault]


def run_document(
    scenario: Scenario, cases: Sequence[tuple[Case, Observation, Observation]]
) -> dict[str, Any]:
    """A saved run as JSON values. Each case comes with the observations before and after."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "scenario": scenario.to_dict(),
        "cases": [
            {
                "fault": case.fault,
                "inputs_sha256": inputs_digest(case),
                "before": _write_observation(before),
                "after": _write_observation(after),
            }
            for case, before, after in cases
        ],
    }


def read_run(path: Path, *, engine: str | None, side: str) -> SavedEngine:
    """One side of a saved run: that of the engine named, or else ``side``, ``before`` or ``after``.

    Raises:
        RunFileError: unreadable, over 512 MiB, no saved run, damaged, or without that engine.
    """
    data = read_bounded(path, MAX_FILE_BYTES, RunFileError)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise RunFileError(f"{path}: not JSON: {err}") from err
    try:
        return _read_document(document, path, engine, side)
    except FieldError as err:
        raise RunFileError(f"{path}: its scenario is wrong: {err}") from err
    except (KeyError, TypeError, ValueError) as err:
        if isinstance(err, RunFileError):
            raise
        raise RunFileError(f"{path}: damaged or no saved run: {type(err).__name__} at {err}") from err


def _read_document(document: Any, path: Path, engine: str | None, side: str) -> SavedEngine:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RunFileError(f"{path}: no saved run; give a file that --save wrote")
    if document["format_version"] != FORMAT_VERSION:
        raise RunFileError(
            f"{path}: format version {document['format_version']}; this moepad reads {FORMAT_VERSION}"
        )
    scenario = scenario_from_values(document["scenario"])
    digests, observations = {}, {}
    for case in document["cases"]:
        sides = {which: case[which] for which in ("before", "after")}
        if engine is None:
            chosen = sides[side]
        else:
            named = [saved for saved in sides.values() if saved["engine"] == engine]
            if not named:
                names = ", ".join(dict.fromkeys(str(saved["engine"]) for saved in sides.values()))
                raise RunFileError(f"{path}: has no engine '{engine}'; it has {names}")
            chosen = named[0]
        digests[str(case["fault"])] = str(case["inputs_sha256"])
        observations[str(case["fault"])] = _read_observation(chosen)
    if not observations:
        raise RunFileError(f"{path}: holds no cases")
    name = next(iter(observations.values())).engine
    return SavedEngine(name, scenario, path, digests, observations)


def _write_observation(observation: Observation) -> dict[str, Any]:
    return {
        "engine": observation.engine,
        "ranks": [
            {
                "dp_rank": rank.dp_rank,
                "attn_tp_rank": rank.attn_tp_rank,
                "num_token_non_padded": rank.num_token_non_padded,
                "error": rank.error,
                "topk_ids": _write_tensor(rank.topk_ids),
                "topk_weights": _write_tensor(rank.topk_weights),
            }
            for rank in observation.ranks
        ],
    }


def _read_observation(saved: Mapping[str, Any]) -> Observation:
    ranks = []
    for rank in saved["ranks"]:
        count, error = rank["num_token_non_padded"], rank["error"]
        if not (count is None or type(count) is int) or not (error is None or isinstance(error, str)):
            raise TypeError("num_token_non_padded or error of a wrong type")
        ranks.append(
            RankObservation(
                int(rank["dp_rank"]),
                int(rank["attn_tp_rank"]),
                count,
                _read_tensor(rank["topk_ids"]),
                _read_tensor(rank["topk_weights"]),
                error,
            )
        )
    return Observation(str(saved["engine"]), tuple(ranks))


def _write_tensor(tensor: Tensor) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": base64.b64encode(tensor.contiguous().view(torch.uint8).numpy().tobytes()).decode(),
    }


def _read_tensor(saved: Mapping[str, Any]) -> Tensor:
    dtype, shape = _DTYPES[saved["dtype"]], saved["shape"]
    if len(shape) != 2 or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"a tensor of shape {shape}")
    try:
        data = base64.b64decode(saved["data"], validate=True)
    except binascii.Error as err:
        raise ValueError(f"a tensor's data: {err}") from err
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of {len(data)} bytes where {shape} of {saved['dtype']} is said")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
