"""Built-in routers against plain derivations and the row-wise law; loading and calling a user's own."""

import asyncio
import contextlib
import math
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode

from repro.routers import ROUTER_NAMES, RouterError, call_router, load_router

EXPERTS = 8
TOP_K = {"sigmoid-top1": 1, "sparse-mixer": 2}
NAMES = "softmax, sigmoid-top1, softcap, sparse-mixer, grouped, degenerate"


def noise(rows: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(seed))


def route(name: str, logits: Tensor, topk: int, renormalize: bool, **options: Any) -> tuple[Tensor, Tensor]:
    function = load_router(name, num_expert_group=4, topk_group=2, **options)
    return function(
        hidden_states=torch.zeros(len(logits), 4), gating_output=logits, topk=topk, renormalize=renormalize
    )


# The mathematics, derived again in plain Python


def softmax(values: list[float]) -> list[float]:
    exponents = [math.exp(value - max(values)) for value in values]
    return [exponent / sum(exponents) for exponent in exponents]


def best_of(values: list[float], k: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def derive(name: str, row: list[float], k: int, renormalize: bool) -> tuple[list[int], list[float]]:
    if name == "degenerate":
        return list(range(k)), [1 / k] * k
    if name == "sigmoid-top1":
        ids = best_of(row, 1)
        return ids, [1 / (1 + math.exp(-row[ids[0]]))]
    if name == "sparse-mixer":
        return derive_sparse_mixer(row, renormalize)
    scores = softmax([30 * math.tanh(x / 30) for x in row] if name == "softcap" else row)
    allowed = scores
    if name == "grouped":
        groups = [max(scores[i : i + 2]) for i in range(0, EXPERTS, 2)]
        allowed = [s if i // 2 in best_of(groups, 2) else -1.0 for i, s in enumerate(scores)]
    ids = best_of(allowed, k)
    total = sum(scores[i] for i in ids) if renormalize else 1.0
    return ids, [scores[i] / total for i in ids]


def derive_sparse_mixer(row: list[float], renormalize: bool) -> tuple[list[int], list[float]]:
    ids, weights = [], []
    for _ in range(2):
        left = [i for i in range(len(row)) if i not in ids]
        best = max(left, key=lambda i: row[i])
        close = [row[i] for i in left if (row[best] - row[i]) / max(abs(row[i]), row[best]) <= 0.02]
        ids.append(best)
        weights.append(1 / sum(math.exp(value - row[best]) for value in close))
    total = sum(weights) if renormalize else 1.0
    return ids, [weight / total for weight in weights]


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("name", ROUTER_NAMES)
def test_each_router_agrees_with_a_plain_derivation(name: str, renormalize: bool) -> None:
    k, logits = TOP_K.get(name, 3), noise(40)
    # Experts within 2 % of the best, so that the sparse mixer's weights are not all 1.
    logits[:20, 5] = logits[:20].amax(dim=-1) * 0.99
    weights, ids = route(name, logits, k, renormalize)
    expected = [derive(name, row, k, renormalize) for row in logits.double().tolist()]
    assert ids.tolist() == [row for row, _ in expected]
    for ours, (_, theirs) in zip(weights.tolist(), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)


def test_the_sparse_mixer_shares_weight_among_close_experts_only() -> None:
    weights, ids = route("sparse-mixer", torch.tensor([[4.0, 3.96, 1.0, 0.0]]), 2, False)
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [pytest.approx([1 / (1 + math.exp(-0.04)), 1.0], rel=1e-6)]


def test_softcap_holds_logits_under_thirty() -> None:
    weights, _ = route("softcap", torch.tensor([[1e6, 0.0]]), 2, False)
    assert weights.tolist() == [pytest.approx([1.0, math.exp(-30)], rel=1e-6)]


# The laws


def bits(tensor: Tensor) -> Any:
    return tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()]).tolist()


@given(
    name=st.sampled_from(ROUTER_NAMES),
    real=st.integers(0, 9),
    pads=st.integers(0, 9),
    fill=st.sampled_from(["zeros", "noise", "nan", "inf"]),
    logits_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
    weight_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    renormalize=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=200)
