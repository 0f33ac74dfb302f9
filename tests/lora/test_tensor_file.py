"""Safetensors files, as the package writes and reads them. What is refused: test_peft_damage.py."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from torch import Tensor

from lorakeet.lora.tensor_file import TensorFileError, read_tensors

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensors") / "file.safetensors"


def read(path: Path, data: bytes) -> dict[str, Tensor]:
    path.write_bytes(data)
    with path.open("rb") as file:
        return read_tensors(file, len(data))


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Any bytes, also those of NaN."""
    size = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(2, shape).bool()
    return torch.randint(256, (size * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].data_ptr() % tensor.itemsize == 0
        bytes_of = [t.reshape(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*bytes_of)


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
tensors_in_file = st.tuples(st.sampled_from(DTYPES), shapes)
# The package's own empty file with metadata is no JSON.
files = st.dictionaries(st.text(max_size=8), tensors_in_file, min_size=1, max_size=6)


@settings(deadline=None, max_examples=200)
@given(contents=files, metadata=st.none() | st.dictionaries(st.text(), st.text(), max_size=3))
def test_what_the_package_writes(
    path: Path, contents: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    tensors = {name: tensor_of(*content) for name, content in contents.items()}
    assert_same(read(path, safetensors.torch.save(tensors, metadata)), tensors)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_nothing_that_the_package_refuses_is_accepted(path: Path, data: st.DataObject) -> None:
    tensors = {"one": torch.rand(3, 4), "two": torch.rand(10).half(), "three": torch.rand(2, 2)}
    changed = bytearray(safetensors.torch.save(tensors))
    border = 8 + struct.unpack("<Q", changed[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, border - 1))
        changed[place] = data.draw(st.sampled_from(b'0123456789",[]{}: ') | st.integers(0, 255))
    try:
        found = read(path, bytes(changed))
    except TensorFileError:
        return
    try:
        expected = safetensors.torch.load(bytes(changed))
    except SafetensorError as error:
        pytest.fail(f"accepted, but: {error}")
    assert_same(found, expected)


def test_a_tensor_that_is_not_aligned(path: Path) -> None:
    """The package writes none, others may."""
    values = torch.tensor([1.5, -2.0])
    fields = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "values": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    text = json.dumps(fields).encode()
    body = bytes([7, 8, 9]) + values.numpy().tobytes()
    found = read(path, struct.pack("<Q", len(text)) + text + body)
    assert_same(found, {"odd": torch.tensor([7, 8, 9], dtype=torch.uint8), "values": values})


def test_all_tensors_share_one_buffer(path: Path) -> None:
    found = read(path, safetensors.torch.save({"a": torch.rand(3, 4), "b": torch.rand(5)}))
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1
