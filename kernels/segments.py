"""Runs of tokens that share a slot: the shape in which every LoRA kernel gets its work."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """P token rows in sorted order, cut into S segments of at most `block` rows each.

    Rows without an adapter are in no segment. Padding segments have weight index 0 and length 0:
    a kernel returns at once for them.
    """

    permutation: Tensor  # (P,) int32, token row at each sorted position
    starts: Tensor  # (S,) int32, first sorted position of the segment
    lengths: Tensor  # (S,) int32, rows in the segment, at most `block`
    weight_indices: Tensor  # (S,) int32, adapter slot of the segment
    scalings: Tensor  # (S,) float32, factor on the delta
    block: int


def build_segments(
    weight_indices: NDArray[np.int32], block: int, device: torch.device | str = "cpu"
) -> Segments | None:
    """Group token rows by slot. `weight_indices`: (T,) slot of each row, 0 for none.

    Returns None when no row has an adapter.
    """
    rows = np.flatnonzero(weight_indices)
    if rows.size == 0:
        return None
    permutation = rows[np.argsort(weight_indices[rows], kind="stable")]
    slots, counts = np.unique(weight_indices[rows], return_counts=True)
    segments_of_slot = -(-counts // block)
    slot_starts = np.cumsum(counts) - counts
    first_segment = np.cumsum(segments_of_slot) - segments_of_slot
    within = np.arange(segments_of_slot.sum()) - np.repeat(first_segment, segments_of_slot)
    starts = np.repeat(slot_starts, segments_of_slot) + within * block
    lengths = np.minimum(np.repeat(slot_starts + counts, segments_of_slot) - starts, block)

    def to_device(values: NDArray[np.generic], dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(values.astype(dtype)).to(device, non_blocking=True)

    return Segments(
        permutation=to_device(permutation, np.int32),
        starts=to_device(starts, np.int32),
        lengths=to_device(lengths, np.int32),
        weight_indices=to_device(np.repeat(slots, segments_of_slot), np.int32),
        scalings=torch.ones(len(starts), dtype=torch.float32, device=device),
        block=block,
    )
