"""Torch references of the kernels: plain loops, in float32 or float64, with the same signatures."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lorakeet.kernels.segments import Delta, Segments


class _Segment(NamedTuple):
    positions: slice  # its sorted positions
    tokens: Tensor  # token row of each
    rows: Tensor  # pool rows of its adapter, as many as the rank
    scaling: float


def _segments(segments: Segments, ranks: Tensor, row_table: Tensor) -> Iterator[_Segment]:
    """The segments that have work, one by one."""
    for start, length, slot, scaling in zip(
        segments.starts.tolist(),
        segments.lengths.tolist(),
        segments.weight_indices.tolist(),
        segments.scalings.tolist(),
        strict=True,
    ):
        rank = int(ranks[slot])
        if slot == 0 or length == 0 or rank == 0:
            continue
        positions = slice(start, start + length)
        tokens = segments.permutation[positions].long()
        yield _Segment(positions, tokens, row_table[slot, :rank].long(), scaling)


def _unset(segments: Segments, slices: int, row_table: Tensor, dtype: torch.dtype) -> Tensor:
    shape = (1, segments.permutation.shape[0], slices, row_table.shape[1])
    return torch.full(shape, torch.nan, dtype=dtype, device=row_table.device)


def sgemm_lora_a(
    x: Tensor,
    a: Tensor,
    segments: Segments,
    ranks: Tensor,
    row_table: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(1, P, slices, R) in `dtype`; NaN past the rank and at positions in no segment."""
    h = _unset(segments, a.shape[0], row_table, dtype)
    for segment in _segments(segments, ranks, row_table):
        inputs = x[segment.tokens].to(dtype)
        for index in range(a.shape[0]):
            weights = a[index, segment.rows].to(dtype)
            h[0, segment.positions, index, : len(segment.rows)] = inputs @ weights.T
    return h


def embedding_lora_a(
    token_ids: Tensor,
    a: Tensor,
    segments: Segments,
    ranks: Tensor,
    row_table: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(1, P, 1, R) in `dtype`; NaN past the rank and at positions in no segment."""
    h = _unset(segments, 1, row_table, dtype)
    for segment in _segments(segments, ranks, row_table):
        columns = a[segment.rows][:, token_ids[segment.tokens]]
        h[0, segment.positions, 0, : len(segment.rows)] = columns.T.to(dtype)
    return h


def _expand(
    h: Tensor,
    b: Tensor,
    segments: Segments,
    ranks: Tensor,
    row_table: Tensor,
    y: Tensor,
    sizes: list[int],
    dtype: torch.dtype,
) -> None:
    for segment in _segments(segments, ranks, row_table):
        sums = h[:, segment.positions, :, : len(segment.rows)].to(dtype).sum(0)
        slices = torch.split(b[segment.rows].to(dtype), sizes, dim=1)
        deltas = [sums[:, index] @ weights for index, weights in enumerate(slices)]
        delta = segment.scaling * torch.cat(deltas, dim=1)
        y[segment.tokens] = (y[segment.tokens].to(dtype) + delta).to(y.dtype)


def sgemm_lora_b(
    h: Tensor,
    b: Tensor,
    segments: Segments,
    ranks: Tensor,
    row_table: Tensor,
    y: Tensor,
    dtype: torch.dtype = torch.float32,
) -> None:
    _expand(h, b, segments, ranks, row_table, y, [y.shape[1]], dtype)


def qkv_lora_b(
    h: Tensor,
    b: Tensor,
    segments: Segments,
    ranks: Tensor,
    row_table: Tensor,
    y: Tensor,
    q_size: int,
    kv_size: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    _expand(h, b, segments, ranks, row_table, y, [q_size, kv_size, kv_size], dtype)


def gate_up_lora_b(
    h: Tensor,
    b: Tensor,
    segments: Segments,
    ranks: Tensor,
    row_table: Tensor,
    y: Tensor,
    dtype: torch.dtype = torch.float32,
) -> None:
    _expand(h, b, segments, ranks, row_table, y, [y.shape[1] // 2] * 2, dtype)


def _added(y: Tensor, delta: Delta | None, sizes: list[int], dtype: torch.dtype) -> Tensor:
    total = y.to(dtype, copy=True)
    if delta is not None:
        block = (delta.segments, delta.ranks, delta.row_table)
        _expand(delta.h, delta.b, *block, total, sizes, dtype)
    return total


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def add_rms_norm(
    y: Tensor,
    delta: Delta | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Normed and total, in `dtype`; total is rounded to residual's in between."""
    total = _added(y, delta, [y.shape[1]], dtype) + residual.to(dtype)
    total = total.to(residual.dtype).to(dtype)
    return _rms_norm(total, weight.to(dtype), eps), total


def silu_mul(gate_up: Tensor, delta: Delta | None, dtype: torch.dtype = torch.float32) -> Tensor:
    size = gate_up.shape[1] // 2
    gate, up = _added(gate_up, delta, [size, size], dtype).chunk(2, dim=1)
    return gate * gate.sigmoid() * up


def rotate_heads(
    qkv: Tensor,
    delta: Delta | None,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of `rotate_and_write`, in `dtype`: (T, heads, head_dim) each."""
    head_dim = cos.shape[-1]
    sizes = [count * head_dim for count in (num_heads, num_kv_heads, num_kv_heads)]
    parts = torch.split(_added(qkv, delta, sizes, dtype), sizes, dim=1)
    q, k, v = (part.reshape(len(part), -1, head_dim) for part in parts)
    if norms is not None:
        q = _rms_norm(q, norms[0].to(dtype), norms[2])
        k = _rms_norm(k, norms[1].to(dtype), norms[2])
    q, k = (x * cos + x.roll(head_dim // 2, dims=-1) * sin for x in (q, k))
    return q, k, v


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    num_decodes: int,
    max_query_len: int,
    max_context_len: int,
    scale: float,
    sliding_window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(T, heads, head_dim) in `dtype`: one softmax a query, over the keys that it sees."""
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    group = q.shape[1] // k_cache.shape[2]
    block_size = k_cache.shape[1]
    starts = query_starts.tolist()
    for sequence, context in enumerate(context_lens.tolist()):
        keys = torch.arange(context, device=q.device)
        blocks, offsets = block_tables[sequence, keys // block_size].long(), keys % block_size
        k = k_cache[blocks, offsets].to(dtype).repeat_interleave(group, dim=1)
        v = v_cache[blocks, offsets].to(dtype).repeat_interleave(group, dim=1)
        first, end = starts[sequence], starts[sequence + 1]
        for row in range(first, end if context else first):
            last = context - (end - first) + (row - first)
            low = 0 if sliding_window is None else max(0, last - sliding_window + 1)
            scores = torch.einsum("hd,khd->hk", q[row].to(dtype), k[low : last + 1]) * scale
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[low : last + 1])
    return out
