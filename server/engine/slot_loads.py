"""Copies of adapters into slots of the pool, beside the passes."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lorakeet.lora.adapter import Adapter, Slot
from lorakeet.lora.host_store import HostStore
from lorakeet.lora.pool import AdapterPool, PoolWrite
from lorakeet.server.engine.step import SlotLoad

logger = logging.getLogger(__name__)

_STEP_BYTES = 2**26  # after so many, the next copies begin in the next step: see Staging


@dataclass(frozen=True)
class _WaitingLoad:
    load: SlotLoad
    adapter: Adapter | None  # held: it may be put out of the host store; None: a blend
    asked: float


@dataclass(frozen=True)
class _RunningLoad:
    slot: Slot
    write: PoolWrite
    asked: float


class SlotLoads:
    """Copies begin in the order in which they are asked for, so a blend's after its parts'."""

    def __init__(self, pool: AdapterPool, host_store: HostStore) -> None:
        self._pool = pool
        self._host_store = host_store
        self._waiting: deque[_WaitingLoad] = deque()
        self._running: list[_RunningLoad] = []

    def start(self, loads: Sequence[SlotLoad]) -> dict[Slot, str]:
        """Start these copies, or at least queue them. Returns the slots whose copy has failed, and
        why: also of earlier calls."""
        asked = time.perf_counter()
        for load in loads:
            adapter = None if load.parts else self._host_store.get(load.adapter_id)
            self._waiting.append(_WaitingLoad(load, adapter, asked))
        errors: dict[Slot, str] = {}
        num_bytes = 0
        while self._waiting and num_bytes < _STEP_BYTES:
            waiting = self._waiting.popleft()
            num_bytes += 0 if waiting.adapter is None else waiting.adapter.num_bytes
            self._start(waiting, errors)
        return errors

    def _start(self, waiting: _WaitingLoad, errors: dict[Slot, str]) -> None:
        slot = waiting.load.slot
        try:
            write = self._write(waiting.load, waiting.adapter)
        except (ValueError, RuntimeError) as error:  # torch raises RuntimeError, also for OOM
            logger.exception("adapter %d cannot be copied to its slot", waiting.load.adapter_id)
            errors[slot] = f"the adapter could not be copied to the device: {error}"
        else:
            self._running.append(_RunningLoad(slot, write, waiting.asked))

    def _write(self, load: SlotLoad, adapter: Adapter | None) -> PoolWrite:
        self._pool.clear(load.slot)
        if adapter is not None:
            return self._pool.write(load.slot, load.rows, adapter)
        parts = [(part.slot, part.num_rows, part.weight) for part in load.parts]
        return self._pool.write_blend(load.slot, parts)

    def take_finished(self) -> list[tuple[Slot, float]]:
        """Slots whose copy has completed since the last call, and the seconds that it took."""
        now = time.perf_counter()
        done = [(load.slot, now - load.asked) for load in self._running if load.write.done()]
        slots = {slot for slot, _ in done}
        self._running = [load for load in self._running if load.slot not in slots]
        return done
