"""The paged cache's tensors: blocks of keys and values, given out by the engine's block manager."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lorakeet.models.config import ModelConfig
from lorakeet.models.cuts import cut_model
from lorakeet.models.process_group import ALONE, ProcessGroup


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer: (num_blocks, block_size, num_kv_heads, head_dim) each.

    The heads are those of one rank.
    """

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


def kv_block_bytes(
    config: ModelConfig, block_size: int, dtype: torch.dtype, group: ProcessGroup = ALONE
) -> int:
    """Bytes that one block takes on a rank, keys and values of all layers."""
    kv_size = cut_model(config, group).kv.size
    return 2 * config.num_hidden_layers * block_size * kv_size * dtype.itemsize


def allocate_kv_cache(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    group: ProcessGroup = ALONE,
) -> KVCache:
    """A rank's part of all blocks, zeroed. (On the CPU a block takes no memory before it is first
    written.)"""
    num_kv_heads = cut_model(config, group).kv.size // config.head_dim
    shape = (num_blocks, block_size, num_kv_heads, config.head_dim)

    def blocks() -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    layers = tuple(LayerCache(blocks(), blocks()) for _ in range(config.num_hidden_layers))
    return KVCache(layers, num_blocks, block_size)
