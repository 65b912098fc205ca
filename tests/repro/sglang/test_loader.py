"""What of a tree is loaded, what stands around it, and what never reaches it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.engines.sglang.process import Worker
from repro.engines.sglang.worker.loader import compiled, prepare
from repro.engines.sglang.worker.shims import OPTIONAL_PACKAGES
from repro.errors import NotVerifiedError

MINITREE = Path(__file__).parents[2] / "data" / "minitree"
TOPK = "sglang/srt/layers/moe/topk.py"
UTILS = "sglang/srt/layers/moe/utils.py"
ENVIRON = "sglang/srt/environ.py"
DISPATCH = "sglang/srt/eplb/expert_location_dispatch.py"
REGISTRY = "sglang/srt/model_executor/cuda_graph_buffer_registry.py"
BATCH_INFO = "sglang/srt/model_executor/forward_batch_info.py"
SHARED = "sglang/srt/configs/shared_experts.py"
FUTURE = "from __future__ import annotations\n"

ROUTE: dict[str, Any] = {
    "branch": "grouped",
    "scoring_func": "softmax",
    "top_k": 2,
    "num_fused_shared_experts": 0,
    "renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "hidden_states": "hidden_states",
    "router_logits": "router_logits",
    "rows": [0, 4],
    "router": None,
    "correction_bias": None,
    "dispatch": None,
}
RANK = {"attn_tp_size": 1, "attn_tp_rank": 0}
MASKED: dict[str, Any] = {"rank": RANK, "count": 2, "route": ROUTE}
REPLAYED: dict[str, Any] = {
    "rank": RANK,
    "count": {
        "replay": {
            "mode": "prefill",
            "require_gathered_buffer": True,
            "enable_prefill_cp": False,
            "sharded": True,
            "tokens_per_request": 1,
            "bucket": 8,
            "fills": [{"global": 3, "carried": None, "raw_num_tokens": 4}],
        }
    },
    "route": None,
}
TENSORS = {"hidden_states": torch.zeros(4, 8), "router_logits": torch.arange(16.0).reshape(4, 4)}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


Change = Callable[..., Path]
Reason = Callable[..., str]


@pytest.fixture
def changed(tmp_path: Path) -> Change:
    """A copy of the mini tree in which ``files`` have another text, or the one that a function makes of theirs."""

    def changed(files: dict[str, str | Callable[[str], str] | None], folder: str = "tree") -> Path:
        root = tmp_path / folder
        shutil.copytree(MINITREE, root)
        for name, text in files.items():
            if text is None:
                (root / name).unlink()
            else:
                old = (root / name).read_text() if (root / name).exists() else ""
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text if isinstance(text, str) else text(old))
        return root

    return changed


def line_of(text: str) -> int:
    """Where in the mini tree's topk.py a text stands."""
    lines = (MINITREE / TOPK).read_text().split("\n")
    (number,) = (number for number, line in enumerate(lines, 1) if text in line)
    return number


def before(text: str) -> Callable[[str], str]:
    """Puts text before all else but the import from the future, which has to come first."""
    return lambda old: FUTURE + text + old.replace(FUTURE, "")


@pytest.fixture
def reason(worker: Worker) -> Iterator[Reason]:
    """Why a tree cannot be verified, or ``verified``."""

    def reason(root: Path, item: dict[str, Any] = MASKED, platform: str = "cuda") -> str:
        try:
            worker.open(tree=str(root), platform=platform)
            (result,), _ = worker.observe([item], TENSORS)
        except NotVerifiedError as err:
            return str(err)
        assert result["error"] is None
        return str(result["cannot_verify"] or "verified")

    yield reason
    worker.close()


@pytest.mark.parametrize("item", [MASKED, REPLAYED])
@pytest.mark.parametrize("platform", ["cuda", "hip", "cpu"])
def test_the_mini_tree_is_verified(reason: Reason, platform: str, item: dict[str, Any]) -> None:
    assert reason(MINITREE, item, platform) == "verified"


