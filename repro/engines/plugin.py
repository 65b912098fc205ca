"""An engine that another package brings, held to the protocol."""

from __future__ import annotations

from contextlib import suppress

from torch import Tensor

from repro.case import Case
from repro.engines import stop_engine
from repro.engines.protocol import Engine, Observation, RankObservation
from repro.errors import NotVerifiedError, one_line


class PluginEngine:
    """Whatever the engine raises or gives instead of an observation is no answer, and no error of moepad's."""

    def __init__(self, engine: Engine) -> None:
        self.name = engine.name
        self._engine = engine

    def observe(self, case: Case) -> Observation:
        try:
            observation = self._engine.observe(case)
        except NotVerifiedError:
            raise
        except (Exception, SystemExit) as err:
            raise NotVerifiedError(f"{self.name}: {one_line(err)}") from err
        problem = _problem(observation)
        if problem:
            raise NotVerifiedError(f"{self.name}: gave {problem}")
        return observation

    def stop(self) -> None:
        with suppress(Exception, SystemExit):
            stop_engine(self._engine)


def _problem(observation: object) -> str | None:
    if not isinstance(observation, Observation):
        return f"{type(observation).__name__}, not an Observation"
    for rank in observation.ranks:
        if not isinstance(rank, RankObservation):
            return f"{type(rank).__name__} for a rank, not a RankObservation"
        for name, tensor in (("topk_ids", rank.topk_ids), ("topk_weights", rank.topk_weights)):
            if not isinstance(tensor, Tensor) or tensor.device.type != "cpu":
                return f"{name} that is no tensor on the CPU"
        if type(rank.num_token_non_padded) not in (int, type(None)):
            return f"a count of type {type(rank.num_token_non_padded).__name__}, not int"
        if not isinstance(rank.error, str | None):
            return f"an error of type {type(rank.error).__name__}, not text"
    return None
