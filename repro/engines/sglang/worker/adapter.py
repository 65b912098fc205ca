"""Asks one loaded tree: what does your graph buffer hold, and what does your ``select_experts`` give?

The tree is asked for its own signatures; version numbers decide nothing. Legend: R rows of one rank's shard,
H hidden size, E logical experts, K routed experts of a row, S shared experts.

An item, as JSON (tensors by name)::

    rank     {attn_tp_size, attn_tp_rank}
    count    null, a number, or {replay: REPLAY}, or {eager: {global, raw_num_tokens, localised}}
    route    null, or {branch, scoring_func, top_k, num_fused_shared_experts, renormalize, num_expert_group,
             topk_group, routed_scaling_factor, hidden_states, router_logits, rows: [first, end],
             router: null or {weights, ids}, correction_bias: null or name,
             dispatch: null or {ep_dispatch_algorithm, num_physical_experts, rank_map, all_map, num_valid}}
    REPLAY   {mode, require_gathered_buffer, enable_prefill_cp, sharded, tokens_per_request, bucket,
             fills: [{global, carried: null or number, raw_num_tokens}]}

``carried`` is the count that the batch brings along; null lets the tree localise it itself, against the raw
length, as it does before a replay. Fills happen in order in one buffer.

A result: ``{count, error, cannot_verify}`` with the tensors ``ids.N`` [R, K+S] and ``weights.N`` [R, K+S].
``error`` is what the tree raised when given the count; ids and weights are then those of a call without one.
The last result has what ``Session.describe`` says by then, as ``described``.
"""

from __future__ import annotations

import dis
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import native
from .kernels import EMULATIONS, KernelRefused, NotEmulated
from .loader import BATCH_INFO, PACKAGE, REGISTRY, TOPK, TreeLoader, one_line
from .runner import SLOT, check_runner
from .shims import DeviceTensor, Settings, Situation
from .signatures import accepted, member, parameters_of, positional
from .stubs import WATCH, CannotVerify, running

Item = dict[str, Any]
Tensors = dict[str, Tensor]

_DISPATCH = "sglang.srt.eplb.expert_location_dispatch"
_SHARED = "sglang.srt.configs.shared_experts"


