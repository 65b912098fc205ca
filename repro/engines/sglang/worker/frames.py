"""Messages with tensors on a pipe.

A frame is a header (magic, length of the JSON as u32, length of the payload as u64, little-endian), a JSON
object in UTF-8, and the tensors' bytes one after another. The object's key ``tensors`` lists their name, dtype
and shape in that order. Reads take exactly what a frame holds, since two processes take turns at one pipe.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import select
import struct
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_JSON = 64 << 20
MAX_PAYLOAD = 1 << 30
MAX_DIMENSIONS = 16
# The native byte order is little-endian wherever torch runs, and both ends are on one machine.
ITEM_SIZES = {
    "int32": 4,
    "int64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float64": 8,
    "bool": 1,
}
_MAGIC = b"MPAD"
_HEADER = struct.Struct("<4sIQ")
_PIECE = 1 << 20


class FrameError(ValueError):
    """What came is no frame, or what was to be sent fits none; the text is one plain reason."""


class EndOfStreamError(FrameError):
    """The other end is closed."""


def write_frame(
    fd: int, message: Mapping[str, Any], tensors: Mapping[str, Tensor], deadline: float | None = None
) -> None:
    """Send one frame. Nothing is sent if the message or a tensor fits no frame.

    Args:
        fd: with a deadline it must not block, or the deadline may be missed.
        deadline: as ``time.monotonic()`` tells it.

    Raises:
        FrameError: a value that JSON does not know, a dtype or a layout that frames do not, or too much.
        TimeoutError: the deadline passed.
        OSError: the other end is gone.
    """
    write_pieces(fd, pack(message, tensors), deadline)


def read_frame(fd: int, deadline: float | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take one frame and not a byte more. The tensors are on the CPU, contiguous, and own their memory.

    Raises:
        EndOfStreamError: the other end is closed, before the frame or within it.
        FrameError: no frame, or one over the limits.
        TimeoutError: ``deadline``, as ``time.monotonic()`` tells it, passed.
    """
    magic, json_length, payload_length = _HEADER.unpack(_read_exactly(fd, _HEADER.size, deadline))
    if magic != _MAGIC:
        raise FrameError(f"wrong magic {magic!r}")
    if json_length > MAX_JSON or payload_length > MAX_PAYLOAD:
        raise FrameError(f"too long: {json_length:,} bytes of JSON, {payload_length:,} of tensors")
    text = _read_exactly(fd, json_length, deadline)
    try:
        message = json.loads(text.decode())
    except (ValueError, RecursionError) as err:
        raise FrameError("no JSON") from err
    if not isinstance(message, dict):
        raise FrameError("no JSON object")
    listed = _listed(message.pop("tensors", None))
    total = sum(size for _, _, _, size in listed)
    if total != payload_length:
        raise FrameError(f"tensors of {total:,} bytes in a payload of {payload_length:,}")
    tensors = {}
    for name, dtype, shape, size in listed:
        tensors[name] = _tensor(_read_exactly(fd, size, deadline), dtype, shape)
    return message, tensors


def pack(message: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[bytes]:
    """The bytes of one frame, in pieces.

    Raises:
        FrameError: as ``write_frame``.
    """
    if "tensors" in message:
        raise FrameError("'tensors' is the frame's own key")
    listed, payload = [], []
    for name, tensor in tensors.items():
        dtype, shape, data = _plain(name, tensor)
        listed.append({"name": name, "dtype": dtype, "shape": shape})
        payload.append(data)
    try:
        text = json.dumps({**message, "tensors": listed}, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as err:
        raise FrameError(f"no JSON: {err}") from err
    total = sum(map(len, payload))
    if len(text) > MAX_JSON or total > MAX_PAYLOAD:
        raise FrameError(f"too long: {len(text):,} bytes of JSON, {total:,} of tensors")
    return [_HEADER.pack(_MAGIC, len(text), total) + text, *payload]


def write_pieces(fd: int, pieces: Sequence[bytes], deadline: float | None = None) -> None:
    """Send what ``pack`` gave; errors as ``write_frame``."""
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            if deadline is not None:
                _wait(fd, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(fd, rest[:_PIECE]) :]
            except BlockingIOError:
                _wait(fd, select.POLLOUT, deadline)


def _read_exactly(fd: int, length: int, deadline: float | None) -> bytearray:
    data = bytearray()
    while len(data) < length:
        if deadline is not None:
            _wait(fd, select.POLLIN, deadline)
        try:
            piece = os.read(fd, min(length - len(data), _PIECE))
        except BlockingIOError:
            _wait(fd, select.POLLIN, deadline)
            continue
        if not piece:
            raise EndOfStreamError("end of stream")
        data += piece
    return data


def _wait(fd: int, event: int, deadline: float | None) -> None:
    poll = select.poll()
    poll.register(fd, event)
    left = None if deadline is None else max(0, math.ceil((deadline - time.monotonic()) * 1000))
    if not poll.poll(left):
        raise TimeoutError("the deadline passed")


def _listed(entries: Any) -> list[tuple[str, str, list[int], int]]:
    """Name, dtype, shape and bytes of each tensor that a frame lists."""
    if not isinstance(entries, list):
        raise FrameError("no list of tensors")
    listed: dict[str, tuple[str, str, list[int], int]] = {}
    for entry in entries:
        if not isinstance(entry, dict) or entry.keys() != {"name", "dtype", "shape"}:
            raise FrameError("a tensor without name, dtype and shape")
        name, dtype, shape = entry["name"], entry["dtype"], entry["shape"]
        if not isinstance(name, str) or name in listed:
            raise FrameError("a tensor without a name of its own")
        if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
            raise FrameError(f"unknown dtype {_short(dtype)}")
        if not _possible(shape):
            raise FrameError(f"a tensor of shape {_short(shape)}")
        listed[name] = (name, dtype, shape, math.prod(shape) * ITEM_SIZES[dtype])
    return list(listed.values())


def _possible(shape: Any) -> bool:
    """Whether torch can make it; strides of empty tensors count too, which overflow otherwise."""
    return (
        isinstance(shape, list)
        and len(shape) <= MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size <= MAX_PAYLOAD for size in shape)
        and math.prod(max(size, 1) for size in shape) <= MAX_PAYLOAD
    )


def _tensor(data: bytearray, dtype: str, shape: list[int]) -> Tensor:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=kind).reshape(shape)


def _plain(name: Any, tensor: Any) -> tuple[str, list[int], bytes]:
    """Dtype, shape and bytes of a tensor, whatever its strides and device."""
    import torch

    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise FrameError(f"{_short(name)}: {type(tensor).__name__} is no tensor")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_SIZES or tensor.layout is not torch.strided or tensor.is_nested:
        raise FrameError(f"{_short(name)}: no frame holds {dtype}, {tensor.layout}")
    shape = list(tensor.shape)
    if not _possible(shape):
        raise FrameError(f"{_short(name)}: a tensor of shape {_short(shape)}")
    try:
        plain = tensor.detach().cpu().resolve_neg().contiguous()
        is_plain = plain.is_contiguous() and plain.dtype is tensor.dtype and list(plain.shape) == shape
        size, address = math.prod(shape) * ITEM_SIZES[dtype], plain.data_ptr()
    except Exception as err:  # whatever a subclass, a mode or another device may raise
        raise FrameError(f"{_short(name)}: {type(tensor).__name__} that cannot be read") from err
    if not is_plain or (size and not address):
        raise FrameError(f"{_short(name)}: {type(tensor).__name__} without data")
    return dtype, shape, ctypes.string_at(address, size) if size else b""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
