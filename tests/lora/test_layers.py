"""The wrappers around the model's layers, and a whole wrapped model beside PEFT."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lorakeet.kernels.delta import Delta
from lorakeet.lora.adapter import Slot
from lorakeet.lora.backend import LoRABackend
from lorakeet.lora.batch import (
    HEAD,
    LoRABatch,
    LoRAForwardBatch,
    body_groups,
    build_lora_batch,
)
from lorakeet.lora.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    ParallelLMHeadWithLoRA,
    QKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
    wrap_model,
)
from lorakeet.lora.pool import AdapterPool, LayerWeights
from lorakeet.lora.specs import group_specs
from lorakeet.lora.torch_backend import TorchBackend
from lorakeet.models import llama
from lorakeet.models.batch import ForwardBatch
from lorakeet.models.llama import LlamaForCausalLM
from lorakeet.models.ops import TritonOps
from lorakeet.models.parallel import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from lorakeet.models.weights import load_model
from support.adapters import make_adapter, peft_logprobs
from support.deltas import read
from support.models import VOCAB_SIZE, tiny_model
from support.passes import Passes, plain_batch
from support.pools import (
    SPECS,
    expected_delta,
    filled_pool,
    input_of,
    listed_batch,
    random_adapter,
    same_rank,
)

SPEC = {spec.name: spec for spec in SPECS}
ADAPTERS = {1: random_adapter(same_rank(3), 1), 2: random_adapter(same_rank(5), 2)}
LAYERS: dict[str, tuple[Callable[[], nn.Module], type[BaseLayerWithLoRA]]] = {
    "embed_tokens": (lambda: VocabParallelEmbedding(50, 20), VocabParallelEmbeddingWithLoRA),
    "qkv_proj": (lambda: QKVParallelLinear(20, 24, 8, bias=True), QKVParallelLinearWithLoRA),
    "o_proj": (lambda: RowParallelLinear(24, 20, "o_proj"), RowParallelLinearWithLoRA),
    "gate_up_proj": (
        lambda: MergedColumnParallelLinear(20, 36),
        MergedColumnParallelLinearWithLoRA,
    ),
    "down_proj": (
        lambda: ColumnParallelLinear(36, 20, "down_proj"),
        ColumnParallelLinearWithLoRA,
    ),
    "lm_head": (lambda: ParallelLMHead(50, 20), ParallelLMHeadWithLoRA),
}


class NoBackend:
    """Fails when it is asked for anything."""

    def add_linear(self, y: Tensor, x: Tensor, weights: LayerWeights, batch: LoRABatch) -> None:
        raise AssertionError("LoRA work in a pass without adapters")

    add_embedding = add_linear

    def linear(
        self, layer: ParallelLinear, x: Tensor, weights: LayerWeights, batch: LoRABatch
    ) -> Tensor:
        raise AssertionError("LoRA work in a pass without adapters")

    def linear_and_delta(
        self, layer: ParallelLinear, x: Tensor, weights: LayerWeights, batch: LoRABatch
    ) -> tuple[Tensor, Delta | None]:
        raise AssertionError("LoRA work in a pass without adapters")


def base_layer(group: str) -> nn.Module:
    layer = LAYERS[group][0]()
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=generator).requires_grad_(False)
    return layer


def only_output(y: Tensor, delta: Delta | None) -> Tensor:
    """An epilogue that does nothing."""
    assert delta is None
    return y


def with_lora(
    batch: ForwardBatch, pool: AdapterPool, slots: list[int], logits_slots: list[int] | None = None
) -> LoRAForwardBatch:
    """`logits_slots` left out: the logits of all rows are wanted."""
    values = {field.name: getattr(batch, field.name) for field in fields(ForwardBatch)}
    rows, logits_rows = (np.array(each, dtype=np.int32) for each in (slots, logits_slots or slots))
    return LoRAForwardBatch(
        **values,
        lora=build_lora_batch(rows, pool, body_groups(pool)),
        logits_lora=build_lora_batch(logits_rows, pool, [HEAD]),
    )


@pytest.mark.parametrize("group", LAYERS)
def test_without_adapters_it_is_the_base_layer(group: str) -> None:
    layer, x = base_layer(group), input_of(SPEC[group], 4)
    pool = filled_pool(ADAPTERS)
    wrapped = LAYERS[group][1](layer, pool.layer(group, 0), NoBackend())
    assert wrapped.base_layer is layer
    assert wrapped.weight is layer.weight
    want = layer(x, plain_batch(4))
    for batch in (plain_batch(4), with_lora(plain_batch(4), pool, [0] * 4)):
        assert torch.equal(wrapped(x, batch), want)
        if isinstance(wrapped, MergedColumnParallelLinearWithLoRA):
            assert torch.equal(wrapped.project(x, batch, only_output), want)


@pytest.mark.parametrize("group", LAYERS)
def test_each_row_gets_its_own_adapters_delta(group: str) -> None:
    spec, layer, slots = SPEC[group], base_layer(group), [1, 0, 2, 1, 0]
    pool = filled_pool(ADAPTERS)
    wrapped = LAYERS[group][1](layer, pool.layer(group, 0), TorchBackend())
    x, batch = input_of(spec, 5), with_lora(plain_batch(5), pool, slots)
    found = wrapped(x, batch)
    if isinstance(wrapped, MergedColumnParallelLinearWithLoRA):
        assert torch.equal(wrapped.project(x, batch, only_output), found)
    base = layer(x, plain_batch(5))
    assert torch.equal(found[[1, 4]], base[[1, 4]])
    delta = expected_delta(spec, 0, x, ADAPTERS, np.array(slots, dtype=np.int32))
    torch.testing.assert_close(found.double(), base + delta, atol=2e-5, rtol=1e-5)


def test_the_head_goes_by_the_rows_whose_logits_are_wanted() -> None:
    spec, layer = SPEC["lm_head"], base_layer("lm_head")
    pool = filled_pool(ADAPTERS)
    wrapped = ParallelLMHeadWithLoRA(layer, pool.layer("lm_head", 0), TorchBackend())
    x, logits_slots = input_of(spec, 2), [2, 0]
    found = wrapped(x, with_lora(plain_batch(5), pool, [1, 1, 2, 2, 0], logits_slots))
    delta = expected_delta(spec, 0, x, ADAPTERS, np.array(logits_slots, dtype=np.int32))
    want = layer(x, plain_batch(5)) + delta
    torch.testing.assert_close(found.double(), want, atol=2e-5, rtol=1e-5)


# --- whole models ---

KINDS = ["llama", "llama_tied", "llama_bias", "qwen3"]
ADAPTER_KINDS: dict[str, dict[str, Any]] = {
    "all": {"r": 8},
    "few": {"r": 3, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "mlp_of_one_layer": {"r": 5, "target_modules": ["down_proj"], "layers_to_transform": [1]},
    "mixed_ranks": {"r": 4, "rank_pattern": {"layers.0.self_attn.k_proj": 13, "up_proj": 1}},
    "ends": {"r": 7, "target_modules": ["embed_tokens", "lm_head", "o_proj"]},
    "dora": {"r": 4, "use_dora": True, "use_rslora": True, "bias": "all"},
    "dora_ends": {
        "r": 3,
        "use_dora": True,
        "target_modules": ["embed_tokens", "lm_head", "v_proj"],
    },
    "lora_bias": {"r": 5, "lora_bias": True, "target_modules": ["q_proj", "up_proj", "lm_head"]},
    "bias": {"r": 2, "bias": "all", "target_modules": ["o_proj"]},
}
Prompts = Mapping[str, list[int]]


class Wrapped:
    """A tiny model with all adapters in its pool; sequences are named after their adapters.

    What is in the folder already is taken as it is.
    """

    def __init__(self, folder: Path, kind: str, backend: LoRABackend | None = None) -> None:
        self.folder = folder / "model"
        if not self.folder.exists():
            tiny_model(self.folder, kind)
        self.model = load_model(self.folder, "cpu")
        specs = group_specs(self.model.config)
        self.pool = AdapterPool(specs, 12, 80, 24, torch.float32, "cpu")
        self.adapters: dict[str, Path | None] = {"base": None}
        self.slots = {"base": 0}
        rows = list(range(80))
        Random(3).shuffle(rows)
        for slot, (name, options) in enumerate(ADAPTER_KINDS.items(), start=1):
            path = folder / name
            if not path.exists():
                make_adapter(path, self.folder, seed=slot, **options)
            adapter = read(path, self.folder)
            self.pool.write(Slot(slot), [rows.pop() for _ in range(adapter.num_rows)], adapter)
            self.adapters[name], self.slots[name] = path, slot
        wrap_model(self.model, self.pool, backend or TorchBackend())

    def batch_for(self, chunks: Prompts) -> Callable[[ForwardBatch], ForwardBatch]:
        ordered = sorted(chunks.items(), key=lambda item: len(item[1]) != 1)  # as Passes does
        slots = [self.slots[name] for name, tokens in ordered for _ in tokens]
        return lambda batch: with_lora(batch, self.pool, slots)

    def assert_equals_peft(self, logits: Mapping[str, Tensor], prompts: Prompts) -> None:
        for name, tokens in prompts.items():
            want = peft_logprobs(self.folder, self.adapters[name], tokens)
            found = torch.log_softmax(logits[name], dim=-1)
            torch.testing.assert_close(found, want, atol=1e-3, rtol=0)


@pytest.fixture(scope="module", params=KINDS)
def wrapped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Wrapped:
    return Wrapped(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    random = Random(7)
    return {
        name: [random.randrange(VOCAB_SIZE) for _ in range(length)]
        for name, length in zip(
            ["base", *ADAPTER_KINDS], [9, 17, 1, 30, 16, 21, 40, 7, 1, 13], strict=True
        )
    }


class TestWholeModel:
    def test_adapters_differ(self, wrapped: Wrapped, prompts: Prompts) -> None:
        """Or else parity would say little."""
        tokens = prompts["all"]
        base = peft_logprobs(wrapped.folder, None, tokens)
        for path in wrapped.adapters.values():
            if path is not None:
                assert (peft_logprobs(wrapped.folder, path, tokens) - base).abs().max() > 0.05

    def test_one_mixed_pass_equals_peft(self, wrapped: Wrapped, prompts: Prompts) -> None:
        passes = Passes(wrapped.model)
        passes.run(prompts, wrapped.batch_for(prompts))
        wrapped.assert_equals_peft(passes.logits, prompts)

    @pytest.mark.parametrize("size", [1, 7])
    def test_any_chunking_equals_peft(self, wrapped: Wrapped, prompts: Prompts, size: int) -> None:
        passes = Passes(wrapped.model)
        for start in range(0, 40, size):
            parts = {name: tokens[start : start + size] for name, tokens in prompts.items()}
            chunks = {name: part for name, part in parts.items() if part}
            passes.run(chunks, wrapped.batch_for(chunks))
        wrapped.assert_equals_peft(passes.logits, prompts)

    def test_pruned_logits(self, wrapped: Wrapped, prompts: Prompts) -> None:
        """Only the last row of each sequence is scored, as in serving."""
        passes = Passes(wrapped.model)
        names = sorted(prompts, key=lambda name: len(prompts[name]) != 1)
        batch = wrapped.batch_for(prompts)(passes.batch({name: prompts[name] for name in names}))
        assert isinstance(batch, LoRAForwardBatch)
        last = np.array([wrapped.slots[name] for name in names], dtype=np.int32)
        batch = replace(batch, logits_lora=build_lora_batch(last, wrapped.pool, [HEAD]))
        with torch.inference_mode():
            hidden = wrapped.model(batch)[batch.query_starts[1:].long() - 1]
            logits = wrapped.model.compute_logits(hidden, batch)
        for name, row in zip(names, logits, strict=True):
            want = peft_logprobs(wrapped.folder, wrapped.adapters[name], prompts[name])[-1]
            torch.testing.assert_close(torch.log_softmax(row, -1), want, atol=1e-3, rtol=0)

    def test_base_rows_are_the_base_models(self, wrapped: Wrapped, prompts: Prompts) -> None:
        """Wrapped and unwrapped, the same bits: the same pass, with and without adapters in it."""
        mixed, plain = Passes(wrapped.model), Passes(load_model(wrapped.folder, "cpu"))
        mixed.run(prompts, wrapped.batch_for(prompts))
        plain.run(prompts)
        assert torch.equal(mixed.logits["base"], plain.logits["base"])


BLEND = {"mixed_ranks": 0.6, "lora_bias": -1.5}


def with_blend(wrapped: Wrapped) -> Wrapped:
    """Some of its adapters together are another one."""
    slot = wrapped.slots["blend"] = len(ADAPTER_KINDS) + 1
    parts = []
    for name, weight in BLEND.items():
        path = wrapped.adapters[name]
        assert path is not None
        adapter = read(path, wrapped.folder)
        parts.append((Slot(wrapped.slots[name]), adapter.rank + adapter.has_bias, weight))
    wrapped.pool.write_blend(Slot(slot), parts)
    return wrapped


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Wrapped:
    return with_blend(Wrapped(tmp_path_factory.mktemp("both"), "qwen3"))


@pytest.fixture(scope="module")
def as_on_cuda(on_the_cpu: Wrapped) -> Wrapped:
    """The same model and adapters with Triton's kernels, in its interpreter."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter needs a machine without CUDA")
    from lorakeet.lora.triton_backend import TritonBackend

    wrapped = Wrapped(on_the_cpu.folder.parent, "qwen3", TritonBackend("cpu", 2**12))
    for layer in wrapped.model.modules():  # the packed weights of the CPU are for oneDNN alone
        if isinstance(layer, ParallelLinear) and layer.weight.is_mkldnn:
            layer.weight = nn.Parameter(layer.weight.to_dense(), requires_grad=False)
    return with_blend(wrapped)


