"""Adapters in host memory: read in the background, shared by content, bounded, freed by reference.

An adapter that is not in use may be put out to make room for another. It stays known, and is read
again from its folder when it is wanted; only the same content is then taken.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from lorakeet.lora.adapter import Adapter, AdapterError, AdapterId, GroupSpec
from lorakeet.lora.host_memory import CPU
from lorakeet.lora.peft_files import read_adapter
from lorakeet.lora.read_faults import ending_only_this_read
from lorakeet.lora.streams import keeping_nothing

_NUM_WORKERS = max(4, min(8, (os.cpu_count() or 1) // 2))  # threads that the reads share


def default_host_bytes() -> int:
    """A quarter of the memory that this process may use: the machine's, or its cgroup's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total // 4


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    """Each works alone: the pieces are small, and teams of threads that wait for each other hold up
    all."""
    return ThreadPoolExecutor(count, name, initializer=torch.set_num_threads, initargs=(1,))


def _let_go(adapter: Adapter) -> None:
    """To unpin and free it is long work, which falls to who has held it last."""


class Replicas(Protocol):
    """The same adapters in the other processes that a model is cut over (tensor parallelism)."""

    def read(self, adapter_id: AdapterId, path: Path) -> Callable[[], set[str]]:
        """Have all read it; what is returned waits for the digests that they found.

        It raises AdapterError when one could not, once all are done."""

    def release(self, adapter_id: AdapterId) -> None:
        """Have all forget it, if they have it."""


@dataclass
class _Record:
    """What is known of one id until it is released."""

    paths: Sequence[Path]  # where it lies; the first that holds it is read
    digest: str | None  # what its content must be; None: whatever is found first
    pinned: bool = False
    num_bytes: int = 0  # of the adapter, once it has been read
    adapter: Adapter | None = None  # while it is in memory
    future: Future[Adapter] | None = None  # of the read under way
    reserved: int = 0  # bytes kept free for that read
    seconds: dict[str, float] = field(default_factory=dict)  # of the last read, by stage


