"""Stand-ins may be named and nothing else: trees that name them are heard, trees that use them are not verified.

Each tree here is one module with one thing in it, asked through a worker as a real tree is.

What cannot be trapped, and why a verdict can still rest on it: a stand-in that nobody looks at; a list that is
compared with itself; ``type``, ``id`` and ``callable`` under another name; a tensor's device that is compared as a
whole, or whose type is read by ``getattr``; a class that lacks what its stand-in
of a base would have given it, when it is asked by ``hasattr`` or ``super``; C code that refuses a stand-in with a
``TypeError`` of its own, where the tree swallows that; and what a tree asks the machine by itself: ``sys.modules``,
files, the environment. A tree that was made to deceive cannot be found out at all: it could give the right answer
here alone.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.engines.sglang.process import Worker
from repro.errors import NotVerifiedError

FILE = "sglang/srt/layers/moe/topk.py"
TREE = """\
import torch
{top}

class TopKConfig:
    def __init__(self, top_k, use_grouped_topk, num_expert_group, topk_group, renormalize, custom_routing_function,
                 correction_bias, torch_native, routed_scaling_factor, scoring_func, num_fused_shared_experts):
        pass


class Output:
    def __init__(self, rows):
        self.topk_ids = torch.zeros(rows, 2, dtype=torch.int32)
        self.topk_weights = torch.ones(rows, 2)


def select_experts(hidden_states, router_logits, topk_config, *, num_token_non_padded=None,
                   expert_location_dispatch_info=None):
    output = Output(len(router_logits))
{use}
    return output
"""
IMPORT = "from missing.pkg import thing\n"
KEPT = IMPORT + "KEPT = [thing]\n"
ROUTE = {
    "branch": "softmax",
    "scoring_func": "softmax",
    "top_k": 2,
    "num_fused_shared_experts": 0,
    "renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "hidden_states": "hidden_states",
    "router_logits": "router_logits",
    "rows": [0, 2],
    "router": None,
    "correction_bias": None,
    "dispatch": None,
}
ITEM = {"rank": {"attn_tp_size": 1, "attn_tp_rank": 0}, "count": 1, "route": ROUTE}

Ask = Callable[..., str]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


@pytest.fixture
def ask(worker: Worker, tmp_path: Path) -> Iterator[Ask]:
    """Gives ``verified``, or why not; where that names the line marked with ``# here``, it says so instead.

    ``others`` are the texts of more files of the tree.
    """

    numbers = itertools.count()

    def ask(top: str, use: str = "pass", *, platform: str = "cuda", **others: str) -> str:
        text = TREE.format(top=textwrap.dedent(top), use=textwrap.indent(textwrap.dedent(use), "    "))
        root = tmp_path / f"tree{next(numbers)}"
        file = root / FILE
        file.parent.mkdir(parents=True)
        file.write_text(text)
        for name, content in others.items():
            (root / "sglang" / "srt" / f"{name}.py").write_text(content)
        lines = [number for number, line in enumerate(text.split("\n"), 1) if line.endswith("# here")]
        try:
            worker.open(tree=str(root), platform=platform)
            (result,), _ = worker.observe(
                [ITEM], {"hidden_states": torch.zeros(2, 4), "router_logits": torch.zeros(2, 4)}
            )
        except NotVerifiedError as err:
            reason: Any = str(err)
        else:
            assert result["error"] is None
            reason = result["cannot_verify"] or "verified"
        for line in lines:
            reason = reason.replace(f" at {FILE}:{line}", " here")
        return str(reason)

    yield ask
    worker.close()


NAMED = {
    "imported": IMPORT,
    "imported as": "from missing.pkg import thing as other\nimport missing.pkg.sub as sub",
    "imported with a package": "import missing.pkg.sub\nX = missing.pkg.sub.thing",
    "imported within a function": "def unused():\n    from missing.pkg import thing\n    return thing()",
    "only tried": "try:\n    from missing.pkg import thing\nexcept ImportError:\n    thing = None",
    "in annotations that are evaluated": IMPORT
    + """\
from typing import Annotated, Any, Callable, Dict, Literal, NewType, Optional, TypeVar, Union
A = Optional[thing], thing | None, None | thing, thing | int, int | thing, Dict[str, thing], Union[thing, int, None]
B = Callable[[thing], thing], list[thing], tuple[thing, ...], type[thing], Literal[thing], Annotated[thing, 1]
C = Optional[thing | None], Union[thing, thing.part, None], thing[int], Optional[thing[int]]
D = TypeVar("D", bound=thing), TypeVar("D", thing, int), NewType("D", thing)
def function(x: thing, *y: Optional[thing.part], z: "thing" = 1) -> Union[thing, None]: ...
value: Optional[thing] = None
""",
    "as the default of a type variable": IMPORT
    + 'from typing_extensions import TypeVar\nT = TypeVar("T", default=thing)',
    "as a default that is not used": IMPORT + "def function(x=thing, *, y=[thing]): ...",
    "subclassed": IMPORT
    + "class A(thing): ...\nclass B(thing, thing.other): ...\nclass C(A): ...\nA(), B(), C()",
    "subclassed with others": IMPORT
    + """\