@pytest.mark.parametrize("length", [2, 12])
def test_the_way_that_cuda_takes_equals_the_torch_backends(
    on_the_cpu: Wrapped, as_on_cuda: Wrapped, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of few tokens, or of more than one kernel takes for a linear layer, and after it a
    decode of every sequence."""
    from lorakeet.kernels import lora_linear

    random, names = Random(5), list(as_on_cuda.slots)
    tokens = {name: [random.randrange(VOCAB_SIZE) for _ in range(length)] for name in names}
    assert (len(names) * length > lora_linear.MAX_TOKENS) == (length == 12)
    chunks_of_passes = [tokens, {name: [5 + row] for row, name in enumerate(names)}]
    torch_passes, triton_passes = Passes(on_the_cpu.model), Passes(as_on_cuda.model)
    for chunks in chunks_of_passes:
        torch_passes.run(chunks, on_the_cpu.batch_for(chunks))

    def with_lists(chunks: Prompts) -> Callable[[ForwardBatch], ForwardBatch]:
        slots = [as_on_cuda.slots[name] for name, part in chunks.items() for _ in part]
        rows, pool = np.array(slots, dtype=np.int32), as_on_cuda.pool
        return lambda batch: replace(
            with_lora(batch, pool, slots),
            lora=listed_batch(rows, pool),
            logits_lora=listed_batch(rows, pool),
        )

    monkeypatch.setattr(llama, "plan_ops", TritonOps)
    for chunks in chunks_of_passes:
        triton_passes.run(chunks, with_lists(chunks))
    for name in names:
        want, found = torch_passes.logits[name], triton_passes.logits[name]
        torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    return load_model(tiny_model(tmp_path_factory.mktemp("bare")), "cpu")


def test_wrap_model_wraps_the_pools_groups_and_no_other(model: LlamaForCausalLM) -> None:
    specs = [spec for spec in group_specs(model.config) if spec.name in ("o_proj", "lm_head")]
    wrap_model(model, AdapterPool(specs, 2, 4, 4, torch.float32, "cpu"), TorchBackend())
    found = {
        name for name, module in model.named_modules() if isinstance(module, BaseLayerWithLoRA)
    }
    assert found == {"lm_head"} | {f"model.layers.{i}.self_attn.o_proj" for i in range(3)}


def test_wrap_model_refuses_a_group_without_layers(model: LlamaForCausalLM) -> None:
    pool = AdapterPool([replace(SPECS[0], name="router")], 2, 4, 4, torch.float32, "cpu")
    with pytest.raises(ValueError, match="router"):
        wrap_model(model, pool, TorchBackend())
