"""Frames on a pipe: what is sent comes out, and what is no frame is refused with a reason."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from repro.engines.sglang.worker import frames
from repro.engines.sglang.worker.frames import EndOfStreamError, FrameError, read_frame, write_frame


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", 0), os.fdopen(writer, "wb", 0):
        yield reader, writer


def through(pipe: tuple[int, int], message: dict[str, object], **tensors: Tensor) -> dict[str, Tensor]:
    """The tensors as they come out; the message is compared here."""
    sender = threading.Thread(target=write_frame, args=(pipe[1], message, tensors))
    sender.start()
    seen, came = read_frame(pipe[0])
    sender.join()
    assert seen == message
    assert list(came) == list(tensors)
    return came


def same(came: Tensor, sent: Tensor) -> bool:
    return came.dtype == sent.dtype and came.shape == sent.shape and came.tolist() == sent.tolist()


def header(json_length: int, payload_length: int, magic: bytes = b"MPAD") -> bytes:
    return struct.pack("<4sIQ", magic, json_length, payload_length)


def frame(value: object, payload: bytes = b"") -> bytes:
    text = json.dumps(value).encode()
    return header(len(text), len(payload)) + text + payload


def refusal(pipe: tuple[int, int], data: bytes) -> str:
    os.write(pipe[1], data)
    with pytest.raises(FrameError) as caught:
        read_frame(pipe[0])
    return str(caught.value)


@pytest.mark.parametrize("dtype", sorted(frames.ITEM_SIZES))
def test_every_dtype_comes_out_as_it_went_in(pipe: tuple[int, int], dtype: str) -> None:
    kind = getattr(torch, dtype)
    assert torch.empty(0, dtype=kind).itemsize == frames.ITEM_SIZES[dtype]
    sent = torch.tensor([[0, 1, 0], [3, 0, 100]]).to(kind)
    assert same(through(pipe, {"op": "x"}, a=sent)["a"], sent)


def test_special_values_keep_their_bits(pipe: tuple[int, int]) -> None:
    sent = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    came = through(pipe, {}, a=sent)["a"]
    assert came.view(torch.int32).tolist() == sent.view(torch.int32).tolist()


@pytest.mark.parametrize(
    "sent",
    [
        torch.empty(0, 5),
        torch.empty(3, 0, 2, dtype=torch.int32),
        torch.tensor(7),
        torch.tensor(True),
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(12)[1::3],
        torch.tensor([[1.0], [2.0]]).expand(2, 4),
        torch._neg_view(torch.tensor([1.0, -2.0])),
        torch.tensor([1.0], requires_grad=True),
        torch.nn.Parameter(torch.tensor([2.0])),
    ],
    ids=[
        "no rows",
        "no columns",
        "0-d",
        "0-d bool",
        "transposed",
        "strided",
        "expanded",
        "negated",
        "grad",
        "subclass",
    ],
)
def test_every_layout_comes_out_plain(pipe: tuple[int, int], sent: Tensor) -> None:
    came = through(pipe, {"n": 1}, a=sent)["a"]
    assert same(came, sent.detach())
    assert came.is_contiguous()
    assert not came.requires_grad
    came.add_(came) if came.dtype != torch.bool else came.logical_not_()  # it owns its memory


def test_several_tensors_keep_their_names_and_order(pipe: tuple[int, int]) -> None:
    tensors = {
        "b": torch.tensor([1]),
        "a": torch.tensor(2.0),
        "ä\n": torch.zeros(0, 1),
        "": torch.tensor([True]),
    }
    came = through(pipe, {"text": "ä\ud800\n", "deep": [{"x": None}]}, **tensors)
    assert all(same(came[name], tensors[name]) for name in tensors)


def test_a_frame_larger_than_the_pipe_comes_out_whole(pipe: tuple[int, int]) -> None:
    sent = torch.arange(700_000)
    assert torch.equal(through(pipe, {"text": "x" * 300_000}, a=sent)["a"], sent)


def test_a_read_takes_one_frame_and_no_byte_more(pipe: tuple[int, int]) -> None:
    write_frame(pipe[1], {"n": 1}, {"a": torch.tensor([5])})
    write_frame(pipe[1], {"n": 2}, {})
    os.write(pipe[1], b"rest")
    assert read_frame(pipe[0])[0] == {"n": 1}
    assert read_frame(pipe[0]) == ({"n": 2}, {})
    assert os.read(pipe[0], 100) == b"rest"


A = {"name": "a", "dtype": "int32", "shape": [2]}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (header(2, 0, b"HTTP") + b"{}", "wrong magic b'HTTP'"),
        (header((64 << 20) + 1, 0), "too long: 67,108,865 bytes of JSON, 0 of tensors"),
        (header(2, 2**63), "too long: 2 bytes of JSON, 9,223,372,036,854,775,808 of tensors"),
        (header(2, 0) + b"{]", "no JSON"),
        (header(2, 0) + b"\xff\xfe", "no JSON"),
        (header(20_000, 0) + b"[" * 20_000, "no JSON"),
        (frame([]), "no JSON object"),
        (frame({}), "no list of tensors"),
        (frame({"tensors": {}}), "no list of tensors"),
        (frame({"tensors": ["a"]}), "a tensor without name, dtype and shape"),
        (frame({"tensors": [{"name": "a"}]}), "a tensor without name, dtype and shape"),
        (frame({"tensors": [{**A, "name": 1}]}, bytes(8)), "a tensor without a name of its own"),
        (frame({"tensors": [A, A]}, bytes(16)), "a tensor without a name of its own"),
        (frame({"tensors": [{**A, "dtype": "complex64"}]}, bytes(16)), "unknown dtype 'complex64'"),
        (frame({"tensors": [{**A, "dtype": ["int32"]}]}, bytes(8)), "unknown dtype ['int32']"),
        (frame({"tensors": [{**A, "shape": [-2]}]}, bytes(8)), "a tensor of shape [-2]"),
        (frame({"tensors": [{**A, "shape": [-1, -2]}]}, bytes(8)), "a tensor of shape [-1, -2]"),
        (frame({"tensors": [{**A, "shape": [2.0]}]}, bytes(8)), "a tensor of shape [2.0]"),
        (frame({"tensors": [{**A, "shape": [True]}]}, bytes(4)), "a tensor of shape [True]"),
        (frame({"tensors": [{**A, "shape": 2}]}, bytes(8)), "a tensor of shape 2"),
        (
            frame({"tensors": [{**A, "shape": [0, 2**62, 4]}]}),
            "a tensor of shape [0, 4611686018427387904, 4]",
        ),
        (frame({"tensors": [{**A, "shape": [1] * 17}]}, bytes(4)), f"a tensor of shape {[1] * 17}"),
        (frame({"tensors": [A]}, bytes(7)), "tensors of 8 bytes in a payload of 7"),
        (frame({"tensors": [A]}, bytes(9)), "tensors of 8 bytes in a payload of 9"),
        (frame({"tensors": []}, bytes(1)), "tensors of 0 bytes in a payload of 1"),
    ],
)
def test_what_is_no_frame_is_refused_with_its_reason(pipe: tuple[int, int], data: bytes, reason: str) -> None:
    assert refusal(pipe, data) == reason


@pytest.mark.parametrize(
    "data", [b"", b"MPA", header(5, 0), header(5, 0) + b"{", frame({"tensors": [A]}, bytes(8))[:-1]]
)
def test_a_stream_that_ends_is_told_from_a_wrong_one(data: bytes) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", 0):
        with os.fdopen(writer, "wb", 0) as file:
            file.write(data)
        with pytest.raises(EndOfStreamError, match=r"^end of stream$"):
            read_frame(reader)


@pytest.mark.parametrize("data", [b"", b"MPAD", header(5, 0) + b"{"])
def test_a_read_ends_at_its_deadline(pipe: tuple[int, int], data: bytes) -> None:
    os.write(pipe[1], data)
    with pytest.raises(TimeoutError):
        read_frame(pipe[0], time.monotonic() + 0.05)


def test_a_write_ends_at_its_deadline(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    with pytest.raises(TimeoutError):
        write_frame(pipe[1], {}, {"a": torch.zeros(1_000_000)}, time.monotonic() + 0.05)


def test_a_deadline_that_is_kept_changes_nothing(pipe: tuple[int, int]) -> None:
    for fd in pipe:
        os.set_blocking(fd, False)
    sent, deadline = torch.arange(300_000), time.monotonic() + 60
    sender = threading.Thread(target=write_frame, args=(pipe[1], {"n": 1}, {"a": sent}, deadline))
    sender.start()
    message, tensors = read_frame(pipe[0], deadline)
    sender.join()
    assert message == {"n": 1}
    assert torch.equal(tensors["a"], sent)


def test_non_blocking_ends_without_a_deadline_wait(pipe: tuple[int, int]) -> None:
    for fd in pipe:
        os.set_blocking(fd, False)
    sent = torch.arange(300_000)
    assert torch.equal(through(pipe, {}, a=sent)["a"], sent)


@pytest.mark.parametrize(
    ("message", "tensors", "reason"),
    [
        ({"tensors": []}, {}, "'tensors' is the frame's own key"),
        ({"a": {1}}, {}, "no JSON: Object of type set is not JSON serializable"),
        ({}, {"a": [1]}, "'a': list is no tensor"),
        ({}, {1: torch.tensor(1)}, "1: Tensor is no tensor"),
        ({}, {"a": torch.tensor(1j)}, "'a': no frame holds complex64, torch.strided"),
        ({}, {"a": torch.tensor([1.0]).to_sparse()}, "'a': no frame holds float32, torch.sparse_coo"),
        ({}, {"a": torch.empty(1).expand(2, 1 << 30)}, "'a': a tensor of shape [2, 1073741824]"),
        ({}, {"a": torch.empty(0, 1 << 31)}, "'a': a tensor of shape [0, 2147483648]"),
    ],
)
def test_what_fits_no_frame_is_refused_before_a_byte_is_sent(
    pipe: tuple[int, int], message: dict[str, object], tensors: dict[str, Tensor], reason: str
) -> None:
    with pytest.raises(FrameError) as caught:
        write_frame(pipe[1], message, tensors)
    assert str(caught.value) == reason
    os.set_blocking(pipe[0], False)
    with pytest.raises(BlockingIOError):
        os.read(pipe[0], 1)


def test_a_tensor_without_data_is_refused(pipe: tuple[int, int]) -> None:
    class Hollow(Tensor):
        @staticmethod
        def __new__(cls) -> Hollow:
            return Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return args[0]

    for tensor, reason in (
        (Hollow(), "'a': Hollow without data"),
        (torch.empty(3, device="meta"), "'a': Tensor that cannot be read"),
    ):
        with pytest.raises(FrameError) as caught:
            write_frame(pipe[1], {}, {"a": tensor})
        assert str(caught.value) == reason


def test_more_than_the_limits_is_refused_by_the_sender(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MAX_PAYLOAD", 8)
    monkeypatch.setattr(frames, "MAX_JSON", 200)
    write_frame(pipe[1], {}, {"a": torch.tensor([1])})
    with pytest.raises(FrameError, match=r"^too long: \d+ bytes of JSON, 16 of tensors$"):
        write_frame(pipe[1], {}, {"a": torch.tensor([1, 2])})
    with pytest.raises(FrameError, match=r"^too long: \d+ bytes of JSON, 0 of tensors$"):
        write_frame(pipe[1], {"x": "y" * 200}, {})


def test_frames_need_no_torch_until_a_tensor_comes() -> None:
    import subprocess
    import sys

    code = (
        "import importlib.util, sys, os\n"
        "spec = importlib.util.spec_from_file_location('frames', sys.argv[1])\n"
        "frames = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(frames)\n"
        "reader, writer = os.pipe()\n"
        "frames.write_frame(writer, {'a': 1}, {})\n"
        "print(frames.read_frame(reader), 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, frames.__file__], capture_output=True, text=True, check=True
    )
    assert done.stdout == "({'a': 1}, {}) False\n"
