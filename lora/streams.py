"""Work beside the model's passes on CUDA."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream beside the device's current one. On the CPU, all is done in the order of calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

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
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def hold_current(self) -> None:
        """What the current stream gets next runs after all that this one has got."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def record(self) -> torch.cuda.Event | None:
        """When all that it has got is complete; None: it is."""
        return None if self._stream is None else self._stream.record_event()