class Session:
    """One tree on one platform; ``tree`` is the folder that holds ``sglang/``, None the installed package."""

    def __init__(self, tree: str | None, platform: str, without: Sequence[str] = ()) -> None:
        root = Path(tree) if tree is not None else _installed_root()
        self.situation = Situation(platform)
        self.note = ""
        self.loader = self._native(root) or TreeLoader(root, self.situation, without)
        self.topk = self.loader.load(TOPK)

    def _native(self, root: Path) -> native.NativeTree | None:
        """The tree as it is, where this machine can run it; ``note`` says why not, where that was tried."""
        if not native.can_be_tried(self.situation.platform):
            return None
        try:
            return native.NativeTree(root, self.situation)
        except (CannotVerify, Exception) as err:
            self.note = f"not native: {err}"
            native.forget()
            return None

    def describe(self) -> dict[str, Any]:
        """How the tree was loaded, as JSON."""
        return {
            "mode": self.loader.mode,
            "note": self.note,
            "platform": self.situation.platform,
            "real": list(self.loader.loaded),
            "shims": dict(self.loader.used),
            "kernels": [name for name in EMULATIONS if name in self.loader.used],
            "stubs": sorted(WATCH.named),
        }

    def observe(self, items: Sequence[Item], tensors: Tensors) -> tuple[list[Item], Tensors]:
        """The results of all items; what cannot be verified of one does not spoil the others."""
        results: list[Item] = []
        given: Tensors = {}
        for number, item in enumerate(items):
            result: Item = {"count": None, "error": None, "cannot_verify": None}
            try:
                self._observe(item, tensors, number, result, given)
            except (CannotVerify, KernelRefused, NotEmulated) as err:
                result["cannot_verify"] = str(err)
            except MemoryError:
                result["cannot_verify"] = "ran out of memory"
            results.append(result)
        if results:
            # Some of the tree is loaded only when it runs.
            results[-1]["described"] = self.describe()
        return results, given

    def _observe(self, item: Item, tensors: Tensors, number: int, result: Item, given: Tensors) -> None:
        self.situation.attn_tp_size = item["rank"]["attn_tp_size"]
        self.situation.attn_tp_rank = item["rank"]["attn_tp_rank"]
        count = item["count"]
        if isinstance(count, dict):
            count = self._replayed(count["replay"]) if "replay" in count else self._eager(count["eager"])
        result["count"] = count
        if item["route"] is None:
            return
        ids, weights, error = _Routing(self, item["route"], tensors).run(count)
        if error is not None:
            result["count"], result["error"] = None, error
        given[f"ids.{number}"], given[f"weights.{number}"] = ids, weights

    def module(self, name: str) -> ModuleType:
        return self.loader.load(name)

    # The count.

    def _eager(self, batch: Item) -> int:
        """What a forward without a graph reads: the batch's own count."""
        with running():
            return self._carried(batch["global"], batch["raw_num_tokens"], localised=batch["localised"])

    def _carried(self, whole: int, raw_num_tokens: int, *, localised: bool) -> int:
        """The count that a batch brings along: localised against its length where the forward is sharded."""
        if not localised:
            return whole
        compute = member(self.module(BATCH_INFO), f"compute_local_{SLOT}")
        offered = {
            f"global_{SLOT}": self._number(whole),
            "num_tokens_per_dp": raw_num_tokens,
            "sharded": True,
        }
        return _one_count(compute(**accepted(compute, offered)))

    def _replayed(self, replay: Item) -> int:
        """What the slot holds after the last fill."""
        registry_module, batch_module = self.module(REGISTRY), self.module(BATCH_INFO)
        builder = member(registry_module, f"build_{replay['mode']}_registry")
        if f"enable_{SLOT}" not in parameters_of(builder):
            raise CannotVerify(f"the {replay['mode']} registry of this tree has no slot {SLOT}")
        check_runner(self.loader.root, replay["mode"], builder)
        localised = replay["require_gathered_buffer"] and not replay["enable_prefill_cp"]
        sharded = localised and replay["sharded"]
        # As a runner's own: it knows nothing of context parallelism, which is the registry's to heed.
        gathers_sharded = replay["require_gathered_buffer"] and replay["sharded"]
        predicate = getattr(batch_module, "register_attn_tp_sequence_sharded_predicate", None)
        per_request, bucket = replay["tokens_per_request"], replay["bucket"]
        with running():
            if predicate is not None:
                predicate(lambda _num_tokens: replay["sharded"])
            registry = builder(
                **accepted(
                    builder,
                    {
                        "device": torch.device(self.loader.device),
                        "max_bs": bucket // per_request,
                        "max_num_token": bucket,
                        "cache_loc_dtype": torch.int64,
                        "seq_len_fill_value": 1,
                        f"enable_{SLOT}": True,
                        "require_gathered_buffer": replay["require_gathered_buffer"],
                        "enable_prefill_cp": replay["enable_prefill_cp"],
                        "attn_tp_sharded_fn": lambda _num_tokens: gathers_sharded,
                        "share_pool": False,
                    },
                )
            )
            slot = member(registry, "get_slot")(SLOT)
            held = _slot_buffer(slot)
            for fill in replay["fills"]:
                raw = fill["raw_num_tokens"]
                shape = {
                    "raw_bs": -(-raw // per_request),
                    "padded_bs": bucket // per_request,
                    "raw_num_tokens": raw,
                    "padded_num_tokens": bucket,
                }
                batch = self._batch(fill, replay, localised=localised, sharded=sharded)
                fill_from = member(registry, "fill_from")
                positional(fill_from, 1)
                fill_from(batch, **accepted(fill_from, shape, skip=1))
            # A graph reads the memory that it was captured with, by way of slice_for.
            read = member(slot, "slice_for")(bucket // per_request, bucket)
            for now in (_slot_buffer(slot), read):
                if (
                    not isinstance(now, Tensor)
                    or now.data_ptr() != held.data_ptr()
                    or now.shape != held.shape
                ):
                    raise CannotVerify(f"the buffer of slot {SLOT} is another after a fill than before it")
            return _one_count(held)

    def _batch(self, fill: Item, replay: Item, *, localised: bool, sharded: bool) -> Settings:
        """A batch with the attributes that released registries read, and no others."""
        whole, raw = fill["global"], fill["raw_num_tokens"]
        fields = getattr(member(self.module(BATCH_INFO), "ForwardBatch"), "__dataclass_fields__", {})
        # Before the batch had a field of its own for the whole count, decode carried that one.
        carries_whole = replay["mode"] == "decode" and f"global_{SLOT}" not in fields
        carried = fill["carried"]
        if carried is None:
            compute = member(self.module(BATCH_INFO), f"compute_local_{SLOT}")
            asks = sharded if "sharded" in parameters_of(compute) else localised
            carried = whole if carries_whole else self._carried(whole, raw, localised=asks)
        positions = torch.arange(raw, device=self.loader.device)
        requests = torch.arange(-(-raw // replay["tokens_per_request"]), device=self.loader.device)
        counts = {
            SLOT: self._number(carried),
            f"{SLOT}_cpu": whole,
            f"global_{SLOT}": self._number(whole),
            f"global_{SLOT}_cpu": whole,
        }
        return Settings(
            "forward batch",
            batch_size=len(requests),
            input_ids=positions,
            positions=positions,
            out_cache_loc=positions,
            req_pool_indices=requests,
            seq_lens=requests + 1,
            seq_lens_cpu=(requests + 1).cpu(),
            mrope_positions=None,
            # Those that the tree's own batch has; another era's name means nothing there.
            **{name: value for name, value in counts.items() if name in fields or not fields},
        )

    def _number(self, value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int32, device=self.loader.device)


class _Routing:
    """One call of ``select_experts``, prepared from an item."""

    def __init__(self, session: Session, route: Item, tensors: Tensors) -> None:
        self._session, self._route, self._tensors = session, route, tensors
        isolated = session.loader.mode == "isolated"
        self._pretends = isolated and session.situation.platform != "cpu"
        self._misasked: list[str] = []

    def run(self, count: int | None) -> tuple[Tensor, Tensor, str | None]:
        """``(ids, weights, error)``."""
        route, situation = self._route, self._session.situation
        situation.eplb = route["dispatch"] is not None
        try:
            ids, weights = self._call(count)
        except Exception as err:
            refusal = one_line(err)
            if count is None:
                raise CannotVerify(f"select_experts raised {refusal}") from err
            if not self._is_refusal(err):
                raise CannotVerify(f"select_experts raised {refusal} when given the count") from err
            try:
                ids, weights = self._call(None)
            except Exception as other:
                raise CannotVerify(
                    f"select_experts raised {one_line(other)}, with the count or without"
                ) from other
            return ids, weights, refusal
        return ids, weights, None

    def _is_refusal(self, err: Exception) -> bool:
        """Whether the tree itself said no, by ``assert`` or ``raise``, as opposed to falling over."""
        if not isinstance(err, AssertionError | NotImplementedError | ValueError | TypeError | RuntimeError):
            return False
        if err.__context__ is not None:  # it fell over, and said so in its own words
            return False
        last: TracebackType | None = err.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        if last is None or not self._session.loader.owns(last.tb_frame.f_code.co_filename):
            return False
        at = {i.offset: i.opname for i in dis.get_instructions(last.tb_frame.f_code)}
        return at.get(last.tb_lasti) == "RAISE_VARARGS"

    def _call(self, count: int | None) -> tuple[Tensor, Tensor]:
        select_experts = member(self._session.topk, "select_experts")
        first, end = self._route["rows"]
        # Copies: the code under test may write into what it is given.
        hidden_states, router_logits = (
            self._tensor(self._tensors[self._route[name]][first:end].clone())
            for name in ("hidden_states", "router_logits")
        )
        offered = {
            "hidden_states": hidden_states,
            "router_logits": router_logits,
            "topk_config": self._config(hidden_states, router_logits),
            SLOT: None if count is None else self._tensor(torch.tensor([count], dtype=torch.int32)),
            "expert_location_dispatch_info": self._dispatch_info(),
        }
        # Layers other than the first ask too.
        layer = {"layer_id": self._session.situation.attn_tp_rank % 2 * 3}
        for name in offered:
            if name not in parameters_of(select_experts):
                raise CannotVerify(f"select_experts of this tree has no parameter {name}")
        with torch.no_grad(), running(), _AllOnGpu(self._pretends):
            output = select_experts(**accepted(select_experts, offered | layer))
        if self._misasked:
            raise CannotVerify(self._misasked[0])
        ids, weights = (self._given(output, name) for name in ("topk_ids", "topk_weights"))
        return ids, weights

    def _given(self, output: Any, name: str) -> Tensor:
        value = getattr(output, name, None)
        if not isinstance(value, Tensor):
            raise CannotVerify(f"select_experts gave {type(value).__name__} for {name}, no tensor")
        return value.as_subclass(Tensor).detach().cpu().clone()

    def _tensor(self, value: Tensor) -> Tensor:
        value = value.to(self._session.loader.device)
        return value.as_subclass(DeviceTensor) if self._pretends else value

    def _config(self, hidden_states: Tensor, router_logits: Tensor) -> Any:
        route = self._route
        config = member(self._session.topk, "TopKConfig")
        shared = route["num_fused_shared_experts"]
        grouped = route["branch"] in ("grouped", "biased-grouped")
        if shared and not grouped:
            raise CannotVerify(f"select_experts appends no shared experts on branch {route['branch']}")
        bias = route["correction_bias"]
        parameters = parameters_of(config)
        offered = {
            "top_k": route["top_k"] + shared,
            "use_grouped_topk": grouped,
            "num_expert_group": route["num_expert_group"] if grouped else None,
            "topk_group": route["topk_group"] if grouped else None,
            "renormalize": route["renormalize"],
            "custom_routing_function": self._router(hidden_states, router_logits),
            "correction_bias": None if bias is None else self._tensor(self._tensors[bias]),
            "torch_native": route["branch"] == "torch-native",
            "routed_scaling_factor": route["routed_scaling_factor"],
            "scoring_func": route["scoring_func"],
        }
        if "num_fused_shared_experts" in parameters:
            offered["num_fused_shared_experts"] = shared
        elif "shared_experts" in parameters:
            layout = member(self._session.module(_SHARED), "SharedExpertsConfig")
            offered["shared_experts"] = layout(num_fused_shared_experts=shared)
        else:
            raise CannotVerify("TopKConfig of this tree takes no number of shared experts")
        for name in offered:
            if name not in parameters:
                raise CannotVerify(f"TopKConfig of this tree has no field {name}")
        return config(**accepted(config, offered))

    def _router(self, hidden_states: Tensor, router_logits: Tensor) -> Callable[..., Any] | None:
        """Gives what the routing function gave for these rows; asked for anything else, it is no answer."""
        router = self._route["router"]
        if router is None:
            return None
        asked = {
            # Copies: the tree may have written into its own before it asks.
            "hidden_states": hidden_states.clone(),
            "gating_output": router_logits.clone(),
            "topk": self._route["top_k"],
            "renormalize": self._route["renormalize"],
        }

        def custom_routing_function(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            given = dict(zip(asked, args, strict=False)) | kwargs
            for name, wanted in asked.items():
                if not _same(given.get(name), wanted):
                    self._misasked.append(f"custom_routing_function was asked with another {name}")
            if given.keys() != asked.keys():
                self._misasked.append(f"custom_routing_function was given {', '.join(given)}")
            weights, ids = (self._tensor(self._tensors[router[name]].clone()) for name in ("weights", "ids"))
            return weights, ids

        return custom_routing_function

    def _dispatch_info(self) -> Any:
        dispatch = self._route["dispatch"]
        if dispatch is None:
            return None
        info = member(self._session.module(_DISPATCH), "ExpertLocationDispatchInfo")
        offered = {
            "ep_dispatch_algorithm": dispatch["ep_dispatch_algorithm"],
            "partial_logical_to_rank_dispatch_physical_map": self._tensor(
                self._tensors[dispatch["rank_map"]]
            ),
            "partial_logical_to_all_physical_map": self._tensor(self._tensors[dispatch["all_map"]]),
            "partial_logical_to_all_physical_map_num_valid": self._tensor(
                self._tensors[dispatch["num_valid"]]
            ),
            "num_physical_experts": dispatch["num_physical_experts"],
        }
        return info(**accepted(info, offered))


class _AllOnGpu(TorchFunctionMode):
    """New tensors pass for tensors on a GPU too, where CPU tensors stand for those of a GPU."""

    def __init__(self, pretends: bool) -> None:
        super().__init__()
        self._pretends = pretends

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._pretends:
            return result
        if type(result) is Tensor:
            return result.as_subclass(DeviceTensor)
        if isinstance(result, tuple) and any(type(value) is Tensor for value in result):
            pretending = [v.as_subclass(DeviceTensor) if type(v) is Tensor else v for v in result]
            return type(result)(pretending)
        return result


def _installed_root() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise CannotVerify("sglang is not installed in this environment; give sglang==VERSION or sglang@PATH")
    return Path(places[0]).parent


def _slot_buffer(slot: Any) -> Tensor:
    buffer = member(slot, "buffer")
    if not isinstance(buffer, Tensor) or buffer.dtype != torch.int32 or buffer.numel() != 1:
        raise CannotVerify(f"slot {SLOT} of this tree holds no tensor of one int32")
    if getattr(slot, "device", None) is not None:
        raise CannotVerify(f"slot {SLOT} of this tree is kept on a device of its own, {slot.device}")
    return buffer


def _one_count(value: Any) -> int:
    if not isinstance(value, Tensor) or value.numel() != 1 or value.dtype not in (torch.int32, torch.int64):
        raise CannotVerify(f"{SLOT} of this tree is no tensor of one whole number")
    return int(value.item())


def _same(given: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Tensor):
        return type(given) is type(wanted) and given == wanted
    if not isinstance(given, Tensor) or given.shape != wanted.shape or given.dtype != wanted.dtype:
        return False
    return torch.equal(given.nan_to_num(nan=1.5), wanted.nan_to_num(nan=1.5)) and torch.equal(
        given.isnan(), wanted.isnan()
    )
