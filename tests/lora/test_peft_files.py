"""Adapter folders made by PEFT → canonical weights, compared with PEFT's own delta weights."""

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakeet.lora.peft_config import parse_config
from lorakeet.lora.peft_tensors import parse_tensors, plain_names
from support.adapter_kinds import fuse, fuse_all, share_a
from support.adapters import (
    ALL_LINEAR,
    edit_config,
    edit_tensors,
    make_adapter,
    tensors_of,
)
from support.deltas import Tensors, assert_equals_peft, deltas, peft_deltas, read, renamed
from support.models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tied", "llama_tied")


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "deep", num_hidden_layers=12)


TARGETS = [
    ALL_LINEAR,
    ("q_proj", "v_proj"),
    ("k_proj",),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
    ("embed_tokens",),
    ("lm_head",),
    (*ALL_LINEAR, "embed_tokens", "lm_head"),
]


@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_deltas_are_pefts(tmp_path: Path, model: Path, targets: tuple[str, ...]) -> None:
    assert_equals_peft(make_adapter(tmp_path, model, target_modules=targets), model)


@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_rslora_holds_for_every_target(
    tmp_path: Path, model: Path, targets: tuple[str, ...]
) -> None:
    folder = make_adapter(
        tmp_path, model, target_modules=targets, r=16, lora_alpha=32, use_rslora=True
    )
    with_root = deltas(assert_equals_peft(folder, model), model)
    edit_config(folder, use_rslora=False)
    without = deltas(read(folder, model), model)
    for path, delta in with_root.items():
        torch.testing.assert_close(delta, 4 * without[path], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rank", [1, 2, 3, 5, 7, 12, 16])
def test_any_rank_up_to_the_limit(tmp_path: Path, model: Path, rank: int) -> None:
    adapter = assert_equals_peft(make_adapter(tmp_path, model, r=rank), model, max_rank=16)
    assert adapter.rank == rank


@pytest.mark.parametrize("alpha", [0, -16, 12.5])
def test_alpha_may_be_zero_or_negative(tmp_path: Path, model: Path, alpha: float) -> None:
    folder = edit_config(make_adapter(tmp_path, model, target_modules=["o_proj"]), lora_alpha=alpha)
    ours, theirs = deltas(read(folder, model), model), peft_deltas(folder, model)
    for path, delta in theirs.items():
        torch.testing.assert_close(ours[path], delta, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_patterns_are_looked_up_as_peft_does(
    tmp_path: Path, deep_model: Path, use_rslora: bool
) -> None:
    folder = make_adapter(
        tmp_path,
        deep_model,
        rank_pattern={"layers.1.self_attn.q_proj": 32, "down_proj": 4},
        alpha_pattern={r".*layers\.2\..*": 128},
        use_rslora=use_rslora,
    )
    adapter = assert_equals_peft(folder, deep_model)
    assert adapter.rank == 32
    assert adapter.groups["qkv_proj"].ranks == (8, 32, *[8] * 10)
    assert adapter.groups["down_proj"].ranks == (4,) * 12


def test_ranks_differ_within_a_fused_group(tmp_path: Path, model: Path) -> None:
    folder = make_adapter(tmp_path, model, rank_pattern={"q_proj": 3, "v_proj": 12, "up_proj": 1})
    adapter = assert_equals_peft(folder, model)
    assert adapter.groups["qkv_proj"].ranks == (12, 12, 12)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["model.layers.0.self_attn.q_proj", "model.layers.2.mlp.up_proj"]},
        {"target_modules": r".*self_attn\.(q|v)_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": ["mlp.gate_proj"]},
        {"target_modules": ["q_proj", "not_in_the_model"]},
        {"layers_to_transform": [2], "layers_pattern": "layers"},
        {"target_modules": r".*(layers\.0\..*(q|down)_proj|layers\.1\..*up_proj)"},
    ],
    ids=str,
)
def test_the_tensors_decide_what_is_adapted(
    tmp_path: Path, model: Path, config: dict[str, Any]
) -> None:
    folder = make_adapter(tmp_path, model, **config)
    adapter = assert_equals_peft(folder, model)
    edit_config(folder, target_modules="no such module", layers_to_transform=None)
    assert deltas(read(folder, model), model).keys() == deltas(adapter, model).keys()


def test_layers_that_are_left_alone_have_rank_zero(tmp_path: Path, model: Path) -> None:
    folder = make_adapter(
        tmp_path, model, target_modules=["q_proj"], layers_to_transform=[1], layers_pattern="layers"
    )
    adapter = read(folder, model)
    assert adapter.groups.keys() == {"qkv_proj"}
    assert adapter.groups["qkv_proj"].ranks == (0, 8, 0)


