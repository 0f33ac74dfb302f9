"""The engine in a process of its own: `python -m lorakeet.server.engine.process SOCKETS MODEL`.

SOCKETS is a folder of two Unix sockets: commands come from one, events go to the other. MODEL is
the model's folder. Settings come as one line of JSON on standard input, which then stays open for
as long as the API process lives: its end is how the engine learns that its parent is gone.
"""

import gc
import logging
import math
import os
import shutil
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
import zmq

from lorakeet.configs.settings import Settings
from lorakeet.server import logs
from lorakeet.server.engine.devices import uses_cuda
from lorakeet.server.engine.messages import Command, EngineDead, Event, endpoints
from lorakeet.server.engine.run import run_engine

LINGER = 2000  # milliseconds in which the last events can still leave
_THREADS_BESIDE_GPU = 4
# Python lets a thread go on for 5 ms: so long those that read and copy adapters would wait for the
# loop after each of their calls into torch.
_SWITCH_SECONDS = 0.001


class SocketInbox:
    """An `Inbox` on a ZeroMQ socket; `wake` writes to a second one inside the process."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._commands = context.socket(zmq.PULL)
        self._commands.set_hwm(0)
        self._commands.bind(address)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(self._commands, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def receive(self, timeout: float) -> list[Command]:
        commands = self._drain()
        if commands or timeout <= 0:
            return commands
        if any(
            source == self._wake_read for source, _ in self._poller.poll(math.ceil(timeout * 1000))
        ):
            os.read(self._wake_read, 4096)
        return self._drain()

    def wake(self) -> None:
        with suppress(BlockingIOError):  # it is full of wake-ups already
            os.write(self._wake_write, b"\0")

    def _drain(self) -> list[Command]:
        commands: list[Command] = []
        while True:
            try:
                commands.append(self._decoder.decode(self._commands.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return commands


def main() -> int:
    """Run the engine; returns the exit code: 0 after `Shutdown`, 1 when it could not go on."""
    folder, model_folder = map(Path, sys.argv[1:])
    # Ctrl-C reaches the whole process group; the API process decides when the engine stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings = Settings.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=exit_at_end_of_input, args=(folder,), daemon=True).start()
    logs.configure(settings.log_level)
    set_up_threads(settings)
    gc.freeze()  # looking through all that was imported takes a tenth of a second, at any time

    commands, events = endpoints(folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = _event_socket(context, events)
    encoder = msgspec.msgpack.Encoder()

    def send(event: Event) -> None:
        socket.send(encoder.encode(event))

    def die(reason: str) -> None:
        """From another thread, which may not use `socket`; this one's may be stuck for ever."""
        own: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        _event_socket(own, events).send(encoder.encode(EngineDead(reason)))
        own.destroy(linger=LINGER)
        os._exit(1)

    alive = run_engine(settings, model_folder, SocketInbox(context, commands), send, die)
    context.destroy(linger=LINGER)
    return 0 if alive else 1


def _event_socket(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, LINGER)
    socket.connect(address)
    return socket


def set_up_threads(settings: Settings) -> None:
    """Share the cores that this process may use with the other ranks, and Python among threads.

    Beside a GPU a few cores are enough: what is left for them is to copy embedding and head rows.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    if sys.platform == "linux" and "OMP_NUM_THREADS" not in os.environ:
        share = max(1, len(os.sched_getaffinity(0)) // settings.tensor_parallel_size)
        torch.set_num_threads(min(share, _THREADS_BESIDE_GPU) if uses_cuda(settings) else share)
        torch.get_num_threads()  # settles it for this thread: readers of adapters take another


def exit_at_end_of_input(folder: Path | None = None) -> None:
    """Wait for the end of standard input, which is the parent's, and end the process."""
    while sys.stdin.buffer.read(4096):
        pass
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)  # the parent may have had no time to
    os._exit(1)


if __name__ == "__main__":
    # Not sys.exit: threads that still read adapter files must not hold the process back.
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
