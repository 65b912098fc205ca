from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.mixins import ForwardBatchTboMixin
from sglang.srt.runtime_context import get_parallel


@dataclass
class ForwardBatch(ForwardBatchTboMixin):
    batch_size: int
    input_ids: torch.Tensor
    attn_backend: AttentionBackend | None = None
    num_token_non_padded: torch.Tensor | None = None
    global_num_token_non_padded: torch.Tensor | None = None
    global_num_token_non_padded_cpu: int | None = None


def _attn_tp_local_shard_bounds(num_tokens_per_dp: int, *, sharded: bool) -> tuple[int, int]:
    """First row and number of rows of this rank's shard."""
    if not sharded:
        return 0, num_tokens_per_dp
    parallel = get_parallel()
    tokens_per_rank = num_tokens_per_dp // parallel.attn_tp_size
    return tokens_per_rank * parallel.attn_tp_rank, tokens_per_rank


def compute_local_num_token_non_padded(
    global_num_token_non_padded: torch.Tensor, num_tokens_per_dp: int, *, sharded: bool
) -> torch.Tensor:
    rank_offset, tokens_per_rank = _attn_tp_local_shard_bounds(num_tokens_per_dp, sharded=sharded)
    return torch.clamp(global_num_token_non_padded - rank_offset, 0, tokens_per_rank)


def compute_local_num_token_non_padded_cpu(
    global_num_token_non_padded: int, num_tokens_per_dp: int, *, sharded: bool
) -> int:
    rank_offset, tokens_per_rank = _attn_tp_local_shard_bounds(num_tokens_per_dp, sharded=sharded)
    return min(max(global_num_token_non_padded - rank_offset, 0), tokens_per_rank)
