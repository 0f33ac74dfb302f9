"""Triton's kernels run in its interpreter where there is no GPU."""

import os

import torch

torch.set_num_threads(1)  # tiny tensors; on busy cores, waiting for a second thread costs most
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
