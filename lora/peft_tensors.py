"""The named tensors of a PEFT file → pairs of A and B, each of one module; nothing is left out."""

import hashlib
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, groupby

import torch
from torch import Tensor

from lorakeet.lora.adapter import AdapterError
from lorakeet.lora.peft_config import REPLACEABLE, PeftConfig, Scaling, shorten

PEFT_PREFIX = "base_model.model."
# Around the decoder: plain, both forms of a multimodal parent, or saved from the bare decoder.
PARENT = r"(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)?"
# What wrappers leave in the names when a trainer saves from inside them: torch.compile, FSDP,
# activation checkpointing, FSDP of XLA, DDP and DeepSpeed.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))"
    r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_module|module)\."
)
_KEY = re.compile(
    rf"(?P<path>{PARENT}"
    r"(?:layers\.(?P<layer>0|[1-9][0-9]{0,5})\."
    r"(?:self_attn\.(?P<attention>[qkvo]_proj|qkv_proj)|mlp\.(?P<mlp>(?:gate|up|down|gate_up)_proj))"
    r"|(?P<outer>embed_tokens|lm_head)))\.(?P<part>.+)"
)
_LINEAR = {"lora_A.weight": "A", "lora_B.weight": "B", "lora_B.bias": "bias of B"}
_EMBEDDING = {"lora_embedding_A": "A", "lora_embedding_B": "B"}
_DORA = {"lora_magnitude_vector": "magnitude", "lora_magnitude_vector.weight": "magnitude"}
_BASE = {
    "weight": "weight",
    "base_layer.weight": "weight",
    "bias": "bias",
    "base_layer.bias": "bias",
}
_UNKNOWN = {
    ".experts.": "experts of an MoE model are not supported: ",
    ".lora_a.": "torchtune's own names, not those of its PEFT export: ",
}

_BLOCK_BYTES = 2**20  # hashed at a time
_ORDERED = (torch.bfloat16, torch.float16, torch.float32)  # others are compared as float32

Place = tuple[int, str]  # layer and name of a module


@dataclass(frozen=True)
class _Module:
    path: str  # its name in the model it was trained in: "model.layers.1.self_attn.q_proj"
    name: str  # its last part; "qkv_proj" and "gate_up_proj" are fused modules
    layer: int  # 0 for embed_tokens and lm_head

    @property
    def place(self) -> Place:
        return self.layer, self.name

    @property
    def key(self) -> str:
        """Its name among the model's weights: see `BaseWeights`."""
        return self.name if self.name in REPLACEABLE else f"layers.{self.layer}.{self.name}"


@dataclass(frozen=True)
class LoRAModule(_Module):
    """A and B of one module of the file, as PEFT stores them."""

    scaling: Scaling
    a: Tensor  # (r, in)
    b: Tensor  # (out, r)
    magnitude: Tensor | None = None  # (out,), DoRA's
    bias: Tensor | None = None  # (out,), of B

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What it has of A, B, magnitude and bias, by name."""
        parts = {"a": self.a, "b": self.b, "magnitude": self.magnitude, "bias": self.bias}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}


@dataclass(frozen=True)
class BaseTensor(_Module):
    """A weight (out, in) or a bias (out,) in place of the base model's."""

    tensor: Tensor


@dataclass(frozen=True)
class PeftTensors:
    """All that a file holds, but for whole rows of embedding and head: see peft_vocabulary.py."""

    modules: tuple[LoRAModule, ...]  # sorted by layer and name
    biases: tuple[BaseTensor, ...] = ()
    copies: tuple[BaseTensor, ...] = ()  # weights, which must be the model's

    @property
    def rank(self) -> int:
        return max((module.scaling.rank for module in self.modules), default=0)

    def digest(self) -> str:
        """sha256 over those of `parts`: names, scales, and every byte of their tensors."""
        return digest_of(map(hash_part, self.parts()))

    def parts(self) -> Iterator["Part"]:
        """What is hashed on its own: the modules of each layer, then all biases."""
        for _, modules in groupby(self.modules, lambda module: module.layer):
            yield tuple(modules)
        yield self.biases