import abc, enum, typing
class A(thing, torch.nn.Module): ...
class B(torch.nn.Module, thing.part): ...
class C(thing, enum.Enum):
    ONE = 1
class D(thing, abc.ABC): ...
class E(thing, typing.Generic[typing.TypeVar("T")]): ...
class F(thing, typing.Protocol): ...
class G(thing, Exception): ...
A(), B(), C(1), D(), E(), G("text")
""",
    "a base of a dataclass, and in its fields": IMPORT
    + """\
from dataclasses import dataclass, field
@dataclass
class A(thing):
    a: thing
    b: thing = thing
    c: int = 1
    d: list = field(default_factory=list)
@dataclass
class B(A):
    e: thing = thing
A(1)
""",
    "in an enumeration, a named tuple, a table": IMPORT
    + """\
from enum import Enum
from typing import NamedTuple
class A(Enum):
    ONE = thing
    TWO = thing.two
class B(NamedTuple):
    one: thing = thing
TABLE = {"one": thing, "two": (thing, [thing.two])}
""",
    "a decorator": IMPORT
    + """\
import abc, functools
@thing
def a(): ...
@thing(1, key="value")
def b(): ...
@thing.part
@thing.other(
    1,
    2,
)
@functools.lru_cache(None)
@thing
def c(): ...
@thing.cls
class D:
    @thing
    def a(self): ...
    @staticmethod
    @thing(1)
    def b(): ...
    @classmethod
    @thing
    def c(cls): ...
    @property
    @thing
    def d(self): ...
    @abc.abstractmethod
    @thing
    def e(self): ...
    @thing.setter
    def f(self): ...
if True:
    try:
        @thing
        def g(): ...
    except ImportError:
        @thing
        def g(): ...
    finally:
        @thing
        def h(): ...
