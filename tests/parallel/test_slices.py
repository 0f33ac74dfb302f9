"""What each rank holds, put together again by the design's table, is the whole: any shape."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import lorakeet.models.weights as weights_module
from lorakeet.lora.adapter import Adapter, AdapterError, GroupSpec
from lorakeet.lora.base_weights import BaseWeights
from lorakeet.lora.canonical import pack
from lorakeet.lora.host_memory import CPU
from lorakeet.lora.peft_config import Scaling
from lorakeet.lora.peft_tensors import LoRAModule, PeftTensors
from lorakeet.lora.pool import bytes_per_row
from lorakeet.lora.specs import group_specs
from lorakeet.lora.vectors import Vectors
from lorakeet.models.config import ModelConfig, UnsupportedModelError, load_config, parse_config
from lorakeet.models.kv_cache import allocate_kv_cache, kv_block_bytes
from lorakeet.models.llama import LlamaForCausalLM
from lorakeet.models.process_group import ProcessGroup
from support.deltas import WORKERS
from support.models import tiny_model

Whole = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """A model, and a number of ranks that it can be cut for."""

    config: ModelConfig
    size: int

    @property
    def groups(self) -> list[ProcessGroup]:
        return [ProcessGroup(rank, self.size) for rank in range(self.size)]

    def kv_parts(self, tensor: Tensor) -> list[Tensor]:
        """By rank, the heads of k or v (outputs first): each its own, or one that others share."""
        heads = tensor.view(self.config.num_key_value_heads, self.config.head_dim, -1)
        if len(heads) >= self.size:
            return [part.flatten(0, 1) for part in heads.chunk(self.size)]
        return [heads[rank * len(heads) // self.size] for rank in range(self.size)]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    size = draw(st.integers(1, 6))
    kv_heads = draw(st.sampled_from([n for n in range(1, 13) if n % size == 0 or size % n == 0]))
    multiple = size if kv_heads % size else 1
    heads = kv_heads * multiple * draw(st.integers(1, 2))
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": draw(st.integers(size, 40)),
        "hidden_size": draw(st.integers(3, 20)),
        "intermediate_size": size * draw(st.integers(1, 7)),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 3)),
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
    }
    return Shape(parse_config(values), size)


def random_adapter(config: ModelConfig, fused: bool, seed: int) -> tuple[PeftTensors, Vectors]:
    """All modules, with biases and magnitudes; ranks that are below most numbers of ranks too."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    modules, factors, biases = [], {}, {}
    for spec in group_specs(config):
        for layer in range(spec.num_layers):
            sizes = dict(zip(spec.slice_names, spec.slice_sizes, strict=True))
            for name, size in {spec.name: spec.output_size}.items() if fused else sizes.items():
                rank = int(torch.randint(1, 5, (1,), generator=generator))
                scaling = Scaling(rank, 1.0, 0.5)
                a, b = normal(rank, spec.input_size), normal(size, rank)
                modules.append(LoRAModule(name, name, layer, scaling, a, b))
                factors[layer, name], biases[layer, name] = normal(size), normal(size)
    return PeftTensors(tuple(modules)), Vectors(factors, biases)


def split(spec: GroupSpec, tensor: Tensor) -> dict[str, Tensor]:
    """The slices of (layers, …, outputs), each with its outputs first."""
    parts = torch.split(tensor, list(spec.slice_sizes), dim=-1)
    return {name: part.movedim(-1, 0) for name, part in zip(spec.slice_names, parts, strict=True)}


