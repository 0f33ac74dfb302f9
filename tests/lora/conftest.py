"""Tiny tensors: on busy cores, waiting for a second thread would cost most."""

import torch

torch.set_num_threads(1)
