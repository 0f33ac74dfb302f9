"""Ranks of a process group: real processes, which meet by gloo, or by NCCL on a GPU each."""

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from lorakeet.models.process_group import ProcessGroup, address_of, join, leave, listen

_TIMEOUT = 120.0  # seconds; of a run that takes a few


def run_ranks(size: int, work: Callable[..., None], *args: Any, device: str = "cpu") -> None:
    """`work(group, *args)` in `size` processes; what one of them raises is raised here.

    `work` is a function of a module that a new process can import.
    """
    with listen() as listener:
        context = spawn(  # type: ignore[no-untyped-call]
            _run, (size, listener, device, work, args), nprocs=size, join=False
        )
    while not context.join(_TIMEOUT):
        pass


def _run(
    rank: int,
    size: int,
    listener: socket.socket,
    device: str,
    work: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    own = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(own)
    meeting: socket.socket | str = listener
    if rank > 0:  # each was started with the socket, but it is rank 0's
        meeting = address_of(listener)
        listener.close()
    group = join(rank, size, meeting, own, _TIMEOUT)
    work(CountingGroup(group.rank, group.size, group.one_shot, group.mailbox), *args)
    leave()


@dataclass(frozen=True)
class CountingGroup(ProcessGroup):
    """Knows which collectives it has done."""

    calls: list[str] = field(default_factory=list)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls.append("all_reduce")
        return super().all_reduce(x)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        self.calls.append("all_gather")
        return super().all_gather(x, dim)
