from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_flags
from sglang.srt.utils import get_bool_env_var, log_info_on_rank0

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

LOG_TO = log_info_on_rank0
IS_TBO_ENABLED = get_bool_env_var("MINI_TWO_BATCH_OVERLAP")


class MoeRunnerBackend(Enum):
    AUTO = "auto"
    TRITON = "triton"


def get_moe_runner_backend() -> MoeRunnerBackend:
    return get_flags().moe.runner_backend or MoeRunnerBackend.AUTO


def initialize_moe_config(server_args: ServerArgs) -> None:
    LOG_TO(server_args)
