"""Adapters between disk and host memory: first reads, reads of those put out, and unloading.

Reads happen on the host store's threads; everything else in the engine's, which calls `work` before
each step. An adapter that requests wait for is read as soon as there is room for it.
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import assert_never

import msgspec

from lorakeet.lora.adapter import Adapter, AdapterError, AdapterId, AdapterNotFoundError
from lorakeet.lora.host_store import HostStore
from lorakeet.lora.slots import PinError, PoolError
from lorakeet.server.engine.messages import (
    AdapterLoaded,
    AdapterUnloaded,
    AdapterUpdated,
    Event,
    LoadAdapter,
    LoadFailed,
    RequestOutput,
    UpdateAdapter,
)
from lorakeet.server.engine.scheduler import Scheduler

# By what a pin would leave too little of: its name, who of the others may need it, what helps.
_SHORT_BESIDE_PINS = {
    "slots": ("slots", "a blend", "raise max_loras"),
    "rows": ("rank rows", "a blend", "raise max_loras or lora_memory, or lower max_blend_rank"),
    "vocabulary_bytes": (
        "bytes for embedding and head rows",
        "one",
        "raise lora_vocabulary_memory",
    ),
}


def refusal(error: PoolError) -> str:
    """What a client is told."""
    if isinstance(error, PinError):
        kind, who, remedy = _SHORT_BESIDE_PINS[error.limit]
        return (
            f"pinning this adapter would leave no room for others: {error.room} {kind} are left, "
            f"and {who} of them may need {error.needed} ({remedy})"
        )
    match error.limit:
        case "rank":
            return f"rank {error.needed} is larger than the pool takes, which is {error.room}"
        case "slots" | "rows":
            return f"it needs {error.needed} of the pool's {error.room} {error.limit}"
        case "vocabulary_bytes":
            return (
                f"its embedding and head rows take {error.needed} bytes, there is room for "
                f"{error.room} (lora_vocabulary_memory)"
            )
        case _:
            assert_never(error.limit)


class HostTier:
    """What the engine does with adapters outside its steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        host_store: HostStore,
        send: Callable[[Event], None],
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called, on any thread, when a read has ended."""
        self._scheduler = scheduler
        self._host_store = host_store
        self._send = send
        self._wake = wake
        self._finished: SimpleQueue[tuple[AdapterId, Future[Adapter]]] = SimpleQueue()
        self._reading: dict[AdapterId, Future[Adapter]] = {}
        self._loaded: set[AdapterId] = set()  # known to the scheduler, not unloaded
        self._moved: set[AdapterId] = set()  # whose paths have changed during the read
        self._errors: dict[AdapterId, str] = {}  # of the last read, where it failed

    @property
    def errors(self) -> dict[AdapterId, str]:
        """Adapters that could not be read again, and why."""
        return self._errors

    def load(self, command: LoadAdapter) -> None:
        """Start to read an adapter for the first time; an event tells how it ended."""
        adapter_id = AdapterId(command.adapter_id)
        self._watch(
            adapter_id, self._host_store.load(adapter_id, Path(command.path), command.digest)
        )

    def update(self, command: UpdateAdapter) -> None:
        adapter_id, error = AdapterId(command.adapter_id), None
        if adapter_id in self._loaded:
            try:
                self._scheduler.slots.set_pinned(adapter_id, command.pinned)
                paths = [Path(path) for path in command.paths]
                self._host_store.update(adapter_id, paths, command.pinned)
                if adapter_id in self._reading:
                    self._moved.add(adapter_id)
            except PoolError as failure:
                error = refusal(failure)
        self._send(AdapterUpdated(adapter_id, error))

    def unload(self, adapter_id: AdapterId) -> None:
        """Once it is gone, or if it was not there, an event tells what that has freed."""
        if adapter_id in self._loaded:
            self._loaded.remove(adapter_id)
            self._scheduler.remove_adapter(adapter_id)
        else:
            if adapter_id in self._reading:
                message = "the adapter was unloaded while it was read"
                self._send(LoadFailed(adapter_id, False, message))
            self._free(AdapterUnloaded(adapter_id))

    def touch(self, adapter_id: AdapterId) -> None:
        """A request names it: the others are put out of host memory before it."""
        self._host_store.touch(adapter_id)

    def work(self) -> list[RequestOutput]:
        """Take in reads that have ended, and start those that are wanted. Returns the last outputs
        of requests whose adapter cannot be read any more."""
        outputs: list[RequestOutput] = []
        while not self._finished.empty():
            adapter_id, future = self._finished.get()
            if self._reading.get(adapter_id) is not future:  # it was unloaded in the meantime
                continue
            del self._reading[adapter_id]
            if self._scheduler.adapters.knows(adapter_id):
                outputs += self._finish_reload(adapter_id, future)
            else:
                self._finish_load(adapter_id, future)
        self._start_reloads()
        self._make_room()
        return outputs

    def take_unloaded(self) -> None:
        """Free adapters whose last request has ended."""
        for gone in self._scheduler.take_unloaded():
            self._free(
                AdapterUnloaded(
                    gone.adapter_id,
                    num_rows=gone.room.rows,
                    vocabulary_bytes=gone.room.vocabulary_bytes,
                    num_blocks=gone.num_blocks,
                )
            )

    # --- reads ---

    def _watch(self, adapter_id: AdapterId, future: Future[Adapter]) -> None:
        self._reading[adapter_id] = future
        future.add_done_callback(partial(self._on_read, adapter_id))

    def _on_read(self, adapter_id: AdapterId, future: Future[Adapter]) -> None:
        self._finished.put((adapter_id, future))
        self._wake()

    def _finish_load(self, adapter_id: AdapterId, future: Future[Adapter]) -> None:
        try:
            adapter = future.result()
            self._scheduler.add_adapter(
                adapter_id,
                adapter.digest,
                adapter.num_rows,
                invocation=adapter.invocation,
                vocabulary_bytes=adapter.vocabulary_bytes,
            )
        except (AdapterError, PoolError) as error:
            self._host_store.release(adapter_id)
            missing = isinstance(error, AdapterNotFoundError)
            message = refusal(error) if isinstance(error, PoolError) else str(error)
            self._send(LoadFailed(adapter_id, missing, message))
            return
        self._loaded.add(adapter_id)
        self._send(
            AdapterLoaded(
                adapter_id,
                digest=adapter.digest,
                rank=adapter.rank,
                modules=list(adapter.modules),
                num_bytes=adapter.num_bytes,
                seconds=self._host_store.seconds(adapter_id),
                num_rows=adapter.num_rows,
                blendable=adapter.blendable,
                vocab_size=adapter.vocabulary.size if adapter.vocabulary else None,
            )
        )

    def _finish_reload(self, adapter_id: AdapterId, future: Future[Adapter]) -> list[RequestOutput]:
        has_moved = adapter_id in self._moved
        self._moved.discard(adapter_id)
        try:
            future.result()
        except AdapterError as error:
            if has_moved:  # it is wanted still, and may lie where the read did not look
                return []
            message = f"the adapter cannot be read again from disk: {error}"
            self._errors[adapter_id] = message
            return self._scheduler.fail_adapter(adapter_id, message)
        self._errors.pop(adapter_id, None)
        self._scheduler.adapters.set_in_host(adapter_id, True)
        return []

    def _start_reloads(self) -> None:
        """In order: none overtakes one that needs more room."""
        for adapter_id, needed_with in self._scheduler.places.wanted():
            if adapter_id in self._reading:
                continue
            self._make_room(adapter_id)
            future = self._host_store.reload(adapter_id, needed_with)
            if future is None:
                return
            self._watch(adapter_id, future)

    def _make_room(self, adapter_id: AdapterId | None = None) -> None:
        adapters = self._scheduler.adapters

        def kept() -> set[AdapterId]:
            return self._scheduler.places.kept_in_host() | self._reading.keys()

        for gone in self._host_store.make_room(kept, adapter_id):
            adapters.set_in_host(gone, False)

    def _free(self, unloaded: AdapterUnloaded) -> None:
        adapter_id = AdapterId(unloaded.adapter_id)
        self._reading.pop(adapter_id, None)
        self._moved.discard(adapter_id)
        self._errors.pop(adapter_id, None)
        host_bytes = self._host_store.release(adapter_id)
        self._send(msgspec.structs.replace(unloaded, host_bytes=host_bytes))
