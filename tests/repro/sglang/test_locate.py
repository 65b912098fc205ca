"""Where trees come from: releases, folders and git revisions, each brought whole or not at all."""

import importlib
import io
import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
import zlib
from contextlib import suppress
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from repro.errors import EngineSpecError, NotVerifiedError

trees = importlib.import_module("repro.engines.sglang.locate")
TOPK = "sglang/srt/layers/moe/topk.py"
METADATA = "sglang-0.5.16.dist-info/METADATA"
MEMBERS = {
    "sglang/__init__.py": b"raise SystemExit('code of the tree was run')\n",
    TOPK: b"TOP_K = 8\n",
    "sglang/jit_kernel/csrc/mask.cuh": b"// mask\n",
    "sglang/csrc/a.h": b"",
    "sglang/csrc/a.cu": b"// a\n",
    METADATA: b"Name: sglang\nVersion: 0.5.16\n",
}
DROPPED = {
    "sglang/lib/kernel.so": b"\x7fELF",
    "sglang/data.json": b"{}",
    "sglang/README.md": b"# sglang",
    "sglang-0.5.16.dist-info/RECORD": b"",
    "tools/setup.py": b"",
}
ABSENT = (
    "WARNING: Location is ignored: it is neither a file nor a directory.\n"
    "ERROR: Could not find a version that satisfies the requirement sglang==9.9.9 (from versions: {})\n"
    "ERROR: No matching distribution found for sglang==9.9.9\n"
)
RETRYING = "WARNING: Retrying (Retry(total=0)) after connection broken by 'x': /simple/sglang/\n"
FORMS = "give sglang, sglang==VERSION, sglang@PATH or sglang@PATH#REVISION"


