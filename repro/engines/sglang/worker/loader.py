"""Loads the few modules of an SGLang tree that hold the code under test, and puts stand-ins around them."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

from . import kernels
from .shims import (
    OPTIONAL_PACKAGES,
    SHIMS,
    Shim,
    Situation,
    device_of,
    identity_compile,
    known_device,
    lenient_register_fake,
    struct_shim,
    stub_compile,
    triton_module,
    watch_machine,
)
from .stubs import WATCH, CannotVerify, Stub, StubModule, seen

PACKAGE = "sglang"
TOPK = "sglang.srt.layers.moe.topk"
REGISTRY = "sglang.srt.model_executor.cuda_graph_buffer_registry"
BATCH_INFO = "sglang.srt.model_executor.forward_batch_info"

# The code under test, and what of the tree it needs at run time.
REAL_MODULES = (
    "sglang.srt.environ",
    "sglang.srt.configs.shared_experts",
    "sglang.srt.eplb.expert_location_dispatch",
    "sglang.srt.layers.moe.utils",
    TOPK,
    "sglang.kernels.ops.moe.fill_padded_rows",
    "sglang.srt.model_executor.input_buffers",
    "sglang.srt.model_executor.forward_context",
    BATCH_INFO,
    REGISTRY,
)

# What a tree may have for real besides its own modules: torch, and what torch itself stands on.
_REAL_PACKAGES = frozenset({"torch", "numpy", "typing_extensions"})

TORCH_COMPILE, REGISTER_FAKE = "torch.compile", "torch.library.register_fake"
TRITON, STRUCT = "triton", "msgspec.Struct"
_FILL_KERNEL = "_fill_padded_rows_kernel"


class TreeLoader:
    """One tree on one platform. The process has no other, and is not used for anything else after.

    ``root`` is the folder that holds ``sglang/``. ``without`` names shims that are taken away, to see that the
    verdict then is "cannot verify".
    """

    mode = "isolated"
    device = "cpu"

    def __init__(self, root: Path, situation: Situation, without: Sequence[str] = ()) -> None:
        self.root = root
        self.situation = situation
        self.without = frozenset(without)
        self.used: dict[str, str] = {}
        self.loaded: list[str] = []
        self._kernels: dict[str, Any] = {}
        self._texts: dict[str, str] = {}
        # The tests' trees are parts of one.
        self._is_whole = (root / PACKAGE / "__init__.py").is_file()
        self._shims: dict[str, dict[str, Shim]] = {}
        for shim in SHIMS:
            for module in shim.modules:
                self._shims.setdefault(f"{PACKAGE}.{module}", {})[shim.name] = shim
        sys.dont_write_bytecode = True
        sys.meta_path.insert(0, _Finder(self))
        watch_machine()
        WATCH.pretends = situation.platform != "cpu"
        torch.compile = identity_compile if self._takes(TORCH_COMPILE) else stub_compile
        if self._takes(TORCH_COMPILE):
            self.used[TORCH_COMPILE] = "compiles nothing"
        if self._takes(REGISTER_FAKE):
            note_use = partial(self.used.setdefault, REGISTER_FAKE, "passes over operators that are not here")
            torch.library.register_fake = lenient_register_fake(torch.library.register_fake, note_use)

    def _takes(self, name: str) -> bool:
        return name not in self.without

    def load(self, name: str) -> ModuleType:
        """A module of the tree.

        Raises:
            CannotVerify: it is not there, or does not load.
        """
        if not self.file_of(name).is_file():
            raise CannotVerify(f"the tree has no {_short(name)}")
        try:
            module = importlib.import_module(name)
        except CannotVerify as err:
            WATCH.let_go(str(err))
            raise
        except Exception as err:
            where = _innermost(err)
            raise CannotVerify(f"{_short(name)} does not load: {one_line(err)}{where}") from err
        WATCH.raise_if_spoiled()
        return module

    def file_of(self, name: str) -> Path:
        return self.root / (name.replace(".", "/") + ".py")

    def is_real(self, name: str) -> bool:
        return name in REAL_MODULES and self.file_of(name).is_file()

    def has(self, name: str) -> bool:
        """Whether the tree has a module; of a part of a tree, without the package's own file, that is not known."""
        path = self.root / name.replace(".", "/")
        return not self._is_whole or path.is_dir() or any(path.parent.glob(f"{path.name}.*"))

    def defines(self, module: str, name: str) -> bool:
        """Whether a module's source may have that name: it stands there, or is made by other means."""
        path = self.root / module.replace(".", "/")
        if not self._is_whole or self.has(f"{module}.{name}"):
            return True
        if module not in self._texts:
            source = path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")
            self._texts[module] = source.read_text("utf-8", "replace") if source.is_file() else ""
        text = self._texts[module]
        return (
            not text or "import *" in text or "__getattr__" in text or bool(re.search(rf"\b{name}\b", text))
        )

    def owns(self, filename: str) -> bool:
        """Whether a file is one of the tree's that were loaded."""
        return filename in WATCH.files

    def stub_module(self, name: str) -> StubModule:
        if name == "triton":
            return triton_module(name, self._jit if self._takes(TRITON) else None)
        replacements: dict[str, Callable[[], Any]] = {}
        if name == "msgspec":
            if self._takes(STRUCT):
                self.used[STRUCT] = "a frozen struct in plain Python"
                replacements["Struct"] = struct_shim
            return StubModule(name, replacements)
        for shim in self._shims.get(name, {}).values():
            if self._takes(shim.name):
                replacements[shim.name] = self._maker(shim)
        if name.startswith(("sglang.kernels.", "sglang.jit_kernel.")):
            for kernel in kernels.EMULATIONS.values():
                if kernel.name != _FILL_KERNEL and self._takes(kernel.name):
                    replacements[kernel.name] = partial(self._emulated, kernel)
        for real in REAL_MODULES:
            package, _, last = real.rpartition(".")
            if package == name and self.is_real(real):
                replacements[last] = partial(importlib.import_module, real)
        init = self.root / name.replace(".", "/") / "__init__.py"
        for exported, (module, original) in _re_exports(init).items():
            if self.is_real(module):
                replacements[exported] = partial(_member_of, module, original)
        return StubModule(name, replacements, partial(self.defines, name))

    def _maker(self, shim: Shim) -> Callable[[], Any]:
        made: list[Any] = []

        def replacement() -> Any:
            if not made:
                made.append(shim.make(self.situation))
                self.used[shim.name] = shim.reason
            return made[0]

        return replacement

    def _emulated(self, kernel: kernels.Emulation) -> Any:
        if kernel.name not in self._kernels:
            if kernels.is_known(kernel.name, self.root):
                self.used[kernel.name] = kernel.reason
                self._kernels[kernel.name] = kernel.replacement(self.root)
            else:
                self._kernels[kernel.name] = Stub(
                    f"{kernel.name} (a kernel whose source moepad does not know)"
                )
        return self._kernels[kernel.name]

    def _jit(self, function: Any = None, **_options: Any) -> Any:
        """``triton.jit``: the kernel is emulated where it is known, and else a stand-in."""
        if function is None:
            return self._jit
        self.used[TRITON] = "jit gives emulated kernels"
        name = function.__name__
        if name == _FILL_KERNEL and self._takes(name):
            return self._emulated(kernels.EMULATIONS[name])
        return Stub(f"Triton kernel {name}")


