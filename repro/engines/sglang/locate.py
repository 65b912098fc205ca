"""Where an SGLang tree comes from: a release, a folder, or a git revision. No code of it is run here.

A tree that was brought is kept in the user's cache directory: the sources of the package and nothing else,
written aside and moved into place by one rename, so that an entry is whole or is not there. Beside them lies a
manifest with the key of the entry, where it came from, and each file's SHA-256, size and times. At every use the
names, sizes and times are compared, and a file whose times differ is hashed again. This tells of files that were
edited, cut short, added (a stray ``__pycache__`` too) or taken away by accident, and of an entry that was renamed.
It does not protect from somebody who may write into the cache directory and writes a matching manifest too, nor
from what is changed after ``locate`` returned.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro._files import read_bounded
from repro.errors import EngineSpecError, NotVerifiedError, shown

if TYPE_CHECKING:
    from packaging.version import Version

__all__ = ["Tree", "git_revisions", "locate", "released_versions"]

LANDMARK = "sglang/srt/layers/moe/topk.py"
SUFFIXES = (".py", ".cuh", ".h", ".cu")
MANIFEST = "moepad-manifest.json"
FORMAT = "moepad-sglang-tree-1"
MAX_VERSION_LENGTH = 100
MAX_FILES = 20_000
MAX_FILE_BYTES = 1 << 24
MAX_TREE_BYTES = 1 << 28
MAX_ARCHIVE_BYTES = 1 << 28
MAX_LINE = 200
DOWNLOAD_SECONDS = 600.0
INDEX_SECONDS = 120.0
GIT_SECONDS = 120.0
STALE_SECONDS = 86_400.0
# A wheel built for any machine will do, since only its sources are read.
ANY_MACHINE = ("--platform", "manylinux_2_34_x86_64", "--python-version", "3.11", "--implementation", "cp")
# What pip says where it finds nothing, and where a connection failed.
NO_MATCH, RETRIED = "No matching distribution found", "Retrying ("
FORMS = "sglang, sglang==VERSION, sglang@PATH or sglang@PATH#REVISION"


@dataclass(frozen=True)
class Tree:
    """One SGLang.

    ``label`` is its name for people. ``root`` holds the package folder ``sglang``, None: the one installed beside
    the worker's interpreter. ``version`` is a release's version or a commit's full sha, "" where unknown.
    """

    label: str
    root: Path | None
    version: str


def locate(spec: str) -> Tree:
    """The tree that ``spec`` names, downloaded or taken out of git where it is not in the cache yet.

    ``sglang`` is the one installed; ``sglang==VERSION`` a release; ``sglang@PATH`` a checkout, its ``python``
    folder, any folder that holds ``sglang``, or that package folder itself; ``sglang@PATH#REVISION`` a commit of
    the git repository there, whose files and index are not touched. The last ``#`` begins a revision only where
    the whole text is no path that exists.

    Raises:
        EngineSpecError: no such form, release, path or commit, or no SGLang there.
        NotVerifiedError: it could not be brought or kept, or its copy in the cache was changed.
    """
    if not spec.isprintable():
        raise EngineSpecError(f"{shown(spec)} is no SGLang; give printable characters")
    if spec == "sglang":
        return Tree(spec, None, "")
    if spec.startswith("sglang=="):
        return _release(spec)
    if spec.startswith("sglang@"):
        path = spec.removeprefix("sglang@")
        if "#" in path and not os.path.exists(os.path.expanduser(path)):
            path, _, revision = path.rpartition("#")
            return _revision(spec, _folder(spec, path), revision)
        return Tree(spec, _root(spec, _folder(spec, path)), "")
    raise EngineSpecError(f"{shown(spec)} is no SGLang; give {FORMS}")


def released_versions() -> list[str]:
    """Final and post releases that pip can download, oldest first; no pre-releases.

    Raises:
        NotVerifiedError: pip could not be asked.
    """
    done = _pip(["index", "versions", *ANY_MACHINE, "--only-binary=:all:", "sglang"], INDEX_SECONDS, "sglang")
    listed = re.search(r"^Available versions:(.*)$", done.stdout, re.MULTILINE)
    if done.returncode or not listed:
        raise NotVerifiedError(f"sglang: pip could not list its releases: {_pip_problem(done)}")
    return _final_versions(listed[1])


def git_revisions(path: str, good: str, bad: str) -> list[str]:
    """Full shas from ``good`` to ``bad``, both included, in that order, whichever of the two is the older.

    They are the commits on the newer one's first-parent line that descend from the older one; the older one comes
    before them even where it lies on a side branch that was merged into that line.

    Raises:
        EngineSpecError: no git repository, no such commit, or neither is an ancestor of the other.
        NotVerifiedError: git could not be asked.
    """
    spec = f"sglang@{path}" if path.isprintable() else shown(path)
    folder = _folder(spec, path)
    first, last = (_commit(spec, folder, revision) for revision in (good, bad))
    if first == last:
        return [first]
    for older, newer in ((first, last), (last, first)):
        between = f"{older}..{newer}"
        descendants = set(_git(spec, folder, "rev-list", "--ancestry-path", between).split())
        if descendants:
            line = _git(spec, folder, "rev-list", "--first-parent", between).split()
            newest_first = [sha.decode() for sha in line if sha in descendants] + [older]
            return newest_first if newer == first else newest_first[::-1]
    raise EngineSpecError(
        f"{spec}: neither of {shown(good)} and {shown(bad)} is an ancestor of the other; "
        "give two commits of one line of history"
    )


# Folders


def _folder(spec: str, path: str) -> Path:
    if not path:
        raise EngineSpecError(f"{shown(spec)} is no SGLang; give {FORMS}")
    folder = Path(os.path.expanduser(path)).absolute()
    if not os.path.isdir(folder):
        problem = "is no folder" if os.path.exists(folder) else "does not exist"
        raise EngineSpecError(f"{spec}: {shown(path)} {problem}; give the folder of an SGLang")
    return folder


def _root(spec: str, folder: Path) -> Path:
    above = [package.parent for package in (folder, folder.resolve()) if package.name == "sglang"]
    for root in (folder / "python", folder, *above):
        if _is_sglang(root):
            return root
    raise EngineSpecError(
        f"{spec}: no SGLang there; looked for {LANDMARK} in that folder, in its python folder and, "
        "if it is named sglang, in the folder above"
    )


def _is_sglang(root: Path) -> bool:
    return os.path.isfile(root / LANDMARK)


# Releases


def _release(spec: str) -> Tree:
    from packaging.version import Version

    text = spec.removeprefix("sglang==")
    try:
        version = Version(text if len(text) <= MAX_VERSION_LENGTH else "")
    except ValueError as err:
        raise EngineSpecError(f"{shown(spec)}: {shown(text)} is no version; give one such as 0.5.16") from err
    label = f"sglang=={version}"
    entry = _cache() / str(version)
    if not os.path.lexists(entry):
        with _staging(label) as staging:
            wheel = _download(label, version, staging)
            source = f"{wheel.name} sha256:{_sha256(wheel)}"
            _keep(label, _wheel_members(label, wheel), staging, entry, source)
    _verify(label, entry)
    if not _is_sglang(entry):
        raise EngineSpecError(f"{label}: that release has no {LANDMARK}; give a later one")
    return Tree(label, entry, str(version))


def _download(label: str, version: Version, folder: Path) -> Path:
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename
    from packaging.version import InvalidVersion

    options = ("--no-deps", "--only-binary=:all:", "--progress-bar=off", f"--dest={folder}")
    for target in ((), ANY_MACHINE):
        done = _pip(["download", *options, *target, label], DOWNLOAD_SECONDS, label)
        if done.returncode == 0:
            break
        if NO_MATCH not in done.stderr or RETRIED in done.stderr:
            raise NotVerifiedError(f"{label}: pip could not download it: {_pip_problem(done)}")
    else:
        raise _absent(label, done.stderr)
    wheels = list(folder.glob("*.whl"))
    try:
        brought = [parse_wheel_filename(wheel.name)[:2] for wheel in wheels]
    except (InvalidWheelFilename, InvalidVersion):
        brought = []
    if brought != [("sglang", version)]:
        found = _quoted(", ".join(sorted(wheel.name for wheel in wheels))) or "no wheel"
        raise NotVerifiedError(
            f"{label}: pip brought {found}; only the wheel of that very version can be used"
        )
    return wheels[0]


def _absent(label: str, pip_text: str) -> EngineSpecError | NotVerifiedError:
    listed = re.search(r"\(from versions: (.*?)\)", pip_text)
    versions = _final_versions(listed[1]) if listed else []
    if versions:
        return EngineSpecError(f"{label}: there is no wheel of that version; the newest is {versions[-1]}")
    return NotVerifiedError(
        f"{label}: pip found no release of sglang at all; it needs a network and an index that has them"
    )


def _final_versions(listed: str) -> list[str]:
    from packaging.version import InvalidVersion, Version

    versions = []
    for text in listed.split(","):
        with suppress(InvalidVersion):
            versions.append(Version(text.strip()))
    return [str(version) for version in sorted(versions) if not version.is_prerelease]


def _wheel_members(label: str, wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Name and contents of each member that is kept.

    A member's contents end past ``MAX_FILE_BYTES``, whatever the archive's directory says of its size.
    """
    if wheel.stat().st_size > MAX_ARCHIVE_BYTES:
        raise NotVerifiedError(f"{label}: its wheel is larger than {MAX_ARCHIVE_BYTES:,} bytes")
    try:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                name, kind = info.filename, stat.S_IFMT(info.external_attr >> 16)
                if not _is_safe(name.removesuffix("/")) or kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                    raise zipfile.BadZipFile(f"{shown(name)} is a link or leads out of the tree")
                if info.is_dir() or not _is_kept(name):
                    continue
                # The other methods' readers expand without a bound.
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise zipfile.BadZipFile(f"{shown(name)} is compressed in a way that no wheel is")
                with archive.open(info) as file:
                    yield name, file.read(MAX_FILE_BYTES + 1)
    # RuntimeError: encrypted, or of a later format. ValueError and OSError: a name, a place in the file.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, OSError) as err:
        problem = _quoted(str(err)) or "it ends too early"
        raise NotVerifiedError(f"{label}: its wheel is damaged: {problem}") from err


