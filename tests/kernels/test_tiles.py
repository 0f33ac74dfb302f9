"""Tiles of `lora_linear` on devices with less shared memory than they were measured on."""

import pytest

from lorakeet.kernels.tiles import ROWS_AT_ONCE, linear_tiles

H200, L40S = 232_448, 101_376  # bytes for a program, by NVIDIA's CUDA programming guide


@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
@pytest.mark.parametrize("output_size", [4096, 28672])
def test_tiles_fit_the_device(block_m: int, output_size: int) -> None:
    assert linear_tiles(block_m, output_size, 2, H200) == linear_tiles(
        block_m, output_size, 2, None
    )
    tiles = linear_tiles(block_m, output_size, 2, L40S)
    rows = (block_m + tiles.outputs) * tiles.inputs, (block_m + ROWS_AT_ONCE) * tiles.shrink_inputs
    assert 2 * rows[0] * tiles.stages <= L40S
    assert 2 * rows[1] * tiles.shrink_stages <= L40S
    assert tiles.stages >= 3