def test_layers_may_be_of_different_dtypes_scales_and_gaps(
    tmp_path: Path, deep_model: Path
) -> None:
    """What is laid out in one piece ends where the next layer is of another kind."""
    folder = make_adapter(tmp_path, deep_model, target_modules=["q_proj", "v_proj", "down_proj"])
    edit_config(folder, alpha_pattern={"layers.4.self_attn.q_proj": 3, "layers.9.mlp.down_proj": 5})

    def change(tensors: Tensors) -> Tensors:
        kept = {key: t for key, t in tensors.items() if "layers.6.self_attn.q_proj" not in key}
        return {key: t.bfloat16() if "layers.2." in key else t for key, t in kept.items()}

    edit_tensors(folder, change)
    ours, theirs = deltas(read(folder, deep_model), deep_model), peft_deltas(folder, deep_model)
    assert not ours["model.layers.6.self_attn.q_proj"].any()
    for path in theirs.keys() - {"model.layers.6.self_attn.q_proj"}:  # PEFT makes one up
        torch.testing.assert_close(ours[path], theirs[path], atol=1e-5, rtol=1e-5)


# --- names ---


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.model.", "base_model.model.model.language_model."),
        ("base_model.model.model.", "base_model.model.language_model.model."),
        ("base_model.model.model.", "base_model.model.language_model."),
        ("base_model.model.model.", "base_model.model."),
        ("base_model.model.model.", "model."),
        ("base_model.model.model.", ""),
        (".weight", ".default.weight"),
    ],
)
def test_names_that_mean_the_same(tmp_path: Path, model: Path, old: str, new: str) -> None:
    folder = make_adapter(tmp_path, model)
    expected = read(folder, model)
    edit_tensors(folder, renamed(lambda key: key.replace(old, new)))
    adapter = read(folder, model)
    assert adapter.digest == expected.digest
    torch.testing.assert_close(deltas(adapter, model), deltas(expected, model), atol=0, rtol=0)


def test_embedding_with_adapter_name(tmp_path: Path, model: Path) -> None:
    folder = make_adapter(tmp_path, model, target_modules=["embed_tokens"])
    expected = read(folder, model)
    edit_tensors(folder, renamed(lambda k: k + ".default" if "lora_embedding" in k else k))
    assert read(folder, model).digest == expected.digest


# --- fused modules ---


def test_fused_modules_are_cut_at_the_borders(tmp_path: Path, model: Path) -> None:
    folder = edit_tensors(make_adapter(tmp_path, model), share_a)
    expected = deltas(assert_equals_peft(folder, model), model)
    edit_tensors(folder, fuse_all)
    adapter = read(folder, model)
    torch.testing.assert_close(deltas(adapter, model), expected, atol=0, rtol=0)
    assert adapter.modules == ("down_proj", "gate_up_proj", "o_proj", "qkv_proj")


def test_the_halves_of_a_fused_module_are_not_alike(tmp_path: Path, model: Path) -> None:
    folder = edit_tensors(make_adapter(tmp_path, model), share_a)
    expected = deltas(read(folder, model), model)
    edit_tensors(folder, lambda t: fuse(t, "gate_up_proj", ("gate_proj", "up_proj"), swap=True))
    found = deltas(read(folder, model), model)
    gate, up = "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"
    assert torch.equal(found[gate], expected[up])
    assert not torch.allclose(found[gate], expected[gate], atol=1e-2)


# --- embedding, head and other files ---


def test_a_tied_head_is_adapted_alone(tmp_path: Path, tied_model: Path) -> None:
    for target in ("embed_tokens", "lm_head"):
        folder = make_adapter(tmp_path / target, tied_model, target_modules=[target])
        assert assert_equals_peft(folder, tied_model).modules == (target,)


def test_tied_factors_are_both_in_the_file(tmp_path: Path, tied_model: Path) -> None:
    folder = make_adapter(
        tmp_path, tied_model, target_modules=["embed_tokens"], ensure_weight_tying=True
    )
    adapter = assert_equals_peft(folder, tied_model)
    assert adapter.modules == ("embed_tokens", "lm_head")


def test_a_list_of_added_tokens_beside_the_adapter_is_not_looked_at(
    tmp_path: Path, model: Path
) -> None:
    folder = make_adapter(tmp_path, model)
    (folder / "added_tokens.json").write_text('{"<|eos|>": 1}')
    assert_equals_peft(folder, model)


def test_bias_without_bias_tensors_is_a_plain_lora(tmp_path: Path, model: Path) -> None:
    assert_equals_peft(make_adapter(tmp_path, model, bias="all"), model)