class Pip:
    """Stands in for pip: brings what it is given into the folder asked for, or answers as it is told."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = []

    def __call__(self, arguments, seconds, label):
        self.calls.append(list(arguments))
        answer = self.answers.pop(0)
        if isinstance(answer, subprocess.CompletedProcess):
            return answer
        [folder] = [Path(word.removeprefix("--dest=")) for word in arguments if word.startswith("--dest=")]
        for name, data in answer.items():
            (folder / name).write_bytes(data)
        return done()


def done(code=0, out="", err=""):
    return subprocess.CompletedProcess(["pip"], code, out, err)


def wheel(members, compression=zipfile.ZIP_DEFLATED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as archive:
        for name, text in members if isinstance(members, list) else members.items():
            archive.writestr(name, text)
    return data.getvalue()


def named(data, version="0.5.16", tag="cp311-cp311-manylinux_2_34_x86_64"):
    return {f"sglang-{version}-{tag}.whl": data}


RELEASE = named(wheel(MEMBERS | DROPPED))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "cache" / "moepad" / "sglang"


@pytest.fixture(autouse=True)
def pip(cache, monkeypatch):
    """No test asks the real pip but those that say so."""

    def use(*answers):
        stand_in = Pip(*answers)
        monkeypatch.setattr(trees, "_pip", stand_in)
        return stand_in

    use()
    return use


def contents(root):
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != trees.MANIFEST
    }


def failure(call, *arguments):
    with pytest.raises((EngineSpecError, NotVerifiedError)) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return type(caught.value), str(caught.value)


def package(folder, at="sglang"):
    """A folder that holds the least of an SGLang; its package folder lies at ``at``."""
    topk = folder / at / TOPK.removeprefix("sglang/")
    topk.parent.mkdir(parents=True)
    topk.write_text("raise SystemExit('code of the tree was run')\n")
    return folder


# Releases


def test_a_release_is_downloaded_once_with_only_its_sources_and_then_reused_without_pip(cache, pip):
    used = pip(RELEASE)
    tree = trees.locate("sglang==0.5.16")
    assert tree == trees.Tree("sglang==0.5.16", cache / "0.5.16", "0.5.16")
    assert contents(tree.root) == MEMBERS
    assert sorted(path.name for path in cache.iterdir()) == ["0.5.16"]
    [call] = used.calls
    folder = call[4].removeprefix("--dest=")
    assert call == [
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--progress-bar=off",
        f"--dest={folder}",
        "sglang==0.5.16",
    ]
    assert Path(folder).parent == cache
    used = pip()
    assert trees.locate("sglang==0.5.16") == tree
    assert used.calls == []
    with pytest.raises(FrozenInstanceError):
        tree.version = ""


@pytest.mark.parametrize(
    ("text", "version"),
    [("v0.5.16", "0.5.16"), ("0.5.10.POST1", "0.5.10.post1"), ("0.5.0-rc.1", "0.5.0rc1"), (" 1 ", "1")],
)
def test_a_version_is_normalised_before_pip_sees_it(cache, pip, text, version):
    used = pip(named(wheel(MEMBERS), version))
    assert trees.locate(f"sglang=={text}") == trees.Tree(f"sglang=={version}", cache / version, version)
    assert used.calls[0][-1] == f"sglang=={version}"


def test_where_no_wheel_suits_this_interpreter_one_for_another_machine_is_taken(cache, pip):
    used = pip(done(1, err=ABSENT.format("none")), RELEASE)
    assert contents(trees.locate("sglang==0.5.16").root) == MEMBERS
    assert used.calls[1] == [
        *used.calls[0][:-1],
        "--platform",
        "manylinux_2_34_x86_64",
        "--python-version",
        "3.11",
        "--implementation",
        "cp",
        "sglang==0.5.16",
    ]


def test_the_manifest_says_where_an_entry_came_from_and_the_files_are_read_only(cache, pip):
    pip(RELEASE)
    root = trees.locate("sglang==0.5.16").root
    manifest = json.loads((root / trees.MANIFEST).read_text())
    [(name, data)] = RELEASE.items()
    assert manifest["source"] == f"{name} sha256:{trees.hashlib.sha256(data).hexdigest()}"
    assert sorted(manifest["files"]) == sorted(MEMBERS)
    assert {stat.S_IMODE((root / name).stat().st_mode) & 0o222 for name in MEMBERS} == {0}


@pytest.mark.parametrize(
    "text", ["-r foo", "-rfoo", "", "0.5.*", ">=0.5", "0.5.16 --pre", "1;os", "../x", "１"]
)
def test_what_is_no_version_is_refused_before_pip_sees_it(pip, text):
    used = pip()
    spec = f"sglang=={text}"
    line = f"{spec!r}: {text!r} is no version; give one such as 0.5.16"
    assert failure(trees.locate, spec) == (EngineSpecError, line)
    assert used.calls == []


@pytest.mark.parametrize("text", ["9" * 5000, "1" + ".1" * 100])
def test_a_version_longer_than_any_is_refused_shortly(text):
    kind, line = failure(trees.locate, f"sglang=={text}")
    assert (kind, line.partition("... ")[2]) == (
        EngineSpecError,
        "is no version; give one such as 0.5.16",
    )


HEAD = "sglang==9.9.9: "
NO_INDEX = HEAD + "pip found no release of sglang at all; it needs a network and an index that has them"
COULD_NOT = HEAD + "pip could not download it: "


@pytest.mark.parametrize(
    ("answers", "kind", "line"),
    [
        (
            [
                done(1, err=ABSENT.format("none")),
                done(1, err=ABSENT.format("0.5.9, 0.5.10.post1, 0.6rc1, 0.5.10")),
            ],
            EngineSpecError,
            HEAD + "there is no wheel of that version; the newest is 0.5.10.post1",
        ),
        ([done(1, err=ABSENT.format("none"))] * 2, NotVerifiedError, NO_INDEX),
        (
            [done(1, err=RETRYING + ABSENT.format("none"))],
            NotVerifiedError,
            COULD_NOT + "it lost the connection to a package index",
        ),
        (
            [done(1, err=RETRYING + ABSENT.format("0.5.9, 0.5.10"))],
            NotVerifiedError,
            COULD_NOT + "it lost the connection to a package index",
        ),
        (
            [done(1, err="ERROR: first\nERROR: [Errno 28] No space left on device\nmore\n\n")],
            NotVerifiedError,
            COULD_NOT + "[Errno 28] No space left on device",
        ),
        (
            [done(1, err="Traceback (most recent call last):\n  x\nOSError: gone\n")],
            NotVerifiedError,
            COULD_NOT + "OSError: gone",
        ),
        (
            [
                done(
                    1,
                    err="ERROR: HTTP error 403 while getting https://me:secret@example.invalid/a\x1b[0m b\n",
                )
            ],
            NotVerifiedError,
            COULD_NOT + "HTTP error 403 while getting (address) b",
        ),
        ([done(1, err="x" * 1000)], NotVerifiedError, COULD_NOT + "x" * 200 + "..."),
        ([done(-9)], NotVerifiedError, COULD_NOT + "exit -9"),
        (
            [done(1, err="/usr/bin/python: No module named pip\n")],
            NotVerifiedError,
            COULD_NOT + "/usr/bin/python: No module named pip",
        ),
        (
            [{}],
            NotVerifiedError,
            HEAD + "pip brought no wheel; only the wheel of that very version can be used",
        ),
        (
            [named(wheel(MEMBERS), "9.9.9+cu1", "py3-none-any")],
            NotVerifiedError,
            HEAD
            + "pip brought sglang-9.9.9+cu1-py3-none-any.whl; only the wheel of that very version can be used",
        ),
        (
            [{"sglang.whl": b""}],
            NotVerifiedError,
            HEAD + "pip brought sglang.whl; only the wheel of that very version can be used",
        ),
        (
            [named(wheel(MEMBERS), "9.9.9") | named(wheel(MEMBERS), "9.9.9", "py3-none-any")],
            NotVerifiedError,
            HEAD + "pip brought sglang-9.9.9-cp311-cp311-manylinux_2_34_x86_64.whl, "
            "sglang-9.9.9-py3-none-any.whl; only the wheel of that very version can be used",
        ),
        (
            [named(wheel({"sglang/__init__.py": b""}), "9.9.9")],
            EngineSpecError,
            HEAD + f"that release has no {TOPK}; give a later one",
        ),
        ([named(wheel(DROPPED), "9.9.9")], NotVerifiedError, HEAD + "holds no source files"),
    ],
)
def test_each_failure_of_a_download_is_one_line_and_leaves_nothing_half_made(cache, pip, answers, kind, line):
    used = pip(*answers)
    assert failure(trees.locate, "sglang==9.9.9") == (kind, line)
    assert used.answers == []
    assert [path.name for path in cache.iterdir() if path.name.startswith(".tmp-")] == []


def test_a_release_too_old_to_have_routing_is_kept_so_that_it_is_not_downloaded_again(pip):
    used = pip(named(wheel({"sglang/__init__.py": b""}), "0.1"))
    assert failure(trees.locate, "sglang==0.1") == failure(trees.locate, "sglang==0.1")
    assert len(used.calls) == 1


# Hostile and damaged wheels


def link(name="sglang/link.py"):
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return [(info, "/etc/passwd")]


def device():
    info = zipfile.ZipInfo("sglang/device.py")
    info.external_attr = (stat.S_IFIFO | 0o666) << 16
    return [(info, "")]


DAMAGED = "sglang==0.5.16: its wheel is damaged: "


@pytest.mark.parametrize(
    ("members", "name"),
    [
        ([("sglang/../../evil.py", "")], "sglang/../../evil.py"),
        ([("../evil.py", "")], "../evil.py"),
        ([("/etc/evil.py", "")], "/etc/evil.py"),
        ([("sglang//evil.py", "")], "sglang//evil.py"),
        ([("sglang/./evil.py", "")], "sglang/./evil.py"),
        ([("sglang/..\\evil.py", "")], "sglang/..\\evil.py"),
        ([("sglang/a\nb.py", "")], "sglang/a\nb.py"),
        ([("sglang/../", "")], "sglang/../"),
        (link(), "sglang/link.py"),
        (link("sglang/dir"), "sglang/dir"),
        (device(), "sglang/device.py"),
    ],
)
def test_a_member_that_leads_out_of_the_tree_condemns_the_wheel(cache, pip, tmp_path, members, name):
    pip(named(wheel([*MEMBERS.items(), *members])))
    line = f"{DAMAGED}{name!r} is a link or leads out of the tree"
    assert failure(trees.locate, "sglang==0.5.16") == (NotVerifiedError, line)
    assert list(cache.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]


TOO_LARGE = "sglang==0.5.16: larger than any SGLang: over {} files, {} bytes in one of them or {} in all"


def test_a_member_that_expands_past_the_bound_is_cut_off(cache, pip):
    pip(named(wheel(MEMBERS | {"sglang/zeros.py": bytes((1 << 24) + 1)})))
    line = TOO_LARGE.format("20,000", "16,777,216", "268,435,456")
    assert failure(trees.locate, "sglang==0.5.16") == (NotVerifiedError, line)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("said", [10, (1 << 20) - 1, (1 << 20) + 1, (1 << 32) - 2])
def test_what_the_archive_says_of_a_size_is_not_believed(cache, pip, said):
    data = bytearray(wheel({TOPK: bytes(1 << 20)}))
    at = data.find(b"PK\x01\x02") + 24
    assert struct.unpack_from("<I", data, at) == (1 << 20,)
    struct.pack_into("<I", data, at, said)
    pip(named(bytes(data)))
    if said > 1 << 20:
        assert contents(trees.locate("sglang==0.5.16").root) == {TOPK: bytes(1 << 20)}
    else:
        line = f"{DAMAGED}Bad CRC-32 for file '{TOPK}'"
        assert failure(trees.locate, "sglang==0.5.16") == (NotVerifiedError, line)
        assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("limit", "most", "line"),
    [
        ("MAX_FILES", 5, TOO_LARGE.format("5", "16,777,216", "268,435,456")),
        ("MAX_TREE_BYTES", 80, TOO_LARGE.format("20,000", "16,777,216", "80")),
        ("MAX_ARCHIVE_BYTES", 99, "sglang==0.5.16: its wheel is larger than 99 bytes"),
    ],
)
def test_a_tree_larger_than_any_sglang_is_refused(cache, pip, monkeypatch, limit, most, line):
    monkeypatch.setattr(trees, limit, most)
    pip(RELEASE)
    assert failure(trees.locate, "sglang==0.5.16") == (NotVerifiedError, line)
    assert list(cache.iterdir()) == []


def with_bad_crc():
    data = wheel(MEMBERS, zipfile.ZIP_STORED)
    return data.replace(b"TOP_K = 8", b"TOP_K = 9")


def encrypted():
    data = bytearray(wheel({TOPK: b"x"}))
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.find(mark) + offset] |= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "File is not a zip file"),
        (b"<html>no such page</html>", "File is not a zip file"),
        (wheel(MEMBERS)[:-30], "File is not a zip file"),
        (with_bad_crc(), f"Bad CRC-32 for file '{TOPK}'"),
        (wheel({TOPK: b"x"}, zipfile.ZIP_BZIP2), f"'{TOPK}' is compressed in a way that no wheel is"),
        (wheel({TOPK: b"x"}, zipfile.ZIP_LZMA), f"'{TOPK}' is compressed in a way that no wheel is"),
    ],
)
def test_a_damaged_wheel_is_not_verified(cache, pip, data, problem):
    pip(named(data))
    assert failure(trees.locate, "sglang==0.5.16") == (NotVerifiedError, DAMAGED + problem)
    assert list(cache.iterdir()) == []


def test_an_encrypted_wheel_is_not_verified(pip):
    pip(named(encrypted()))
    kind, line = failure(trees.locate, "sglang==0.5.16")
    assert (kind, line.startswith(DAMAGED), "is encrypted" in line) == (NotVerifiedError, True, True)


@pytest.mark.parametrize("second", ["sglang/a.py", "sglang/a.py/b.py"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name_are_refused(cache, pip, second):
    pip(named(wheel([("sglang/a.py", "1"), (second, "2")])))
    line = f"sglang==0.5.16: two of its files have one name, {second!r}"
    assert failure(trees.locate, "sglang==0.5.16") == (NotVerifiedError, line)
    assert list(cache.iterdir()) == []


# The cache


def edit(root):
    (root / TOPK).chmod(0o644)
    (root / TOPK).write_bytes(b"TOP_K = 9\n")


def edit_and_set_the_times_back(root):
    before = (root / TOPK).stat()
    edit(root)
    os.utime(root / TOPK, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_a_link(root):
    (root / TOPK).rename(root.parent / "topk.py")
    (root / TOPK).symlink_to(root.parent / "topk.py")


def add_bytecode(root):
    (root / "sglang/__pycache__").mkdir()
    (root / "sglang/__pycache__/__init__.cpython-311.pyc").write_bytes(b"")


def rewrite_manifest(**values):
    def change(root):
        manifest = json.loads((root / trees.MANIFEST).read_text()) | values
        (root / trees.MANIFEST).write_text(json.dumps(manifest))

    return change


def replace_manifest(text):
    return lambda root: (root / trees.MANIFEST).write_text(text)


def empty(root):
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (edit, f"'{TOPK}'"),
        (edit_and_set_the_times_back, f"'{TOPK}'"),
        (lambda root: (root / TOPK).unlink(), f"'{TOPK}'"),
        (replace_by_a_link, f"'{TOPK}'"),
        (lambda root: os.truncate(root / TOPK, 3), f"'{TOPK}'"),
        (lambda root: (root / "sglang/new.py").touch(), "'sglang/new.py'"),
        (add_bytecode, "'sglang/__pycache__/__init__.cpython-311.pyc'"),
        (lambda root: (root / trees.MANIFEST).unlink(), f"its {trees.MANIFEST}"),
        (lambda root: os.truncate(root / trees.MANIFEST, 99), f"its {trees.MANIFEST}"),
        (rewrite_manifest(key="0.5.17"), f"its {trees.MANIFEST}"),
        (rewrite_manifest(format="moepad-sglang-tree-0"), f"its {trees.MANIFEST}"),
        (rewrite_manifest(files=[]), f"its {trees.MANIFEST}"),
        (rewrite_manifest(files={TOPK: 1}), f"its {trees.MANIFEST}"),
        (replace_manifest("[]"), f"its {trees.MANIFEST}"),
        (replace_manifest("[" * 100_000), f"its {trees.MANIFEST}"),
        (empty, f"its {trees.MANIFEST}"),
    ],
)
def test_a_copy_that_was_changed_is_refused_and_not_mended_in_silence(cache, pip, change, what):
    used = pip(RELEASE)
    root = trees.locate("sglang==0.5.16").root
    change(root)
    line = f"sglang==0.5.16: the copy in the cache was changed ({what}); delete {root} and try again"
    for _ in range(2):
        assert failure(trees.locate, "sglang==0.5.16") == (NotVerifiedError, line)
    assert len(used.calls) == 1


def test_a_copy_under_another_versions_name_is_refused(cache, pip):
    pip(RELEASE)
    trees.locate("sglang==0.5.16").root.rename(cache / "0.5.17")
    kind, line = failure(trees.locate, "sglang==0.5.17")
    assert (kind, line.partition("; ")[0]) == (
        NotVerifiedError,
        f"sglang==0.5.17: the copy in the cache was changed (its {trees.MANIFEST})",
    )


def test_a_copy_whose_times_alone_differ_is_hashed_and_used(pip):
    pip(RELEASE)
    tree = trees.locate("sglang==0.5.16")
    for name in MEMBERS:
        os.utime(tree.root / name, ns=(0, 0))
    assert trees.locate("sglang==0.5.16") == tree


def test_a_cache_that_cannot_be_written_is_not_verified(tmp_path, pip):
    (tmp_path / "cache").write_text("a file")
    used = pip()
    line = f"sglang==0.5.16: cannot be kept in {tmp_path}/cache/moepad/sglang: Not a directory"
    assert failure(trees.locate, "sglang==0.5.16") == (NotVerifiedError, line)
    assert used.calls == []


def test_a_full_disk_is_not_verified_and_leaves_nothing(cache, pip, monkeypatch):
    pip(RELEASE)
    monkeypatch.setattr(
        trees, "_stamps", lambda folder: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    line = f"sglang==0.5.16: cannot be kept in {cache}: No space left on device"
    assert failure(trees.locate, "sglang==0.5.16") == (NotVerifiedError, line)
    assert list(cache.iterdir()) == []


def test_a_relative_cache_directory_still_gives_an_absolute_root(tmp_path, monkeypatch, pip):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **__: Path("here"))
    pip(RELEASE)
    assert trees.locate("sglang==0.5.16").root == tmp_path / "here/sglang/0.5.16"


def test_two_threads_that_bring_the_same_release_at_once_both_have_it_whole(cache, monkeypatch):
    meet = threading.Barrier(2, timeout=20)

    def slow_pip(arguments, seconds, label):
        answer = Pip(RELEASE)(arguments, seconds, label)
        meet.wait()
        return answer

    monkeypatch.setattr(trees, "_pip", slow_pip)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(trees.locate("sglang==0.5.16"))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [trees.Tree("sglang==0.5.16", cache / "0.5.16", "0.5.16")] * 2
    assert contents(cache / "0.5.16") == MEMBERS
    assert [path.name for path in cache.iterdir()] == ["0.5.16"]


SCRIPT = """
import importlib, os, signal, subprocess, sys, time
from pathlib import Path
trees = importlib.import_module("repro.engines.sglang.locate")
here = Path({here!r})
def bring(arguments, share=1.0):
    [folder] = [word.removeprefix("--dest=") for word in arguments if word.startswith("--dest=")]
    data = (here / "a.whl").read_bytes()
    (Path(folder) / {name!r}).write_bytes(data[: int(len(data) * share)])
