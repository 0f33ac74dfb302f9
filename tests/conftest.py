"""Without a GPU, Triton kernels run in its interpreter, and GPU tests are left out."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # it must know before anything imports it


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    gpu_only = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_only:
        config.hook.pytest_deselected(items=gpu_only)
        left_out = set(gpu_only)
        items[:] = [item for item in items if item not in left_out]
