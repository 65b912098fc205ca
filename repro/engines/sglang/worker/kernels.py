"""Plain-torch formulas that take the place of a few compiled kernels where there is no GPU to run them.

A formula stands in only for kernel source that it was compared with: ``Emulation.known`` holds the fingerprints of
that source, and a tree whose kernel has another one cannot be verified. ``_fill_padded_rows_kernel`` and
``moe_fused_gate`` were compared by running the released Triton source in Triton's interpreter
(``tests/repro/sglang/kernel_parity.py``). ``mask_topk_ids`` is CUDA C++: compared by reading, not by running.
``moe_fused_gate`` of 0.5.12 to 0.5.14 is CUDA C++ too, and not known: with 224 experts or fewer, on 512 rows or
fewer, it reads shared memory that nothing wrote.

A GPU's ``exp`` and ``log`` are approximate: a router's weights agree with one's to about 6 digits, and two experts
whose scores are that close may change places.

T rows, E experts, K columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .kernel_source import KernelSource, find_kernel, fingerprint_cuda, fingerprint_python

__all__ = [
    "EMULATIONS",
    "Emulation",
    "FillPaddedRows",
    "FusedGate",
    "KernelRefused",
    "KernelSource",
    "NotEmulated",
    "find_kernel",
    "fingerprint_cuda",
    "fingerprint_python",
    "is_known",
    "mask_topk_ids",
]


class KernelRefused(RuntimeError):  # noqa: N818
    """The kernel, or the launcher that is part of it, refuses these arguments."""


class NotEmulated(RuntimeError):  # noqa: N818
    """What the kernel does with these arguments, or this kernel at all, is not known here."""


def mask_topk_ids(topk_ids: Tensor, num_token_non_padded: Tensor) -> None:
    """``topk_ids[row, :] = -1`` for every row at or after the count, in place. ``topk_ids``: int32 ``[T, K]``.

    The count is compared as an unsigned number: a negative one masks nothing. No rows means a launch of no blocks,
    which CUDA refuses. The kernel takes an int64 count from host memory and refuses it in device memory.
    """
    ids, count = topk_ids, num_token_non_padded

    def require(holds: bool, otherwise: str) -> None:
        if not holds:
            raise KernelRefused(f"mask_topk_ids: {otherwise}")

    require(ids.dim() == 2, f"topk_ids has {ids.dim()} dimensions, not 2")
    rows, columns = ids.shape
    require(columns == 1 or ids.stride(1) == 1, f"the columns of topk_ids have stride {ids.stride(1)}, not 1")
    require(ids.dtype == torch.int32, f"topk_ids is {ids.dtype}, not torch.int32")
    require(count.numel() == 1, f"the count has {count.numel()} elements, not 1")
    require(columns <= 32, f"top-k is {columns}, more than the 32 threads of a warp")
    if count.dtype == torch.int64 and not count.is_cuda:
        raise NotEmulated(
            "mask_topk_ids: an int64 count is refused on the device, and this one may stand for such"
        )
    require(count.dtype == torch.int32, f"the count is {count.dtype}, not torch.int32")
    require(rows > 0, "topk_ids has no rows, and a launch of no blocks is an invalid configuration")
    if rows > 1 and ids.stride(0) < columns:
        raise NotEmulated("mask_topk_ids: rows of topk_ids share memory")
    ids[_first_element(count) % 2**32 :] = -1


def _first_element(pointer: Tensor) -> int:
    """What a kernel reads where the pointer points: the first element, whatever the shape."""
    return int(torch.as_strided(pointer, (1,), (1,)).item())


class FillPaddedRows:
    """``_fill_padded_rows_kernel``.

    Launched as ``kernel[(rows,)](out, num_token_non_padded, n_cols, fill_value, stride_row, BLOCK_COLS=...)``, it
    writes ``fill_value`` into the first ``n_cols`` elements of every row at or after the count (a signed number);
    row ``r`` begins ``r * stride_row`` elements after the first of ``out``. Any dtype of ids or weights.
    """

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    @staticmethod
    def _launch(
        grid: tuple[int, ...],
        out: Tensor,
        num_token_non_padded: Tensor,
        n_cols: int,
        fill_value: float,
        stride_row: int,
        **options: int,
    ) -> None:
        if len(grid) != 1 or set(options) != {"BLOCK_COLS"}:
            raise NotEmulated(f"_fill_padded_rows_kernel: grid {grid}, options {sorted(options)}")
        block = options["BLOCK_COLS"]
        if block < 1 or block & (block - 1):
            raise KernelRefused(f"_fill_padded_rows_kernel: BLOCK_COLS is {block}, not a power of two")
        try:
            first = max(_first_element(num_token_non_padded), 0)
            if first < grid[0]:
                shape, start = (
                    (grid[0] - first, min(n_cols, block)),
                    out.storage_offset() + first * stride_row,
                )
                torch.as_strided(out, shape, (stride_row, 1), start).fill_(fill_value)
        except RuntimeError as err:
            raise NotEmulated(f"_fill_padded_rows_kernel: {str(err).splitlines()[0]}") from err


_SCORING = ("sigmoid", "sqrtsoftplus", "softmax")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Parameters that came with 0.5.21 and are not emulated, with the values that ask for nothing.
_NEWER = {
    "bias_alt": None,
    "input_ids": None,
    "bias_alt_token_id": None,
    "renormalize_epsilon": 0.0,
    "packed_out": None,
}


@dataclass(frozen=True)
class FusedGate:
    """``moe_fused_gate`` as ``release`` (a triple) has it: weights float32 and ids int32, both ``[T, topk]``.

    ``scores``: raw logits ``[T, E]``; all is computed in float32. Sigmoid and sqrt-softplus: score plus ``bias``
    decides the choice, the score alone is the weight. Softmax: the bias is part of both. The lowest id wins a tie,
    of experts and of groups. A group is worth the sum of its two best *distinct* values.

    A NaN score ranks as -1e30 (with ``sqrtsoftplus_log1p`` as +inf), so that a row of NaN chooses the ids 0, 1, 2
    ... with NaN weights. Where only -inf is left, releases before 0.5.21 choose the lowest such id again and again.
    """

    release: tuple[int, ...]

    def __call__(
        self,
        scores: Tensor,
        bias: Tensor | None,
        topk: int,
        scoring_func: str = "sigmoid",
        num_fused_shared_experts: int = 0,
        renormalize: bool = True,
        routed_scaling_factor: float | None = 1.0,
        apply_routed_scaling_factor_on_output: bool = False,
        moe_softcapping: float = 0.0,
        num_expert_group: int = 1,
        topk_group: int = 1,
        **newer: Any,
    ) -> tuple[Tensor, Tensor]:
        scoring, shared = scoring_func.lower(), num_fused_shared_experts
        self._check_parameters({"moe_softcapping": moe_softcapping, **newer})
        self._check_tensors(scores, bias, scoring)
        experts = scores.shape[1]
        _require(topk > shared, f"topk {topk} is not more than the {shared} shared experts")
        _require(self._since(16) or routed_scaling_factor is not None, "routed_scaling_factor is None")
        _check_groups(experts, num_expert_group, topk_group)
        if self._since(17) and (experts, topk, scoring) == (896, 16, "sigmoid"):
            raise NotEmulated("moe_fused_gate: 896 experts with top-16 go to another kernel")

        logits = scores.to(torch.float32)
        live = _live_rows(scores, newer.get("num_token_non_padded"))
        logits = torch.where(live, logits, 0.0)
        log1p = bool(newer.get("sqrtsoftplus_log1p")) and scoring == "sqrtsoftplus"
        activated, ranked = self._activate(logits, bias, scoring, log1p)
        ranked = torch.where(ranked.isnan(), float("inf") if log1p else -1e30, ranked)
        if num_expert_group > 1:
            ranked = _keep_groups(ranked, num_expert_group, topk_group)
        weights, ids = self._choose(activated, ranked, topk - shared)
        scale = 1.0 if routed_scaling_factor is None else float(routed_scaling_factor)
        weights = self._weigh(weights, shared, renormalize, scale, apply_routed_scaling_factor_on_output)
        ids = torch.cat([ids, (experts + torch.arange(shared)).expand(ids.shape[0], -1)], dim=1)
        weights, ids = torch.where(live, weights, 0.0), torch.where(live, ids, -1)
        return (
            scores.new_empty(weights.shape, dtype=torch.float32).copy_(weights),
            scores.new_empty(ids.shape, dtype=torch.int32).copy_(ids),
        )

    def _since(self, patch: int) -> bool:
        return self.release >= (0, 5, patch)

    def _check_parameters(self, given: Mapping[str, Any]) -> None:
        """Lets through what asks for nothing, and what is emulated of a release that has it."""
        emulated = ("num_token_non_padded", "sqrtsoftplus_log1p") if self._since(21) else ()
        asks_nothing = {"moe_softcapping": 0.0, **(_NEWER if self._since(21) else {})}
        for name, value in given.items():
            if name not in emulated and not (name in asks_nothing and _is(value, asks_nothing[name])):
                raise NotEmulated(f"moe_fused_gate: {name}")

    def _check_tensors(self, scores: Tensor, bias: Tensor | None, scoring: str) -> None:
        _require(scoring in _SCORING, f"scoring_func {scoring!r} is none of {', '.join(_SCORING)}")
        _require(scores.dtype in _FLOATS, f"scores are {scores.dtype}, not float32, float16 or bfloat16")
        _require(scores.dim() == 2, f"scores have {scores.dim()} dimensions, not 2")
        if bias is None:
            _require(self._since(20) and scoring == "softmax", f"{scoring} without a bias")
            return
        floats = _FLOATS if self._since(19) else _FLOATS[:1]
        _require(bias.dtype in floats, f"the bias is {bias.dtype}, not {' or '.join(map(str, floats))}")
        _require(bias.dim() == 1, f"the bias has {bias.dim()} dimensions, not 1")
        _require(
            bias.shape[0] == scores.shape[1], f"{scores.shape[1]} scores a row, but {bias.shape[0]} biases"
        )
        if bias.stride(0) != 1 and bias.shape[0] != 1 and not self._since(21):
            raise NotEmulated("moe_fused_gate: the kernel does not heed that the bias is strided")

    def _activate(
        self, logits: Tensor, bias: Tensor | None, scoring: str, log1p: bool
    ) -> tuple[Tensor, Tensor]:
        """What becomes the weight, and what decides the choice."""
        offset = 0.0 if bias is None else bias.to(torch.float32)
        if scoring == "softmax":
            ranked = logits + offset
            exponents = _rounded(torch.exp, ranked - ranked.amax(dim=1, keepdim=True))
            return exponents / exponents.sum(dim=1, keepdim=True), ranked
        if scoring == "sigmoid":
            activated = 1.0 / (1.0 + _rounded(torch.exp, -logits))
        elif log1p:
            grown = _rounded(torch.log1p, _rounded(torch.exp, logits))
            activated = torch.where(logits > 20.0, logits, grown).sqrt()
        elif self._since(20):
            activated = (logits.clamp(min=0.0) + _log1p(_rounded(torch.exp, -logits.abs()))).sqrt()
        else:
            grown = _rounded(torch.log, 1.0 + _rounded(torch.exp, logits))
            activated = torch.where(logits > 20.0, logits, grown).sqrt()
        return activated, activated + offset

    def _choose(self, activated: Tensor, ranked: Tensor, routed: int) -> tuple[Tensor, Tensor]:
        lanes = torch.arange(ranked.shape[1])
        chosen = torch.zeros_like(ranked, dtype=torch.bool)
        weights, ids = [], []
        for _ in range(routed):
            best = ranked == ranked.amax(dim=1, keepdim=True)
            if self._since(21):
                best &= ~chosen
            lane = torch.where(best, lanes, len(lanes) + 1).amin(dim=1, keepdim=True)
            chosen |= lanes == lane
            ranked = torch.where(chosen, float("-inf"), ranked)
            weights.append(torch.where(lanes == lane, activated, 0.0).sum(dim=1, keepdim=True))
            ids.append(lane)
        return torch.cat(weights, dim=1), torch.cat(ids, dim=1)

    def _weigh(
        self, routed: Tensor, shared: int, renormalize: bool, scale: float, scale_output: bool
    ) -> Tensor:
        """Normalises, scales, and appends the shared experts' columns."""
        total = routed.sum(dim=1, keepdim=True)
        weights = torch.cat([routed, (total / scale).expand(-1, shared)], dim=1)
        if renormalize:
            weights = weights / torch.where(total > 0.0, total, 1.0)
        if scale_output:
            weights = weights * scale
        if self._since(23) and shared:
            weights[:, -shared:] = 1.0 if scale_output else 1.0 / scale
        return weights


