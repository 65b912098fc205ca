"""A tree is asked by its own signatures: where they are not what moepad knows, there is no answer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from repro.engines.sglang.process import Worker

MINITREE = Path(__file__).parents[2] / "data" / "minitree"
TOPK = "sglang/srt/layers/moe/topk.py"
DISPATCH = "sglang/srt/eplb/expert_location_dispatch.py"
REGISTRY = "sglang/srt/model_executor/cuda_graph_buffer_registry.py"
BATCH_INFO = "sglang/srt/model_executor/forward_batch_info.py"
FILL = "sglang/kernels/ops/moe/fill_padded_rows.py"
SHARED = "sglang/srt/configs/shared_experts.py"
PREFILL_RUNNER = "sglang/srt/model_executor/runner/prefill_cuda_graph_runner.py"
DECODE_RUNNER = "sglang/srt/model_executor/runner/decode_cuda_graph_runner.py"

ROWS, EXPERTS, HIDDEN = 6, 8, 4
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
    "rows": [0, ROWS],
    "router": None,
    "correction_bias": None,
    "dispatch": None,
}
CUSTOM = {**ROUTE, "branch": "custom", "router": {"weights": "router_weights", "ids": "router_ids"}}
REMAPPED = {
    **CUSTOM,
    "dispatch": {
        "ep_dispatch_algorithm": "static",
        "num_physical_experts": EXPERTS,
        "rank_map": "rank_map",
        "all_map": "all_map",
        "num_valid": "num_valid",
    },
}
REPLAY: dict[str, Any] = {
    "mode": "prefill",
    "require_gathered_buffer": True,
    "enable_prefill_cp": False,
    "sharded": True,
    "tokens_per_request": 1,
    "bucket": 16,
    "fills": [{"global": 5, "carried": None, "raw_num_tokens": 8}],
}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(ROWS, HIDDEN, generator=generator),
        "router_logits": torch.randn(ROWS, EXPERTS, generator=generator),
        "router_weights": torch.full((ROWS, 2), 0.5),
        "router_ids": torch.tensor([[row, row + 1] for row in range(ROWS)], dtype=torch.int32),
        "correction_bias": torch.zeros(EXPERTS),
        "rank_map": torch.arange(EXPERTS).flip(0),
        "all_map": torch.arange(EXPERTS).flip(0)[:, None],
        "num_valid": torch.ones(EXPERTS, dtype=torch.int64),
    }


def item(
    count: object = None, route: dict[str, Any] | None = None, size: int = 1, rank: int = 0
) -> dict[str, Any]:
    return {"rank": {"attn_tp_size": size, "attn_tp_rank": rank}, "count": count, "route": route}


def replay(size: int = 4, rank: int = 0, **changes: Any) -> dict[str, Any]:
    return item({"replay": {**REPLAY, **changes}}, None, size, rank)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


Files = dict[str, Callable[[str], str] | str | None]
Seen = tuple[list[dict[str, Any]], dict[str, Tensor]]


def put(old: str, new: str) -> Callable[[str], str]:
    def changed(text: str) -> str:
        assert text.count(old) == 1, old
        return text.replace(old, new)

    return changed


@pytest.fixture
def observe(worker: Worker, tmp_path: Path) -> Iterator[Callable[..., Seen]]:
    """What items come to on the mini tree with some of its files changed; without ``described``."""

    def observe(files: Files, *items: dict[str, Any], platform: str = "cuda") -> Seen:
        root = MINITREE
        if files:
            root = tmp_path / "tree"
            shutil.copytree(MINITREE, root)
        for name, change in files.items():
            if change is None:
                (root / name).unlink()
                continue
            text = change if isinstance(change, str) else change((root / name).read_text())
            (root / name).write_text(text)
        worker.open(tree=str(root), platform=platform)
        results, seen = worker.observe(list(items), tensors())
        results[-1].pop("described")
        return results, seen

    yield observe
    worker.close()


# What is not as moepad knows it. (files, item, reason)

MASKED = item(3, ROUTE)
OPTIONAL = "topk_config: TopKConfig,\n    *,"
RETURN = "return StandardTopKOutput(weights, ids, router_logits)"
RENAMED = "of this tree has no"
Row = tuple[Files, dict[str, Any], str]

UNKNOWN: dict[str, Row] = {
    "a new argument of select_experts": (
        {TOPK: put(OPTIONAL, f"{OPTIONAL}\n    layer: int,")},
        MASKED,
        "select_experts of this tree needs layer, which moepad does not know",
    ),
    "a new positional argument of select_experts": (
        {TOPK: put(OPTIONAL, "topk_config: TopKConfig,\n    layer,\n    *,")},
        MASKED,
        "select_experts of this tree needs layer, which moepad does not know",
    ),
    "another name for the count": (
        {TOPK: put("    num_token_non_padded: torch.Tensor | None = None,", "    num_real: object = None,")},
        MASKED,
        "select_experts of this tree has no parameter num_token_non_padded",
    ),
    "arguments of any name": (
        {
            TOPK: put(
                "def select_experts(\n",
                "def select_experts(**kwargs):\n    return _select(**kwargs)\n\n\ndef _select(\n",
            )
        },
        MASKED,
        "select_experts of this tree has no parameter hidden_states",
    ),
    "select_experts renamed": (
        {TOPK: put("def select_experts(", "def choose_experts(")},
        MASKED,
        f"sglang.srt.layers.moe.topk {RENAMED} select_experts",
    ),
    "a new field of TopKConfig": (
        {TOPK: put("class TopKConfig:\n", "class TopKConfig:\n    layer: int\n")},
        MASKED,
        "TopKConfig of this tree needs layer, which moepad does not know",
    ),
    "a field of TopKConfig renamed": (
        {TOPK: put("    renormalize: bool = True\n", "    renorm: bool = True\n")},
        MASKED,
        "TopKConfig of this tree has no field renormalize",
    ),
    "no field for shared experts": (
        {
            TOPK: put(
                "    shared_experts: SharedExpertsConfig = field(", "    others: SharedExpertsConfig = field("
            )
        },
        MASKED,
        "TopKConfig of this tree takes no number of shared experts",
    ),
    "another layout of shared experts": (
        {SHARED: put("    num_fused_shared_experts: int = 0", "    number: int = 0")},
        MASKED,
        "select_experts raised TypeError: Unexpected keyword argument 'num_fused_shared_experts' "
        "when given the count",
    ),
    "no TopKConfig": (
        {
            TOPK: put(
                "\n\nclass StandardTopKOutput",
                "\n\nConfig = TopKConfig\ndel TopKConfig\n\n\nclass StandardTopKOutput",
            )
        },
        MASKED,
        f"sglang.srt.layers.moe.topk {RENAMED} TopKConfig",
    ),
    "a new argument of the dispatch information": (
        {
            DISPATCH: put(
                "class ExpertLocationDispatchInfo:\n", "class ExpertLocationDispatchInfo:\n    layer: int\n"
            )
        },
        item(3, REMAPPED),
        "ExpertLocationDispatchInfo of this tree needs layer, which moepad does not know",
    ),
    "a new argument of the prefill builder": (
        {
            REGISTRY: put(
                "def build_prefill_registry(\n    *,\n",
                "def build_prefill_registry(\n    *,\n    layers: int,\n",
            )
        },
        replay(),
        "build_prefill_registry of this tree needs layers, which moepad does not know",
    ),
    "a new argument of the decode builder": (
        {
            REGISTRY: put(
                "def build_decode_registry(\n    *,\n",
                "def build_decode_registry(\n    *,\n    layers: int,\n",
            )
        },
        replay(mode="decode"),
        "build_decode_registry of this tree needs layers, which moepad does not know",
    ),
    "a builder renamed": (
        {REGISTRY: put("def build_prefill_registry(", "def build_registry(")},
        replay(),
        f"sglang.srt.model_executor.cuda_graph_buffer_registry {RENAMED} build_prefill_registry",
    ),
    "a registry without the slot": (
        {REGISTRY: lambda text: text.replace("enable_num_token_non_padded", "enable_count")},
        replay(),
        "the prefill registry of this tree has no slot num_token_non_padded",
    ),
    "a decode registry without the slot": (
        {REGISTRY: lambda text: text.replace("enable_num_token_non_padded", "enable_count")},
        replay(mode="decode"),
        "the decode registry of this tree has no slot num_token_non_padded",
    ),
    "a new argument of fill_from": (
        {REGISTRY: put("self, fb, *, raw_bs", "self, fb, *, layers, raw_bs")},
        replay(),
        "fill_from of this tree needs layers, which moepad does not know",
    ),
    "a new positional argument of fill_from": (
        {REGISTRY: put("self, fb, *, raw_bs", "self, fb, layers, *, raw_bs")},
        replay(),
        "fill_from of this tree needs layers, which moepad does not know",
    ),
    "fill_from by name only": (
        {REGISTRY: put("self, fb, *, raw_bs", "self, *, fb, raw_bs")},
        replay(),
        "fill_from of this tree takes no batch",
    ),
    "fill_from renamed": (
        {REGISTRY: put("def fill_from(", "def fill(")},
        replay(),
        f"GraphBufferRegistry {RENAMED} fill_from",
    ),
    "get_slot renamed": (
        {REGISTRY: lambda text: text.replace("get_slot(", "slot_of(")},
        replay(),
        f"GraphBufferRegistry {RENAMED} get_slot",
    ),
    "buffer renamed": (
        {
            REGISTRY: lambda text: text.replace("slot.buffer", "slot.memory").replace(
                "    buffer: torch.Tensor\n", "    memory: torch.Tensor\n"
            )
        },
        replay(),
        f"GraphSlot {RENAMED} buffer",
    ),
    "a new argument of compute_local": (
        {
            BATCH_INFO: put(
                "    global_num_token_non_padded: torch.Tensor, num_tokens_per_dp: int, *, sharded",
                "    global_num_token_non_padded: torch.Tensor, num_tokens_per_dp: int, *, mode, sharded",
            )
        },
        replay(),
        "compute_local_num_token_non_padded of this tree needs mode, which moepad does not know",
    ),
    "compute_local renamed": (
        {
            BATCH_INFO: put("def compute_local_num_token_non_padded(", "def compute_local("),
            REGISTRY: lambda text: text.replace("    compute_local_num_token_non_padded,\n", "").replace(
                "compute_local_num_token_non_padded(", "compute_local("
            ),
        },
        replay(),
        f"sglang.srt.model_executor.forward_batch_info {RENAMED} compute_local_num_token_non_padded",
    ),
    "no ForwardBatch": (
        {
            BATCH_INFO: put("class ForwardBatch(", "class Batch("),
            REGISTRY: put("    ForwardBatch,\n", "    Batch as ForwardBatch,\n"),
        },
        replay(),
        f"sglang.srt.model_executor.forward_batch_info {RENAMED} ForwardBatch",
    ),
    "an attribute of the batch renamed": (
        {REGISTRY: put("fb.global_num_token_non_padded_cpu", "fb.global_num_tokens_cpu")},
        replay(),
        f"stand-in forward batch.global_num_tokens_cpu was read at {REGISTRY}:{{fb.global_num_tokens_cpu}}",
    ),
    "an attribute of the batch that may be missing": (
        {REGISTRY: put("fb.global_num_token_non_padded_cpu", 'getattr(fb, "global_num_tokens_cpu", 0)')},
        replay(),
        f'stand-in forward batch.global_num_tokens_cpu was read at {REGISTRY}:{{getattr(fb, "}}',
    ),
    "an attribute of the batch that is written": (
        {
            REGISTRY: put(
                "        padded = context.padded_num_tokens\n        sharded = require_gathered_buffer and not",
                "        padded = context.padded_num_tokens\n        fb.padded = padded\n"
                "        sharded = require_gathered_buffer and not",
            )
        },
        replay(),
        f"stand-in forward batch.padded was written at {REGISTRY}:{{fb.padded = padded}}",
    ),
    "a helper from elsewhere": (
        {
            REGISTRY: lambda text: text.replace("    compute_local_num_token_non_padded_cpu,\n", "").replace(
                "from sglang.srt.runtime_context import get_parallel\n",
                "from sglang.srt.runtime_context import get_parallel\n"
                "from sglang.srt.model_executor.counts import compute_local_num_token_non_padded_cpu\n",
            )
        },
        replay(),
        "stand-in sglang.srt.model_executor.counts.compute_local_num_token_non_padded_cpu was loaded at "
        f"{REGISTRY}:{{            compute_local_num_token_non_padded_cpu(}}",
    ),
    "a mask from elsewhere": (
        {
            TOPK: put(
                "from sglang.kernels.ops.moe.fill_padded_rows import",
                "from sglang.kernels.ops.moe.masks import",
            )
        },
        MASKED,
        f"stand-in sglang.kernels.ops.moe.masks._fill_padded_rows was loaded at {TOPK}:{{_rows(topk_ids,}}",
    ),
    "a slot of floats": (
        {
            REGISTRY: put(
                'return registry, pool.take("num_token_non_padded", 1, torch.int32, device)',
                'return registry, pool.take("num_token_non_padded", 1, torch.float32, device)',
            )
        },
        replay(),
        "slot num_token_non_padded of this tree holds no tensor of one int32",
    ),
    "a slot of two": (
        {REGISTRY: put('"num_token_non_padded", 1, torch.int32', '"num_token_non_padded", 2, torch.int32')},
        replay(),
        "slot num_token_non_padded of this tree holds no tensor of one int32",
    ),
    "a slot that is no tensor": (
        {
            REGISTRY: put(
                "    def get_slot(self, name: str) -> GraphSlot:\n",
                "    def get_slot(self, name: str) -> GraphSlot:\n        return GraphSlot([3], None)\n",
            )
        },
        replay(),
        "slot num_token_non_padded of this tree holds no tensor of one int32",
    ),
    "a slot of truth": (
        {REGISTRY: put('"num_token_non_padded", 1, torch.int32', '"num_token_non_padded", 1, torch.bool')},
        replay(),
        "slot num_token_non_padded of this tree holds no tensor of one int32",
    ),
}

UNKNOWN["a slot of 64 bits"] = (
    {REGISTRY: put('"num_token_non_padded", 1, torch.int32', '"num_token_non_padded", 1, torch.int64')},
    replay(),
    "slot num_token_non_padded of this tree holds no tensor of one int32",
)
UNKNOWN["a buffer that a fill replaces"] = (
    {
        REGISTRY: put(
            "                slot.post_fill(slot.buffer, fb, context)\n",
            "                slot.buffer = slot.buffer.clone()\n"
            "                slot.post_fill(slot.buffer, fb, context)\n",
        )
    },
    replay(),
    "the buffer of slot num_token_non_padded is another after a fill than before it",
)
UNKNOWN["a graph that reads a copy"] = (
    {REGISTRY: put("        return self.buffer\n", "        return self.buffer.clone()\n")},
    replay(),
    "the buffer of slot num_token_non_padded is another after a fill than before it",
)
UNKNOWN["a count of another era's name"] = (
    {REGISTRY: put("fb.global_num_token_non_padded_cpu", "fb.num_token_non_padded_cpu")},
    replay(),
    f"stand-in forward batch.num_token_non_padded_cpu was read at {REGISTRY}:{{fb.num_token_non_padded_cpu}}",
)
UNKNOWN["a kernel that nobody compared"] = (
    {FILL: put("rows <= MOST_PLAIN_ROWS", "rows < 0")},
    MASKED,
    "stand-in _fill_padded_rows_kernel (a kernel whose source moepad does not know) was loaded at "
    f"{FILL}:{{_fill_padded_rows_kernel[(rows,)]}}",
)

PASSED = "            attn_tp_sharded_fn=lambda _num_tokens: gathers,\n"
LEFT_OUT = "{0}_cuda_graph_runner.py of this tree does not pass {1} to build_{0}_registry"
FIXED = "{0}_cuda_graph_runner.py of this tree passes {1} to build_{0}_registry"
RUNNERS: dict[str, Row] = {
    "passes what decides, under a name that moepad does not know": (
        {PREFILL_RUNNER: put(PASSED, PASSED + "            localize_against_bucket=False,\n")},
        replay(),
        FIXED.format("prefill", "localize_against_bucket") + ", which moepad does not know",
    ),
    "leaves out attn_tp_sharded_fn": (
        {PREFILL_RUNNER: put(PASSED, "")},
        replay(),
        LEFT_OUT.format("prefill", "attn_tp_sharded_fn"),
    ),
    "leaves out require_gathered_buffer": (
        {PREFILL_RUNNER: put("            require_gathered_buffer=gathers,\n", "")},
        replay(),
        LEFT_OUT.format("prefill", "require_gathered_buffer"),
    ),
    "leaves out enable_prefill_cp": (
        {PREFILL_RUNNER: put("            enable_prefill_cp=server_args.enable_prefill_cp,\n", "")},
        replay(),
        LEFT_OUT.format("prefill", "enable_prefill_cp"),
    ),
    "leaves out the slot": (
        {PREFILL_RUNNER: put("            enable_num_token_non_padded=model_runner.is_moe,\n", "")},
        replay(),
        LEFT_OUT.format("prefill", "enable_num_token_non_padded"),
    ),
    "always shards": (
        {PREFILL_RUNNER: put(PASSED, PASSED.replace("gathers", "True"))},
        replay(),
        FIXED.format("prefill", "attn_tp_sharded_fn=lambda _num_tokens: True"),
    ),
    "passes None": (
        {PREFILL_RUNNER: put(PASSED, PASSED.replace("lambda _num_tokens: gathers", "None"))},
        replay(),
        FIXED.format("prefill", "attn_tp_sharded_fn=None"),
    ),
    "never has the slot": (
        {PREFILL_RUNNER: put("non_padded=model_runner.is_moe", "non_padded=False")},
        replay(),
        FIXED.format("prefill", "enable_num_token_non_padded=False"),
    ),
    "passes what nobody can see": (
        {PREFILL_RUNNER: put(PASSED, "            **self.arguments,\n")},
        replay(),
        LEFT_OUT.format("prefill", "attn_tp_sharded_fn"),
    ),
    "is not there": (
        {PREFILL_RUNNER: None},
        replay(),
        "no prefill runner of this tree builds the registry",
    ),
    "builds it another way": (
        {
            PREFILL_RUNNER: put(
                "self.registry = build_prefill_registry(", "build = build_prefill_registry\n        build("
            )
        },
        replay(),
        "no prefill runner of this tree builds the registry",
    ),
    "for decode leaves out attn_tp_sharded_fn": (
        {DECODE_RUNNER: put(PASSED, "")},
        replay(mode="decode"),
        LEFT_OUT.format("decode", "attn_tp_sharded_fn"),
    ),
    "for decode is none": (
        {DECODE_RUNNER: "x = 1\n"},
        replay(mode="decode"),
        "no decode runner of this tree builds the registry",
    ),
}

GAVE = "select_experts gave {} for {}, no tensor"
OUTPUTS: dict[str, tuple[str, str]] = {
    "nothing": ("return None", GAVE.format("NoneType", "topk_ids")),
    "a pair": ("return weights, ids", GAVE.format("NoneType", "topk_ids")),
    "a table": ("return {'topk_ids': ids, 'topk_weights': weights}", GAVE.format("NoneType", "topk_ids")),
    "lists": (
        "return StandardTopKOutput(weights.tolist(), ids.tolist(), None)",
        GAVE.format("list", "topk_ids"),
    ),
    "no weights": ("return StandardTopKOutput(None, ids, None)", GAVE.format("NoneType", "topk_weights")),
    "another kind of output": (
        "import types; return types.SimpleNamespace(packed_topk_ids=ids, topk_weights=weights)",
        GAVE.format("NoneType", "topk_ids"),
    ),
    "a stand-in": (
        "from missing.pkg import Output; return Output(weights, ids)",
        f"stand-in missing.pkg.Output was read at {TOPK}:{{from missing.pkg}}",
    ),
}


def resolved(reason: str, root: Path) -> str:
    """Puts the number of the line in place of ``:{its text}``."""
    if ":{" not in reason:
        return reason
    head, _, text = reason.partition(":{")
    file = head.rpartition(" ")[2]
    lines = (root / file).read_text().split("\n")
    (number,) = (number for number, line in enumerate(lines, 1) if text[:-1] in line)
    return f"{head}:{number}"


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=name) for rows in (UNKNOWN, RUNNERS) for name, row in rows.items()]
)
def test_what_moepad_does_not_know_is_no_answer(
    observe: Callable[..., Seen], tmp_path: Path, row: Row
) -> None:
    files, asked, reason = row
    results, seen = observe(files, asked)
    assert seen == {}
    assert results[0]["cannot_verify"] == resolved(reason, tmp_path / "tree")
    assert results[0]["error"] is None


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_output_of_another_kind_is_no_answer(
    observe: Callable[..., Seen], tmp_path: Path, output: str
) -> None:
    text, reason = OUTPUTS[output]
    results, seen = observe({TOPK: put(RETURN, text)}, MASKED)
    assert seen == {}
    assert results == [{"count": 3, "error": None, "cannot_verify": resolved(reason, tmp_path / "tree")}]


# What a tree is given.

ASKED = "        weights, ids = config.custom_routing_function(\n"
CALL = """\
            hidden_states=hidden_states,
            gating_output=router_logits,
            topk=config.top_k,
            renormalize=config.renormalize,
