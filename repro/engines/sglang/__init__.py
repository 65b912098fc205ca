"""Real SGLang trees, run in worker processes."""

from repro.engines.sglang.engine import SglangEngine, start

__all__ = ["SglangEngine", "start"]