Part = tuple[LoRAModule, ...] | tuple[BaseTensor, ...]


def digest_of(hashes: Iterable[bytes]) -> str:
    """Of all parts, in their order."""
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def hash_part(part: Part) -> bytes:
    """Small pieces are joined: after each, a busy engine may keep this thread waiting."""
    digest = hashlib.sha256()
    block: list[bytes | memoryview] = []
    size = 0
    for piece in chain.from_iterable(map(_pieces_of, part)):
        is_large = len(piece) >= _BLOCK_BYTES  # it is not copied
        if is_large or size + len(piece) >= _BLOCK_BYTES:
            digest.update(b"".join(block))
            block, size = [], 0
        if is_large:
            digest.update(piece)
        else:
            block.append(piece)
            size += len(piece)
    digest.update(b"".join(block))
    return digest.digest()


def _pieces_of(module: LoRAModule | BaseTensor) -> Iterator[bytes | memoryview]:
    yield f"{module.layer} {module.name} ".encode()
    if isinstance(module, LoRAModule):
        yield struct.pack("<d", module.scaling.scale)
        tensors = module.tensors
    else:
        tensors = {"bias": module.tensor}
    for part, tensor in tensors.items():
        yield f"{part} {_dtype_name(tensor)} {tuple(tensor.shape)} ".encode()
        yield tensor.contiguous().view(torch.uint8).numpy().ravel().data


def plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by their names without wrappers; AdapterError for one that is there twice."""
    plain: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if plain.setdefault(_WRAPPERS.sub("", key), tensor) is not tensor:
            raise AdapterError(f"{shorten(key)} is there twice, under two names")
    return plain


def parse_tensors(config: PeftConfig, tensors: Mapping[str, Tensor]) -> PeftTensors:
    """Sort the tensors into modules, and check what can be checked without a model.

    Raises AdapterError for names that are not understood, A without B, names that mean the same
    module, magnitudes and biases that the config does not speak of, wrong dimensions and dtypes,
    ranks that differ from the config's. Values are another question: see `check_finite`.
    """
    parts, paths = _sort(tensors)
    adapted = [place for place in sorted(parts) if parts[place].keys() - set(_BASE.values())]
    scalings = config.resolve(paths[place] for place in adapted)
    modules = tuple(
        _make_module(paths[place], place, parts[place], tensors, scalings[paths[place]], config)
        for place in adapted
    )
    biases = _base_tensors("bias", 1, parts, paths, tensors)
    copies = _base_tensors("weight", 2, parts, paths, tensors)
    return PeftTensors(modules, biases, copies)


def _sort(tensors: Mapping[str, Tensor]) -> tuple[dict[Place, dict[str, str]], dict[Place, str]]:
    """The key of each part of each module, and the module's path."""
    parts: dict[Place, dict[str, str]] = {}
    paths: dict[Place, str] = {}
    unknown = []
    for key in tensors:
        match = _KEY.fullmatch(key.removeprefix(PEFT_PREFIX))
        part = _part(match) if match else None
        if match is None or part is None:
            unknown.append(key)
            continue
        place = (int(match["layer"] or 0), match["attention"] or match["mlp"] or match["outer"])
        same_path = paths.setdefault(place, match["path"]) == match["path"]
        if parts.setdefault(place, {}).setdefault(part, key) != key or not same_path:
            raise AdapterError(f"{shorten(key)} is there twice, under two names")
    if unknown:
        raise AdapterError(_unknown_message(unknown))
    return parts, paths


def _part(match: re.Match[str]) -> str | None:
    """An embedding has embedding factors, other layers linear ones; base weights, only projections:
    those of embedding and head are in peft_vocabulary.py."""
    name = match["part"].replace(".default", "", 1)
    if match["outer"] == "embed_tokens":
        return (_EMBEDDING | _DORA).get(name)
    if match["outer"]:
        return (_LINEAR | _DORA).get(name)
    return (_LINEAR | _DORA | _BASE).get(name)


