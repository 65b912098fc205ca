"""A scenario: everything that decides a run, and nothing else. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from repro.errors import ScenarioError, shown
from repro.plan import DpPadding, PaddingPlan, plan_padding

DEFAULT_BUCKET = 64
MAX_INT = 2**31 - 1  # num_token_non_padded is int32
MAX_RANKS = 4096
MAX_NAME = 4096

# What a run may cost, so that one that is asked for too large is refused and does not swallow the machine.
MAX_CELLS = 2**25  # padded rows x (hidden size + experts): 128 MiB of float32, several times over while made
MAX_ORACLE = 2**24  # real rows x experts, scored one by one in Python: about 10 s
MAX_BUFFER_ROWS = 2**25  # rows of the graph buffers of all ranks
MAX_ROUTES = 2**23  # rows of all ranks x ids of a row

BRANCHES = ("custom", "grouped", "biased-grouped", "softmax", "sigmoid", "sqrt-softplus", "torch-native")
ROUTERS = ("softmax", "sigmoid-top1", "softcap", "sparse-mixer", "grouped", "degenerate")
PAD_FILLS = ("zeros", "constant", "random", "nan", "inf", "stale")


def _option(
    default: Any, help_text: str, panel: str, choices: tuple[str, ...] = (), *, off_help: str = ""
) -> Any:
    """``off_help`` is the text of the ``--no-`` flag of a field that is True by default."""
    metadata = {"help": help_text, "panel": panel, "choices": choices, "off_help": off_help}
    return field(default=default, metadata=metadata)


_BATCH, _ROUTING, _SERVER = "Batch", "Routing", "Server"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Every field is a command-line option of the same name, and a key of a scenario file.

    Raises:
        ScenarioError: a value of the wrong type, out of range, or in contradiction with another.
    """

    tokens: tuple[int, ...] = _option(
        (20, 13), "Real tokens, one number for each DP rank; 0 is idle.", _BATCH
    )
    attn_tp: int = _option(4, "Attention-TP size.", _SERVER)
    bucket: int | None = _option(
        None, f"Captured size of the graph, in rows. (default: {DEFAULT_BUCKET})", _BATCH
    )
    buckets: tuple[int, ...] = _option(
        (), "Captured sizes, in rows; the smallest that fits is taken.", _BATCH
    )
    raw_length: int | None = _option(
        None, "Padded length before the bucket. (default: from the tokens)", _BATCH
    )
    align: int = _option(1, "Extra multiple that lengths are aligned to, e.g. the prefill-CP size.", _SERVER)
    dp_padding: DpPadding = _option(
        "max-len",
        "MAX_LEN pads every DP rank to the longest, SUM_LEN leaves each its own length.",
        _SERVER,
        ("max-len", "sum-len"),
    )
    max_padding_factor: float | None = _option(
        None, "Replay no graph where the bucket is more than this many times the length.", _SERVER
    )
    replicated: bool = _option(
        False, "The forward is not cut into shards: every rank holds all rows.", _SERVER
    )
    require_gathered_buffer: bool = _option(
        True,
        "The DP path gathers, so that counts are local to a rank.",
        _SERVER,
        off_help="The DP path does not gather: counts stay whole.",
    )
    enable_prefill_cp: bool = _option(
        False, "Prefill context parallelism: counts stay whole, and every rank holds all rows.", _SERVER
    )
    mode: str = _option("prefill", "Whose graphs are replayed.", _BATCH, ("prefill", "decode"))
    tokens_per_request: int = _option(
        1, "Rows of one request in decode; more than 1 with speculative decoding.", _BATCH
    )
    pad_fill: str = _option(
        "stale",
        "What the pad rows hold; stale is what an earlier, longer batch left there.",
        _BATCH,
        PAD_FILLS,
    )
    platform: Literal["cuda", "hip"] = _option(
        "cuda",
        "Whose mask: cuda (NVIDIA) sets the ids of pad rows to -1, hip (AMD) to 0 with zero weights.",
        _ROUTING,
        ("cuda", "hip"),
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
    renormalize: bool = _option(
        True,
        "Make the weights of a row sum to one.",
        _ROUTING,
        off_help="Leave the weights of a row as scored.",
    )
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
        _check_cost(self)

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        return self.buckets or (self.bucket or DEFAULT_BUCKET,)

    @property
    def gathered(self) -> bool:
        """Whether counts are localised to attention-TP ranks at all."""
        return self.require_gathered_buffer and not self.enable_prefill_cp

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
            gathered=self.gathered,
            sharded=not self.replicated,
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


def _whole(least: int, most: int = MAX_INT) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if type(value) is not int:
            raise ScenarioError(name, f"{shown(value)} is not a whole number")
        if not least <= value <= most:
            raise ScenarioError(name, f"{shown(value)} is out of range; give {least} to {most}")

    return check


def _whole_list(least: int) -> Callable[[str, Any], None]:
    one = _whole(least)

    def check(name: str, value: Any) -> None:
        if not isinstance(value, tuple):
            raise ScenarioError(name, f"{shown(value)} is not a list of whole numbers, such as [20, 13]")
        for item in value:
            one(name, item)

    return check


def _number(least: float, most: float) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if type(value) not in (int, float):
            raise ScenarioError(name, f"{shown(value)} is not a number")
        if not least <= value <= most:
            raise ScenarioError(name, f"{shown(value)} is out of range; give {least:g} to {most:g}")

    return check


def _flag(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise ScenarioError(name, f"{shown(value)} is not true or false")


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > MAX_NAME:
        raise ScenarioError(name, f"{shown(value)} is not a name of printable characters, {MAX_NAME} at most")


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
    "max_padding_factor": _number(1, 1e6),
    # Beyond these, a shared expert's weight leaves the range of float16.
    "routed_scaling_factor": _number(0.01, 1000),
    "replicated": _flag,
    "require_gathered_buffer": _flag,
    "enable_prefill_cp": _flag,
    "renormalize": _flag,
    "router": _text,
}
_FIELDS = {f.name: f for f in fields(Scenario)}


def check_field(name: str, value: Any) -> None:
    """One field on its own.

    Raises:
        ScenarioError: a value of the wrong type or out of range.
    """
    choices = _FIELDS[name].metadata["choices"]
    if choices:
        if value not in choices:
            raise ScenarioError(name, f"{shown(value)} is not one of {', '.join(choices)}")
    else:
        _CHECKS[name](name, value)


def _check_types(scenario: Scenario) -> None:
    for name, definition in _FIELDS.items():
        value = getattr(scenario, name)
        if value is not None or definition.default is not None:
            check_field(name, value)


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
                        name,
                        f"{value} rows are no multiple of {s.tokens_per_request} tokens per request; count rows",
                    )
    elif s.tokens_per_request != 1:
        raise ScenarioError("tokens_per_request", "means something in decode only; set mode to decode")


