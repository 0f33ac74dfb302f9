"""What each rank of a process group on GPUs checks: small sums in one shot, all others by NCCL."""

from itertools import product

import torch
from torch import Tensor

from lorakeet.models.process_group import ProcessGroup

SHAPES = [(1, 8), (3, 5), (128, 4096), (129, 4096), (300, 4096)]  # the last two: too large
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check_sums(group: ProcessGroup) -> None:
    assert group.one_shot is not None
    for shape, dtype in product(SHAPES, DTYPES):
        own, other = (_values(rank, shape, dtype) for rank in (group.rank, 1 - group.rank))
        for factor, total in enumerate(_sums(group, own), start=1):
            assert torch.equal(total, (own + other) * factor), (shape, dtype, factor)


def _sums(group: ProcessGroup, own: Tensor) -> list[Tensor]:
    """Of once and twice and three times the values, in a graph that is replayed: the memory that
    the ranks share is used again and again."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        group.all_reduce(own.clone())
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        sums = [group.all_reduce(own * factor) for factor in (1, 2, 3)]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return sums


def _values(rank: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Small integers, so sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-20, 20, shape, generator=generator).to("cuda", dtype)
