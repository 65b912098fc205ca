"""Engines by name, and engines that other packages bring."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moepad_cli.app import main
from repro.checks import check_cases
from repro.engines import BUILTIN_ENGINES, BUILTIN_NAMES, ENTRY_POINTS, load_engine, stop_engine
from repro.errors import EngineSpecError, NotVerifiedError
from repro.scenario import Scenario
from repro.suite import SuiteCase

EXAMPLE = Path(__file__).parents[1] / "data" / "example_engine"
SOFTMAX = Scenario(tokens=(6, 0), bucket=16, branch="softmax")


def build_wheel(source: Path, folder: Path) -> Path:
    """The wheel that the folder's ``pyproject.toml`` asks for, without its build backend, which is not at hand."""
    document = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
    project = document["project"]
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    contents = {name: (source / name).read_text(encoding="utf-8") for name in wheel_files(document)}
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": "".join(
            f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in points.items())
            for group, points in project["entry-points"].items()
        ),
    }
    contents |= {f"{stem}.dist-info/{name}": text for name, text in about.items()}
    record = f"{stem}.dist-info/RECORD"
    contents[record] = "".join(f"{name},,\n" for name in [*contents, record])
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in contents.items():
            archive.writestr(name, text)
    return wheel


def wheel_files(document: dict[str, Any]) -> list[str]:
    files: list[str] = document["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    return files


@pytest.fixture(scope="module")
def installed_example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed the example engine into, without a network."""
    folder = tmp_path_factory.mktemp("example")
    wheel = build_wheel(EXAMPLE, folder)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    subprocess.run(
        [*command, "--no-index", "--no-deps", "--target", str(folder / "site"), str(wheel)],
        env=environment | {"PIP_CONFIG_FILE": os.devnull},
        check=True,
    )
    return folder / "site"


@pytest.fixture
def example(installed_example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed_example)
    monkeypatch.delitem(sys.modules, "example_engine", raising=False)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``plugin(code, *names)``: installs a module with ``make`` as the engine of these names."""

    def install(code: str, *names: str) -> None:
        about = tmp_path / "plugin-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
        points = "".join(f"{name} = made_up_engine:make\n" for name in names)
        (about / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{points}")
        (tmp_path / "made_up_engine.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "made_up_engine", raising=False)

    return install


@pytest.mark.usefixtures("example")
def test_an_installed_engine_is_found_by_its_name_and_judged() -> None:
    engine = load_engine("example", side="after")
    cases = [SuiteCase(fault, fault, SOFTMAX) for fault in ("mask", "count")]
    assert [row[0].verdict for row in check_cases(cases, [engine])] == ["safe", "safe"]
    stop_engine(engine)


@pytest.mark.usefixtures("example")
def test_check_takes_an_installed_engine(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--branch", "softmax", "--tokens", "6,6", "--bucket", "16", "--device", "cpu")
    assert main(["check", "example", *options]) == 0
    assert capsys.readouterr().out == (
        "engine: example   2 cases   device: cpu\n"
        "tokens 6,6   bucket 16   attention TP 4   prefill\n"
        "16 experts, top-2   platform cuda\n\n"
        "cases\n"
        "fault  case   verdict\n"
        "-----  -----  -------\n"
        "mask   mask   safe\n"
        "count  count  safe\n\n"
        "verdict: example: safe in all 2 cases\n"
        "  example: 2 safe, 0 with findings, 0 not verified\n"
    )


@pytest.mark.usefixtures("example")
def test_what_an_installed_engine_cannot_do_is_not_verified(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--branch", "biased-grouped", "--tokens", "6,6", "--bucket", "16", "--device", "cpu")
    assert main(["check", "example", *options]) == 3
    out, err = capsys.readouterr()
    reason = "does softmax top-k only, not biased-grouped"
    assert (out, err) == ("", f"moepad check: example: cannot verify: {reason}\n")


@pytest.mark.usefixtures("example")
def test_an_engine_gets_all_of_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "example@v2"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        "moepad check: ENGINE: example@v2: this engine has one version; give example\n",
    )


@pytest.mark.usefixtures("example")
def test_a_misspelt_plugin_is_told_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "exmaple"]) == 2
    assert capsys.readouterr().err == (
        "moepad check: ENGINE: 'exmaple' is no engine; did you mean 'example'?\n"
    )


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("made = 1", "AttributeError: module 'made_up_engine' has no attribute 'make'"),
        ("def make(spec): raise RuntimeError('no GPU\\nhere')", "RuntimeError: no GPU here"),
        ("def make(spec): raise SystemExit('gone')", "SystemExit: gone"),
        ("def make(spec): return None", "AttributeError: 'NoneType' object has no attribute 'name'"),
        (
            "class make:\n name = 'mine'\n observe = 1\n def __init__(self, spec): pass",
            "TypeError: its factory gave no engine: a name and a method observe(case)",
        ),
    ],
)
def test_a_plugin_that_does_not_load_makes_one_line_and_exit_code_3(
    plugin: Callable[..., None], capsys: pytest.CaptureFixture[str], code: str, problem: str
) -> None:
    plugin(code, "mine")
    assert main(["check", "mine"]) == 3
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"moepad check: engine plugin mine (made_up_engine:make): {problem}\n")


