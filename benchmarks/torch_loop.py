"""What LoRA is without kernels of its own: torch, adapter after adapter. Not a command."""

from dataclasses import dataclass

from torch import Tensor

from lorakeet.kernels.rank_rows import RankRows
from lorakeet.lora.pool import LayerWeights

RANK = 16


@dataclass(frozen=True)
class Mix:
    """`size` tokens of `count` adapters, in random order."""

    size: int
    count: int
    rank_rows: RankRows
    tokens: list[Tensor]  # by adapter
    rows: Tensor  # of the pool: RANK of each adapter

    def __str__(self) -> str:
        return f"{self.size}x{self.count}"


class Loop:
    """A group's adapters one after the other, in torch."""

    def __init__(self, mix: Mix, weights: list[LayerWeights]) -> None:
        """Each adapter's weights lie together, as they would without a pool."""
        self.tokens = mix.tokens
        self.own = [slice(RANK * i, RANK * (i + 1)) for i in range(mix.count)]
        self.slice_sizes = list(weights[0].slice_sizes)
        self.a = [layer.a[:, mix.rows] for layer in weights]
        self.b = [layer.b[mix.rows].split(self.slice_sizes, 1) for layer in weights]

    def shrink(self, x: Tensor, layer: int) -> list[list[Tensor]]:
        """By adapter and slice: (its tokens, RANK)."""
        found = []
        for tokens, own in zip(self.tokens, self.own, strict=True):
            selected = x.index_select(0, tokens)
            found.append([selected @ part[own].T for part in self.a[layer]])
        return found

    def expand(self, y: Tensor, h: list[list[Tensor]], layer: int) -> Tensor:
        columns = y.split(self.slice_sizes, 1)
        for tokens, own, shrunk in zip(self.tokens, self.own, h, strict=True):
            for i, part in enumerate(shrunk):
                columns[i].index_add_(0, tokens, part @ self.b[layer][i][own])
        return y

    def add(self, y: Tensor, x: Tensor, layer: int) -> Tensor:
        return self.expand(y, self.shrink(x, layer), layer)
