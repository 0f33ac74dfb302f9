"""Work beside the model's passes: on streams of CUDA, and in threads."""

import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


class SideStream:
    """A stream beside the device's current one. On the CPU, all is done in the order of calls."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self.device = device if self._stream is None else self._stream.device  # with its index

    @contextmanager
    def use(self) -> Iterator[None]:
        """What is launched meanwhile runs on this stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def wait(self, events: Iterable[torch.cuda.Event]) -> None:
        """What it gets next runs after these."""
        for event in events:
            event.wait(self._stream)

    def wait_for_current(self) -> None:
        """What it gets next runs after all that the current stream has got."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def hold_current(self) -> None:
        """What the current stream gets next runs after all that this one has got."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Wait until all that it has got is complete."""
        if self._stream is not None:
            self._stream.record_event().synchronize()


def side_thread(device: torch.device, name: str) -> Executor:
    """Runs jobs one at a time, in the order in which they are submitted.

    On CUDA in one thread, beside the caller's: for work that is long on the host, while the caller
    launches passes. The first job starts it. On the CPU a job is done when `submit` returns. Either
    way what a job raises is its future's. Modes and streams of the caller's thread are not the
    job's; its current device is `device`, if that has an index.
    """
    if device.type != "cuda":
        return _AtOnce()
    return ThreadPoolExecutor(
        1, name, initializer=_set_up, initargs=(device, torch.get_num_threads())
    )


def keeping_nothing(job: Callable[[], _T]) -> _T:
    """For a job in a thread: who has its error would have all that its frames have, a file or what
    lies on the device, for as long as Python's collector takes."""
    try:
        return job()
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__context__
        del job
        raise


def _set_up(device: torch.device, num_threads: int) -> None:
    torch.set_num_threads(num_threads)  # else it has as many as the last thread that set them
    if device.index is not None:  # else a thread's is the first GPU, which would get a context
        torch.cuda.set_device(device)


class _AtOnce(Executor):
    """Each job in the thread that submits it."""

    def submit(self, job: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        future: Future[_T] = Future()
        try:
            future.set_result(job(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
