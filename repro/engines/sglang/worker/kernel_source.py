"""Finds a kernel's source in an SGLang tree, and tells by a fingerprint whether it is one that was seen before.

Where ``topk.py`` takes its kernels from (found by following its imports, not from this list):

- ``mask_topk_ids``: 0.5.12 ``jit_kernel/deepseek_v4.py``; 0.5.13 to 0.5.16 ``jit_kernel/dsv4/moe.py``; 0.5.17 to
  0.5.20 ``kernels/ops/attention/dsv4/moe.py``; from 0.5.21 ``kernels/ops/moe/dsv4.py``. The CUDA source is
  ``deepseek_v4/hash_topk.cuh`` throughout, with ``MaskKernel``: in ``jit_kernel/csrc``, from 0.5.17 in
  ``kernels/jit/csrc``.
- ``_fill_padded_rows_kernel``: 0.5.15 ``topk.py`` itself, twice over; from 0.5.16
  ``kernels/ops/moe/fill_padded_rows.py``.
- ``moe_fused_gate``: 0.5.12 to 0.5.16 ``jit_kernel/moe_fused_gate.py``, from 0.5.17
  ``kernels/ops/moe/moe_fused_gate.py``.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class KernelSource:
    """A kernel as a tree has it. ``module`` defines it; an empty ``fingerprint`` is never known."""

    module: str
    fingerprint: str


def fingerprint_python(source: str, function: str | None = None) -> str:
    """SHA-256 of the syntax tree without docstrings, comments and positions; the same in every Python.

    Of the whole module, or of what ``function`` can reach in it: itself, and the module-level names that it and
    they use, with their decorators, assignments and imports. Imports count without their order, and those from
    SGLang by the last part of the module's name, since kernels move. What other modules hold does not count.

    Raises:
        SyntaxError, ValueError: not Python, or no such function at module level.
    """
    return _sha256(" ".join(_reachable(source, function).parts))


def fingerprint_cuda(source: str) -> str:
    """SHA-256 of the whole text without comments and white space (tokens stay apart)."""
    return _sha256(" ".join(t for t in _CUDA_TOKEN.findall(source) if not t.startswith(("//", "/*"))))


_CUDA_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[\w.]+|\S""", re.DOTALL
)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# Left out: what position says already, and what does not change what runs.
_UNSAID = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
_HAS_DOCSTRING = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class _Writer:
    """Writes a syntax tree as words: ``ast.dump`` differs from one Python to the next, this does not."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.names: set[str] = set()
        self.texts: set[str] = set()

    def write(self, node: Any) -> None:
        parts = self.parts
        kind = type(node)
        parts.append(kind.__name__)
        if kind is ast.Name:
            self.names.add(node.id)
            parts.append(node.id)
        elif kind is ast.Constant:
            if isinstance(node.value, str):
                self.texts.add(node.value)
            parts.append(ascii(node.value))
        elif kind is ast.Import or kind is ast.ImportFrom:
            parts.extend(f"{module} {name} {alias}" for module, name, alias in _imported(node))
        else:
            parts.append("(")
            for field in kind._fields:
                value = getattr(node, field, None)
                if value is None or value == [] or field in _UNSAID:
                    continue
                parts.append(field)
                if field == "body" and isinstance(node, _HAS_DOCSTRING) and _is_text(value[0]):
                    value = value[1:]
                for item in value if type(value) is list else (value,):
                    if isinstance(item, ast.AST):
                        self.write(item)
                    else:
                        parts.append(ascii(item))
            parts.append(")")


def _is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _imported(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str, str]]:
    """``(module, name, name that is bound)`` of each import in a statement."""
    for alias in statement.names:
        if isinstance(statement, ast.Import):
            yield "", alias.name, alias.asname or alias.name.split(".")[0]
        else:
            module = statement.module or ""
            if statement.level or module.split(".")[0] == "sglang":
                module = "sglang:" + module.rpartition(".")[2]
            yield module, alias.name, alias.asname or alias.name


def _reachable(source: str, function: str | None) -> _Writer:
    module = ast.parse(source)
    written = _Writer()
    if function is None:
        written.write(module)
        return written
    imports = [i for s in module.body if isinstance(s, (ast.Import, ast.ImportFrom)) for i in _imported(s)]
    rest = [s for s in module.body if not isinstance(s, (ast.Import, ast.ImportFrom))]
    bound = [set(_bound(statement)) for statement in rest]
    if not any(function in names for names in bound):
        raise ValueError(f"no {function} at module level")
    written.names.add(function)
    texts: dict[int, list[str]] = {}
    while fresh := [i for i, names in enumerate(bound) if i not in texts and names & written.names]:
        for index in fresh:
            written.parts = texts[index] = []
            written.write(rest[index])
    written.parts = [" ".join(i) for i in sorted(set(imports)) if i[2] in written.names or i[1] == "*"]
    for index in sorted(texts):
        written.parts += texts[index]
    return written


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Names that a module-level statement binds, or may change by what it calls or writes to."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
        return
    within: list[ast.AST] = [statement]
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        within = list(statement.targets) if isinstance(statement, ast.Assign) else [statement.target]
    for node in (found for part in within for found in ast.walk(part)):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias for _, _, alias in _imported(node))


_TOPK = "sglang.srt.layers.moe.topk"
_CUDA_ROOTS = ("sglang/jit_kernel/csrc", "sglang/kernels/jit/csrc")
_LAUNCHER = {"_fill_padded_rows_kernel": "_fill_padded_rows"}
_IMPORT = re.compile(
    r"^[ \t]*from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+(\((?:[^)#]|#[^\n]*)*\)|[^\n(]*)", re.MULTILINE
)
_COMMENT = re.compile(r"#[^\n]*")


def find_kernel(name: str, tree_root: Path) -> KernelSource | None:
    """The kernel that ``topk.py`` calls, with the Python that launches it; nothing of the tree is run.

    None where ``topk.py`` has no such kernel. Source that is not found, not Python or ambiguous gives an empty
    fingerprint.
    """
    topk = _read(tree_root, _TOPK)
    launcher = _LAUNCHER.get(name, name)
    if topk is None or launcher not in topk:
        return None
    modules = _origins(topk, _TOPK.rpartition(".")[0], launcher)
    defines = f"def {launcher}(" in topk
    if not defines and not modules:
        return None
    try:
        if defines and not modules:
            return KernelSource(_TOPK, fingerprint_python(_cut(topk, {name, launcher}), launcher))
        if not defines and len(modules) == 1:
            return _followed(tree_root, modules.pop(), launcher)
    except (SyntaxError, ValueError, OSError, RecursionError):
        pass
    return KernelSource(_TOPK, "")


def _followed(root: Path, module: str, launcher: str, hops: int = 3) -> KernelSource:
    """Follows a package's re-exports to the module that defines the launcher."""
    text = _read(root, module)
    if text is None:
        raise ValueError(f"no {module}")
    if re.search(rf"^def {launcher}\b", text, re.MULTILINE) is None:
        is_package = (root / module.replace(".", "/")).is_dir()
        further = _origins(text, module if is_package else module.rpartition(".")[0], launcher)
        if len(further) != 1 or not hops:
            raise ValueError(f"{module} does not define {launcher}")
        return _followed(root, further.pop(), launcher, hops - 1)
    written = _reachable(text, launcher)
    parts = [_sha256(" ".join(written.parts))]
    for file in sorted(text for text in written.texts if text.endswith((".cuh", ".cu"))):
        found = [root / base / file for base in _CUDA_ROOTS if (root / base / file).is_file()]
        if not found:
            raise ValueError(f"no {file}")
        parts += [fingerprint_cuda(path.read_text("utf-8")) for path in found]
    # The router hands some shapes to another kernel; a module beside it says which.
    if "moe_route_radix" in written.names:
        radix = _read(root, f"{module.rpartition('.')[0]}.moe_route_radix")
        parts.append(fingerprint_python(radix or "", "covered"))
    return KernelSource(module, parts[0] if len(parts) == 1 else _sha256(" ".join(parts)))


