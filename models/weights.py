"""Safetensors files → the model's parameters, a few tensors at a time, never a second copy."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from lorakeet.models.config import ModelConfig, load_config
from lorakeet.models.cuts import Cut
from lorakeet.models.llama import LlamaForCausalLM
from lorakeet.models.parallel import (
    ParallelLinear,
    ParallelLMHead,
    Piece,
    VocabParallelEmbedding,
    pack_weights,
)
from lorakeet.models.process_group import ALONE, ProcessGroup

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FILE_DTYPES = ("F32", "BF16", "F16")
_INDEX, _SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
_HEAD = "lm_head.weight"
READERS = 4  # threads: one alone copies more slowly than a fast disk reads
_PROGRESS_AFTER = 2.0  # seconds; a load that is over sooner shows no bar


class WeightsError(Exception):
    """The files do not hold this model's weights; the message names the file or tensor."""


def load_model(
    folder: Path,
    device: torch.device | str,
    dtype: DtypeName = "auto",
    load_format: LoadFormat = "auto",
    group: ProcessGroup = ALONE,
) -> LlamaForCausalLM:
    """The model in `folder`, ready for inference, in eval mode and without gradients.

    `load_format="dummy"` reads only config.json and makes up the weights. Of a `group`, each rank
    reads and holds only its own part.
    Raises UnsupportedModelError (config.json) or WeightsError (the rest).
    """
    config = load_config(folder)
    device = torch.device(device)
    model = empty_model(config, device, resolve_dtype(config, device, dtype), group)
    if load_format == "dummy":
        fill_randomly(model)
    else:
        load_weights(model, folder)
        model.checkpoint = folder
    pack_weights(model)
    return model


def resolve_dtype(config: ModelConfig, device: torch.device, dtype: DtypeName) -> torch.dtype:
    """ "auto": float32 on the CPU; on a GPU the checkpoint's 16-bit type, or else bfloat16."""
    if dtype != "auto":
        return _DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if config.dtype == "float16" else torch.bfloat16


