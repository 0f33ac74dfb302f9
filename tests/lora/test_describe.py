"""What `lorakeet adapters check` says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lorakeet.lora.adapter import AdapterError, AdapterNotFoundError
from lorakeet.lora.describe import describe
from lorakeet.lora.specs import group_specs
from lorakeet.models.config import load_config
from support.adapters import edit_config, edit_tensors, make_adapter, tensors_of
from support.deltas import read
from support.models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_what_an_adapter_holds(tmp_path: Path, model: Path) -> None:
    folder = make_adapter(
        tmp_path,
        model,
        target_modules=["q_proj", "down_proj", "lm_head"],
        rank_pattern={"layers.1.self_attn.q_proj": 4},
        alpha_pattern={"down_proj": -2},
    )
    edit_config(folder, base_model_name_or_path="somebody/model")
    found = describe(folder, group_specs(load_config(model)), max_rank=8)
    assert found.digest == read(folder, model).digest
    assert found.rank == 8
    assert found.num_parameters * 4 == found.num_bytes
    assert found.own_rows == {"lm_head": 320}
    text = "\n".join(found.lines())
    for line in (
        "base model   somebody/model",
        "rank         8",
        "q_proj       rank 8, alpha 16, scale 2, layers 0, 2",
        "q_proj       rank 4, alpha 16, scale 4, layers 1",
        "down_proj    rank 8, alpha -2, scale -0.25, layers 0-2",
        "lm_head      rank 8, alpha 16, scale 2, layers 0",
        "lm_head      320 rows in place of the model's (none where they are equal)",
    ):
        assert line in text.splitlines()
    assert "float32; " in text


def test_checked_against_a_model_and_a_limit(tmp_path: Path, model: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", model)
    specs = group_specs(load_config(model))
    describe(folder, specs, max_rank=8)
    small = tiny_model(tmp_path / "small", hidden_size=32)
    with pytest.raises(AdapterError, match="for this model it must be"):
        describe(folder, group_specs(load_config(small)), max_rank=8)
    with pytest.raises(AdapterError, match="largest rank is 8, the limit is 7"):
        describe(folder, specs, max_rank=7)
    with pytest.raises(AdapterNotFoundError):
        describe(tmp_path / "nope", specs, max_rank=8)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"use_dora": True}, "q_proj       rank 8, alpha 16, scale 2, DoRA, layers 0-2"),
        ({"lora_bias": True}, "q_proj       rank 8, alpha 16, scale 2, bias of B, layers 0-2"),
        ({"bias": "all"}, "biases       in place of the model's: k_proj, q_proj, v_proj"),
    ],
)
def test_dora_and_biases(tmp_path: Path, options: dict[str, Any], line: str) -> None:
    """Without the model's weights."""
    model = tiny_model(tmp_path / "model", "qwen2")
    folder = make_adapter(tmp_path / "adapter", model, target_modules=["q_proj"], **options)
    found = describe(folder, group_specs(load_config(model)), max_rank=8)
    assert line in found.lines()
    assert found.num_bytes == sum(tensor.nbytes for tensor in tensors_of(folder).values())


def test_copies_of_the_models_weights(tmp_path: Path, model: Path) -> None:
    folder = make_adapter(tmp_path, model)
    key = "base_model.model.model.layers.1.mlp.up_proj.base_layer.weight"
    edit_tensors(folder, lambda tensors: tensors | {key: torch.ones(96, 64)})
    found = describe(folder, group_specs(load_config(model)), max_rank=8)
    assert "copies       must equal the model's weights: up_proj" in found.lines()