class _Finder(MetaPathFinder):
    """Answers for the tree's package and, where the tree is who asks, for what else it imports."""

    def __init__(self, tree: TreeLoader) -> None:
        self._tree = tree

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top != PACKAGE:
            if (
                not _asked_by_tree(sys._getframe(1))
                or top in sys.stdlib_module_names
                or top in _REAL_PACKAGES
            ):
                return None
            if top in OPTIONAL_PACKAGES:
                raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
            if top == "msgspec" and _is_installed("msgspec"):
                return None
        elif not self._tree.has(fullname):
            # Whatever the tree does about that, a server would do as well.
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        elif self._tree.is_real(fullname):
            return ModuleSpec(fullname, _TreeModule(self._tree), origin=str(self._tree.file_of(fullname)))
        if fullname.rpartition(".")[2].startswith("__"):  # from package import __version__
            raise WATCH.trap(fullname, "read")
        return ModuleSpec(fullname, _StandIn(self._tree), is_package=True)


class _TreeModule(Loader):
    def __init__(self, tree: TreeLoader) -> None:
        self._tree = tree

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        code = compiled(self._tree.file_of(name), _short(name))
        module.__file__ = code.co_filename
        module.__dict__.update({_SEEN: seen, _DEVICE: device_of, _KNOWN_DEVICE: known_device})
        self._tree.loaded.append(name)
        # Importing in the midst of a run is still importing: stand-ins may be named.
        running, trace = WATCH.running, sys.gettrace()
        WATCH.running = False
        sys.settrace(None)
        try:
            exec(code, module.__dict__)  # noqa: S102
        finally:
            WATCH.running = running
            sys.settrace(trace)


