"""What tests are made of is the same whatever ran before: a failure can be seen again."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support import vocabularies
from support.adapters import ALL_LINEAR, make_adapter, tensors_of
from support.models import tiny_model
from support.vocabularies import make_vocabulary_adapter

OPTIONS: list[dict[str, Any]] = [
    {"use_dora": True, "target_modules": [*ALL_LINEAR, "embed_tokens", "lm_head"]},
    {"lora_bias": True, "bias": "all"},
    {"modules_to_save": ["lm_head"], "trainable_token_indices": [3, 7]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama_bias")


def assert_same_files(one: Path, other: Path) -> None:
    found, want = tensors_of(other), tensors_of(one)
    assert found.keys() == want.keys()
    assert [name for name in want if not torch.equal(found[name], want[name])] == []


@pytest.mark.parametrize("options", OPTIONS)
def test_equal_seeds_give_equal_adapters(
    tmp_path: Path, model: Path, options: dict[str, Any]
) -> None:
    one = make_adapter(tmp_path / "one", model, seed=3, **options)
    torch.manual_seed(12345)
    assert_same_files(one, make_adapter(tmp_path / "other", model, seed=3, **options))


@pytest.mark.parametrize("kind", vocabularies.KINDS)
def test_equal_seeds_give_equal_vocabularies(tmp_path: Path, model: Path, kind: str) -> None:
    made = vocabularies.KINDS[kind]
    one = make_vocabulary_adapter(tmp_path / "one", model, made, seed=3)
    torch.manual_seed(12345)
    assert_same_files(one, make_vocabulary_adapter(tmp_path / "other", model, made, seed=3))
