"""Files that are damaged, hostile or not files at all: a short AdapterError, and soon."""

import contextlib
import json
import os
import pickle
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorakeet.lora import peft_files
from lorakeet.lora.adapter import AdapterError, AdapterNotFoundError
from lorakeet.lora.peft_files import MAX_CONFIG_BYTES, max_weights_bytes
from lorakeet.lora.specs import group_specs
from lorakeet.lora.tensor_file import TensorFileError, read_tensors
from lorakeet.models.config import load_config
from support.adapters import edit_tensors, make_adapter, tensors_of
from support.deltas import WORKERS, assert_equals_peft, deltas, read
from support.models import tiny_model

CONFIG, SAFETENSORS, PICKLE = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    return make_adapter(tmp_path / "adapter", model, target_modules=["q_proj"], r=2)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A good adapter, for the property tests, which break it again and again."""
    return make_adapter(tmp_path_factory.mktemp("victim"), model, target_modules=["q_proj"], r=2)


def refusal(folder: Path, model: Path) -> str:
    """The message of the error, which must be short and of the right kind."""
    with pytest.raises(AdapterError) as caught:
        read(folder, model)
    message = str(caught.value)
    assert 0 < len(message) < 400
    assert "\n" not in message
    return message


def header(fields: dict[str, Any], body: bytes = b"") -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"12345678",
        struct.pack("<Q", 2**60),
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 10) + b"{}",
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 2) + b"\xff\xff",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        header({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)),
        header({"a": entry(0, 8, [3])}, bytes(8)),
        header({"a": entry(0, 8, [2])}, bytes(7)),
        header({"a": entry(0, 8, [2])}, bytes(9)),
        header({"a": entry(8, 0, [2])}, bytes(8)),
        header({"a": entry(0, 8, [2], "X99")}, bytes(8)),
        header({"a": entry(0, 2**62, [2**60])}, bytes(8)),
        header({"a": entry(0, 0, [2**40, 2**40])}),
        header({"a": entry(0, 0, [0, 2**63])}),
        header({"a": entry(0, 4, [2**62] * 3 + [1] * 10**5)}, bytes(4)),
        header({"a": entry(0, 4, [True])}, bytes(4)),
        header({"a": entry(0, 4, [-1, -1])}, bytes(4)),
        header({"a": entry(-4, 0, [1])}, bytes(4)),
        header({"a": entry(0, 4, [1.0])}, bytes(4)),  # type: ignore[list-item]
        header({"a": entry(4, 8, [1])}, bytes(8)),
        header({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, bytes(4)),
        header({"a": entry(0, 4, "")}, bytes(4)),  # type: ignore[arg-type]
        header({"a": entry(0, 4, [1], ["F32"])}, bytes(4)),  # type: ignore[arg-type]
        header({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
        header({"a": 5, "b": None}),
        struct.pack("<Q", 4000) + b"[" * 4000,
        struct.pack("<Q", 2) + b"[]",
    ],
)
def test_damaged_safetensors(folder: Path, model: Path, data: bytes) -> None:
    (folder / SAFETENSORS).write_bytes(data)
    assert refusal(folder, model).startswith(SAFETENSORS)


def test_file_without_tensors(folder: Path, model: Path) -> None:
    (folder / SAFETENSORS).write_bytes(header({}))
    assert "no LoRA tensor" in refusal(folder, model)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_safetensors_cut_anywhere(model: Path, victim: Path, data: st.DataObject) -> None:
    path = victim / SAFETENSORS
    whole = path.read_bytes()
    border = 8 + struct.unpack("<Q", whole[:8])[0]
    ends = [0, 1, 7, 8, 9, border - 1, border, border + 1, len(whole) - 1]
    end = data.draw(st.sampled_from(ends) | st.integers(0, len(whole) - 1))
    try:
        path.write_bytes(whole[:end])
        assert refusal(victim, model).startswith(SAFETENSORS)
    finally:
        path.write_bytes(whole)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_safetensors_with_a_changed_header(model: Path, victim: Path, data: st.DataObject) -> None:
    path = victim / SAFETENSORS
    whole = path.read_bytes()
    changed = bytearray(whole)
    border = 8 + struct.unpack("<Q", whole[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, border - 1))] = data.draw(st.integers(0, 255))
    message = ""  # a change of white space or metadata is none
    try:
        path.write_bytes(changed)
        read(victim, model)
    except AdapterError as error:
        message = str(error)
    finally:
        path.write_bytes(whole)
    assert len(message) < 400
    assert "\n" not in message


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_pickle_cut_anywhere(model: Path, victim: Path, data: st.DataObject) -> None:
    whole, path = (victim / SAFETENSORS).read_bytes(), victim / PICKLE
    torch.save(tensors_of(victim), path)
    try:
        (victim / SAFETENSORS).unlink()
        pickled = path.read_bytes()
        path.write_bytes(pickled[: data.draw(st.integers(0, len(pickled) - 1))])
        assert refusal(victim, model).startswith(PICKLE)
    finally:
        path.unlink()
        (victim / SAFETENSORS).write_bytes(whole)


@pytest.mark.parametrize("end", [0, 7, 8, 9, 100, -1])
def test_a_file_cut_short_once_its_size_is_known(folder: Path, end: int) -> None:
    path = folder / SAFETENSORS
    size = path.stat().st_size
    with path.open("rb") as file:
        os.truncate(path, end % size)
        with pytest.raises((EOFError, TensorFileError)):
            read_tensors(file, size)


def test_a_file_that_is_rewritten_while_it_is_read(folder: Path, model: Path) -> None:
    path, stop = folder / SAFETENSORS, threading.Event()
    whole, digest = path.read_bytes(), read(folder, model).digest

    def rewrite() -> None:
        while not stop.is_set():
            os.truncate(path, len(whole) // 2)
            with path.open("r+b") as file:
                file.write(whole)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(300):
            with contextlib.suppress(AdapterError):
                assert read(folder, model).digest == digest
    finally:
        stop.set()
        writer.join()
    assert read(folder, model).digest == digest


# --- the pickle ---


def test_good_pickle_is_read(folder: Path, model: Path) -> None:
    torch.save(tensors_of(folder), folder / PICKLE)
    (folder / SAFETENSORS).unlink()
    assert_equals_peft(folder, model)


def test_a_pickle_of_parameters_is_read(folder: Path, model: Path) -> None:
    adapter = read(folder, model)
    parameters = {key: torch.nn.Parameter(value) for key, value in tensors_of(folder).items()}
    (folder / SAFETENSORS).unlink()
    torch.save(parameters, folder / PICKLE)
    found = read(folder, model)
    assert found.digest == adapter.digest
    assert not any(group.b.requires_grad for group in found.groups.values())


def test_safetensors_wins_over_the_pickle(folder: Path, model: Path) -> None:
    expected = deltas(read(folder, model), model)
    others = {key: tensor + 1 for key, tensor in tensors_of(folder).items()}
    torch.save(others, folder / PICKLE)
    torch.testing.assert_close(deltas(read(folder, model), model), expected, atol=0, rtol=0)
    (folder / SAFETENSORS).write_bytes(b"")
    assert SAFETENSORS in refusal(folder, model)


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("save", [torch.save, lambda bomb, file: file.write(pickle.dumps(bomb))])
def test_nothing_in_a_pickle_is_run(
    folder: Path, model: Path, tmp_path: Path, save: Callable[..., object]
) -> None:
    (folder / SAFETENSORS).unlink()
    marker = tmp_path / "marker"
    for content in (Bomb(marker), {"x": Bomb(marker)}):
        with (folder / PICKLE).open("wb") as file:
            save(content, file)
        assert refusal(folder, model).startswith(PICKLE)
    assert not marker.exists()


A_KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([torch.ones(1)], "dict of named tensors"),
        ({1: torch.ones(1)}, "dict of named tensors"),
        ({A_KEY: 5}, "dict of named tensors"),
        ({A_KEY: torch.ones(1).expand(2, 10**10)}, "not a plain tensor"),
        ({A_KEY: torch.ones(2, 64).to_sparse()}, "not a plain tensor"),
        ({A_KEY: torch.ones(2, 64, device="meta")}, "not a plain tensor"),
    ],
)
def test_strange_pickles(folder: Path, model: Path, content: object, reason: str) -> None:
    b_half = {A_KEY.replace("_A", "_B"): torch.ones(64, 2)}
    if isinstance(content, dict) and A_KEY in content:
        content = content | b_half
    (folder / SAFETENSORS).unlink()
    torch.save(content, folder / PICKLE)
    assert reason in refusal(folder, model)


# --- paths ---


def test_missing_folder(tmp_path: Path, model: Path) -> None:
    for path in (tmp_path / "nope", tmp_path / "a\0b", tmp_path / ("x" * 10_000)):
        with pytest.raises(AdapterNotFoundError):
            read(path, model)


def test_path_is_a_file(folder: Path, model: Path) -> None:
    assert refusal(folder / CONFIG, model) == "the path is not a folder"
    with pytest.raises(AdapterNotFoundError):
        read(folder / CONFIG / "below", model)


def test_config_only_and_weights_only(folder: Path, model: Path) -> None:
    (folder / SAFETENSORS).rename(folder / "kept")
    assert "neither" in refusal(folder, model)
    (folder / "kept").rename(folder / SAFETENSORS)
    (folder / CONFIG).rename(folder / "kept")
    assert CONFIG in refusal(folder, model)
    (folder / "kept").rename(folder / CONFIG)
    assert_equals_peft(folder, model)


@pytest.mark.parametrize("name", [CONFIG, SAFETENSORS])
@pytest.mark.parametrize(
    "replace",
    [
        lambda path: path.symlink_to("/no/such/file"),
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: os.mkfifo(path),
        lambda path: path.mkdir(),
    ],
    ids=["dangling", "loop", "device", "fifo", "folder"],
)
def test_what_is_no_regular_file(
    folder: Path, model: Path, name: str, replace: Callable[[Path], None]
) -> None:
    (folder / name).unlink()
    replace(folder / name)
    assert refusal(folder, model).startswith(name)


@pytest.mark.parametrize("name", [CONFIG, SAFETENSORS])
def test_links_to_files_are_followed(folder: Path, model: Path, name: str) -> None:
    (folder / name).rename(folder / "blob")
    (folder / name).symlink_to("blob")
    assert_equals_peft(folder, model)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(folder: Path, model: Path) -> None:
    (folder / SAFETENSORS).chmod(0)
    assert refusal(folder, model) == f"{SAFETENSORS} cannot be read: Permission denied"
    folder.chmod(0)
    try:
        assert "cannot be read" in refusal(folder, model)
    finally:
        folder.chmod(0o700)


def test_huge_files_are_not_read(folder: Path, model: Path) -> None:
    limit = max_weights_bytes(group_specs(load_config(model)), 64)
    for name, size in ((SAFETENSORS, limit + 1), (CONFIG, MAX_CONFIG_BYTES + 1), (CONFIG, 2**40)):
        os.truncate(folder / name, size)
        assert refusal(folder, model).startswith(f"{name} is too large")


def test_the_largest_adapter_is_within_the_limit_on_size(tmp_path: Path, model: Path) -> None:
    targets = r".*(_proj|embed_tokens)|lm_head"
    folder = make_adapter(tmp_path, model, r=64, target_modules=targets)
    assert read(folder, model).rank == 64
    over = make_adapter(tmp_path / "over", model, r=256, target_modules=targets)
    assert "largest rank is 256" in refusal(over, model)


@pytest.mark.parametrize("text", [b"null", b" " * 1000, b"\xff", b"", b"[]"])
def test_config_that_is_none(folder: Path, model: Path, text: bytes) -> None:
    (folder / CONFIG).write_bytes(text)
    assert refusal(folder, model).startswith(CONFIG)


def test_a_refused_adapter_is_not_hashed_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or many of them would keep the memory of each until all were hashed."""
    model = tiny_model(tmp_path / "model", num_hidden_layers=12)
    folder = make_adapter(tmp_path / "adapter", model)
    edit_tensors(folder, lambda tensors: {k: t * float("nan") for k, t in tensors.items()})
    gate, hashed = threading.Event(), []

    def hash_part(part: object) -> bytes:
        hashed.append(part)
        assert gate.wait(20)
        return b""

    monkeypatch.setattr(peft_files, "hash_part", hash_part)
    assert "NaN" in refusal(folder, model)
    gate.set()
    for idle in [WORKERS.submit(int) for _ in range(100)]:
        idle.result()
    assert len(hashed) <= 4  # one for each worker