def pip(arguments, seconds, label):
    {pip}
    return subprocess.CompletedProcess([], 0, "", "")
trees._pip = pip
{more}
print(trees.locate("sglang==0.5.16").root)
"""


def script(tmp_path, pip_body, more="", **options):
    """Another process that locates 0.5.16 with a stand-in of pip that does ``pip_body``."""
    [(name, data)] = RELEASE.items()
    (tmp_path / "a.whl").write_bytes(data)
    text = SCRIPT.format(here=str(tmp_path), name=name, pip=pip_body, more=textwrap.dedent(more))
    top = Path(trees.__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(top), os.environ.get("PYTHONPATH", "")])},
        **options,
    )


def test_two_processes_that_bring_the_same_release_at_once_both_have_it_whole(cache, tmp_path):
    meet = (
        "bring(arguments); (here / str(os.getpid())).with_suffix('.met').touch()\n"
        "    while len(list(here.glob('*.met'))) < 2: time.sleep(0.01)"
    )
    running = [script(tmp_path, meet) for _ in range(2)]
    assert [process.communicate(timeout=60) for process in running] == [(f"{cache}/0.5.16\n", "")] * 2
    assert contents(cache / "0.5.16") == MEMBERS
    assert [path.name for path in cache.iterdir()] == ["0.5.16"]


@pytest.mark.parametrize(
    ("pip_body", "more"),
    [
        ("bring(arguments, 0.5); os.kill(os.getpid(), signal.SIGKILL)", ""),
        ("bring(arguments)", "trees._stamps = lambda folder: os.kill(os.getpid(), signal.SIGKILL)"),
    ],
    ids=["while downloading", "while unpacking"],
)
def test_a_killed_process_leaves_no_entry_and_what_it_left_is_cleared_a_day_later(
    cache, tmp_path, pip, pip_body, more
):
    process = script(tmp_path, pip_body, more)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    [left] = cache.iterdir()
    assert left.name.startswith(".tmp-")
    pip(RELEASE, named(wheel(MEMBERS), "0.5.17"))
    trees.locate("sglang==0.5.16")
    assert sorted(path.name for path in cache.iterdir()) == [left.name, "0.5.16"]
    day_ago = time.time() - 86_500
    os.utime(left, (day_ago, day_ago))
    trees.locate("sglang==0.5.17")
    assert sorted(path.name for path in cache.iterdir()) == ["0.5.16", "0.5.17"]


# Folders


@pytest.mark.parametrize(
    ("at", "path", "root"),
    [
        ("sglang", "tree", "tree"),
        ("python/sglang", "tree", "tree/python"),
        ("python/sglang", "tree/python", "tree/python"),
        ("python/sglang", "tree/python/sglang", "tree/python"),
        ("python/sglang", "tree/python/sglang/", "tree/python"),
        ("sglang", "tree/../tree", "tree/../tree"),
    ],
)
def test_a_folder_is_taken_by_its_top_its_python_folder_or_the_package_itself(
    tmp_path, monkeypatch, at, path, root
):
    package(tmp_path / "tree", at)
    spec = f"sglang@{tmp_path}/{path}"
    assert trees.locate(spec) == trees.Tree(spec, tmp_path / root, "")
    monkeypatch.chdir(tmp_path)
    assert trees.locate(f"sglang@{path}") == trees.Tree(f"sglang@{path}", tmp_path / root, "")


def test_the_package_folder_is_known_as_the_current_one_and_through_a_link(tmp_path, monkeypatch):
    package(tmp_path / "tree")
    (tmp_path / "link").symlink_to(tmp_path / "tree/sglang")
    spec = f"sglang@{tmp_path}/link"
    assert trees.locate(spec) == trees.Tree(spec, tmp_path / "tree", "")
    monkeypatch.chdir(tmp_path / "tree/sglang/srt")
    for spec in ("sglang@..", "sglang@../../sglang/."):
        assert trees.locate(spec).root.resolve() == tmp_path / "tree"
    monkeypatch.chdir(tmp_path / "tree/sglang")
    assert trees.locate("sglang@.") == trees.Tree("sglang@.", tmp_path / "tree", "")


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    package(tmp_path / "tree")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trees.locate("sglang@~/tree") == trees.Tree("sglang@~/tree", tmp_path / "tree", "")


@pytest.mark.parametrize("name", ["a#b", "#", "a@b", "a@b#c#d", "a b", "sglang==0.5.16"])
def test_a_path_may_hold_any_of_the_marks(tmp_path, name):
    package(tmp_path / name)
    spec = f"sglang@{tmp_path}/{name}"
    assert trees.locate(spec) == trees.Tree(spec, tmp_path / name, "")


def test_the_installed_one_is_nowhere_until_a_worker_looks():
    assert trees.locate("sglang") == trees.Tree("sglang", None, "")


def no_sglang(spec):
    return (
        f"{spec}: no SGLang there; looked for {TOPK} in that folder, in its python folder and, "
        "if it is named sglang, in the folder above"
    )


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("", f"'' is no SGLang; {FORMS}"),
        ("vllm", f"'vllm' is no SGLang; {FORMS}"),
        ("sglang=0.5.16", f"'sglang=0.5.16' is no SGLang; {FORMS}"),
        ("sglang@", f"'sglang@' is no SGLang; {FORMS}"),
        ("sglang@#v1", f"'sglang@#v1' is no SGLang; {FORMS}"),
        ("sglang @x", f"'sglang @x' is no SGLang; {FORMS}"),
        ("sglang@a\nb", "'sglang@a\\nb' is no SGLang; give printable characters"),
        ("sglang==1\0", "'sglang==1\\x00' is no SGLang; give printable characters"),
        ("sglang@nowhere", "sglang@nowhere: 'nowhere' does not exist; give the folder of an SGLang"),
        ("sglang@nowhere#v1", "sglang@nowhere#v1: 'nowhere' does not exist; give the folder of an SGLang"),
        ("sglang@file", "sglang@file: 'file' is no folder; give the folder of an SGLang"),
        ("sglang@file#v1", "sglang@file#v1: 'file' is no folder; give the folder of an SGLang"),
        (
            "sglang@~nobody-at-all",
            "sglang@~nobody-at-all: '~nobody-at-all' does not exist; give the folder of an SGLang",
        ),
        ("sglang@.", no_sglang("sglang@.")),
        ("sglang@other", no_sglang("sglang@other")),
    ],
)
def test_each_spec_that_names_nothing_is_refused_in_one_line(tmp_path, monkeypatch, spec, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    package(tmp_path / "elsewhere", "other").joinpath("other").rename(tmp_path / "other")
    assert failure(trees.locate, spec) == (EngineSpecError, line)


# Git revisions


GIT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.invalid",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.invalid",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
}


class Repository:
    def __init__(self, folder):
        self.folder = folder

    @classmethod
    def new(cls, folder, *options):
        folder.mkdir()
        made = cls(folder)
        made.git("init", "--quiet", "--initial-branch=main", *options)
        return made

    def git(self, *arguments, given=None):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | GIT
        ran = subprocess.run(
            ["/usr/bin/env", "git", "-C", str(self.folder), *arguments],
            input=given,
            capture_output=True,
            check=True,
            env=environment,
        )
        return ran.stdout.decode().strip()

    def commit(self, files, message="change"):
        for name, data in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", f"--message={message}")
        return self.git("rev-parse", "HEAD")


SOURCES = {name: data for name, data in MEMBERS.items() if name != METADATA}


@pytest.fixture(scope="session")
def moved(tmp_path_factory):
    """Two commits; the package lay at the top in the first and lies under python/ in the second."""
    made = Repository.new(tmp_path_factory.mktemp("moved") / "checkout")
    made.commit(SOURCES | DROPPED)
    made.git("tag", "-a", "-m", "first", "v1")
    made.git("rm", "-r", "--quiet", "sglang")
    later = SOURCES | {TOPK: b"TOP_K = 9\n"}
    made.commit({f"python/{name}": data for name, data in later.items()} | {"python/setup.py": b""})
    made.git("branch", "topic#1")
    return made


@pytest.fixture
def repository(tmp_path, monkeypatch, moved):
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_NOSYSTEM"):
        monkeypatch.setenv(name, GIT[name])
    return Repository(shutil.copytree(moved.folder, tmp_path / "checkout"))


@pytest.mark.parametrize("revision", ["HEAD", "main", "HEAD~0", "@{0}", "topic"])
def test_a_revision_is_taken_out_of_git_once_and_then_reused(cache, repository, monkeypatch, revision):
    repository.git("branch", "topic")
    spec = f"sglang@{repository.folder}#{revision}"
    sha = repository.git("rev-parse", "HEAD")
    tree = trees.locate(spec)
    assert (tree.label, tree.version, tree.root.parent) == (spec, sha, cache)
    assert contents(tree.root) == SOURCES | {TOPK: b"TOP_K = 9\n"}
    assert [path.name for path in cache.iterdir()] == [tree.root.name]
    monkeypatch.setattr(trees, "_keep", None)
    for inside in ("python", "python/sglang"):
        assert trees.locate(f"sglang@{repository.folder}/{inside}#{sha[:12]}").root == tree.root


@pytest.mark.parametrize("revision", ["v1", "HEAD~1", "v1^{commit}", "main@{1}"])
def test_a_revision_before_a_move_of_the_package_is_found_at_the_top(repository, revision):
    tree = trees.locate(f"sglang@{repository.folder}#{revision}")
    assert tree.version == repository.git("rev-parse", "v1^{commit}")
    assert contents(tree.root) == SOURCES


def test_a_bare_repository_and_one_with_sha256_names_do_as_well(tmp_path, repository):
    repository.git("clone", "--quiet", "--bare", str(repository.folder), str(tmp_path / "bare.git"))
    assert contents(trees.locate(f"sglang@{tmp_path}/bare.git#v1").root) == SOURCES
    other = Repository.new(tmp_path / "sha256", "--object-format=sha256")
    sha = other.commit(SOURCES)
    tree = trees.locate(f"sglang@{other.folder}#HEAD")
    assert (tree.version, len(sha)) == (sha, 64)
    assert contents(tree.root) == SOURCES


def everything_in(folder):
    seen = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        seen[str(path)] = (about.st_mode, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    return seen


def test_a_dirty_checkout_is_read_by_its_commit_and_left_as_it_is(repository):
    topk = repository.folder / "python" / TOPK
    topk.write_bytes(b"not committed\n")
    (repository.folder / "python/sglang/new.py").touch()
    status = repository.git("status", "--porcelain")
    os.utime(topk, ns=(1, 1))
    before = everything_in(repository.folder)
    assert contents(trees.locate(f"sglang@{repository.folder}#HEAD").root)[TOPK] == b"TOP_K = 9\n"
    trees.git_revisions(str(repository.folder), "v1", "HEAD")
    assert everything_in(repository.folder) == before
    assert repository.git("status", "--porcelain") == status


def test_links_and_submodules_of_a_commit_are_left_out(tmp_path, repository):
    folder = repository.folder / "python/sglang"
    (folder / "link.py").symlink_to("/etc/passwd")
    (folder / "run.py").write_bytes(b"#!")
    (folder / "run.py").chmod(0o755)
    submodule = f"160000,{repository.git('rev-parse', 'v1^{commit}')},python/sglang/module.py"
    repository.git("update-index", "--add", "--cacheinfo", submodule)
    repository.commit({})
    tree = trees.locate(f"sglang@{repository.folder}#HEAD")
    assert contents(tree.root) == SOURCES | {TOPK: b"TOP_K = 9\n", "sglang/run.py": b"#!"}


def test_neither_the_callers_git_variables_nor_replaced_objects_nor_hooks_have_a_say(
    tmp_path, repository, monkeypatch
):
    topk = f"HEAD:python/{TOPK}"
    other = repository.git("hash-object", "-w", "--stdin", given=b"replaced\n")
    repository.git("replace", repository.git("rev-parse", topk), other)
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    repository.git("config", "core.fsmonitor", str(hook))
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"):
        monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    tree = trees.locate(f"sglang@{repository.folder}#HEAD")
    assert contents(tree.root)[TOPK] == b"TOP_K = 9\n"
    assert not (tmp_path / "ran").exists()


def test_files_that_a_partial_clone_lacks_are_not_fetched(tmp_path, repository):
    repository.git("config", "uploadpack.allowFilter", "true")
    source, clone = f"file://{repository.folder}", str(tmp_path / "partial")
    repository.git("clone", "--quiet", "--no-checkout", "--filter=blob:none", source, clone)
    spec = f"sglang@{clone}#v1"
    before = everything_in(tmp_path / "partial")
    line = f"{spec}: the repository lacks files of that commit; fetch them first"
    assert failure(trees.locate, spec) == (NotVerifiedError, line)
    assert everything_in(tmp_path / "partial") == before


def forge(repository, name, kind, data):
    """Put other contents under an object's name."""
    path = repository.folder / ".git/objects" / name[:2] / name[2:]
    path.chmod(0o644)
    path.write_bytes(zlib.compress(b"%s %d\0" % (kind, len(data)) + data))


