"""Native mode without a GPU: a package that imports as it is, on a machine that is told to have one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
MINITREE = ROOT / "tests" / "data" / "minitree"

# What the mini tree imports of SGLang and of others, as a whole installation would have it.
REST = {
    "sglang/srt/utils.py": """
import torch
def is_cuda(): return torch.cuda.is_available() and torch.version.hip is None
def is_hip(): return torch.version.hip is not None
def _no(): return False
is_cpu = is_npu = is_xpu = is_musa = cpu_has_amx_support = is_gfx95_supported = _no
def get_compiler_backend(): return "eager"
def get_bool_env_var(name, default="false"): return default == "true"
def log_info_on_rank0(*args): pass
""",
    "sglang/srt/runtime_context.py": """
def get_server_args(): raise ValueError("not published")
def get_parallel(): raise RuntimeError("no server is running")
def get_exec(): raise RuntimeError("no server is running")
class Flags:
    class moe:
        runner_backend = None
        a2a_backend = None
def get_flags(): return Flags
""",
    "sglang/srt/eplb/expert_distribution.py": """
class Recorder:
    def on_select_experts(self, topk_ids): pass
def get_global_expert_distribution_recorder(): return Recorder()
""",
    "sglang/srt/state_capturer/routed_experts.py": """
class Capturer:
    def capture(self, **given): pass
def get_global_experts_capturer(): return Capturer()
""",
    "sglang/srt/eplb/expert_location.py": "def get_global_expert_location_metadata(): return None\n",
    "sglang/srt/layers/utils.py": "class MultiPlatformOp: pass\n",
    "sglang/srt/layers/attention/base_attn_backend.py": "class AttentionBackend: pass\n",
    "sglang/srt/model_executor/mixins.py": "class ForwardBatchTboMixin: pass\n",
    "sglang/srt/server_args.py": "class ServerArgs: pass\n",
    "sgl_kernel.py": "def topk_softmax(*args): raise RuntimeError('no kernel')\n",
    "triton/__init__.py": "def jit(function): return function\ndef next_power_of_2(n): return n\n",
    "triton/language.py": "constexpr = int\n",
    "msgspec.py": """
import dataclasses
class Struct:
    def __init_subclass__(cls, frozen=False): dataclasses.dataclass(frozen=frozen)(cls)
""",
}

# A session in a process of its own, on CPU tensors in the place of a GPU's.
SCRIPT = """
import json, sys
import torch
torch.cuda.is_available = lambda: True
torch.version.hip = sys.argv[3] or None
torch.library.register_fake = lambda *args: lambda function: function
torch.compile = lambda function=None, **options: function or (lambda wrapped: wrapped)
from repro.engines.sglang.worker import adapter, native
native.NativeTree.device = "cpu"
sys.path.insert(0, sys.argv[1])
session = adapter.Session(sys.argv[1], sys.argv[2])
logits = torch.arange(32.0).reshape(4, 8).sin()
weights, ids = logits.softmax(dim=1).topk(2, dim=1)
route = {
    "branch": "custom", "scoring_func": "softmax", "top_k": 2, "num_fused_shared_experts": 0, "renormalize": False,
    "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "hidden_states": "h",
    "router_logits": "l", "rows": [0, 4], "router": {"weights": "w", "ids": "i"}, "correction_bias": None,
    "dispatch": None,
}
replay = {
    "mode": "prefill", "require_gathered_buffer": True, "enable_prefill_cp": False, "sharded": True,
    "tokens_per_request": 1, "bucket": 16, "fills": [{"global": 6, "carried": None, "raw_num_tokens": 8}],
}
items = [
    {"rank": {"attn_tp_size": 4, "attn_tp_rank": 1}, "count": {"replay": replay}, "route": route},
    {"rank": {"attn_tp_size": 4, "attn_tp_rank": 0}, "count": {"replay": replay}, "route": None},
]
tensors = {"h": torch.zeros(4, 2), "l": logits, "w": weights, "i": ids.int()}
results, given = session.observe(items, tensors)
print(json.dumps({
    **session.describe(),
    "counts": [result["count"] for result in results],
    "reasons": [result["cannot_verify"] for result in results],
    "masked": (given["ids.0"] == -1).all(dim=1).tolist() if "ids.0" in given else None,
    "real_kept": torch.equal(given["ids.0"][:2], ids[:2].int()) if "ids.0" in given else None,
}))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    shutil.copytree(MINITREE, tmp_path / "installed")
    for name, source in REST.items():
        path = tmp_path / "installed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path / "installed"


def told(package: Path, platform: str, *, hip: str = "") -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(package), platform, hip],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_package_that_imports_is_run_as_it_is(package: Path) -> None:
    answer = told(package, "cuda")
    assert (answer["mode"], answer["note"], answer["stubs"], answer["kernels"]) == ("native", "", [], [])
    assert sorted(answer["shims"]) == ["get_exec", "get_parallel", "get_server_args"]
    assert (answer["counts"], answer["reasons"]) == ([2, 4], [None, None])
    assert (answer["masked"], answer["real_kept"]) == ([False, False, True, True], True)


def test_a_machine_of_the_other_platform_runs_it_isolated(package: Path) -> None:
    answer = told(package, "hip")
    assert (answer["mode"], answer["note"], answer["counts"]) == ("isolated", "", [2, 4])


def test_a_package_that_does_not_import_is_run_isolated_and_says_why(package: Path) -> None:
    (package / "sglang" / "srt" / "eplb" / "expert_location.py").unlink()
    answer = told(package, "cuda")
    assert answer["mode"] == "isolated"
    assert answer["note"] == (
        "not native: sglang.srt.layers.moe.topk does not import: ModuleNotFoundError: "
        "No module named 'sglang.srt.eplb.expert_location'"
    )
    assert (answer["counts"], answer["reasons"]) == ([2, 4], [None, None])


def test_a_package_that_takes_the_machine_for_another_is_run_isolated(package: Path) -> None:
    utils = package / "sglang" / "srt" / "utils.py"
    utils.write_text(utils.read_text() + "is_cuda = _no\n")
    answer = told(package, "cuda")
    assert (answer["mode"], answer["note"]) == (
        "isolated",
        "not native: the package does not take this machine for cuda",
    )
    assert answer["counts"] == [2, 4]
