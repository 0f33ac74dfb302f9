"""The rank rows of a pass: the shape in which every LoRA kernel gets its work.

Nothing here needs Triton, which some CPU platforms do not have.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int32]

MIN_ROOM = 256  # rows that a list has room for at least: kernels read ahead
_ALIGNMENT = 4  # int32; 16 bytes: Triton compiles other code for tensors that start elsewhere


@dataclass(frozen=True)
class SlotRows:
    """What one slot of the pool lists for one group: J rows of the pool."""

    rows: Ints  # (J,)
    scales: NDArray[np.float32]  # (J,) factor on A x
    offsets: NDArray[np.float32]  # (J,) added to that
    magnitude: int  # the row of DoRA's magnitudes; -1: none, as where J is 0


@dataclass(frozen=True)
class RankRows:
    """The rows of all slots in a pass, slot after slot; each token owns a range of the list.

    A token's delta is Σ_j h_j B[rows[j]] over its range, h_j = scales[j] A[rows[j]] x + offsets[j].
    A token without an adapter owns an empty range. T tokens, room for at least `count` rows.
    """

    order: Tensor  # (T,) int32, tokens by slot: neighbours share rows
    first: Tensor  # (T,) int32, by token
    last: Tensor  # (T,) int32, by token; one past its last row
    magnitudes: Tensor  # (T,) int32, by token: the row of its magnitudes, or -1
    count: Tensor  # (1,) int32, rows in the list; 0: in this layer they are all zeros
    rows: Tensor  # (J,) int32; what lies past `count` may be anything
    scales: Tensor  # (J,) float32
    offsets: Tensor  # (J,) float32
    width: int  # the most rows that a token can own


@dataclass(frozen=True, eq=False)
class RankRowArrays:
    """`RankRows` on the host."""

    order: Ints
    first: Ints
    last: Ints
    magnitudes: Ints
    rows: Ints
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32]


def list_rank_rows(slots: Ints, rows_of: Callable[[int], SlotRows]) -> RankRowArrays:
    """`slots`: (T,) the slot of each token, 0 for none; `rows_of`: what a slot lists."""
    distinct, owner = np.unique(slots, return_inverse=True)
    empty = SlotRows(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32), -1)
    listed = [rows_of(slot) if slot else empty for slot in distinct.tolist()]
    ends = np.cumsum([len(one.rows) for one in listed])
    starts = ends - [len(one.rows) for one in listed]
    magnitudes = np.array([one.magnitude for one in listed])
    return RankRowArrays(
        order=np.argsort(slots, kind="stable").astype(np.int32),
        first=starts[owner].astype(np.int32),
        last=ends[owner].astype(np.int32),
        magnitudes=magnitudes[owner].astype(np.int32),
        rows=np.concatenate([one.rows for one in listed]),
        scales=np.concatenate([one.scales for one in listed]),
        offsets=np.concatenate([one.offsets for one in listed]),
    )


def pack(arrays: RankRowArrays, room: int) -> Ints:
    """All of it in one int32 buffer, for a single copy; `room`: rows that the list has room for."""
    num_rows = len(arrays.rows)
    assert num_rows <= room
    num_tokens = len(arrays.order)
    values = np.zeros(packed_size(num_tokens, room), np.int32)
    by_token, by_row, count = _places(num_tokens, room)
    fields = (arrays.order, arrays.first, arrays.last, arrays.magnitudes)
    for start, field in zip(by_token, fields, strict=True):
        values[start : start + num_tokens] = field
    by_row_fields = (arrays.rows, arrays.scales.view(np.int32), arrays.offsets.view(np.int32))
    for start, field in zip(by_row, by_row_fields, strict=True):
        values[start : start + num_rows] = field
    values[count] = num_rows
    return values


def packed_size(num_tokens: int, room: int) -> int:
    return 4 * _aligned(num_tokens) + 3 * _aligned(room) + _ALIGNMENT


def unpack(values: Tensor, num_tokens: int, room: int, width: int) -> RankRows:
    """The views of a buffer laid out by `pack`; `width`: of `RankRows`."""
    by_token, by_row, count = _places(num_tokens, room)
    order, first, last, magnitudes = (values[at : at + num_tokens] for at in by_token)
    rows, scales, offsets = (values[at : at + room] for at in by_row)
    return RankRows(
        order=order,
        first=first,
        last=last,
        magnitudes=magnitudes,
        count=values[count : count + 1],
        rows=rows,
        scales=scales.view(torch.float32),
        offsets=offsets.view(torch.float32),
        width=width,
    )


def _places(num_tokens: int, room: int) -> tuple[list[int], list[int], int]:
    """Where the arrays by token start, those by row, and the count."""
    tokens, rows = _aligned(num_tokens), _aligned(room)
    first = 4 * tokens
    return [i * tokens for i in range(4)], [first + i * rows for i in range(3)], first + 3 * rows


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
