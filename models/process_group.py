"""The processes that serve one model together, one a device: tensor parallelism's collectives."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# the name that it has since torch 2.13
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroupError(Exception):
    """The processes did not all meet in time, or one of them could not take part."""


@dataclass(frozen=True)
class ProcessGroup:
    """Rank `rank` of `size` processes. One alone, `ProcessGroup()`, needs no torch.distributed.

    All ranks make the same calls in the same order. On CUDA they run on the current stream, and
    can be captured in CUDA graphs. In float32 and 16 bits alike, sums are in the tensor's type.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"there is no rank {self.rank} among {self.size}")

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place where x is contiguous."""
        if self.size == 1:
            return x
        x = x.contiguous()
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


def join(rank: int, size: int, address: str, device: torch.device, timeout: float) -> ProcessGroup:
    """Meet the other ranks at `address` ("host:port", where rank 0 listens): NCCL on CUDA, gloo on
    the CPU. `device` is this rank's own.

    Raises ProcessGroupError when not all are there after `timeout` seconds.
    """
    group = ProcessGroup(rank, size)
    if size == 1:
        return group
    is_cuda = device.type == "cuda"
    if is_cuda:
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is not to be had everywhere
    try:
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            init_method=f"tcp://{address}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
            device_id=device if is_cuda else None,
        )
    except (RuntimeError, ValueError) as error:
        raise ProcessGroupError(
            f"rank {rank} of {size} did not meet the others at {address}"
            f" within {timeout:.0f} seconds: {error}"
        ) from error
    return group


def leave() -> None:
    """Give the group's connections back; the other ranks' next call then fails."""
    if dist.is_initialized():
        dist.destroy_process_group()