def test_contents_that_are_not_what_their_name_stands_for_are_refused(cache, repository):
    forge(repository, repository.git("rev-parse", f"v1:{TOPK}"), b"blob", b"TOP_K = 7\n")
    spec = f"sglang@{repository.folder}#v1"
    line = f"{spec}: the repository is damaged: '{TOPK}' is not what it should be"
    assert failure(trees.locate, spec) == (NotVerifiedError, line)
    assert list(cache.iterdir()) == []


def test_a_repository_that_lists_other_files_for_a_commit_does_not_reach_the_entry_of_the_true_one(
    tmp_path, repository
):
    evil = Repository.new(tmp_path / "evil")
    evil.git("fetch", "--quiet", str(repository.folder), "v1:refs/tags/v1")
    blob = evil.git("hash-object", "-w", "--stdin", given=b"evil\n")
    folder = evil.git("rev-parse", f"v1:{Path(TOPK).parent}")
    forge(evil, folder, b"tree", b"100644 topk.py\0" + bytes.fromhex(blob))
    false = trees.locate(f"sglang@{evil.folder}#v1")
    true = trees.locate(f"sglang@{repository.folder}#v1")
    assert false.version == true.version
    assert contents(false.root)[TOPK] == b"evil\n"
    assert contents(true.root) == SOURCES


