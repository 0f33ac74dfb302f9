"""What `lorakeet adapters check` says."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorakeet.lora.adapter import AdapterError, AdapterNotFoundError
from lorakeet.lora.describe import describe
from lorakeet.lora.specs import group_specs
from lorakeet.models.config import load_config
from support.adapters import edit_config, make_adapter
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
    assert found.base_copies == ("lm_head",)
    text = "\n".join(found.lines())
    for line in (
        "base model   somebody/model",
        "rank         8",
        "q_proj       rank 8, alpha 16, scale 2, layers 0, 2",
        "q_proj       rank 4, alpha 16, scale 4, layers 1",
        "down_proj    rank 8, alpha -2, scale -0.25, layers 0-2",
        "lm_head      rank 8, alpha 16, scale 2, layers 0",
        "lm_head      a copy of the base model's weights: must equal them to load",
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


def test_added_tokens_are_seen_without_the_weights(tmp_path: Path, model: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", model, target_modules=["lm_head"])
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    (copy,) = (key for key in tensors if key.endswith("lm_head.base_layer.weight"))
    tensors[copy] = torch.cat([tensors[copy], tensors[copy][:4]])
    save_file(tensors, file)
    with pytest.raises(AdapterError, match="added tokens are not supported"):
        describe(folder, group_specs(load_config(model)), max_rank=8)
