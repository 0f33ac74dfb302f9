"""The kernels between the large products, with and without deltas, against float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakeet.kernels import activation, lora_shrink, norm, reference, rotary
from lorakeet.kernels.segments import Delta
from support.lora_cases import POPULARITIES, LoRACase, lora_case, popularity

RANKS = [3, 16, 1, 40, 0, 8]
MIXES = [name for name in POPULARITIES if name != "all_base"]


def case_of(
    name: str, slice_sizes: tuple[int, ...], num_tokens: int = 21, **kwargs: Any
) -> LoRACase:
    slots = popularity(name, num_tokens, len(RANKS))
    options: dict[str, Any] = {"block": 16, "base_rows": True, "max_rank": 48} | kwargs
    return lora_case(slots, RANKS, slice_sizes=slice_sizes, **options)


def delta_of(case: LoRACase) -> Delta:
    h = lora_shrink.sgemm_lora_a(case.x, case.a, *case.block_args)
    return Delta(h, case.b, *case.block_args)


def close(found: Tensor, exact: Tensor, factor: float = 1.0) -> None:
    """Within a rounding or two of what the output can hold.

    `factor`: what an intermediate value, itself rounded once, is multiplied by.
    """
    eps = torch.finfo(found.dtype).eps
    rtol, atol = (2e-5, 4e-5) if found.dtype == torch.float32 else (2 * eps, 2 * eps * factor)
    torch.testing.assert_close(found.double(), exact.double(), rtol=rtol, atol=atol)


def normal(*shape: int, like: Tensor, seed: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


class TestAddNorm:
    @pytest.mark.parametrize("name", MIXES)
    def test_with_deltas(self, name: str, device: str, dtype: torch.dtype) -> None:
        case = case_of(name, (72,), device=device, dtype=dtype)
        self.check(case, delta_of(case))

    @pytest.mark.parametrize("num_tokens", [1, 5, 300])
    def test_without(self, num_tokens: int, device: str, dtype: torch.dtype) -> None:
        self.check(case_of("identical", (70,), num_tokens, device=device, dtype=dtype), None)

    def test_padded_segments(self, device: str, dtype: torch.dtype) -> None:
        case = case_of("with_base", (64,), static=True, device=device, dtype=dtype)
        self.check(case, delta_of(case))

    def check(self, case: LoRACase, delta: Delta | None) -> None:
        residual = normal(*case.y.shape, like=case.y)
        weight = normal(case.y.shape[1], like=case.y, seed=8)
        found = norm.add_rms_norm(case.y, delta, residual, weight, 1e-5)
        total = reference.add_rms_norm(case.y, delta, residual, weight, 1e-5, torch.float64)[1]
        close(found[1], total)
        # normed is that of the total as rounded
        zero = torch.zeros_like(case.y)
        exact = reference.add_rms_norm(zero, None, found[1], weight, 1e-5, torch.float64)[0]
        close(found[0], exact)


class TestSiluMul:
    @pytest.mark.parametrize("name", MIXES)
    def test_with_deltas(self, name: str, device: str, dtype: torch.dtype) -> None:
        case = case_of(name, (300, 300), device=device, dtype=dtype)
        self.check(case, delta_of(case))

    @pytest.mark.parametrize("num_tokens", [1, 5, 300])
    def test_without(self, num_tokens: int, device: str, dtype: torch.dtype) -> None:
        self.check(case_of("identical", (70, 70), num_tokens, device=device, dtype=dtype), None)

    def test_padded_segments(self, device: str, dtype: torch.dtype) -> None:
        case = case_of("with_base", (64, 64), static=True, device=device, dtype=dtype)
        self.check(case, delta_of(case))

    def check(self, case: LoRACase, delta: Delta | None) -> None:
        found = activation.silu_mul(case.y, delta)
        factor = max(1.0, float(case.y.abs().max()))  # gate and up, each with its rounded delta
        close(found, reference.silu_mul(case.y, delta, torch.float64), factor)


class TestRotateAndWrite:
    HEADS, KV_HEADS = 6, 2

    @pytest.mark.parametrize("head_dim", [16, 20])
    @pytest.mark.parametrize("normed", [False, True])
    @pytest.mark.parametrize("name", MIXES)
    def test_with_deltas(
        self, name: str, normed: bool, head_dim: int, device: str, dtype: torch.dtype
    ) -> None:
        case = case_of(name, self.sizes(head_dim), device=device, dtype=dtype)
        self.check(case, delta_of(case), head_dim, normed)

    @pytest.mark.parametrize("num_tokens", [1, 5, 100])
    def test_without(self, num_tokens: int, device: str, dtype: torch.dtype) -> None:
        case = case_of("identical", self.sizes(24), num_tokens, device=device, dtype=dtype)
        self.check(case, None, 24, True)

    def test_padded_segments(self, device: str, dtype: torch.dtype) -> None:
        case = case_of("with_base", self.sizes(32), static=True, device=device, dtype=dtype)
        self.check(case, delta_of(case), 32, False)

    def sizes(self, head_dim: int) -> tuple[int, int, int]:
        return self.HEADS * head_dim, self.KV_HEADS * head_dim, self.KV_HEADS * head_dim

    def check(self, case: LoRACase, delta: Delta | None, head_dim: int, normed: bool) -> None:
        y, num_tokens, block_size = case.y, len(case.y), 4
        angles = normal(num_tokens, 1, head_dim // 2, like=y).float()
        cos = torch.cat((angles.cos(), angles.cos()), -1)
        sin = torch.cat((-angles.sin(), angles.sin()), -1)
        norms = None
        if normed:
            norms = rotary.HeadNorms(
                normal(head_dim, like=y), normal(head_dim, like=y, seed=9), 1e-6
            )
        shape = (num_tokens, block_size, self.KV_HEADS, head_dim)
        caches = torch.full((2, *shape), 7.0, dtype=y.dtype, device=y.device)
        slots = torch.randperm(num_tokens * block_size)[:num_tokens].to(y.device)
        slots[::5] = -1  # padding
        q = rotary.rotate_and_write(
            y, delta, cos, sin, norms, caches[0], caches[1], slots, self.HEADS
        )
        exact = reference.rotate_heads(
            y, delta, cos, sin, norms, self.HEADS, self.KV_HEADS, torch.float64
        )
        close(q, exact[0])
        rows, written = caches.flatten(1, 2), slots >= 0
        for row, values in zip(rows, exact[1:], strict=True):
            close(row[slots[written]], values[written])
        untouched = torch.ones(rows.shape[1], dtype=torch.bool, device=y.device)
        untouched[slots[written]] = False
        assert (rows[:, untouched] == 7.0).all()


def test_a_nan_adapter_stays_in_its_own_rows(device: str, dtype: torch.dtype) -> None:
    case = case_of("with_base", (96, 32, 32), device=device, dtype=dtype)
    broken = case.with_nan_adapter(2)
    healthy = torch.tensor([slot != 2 for slot in case.weight_indices], device=device)
    assert 0 < healthy.sum() < len(healthy)

    def outputs(case: LoRACase) -> list[Tensor]:
        delta = delta_of(case)
        cos = torch.ones(len(case.y), 1, 32, device=device)
        cache = torch.zeros(len(case.y), 1, 1, 32, dtype=dtype, device=device)
        slots = torch.arange(len(case.y), device=device)
        q = rotary.rotate_and_write(case.y, delta, cos, cos, None, cache, cache.clone(), slots, 3)
        one = replace(delta, h=delta.h[:, :, :1].contiguous())
        size = case.y.shape[1]
        normed, total = norm.add_rms_norm(
            case.y, one, torch.zeros_like(case.y), case.y[0].abs(), 1e-5
        )
        two = replace(delta, h=delta.h[:, :, :2].contiguous())
        return [q, cache, normed, total, activation.silu_mul(case.y[:, : size // 2 * 2], two)]

    for good, bad in zip(outputs(case), outputs(broken), strict=True):
        assert torch.equal(good[healthy], bad[healthy])
        assert bad[~healthy].isnan().any()
