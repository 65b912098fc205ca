import msgspec


class SharedExpertsConfig(msgspec.Struct, frozen=True):
    """How many shared experts ride along as further columns."""

    num_fused_shared_experts: int = 0