"""
ANOTHER = "custom_routing_function was asked with another {}"
QUESTIONS: dict[str, tuple[str, str, str | None]] = {
    "as it is": (CALL, CALL, None),
    "by position": (
        CALL,
        "            hidden_states, router_logits, config.top_k, config.renormalize\n",
        None,
    ),
    "with scaled hidden states": (
        "hidden_states=hidden_states,",
        "hidden_states=hidden_states * 2,",
        ANOTHER.format("hidden_states"),
    ),
    "with fewer rows": (
        "hidden_states=hidden_states,",
        "hidden_states=hidden_states[:2],",
        ANOTHER.format("hidden_states"),
    ),
    "with another dtype": (
        "gating_output=router_logits,",
        "gating_output=router_logits.double(),",
        ANOTHER.format("gating_output"),
    ),
    "with softmax of the logits": (
        "gating_output=router_logits,",
        "gating_output=router_logits.softmax(-1),",
        ANOTHER.format("gating_output"),
    ),
    "with logits that were written into": (
        ASKED,
        f"        router_logits[0] += 1\n{ASKED}",
        ANOTHER.format("gating_output"),
    ),
    "with hidden states that were written into": (
        ASKED,
        f"        hidden_states.zero_()\n{ASKED}",
        ANOTHER.format("hidden_states"),
    ),
    "for more experts": ("topk=config.top_k,", "topk=config.top_k + 1,", ANOTHER.format("topk")),
    "for a float of experts": ("topk=config.top_k,", "topk=float(config.top_k),", ANOTHER.format("topk")),
    "for other weights": (
        "renormalize=config.renormalize,",
        "renormalize=not config.renormalize,",
        ANOTHER.format("renormalize"),
    ),
    "without a word on weights": (
        "            renormalize=config.renormalize,\n",
        "",
        ANOTHER.format("renormalize"),
    ),
    "with more": (
        "renormalize=config.renormalize,\n",
        "renormalize=config.renormalize,\n            layer_id=1,\n",
        "custom_routing_function was given hidden_states, gating_output, topk, renormalize, layer_id",
    ),
    "twice, once with other inputs": (
        ASKED,
        "        config.custom_routing_function(hidden_states + 1, router_logits, 2, True)\n" + ASKED,
        ANOTHER.format("hidden_states"),
    ),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_a_routing_function_answers_what_was_asked_of_it_before_and_nothing_else(
    observe: Callable[..., Seen], question: str, platform: str
) -> None:
    old, new, reason = QUESTIONS[question]
    results, seen = observe({TOPK: put(old, new)}, item(4, CUSTOM), platform=platform)
    assert results == [{"count": 4, "error": None, "cannot_verify": reason}]
    assert seen.keys() == (set() if reason else {"ids.0", "weights.0"})


def test_a_tree_that_refuses_the_count_after_it_asked_otherwise_is_no_answer(
    observe: Callable[..., Seen],
) -> None:
    change = put(ASKED, f"        router_logits += 1\n{ASKED}")
    refusing = put(
        "    config = topk_config\n", "    config = topk_config\n    assert num_token_non_padded is None\n"
    )
    results, _ = observe({TOPK: lambda text: refusing(change(text))}, item(4, CUSTOM))
    assert results[0]["cannot_verify"] == ANOTHER.format("gating_output")


def test_nan_in_a_row_is_no_other_question(worker: Worker) -> None:
    given = tensors()
    given["hidden_states"][3:] = float("nan")
    given["router_logits"][3:] = float("nan")
    worker.open(tree=str(MINITREE), platform="cuda")
    results, _ = worker.observe([item(3, CUSTOM)], given)
    worker.close()
    assert results[0]["cannot_verify"] is None


def test_what_a_tree_writes_into_its_inputs_does_not_reach_the_next_item(
    observe: Callable[..., Seen],
) -> None:
    files: Files = {
        TOPK: put(f"    {RETURN}", f"    hidden_states.zero_(); router_logits.zero_()\n    {RETURN}")
    }
    results, seen = observe(files, *[item(None, route) for route in (ROUTE, CUSTOM, ROUTE, CUSTOM)])
    assert [result["cannot_verify"] for result in results] == [None] * 4
    for name in ("ids", "weights"):
        assert torch.equal(seen[f"{name}.0"], seen[f"{name}.2"])
        assert torch.equal(seen[f"{name}.1"], seen[f"{name}.3"])
    assert torch.equal(seen["ids.1"], tensors()["router_ids"])


def test_what_a_tree_writes_into_what_the_routing_function_gave_does_not_reach_the_next_item(
    observe: Callable[..., Seen],
) -> None:
    _, seen = observe({}, item(0, CUSTOM), item(None, CUSTOM))
    assert seen["ids.0"].tolist() == [[-1, -1]] * ROWS
    assert torch.equal(seen["ids.1"], tensors()["router_ids"])
    assert torch.equal(seen["weights.0"], tensors()["router_weights"])


def test_a_tree_may_give_the_same_buffers_every_time(observe: Callable[..., Seen]) -> None:
    files: Files = {
        TOPK: put(
            f"    {RETURN}",
            "    _KEPT.setdefault('ids', ids.clone()).copy_(ids)\n"
            "    _KEPT.setdefault('weights', weights.clone()).copy_(weights)\n"
            "    return StandardTopKOutput(_KEPT['weights'], _KEPT['ids'], router_logits)\n\n\n_KEPT = {}",
        )
    }
    asked = [item(count, CUSTOM) for count in (0, 3, 6)]
    _, seen = observe(files, *asked)
    assert [(seen[f"ids.{number}"] >= 0).all(dim=1).sum().item() for number in range(3)] == [0, 3, 6]


def test_a_rank_is_given_its_own_rows(observe: Callable[..., Seen]) -> None:
    shards = [{**ROUTE, "rows": rows} for rows in ([0, 2], [2, 6], [6, 6])]
    results, seen = observe({}, item(None, ROUTE), *[item(None, shard) for shard in shards])
    assert [result["cannot_verify"] for result in results] == [None] * 4
    assert torch.equal(seen["ids.0"], torch.cat([seen[f"ids.{number}"] for number in (1, 2, 3)]))
    assert seen["ids.3"].shape == (0, 2)


@pytest.mark.parametrize(
    ("platform", "ids", "weights"),
    [("cuda", -1, 0.5), ("hip", 0, 0.0), ("cpu", -1, 0.5)],
)
def test_a_mask_is_seen_as_the_platform_makes_it(
    observe: Callable[..., Seen], platform: str, ids: int, weights: float
) -> None:
    _, seen = observe({}, item(4, CUSTOM), platform=platform)
    expected = tensors()["router_ids"].tolist()[:4] + [[ids, ids]] * 2
    assert seen["ids.0"].tolist() == expected
    assert seen["weights.0"].tolist() == [[0.5, 0.5]] * 4 + [[weights, weights]] * 2
    assert [type(value) for value in seen.values()] == [Tensor, Tensor]


def test_a_remap_is_given_as_the_tree_takes_it(observe: Callable[..., Seen]) -> None:
    dynamic = {**REMAPPED, "dispatch": {**REMAPPED["dispatch"], "ep_dispatch_algorithm": "dynamic"}}
    _, seen = observe({}, item(None, REMAPPED), item(None, dynamic), item(2, REMAPPED))
    physical = (EXPERTS - 1 - tensors()["router_ids"]).tolist()
    assert seen["ids.0"].tolist() == seen["ids.1"].tolist() == physical
    assert seen["ids.2"].tolist() == physical[:2] + [[-1, -1]] * 4


OLDER_SHARED: Files = {
    TOPK: lambda text: text.replace(
        "    shared_experts: SharedExpertsConfig = field(default_factory=SharedExpertsConfig)\n",
        "    num_fused_shared_experts: int = 0\n",
    ).replace("config.shared_experts.num_fused", "config.num_fused")
}


@pytest.mark.parametrize("files", [{}, OLDER_SHARED])
def test_shared_experts_are_asked_for_in_either_way(observe: Callable[..., Seen], files: Files) -> None:
    _, seen = observe(files, item(2, {**ROUTE, "num_fused_shared_experts": 2, "routed_scaling_factor": 2.0}))
    assert seen["ids.0"][:, 2:].tolist() == [[EXPERTS, EXPERTS + 1]] * 2 + [[-1, -1]] * 4
    assert seen["weights.0"][:, 2:] == pytest.approx(0.5)


def test_shared_experts_on_a_branch_without_them_are_no_question(observe: Callable[..., Seen]) -> None:
    results, _ = observe({}, item(2, {**CUSTOM, "num_fused_shared_experts": 1}))
    assert results[0]["cannot_verify"] == "select_experts appends no shared experts on branch custom"


# What a tree raises.

NO = "    config = topk_config\n"


def raising(text: str) -> Files:
    return {TOPK: put(NO, f"{NO}    if num_token_non_padded is not None:\n        {text}\n")}


REFUSALS = {
    "an assertion": ("assert False, 'no count here'", "AssertionError: no count here"),
    "an assertion without words": ("assert False", "AssertionError"),
    "raise": ("raise NotImplementedError('not yet')", "NotImplementedError: not yet"),
    "raise in a helper": ("_refuse()", "ValueError: helper"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_tree_that_refuses_the_count_is_asked_again_without(
    observe: Callable[..., Seen], refusal: str
) -> None:
    text, error = REFUSALS[refusal]
    helper = "def _refuse():\n    raise ValueError('helper')\n\n\ndef select_experts("
    change = raising(text)[TOPK]
    assert callable(change)
    results, seen = observe(
        {TOPK: lambda old: put("def select_experts(", helper)(change(old))}, item(2, CUSTOM)
    )
    assert results == [{"count": None, "error": error, "cannot_verify": None}]
    assert torch.equal(seen["ids.0"], tensors()["router_ids"])


FALLS = {
    "a shape that does not fit": ("router_logits @ router_logits", "RuntimeError: mat1 and mat2*"),
    "a name that is not there": ("nothing_here", "NameError: name 'nothing_here' is not defined"),
    "an attribute that is not there": (
        "hidden_states.nothing",
        "AttributeError: 'DeviceTensor' object has no attribute 'nothing'",
    ),
    "an exception of the standard library": (
        "int('x')",
        "ValueError: invalid literal for int() with base 10: 'x'",
    ),
    "one that was raised for another": (
        "try:\n            int('x')\n        except ValueError:\n            raise RuntimeError('no')",
        "RuntimeError: no",
    ),
    "an exception of another kind": ("raise KeyError('x')", "KeyError: 'x'"),
}


@pytest.mark.parametrize("fall", FALLS)
def test_a_tree_that_falls_over_has_refused_nothing(observe: Callable[..., Seen], fall: str) -> None:
    text, error = FALLS[fall]
    results, seen = observe(raising(text), item(2, CUSTOM))
    assert fnmatchcase(results[0].pop("cannot_verify"), f"select_experts raised {error} when given the count")
    assert (results, seen) == ([{"count": 2, "error": None}], {})


def test_a_tree_that_raises_without_a_count_too_is_no_answer(observe: Callable[..., Seen]) -> None:
    files: Files = {TOPK: put(NO, f"{NO}    raise ValueError(num_token_non_padded is None)\n")}
    results, _ = observe(files, item(2, CUSTOM), item(None, CUSTOM))
    assert [result["cannot_verify"] for result in results] == [
        "select_experts raised ValueError: True, with the count or without",
        "select_experts raised ValueError: True",
    ]


def test_memory_that_runs_out_spoils_one_item_alone(observe: Callable[..., Seen]) -> None:
    files = {TOPK: put(NO, f"{NO}    if len(router_logits) == 2:\n        raise MemoryError\n")}
    results, seen = observe(files, item(2, {**ROUTE, "rows": [0, 2]}), MASKED)
    assert results[1]["cannot_verify"] is None
    assert results[0]["cannot_verify"] == "select_experts raised MemoryError when given the count"
    assert sorted(seen) == ["ids.1", "weights.1"]


# Counts.


OLD_RUNNER = """\
class CudaGraphRunner:
    \"\"\"Its buffers are those of ``build_decode_registry(source=...)``.\"\"\"

    def __init__(self, source):
        self.other = my_build_decode_registry(source)
        self.registry = build_decode_registry(
            enable_num_token_non_padded=source.moe,
            require_gathered_buffer=source.gathers,
            attn_tp_sharded_fn=source.sharded,
        )
