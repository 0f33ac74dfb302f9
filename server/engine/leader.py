"""Rank 0 of a model that is cut over several processes: the others, and steps that all ranks do."""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

from lorakeet.configs.settings import Settings
from lorakeet.lora.adapter import AdapterError, AdapterId, Slot
from lorakeet.models.process_group import address_of, listen
from lorakeet.server.engine.process_client import describe_exit
from lorakeet.server.engine.rank_messages import (
    STAGES,
    AdapterRead,
    Alive,
    Failed,
    Launch,
    Order,
    Progress,
    ReadAdapter,
    ReleaseAdapter,
    Report,
    SlotsFilled,
    Stage,
)
from lorakeet.server.engine.runner import Runner
from lorakeet.server.engine.step import Step, StepResult

logger = logging.getLogger(__name__)

_LACKS: dict[Stage, str] = {
    "starting": "has not started",
    "started": "has not joined the others",
    "joined": "has not loaded its part of the model",
    "loaded": "has not made its part of the model ready",
}


@dataclass(eq=False)
class _Follower:
    rank: int
    process: "subprocess.Popen[bytes]"
    connection: "Connection[bytes, bytes]"
    failure: str | None = None  # in its own words


class Followers:
    """The processes of ranks 1 and up, which end with this one.

    When one of them ends, is not ready in time or gives no sign any more, all are killed, and
    `on_death` is called with the reason, once and in a thread of its own.
    """

    def __init__(self, settings: Settings, model: Path, on_death: Callable[[str], None]) -> None:
        self.listener = listen()
        self._on_death = on_death
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = threading.Lock()  # all ranks get orders in the same order
        self._ending = threading.Lock()  # another one: a send may wait for a rank that hangs
        self._ended = threading.Event()
        self._ready = threading.Event()
        self._reads: dict[tuple[AdapterId, int], Future[str]] = {}  # digests, by id and rank
        self._filled: SimpleQueue[SlotsFilled] = SimpleQueue()
        self._start_timeout, self._step_timeout = settings.start_timeout, settings.step_timeout
        others: list[Stage] = ["starting"] * (settings.tensor_parallel_size - 1)
        self._stages: list[Stage] = ["started", *others]  # by rank
        ranks = range(1, settings.tensor_parallel_size)
        address = address_of(self.listener)
        self._followers = [_spawn(settings, model, address, rank) for rank in ranks]
        for follower in self._followers:
            threading.Thread(target=self._listen, args=(follower,), daemon=True).start()
        threading.Thread(target=self._watch_start, daemon=True).start()

    def reach(self, stage: Stage, rank: int = 0) -> None:
        """A rank's start has come so far; rank 0 tells it of itself, and must reach all stages."""
        self._stages[rank] = stage
        if all(stage == "ready" for stage in self._stages):
            self._ready.set()

    def wait_ready(self) -> None:
        """Rank 0 is; return once all are. If one never is, `on_death` is called."""
        self.reach("ready")
        self._ready.wait()

    def send(self, order: Order) -> None:
        """To all ranks. One that is gone is `on_death`'s to deal with."""
        message = self._encoder.encode(order)
        with self._sending:
            for follower in self._followers:
                try:
                    follower.connection.send_bytes(message)
                except OSError:
                    return

    # --- adapters: lora.host_store.Replicas ---

    def read(self, adapter_id: AdapterId, path: Path) -> Callable[[], set[str]]:
        """Have every rank read the adapter; what is returned waits for the digests that they found.

        It raises AdapterError when a rank could not, once all are done.
        """
        futures: list[Future[str]] = []
        for follower in self._followers:
            futures.append(Future())
            self._reads[adapter_id, follower.rank] = futures[-1]
        self.send(ReadAdapter(adapter_id, str(path)))
        if self._ended.is_set():  # perhaps before these were there to be given up
            self._give_up_reads()

        def wait() -> set[str]:
            errors = [future.exception() for future in futures]
            if (error := next(filter(None, errors), None)) is not None:
                raise error
            return {future.result() for future in futures}

        return wait

    def release(self, adapter_id: AdapterId) -> None:
        self.send(ReleaseAdapter(adapter_id))

    def take_filled(self) -> list[SlotsFilled]:
        """What ranks have reported of slots since the last call."""
        reports = []
        try:
            while True:
                reports.append(self._filled.get_nowait())
        except Empty:
            return reports

    # --- their end ---

    def close(self) -> None:
        """Kill them all; they keep nothing that has to be put in order."""
        self._end()
        self._give_up_reads()
        for follower in self._followers:
            follower.process.wait()

    def _end(self) -> bool:
        """Kill them; False: that was done before."""
        with self._ending:
            if self._ended.is_set():
                return False
            self._ended.set()
        for follower in self._followers:
            follower.process.kill()
        return True

    def _die(self, reason: str) -> None:
        if self._end():
            self._on_death(reason)  # first: who waits for a read is to get the reason
            self._give_up_reads()

    def _give_up_reads(self) -> None:
        for key in list(self._reads):
            if (future := self._reads.pop(key, None)) is not None:
                future.set_exception(AdapterError("the engine has stopped"))

    # --- threads ---

    def _listen(self, follower: _Follower) -> None:
        """Take in one rank's reports, to its end or until there are none for too long."""
        decoder, connection = msgspec.msgpack.Decoder(Report), follower.connection
        try:
            while connection.poll(self._limit(follower)):
                self._receive(follower, decoder.decode(connection.recv_bytes()))
            self._die(
                f"rank {follower.rank} has given no sign for {self._step_timeout:g} seconds"
                " (step_timeout): it hangs, or waits for a rank that does"
            )
        except (EOFError, OSError):
            reason = follower.failure or describe_exit("process", follower.process.wait())
            self._die(f"rank {follower.rank}: {reason}")

    def _limit(self, follower: _Follower) -> float | None:
        """Seconds in which it must report; its start has another limit, of all together."""
        return self._step_timeout if self._stages[follower.rank] == "ready" else None

    def _receive(self, follower: _Follower, report: Report) -> None:
        match report:
            case Progress():
                self.reach(report.stage, follower.rank)
            case Alive():
                pass
            case AdapterRead():
                future = self._reads.pop((AdapterId(report.adapter_id), follower.rank), None)
                if future is None:
                    return
                if report.digest is None:
                    future.set_exception(AdapterError(report.error))
                else:
                    future.set_result(report.digest)
            case SlotsFilled():
                self._filled.put(report)
            case Failed():
                follower.failure = report.message

    def _watch_start(self) -> None:
        if self._ready.wait(self._start_timeout):
            return
        last = min(self._stages, key=STAGES.index)
        if last == "ready":  # just now
            return
        ranks = [str(rank) for rank, stage in enumerate(self._stages) if stage == last]
        self._die(
            f"rank {', '.join(ranks)} {_LACKS[last]} after {self._start_timeout:g} seconds"
            " (start_timeout)"
        )