def test_a_rows_routing_does_not_depend_on_the_rows_beside_it(
    name: str,
    real: int,
    pads: int,
    fill: str,
    logits_dtype: torch.dtype,
    id_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    renormalize: bool,
    seed: int,
) -> None:
    values = {"zeros": 0.0, "nan": math.nan, "inf": math.inf}
    alone = noise(real, seed).to(logits_dtype)
    others = torch.full((pads, EXPERTS), values[fill]) if fill in values else noise(pads, seed + 1)
    together = torch.cat([alone, others.to(logits_dtype)])
    k, options = TOP_K.get(name, 3), {"id_dtype": id_dtype, "weight_dtype": weight_dtype}
    weights, ids = route(name, alone, k, renormalize, **options)
    weights_beside, ids_beside = route(name, together, k, renormalize, **options)
    assert ids_beside[:real].tolist() == ids.tolist()
    assert bits(weights_beside[:real]) == bits(weights)
    assert (ids_beside.dtype, weights_beside.dtype) == (id_dtype, weight_dtype)
    for row in ids_beside.tolist():
        assert len(set(row)) == k
        assert all(0 <= expert < EXPERTS for expert in row)


def test_equal_logits_go_to_the_lower_expert() -> None:
    assert {
        name: route(name, torch.zeros(1, EXPERTS), TOP_K.get(name, 3), True)[1].tolist()
        for name in ROUTER_NAMES
    } == {
        "softmax": [[0, 1, 2]],
        "sigmoid-top1": [[0]],
        "softcap": [[0, 1, 2]],
        "sparse-mixer": [[0, 1]],
        "grouped": [[0, 1, 2]],
        "degenerate": [[0, 1, 2]],
    }


# Loading


ROUTER_FILE = """
from __future__ import annotations
from dataclasses import dataclass
import torch

@dataclass
class Fixed:
    expert: int
    def __call__(self, hidden_states, gating_output, topk, renormalize):
        shape = (gating_output.shape[0], topk)
        return torch.ones(shape), torch.full(shape, self.expert)

class Holder:
    router = Fixed(2)

def mine(hidden_states, gating_output, topk, renormalize):
    return Fixed(1)(hidden_states, gating_output, topk, renormalize)

number = 3
"""


