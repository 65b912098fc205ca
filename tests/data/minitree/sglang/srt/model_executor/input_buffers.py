from dataclasses import dataclass

import torch

_POOL: dict[str, torch.Tensor] = {}


@dataclass
class GraphInputBuffers:
    """Tensors that all graphs of a process may share, by name."""

    share_pool: bool

    def take(self, name: str, size: int, dtype: torch.dtype, device) -> torch.Tensor:
        fresh = torch.zeros(size, dtype=dtype, device=device)
        return _POOL.setdefault(name, fresh) if self.share_pool else fresh
