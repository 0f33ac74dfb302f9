"""Rows of embedding and head in PEFT's files: what is kept, what is dropped, what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lorakeet.lora.adapter import Adapter, AdapterError
from lorakeet.lora.base_weights import BaseWeights
from lorakeet.lora.peft_files import read_adapter
from lorakeet.lora.specs import group_specs
from lorakeet.models.weights import load_model
from support.adapters import edit_config, edit_tensors, make_adapter, tensors_of
from support.deltas import WORKERS
from support.models import VOCAB_SIZE, tiny_model
from support.vocabularies import ADDED, GROWN, KINDS, SHRUNK, make_vocabulary_adapter

EMBED, HEAD = "base_model.model.model.embed_tokens.", "base_model.model.lm_head."
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tied", "llama_tied")


def read(folder: Path, model: Path, dtype: torch.dtype = torch.float32) -> Adapter:
    loaded = load_model(model, "cpu", "bfloat16" if dtype == torch.bfloat16 else "float32")
    return read_adapter(
        folder,
        group_specs(loaded.config),
        max_rank=16,
        dtype=dtype,
        workers=WORKERS,
        base_weights=BaseWeights(loaded),
    )


def sizes(adapter: Adapter) -> tuple[int, int, int] | None:
    """Vocabulary, and how many rows of embedding and head are the adapter's own."""
    own = adapter.vocabulary
    if own is None:
        return None
    embed, head = (0 if part is None else len(part.ids) for part in (own.embed_tokens, own.lm_head))
    return own.size, embed, head


EXPECTED = {
    "head": (VOCAB_SIZE, 0, VOCAB_SIZE),
    "embedding": (VOCAB_SIZE, VOCAB_SIZE, 0),
    "tokens": (VOCAB_SIZE, 3, 0),
    "tokens_of_each": (VOCAB_SIZE, 2, 2),
    "resized": (GROWN, 4, 4),
    "resized_embedding": (GROWN, GROWN, 4),
    "resized_lora": (GROWN, 4, 4),
    "resized_tokens": (GROWN, 5, 4),
    "shrunk": (SHRUNK, SHRUNK, SHRUNK),
    "shrunk_lora": (SHRUNK, 0, 0),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_only_rows_that_differ_are_kept(tmp_path: Path, model: Path, kind: str) -> None:
    adapter = read(make_vocabulary_adapter(tmp_path, model, KINDS[kind]), model)
    assert sizes(adapter) == EXPECTED[kind]
    assert adapter.vocabulary is not None
    plain = sum(w.a.nbytes + w.b.nbytes for w in adapter.groups.values())
    assert adapter.num_bytes >= plain + adapter.vocabulary.num_bytes
    for name, part in (
        ("embed_tokens", adapter.vocabulary.embed_tokens),
        ("lm_head", adapter.vocabulary.lm_head),
    ):
        assert part is None or name in adapter.modules
        assert part is None or (part.ids.diff() > 0).all()


def test_trained_rows_of_a_tied_embedding_are_the_heads_too(tmp_path: Path, tied: Path) -> None:
    adapter = read(make_vocabulary_adapter(tmp_path / "tokens", tied, KINDS["tokens"]), tied)
    assert sizes(adapter) == (VOCAB_SIZE, 3, 3)
    own = adapter.vocabulary
    assert own is not None
    assert own.embed_tokens is not None
    assert own.lm_head is not None
    assert own.embed_tokens.rows.equal(own.lm_head.rows)
    alone = read(make_vocabulary_adapter(tmp_path / "embedding", tied, KINDS["embedding"]), tied)
    assert sizes(alone) == (VOCAB_SIZE, VOCAB_SIZE, 0), "modules_to_save is of one module"


def test_a_copy_that_equals_the_base_costs_nothing(tmp_path: Path, model: Path) -> None:
    base = load_model(model, "cpu")
    plain = read(make_adapter(tmp_path, model), model)
    edit_tensors(tmp_path, lambda t: t | {f"{HEAD}weight": base.lm_head.weight})
    edit_config(tmp_path, modules_to_save=["lm_head"])
    same = read(tmp_path, model)
    assert same.vocabulary is None
    assert (same.num_bytes, same.digest, same.modules) == (
        plain.num_bytes,
        plain.digest,
        plain.modules,
    )
    # float32 noise below what the served dtype can tell is none
    edit_tensors(tmp_path, lambda t: t | {f"{HEAD}weight": base.lm_head.weight.bfloat16().float()})
    assert read(tmp_path, model, torch.bfloat16).vocabulary is None
    assert read(tmp_path, model).vocabulary is not None


def test_the_identity_covers_rows_and_size(tmp_path: Path, model: Path) -> None:
    folder = make_vocabulary_adapter(tmp_path, model, KINDS["tokens"])
    digests = {read(folder, model).digest}
    edit_tensors(folder, lambda t: {k: v + ("delta" in k) * 1e-3 for k, v in t.items()})
    digests.add(read(folder, model).digest)
    edit_config(folder, trainable_token_indices=[3, 8, 250])
    digests.add(read(folder, model).digest)
    lora = {k: v for k, v in tensors_of(folder).items() if "lora_" in k}
    edit_tensors(edit_config(folder, trainable_token_indices=None), lambda _: lora)
    digests.add(read(folder, model).digest)
    assert len(digests) == 4


def test_a_file_without_any_lora(tmp_path: Path, model: Path) -> None:
    folder = make_vocabulary_adapter(tmp_path, model, KINDS["tokens"])
    edit_tensors(folder, lambda t: {k: v for k, v in t.items() if "lora_" not in k})
    adapter = read(folder, model)
    assert (adapter.rank, sizes(adapter)) == (0, (VOCAB_SIZE, 3, 0))
    with pytest.raises(AdapterError, match="no LoRA tensor"):
        read(edit_config(edit_tensors(folder, lambda _: {}), trainable_token_indices=None), model)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("weight", "modules_to_save.weight"),
        ("weight", "modules_to_save.default.weight"),
        ("weight", "base_layer.weight"),
    ],
)
def test_spellings(tmp_path: Path, model: Path, wrong: str, right: str) -> None:
    folder = make_vocabulary_adapter(tmp_path, model, KINDS["both"])
    before = read(folder, model)

    def rename(tensors: Tensors) -> Tensors:
        return {
            k.replace(wrong, right) if k.startswith((EMBED, HEAD)) else k: v
            for k, v in tensors.items()
        }

    assert read(edit_tensors(folder, rename), model).digest == before.digest


