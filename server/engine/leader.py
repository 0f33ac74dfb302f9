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
from lorakeet.server.engine.process_client import describe_exit
from lorakeet.server.engine.rank_messages import (
    STAGES,
    AdapterRead,
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
    "joined": "has not made its part of the model ready",
}


@dataclass(eq=False)
class _Follower:
    rank: int
    process: "subprocess.Popen[bytes]"
    connection: "Connection[bytes, bytes]"
    stage: Stage = "starting"
    failure: str | None = None  # in its own words


class Followers:
    """The processes of ranks 1 and up, which end with this one.

    When one of them ends, or is not ready in time, the rest are killed, and `on_death` is called
    with the reason, once and in a thread of its own.
    """

    def __init__(self, settings: Settings, model: Path, on_death: Callable[[str], None]) -> None:
        self.address = f"127.0.0.1:{_free_port()}"
        self._on_death = on_death
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = threading.Lock()  # all ranks get orders in the same order
        self._ending = threading.Lock()  # another one: a send may wait for a rank that hangs
        self._ended = threading.Event()
        self._ready = threading.Event()
        self._reads: dict[tuple[AdapterId, int], Future[str]] = {}  # digests, by id and rank
        self._filled: SimpleQueue[SlotsFilled] = SimpleQueue()
        self._start_timeout = settings.start_timeout
        ranks = range(1, settings.tensor_parallel_size)
        self._followers = [_spawn(settings, model, self.address, rank) for rank in ranks]
        for follower in self._followers:
            threading.Thread(target=self._listen, args=(follower,), daemon=True).start()
        threading.Thread(target=self._watch_start, daemon=True).start()

    def wait_ready(self) -> None:
        """Return once all ranks are; if one never is, `on_death` is called."""
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
        self._give_up_reads()
        return True

    def _die(self, reason: str) -> None:
        if self._end():
            self._on_death(reason)

    def _give_up_reads(self) -> None:
        for key in list(self._reads):
            if (future := self._reads.pop(key, None)) is not None:
                future.set_exception(AdapterError("the engine has stopped"))

    # --- threads ---

    def _listen(self, follower: _Follower) -> None:
        """Take in one rank's reports, to its end."""
        decoder = msgspec.msgpack.Decoder(Report)
        try:
            while True:
                self._receive(follower, decoder.decode(follower.connection.recv_bytes()))
        except (EOFError, OSError):
            code = follower.process.wait()
        reason = follower.failure or describe_exit("process", code)
        self._die(f"rank {follower.rank}: {reason}")

    def _receive(self, follower: _Follower, report: Report) -> None:
        match report:
            case Progress():
                follower.stage = report.stage
                if all(other.stage == "ready" for other in self._followers):
                    self._ready.set()
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
        last = min((follower.stage for follower in self._followers), key=STAGES.index)
        ranks = [str(follower.rank) for follower in self._followers if follower.stage == last]
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


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