class _StandIn(Loader):
    def __init__(self, tree: TreeLoader) -> None:
        self._tree = tree

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._tree.stub_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A stand-in runs nothing."""


_compiled: dict[Path, CodeType] = {}


def compiled(path: Path, short: str) -> CodeType:
    """The code of a source file, compiled once; notes where its decorators stand."""
    code = _compiled.get(path)
    if code is None:
        parsed = ast.parse(path.read_bytes(), str(path))
        WATCH.files[str(path)] = (short, list(_decorators(parsed.body)))
        _watch(parsed)
        code = _compiled[path] = compile(parsed, str(path), "exec", dont_inherit=True)
    return code


def prepare(root: Path) -> None:
    """Compiles a tree ahead of forking, for all platforms at once. What is wrong with it shows when it loads."""
    for name in REAL_MODULES:
        path = root / (name.replace(".", "/") + ".py")
        try:
            compiled(path, _short(name))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    for kernel in kernels.EMULATIONS:
        with contextlib.suppress(Exception):
            kernels.found(kernel, root)


_SEEN, _DEVICE, _KNOWN_DEVICE = "__moepad_seen__", "__moepad_device__", "__moepad_known_device__"
# What looks at its first argument without asking it: builtins, and all of these modules.
_ASK_NOBODY = frozenset({"type", "id", "callable", "hasattr", "getattr", "signature", "inspect", "operator"})


def _watch(parsed: ast.Module) -> None:
    """Puts ``seen`` around what Python looks at without asking it, and ``device_of`` in place of ``x.device``."""
    node: Any
    patterns: set[int] = set()  # of case clauses, which take names only
    for node in ast.walk(parsed):
        kind = type(node)
        if kind is ast.Compare:
            operands = [node.left, *node.comparators]
            for number, operator in enumerate(node.ops):
                if isinstance(operator, (ast.Is, ast.IsNot)):
                    operands[number] = _call(_SEEN, operands[number])
                    operands[number + 1] = _call(_SEEN, operands[number + 1])
            node.left, *node.comparators = operands
        elif kind is ast.Call:
            asked = node.func.value if type(node.func) is ast.Attribute else node.func
            if type(asked) is ast.Name and asked.id in ("exec", "eval"):
                node.func = _call(_SEEN, node.func)
            elif type(asked) is ast.Name and asked.id in _ASK_NOBODY and node.args:
                node.args[0] = _call(_SEEN, node.args[0])
        elif kind is ast.Match:
            node.subject = _call(_SEEN, node.subject)
        elif kind is ast.ExceptHandler and node.type is not None:
            node.type = _call(_SEEN, node.type)
        elif kind is ast.Raise and node.exc is not None:
            node.exc = _call(_SEEN, node.exc)
        elif kind in (ast.MatchValue, ast.MatchMapping, ast.MatchClass):
            patterns.update(map(id, ast.walk(node)))
        elif kind is ast.Attribute and node.attr in ("type", "index") and id(node) not in patterns:
            if _is_device(node.value):
                node.value = _call(_DEVICE, node.value.value)
            elif type(node.value) is ast.Name:
                node.value = _call(_KNOWN_DEVICE, node.value)


def _is_device(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "device"


def _call(name: str, value: ast.expr) -> ast.expr:
    if isinstance(value, (ast.Constant, ast.Starred)):
        return value
    function = ast.copy_location(ast.Name(name, ast.Load()), value)
    return ast.copy_location(ast.Call(function, [value], []), value)


def _decorators(body: Sequence[ast.stmt]) -> Iterator[tuple[int, int]]:
    for statement in body:
        for decorator in getattr(statement, "decorator_list", ()):
            yield decorator.lineno, decorator.end_lineno or decorator.lineno
        for block in ("body", "orelse", "finalbody"):
            yield from _decorators(getattr(statement, block, ()))
        for handler in getattr(statement, "handlers", ()):
            yield from _decorators(handler.body)


def _re_exports(init: Path) -> dict[str, tuple[str, str]]:
    """Names that a package's ``__init__.py`` takes from other modules: name -> (module, name there)."""
    try:
        source = init.read_bytes()
        # Most have none of a module that is loaded for real, and parsing is slow.
        parsed = ast.parse(source if any(name.encode() in source for name in REAL_MODULES) else b"")
    except (OSError, SyntaxError, ValueError):
        return {}
    return {
        alias.asname or alias.name: (statement.module, alias.name)
        for statement in parsed.body
        if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level
        for alias in statement.names
    }


def _member_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _asked_by_tree(frame: FrameType | None) -> bool:
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename in WATCH.files


def _is_installed(name: str) -> bool:
    own = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    return any(finder.find_spec(name, None) for finder in own if hasattr(finder, "find_spec"))


def _short(name: str) -> str:
    return name.replace(".", "/") + ".py"


def one_line(err: BaseException) -> str:
    text = " ".join(str(err).split())[:300]
    return f"{type(err).__name__}: {text}" if text else type(err).__name__


def _innermost(err: BaseException) -> str:
    """Where in the tree an exception came from."""
    place = ""
    traceback = err.__traceback__
    while traceback is not None:
        known = WATCH.files.get(traceback.tb_frame.f_code.co_filename)
        if known is not None:
            place = f" at {known[0]}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place
