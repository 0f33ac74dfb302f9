"""Causal attention over the paged KV cache, with an optional sliding window.

What is the same for all layers of a pass (masks, gather indices) is worked out once, in a
TorchAttention; each layer calls it. A token at position p sees the positions from
max(0, p - window + 1) to p of its own sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, scaled_dot_product_attention

from lorakeet.models.batch import ForwardBatch
from lorakeet.models.kv_cache import LayerCache
from lorakeet.models.sparse import pair_pattern, sampled_products


@dataclass(frozen=True)
class _Decodes:
    """N sequences with one query each. A pair is one query head and one position that it sees.

    Keys and values are read where they lie: nothing is copied, no sequence is padded to another's
    length, and nothing that another sequence left in a block is ever read. Those of 16 bits are
    gathered and widened.
    """

    gathered: Tensor | None  # int64 places in the cache; None: pairs name the places themselves
    pattern: Tensor  # CSR (N * heads, places * kv_heads), the pairs of each query head
    bag_rows: Tensor  # (pairs,) int32, the same columns
    bag_starts: Tensor  # (N * heads,) int32
    scores: Tensor  # (pairs,) int64, where each score goes in (N * heads, longest)
    longest: int


@dataclass(frozen=True)
class _Prefill:
    """One sequence's chunk: token rows `start` to `stop`, over C gathered cache rows."""

    start: int
    stop: int
    rows: Tensor | None  # (C,) int64 places in the cache; None: the chunk itself is all there is
    mask: Tensor | None  # (chunk, C), 0 or -inf; None: causal


class TorchAttention:
    """The attention of one pass on the CPU: all decodes at once, pair by pair; each prefill chunk
    in a dense product of its own.
    """

    def __init__(self, batch: ForwardBatch) -> None:
        self._batch = batch
        self._kv_slots = batch.kv_slots
        self._written: Tensor | None = None  # rows that are not padding; None: all
        if (batch.kv_slots < 0).any():
            self._written = (batch.kv_slots >= 0).nonzero()[:, 0]
            self._kv_slots = batch.kv_slots[self._written]
        self._query_starts: list[int] = batch.query_starts.tolist()
        self._context_lens: list[int] = batch.context_lens.tolist()
        self._plans: dict[int | None, tuple[_Decodes | None, list[_Prefill]]] = {}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, scale: float, window: int | None
    ) -> Tensor:
        """Write k and v (T, kv_heads, head_dim) to the cache; attend with q (T, heads, head_dim).

        Returns (T, heads, head_dim).
        """
        keys, values = cache.keys.flatten(0, 1), cache.values.flatten(0, 1)
        if self._written is not None:
            k, v = k[self._written], v[self._written]
        keys.index_copy_(0, self._kv_slots, k)
        values.index_copy_(0, self._kv_slots, v)
        decodes, prefills = self._plan(window, cache, q)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if decodes is not None:
            count = self._batch.num_decodes
            out[:count] = _attend_decodes(q[:count], keys, values, decodes, scale)
        for chunk in prefills:
            part = slice(chunk.start, chunk.stop)
            if chunk.rows is None:
                seen = k[part], v[part]
            else:
                seen = keys.index_select(0, chunk.rows), values.index_select(0, chunk.rows)
            out[part] = _attend_chunk(q[part], *seen, chunk.mask, scale)
        return out

    def _plan(
        self, window: int | None, cache: LayerCache, q: Tensor
    ) -> tuple[_Decodes | None, list[_Prefill]]:
        """Made at the first layer with this window, used by all that follow."""
        plan = self._plans.get(window)
        if plan is None:
            sequences = range(self._batch.num_decodes, len(self._context_lens))
            plan = (
                self._plan_decodes(window, cache, q),
                [self._plan_prefill(i, window, cache.block_size, q.dtype) for i in sequences],
            )
            self._plans[window] = plan
        return plan

    def _plan_decodes(self, window: int | None, cache: LayerCache, q: Tensor) -> _Decodes | None:
        count, heads = self._batch.num_decodes, q.shape[1]
        if count == 0:
            return None
        # padding has no context: it looks at one row of block 0, and nobody looks at its result
        lengths = self._batch.context_lens[:count, None].long().clamp(min=1)
        first = torch.zeros_like(lengths) if window is None else (lengths - window).clamp(min=0)
        longest = int(lengths.max())
        positions = first + torch.arange(longest if window is None else min(longest, window))
        visible = positions < lengths
        blocks = self._batch.block_tables[:count].long()
        rows = _cache_rows(blocks, torch.minimum(positions, lengths - 1), cache.block_size)
        num_blocks, block_size, kv_heads, _ = cache.keys.shape
        gathered, num_rows = None, num_blocks * block_size
        if q.dtype.itemsize < 4:
            gathered = rows[visible]
            num_rows = len(gathered)
            rows = (visible.flatten().cumsum(0) - 1).view_as(rows)
        kv_head = torch.arange(heads)[:, None] // (heads // kv_heads)
        columns = rows[:, None] * kv_heads + kv_head  # (N, heads, positions)
        wanted = visible[:, None].expand_as(columns)
        starts = torch.zeros(count * heads + 1, dtype=torch.int32)
        starts[1:] = wanted.sum(2).flatten().cumsum(0)
        bag_rows = columns[wanted].int()
        dtype = torch.promote_types(q.dtype, torch.float32)
        return _Decodes(
            gathered,
            pair_pattern(starts, bag_rows, num_rows * kv_heads, dtype),
            bag_rows,
            bag_starts=starts[:-1],
            scores=wanted.flatten().nonzero()[:, 0],
            longest=positions.shape[1],
        )

    def _plan_prefill(
        self, index: int, window: int | None, block_size: int, dtype: torch.dtype
    ) -> _Prefill:
        start, stop = self._query_starts[index], self._query_starts[index + 1]
        length = self._context_lens[index]
        first_query = length - (stop - start)
        first_key = 0 if window is None else max(0, first_query - window + 1)
        if first_query == 0 and (window is None or length <= window):
            return _Prefill(start, stop, rows=None, mask=None)
        queries = torch.arange(first_query, length)[:, None]
        positions = torch.arange(first_key, length)
        visible = positions <= queries
        if window is not None:
            visible &= positions > queries - window
        blocks = self._batch.block_tables[index, None].long()
        rows = _cache_rows(blocks, positions[None], block_size)[0] if first_query else None
        return _Prefill(start, stop, rows, _additive(visible, dtype))


