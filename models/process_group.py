"""The processes that serve one model together, one a device: tensor parallelism's collectives."""

import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lorakeet.kernels.mailbox import Mailbox, mailbox_shape

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# the name that it has since torch 2.13
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_ONE_SHOT_BYTES = 2**16  # that a rank reads of the others; past it, NCCL was measured faster


class ProcessGroupError(Exception):
    """The processes did not all meet in time, or one of them could not take part."""


def fits_one_shot(x: Tensor, size: int) -> bool:
    """Whether `OneShotSum` takes x, of each of `size` ranks."""
    is_small = x.nbytes * (size - 1) <= _ONE_SHOT_BYTES and x.nbytes % 16 == 0
    return is_small and x.dtype in (torch.float32, torch.bfloat16)


class OneShotSum:
    """Sums over GPUs that can read each other's memory, in one kernel: each rank writes its part
    where all can see it, and sums up all parts itself. For some kilobytes a message is all
    latency, of which NCCL's rings have more."""

    def __init__(self, device: torch.device) -> None:
        """All ranks together, after the process group is there."""
        group = dist.group.WORLD
        assert group is not None
        self._group = group.group_name
        self._shared = symmetric_memory.empty(_ONE_SHOT_BYTES, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self._shared, group)

    def __call__(self, x: Tensor) -> Tensor:
        """x: contiguous, and `fits_one_shot`."""
        shared = self._shared.view(x.dtype)[: x.numel()].view(x.shape)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x, "sum", self._group)
        return total


@dataclass(frozen=True)
class ProcessGroup:
    """Rank `rank` of `size` processes. One alone, `ProcessGroup()`, needs no torch.distributed.

    All ranks make the same calls in the same order. On CUDA they run on the current stream, and
    can be captured in CUDA graphs. In float32 and 16 bits alike, sums are in the tensor's type.
    """

    rank: int = 0
    size: int = 1
    one_shot: OneShotSum | None = None  # of `all_reduce`, where x fits it
    mailbox: Mailbox | None = None  # of `all_reduce_add_rms_norm`, where it takes x

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"there is no rank {self.rank} among {self.size}")

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks; x may be overwritten with it."""
        if self.size == 1:
            return x
        x = x.contiguous()
        if self.one_shot is not None and fits_one_shot(x, self.size):
            return self.one_shot(x)
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The x of all ranks, equal in shape, one after the other along a dimension of x."""
        if self.size == 1:
            return x
        parts = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        _gather(parts, x.contiguous())
        return parts.view(self.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Write rank `source`'s x, contiguous, into everybody's; returns x."""
        if self.size > 1:
            dist.broadcast(x, source)
        return x


ALONE = ProcessGroup()


def listen() -> socket.socket:
    """Where ranks can meet: for processes of this host alone, as nothing asks who they are."""
    return socket.create_server(("127.0.0.1", 0))


def address_of(listener: socket.socket) -> str:
    """As host:port, for those that come to it."""
    return "{}:{}".format(*listener.getsockname())


def join(
    rank: int,
    size: int,
    meeting: socket.socket | str,
    device: torch.device,
    timeout: float,
) -> ProcessGroup:
    """Meet the other ranks: NCCL on CUDA, gloo on the CPU. `device` is this rank's own.

    `meeting`: rank 0 has the socket of `listen`, which is taken over, the others its address.

    Raises ProcessGroupError when not all are there after `timeout` seconds.
    """
    if size == 1:
        return ProcessGroup()
    is_cuda = device.type == "cuda"
    loopback = "lo" if sys.platform == "linux" else "lo0"
    for library in ("NCCL", "GLOO"):  # not an interface that others reach
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)
    if is_cuda:  # multicast is not to be had everywhere
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    try:
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=_store(size, meeting, timeout),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
            device_id=device if is_cuda else None,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ProcessGroupError(
            f"rank {rank} of {size} did not meet the others within {timeout:.0f} seconds: {error}"
        ) from error
    if not _see_each_other(size, device):
        return ProcessGroup(rank, size)
    one_shot, mailbox = by_all(OneShotSum, device), by_all(_mailbox, device)
    return ProcessGroup(rank, size, one_shot=one_shot, mailbox=mailbox)


def _store(size: int, meeting: socket.socket | str, timeout: float) -> TCPStore:
    """What the ranks tell each other while they meet: rank 0's serves it from its socket."""
    limit = timedelta(seconds=timeout)
    if isinstance(meeting, str):
        host, port = meeting.split(":")
        return TCPStore(host, int(port), size, timeout=limit)
    host, number = meeting.getsockname()
    return TCPStore(
        host, number, size, is_master=True, timeout=limit, master_listen_fd=meeting.detach()
    )


def by_all(make: Callable[[torch.device], _T], device: torch.device) -> _T | None:
    """What each rank makes in memory that the others see; None where not all can."""
    made = None
    try:
        made = make(device)
    except RuntimeError as error:  # not every container may share its GPUs' memory
        logger.warning("sums over GPUs go through NCCL: %s", error)
    have_it = torch.tensor(int(made is not None), device=device)
    dist.all_reduce(have_it, dist.ReduceOp.MIN)  # after it, all mailboxes are zeros
    return made if have_it else None


def _mailbox(device: torch.device) -> Mailbox:
    """All ranks together."""
    group = dist.group.WORLD
    assert group is not None
    rank, shape = group.rank(), mailbox_shape(group.size())
    own = symmetric_memory.empty(shape, dtype=torch.int64, device=device).zero_()
    handle = symmetric_memory.rendezvous(own, group)
    boxes = [handle.get_remote_tensor(other, shape, own.dtype) for other in range(group.size())]
    boxes[rank] = own  # which keeps all of them
    return Mailbox(rank, boxes)


def _see_each_other(size: int, device: torch.device) -> bool:
    """Whether the GPUs of all ranks, those of the numbers 0 to size - 1, can read each other's."""
    return device.type == "cuda" and all(
        torch.cuda.can_device_access_peer(reader, read)
        for reader in range(size)
        for read in range(size)
        if reader != read
    )


def leave() -> None:
    """Give the group's connections back; the other ranks' next call then fails."""
    if dist.is_initialized():
        dist.destroy_process_group()