def git_failure(repository, revision):
    spec = f"sglang@{repository.folder}#{revision}"
    kind, line = failure(trees.locate, spec)
    return kind, line.removeprefix(f"{spec}: ")


@pytest.mark.parametrize(
    "revision",
    ["v9", "", "-r", "--all", "--output=x", "HEAD~9", "v1..HEAD", "0" * 40, "HEAD:python", "v1 HEAD"],
)
def test_what_names_no_commit_is_the_callers_mistake(repository, revision):
    line = f"{revision!r} names no commit there; give a branch, a tag or a commit's sha"
    assert git_failure(repository, revision) == (EngineSpecError, line)


def test_only_the_last_mark_begins_a_revision(repository, monkeypatch):
    monkeypatch.chdir(repository.folder.parent)
    line = "sglang@checkout#topic#1: 'checkout#topic' does not exist; give the folder of an SGLang"
    assert failure(trees.locate, "sglang@checkout#topic#1") == (EngineSpecError, line)
    repository.folder.rename("check#out")
    tree = trees.locate("sglang@check#out#v1")
    assert (tree.label, contents(tree.root)) == ("sglang@check#out#v1", SOURCES)


def test_a_folder_outside_git_and_a_commit_without_sglang_are_the_callers_mistakes(tmp_path, repository):
    plain = package(tmp_path / "plain")
    line = f"sglang@{plain}#v1: {plain} is not in a git repository; give a checkout"
    assert failure(trees.locate, f"sglang@{plain}#v1") == (EngineSpecError, line)
    repository.git("rm", "-r", "--quiet", f"python/{TOPK}")
    repository.commit({TOPK.replace("srt", "other"): b""})
    line = f"no SGLang in that commit; looked for {TOPK} in its python folder and at its top"
    assert git_failure(repository, "HEAD") == (EngineSpecError, line)


