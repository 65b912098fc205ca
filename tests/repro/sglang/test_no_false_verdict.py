"""No tree is called safe that is not: shims taken away, faults planted, trees that misbehave.

All offline, on copies of ``tests/data/minitree``, which the default suite finds safe in all of its cases.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

import pytest

from moepad_cli.app import main
from repro.checks import NOT_VERIFIED, SAFE, CaseResult, check_cases, check_verdict
from repro.engines.sglang.engine import SglangEngine
from repro.engines.sglang.locate import Tree
from repro.engines.sglang.process import Worker
from repro.engines.sglang.worker.kernels import EMULATIONS
from repro.engines.sglang.worker.loader import REGISTER_FAKE, STRUCT, TORCH_COMPILE, TRITON
from repro.engines.sglang.worker.shims import SHIMS
from repro.suite import load_suite

ROOT = Path(__file__).parents[3]
MINITREE = ROOT / "tests" / "data" / "minitree"
TOPK = "sglang/srt/layers/moe/topk.py"
FILL = "sglang/kernels/ops/moe/fill_padded_rows.py"
REGISTRY = "sglang/srt/model_executor/cuda_graph_buffer_registry.py"
BATCH_INFO = "sglang/srt/model_executor/forward_batch_info.py"

SUITE = load_suite("default")
ALL = frozenset(case.name for case in SUITE)
HIP = frozenset(case.name for case in SUITE if case.scenario.platform == "hip")
COUNT = frozenset(case.name for case in SUITE if case.fault == "count")
REMAPPED = frozenset(case.name for case in SUITE if case.scenario.eplb != "none")
GROUPED = COUNT | {case.name for case in SUITE if "grouped" in case.scenario.branch}
SHARDED = frozenset(case.name for case in SUITE if case.fault == "count" and case.scenario.plan().sharded)

# (file, what stands there once, what takes its place)
Change = tuple[str, str, str]
Check = Callable[..., list[CaseResult]]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


@pytest.fixture(scope="module")
def check(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Check:
    """The default suite on the mini tree with ``changes``, and without some shims."""

    def check(*changes: Change, without: tuple[str, ...] = ()) -> list[CaseResult]:
        root = changed_tree(tmp_path_factory.mktemp("changed"), *changes) if changes else MINITREE
        engine = SglangEngine(Tree("tree", root, ""), worker, without)
        return [row[0] for row in check_cases(SUITE, [engine])]

    return check


def changed_tree(folder: Path, *changes: Change) -> Path:
    root = folder / "tree"
    shutil.copytree(MINITREE, root)
    for name, old, new in changes:
        text = (root / name).read_text()
        assert text.count(old) == 1, (name, old)
        (root / name).write_text(text.replace(old, new))
    return root


def cases_of(results: list[CaseResult], verdict: str) -> set[str]:
    return {result.case.name for result in results if result.verdict == verdict}


def test_the_tree_as_it_is_is_safe_in_all_cases(check: Check) -> None:
    results = check()
    assert cases_of(results, SAFE) == ALL
    assert check_verdict(results).exit_code == 0


# Shims.

# Before 0.5.14 the size and rank came from functions of their own, and so did the server's arguments.
OLDER: tuple[Change, ...] = (
    (
        BATCH_INFO,
        "from sglang.srt.runtime_context import get_parallel",
        "from sglang.srt.layers.dp_attention import get_attention_tp_rank, get_attention_tp_size",
    ),
    (BATCH_INFO, "    parallel = get_parallel()\n", ""),
    (
        BATCH_INFO,
        "num_tokens_per_dp // parallel.attn_tp_size",
        "num_tokens_per_dp // get_attention_tp_size()",
    ),
    (BATCH_INFO, "tokens_per_rank * parallel.attn_tp_rank", "tokens_per_rank * get_attention_tp_rank()"),
    (
        TOPK,
        "from sglang.srt.runtime_context import get_server_args",
        "from sglang.srt.server_args import get_global_server_args",
    ),
    (TOPK, "get_server_args().enable_eplb", "get_global_server_args().enable_eplb"),
)
# Shim -> the cases that cannot be verified without it, on the tree as it is or on the older one.
USED_BY: dict[str, frozenset[str] | set[str]] = {
    "is_cuda": ALL,
    "is_hip": ALL,
    "is_cpu": ALL,
    "is_npu": ALL,
    "is_xpu": ALL,
    "is_musa": ALL,
    "cpu_has_amx_support": ALL,
    "is_gfx95_supported": HIP,
    "get_bool_env_var": ALL,
    "get_global_expert_distribution_recorder": ALL,
    "get_global_experts_capturer": ALL,
    "get_parallel": SHARDED,
    "get_server_args": HIP,
    "get_exec": REMAPPED,
    "get_flags": ALL,
    TORCH_COMPILE: GROUPED,
    REGISTER_FAKE: ALL - HIP,
    TRITON: ALL,
    STRUCT: ALL,
}
USED_BY_OLDER = {
    "get_attention_tp_size": SHARDED,
    "get_attention_tp_rank": SHARDED,
    "get_global_server_args": HIP,
}
without_each = pytest.mark.parametrize(
    ("shim", "older"), [*((shim, False) for shim in USED_BY), *((shim, True) for shim in USED_BY_OLDER)]
)


def test_every_shim_is_taken_away_in_these_tests() -> None:
    """Emulated kernels stand in for released sources alone, and are taken away in test_released.py."""
    known = {shim.name for shim in SHIMS} | {TORCH_COMPILE, REGISTER_FAKE, TRITON, STRUCT}
    assert known == USED_BY.keys() | USED_BY_OLDER.keys()
    assert not known & EMULATIONS.keys()


def test_every_shim_that_a_tree_took_is_told_of(worker: Worker) -> None:
    engine = SglangEngine(Tree("tree", MINITREE, ""), worker)
    check_cases(SUITE, [engine])
    assert {shim for loaded in engine.loaded.values() for shim in loaded["shims"]} == USED_BY.keys()


@without_each
def test_without_a_shim_the_cases_that_used_it_are_not_verified(check: Check, shim: str, older: bool) -> None:
    used_by = USED_BY_OLDER[shim] if older else USED_BY[shim]
    if shim == STRUCT and find_spec("msgspec"):  # the real one is taken where there is one
        used_by = set()
    results = check(*(OLDER if older else ()), without=(shim,))
    assert cases_of(results, NOT_VERIFIED) == used_by
    assert cases_of(results, SAFE) == ALL - used_by
    verdict = check_verdict(results)
    assert (verdict.status, verdict.exit_code) == (("not-verified", 3) if used_by else ("ok", 0))
    if used_by:
        assert all(
            shim.rpartition(".")[2] in result.reason or shim in UNNAMED for result in results if result.reason
        )


# What is missing then is told of in Python's own words.
UNNAMED = (REGISTER_FAKE, STRUCT)


# One pad row too many is routed, and counts are of the raw length.
WORST: tuple[Change, ...] = (
    (FILL, ">= count]", "> count]"),
    (REGISTRY, "        padded = context.padded_num_tokens\n        sharded = require_gathered_buffer and not",
     "        padded = context.raw_num_tokens\n        sharded = require_gathered_buffer and not"),
)  # fmt: skip


@pytest.fixture(scope="module")
def found_in_worst(check: Check) -> dict[bool, dict[str, str]]:
    """Whether the tree is the older one -> verdicts by case."""
    return {
        older: {result.case.name: result.verdict for result in check(*WORST, *(OLDER if older else ()))}
        for older in (False, True)
    }


@without_each
def test_without_a_shim_findings_stay_what_they_are_or_are_not_verified(
    check: Check, found_in_worst: dict[bool, dict[str, str]], shim: str, older: bool
) -> None:
    used_by = USED_BY_OLDER[shim] if older else USED_BY[shim]
    if shim == STRUCT and find_spec("msgspec"):
        used_by = set()
    found = found_in_worst[older]
    assert sum(verdict.startswith("PAD") for verdict in found.values()) == 32
    results = check(*WORST, *(OLDER if older else ()), without=(shim,))
    assert {result.case.name: result.verdict for result in results} == {
        name: NOT_VERIFIED if name in used_by else verdict for name, verdict in found.items()
    }
    assert check_verdict(results).exit_code == (3 if used_by == ALL else 1)


# Faults. (what is changed, {verdict: the cases or how many}); all other cases are safe.

REMAP = """\
    if info is not None:
        ids = expert_location_dispatch.topk_ids_logical_to_physical(ids, info)
