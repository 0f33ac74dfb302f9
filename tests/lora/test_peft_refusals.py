"""Adapters that must not be loaded: each is refused with an error that names what is wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakeet.lora.adapter import AdapterError
from support.adapters import edit_config, edit_tensors, make_adapter, tensors_of
from support.deltas import Tensors, read, renamed
from support.models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


# --- names ---


@pytest.mark.parametrize(
    "change",
    [
        lambda key: key.replace("base_model.model.model.layers", "decoder.layers"),
        lambda key: key.replace("self_attn", "attn"),
        lambda key: key.replace("lora_A", "lora_a"),
        lambda key: key.replace(".weight", ".other.weight"),
        lambda key: "base_model.model." + key,
        lambda key: key.replace("layers.1.", "layers.99."),
        lambda key: key.replace("layers.1.", "layers.01."),
        lambda key: key.replace("layers.2.mlp.down_proj.lora_A", "layers.2.mlp.down.lora_A"),
    ],
)
def test_tensors_that_cannot_be_bound_are_refused(
    tmp_path: Path, model: Path, change: Callable[[str], str]
) -> None:
    folder = edit_tensors(make_adapter(tmp_path, model), renamed(change))
    with pytest.raises(AdapterError, match=r"cannot be bound|no layer 99"):
        read(folder, model)


def test_layer_index_past_the_end(tmp_path: Path, model: Path) -> None:
    folder = make_adapter(tmp_path, model)
    edit_tensors(folder, renamed(lambda key: key.replace("layers.2.", "layers.3.")))
    with pytest.raises(AdapterError, match="there is no layer 3, the model has 3"):
        read(folder, model)


def test_the_same_module_under_two_names(tmp_path: Path, model: Path) -> None:
    def twice(tensors: Tensors) -> Tensors:
        key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        return tensors | {key.removeprefix("base_model.model."): tensors[key]}

    folder = edit_tensors(make_adapter(tmp_path, model), twice)
    with pytest.raises(AdapterError, match="twice"):
        read(folder, model)


def test_embedding_in_linear_orientation_is_refused(tmp_path: Path, model: Path) -> None:
    folder = make_adapter(tmp_path, model, target_modules=["embed_tokens"])
    edit_tensors(folder, renamed(lambda k: k.replace("embedding_A", "A.weight")))
    with pytest.raises(AdapterError, match="cannot be bound"):
        read(folder, model)


def test_a_fused_module_beside_one_of_its_parts(tmp_path: Path, model: Path) -> None:
    def both(tensors: Tensors) -> Tensors:
        q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        fused = q.replace("q_proj", "qkv_proj")
        return tensors | {fused: tensors[q], fused.replace("_A", "_B"): torch.ones(128, 8)}

    folder = edit_tensors(make_adapter(tmp_path, model), both)
    with pytest.raises(AdapterError, match="layer 0 has both qkv_proj and q_proj"):
        read(folder, model)


# --- ranks, shapes, values ---


def test_rank_over_the_limit_is_named(tmp_path: Path, model: Path) -> None:
    folder = make_adapter(tmp_path, model, r=17)
    with pytest.raises(AdapterError, match="largest rank is 17, the limit is 16"):
        read(folder, model, max_rank=16)


def test_rank_of_a_pattern_over_the_limit_is_named(tmp_path: Path, model: Path) -> None:
    folder = make_adapter(tmp_path, model, rank_pattern={"q_proj": 32})
    with pytest.raises(AdapterError, match="largest rank is 32, the limit is 16"):
        read(folder, model, max_rank=16)


def test_config_and_tensors_disagree_on_the_rank(tmp_path: Path, model: Path) -> None:
    folder = edit_config(make_adapter(tmp_path, model, r=12), r=8)
    with pytest.raises(AdapterError, match=r"has rank 12 \(shape .*\), by the config it is 8"):
        read(folder, model)


A_KEY = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
B_KEY = A_KEY.replace("lora_A", "lora_B")


@pytest.mark.parametrize(
    ("key", "change", "reason"),
    [
        (A_KEY, lambda a: a.T, "rank 64"),
        (B_KEY, lambda b: b[:-1], r"shape of B is \(63, 8\)"),
        (B_KEY, lambda b: torch.cat([b, b]), r"shape of B is \(128, 8\)"),
        (A_KEY, lambda a: a[:, :32], r"shape of A is \(8, 32\)"),
        (A_KEY, lambda a: a[:4], "rank 4"),
        (A_KEY, lambda a: a[:0], r"empty: its shape is \(0, 64\)"),
        (A_KEY, lambda a: a[:, :0], r"empty: its shape is \(8, 0\)"),
        (A_KEY, lambda a: a[None], "2 dimensions, not 3"),
        (A_KEY, lambda a: a[0, 0], "2 dimensions, not 0"),
        (A_KEY, lambda a: a.to(torch.int8), "holds int8"),
        (A_KEY, lambda a: a.to(torch.complex64), "holds complex64"),
        (B_KEY, lambda b: b.index_fill(1, torch.tensor([3]), torch.nan), "NaN or infinite"),
        (A_KEY, lambda a: a.index_fill(0, torch.tensor([7]), torch.inf), "NaN or infinite"),
        (B_KEY, lambda b: b.index_fill(1, torch.tensor([0]), -torch.inf), "NaN or infinite"),
    ],
)
def test_wrong_tensors_are_named(
    tmp_path: Path, model: Path, key: str, change: Callable[[Tensor], Tensor], reason: str
) -> None:
    folder = edit_tensors(make_adapter(tmp_path, model), lambda t: t | {key: change(t[key])})
    with pytest.raises(AdapterError, match=rf"layers\.1\.self_attn\.q_proj.*{reason}"):
        read(folder, model)


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_values_are_looked_at_whatever_the_dtypes(
    tmp_path: Path, model: Path, other: torch.dtype
) -> None:
    """A file of one dtype, or of two: one of its values is not finite."""
    folder = make_adapter(tmp_path, model)
    bad = {B_KEY: tensors_of(folder)[B_KEY].index_fill(0, torch.tensor([9]), torch.nan).to(other)}
    edit_tensors(folder, lambda tensors: tensors | bad)
    with pytest.raises(AdapterError, match=r"layers\.1\.self_attn\.q_proj.*lora_B.*NaN"):
        read(folder, model)
    edit_tensors(folder, lambda tensors: {key: value.to(other) for key, value in tensors.items()})
    with pytest.raises(AdapterError, match=r"layers\.1\.self_attn\.q_proj.*lora_B.*NaN"):
        read(folder, model)


@pytest.mark.parametrize("key", [A_KEY, B_KEY])
def test_half_a_module(tmp_path: Path, model: Path, key: str) -> None:
    folder = edit_tensors(
        make_adapter(tmp_path, model), lambda t: {k: v for k, v in t.items() if k != key}
    )
    with pytest.raises(AdapterError, match=r"is there without its (A|B)"):
        read(folder, model)


def test_an_adapter_of_a_smaller_model(tmp_path: Path, model: Path) -> None:
    small = tiny_model(tmp_path / "small", hidden_size=32)
    folder = make_adapter(tmp_path / "adapter", small)
    with pytest.raises(AdapterError, match="for this model it must be"):
        read(folder, model)


def test_a_scaled_value_too_large_for_the_dtype(tmp_path: Path, model: Path) -> None:
    folder = make_adapter(tmp_path, model, target_modules=["o_proj"], lora_alpha=1e7)
    read(folder, model)
    with pytest.raises(AdapterError, match=r"o_proj: B, scaled, is too large for torch\.float16"):
        read(folder, model, dtype=torch.float16)


@pytest.mark.parametrize("key", [A_KEY, B_KEY])
def test_the_module_of_a_value_too_large_is_named(tmp_path: Path, model: Path, key: str) -> None:
    folder = make_adapter(tmp_path, model)
    edit_tensors(folder, lambda tensors: tensors | {key: tensors[key] * 1e8})
    side = "A" if key == A_KEY else "B"
    with pytest.raises(AdapterError, match=rf"layers\.1\.self_attn\.q_proj: {side}, scaled, is"):
        read(folder, model, dtype=torch.float16)


# --- embedding and head ---


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_copies_of_base_weights_need_the_model(tmp_path: Path, model: Path, name: str) -> None:
    folder = make_adapter(tmp_path, model, target_modules=[name])
    assert any(key.endswith(f"{name}.base_layer.weight") for key in tensors_of(folder))
    with pytest.raises(AdapterError, match=f"{name}: .* no model to compare"):
        read(folder, model, base_weights=None)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
    ],
)
def test_config_and_tensors_must_both_say_it(
    tmp_path: Path, model: Path, config: dict[str, Any], reason: str
) -> None:
    folder = edit_config(make_adapter(tmp_path, model), **config)
    with pytest.raises(AdapterError, match=reason):
        read(folder, model)


@pytest.mark.parametrize(
    ("tokens", "targets", "message"),
    [
        ([5, 320], ["q_proj"], "alora_invocation_tokens: the model has no token 320"),
        ([10**12], ["q_proj"], f"alora_invocation_tokens: the model has no token {10**12}"),
        ([5], ["embed_tokens"], "cannot change the embedding"),
    ],
)
def test_invocations_that_can_never_come(
    tmp_path: Path, model: Path, tokens: list[int], targets: list[str], message: str
) -> None:
    folder = make_adapter(tmp_path, model, target_modules=targets)
    edit_config(folder, alora_invocation_tokens=tokens)
    with pytest.raises(AdapterError, match=message):
        read(folder, model)