def test_a_repository_that_git_refuses_to_read_is_not_verified(repository):
    (repository.folder / ".git/config").write_text("[core]\n\trepositoryformatversion = 99\n")
    kind, line = git_failure(repository, "HEAD")
    assert kind is NotVerifiedError
    assert line.startswith("git could not read the repository: ")
    (repository.folder / ".git/config").write_text("[core\n")
    assert git_failure(repository, "HEAD") == (
        NotVerifiedError,
        "git could not read the repository: bad config line 1 in file .git/config",
    )


def test_a_commit_larger_than_any_sglang_is_refused_before_it_is_read(cache, repository, monkeypatch):
    monkeypatch.setattr(trees, "MAX_TREE_BYTES", 50)
    monkeypatch.setattr(trees, "_keep", lambda label, members, *_: next(members))
    line = TOO_LARGE.partition(": ")[2].format("20,000", "16,777,216", "50")
    assert git_failure(repository, "v1") == (NotVerifiedError, line)
    assert list(cache.iterdir()) == []


def test_names_in_a_commit_that_lead_out_of_the_tree_are_refused(cache, repository):
    blob = repository.git("rev-parse", f"v1:{TOPK}")

    def tree(text):
        return repository.git("mktree", "--missing", given=text.encode())

    moe = tree(f"100644 blob {blob}\ttopk.py\n")
    layers = tree(f"040000 tree {moe}\tmoe\n")
    srt = tree(f"040000 tree {layers}\tlayers\n")
    up = repository.git(
        "hash-object", "-t", "tree", "-w", "--literally", "--stdin",
        given=b"100644 evil.py\0" + bytes.fromhex(blob),
    )  # fmt: skip
    sglang = repository.git(
        "hash-object", "-t", "tree", "-w", "--literally", "--stdin",
        given=b"40000 ..\0" + bytes.fromhex(up) + b"40000 srt\0" + bytes.fromhex(srt),
    )  # fmt: skip
    sha = repository.git("commit-tree", "-m", "x", tree(f"040000 tree {sglang}\tsglang\n"))
    line = "'sglang/../evil.py' leads out of the tree"
    assert git_failure(repository, sha) == (NotVerifiedError, line)
    assert list(cache.iterdir()) == []


