"""Copies of adapters into slots of the pool, beside the passes."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lorakeet.lora.adapter import Slot
from lorakeet.lora.host_store import HostStore
from lorakeet.lora.pool import AdapterPool, PoolWrite
from lorakeet.server.engine.step import SlotLoad

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _RunningLoad:
    slot: Slot
    write: PoolWrite
    started: float


class SlotLoads:
    def __init__(self, pool: AdapterPool, host_store: HostStore) -> None:
        self._pool = pool
        self._host_store = host_store
        self._running: list[_RunningLoad] = []

    def start(self, loads: Sequence[SlotLoad]) -> dict[Slot, str]:
        """Returns the slots whose copy has failed, and why."""
        errors = {}
        for load in loads:
            started = time.perf_counter()
            try:
                write = self._write(load)
            except (ValueError, RuntimeError) as error:  # torch raises RuntimeError, also for OOM
                logger.exception("adapter %d cannot be copied to its slot", load.adapter_id)
                errors[load.slot] = f"the adapter could not be copied to the device: {error}"
            else:
                self._running.append(_RunningLoad(load.slot, write, started))
        return errors

    def _write(self, load: SlotLoad) -> PoolWrite:
        self._pool.clear(load.slot)
        if load.parts:
            parts = [(part.slot, part.num_rows, part.weight) for part in load.parts]
            return self._pool.write_blend(load.slot, parts)
        adapter = self._host_store.get(load.adapter_id)
        return self._pool.write(load.slot, load.rows, adapter)

    def take_finished(self) -> list[tuple[Slot, float]]:
        """Slots whose copy has completed since the last call, and the seconds that it took."""
        now = time.perf_counter()
        done = [(load.slot, now - load.started) for load in self._running if load.write.done()]
        slots = {slot for slot, _ in done}
        self._running = [load for load in self._running if load.slot not in slots]
        return done
