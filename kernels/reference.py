"""Torch references of the kernels: plain loops, in float32 or float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lorakeet.kernels.rank_rows import RankRows


def add_lora(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    rank_rows: RankRows,
    slice_sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """y[t] · (1 + b[magnitudes[t]]) + Σ_j h_j · b[rows[j]], h_j = scales[j] · a[rows[j]] · x[t] +
    offsets[j], j in the token's own range, slice by slice: (T, out) in `dtype`."""
    total = y.to(dtype, copy=True)
    for token in range(len(y)):
        magnitude = int(rank_rows.magnitudes[token])
        if magnitude >= 0:
            total[token] *= 1 + b[magnitude].to(dtype)
        own = slice(int(rank_rows.first[token]), int(rank_rows.last[token]))
        rows = rank_rows.rows[own].long()
        for part, weights, columns in zip(
            a,
            torch.split(b[rows], list(slice_sizes), 1),
            torch.split(total[token], list(slice_sizes)),
            strict=True,
        ):
            h = part[rows].to(dtype) @ x[token].to(dtype)
            h = h * rank_rows.scales[own] + rank_rows.offsets[own]
            columns += h @ weights.to(dtype)
    return total


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    rank_rows: RankRows,
    slice_sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    y = x.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        y += bias.to(dtype)
    return add_lora(y, x, a, b, rank_rows, slice_sizes, dtype)


def embedding_lora(
    y: Tensor,
    token_ids: Tensor,
    a: Tensor,
    b: Tensor,
    rank_rows: RankRows,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    one_hot = torch.nn.functional.one_hot(token_ids, a.shape[1])
    return add_lora(y, one_hot, a[None], b, rank_rows, [y.shape[1]], dtype)


def _summed(y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.to(dtype).sum(0) if y.dim() == 3 else y.to(dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def add_rms_norm(
    y: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Normed and total, in `dtype`; total is rounded to residual's in between."""
    total = _summed(y, dtype) + residual.to(dtype)
    total = total.to(residual.dtype).to(dtype)
    return _rms_norm(total, weight.to(dtype), eps), total


def silu_mul(gate_up: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    gate, up = _summed(gate_up, dtype).chunk(2, dim=1)
    return gate * gate.sigmoid() * up


def rotate_heads(
    qkv: Tensor,
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
    parts = torch.split(_summed(qkv, dtype), sizes, dim=1)
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