def test_a_changed_copy_of_a_commit_is_refused(repository):
    spec = f"sglang@{repository.folder}#v1"
    root = trees.locate(spec).root
    edit(root)
    line = f"the copy in the cache was changed ('{TOPK}'); delete {root} and try again"
    assert git_failure(repository, "v1") == (NotVerifiedError, line)


# Lines of history


@pytest.fixture(scope="session")
def history(tmp_path_factory):
    """main: 0 - 1 - 4(merge of side) - 5, and 6 after 1 on another branch; side: 0 - 2 - 3."""
    made = Repository.new(tmp_path_factory.mktemp("lines") / "history")
    shas = [made.commit({}, str(0)), made.commit({}, str(1))]
    made.git("checkout", "--quiet", "-b", "side", shas[0])
    shas += [made.commit({}, str(2)), made.commit({}, str(3))]
    made.git("checkout", "--quiet", "main")
    made.git("merge", "--quiet", "--no-ff", "--message=4", "side")
    shas.append(made.git("rev-parse", "HEAD"))
    shas.append(made.commit({}, str(5)))
    made.git("checkout", "--quiet", "-b", "other", shas[1])
    shas.append(made.commit({}, str(6)))
    made.git("checkout", "--quiet", "main")
    return made, shas


@pytest.mark.parametrize(
    ("good", "bad", "line"),
    [
        (0, 5, [0, 1, 4, 5]),
        (1, 5, [1, 4, 5]),
        (2, 5, [2, 4, 5]),
        (3, 4, [3, 4]),
        (0, 3, [0, 2, 3]),
        (4, 5, [4, 5]),
        (5, 5, [5]),
        (5, 0, [5, 4, 1, 0]),
        (5, 2, [5, 4, 2]),
    ],
)
def test_revisions_run_from_good_to_bad_along_first_parents(history, good, bad, line):
    made, shas = history
    found = trees.git_revisions(str(made.folder), shas[good][:20], shas[bad])
    assert found == [shas[number] for number in line]


@pytest.mark.parametrize(("good", "bad"), [(1, 2), (3, 6), (5, 6)])
def test_revisions_of_two_lines_are_the_callers_mistake(history, good, bad):
    made, shas = history
    line = (
        f"sglang@{made.folder}: neither of {shas[good]!r} and {shas[bad]!r} is an ancestor of the other; "
        "give two commits of one line of history"
    )
    assert failure(trees.git_revisions, str(made.folder), shas[good], shas[bad]) == (EngineSpecError, line)


def test_revisions_take_names_and_a_tilde(history, monkeypatch):
    made, shas = history
    monkeypatch.setenv("HOME", str(made.folder.parent))
    assert trees.git_revisions("~/history", "main~2", "main") == [shas[1], shas[4], shas[5]]
    line = "sglang@~/history: 'x\\n' names no commit there; give a branch, a tag or a commit's sha"
    assert failure(trees.git_revisions, "~/history", "x\n", "main") == (EngineSpecError, line)
    line = "'a\\x00b': 'a\\x00b' does not exist; give the folder of an SGLang"
    assert failure(trees.git_revisions, "a\0b", "x", "main") == (EngineSpecError, line)


# What releases there are


LISTED = textwrap.dedent("""\
    WARNING: pip index is currently an experimental command. It may be removed without prior warning.
    sglang (0.5.16)
    Available versions: 0.5.16, 0.5.10.post1, 0.5.10, 0.5.9, 0.6.0rc1, 0.5.2.dev3, odd_version, 0.5.16+cu1, 0.5.17a0
      INSTALLED: 0.5.2
      LATEST:    0.5.16
""")