"""
MASK = """\
    if masked and not _is_hip:
        _mask_topk_ids_padded_region(ids, num_token_non_padded, -1)
"""
COMPUTED = """\
            compute_local_num_token_non_padded_cpu(
                fb.global_num_token_non_padded_cpu, padded, sharded=sharded
            )
"""
SHARDED_IF = "require_gathered_buffer and not enable_prefill_cp and attn_tp_sharded_fn(padded)"
IDLE = {"one token, an idle rank", "prefill, an idle rank", "prefill, attention TP 8"}
IDLE_COUNT = IDLE & COUNT
NAN = {"NaN in pad rows"}
FULL = {"no pad rows", "prefill, no pad rows"}
INT64 = {"custom, int64 ids, bfloat16 weights", "hip, custom, int64 ids, bfloat16 weights"}
HIP_PLAIN = HIP - {"hip, custom, remapped", "hip, grouped, a fused shared expert"}
CUSTOM = ALL - COUNT - {case.name for case in SUITE if case.scenario.branch != "custom"}
UNSHARDED = {"prefill, replicated", "prefill, no gathered buffer", "prefill, context parallel"}
PREFILL = frozenset(case.name for case in SUITE if case.fault == "count" and case.scenario.mode == "prefill")


def _padded(verdict: str) -> dict[str, set[str]]:
    """The verdict of every case with pad rows, and what goes with it where a rank is idle or rows are NaN."""
    return {
        verdict: set(ALL - IDLE - NAN - FULL),
        f"{verdict} PAD010": NAN,
        f"{verdict} PAD018": IDLE,
    }


FAULTS: dict[str, tuple[tuple[Change, ...], dict[str, set[str]]]] = {
    "no mask": (((TOPK, "= num_token_non_padded is not None and", "= False and"),), _padded("PAD001")),
    "None in place of the count": (
        ((
                TOPK,
                "        ids, weights, router_logits, num_token_non_padded, exp",
                "        ids, weights, router_logits, None, exp",
            ),),
        _padded("PAD001"),
    ),
    "no mask on the custom branch": (
        (
            (
                TOPK,
                "    ids, weights = _post_process_topk_ids(",
                "    if config.custom_routing_function is not None:\n        num_token_non_padded = None\n"
                "    ids, weights = _post_process_topk_ids(",
            ),
        ),
        {
            "PAD001": CUSTOM - NAN - FULL - IDLE,
            "PAD001 PAD010": NAN,
            "PAD001 PAD018": CUSTOM & IDLE,
        },
    ),
    "no count on the custom branch": (
        (
            (
                TOPK,
                "    config = topk_config\n",
                "    config = topk_config\n    if config.custom_routing_function is not None:\n"
                '        assert num_token_non_padded is None, "no count here"\n',
            ),
        ),
        {
            "PAD001 PAD004": CUSTOM - NAN - FULL - IDLE,
            "PAD001 PAD004 PAD010": NAN,
            "PAD001 PAD004 PAD018": CUSTOM & IDLE,
            "PAD004": CUSTOM & FULL,
        },
    ),
    "no mask for int64 ids": (
        ((FILL, "    if rows <=", "    if out.dtype == torch.int64:\n        return\n    if rows <="),),
        {"PAD001": INT64},
    ),
    "the mask before the remap": (
        ((TOPK, REMAP + MASK, MASK + REMAP),),
        {"PAD001 PAD009": set(REMAPPED - HIP)},
    ),
    "the mask of AMD after the remap alone": (
        ((TOPK, "if masked and _is_hip:", "if False:"),),
        {"PAD001": HIP_PLAIN},
    ),
    "weights kept on AMD": (
        ((TOPK, "if masked and _is_hip and not _keeps_weights():", "if False:"),),
        {"PAD001 PAD009": set(HIP)},
    ),
    "weights kept on AMD with a remap": (
        ((TOPK, ".enable_eplb and _use_aiter", ".enable_eplb"),),
        {"PAD001 PAD009": set(HIP & REMAPPED)},
    ),
    "one pad row too many routed": (((FILL, ">= count]", "> count]"),), _padded("PAD001")),
    "one real row too many masked": (((FILL, ">= count]", ">= count - 1]"),), {"PAD002": set(ALL)}),
    "all rows masked": (((FILL, ">= count]", ">= 0]"),), {"PAD002": set(ALL)}),
    "the first row of a shard never masked": (
        ((FILL, "out[torch.arange(rows) >= count]", "out[torch.arange(rows) >= count.clamp(min=1)]"),),
        {
            "PAD001": ALL
            - IDLE
            - NAN
            - FULL
            - UNSHARDED
            - {"prefill, length is the bucket", "prefill, 100 tokens in 128", "prefill, attention TP 2"},
            "PAD001 PAD010": NAN,
            "PAD001 PAD018": IDLE,
        },
    ),
    "a shared column not masked": (
        ((TOPK, "_fill_padded_rows(topk_ids,", "_fill_padded_rows(topk_ids[:, :2],"),),
        {"PAD001": {"grouped, a fused shared expert"}},
    ),
    "weights masked in place of ids": (
        (
            (
                TOPK,
                MASK,
                MASK.replace("_mask_topk_ids_padded_region(ids", "_fill_padded_rows(weights").replace("-1", "0"),
            ),
        ),
        {"PAD001": ALL - HIP - IDLE - FULL, "PAD001 PAD018": IDLE},
    ),
    "the number of experts as the sentinel": (
        ((TOPK, "num_token_non_padded, -1)", "num_token_non_padded, router_logits.shape[1])"),),
        {
            "PAD001 PAD008": ALL
            - HIP
            - IDLE
            - NAN
            - FULL
            - {"custom, remapped, 4 redundant experts", "grouped, a fused shared expert"},
            "PAD001 PAD009": {"custom, remapped, 4 redundant experts", "grouped, a fused shared expert"},
            "PAD001 PAD008 PAD010": NAN,
            "PAD001 PAD008 PAD018": IDLE,
        },
    ),
    "no post_fill": (
        ((REGISTRY, "if slot.post_fill is not None:", "if False:"),),
        {"PAD002 PAD003": set(COUNT)},
    ),
    "the raw length": (
        ((REGISTRY, "        sharded = require_gathered_buffer and not", "        padded = context.raw_num_tokens\n"
          "        sharded = require_gathered_buffer and not"),),
        {"PAD001 PAD002 PAD003": PREFILL - UNSHARDED - FULL - {"prefill, length is the bucket"}},
    ),
    "the count that the batch carries": (
        ((REGISTRY, COMPUTED, "            int(fb.num_token_non_padded)\n"),),
        {"PAD001 PAD002 PAD003": PREFILL - UNSHARDED - FULL - {"prefill, length is the bucket"}},
    ),
    "the whole count": (
        ((REGISTRY, COMPUTED, "            fb.global_num_token_non_padded_cpu\n"),),
        {
            "PAD001 PAD003 PAD017": PREFILL
            - UNSHARDED
            - FULL
            - {"prefill, less than a shard", "prefill, one shard full"},
            "PAD001 PAD003": {"prefill, less than a shard", "prefill, one shard full"},
            "PAD003 PAD017": {"prefill, no pad rows"},
        },
    ),
    "never sharded": (
        ((REGISTRY, f"sharded = {SHARDED_IF}", "sharded = False"),),
        {
            "PAD001 PAD003 PAD017": PREFILL
            - UNSHARDED
            - FULL
            - {"prefill, less than a shard", "prefill, one shard full"},
            "PAD001 PAD003": {"prefill, less than a shard", "prefill, one shard full"},
            "PAD003 PAD017": {"prefill, no pad rows"},
        },
    ),
    "always sharded": (((REGISTRY, f"sharded = {SHARDED_IF}", "sharded = True"),), {"PAD002 PAD003": UNSHARDED}),
    "replicated taken for sharded": (
        ((REGISTRY, "enable_prefill_cp and attn_tp_sharded_fn(padded)", "enable_prefill_cp"),),
        {"PAD002 PAD003": {"prefill, replicated"}},
    ),
    "context parallelism not heeded": (
        ((REGISTRY, "and not enable_prefill_cp and", "and"),),
        {"PAD002 PAD003": {"prefill, context parallel"}},
    ),
    "the rank's offset lost": (
        ((BATCH_INFO, "tokens_per_rank * parallel.attn_tp_rank", "0"),),
        {"PAD001 PAD003": set(SHARDED - FULL)},
    ),
    "no clamp": (
        ((BATCH_INFO, "return min(max(global_num_token_non_padded - rank_offset, 0), tokens_per_rank)",
          "return global_num_token_non_padded - rank_offset"),),
        {
            "PAD003 PAD017": PREFILL - UNSHARDED - IDLE,
            "PAD003 PAD017 PAD018": IDLE_COUNT,
        },
    ),
    "the count of an earlier replay": (
        ((REGISTRY, "        buffer.fill_(\n", "        int(buffer) or buffer.fill_(\n"),),
        {"PAD001 PAD003": PREFILL - IDLE - FULL, "PAD001 PAD003 PAD018": IDLE_COUNT},
    ),
    "requests in place of tokens": (
        ((REGISTRY, "token_non_padded, padded, sharded", "token_non_padded, context.padded_bs, sharded"),),
        {"PAD001 PAD002 PAD003": {"decode, 4 tokens a request"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(check: Check, fault: str) -> None:
    changes, expected = FAULTS[fault]
    results = check(*changes)
    seen: dict[str, set[str]] = {}
    for result in results:
        seen.setdefault(result.verdict, set()).add(result.case.name)
    safe = seen.pop(SAFE, set())
    assert seen == expected
    assert safe == ALL - set().union(*expected.values())
    assert check_verdict(results).exit_code == 1


# Trees that misbehave, through the command line. (what stands before the tree's topk.py, options, why it is not
# verified)

MARK = "MOEPAD_TEST_MARK"
RETURN = "    return StandardTopKOutput(weights, ids, router_logits)\n"
ONE = ("--tokens", "3", "--bucket", "8", "--attn-tp", "2")


def _import(text: str) -> Change:
    return TOPK, '"""Which experts a row goes to."""\n\nfrom __future__ import annotations\n', text


def _routing(text: str) -> Change:
    return TOPK, RETURN, f"    {text}\n{RETURN}"


SHAPES = "engine {tree}: DP rank 0, attention-TP rank 0 gave "
HOSTILE: dict[str, tuple[tuple[Change, ...], tuple[str, ...], str]] = {
    "ends at import": ((_import("import os\nos._exit(0)"),), (), "the process ended: exit status 0"),
    "ends at import with a status": (
        (_import("import os\nos._exit(1)"),),
        ONE,
        "the process ended: exit status 1",
    ),
    "exits at import": (
        (_import("raise SystemExit(0)"),),
        ONE,
        "SystemExit: 0",
    ),
    "ends in select_experts": (
        (_routing("import os; os._exit(0)"),),
        ONE,
        "the process ended: exit status 0",
    ),
    "kills itself in select_experts": (
        (_routing("import os; os.kill(os.getpid(), 9)"),),
        ONE,
        "the process ended: signal SIGKILL",
    ),
    "loops for ever at import": (
        (_import("while True: pass"),),
        (*ONE, "--time-limit", "3"),
        "took longer than 3 s",
    ),
    "loops for ever in select_experts": (
        (_routing("\n    while True: pass"),),
        (*ONE, "--time-limit", "3"),
        "took longer than 3 s",
    ),
    "leaves a process behind": (
        (_import('import subprocess\nsubprocess.Popen(["sleep", "600"], start_new_session=True)\n1 / 0'),),
        ONE,
        "sglang/srt/layers/moe/topk.py does not load: ZeroDivisionError: division by zero "
        "at sglang/srt/layers/moe/topk.py:3",
    ),
    "writes to standard output": (
        (_import('print("all is well")'),),
        ONE,
        "wrote to standard output: 'all is well\\n'; only standard error is free to print to",
    ),
    "is no Python": (
        (_import("def select_experts(:"),),
        ONE,
        "sglang/srt/layers/moe/topk.py does not load: SyntaxError: invalid syntax (topk.py, line 1)",
    ),
    "gives another shape": (
        ((TOPK, RETURN, "    return StandardTopKOutput(weights[:, :1], ids[:, :1], router_logits)\n"),),
        ONE,
        SHAPES + "ids (4, 1) and weights (4, 1), not (4, 2)",
    ),
    "gives another dtype": (
        ((TOPK, RETURN, "    return StandardTopKOutput(weights, ids.to(torch.int16), router_logits)\n"),),
        ONE,
        "FrameError: 'ids.0': no frame holds int16, torch.strided",
    ),
    "takes all memory": (
        (_routing("torch.empty(1 << 40, dtype=torch.uint8)"),),
        ONE,
        "select_experts raised RuntimeError: *: you tried to allocate 1099511627776 bytes.* when given the count",
    ),
}


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """``moepad check``: its exit code and what came to standard output and error. No process may be left after."""

    def run(root: Path, *options: str) -> tuple[int, str, str]:
        mark = uuid.uuid4().hex
        monkeypatch.setenv(MARK, mark)
        status = main(["check", f"sglang@{root}", "--device", "cpu", *options])
        assert processes_marked(mark) == []
        return status, *capfd.readouterr()

    return run


@pytest.mark.parametrize("tree", HOSTILE)
def test_a_tree_that_misbehaves_is_not_verified(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, tree: str
) -> None:
    changes, options, reason = HOSTILE[tree]
    root = changed_tree(tmp_path, *changes)
    status, out, err = run(root, *options)
    assert (status, out) == (3, "")
    expected = f"moepad check: sglang@{root}: cannot verify: {reason.format(tree=f'sglang@{root}')}\n"
    if "*" in reason:
        assert fnmatchcase(err, expected)
        assert err.count("\n") == 1
    else:
        assert err == expected


def test_a_tree_that_misbehaves_on_one_platform_is_safe_on_the_other(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    root = changed_tree(
        tmp_path, (TOPK, "_is_other = ", "if _is_hip:\n    import os\n    os._exit(0)\n_is_other = ")
    )
    status, out, err = run(root)
    assert (status, err) == (3, "")
    lines = out.splitlines()
    assert f"verdict: sglang@{root}: not verified in 7 of 34 cases" in lines
    assert f"  sglang@{root}: 27 safe, 0 with findings, 7 not verified" in lines
    names = [case.name for case in SUITE if case.name in HIP]
    some = f"{'; '.join(names[:3])}; and {len(names) - 3} more cases"
    assert f"not checked: sglang@{root}: the process ended: exit status 0: {some}" in lines


def test_a_tree_that_misbehaves_does_so_in_a_process_of_its_own(tmp_path: Path) -> None:
    root = changed_tree(tmp_path, *HOSTILE["ends at import"][0])
    done = subprocess.run(
        [sys.executable, "-m", "moepad_cli", "check", f"sglang@{root}", "--device", "cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        3,
        "",
        f"moepad check: sglang@{root}: cannot verify: the process ended: exit status 0\n",
    )


def processes_marked(mark: str) -> list[str]:
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            if entry.isdigit() and f"{MARK}={mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(Path(f"/proc/{entry}/cmdline").read_text())
        except OSError:
            continue
    return found