@settings(deadline=None, max_examples=60)
@given(shapes(), st.booleans(), st.integers(0, 99))
def test_adapters_by_the_table(shape: Shape, fused: bool, seed: int) -> None:
    found, vectors = random_adapter(shape.config, fused, seed)
    whole_specs = group_specs(shape.config)
    whole = pack(found, vectors, whole_specs, torch.float32, found.digest, WORKERS, CPU)
    by_rank: list[tuple[Adapter, tuple[GroupSpec, ...]]] = []
    for group in shape.groups:
        specs = group_specs(shape.config, group)
        assert tuple(spec.whole for spec in specs) == tuple(spec.whole for spec in whole_specs)
        by_rank.append(
            (pack(found, vectors, specs, torch.float32, found.digest, WORKERS, CPU), specs)
        )
    assert {adapter.num_rows for adapter, _ in by_rank} == {whole.num_rows}
    for index, spec in enumerate(whole_specs):
        want = whole.groups[spec.name]
        assert want.bias is not None
        assert want.magnitude is not None
        parts = [(adapter.groups[spec.name], specs[index]) for adapter, specs in by_rank]
        for part, own in parts:
            assert part.ranks == want.ranks
            assert part.a.shape == (*want.a.shape[:3], own.input_size)
            assert part.b.shape == (*want.b.shape[:2], own.output_size)
        is_row = spec.name in ("o_proj", "down_proj")
        if is_row:
            assert torch.cat([part.a for part, _ in parts], dim=-1).equal(want.a)
            biases = [part.bias for part, _ in parts if part.bias is not None]
            assert len(biases) == shape.size
            assert torch.stack(biases).sum(0).equal(want.bias)
        for part, _ in parts:
            if not is_row:
                assert part.a.equal(want.a)
            if is_row or spec.name == "embed_tokens":
                assert part.b.equal(want.b)
                assert part.magnitude.equal(want.magnitude)  # type: ignore[union-attr]
        if spec.name == "embed_tokens":
            assert all(part.bias.equal(want.bias) for part, _ in parts)  # type: ignore[union-attr]
        elif not is_row:
            for field in ("b", "bias", "magnitude"):
                assert_outputs_are_cut(
                    shape,
                    split(spec, getattr(want, field)),
                    [split(own, getattr(part, field)) for part, own in parts],
                )


def assert_outputs_are_cut(shape: Shape, whole: Whole, parts: list[Whole]) -> None:
    for name, want in whole.items():
        own = [part[name] for part in parts]
        if name in ("k_proj", "v_proj"):
            for found, expected in zip(own, shape.kv_parts(want.flatten(1)), strict=True):
                assert found.flatten(1).equal(expected)
        else:
            together = torch.cat(own)
            assert together[: len(want)].equal(want)
            assert not together[len(want) :].any()
            assert len(together) - len(want) < shape.size
            assert name == "lm_head" or len(together) == len(want)


# --- the model ---


def fill(config: ModelConfig, folder: Path) -> Whole:
    """A checkpoint of random numbers, and its tensors."""
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(piece.shape, generator=generator)
        for name, piece in weights_module._destinations(model)
    }
    save_file(tensors, folder / "model.safetensors")
    return tensors


def loaded(shape: Shape, folder: Path) -> list[Whole]:
    """By rank, what it holds of each tensor, padding included."""
    parts = []
    for group in shape.groups:
        device, dtype = torch.device("cpu"), torch.float32
        model = weights_module.empty_model(shape.config, device, dtype, group)
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        weights_module.load_weights(model, folder)
        assert not any(parameter.isnan().any() for parameter in model.parameters())
        parts.append({n: piece.view for n, piece in weights_module._destinations(model)})
    return parts


@settings(deadline=None, max_examples=25)
@given(shapes())
def test_weights_by_the_table(tmp_path_factory: pytest.TempPathFactory, shape: Shape) -> None:
    folder = tmp_path_factory.mktemp("model")
    whole = fill(shape.config, folder)
    parts = loaded(shape, folder)
    for name, want in whole.items():
        own = [part[name] for part in parts]
        module, kind = name.split(".")[-2:]
        if module in ("o_proj", "down_proj"):
            if kind == "weight":
                assert torch.cat(own, dim=1).equal(want)
            else:
                assert own[0].equal(want)
                assert not any(len(part) for part in own[1:])
        elif module in ("k_proj", "v_proj"):
            for found, expected in zip(own, shape.kv_parts(want), strict=True):
                assert found.view_as(expected).equal(expected)
        elif "norm" in module:
            assert all(part.equal(want) for part in own)
        else:
            together = torch.cat(own)
            assert together[: len(want)].equal(want)
            assert not together[len(want) :].any()


