"""Logits against transformers in float32: every kind of model, every way to cut a prompt."""

from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lorakeet.models import llama
from lorakeet.models.llama import LlamaForCausalLM
from lorakeet.models.ops import TritonOps
from lorakeet.models.weights import load_model
from support.models import KINDS, VOCAB_SIZE, tiny_model
from support.passes import Passes

TOLERANCE = 1e-3
LENGTHS = {"a": 33, "b": 1, "c": 16, "d": 50}


def prompt(seed: str, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB_SIZE) for _ in range(length)]


PROMPTS = {name: prompt(name, length) for name, length in LENGTHS.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def reference_logits(folder: Path, tokens: list[int]) -> Tensor:
    """What transformers says to a whole prompt, in float32: (tokens, vocab)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@cache
def made(folders: Path, kind: str) -> tuple[Path, LlamaForCausalLM, dict[str, Tensor]]:
    folder = tiny_model(folders / kind, kind)
    expected = {name: reference_logits(folder, tokens) for name, tokens in PROMPTS.items()}
    return folder, load_model(folder, "cpu"), expected


def check(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, logits in actual.items():
        torch.testing.assert_close(logits, expected[name], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
class TestParity:
    def test_whole_prompts_in_one_pass(self, folders: Path, kind: str) -> None:
        _, model, expected = made(folders, kind)
        passes = Passes(model)
        passes.run(PROMPTS)
        check(passes.logits, expected)

    @pytest.mark.parametrize("size", [1, 7, 16])
    def test_chunks_of_one_size(self, folders: Path, kind: str, size: int) -> None:
        """Size 1 is decoding: all sequences in the padded product, of unequal lengths."""
        _, model, expected = made(folders, kind)
        passes = Passes(model)
        for start in range(0, max(LENGTHS.values()), size):
            rest = {name: tokens[start : start + size] for name, tokens in PROMPTS.items()}
            passes.run({name: tokens for name, tokens in rest.items() if tokens})
        check(passes.logits, expected)

    @pytest.mark.parametrize("seed", range(3))
    def test_random_mix(self, folders: Path, kind: str, seed: int) -> None:
        """Decodes, chunks and whole prompts side by side; not all sequences in every pass."""
        _, model, expected = made(folders, kind)
        random = Random(seed)
        passes = Passes(model, block_size=random.choice([1, 4, 5, 16]), seed=seed)
        left = {name: list(tokens) for name, tokens in PROMPTS.items()}
        while left:
            names = random.sample(sorted(left), random.randint(1, len(left)))
            chunks = {}
            for name in names:
                size = random.choice([1, 1, 1, 2, 3, 8, 13, 40])
                chunks[name], left[name] = left[name][:size], left[name][size:]
                if not left[name]:
                    del left[name]
            passes.run(chunks)
        check(passes.logits, expected)


@pytest.mark.parametrize("kind", ["mistral", "qwen3", "odd_head_dim"])
def test_with_the_kernels(folders: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that CUDA takes, in Triton's interpreter."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter needs a machine without CUDA")
    monkeypatch.setattr(llama, "plan_ops", TritonOps)
    _, model, expected = made(folders, kind)
    passes = Passes(model)
    names = {name: PROMPTS[name] for name in "abc"}
    passes.run({"a": names["a"][:20], "c": names["c"][:3]})
    passes.run({"a": names["a"][20:21], "b": names["b"], "c": names["c"][3:15]})
    passes.run({"a": names["a"][21:], "c": names["c"][15:]})
    check(passes.logits, {name: expected[name] for name in names})


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_cuda(folders: Path, kind: str) -> None:
    folder, _, expected = made(folders, kind)
    model = load_model(folder, "cuda", "float32")
    passes = Passes(model)
    for start in range(0, max(LENGTHS.values()), 11):
        rest = {name: tokens[start : start + 11] for name, tokens in PROMPTS.items()}
        passes.run({name: tokens for name, tokens in rest.items() if tokens})
    check({name: logits.cpu() for name, logits in passes.logits.items()}, expected)
    half = Passes(load_model(folder, "cuda"))
    half.run(PROMPTS)
    assert half.logits["d"].dtype == torch.bfloat16
    assert (half.logits["d"].float().cpu() - expected["d"]).abs().mean() < 0.1


def test_the_kinds_differ(folders: Path) -> None:
    """Otherwise parity with one would say nothing about the others: same weights, other results."""
    kinds = ["llama", "mistral", "rope_linear", "rope_llama3", "rope_yarn"]
    results = [made(folders, kind)[2]["d"][-1] for kind in kinds]
    for index, one in enumerate(results):
        for other in results[index + 1 :]:
            assert (one - other).abs().max() > 100 * TOLERANCE


class TestDynamicRope:
    """Trained for 64 positions; the other tests stay within, where nothing depends on chunks."""

    def test_long_prompt_in_one_pass(self, folders: Path) -> None:
        folder, model, _ = made(folders, "rope_dynamic")
        tokens = prompt("long", 150)
        passes = Passes(model)
        passes.run({"short": PROMPTS["a"], "long": tokens})
        check(
            passes.logits,
            {
                "short": reference_logits(folder, PROMPTS["a"]),
                "long": reference_logits(folder, tokens),
            },
        )

    def test_decoding_across_the_trained_length(self, folders: Path) -> None:
        folder, model, _ = made(folders, "rope_dynamic")
        tokens, passes = prompt("grows", 80), Passes(model)
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            state = reference(torch.tensor([tokens[:60]]), use_cache=True)
            expected = [state.logits[0]]
            for token in tokens[60:]:
                past = state.past_key_values
                state = reference(torch.tensor([[token]]), past_key_values=past, use_cache=True)
                expected.append(state.logits[0])
        passes.run({"grows": tokens[:60]})
        for token in tokens[60:]:
            passes.run({"grows": [token]})
        check(passes.logits, {"grows": torch.cat(expected)})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_is_as_close_to_float32_as_in_transformers(folders: Path, dtype: str) -> None:
    folder, _, expected = made(folders, "llama")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.no_grad():
        their_logits = theirs(torch.tensor([PROMPTS["d"]])).logits[0].float()
    passes = Passes(load_model(folder, "cpu", dtype))  # type: ignore[arg-type]
    passes.run({"d": PROMPTS["d"][:40]})
    passes.run({"d": PROMPTS["d"][40:-2]})
    for token in PROMPTS["d"][-2:]:
        passes.run({"d": [token]})
    error = (passes.logits["d"].float() - expected["d"]).abs()
    assert error.mean() < 1.2 * (their_logits - expected["d"]).abs().mean()
