"""Routing functions: the built-in ones by name, and a user's own from a module or a file.

Legend: T rows, E experts, K top-k. The built-in ones are row-wise to the last bit, choose distinct experts
even in a row of NaN, and list them best first.
"""

from __future__ import annotations

import difflib
import importlib
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, overrides
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext

from repro._scoring import choose, grouped_topk, plain_topk, renormalized, score
from repro.errors import FieldError, one_line

__all__ = ["ROUTER_NAMES", "RouterError", "RoutingFunction", "call_router", "load_router"]

Routed = tuple[Tensor, Tensor]

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

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
    with _user_code(f"{spec}: looking up {attribute!r}"):
        try:
            function = attrgetter(attribute)(module)
        except AttributeError:
            raise RouterError(f"{spec}: {source} has no {attribute!r}; {_functions_of(module)}") from None
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
    """Weights and ids of ``function`` as plain tensors of their own; reads no values on the host.

    Raises:
        RouterError: the function raised (which is then the cause), or broke the contract of ``RoutingFunction``.
    """
    with _user_code(name):
        answer: Any = function(
            hidden_states=hidden_states, gating_output=gating_output, topk=topk, renormalize=renormalize
        )
    with _user_code(f"{name} returned an answer; reading it"):
        problem = _breach(answer, gating_output, topk)
        if not problem:
            weights, ids = answer
            return _plain_copy(weights), _plain_copy(ids)
    raise RouterError(f"{name} {problem}")


@torch.no_grad()
def _plain_copy(tensor: Tensor) -> Tensor:
    """Neither a view nor lazy, without gradient, and out of the reach of whoever made ``tensor``."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@contextmanager
def _user_code(doing: str) -> Iterator[None]:
    """Runs a user's code: torch's global settings and modes are put back after it.

    Ctrl-C is not the code's own, nor what a handler of a signal raises to end the process; both pass through.

    Raises:
        RouterError: ``doing`` and what the code raised, in one line; or a mode of torch was left entered.
    """
    dtype, device, grad = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    stacks = [(stack, stack.modes()) for stack in (_DISPATCH_MODES, _FUNCTION_MODES)]
    left: list[str] = []
    try:
        try:
            yield
        finally:
            for stack, modes in stacks:
                left += stack.put_back(modes)
            torch.set_default_dtype(dtype)
            if torch.get_default_device() != device:
                torch.set_default_device(None if device.type == "cpu" else device)
            torch.set_grad_enabled(grad)
    except (RouterError, KeyboardInterrupt):
        raise
    except BaseException as err:
        if not isinstance(err, Exception) and _is_from_a_signal(err):
            raise
        raise RouterError(f"{doing} raised {one_line(err)}") from err
    if left:
        raise RouterError(f"{doing} left {', '.join(left)} entered; enter modes of torch in a with statement")


def _is_from_a_signal(err: BaseException) -> bool:
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(err.__traceback__))


@dataclass(frozen=True)
class _ModeStack:
    """One of torch's stacks of modes, innermost last."""

    modes: Callable[[], list[Any]]
    push: Callable[[Any], None]
    pop: Callable[[Any], object]

    def put_back(self, wanted: list[Any]) -> list[str]:
        """Makes the stack ``wanted`` again; gives the modes that were left on it, but for default devices."""
        left = []
        while (modes := self.modes()) != wanted[: len(modes)]:
            mode = modes[-1]
            if not any(mode is other for other in wanted):
                if not isinstance(mode, DeviceContext):
                    left.append(type(mode).__name__)
                with suppress(Exception):
                    mode.__exit__(None, None, None)
            if (now := self.modes()) and now[-1] is mode:
                self.pop(mode)
        for mode in wanted[len(modes) :]:
            self.push(mode)
        return left


_DISPATCH_MODES = _ModeStack(
    _python_dispatch._get_current_dispatch_mode_stack,
    _python_dispatch._push_mode,
    # Some modes have a slot of their own, by a key.
    lambda mode: _python_dispatch._pop_mode(getattr(mode, "_mode_key", None)),
)
_FUNCTION_MODES = _ModeStack(
    overrides._get_current_function_mode_stack,
    overrides._push_mode,
    lambda _mode: overrides._pop_mode(),  # type: ignore[no-untyped-call]
)


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
        # Lazy zeros, and a tensor whose storage was shrunk, have less than they say.
        if value.numel() and value.untyped_storage().nbytes() < _bytes_spanned(value):
            return f"returned {what} without the memory that their shape needs; {wanted}"
    return ""


def _bytes_spanned(tensor: Tensor) -> int:
    """From the start of the storage to the end of the last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = int(tensor.storage_offset()) + sum((size - 1) * stride for size, stride in steps)
    return (last + 1) * tensor.element_size()


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
    with _user_code(f"{spec}: importing {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as err:
            if err.name and (name == err.name or name.startswith(f"{err.name}.")):
                raise RouterError(
                    f"{spec}: no module {err.name!r} can be imported; install it, or give path/file.py:function"
                ) from err
            raise


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
        with _user_code(f"{spec}: running {path}"):
            exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102
    except BaseException:
        sys.modules.pop(module.__name__, None)
        raise
    return module
