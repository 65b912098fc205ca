"""The mathematics of the routing branches: scores of a row, the choice among them, weights of the choice.

Legend: T rows, E logical experts, K top-k, G groups of experts.

A row's result depends on that row alone, bit for bit, whatever rows stand beside it. Formulas are those of
SGLang 0.5.17, ``layers/moe/topk.py``; unlike there, all logits are scored in more than float32, and the
choice is in order: best first, equal scores by the lower id, NaN before any number.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from repro.errors import FieldError

ScoringFunc = Literal["softmax", "sigmoid", "sqrtsoftplus"]

RENORMALIZE_SUM_EPSILON = 1e-20  # of the DeepSeek gate: a sum of zeros must not give NaN


def score(logits: Tensor, scoring_func: ScoringFunc) -> Tensor:
    """Scores [T, E], float32, of logits [T, E] of any floating dtype."""
    # Elementwise CPU kernels take a vector or a scalar path by position in memory, and the two differ in the
    # last bit: a row's float32 score would depend on how many rows there are. Rounding from float64 hides it.
    exact = logits.double()
    if scoring_func == "softmax":
        return exact.softmax(dim=-1).float()
    if scoring_func == "sigmoid":
        return exact.sigmoid().float()
    return F.softplus(exact).sqrt().float()


def choose(scores: Tensor, k: int) -> Tensor:
    """Ids [T, k], int64, of the k best of ``scores`` [T, N]; distinct in every row, NaN rows too."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]


def row_sum(weights: Tensor) -> Tensor:
    """Sums [T, 1], float32, of ``weights`` [T, K]."""
    # Column by column, since a reduction may order its additions by the number of rows.
    total = torch.zeros_like(weights[:, 0], dtype=torch.float32)
    for column in weights.unbind(dim=-1):
        total = total + column
    return total.unsqueeze(-1)


def renormalized(weights: Tensor) -> Tensor:
    return weights / (row_sum(weights) + RENORMALIZE_SUM_EPSILON)


def plain_topk(
    logits: Tensor, k: int, *, scoring_func: ScoringFunc, correction_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights [T, k] and ids [T, k]; ``correction_bias`` [E] moves the choice and not the weights."""
    scores = score(logits, scoring_func)
    ids = choose(scores if correction_bias is None else scores + correction_bias.float(), k)
    return scores.gather(1, ids), ids


def grouped_topk(
    logits: Tensor, k: int, *, scoring_func: ScoringFunc, num_expert_group: int, topk_group: int
) -> tuple[Tensor, Tensor]:
    """The k best experts of the ``topk_group`` best groups; a group is as good as its best expert.

    Raises:
        FieldError: groups that E cannot be cut into, or with fewer than k experts among them.
    """
    size = experts_per_group(logits.shape[1], k, num_expert_group=num_expert_group, topk_group=topk_group)
    scores = score(logits, scoring_func)
    group_scores = torch.unflatten(scores, 1, (num_expert_group, size)).amax(dim=-1)
    ids = choose(_within_best_groups(scores, group_scores, topk_group), k)
    return scores.gather(1, ids), ids


def biased_grouped_topk(
    logits: Tensor, correction_bias: Tensor, k: int, *, num_expert_group: int, topk_group: int
) -> tuple[Tensor, Tensor]:
    """As ``grouped_topk``, chosen by sigmoid + bias; a group is as good as the sum of its two best experts.

    Raises:
        FieldError: as ``grouped_topk``, or groups of one expert.
    """
    size = experts_per_group(logits.shape[1], k, num_expert_group=num_expert_group, topk_group=topk_group)
    if size < 2:
        raise FieldError(
            "num_expert_group",
            f"{num_expert_group} leaves one expert a group; biased grouped top-k needs two",
        )
    scores = score(logits, "sigmoid")
    biased = scores + correction_bias.float()
    best = torch.unflatten(biased, 1, (num_expert_group, size)).sort(dim=-1, descending=True).values
    ids = choose(_within_best_groups(biased, best[..., 0] + best[..., 1], topk_group), k)
    return scores.gather(1, ids), ids


def experts_per_group(num_experts: int, k: int, *, num_expert_group: int, topk_group: int) -> int:
    """E // G.

    Raises:
        FieldError: E is no multiple of G, more groups are chosen than there are, or they hold fewer than k.
    """
    if num_expert_group < 1 or num_experts % num_expert_group:
        raise FieldError(
            "num_expert_group", f"{num_experts} experts cannot be cut into {num_expert_group} equal groups"
        )
    if not 1 <= topk_group <= num_expert_group:
        raise FieldError("topk_group", f"{topk_group} is out of range; give 1 to {num_expert_group}")
    size = num_experts // num_expert_group
    if k > topk_group * size:
        raise FieldError("top_k", f"{k} is more than the {topk_group * size} experts of {topk_group} groups")
    return size


def _within_best_groups(scores: Tensor, group_scores: Tensor, topk_group: int) -> Tensor:
    kept = torch.zeros_like(group_scores, dtype=torch.bool)
    kept.scatter_(1, choose(group_scores, topk_group), True)
    size = scores.shape[1] // group_scores.shape[1]
    return scores.masked_fill(~kept.repeat_interleave(size, dim=1), float("-inf"))
