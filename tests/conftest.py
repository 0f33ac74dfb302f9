"""Without a GPU, Triton kernels run in its interpreter, and GPU tests are left out."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # it must know before anything imports it
    if find_spec("triton"):
        from support.interpreter import quicken

        quicken()

from support.copies import CopyThreads

if num_workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # They share the cores, and threads of torch spin while they wait for one another.
    share = max(1, (os.cpu_count() or 1) // int(num_workers))
    os.environ.setdefault("OMP_NUM_THREADS", str(share))  # of processes that a test starts
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    gpu_only = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_only:
        config.hook.pytest_deselected(items=gpu_only)
        left_out = set(gpu_only)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def copy_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyThreads]:
    threads = CopyThreads()
    monkeypatch.setattr("lorakeet.lora.row_writer.side_thread", threads.make)
    yield threads
    threads.close()