def test_a_tree_is_described_by_what_was_loaded_stood_in_for_and_named(worker: Worker) -> None:
    opened = worker.open(tree=str(MINITREE), platform="cuda")
    results, _ = worker.observe([MASKED, REPLAYED], TENSORS)
    worker.close()
    described = results[-1]["described"]
    assert "described" not in results[0]
    reasons = {name: reason for name, reason in described.pop("shims").items() if reason}
    assert sorted(reasons) == [
        "cpu_has_amx_support",
        "get_bool_env_var",
        "get_exec",
        "get_flags",
        "get_global_expert_distribution_recorder",
        "get_global_experts_capturer",
        "get_parallel",
        "get_server_args",
        "is_cpu",
        "is_cuda",
        "is_gfx95_supported",
        "is_hip",
        "is_musa",
        "is_npu",
        "is_xpu",
        "msgspec.Struct",
        "torch.compile",
        "torch.library.register_fake",
        "triton",
    ]
    real = [
        "sglang.srt.layers.moe.topk",
        "sglang.kernels.ops.moe.fill_padded_rows",
        "sglang.srt.configs.shared_experts",
        "sglang.srt.environ",
        "sglang.srt.eplb.expert_location_dispatch",
        "sglang.srt.layers.moe.utils",
    ]
    assert opened["real"] == real
    stubs = described.pop("stubs")
    assert described == {
        "mode": "isolated",
        "note": "",
        "platform": "cuda",
        "real": [
            *real,
            "sglang.srt.model_executor.cuda_graph_buffer_registry",
            "sglang.srt.model_executor.forward_batch_info",
            "sglang.srt.model_executor.input_buffers",
        ],
        "kernels": [],
    }
    assert stubs == [
        "_fill_padded_rows_kernel (a kernel whose source moepad does not know)",
        "sgl_kernel.topk_softmax",
        "sglang.srt.eplb.expert_location.get_global_expert_location_metadata",
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend",
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend | ...",
        "sglang.srt.layers.utils.MultiPlatformOp",
        "sglang.srt.model_executor.mixins.ForwardBatchTboMixin",
        "sglang.srt.utils.get_compiler_backend",
        "sglang.srt.utils.get_compiler_backend()",
        "sglang.srt.utils.log_info_on_rank0",
        "triton.language.constexpr",
    ]


# What a tree may import.


@pytest.mark.parametrize("package", OPTIONAL_PACKAGES)
def test_an_optional_package_does_not_import(changed: Change, reason: Reason, package: str) -> None:
    text = f"""\
for name in ("{package}", "{package}.part"):
    try:
        __import__(name)
    except ModuleNotFoundError as err:
        if err.name != "{package}":
            raise ValueError(err.name)
    else:
        raise ValueError(name)
try:
    from {package}.part import thing
    raise ValueError("imported")
except ImportError:
    pass
"""
    assert reason(changed({TOPK: before(text)})) == "verified"


@pytest.mark.parametrize("package", ["packaging", "pytest", "typer", "sgl_kernel"])
def test_any_other_package_is_a_stand_in_whether_it_is_here_or_not(
    changed: Change, reason: Reason, package: str
) -> None:
    assert reason(changed({TOPK: before(f"import {package}.version as p\nX = p.parse('1')\n")})) == (
        f"stand-in {package}.version.parse was called at {TOPK}:3"
    )


def test_the_standard_library_torch_and_what_it_stands_on_are_real(changed: Change, reason: Reason) -> None:
    text = "import json, torch, torch.nn.functional, typing_extensions\njson.loads('1'); torch.zeros(1)\n"
    assert reason(changed({TOPK: before(text)})) == "verified"


def test_modules_of_the_tree_beyond_those_under_test_are_stand_ins(changed: Change, reason: Reason) -> None:
    root = changed(
        {
            TOPK: before("from sglang.srt.layers.moe.helper import helped\nX = helped()\n"),
            "sglang/srt/layers/moe/helper.py": "def helped():\n    return 1\n",
        }
    )
    assert reason(root) == f"stand-in sglang.srt.layers.moe.helper.helped was called at {TOPK}:3"


def test_a_module_under_test_is_reached_by_every_way_of_importing_it(changed: Change, reason: Reason) -> None:
    text = """\
import sglang.srt.environ
import sglang.srt.environ as a
from sglang.srt import environ as b
from sglang.srt.environ import envs as c
from ... import environ as d
from ...environ import envs as e
from sglang.srt.layers import moe
assert sglang.srt.environ.envs is a.envs is b.envs is c is d.envs is e
assert moe.utils.MoeRunnerBackend.AUTO.value == "auto"
"""
    assert reason(changed({TOPK: before(text)})) == "verified"


