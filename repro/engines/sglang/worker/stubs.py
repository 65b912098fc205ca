"""Stand-ins for what a tree imports and this machine lacks: they may be named, never used.

A stand-in may be imported, subclassed, used as a decorator or in an annotation. The moment its value is needed
(called, tested, compared, counted with, iterated, entered, or merely loaded while the code under test runs) it
raises ``StandInReached`` and is remembered, so that no ``except`` clause of the tree can hide it. A use while the
tree is imported spoils the tree for good.

Python asks nobody for ``x is None``, ``type(x)`` and the like: ``loader.compiled`` puts ``seen`` around such
operands. What still goes unnoticed: those builtins under another name (``map(type, values)``), containers that
compare their values by identity, what a class lacks for its base being a stand-in, a ``TypeError`` by which C code
refuses a stand-in, and all that a tree asks the machine by itself (files, processes, environment, ``sys.modules``).
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any


class CannotVerify(BaseException):
    """The tree could not be asked. Not an Exception: a tree's ``except Exception`` must not swallow it."""


class StandInReached(CannotVerify):
    """A value was needed that only the real package has."""


class Watch:
    """What the stand-ins of one process know of the tree around them.

    ``files`` maps a source file of the tree to the line ranges of its decorators. ``running`` is set while the
    code under test runs, as opposed to while it is being imported. ``reached`` holds one line for each use in a
    run, ``spoiled`` one for each use in an import.
    """

    def __init__(self) -> None:
        self.files: dict[str, tuple[str, list[tuple[int, int]]]] = {}
        self.running = False
        self.pretends = False  # CPU tensors stand for those of a GPU
        self.reached: list[str] = []
        self.spoiled: list[str] = []
        self.named: set[str] = set()

    def place(self, frame: FrameType | None) -> tuple[str, int]:
        """Short file name and line of the innermost frame of the tree."""
        while frame is not None:
            known = self.files.get(frame.f_code.co_filename)
            if known is not None:
                return known[0], frame.f_lineno
            frame = frame.f_back
        return "outside the tree", 0

    def is_decorating(self, frame: FrameType) -> bool:
        known = self.files.get(frame.f_code.co_filename)
        return known is not None and any(first <= frame.f_lineno <= last for first, last in known[1])

    def is_asked(self, frame: FrameType) -> bool:
        """Whether a question from this frame is the tree's: typing and functools look at what they are handed."""
        return self.running or frame.f_code.co_filename in self.files

    def trap(self, name: str, use: str, kind: str = "stand-in ") -> StandInReached:
        file, line = self.place(sys._getframe(2))
        text = f"{kind}{name} was {use} at {file}:{line}"
        (self.reached if self.running else self.spoiled).append(text)
        return StandInReached(text)

    def let_go(self, text: str) -> None:
        """For a use in an import that came to nothing by it: what did not load is not spoiled."""
        if text in self.spoiled:
            self.spoiled.remove(text)

    def raise_if_spoiled(self) -> None:
        """
        Raises:
            StandInReached: a stand-in was used in an import, whether or not the tree let the exception through.
        """
        if self.spoiled:
            raise StandInReached(self.spoiled[0])


WATCH = Watch()


