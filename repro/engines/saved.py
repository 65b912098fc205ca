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
from repro.errors import MAX_TEXT, FieldError, NotVerifiedError, RunFileError, one_line, shown
from repro.scenario import Scenario, scenario_from_values

FORMAT = "moepad-run"
FORMAT_VERSION = 1
MAX_FILE_BYTES = 1 << 26
MAX_NAME = 200
INT32_MAX = 2**31 - 1
_DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (torch.int32, torch.int64, torch.float64, torch.float32, torch.float16, torch.bfloat16)
}

# Ids and weights [n, K] of each DP rank's real rows, each row routed alone by a user's own function.
Reference = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class SavedCase:
    """``reference`` is None where the routing is built in."""

    inputs_sha256: str
    observation: Observation
    reference: Reference | None


@dataclass(frozen=True)
class SavedEngine:
    """One side of a saved run, asked like any other engine."""

    name: str
    scenario: Scenario
    path: Path
    cases: Mapping[str, SavedCase]

    def observe(self, case: Case) -> Observation:
        """The observation that was saved for this case's fault.

        Raises:
            NotVerifiedError: the run has no such case, or was made on other rows or with another router.
        """
        saved = self.cases.get(case.fault)
        if saved is None:
            raise NotVerifiedError(f"{self.path}: holds no case of fault {case.fault}")
        if saved.inputs_sha256 != inputs_digest(case):
            raise NotVerifiedError(
                f"{self.path}: was made on other rows than this scenario has here "
                "(another scenario, or another version of moepad or torch)"
            )
        if not _same_reference(saved.reference, _reference(case)):
            raise NotVerifiedError(
                f"{self.path}: router {case.scenario.router} routes single rows otherwise than it did when the run "
                "was saved, so that the run cannot be judged by it"
            )
        return saved.observation


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
                "reference": _write_reference(_reference(case)),
                "before": _write_observation(before),
                "after": _write_observation(after),
            }
            for case, before, after in cases
        ],
    }


def read_run(path: Path, *, engine: str | None, side: str) -> SavedEngine:
    """One side of a saved run: that of the engine named, or else ``side``, ``before`` or ``after``.

    Raises:
        RunFileError: unreadable, over 64 MiB, no saved run, damaged, or without that engine.
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
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as err:
        if isinstance(err, RunFileError):
            raise
        raise RunFileError(f"{path}: damaged or no saved run: {one_line(err)}") from err


def _read_document(document: Any, path: Path, engine: str | None, side: str) -> SavedEngine:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RunFileError(f"{path}: no saved run; give a file that --save wrote")
    version = document["format_version"]
    if type(version) is not int or version != FORMAT_VERSION:
        raise RunFileError(f"{path}: format version {shown(version)}; this moepad reads {FORMAT_VERSION}")
    if not isinstance(document["scenario"], dict):
        raise TypeError("scenario")
    scenario = scenario_from_values(document["scenario"])
    cases: dict[str, SavedCase] = {}
    for case in document["cases"]:
        fault = str(case["fault"])
        if fault in cases:
            raise RunFileError(f"{path}: holds two cases of fault {shown(fault)}; make the run again")
        sides = {which: case[which] for which in ("before", "after")}
        if engine is None:
            chosen = sides[side]
        else:
            named = [saved for saved in sides.values() if saved["engine"] == engine]
            if not named:
                names = ", ".join(dict.fromkeys(str(saved["engine"]) for saved in sides.values()))
                raise RunFileError(f"{path}: has no engine '{engine}'; it has {names}")
            chosen = named[0]
        cases[fault] = SavedCase(
            str(case["inputs_sha256"]), _read_observation(chosen), _read_reference(case["reference"])
        )
    if not cases:
        raise RunFileError(f"{path}: holds no cases")
    name = next(iter(cases.values())).observation.engine
    return SavedEngine(f"{path}#{name}", scenario, path, cases)


def _reference(case: Case) -> Reference | None:
    if case.routes_alone is None:
        return None
    reference = []
    for routes in case.routes_alone:
        shape = (len(routes), case.scenario.top_k)
        ids = torch.tensor([ids for ids, _ in routes], dtype=torch.int64).reshape(shape)
        weights = torch.tensor([weights for _, weights in routes], dtype=torch.float64).reshape(shape)
        reference.append((ids, weights))
    return reference


def _same_reference(saved: Reference | None, now: Reference | None) -> bool:
    """Ids to the letter, weights within what another CPU's rounding may change."""
    if saved is None or now is None:
        return saved is now
    return len(saved) == len(now) and all(
        torch.equal(old_ids, ids)
        and old_weights.shape == weights.shape
        and torch.allclose(old_weights, weights, rtol=1e-4, atol=1e-6, equal_nan=True)
        for (old_ids, old_weights), (ids, weights) in zip(saved, now, strict=True)
    )


def _write_reference(reference: Reference | None) -> list[dict[str, Any]] | None:
    if reference is None:
        return None
    return [{"topk_ids": _write_tensor(ids), "topk_weights": _write_tensor(w)} for ids, w in reference]


def _read_reference(saved: Any) -> Reference | None:
    if saved is None:
        return None
    return [(_read_tensor(rank["topk_ids"]), _read_tensor(rank["topk_weights"])) for rank in saved]


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
        error = rank["error"]
        if not (error is None or isinstance(error, str)):
            raise TypeError("error")
        ranks.append(
            RankObservation(
                _whole(rank["dp_rank"]),
                _whole(rank["attn_tp_rank"]),
                None if rank["num_token_non_padded"] is None else _whole(rank["num_token_non_padded"]),
                _read_tensor(rank["topk_ids"]),
                _read_tensor(rank["topk_weights"]),
                error if error is None else error[:MAX_TEXT],
            )
        )
    name = saved["engine"]
    if not isinstance(name, str) or not name.isprintable() or len(name) > MAX_NAME:
        raise TypeError("the engine's name")
    return Observation(name, tuple(ranks))


def _whole(value: object) -> int:
    if type(value) is not int or abs(value) > INT32_MAX:
        raise ValueError(f"{shown(value)}, which is no int32")
    return value


def _write_tensor(tensor: Tensor) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": base64.b64encode(tensor.contiguous().view(torch.uint8).numpy().tobytes()).decode(),
    }


def _read_tensor(saved: Mapping[str, Any]) -> Tensor:
    dtype, shape = _DTYPES[saved["dtype"]], saved["shape"]
    if not isinstance(shape, list) or len(shape) != 2 or min(map(_whole, shape)) < 0:
        raise ValueError(f"a tensor of shape {shown(shape)}")
    try:
        data = base64.b64decode(saved["data"], validate=True)
    except binascii.Error as err:
        raise ValueError(f"a tensor's data: {err}") from err
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of {len(data)} bytes where {shape} of {saved['dtype']} is said")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