def test_what_a_package_exports_of_a_module_under_test_is_real(changed: Change, reason: Reason) -> None:
    root = changed(
        {
            "sglang/srt/layers/moe/__init__.py": "from sglang.srt.layers.moe.elsewhere import other\n"
            "from sglang.srt.layers.moe.utils import MoeRunnerBackend as Backend\n",
            TOPK: before(
                "from sglang.srt.layers.moe import Backend, other\nassert Backend.AUTO.value == 'auto'\n"
            ),
        }
    )
    assert reason(root) == "verified"


@pytest.mark.parametrize("platform", ["cuda", "hip", "cpu"])
def test_a_platform_is_what_was_asked_for(changed: Change, reason: Reason, platform: str) -> None:
    text = f"""\
from sglang.srt.utils import is_cpu, is_cuda, is_hip, is_npu
from sglang.srt.utils.common import is_cuda as is_cuda_too
if [is_cuda(), is_hip(), is_cpu(), is_npu(), is_cuda_too()] != {
        [platform == "cuda", platform == "hip", platform == "cpu", False, platform == "cuda"]
    }:
    raise ValueError
"""
    root = changed({TOPK: before(text)})
    assert reason(root, platform=platform) == "verified"


# What does not reach a tree.


def test_variables_of_engines_and_compilers_do_not_reach_a_tree(
    changed: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = [
        "SGLANG_X",
        "SGL_X",
        "VLLM_X",
        "TRITON_X",
        "TORCHINDUCTOR_X",
        "TORCH_COMPILE_DEBUG",
        "FLASHINFER_X",
    ]
    dropped += ["PYTHONOPTIMIZE", "PYTHONWARNINGS"]
    for name in [*dropped, "OTHER_X"]:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SGLANG_MINI_SKIP_MASK", "1")
    text = "import os\nraise ValueError(sorted(name for name in os.environ if name in %r))\n"
    told = changed({TOPK: before(text % [*dropped, "OTHER_X"])}, "told")
    with Worker() as worker:
        with pytest.raises(NotVerifiedError, match=r"does not load: ValueError: \['OTHER_X'\] at "):
            worker.open(tree=str(told), platform="cuda")
        worker.open(tree=str(MINITREE), platform="cuda")
        _, seen = worker.observe([MASKED], TENSORS)
    assert seen["ids.0"].tolist() == [[3, 2], [3, 2], [-1, -1], [-1, -1]]


def test_a_variable_that_the_tree_sets_itself_does_reach_it(changed: Change, worker: Worker) -> None:
    root = changed({TOPK: before("import os\nos.environ['SGLANG_MINI_SKIP_MASK'] = '1'\n")})
    worker.open(tree=str(root), platform="cuda")
    _, seen = worker.observe([MASKED], TENSORS)
    worker.close()
    assert seen["ids.0"].tolist() == [[3, 2]] * 4


def test_no_bytecode_is_written_into_a_tree(changed: Change, reason: Reason) -> None:
    root = changed({})
    files = sorted(
        str(path.relative_to(MINITREE)) for path in MINITREE.rglob("*") if "__pycache__" not in str(path)
    )
    for platform in ("cuda", "hip"):
        assert reason(root, REPLAYED, platform) == "verified"
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*")) == files


def test_one_platform_sees_nothing_of_another(changed: Change, reason: Reason) -> None:
    root = changed({TOPK: before("import torch\nassert not hasattr(torch, 'mini')\ntorch.mini = 1\n")})
    assert [reason(root, platform=platform) for platform in ("cuda", "hip", "cuda")] == ["verified"] * 3


@pytest.mark.parametrize("folder", ["a b", "a#b", "@", "日本", "a'b", "sglang"])
def test_a_tree_may_lie_anywhere(changed: Change, reason: Reason, folder: str) -> None:
    assert reason(changed({}, folder), REPLAYED) == "verified"


# Trees that do not load.

DOES_NOT_LOAD = "{} does not load: "
BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no topk.py": ({TOPK: None}, MASKED, f"the tree has no {TOPK}"),
    "no registry": ({REGISTRY: None}, REPLAYED, f"the tree has no {REGISTRY}"),
    "no batch": (
        {BATCH_INFO: None},
        REPLAYED,
        f"the tree has no {BATCH_INFO}",
    ),
    "no remap": (
        {DISPATCH: None},
        MASKED,
        "verified",
    ),
    "no environment": (
        {ENVIRON: None},
        MASKED,
        f"stand-in sglang.srt.environ.envs was loaded at {TOPK}:{line_of('envs.SGLANG_MINI_SKIP_MASK')}",
    ),
    "a syntax error": (
        {TOPK: "x = 1\ndef select_experts(:\n"},
        MASKED,
        f"{TOPK} does not load: SyntaxError: invalid syntax (topk.py, line 2)",
    ),
    "a syntax error in a module that it imports": (
        {UTILS: "x = (\n"},
        MASKED,
        f"{TOPK} does not load: SyntaxError: '(' was never closed (utils.py, line 1) "
        f"at {TOPK}:{line_of('from sglang.srt.layers.moe.utils')}",
    ),
    "a syntax error in a module that is not reached": ({REGISTRY: "x = (\n"}, MASKED, "verified"),
    "a null byte": (
        {TOPK: "x = 1\n\0"},
        MASKED,
        f"{TOPK} does not load: SyntaxError: source code string cannot contain null bytes",
    ),
    "no code at all": ({TOPK: ""}, MASKED, "sglang.srt.layers.moe.topk of this tree has no select_experts"),
    "an exception": (
        {TOPK: "x = 1\nraise KeyError('x')\n"},
        MASKED,
        f"{TOPK} does not load: KeyError: 'x' at {TOPK}:2",
    ),
    "an exception deeper down": (
        {UTILS: "def f():\n    raise OSError('no disk')\nf()\n"},
        MASKED,
        f"{TOPK} does not load: OSError: no disk at {UTILS}:2",
    ),
    "a name that a module under test does not have": (
        {TOPK: before("from sglang.srt.environ import other\n")},
        MASKED,
        f"{TOPK} does not load: ImportError: cannot import name 'other' from 'sglang.srt.environ' "
        f"({{root}}/{ENVIRON}) at {TOPK}:2",
    ),
    "a circle": (
        {UTILS: before("from sglang.srt.layers.moe.topk import select_experts\n")},
        MASKED,
        f"{TOPK} does not load: ImportError: cannot import name 'select_experts' from partially initialized module "
        f"'sglang.srt.layers.moe.topk' (most likely due to a circular import) ({{root}}/{TOPK}) at {UTILS}:2",
    ),
    "a struct of another kind": (
        {SHARED: lambda old: old.replace("frozen=True", "kw_only=True")},
        MASKED,
        "SharedExpertsConfig is a msgspec.Struct with the options {{'kw_only': True}}",
    ),
    "an exception that says nothing": (
        {TOPK: "raise ValueError\n"},
        MASKED,
        f"{TOPK} does not load: ValueError at {TOPK}:1",
    ),
    "an exception of many lines": (
        {TOPK: "raise ValueError('one\\n  two\\tthree')\n"},
        MASKED,
        f"{TOPK} does not load: ValueError: one two three at {TOPK}:1",
    ),
    "an exit": ({TOPK: "raise SystemExit('bye')\n"}, MASKED, "SystemExit: bye"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_tree_that_does_not_load_says_why(changed: Change, reason: Reason, kind: str) -> None:
    files, item, expected = BROKEN[kind]
    root = changed(files)
    assert reason(root, item) == expected.format(root=root)


def test_a_module_that_does_not_load_is_no_reason_against_what_needs_it_not(
    changed: Change, worker: Worker
) -> None:
    root = changed({REGISTRY: "raise ValueError('no')\n"})
    worker.open(tree=str(root), platform="cuda")
    results, seen = worker.observe([MASKED, REPLAYED, MASKED], TENSORS)
    worker.close()
    assert [result["cannot_verify"] for result in results] == [
        None,
        f"{REGISTRY} does not load: ValueError: no at {REGISTRY}:1",
        None,
    ]
    assert sorted(seen) == ["ids.0", "ids.2", "weights.0", "weights.2"]


def test_a_stand_in_that_ended_an_import_spoils_that_module_alone(changed: Change, worker: Worker) -> None:
    root = changed({REGISTRY: "from missing.pkg import thing\nX = thing()\n"})
    worker.open(tree=str(root), platform="cuda")
    results, _ = worker.observe([MASKED, REPLAYED, MASKED], TENSORS)
    worker.close()
    said = f"stand-in missing.pkg.thing was called at {REGISTRY}:2"
    assert [result["cannot_verify"] for result in results] == [None, said, None]


def test_what_is_wrong_with_a_tree_is_not_told_when_it_is_compiled_ahead(tmp_path: Path) -> None:
    file = tmp_path / TOPK
    file.parent.mkdir(parents=True)
    for text in (b"def (", b"x = '\xff'", b"\0", b"(" * 100_000):
        file.write_bytes(text)
        assert prepare(tmp_path) is None
        with pytest.raises((SyntaxError, ValueError, MemoryError, RecursionError)):
            compiled(file, TOPK)


# The plain-Python Struct.

STRUCT = """\
import msgspec
class A(msgspec.Struct, frozen=True):
    one: int
    two: int = 2
def raised(kind, text, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except kind as err:
        if str(err) != text:
            raise ValueError(str(err))
    else:
        raise ValueError(text)
raised(TypeError, "Missing required argument 'one'", A)
raised(TypeError, "Unexpected keyword argument 'three'", A, one=1, three=3)
raised(AttributeError, "immutable type: 'A' (one)", setattr, A(one=1), "one", 2)
if not (A(one=1) == A(one=1, two=2) != A(one=2) and hash(A(one=1)) == hash(A(one=1, two=2)) and A(one=1).two == 2):
    raise ValueError
if A(one=1) == 1:
    raise ValueError
"""


def test_a_struct_does_what_msgspec_does(changed: Change, reason: Reason) -> None:
    assert reason(changed({TOPK: before(STRUCT)})) == "verified"


# Settings.


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("get_parallel().tp_size", "parallel state.tp_size was read"),
        ("getattr(get_parallel(), 'tp_size', 1)", "parallel state.tp_size was read"),
        ("hasattr(get_parallel(), 'tp_size')", "parallel state.tp_size was read"),
        ("setattr(get_parallel(), 'tp_size', 1)", "parallel state.tp_size was written"),
        ("get_flags().moe.other", "flags, moe.other was read"),
        ("get_exec().other", "execution settings.other was read"),
        ("get_exec().moe.other", "execution settings, moe.other was read"),
    ],
)
def test_a_setting_that_is_not_known_is_no_none(changed: Change, reason: Reason, use: str, said: str) -> None:
    text = "from sglang.srt.runtime_context import get_exec, get_flags, get_parallel\n"

    def used(old: str) -> str:
        return before(text)(old).replace(
            "    config = topk_config\n", f"    config = topk_config\n    {use}\n"
        )

    line = line_of("    config = topk_config") + 2
    assert reason(changed({TOPK: used})) == f"stand-in {said} at {TOPK}:{line}"


