"""The index work of the torch backend, done once in a pass for all layers that are alike."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.lora.batch import LoRABatch
from lorakeet.lora.pool import LayerWeights
from lorakeet.models.sparse import pair_pattern

Ints = NDArray[np.int64]


_RUN = 32  # adjacent rows of one adapter from which dense products are the faster way


@dataclass(frozen=True)
class Run:
    """Adjacent token rows of one adapter, `start` to `stop`, as a prompt has them."""

    start: int
    stop: int
    rows: Tensor  # (rank,) int64, rows of the pool
    factors: Tensor | None  # (slices * rank,) float32, on A x; None: all are 1
    offsets: Tensor | None  # (slices * rank,) float32, added to that; None: all are 0
    magnitude: int | None  # row of the pool


@dataclass(frozen=True)
class Magnitudes:
    """M of the token rows that get a delta: what of the base layer's output is part of it."""

    positions: Tensor  # (M,) int64, among those that get a delta; there may be equal ones
    tokens: Tensor  # (M,) int64
    rows: Tensor  # (M,) int64, rows of the pool


@dataclass(frozen=True)
class Pairs:
    """The N pairs (token row, rank row) of the other token rows, in token order.

    B's outputs are cut into equal chunks, each inside one slice, so that one embedding bag serves
    all slices: a bag holds the rank rows of one token for one chunk.
    """

    tokens: Tensor | None  # (U,) int64, token rows that get a delta, ascending; None: all
    pair_tokens: Tensor  # (N,) int64
    pair_rows: Tensor  # (N,) int64, rows of the pool
    widened_rows: Tensor | None  # int64, rows of the pool to copy as float32; None: use in place
    pattern: Tensor  # CSR (T, slices * rows): a token's rows of slice 0, of slice 1 …; all zero
    num_chunks: int
    bag_rows: Tensor  # int32, entries of the bags (token, chunk), rows of B cut into chunks
    bag_starts: Tensor  # (U * chunks,) int32
    bag_values: Tensor | None  # int64, which value of the pattern weighs the entry; None: its own
    bag_factors: Tensor | None  # float32, on that weight; None: all are 1
    bag_offsets: Tensor | None  # float32, added to that; None: all are 0
    magnitudes: Magnitudes | None


@dataclass(frozen=True)
class Plan:
    """What a layer adds; a token row is in one run, or in pairs, or has no delta."""

    runs: tuple[Run, ...]
    pairs: Pairs | None
    dtype: torch.dtype  # of the products: float32 for narrower weights


@dataclass(frozen=True)
class _Rows:
    """Token rows with an adapter, ascending, on the host."""

    tokens: Ints
    slots: Ints

    def __getitem__(self, index: Ints | NDArray[np.bool_]) -> "_Rows":
        return _Rows(self.tokens[index], self.slots[index])


@dataclass(frozen=True)
class _Work:
    """A pass's rows: the first ones of the runs, how long these are, and all the others."""

    runs: _Rows
    lengths: Ints
    others: _Rows


def get_plan(weights: LayerWeights, batch: LoRABatch, num_tokens: int) -> Plan | None:
    """The pass's plan for a layer like this one; None when no row's adapter changes it."""
    work = batch.cached("work", lambda: _get_work(batch.slots.numpy()))
    run_ranks = weights.ranks[work.runs.slots]
    ranks = weights.ranks[work.others.slots]
    slices = weights.slice_sizes if len(weights.slice_sizes) > 1 else None

    def make() -> Plan | None:
        runs = tuple(_make_runs(weights, work, run_ranks))
        pairs = _make_pairs(weights, work.others, ranks, num_tokens) if ranks.any() else None
        dtype = torch.promote_types(weights.b.dtype, torch.float32)
        return Plan(runs, pairs, dtype) if runs or pairs is not None else None

    return batch.cached((slices, run_ranks.tobytes(), ranks.tobytes()), make)


def _get_work(slots: NDArray[np.int32]) -> _Work:
    tokens = np.flatnonzero(slots)
    rows = _Rows(tokens=tokens, slots=slots[tokens].astype(np.int64))
    goes_on = (np.diff(rows.tokens) == 1) & (np.diff(rows.slots) == 0)
    starts = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    lengths = np.diff(np.append(starts, len(rows.tokens)))
    is_run = lengths >= _RUN
    return _Work(rows[starts[is_run]], lengths[is_run], rows[~np.repeat(is_run, lengths)])


def _make_runs(weights: LayerWeights, work: _Work, ranks: NDArray[np.int32]) -> Iterator[Run]:
    runs, num_slices = work.runs, len(weights.slice_sizes)
    for start, length, slot, rank in zip(
        runs.tokens.tolist(),
        work.lengths.tolist(),
        runs.slots.tolist(),
        ranks.tolist(),
        strict=True,
    ):
        if rank == 0:
            continue
        magnitude_row = int(weights.tables.magnitude_rows[slot])
        yield Run(
            start=start,
            stop=start + length,
            rows=torch.from_numpy(weights.tables.rows[slot, :rank]).long(),
            factors=_unless(1, np.tile(weights.tables.scales[slot, :rank], num_slices)),
            offsets=_unless(0, np.tile(weights.tables.offsets[slot, :rank], num_slices)),
            magnitude=magnitude_row if magnitude_row >= 0 else None,
        )


