"""Routing functions: the built-in ones by name, and a user's own from a module or a file.

Legend: T rows, E experts, K top-k. The built-in ones are row-wise to the last bit, choose distinct experts
even in a row of NaN, and list them best first.
"""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from repro._scoring import choose, grouped_topk, plain_topk, renormalized, score
from repro.errors import FieldError, one_line

__all__ = ["ROUTER_NAMES", "RouterError", "RoutingFunction", "call_router", "load_router"]

Routed = tuple[Tensor, Tensor]

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Everything that a user's code may raise, a request to exit among it; only Ctrl-C is not its own.
_ANY = (Exception, SystemExit, GeneratorExit)

_SOFTCAP = 30.0
_SPARSE_MIXER_EPS = 0.01


class RouterError(FieldError):
    """A router that cannot be loaded, raises, or breaks its contract; one line. Its field is ``router``."""

    def __init__(self, problem: str) -> None:
        super().__init__("router", problem)


class RoutingFunction(Protocol):
    """SGLang's ``custom_routing_function``, called with keywords only.

    ``hidden_states`` [T, H] and ``gating_output`` [T, E] (logits) give weights [T, K], floating, and ids
    [T, K], int32 or int64, in this order.
    """

    def __call__(
        self, hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]: ...


def _softmax(logits: Tensor, topk: int, renormalize: bool) -> Routed:
    """Mixtral and Qwen3 MoE: softmax over all experts, then the best.

    arXiv:2401.04088 (as a softmax over the best alone, which is the renormalised form); SGLang
    ``layers/moe/topk.py``, ``fused_topk``.
    """
    weights, ids = plain_topk(logits, topk, scoring_func="softmax")
    return (renormalized(weights) if renormalize else weights), ids


def _sigmoid_top1(logits: Tensor, topk: int, renormalize: bool) -> Routed:
    """Llama 4: the best logit's expert, its sigmoid as weight; ``renormalize`` changes nothing.

    SGLang ``models/llama4.py``, ``Llama4MoE.custom_routing_function``.
    """
    _check_topk(topk, 1)
    ids = choose(logits, 1)
    return score(logits.gather(1, ids), "sigmoid"), ids


def _softcap(logits: Tensor, topk: int, renormalize: bool) -> Routed:
    """Grok: softmax over all experts of 30 * tanh(logit / 30), then the best.

    SGLang ``models/grok.py`` and ``layers/moe/router.py``, which never renormalise; here it can be asked for.
    """
    capped = _SOFTCAP * torch.tanh(logits.double() / _SOFTCAP)
    return _softmax(capped, topk, renormalize)


def _sparse_mixer(logits: Tensor, topk: int, renormalize: bool) -> Routed:
    """Phi MoE, at inference: twice the best expert, weighted by a softmax over those close to it.

    The second choice is made without the first. Experts count as close where
    ``(best - x) / max(|x|, best) <= 2 * 0.01``. SparseMixer-v2 of arXiv:2409.12136; SGLang
    ``models/phimoe.py``, ``sparsemixer``, which refuses to renormalise; here it can be asked for.
    """
    _check_topk(topk, 2)
    exact = logits.double()
    first = choose(logits, 1)
    left = exact.scatter(1, first, float("-inf"))
    second = choose(left, 1)
    shares = [_share_of_close(exact, scores, ids) for scores, ids in ((exact, first), (left, second))]
    weights = torch.cat(shares, dim=-1).float()
    return (renormalized(weights) if renormalize else weights), torch.cat([first, second], dim=-1)


