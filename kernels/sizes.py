"""Arithmetic of sizes, on the host, for launches of kernels."""

# In a pass, as in decode, where each may have another adapter: LoRA's tiles of tokens are small.
# With more, tiles are large, and slow where adapters are many.
FEW_TOKENS = 512


def cdiv(size: int, part: int) -> int:
    """How many parts a size takes. (Triton's is for kernels too: it takes microseconds.)"""
    return -(-size // part)


def power_of_two(size: int) -> int:
    """The next, from `size` on."""
    return 1 << (size - 1).bit_length()
