"""Where results go: standard output, and files that are written whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass

from moepad_cli.errors import UsageError, unwritable
from moepad_cli.render import RENDERERS, table
from repro.report import Report

Drawing = Callable[[Report, int, bool], str]
"""``(report, width in columns, whether block characters can be written)`` -> text for a terminal."""


@dataclass(frozen=True)
class OutputOptions:
    format: str = "table"
    output: str | None = None
    junit_xml: str | None = None
    html: str | None = None
    save: str | None = None

    def files(self) -> list[tuple[str, str]]:
        """``(option, path)`` of every file asked for."""
        given = (
            ("--output", self.output),
            ("--junit-xml", self.junit_xml),
            ("--html", self.html),
            ("--save", self.save),
        )
        return [(option, path) for option, path in given if path is not None]


def check(options: OutputOptions) -> None:
    """Finds out before the work whether its results can be written.

    Raises:
        UsageError: a file that cannot be written, one file given twice, or ``--html`` without jinja2.
    """
    taken: dict[str, str] = {}
    for option, path in options.files():
        _check_file(option, path)
        other = taken.setdefault(os.path.realpath(path), option)
        if other != option and not _is_special(path):
            raise UsageError(f"{option}: '{path}' is given to {other} too; give each its own file")
    if options.html is not None:
        from importlib.util import find_spec

        if find_spec("jinja2") is None:
            raise UsageError("--html: jinja2 is not installed; run: pip install 'moepad[html]'")


def emit(
    report: Report,
    options: OutputOptions,
    *,
    saved: Callable[[], str] | None = None,
    drawing: Drawing | None = None,
    on_stdout: bool = True,
) -> None:
    """Writes all files, then standard output (nothing there where ``--output`` takes the result).

    ``saved`` gives the text for ``--save``; without it no such file is written. ``drawing`` is shown with the
    table format on a terminal only.
    """
    on_terminal = options.output is None and sys.stdout is not None and sys.stdout.isatty()
    if options.format == "table" and on_terminal:
        text = _for_terminal(report, drawing)
    else:
        text = RENDERERS[options.format](report)
    files = []
    if options.output is not None:
        files.append(("--output", options.output, text))
    if options.junit_xml is not None:
        files.append(("--junit-xml", options.junit_xml, RENDERERS["junit"](report)))
    if options.html is not None:
        files.append(("--html", options.html, RENDERERS["html"](report)))
    if options.save is not None and saved is not None:
        files.append(("--save", options.save, saved()))
    write_files(files)
    if options.output is None and on_stdout:
        write_stdout(text)


@contextmanager
def kept_for_results() -> Iterator[None]:
    """Standard output is the report's alone: what the work writes there meanwhile goes to standard error.

    That holds below Python too (``os.write``, child processes). The working directory is put back after, since
    the files to write were named relative to it.
    """
    folder = kept = None
    with suppress(FileNotFoundError):  # the caller's own was removed
        folder = os.getcwd()
    if sys.stderr is None:  # closed; its descriptor must not become that of the next file
        os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            with suppress(OSError, ValueError, AttributeError):
                sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
        if sys.stdout is not None and sys.stdout.closed:
            sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        if folder is not None:
            os.chdir(folder)


def write_files(files: Sequence[tuple[str, str, str]]) -> None:
    """Writes ``(option, path, text)`` as UTF-8: every file whole, or none of them.

    Raises:
        UsageError: a file that cannot be written.
    """
    staged: list[tuple[str, str, str, str]] = []
    try:
        for option, path, text in files:
            try:
                if (descriptor := _descriptor_of(path)) is not None:
                    with open(descriptor, "wb", closefd=False) as stream:
                        stream.write(_encoded(text))
                elif _is_special(path):
                    with open(path, "wb") as device:
                        device.write(_encoded(text))
                else:
                    target = os.path.realpath(path)
                    staged.append((_stage(target, text), target, option, path))
            except OSError as err:
                raise unwritable(option, path, err) from err
        while staged:
            temporary, target, option, path = staged[0]
            try:
                os.replace(temporary, target)
            except OSError as err:
                raise unwritable(option, path, err) from err
            staged.pop(0)
    finally:
        for temporary, *_ in staged:
            with suppress(OSError):
                os.unlink(temporary)


def write_stdout(text: str) -> None:
    """Writes and flushes. A reader that has gone away is no error: what it did not want is dropped.

    Raises:
        UsageError: standard output cannot be written for another reason, such as a full disk.
    """
    if sys.stdout is None:
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
    except OSError as err:
        _discard_stdout()
        raise UsageError(f"standard output: cannot be written: {err.strerror or err}") from err


def settle_stdout() -> None:
    """Flushes what an error left behind, so that the interpreter's own flush at exit cannot fail."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _discard_stdout()


def _discard_stdout() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _for_terminal(report: Report, drawing: Drawing | None) -> str:
    drawn = ""
    if drawing is not None:
        drawn = drawing(report, shutil.get_terminal_size().columns, _has_blocks(sys.stdout.encoding))
    colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return table.render(report, colour=colour, drawing=drawn)


def _has_blocks(encoding: str | None) -> bool:
    try:
        "█░▄▚".encode(encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _descriptor_of(path: str) -> int | None:
    """The open file behind ``/dev/stdout`` and its like; opened by name, a regular one would be emptied."""
    named = {"/dev/stdout": 1, "/dev/stderr": 2}.get(path)
    if named is None and (match := re.fullmatch(r"/(?:dev|proc/self)/fd/([0-9]{1,6})", path)):
        named = int(match[1])
    return named


def _is_special(path: str) -> bool:
    """A device or pipe, which must be written to and not replaced."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _check_file(option: str, path: str) -> None:
    if not path:
        raise UsageError(f"{option}: '' is not a file name")
    if (descriptor := _descriptor_of(path)) is not None:
        try:
            os.write(descriptor, b"")
        except OSError as err:
            raise unwritable(option, path, err) from err
        return
    if os.path.isdir(path) or path.endswith(os.sep):
        raise UsageError(f"{option}: cannot write '{path}': it is a directory")
    try:
        if os.path.exists(path) and not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
        if not _is_special(path):
            os.unlink(_stage(os.path.realpath(path), ""))
    except OSError as err:
        raise unwritable(option, path, err) from err


def _stage(target: str, text: str) -> str:
    """A new file beside ``target``, with its permissions and ``text`` in it; gives its path."""
    serial = 0
    while True:
        temporary = os.path.join(os.path.dirname(target), f".moepad-{os.getpid()}-{serial}.tmp")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            break
        except FileExistsError:
            serial += 1
    try:
        with open(descriptor, "wb") as file:
            file.write(_encoded(text))
        with suppress(FileNotFoundError):
            os.chmod(temporary, os.stat(target).st_mode & 0o777)
    except BaseException:
        os.unlink(temporary)
        raise
    return temporary


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")
