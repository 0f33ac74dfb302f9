"""The same tests run in Triton's interpreter on the CPU and, marked `gpu`, compiled on CUDA."""

from collections.abc import Iterator

import pytest
import torch

TARGETS = [
    pytest.param(("cpu", torch.float32), id="cpu"),
    pytest.param(("cuda", torch.float32), id="cuda-float32", marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.bfloat16), id="cuda-bfloat16", marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.float16), id="cuda-float16", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="session", params=TARGETS)
def target(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    device, dtype = request.param
    if (device == "cuda") != torch.cuda.is_available():
        pytest.skip("the interpreter needs a machine without CUDA, the GPU tests one with it")
    return device, dtype


@pytest.fixture(scope="session")
def device(target: tuple[str, torch.dtype]) -> str:
    return target[0]


@pytest.fixture(scope="session")
def dtype(target: tuple[str, torch.dtype]) -> torch.dtype:
    return target[1]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Every `torch.empty` is full of NaN: what a kernel leaves unset, or reads too far, shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)
