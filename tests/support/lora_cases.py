"""Inputs for the LoRA kernels: adapters scattered over a poisoned pool, batches that mix them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.kernels.segments import Segments, build_segments

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


def pad_segments(segments: Segments | None, num_tokens: int, block: int, device: str) -> Segments:
    """One segment for each of `num_tokens` rows: the static grid of a captured graph."""
    padded = Segments(
        permutation=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        starts=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        lengths=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        weight_indices=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        scalings=torch.full((num_tokens,), torch.nan, device=device),
        block=block,
    )
    if segments is not None:
        for name in ("permutation", "starts", "lengths", "weight_indices", "scalings"):
            values = getattr(segments, name)
            getattr(padded, name)[: len(values)] = values
    return padded


@dataclass(frozen=True)
class LoRACase:
    x: Tensor  # (T, in)
    token_ids: Tensor  # (T,) int64, below in
    a: Tensor  # (slices, rows, in)
    b: Tensor  # (rows, out)
    y: Tensor  # (T, out)
    segments: Segments
    ranks: Tensor  # (slots,) int32
    row_table: Tensor  # (slots, R) int32
    weight_indices: tuple[int, ...]
    slice_sizes: tuple[int, ...]

    @property
    def block_args(self) -> tuple[Segments, Tensor, Tensor]:
        return self.segments, self.ranks, self.row_table

    def rows_of(self, slot: int) -> Tensor:
        """Pool rows of the adapter in a slot."""
        return self.row_table[slot, : int(self.ranks[slot])].long()

    def with_nan_adapter(self, slot: int) -> "LoRACase":
        a, b = self.a.clone(), self.b.clone()
        a[:, self.rows_of(slot)] = torch.nan
        b[self.rows_of(slot)] = torch.nan
        return replace(self, a=a, b=b, y=self.y.clone())


def lora_case(
    weight_indices: Sequence[int],
    ranks: Sequence[int],
    *,
    input_size: int = 40,
    slice_sizes: Sequence[int] = (24,),
    block: int = 4,
    max_rank: int | None = None,
    static: bool = False,
    base_rows: bool = False,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LoRACase:
    """`ranks[i]` is the rank in slot i + 1. Pool rows of no adapter are NaN, and so is what the row
    table names past a rank. Weights are scaled so that deltas are about 1 in size.
    """
    generator = torch.Generator().manual_seed(seed)
    num_tokens, table_width = len(weight_indices), max_rank or max(ranks)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    num_rows = sum(ranks) + 3
    rows = torch.randperm(num_rows, generator=generator)
    poison, free = rows[:3], torch.split(rows[3:], [*ranks])
    row_table = poison[torch.randint(3, (len(ranks) + 1, table_width), generator=generator)]
    a = torch.full((len(slice_sizes), num_rows, input_size), torch.nan)
    b = torch.full((num_rows, sum(slice_sizes)), torch.nan)
    for slot, (rank, own) in enumerate(zip(ranks, free, strict=True), start=1):
        row_table[slot, :rank] = own
        a[:, own] = normal(len(slice_sizes), rank, input_size, scale=input_size**-0.5)
        b[own] = normal(rank, sum(slice_sizes), scale=max(rank, 1) ** -0.5)

    segments = build_segments(np.asarray(weight_indices, dtype=np.int32), block, device, base_rows)
    if segments is not None:
        scalings = torch.rand(len(segments.scalings), generator=generator) + 0.5
        segments = replace(segments, scalings=scalings.to(device))
    if static or segments is None:
        segments = pad_segments(segments, num_tokens, block, device)
    return LoRACase(
        x=normal(num_tokens, input_size).to(device, dtype),
        token_ids=torch.randint(input_size, (num_tokens,), generator=generator).to(device),
        a=a.to(device, dtype),
        b=b.to(device, dtype),
        y=normal(num_tokens, sum(slice_sizes)).to(device, dtype),
        segments=segments,
        ranks=torch.tensor([0, *ranks], dtype=torch.int32, device=device),
        row_table=row_table.to(device, torch.int32),
        weight_indices=tuple(weight_indices),
        slice_sizes=tuple(slice_sizes),
    )