@pytest.mark.parametrize("out", [LISTED, LISTED.replace("\n", "\r\n")])
def test_released_versions_are_final_and_oldest_first(pip, out):
    used = pip(done(out=out, err="WARNING: x\n"))
    assert trees.released_versions() == ["0.5.9", "0.5.10", "0.5.10.post1", "0.5.16", "0.5.16+cu1"]
    [call] = used.calls
    assert (call[:2], call[-1]) == (["index", "versions"], "sglang")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (done(1, err='ERROR: unknown command "index"\n'), 'unknown command "index"'),
        (done(1, err=RETRYING + ABSENT.format("none")), "it lost the connection to a package index"),
        (done(0, out="sglang (0.5.16)\n"), "exit 0"),
        (done(1, err="/usr/bin/python: No module named pip\n"), "/usr/bin/python: No module named pip"),
    ],
)
def test_releases_that_cannot_be_listed_are_not_verified(pip, answer, problem):
    pip(answer)
    line = f"sglang: pip could not list its releases: {problem}"
    assert failure(trees.released_versions) == (NotVerifiedError, line)


# Processes


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def ended_early(told):
    """Whether the program of ``STUCK`` and its child are gone without having come to their own end."""
    pids = [int(word) for word in told.read_text().split()]
    for _ in range(500):
        if not any(map(alive, pids)):
            return len(pids) == 2 and not told.with_suffix(".end").exists()
        time.sleep(0.02)
    return False


def alive(pid):
    """Whether a process runs; one that ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    told = Path(f"/proc/{pid}/stat")
    return not (told.exists() and told.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.fixture
def real_pip(monkeypatch, tmp_path, cache):
    """Runs ``sys.executable`` of the module as it is, which the test then puts something else for."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache


STUCK = "sleep 60 & echo $$ $! > {0}\nwait; touch {0}.end"


def test_a_pip_that_takes_too_long_is_ended_with_its_children(real_pip, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python", STUCK.format(tmp_path / "pids")))
    monkeypatch.setattr(trees, "DOWNLOAD_SECONDS", 0.5)
    line = "sglang==0.5.16: pip took longer than 0.5 s; try again"
    assert failure(trees.locate, "sglang==0.5.16") == (NotVerifiedError, line)
    assert ended_early(tmp_path / "pids")
    assert list(real_pip.iterdir()) == []


def test_an_interrupt_ends_pip_and_its_children_and_leaves_nothing(cache, tmp_path):
    stuck = program(tmp_path / "python", STUCK.format(tmp_path / "pids"))
    process = script(
        tmp_path,
        "pass",
        f"""
        importlib.reload(trees)  # with its own pip again
        sys.executable = {stuck!r}
        signal.signal(signal.SIGINT, signal.default_int_handler)
        """,
    )
    pids = []
    for _ in range(1000):
        if len(pids) == 2 or process.poll() is not None:
            break
        time.sleep(0.02)
        with suppress(FileNotFoundError):
            pids = (tmp_path / "pids").read_text().split()
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=60)
    assert text.endswith("KeyboardInterrupt\n")
    assert ended_early(tmp_path / "pids")
    assert list(cache.iterdir()) == []


def test_a_python_without_pip_and_one_that_is_gone_are_not_verified(real_pip, tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "executable", program(tmp_path / "python", "echo No module named pip >&2; exit 1")
    )
    line = "sglang==0.5.16: pip could not download it: No module named pip"
    assert failure(trees.locate, "sglang==0.5.16") == (NotVerifiedError, line)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    line = "sglang==0.5.16: pip could not be started: No such file or directory"
    assert failure(trees.locate, "sglang==0.5.16") == (NotVerifiedError, line)


def test_pip_runs_without_asking_and_apart_from_the_current_folder(real_pip, tmp_path, monkeypatch):
    shown = tmp_path / "shown"
    monkeypatch.setattr(
        sys,
        "executable",
        program(tmp_path / "python", f"echo $@ q=$PIP_QUIET v=$PIP_VERBOSE > {shown}; cat >> {shown}"),
    )
    monkeypatch.setenv("PIP_QUIET", "3")
    failure(trees.released_versions)
    assert shown.read_text() == (
        "-P -m pip --no-input --disable-pip-version-check index versions --platform manylinux_2_34_x86_64 "
        "--python-version 3.11 --implementation cp --only-binary=:all: sglang q=0 v=0\n"
    )


def test_a_missing_and_a_stuck_git_are_not_verified(tmp_path, repository, monkeypatch):
    spec = f"sglang@{repository.folder}#HEAD"
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}")
    line = f"{spec}: git could not be started: No such file or directory"
    assert failure(trees.locate, spec) == (NotVerifiedError, line)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    program(tmp_path / "bin/git", STUCK.format(tmp_path / "pids"))
    monkeypatch.setattr(trees, "GIT_SECONDS", 0.5)
    line = f"{spec}: git took longer than 0.5 s; try again"
    assert failure(trees.locate, spec) == (NotVerifiedError, line)
    assert ended_early(tmp_path / "pids")


# The package index itself


@pytest.mark.network
def test_a_real_release_is_downloaded_once_and_reused(real_pip, monkeypatch):
    tree = trees.locate("sglang==0.5.16")
    assert tree == trees.Tree("sglang==0.5.16", real_pip / "0.5.16", "0.5.16")
    assert "def select_experts(" in (tree.root / TOPK).read_text()
    assert "\nVersion: 0.5.16\n" in (tree.root / METADATA).read_text()
    monkeypatch.setattr(trees, "_pip", None)
    assert trees.locate("sglang==0.5.16") == tree


@pytest.mark.network
def test_the_real_index_lists_releases_and_tells_an_absent_one(real_pip):
    versions = trees.released_versions()
    assert [version for version in versions if version in ("0.5.15", "0.5.15.post1", "0.5.16")] == [
        "0.5.15",
        "0.5.15.post1",
        "0.5.16",
    ]
    line = f"sglang==0.4.99: there is no wheel of that version; the newest is {versions[-1]}"
    assert failure(trees.locate, "sglang==0.4.99") == (EngineSpecError, line)
