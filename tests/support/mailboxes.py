"""Sums over ranks by mailboxes: on the CPU these lie in memory that the processes share, and the
kernel runs in Triton's interpreter."""

import faulthandler
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from lorakeet.kernels import all_reduce_norm
from lorakeet.kernels.mailbox import Mailbox
from lorakeet.models.norm import RMSNorm
from support.interpreter import quicken
from support.passes import epilogues
from support.ranks import CountingGroup

EPS = 1e-5
NUM_ROWS = 5


@dataclass(frozen=True)
class Call:
    num_rows: int
    size: int
    num_parts: int | None
    dtype: torch.dtype

    def values(self, seed: int, rank: int) -> Tensor:
        """A rank's y: (T, size) of `dtype`, or its parts in float32."""
        if self.num_parts is None:
            return self._random(1000 * seed + rank, self.num_rows, self.size).to(self.dtype)
        return self._random(1000 * seed + rank, self.num_parts, self.num_rows, self.size)

    def others(self, seed: int) -> tuple[Tensor, Tensor]:
        """The residual and the norm's weight."""
        residual = self._random(1000 * seed + 999, self.num_rows, self.size).to(self.dtype)
        weight = torch.randn(self.size, generator=torch.Generator().manual_seed(seed))
        return residual, weight.to(self.dtype)

    def _random(self, seed: int, *shape: int) -> Tensor:
        """For float16 so large and so small that sums depend on their order, for the others small
        integers: the interpreter's bfloat16 is not rounded to the nearest."""
        generator = torch.Generator().manual_seed(seed)
        integers = torch.randint(-20, 21, shape, generator=generator).float()
        if self.dtype != torch.float16:
            return integers
        small = torch.randn(shape, generator=generator) * 2**-14
        return torch.where(integers.abs() < 10, small, integers.sign() * 2**10)


def mixed_calls(count: int) -> list[Call]:
    """Of rows more and fewer, sizes and dtypes of all kinds, one after the other."""
    random = Random(4)
    kinds = list(product([2, 6, 64, 70], [None, 1, 3], [torch.bfloat16, torch.float16]))
    return [Call(random.randint(1, NUM_ROWS), *random.choice(kinds)) for _ in range(count)]


def shared_boxes(num_ranks: int) -> list[Tensor]:
    """As a new group has them, for `NUM_ROWS` rows of 70 values."""
    shape = (2, NUM_ROWS, num_ranks, 35)
    return [torch.zeros(shape, dtype=torch.int64).share_memory_() for _ in range(num_ranks)]  # type: ignore[no-untyped-call]


def used_boxes(num_ranks: int, last_call: int) -> list[Tensor]:
    """As calls of all rows leave them, up to this one: each place has its last call's number."""
    boxes = shared_boxes(num_ranks)
    for box in boxes:
        for call in (last_call - 1, last_call):
            box[call & 1] = (call << 32) + 0x3C003C00  # of what values, does not matter
    return boxes


def make_calls(
    group: CountingGroup,
    calls: Sequence[Call],
    boxes: Sequence[Tensor],
    results: Path,
    last_call: int = 0,
) -> None:
    """What a rank does: all calls, without a pause but those at random. To `results`/RANK.pt: what
    they gave, and the collectives that they took. `last_call`: of those before, an int32."""
    quicken()
    faulthandler.dump_traceback_later(100, exit=True)  # who waits in vain does so for ever
    _delay(Random(group.rank))
    group = replace(group, mailbox=Mailbox(group.rank, boxes))
    assert group.mailbox is not None
    group.mailbox.num_calls.fill_(last_call)
    found = []
    for seed, call in enumerate(calls):
        residual, weight = call.others(seed)
        norm = RMSNorm(call.size, EPS)
        norm.weight.data = weight
        y = call.values(seed, group.rank)
        found.append(epilogues(call.dtype, group).add_norm(residual, norm, y))
    torch.save((found, group.calls), results / f"{group.rank}.pt")
    faulthandler.cancel_dump_traceback_later()


def _delay(random: Random) -> None:
    """Sleep now and then between a push and what is received: others are a call ahead by then."""
    received = all_reduce_norm._received

    def late(*args: Any) -> Any:
        if random.random() < 0.2:
            time.sleep(random.random() * 0.02)
        return received(*args)

    vars(all_reduce_norm)["_received"] = late
