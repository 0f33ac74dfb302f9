"""Runs of tokens that share a slot: the shape in which every LoRA kernel gets its work.

Nothing here needs Triton, which some CPU platforms do not have.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """P token rows in sorted order, cut into S segments of at most `block` rows each.

    Rows without an adapter are in no segment, or, for fused kernels, in segments of slot 0.
    Padding segments have weight index 0 and length 0: a kernel returns at once for them.
    """

    permutation: Tensor  # (P,) int32, token row at each sorted position
    starts: Tensor  # (S,) int32, first sorted position of the segment
    lengths: Tensor  # (S,) int32, rows in the segment, at most `block`
    weight_indices: Tensor  # (S,) int32, adapter slot of the segment
    scalings: Tensor  # (S,) float32, factor on the delta
    block: int


@dataclass(frozen=True)
class Delta:
    """A LoRA delta that is still to be added, by the kernel that reads y next.

    `y[permutation[p]] += scaling · Σ_j<rank h[:, p, slice, j] · b[row_table[slot, j]]`.
    Every row of y is in exactly one of the segments; rows without an adapter have slot 0.
    """

    h: Tensor  # (splits, P, slices, R) float32, from `sgemm_lora_a`
    b: Tensor  # (rows, out), slices side by side
    segments: Segments
    ranks: Tensor  # (slots,) int32, 0 for slot 0
    row_table: Tensor  # (slots, R) int32


def build_segments(
    weight_indices: NDArray[np.int32],
    block: int,
    device: torch.device | str = "cpu",
    base_rows: bool = False,
) -> Segments | None:
    """Group token rows by slot. `weight_indices`: (T,) slot of each row, 0 for none.

    `base_rows`: rows without an adapter get segments too. Returns None when no row has an adapter.
    """
    rows = np.flatnonzero(weight_indices)
    if rows.size == 0:
        return None
    if base_rows:
        rows = np.arange(len(weight_indices))
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


def most_segments(num_rows: int, num_slots: int, block: int) -> int:
    """How many segments `num_rows` rows of `num_slots` slots (0 included) can need at most."""
    return min(num_rows, num_rows // block + num_slots)