def _share_of_close(logits: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
    best = scores.gather(1, ids)
    far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * _SPARSE_MIXER_EPS
    return scores.masked_fill(far, float("-inf")).softmax(dim=-1).gather(1, ids)


def _grouped(
    logits: Tensor, topk: int, renormalize: bool, *, num_expert_group: int, topk_group: int
) -> Routed:
    """DeepSeek-V2's group-limited routing: the best experts of the groups with the best single expert.

    arXiv:2405.04434; SGLang ``layers/moe/topk.py``, ``grouped_topk``.
    """
    weights, ids = grouped_topk(
        logits, topk, scoring_func="softmax", num_expert_group=num_expert_group, topk_group=topk_group
    )
    return (renormalized(weights) if renormalize else weights), ids


def _degenerate(logits: Tensor, topk: int, renormalize: bool) -> Routed:
    """Every row alike, whatever its logits: experts 0 to K-1, weight 1/K.

    It is what identical pad rows do to any router: all of them land on the same K experts.
    """
    rows = logits.shape[0]
    ids = torch.arange(topk, device=logits.device).expand(rows, topk)
    return torch.full((rows, topk), 1 / topk, device=logits.device), ids


_BUILT_IN: dict[str, Callable[..., Routed]] = {
    "softmax": _softmax,
    "sigmoid-top1": _sigmoid_top1,
    "softcap": _softcap,
    "sparse-mixer": _sparse_mixer,
    "grouped": _grouped,
    "degenerate": _degenerate,
}
ROUTER_NAMES: tuple[str, ...] = tuple(_BUILT_IN)


@dataclass(frozen=True)
class _BuiltInRouter:
    route: Callable[[Tensor, int, bool], Routed]
    id_dtype: torch.dtype
    weight_dtype: torch.dtype

    def __call__(self, hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> Routed:
        weights, ids = self.route(gating_output, topk, renormalize)
        return weights.to(self.weight_dtype), ids.to(self.id_dtype)


def load_router(
    spec: str,
    *,
    num_expert_group: int = 1,
    topk_group: int = 1,
    id_dtype: torch.dtype = torch.int32,
    weight_dtype: torch.dtype = torch.float32,
) -> RoutingFunction:
    """A built-in router by name, or a user's own: ``module:function`` or ``path/file.py:function``.

    The keyword arguments are for built-in ones (the first two for ``grouped``); a user's own is left alone.

    Raises:
        RouterError: an unknown name, or a module, file or function that is missing, fails or is not callable.
    """
    if spec in _BUILT_IN:
        route = _BUILT_IN[spec]
        if spec == "grouped":
            route = partial(route, num_expert_group=num_expert_group, topk_group=topk_group)
        return _BuiltInRouter(route, id_dtype, weight_dtype)
    source, colon, attribute = spec.rpartition(":")
    if not (colon and source and attribute):
        raise RouterError(f"{spec!r} is no router; {_suggestion(spec)}")
    is_file = source.endswith(".py") or "/" in source or "\\" in source
    module = _load_file(spec, Path(source)) if is_file else _import_module(spec, source)
    try:
        function = attrgetter(attribute)(module)
    except AttributeError:
        raise RouterError(f"{spec}: {source} has no {attribute!r}; {_functions_of(module)}") from None
    except _ANY as err:
        raise RouterError(f"{spec}: looking up {attribute!r} raised {one_line(err)}") from err
    if not callable(function):
        raise RouterError(f"{spec}: {attribute} is a {type(function).__name__}; give a function")
    return cast(RoutingFunction, function)


def call_router(
    function: RoutingFunction,
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    *,
    name: str,
) -> tuple[Tensor, Tensor]:
    """Weights and ids of ``function``, with the contract of ``RoutingFunction`` checked; reads no values.

    Raises:
        RouterError: the function raised (which is then the cause), or returned something else.
    """
    try:
        with _torch_undisturbed():
            answer: Any = function(
                hidden_states=hidden_states, gating_output=gating_output, topk=topk, renormalize=renormalize
            )
    except _ANY as err:
        raise RouterError(f"{name} raised {one_line(err)}") from err
    problem = _breach(answer, gating_output, topk)
    if problem:
        raise RouterError(f"{name} {problem}")
    return cast(Routed, answer)


@contextmanager
def _torch_undisturbed() -> Iterator[None]:
    """Puts back the global settings of torch that a user's code may leave changed for everybody."""
    dtype, device, grad = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None if device.type == "cpu" else device)
        torch.set_grad_enabled(grad)


def _breach(answer: Any, gating_output: Tensor, topk: int) -> str:
    wanted = "give a tuple of two tensors, (weights, ids)"
    if not isinstance(answer, tuple) or len(answer) != 2:
        size = f" of {len(answer)}" if isinstance(answer, tuple) else ""
        return f"returned a {type(answer).__name__}{size}; {wanted}"
    for value in answer:
        # A subclass may do anything when it is looked at.
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return f"returned a {type(value).__name__} in its tuple that is no plain tensor; {wanted}"
    weights, ids = answer
    if ids.is_floating_point() and not weights.is_floating_point():
        return "returned (ids, weights); give (weights, ids)"
    if weights.dtype not in WEIGHT_DTYPES:
        return f"returned weights of {weights.dtype}; give {', '.join(map(str, WEIGHT_DTYPES))}"
    if ids.dtype not in (torch.int32, torch.int64):
        return f"returned ids of {ids.dtype}; give int32 or int64"
    shape = (gating_output.shape[0], topk)
    for what, value in (("weights", weights), ("ids", ids)):
        if value.shape != shape:
            return f"returned {what} of shape {list(value.shape)}; give {list(shape)}, rows x top-k"
        if value.device != gating_output.device:
            return (
                f"returned {what} on {value.device}; give them on {gating_output.device}, as the logits are"
            )
    return ""


def _check_topk(topk: int, needed: int) -> None:
    if topk != needed:
        raise ValueError(f"top-k is {topk}, but this router chooses {needed} a row")


def _suggestion(spec: str) -> str:
    close = difflib.get_close_matches(spec.lower(), ROUTER_NAMES, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}give one of {', '.join(ROUTER_NAMES)}, or module:function, or path/file.py:function"


def _functions_of(module: ModuleType) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if callable(value)
        and not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
    ]
    return f"it defines {', '.join(own[:8])}" if own else "it defines no function"


def _import_module(spec: str, name: str) -> ModuleType:
    try:
        with _torch_undisturbed():
            return importlib.import_module(name)
    except ModuleNotFoundError as err:
        if err.name and (name == err.name or name.startswith(f"{err.name}.")):
            raise RouterError(
                f"{spec}: no module {err.name!r} can be imported; install it, or give path/file.py:function"
            ) from err
        raise RouterError(f"{spec}: importing {name} raised {one_line(err)}") from err
    except _ANY as err:
        raise RouterError(f"{spec}: importing {name} raised {one_line(err)}") from err


def _load_file(spec: str, path: Path) -> ModuleType:
    try:
        source = path.read_bytes()
    except OSError as err:
        raise RouterError(f"{spec}: cannot read {path}: {err.strerror or err}; give a Python file") from err
    module = ModuleType("moepad_router_" + re.sub(r"\W", "_", str(path.resolve())))
    module.__file__ = str(path)
    # Compiled here and not by the import system, whose cache would write beside the user's file and could
    # serve an older text of it. Listed before it runs, because dataclasses look their module up.
    sys.modules[module.__name__] = module
    try:
        with _torch_undisturbed():
            exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102
    except _ANY as err:
        sys.modules.pop(module.__name__, None)
        raise RouterError(f"{spec}: running {path} raised {one_line(err)}") from err
    return module
