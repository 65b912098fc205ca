"""Faithful stand-ins: the few values that the tree reads from packages that are not loaded.

Each is true to what the real one gives in the situation that is asked about, and refuses everything beyond it.
``SHIMS`` is the whole list; what of it a tree used is reported with the result.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from .stubs import WATCH, CannotVerify, Stub, StubModule


@dataclass
class Situation:
    """What the shims answer by. ``platform`` is fixed for the life of the process, the rest by request.

    ``eplb`` says whether the server was started with a remap of experts.
    """

    platform: str
    attn_tp_size: int = 1
    attn_tp_rank: int = 0
    eplb: bool = False
    recorded: list[Any] = field(default_factory=list)


class Settings:
    """Named values only: a name that is not there cannot be verified, and is not None."""

    def __init__(self, _kind: str, **values: Any) -> None:
        self.__dict__["_kind"] = _kind
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise WATCH.trap(f"{self._kind}.{name}", "read")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            raise WATCH.trap(f"{self._kind}.{name}", "written")
        self.__dict__[name] = value

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class Shim:
    """``modules`` are the places that released trees import ``name`` from, below ``sglang.`` unless absolute."""

    name: str
    modules: tuple[str, ...]
    make: Callable[[Situation], Any]
    reason: str


def _platform(name: str) -> Callable[[Situation], Any]:
    return lambda situation: lambda: situation.platform == name


def _constant(value: Any) -> Callable[[Situation], Any]:
    return lambda _situation: lambda *_args, **_kwargs: value


def _get_bool_env_var(_situation: Situation) -> Any:
    def get_bool_env_var(name: str, default: str = "false") -> bool:
        return os.environ.get(name, default).lower() in ("true", "1")

    return get_bool_env_var


def _recorder(situation: Situation) -> Any:
    def on_select_experts(topk_ids: Any) -> None:
        situation.recorded.append(topk_ids)

    recorder = Settings("expert distribution recorder", on_select_experts=on_select_experts)
    return lambda: recorder


def _capturer(_situation: Situation) -> Any:
    def capture(layer_id: Any = None, topk_ids: Any = None, topk_indices: Any = None) -> None:
        """Where routed experts are captured nothing of the routing changes."""

    capturer = Settings("routed-experts capturer", capture=capture)
    return lambda: capturer


def _get_parallel(situation: Situation) -> Any:
    def get_parallel() -> Settings:
        return Settings(
            "parallel state",
            attn_tp_size=situation.attn_tp_size,
            attn_tp_rank=situation.attn_tp_rank,
        )

    return get_parallel


def _get_server_args(situation: Situation) -> Any:
    def get_server_args() -> Settings:
        if not situation.eplb:
            raise ValueError("server arguments are not published")
        return Settings(
            "server arguments",
            enable_eplb=True,
            init_expert_location="trivial",
            ep_num_redundant_experts=0,
        )

    return get_server_args


def _get_exec(situation: Situation) -> Any:
    def get_exec() -> Settings:
        moe = Settings(
            "execution settings, moe",
            enable_eplb=situation.eplb,
            init_expert_location="trivial",
            ep_num_redundant_experts=0,
        )
        return Settings("execution settings", moe=moe)

    return get_exec


def _get_flags(_situation: Situation) -> Any:
    moe = Settings("flags, moe", a2a_backend=None, runner_backend=None)
    flags = Settings("flags", moe=moe)
    return lambda: flags


_UTILS = ("srt.utils", "srt.utils.common")
_CONTEXT = ("srt.runtime_context",)

SHIMS: tuple[Shim, ...] = (
    *(
        Shim(f"is_{name}", _UTILS, _platform(name), "the platform that was asked for")
        for name in ("cuda", "hip", "cpu", "npu", "xpu", "musa")
    ),
    Shim("cpu_has_amx_support", _UTILS, _constant(False), "no AMX kernels"),
    Shim("is_gfx95_supported", _UTILS, _constant(False), "no gfx95 kernels"),
    Shim("get_bool_env_var", _UTILS, _get_bool_env_var, "defaults: the engine's variables are dropped"),
    Shim(
        "get_global_expert_distribution_recorder",
        ("srt.eplb.expert_distribution",),
        _recorder,
        "keeps what it is given",
    ),
    Shim(
        "get_global_experts_capturer",
        ("srt.state_capturer.routed_experts", "srt.layers.moe.routed_experts_capturer"),
        _capturer,
        "captures nothing",
    ),
    Shim("get_parallel", _CONTEXT, _get_parallel, "attention-TP size and rank under test"),
    Shim(
        "get_attention_tp_size",
        ("srt.layers.dp_attention",),
        lambda situation: lambda: situation.attn_tp_size,
        "attention-TP size under test",
    ),
    Shim(
        "get_attention_tp_rank",
        ("srt.layers.dp_attention",),
        lambda situation: lambda: situation.attn_tp_rank,
        "attention-TP rank under test",
    ),
    Shim(
        "get_server_args",
        _CONTEXT,
        _get_server_args,
        "published only where the scenario has a remap of experts",
    ),
    Shim(
        "get_global_server_args",
        ("srt.server_args",),
        _get_server_args,
        "published only where the scenario has a remap of experts",
    ),
    Shim("get_exec", _CONTEXT, _get_exec, "execution settings of a server with or without a remap"),
    Shim("get_flags", _CONTEXT, _get_flags, "no MoE backend chosen"),
)

# Packages that SGLang runs without: importing them fails, so that the tree's own branch for that runs.
OPTIONAL_PACKAGES = ("aiter", "deep_ep", "deep_gemm", "flashinfer", "mori", "triton_kernels")


def struct_shim() -> type:
    """A base class with what the tree's frozen ``msgspec.Struct`` classes use: fields, defaults, equality."""

    class Struct:
        _fields: tuple[str, ...] = ()

        def __init_subclass__(cls, **options: Any) -> None:
            if options != {"frozen": True}:
                raise CannotVerify(f"{cls.__name__} is a msgspec.Struct with the options {options}")
            cls._fields = tuple(cls.__annotations__)

        def __init__(self, **values: Any) -> None:
            for name in self._fields:
                if name not in values and not hasattr(type(self), name):
                    raise TypeError(f"Missing required argument '{name}'")
            for name in values:
                if name not in self._fields:
                    raise TypeError(f"Unexpected keyword argument '{name}'")
            self.__dict__.update(values)

        def __setattr__(self, name: str, _value: Any) -> None:
            raise AttributeError(f"immutable type: {type(self).__name__!r} ({name})")

        def __eq__(self, other: object) -> bool:
            mine, theirs = ([getattr(x, name, None) for name in self._fields] for x in (self, other))
            return type(self) is type(other) and mine == theirs

        def __hash__(self) -> int:
            return hash(tuple(getattr(self, name) for name in self._fields))

    return Struct