""",
    "a partial that is not called": IMPORT + "import functools\nX = functools.partial(thing, 1)",
}


@pytest.mark.parametrize("top", [pytest.param(top, id=name) for name, top in NAMED.items()])
def test_a_stand_in_may_be(ask: Ask, top: str) -> None:
    assert ask(top) == "verified"


@pytest.mark.parametrize("top", [pytest.param(top, id=name) for name, top in NAMED.items()])
def test_naming_them_does_not_blunt_them(ask: Ask, top: str) -> None:
    use = "try:\n    thing  # here\nexcept NameError:\n    pass"
    assert ask(f"{top}\nfrom missing.pkg import thing", use) == "stand-in missing.pkg.thing was loaded here"


# How an expression with x uses it, by what it is told as. What follows ``.`` belongs to the name.
USES = {
    "called": ["x()", "x(1, key=2)"],
    "tested for truth": [
        "not x",
        "1 if x else 2",
        "x and 1",
        "x or 1",
        "bool(x)",
        "any([x])",
        "[1 for _ in [1] if x]",
    ],
    "compared": [
        "x == 1",
        "x != 1",
        "1 == x",
        "x < 1",
        "1 < x",
        "x >= x",
        "x in (1, 2)",
        "1 in [x]",
        "sorted([x, 1])",
        "max(1, x)",
        "[1].index(x)",
    ],
    "iterated": ["list(x)", "1 in x", "[*x]", "dict(a=[*x])", "iter(x)", "next(x)", "reversed(x)", "len(x)"],
    "turned into a value": [
        "int(x)",
        "float(x)",
        "complex(x)",
        "str(x)",
        "repr(x)",
        "f'{x}'",
        "f'{x!r:>9}'",
        "'%s' % x",
        "'%r' % (x,)",
        "'{}'.format(x)",
        "[1, 2][x]",
        "[1][:x]",
        "range(x)",
        "bytes(x)",
        "round(x)",
        "hex(x)",
        "__import__('os').fspath(x)",
        "__import__('math').floor(x)",
        "__import__('copy').copy(x)",
        "__import__('copy').deepcopy([x])",
    ],
    "asked for its instances": ["isinstance(1, x)", "isinstance(1, (str, x))", "issubclass(int, x)"],
    "written to": ["setattr(x, 'name', 1)", "delattr(x, 'name')"],
    "counted with": [
        "x + 1",
        "1 + x",
        "x * 2",
        "2 ** x",
        "-x",
        "~x",
        "abs(x)",
        "x @ x",
        "x & 1",
        "divmod(x, 2)",
    ],
    "hashed": ["hash(x)", "{x: 1}", "{x}", "x in {1, 2}", "{1: 2}.get(x)", "x in {1: 2}"],
    "examined": [
        "x is None",
        "None is not x",
        "1 is x is 2",
        "type(x)",
        "id(x)",
        "callable(x)",
        "hasattr(x, 'name')",
        "getattr(x, '__version__', '0')",
        "__import__('inspect') and inspect.signature(x)",
        "operator.is_(x, None)",
    ],
}
SPECIAL = {
    "isinstance(x, int)": "__class__",
    "isinstance(x, (int, torch.Tensor))": "__class__",
    "issubclass(x, int)": "__bases__",
    "x.__class__": "__class__",
    "x.__name__": "__name__",
    "x.__doc__": "__doc__",
    "vars(x)": "__dict__",
    "dir(x)": "__dict__",
}
EXPRESSIONS = [
    *(
        (expression, f"missing.pkg.thing was {use}")
        for use, several in USES.items()
        for expression in several
    ),
    *((expression, f"missing.pkg.thing.{name} was read") for expression, name in SPECIAL.items()),
]
everything = pytest.mark.parametrize(
    ("expression", "use"), [pytest.param(*pair, id=pair[0]) for pair in EXPRESSIONS]
)
MODULES = "import inspect, operator\n"


@everything
def test_every_use_while_the_tree_is_imported_spoils_it(ask: Ask, expression: str, use: str) -> None:
    top = f"{IMPORT}{MODULES}x = thing\nX = {expression}  # here"
    assert ask(top) == f"stand-in {use} here"


# In a run, whatever is read of a stand-in is a use; while importing, only what needs a value.
READ_IN_A_RUN = {
    "__import__('copy').copy(x)": "__reduce_ex__",
    "__import__('copy').deepcopy([x])": "__deepcopy__",
}
BY_ANOTHER_WAY = "for x in KEPT:\n    {}"
BY_A_GLOBAL = "{}"


@pytest.fixture(scope="module", params=["by a global", "by another way"])
def said_in_runs(
    request: pytest.FixtureRequest, worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, str]]:
    """What each expression came to in a run, all asked of one tree: an item's ``top_k`` says which one is run."""
    cases = "".join(
        f"    if topk_config.top_k == {number}:\n        {expression}  # {number}\n"
        for number, (expression, _) in enumerate(EXPRESSIONS)
    )
    source = {"by a global": "x = thing", "by another way": "def _kept(topk_config, x=thing):\n" + cases}
    use = "_kept(topk_config)" if request.param == "by another way" else cases.strip()
    text = TREE.format(top=f"{IMPORT}{MODULES}{source[request.param]}", use=f"    {use}").replace(
        "        pass", "        self.top_k = top_k"
    )
    root = tmp_path_factory.mktemp("runs")
    file = root / FILE
    file.parent.mkdir(parents=True)
    file.write_text(text)
    worker.open(tree=str(root), platform="cuda")
    items = [{**ITEM, "route": {**ROUTE, "top_k": number}} for number in range(len(EXPRESSIONS))]
    results, _ = worker.observe(
        items, {name: torch.zeros(2, 4) for name in ("hidden_states", "router_logits")}
    )
    worker.close()
    lines = text.split("\n")
    said = {}
    for number, ((expression, _), result) in enumerate(zip(EXPRESSIONS, results, strict=True)):
        line = next(n for n, line in enumerate(lines, 1) if line.endswith(f"  # {number}"))
        said[expression] = str(result["cannot_verify"]).replace(f"{FILE}:{line}", "its line")
    return request.param, said


@everything
def test_every_use_in_a_run_is_heard(
    said_in_runs: tuple[str, dict[str, str]], expression: str, use: str
) -> None:
    way, said = said_in_runs
    if way == "by a global":
        use = "missing.pkg.thing was loaded"
    elif expression in READ_IN_A_RUN:
        use = f"missing.pkg.thing.{READ_IN_A_RUN[expression]} was read"
    assert said[expression] == f"stand-in {use} at its line"


SWALLOWED = {
    "a bare except": "try:\n    {}  # here\nexcept:\n    pass",
    "except BaseException": "try:\n    {}  # here\nexcept BaseException:\n    pass",
    "except Exception": "try:\n    {}  # here\nexcept Exception:\n    pass",
    "suppress": "import contextlib\nwith contextlib.suppress(BaseException):\n    {}  # here",
    "a return in finally": "def inner():\n    try:\n        {}  # here\n    finally:\n        return 1\ninner()",
    "a decorator": """\
def safe(function):
    def call():
        try:
            return function()
        except BaseException:
            return None
    return call
@safe
def inner():
    {}  # here
inner()""",
    "another exception": """\
try:
    {}  # here
except BaseException as err:
    try:
        raise ValueError("no count, please") from err
    except ValueError:
        pass""",
    "a generator": """\
def inner():
    try:
        yield {}  # here
    except BaseException:
        yield 1
list(inner())""",
    "a thread": """\
import threading
def inner():
    try:
        {}  # here
    except BaseException:
        pass
thread = threading.Thread(target=inner)
thread.start()
thread.join()""",
}
swallowed = pytest.mark.parametrize("form", [pytest.param(form, id=name) for name, form in SWALLOWED.items()])


