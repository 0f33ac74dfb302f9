import pytest

from lorakeet.lora.host_memory import zeros


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 5000, 9_000_001])
def test_zeros_that_are_aligned(num_bytes: int) -> None:
    for _ in range(8):  # also in memory that was used before
        block = zeros(num_bytes)
        assert block.nbytes == block.untyped_storage().nbytes() == num_bytes
        assert block.data_ptr() % 64 == 0
        assert not block.any()
        block.fill_(255)
