"""Without a GPU, Triton kernels run in its interpreter, and GPU tests are left out."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # it must know before anything imports it

from support.copies import CopyThreads


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