def _origins(text: str, package: str, name: str) -> set[str]:
    """Modules of SGLang from which ``text``, a module in ``package``, imports ``name``."""
    found: set[str] = set()
    whole = re.compile(rf"\b{name}\b")
    for match in _IMPORT.finditer(text):
        module, names = match.groups()
        if not module.startswith((".", "sglang.")) or whole.search(_COMMENT.sub("", names)) is None:
            continue
        level = len(module) - len(module.lstrip("."))
        parts = package.split(".")
        above = parts[: len(parts) - level + 1] if level else []
        found.add(".".join(part for part in (*above, *module[level:].split(".")) if part))
    return found


def _cut(text: str, names: set[str]) -> str:
    """The module-level functions of these names with what stands right above them, and lines that bind them.

    Cut out as text: parsing all of a ``topk.py`` takes longer than all else here.
    """
    pieces: list[str] = []
    choice = "|".join(sorted(names))
    for head in re.finditer(rf"^def (?:{choice})\b[^\n]*\n", text, re.MULTILINE):
        start = text.rfind("\n\n", 0, head.start()) + 2
        end = _NEXT_STATEMENT.search(text, head.end())
        pieces.append(text[start : end.start() if end else len(text)])
    pieces += re.findall(rf"^[ \t]*((?:{choice})[ \t]*[=:][^=\n][^\n]*)", text, re.MULTILINE)
    return "\n".join(pieces)


_NEXT_STATEMENT = re.compile(r"^[^\s)#]", re.MULTILINE)


def _read(root: Path, module: str) -> str | None:
    path = root / module.replace(".", "/")
    for file in (path.with_name(path.name + ".py"), path / "__init__.py"):
        if file.is_file():
            return file.read_text("utf-8", "surrogateescape")
    return None
