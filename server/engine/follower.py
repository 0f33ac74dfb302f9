"""A rank above 0 in a process of its own: `python -m …engine.follower FD RANK ADDRESS MODEL`.

FD is its end of a socket pair to rank 0: orders come from there, reports go back. ADDRESS is where
the ranks meet. Settings come on standard input, as in `process.py`, and its end is how it learns
that rank 0 is gone.
"""

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import structlog

from lorakeet.configs.settings import Settings
from lorakeet.lora.adapter import Adapter, AdapterError, AdapterId
from lorakeet.models.process_group import join
from lorakeet.server import logs
from lorakeet.server.engine.devices import choose_device
from lorakeet.server.engine.process import exit_at_end_of_input, set_up_threads
from lorakeet.server.engine.rank_messages import (
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
)
from lorakeet.server.engine.run import SETTLE_SECONDS, USER_ERRORS
from lorakeet.server.engine.runner import Runner

logger = logging.getLogger(__name__)

_SIGN_INTERVAL = 0.25  # seconds
_PR_SET_PDEATHSIG = 1  # prctl(2): the signal that comes when the parent dies


class Channel:
    """The way to rank 0; reports may be sent from any thread."""

    def __init__(self, connection: "Connection[bytes, bytes]") -> None:
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Order)
        self._lock = threading.Lock()
        self._next_sign = 0.0

    def receive(self) -> Order:
        """Wait for the next order, and give signs of life. Raises EOFError when rank 0 is gone."""
        while True:
            if time.monotonic() >= self._next_sign:
                self.report(Alive())
                self._next_sign = time.monotonic() + _SIGN_INTERVAL
            if self._connection.poll(max(0.0, self._next_sign - time.monotonic())):
                order: Order = self._decoder.decode(self._connection.recv_bytes())
                return order

    def report(self, report: Report) -> None:
        with self._lock:
            self._connection.send_bytes(self._encoder.encode(report))


def follow(settings: Settings, rank: int, address: str, model: Path, channel: Channel) -> None:
    """Do as rank 0 does, until it is gone (EOFError)."""
    channel.report(Progress("started"))
    device, size = choose_device(settings, rank), settings.tensor_parallel_size
    group = join(rank, size, address, device, settings.start_timeout + settings.step_timeout)
    channel.report(Progress("joined"))
    runner = Runner(settings, model, group, on_loaded=lambda: channel.report(Progress("loaded")))
    channel.report(Progress("ready"))
    while True:
        match channel.receive():
            case Launch(step):
                result = runner.launch(step)()
                if result.loaded or result.load_errors:
                    channel.report(SlotsFilled(result.loaded, result.load_errors))
            case ReadAdapter(adapter_id, path):
                future = runner.host_store.load(AdapterId(adapter_id), Path(path))
                future.add_done_callback(partial(_report_read, channel, adapter_id))
            case ReleaseAdapter(adapter_id):
                runner.host_store.release(AdapterId(adapter_id))


def _report_read(channel: Channel, adapter_id: int, future: "Future[Adapter]") -> None:
    try:
        channel.report(AdapterRead(adapter_id, future.result().digest))
    except AdapterError as error:
        channel.report(AdapterRead(adapter_id, None, str(error)))


def main() -> None:
    fd, rank, address, model = sys.argv[1:]
    if sys.platform == "linux":  # also when it hangs, and cannot see the end of its input
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings = Settings.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=exit_at_end_of_input, daemon=True).start()
    logs.configure(settings.log_level)
    structlog.contextvars.bind_contextvars(rank=int(rank))
    set_up_threads(settings)
    channel = Channel(Connection(int(fd)))
    try:
        follow(settings, int(rank), address, Path(model), channel)
    except (EOFError, ConnectionError):
        pass
    except USER_ERRORS as error:
        channel.report(Failed(str(error)))
    except Exception as error:
        time.sleep(SETTLE_SECONDS)
        logger.exception("rank %s is dead", rank)
        channel.report(Failed(f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    try:
        main()
    finally:  # whatever is wrong, nothing here may hold the process back
        os._exit(1)
