"""Who builds the prefill registry. moepad reads this file and does not load it."""

from sglang.srt.layers.dp_attention import require_gathered_buffer
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_prefill_registry


class PrefillCudaGraphRunner:
    def __init__(self, model_runner) -> None:
        server_args = model_runner.server_args
        gathers = require_gathered_buffer(server_args)
        self.registry = build_prefill_registry(
            device=model_runner.device,
            max_bs=1,
            max_num_token=max(model_runner.capture_num_tokens),
            cache_loc_dtype=model_runner.cache_loc_dtype,
            enable_num_token_non_padded=model_runner.is_moe,
            require_gathered_buffer=gathers,
            enable_prefill_cp=server_args.enable_prefill_cp,
            attn_tp_sharded_fn=lambda _num_tokens: gathers,
            share_pool=True,
        )