def _unknown_message(unknown: list[str]) -> str:
    listed = ", ".join(shorten(key) for key in sorted(unknown)[:3])
    more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
    reasons = [why for part, why in _UNKNOWN.items() if any(part in key for key in unknown)]
    return f"tensors that cannot be bound to a module: {''.join(reasons)}{listed}{more}"


def _make_module(
    path: str,
    place: Place,
    keys: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    scaling: Scaling,
    config: PeftConfig,
) -> LoRAModule:
    for part in ("A", "B"):
        if part not in keys:
            lonely = next(key for other, key in keys.items() if other not in _BASE.values())
            raise AdapterError(f"{shorten(lonely)} is there without its {part}")
    for part, axis in (("A", 0), ("B", 1)):
        key, tensor = keys[part], tensors[keys[part]]
        check_tensor(key, tensor)
        if tensor.shape[axis] != scaling.rank:
            raise AdapterError(
                f"{shorten(key)} has rank {tensor.shape[axis]} (shape {tuple(tensor.shape)}), "
                f"by the config it is {scaling.rank}"
            )
    vectors = {}
    for part, is_expected, field in (
        ("magnitude", config.use_dora, "use_dora"),
        ("bias of B", config.lora_bias, "lora_bias"),
    ):
        if part in keys:
            if not is_expected:
                raise AdapterError(f"{shorten(keys[part])} is there, but {field} is not true")
            check_tensor(keys[part], tensors[keys[part]], dimensions=1)
            vectors[part] = tensors[keys[part]]
        elif is_expected:
            raise AdapterError(f"{shorten(path)}: {field}, but the file has no {part} for it")
    return LoRAModule(
        path=path,
        name=place[1],
        layer=place[0],
        scaling=scaling,
        a=tensors[keys["A"]],
        b=tensors[keys["B"]],
        magnitude=vectors.get("magnitude"),
        bias=vectors.get("bias of B"),
    )


def _base_tensors(
    part: str,
    dimensions: int,
    parts: Mapping[Place, Mapping[str, str]],
    paths: Mapping[Place, str],
    tensors: Mapping[str, Tensor],
) -> tuple[BaseTensor, ...]:
    found = []
    for (layer, name), keys in sorted(parts.items()):
        if part in keys:
            tensor = tensors[keys[part]]
            check_tensor(keys[part], tensor, dimensions)
            found.append(BaseTensor(paths[layer, name], name, layer, tensor))
    return tuple(found)


def check_tensor(key: str, tensor: Tensor, dimensions: int = 2) -> None:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise AdapterError(f"{shorten(key)} is not a plain tensor")
    if not tensor.is_floating_point():
        raise AdapterError(
            f"{shorten(key)} holds {_dtype_name(tensor)}, not floating-point numbers"
        )
    if tensor.ndim != dimensions:
        raise AdapterError(f"{shorten(key)} must have {dimensions} dimensions, not {tensor.ndim}")
    if tensor.nbytes > tensor.untyped_storage().nbytes():  # a stride of 0: a few bytes, any size
        raise AdapterError(f"{shorten(key)} is not a plain tensor")
    if tensor.numel() == 0:
        raise AdapterError(f"{shorten(key)} is empty: its shape is {tuple(tensor.shape)}")


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise AdapterError that names one with NaN or infinite values. All are floating, none empty.

    The usual file, of one buffer and one dtype, is looked at in one piece.
    """
    first = next(iter(tensors.values()))
    buffer, dtype = first.untyped_storage(), first.dtype
    if (
        dtype in _ORDERED
        and all(
            tensor.dtype == dtype and tensor.untyped_storage().data_ptr() == buffer.data_ptr()
            for tensor in tensors.values()
        )
        and all_finite(first.as_strided((buffer.nbytes() // dtype.itemsize,), (1,), 0))
    ):
        return
    for key, tensor in tensors.items():
        if not all_finite(tensor):
            raise AdapterError(f"{shorten(key)} holds NaN or infinite values")


def all_finite(tensor: Tensor) -> bool:
    """Of a tensor that is not empty. NaN is its own minimum; many times faster than isfinite."""
    low, high = (tensor if tensor.dtype in _ORDERED else tensor.float()).aminmax()
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
