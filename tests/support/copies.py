"""Pools in host memory whose copies are made in a thread, as on CUDA, and can be held up."""

import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

import torch

from lorakeet.lora.streams import side_thread


class CopyThreads:
    """Those of all pools that are made with `make` in place of `side_thread`."""

    def __init__(self) -> None:
        self._threads: list[Executor] = []

    def make(self, device: torch.device, name: str) -> Executor:
        self._threads.append(side_thread(torch.device("cuda"), name))
        return self._threads[-1]

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is given to them meanwhile does not begin."""
        go = threading.Event()
        began = [threading.Event() for _ in self._threads]

        def stand(here: threading.Event) -> None:
            here.set()
            go.wait()

        for thread, event in zip(self._threads, began, strict=True):
            thread.submit(stand, event)
        try:
            for event in began:
                assert event.wait(30)
            yield
        finally:
            go.set()

    def forget(self) -> None:
        """Hold them no longer."""
        self._threads.clear()

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


def copy_threads_alive() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("adapter-copies")]