class HostStore:
    """Holds each adapter's weights from the moment it is read until it is put out or released.

    Ids with the same content share one `Adapter`. All methods may be called from any thread, and
    only `shutdown` waits.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        *,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        max_bytes: int | None = None,
        base_weights: Mapping[str, Tensor] | None = None,
        base_model: str | None = None,
        num_threads: int = 2,
        replicas: Replicas | None = None,
    ) -> None:
        """`num_threads` adapters are read at a time; None for `max_bytes` is no limit; the rest is
        as in `read_adapter`. `replicas` hold what this store holds, or soon will."""
        self.max_bytes = max_bytes
        self._specs = tuple(specs)
        self._max_rank = max_rank
        self._dtype = dtype
        self._device = device
        self._base_weights = base_weights
        self._base_model = base_model
        self._replicas = replicas
        self._readers = _threads(num_threads, "adapter-reader")
        self._workers = _threads(_NUM_WORKERS, "adapter-worker")
        self._releaser = _threads(1, "adapter-releaser")
        self._lock = Lock()
        self._records: dict[AdapterId, _Record] = {}  # least recently used first
        self._by_digest: dict[str, Adapter] = {}
        self._references: Counter[str] = Counter()  # ids in memory, by digest
        self._num_bytes = 0

    # --- reads ---

    def load(self, adapter_id: AdapterId, path: Path, digest: str | None = None) -> Future[Adapter]:
        """Start to read the folder at `path` for the first time. Ids are never used again.

        The future raises AdapterError when the adapter cannot be loaded, has not this digest, or
        was released before it was read; then nothing of it is kept. It raises CancelledError when
        the read had not begun.
        """
        with self._lock:
            assert adapter_id not in self._records
            record = self._records[adapter_id] = _Record([path], digest)
            return self._submit(adapter_id, record)

    def reload(
        self, adapter_id: AdapterId, beside: Collection[AdapterId] = ()
    ) -> Future[Adapter] | None:
        """Start to read an adapter again that was put out; None: there is no room for it now.

        It is always taken when nothing else is held but `beside`, what it is needed with. The
        future is as in `load`; a failed read leaves the id known.
        """
        with self._lock:
            record = self._records[adapter_id]
            assert record.adapter is None
            assert record.future is None
            if self._excess(record.num_bytes) > 0 and self._holds_others(beside):
                return None
            record.reserved = record.num_bytes
            return self._submit(adapter_id, record)

    def update(self, adapter_id: AdapterId, paths: Sequence[Path], pinned: bool) -> None:
        """Where it can be read again from now on, and whether it may be put out."""
        with self._lock:
            record = self._records[adapter_id]
            record.paths, record.pinned = paths, pinned

    # --- what is in memory ---

    def get(self, adapter_id: AdapterId) -> Adapter:
        """An adapter that is in memory; KeyError when it is not, or no longer."""
        with self._lock:
            adapter = self._records[adapter_id].adapter
        if adapter is None:
            raise KeyError(adapter_id)
        return adapter

    def holds(self, adapter_id: AdapterId) -> bool:
        with self._lock:
            record = self._records.get(adapter_id)
            return record is not None and record.adapter is not None

    def touch(self, adapter_id: AdapterId) -> None:
        """It is used now: the others are put out before it."""
        with self._lock:
            if (record := self._records.pop(adapter_id, None)) is not None:
                self._records[adapter_id] = record

    def seconds(self, adapter_id: AdapterId) -> dict[str, float]:
        """What the stages of its last read took: "read" and "check". KeyError if not known."""
        with self._lock:
            return dict(self._records[adapter_id].seconds)

    def make_room(
        self, kept: Callable[[], Container[AdapterId]], adapter_id: AdapterId | None = None
    ) -> list[AdapterId]:
        """Put adapters out until the rest, and a reload of `adapter_id`, are within the limit.

        The least recently used go first; pinned ones stay, and those that `kept` gives, which is
        called if need be. Returns those that were put out.
        """
        with self._lock:
            size = 0 if adapter_id is None else self._records[adapter_id].num_bytes
            return self._put_out(size, kept)

    def release(self, adapter_id: AdapterId) -> int:
        """Forget an adapter, also one that is being read, failed or is not known.

        Returns the bytes that this freed: 0 while another id holds the same content.
        """
        with self._lock:
            record = self._records.pop(adapter_id, None)
            freed = 0 if record is None else self._drop(adapter_id, record)
            future = None if record is None else record.future
        if future is not None:
            future.cancel()  # outside the lock: it calls the future's callbacks
        return freed

    @property
    def num_bytes(self) -> int:
        """Host memory of all adapters, shared content counted once."""
        return self._num_bytes

    def shutdown(self) -> None:
        """Cancel what has not begun, and wait for the reads that run."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._workers.shutdown()
        self._releaser.shutdown()

    # --- with the lock held ---

    def _submit(self, adapter_id: AdapterId, record: _Record) -> Future[Adapter]:
        read = partial(self._read, adapter_id, record)
        record.future = self._readers.submit(keeping_nothing, read)
        return record.future

    def _holds_others(self, ids: Collection[AdapterId]) -> bool:
        """Other adapters are in memory or about to be, and will go again."""
        return any(
            record.reserved or (record.adapter is not None and not record.pinned)
            for adapter_id, record in self._records.items()
            if adapter_id not in ids
        )

    def _excess(self, size: int) -> int:
        """Bytes over the limit if so many were added."""
        if self.max_bytes is None:
            return 0
        reserved = sum(record.reserved for record in self._records.values())
        return self._num_bytes + reserved + size - self.max_bytes

    def _put_out(self, size: int, kept: Callable[[], Container[AdapterId]]) -> list[AdapterId]:
        gone: list[AdapterId] = []
        excess = self._excess(size)
        if excess <= 0:
            return gone
        stays = kept()
        for adapter_id, record in self._records.items():
            if record.adapter is not None and not record.pinned and adapter_id not in stays:
                gone.append(adapter_id)
                excess -= self._drop(adapter_id, record)
                if excess <= 0:
                    break
        return gone

    def _drop(self, adapter_id: AdapterId, record: _Record) -> int:
        adapter, record.adapter = record.adapter, None
        record.reserved = 0
        if adapter is None:
            return 0
        self._release_replicas(adapter_id)
        self._references[adapter.digest] -= 1
        if self._references[adapter.digest]:
            return 0
        del self._references[adapter.digest], self._by_digest[adapter.digest]
        self._num_bytes -= adapter.num_bytes
        with contextlib.suppress(RuntimeError):  # after the shutdown
            self._releaser.submit(_let_go, adapter)
        return adapter.num_bytes

    # --- on a reader thread ---

    def _read(self, adapter_id: AdapterId, record: _Record) -> Adapter:
        *others, last = record.paths
        for path in others:
            with contextlib.suppress(AdapterError):
                return self._read_folder(adapter_id, record, path)
            self._release_replicas(adapter_id)  # before they read it under another path
        try:
            return self._read_folder(adapter_id, record, last)
        except AdapterError:
            self._forget_read(adapter_id, record)
            raise

    def _read_folder(self, adapter_id: AdapterId, record: _Record, path: Path) -> Adapter:
        seconds: dict[str, float] = {}
        with ending_only_this_read(path):
            adapter = self._read_everywhere(adapter_id, path, seconds)
            return self._keep(adapter_id, record, adapter, seconds)

    def _read_everywhere(
        self, adapter_id: AdapterId, path: Path, seconds: dict[str, float]
    ) -> Adapter:
        others = None if self._replicas is None else self._replicas.read(adapter_id, path)
        try:
            adapter = read_adapter(
                path,
                self._specs,
                max_rank=self._max_rank,
                dtype=self._dtype,
                workers=self._workers,
                device=self._device,
                base_weights=self._base_weights,
                base_model=self._base_model,
                on_stage=seconds.__setitem__,
            )
        except Exception:
            with contextlib.suppress(AdapterError):
                if others is not None:
                    others()  # they must be done with it before it is read again
            raise
        if others is not None and others() != {adapter.digest}:
            raise AdapterError("its files changed while they were read")
        return adapter

    def _keep(
        self, adapter_id: AdapterId, record: _Record, adapter: Adapter, seconds: dict[str, float]
    ) -> Adapter:
        with self._lock:
            if self._records.get(adapter_id) is not record:
                raise AdapterError("the adapter was unloaded while it was read")
            if record.digest not in (None, adapter.digest):
                raise AdapterError(
                    "its files have changed since it was loaded: load it again, with load_inplace"
                )
            if adapter.digest not in self._by_digest:
                self._by_digest[adapter.digest] = adapter
                self._num_bytes += adapter.num_bytes
            self._references[adapter.digest] += 1
            shared = self._by_digest[adapter.digest]
            record.adapter, record.digest = shared, adapter.digest
            record.num_bytes, record.seconds = adapter.num_bytes, seconds
            record.future, record.reserved = None, 0
            return shared

    def _forget_read(self, adapter_id: AdapterId, record: _Record) -> None:
        """After a failure: an id that was never loaded is not known any more."""
        self._release_replicas(adapter_id)
        with self._lock:
            record.future, record.reserved = None, 0
            if record.num_bytes == 0:
                self._records.pop(adapter_id, None)

    def _release_replicas(self, adapter_id: AdapterId) -> None:
        if self._replicas is not None:
            self._replicas.release(adapter_id)
