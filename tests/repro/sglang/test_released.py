"""Released SGLang, through the worker: what is known of it comes out again, and faults planted in it are found."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moepad_cli.app import main
from repro.checks import NOT_VERIFIED, SAFE, CaseResult, check_cases, check_verdict
from repro.engines.sglang.engine import SglangEngine
from repro.engines.sglang.locate import Tree, locate, released_versions
from repro.engines.sglang.process import Worker
from repro.engines.sglang.worker.loader import REAL_MODULES
from repro.suite import load_suite

pytestmark = pytest.mark.network

DATA = Path(__file__).parents[2] / "data"
SUITE = load_suite("default")
ALL = {case.name for case in SUITE}
VERSIONS = ("0.5.16", "0.5.17", "0.5.23")


def lines_of(name: str) -> list[dict[str, Any]]:
    text = gzip.decompress((DATA / f"released_{name}.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]


COUNTS, TOPK = lines_of("counts"), lines_of("topk")


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


def ask(
    worker: Worker, version: str, platform: str, items: list[dict[str, Any]], tensors: dict[str, Tensor]
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    worker.open(tree=root_of(version), platform=platform)
    results, seen = worker.observe(items, tensors)
    worker.close()
    results[-1].pop("described")
    return results, seen


def root_of(version: str) -> str:
    return str(locate(f"sglang=={version}").root)


def test_the_data_hold_these_versions_and_nothing_else() -> None:
    assert (len(COUNTS), len(TOPK)) == (1827, 78)
    assert {row["version"] for row in COUNTS} == {row["version"] for row in TOPK} == set(VERSIONS)


# Counts.


def count_item(row: dict[str, Any]) -> dict[str, Any]:
    fill = {
        "global": row["fb_global"],
        "carried": row["fb_num_token_non_padded"],
        "raw_num_tokens": row["raw"],
    }
    replay = {
        "mode": "prefill",
        "require_gathered_buffer": row["require_gathered_buffer"],
        "enable_prefill_cp": row["enable_prefill_cp"],
        "sharded": not row["replicated"],
        "tokens_per_request": 1,
        "bucket": row["bucket"],
        "fills": [fill],
    }
    rank = {"attn_tp_size": row["attn_tp_size"], "attn_tp_rank": row["rank"]}
    return {"rank": rank, "count": {"replay": replay}, "route": None}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_slot_of_every_rank_holds_what_it_held(worker: Worker, version: str) -> None:
    rows = [row for row in COUNTS if row["version"] == version]
    results, _ = ask(worker, version, "cuda", [count_item(row) for row in rows], {})
    assert results == [{"count": row["value"], "error": None, "cannot_verify": None} for row in rows]


# Ids and weights.

BRANCHES = {
    "custom": "custom",
    "custom_eplb": "custom",
    "custom_top1": "custom",
    "grouped": "grouped",
    "biased_grouped": "biased-grouped",
    "softmax": "softmax",
    "torch_native": "torch-native",
}


def route_item(row: dict[str, Any], count: int | None, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """One item, its tensors put among the others under a prefix of its own."""
    prefix = f"{len(tensors)}."
    given = {
        "hidden_states": torch.zeros(row["rows"], 16),
        "router_logits": torch.tensor(row["logits"]),
    }
    seen = row["reference"]
    if "router_ids" in row:
        given["weights"] = torch.tensor(row["router_weights"], dtype=getattr(torch, seen["weights_dtype"]))
        given["ids"] = torch.tensor(row["router_ids"], dtype=getattr(torch, seen["ids_dtype"]))
    if "correction_bias" in row:
        given["correction_bias"] = torch.tensor(row["correction_bias"])
    if "logical_to_physical" in row:
        given["rank_map"] = torch.tensor(row["logical_to_physical"])
        given["all_map"] = given["rank_map"][:, None]
        given["num_valid"] = torch.ones(row["experts"], dtype=torch.int64)
    tensors.update({prefix + name: value for name, value in given.items()})
    names = {name: prefix + name for name in given}
    dispatch = None
    if "rank_map" in names:
        dispatch = {"ep_dispatch_algorithm": "static", "num_physical_experts": row["experts"]}
        dispatch |= {name: names[name] for name in ("rank_map", "all_map", "num_valid")}
    route = {
        "branch": BRANCHES[row["kind"]],
        "scoring_func": "softmax",
        "top_k": row["top_k"],
        "num_fused_shared_experts": 0,
        "renormalize": row["renormalize"],
        # The data do not say how experts were grouped; of all pairs only this one explains them.
        "num_expert_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.0,
        "hidden_states": names["hidden_states"],
        "router_logits": names["router_logits"],
        "rows": [0, row["rows"]],
        "router": {name: names[name] for name in ("weights", "ids")} if "ids" in names else None,
        "correction_bias": names.get("correction_bias"),
        "dispatch": dispatch,
    }
    return {"rank": {"attn_tp_size": 1, "attn_tp_rank": 0}, "count": count, "route": route}


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
@pytest.mark.parametrize("version", VERSIONS)
def test_select_experts_gives_what_it_gave(worker: Worker, version: str, platform: str) -> None:
    rows = [row for row in TOPK if (row["version"], row["platform"]) == (version, platform)]
    tensors: dict[str, Tensor] = {}
    items = [route_item(row, count, tensors) for row in rows for count in (None, row["valid"])]
    results, seen = ask(worker, version, platform, items, tensors)
    for number, row in enumerate(rows):
        for index, name in ((2 * number, "reference"), (2 * number + 1, "result")):
            result, refused = results[index], name == "result" and "error" in row
            # Refused, the call was made again without a count.
            expected = row["reference" if refused else name]
            assert result == {
                "count": row["valid"] if name == "result" and not refused else None,
                "error": row["error"] if refused else None,
                "cannot_verify": None,
            }, row["cfg"]
            ids, weights = seen[f"ids.{index}"], seen[f"weights.{index}"]
            assert (str(ids.dtype), str(weights.dtype)) == (
                f"torch.{expected['ids_dtype']}",
                f"torch.{expected['weights_dtype']}",
            )
            assert ids.tolist() == expected["ids"], row["cfg"]
            assert weights.tolist() == expected["weights"], row["cfg"]


# Faults planted in 0.5.17, by text of our own put behind a module's. (file, text, {verdict: cases}); all other
# cases stay safe.

TOPK_FILE = "sglang/srt/layers/moe/topk.py"
REGISTRY_FILE = "sglang/srt/model_executor/cuda_graph_buffer_registry.py"
BATCH_FILE = "sglang/srt/model_executor/forward_batch_info.py"

MASK = """
_asked = _mask_topk_ids_padded_region
def _mask_topk_ids_padded_region(topk_ids, count=None, *args, **kwargs):
    {}