@swallowed
def test_a_use_that_the_tree_swallows_in_a_run_is_remembered(ask: Ask, form: str) -> None:
    assert ask(KEPT, form.format("KEPT[0]()")) == "stand-in missing.pkg.thing was called here"


@swallowed
def test_a_use_that_the_tree_swallows_while_it_is_imported_is_remembered(ask: Ask, form: str) -> None:
    assert ask(f"{IMPORT}{form.format('thing()')}") == "stand-in missing.pkg.thing was called here"


@swallowed
def test_a_use_that_the_tree_swallows_while_a_module_of_it_is_imported_in_a_run(ask: Ask, form: str) -> None:
    environ = f"{IMPORT}{form.format('thing()')}".replace("# here", "# there")
    line = next(n for n, line in enumerate(environ.split("\n"), 1) if line.endswith("# there"))
    assert ask("", "import sglang.srt.environ", environ=environ) == (
        f"stand-in missing.pkg.thing was called at sglang/srt/environ.py:{line}"
    )


def test_a_tree_that_swallows_a_use_and_then_refuses_the_count_has_not_refused_it(ask: Ask) -> None:
    use = "try:\n    thing()  # here\nexcept BaseException:\n    pass\nraise ValueError('no count, please')"
    assert ask(IMPORT, use) == "stand-in missing.pkg.thing was loaded here"


def test_the_second_of_two_items_is_not_spoilt_by_a_use_in_the_first(worker: Worker, tmp_path: Path) -> None:
    file = tmp_path / FILE
    file.parent.mkdir(parents=True)
    file.write_text(TREE.format(top=IMPORT, use="    if len(router_logits) == 1:\n        thing()"))
    worker.open(tree=str(tmp_path), platform="cuda")
    items = [{**ITEM, "route": {**ROUTE, "rows": rows}} for rows in ([0, 1], [0, 2])]
    results, seen = worker.observe(
        items, {name: torch.zeros(2, 4) for name in ("hidden_states", "router_logits")}
    )
    worker.close()
    assert [result["cannot_verify"] for result in results] == [
        f"stand-in missing.pkg.thing was loaded at {FILE}:21",
        None,
    ]
    assert sorted(seen) == ["ids.1", "weights.1"]


def test_a_use_in_another_module_of_the_tree_spoils_it_all(ask: Ask) -> None:
    environ = f"{IMPORT}try:\n    thing()\nexcept:\n    pass\n"
    assert ask("from sglang.srt import environ", environ=environ) == (
        "stand-in missing.pkg.thing was called at sglang/srt/environ.py:3"
    )


def test_a_tree_that_was_spoilt_is_not_opened(worker: Worker, tmp_path: Path) -> None:
    file = tmp_path / FILE
    file.parent.mkdir(parents=True)
    file.write_text(TREE.format(top=f"{IMPORT}try:\n    thing()\nexcept:\n    pass", use=""))
    with pytest.raises(NotVerifiedError, match=rf"^stand-in missing\.pkg\.thing was called at {FILE}:4$"):
        worker.open(tree=str(tmp_path), platform="cuda")


# Where a stand-in may lie when it is compared with None, which asks nobody. ``top`` and the run.
HIDDEN = {
    "a default": ("def inner(x=thing):\n    return x is None  # here", "inner()"),
    "a keyword's default": ("def inner(*, x=thing):\n    return x is None  # here", "inner()"),
    "a list as a default": ("def inner(x=[thing]):\n    return x[0] is None  # here", "inner()"),
    "a closure": ("def outer(x):\n    return lambda: x is None  # here\nINNER = outer(thing)", "INNER()"),
    "a class": ("class A:\n    x = thing", "A.x is None  # here"),
    "an instance": (
        "class A:\n    def __init__(self, x=thing):\n        self.x = x\nA = A()",
        "A.x is None  # here",
    ),
    "a table": ('TABLE = {"x": thing}', 'TABLE["x"] is None  # here'),
    "a tuple that is unpacked": ("PAIR = thing, 1", "x, y = PAIR\nx is None  # here"),
    "a loop": ("", "for x in KEPT:\n    x is None  # here"),
    "a comprehension": ("", "[x is None for x in KEPT]  # here"),
    "a generator": ("", "any(x is None for x in KEPT)  # here"),
    "a generator that was started before": (
        "def inner():\n    yield\n    yield KEPT[0] is None  # here\nINNER = inner()\nnext(INNER)",
        "next(INNER)",
    ),
    "a walrus": ("", "(x := KEPT[0]) is None  # here"),
    "a partial": (
        "import functools\nINNER = functools.partial(lambda x: x is None, thing)  # here",
        "INNER()",
    ),
    "a global of a nested function": (
        "",
        "def inner():\n    global x\n    x = KEPT[0]\n    return x is None  # here\ninner()",
    ),
    "a module's attribute": ("import sys", "sys.modules[__name__].KEPT[0] is None  # here"),
    "a module's own __getattr__": (
        "def __getattr__(name):\n    return KEPT[0]\nimport sys",
        "sys.modules[__name__].anything is None  # here",
    ),
    "a dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: object = thing",
        "A().x is None  # here",
    ),
    "an argument": ("def inner(x):\n    return x is None  # here", "inner(KEPT[0])"),
    "a return value": ("def inner():\n    return KEPT[0]", "inner() is None  # here"),
    "what a decorator made": ("@thing\ndef inner(): ...\nINNER = [inner]", "INNER[0] is None  # here"),
    "a property": (
        "class A:\n    @property\n    def x(self):\n        return KEPT[0]",
        "A().x is None  # here",
    ),
    "a cached function": (
        "import functools\n@functools.lru_cache(None)\ndef inner(n):\n    return KEPT[0]",
        "inner(1) is None  # here",
    ),
    "an assertion": ("", "assert KEPT[0] is not None  # here"),
    "a conditional": ("", "1 if KEPT[0] is None else 2  # here"),
    "a match": ("", "match KEPT[0]:  # here\n    case None:\n        pass"),
    "a thread": (
        "import threading",
        "def inner():\n    try:\n        KEPT[0] is None  # here\n    except BaseException:\n        pass\n"
        "thread = threading.Thread(target=inner)\nthread.start()\nthread.join()",
    ),
    "a coroutine": ("", "async def inner():\n    KEPT[0] is None  # here\ninner().send(None)"),
}