@pytest.mark.parametrize(("attribute", "expert"), [("mine", 1), ("Holder.router", 2)])
def test_a_file_is_loaded_and_nothing_is_written_beside_it(
    tmp_path: Path, attribute: str, expert: int
) -> None:
    file = tmp_path / "my router.py"
    file.write_text(ROUTER_FILE)
    function = load_router(f"{file}:{attribute}")
    weights, ids = call_router(function, torch.zeros(3, 4), torch.zeros(3, EXPERTS), 2, True, name="mine")
    assert (weights.tolist(), ids.tolist()) == ([[1.0, 1.0]] * 3, [[expert, expert]] * 3)
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_changed_is_loaded_anew(tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    for value in (1, 2):
        file.write_text(f"def f(**_):\n    return {value}\n")
        assert load_router(f"{file}:f")() == value  # type: ignore[call-arg]


def test_a_module_is_loaded_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_with_a_router.py").write_text(ROUTER_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    function = load_router("module_with_a_router:mine")
    assert function is sys.modules["module_with_a_router"].mine


BROKEN = {
    "good.py": ROUTER_FILE,
    "raises.py": "raise OSError('first\\nsecond')",
    "exits.py": "raise SystemExit(3)",
    "cancels.py": "import asyncio; raise asyncio.CancelledError",
    "enters.py": "from torch.overrides import TorchFunctionMode\nTorchFunctionMode().__enter__()",
    "syntax.py": "def f(:\n",
    "needs.py": "import no_such_dependency",
    "empty.py": "",
    "raising_module.py": "1 / 0",
    "needing_module.py": "import no_such_dependency",
}


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("", f"'' is no router; give one of {NAMES}, or module:function, or path/file.py:function"),
        (
            "sofmax",
            "'sofmax' is no router; did you mean 'softmax'? "
            f"give one of {NAMES}, or module:function, or path/file.py:function",
        ),
        (
            "zzz",
            f"'zzz' is no router; give one of {NAMES}, or module:function, or path/file.py:function",
        ),
        (
            "good.py:",
            f"'good.py:' is no router; give one of {NAMES}, or module:function, or path/file.py:function",
        ),
        (
            ":f",
            f"':f' is no router; give one of {NAMES}, or module:function, or path/file.py:function",
        ),
        (
            "none.py:f",
            "none.py:f: cannot read none.py: No such file or directory; give a Python file",
        ),
        ("./:f", "./:f: cannot read .: Is a directory; give a Python file"),
        ("good.py:nine", "good.py:nine: good.py has no 'nine'; it defines Fixed, Holder, mine"),
        ("empty.py:f", "empty.py:f: empty.py has no 'f'; it defines no function"),
        ("good.py:number", "good.py:number: number is a int; give a function"),
        ("raises.py:f", "raises.py:f: running raises.py raised OSError: first second"),
        ("exits.py:f", "exits.py:f: running exits.py raised SystemExit: 3"),
        ("cancels.py:f", "cancels.py:f: running cancels.py raised CancelledError"),
        (
            "enters.py:f",
            "enters.py:f: running enters.py left TorchFunctionMode entered; "
            "enter modes of torch in a with statement",
        ),
        (
            "syntax.py:f",
            "syntax.py:f: running syntax.py raised SyntaxError: invalid syntax (syntax.py, line 1)",
        ),
        (
            "needs.py:f",
            "needs.py:f: running needs.py raised ModuleNotFoundError: No module named 'no_such_dependency'",
        ),
        (
            "no_such_module:f",
            "no_such_module:f: no module 'no_such_module' can be imported; "
            "install it, or give path/file.py:function",
        ),
        (
            "no_such_module.sub:f",
            "no_such_module.sub:f: no module 'no_such_module' can be imported; "
            "install it, or give path/file.py:function",
        ),
        (
            "raising_module:f",
            "raising_module:f: importing raising_module raised ZeroDivisionError: division by zero",
        ),
        (
            "needing_module:f",
            "needing_module:f: importing needing_module raised "
            "ModuleNotFoundError: No module named 'no_such_dependency'",
        ),
        (
            "..relative:f",
            "..relative:f: importing ..relative raised TypeError: the 'package' argument is required "
            "to perform a relative import for '..relative'",
        ),
    ],
)
def test_what_cannot_be_loaded_is_told_in_one_line(
    spec: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, source in BROKEN.items():
        (tmp_path / name).write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with pytest.raises(RouterError) as caught:
        load_router(spec)
    assert str(caught.value) == f"router: {text}"


# Calling


def call(answer: Any) -> tuple[Tensor, Tensor]:
    return call_router(lambda **_: answer, torch.zeros(3, 4), torch.zeros(3, EXPERTS), 2, True, name="mine")


WEIGHTS, IDS = torch.ones(3, 2), torch.ones(3, 2, dtype=torch.int64)


@pytest.mark.parametrize("ids", [IDS, IDS.int(), torch._neg_view(-IDS), IDS[:, :1].expand(3, 2)])
@pytest.mark.parametrize(
    "weights",
    [
        WEIGHTS,
        WEIGHTS.bfloat16(),
        WEIGHTS.half(),
        WEIGHTS.double() * math.nan,
        torch._neg_view(-WEIGHTS),
        torch.nn.Parameter(WEIGHTS),
        torch.ones(2, 3).t(),
    ],
)
def test_an_answer_that_keeps_the_contract_is_handed_on_in_plain_tensors(
    weights: Tensor, ids: Tensor
) -> None:
    seen = call((weights, ids))
    for ours, theirs in zip(seen, (weights, ids), strict=True):
        assert type(ours) is Tensor
        assert (ours.dtype, ours.is_contiguous(), ours.is_neg()) == (theirs.dtype, True, False)
        assert not ours.requires_grad
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
        assert ours.data_ptr() != theirs.data_ptr()


def shrunk(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() - 1)
    return tensor


class Hostile(tuple[Any, ...]):
    def __len__(self) -> int:
        raise OSError("no length")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "returned a NoneType; give a tuple of two tensors, (weights, ids)"),
        ([WEIGHTS, IDS], "returned a list; give a tuple of two tensors, (weights, ids)"),
        ((WEIGHTS, IDS, IDS), "returned a tuple of 3; give a tuple of two tensors, (weights, ids)"),
        (
            ([[1.0]], IDS),
            "returned a list in its tuple that is no plain tensor; give a tuple of two tensors, (weights, ids)",
        ),
        ((IDS, WEIGHTS), "returned (ids, weights); give (weights, ids)"),
        (
            (IDS, IDS),
            "returned weights of torch.int64; give torch.float32, torch.bfloat16, torch.float16, torch.float64",
        ),
        ((WEIGHTS, WEIGHTS), "returned ids of torch.float32; give int32 or int64"),
        ((WEIGHTS, IDS.short()), "returned ids of torch.int16; give int32 or int64"),
        ((WEIGHTS[:2], IDS), "returned weights of shape [2, 2]; give [3, 2], rows x top-k"),
        ((WEIGHTS, IDS[:, :1]), "returned ids of shape [3, 1]; give [3, 2], rows x top-k"),
        ((WEIGHTS, IDS[0]), "returned ids of shape [2]; give [3, 2], rows x top-k"),
        (
            (WEIGHTS, IDS.to("meta")),
            "returned ids on meta; give them on cpu, as the logits are",
        ),
        (
            (shrunk(torch.ones(3, 2)), IDS),
            "returned weights without the memory that their shape needs; "
            "give a tuple of two tensors, (weights, ids)",
        ),
        (
            (WEIGHTS, shrunk(torch.ones(3, 4, dtype=torch.int64)[:, 2:])),
            "returned ids without the memory that their shape needs; give a tuple of two tensors, (weights, ids)",
        ),
        (Hostile((WEIGHTS, IDS)), "returned an answer; reading it raised OSError: no length"),
    ],
)
def test_a_breach_of_the_contract_is_told_in_one_line(answer: Any, problem: str) -> None:
    with pytest.raises(RouterError) as caught:
        call(answer)
    assert str(caught.value) == f"router: mine {problem}"


