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


@dataclass(frozen=True)
class SlotRows:
    """What one slot of the pool lists for one group: J rows of the pool."""

    rows: Ints  # (J,)
    scales: NDArray[np.float32]  # (J,) factor on A x
    offsets: NDArray[np.float32]  # (J,) added to that
    magnitude: int  # the row of DoRA's magnitudes; -1: none


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
    count: Tensor  # (1,) int32
    rows: Tensor  # (J,) int32; what lies past `count` may be anything
    scales: Tensor  # (J,) float32
    offsets: Tensor  # (J,) float32
    width: int  # the most rows that a token can own


@dataclass(frozen=True)
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


def to_device(
    arrays: RankRowArrays, room: int, width: int, device: torch.device | str
) -> RankRows:
    """`room`: rows that the list has room for, if there are fewer; `width`: of `RankRows`."""

    def put(values: NDArray[np.generic], size: int = 0) -> Tensor:
        padded = np.pad(values, (0, max(size - len(values), 0)))
        return torch.from_numpy(padded).to(device, non_blocking=True)

    return RankRows(
        order=put(arrays.order),
        first=put(arrays.first),
        last=put(arrays.last),
        magnitudes=put(arrays.magnitudes),
        count=put(np.array([len(arrays.rows)], np.int32)),
        rows=put(arrays.rows, room),
        scales=put(arrays.scales, room),
        offsets=put(arrays.offsets, room),
        width=width,
    )