def made_whole(root: Path) -> Path:
    """A tree as a whole package: what it imports of SGLang is there too, in so many words."""
    words = " ".join(re.findall(r"\w+", "".join(path.read_text() for path in root.rglob("*.py"))))
    for name in (
        *("srt/utils", "srt/runtime_context", "srt/layers/utils", "srt/eplb/expert_distribution"),
        *("srt/eplb/expert_location", "srt/state_capturer/routed_experts", "srt/layers/dp_attention"),
    ):
        path = root / "sglang" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {words}\n")
    (root / "sglang" / "__init__.py").touch()
    return root


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", ""),
        (
            "from sglang.srt.layers.moe.elsewhere import limit\n",
            "ModuleNotFoundError: No module named 'sglang.srt.layers.moe.elsewhere'",
        ),
        (
            "from sglang.srt.runtime_context import get_nothing\n",
            "ImportError: cannot import name 'get_nothing' from 'sglang.srt.runtime_context' (unknown location)",
        ),
    ],
)
def test_what_a_whole_tree_does_not_have_cannot_be_imported(
    changed: Change, worker: Worker, line: str, reason: str
) -> None:
    root = made_whole(changed({}))
    (root / TOPK).write_text((root / TOPK).read_text().replace(FUTURE, f"{FUTURE}{line}"))
    try:
        told = str(worker.open(tree=str(root), platform="cuda")["note"])
    except NotVerifiedError as err:
        told = str(err)
    assert told == (f"{TOPK} does not load: {reason} at {TOPK}:4" if reason else "")