def test_a_router_that_raises_is_told_with_its_error_as_the_cause() -> None:
    error = KeyError("no\nexpert")

    def function(**_: Any) -> tuple[Tensor, Tensor]:
        raise error

    with pytest.raises(RouterError, match=r"^router: mine raised KeyError: 'no\\nexpert'$") as caught:
        call_router(function, torch.zeros(3, 4), torch.zeros(3, EXPERTS), 2, True, name="mine")
    assert caught.value.__cause__ is error


class Own(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (asyncio.CancelledError(), "CancelledError"),
        (Own("out"), "Own: out"),
        (SystemExit(0), "SystemExit: 0"),
        (GeneratorExit(), "GeneratorExit"),
        (BaseExceptionGroup("both", [Own()]), "BaseExceptionGroup: both (1 sub-exception)"),
    ],
)
def test_what_a_router_raises_that_is_no_exception_is_told_as_well(error: BaseException, text: str) -> None:
    def function(**_: Any) -> tuple[Tensor, Tensor]:
        raise error

    with pytest.raises(RouterError) as caught:
        call_router(function, torch.zeros(3, 4), torch.zeros(3, EXPERTS), 2, True, name="mine")
    assert str(caught.value) == f"router: mine raised {text}"


def test_a_request_to_end_that_comes_while_a_router_runs_is_not_the_routers() -> None:
    def handler(_number: int, _frame: object) -> None:
        raise Own

    def interrupted(**_: Any) -> tuple[Tensor, Tensor]:
        raise KeyboardInterrupt

    def stopped(**_: Any) -> tuple[Tensor, Tensor]:
        signal.raise_signal(signal.SIGTERM)
        return WEIGHTS, IDS

    before = signal.signal(signal.SIGTERM, handler)
    try:
        for function, error in ((interrupted, KeyboardInterrupt), (stopped, Own)):
            with pytest.raises(error):
                call_router(function, torch.zeros(3, 4), torch.zeros(3, EXPERTS), 2, True, name="mine")
    finally:
        signal.signal(signal.SIGTERM, before)


class RefuseHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a tensor's value was read on the host")
        return func(*args, **(kwargs or {}))


