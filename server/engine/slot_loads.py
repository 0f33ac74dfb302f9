"""Copies of adapters into slots of the pool, beside the passes."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from lorakeet.lora.adapter import Slot
from lorakeet.lora.host_store import HostStore
from lorakeet.lora.pool import AdapterPool
from lorakeet.server.engine.step import SlotLoad

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedLoads:
    """Each load is named once."""

    seconds: dict[Slot, float] = field(default_factory=dict)  # what a copy took that is complete
    errors: dict[Slot, str] = field(default_factory=dict)  # why a copy has failed


@dataclass(frozen=True)
class _RunningLoad:
    load: SlotLoad
    write: Future[None]
    asked: float


class SlotLoads:
    """Copies are made in the order in which they are asked for."""

    def __init__(self, pool: AdapterPool, host_store: HostStore) -> None:
        self._pool = pool
        self._host_store = host_store
        self._running: list[_RunningLoad] = []
        self._finished = FinishedLoads()

    def start(self, loads: Sequence[SlotLoad]) -> None:
        """Start these copies, or at least queue them; an adapter is held until it is copied, also
        when the host store puts it out. Whatever goes wrong is for `take_finished` to tell."""
        asked = time.perf_counter()
        for load in loads:
            try:
                if load.parts:
                    self._blend(load)
                    self._finished.seconds[load.slot] = time.perf_counter() - asked
                else:
                    adapter = self._host_store.get(load.adapter_id)
                    write = self._pool.write(load.slot, load.rows, adapter)
                    self._running.append(_RunningLoad(load, write, asked))
            except (ValueError, RuntimeError) as error:  # torch raises RuntimeError, also for OOM
                self._fail(load, error)

    def take_finished(self) -> FinishedLoads:
        """Slots whose copy has completed or failed since the last call. Never waits."""
        now = time.perf_counter()
        running, self._running = self._running, []
        for one in running:
            if not one.write.done():
                self._running.append(one)
                continue
            try:
                one.write.result()
            except Exception as error:  # of the pool's thread
                self._fail(one.load, error)
            else:
                self._finished.seconds[one.load.slot] = now - one.asked
        finished, self._finished = self._finished, FinishedLoads()
        return finished

    def _blend(self, load: SlotLoad) -> None:
        """There is nothing to copy."""
        parts = [(part.slot, part.num_rows, part.weight) for part in load.parts]
        self._pool.write_blend(load.slot, parts)

    def _fail(self, load: SlotLoad, error: Exception) -> None:
        message = "adapter %d cannot be copied to its slot"
        logger.error(message, load.adapter_id, exc_info=error)
        self._pool.clear(load.slot)  # its tables are set, and there is room for its vocabulary
        self._finished.errors[load.slot] = f"the adapter could not be copied to the device: {error}"
