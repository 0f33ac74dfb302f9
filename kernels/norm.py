# mypy: allow-untyped-decorators
"""Residual sum and RMSNorm in one pass over the rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorakeet.kernels.partial import load_sum, parts_of
from lorakeet.kernels.sizes import power_of_two


@triton.jit
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    y,
    residual,
    weight,
    total,
    normed,
    part_stride,
    y_stride,
    size,
    eps,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    in_row = n < size
    values = load_sum(y + token * y_stride + n, part_stride, in_row, PARTS)
    values += tl.load(residual + token * size + n, mask=in_row, other=0.0).to(tl.float32)
    rounded = values.to(total.dtype.element_ty)
    tl.store(total + token * size + n, rounded, mask=in_row)
    values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    scale = tl.load(weight + n, mask=in_row, other=0.0).to(tl.float32)
    result = values * factor * scale
    tl.store(normed + token * size + n, result.to(normed.dtype.element_ty), mask=in_row)


def add_rms_norm(y: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Semantics: total = residual + y; normed = total / rms(total) · weight.

    y: (T, size), or its parts; residual: (T, size), contiguous; weight: (size,). Returns normed and
    total, of residual's dtype; sums are float32, total is rounded before it is normed.
    """
    parts = parts_of(y)
    assert (parts.num_rows, parts.size) == residual.shape
    assert residual.is_contiguous()
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    _add_norm_kernel[(parts.num_rows,)](
        y,
        residual,
        weight,
        total,
        normed,
        parts.stride,
        parts.row_stride,
        parts.size,
        eps,
        PARTS=parts.num_parts,
        BLOCK_N=power_of_two(parts.size),
        num_warps=4,
    )
    return normed, total
