"""Finding a kernel in a tree, and telling a changed one. The trees here are small and made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from repro.engines.sglang.worker import kernels
from repro.engines.sglang.worker.kernel_source import (
    KernelSource,
    find_kernel,
    fingerprint_cuda,
    fingerprint_python,
)

FILL, MASK, GATE = "_fill_padded_rows_kernel", "mask_topk_ids", "moe_fused_gate"

FILL_SOURCE = """
import triton
import triton.language as tl
import unrelated

LIMIT = 4


@triton.jit
def _fill_padded_rows_kernel(out, count, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row >= tl.load(count):
        tl.store(out + row, -1)


def _fill_padded_rows(x, count):
    _fill_padded_rows_kernel[(x.shape[0],)](x, count, BLOCK=LIMIT)


def unrelated_helper():
    return unrelated.thing
"""

# Each changes what runs, and must be told.
CHANGES = {
    "the comparison in the kernel": ("row >= tl", "row > tl"),
    "a number in the kernel": ("row, -1)", "row, -2)"),
    "the kernel's decorator": ("@triton.jit", "@triton.jit(noinline=True)"),
    "an annotation that Triton reads": ("BLOCK: tl.constexpr", "BLOCK"),
    "the pointer that the launcher passes": ("](x, count,", "](x, x,"),
    "a constant that the launcher uses": ("LIMIT = 4", "LIMIT = 8"),
    "a name that is imported from another package": (
        "import triton.language as tl",
        "import my.language as tl",
    ),
    "an import of whatever is there": ("import unrelated\n", "import unrelated\nfrom somewhere import *\n"),
    "a later assignment": (
        "def unrelated_helper",
        "_fill_padded_rows_kernel = other\n\n\ndef unrelated_helper",
    ),
    "a later definition": (
        "def unrelated_helper",
        "def _fill_padded_rows(x, count):\n    pass\n\n\ndef unrelated_helper",
    ),
    "a later change of the kernel by a call": (
        "def unrelated_helper",
        "_fill_padded_rows_kernel.tune(3)\n\n\ndef unrelated_helper",
    ),
    "a definition in a branch": (
        "def unrelated_helper",
        "if True:\n    def _fill_padded_rows(x, count):\n        pass\n\n\ndef unrelated_helper",
    ),
}

# None changes what runs.
SAME = {
    "a comment": ("    row = tl.program_id(0)\n", "    # Which row.\n    row = tl.program_id(0)  # 0\n"),
    "a docstring": (
        "def _fill_padded_rows(x, count):\n",
        'def _fill_padded_rows(x, count):\n    """Fills."""\n',
    ),
    "line breaks and parentheses": (
        "tl.store(out + row, -1)",
        "tl.store(\n            (out + row),\n            -1,\n        )",
    ),
    "another function": ("return unrelated.thing", "return None"),
    "another import": ("import unrelated\n", "import unrelated as name\nfrom somewhere import else_\n"),
    "the order of imports": (
        "import triton\nimport triton.language as tl\n",
        "import triton.language as tl\nimport triton\n",
    ),
}


def edited(change: tuple[str, str], source: str = FILL_SOURCE) -> str:
    assert source.count(change[0]) == 1
    return source.replace(*change)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_what_runs_changes_the_fingerprint(change: tuple[str, str]) -> None:
    assert fingerprint_python(edited(change), "_fill_padded_rows") != fingerprint_python(
        FILL_SOURCE, "_fill_padded_rows"
    )


@pytest.mark.parametrize("change", SAME.values(), ids=SAME.keys())
def test_what_does_not_run_does_not_change_it(change: tuple[str, str]) -> None:
    assert fingerprint_python(edited(change), "_fill_padded_rows") == fingerprint_python(
        FILL_SOURCE, "_fill_padded_rows"
    )


def test_of_a_whole_module_every_statement_counts_but_no_comment() -> None:
    whole = fingerprint_python(FILL_SOURCE)
    assert fingerprint_python(edited(SAME["another function"])) != whole
    assert fingerprint_python('"""Docstring."""\n' + edited(SAME["a comment"])) == whole


def test_a_kernel_that_moves_within_sglang_keeps_its_fingerprint() -> None:
    sources = [
        f"from {module} import load\n\n\ndef launch():\n    return load()\n"
        for module in ("sglang.old.utils", "sglang.new.place.utils", ".utils")
    ]
    assert len({fingerprint_python(source, "launch") for source in sources}) == 1
    elsewhere = sources[0].replace("sglang.old.utils", "other.utils")
    assert fingerprint_python(elsewhere, "launch") != fingerprint_python(sources[0], "launch")
    assert fingerprint_python(sources[0].replace("import load", "import other as load"), "launch") != (
        fingerprint_python(sources[0], "launch")
    )


def test_values_of_different_types_are_different() -> None:
    fingerprints = {
        fingerprint_python(f"x = {value}") for value in ("1", "1.0", "True", "'1'", "b'1'", "None", "-1")
    }
    assert len(fingerprints) == 7


def test_no_such_function_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^no launch at module level$"):
        fingerprint_python(FILL_SOURCE, "launch")


CUDA_SOURCE = """
#include <cstdint>
struct MaskKernel {
  static void run(int* ids, const int count) {
    if (row >= count) ids[row] = -1;  // pads
  }
};
"""


def test_a_cuda_fingerprint_sees_tokens_only() -> None:
    same = (
        CUDA_SOURCE.replace("// pads", "/* pad\nrows */")
        .replace(" {", "\n\t{")
        .replace("row >= count", "row>=count")
    )
    assert fingerprint_cuda(same) == fingerprint_cuda(CUDA_SOURCE)
    for old, new in (
        ("row >= count", "row > count"),
        ("= -1", "= -2"),
        ("const int", "constint"),
        ("cstdint", "cmath"),
    ):
        assert fingerprint_cuda(CUDA_SOURCE.replace(old, new)) != fingerprint_cuda(CUDA_SOURCE)


def test_what_looks_like_a_comment_in_a_string_is_none() -> None:
    assert fingerprint_cuda('f("a // b"); g();') != fingerprint_cuda('f("a // c"); g();')


# ------------------------------------------------------------------------------------------------- trees

TOPK = "srt/layers/moe/topk.py"
MASK_SOURCE = """
from {jit}.utils import load_jit


def _module():
    return load_jit("mask", cuda_files=["deepseek_v4/hash_topk.cuh"], cuda_wrappers=[("run", "MaskKernel::run")])


def mask_topk_ids(topk_ids, num_token_non_padded):
    return _module().run(topk_ids, num_token_non_padded)
"""
GATE_SOURCE = """
from sglang.kernels.ops.moe import moe_route_radix


def moe_fused_gate(scores, bias, topk):
    return moe_route_radix.covered(scores)
"""
RADIX_SOURCE = "WIDTH = 896\n\n\ndef covered(s):\n    return s == WIDTH\n"


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return folder


def with_fill(folder: Path, fill: str = FILL_SOURCE) -> Path:
    names = "(\n    _can_fuse,  # (!)\n    _fill_padded_rows,\n)"
    topk = f"from sglang.kernels.ops.moe.fill_padded_rows import {names}\n"
    return tree(folder, {TOPK: topk, "kernels/ops/moe/fill_padded_rows.py": fill})


def with_mask(folder: Path, *, old: bool = False, cuda: str = CUDA_SOURCE) -> Path:
    if old:
        files = {
            TOPK: "from sglang.jit_kernel.dsv4 import mask_topk_ids\n",
            "jit_kernel/dsv4/__init__.py": "from .moe import (\n    hash_topk,\n    mask_topk_ids,\n)\n",
            "jit_kernel/dsv4/moe.py": MASK_SOURCE.format(jit="sglang.jit_kernel"),
            "jit_kernel/csrc/deepseek_v4/hash_topk.cuh": cuda,
        }
    else:
        files = {
            TOPK: "if x:\n    from sglang.kernels.ops.moe.dsv4 import mask_topk_ids\n",
            "kernels/ops/moe/dsv4.py": MASK_SOURCE.format(jit="sglang.kernels.jit"),
            "kernels/jit/csrc/deepseek_v4/hash_topk.cuh": cuda,
        }
    return tree(folder, files)


def with_gate(folder: Path, radix: str = RADIX_SOURCE) -> Path:
    return tree(
        folder,
        {
            TOPK: "from mate import moe_fused_gate\n\n\ndef f():\n"
            "    from sglang.kernels.ops.moe.moe_fused_gate import moe_fused_gate as gate\n"
            "    from sglang.kernels.ops.moe.moe_fused_gate import moe_fused_gate\n",
            "kernels/ops/moe/moe_fused_gate.py": GATE_SOURCE,
            "kernels/ops/moe/moe_route_radix.py": radix,
        },
    )


def found(name: str, root: Path) -> KernelSource:
    source = find_kernel(name, root)
    assert source is not None
    return source


def test_a_kernel_is_found_where_topk_imports_it_from(tmp_path: Path) -> None:
    fill = found(FILL, with_fill(tmp_path / "fill"))
    assert fill == KernelSource(
        "sglang.kernels.ops.moe.fill_padded_rows", fingerprint_python(FILL_SOURCE, "_fill_padded_rows")
    )
    assert found(GATE, with_gate(tmp_path / "gate")).module == "sglang.kernels.ops.moe.moe_fused_gate"


def test_a_package_that_passes_a_kernel_on_is_followed_and_moving_it_changes_nothing(tmp_path: Path) -> None:
    old, new = found(MASK, with_mask(tmp_path / "old", old=True)), found(MASK, with_mask(tmp_path / "new"))
    assert (old.module, new.module) == ("sglang.jit_kernel.dsv4.moe", "sglang.kernels.ops.moe.dsv4")
    assert old.fingerprint == new.fingerprint != ""


def test_the_cuda_source_counts_and_so_does_the_struct_that_is_run(tmp_path: Path) -> None:
    whole = found(MASK, with_mask(tmp_path / "a")).fingerprint
    changed = with_mask(tmp_path / "b", cuda=CUDA_SOURCE.replace("row >= count", "row > count"))
    assert found(MASK, changed).fingerprint not in ("", whole)
    file = with_mask(tmp_path / "c") / "sglang/kernels/ops/moe/dsv4.py"
    file.write_text(file.read_text().replace("MaskKernel", "OtherKernel"))
    assert found(MASK, tmp_path / "c").fingerprint not in ("", whole)


def test_the_shapes_that_go_to_another_kernel_count(tmp_path: Path) -> None:
    known = found(GATE, with_gate(tmp_path / "a")).fingerprint
    changed = with_gate(tmp_path / "b", RADIX_SOURCE.replace("896", "256"))
    assert found(GATE, changed).fingerprint not in ("", known)


def in_topk(folder: Path, kernel: str) -> Path:
    body = (
        kernel.split("LIMIT = 4\n\n\n")[1]
        .split("\n\ndef unrelated_helper")[0]
        .replace("BLOCK=LIMIT", "BLOCK=4")
    )
    between = "\n\ndef _between(\n    a,\n) -> None:\n    _fill_padded_rows(a, a)\n"
    return tree(folder, {TOPK: "import triton\n\n\n" + body + between + "\n\n" + body + "\n\nX = 1\n"})


def test_a_kernel_in_topk_itself_is_cut_out_of_it_however_often_it_stands_there(tmp_path: Path) -> None:
    source = found(FILL, in_topk(tmp_path / "a", FILL_SOURCE))
    assert source.module == "sglang.srt.layers.moe.topk"
    topk = tmp_path / "a/sglang" / TOPK
    text = topk.read_text()

    topk.write_text(text.replace("X = 1", "X = 2").replace("-> None:", "-> None:\n    # more"))
    assert found(FILL, tmp_path / "a") == source

    second = text.rindex("row >= ")
    changed = text[:second] + "row > " + text[second + 7 :]
    assert changed.count("row > ") == 1
    others = [
        changed,
        text.replace("X = 1", "_fill_padded_rows_kernel = None"),
        text.replace("@triton.jit", "@triton"),
    ]
    for other in others:
        topk.write_text(other)
        assert found(FILL, tmp_path / "a").fingerprint not in ("", source.fingerprint)


def test_no_kernel_is_none(tmp_path: Path) -> None:
    assert find_kernel(FILL, tmp_path) is None
    root = tree(tmp_path, {TOPK: "import torch  # moe_fused_gate\nfrom sgl_kernel import moe_fused_gate\n"})
    assert [find_kernel(name, root) for name in (FILL, MASK, GATE)] == [None, None, None]
    assert kernels.is_known(GATE, root) is None


@pytest.mark.parametrize(
    "files",
    [
        {TOPK: "from sglang.a import moe_fused_gate\nfrom sglang.b import moe_fused_gate\n"},
        {TOPK: "from sglang.a import moe_fused_gate\n"},
        {TOPK: "from sglang.a import moe_fused_gate\n", "a.py": "moe_fused_gate = 3\n"},
        {TOPK: "from sglang.a import moe_fused_gate\n", "a.py": "def moe_fused_gate(:\n"},
        {TOPK: "from sglang.a import moe_fused_gate\n", "a.py": "from sglang.a import moe_fused_gate\n"},
        {
            TOPK: "from sglang.a import moe_fused_gate\n\n\ndef moe_fused_gate(x):\n    pass\n",
            "a.py": GATE_SOURCE,
        },
        {TOPK: "from sglang.a import moe_fused_gate\n", "a.py": GATE_SOURCE},
    ],
    ids=[
        "two places",
        "no file",
        "no function",
        "no Python",
        "a circle",
        "here and there",
        "no module beside it",
    ],
)
def test_what_cannot_be_told_has_no_fingerprint(tmp_path: Path, files: dict[str, str]) -> None:
    root = tree(tmp_path, files)
    assert found(GATE, root).fingerprint == ""
    assert kernels.is_known(GATE, root) is False


def test_bytes_that_are_no_text_have_no_fingerprint(tmp_path: Path) -> None:
    (with_fill(tmp_path) / "sglang/kernels/ops/moe/fill_padded_rows.py").write_bytes(
        FILL_SOURCE.encode() + b"x = '\xff'"
    )
    assert found(FILL, tmp_path).fingerprint == ""


def test_a_missing_cuda_file_has_no_fingerprint(tmp_path: Path) -> None:
    (with_mask(tmp_path) / "sglang/kernels/jit/csrc/deepseek_v4/hash_topk.cuh").unlink()
    assert found(MASK, tmp_path).fingerprint == ""


def test_only_a_known_kernel_is_replaced_and_by_its_own_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = with_gate(tmp_path)
    gate = kernels.EMULATIONS[GATE]
    assert kernels.is_known(GATE, root) is False
    with pytest.raises(
        kernels.NotEmulated, match=r"^moe_fused_gate: the tree's source of it is not one that was compared$"
    ):
        gate.replacement(root)

    learnt = replace(gate, known={found(GATE, root).fingerprint: "0.5.17"})
    monkeypatch.setattr(kernels, "EMULATIONS", {GATE: learnt})

    assert kernels.is_known(GATE, root) is True
    assert learnt.replacement(root) == kernels.FusedGate((0, 5, 17))