"""


def test_a_runner_of_older_name_is_found_and_what_it_says_of_itself_is_no_call(
    observe: Callable[..., Seen],
) -> None:
    old = "sglang/srt/model_executor/cuda_graph_runner.py"
    results, _ = observe({DECODE_RUNNER: None, old: OLD_RUNNER}, replay(mode="decode"))
    assert results == [{"count": 4, "error": None, "cannot_verify": None}]


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, [4, 1, 0, 0]),
        ({"fills": [{"global": 16, "carried": None, "raw_num_tokens": 16}]}, [4, 4, 4, 4]),
        ({"fills": [{"global": 0, "carried": None, "raw_num_tokens": 4}]}, [0, 0, 0, 0]),
        ({"sharded": False}, [5, 5, 5, 5]),
        ({"require_gathered_buffer": False}, [5, 5, 5, 5]),
    ],
)
def test_a_slot_holds_the_count_of_its_rank(
    observe: Callable[..., Seen], mode: str, changes: dict[str, Any], counts: list[int]
) -> None:
    results, _ = observe({}, *[replay(rank=rank, mode=mode, **changes) for rank in range(4)])
    assert results == [{"count": count, "error": None, "cannot_verify": None} for count in counts]


def test_context_parallelism_leaves_the_count_whole(observe: Callable[..., Seen]) -> None:
    results, _ = observe({}, *[replay(rank=rank, enable_prefill_cp=True) for rank in range(4)])
    assert [result["count"] for result in results] == [5] * 4


def test_fills_happen_in_one_buffer_one_after_another(observe: Callable[..., Seen]) -> None:
    stale = {REGISTRY: put("        buffer.fill_(\n", "        int(buffer) or buffer.fill_(\n")}
    fills = [{"global": n, "carried": None, "raw_num_tokens": n} for n in (16, 5)]
    results, _ = observe(
        stale, replay(fills=fills), replay(fills=fills[::-1]), replay(fills=fills[1:], rank=1)
    )
    assert [result["count"] for result in results] == [4, 4, 1]


def test_a_batch_carries_what_it_is_told_to_or_what_the_tree_makes_of_it(
    observe: Callable[..., Seen],
) -> None:
    carried: Files = {
        REGISTRY: put(
            "            compute_local_num_token_non_padded_cpu(\n"
            "                fb.global_num_token_non_padded_cpu, padded, sharded=sharded\n            )",
            "            int(fb.num_token_non_padded)",
        )
    }
    fill = {"global": 5, "raw_num_tokens": 8}
    asked = [
        replay(fills=[{**fill, "carried": carried}], rank=rank) for carried in (7, None) for rank in range(4)
    ]
    whole = replay(fills=[{**fill, "carried": None}], rank=1, sharded=False)
    results, _ = observe(carried, *asked, whole)
    assert [result["count"] for result in results] == [7, 7, 7, 7, 2, 2, 1, 0, 5]


def test_a_forward_without_a_graph_reads_what_its_batch_carries(observe: Callable[..., Seen]) -> None:
    eager = {"global": 5, "raw_num_tokens": 8}
    results, _ = observe(
        {},
        *[item({"eager": {**eager, "localised": True}}, None, 4, rank) for rank in range(4)],
        item({"eager": {**eager, "localised": False}}, None, 4, 3),
    )
    assert [result["count"] for result in results] == [2, 2, 1, 0, 5]


def test_a_count_of_the_buffer_is_what_select_experts_is_given(observe: Callable[..., Seen]) -> None:
    asked = {**replay(rank=1), "route": CUSTOM}
    results, seen = observe({}, asked)
    assert results[0]["count"] == 1
    assert seen["ids.0"].tolist() == [[0, 1]] + [[-1, -1]] * (ROWS - 1)


PREDICATE: Files = {
    BATCH_INFO: lambda text: (
        text.replace(", *, sharded: bool", "")
        .replace(", sharded=sharded)", ")")
        .replace("    if not sharded:\n", "    if _predicate and not _predicate(num_tokens_per_dp):\n")
        + "\n\n_predicate = None\n\n\ndef register_attn_tp_sequence_sharded_predicate(predicate):\n"
        "    global _predicate\n    _predicate = predicate\n"
    ),
    REGISTRY: lambda text: text.replace(", sharded=sharded", ""),
}


def test_a_module_predicate_tells_whether_a_forward_is_sharded(observe: Callable[..., Seen]) -> None:
    ranks = range(4)
    results, _ = observe(
        PREDICATE,
        *[replay(rank=rank) for rank in ranks],
        *[replay(rank=rank, sharded=False) for rank in ranks],
        *[replay(rank=rank) for rank in ranks],
    )
    assert [result["count"] for result in results] == [4, 1, 0, 0, 5, 5, 5, 5, 4, 1, 0, 0]
