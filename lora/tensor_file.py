"""A safetensors file → its tensors, all in one buffer.

The format: https://github.com/huggingface/safetensors#format.
The package's own reader copies all tensors of a file in one call, in which no other thread runs:
adapters are read beside the engine's loop. Nor is the file mapped: see peft_files.py.
"""

import math
from functools import cache
from io import BufferedReader
from typing import Any

import orjson
import torch
from torch import Tensor

from lorakeet.lora.host_memory import Pages

_MAX_HEADER_BYTES = 16 * 2**20  # those of large models take some hundred kilobytes
_MAX_DIMENSIONS = 8
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


class TensorFileError(ValueError):
    """The bytes are no safetensors file."""


def read_tensors(file: BufferedReader, size: int) -> dict[str, Tensor]:
    """The tensors of a file of `size` bytes, by name.

    Raises TensorFileError, and EOFError when the file has become shorter.
    """
    length = int.from_bytes(file.read(8), "little")
    body_size = size - 8 - length
    if body_size < 0 or length > _MAX_HEADER_BYTES:
        raise TensorFileError("it ends within its header, or that is too large")
    header = file.read(length)
    body = Pages(body_size).tensor()
    if len(header) < length or file.readinto(body.numpy().data) < body_size:
        raise EOFError
    try:
        fields = orjson.loads(header)
        fields.pop("__metadata__", None)
        return _cut(body, fields)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):  # torch's last
        raise TensorFileError("its header does not describe its tensors") from None


def _cut(body: Tensor, fields: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
    """Views of the body, all of which they must cover, each byte once.

    One operation for each: after it, a busy engine may keep this thread waiting.
    """
    tensors, position = {}, 0
    body_as = cache(lambda dtype: body[: len(body) - len(body) % dtype.itemsize].view(dtype))
    for name, field in sorted(fields.items(), key=lambda named: named[1]["data_offsets"]):
        (begin, end), shape, dtype = field["data_offsets"], field["shape"], _DTYPES[field["dtype"]]
        if any(type(number) is not int or number < 0 for number in (begin, end, *shape)):
            raise ValueError
        if begin != position or end > len(body) or len(shape) > _MAX_DIMENSIONS:
            raise ValueError
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError
        position = end
        if begin % dtype.itemsize:
            tensors[name] = body[begin:end].clone().view(dtype).view(shape)  # where it is aligned
        else:
            strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            start = begin // dtype.itemsize
            tensors[name] = body_as(dtype).as_strided(shape, strides, start)
    if position != len(body):
        raise ValueError
    return tensors
