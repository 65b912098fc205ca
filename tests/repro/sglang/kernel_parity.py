# ruff: noqa: T201
"""Compares the emulated kernels with a tree's own, for whoever adds a fingerprint to ``worker/kernels.py``.

Not collected by pytest: it needs ``triton`` (3.9 was used) and ``numpy`` beside torch, and real trees. From the
root of the repository, with TREE a folder that holds ``sglang/`` (an unpacked wheel, ``python/`` of a checkout):

    python tests/repro/sglang/kernel_parity.py --fingerprints TREE ...
    python tests/repro/sglang/kernel_parity.py TREE ...
    python tests/repro/sglang/kernel_parity.py --as 0.5.23 TREE ...

The first prints what ``known`` would hold. The second runs the tree's Triton source in Triton's interpreter on
CPU tensors, beside the emulation, over random inputs; the third does so for a tree whose fingerprints are not known
yet, against what the emulation does for that release. It ends with status 1 if anything differs: another id (unless
the two experts' scores are the same to 6 digits, a *near tie*), or a weight that is off by over 1e-5 of itself.

``mask_topk_ids`` is CUDA C++ and is not run here: read ``MaskKernel`` in the tree's ``hash_topk.cuh`` instead. A
GPU's ``exp`` and ``log`` are approximate: weights there agree to about 6 digits, not to the last bit.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from repro.engines.sglang.worker import kernel_source, kernels

FILL, GATE = "_fill_padded_rows_kernel", "moe_fused_gate"


@dataclass
class Tally:
    cases: int = 0
    rows: int = 0
    nan_rows: int = 0
    refused: int = 0
    not_emulated: int = 0
    near_ties: int = 0
    worst: float = 0.0
    differing: int = 0

    def __str__(self) -> str:
        return (
            f"{self.cases} cases, {self.rows} rows ({self.nan_rows} with NaN), {self.refused} refused by both, "
            f"{self.not_emulated} not emulated, {self.near_ties} near ties, worst weight off by {self.worst:.1e} "
            f"of itself, {self.differing} DIFFER"
        )


# ------------------------------------------------------------------------------------- loading a tree's kernels


def _stub(name: str, **values: Any) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    module.__dict__.update(values)
    sys.modules[name] = module
    return module


def _numpy_function(name: str) -> Callable[[Any], Any]:
    """A function of libdevice, which the interpreter has not, on what it has for a tensor."""
    import numpy
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    function = getattr(numpy, name)
    return lambda x: tl.tensor(TensorHandle(function(x.handle.data), x.handle.dtype), x.type)


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _prepare(tree: Path) -> None:
    """Stand-ins for what the kernel modules import; none of it has a say in the numbers."""
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]
    for name in (
        "sglang",
        "sglang.kernels",
        "sglang.kernels.ops",
        "sglang.kernels.jit",
        "sglang.srt",
        "sglang.jit_kernel",
    ):
        _stub(name)
    no = {
        "is_arch_support_pdl": lambda: False,
        "get_jit_cuda_arch": None,
        "load_jit": None,
        "make_cpp_args": None,
    }
    for name in ("sglang.kernels.jit.utils", "sglang.jit_kernel.utils"):
        _stub(name, cache_once=lambda function: function, **no)
    for name in ("sglang.kernels.kernel_api_logging", "sglang.kernel_api_logging"):
        _stub(name, debug_kernel_api=lambda function: function)
    off = SimpleNamespace(get=lambda: False)
    _stub("sglang.srt.environ", envs=SimpleNamespace(SGLANG_OPT_SM120_MTP_ROUTER_TOP22=off))
    package = _stub("sglang.kernels.ops.moe")
    radix = tree / "sglang/kernels/ops/moe/moe_route_radix.py"
    if radix.is_file():
        package.moe_route_radix = _load("sglang.kernels.ops.moe.moe_route_radix", radix)


def real_gate(tree: Path, module: str) -> Callable[..., Any]:
    _prepare(tree)
    loaded = _load(module, tree / (module.replace(".", "/") + ".py"))
    if hasattr(loaded, "libdevice"):
        loaded.libdevice = SimpleNamespace(
            **{name: _numpy_function(name) for name in ("exp", "log1p", "sqrt")}
        )
    return loaded.moe_fused_gate


def real_fill(tree: Path, module: str, folder: Path) -> ModuleType:
    _prepare(tree)
    source = (tree / (module.replace(".", "/") + ".py")).read_text("utf-8")
    if module.endswith(".topk"):
        source = kernel_source._cut(source, {FILL, "_fill_padded_rows"})
        source = "import torch\nimport triton\nimport triton.language as tl\n\n\n" + source
    copy = folder / f"fill_{len(list(folder.iterdir()))}.py"
    copy.write_text(source, "utf-8")
    return _load(copy.stem, copy)


# ------------------------------------------------------------------------------------------------- fill


def _pick(generator: torch.Generator, *choices: Any) -> Any:
    return choices[int(torch.randint(len(choices), (1,), generator=generator))]


def _fills(dtype: torch.dtype) -> tuple[float, ...]:
    """The interpreter stores wrong bits for an integer, or a number to be rounded, that is filled into bfloat16."""
    if dtype == torch.bfloat16:
        return (0.0, -1.0, 3.5, float("nan"))
    return (-1, 0, 7, 0.0, 3.7, float("nan")) if dtype.is_floating_point else (-1, 0, 7)


def fill_parity(module: ModuleType, cases: int, generator: torch.Generator) -> Tally:
    tally, kernel, ours = Tally(), getattr(module, FILL), kernels.FillPaddedRows()
    for _ in range(cases):
        rows, columns = _pick(generator, 0, 1, 2, 5, 9), _pick(generator, 1, 2, 3, 6, 8, 9)
        dtype = _pick(generator, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16)
        base = torch.arange(2 * rows * (columns + 3)).reshape(2 * rows, columns + 3).to(dtype)
        fill = _pick(generator, *_fills(dtype))
        count = torch.tensor(
            _pick(generator, -1, 0, 1, rows // 2, rows, rows + 2),
            dtype=_pick(generator, torch.int32, torch.int64),
        ).reshape(_pick(generator, (), (1,)))
        view = _pick(generator, "whole", "every second row", "columns within", "odd launch")
        results = []
        for run in (kernel, ours):
            memory = base.clone()
            if view == "odd launch":
                run[(rows,)](
                    memory, count, columns, fill, columns + 3, BLOCK_COLS=_pick(_at(generator), 1, 2, 4, 16)
                )
            else:
                x = {
                    "whole": memory[:rows],
                    "every second row": memory[::2],
                    "columns within": memory[:rows, 1 : columns + 1],
                }[view]
                setattr(module, FILL, run)
                module._fill_padded_rows(x, count, fill)
            results.append(memory)
        setattr(module, FILL, kernel)
        tally.cases += 1
        tally.rows += rows
        if not torch.equal(results[0].nan_to_num(99.0), results[1].nan_to_num(99.0)):
            tally.differing += 1
            print(f"    differs: {view}, {dtype}, {rows} x {columns}, count {count.tolist()}, fill {fill}")
    return tally


def _at(generator: torch.Generator) -> torch.Generator:
    """A copy of a generator: both runs of a case draw the same."""
    return generator.clone_state()


# ------------------------------------------------------------------------------------------------- router


@dataclass(frozen=True)
class Call:
    scores: Tensor
    bias: Tensor | None
    topk: int
    options: dict[str, Any]


def _contents(generator: torch.Generator, kind: str, rows: int, experts: int) -> Tensor:
    scores = torch.randn(rows, experts, generator=generator)
    where = torch.rand(rows, experts, generator=generator)
    whole_rows = torch.rand(rows, 1, generator=generator) < 0.5
    if kind == "ties":
        return scores.round()
    if kind == "all equal":
        return torch.zeros_like(scores)
    if kind == "wide":
        return scores * 40.0
    if kind == "NaN rows":
        return torch.where(whole_rows, float("nan"), scores)
    if kind == "NaN cells":
        return torch.where(where < 0.2, float("nan"), scores)
    if kind == "infinite cells":
        return torch.where(where < 0.1, float("inf"), torch.where(where > 0.8, float("-inf"), scores))
    if kind == "-inf":
        return torch.where((where < 0.7) | whole_rows, float("-inf"), scores)
    return scores


_KINDS = (
    "normal",
    "normal",
    "ties",
    "ties",
    "all equal",
    "wide",
    "NaN rows",
    "NaN cells",
    "infinite cells",
    "-inf",
)


def _laid_out(generator: torch.Generator, x: Tensor) -> Tensor:
    """The same contents, laid out in memory in another way."""
    layout = _pick(generator, "contiguous", "contiguous", "transposed", "every second column", "within")
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "every second column":
        wide = torch.full((x.shape[0], 2 * x.shape[1]), -7.0, dtype=x.dtype)
        wide[:, ::2] = x
        return wide[:, ::2]
    if layout == "within":
        wide = torch.full((x.shape[0] + 2, x.shape[1] + 5), 9.0, dtype=x.dtype)
        wide[1:-1, 2:-3] = x
        return wide[1:-1, 2:-3]
    return x


def calls(generator: torch.Generator, release: tuple[int, ...], cases: int) -> Iterator[Call]:
    for _ in range(cases):
        rows = _pick(generator, 0, 1, 2, 3, 5, 9)
        experts, groups = _pick(
            generator,
            (4, 1),
            (6, 1),
            (8, 2),
            (16, 4),
            (20, 5),
            (24, 3),
            (64, 8),
            (100, 1),
            (256, 8),
            (384, 1),
            (6, 6),
        )
        kept = int(torch.randint(1, groups + 1, (1,), generator=generator))
        routed = min(_pick(generator, 1, 2, 3, 4, 6, 8), experts)
        shared = _pick(generator, 0, 0, 1, 2)
        scoring = _pick(generator, "sigmoid", "sqrtsoftplus", "softmax", "Sigmoid")
        dtype = _pick(generator, torch.float32, torch.float32, torch.bfloat16, torch.float16)
        scores = _contents(generator, _pick(generator, *_KINDS), rows, experts).to(dtype)
        bias: Tensor | None = torch.randn(experts, generator=generator)
        shape = _pick(generator, "random", "zero", "ties", "none", "half", "strided")
        if shape in ("zero", "ties"):
            bias = torch.zeros(experts) if shape == "zero" else bias.round()
        elif shape == "none":
            bias = None
        elif shape == "half":
            bias = bias.to(torch.bfloat16)
        elif shape == "strided" and release >= (0, 5, 21):
            bias = torch.randn(2 * experts, generator=generator)[::2]
        options: dict[str, Any] = {
            "scoring_func": scoring,
            "num_fused_shared_experts": shared,
            "renormalize": _pick(generator, True, False),
            "routed_scaling_factor": _pick(generator, 1.0, 2.5, 2.827, None),
            "apply_routed_scaling_factor_on_output": _pick(generator, True, False),
        }
        if groups > 1 and _pick(generator, True, True, False):
            options |= {"num_expert_group": groups, "topk_group": kept}
        if release >= (0, 5, 21):
            if _pick(generator, True, False):
                number = _pick(generator, -1, 0, 1, rows // 2, rows, rows + 3)
                dtype = _pick(generator, torch.int32, torch.int64)
                options["num_token_non_padded"] = torch.tensor([number], dtype=dtype)
            options["sqrtsoftplus_log1p"] = _pick(generator, True, False)
        yield Call(_laid_out(generator, scores), bias, routed + shared, options)


def _ranked(release: tuple[int, ...], call: Call) -> Tensor:
    """What decides the choice, to tell a near tie."""
    gate = kernels.FusedGate(release)
    log1p = bool(call.options.get("sqrtsoftplus_log1p"))
    return gate._activate(call.scores.float(), call.bias, call.options["scoring_func"].lower(), log1p)[1]


def _differs(release: tuple[int, ...], call: Call, theirs: Any, ours: Any, tally: Tally) -> bool:
    experts, ranked = call.scores.shape[1], _ranked(release, call)
    (their_weights, their_ids), (our_weights, our_ids) = theirs, ours
    if [t.dtype for t in theirs] != [t.dtype for t in ours] or their_ids.shape != our_ids.shape:
        return True
    near = their_ids != our_ids
    for row, column in near.nonzero().tolist():
        pair = [int(ids[row, column]) for ids in (their_ids, our_ids)]
        if not all(0 <= i < experts for i in pair):
            return True
        a, b = (float(ranked[row, i]) for i in pair)
        if not abs(a - b) <= 1e-6 * max(abs(a), abs(b)):
            return True
    tally.near_ties += int(near.any(dim=1).sum())
    same = ~near.any(dim=1)
    a, b = their_weights[same], our_weights[same]
    if a.isnan().ne(b.isnan()).any() or a.isinf().ne(b.isinf()).any():
        return True
    finite = a.isfinite() & b.isfinite()
    off = ((a - b).abs() / torch.maximum(a.abs(), torch.tensor(1e-30)))[finite]
    tally.worst = max(tally.worst, float(off.max()) if off.numel() else 0.0)
    return not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()) or bool((off > 1e-5).any())


def gate_parity(
    real: Callable[..., Any], release: tuple[int, ...], cases: int, generator: torch.Generator
) -> Tally:
    tally, ours = Tally(), kernels.FusedGate(release)
    for call in calls(generator, release, cases):
        tally.cases += 1
        tally.rows += call.scores.shape[0]
        tally.nan_rows += int(call.scores.isnan().any(dim=1).sum())
        try:
            mine = ours(call.scores, call.bias, call.topk, **call.options)
        except kernels.KernelRefused:
            mine = None
        except kernels.NotEmulated:
            tally.not_emulated += 1
            continue
        try:
            theirs = real(call.scores, call.bias, call.topk, **call.options)
        except (AssertionError, AttributeError, TypeError) as err:
            theirs = None
            refusal = f"{type(err).__name__}: {err}"
        if theirs is None and mine is None:
            tally.refused += 1
        elif mine is None or theirs is None or _differs(release, call, theirs, mine, tally):
            tally.differing += 1
            shown = {
                name: value.tolist() if isinstance(value, Tensor) else value
                for name, value in call.options.items()
            }
            print(
                f"    differs: {tuple(call.scores.shape)} top-{call.topk} bias {call.bias is not None} {shown}"
            )
            print(f"      theirs {theirs if theirs is not None else refusal}\n      ours   {mine}")
    return tally


# --------------------------------------------------------------------------------------------------- command


def _print_fingerprints(tree: Path) -> None:
    for name, emulation in kernels.EMULATIONS.items():
        source = kernels.find_kernel(name, tree)
        if source is None:
            print(f"  {name}: none")
        else:
            print(f"  {name}: {source.module}\n    {source.fingerprint or 'no fingerprint'}", end="")
            print(f"  as in {emulation.known.get(source.fingerprint, 'no release that was compared')}")


def _compare(tree: Path, release: str | None, cases: int, folder: Path) -> int:
    differing = 0
    for name in (FILL, GATE):
        source = kernels.find_kernel(name, tree)
        version = release or (source and kernels.EMULATIONS[name].known.get(source.fingerprint))
        if source is None or version is None:
            print(f"  {name}: {'none' if source is None else 'not known'}")
            continue
        generator = torch.Generator().manual_seed(0)
        if name == FILL:
            tally = fill_parity(real_fill(tree, source.module, folder), cases, generator)
        else:
            numbers = tuple(int(part) for part in version.split(".")[:3])
            tally = gate_parity(real_gate(tree, source.module), numbers, cases, generator)
        print(f"  {name} (as in {version}): {tally}")
        differing += tally.differing
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Emulated kernels beside a tree's own, in Triton's interpreter."
    )
    parser.add_argument("trees", nargs="+", type=Path, metavar="TREE")
    parser.add_argument("--fingerprints", action="store_true", help="only print what `known` would hold")
    parser.add_argument("--as", dest="release", help="compare with what the emulation does for this release")
    parser.add_argument("--cases", type=int, default=300, help="random cases a kernel")
    args = parser.parse_args()
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        for tree in args.trees:
            print(tree, flush=True)
            if args.fingerprints:
                _print_fingerprints(tree)
            else:
                differing += _compare(tree, args.release, args.cases, Path(folder))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