@settings(deadline=None, max_examples=40)
@given(shapes())
def test_memory_of_a_rank(shape: Shape) -> None:
    """1/N of the sharded matrices: A of o and down, B of q, k, v, gate, up and of the head."""
    config, size, layers = shape.config, shape.size, shape.config.num_hidden_layers
    kv = max(config.kv_size // size, config.head_dim)
    vocab = -(-config.vocab_size // size)
    hidden = config.hidden_size
    whole = config.vocab_size + hidden + layers * (3 + 1 + 2 + 1) * hidden + hidden
    cut = layers * (2 * config.q_size + 3 * config.intermediate_size) // size
    for group in shape.groups:
        found = bytes_per_row(group_specs(config, group), torch.float32)
        assert found == 4 * (whole + cut + 2 * layers * kv + vocab)
        cache = allocate_kv_cache(config, 5, 4, torch.float32, "cpu", group)
        held = sum(part.keys.nbytes + part.values.nbytes for part in cache.layers)
        assert held == 5 * kv_block_bytes(config, 4, torch.float32, group)
        assert held == 5 * 4 * 2 * layers * kv * 4


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, 4, r"num_attention_heads \(6\)"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, r"num_key_value_heads \(4\)"),
        ({"intermediate_size": 97}, 2, r"intermediate_size \(97\)"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    tmp_path: Path, change: dict[str, Any], size: int, message: str
) -> None:
    folder = tiny_model(tmp_path, hidden_size=96, head_dim=16, **change)
    weights_module.load_model(folder, "cpu")
    refused: list[Callable[[ProcessGroup], object]] = [
        lambda group: weights_module.load_model(folder, "cpu", group=group),
        lambda group: group_specs(load_config(folder), group),
    ]
    for build in refused:
        for rank in range(size):
            with pytest.raises(UnsupportedModelError, match=message):
                build(ProcessGroup(rank, size))


class TestTiedHead:
    @pytest.mark.parametrize("size", [2, 4])
    def test_saved_twice(self, tmp_path: Path, size: int) -> None:
        folder = tiny_model(tmp_path, "llama_tied", vocab_size=5)
        self._add_head(folder, lambda embedding: embedding.clone())
        for rank in range(size):
            model = weights_module.load_model(folder, "cpu", group=ProcessGroup(rank, size))
            assert model.lm_head.weight is model.model.embed_tokens.weight

    @pytest.mark.parametrize("rank", range(4))
    def test_of_its_own_is_refused_where_it_differs(self, tmp_path: Path, rank: int) -> None:
        folder = tiny_model(tmp_path, "llama_tied", vocab_size=322)
        self._add_head(folder, lambda embedding: embedding + 1)
        with pytest.raises(weights_module.WeightsError, match=r"lm_head\.weight differs"):
            weights_module.load_model(folder, "cpu", group=ProcessGroup(rank, 4))

    @staticmethod
    def _add_head(folder: Path, change: Callable[[Tensor], Tensor]) -> None:
        file = folder / "model.safetensors"
        tensors: Whole = load_file(file)
        save_file(tensors | {"lm_head.weight": change(tensors["model.embed_tokens.weight"])}, file)


class TestBaseWeights:
    """What adapters are compared with is whole on every rank."""

    @pytest.mark.parametrize("kind", ["llama_bias", "llama_tied"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_are_those_of_the_whole_model(self, tmp_path: Path, kind: str, dtype: Any) -> None:
        folder = tiny_model(tmp_path, kind, vocab_size=323)
        whole = BaseWeights(weights_module.load_model(folder, "cpu", dtype))
        model = weights_module.load_model(folder, "cpu", dtype, group=ProcessGroup(3, 4))
        cut = BaseWeights(model)
        assert list(cut) == list(whole)
        for name, want in whole.items():
            assert cut[name].equal(want), name
            assert cut[name].dtype == want.dtype
        for weights in (whole, cut):
            ends = {weights[name].data_ptr() for name in ("embed_tokens", "lm_head")}
            assert len(ends) == (1 if kind == "llama_tied" else 2)

    def test_dummy_weights_are_no_base_of_an_adapter(self, tmp_path: Path) -> None:
        folder = tiny_model(tmp_path / "model")
        (folder / "model.safetensors").unlink()
        group = ProcessGroup(1, 2)
        model = weights_module.load_model(folder, "cpu", load_format="dummy", group=group)
        with pytest.raises(AdapterError, match="the model's are dummy"):
            BaseWeights(model)["layers.0.o_proj"]
