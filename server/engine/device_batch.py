"""A step's arrays, moved to the device, and what stays there between steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.lora.batch import LoRABatch, LoRAForwardBatch
from lorakeet.models.transfer import upload
from lorakeet.server.engine.inputs import Ints, StepArrays

_ALIGNMENT = 4  # int32; 16 bytes: Triton compiles other code for tensors that start elsewhere


@dataclass(frozen=True)
class Packed:
    """Several arrays in one int32 buffer, so that a single copy moves them."""

    values: NDArray[np.int32]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def views(self, whole: Tensor) -> list[Tensor]:
        """The arrays in a tensor that is laid out like `values`."""
        places = zip(self.starts, self.sizes, strict=True)
        return [whole[start : start + size] for start, size in places]


def pack(arrays: Sequence[NDArray[np.integer]]) -> Packed:
    """Flat arrays, each aligned. Their values must fit 32 bits."""
    sizes = [len(array) for array in arrays]
    *starts, total = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)])
    values = np.zeros(total, np.int32)
    for start, size, array in zip(starts, sizes, arrays, strict=True):
        own = values[start : start + size]
        own[:] = array
        assert array.dtype == np.int32 or (own == array).all()
    return Packed(values, tuple(map(int, starts)), tuple(sizes))


def upload_all(arrays: Sequence[NDArray[np.integer]], device: torch.device) -> list[Tensor]:
    """All arrays on the device as int64, with a single copy."""
    packed = pack(arrays)
    return packed.views(upload(packed.values, device).long())


class DeviceRows:
    """What the device keeps of each row of `SequenceRows`: KV blocks and the last sampled token."""

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device) -> None:
        self.device = device
        self.block_tables = torch.zeros((num_rows, max_blocks), dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def set_blocks(self, places: Tensor, block_ids: Tensor) -> None:
        """`places`: (N,) int64, flat; `block_ids`: (N,) int64."""
        self.block_tables.view(-1).index_copy_(0, places, block_ids.int())

    def set_last_tokens(self, rows: Tensor, token_ids: Tensor) -> None:
        self.last_tokens.index_copy_(0, rows, token_ids)

    def resolve(self, token_ids: Tensor) -> Tensor:
        """Token ids (T,) of a pass; -1 - row becomes the token sampled last in that row."""
        rows = (-1 - token_ids).clamp_(min=0)
        return torch.where(token_ids < 0, self.last_tokens[rows], token_ids)


def pass_arrays(arrays: StepArrays) -> list[Ints]:
    """What `make_batch` reads, in its order."""
    return [
        arrays.token_ids,
        arrays.positions,
        arrays.kv_slots,
        arrays.rows,
        arrays.query_starts,
        arrays.context_lens,
    ]


def make_batch(
    wide: Sequence[Tensor],
    narrow: Sequence[Tensor],
    rows: DeviceRows,
    max_context_len: int,
    num_blocks: int,
    num_decodes: int,
    lora: LoRABatch | None,
) -> LoRAForwardBatch:
    """The pass of `pass_arrays` on the device, as int64 (`wide`) and as int32 (`narrow`).

    `num_blocks`: KV blocks of the longest sequence. Launches depend on the sizes alone.
    """
    token_ids, positions, kv_slots, row_ids = wide[:4]
    query_starts, context_lens = narrow[4:6]
    return LoRAForwardBatch(
        token_ids=rows.resolve(token_ids),
        positions=positions,
        kv_slots=kv_slots,
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=rows.block_tables[:, :num_blocks].index_select(0, row_ids),
        num_decodes=num_decodes,
        max_context_len=max_context_len,
        lora=lora,
        logits_lora=None,
    )


def build_batch(
    arrays: StepArrays, rows: DeviceRows, block_size: int, lora: LoRABatch | None
) -> LoRAForwardBatch:
    """The pass of any step. No logits are asked for yet: `logits_lora` is None."""
    packed = pack(pass_arrays(arrays))
    narrow = upload(packed.values, rows.device)
    max_context_len = int(arrays.context_lens.max())
    return make_batch(
        packed.views(narrow.long()),
        packed.views(narrow),
        rows,
        max_context_len=max_context_len,
        num_blocks=-(-max_context_len // block_size),
        num_decodes=arrays.num_decodes,
        lora=lora,
    )


def empty_batch(device: torch.device) -> LoRAForwardBatch:
    """For the output head, which reads nothing of a batch but `logits_lora`."""
    ids, counts = (torch.zeros(0, dtype=t, device=device) for t in (torch.int64, torch.int32))
    return LoRAForwardBatch(
        token_ids=ids,
        positions=ids,
        kv_slots=ids,
        query_starts=counts,
        context_lens=counts,
        block_tables=counts,
        num_decodes=0,
        max_context_len=0,
        lora=None,
        logits_lora=None,
    )
