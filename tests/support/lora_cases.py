"""Inputs for the LoRA kernels: adapters scattered over a poisoned pool, batches that mix them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.kernels import reference
from lorakeet.kernels.rank_rows import MIN_ROOM, RankRows, SlotRows, list_rank_rows, pack, unpack

POPULARITIES = ["identical", "uniform", "skewed", "distinct", "with_base", "all_base"]


def popularity(name: str, num_tokens: int, num_adapters: int) -> list[int]:
    """The slot of each token row: who asks for which adapter."""
    rng = np.random.default_rng(len(name))
    slots: dict[str, Callable[[], NDArray[np.integer]]] = {
        "identical": lambda: np.ones(num_tokens, dtype=np.int32),
        "uniform": lambda: rng.integers(1, num_adapters + 1, num_tokens),
        "skewed": lambda: np.minimum(rng.zipf(1.5, num_tokens), num_adapters),
        "distinct": lambda: rng.permutation(num_tokens) % num_adapters + 1,
        "with_base": lambda: rng.integers(0, num_adapters + 1, num_tokens),
        "all_base": lambda: np.zeros(num_tokens, dtype=np.int32),
    }
    return [int(slot) for slot in slots[name]()]


@dataclass(frozen=True)
class LoRACase:
    x: Tensor  # (T, in)
    token_ids: Tensor  # (T,) int64, below in
    weight: Tensor  # (out, in)
    bias: Tensor  # (out,)
    a: Tensor  # (slices, rows, in)
    b: Tensor  # (rows, out)
    y: Tensor  # (T, out)
    rank_rows: RankRows
    slots: tuple[int, ...]
    slice_sizes: tuple[int, ...]
    arrivals: Tensor  # (1,) int32, zero
    counters: Tensor  # int32 zeros

    def exact(self, y: Tensor | None = None) -> Tensor:
        """y with the delta of every token, in float64."""
        args = (self.x, self.a, self.b, self.rank_rows, self.slice_sizes)
        return reference.add_lora(self.y if y is None else y, *args, dtype=torch.float64)

    def exact_linear(self) -> Tensor:
        args = (self.x, self.weight, self.bias, self.a, self.b, self.rank_rows, self.slice_sizes)
        return reference.lora_linear(*args, dtype=torch.float64)

    def rounding(self) -> Tensor:
        """What moves y (T, out): the rounding of every h, on its way from A to B, and sums in
        float32, of which tensor cores cut off 2^-23 at every 16 inputs."""
        # bfloat16 has 8 bits; float16 meets h as tf32, which is cut off at 11
        unit = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-10}[self.x.dtype]
        zeros, listed = torch.zeros_like(self.y, dtype=torch.float64), self.rank_rows
        for token, (first, last) in enumerate(
            zip(listed.first.tolist(), listed.last.tolist(), strict=True)
        ):
            rows, x = listed.rows[first:last].long(), self.x[token].double()
            scales, offsets = listed.scales[first:last], listed.offsets[first:last]
            h = ((self.a[:, rows].double() @ x) * scales + offsets).abs()
            columns = torch.split(self.b[rows].double().abs(), list(self.slice_sizes), 1)
            zeros[token] = torch.cat([one @ each for one, each in zip(h, columns, strict=True)])
        return unit * zeros + self.x.shape[1] * 2**-27


def assert_rounded(actual: Tensor, exact: Tensor, rounding: Tensor | float = 0.0) -> None:
    """`actual` is `exact`, rounded once, and off by `rounding` at most (and by what sums in float32
    are)."""
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[actual.dtype]
    error, most = (actual.double() - exact).abs(), 3e-5 + rtol * exact.abs() + rounding
    assert (error <= most).all(), f"{float((error / most).max()):.2f} of the error that may be"


def silu_mul_rounding(gate_up: Tensor, rounding: Tensor) -> Tensor:
    """What moves silu(gate) · up when these are off by `rounding`: silu's slope is 1.1 at most."""
    gate, up = gate_up.abs().chunk(2, dim=1)
    gate_error, up_error = rounding.chunk(2, dim=1)
    return 1.1 * gate_error * (up + up_error) + gate * up_error


def aligned(rows: Tensor) -> Tensor:
    """The same values (N, K), in rows that start at whole 16 bytes; NaN between them."""
    width = -(-rows.shape[1] // 8) * 8
    wide = torch.full((len(rows), width), torch.nan, dtype=rows.dtype, device=rows.device)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def lora_case(
    slots: Sequence[int],
    ranks: Sequence[int],
    *,
    input_size: int = 40,
    slice_sizes: Sequence[int] = (24,),
    room: int = MIN_ROOM,
    plain: bool = False,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LoRACase:
    """`ranks[i]` is the rank in slot i + 1. Pool rows of no adapter are NaN, and so are scales and
    offsets past the list. Rows have scales and offsets unless `plain`, every third slot has
    magnitudes. Weights are scaled so that deltas are about 1 in size. Rows of x and of weight start
    at whole 16 bytes.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    num_rows = sum(ranks) + len(ranks) + 3
    free = torch.randperm(num_rows, generator=generator).tolist()
    a = torch.full((len(slice_sizes), num_rows, input_size), torch.nan)
    b = torch.full((num_rows, sum(slice_sizes)), torch.nan)
    listed = {}
    for slot, rank in enumerate(ranks, start=1):
        own = [free.pop() for _ in range(rank)]
        a[:, own] = normal(len(slice_sizes), rank, input_size, scale=input_size**-0.5)
        b[own] = normal(rank, sum(slice_sizes), scale=max(rank, 1) ** -0.5)
        magnitude = -1
        if slot % 3 == 0 and rank and not plain:
            magnitude = free.pop()
            b[magnitude] = normal(sum(slice_sizes), scale=0.5)
        scales, offsets = torch.ones(rank), torch.zeros(rank)
        if not plain:
            scales, offsets = normal(rank), normal(rank) * (torch.arange(rank) % 4 == 0)
        listed[slot] = SlotRows(np.array(own, np.int32), scales.numpy(), offsets.numpy(), magnitude)
    arrays = list_rank_rows(np.array(slots, np.int32), listed.__getitem__)
    packed = torch.from_numpy(pack(arrays, room)).to(device)
    rank_rows = unpack(packed, len(slots), room, max([*ranks, 1]))
    for values in (rank_rows.scales, rank_rows.offsets):
        values[len(arrays.rows) :] = torch.nan
    outputs = sum(slice_sizes)
    return LoRACase(
        x=aligned(normal(len(slots), input_size).to(device, dtype)),
        token_ids=torch.randint(input_size, (len(slots),), generator=generator).to(device),
        weight=aligned(normal(outputs, input_size, scale=input_size**-0.5).to(device, dtype)),
        bias=normal(outputs).to(device, dtype),
        a=a.to(device, dtype),
        b=b.to(device, dtype),
        y=normal(len(slots), outputs).to(device, dtype),
        rank_rows=rank_rows,
        slots=tuple(slots),
        slice_sizes=tuple(slice_sizes),
        arrivals=torch.zeros(1, dtype=torch.int32, device=device),
        counters=torch.zeros(4096, dtype=torch.int32, device=device),
    )