def _is_kept(name: str) -> bool:
    if name.startswith("sglang/"):
        return name.endswith(SUFFIXES)
    return re.fullmatch(r"sglang-[^/]+\.dist-info/METADATA", name) is not None


def _is_safe(name: str) -> bool:
    """Whether a name leads to a place below the folder that it is written in."""
    return name.isprintable() and "\\" not in name and not {"", ".", ".."}.intersection(name.split("/"))


# Git revisions


def _revision(spec: str, folder: Path, revision: str) -> Tree:
    sha = _commit(spec, folder, revision)
    blobs = _blobs(spec, folder, sha)
    listing = "".join(f"{blob} {name}\n" for name, blob in blobs.items())
    # The sha alone would trust each repository to hold what the sha stands for; blobs are checked, trees are not.
    entry = _cache() / f"git-{sha}-{hashlib.sha256(listing.encode()).hexdigest()[:32]}"
    if not os.path.lexists(entry):
        with _staging(spec) as staging:
            _keep(spec, _blob_members(spec, folder, blobs), staging, entry, f"git commit {sha}")
    _verify(spec, entry)
    return Tree(spec, entry, sha)


def _commit(spec: str, folder: Path, revision: str) -> str:
    if revision and revision.isprintable():
        asked = _run_git(spec, folder, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
        if asked.returncode == 0:
            return asked.stdout.decode().strip()
    repository = _run_git(spec, folder, "rev-parse", "--git-dir")
    if b"not a git repository" in repository.stderr:
        raise EngineSpecError(f"{spec}: {folder} is not in a git repository; give a checkout")
    if repository.returncode:
        raise NotVerifiedError(f"{spec}: git could not read the repository: {_git_line(repository)}")
    raise EngineSpecError(
        f"{spec}: {shown(revision)} names no commit there; give a branch, a tag or a commit's sha"
    )


def _blobs(spec: str, folder: Path, sha: str) -> dict[str, str]:
    """Git's object name of each source file of a commit, by its name from ``sglang/`` on, sorted."""
    listed = _git(spec, folder, "ls-tree", "-r", "-z", "--full-tree", sha, "--", "python/sglang", "sglang")
    suffixes = tuple(suffix.encode() for suffix in SUFFIXES)
    blobs = {}
    for line in listed.split(b"\0")[:-1]:
        about, _, name = line.partition(b"\t")
        mode, _, blob = about.split(b" ")
        if mode in (b"100644", b"100755") and name.endswith(suffixes):
            blobs[name.decode(errors="replace")] = blob.decode()
    for top in ("python/", ""):
        if top + LANDMARK in blobs:
            inside = sorted(name for name in blobs if name.startswith(f"{top}sglang/"))
            return {name.removeprefix(top): blobs[name] for name in inside}
    raise EngineSpecError(
        f"{spec}: no SGLang in that commit; looked for {LANDMARK} in its python folder and at its top"
    )


def _blob_members(spec: str, folder: Path, blobs: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    wanted = "".join(f"{blob}\n" for blob in blobs.values()).encode()
    asked = _run_git(spec, folder, "cat-file", "--batch-check=%(objectsize)", given=wanted)
    sizes = asked.stdout.split()
    if asked.returncode or not all(size.isdigit() for size in sizes):
        raise NotVerifiedError(f"{spec}: the repository lacks files of that commit; fetch them first")
    if sum(map(int, sizes)) > MAX_TREE_BYTES:
        raise _too_large(spec)
    answer = _git(spec, folder, "cat-file", "--batch", given=wanted)
    at = 0
    for (name, blob), size in zip(blobs.items(), map(int, sizes), strict=True):
        start = answer.find(b"\n", at) + 1
        data, at = answer[start : start + size], start + size + 1
        algorithm = "sha1" if len(blob) == 40 else "sha256"
        if hashlib.new(algorithm, b"blob %d\0" % size + data, usedforsecurity=False).hexdigest() != blob:
            raise NotVerifiedError(
                f"{spec}: the repository is damaged: {shown(name)} is not what it should be"
            )
        if not _is_safe(name):
            raise NotVerifiedError(f"{spec}: {shown(name)} leads out of the tree")
        yield name, data


def _git(spec: str, folder: Path, *arguments: str, given: bytes = b"") -> bytes:
    done = _run_git(spec, folder, *arguments, given=given)
    if done.returncode:
        raise NotVerifiedError(f"{spec}: git could not read the repository: {_git_line(done)}")
    return done.stdout


def _run_git(
    spec: str, folder: Path, *arguments: str, given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    # Not the caller's: a hook that runs moepad has GIT_DIR set. Its configuration stays (safe.directory).
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(("GIT_CONFIG_", "GIT_EXEC_PATH"))
    } | {
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_GRAFT_FILE": os.devnull,
        # An older git heeds only the second.
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "none",
        "LC_ALL": "C",
    }
    command = ["git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "-C", str(folder)]
    return _run([*command, *arguments], environment, GIT_SECONDS, spec, given=given)


def _git_line(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").split("\n")
    said = [line for line in lines if line.startswith(("fatal: ", "error: "))] or [f"exit {done.returncode}"]
    return _quoted(said[-1].partition(": ")[2] or said[-1])


# The cache


def _cache() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("moepad", appauthor=False).absolute() / "sglang"


@contextmanager
def _staging(label: str) -> Iterator[Path]:
    """A folder in the cache to make an entry in, gone afterwards; what killed processes left is cleared away."""
    cache = _cache()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for left in cache.glob(".tmp-*"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=cache, ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except OSError as err:
        raise NotVerifiedError(f"{label}: cannot be kept in {cache}: {err.strerror or err}") from err


def _keep(label: str, members: Iterable[tuple[str, bytes]], staging: Path, entry: Path, source: str) -> None:
    """Write files and their manifest in ``staging`` and move them to ``entry``, unless somebody was faster."""
    made = staging / "tree"
    hashes: dict[str, str] = {}
    total = 0
    for name, data in members:
        total += len(data)
        if len(data) > MAX_FILE_BYTES or total > MAX_TREE_BYTES or len(hashes) == MAX_FILES:
            raise _too_large(label)
        target = made / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # Read-only, so that an editor says that this is no place to edit.
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
        except (FileExistsError, NotADirectoryError) as err:
            raise NotVerifiedError(f"{label}: two of its files have one name, {shown(name)}") from err
        with open(descriptor, "wb") as file:
            file.write(data)
        hashes[name] = hashlib.sha256(data).hexdigest()
    if not hashes:
        raise NotVerifiedError(f"{label}: holds no source files")
    files = {name: [hashes[name], *stamp] for name, stamp in _stamps(made).items()}
    manifest = {"format": FORMAT, "key": entry.name, "source": source, "files": files}
    (made / MANIFEST).write_text(json.dumps(manifest, indent=0), encoding="utf-8")
    try:
        made.rename(entry)
    except OSError:
        if not entry.is_dir():
            raise


def _verify(label: str, entry: Path) -> None:
    try:
        manifest: dict[str, Any] = json.loads(
            read_bounded(entry / MANIFEST, MAX_TREE_BYTES, NotVerifiedError)
        )
        files, found = manifest["files"], _stamps(entry)
        found.pop(MANIFEST, None)
        changed = [
            name
            for name in files.keys() | found.keys()
            if name not in found
            or name not in files
            or found[name][0] != files[name][1]
            or (found[name] != files[name][1:] and _sha256(entry / name) != files[name][0])
        ]
        whole = (manifest["format"], manifest["key"]) == (FORMAT, entry.name)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        changed, whole = [], False
    if changed or not whole:
        what = shown(min(changed)) if changed else f"its {MANIFEST}"
        raise NotVerifiedError(
            f"{label}: the copy in the cache was changed ({what}); delete {entry} and try again"
        )


def _stamps(folder: Path) -> dict[str, list[int]]:
    """Size, modification time and change time (ns) of each file below; size -1: no regular file."""
    stamps, folders = {}, [""]
    while folders:
        prefix = folders.pop()
        with os.scandir(folder / prefix) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{name}/")
                elif entry.is_file(follow_symlinks=False):
                    about = entry.stat(follow_symlinks=False)
                    stamps[name] = [about.st_size, about.st_mtime_ns, about.st_ctime_ns]
                else:
                    stamps[name] = [-1, 0, 0]
    return stamps


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _too_large(label: str) -> NotVerifiedError:
    return NotVerifiedError(
        f"{label}: larger than any SGLang: over {MAX_FILES:,} files, {MAX_FILE_BYTES:,} bytes in one of them "
        f"or {MAX_TREE_BYTES:,} in all"
    )


# Processes


def _pip(arguments: Sequence[str], seconds: float, label: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pip", "--no-input", "--disable-pip-version-check"]
    # What is read of its output does not depend on how talkative the user's own settings make it.
    environment = dict(os.environ) | {"PIP_QUIET": "0", "PIP_VERBOSE": "0", "PIP_NO_COLOR": "1"}
    done = _run([*command, *arguments], environment, seconds, label)
    out, err = (data.decode(errors="replace") for data in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def _pip_problem(done: subprocess.CompletedProcess[str]) -> str:
    if NO_MATCH in done.stderr and RETRIED in done.stderr:
        return "it lost the connection to a package index"
    lines = [line.strip() for line in done.stderr.split("\n") if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return _quoted((errors or lines or [f"exit {done.returncode}"])[-1])


def _quoted(line: str) -> str:
    """Another program's line as an error quotes it, without addresses, which may hold passwords."""
    line = re.sub(r"\w+://\S+", "(address)", line)
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}..."


def _run(
    command: Sequence[str], environment: Mapping[str, str], seconds: float, label: str, *, given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run to the end; past its time, or when this call is interrupted, it and its own children are killed."""
    program = "git" if command[0] == "git" else "pip"
    try:
        process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except OSError as err:
        raise NotVerifiedError(f"{label}: {program} could not be started: {err.strerror or err}") from err
    with process:
        try:
            out, err_text = process.communicate(given, timeout=seconds)
        except BaseException as err:
            if process.returncode is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            if isinstance(err, subprocess.TimeoutExpired):
                raise NotVerifiedError(
                    f"{label}: {program} took longer than {seconds:g} s; try again"
                ) from err
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err_text)
