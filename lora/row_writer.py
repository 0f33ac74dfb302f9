"""Adapters' weights on their way into rows of the pool."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lorakeet.lora.adapter import Adapter, GroupWeights
from lorakeet.lora.staging import Staging
from lorakeet.lora.streams import SideStream, keeping_nothing, side_thread


class RowWriter:
    """Copies adapters, one after the other: on CUDA in a thread of its own, on the copy stream.

    All of it but `start` and `close` runs in that thread. It touches tensors alone; what the rows
    are used for is the pool's to know.
    """

    def __init__(
        self, a: Mapping[str, Tensor], b: Mapping[str, Tensor], staging: Staging, copies: SideStream
    ) -> None:
        """`a`, `b`: by group, of the pool; `staging` is for this thread, and so is the filling of
        vocabularies."""
        self._a = a
        self._b = b
        self._staging = staging
        self._copies = copies
        # rows that are zeros, by group: most adapters leave the same groups alone
        self._is_zero = {name: np.zeros(values.shape[1], np.bool_) for name, values in b.items()}
        self._thread = side_thread(copies.device, "adapter-copies")

    def start(
        self,
        rows: Sequence[int],
        adapter: Adapter,
        readers: Collection[torch.cuda.Event],
        fill_vocabulary: Callable[[], None],
    ) -> Future[None]:
        """Start to copy an adapter into these rows, once the `readers` have read them.

        The future is done when the copy is complete, and all that were started before it. The
        adapter is held until then.
        """
        copy = partial(self._copy, [*rows], adapter, readers, fill_vocabulary)
        return self._thread.submit(keeping_nothing, copy)

    def close(self) -> None:
        """End the thread: after the copy that it is at, those behind it are dropped."""
        self._thread.shutdown(cancel_futures=True)

    @torch.inference_mode()  # a matter of each thread, as the current stream is
    def _copy(
        self,
        rows: Sequence[int],
        adapter: Adapter,
        readers: Collection[torch.cuda.Event],
        fill_vocabulary: Callable[[], None],
    ) -> None:
        """What is staged comes to the device beside the readers. It is freed on return, so all
        copies together never have more than one adapter's staged weights on the device."""
        with self._copies.use():
            try:
                groups = {name: self._stage(weights) for name, weights in adapter.groups.items()}
                fill_vocabulary()
                own = _split_rows(self._stage_ids(rows), adapter)
                self._copies.wait(readers)
                for name, is_zero in self._is_zero.items():
                    weights = groups.get(name)
                    if weights is not None or not is_zero[rows].all():
                        is_zero[rows] = False  # also if this fails half-way
                        self._write_group(name, own, weights)
                        is_zero[rows] = weights is None
            finally:
                self._copies.synchronize()  # the device reads the adapter's own memory

    def _stage(self, weights: GroupWeights) -> GroupWeights:
        """The same on the device."""
        stage = self._staging.to_device
        return GroupWeights(
            ranks=weights.ranks,
            a=stage(weights.a),
            b=stage(weights.b),
            bias=None if weights.bias is None else stage(weights.bias),
            magnitude=None if weights.magnitude is None else stage(weights.magnitude),
        )

    def _write_group(self, name: str, own: "_OwnRows", weights: GroupWeights | None) -> None:
        """Also where the adapter has nothing, its rows become zeros. They are read there: a blend
        lists its parts' rows one after the other, for each group up to the last part that has
        weights in it, so those of a part before it too."""
        a, b = self._a[name], self._b[name]
        num_filled = 0 if weights is None else weights.a.shape[2]
        everywhere = weights is not None and len(weights.layers) == len(b)
        filled, left = own.ranks[:num_filled], own.ranks[num_filled if everywhere else 0 :]
        empty = torch.cat([left, own.bias, own.magnitude])
        a.index_fill_(2, empty, 0)
        b.index_fill_(1, empty, 0)
        if weights is None:
            return
        new_a, new_b = weights.a.to(a.dtype), weights.b.to(b.dtype)
        if everywhere:
            a.index_copy_(2, filled, new_a)
            b.index_copy_(1, filled, new_b)
        else:
            layers = self._stage_ids(weights.layers)
            slices = torch.arange(a.shape[1], device=a.device)
            a[layers[:, None, None], slices[:, None], filled] = new_a
            b[layers[:, None], filled] = new_b
        for row, values in ((own.bias, weights.bias), (own.magnitude, weights.magnitude)):
            if values is not None:
                b.index_copy_(1, row, values.to(b.dtype).unsqueeze(1))

    def _stage_ids(self, ids: Sequence[int]) -> Tensor:
        return self._staging.to_device(torch.tensor(ids, dtype=torch.int64))


@dataclass(frozen=True)
class _OwnRows:
    """The rows of one adapter, int64; empty where it has none."""

    ranks: Tensor
    bias: Tensor
    magnitude: Tensor


def _split_rows(rows: Tensor, adapter: Adapter) -> _OwnRows:
    sizes = [adapter.rank, int(adapter.has_bias), int(adapter.has_magnitude)]
    return _OwnRows(*torch.split(rows, sizes))
