"""RMSNorm (arXiv:1910.07467)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, in float32, rounded once."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.eps)
