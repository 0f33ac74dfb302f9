"""What each rank of a process group on GPUs checks: small sums in one shot, all others by NCCL;
and those that a norm follows, in one kernel with it."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from random import Random

import torch
from torch import Tensor

from lorakeet.kernels.norm import add_rms_norm
from lorakeet.models.norm import RMSNorm
from lorakeet.models.process_group import ProcessGroup
from support.passes import epilogues

SHAPES = [(1, 8), (3, 5), (8, 4096), (9, 4096), (300, 4096)]  # the last two: too large
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NORM_SHAPES = [(1, 4096), (7, 70), (32, 8192), (256, 4096)]
FACTORS = (1, 2, 3)
TURNS = 4  # of values

AddNorm = Callable[[Tensor], tuple[Tensor, Tensor]]


def check_sums(group: ProcessGroup) -> None:
    assert group.one_shot is not None
    for shape, dtype in product(SHAPES, DTYPES):
        own, other = (_values(rank, shape, dtype) for rank in (group.rank, 1 - group.rank))
        graph, sums = _captured(partial(_sums, group, own))
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        for factor, total in zip(FACTORS, sums, strict=True):
            assert torch.equal(total, (own + other) * factor), (shape, dtype, factor)


def check_norms(group: ProcessGroup, num_parts: int | None) -> None:
    assert group.mailbox is not None
    for shape, dtype in product(NORM_SHAPES, DTYPES[1:]):
        residual, norm = _values(98, shape, dtype), RMSNorm(shape[1], 1e-5).to("cuda", dtype)
        norm.weight.data = _values(99, shape, dtype)[0]
        assert group.mailbox.takes(residual)
        own, other = (
            [_parts(8 * turn + rank, shape, dtype, num_parts) for turn in range(TURNS)]
            for rank in (group.rank, 1 - group.rank)
        )
        add_norm = partial(epilogues(dtype, group).add_norm, residual, norm)
        want = [
            _norms(lambda y: add_rms_norm(y, residual, norm.weight, norm.eps), a + b)  # noqa: B023
            for a, b in zip(own, other, strict=True)
        ]
        errors = _largest_errors(add_norm, own, want, Random(group.rank))
        largest = max(float(normed.abs().max()) for normed in want[0][::2])
        assert max(errors[::2]) <= 2 * torch.finfo(dtype).eps * largest, (shape, dtype)
        assert max(errors[1::2]) == 0, (shape, dtype)  # of the sums


def _largest_errors(
    add_norm: AddNorm, ys: Sequence[Tensor], want: Sequence[Sequence[Tensor]], random: Random
) -> list[float]:
    """Of each result over many replays on changing values, without a pause but those at random."""
    y = ys[0].clone()
    graph, found = _captured(partial(_norms, add_norm, y))
    errors = torch.zeros(len(found), device="cuda")
    for turn in range(200):
        y.copy_(ys[turn % TURNS])
        if random.random() < 0.1:
            torch.cuda._sleep(random.randrange(10**6))  # type: ignore[no-untyped-call]
        graph.replay()
        pairs = zip(found, want[turn % TURNS], strict=True)
        differences = [(x.float() - exact.float()).abs().max() for x, exact in pairs]
        errors = torch.maximum(errors, torch.stack(differences))
    largest: list[float] = errors.tolist()
    return largest


def _sums(group: ProcessGroup, own: Tensor) -> list[Tensor]:
    return [group.all_reduce(own * factor) for factor in FACTORS]


def _norms(add_norm: AddNorm, y: Tensor) -> list[Tensor]:
    """One norm and one sum after the other."""
    return [x for factor in FACTORS for x in add_norm(y * factor)]


def _captured(work: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """The work in a graph, and what each replay gives: the memory that the ranks share is used
    again and again."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        results = work()
    return graph, results


def _parts(seed: int, shape: tuple[int, int], dtype: torch.dtype, num_parts: int | None) -> Tensor:
    """Values of `dtype`, or in float32 parts."""
    if num_parts is None:
        return _values(seed, shape, dtype)
    own = [_values(100 * seed + part, shape, torch.float32) for part in range(num_parts)]
    return torch.stack(own)


def _values(seed: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Small integers, so sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-10, 10, shape, generator=generator).to("cuda", dtype)