@pytest.mark.parametrize(("top", "use"), [pytest.param(*pair, id=name) for name, pair in HIDDEN.items()])
def test_a_stand_in_is_heard_where_its_identity_is_asked(ask: Ask, top: str, use: str) -> None:
    name = "thing(inner)" if "@thing" in top else "thing"
    assert ask(f"{KEPT}{top}", use) == f"stand-in missing.pkg.{name} was examined here"


OTHER_USES = {
    "a context": ("with x:  # here\n    pass", "{} was entered"),
    "an awaited value": ("async def inner():\n    await x  # here\ninner().send(None)", "{} was entered"),
    "an asynchronous context": (
        "async def inner():\n    async with x:  # here\n        pass\ninner().send(None)",
        "{} was entered",
    ),
    "an asynchronous loop": (
        "async def inner():\n    async for y in x:  # here\n        pass\ninner().send(None)",
        "{} was iterated",
    ),
    "a loop": ("for y in x:  # here\n    pass", "{} was iterated"),
    "an endless loop": ("while x:  # here\n    pass", "{} was tested for truth"),
    "unpacking": ("y, z = x  # here", "{} was iterated"),
    "yield from": ("def inner():\n    yield from x  # here\nlist(inner())", "{} was iterated"),
    "arguments": ("print(*x)  # here", "{} was iterated"),
    "keywords": ("dict(**x)  # here", "{}.keys was read"),
    "an item that is set": ("x[1] = 2  # here", "{} was written to"),
    "an item that is deleted": ("del x[1]  # here", "{} was written to"),
    "an attribute that is set": ("x.y = 2  # here", "{} was written to"),
    "an attribute that is deleted": ("del x.y  # here", "{} was written to"),
    "an index": ("x[1]  # here", "{} was indexed"),
    "an attribute": ("x.y  # here", "{}.y was read"),
    "an attribute with a default": ("getattr(x, 'y', None)  # here", "{} was examined"),
    "addition in place": ("x += 1  # here", "{} was counted with"),
    "a union": ("x | None  # here", "{} was counted with"),
    "a value pattern": (
        "class HOLDER:\n    y = x\nmatch 1:\n    case HOLDER.y:  # here\n        pass",
        "{} was compared",
    ),
    "a class pattern": ("match x:  # here\n    case int():\n        pass", "{} was examined"),
    "a sequence pattern": ("match x:  # here\n    case [y]:\n        pass", "{} was examined"),
    "a mapping pattern": ("match x:  # here\n    case {'y': 1}:\n        pass", "{} was examined"),
    "raise": ("try:\n    raise x  # here\nexcept Exception:\n    pass", "{} was examined"),
    "an except clause": (
        "try:\n    try:\n        1 / 0\n    except x:  # here\n        pass\nexcept Exception:\n    pass",
        "{} was examined",
    ),
    "one of an except clause": (
        "try:\n    try:\n        1 / 0\n    except (KeyError, x):  # here\n        1\nexcept Exception:\n    1",
        "{} was examined",
    ),
    "a partial that is called": ("import functools\nfunctools.partial(x, 1)()  # here", "{} was called"),
    "a key of a sort": ("sorted([1, 2], key=x)  # here", "{} was called"),
    "the argument of a cached function": (
        "import functools\ninner = functools.lru_cache(lambda y: y)\ninner(x)  # here",
        "{} was hashed",
    ),
    "json": ("import json\njson.dumps([1, x])  # here", "{}.__class__ was read"),
    "pickle": ("import pickle\npickle.dumps(x)  # here", "{}.__reduce_ex__ was read"),
    "a log": ("import logging\nlogging.warning('%s', x)  # here", "{}.__class__ was read"),
    "a subclass in a run": ("class A(x):\n    pass\nA().y  # here", "base of A: y was read"),
}