class LeadingRunner:
    """An `Executor`: each step is done by all ranks, and a slot is loaded when it is on all."""

    def __init__(self, runner: Runner, followers: Followers) -> None:
        self._runner = runner
        self._followers = followers
        self._answers: Counter[Slot] = Counter()  # ranks that have filled a slot, or failed to
        self._errors: dict[Slot, str] = {}
        self._seconds: dict[Slot, float] = {}

    @property
    def depth(self) -> int:
        return self._runner.depth

    def launch(self, step: Step) -> Callable[[], StepResult]:
        self._followers.send(Launch(step))
        wait = self._runner.launch(step)
        return lambda: self._merge(wait())

    def _merge(self, result: StepResult) -> StepResult:
        self._seconds |= zip(result.loaded, result.load_seconds, strict=True)
        own = SlotsFilled(result.loaded, result.load_errors)
        for report in (own, *self._followers.take_filled()):
            self._answers.update([*report.loaded, *report.errors])
            self._errors |= report.errors
        size = self._runner.group.size
        done = [slot for slot, count in self._answers.items() if count == size]
        for slot in done:
            del self._answers[slot]
        errors = {slot: self._errors.pop(slot) for slot in done if slot in self._errors}
        seconds = {slot: self._seconds.pop(slot, 0.0) for slot in done}
        loaded = tuple(slot for slot in done if slot not in errors)
        return replace(
            result,
            loaded=loaded,
            load_seconds=tuple(seconds[slot] for slot in loaded),
            load_errors=errors,
        )


def _spawn(settings: Settings, model: Path, address: str, rank: int) -> _Follower:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "lorakeet.server.engine.follower"),
                *(str(theirs.fileno()), str(rank), address, str(model)),
            ],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "TQDM_DISABLE": "1"},  # rank 0's progress bars are enough
        )
    assert process.stdin is not None
    process.stdin.write(settings.model_dump_json().encode() + b"\n")
    process.stdin.flush()
    return _Follower(rank, process, Connection(ours.detach()))
