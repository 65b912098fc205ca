"""One value for every row at or after the count."""

import torch
import triton
import triton.language as tl

MOST_PLAIN_ROWS = 4096


@triton.jit
def _fill_padded_rows_kernel(out, count, width, value, stride, BLOCK_COLS: tl.constexpr):  # noqa: N803
    row = tl.program_id(0)
    if row < tl.load(count):
        return
    columns = tl.arange(0, BLOCK_COLS)
    tl.store(out + row * stride + columns, value, mask=columns < width)


def _fill_padded_rows(out: torch.Tensor, count: torch.Tensor, value: float) -> None:
    rows, width = out.shape
    block = triton.next_power_of_2(width)
    if rows <= MOST_PLAIN_ROWS:
        out[torch.arange(rows) >= count] = value
        return
    _fill_padded_rows_kernel[(rows,)](out, count, width, value, out.stride(0), BLOCK_COLS=block)