class Rewrites(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("still entered")


class Stays(Rewrites):
    def __exit__(self, *_: object) -> None:
        raise OSError("no way out")


class Watches(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("still entered")


LEFT = {
    "FakeTensorMode": lambda: FakeTensorMode(),
    "Rewrites": Rewrites,
    "Stays": Stays,
    "Watches": Watches,
}


def entered() -> list[Any]:
    return [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize(
    "outside", [[], ["FakeTensorMode"], ["RefuseHostReads"]], ids=["", "in-fake", "in-own"]
)
def test_a_mode_of_torch_that_a_router_leaves_entered_is_left_for_it_and_told(
    name: str, outside: list[str]
) -> None:
    def function(**_: Any) -> tuple[Tensor, Tensor]:
        LEFT[name]().__enter__()
        return WEIGHTS, IDS

    inputs = torch.zeros(3, 4), torch.zeros(3, EXPERTS)
    with contextlib.ExitStack() as modes:
        for mode in outside:
            modes.enter_context(FakeTensorMode() if mode == "FakeTensorMode" else RefuseHostReads())
        before = entered()
        with pytest.raises(RouterError) as caught:
            call_router(function, *inputs, 2, True, name="mine")
        assert all(one is other for one, other in zip(before, entered(), strict=True))
    assert str(caught.value) == (
        f"router: mine left {name} entered; enter modes of torch in a with statement"
    )
    assert entered() == []
    assert torch.ones(2).tolist() == [1.0, 1.0]


def test_a_mode_left_by_a_router_that_raises_does_not_hide_what_it_raised() -> None:
    def function(**_: Any) -> tuple[Tensor, Tensor]:
        Rewrites().__enter__()
        raise KeyError("expert")

    with pytest.raises(RouterError, match=r"^router: mine raised KeyError: 'expert'$"):
        call_router(function, torch.zeros(3, 4), torch.zeros(3, EXPERTS), 2, True, name="mine")
    assert entered() == []


def test_a_mode_that_a_router_takes_off_is_put_back() -> None:
    def function(**_: Any) -> tuple[Tensor, Tensor]:
        _pop_mode()
        return WEIGHTS, IDS

    with RefuseHostReads() as mode:
        call_router(function, torch.zeros(3, 4), torch.zeros(3, EXPERTS), 2, True, name="mine")
        assert entered() == [mode]


@pytest.mark.parametrize("default", [None, "cpu", "meta"])
def test_default_devices_that_a_router_leaves_are_put_back_without_a_word(default: str | None) -> None:
    def function(**_: Any) -> tuple[Tensor, Tensor]:
        answer = torch.ones(3, 2, device="cpu"), torch.ones(3, 2, dtype=torch.int32, device="cpu")
        torch.set_default_device("meta")
        torch.device("meta").__enter__()
        torch.set_default_dtype(torch.float64)
        return answer

    torch.set_default_device(default)
    try:
        inputs = torch.zeros(3, 4, device="cpu"), torch.zeros(3, EXPERTS, device="cpu")
        weights, _ = call_router(function, *inputs, 2, True, name="mine")
        assert weights.tolist() == [[1.0, 1.0]] * 3
        assert torch.get_default_device() == torch.device(default or "cpu")
        assert (torch.ones(1).device, torch.ones(1).dtype) == (torch.device(default or "cpu"), torch.float32)
    finally:
        torch.set_default_device(None)
    assert entered() == []
    assert torch.ones(1).device == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "topk", "problem"),
    [
        ("sigmoid-top1", 2, "ValueError: top-k is 2, but this router chooses 1 a row"),
        ("sparse-mixer", 1, "ValueError: top-k is 1, but this router chooses 2 a row"),
        ("grouped", 5, "FieldError: top_k: 5 is more than the 4 experts of 2 groups"),
    ],
)
def test_a_built_in_router_refuses_a_top_k_that_it_has_no_meaning_for(
    name: str, topk: int, problem: str
) -> None:
    function = load_router(name, num_expert_group=4, topk_group=2)
    with pytest.raises(RouterError) as caught:
        call_router(function, torch.zeros(3, 4), torch.zeros(3, EXPERTS), topk, True, name=name)
    assert str(caught.value) == f"router: {name} raised {problem}"


@pytest.mark.parametrize("name", ROUTER_NAMES)
def test_calling_a_router_reads_no_value_on_the_host(name: str) -> None:
    function, logits = load_router(name, num_expert_group=4, topk_group=2), noise(3)
    with RefuseHostReads():
        weights, ids = call_router(function, torch.zeros(3, 4), logits, TOP_K.get(name, 3), True, name=name)
    assert weights.shape == ids.shape == (3, TOP_K.get(name, 3))


def test_a_router_that_reads_a_value_on_the_host_is_told() -> None:
    def function(gating_output: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        return WEIGHTS * float(gating_output.sum()), IDS

    with (
        RefuseHostReads(),
        pytest.raises(RouterError, match=r"raised RuntimeError: a tensor's value was read"),
    ):
        call_router(function, torch.zeros(3, 4), noise(3), 2, True, name="mine")