@pytest.mark.parametrize(("use", "said"), [pytest.param(*pair, id=name) for name, pair in OTHER_USES.items()])
def test_a_use_in_a_statement_is_heard(ask: Ask, use: str, said: str) -> None:
    said = said.format("missing.pkg.thing")
    assert ask(KEPT, f"x = KEPT[0]\n{use}") == f"stand-in {said} here"


TORCH = [
    "torch.add(output.topk_ids, x)",
    "torch.where(output.topk_ids == 0, x, 1)",
    "torch.zeros(x)",
    "torch.zeros(1, dtype=x)",
    "torch.zeros(1, device=x)",
    "torch.tensor([x])",
    "torch.cat([output.topk_ids, x])",
    "output.topk_ids.fill_(x)",
    "output.topk_ids.to(x)",
    "output.topk_ids.sum(dim=x)",
    "output.topk_ids.sum(0, keepdim=x)",
    "output.topk_ids == x",
    "output.topk_ids[x]",
    "output.topk_ids.__setitem__(0, x)",
    "torch.nn.functional.softmax(x, dim=0)",
]


@pytest.mark.parametrize("call", TORCH)
def test_torch_does_not_hide_that_it_was_given_a_stand_in(ask: Ask, call: str) -> None:
    said = ask(KEPT, f"x = KEPT[0]\ntry:\n    {call}  # here\nexcept Exception:\n    pass")
    name, _, use = said.removeprefix("stand-in missing.pkg.thing").removesuffix(" here").partition(" was ")
    assert (name, use) in [
        (".__torch_function__", "read"),
        (".__class__", "read"),
        ("", "iterated"),
        ("", "turned into a value"),
    ], said


IN_A_RUN = {
    "a name": ("from missing.pkg import thing  # here", "missing.pkg.thing was read"),
    "a name under another": ("from missing.pkg import thing as x  # here", "missing.pkg.thing was read"),
    "a name that is only tried": (
        "try:\n    from missing.pkg import thing  # here\nexcept BaseException:\n    thing = None",
        "missing.pkg.thing was read",
    ),
    "all names": ("exec('from missing.pkg import *')  # here", None),
    "a module": ("import missing.pkg as m\nm is None  # here", "missing.pkg was examined"),
    "a module's name": ("import missing.pkg\nmissing.pkg.thing  # here", "missing.pkg.thing was read"),
    "a module by its name": (
        "import importlib\nimportlib.import_module('missing.pkg').thing  # here",
        "missing.pkg.thing was read",
    ),
    "a module by __import__": ("__import__('missing').thing  # here", "missing.thing was read"),
}


@pytest.mark.parametrize(("use", "said"), [pytest.param(*pair, id=name) for name, pair in IN_A_RUN.items()])
def test_an_import_in_a_run_gives_no_value(ask: Ask, use: str, said: str | None) -> None:
    assert ask("", use) == ("the builtin exec was called here" if said is None else f"stand-in {said} here")


MODULE_USES = {
    "m is None": "missing.pkg was examined",
    "hasattr(m, 'thing')": "missing.pkg was examined",
    "getattr(m, 'thing', None)": "missing.pkg was examined",
    "callable(m)": "missing.pkg was examined",
    "not m": "missing.pkg was tested for truth",
    "m == 1": "missing.pkg was compared",
    "m < 1": "missing.pkg was taken for a value",
    "m in {1}": "missing.pkg was hashed",
    "m()": "missing.pkg was taken for a value",
    "m[1]": "missing.pkg was taken for a value",
    "str(m)": "missing.pkg was taken for a value",
    "repr(m)": "missing.pkg was turned into a value",
    "m.__version__": "missing.pkg.__version__ was read",
    "m.thing()": "missing.pkg.thing was called",
    "m.thing is None": "missing.pkg.thing was examined",
}


@pytest.mark.parametrize("expression", MODULE_USES)
def test_a_module_that_is_not_there_has_no_value_either(ask: Ask, expression: str) -> None:
    top = f"import missing.pkg as m\ntry:\n    X = {expression}  # here\nexcept BaseException:\n    X = 1"
    assert ask(top) == f"stand-in {MODULE_USES[expression]} here"


@pytest.mark.parametrize("expression", MODULE_USES)
def test_a_module_that_is_not_there_has_no_value_in_a_run(ask: Ask, expression: str) -> None:
    use = f"try:\n    {expression}  # here\nexcept BaseException:\n    pass"
    said = MODULE_USES[expression]
    if "m.thing" in expression:
        said = "missing.pkg.thing was read"
    assert ask("import missing.pkg as m", use) == f"stand-in {said} here"


