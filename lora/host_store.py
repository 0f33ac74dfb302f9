"""Adapters in host memory: read in the background, shared by content, freed by reference."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from lorakeet.lora.adapter import Adapter, AdapterError, AdapterId, GroupSpec
from lorakeet.lora.peft_files import read_adapter

_log = logging.getLogger(__name__)


class HostStore:
    """Holds each adapter's weights from the moment it is read until it is released.

    Ids with the same content share one `Adapter`. All methods may be called from any thread, and
    only `shutdown` waits.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        *,
        max_rank: int,
        dtype: torch.dtype,
        pin_memory: bool = False,
        base_weights: Mapping[str, Tensor] | None = None,
        base_model: str | None = None,
        num_threads: int = 2,
    ) -> None:
        """`num_threads` adapters are read at a time; the rest is as in `read_adapter`."""
        self._specs = tuple(specs)
        self._max_rank = max_rank
        self._dtype = dtype
        self._pin_memory = pin_memory
        self._base_weights = base_weights
        self._base_model = base_model
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-reader")
        self._lock = Lock()
        self._futures: dict[AdapterId, Future[Adapter]] = {}  # not released, not failed
        self._adapters: dict[AdapterId, Adapter] = {}
        self._seconds: dict[AdapterId, dict[str, float]] = {}
        self._by_digest: dict[str, Adapter] = {}
        self._references: Counter[str] = Counter()  # ids by digest

    def load(self, adapter_id: AdapterId, path: Path) -> Future[Adapter]:
        """Start to read the folder at `path`. Ids are never used again.

        The future raises AdapterError when the adapter cannot be loaded, or was released before
        it was; then nothing of it is kept. It raises CancelledError when it had not begun.
        """
        with self._lock:
            assert adapter_id not in self._futures
            future = self._executor.submit(self._read, adapter_id, path)
            self._futures[adapter_id] = future
        return future

    def get(self, adapter_id: AdapterId) -> Adapter:
        """A loaded adapter; KeyError when it is not, or no longer, loaded."""
        with self._lock:
            return self._adapters[adapter_id]

    def seconds(self, adapter_id: AdapterId) -> dict[str, float]:
        """What the stages of a loaded adapter took: "read" and "check"."""
        with self._lock:
            return dict(self._seconds[adapter_id])

    def release(self, adapter_id: AdapterId) -> int:
        """Forget an adapter, also one that is being read, failed or is not known.

        Returns the bytes that this freed: 0 while another id holds the same content.
        """
        with self._lock:
            future = self._futures.pop(adapter_id, None)
            adapter = self._adapters.pop(adapter_id, None)
            freed = 0
            if adapter is not None:
                del self._seconds[adapter_id]
                self._references[adapter.digest] -= 1
                if self._references[adapter.digest] == 0:
                    del self._references[adapter.digest], self._by_digest[adapter.digest]
                    freed = adapter.num_bytes
        if future is not None:
            future.cancel()  # outside the lock: it calls the future's callbacks
        return freed

    @property
    def num_bytes(self) -> int:
        """Host memory of all adapters, shared content counted once."""
        with self._lock:
            return sum(adapter.num_bytes for adapter in self._by_digest.values())

    def shutdown(self) -> None:
        """Cancel what has not begun, and wait for the reads that run."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _read(self, adapter_id: AdapterId, path: Path) -> Adapter:
        """On a reader thread. Whatever is wrong ends this load and nothing else."""
        seconds: dict[str, float] = {}
        try:
            adapter = read_adapter(
                path,
                self._specs,
                max_rank=self._max_rank,
                dtype=self._dtype,
                pin_memory=self._pin_memory,
                base_weights=self._base_weights,
                base_model=self._base_model,
                on_stage=seconds.__setitem__,
            )
            return self._keep(adapter_id, adapter, seconds)
        except AdapterError:
            self.release(adapter_id)
            raise
        except Exception as error:
            self.release(adapter_id)
            _log.exception("the adapter could not be read")
            raise AdapterError(f"the adapter could not be read: {type(error).__name__}") from error

    def _keep(self, adapter_id: AdapterId, adapter: Adapter, seconds: dict[str, float]) -> Adapter:
        with self._lock:
            if adapter_id not in self._futures:
                raise AdapterError("the adapter was unloaded while it was read")
            shared = self._by_digest.setdefault(adapter.digest, adapter)
            self._references[adapter.digest] += 1
            self._adapters[adapter_id] = shared
            self._seconds[adapter_id] = seconds
            return shared
