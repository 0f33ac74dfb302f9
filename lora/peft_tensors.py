"""The named tensors of a PEFT file → pairs of A and B, each of one module; nothing is left out."""

import hashlib
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorakeet.lora.adapter import AdapterError
from lorakeet.lora.peft_config import PeftConfig, Scaling, shorten

PEFT_PREFIX = "base_model.model."
# Around the decoder: plain, both forms of a multimodal parent, or saved from the bare decoder.
PARENT = r"(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)?"
_KEY = re.compile(
    rf"(?P<path>{PARENT}"
    r"(?:layers\.(?P<layer>0|[1-9][0-9]{0,5})\."
    r"(?:self_attn\.(?P<attention>[qkvo]_proj|qkv_proj)|mlp\.(?P<mlp>(?:gate|up|down|gate_up)_proj))"
    r"|(?P<outer>embed_tokens|lm_head)))"
    r"\.(?:lora_(?P<linear>[AB])(?:\.default)?\.weight"
    r"|lora_embedding_(?P<embedding>[AB])(?:\.default)?)"
)

_Place = tuple[int, str]  # layer and name of a module


@dataclass(frozen=True)
class LoRAModule:
    """A and B of one module of the file, as PEFT stores them."""

    path: str  # its name in the model it was trained in: "model.layers.1.self_attn.q_proj"
    name: str  # its last part; "qkv_proj" and "gate_up_proj" are fused modules
    layer: int  # 0 for embed_tokens and lm_head
    scaling: Scaling
    a: Tensor  # (r, in)
    b: Tensor  # (out, r)


@dataclass(frozen=True)
class PeftTensors:
    """All that a file holds, but for whole rows of embedding and head: see peft_vocabulary.py."""

    modules: tuple[LoRAModule, ...]  # sorted by layer and name
    digest: str  # sha256 over the modules: names, scales, and every byte of their tensors

    @property
    def rank(self) -> int:
        return max((module.scaling.rank for module in self.modules), default=0)


def parse_tensors(config: PeftConfig, tensors: Mapping[str, Tensor]) -> PeftTensors:
    """Sort the tensors into modules, and check what can be checked without a model.

    Raises AdapterError for names that are not understood, A without B, names that mean the same
    module, wrong dimensions and dtypes, ranks that differ from the config's, values not finite.
    """
    matches = {key: _match(key) for key in tensors}
    if unknown := [key for key, match in matches.items() if match is None]:
        raise AdapterError(_unknown_message(unknown))
    halves: dict[_Place, dict[str, str]] = {}  # "A" or "B" → key
    paths: dict[_Place, str] = {}
    for key, match in matches.items():
        assert match is not None
        place = (int(match["layer"] or 0), match["attention"] or match["mlp"] or match["outer"])
        side = match["linear"] or match["embedding"]
        if (
            side in halves.setdefault(place, {})
            or paths.setdefault(place, match["path"]) != (match["path"])
        ):
            raise AdapterError(f"{shorten(key)} is there twice, under two names")
        halves[place][side] = key
    adapted = sorted(halves)
    scalings = config.resolve(paths[place] for place in adapted)
    modules = tuple(
        _pair(paths[place], place, halves[place], tensors, scalings[paths[place]])
        for place in adapted
    )
    return PeftTensors(modules, _digest(modules))


def _match(key: str) -> re.Match[str] | None:
    """An embedding has embedding factors, other layers linear ones."""
    match = _KEY.fullmatch(key.removeprefix(PEFT_PREFIX))
    if match is None:
        return None
    return match if bool(match["embedding"]) == (match["outer"] == "embed_tokens") else None


def _unknown_message(unknown: list[str]) -> str:
    listed = ", ".join(shorten(key) for key in sorted(unknown)[:3])
    more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
    kinds = {".lora_magnitude_vector": "DoRA", ".bias": "a trained bias"}
    for part, kind in kinds.items():
        if any(part in key for key in unknown):
            return f"{kind} is not supported, the file holds {listed}{more}"
    return f"tensors that cannot be bound to a module: {listed}{more}"


def _pair(
    path: str,
    place: _Place,
    half: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    scaling: Scaling,
) -> LoRAModule:
    for side, other in (("A", "B"), ("B", "A")):
        if side not in half:
            raise AdapterError(f"{shorten(half[other])} is there without its {side}")
    for side, axis in (("A", 0), ("B", 1)):
        key, tensor = half[side], tensors[half[side]]
        check_tensor(key, tensor)
        if tensor.shape[axis] != scaling.rank:
            raise AdapterError(
                f"{shorten(key)} has rank {tensor.shape[axis]} (shape {tuple(tensor.shape)}), "
                f"by the config it is {scaling.rank}"
            )
    layer, name = place
    return LoRAModule(path, name, layer, scaling, tensors[half["A"]], tensors[half["B"]])


def check_tensor(key: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise AdapterError(f"{shorten(key)} is not a plain tensor")
    if not tensor.is_floating_point():
        raise AdapterError(
            f"{shorten(key)} holds {_dtype_name(tensor)}, not floating-point numbers"
        )
    if tensor.ndim != 2:
        raise AdapterError(f"{shorten(key)} must have 2 dimensions, not {tensor.ndim}")
    if tensor.nbytes > tensor.untyped_storage().nbytes():  # a stride of 0: a few bytes, any size
        raise AdapterError(f"{shorten(key)} is not a plain tensor")
    if tensor.numel() == 0:
        raise AdapterError(f"{shorten(key)} is empty: its shape is {tuple(tensor.shape)}")
    if not all_finite(tensor):
        raise AdapterError(f"{shorten(key)} holds NaN or infinite values")


def _digest(modules: Sequence[LoRAModule]) -> str:
    digest = hashlib.sha256()
    for module in modules:
        digest.update(f"{module.layer} {module.name} ".encode())
        digest.update(struct.pack("<d", module.scaling.scale))
        for tensor in (module.a, module.b):
            digest.update(f"{_dtype_name(tensor)} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def all_finite(tensor: Tensor) -> bool:
    """Of a tensor that is not empty. NaN is its own minimum; many times faster than isfinite."""
    low, high = tensor.float().aminmax()
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
