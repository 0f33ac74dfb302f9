"""The paged cache's tensors: blocks of keys and values, given out by the engine's block manager."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lorakeet.models.config import ModelConfig


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer: (num_blocks, block_size, num_kv_heads, head_dim) each."""

    keys: Tensor
    values: Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True)
class KVCache:
    """One LayerCache a layer; all share the block ids."""

    layers: tuple[LayerCache, ...]
    num_blocks: int
    block_size: int


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes, keys and values of all layers."""
    return 2 * config.num_hidden_layers * block_size * config.kv_size * dtype.itemsize


def allocate_kv_cache(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> KVCache:
    """All blocks, zeroed. (On the CPU a block takes no memory before it is first written.)"""
    shape = (num_blocks, block_size, config.num_key_value_heads, config.head_dim)

    def blocks() -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    layers = tuple(LayerCache(blocks(), blocks()) for _ in range(config.num_hidden_layers))
    return KVCache(layers, num_blocks, block_size)
