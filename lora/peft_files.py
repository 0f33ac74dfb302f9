"""An adapter folder on disk, which may hold anything → its config and tensors, or an AdapterError.

The files are read whole into memory, never mapped: a mapped file that somebody cuts short kills
the process that looks at it. Nothing is unpickled but what torch's weights-only reader allows.
"""

import errno
import hashlib
import io
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from lorakeet.lora.adapter import Adapter, AdapterError, AdapterNotFoundError, GroupSpec
from lorakeet.lora.base_weights import check_copies
from lorakeet.lora.canonical import check_fit, check_rank, pack
from lorakeet.lora.host_memory import CPU
from lorakeet.lora.peft_config import CONFIG_NAME, PeftConfig, parse_config, shorten
from lorakeet.lora.peft_tensors import (
    PeftTensors,
    check_finite,
    digest_of,
    hash_part,
    parse_tensors,
    plain_names,
)
from lorakeet.lora.peft_vocabulary import (
    VocabularyTensors,
    fit_modules,
    resolve_vocabulary,
    split_vocabulary,
    with_vocabulary,
)
from lorakeet.lora.tensor_file import TensorFileError, read_tensors
from lorakeet.lora.vectors import work_out_vectors

SAFETENSORS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"
MAX_CONFIG_BYTES = 4 * 2**20

_log = logging.getLogger(__name__)


def read_adapter(
    folder: Path,
    specs: Sequence[GroupSpec],
    *,
    max_rank: int,
    dtype: torch.dtype,
    workers: Executor,
    device: torch.device = CPU,
    base_weights: Mapping[str, Tensor] | None = None,
    base_model: str | None = None,
    on_stage: Callable[[str, float], None] = lambda stage, seconds: None,
) -> Adapter:
    """Read a PEFT LoRA folder, check it against the model, and return its canonical weights, those
    of the rank that `specs` are for. The digest is that of the whole. `workers` share the work.
    `device`: to which the weights will be copied.

    `base_weights` are the model's, named as in `BaseWeights`: copies of them in the file are
    compared with them, and DoRA and biases are worked out from them. Without them such a file is
    refused.
    `base_model` is the name of the model served: another name in the config is a warning in the
    log. `on_stage` is told the seconds of each stage: "read" and "check".

    Raises AdapterNotFoundError when there is no folder, AdapterError for everything else.
    """
    start = time.monotonic()
    whole = [spec.whole for spec in specs]
    config, tensors = read_files(folder, max_weights_bytes(whole, max_rank))
    read = time.monotonic()
    on_stage("read", read - start)
    own, others = split_vocabulary(config, tensors)
    found = parse_tensors(config, others)
    check_not_empty(found, own)
    check_rank(found, max_rank)
    with _hashed_meanwhile(found, workers) as digest:
        check_finite(tensors)
        vocabulary = resolve_vocabulary(own, found.modules, base_weights, dtype)
        found = replace(found, modules=fit_modules(found.modules, own, whole))
        check_fit(found, whole)
        _warn_of_other_base(folder, config, base_model)
        check_copies(found.copies, base_weights)
        vectors = work_out_vectors(found, base_weights)
        adapter = pack(found, vectors, specs, dtype, digest, workers, device)
    adapter = with_vocabulary(adapter, vocabulary)
    adapter = _with_invocation(adapter, config.alora_invocation_tokens, whole)
    on_stage("check", time.monotonic() - read)
    return adapter


@contextmanager
def _hashed_meanwhile(found: PeftTensors, workers: Executor) -> Iterator[Callable[[], str]]:
    """Gives its digest, which is waited for. What fails meanwhile is not hashed to its end."""
    hashes = [workers.submit(hash_part, part) for part in found.parts()]
    try:
        yield lambda: digest_of(each.result() for each in hashes)
    finally:
        for each in hashes:
            each.cancel()


def _with_invocation(
    adapter: Adapter, tokens: tuple[int, ...], specs: Sequence[GroupSpec]
) -> Adapter:
    """An aLoRA. Raises AdapterError for what PEFT does not know as one, and for tokens that the
    model does not have."""
    if not tokens:
        return adapter
    if "embed_tokens" in adapter.modules or adapter.vocabulary is not None:
        raise AdapterError("an aLoRA (alora_invocation_tokens) cannot change the embedding")
    vocab_size = next(spec.input_size for spec in specs if spec.name == "embed_tokens")
    if max(tokens) >= vocab_size:
        raise AdapterError(f"alora_invocation_tokens: the model has no token {max(tokens)}")
    digest = hashlib.sha256(f"{adapter.digest} {tokens}".encode()).hexdigest()
    return replace(adapter, digest=digest, invocation=tokens)


