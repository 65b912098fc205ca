"""A scenario: everything that decides a run, and nothing else. Reads and writes TOML and JSON; no torch."""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from repro._files import read_bounded
from repro.errors import FieldError, ScenarioError, ScenarioFileError
from repro.plan import DpPadding, PaddingPlan, plan_padding

DEFAULT_BUCKET = 64
MAX_INT = 2**31 - 1  # num_token_non_padded is int32
MAX_CELLS = 2**27  # rows x max(experts, hidden size) over all DP ranks: half a GiB of float32
MAX_RANKS = 4096
MAX_FILE_BYTES = 1 << 20

BRANCHES = ("custom", "grouped", "biased-grouped", "softmax", "sigmoid", "sqrt-softplus", "torch-native")
ROUTERS = ("softmax", "sigmoid-top1", "softcap", "sparse-mixer", "grouped", "degenerate")
PAD_FILLS = ("zeros", "constant", "random", "nan", "inf", "stale")


def _option(default: Any, help_text: str, panel: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help_text, "panel": panel, "choices": choices})


_BATCH, _ROUTING, _SERVER = "Batch", "Routing", "Server"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Every field is a command-line option of the same name, and a key of a scenario file.

    Raises:
        ScenarioError: a value of the wrong type, out of range, or in contradiction with another.
    """

    tokens: tuple[int, ...] = _option((20, 13), "Real tokens of each DP rank; 0 is an idle rank.", _BATCH)
    attn_tp: int = _option(4, "Attention-TP size.", _SERVER)
    bucket: int | None = _option(None, f"Captured size of the graph. (default: {DEFAULT_BUCKET})", _BATCH)
    buckets: tuple[int, ...] = _option((), "Captured sizes; the smallest that fits is taken.", _BATCH)
    raw_length: int | None = _option(
        None, "Padded length before the bucket. (default: from the tokens)", _BATCH
    )
    align: int = _option(1, "Extra multiple that lengths are aligned to, e.g. the prefill-CP size.", _SERVER)
    dp_padding: DpPadding = _option(
        "max-len", "DP ranks padded to the longest, or each to its own.", _SERVER, ("max-len", "sum-len")
    )
    max_padding_factor: float | None = _option(
        None, "Run eagerly where the bucket is more than this many times the length.", _SERVER
    )
    replicated: bool = _option(False, "The forward is not sharded: all rows on every rank.", _SERVER)
    require_gathered_buffer: bool = _option(
        True, "The DP path gathers, so that counts are local to a rank.", _SERVER
    )
    enable_prefill_cp: bool = _option(False, "Prefill context parallelism: counts stay whole.", _SERVER)
    mode: str = _option("prefill", "Which graph registry is used.", _BATCH, ("prefill", "decode"))
    tokens_per_request: int = _option(1, "Rows of one request in decode (speculative: more than 1).", _BATCH)
    pad_fill: str = _option("stale", "What the pad rows hold.", _BATCH, PAD_FILLS)
    platform: Literal["cuda", "hip"] = _option(
        "cuda", "Whose mask: ids -1, or ids 0 with zero weights.", _ROUTING, ("cuda", "hip")
    )
    branch: str = _option("custom", "Branch of select_experts.", _ROUTING, BRANCHES)
    router: str = _option(
        "softmax",
        f"Routing function of the custom branch: {', '.join(ROUTERS)}, module:function or file.py:function.",
        _ROUTING,
    )
    experts: int = _option(16, "Logical experts.", _ROUTING)
    top_k: int = _option(2, "Routed experts of a row.", _ROUTING)
    num_expert_group: int = _option(4, "Groups of experts, for grouped routing.", _ROUTING)
    topk_group: int = _option(2, "Groups that a row may choose from.", _ROUTING)
    renormalize: bool = _option(True, "Weights of a row sum to one.", _ROUTING)
    routed_scaling_factor: float = _option(1.0, "Divides the shared experts' weight.", _ROUTING)
    num_fused_shared_experts: int = _option(0, "Shared experts appended as columns.", _ROUTING)
    eplb: Literal["none", "static", "dynamic"] = _option(
        "none", "Logical to physical remap.", _ROUTING, ("none", "static", "dynamic")
    )
    redundant_experts: int = _option(0, "Physical experts beyond the logical ones (with --eplb).", _ROUTING)
    id_dtype: str = _option("int32", "Ids of the built-in routers.", _ROUTING, ("int32", "int64"))
    weight_dtype: str = _option(
        "float32", "Weights of the built-in routers.", _ROUTING, ("float32", "bfloat16", "float16")
    )
    hidden_size: int = _option(16, "Width of the hidden states.", _BATCH)
    seed: int = _option(0, "Seed of all random contents.", _BATCH)

    def __post_init__(self) -> None:
        _check_types(self)
        _check_batch(self)
        _check_routing(self)
        plan = self.plan()
        cells = sum(rank.padded_num_tokens for rank in plan.ranks) * max(self.experts, self.hidden_size)
        if cells > MAX_CELLS:
            raise ScenarioError(
                "tokens",
                f"{cells:,} values (padded rows of all DP ranks x experts) are more than the {MAX_CELLS:,} "
                "that a run holds; give fewer tokens, smaller buckets or fewer experts",
            )

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        return self.buckets or (self.bucket or DEFAULT_BUCKET,)

    @property
    def sharded(self) -> bool:
        """Whether each attention-TP rank owns a part of the rows; else all ranks hold all of them."""
        return self.require_gathered_buffer and not self.enable_prefill_cp and not self.replicated

    def plan(self) -> PaddingPlan:
        """The padding plan of the batch.

        Raises:
            PlanError: as ``plan_padding``.
        """
        return plan_padding(
            self.tokens,
            attn_tp_size=self.attn_tp,
            buckets=self.captured_sizes,
            raw_length=self.raw_length,
            align=self.align,
            dp_padding=self.dp_padding,
            max_padding_factor=self.max_padding_factor,
            sharded=self.sharded,
        )

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, as JSON values; the bucket is the one that is used."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if not self.buckets:
            values["bucket"] = self.captured_sizes[0]
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_toml(self) -> str:
        """Every field that has a value, one key a line (TOML has no null)."""
        # JSON spells numbers, booleans, lists of integers and plain strings as TOML does.
        lines = [
            f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
            for name, value in self.to_dict().items()
            if value is not None and value != []
        ]
        return "".join(lines)


def read_scenario_values(path: Path) -> dict[str, Any]:
    """The fields that a scenario file sets: TOML, or JSON where the text begins with ``{``.

    Raises:
        ScenarioFileError: unreadable, over 1 MiB, malformed, an unknown key, or a value no scenario can have;
            with the line.
    """
    text = _read_text(path)
    try:
        values = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (ValueError, RecursionError) as err:
        raise ScenarioFileError(f"{path}: {err}") from err
    known = [f.name for f in fields(Scenario)]
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(known)}"
            raise ScenarioFileError(f"{path}: {_line_of(text, name)}unknown key '{name}'; {hint}")
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if v is not None}
    for name in values:
        # One key at a time first, so that a bad value is told with its own line.
        try:
            _check_field(name, values[name])
        except ScenarioError as err:
            raise ScenarioFileError(f"{path}: {_line_of(text, name)}{err}") from err
    return values


def scenario_from_values(values: Mapping[str, Any]) -> Scenario:
    """A scenario of the fields in ``values`` as JSON spells them: lists for tuples.

    Raises:
        ScenarioError: as ``Scenario``, or an unknown field.
    """
    for name in values:
        if name not in _FIELDS:
            raise ScenarioError(name, "no field of a scenario")
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return Scenario(**given)


def read_scenario(path: Path) -> Scenario:
    """A scenario file as a Scenario; fields that it does not set keep their defaults.

    Raises:
        ScenarioFileError: as ``read_scenario_values``, or fields that contradict each other.
    """
    values = read_scenario_values(path)
    try:
        return scenario_from_values(values)
    except FieldError as err:
        raise ScenarioFileError(f"{path}: {err}") from err


def _read_text(path: Path) -> str:
    data = read_bounded(path, MAX_FILE_BYTES, ScenarioFileError)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise ScenarioFileError(f"{path}: not UTF-8 text (byte {err.start})") from err


def _line_of(text: str, name: str) -> str:
    pattern = re.compile(rf"""^\s*(?:\[+\s*)?["']?{re.escape(name)}["']?\s*[=:\].]""")
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.match(line):
            return f"line {number}: "
    return ""


def _whole(least: int, most: int = MAX_INT) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if type(value) is not int:
            raise ScenarioError(name, f"{value!r} is not a whole number")
        if not least <= value <= most:
            raise ScenarioError(name, f"{value} is out of range; give {least} to {most}")

    return check


def _whole_list(least: int) -> Callable[[str, Any], None]:
    one = _whole(least)

    def check(name: str, value: Any) -> None:
        if not isinstance(value, tuple):
            raise ScenarioError(name, f"{value!r} is not a list of whole numbers, such as [20, 13]")
        for item in value:
            one(name, item)

    return check


def _positive(name: str, value: Any) -> None:
    if type(value) not in (int, float):
        raise ScenarioError(name, f"{value!r} is not a number")
    if not (math.isfinite(value) and value > 0):
        raise ScenarioError(name, f"{value} is out of range; give a finite number above 0")


def _flag(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise ScenarioError(name, f"{value!r} is not true or false")


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ScenarioError(name, f"{value!r} is not a name")


_CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "tokens": _whole_list(0),
    "buckets": _whole_list(1),
    "bucket": _whole(1),
    "raw_length": _whole(1),
    "attn_tp": _whole(1, MAX_RANKS),
    "align": _whole(1),
    "tokens_per_request": _whole(1),
    "experts": _whole(1, 65_536),
    "top_k": _whole(1, 65_536),
    "num_expert_group": _whole(1),
    "topk_group": _whole(1),
    "num_fused_shared_experts": _whole(0, 64),
    "redundant_experts": _whole(0, 65_536),
    "hidden_size": _whole(1, 65_536),
    "seed": _whole(0),
    "max_padding_factor": _positive,
    "routed_scaling_factor": _positive,
    "replicated": _flag,
    "require_gathered_buffer": _flag,
    "enable_prefill_cp": _flag,
    "renormalize": _flag,
    "router": _text,
}
_FIELDS = {f.name: f for f in fields(Scenario)}


def _check_field(name: str, value: Any) -> None:
    choices = _FIELDS[name].metadata["choices"]
    if choices:
        if value not in choices:
            raise ScenarioError(name, f"{value!r} is not one of {', '.join(choices)}")
    else:
        _CHECKS[name](name, value)


def _check_types(scenario: Scenario) -> None:
    for name, definition in _FIELDS.items():
        value = getattr(scenario, name)
        if value is not None or definition.default is not None:
            _check_field(name, value)


def _check_batch(s: Scenario) -> None:
    if s.bucket is not None and s.buckets:
        raise ScenarioError("buckets", "given together with bucket; give one of them")
    if len(s.tokens) * s.attn_tp > MAX_RANKS:
        raise ScenarioError(
            "attn_tp", f"{len(s.tokens)} DP x {s.attn_tp} attention-TP ranks are more than {MAX_RANKS}"
        )
    if s.mode == "decode":
        for name, values in (("tokens", s.tokens), ("buckets" if s.buckets else "bucket", s.captured_sizes)):
            for value in values:
                if value % s.tokens_per_request:
                    raise ScenarioError(
                        name, f"{value} rows are no multiple of the {s.tokens_per_request} tokens per request"
                    )
    elif s.tokens_per_request != 1:
        raise ScenarioError("tokens_per_request", "means something in decode only; add mode decode")


def _check_routing(s: Scenario) -> None:
    if s.top_k > s.experts:
        raise ScenarioError("top_k", f"{s.top_k} is more than the {s.experts} experts")
    router = s.router if s.branch == "custom" else ""
    if s.branch in ("grouped", "biased-grouped") or router == "grouped":
        if s.experts % s.num_expert_group:
            raise ScenarioError(
                "num_expert_group",
                f"{s.experts} experts cannot be cut into {s.num_expert_group} equal groups",
            )
        size = s.experts // s.num_expert_group
        if s.topk_group > s.num_expert_group:
            raise ScenarioError("topk_group", f"{s.topk_group} is more than the {s.num_expert_group} groups")
        if s.top_k > s.topk_group * size:
            raise ScenarioError(
                "top_k", f"{s.top_k} is more than the {s.topk_group * size} experts of {s.topk_group} groups"
            )
        if s.branch == "biased-grouped" and size < 2:
            raise ScenarioError(
                "num_expert_group", "biased grouped routing needs two experts a group or more"
            )
    for name, needed in (("sigmoid-top1", 1), ("sparse-mixer", 2)):
        if router == name and s.top_k != needed:
            raise ScenarioError("top_k", f"router {name} chooses {needed} a row; give {needed}")
    if s.eplb == "none" and s.redundant_experts:
        raise ScenarioError(
            "redundant_experts", "means something with a remap only; add eplb static or dynamic"
        )
    if s.eplb != "none" and s.branch == "torch-native":
        raise ScenarioError("eplb", "branch torch-native takes no remap")