def _is(value: Any, default: float | None) -> bool:
    return not isinstance(value, Tensor) and value == default


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise KernelRefused(f"moe_fused_gate: {otherwise}")


def _check_groups(experts: int, groups: int, kept: int) -> None:
    if groups < 1:
        raise NotEmulated(f"moe_fused_gate: num_expert_group {groups}")
    if groups > 1:
        _require(experts % groups == 0, f"{experts} experts do not divide into {groups} groups")
        _require(1 <= kept <= groups, f"topk_group {kept} is not 1 to {groups}")


def _live_rows(scores: Tensor, count: Tensor | None) -> Tensor:
    """``[T, 1]``: the rows before the count, a signed number."""
    rows = torch.arange(scores.shape[0])[:, None]
    if count is None:
        return rows >= 0
    if count.is_floating_point() or count.numel() == 0:
        raise NotEmulated(f"moe_fused_gate: a count of {count.numel()} elements, {count.dtype}")
    return rows < _first_element(count)


def _rounded(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """float32 by way of float64: equal inputs stay equal wherever in the tensor they are, as ties must."""
    return function(x.double()).float()


def _log1p(z: Tensor) -> Tensor:
    """``log(1 + z)`` for z of 0 to 1, by ``z * log(u) / (u - 1)`` with u the rounded ``1 + z``."""
    u = 1.0 + z
    exact = u == 1.0
    return torch.where(exact, z, z * _rounded(torch.log, u) / torch.where(exact, 1.0, u - 1.0))


def _keep_groups(ranked: Tensor, groups: int, kept: int) -> Tensor:
    """-inf for all experts outside the best ``kept`` groups."""
    lowest = float("-inf")
    grouped = ranked.reshape(len(ranked), groups, ranked.shape[1] // groups)
    first = grouped.amax(dim=2, keepdim=True)
    second = torch.where(grouped >= first, lowest, grouped).amax(dim=2, keepdim=True)
    worth = (first + second).squeeze(2)
    lanes = torch.arange(groups)
    keep = torch.zeros_like(worth, dtype=torch.bool)
    for _ in range(kept):
        best = worth == torch.where(worth.isnan(), lowest, worth).amax(dim=1, keepdim=True)
        winner = torch.where(best, lanes, groups + 1).amin(dim=1, keepdim=True)
        keep |= lanes == winner
        worth = torch.where(lanes == winner, lowest, worth)
    return torch.where(keep[:, :, None], grouped, lowest).flatten(1)


@dataclass(frozen=True)
class Emulation:
    """``known``: fingerprint -> the first release with that source; ``make`` takes that release."""

    name: str
    reason: str
    known: Mapping[str, str]
    make: Callable[[str], Any]

    def replacement(self, tree_root: Path) -> Any:
        """What to put in the kernel's place in that tree: it does what that tree's version of the kernel does.

        Raises:
            NotEmulated: ``is_known(self.name, tree_root)`` is not true.
        """
        source = found(self.name, tree_root)
        release = self.known.get(source.fingerprint) if source else None
        if release is None:
            raise NotEmulated(f"{self.name}: the tree's source of it is not one that was compared")
        return self.make(release)


# A process asks one tree, which does not change under it; a search costs some milliseconds.
found = functools.cache(find_kernel)


def is_known(name: str, tree_root: Path) -> bool | None:
    """Whether the emulation was compared with the kernel of this tree; None where the tree has no such kernel.

    ``tree_root`` is the folder that holds ``sglang/``.
    """
    source = found(name, tree_root)
    return None if source is None else source.fingerprint in EMULATIONS[name].known


def _gate_of(release: str) -> FusedGate:
    return FusedGate(tuple(int(part) for part in release.split(".")[:3]))


_EMULATIONS = (
    Emulation(
        "mask_topk_ids",
        "plain torch for a CUDA kernel, compared by reading: ids of pad rows become -1",
        {
            "ef896eda1a290a0d679dd38cf4df10bcc39534c295ad9eece5c4b95e047ba2d0": "0.5.12",
            "e606dcc0b8641c463c89cc7c51996d86ab85e145cefb42739783badbcf23389e": "0.5.13",
            "2de24ecebf76c410ce6fcd2b81e7bf95b5b0cda1f7496fdd74171261857f498c": "0.5.18",
            "42de7336ac155a50749efdda1346f88ec28dd4a90933962a3095f931aca546d0": "0.5.20",
            "8cce5794485024d5fa8b7a7cacb9457cad7d6c642c7c8069878a984be2c0fc66": "0.5.21",
        },
        lambda _release: mask_topk_ids,
    ),
    Emulation(
        "_fill_padded_rows_kernel",
        "plain torch for a Triton kernel, compared in Triton's interpreter: pad rows get one value",
        {
            "7eaf96cbf04ae00097ef6ccf0c8a6e72225b171788b1d103dfd9a5370d0e3b33": "0.5.15",
            "31c544a9f9264520fde88977fa69ca47882ed28a57f69234f8e94153d93eb844": "0.5.16",
        },
        lambda _release: FillPaddedRows(),
    ),
    Emulation(
        "moe_fused_gate",
        "plain torch for a Triton kernel, compared in Triton's interpreter: top-k of scores and bias",
        {
            "0b2740fa6ce468e7c8659a7c4fc9f2abccc1bdfb5084dd233e6f46de121ca0ba": "0.5.15",
            "4097f8594b62bd1f4a9484b07da39cb60e20de6a3cff5d3c2b1700b72b6d23b5": "0.5.16",
            "5088e8f9b63290861b9daac62c4abf3054289f1f5e2677ab30e72a9a6cb55ef4": "0.5.17",
            "c7270076d6df6a4cdfcb4ff5ac072336e089ff7c006922cd01c4299b1b2e7083": "0.5.19",
            "d1fbb43638117886d38c1ecca2b4c4753e9c305591b0a3b7d6b128f77e8d42a0": "0.5.20",
            "18a8c700cc9a63755077a5ff3191aba39ecfad93c4265ec7214648c6401c1b70": "0.5.21",
            "f5ee66ed64d3c22503e5ecd9cc1d7f0883c3ba22837cc8dcdec828db2a0dad3d": "0.5.23",
        },
        _gate_of,
    ),
)
EMULATIONS: Mapping[str, Emulation] = {emulation.name: emulation for emulation in _EMULATIONS}