def _trapping(use: str, *, unasked: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A method that traps; ``unasked`` is what it does for others than the tree, where that is something else."""

    def method(self: Stub | StubModule, *args: Any, **_kwargs: Any) -> Any:
        if unasked is not None and not WATCH.is_asked(sys._getframe(1)):
            return unasked(self, *args)
        raise WATCH.trap(_name_of(self), use)

    return method


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class Stub:
    """One name of a package that is not there."""

    __slots__ = ("_moepad_name",)

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_moepad_name", name)
        WATCH.named.add(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Stub:
        if not WATCH.running and WATCH.is_decorating(sys._getframe(1)):
            decorated = getattr(args[0], "__qualname__", "") if len(args) == 1 and not kwargs else ""
            return Stub(f"{_name_of(self)}({decorated})")
        raise WATCH.trap(_name_of(self), "called")

    def __getattribute__(self, name: str) -> Any:
        if name == "__mro_entries__":
            return object.__getattribute__(self, name)
        caller, special = sys._getframe(1), _is_special(name)
        # staticmethod, property and their like take over the name of what they decorate.
        taken_over = name in _TAKEN_OVER and WATCH.is_decorating(caller)
        if WATCH.running or (special and WATCH.is_asked(caller) and not taken_over):
            raise WATCH.trap(f"{_name_of(self)}.{name}", "read")
        return object.__getattribute__(self, name) if special else Stub(f"{_name_of(self)}.{name}")

    def __getitem__(self, _key: Any) -> Stub:
        if WATCH.running:
            raise WATCH.trap(_name_of(self), "indexed")
        return Stub(f"{_name_of(self)}[...]")

    def __or__(self, _other: Any) -> Any:
        if WATCH.running:
            raise WATCH.trap(_name_of(self), "counted with")
        return Stub(f"{_name_of(self)} | ...")

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        # Beside a real base it leaves no trace: that one may have a metaclass, or attributes of its own making.
        return (Heir,) if bases[0] is self and all(type(base) is Stub for base in bases) else ()


_TAKEN_OVER = frozenset(
    f"__{name}__" for name in ("module", "name", "qualname", "doc", "dict", "annotations", "isabstractmethod")
)


def _name_of(value: Stub | StubModule) -> str:
    if type(value) is StubModule:
        return value.__name__
    return str(object.__getattribute__(value, "_moepad_name"))


class Heir:
    """What is left of stand-ins as the bases of a class: what the class lacks, it would have had from them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            raise WATCH.trap(f"base of {type(self).__name__}", "initialised")

    def __getattr__(self, name: str) -> Any:
        if WATCH.is_asked(sys._getframe(1)):
            raise WATCH.trap(f"base of {type(self).__name__}: {name}", "read")
        raise AttributeError(name)


class StubModule(ModuleType):
    """A module that is not there. ``replacements`` are the names in it that have a faithful stand-in.

    ``defines`` says whether the real module may have a name; one that it has not cannot be imported here either.
    """

    def __init__(
        self,
        name: str,
        replacements: dict[str, Callable[[], Any]],
        defines: Callable[[str], bool] = lambda _name: True,
    ) -> None:
        super().__init__(name)
        self._moepad_defines = defines
        self.__path__: list[str] = []
        self._moepad_replacements = replacements
        self._moepad_stubs: dict[str, Stub] = {}

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if name == "__all__":
            raise WATCH.trap(self.__name__, "imported as *")
        if _is_special(name) and not WATCH.is_asked(sys._getframe(1)):
            raise AttributeError(name)
        if not _is_special(name) and not self._moepad_defines(name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        replacement = self._moepad_replacements.get(name)
        if replacement is not None:
            return replacement()
        if WATCH.running or _is_special(name):
            raise WATCH.trap(full, "read")
        return self._moepad_stubs.setdefault(name, Stub(full))


# What needs a value, by what it is told as. Operators of numbers come in three forms each.
_USES = {
    "compared": "lt le gt ge",
    "iterated": "iter next reversed contains length_hint len aiter anext",
    "entered": "enter exit aenter aexit await",
    "turned into a value": "int float complex index str format bytes fspath round trunc floor ceil reduce_ex",
    "asked for its instances": "instancecheck subclasscheck",
    "written to": "delattr setitem delitem",
    "counted with": "neg pos abs invert and xor lshift rshift add sub mul truediv floordiv mod divmod pow matmul",
}
for _use, _names in _USES.items():
    for _name in _names.split():
        setattr(Stub, f"__{_name}__", _trapping(_use))
        if _use == "counted with":
            setattr(Stub, f"__r{_name}__", _trapping(_use))
            setattr(Stub, f"__i{_name}__", _trapping(_use))
# typing, functools, abc and dataclasses do these to whatever they are handed.
_ANYONES: dict[str, tuple[str, Callable[..., Any]]] = {
    "bool": ("tested for truth", lambda _self: True),
    "eq": ("compared", lambda self, other: self is other),
    "ne": ("compared", lambda self, other: self is not other),
    "hash": ("hashed", object.__hash__),
    "repr": ("turned into a value", lambda self: f"<stand-in {_name_of(self)}>"),
}
for _name, (_use, _unasked) in _ANYONES.items():
    for _kind in (Stub, StubModule):
        setattr(_kind, f"__{_name}__", _trapping(_use, unasked=_unasked))
setattr(Stub, "__setattr__", _trapping("written to", unasked=lambda *_: None))  # noqa: B010
for _name in ("call", "iter", "len", "getitem", "lt", "le", "gt", "ge", "str", "format"):
    setattr(StubModule, f"__{_name}__", _trapping("taken for a value"))


def is_stand_in(value: Any) -> bool:
    return type(value) is Stub


def seen(value: Any) -> Any:
    """``value``, unless it is a stand-in, or a tuple that holds one: put around operands that ask nobody.

    Code that is made of text escapes this, so that ``exec`` and ``eval`` are refused too.
    """
    for one in value if type(value) is tuple else (value,):
        if type(one) is Stub:
            raise WATCH.trap(_name_of(one), "examined")
        if type(one) is StubModule:
            raise WATCH.trap(one.__name__, "examined")
        if one is exec or one is eval:
            raise WATCH.trap(one.__name__, "called", "the builtin ")
    return value


@contextmanager
def running() -> Iterator[None]:
    """While the code under test runs: every load of a stand-in out of globals counts as a use.

    Raises:
        StandInReached: a stand-in was used, whether or not the tree let the exception through.
        CannotVerify: the tree stopped the watch.
    """
    WATCH.reached.clear()
    WATCH.running = True
    sys.settrace(_trace_call)
    try:
        yield
    finally:
        trace = sys.gettrace()
        sys.settrace(None)
        WATCH.running = False
        WATCH.raise_if_spoiled()
        if WATCH.reached:
            raise StandInReached(WATCH.reached[0])
        if trace is not _trace_call and WATCH.files:
            raise CannotVerify("the tree stopped the watch over its stand-ins, or ran out of stack")


def _trace_call(frame: FrameType, _event: str, _argument: Any) -> Any:
    if not any(is_stand_in(frame.f_globals.get(name)) for name in frame.f_code.co_names):
        return None
    frame.f_trace_opcodes = True
    return _trace_opcode


def _trace_opcode(frame: FrameType, event: str, _argument: Any) -> Any:
    if event == "opcode":
        loaded = _loads_of(frame.f_code).get(frame.f_lasti)
        value = None if loaded is None else frame.f_globals.get(loaded)
        if isinstance(value, Stub):
            raise WATCH.trap(_name_of(value), "loaded")
    return _trace_opcode


_offsets_of: dict[CodeType, dict[int, str]] = {}


def _loads_of(code: CodeType) -> dict[int, str]:
    """Offsets at which a function loads one of its globals, with the name."""
    if code not in _offsets_of:
        loads: dict[int, str] = {}
        extended: list[int] = []
        for instruction in dis.get_instructions(code):
            if instruction.opname == "EXTENDED_ARG":
                extended.append(instruction.offset)
                continue
            if instruction.opname in _GLOBAL_LOADS:
                # Where the argument is long, Python tells of its first part only.
                loads.update(dict.fromkeys([*extended, instruction.offset], str(instruction.argval)))
            extended.clear()
        _offsets_of[code] = loads
    return _offsets_of[code]


_GLOBAL_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
