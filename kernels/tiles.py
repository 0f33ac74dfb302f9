"""Tile sizes of `lora_linear`, by measurement on an H200. They depend on shapes alone."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearTiles:
    outputs: int  # of a program
    inputs: int  # that it takes at a time
    stages: int  # of them in flight
    warps: int
    shrink_inputs: int  # that a program of the shrink takes at a time
    shrink_stages: int
    expand_stages: int = 3  # tiles of rank rows in flight


def linear_tiles(block_m: int, output_size: int, itemsize: int) -> LinearTiles:
    """By measurement on an H200; two programs of up to 64 tokens fit on a multiprocessor."""
    is_wide = output_size >= 16384
    if itemsize > 2:
        return LinearTiles(64, 32, 3, 4, 32, 3)
    if block_m <= 32:
        return LinearTiles(64, 128, 4, 4, 128, 3)
    if block_m <= 64:
        return LinearTiles(128, 64, 4, 8, 128, 3) if is_wide else LinearTiles(64, 64, 6, 4, 128, 3)
    return LinearTiles(128, 64, 5, 8, 64, 5)
