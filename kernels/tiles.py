"""Tile sizes of the LoRA kernels, in one table. All but `rows` are powers of two, at least 16."""

from dataclasses import dataclass

import triton

DECODE_ROWS = 16  # the least that `tl.dot` takes; larger blocks are prefill work


@dataclass(frozen=True)
class Tiles:
    rank: int  # ranks of a shrink program; ranks an expand program takes at a time
    inner: int  # shrink: inputs taken at a time
    split_size: int  # shrink: inputs that a program sums; a multiple of `inner`
    columns: int  # expand: outputs of a program
    num_warps: int
    num_stages: int  # shrink: steps of the loop over the inputs in flight


DECODE = Tiles(rank=16, inner=128, split_size=1024, columns=64, num_warps=4, num_stages=4)
PREFILL = Tiles(rank=32, inner=64, split_size=2**20, columns=128, num_warps=4, num_stages=3)


def tiles_for(block: int) -> Tiles:
    return DECODE if block <= DECODE_ROWS else PREFILL


def tile_rows(block: int) -> int:
    """Rows of the tile that holds a segment of at most `block` rows."""
    return max(DECODE_ROWS, int(triton.next_power_of_2(block)))