def _cache_rows(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Where the tokens at `positions` (N, L) lie in the cache of (num_blocks * block_size) rows."""
    blocks = block_tables.gather(1, positions // block_size)
    return blocks * block_size + positions % block_size


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))


def _attend_decodes(
    q: Tensor, keys: Tensor, values: Tensor, plan: _Decodes, scale: float
) -> Tensor:
    """q: (N, heads, head_dim). Scores are padded for the softmax alone."""
    size, dtype = q.shape[-1], plan.pattern.dtype
    if plan.gathered is not None:
        keys = keys.index_select(0, plan.gathered).to(dtype)
        values = values.index_select(0, plan.gathered).to(dtype)
    queries = q.reshape(-1, size).to(dtype)
    scores = sampled_products(plan.pattern, queries, keys.view(-1, size), scale)
    padded = scores.new_full((len(queries) * plan.longest,), float("-inf"))
    padded.index_copy_(0, plan.scores, scores)
    weights = padded.view(-1, plan.longest).softmax(dim=1).view(-1).index_select(0, plan.scores)
    attended = embedding_bag(
        plan.bag_rows,
        values.view(-1, size),
        plan.bag_starts,
        mode="sum",
        per_sample_weights=weights,
    )
    return attended.view_as(q).to(q.dtype)


def _attend_chunk(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """q: (chunk, heads, head_dim); keys, values: (C, kv_heads, head_dim)."""
    chunk, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads

    def spread(x: Tensor) -> Tensor:  # a view: KV heads as the batch, repeated without a copy
        return x.transpose(0, 1)[:, None].expand(kv_heads, groups, -1, head_dim)

    attended = scaled_dot_product_attention(
        q.view(chunk, kv_heads, groups, head_dim).permute(1, 2, 0, 3),
        spread(keys),
        spread(values),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return attended.permute(2, 0, 1, 3).reshape(chunk, heads, head_dim)