def with_tensors(**tensors: Tensor) -> Callable[[Tensors], Tensors]:
    named = {
        k.replace("E_", EMBED).replace("H_", HEAD).replace("__", "."): v for k, v in tensors.items()
    }
    return lambda old: old | named


@pytest.mark.parametrize(
    ("kind", "config", "change", "reason"),
    [
        ("head", {"modules_to_save": ["embed_tokens", "lm_head"]}, {}, "embed_tokens: the file"),
        ("head", {}, {"H_weight": torch.ones(VOCAB_SIZE, 32)}, "hidden size 32, the model has 64"),
        ("head", {}, {"H_weight": torch.full((VOCAB_SIZE, 64), torch.nan)}, "NaN"),
        ("head", {}, {"H_weight": torch.ones(VOCAB_SIZE, 64, dtype=torch.int32)}, "int32"),
        ("head", {}, {"H_weight": torch.ones(VOCAB_SIZE)}, "2 dimensions"),
        ("head", {}, {"H_weight": torch.ones(GROWN, 64)}, "embeddings of all added ones"),
        ("both", {}, {"H_weight": torch.ones(GROWN, 64)}, "different vocabularies"),
        ("both", {}, {"H_modules_to_save__weight": torch.ones(VOCAB_SIZE, 64)}, "which differ"),
        (
            "tokens",
            {},
            {"E_original_module__weight": torch.ones(VOCAB_SIZE, 64)},
            "without the new",
        ),
        ("tokens", {"trainable_token_indices": [3, 7]}, {}, "has 3 rows"),
        ("tokens", {"trainable_token_indices": None}, {}, "has 0 trainable_token_indices"),
        ("tokens", {"trainable_token_indices": [3, 7, 2**30]}, {}, "past the adapter's vocabulary"),
        ("tokens", {"trainable_token_indices": [3, 7, 330]}, {}, "embeddings of all added ones"),
        ("tokens", {}, {"E_token_adapter__foo": torch.ones(1, 1)}, "cannot be bound"),
        ("resized_lora", {}, {"H_lora_B__weight": torch.ones(VOCAB_SIZE, 4)}, "320 tokens"),
        ("head", {}, {"base_model.model.model.norm.weight": torch.ones(64)}, "cannot be bound"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path,
    model: Path,
    kind: str,
    config: dict[str, object],
    change: dict[str, Tensor],
    reason: str,
) -> None:
    folder = make_vocabulary_adapter(tmp_path, model, KINDS[kind])
    read(folder, model)
    edit_config(folder, **config)
    edit_tensors(folder, with_tensors(**change))
    with pytest.raises(AdapterError, match=reason):
        read(folder, model)


def test_trained_tokens_past_the_models_without_a_table(tmp_path: Path, model: Path) -> None:
    """`save_embedding_layers=False`: the embedding has them, the untied head can't name them."""
    folder = make_vocabulary_adapter(tmp_path, model, KINDS["resized_tokens"])

    def only_rows(tensors: Tensors) -> Tensors:
        return {k: v for k, v in tensors.items() if "lora_" in k or "delta" in k}

    adapter = read(edit_tensors(folder, only_rows), model)
    assert sizes(adapter) == (GROWN, 5, 0)
    own = adapter.vocabulary
    assert own is not None
    assert own.embed_tokens is not None
    assert own.embed_tokens.ids.tolist() == [3, *ADDED]


def test_tied_tokens_beside_a_head_of_its_own_are_refused(tmp_path: Path, tied: Path) -> None:
    """PEFT itself saves such an adapter, and cannot run it."""
    folder = make_vocabulary_adapter(tmp_path, tied, KINDS["tokens"])
    edit_tensors(folder, with_tensors(H_weight=torch.ones(VOCAB_SIZE, 64)))
    edit_config(folder, modules_to_save=["lm_head"])
    with pytest.raises(AdapterError, match="ties the two"):
        read(folder, tied)


def test_rows_too_large_for_the_dtype(tmp_path: Path, model: Path) -> None:
    folder = make_vocabulary_adapter(tmp_path, model, KINDS["tokens"])
    edit_tensors(folder, lambda t: {k: v * 1e6 if "delta" in k else v for k, v in t.items()})
    read(folder, model)
    with pytest.raises(AdapterError, match=r"too large for torch\.float16"):
        read(folder, model, torch.float16)
