"""What a tree's functions take, asked of themselves: version numbers decide nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .stubs import CannotVerify


def member(owner: Any, name: str) -> Any:
    value = getattr(owner, name, None)
    if value is None:
        raise CannotVerify(f"{getattr(owner, '__name__', type(owner).__name__)} of this tree has no {name}")
    return value


def parameters_of(function: Callable[..., Any], *, skip: int = 0) -> Mapping[str, inspect.Parameter]:
    """Parameters by name, without the first ``skip``. A signature costs more than the call that it is for."""
    plain = getattr(function, "__func__", function)
    bound = plain is not function
    parameters = _signature(plain)[bound + skip :]
    return {parameter.name: parameter for parameter in parameters}


@functools.cache
def _signature(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(function).parameters.values())


def accepted(function: Callable[..., Any], offered: dict[str, Any], *, skip: int = 0) -> dict[str, Any]:
    """Of what is offered, what the tree's function takes; a parameter that it needs besides is no answer."""
    parameters = parameters_of(function, skip=skip).values()
    for parameter in parameters:
        optional = parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if parameter.name not in offered and not optional:
            raise CannotVerify(
                f"{function.__name__} of this tree needs {parameter.name}, which moepad does not know"
            )
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in offered.items() if name in names}


def positional(function: Callable[..., Any], count: int) -> None:
    parameters = list(parameters_of(function).values())
    if len(parameters) < count or parameters[0].kind is parameters[0].KEYWORD_ONLY:
        raise CannotVerify(f"{function.__name__} of this tree takes no batch")