@pytest.mark.parametrize(
    ("top", "said"),
    [
        ("from missing.pkg import *  # here", "missing.pkg was imported as *"),
        ("from missing.pkg import __version__  # here", "missing.pkg.__version__ was read"),
        ("from missing import __version__ as v  # here", "missing.__version__ was read"),
    ],
)
def test_what_no_module_can_be_asked_for_without_its_value(ask: Ask, top: str, said: str) -> None:
    swallowing = (
        f"try:\n    {top.replace('*', '__all__') if '*' in top else top}\nexcept BaseException:\n    v = 1"
    )
    assert ask(top) == f"stand-in {said} here"
    if "*" not in top:
        assert ask(swallowing) == f"stand-in {said} here"


# What a tree could ask the machine in place of its own predicates. Here is no GPU, so that the answer would lead
# into the branch for none.
MACHINE = {
    "torch.cuda.is_available()": "torch.cuda.is_available was called",
    "torch.cuda.device_count()": "torch.cuda.device_count was called",
    "torch.cuda.get_device_capability()": "torch.cuda.get_device_capability was called",
    "torch.version.hip is not None": "torch.version.hip was read",
    "torch.version.cuda": "torch.version.cuda was read",
    "hasattr(torch.ops.sgl_kernel, 'topk')": "torch.ops.sgl_kernel.topk was read",
    "torch.ops.sgl_kernel.topk(1)": "torch.ops.sgl_kernel.topk was read",
    "importlib.util.find_spec('missing')": "importlib.util.find_spec was called",
    "importlib.metadata.version('missing')": "importlib.metadata.version was called",
    "eval('1')": "the builtin eval was called",
    "exec('X = 1')": "the builtin exec was called",
}
ASKS = "import importlib.metadata, importlib.util\n"


@pytest.mark.parametrize("question", MACHINE)
def test_a_tree_that_asks_the_machine_is_not_verified(ask: Ask, question: str) -> None:
    asking = f"try:\n    X = {question}  # here\nexcept BaseException:\n    X = 1"
    assert ask(ASKS + asking) == f"{MACHINE[question]} here"
    assert ask(ASKS, asking) == f"{MACHINE[question]} here"


def test_torch_itself_may_go_on_asking_the_machine(ask: Ask) -> None:
    use = "torch.nn.functional.softmax(router_logits, dim=-1).topk(2)\ntorch.manual_seed(1)\nrepr(router_logits)"
    assert (
        ask("torch.ops.aten.add(torch.ones(1), 1)\ntorch.version.git_version, torch.__version__", use)
        == "verified"
    )


@pytest.mark.parametrize(("platform", "kind"), [("cuda", "cuda"), ("hip", "cuda"), ("cpu", "cpu")])
def test_a_tensor_tells_the_platform_that_was_asked_for(ask: Ask, platform: str, kind: str) -> None:
    on_gpu = kind == "cuda"
    use = f"""\
made = [router_logits + 1, num_token_non_padded, output.topk_ids, torch.zeros(1), router_logits.topk(1)[1]]
for tensor in made:
    if tensor.device.type != {kind!r} or tensor.is_cuda is not {on_gpu} or tensor.is_cpu is {on_gpu}:
        raise ValueError(tensor)
torch.empty(2, device=router_logits.device)
"""
    assert ask("", use, platform=platform) == "verified"


@pytest.mark.parametrize("look", ["device.type == 'cuda'", "device.index", "getattr(device, 'type')"])
def test_a_device_that_may_stand_for_one_of_a_gpu_does_not_tell_its_type(ask: Ask, look: str) -> None:
    use = f"device = router_logits.device\ntry:\n    {look}  # here\nexcept BaseException:\n    pass"
    said = "verified" if "getattr" in look else "the type of a device was read here"
    assert ask("", use) == said
    assert ask("", use, platform="cpu") == "verified"


def test_attributes_of_such_names_are_read_written_and_matched_as_ever(ask: Ask) -> None:
    use = """\
class Kind:
    type = 1
kind = Kind()
kind.type += 1
kind.index = 3
match 1:
    case Kind.type:
        kind.index += 1
match kind:
    case Kind(type=2, index=4):
        del kind.type
if (kind.type, kind.index) != (1, 4) or torch.device("cuda").type != "cuda":
    raise ValueError(kind.type, kind.index)
match {1: kind}:
    case {Kind.type: Kind()}:
        pass
    case _:
        raise ValueError
"""
    assert ask("", use) == "verified"


def test_a_tree_that_stops_the_watch_is_not_verified(ask: Ask) -> None:
    stopped = "the tree stopped the watch over its stand-ins, or ran out of stack"
    assert ask("import sys", "sys.settrace(None)") == stopped
    assert ask("import sys", "sys.settrace(lambda *_: None)") == stopped
    recursion = "def inner():\n    return inner()\ntry:\n    inner()\nexcept RecursionError:\n    pass"
    assert ask("", recursion) == stopped


def test_a_stand_in_is_heard_deep_in_the_stack(ask: Ask) -> None:
    top = f"{IMPORT}def inner(n):\n    if n:\n        return inner(n - 1)\n    thing  # here"
    assert ask(top, "inner(700)") == "stand-in missing.pkg.thing was loaded here"


