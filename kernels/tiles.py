"""Tile sizes by measurement on an H200; by shapes and device alone."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from triton.runtime import driver

ROWS_AT_ONCE = 64  # rank rows of a tile
_FEWEST_STAGES = 3  # that hide what a tile takes to come


@dataclass(frozen=True)
class LinearTiles:
    outputs: int  # of a program
    inputs: int  # that it takes at a time
    stages: int  # of them in flight
    warps: int
    shrink_inputs: int  # that a program of the shrink takes at a time
    shrink_stages: int
    expand_stages: int = 3  # tiles of rank rows in flight


def linear_tiles(
    block_m: int, output_size: int, itemsize: int, shared_memory: int | None
) -> LinearTiles:
    """Two programs of up to 64 tokens fit on a multiprocessor of an H200. With less
    `shared_memory`, in bytes for a program, fewer or smaller tiles are in flight.
    None: no limit."""
    tiles = _measured(block_m, output_size, itemsize)
    if shared_memory is None:
        return tiles
    row = (block_m + tiles.outputs) * tiles.inputs * itemsize
    if shared_memory < _FEWEST_STAGES * row:
        tiles, row = replace(tiles, inputs=tiles.inputs // 2), row // 2
    shrink_row = (block_m + ROWS_AT_ONCE) * tiles.shrink_inputs * itemsize
    expand_row = (2 * block_m + tiles.outputs) * ROWS_AT_ONCE * itemsize  # h may be float32
    return replace(
        tiles,
        stages=max(1, min(tiles.stages, shared_memory // row)),
        shrink_stages=max(1, min(tiles.shrink_stages, shared_memory // shrink_row)),
        expand_stages=max(1, min(tiles.expand_stages, shared_memory // expand_row)),
    )


@dataclass(frozen=True)
class DecodeTiles:
    keys: int  # that a program of decode attention takes at a time
    warps: int
    stages: int  # of keys on their way, and of the blocks that say where they lie
    min_split: int  # keys of a program
    max_splits: int  # of a context; a power of two


def decode_tiles(num_heads: int, key_size: int) -> DecodeTiles:
    """`num_heads`: KV heads of all sequences; `key_size`: of one key, in bytes. Few heads would
    leave most of a GPU idle, were their contexts not split."""
    if num_heads <= 8:
        return DecodeTiles(32, 4, 2, min_split=32, max_splits=64)
    is_narrow = key_size <= 256  # five stages of 64 keys then take 72 KB of shared memory
    if num_heads <= 32 and is_narrow:
        return DecodeTiles(64, 2, 5, min_split=32, max_splits=16 if num_heads <= 16 else 8)
    if num_heads <= 64:
        return DecodeTiles(64, 2, 2, min_split=32, max_splits=8)
    if num_heads <= 128:
        return DecodeTiles(64, 2, 2, min_split=128, max_splits=32)
    if num_heads <= 384 and is_narrow:
        return DecodeTiles(64, 2, 5, min_split=512, max_splits=16)
    if num_heads <= 1024:
        return DecodeTiles(64, 2, 2, min_split=512, max_splits=16)
    return DecodeTiles(32, 4, 2, min_split=512, max_splits=16)


@lru_cache
def shared_memory_of(device: torch.device) -> int | None:
    """Bytes that one program can have; None in Triton's interpreter."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = driver.active.utils.get_device_properties(index)  # what a launch is held against
    return int(properties["max_shared_mem"])


def _measured(block_m: int, output_size: int, itemsize: int) -> LinearTiles:
    if itemsize > 2:
        return LinearTiles(64, 32, 3, 4, 32, 3)
    if block_m <= 32:
        return LinearTiles(64, 128, 4, 4, 128, 3)
    if block_m <= 64:
        wide, narrow = LinearTiles(128, 64, 4, 4, 128, 3), LinearTiles(64, 64, 6, 4, 128, 3)
        return wide if output_size >= 16384 else narrow
    # every tile reads all of x: with many tiles that is more than the weights
    wide, narrow = LinearTiles(128, 64, 5, 8, 64, 5), LinearTiles(64, 128, 4, 4, 64, 5)
    return wide if output_size >= 8192 else narrow