def empty_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, group: ProcessGroup = ALONE
) -> LlamaForCausalLM:
    """Allocated once, on the device and in the type it will stay in; values undefined."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config, group).to(dtype)
    model.to_empty(device=device)
    model.tie_weights()  # to_empty gives each layer a tensor of its own
    return model.requires_grad_(False).eval()


def fill_randomly(model: LlamaForCausalLM) -> None:
    """The same values each time, others on each rank; outputs of every layer are of about unit
    size."""
    generator = torch.Generator(model.device).manual_seed(model.group.rank)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:  # norms
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)


def load_weights(model: LlamaForCausalLM, folder: Path) -> None:
    """Fill every parameter from `folder`; every tensor there must have its place."""
    missing = dict(_destinations(model))
    found: list[tuple[Path, str, Piece]] = []
    tied_head: Path | None = None
    for file in _weight_files(folder):
        for name in _tensor_names(file):
            if name.endswith("rotary_emb.inv_freq"):
                continue  # old checkpoints; follows from config.json
            if name == _HEAD and model.config.tie_word_embeddings:
                tied_head = file
                continue
            if name not in missing:
                others = [other.name for other, known, _ in found if known == name]
                reason = f": {others[0]} has it too" if others else ""
                raise WeightsError(f"{file.name}: the model has no place for tensor {name}{reason}")
            found.append((file, name, missing.pop(name)))
    if missing:
        names = ", ".join(sorted(missing)[:5])
        raise WeightsError(f"{folder}: {len(missing)} tensors are missing, among them {names}")
    _fill_all(found)
    if tied_head is not None:
        _check_tied_head(tied_head, model.model.embed_tokens)


def _fill_all(found: Sequence[tuple[Path, str, Piece]]) -> None:
    with (
        ThreadPoolExecutor(READERS, "weight-reader") as readers,
        tqdm(
            total=sum(piece.view.nbytes for _, _, piece in found),
            desc="Loading weights",
            unit="B",
            unit_scale=True,
            delay=_PROGRESS_AFTER,
            disable=None,  # where nobody watches
        ) as progress,
    ):
        filled = [readers.submit(_fill, *each) for each in found]
        try:
            for each, (_, _, piece) in zip(filled, found, strict=True):
                each.result()
                progress.update(piece.view.nbytes)
        except BaseException:
            readers.shutdown(cancel_futures=True)  # the rest is not wanted
            raise


def _destinations(model: LlamaForCausalLM) -> Iterator[tuple[str, Piece]]:
    """Each tensor that a checkpoint must hold, by name, with the memory that it fills."""
    for path, module in model.named_modules():
        if module is model.lm_head and model.config.tie_word_embeddings:
            continue
        if isinstance(module, ParallelLinear):
            parent = path.rpartition(".")[0]
            for name, piece in module.pieces():
                yield f"{parent}.{name}", piece
        elif isinstance(module, VocabParallelEmbedding | ParallelLMHead):
            for name, piece in module.pieces():
                yield f"{path}.{name}", piece
        else:  # norms, the same on all ranks
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{path}.{name}", Piece.of(parameter, *map(Cut.none, parameter.shape))


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.exists():
        if (folder / _SINGLE_FILE).exists():
            return [folder / _SINGLE_FILE]
        raise WeightsError(f"{folder} holds neither {_SINGLE_FILE} nor {_INDEX}")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [folder / name for name in sorted(names)]
        strangers = [file.name for file in files if file.parent != folder or not file.exists()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"Cannot read {index}: {error!r}") from None
    if strangers:
        raise WeightsError(f"{index} names {strangers[0]}, which is not in the folder")
    return files


@contextmanager
def _reading(file: Path) -> Iterator[Any]:
    try:
        file.open("rb").close()  # safetensors says of what it may not read that it is not there
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"Cannot read {file}: {error}") from None


def _tensor_names(file: Path) -> list[str]:
    with _reading(file) as tensors:
        return list(tensors.offset_keys())


def _fill(file: Path, name: str, piece: Piece) -> None:
    """Padding becomes zeros. One opening a tensor: closing it lets the pages go that the memory map
    has brought in."""
    with _reading(file) as tensors:
        source = tensors.get_slice(name)
        if source.get_dtype() not in _FILE_DTYPES:
            raise WeightsError(f"{file.name}: {name} is of type {source.get_dtype()}")
        if tuple(source.get_shape()) != piece.shape:
            raise WeightsError(
                f"{file.name}: {name} has shape {tuple(source.get_shape())},"
                f" but config.json makes it {piece.shape}"
            )
        filled = piece.filled
        if filled.shape != piece.view.shape:
            piece.view.zero_()
        if filled.shape == piece.shape:
            filled.copy_(tensors.get_tensor(name))
        elif filled.numel():
            filled.copy_(source[piece.places])


class Checkpoint:
    """The whole tensors of a folder that a model was loaded from, in the type of the file."""

    def __init__(self, folder: Path) -> None:
        self._files = {name: file for file in _weight_files(folder) for name in _tensor_names(file)}

    def read(self, name: str) -> Tensor:
        """Mapped: what is not looked at is not read."""
        with _reading(self._files[name]) as tensors:
            return tensors.get_tensor(name)  # type: ignore[no-any-return]


def _check_tied_head(file: Path, embed_tokens: VocabParallelEmbedding) -> None:
    """Older files repeat the embedding as the head. A head of its own must not be dropped."""
    ((_, piece),) = embed_tokens.pieces()
    with _reading(file) as tensors:
        head = tensors.get_slice(_HEAD)
        is_same = tuple(head.get_shape()) == piece.shape
        if is_same and piece.filled.numel():
            own = head[piece.places].to(piece.view.device, piece.view.dtype)
            is_same = torch.equal(own, piece.filled)
    if not is_same:
        raise WeightsError(
            f"{file.name}: {_HEAD} differs from the embedding, but config.json ties the two"
        )