def _check_cost(s: Scenario) -> None:
    plan = s.plan()
    padded = sum(rank.padded_num_tokens for rank in plan.ranks)
    routes = sum(shard.rows for shard in plan.shards) * (s.top_k + s.num_fused_shared_experts)
    for cost, most, what in (
        (padded * (s.hidden_size + s.experts), MAX_CELLS, "padded rows x (experts + hidden size)"),
        (sum(s.tokens) * s.experts, MAX_ORACLE, "tokens x experts"),
        (padded * s.attn_tp, MAX_BUFFER_ROWS, "padded rows x attention-TP ranks"),
        (routes, MAX_ROUTES, "rows of all ranks x experts of a row"),
    ):
        if cost > most:
            raise ScenarioError(
                "tokens",
                f"{what} come to {cost:,}, more than the {most:,} that a run takes; "
                "give fewer tokens, smaller buckets, fewer ranks or fewer experts",
            )


def _check_routing(s: Scenario) -> None:
    if s.top_k > s.experts:
        raise ScenarioError("top_k", f"{s.top_k} is more than the {s.experts} experts")
    if s.branch != "custom" and s.router != ROUTERS[0]:
        raise ScenarioError(
            "router", f"is called on branch custom only, not on {s.branch}; leave one of them out"
        )
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
            "redundant_experts", "means something with a remap only; set eplb to static or dynamic"
        )
    if s.eplb != "none" and s.branch == "torch-native":
        raise ScenarioError("eplb", "branch torch-native takes no remap")
