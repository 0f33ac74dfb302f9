"""A LoRA delta on its way: what a large pass leaves to the kernel that reads y next.

Nothing here needs Triton, which some CPU platforms do not have.
"""

from dataclasses import dataclass

from torch import Tensor

from lorakeet.kernels.rank_rows import RankRows


@dataclass(frozen=True)
class Delta:
    """y[t] · (1 + b[magnitudes[t]]) + Σ_j h[t, j] b[rows[j]] over each token's own rows."""

    h: Tensor  # (slices, pairs of tiles, tokens, rows)
    b: Tensor  # (rows, out), slices side by side
    rank_rows: RankRows