# --- identity, memory, precision ---


def test_digest_is_of_config_and_tensors(tmp_path: Path, model: Path) -> None:
    folder = make_adapter(tmp_path / "a", model)
    digest = read(folder, model).digest
    assert read(make_adapter(tmp_path / "b", model), model).digest == digest
    others = [
        make_adapter(tmp_path / "c", model, seed=1),
        make_adapter(tmp_path / "d", model, lora_alpha=32),
        make_adapter(tmp_path / "e", model, use_rslora=True),
        make_adapter(tmp_path / "f", model, alpha_pattern={"layers.2.mlp.up_proj": 17}),
        make_adapter(tmp_path / "g", model, target_modules=["q_proj"]),
        edit_tensors(
            make_adapter(tmp_path / "h", model), lambda t: {k: v.bfloat16() for k, v in t.items()}
        ),
        edit_tensors(
            make_adapter(tmp_path / "i", model),
            renamed(lambda k: k.translate(str.maketrans("01", "10"))),
        ),
    ]
    digests = {read(other, model).digest for other in others}
    assert len(digests) == len(others)
    assert digest not in digests


def test_digest_does_not_depend_on_the_serving_dtype(tmp_path: Path, model: Path) -> None:
    folder = make_adapter(tmp_path, model)
    assert read(folder, model, dtype=torch.bfloat16).digest == read(folder, model).digest


def test_digest_of_the_same_tensors_stays_what_it_is() -> None:
    """It is kept in state files. This one was written down at version 0.1."""
    config = parse_config(b'{"peft_type": "LORA", "r": 2, "lora_alpha": 3, "use_dora": true}')
    tensors: dict[str, Tensor] = {}
    for layer in (0, 1):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj."
        tensors[name + "lora_A.weight"] = torch.arange(8.0).view(2, 4) + layer
        tensors[name + "lora_B.weight"] = torch.arange(10.0).view(5, 2).bfloat16()
        tensors[name + "lora_magnitude_vector"] = torch.arange(5.0)
    digest = parse_tensors(config, plain_names(tensors)).digest()
    assert digest == "6edb5cde4fd48013ffc3ab9c1b656f9e311bc8d850f86568c55e262b9334607e"


@pytest.mark.parametrize("num_bytes", [1, 5000])
def test_digest_does_not_depend_on_what_is_hashed_at_a_time(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    folder = make_adapter(tmp_path, model)
    digest = read(folder, model).digest
    monkeypatch.setattr("lorakeet.lora.peft_tensors._BLOCK_BYTES", num_bytes)
    assert read(folder, model).digest == digest


def test_all_weights_lie_in_one_block(tmp_path: Path, model: Path) -> None:
    adapter = read(make_adapter(tmp_path, model), model)
    tensors = [t for group in adapter.groups.values() for t in (group.a, group.b)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert tensors[0].untyped_storage().nbytes() == adapter.num_bytes
    assert all(tensor.is_contiguous() and tensor.data_ptr() % 64 == 0 for tensor in tensors)
    regions = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(regions))


@pytest.mark.parametrize("served", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "stored",
    [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn],
)
@pytest.mark.parametrize("alpha", [5, 5e5])  # the second scale is no float16
def test_scale_is_applied_before_the_one_rounding(
    tmp_path: Path, model: Path, stored: torch.dtype, served: torch.dtype, alpha: float
) -> None:
    folder = make_adapter(tmp_path, model, lora_alpha=alpha, r=3)
    small = 5 / alpha
    edit_tensors(folder, lambda t: {key: (tensor * small).to(stored) for key, tensor in t.items()})
    b = tensors_of(folder)["base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"]
    found = read(folder, model, dtype=served).groups["o_proj"].b[1]
    assert torch.equal(found, (b.float() * (alpha / 3)).T.to(served))


def test_another_base_model_is_a_warning(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_adapter(tmp_path, model)
    with caplog.at_level(logging.WARNING):
        edit_config(folder, base_model_name_or_path="somebody/tiny")
        read(folder, model, base_model=str(model))
        assert not caplog.records
        edit_config(folder, base_model_name_or_path="somebody/private-model")
        read(folder, model, base_model=str(model))
    assert "somebody/private-model" in caplog.text


def test_stages_are_timed(tmp_path: Path, model: Path) -> None:
    seconds: dict[str, float] = {}
    read(make_adapter(tmp_path, model), model, on_stage=seconds.__setitem__)
    assert seconds.keys() == {"read", "check"}
    assert all(value > 0 for value in seconds.values())
