"""A step's arrays, moved to the device: one copy for each integer type."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorakeet.lora.batch import LoRAForwardBatch, build_lora_batch
from lorakeet.server.engine.inputs import StepArrays

_ALIGNMENT = 16  # bytes; Triton compiles other code for tensors that start elsewhere


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy on the device, through pinned memory on CUDA; on the CPU the array itself."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_all(
    arrays: Sequence[NDArray[np.generic]], dtype: type[np.generic], device: torch.device
) -> list[Tensor]:
    """All arrays as `dtype` on the device, in their shapes, with a single copy."""
    step = _ALIGNMENT // np.dtype(dtype).itemsize
    sizes = [-(-array.size // step) * step for array in arrays]
    packed = np.zeros(sum(sizes), dtype)
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.size] = array.ravel()
    whole = upload(packed, device)
    return [
        whole[start : start + array.size].view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def build_batch(
    arrays: StepArrays,
    token_slots: NDArray[np.int32],
    logits_slots: NDArray[np.int32],
    device: torch.device,
) -> LoRAForwardBatch:
    """The pass of `arrays`, with the slot of each token and of each row whose logits are wanted."""
    token_ids, positions, kv_slots = upload_all(
        [arrays.token_ids, arrays.positions, arrays.kv_slots], np.int64, device
    )
    block_tables, context_lens, query_starts = upload_all(
        [arrays.block_tables, arrays.context_lens, arrays.query_starts], np.int32, device
    )
    counts = np.diff(arrays.query_starts)
    return LoRAForwardBatch(
        token_ids=token_ids,
        positions=positions,
        kv_slots=kv_slots,
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=block_tables,
        num_decodes=int((counts == 1).sum()),
        max_query_len=int(counts.max()),
        max_context_len=int(arrays.context_lens.max()),
        lora=build_lora_batch(token_slots, device),
        logits_lora=build_lora_batch(logits_slots, device),
    )
