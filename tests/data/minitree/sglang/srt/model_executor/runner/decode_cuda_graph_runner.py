"""Who builds the decode registry. moepad reads this file and does not load it."""

from sglang.srt.layers.dp_attention import require_gathered_buffer
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry


class DecodeCudaGraphRunner:
    def __init__(self, model_runner) -> None:
        gathers = require_gathered_buffer(model_runner.server_args)
        self.registry = build_decode_registry(
            device=model_runner.device,
            max_bs=max(model_runner.capture_bs),
            max_num_token=max(model_runner.capture_bs) * model_runner.num_tokens_per_bs,
            cache_loc_dtype=model_runner.cache_loc_dtype,
            seq_len_fill_value=1,
            enable_num_token_non_padded=model_runner.is_moe,
            require_gathered_buffer=gathers,
            attn_tp_sharded_fn=lambda _num_tokens: gathers,
            share_pool=True,
        )
