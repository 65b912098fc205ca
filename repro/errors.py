"""Errors that the library raises at its edge.

MoepadError
  FieldError       a value that cannot be used; names the field
    PlanError        ... of a padding plan
    ScenarioError    ... of a scenario
    RouterError      ... of a routing function (in repro.routers)
  ScenarioFileError  a scenario file that cannot be read
  RunFileError       a saved run that cannot be read
  EngineSpecError    an engine name that means nothing
  NotVerifiedError   the code under test gave no answer that could be judged
"""

from __future__ import annotations

MAX_TEXT = 500
MAX_QUOTE = 60


class MoepadError(ValueError):
    """Base of all errors of this library; the text is one line."""


class FieldError(MoepadError):
    """``field`` is spelled as in ``Scenario`` and ``plan_padding``; ``problem`` says what would be right."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class PlanError(FieldError):
    """A padding plan that cannot be made."""


class ScenarioError(FieldError):
    """A scenario with a value out of range, or two that contradict each other."""


class ScenarioFileError(MoepadError):
    """A scenario file that is unreadable, malformed, or has an unknown key; the text has the line."""


class RunFileError(MoepadError):
    """A saved run that is unreadable, damaged or of another format."""


class EngineSpecError(MoepadError):
    """A text that names no engine."""


class NotVerifiedError(MoepadError):
    """The engine could not be asked, so that nothing may be said of it."""


def one_line(err: BaseException) -> str:
    """An exception's type and text without line breaks."""
    try:
        text = " ".join(str(err).split())
    except Exception:
        text = "(its text raised)"
    text = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
    return f"{type(err).__name__}: {text}" if text else type(err).__name__


def shown(value: object) -> str:
    """A value as an error quotes it: short, whatever somebody put there."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "that number"
    return text if len(text) <= MAX_QUOTE else f"{text[:MAX_QUOTE]}..."