def test_a_load_is_heard_in_a_function_of_many_names(ask: Ask) -> None:
    names = [f"name{number}" for number in range(400)]
    top = (
        f"{' = '.join(names)} = 1\n{IMPORT}def inner():\n    " + "\n    ".join(names) + "\n    thing  # here"
    )
    assert ask(top, "inner()") == "stand-in missing.pkg.thing was loaded here"


@pytest.mark.parametrize(
    "load",
    [
        "(lambda: thing)()",
        "[thing for _ in range(2)]",
        "{thing: 1 for _ in range(2)}",
        "list(thing for _ in range(2))",
        "print((lambda x=thing: 1)())",
        "(y := thing)",
        "del_ = thing",
        "[thing]",
        "torch.zeros(thing)",
        "output.thing if False else thing",
        "isinstance(1, thing)",
    ],
)
def test_loading_it_is_a_use_wherever_in_a_run(ask: Ask, load: str) -> None:
    assert ask(IMPORT, f"{load}  # here") == "stand-in missing.pkg.thing was loaded here"


@pytest.mark.parametrize(
    "body",
    [
        "class A:\n    x = thing  # here",
        "def inner(x=thing): ...  # here",
        "async def inner():\n    thing  # here\ninner().send(None)",
    ],
)
def test_loading_it_is_a_use_in_a_definition(ask: Ask, body: str) -> None:
    assert ask(IMPORT, body) == "stand-in missing.pkg.thing was loaded here"


NAMES = {
    "thing.part.other": "missing.pkg.thing.part.other",
    "thing[1]": "missing.pkg.thing[...]",
    "thing | None": "missing.pkg.thing | ...",
}


@pytest.mark.parametrize("expression", NAMES)
def test_a_reason_names_the_stand_in_as_the_tree_does(ask: Ask, expression: str) -> None:
    assert ask(f"{IMPORT}X = {expression}", "X  # here") == f"stand-in {NAMES[expression]} was loaded here"


def test_what_a_stand_in_decorated_is_one_itself_and_told_by_its_name(ask: Ask) -> None:
    top = f"{IMPORT}class A:\n    @thing\n    def a(self): ...\n@thing(1, key=2)\ndef b(): ...\n"
    assert ask(top, "A().a()  # here") == "stand-in missing.pkg.thing(A.a) was called here"
    assert ask(top, "b()  # here") == "stand-in missing.pkg.thing()(b) was loaded here"


def test_a_call_within_a_decorator_is_no_value(ask: Ask) -> None:
    top = f"{IMPORT}def deco(flag):\n    flag is None  # here\n    return lambda f: f\n@deco(thing())\ndef a(): ..."
    assert ask(top) == "stand-in missing.pkg.thing() was examined here"


HEIRS = {
    "an attribute": ("A().y  # here", "y was read"),
    "an attribute with a default": ("getattr(A(), 'y', None)  # here", "y was read"),
    "an attribute that is only asked for": ("hasattr(A(), 'y')  # here", "y was read"),
    "a method": ("try:\n    A().y()  # here\nexcept Exception:\n    pass", "y was read"),
    "arguments": ("try:\n    A(1)  # here\nexcept Exception:\n    pass", "initialised"),
}


@pytest.mark.parametrize(("use", "said"), [pytest.param(*pair, id=name) for name, pair in HEIRS.items()])
def test_what_a_class_has_from_a_stand_in_is_not_there(ask: Ask, use: str, said: str) -> None:
    said = f"stand-in base of A: {said} here" if "read" in said else f"stand-in base of A was {said} here"
    assert ask(f"{IMPORT}class A(thing): ...", use) == said


def test_an_heir_that_starts_its_base_has_not_started_it(ask: Ask) -> None:
    top = f"{IMPORT}class A(thing):\n    def __init__(self):\n        super().__init__(1)  # here"
    assert ask(top, "try:\n    A()\nexcept Exception:\n    pass") == "stand-in base of A was initialised here"


# See the docstring of this file: whoever finds a way to hear one of these takes it out there as well.
UNHEARD = {
    "a list that is compared with itself": "KEPT == KEPT",
    "a builtin under another name": "kind = type\nkind(KEPT[0])",
    "a builtin that is handed on": "list(map(callable, KEPT))",
    "a class whose base would have it": "hasattr(A, 'name')",
    "a TypeError of C code": "try:\n    ','.join(KEPT)\nexcept TypeError:\n    pass",
    "the type of a device by its name": "getattr(output.topk_ids.device, 'type') == 'cuda'",
    "what was imported so far": "import sys\n'sgl_kernel' in sys.modules",
}


@pytest.mark.parametrize("use", [pytest.param(use, id=name) for name, use in UNHEARD.items()])
def test_what_cannot_be_trapped_is_known(ask: Ask, use: str) -> None:
    assert ask(f"{KEPT}class A(thing): ...", use) == "verified"