def read_files(folder: Path, max_bytes: int) -> tuple[PeftConfig, dict[str, Tensor]]:
    """The config and the tensors, as they are in the file: safetensors when there is one."""
    _check_folder(folder)
    config = parse_config(_read_file(folder / CONFIG_NAME, MAX_CONFIG_BYTES))
    if os.path.lexists(folder / SAFETENSORS_NAME):
        tensors = _from_safetensors(folder / SAFETENSORS_NAME, max_bytes)
    elif os.path.lexists(folder / PICKLE_NAME):
        tensors = _from_pickle(_read_file(folder / PICKLE_NAME, max_bytes))
    else:
        raise AdapterError(f"the folder holds neither {SAFETENSORS_NAME} nor {PICKLE_NAME}")
    return config, plain_names(tensors)


def check_not_empty(found: PeftTensors, own: VocabularyTensors) -> None:
    """Raise AdapterError for a file that changes nothing."""
    if not (found.modules or own):
        raise AdapterError("there is no LoRA tensor in the file")


def max_weights_bytes(specs: Sequence[GroupSpec], max_rank: int) -> int:
    """What a file for this model may weigh.

    Float32, three copies of embedding and head (PEFT writes as many of what it trains once the
    vocabulary was resized), the vocabulary an eighth larger than the model's, a copy of every other
    weight (some trainers write those of adapted modules beside the factors), and factors of
    several times the largest rank, so that the usual fault, a rank over the limit, is named and not
    just called too large.
    """
    per_rank = sum(
        spec.num_layers * (len(spec.slice_names) * spec.input_size + spec.output_size)
        for spec in specs
    )
    ends = sum(spec.input_size * spec.output_size for spec in specs if spec.num_layers == 1)
    weights = sum(spec.num_layers * spec.input_size * spec.output_size for spec in specs)
    return 4 * (8 * max_rank * per_rank + 3 * ends * 9 // 8 + weights) + 2**24


def _check_folder(folder: Path) -> None:
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            raise AdapterError("the path is not a folder")
    except (FileNotFoundError, ValueError):  # ValueError: a NUL byte
        raise AdapterNotFoundError("there is no adapter folder at the path") from None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR):
            raise AdapterNotFoundError("there is no adapter folder at the path") from None
        raise AdapterError(f"the folder cannot be read: {error.strerror}") from None


def _read_file(path: Path, max_bytes: int) -> bytes:
    with _open(path, max_bytes) as (file, size):
        data = file.read(size)
        if len(data) != size:
            raise EOFError
    return data


@contextmanager
def _open(path: Path, max_bytes: int) -> Iterator[tuple[BufferedReader, int]]:
    """A regular file, and its size. Never waits for a FIFO, never reads a device.

    EOFError while it is open means that it was cut short.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise AdapterError(f"{path.name} is not a regular file")
            if status.st_size > max_bytes:
                raise AdapterError(
                    f"{path.name} is too large: {status.st_size} bytes, the limit is {max_bytes}"
                )
            yield file, status.st_size
    except EOFError:
        raise AdapterError(f"{path.name} was changed while it was read") from None
    except OSError as error:
        raise AdapterError(f"{path.name} cannot be read: {error.strerror}") from None


def _from_safetensors(path: Path, max_bytes: int) -> dict[str, Tensor]:
    try:
        with _open(path, max_bytes) as (file, size):
            return read_tensors(file, size)
    except TensorFileError as error:
        raise AdapterError(f"{path.name} is damaged: {error}") from None


def _from_pickle(data: bytes) -> dict[str, Tensor]:
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # anything can be in a pickle
        raise AdapterError(f"{PICKLE_NAME} is refused: {_reason(error)}") from None
    if not isinstance(loaded, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in loaded.items()
    ):
        raise AdapterError(f"{PICKLE_NAME} must hold a dict of named tensors")
    return {key: value.detach() for key, value in loaded.items()}


def _reason(error: Exception) -> str:
    first_line = str(error).strip().split("\n")[0]
    return first_line[:120] or type(error).__name__


def _warn_of_other_base(folder: Path, config: PeftConfig, base_model: str | None) -> None:
    """By the last part of the names: the same model may lie in a folder here, on a hub there."""
    trained_on = config.base_model_name_or_path
    if trained_on and base_model and _last_part(trained_on) != _last_part(base_model):
        _log.warning(
            "the adapter in %s was trained on %s, the model served is %s",
            folder,
            shorten(trained_on),
            shorten(base_model),
        )


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