def identity_compile(model: Any = None, **_options: Any) -> Any:
    """``torch.compile`` that compiles nothing; the functions that it wraps are plain Python."""
    return model if callable(model) else lambda function: function


def stub_compile(model: Any = None, **_options: Any) -> Any:
    """What takes its place where that shim is taken away."""
    return Stub("torch.compile") if callable(model) else lambda _function: Stub("torch.compile")


def lenient_register_fake(register_fake: Any, note_use: Callable[[], object]) -> Any:
    """``torch.library.register_fake`` that passes over operators of compiled packages that are not here.

    What it registers serves tracing only; no plain call reads it.
    """

    def register(op: Any, function: Any = None, /, **options: Any) -> Any:
        namespace, _, name = op.partition("::") if isinstance(op, str) else ("", "", "")
        if namespace and not hasattr(getattr(torch.ops, namespace), name):
            note_use()
            return (lambda decorated: decorated) if function is None else function
        return register_fake(op, function, **options)

    return register


def triton_module(name: str, jit: Callable[[Any], Any] | None) -> StubModule:
    """``triton`` with a ``jit`` that gives emulated kernels, and the one helper that launchers call."""
    replacements: dict[str, Callable[[], Any]] = {}
    if jit is not None:
        replacements = {"jit": lambda: jit, "next_power_of_2": lambda: _next_power_of_2}
    return StubModule(name, replacements)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


class DeviceTensor(torch.Tensor):
    """A CPU tensor that the tree takes for one on a GPU, so that its branch for GPUs runs.

    Its ``device`` tells the truth, since new tensors are made there; ``device_of`` stands in for the tree's
    ``x.device.type``. What is computed from it is a plain tensor, until ``adapter`` makes it one of these: torch's
    own way to keep a subclass costs several times as much.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return 0


_GPU = SimpleNamespace(type="cuda", index=0)  # ROCm's torch says so too


def device_of(value: Any) -> Any:
    """``value.device``, for a look at its type or index only."""
    return _GPU if isinstance(value, DeviceTensor) else value.device


def known_device(value: Any) -> Any:
    """``value``, for a look at its type or index, unless it is a device that may stand for one of a GPU."""
    if isinstance(value, torch.device) and value.type == "cpu" and WATCH.running and WATCH.pretends:
        raise WATCH.trap("the type of a device", "read", "")
    return value


# What a tree could ask about this machine in place of its own predicates, by module. The answers would be those
# of a machine without a GPU, and lead into another branch.
_MACHINE = (
    (torch.cuda, "is_available device_count is_bf16_supported get_device_capability get_device_properties"),
    (importlib.util, "find_spec"),
    (importlib.metadata, "version"),
)


def watch_machine() -> None:
    """Lets no tree ask the machine what the situation must answer; everyone else may."""
    for module, names in _MACHINE:
        for name in names.split():
            setattr(module, name, _watched(f"{module.__name__}.{name}", getattr(module, name)))
    torch.version = sys.modules["torch.version"] = _Version(torch.version)
    namespace: Any = type(torch.ops.aten)
    namespace.__getattr__ = _watched_operators(namespace.__getattr__)


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_filename in WATCH.files:
            raise WATCH.trap(name, "called", "")
        return function(*args, **kwargs)

    return ask


class _Version(ModuleType):
    """``torch.version`` with ``cuda`` and ``hip`` hidden from the tree."""

    def __init__(self, real: ModuleType) -> None:
        super().__init__(real.__name__)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name in ("cuda", "hip") and sys._getframe(1).f_code.co_filename in WATCH.files:
            raise WATCH.trap(f"torch.version.{name}", "read", "")
        return getattr(self._real, name)


def _watched_operators(find: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def __getattr__(namespace: Any, name: str) -> Any:  # noqa: N807
        try:
            return find(namespace, name)
        except AttributeError:
            if sys._getframe(1).f_code.co_filename in WATCH.files:
                raise WATCH.trap(f"torch.ops.{namespace.name}.{name}", "read", "") from None
            raise

    return __getattr__
