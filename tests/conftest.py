"""Without a GPU, Triton kernels run in its interpreter: it must know before anything imports it."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
