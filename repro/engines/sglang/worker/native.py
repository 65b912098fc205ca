"""An SGLang that imports as it is: its own dependencies, its own kernels, on the GPU that it is for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

from .loader import BATCH_INFO, PACKAGE, REGISTRY, TOPK, one_line
from .shims import SHIMS, Situation
from .stubs import CannotVerify

DEVICE = "cuda"  # of ROCm's torch too

# Only the state of a server that is not running is stood in for.
_SHIMS = (
    "get_parallel",
    "get_attention_tp_size",
    "get_attention_tp_rank",
    "get_server_args",
    "get_global_server_args",
    "get_exec",
)
_NEEDED = ("sgl_kernel", "triton")


class NativeTree:
    """As ``loader.TreeLoader``, with nothing replaced but the server's state.

    Raises:
        CannotVerify: the package does not import here, or is not for this platform.
    """

    mode = "native"
    device = DEVICE

    def __init__(self, root: Path, situation: Situation) -> None:
        self.root = root
        self.loaded: list[str] = []
        self.used: dict[str, str] = {}
        sys.path.insert(0, str(root))
        topk = self.load(TOPK)
        if not getattr(topk, f"_is_{situation.platform}", False):
            raise CannotVerify(f"the package does not take this machine for {situation.platform}")
        for shim in SHIMS:
            if shim.name in _SHIMS:
                made = shim.make(situation)
                for module in (TOPK, BATCH_INFO, REGISTRY, *(f"{PACKAGE}.{place}" for place in shim.modules)):
                    if hasattr(sys.modules.get(module), shim.name):
                        setattr(sys.modules[module], shim.name, made)
                        self.used[shim.name] = shim.reason

    def load(self, name: str) -> ModuleType:
        try:
            module = importlib.import_module(name)
        except ImportError as err:
            raise CannotVerify(f"{name} does not import: {one_line(err)}") from err
        if name not in self.loaded:
            self.loaded.append(name)
        return module

    def owns(self, filename: str) -> bool:
        return filename.startswith(f"{self.root}/{PACKAGE}/")


def can_be_tried(platform: str) -> bool:
    """Whether this machine has the GPU of that platform, and the packages without which no import succeeds."""
    if not torch.cuda.is_available() or (torch.version.hip is None) != (platform == "cuda"):
        return False
    return all(importlib.util.find_spec(name) is not None for name in _NEEDED)


def forget() -> None:
    """Drops what a failed native import left behind."""
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
