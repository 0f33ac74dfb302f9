"""Products of few pairs of rows, read where they lie: attention and LoRA of a decode step.

With a handful of queries, dense products would first have to gather what each of them sees. Here
only the wanted pairs are worked out: `sampled_products`, and an embedding bag for the way back.
"""

import warnings

import torch
from torch import Tensor

with warnings.catch_warnings(action="ignore"):
    # the first CSR tensor of a process warns that they are in beta: no news for the user
    torch.sparse_csr_tensor([0], [], [], size=(0, 0))


def pair_pattern(starts: Tensor, columns: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
    """N wanted pairs as a CSR tensor of zeros, for `sampled_products`.

    `starts`: (rows + 1,) int32, where each row's pairs start, and the end; `columns`: (N,) int32,
    in any order.
    """
    return torch.sparse_csr_tensor(
        starts,
        columns,
        torch.zeros(len(columns), dtype=dtype),
        size=(len(starts) - 1, num_columns),
        check_invariants=False,  # a row's columns need not ascend
    )


def sampled_products(pattern: Tensor, x: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """`scale * x[row] · table[column]` of each pair: (N,), of the pattern's dtype.

    x: (rows, size), table: (num_columns, size).
    """
    product = torch.sparse.sampled_addmm(pattern, x, table.t(), beta=0.0, alpha=scale)
    return product.values()  # type: ignore[no-any-return]
