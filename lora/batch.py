"""Which adapter each row of a pass has, in the shape that the backends work from."""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.kernels.rank_rows import (
    RankRowArrays,
    RankRows,
    SlotRows,
    list_rank_rows,
    pack,
    packed_size,
    unpack,
)
from lorakeet.lora.pool import AdapterPool
from lorakeet.lora.vocabulary import VocabularyBatch
from lorakeet.models.batch import ForwardBatch

HEAD = "lm_head"
MIN_ROOM = 256  # rows that a list always has room for: kernels read ahead

_T = TypeVar("_T")


@dataclass(frozen=True)
class LoRABatch:
    """The adapters of the rows of one pass."""

    slots: Tensor  # (T,) int32, 0 for none
    rank_rows: Mapping[str, RankRows] = field(default_factory=dict)  # by group; on CUDA only
    arrivals: Tensor | None = None  # int32, zero, one for each layer of the pool; on CUDA only
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def cached(self, key: Hashable, build: Callable[[], _T]) -> _T:
        """What a backend works out once in a pass and needs again in every layer."""
        if key not in self._cache:
            self._cache[key] = build()
        value: _T = self._cache[key]
        return value


@dataclass(frozen=True, kw_only=True)
class LoRAForwardBatch(ForwardBatch):
    """A pass in which rows may have an adapter; None where no row has."""

    lora: LoRABatch | None  # for the T token rows
    logits_lora: LoRABatch | None  # for the rows whose logits are wanted
    vocabulary: VocabularyBatch | None = None  # for the T token rows
    logits_vocabulary: VocabularyBatch | None = None


def build_lora_batch(
    slots: NDArray[np.int32], pool: AdapterPool, groups: Collection[str]
) -> LoRABatch | None:
    """`slots`: (T,) slot of each row of a pass, 0 for none; `groups`: those that it runs through.

    Returns None when no row has an adapter that changes any of them: the pass then does no LoRA
    work at all.
    """
    groups = pool.tables.touched(np.unique(slots).tolist(), groups)
    if not groups:
        return None
    if pool.device.type != "cuda":
        return LoRABatch(torch.from_numpy(slots))
    return _upload(slots, list_by_group(slots, pool, groups), pool)


def full_lora_batch(
    slots: NDArray[np.int32], pool: AdapterPool, groups: Collection[str]
) -> LoRABatch:
    """As if every slot listed as many rows as it can: the most memory that a pass takes."""
    if pool.device.type != "cuda":
        return LoRABatch(torch.from_numpy(slots))
    width = pool.tables.width
    full = SlotRows(
        np.zeros(width, np.int32), np.zeros(width, np.float32), np.zeros(width, np.float32), -1
    )
    arrays = list_rank_rows(slots, lambda slot: full)
    return _upload(slots, dict.fromkeys(groups, arrays), pool)


def _upload(
    slots: NDArray[np.int32], lists: Mapping[str, RankRowArrays], pool: AdapterPool
) -> LoRABatch:
    """Each list once, with a single copy."""
    on_device: dict[int, RankRows] = {}
    for arrays in lists.values():
        if id(arrays) not in on_device:
            room = max(len(arrays.rows), MIN_ROOM)
            packed = torch.from_numpy(pack(arrays, room)).pin_memory()
            packed = packed.to(pool.device, non_blocking=True)
            on_device[id(arrays)] = unpack(packed, len(slots), room, pool.tables.width)
    return LoRABatch(
        torch.from_numpy(slots),
        {group: on_device[id(arrays)] for group, arrays in lists.items()},
        torch.zeros(pool.num_layers, dtype=torch.int32, device=pool.device),
    )


def body_groups(pool: AdapterPool) -> list[str]:
    """The groups that the model's pass runs through; the head has a batch of its own."""
    return [group for group in pool.specs if group != HEAD]


def list_by_group(
    slots: NDArray[np.int32], pool: AdapterPool, groups: Collection[str]
) -> dict[str, RankRowArrays]:
    """The rank rows of a pass for each group. Groups that list the same share one."""
    distinct = np.unique(slots)
    lists: dict[Hashable, RankRowArrays] = {}
    by_group = {}
    for group in groups:
        key = tuple(pool.tables.num_listed(distinct, group).tolist())
        if key not in lists:
            lists[key] = list_rank_rows(slots, partial(pool.tables.slot_rows, group))
        by_group[group] = lists[key]
    return by_group


def static_room(pool: AdapterPool) -> int:
    """The most rows in a list that static batches have room for: adapters' own are never more, but
    blends may list the same rows again."""
    return max(pool.num_rows, MIN_ROOM)


class StaticRankRows:
    """Room for the rank rows of a pass of `num_tokens` in one int32 buffer, group by group.

    On the CPU no lists are made: its backend needs the slots alone.
    """

    def __init__(self, pool: AdapterPool, num_tokens: int, num_adapters: int) -> None:
        """`num_adapters`: the most that a pass has."""
        self._pool = pool
        self._groups = body_groups(pool) if pool.device.type == "cuda" else []
        self._num_tokens = num_tokens
        self._room = min(max(num_adapters * pool.tables.width, MIN_ROOM), static_room(pool))
        self._size = packed_size(num_tokens, self._room)

    def pack(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """`slots`: (num_tokens,). In front, zeros for the arrivals of every layer."""
        lists = list_by_group(slots, self._pool, self._groups)
        packed = {id(arrays): pack(arrays, self._room) for arrays in set(lists.values())}
        by_group = [packed[id(lists[group])] for group in self._groups]
        return np.concatenate([np.zeros(self._arrivals_size, np.int32), *by_group])

    def batch(self, values: Tensor, slots: Tensor) -> LoRABatch:
        """The views of a buffer that `pack` has filled."""
        if not self._groups:
            return LoRABatch(slots)
        parts = torch.split(values[self._arrivals_size :], self._size)
        rank_rows = {
            group: unpack(part, self._num_tokens, self._room, self._pool.tables.width)
            for group, part in zip(self._groups, parts, strict=True)
        }
        return LoRABatch(slots, rank_rows, values[: self._pool.num_layers])

    @property
    def _arrivals_size(self) -> int:
        return -(-self._pool.num_layers // 4) * 4