def _make_pairs(
    weights: LayerWeights, rows: _Rows, ranks: NDArray[np.int32], num_tokens: int
) -> Pairs:
    """`ranks`: of each of `rows`."""
    row_of_pair = np.repeat(np.arange(len(ranks)), ranks)
    pair_tokens = rows.tokens[row_of_pair]
    nth_rank = _ranges(np.zeros_like(ranks), ranks)
    entries = rows.slots[row_of_pair], nth_rank
    pair_rows = weights.tables.rows[entries].astype(np.int64)
    used, widened_rows, num_rows = pair_rows, None, weights.b.shape[0]
    if weights.b.dtype.itemsize < 4:
        widened_rows, used = np.unique(pair_rows, return_inverse=True)
        num_rows = len(widened_rows)

    counts = np.bincount(pair_tokens, minlength=num_tokens)
    num_slices = len(weights.slice_sizes)
    slice_of_chunk = _slice_of_chunk(weights.slice_sizes)
    num_chunks = len(slice_of_chunk)
    pairs, chunks = _repeat_pairs(counts, num_chunks)
    values = None
    if num_chunks > num_slices:  # a token's values lie slice by slice, its bags chunk by chunk
        own_count = counts[pair_tokens[pairs]]
        first_pair = (np.cumsum(counts) - counts)[pair_tokens[pairs]]
        values = pairs + (num_slices - 1) * first_pair + slice_of_chunk[chunks] * own_count
    factors = weights.tables.scales[entries][pairs]
    offsets = weights.tables.offsets[entries][pairs]
    dtype = torch.promote_types(weights.b.dtype, torch.float32)
    return Pairs(
        tokens=None if counts.all() else torch.from_numpy(np.flatnonzero(counts)),
        pair_tokens=torch.from_numpy(pair_tokens),
        pair_rows=torch.from_numpy(pair_rows),
        widened_rows=None if widened_rows is None else torch.from_numpy(widened_rows),
        pattern=_pattern(used, num_rows, counts, num_slices, dtype),
        num_chunks=num_chunks,
        bag_rows=torch.from_numpy((used[pairs] * num_chunks + chunks).astype(np.int32)),
        bag_starts=torch.from_numpy(_bounds(np.repeat(counts[counts > 0], num_chunks))[:-1]),
        bag_values=None if values is None else torch.from_numpy(values),
        bag_factors=_unless(1, factors),
        bag_offsets=_unless(0, offsets),
        magnitudes=_make_magnitudes(weights, rows[ranks > 0], counts),
    )


def _make_magnitudes(weights: LayerWeights, rows: _Rows, counts: Ints) -> Magnitudes | None:
    """`rows`: those whose adapter changes the layer; `counts`: pairs of each token."""
    magnitude_rows = weights.tables.magnitude_rows[rows.slots].astype(np.int64)
    has_magnitude = magnitude_rows >= 0
    if not has_magnitude.any():
        return None
    rows = rows[has_magnitude]
    return Magnitudes(
        positions=torch.from_numpy((np.cumsum(counts > 0) - 1)[rows.tokens]),
        tokens=torch.from_numpy(rows.tokens),
        rows=torch.from_numpy(magnitude_rows[has_magnitude]),
    )


def _unless(neutral: float, values: NDArray[np.float32]) -> Tensor | None:
    return None if (values == neutral).all() else torch.from_numpy(values)


def _pattern(
    rows: Ints, num_rows: int, counts: Ints, num_slices: int, dtype: torch.dtype
) -> Tensor:
    """`rows`: the row of each pair, out of `num_rows`; `counts`: pairs of each token."""
    pairs, slices = _repeat_pairs(counts, num_slices)
    return pair_pattern(
        torch.from_numpy(_bounds(counts * num_slices)),
        torch.from_numpy((slices * num_rows + rows[pairs]).astype(np.int32)),
        num_slices * num_rows,
        dtype,
    )


def _slice_of_chunk(slice_sizes: tuple[int, ...]) -> Ints:
    """Chunks are the largest equal parts of which all slices are made."""
    size = math.gcd(*slice_sizes)
    return np.repeat(np.arange(len(slice_sizes)), [part // size for part in slice_sizes])


def _repeat_pairs(counts: Ints, times: int) -> tuple[Ints, Ints]:
    """Each token's pairs `times` times over, token by token: the pair, and which time it is."""
    lengths = np.repeat(counts, times)
    pairs = _ranges(np.repeat(np.cumsum(counts) - counts, times), lengths)
    return pairs, np.repeat(np.tile(np.arange(times), len(counts)), lengths)


def _ranges(starts: NDArray[np.integer], lengths: NDArray[np.integer]) -> Ints:
    """start, start + 1 … `length` times, one run after the other."""
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(lengths.sum(), dtype=np.int64)


def _bounds(lengths: Ints) -> NDArray[np.int32]:
    """Where each of the adjacent runs starts, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
