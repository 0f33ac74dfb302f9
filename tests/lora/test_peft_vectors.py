"""DoRA and biases: what is read gives PEFT's outputs, module by module; what cannot is refused."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorakeet.lora.adapter import Adapter, AdapterError, Slot
from lorakeet.lora.batch import LoRABatch
from lorakeet.lora.pool import AdapterPool
from lorakeet.lora.row_tables import table_width
from lorakeet.lora.specs import group_specs
from lorakeet.lora.torch_backend import TorchBackend
from lorakeet.models.config import load_config
from support.adapter_kinds import fuse_all, share_a
from support.adapters import (
    ALL_LINEAR,
    base_model,
    edit_config,
    edit_tensors,
    make_adapter,
    peft_model,
    tensors_of,
)
from support.deltas import Tensors, base_weights, read, renamed
from support.models import tiny_model

EVERYTHING = [*ALL_LINEAR, "embed_tokens", "lm_head"]
Q = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return cache(lambda kind: tiny_model(root / kind, kind))


def module_outputs(root: nn.Module, inputs: dict[str, Tensor]) -> Tensors:
    """What each projection, the embedding and the head make of inputs of their size."""
    names = {name.removeprefix("base_model.model."): name for name, _ in root.named_modules()}
    with torch.inference_mode():
        return {name: root.get_submodule(names[name])(x) for name, x in inputs.items()}


def our_outputs(adapter: Adapter, model: Path, inputs: dict[str, Tensor], base: Tensors) -> Tensors:
    """The base model's outputs, with the adapter added by pool and backend."""
    specs = group_specs(load_config(model))
    width = table_width(adapter.rank)
    pool = AdapterPool(specs, 2, adapter.num_rows, width, torch.float32, "cpu")
    pool.write(Slot(1), range(adapter.num_rows), adapter)
    found: Tensors = {}
    for spec in specs:
        for layer in range(spec.num_layers):
            names = [n for part in spec.slice_names for n in inputs if is_at(n, part, layer)]
            y = torch.cat([base[name] for name in names], dim=1).clone()
            batch = LoRABatch(torch.ones(len(y), dtype=torch.int32))
            backend = TorchBackend()
            add = backend.add_embedding if spec.name == "embed_tokens" else backend.add_linear
            add(y, inputs[names[0]], pool.layer(spec.name, layer), batch)
            parts = torch.split(y, list(spec.slice_sizes), dim=1)
            found |= dict(zip(names, parts, strict=True))
    return found


def is_at(name: str, part: str, layer: int) -> bool:
    *parents, last = name.split(".")
    return last == part and (part in ("embed_tokens", "lm_head") or parents[2] == str(layer))


def assert_outputs_are_pefts(folder: Path, model: Path, oracle: Path | None = None) -> Adapter:
    adapter = read(folder, model)
    generator = torch.Generator().manual_seed(3)
    inputs: Tensors = {}
    for name, module in base_model(model).named_modules():
        if isinstance(module, nn.Embedding):
            inputs[name] = torch.randint(module.num_embeddings, (40,), generator=generator)
        elif isinstance(module, nn.Linear):
            same = torch.Generator().manual_seed(module.in_features)  # slices share their input
            inputs[name] = torch.randn((40, module.in_features), generator=same)
    base = module_outputs(base_model(model), inputs)
    theirs = module_outputs(peft_model(model, oracle or folder), inputs)
    ours = our_outputs(adapter, model, inputs, base)
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        torch.testing.assert_close(ours[name], want, atol=1e-4, rtol=1e-4, msg=name)
    changed = {name.rpartition(".")[2] for name in theirs if not theirs[name].equal(base[name])}
    assert set(adapter.modules) == changed
    return adapter


@pytest.mark.parametrize("kind", ["llama", "llama_bias", "qwen2", "qwen3", "llama_tied"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_dora_everywhere(
    models: Callable[[str], Path], tmp_path: Path, kind: str, use_rslora: bool
) -> None:
    """Base biases are not scaled."""
    targets = ALL_LINEAR if kind == "llama_tied" else EVERYTHING
    options = {"use_dora": True, "use_rslora": use_rslora}
    folder = make_adapter(tmp_path, models(kind), lora_alpha=6, target_modules=targets, **options)
    adapter = assert_outputs_are_pefts(folder, models(kind))
    assert adapter.num_rows == 9 + (kind in ("llama_bias", "qwen2"))


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        *(("llama", name) for name in EVERYTHING),
        *(("llama_tied", name) for name in EVERYTHING[-2:]),
    ],
)
def test_dora_of_one_module(
    models: Callable[[str], Path], tmp_path: Path, kind: str, target: str
) -> None:
    folder = make_adapter(tmp_path, models(kind), use_dora=True, r=3, target_modules=[target])
    assert_outputs_are_pefts(folder, models(kind))


