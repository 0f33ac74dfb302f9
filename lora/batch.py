"""Which adapter each row of a pass has, in the shape that the backends work from."""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.kernels.rank_rows import (
    MIN_ROOM,
    Ints,
    RankRowArrays,
    RankRows,
    SlotRows,
    list_rank_rows,
    pack,
    packed_size,
    unpack,
)
from lorakeet.lora.pool import AdapterPool, LayerWeights
from lorakeet.lora.vocabulary import OwnEmbeddings, VocabularyBatch
from lorakeet.models.batch import ForwardBatch
from lorakeet.models.transfer import upload

HEAD = "lm_head"

_T = TypeVar("_T")


@dataclass(frozen=True)
class LoRABatch:
    """The adapters of the rows of one pass."""

    slots: Tensor  # (T,) int32, 0 for none
    rank_rows: Mapping[str, RankRows] = field(default_factory=dict)  # by group; on CUDA only
    arrivals: Tensor | None = None  # int32, zero, one for each layer of the pool; on CUDA only
    counts: Tensor | None = None  # int32, `RankRows.count` for each layer of the pool; on CUDA only
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def rows_of(self, weights: LayerWeights) -> RankRows | None:
        """Those of a layer; None: no row's adapter changes its group."""
        rank_rows, number = self.rank_rows.get(weights.group), weights.number
        if rank_rows is None:
            return None
        assert self.counts is not None
        return replace(rank_rows, count=self.counts[number : number + 1])

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
    own_embeddings: OwnEmbeddings | None = None  # of the T token rows
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
    lists = list_by_group(slots, pool, groups)
    return _upload(slots, lists, values_by_layer(slots, lists, pool), pool)


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
    by_layer = np.zeros((2, pool.num_layers), np.int32)
    by_layer[1] = len(arrays.rows)
    return _upload(slots, dict.fromkeys(groups, arrays), by_layer, pool)


def _upload(
    slots: NDArray[np.int32],
    lists: Mapping[str, RankRowArrays],
    by_layer: Ints,
    pool: AdapterPool,
) -> LoRABatch:
    """Each list with a single copy; in layers that no row's adapter changes they count nothing."""
    on_device: dict[int, RankRows] = {}
    for arrays in lists.values():
        if id(arrays) not in on_device:
            room = max(len(arrays.rows), MIN_ROOM)
            packed = upload(pack(arrays, room), pool.device)
            on_device[id(arrays)] = unpack(packed, len(slots), room, pool.tables.width)
    rank_rows = {group: on_device[id(arrays)] for group, arrays in lists.items()}
    return LoRABatch(torch.from_numpy(slots), rank_rows, *upload(by_layer, pool.device))


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


def values_by_layer(
    slots: NDArray[np.int32], lists: Mapping[str, RankRowArrays], pool: AdapterPool
) -> Ints:
    """(2, layers of the pool): `arrivals` and `counts` of a batch with these lists."""
    distinct = np.unique(slots)
    counts = np.concatenate(
        [
            ranks[:, distinct].any(1) * (len(lists[group].rows) if group in lists else 0)
            for group, ranks in pool.tables.ranks.items()
        ]
    ).astype(np.int32)
    return np.stack([np.zeros_like(counts), counts])


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
        """`slots`: (num_tokens,). In front, the values by layer."""
        lists = list_by_group(slots, self._pool, self._groups)
        packed = {id(arrays): pack(arrays, self._room) for arrays in set(lists.values())}
        by_group = [packed[id(lists[group])] for group in self._groups]
        by_layer = values_by_layer(slots, lists, self._pool).reshape(-1)
        front = np.pad(by_layer, (0, self._front_size - len(by_layer)))
        return np.concatenate([front, *by_group])

    def batch(self, values: Tensor, slots: Tensor) -> LoRABatch:
        """The views of a buffer that `pack` has filled."""
        if not self._groups:
            return LoRABatch(slots)
        parts = torch.split(values[self._front_size :], self._size)
        rank_rows = {
            group: unpack(part, self._num_tokens, self._room, self._pool.tables.width)
            for group, part in zip(self._groups, parts, strict=True)
        }
        num_layers = self._pool.num_layers
        by_layer = values[: 2 * num_layers].view(2, num_layers)
        return LoRABatch(slots, rank_rows, *by_layer)

    @property
    def _front_size(self) -> int:
        return -(-2 * self._pool.num_layers // 4) * 4  # lists start at whole 16 bytes
