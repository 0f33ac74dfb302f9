"""Arithmetic of sizes, on the host, for launches of kernels."""


def cdiv(size: int, part: int) -> int:
    """How many parts a size takes. (Triton's is for kernels too: it takes microseconds.)"""
    return -(-size // part)


def power_of_two(size: int) -> int:
    """The next, from `size` on."""
    return 1 << (size - 1).bit_length()