@pytest.mark.parametrize(
    "options",
    [
        {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 13}, "alpha_pattern": {"v_proj": 1}},
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        {"bias": "all"},
        {"bias": "lora_only", "target_modules": ["k_proj", "o_proj", "gate_proj"]},
    ],
    ids=str,
)
def test_dora_with_patterns_and_biases(
    models: Callable[[str], Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = make_adapter(tmp_path, models("llama_bias"), use_dora=True, **options)
    assert_outputs_are_pefts(folder, models("llama_bias"))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_stored_in_sixteen_bits(
    models: Callable[[str], Path], tmp_path: Path, stored: torch.dtype
) -> None:
    folder = make_adapter(tmp_path, models("qwen2"), use_dora=True, bias="all")
    edit_tensors(folder, lambda t: {key: tensor.to(stored) for key, tensor in t.items()})
    assert_outputs_are_pefts(folder, models("qwen2"))


def test_dora_of_fused_modules(models: Callable[[str], Path], tmp_path: Path) -> None:
    """q, k and v with one A; the magnitudes side by side."""
    model = models("qwen2")
    oracle = make_adapter(tmp_path / "split", model, use_dora=True)
    edit_tensors(oracle, share_a)

    def fuse_magnitudes(tensors: Tensors) -> Tensors:
        fused = fuse_all(tensors)
        for name, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
            for key in [k for k in fused if f".{parts[0]}_proj.lora_magnitude" in k]:
                keys = [key.replace(f"{parts[0]}_proj", f"{part}_proj") for part in parts]
                whole = torch.cat([fused.pop(k) for k in keys])
                fused[key.replace(f"{parts[0]}_proj", name)] = whole
        return fused

    folder = make_adapter(tmp_path / "fused", model, use_dora=True)
    edit_tensors(folder, lambda _: fuse_magnitudes(tensors_of(oracle)))
    adapter = read(folder, model)
    want = read(oracle, model)
    for name, group in want.groups.items():
        torch.testing.assert_close(adapter.groups[name].b, group.b)
        torch.testing.assert_close(adapter.groups[name].magnitude, group.magnitude)
        torch.testing.assert_close(adapter.groups[name].bias, group.bias)


# --- biases ---


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2", {"bias": "all"}),
        ("qwen2", {"bias": "lora_only"}),
        ("qwen2", {"bias": "all", "target_modules": ["k_proj"]}),  # q and v have biases alone
        ("qwen2", {"bias": "all", "target_modules": ["down_proj"]}),
        ("llama_bias", {"bias": "all", "rank_pattern": {"q_proj": 1, "layers.1.mlp": 5}}),
        ("llama_bias", {"bias": "lora_only", "target_modules": ["v_proj", "down_proj"]}),
        ("llama_bias", {"lora_bias": True}),
        ("llama", {"lora_bias": True, "use_rslora": True}),
        ("llama", {"lora_bias": True, "target_modules": ["lm_head", "q_proj"]}),
        ("qwen2", {"lora_bias": True, "bias": "all"}),
    ],
    ids=str,
)
def test_biases(
    models: Callable[[str], Path], tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    folder = make_adapter(tmp_path, models(kind), lora_alpha=5, **options)
    assert any(key.endswith(".bias") for key in tensors_of(folder))
    adapter = assert_outputs_are_pefts(folder, models(kind))
    assert adapter.num_rows == adapter.rank + 1


def test_the_bias_field_without_bias_tensors_is_a_plain_lora(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    """As older versions of PEFT wrote it."""
    for bias in ("all", "lora_only"):
        folder = make_adapter(tmp_path / bias, models("qwen2"), bias=bias)
        edit_tensors(folder, lambda t: {k: v for k, v in t.items() if not k.endswith(".bias")})
        assert assert_outputs_are_pefts(folder, models("qwen2")).num_rows == 8


def test_copies_of_the_models_biases_cost_nothing(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = make_adapter(tmp_path / "plain", models("qwen2"))
    copies = {
        f"base_model.model.{name.replace('.bias', '.base_layer.bias')}": bias
        for name, bias in base_model(models("qwen2")).named_parameters()
        if name.endswith(".bias")
    }
    edit_tensors(plain, lambda tensors: tensors | copies)
    assert read(plain, models("qwen2")).num_rows == 8


# --- what cannot be served right ---


def test_magnitudes_that_the_config_does_not_speak_of(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path, models("llama"), use_dora=True)
    edit_config(folder, use_dora=False)
    with pytest.raises(AdapterError, match=r"lora_magnitude_vector' is there, but use_dora"):
        read(folder, models("llama"))


def test_a_magnitude_is_missing(models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = make_adapter(tmp_path, models("llama"), use_dora=True)
    key = f"{Q}.lora_magnitude_vector"
    edit_tensors(folder, lambda t: {k: v for k, v in t.items() if k != key})
    with pytest.raises(AdapterError, match=r"layers.1.self_attn.q_proj.*has no magnitude"):
        read(folder, models("llama"))


def test_a_bias_of_b_is_missing(models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = make_adapter(tmp_path, models("llama"), lora_bias=True)
    edit_tensors(
        folder, lambda t: {k: v for k, v in t.items() if "1.self_attn.q_proj.lora_B.bias" not in k}
    )
    with pytest.raises(AdapterError, match=r"layers.1.self_attn.q_proj.*lora_bias.*no bias of B"):
        read(folder, models("llama"))


def test_biases_of_b_that_the_config_does_not_speak_of(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = edit_config(make_adapter(tmp_path, models("llama"), lora_bias=True), lora_bias=False)
    with pytest.raises(AdapterError, match=r"lora_B.bias' is there, but lora_bias"):
        read(folder, models("llama"))


def test_a_bias_that_the_model_does_not_have(models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = make_adapter(tmp_path, models("llama"))
    edit_tensors(folder, lambda t: t | {f"{Q}.base_layer.bias": torch.ones(64)})
    with pytest.raises(AdapterError, match=r"q_proj: the file has a bias for it, the model has"):
        read(folder, models("llama"))


@pytest.mark.parametrize("options", [{"use_dora": True}, {"bias": "all"}])
def test_without_the_models_weights(
    models: Callable[[str], Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = make_adapter(tmp_path, models("qwen2"), **options)
    with pytest.raises(AdapterError, match="need the model's weights"):
        read(folder, models("qwen2"), base_weights=None)


@pytest.mark.parametrize(
    ("options", "key", "change", "reason"),
    [
        ({"use_dora": True}, "lora_magnitude_vector", lambda v: v[:-1], r"magnitude is \(63,\)"),
        ({"use_dora": True}, "lora_magnitude_vector", lambda v: v[:, None], "1 dimensions, not 2"),
        ({"use_dora": True}, "lora_magnitude_vector", lambda v: v * torch.nan, "NaN or infinite"),
        ({"lora_bias": True}, "lora_B.bias", lambda v: v[:-1], r"bias of B is \(63,\)"),
        ({"bias": "all"}, "base_layer.bias", lambda v: torch.cat([v, v]), r"bias is \(128,\)"),
        ({"bias": "all"}, "base_layer.bias", lambda v: v.to(torch.int32), "holds int32"),
    ],
)
def test_damaged_vectors(
    models: Callable[[str], Path],
    tmp_path: Path,
    options: dict[str, Any],
    key: str,
    change: Callable[[Tensor], Tensor],
    reason: str,
) -> None:
    folder = make_adapter(tmp_path, models("qwen2"), **options)
    edit_tensors(folder, lambda t: t | {f"{Q}.{key}": change(t[f"{Q}.{key}"])})
    with pytest.raises(AdapterError, match=reason):
        read(folder, models("qwen2"))


def test_a_norm_of_zero(models: Callable[[str], Path], tmp_path: Path) -> None:
    """The factors take away all weights of one output."""
    model = models("llama")
    folder = make_adapter(tmp_path, model, use_dora=True, r=64, lora_alpha=64)
    weight = base_weights(model)["layers.1.q_proj"]
    factors = {f"{Q}.lora_A.weight": torch.eye(64), f"{Q}.lora_B.weight": -weight}
    edit_tensors(folder, lambda tensors: tensors | factors)
    with pytest.raises(AdapterError, match=r"q_proj: the weights of an output have norm zero"):
        read(folder, model)


def test_what_overflows_the_serving_dtype(models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = make_adapter(tmp_path, models("llama"), lora_bias=True, lora_alpha=8)
    edit_tensors(folder, lambda t: {k: v * (1e6 if "bias" in k else 1) for k, v in t.items()})
    with pytest.raises(AdapterError, match=r"a bias is too large for torch\.float16"):
        read(folder, models("llama"), dtype=torch.float16)


def test_identity_covers_magnitudes_and_biases(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    every: list[dict[str, Any]] = [{"use_dora": True}, {"bias": "all"}, {"lora_bias": True}]
    for options in every:
        folder = make_adapter(tmp_path / "".join(options), models("qwen2"), **options)
        digest = read(folder, models("qwen2")).digest
        (key, *_) = (k for k in tensors_of(folder) if k.endswith((".bias", "_vector")))
        edit_tensors(folder, lambda tensors, key=key: tensors | {key: tensors[key] * 1.5})  # type: ignore[misc]
        assert read(folder, models("qwen2")).digest != digest


def test_older_and_wrapped_spellings(models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = make_adapter(tmp_path, models("qwen2"), use_dora=True, bias="all")
    digest = read(folder, models("qwen2")).digest
    for old, new in (
        ("lora_magnitude_vector", "lora_magnitude_vector.default.weight"),
        ("lora_magnitude_vector.default.weight", "lora_magnitude_vector.weight"),
        (".base_layer.bias", ".bias"),
    ):
        edit_tensors(folder, renamed(lambda k, old=old, new=new: k.replace(old, new)))  # type: ignore[misc]
        assert read(folder, models("qwen2")).digest == digest
