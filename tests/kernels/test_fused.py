"""The kernels between the large products against float64, of outputs that are whole or in parts."""

import pytest
import torch
from torch import Tensor

from lorakeet.kernels import activation, norm, reference, rotary

# a product's output (T, N), or how many parts in float32 there are of it
PARTS = [None, 1, 2, 4]


def close(found: Tensor, exact: Tensor) -> None:
    """Within a rounding or two of what the output can hold."""
    eps = torch.finfo(found.dtype).eps
    tolerance = 2e-5 if found.dtype == torch.float32 else 2 * eps
    torch.testing.assert_close(found.double(), exact.double(), rtol=tolerance, atol=tolerance)


def normal(*shape: int, device: str, dtype: torch.dtype, seed: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def product(
    num_parts: int | None, num_tokens: int, size: int, device: str, dtype: torch.dtype
) -> Tensor:
    """(T, size) of `dtype`, or its parts in float32; a view of something wider that is NaN."""
    shape = (num_tokens, size) if num_parts is None else (num_parts, num_tokens, size)
    dtype = dtype if num_parts is None else torch.float32
    wide = torch.full((*shape[:-2], num_tokens + 1, size + 3), torch.nan, dtype=dtype)
    wide[..., :num_tokens, :size] = normal(*shape, device="cpu", dtype=dtype)
    return wide.to(device)[..., :num_tokens, :size]


@pytest.mark.parametrize("num_tokens", [1, 5, 70])
@pytest.mark.parametrize("num_parts", PARTS)
class TestAddNorm:
    @pytest.mark.parametrize("size", [64, 70])
    def test_equals_the_reference(
        self, size: int, num_parts: int | None, num_tokens: int, device: str, dtype: torch.dtype
    ) -> None:
        y = product(num_parts, num_tokens, size, device, dtype)
        residual = normal(num_tokens, size, device=device, dtype=dtype, seed=8)
        weight = normal(size, device=device, dtype=dtype, seed=9)
        normed, total = norm.add_rms_norm(y, residual, weight, 1e-5)
        assert normed.dtype == total.dtype == dtype
        close(total, reference.add_rms_norm(y, residual, weight, 1e-5, torch.float64)[1])
        # normed is that of the total as rounded
        zero = torch.zeros_like(total)
        close(normed, reference.add_rms_norm(zero, total, weight, 1e-5, torch.float64)[0])


@pytest.mark.parametrize("num_tokens", [1, 5, 70])
@pytest.mark.parametrize("num_parts", PARTS)
class TestSiluMul:
    @pytest.mark.parametrize("size", [35, 1100])  # in one program, in two
    def test_equals_the_reference(
        self, size: int, num_parts: int | None, num_tokens: int, device: str, dtype: torch.dtype
    ) -> None:
        gate_up = product(num_parts, num_tokens, 2 * size, device, dtype)
        found = activation.silu_mul(gate_up, None, dtype)
        assert found.dtype == dtype
        close(found, reference.silu_mul(gate_up, torch.float64))


class TestRotateAndWrite:
    HEADS, KV_HEADS, BLOCK_SIZE = 6, 2, 4

    @pytest.mark.parametrize("head_dim", [16, 20, 64])
    @pytest.mark.parametrize("normed", [False, True])
    @pytest.mark.parametrize("num_parts", PARTS)
    @pytest.mark.parametrize("num_tokens", [1, 21])
    def test_equals_the_reference(
        self,
        num_tokens: int,
        num_parts: int | None,
        normed: bool,
        head_dim: int,
        device: str,
        dtype: torch.dtype,
    ) -> None:
        size = (self.HEADS + 2 * self.KV_HEADS) * head_dim
        qkv = product(num_parts, num_tokens, size, device, dtype)
        angles = normal(num_tokens, 1, head_dim // 2, device=device, dtype=torch.float32)
        cos = torch.cat((angles.cos(), angles.cos()), -1)
        sin = torch.cat((-angles.sin(), angles.sin()), -1)
        norms = None
        if normed:
            q_norm, k_norm = (
                normal(head_dim, device=device, dtype=dtype, seed=seed) for seed in (8, 9)
            )
            norms = rotary.HeadNorms(q_norm, k_norm, 1e-6)
        shape = (num_tokens, self.BLOCK_SIZE, self.KV_HEADS, head_dim)
        caches = torch.full((2, *shape), 7.0, dtype=dtype, device=device)
        slots = torch.randperm(num_tokens * self.BLOCK_SIZE)[:num_tokens].to(device)
        slots[3::5] = -1  # padding
        k, v = caches
        q = rotary.rotate_and_write(qkv, cos, sin, norms, k, v, slots, self.HEADS)
        assert q.dtype == dtype
        exact = reference.rotate_heads(
            qkv, cos, sin, norms, self.HEADS, self.KV_HEADS, torch.float64
        )
        close(q, exact[0])
        rows, written = caches.flatten(1, 2), slots >= 0
        for row, values in zip(rows, exact[1:], strict=True):
            close(row[slots[written]], values[written])
        untouched = torch.ones(rows.shape[1], dtype=torch.bool, device=device)
        untouched[slots[written]] = False
        assert (rows[:, untouched] == 7.0).all()


@pytest.mark.parametrize("num_parts", [None, 3])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bad_row_stays_alone(
    value: float, num_parts: int | None, device: str, dtype: torch.dtype
) -> None:
    num_tokens, bad = 6, 2
    healthy = [row for row in range(num_tokens) if row != bad]
    y = product(num_parts, num_tokens, 96, device, dtype)
    broken = y.clone()
    broken[..., bad, :] = value

    def outputs(y: Tensor) -> list[Tensor]:
        angle = torch.full((num_tokens, 1, 32), 0.5, device=device)
        caches = torch.zeros(2, num_tokens, 1, 1, 32, dtype=dtype, device=device)
        slots = torch.arange(num_tokens, device=device)
        k, v = caches
        q = rotary.rotate_and_write(y, angle, angle, None, k, v, slots, 1)
        residual = torch.ones(num_tokens, 96, dtype=dtype, device=device)
        normed = norm.add_rms_norm(y, residual, residual[0], 1e-5)
        return [q, *caches, *normed, activation.silu_mul(y, None, dtype)]

    for good, found in zip(outputs(y), outputs(broken), strict=True):
        assert torch.equal(good[healthy], found[healthy])
        assert not found[bad].isfinite().all()