@pytest.mark.parametrize(
    ("observe", "reason"),
    [
        ("raise KeyError('lost')", "KeyError: 'lost'"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("return None", "gave NoneType, not an Observation"),
        (
            "from repro.engines import Observation\n  return Observation('mine', ())",
            "engine mine: did not answer once for every rank of the plan",
        ),
    ],
)
def test_a_plugin_that_fails_in_a_case_leaves_it_not_verified(
    plugin: Callable[..., None], capsys: pytest.CaptureFixture[str], observe: str, reason: str
) -> None:
    plugin(
        f"class make:\n name = 'mine'\n def __init__(self, spec): pass\n def observe(self, case):\n  {observe}",
        "mine",
    )
    assert main(["check", "mine", "--tokens", "6", "--bucket", "16", "--device", "cpu"]) == 3
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"moepad check: mine: cannot verify: {reason}\n")


def test_a_plugin_is_stopped_once_it_is_done_with(
    plugin: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    plugin(
        "from repro.errors import NotVerifiedError\n"
        "stopped = []\n"
        "class make:\n"
        " name = 'mine'\n"
        " def __init__(self, spec): pass\n"
        " def observe(self, case): raise NotVerifiedError('not today')\n"
        " def stop(self): stopped.append(self.name)\n",
        "mine",
    )
    assert main(["check", "mine", "--tokens", "6", "--bucket", "16", "--device", "cpu"]) == 3
    assert sys.modules["made_up_engine"].stopped == ["mine"]


@pytest.mark.parametrize("name", BUILTIN_NAMES)
def test_a_plugin_does_not_take_the_name_of_a_built_in_engine(plugin: Callable[..., None], name: str) -> None:
    plugin("raise AssertionError('this must not be loaded')", name)
    assert load_engine(name, side="after") is BUILTIN_ENGINES[name]
    with pytest.raises(EngineSpecError, match="is no engine"):
        load_engine(f"{name}@v2", side="after")


def test_a_plugin_does_not_take_the_name_of_sglang(plugin: Callable[..., None], tmp_path: Path) -> None:
    plugin("raise AssertionError('this must not be loaded')", "sglang")
    with pytest.raises(EngineSpecError, match="no SGLang there"):
        load_engine(f"sglang@{tmp_path}", side="after")


@pytest.mark.parametrize("spec", ["mine", "mine@v2", "mine==2", "mine#abc", "mine@/a/b#c"])
def test_a_plugin_is_known_by_what_stands_before_the_first_sign(
    plugin: Callable[..., None], spec: str
) -> None:
    plugin("def make(spec): raise RuntimeError(spec)", "mine")
    with pytest.raises(NotVerifiedError) as caught:
        load_engine(spec, side="after")
    assert str(caught.value) == f"engine plugin mine (made_up_engine:make): RuntimeError: {spec}"