"""
FILL = """
_filled = CudaGraphBufferRegistry.fill_from
def _fill_from(self, *args, **kwargs):
    {}
_fill_from.__signature__ = __import__("inspect").signature(_filled)
CudaGraphBufferRegistry.fill_from = _fill_from
"""
BUILD = """
import functools
_built = build_prefill_registry
@functools.wraps(_built)
def build_prefill_registry(**kwargs):
    {}
"""

HIP = {case.name for case in SUITE if case.scenario.platform == "hip"}
COUNT = {case.name for case in SUITE if case.fault == "count"}
DECODE = {case.name for case in SUITE if case.scenario.mode == "decode"}
PREFILL = {case.name for case in SUITE if case.fault == "count" and case.scenario.mode == "prefill"}
REMAPPED = {case.name for case in SUITE if case.scenario.eplb != "none"}
IDLE = {"one token, an idle rank", "prefill, an idle rank", "prefill, attention TP 8"}
NAN = {"NaN in pad rows"}
FULL = {"no pad rows", "prefill, no pad rows"}
SHORT = {"prefill, less than a shard", "prefill, one shard full"}
WHOLE = {"prefill, replicated", "prefill, no gathered buffer", "prefill, context parallel"}
CUT = PREFILL - WHOLE - FULL
# On AMD, where ids in range tell nothing of a masked row: its weights do.
ZERO_WEIGHTS = {"hip, custom, remapped", "hip, grouped, a fused shared expert"}
ALL_PADDED = {"PAD001": ALL - IDLE - NAN - FULL, "PAD001 PAD010": NAN, "PAD001 PAD018": IDLE}

FAULTS: dict[str, tuple[str, str, dict[str, set[str]]]] = {
    "None in place of the count": (
        TOPK_FILE,
        "import functools\n_selected = select_experts\n@functools.wraps(_selected)\n"
        "def select_experts(*args, **kwargs):\n"
        "    return _selected(*args, **{**kwargs, 'num_token_non_padded': None})\n",
        ALL_PADDED,
    ),
    "no mask for int64 ids": (
        TOPK_FILE,
        MASK.format("topk_ids.dtype == torch.int64 or _asked(topk_ids, count, *args, **kwargs)"),
        {"PAD001": {name for name in ALL if "int64" in name}},
    ),
    "one pad row too many routed": (
        TOPK_FILE,
        MASK.format("_asked(topk_ids, count + 1, *args, **kwargs)"),
        {**ALL_PADDED, "PAD001": ALL_PADDED["PAD001"] - ZERO_WEIGHTS},
    ),
    "one real row too many masked": (
        TOPK_FILE,
        MASK.format("_asked(topk_ids, (count - 1).clamp(min=0), *args, **kwargs)"),
        {"PAD002": ALL - HIP, "PAD009 PAD019": HIP},
    ),
    "the first row of a shard never masked": (
        TOPK_FILE,
        MASK.format("_asked(topk_ids, count.clamp(min=1), *args, **kwargs)"),
        {
            **ALL_PADDED,
            "PAD001": ALL_PADDED["PAD001"]
            - ZERO_WEIGHTS
            - WHOLE
            - {"prefill, length is the bucket", "prefill, 100 tokens in 128", "prefill, attention TP 2"},
        },
    ),
    "a shared column not masked": (
        TOPK_FILE,
        MASK.format(
            "kept = topk_ids[:, 2:].clone(); _asked(topk_ids, count, *args, **kwargs); topk_ids[:, 2:] = kept"
        ),
        {"PAD001": {"grouped, a fused shared expert"}},
    ),
    "the mask before the remap": (
        TOPK_FILE,
        "def _biased_grouped_topk_postprocess(topk_ids, info, count):\n"
        "    _mask_topk_ids_padded_region(topk_ids, count)\n"
        "    return topk_ids_logical_to_physical(topk_ids, info)\n",
        {"PAD001 PAD009": REMAPPED - HIP},
    ),
    "weights kept on AMD": (
        TOPK_FILE,
        "def _zero_topk_weights_padded_region(*args): ...\n",
        {"PAD001 PAD009": HIP},
    ),
    "no post_fill": (
        REGISTRY_FILE,
        BUILD.format(
            "built = _built(**kwargs); built.get_slot('num_token_non_padded').post_fill = None; return built"
        ),
        {"PAD001 PAD002 PAD003": CUT - {"prefill, length is the bucket"}},
    ),
    "context parallelism not heeded": (
        REGISTRY_FILE,
        BUILD.format("return _built(**{**kwargs, 'enable_prefill_cp': False})"),
        {"PAD002 PAD003": {"prefill, context parallel"}},
    ),
    "the raw length": (
        REGISTRY_FILE,
        FILL.format(
            "return _filled(self, *args, **{**kwargs, 'padded_num_tokens': kwargs['raw_num_tokens']})"
        ),
        {"PAD001 PAD002 PAD003": DECODE | CUT - {"prefill, length is the bucket"}},
    ),
    "the count of an earlier replay": (
        REGISTRY_FILE,
        FILL.format(
            "return vars(self).setdefault('once', []) or self.once.append(_filled(self, *args, **kwargs))"
        ),
        {"PAD001 PAD003": COUNT - FULL - IDLE, "PAD001 PAD003 PAD018": COUNT & IDLE},
    ),
    "never sharded": (
        BATCH_FILE,
        "def compute_local_num_token_non_padded_cpu(global_num_token_non_padded, num_tokens_per_dp):\n"
        "    return global_num_token_non_padded\n",
        {
            "PAD001 PAD003 PAD017": CUT - SHORT,
            "PAD001 PAD003": SHORT,
            "PAD003 PAD017": {"prefill, no pad rows"},
        },
    ),
    "replicated taken for sharded": (
        BATCH_FILE,
        "def register_attn_tp_sequence_sharded_predicate(predicate): ...\n",
        {"PAD002 PAD003": {"prefill, replicated"}},
    ),
    "the rank's offset lost": (
        BATCH_FILE,
        "_bounds = _attn_tp_local_shard_bounds\n"
        "def _attn_tp_local_shard_bounds(*args):\n    return _bounds(*args)[0], 0\n",
        {"PAD001 PAD003": CUT | DECODE},
    ),
}


@pytest.fixture(scope="module")
def check(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[CaseResult]]:
    """The default suite on a version, or on a copy of it with text put behind one of its files."""

    def check(
        version: str, file: str = "", text: str = "", *, without: tuple[str, ...] = ()
    ) -> list[CaseResult]:
        root = Path(root_of(version))
        if file:
            root = copied(root, tmp_path_factory.mktemp("changed"))
            (root / file).write_text(f"{(root / file).read_text()}\n\n{text}")
        engine = SglangEngine(Tree("tree", root, ""), worker, without)
        return [row[0] for row in check_cases(SUITE, [engine])]

    return check


def copied(root: Path, folder: Path) -> Path:
    """What of a tree is loaded or read: its modules under test, its kernels and its runners."""
    for name in (*REAL_MODULES, "sglang.srt.layers.moe"):
        source = root / (name.replace(".", "/") + ".py")
        if source.is_file():
            (folder / source.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / source.relative_to(root))
    for name in ("sglang/kernels", "sglang/jit_kernel", "sglang/srt/model_executor/runner"):
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, copy_function=_copy_unless_there, dirs_exist_ok=True)
    return folder


def _copy_unless_there(source: str, target: str) -> None:
    if not os.path.exists(target):
        shutil.copy(source, target)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_0_5_17_is_found(check: Callable[..., list[CaseResult]], fault: str) -> None:
    file, text, expected = FAULTS[fault]
    results = check("0.5.17", file, text)
    seen: dict[str, set[str]] = {}
    for result in results:
        seen.setdefault(result.verdict, set()).add(result.case.name)
    assert seen.pop(SAFE, set()) == ALL - set().union(*expected.values())
    assert seen == expected
    assert check_verdict(results).exit_code == 1


# Shims.


@pytest.mark.parametrize("version", ["0.5.17", "newest"])
def test_without_a_shim_what_used_it_is_not_verified_and_all_else_is_as_before(
    check: Callable[..., list[CaseResult]], worker: Worker, version: str
) -> None:
    number = released_versions()[-1] if version == "newest" else version
    engine = SglangEngine(locate(f"sglang=={number}"), worker)
    before = {row[0].case.name: row[0].verdict for row in check_cases(SUITE, [engine])}
    told = {name for loaded in engine.loaded.values() for name in loaded["shims"]}
    assert {"mask_topk_ids", "_fill_padded_rows_kernel", "moe_fused_gate", "get_parallel", "is_hip"} <= told
    never_asked = set()
    for shim in sorted(told):
        results = check(number, without=(shim,))
        after = {result.case.name: result.verdict for result in results}
        changed = {name for name in ALL if after[name] != before[name]}
        assert {after[name] for name in changed} <= {NOT_VERIFIED}, shim
        assert check_verdict(results).exit_code in ((0, 1) if not changed else (1, 3)), shim
        if not changed:
            never_asked.add(shim)
    assert never_asked == set()


# The fix, as users ask for it.

# PAD010 and PAD018 come with PAD001: pad rows that hold NaN, and those of an idle rank.
CODES = {"PAD001", "PAD002", "PAD003", "PAD004", "PAD010", "PAD018"}


def compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *sides: str
) -> tuple[int, dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    before, after = (f"sglang=={version}" for version in sides)
    status = main(["compare", "--before", before, "--after", after, "--device", "cpu", "--format", "json"])
    out, err = capsys.readouterr()
    assert err == ""
    return status, json.loads(out)


def seen_of(document: dict[str, Any], version: str) -> tuple[set[str], set[tuple[str, str]]]:
    """Codes of the findings of a version, and (change, code) of all."""
    codes = {row["code"] for row in document["findings"] if row["engine"] == f"sglang=={version}"}
    return codes, {(row["change"], row["code"]) for row in document["tables"]["finding_changes"]}


def test_compare_shows_that_0_5_17_fixed_both_faults_of_0_5_16(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status, document = compared(capsys, monkeypatch, tmp_path, "0.5.16", "0.5.17")
    assert (status, document["verdict"]["status"]) == (0, "ok")
    assert document["verdict"]["summary"] == "sglang==0.5.17: safe in all 34 cases"
    assert seen_of(document, "0.5.16") == (CODES, {("fixed", code) for code in CODES})
    assert seen_of(document, "0.5.17")[0] == set()
    assert {row["after"] for row in document["tables"]["cases"]} == {SAFE}


def test_compare_the_other_way_round_shows_them_introduced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status, document = compared(capsys, monkeypatch, tmp_path, "0.5.17", "0.5.16")
    assert (status, document["verdict"]["status"]) == (1, "findings")
    assert document["verdict"]["summary"] == "sglang==0.5.16: findings in 20 of 34 cases"
    assert seen_of(document, "0.5.16") == (CODES, {("introduced", code) for code in CODES})
    assert seen_of(document, "0.5.17")[0] == set()
    assert {row["before"] for row in document["tables"]["cases"]} == {SAFE}
