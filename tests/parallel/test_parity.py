"""One, two and four ranks beside PEFT: every kind of adapter and model, all in mixed batches."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakeet.models.process_group import ProcessGroup, ProcessGroupError, join, listen
from support.adapter_kinds import adapters_of_every_kind
from support.adapters import ALL_LINEAR, make_adapter, peft_logprobs
from support.blends import logprobs, summed_model
from support.models import VOCAB_SIZE, tiny_model
from support.parallel_cases import Blend, ModelCase, make_prompts, run_cases
from support.ranks import run_ranks
from support.vocabularies import KINDS as VOCABULARIES
from support.vocabularies import make_vocabulary_adapter, vocabulary_logprobs

SIZES = (1, 2, 4)
TOLERANCE = 1e-3
ODD = {"vocab_size": 321}  # over two ranks one row of padding, over four three
LAYERS = 3

EVERYTHING = [*ALL_LINEAR, "embed_tokens", "lm_head"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", ODD),
    "tied": ("llama_tied", {"num_key_value_heads": 1, **ODD}),
    "bias": ("llama_bias", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", ODD),
    "qwen3": ("qwen3", {"num_key_value_heads": 1}),
    "vocabularies": ("llama", {}),
    "tied_vocabularies": ("llama_tied", {}),
}
OWN_VOCABULARY = [
    "both",
    "tokens_of_each",
    "tokens_and_lora_head",
    "resized_lora",
    "resized_dora_head",
    "shrunk",
]
ADAPTERS: dict[str, dict[str, dict[str, Any]]] = {
    "tied": {
        "all": {"r": 3},
        "k": {"r": 1, "target_modules": ["k_proj"]},
        "v": {"r": 2, "target_modules": ["v_proj"]},
        "ends": {"r": 5, "target_modules": ["embed_tokens", "lm_head"]},
        "dora": {"r": 4, "use_dora": True, "target_modules": EVERYTHING},
    },
    "bias": {
        "lora_only": {"r": 5, "bias": "lora_only"},
        "all": {"r": 2, "bias": "all", "target_modules": ["o_proj", "down_proj"]},
        "dora": {"r": 3, "use_dora": True, "use_rslora": True},
        "dora_bias": {"r": 3, "use_dora": True, "bias": "all"},
        "lora_bias": {"r": 4, "lora_bias": True},
    },
    "qwen2": {"all": {"r": 1, "bias": "all"}, "dora": {"r": 2, "use_dora": True}},
    "qwen3": {"all": {"r": 6}, "k": {"target_modules": ["k_proj"]}, "dora": {"use_dora": True}},
}
BLENDS: dict[str, dict[str, Blend]] = {
    "llama": {"blend": (("all_linear", 0.7), ("everything", -0.4), ("rslora", 1.2))},
    "bias": {"blend": (("lora_only", -0.8), ("lora_bias", 0.5))},
}


class Files:
    """Everything on disk, and what PEFT says of each prompt, by model."""

    def __init__(self, root: Path) -> None:
        self.expected: dict[str, dict[str, Tensor]] = {}
        self.cases = [self._make(root / name, name) for name in MODELS]

    def _make(self, root: Path, name: str) -> ModelCase:
        kind, config = MODELS[name]
        folder = tiny_model(root / "model", kind, **config)
        oracles: dict[str, Callable[[list[int]], Tensor]] = {}
        adapters: dict[str, Path] = {}

        def add(adapter: str, served: Path, oracle: Path) -> None:
            adapters[adapter] = served
            oracles[adapter] = lambda tokens: peft_logprobs(folder, oracle, tokens)

        if name == "llama":
            for case in adapters_of_every_kind(root, folder):
                add(case.name, case.folder, case.oracle)
        for seed, (adapter, options) in enumerate(ADAPTERS.get(name, {}).items()):
            path = make_adapter(root / adapter, folder, seed=seed, **options)
            add(adapter, path, path)
        if "vocabularies" in name:
            for adapter in [*OWN_VOCABULARY, "both_tied"] if "tied" in name else OWN_VOCABULARY:
                if "tied" in name and adapter in ("both", "tokens_of_each"):
                    continue  # PEFT unties them
                self._add_vocabulary(root / adapter, folder, adapter, adapters, oracles)
        for blend, parts in BLENDS.get(name, {}).items():
            summed = summed_model(folder, [(adapters[part], weight) for part, weight in parts])
            oracles[blend] = partial(logprobs, summed)
        for base in ("base", "base alone"):
            oracles[base] = lambda tokens: peft_logprobs(folder, None, tokens)
        prompts = make_prompts(list(oracles), 300)
        self.expected[name] = {each: oracle(prompts[each]) for each, oracle in oracles.items()}
        return ModelCase(name, folder, adapters, BLENDS.get(name, {}), prompts)

    @staticmethod
    def _add_vocabulary(
        path: Path,
        model: Path,
        name: str,
        adapters: dict[str, Path],
        oracles: dict[str, Callable[[list[int]], Tensor]],
    ) -> None:
        kind = VOCABULARIES[name]
        adapters[name] = make_vocabulary_adapter(path, model, kind, seed=len(adapters))
        oracles[name] = lambda tokens: vocabulary_logprobs(model, path, kind, tokens)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("parallel"))


Results = list[dict[str, Any]]  # by rank


@pytest.fixture(scope="module")
def results(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Results]:
    @cache
    def run(size: int) -> Results:
        folder = tmp_path_factory.mktemp(f"ranks{size}")
        if size == 1:
            run_cases(ProcessGroup(), files.cases, folder)
        else:
            run_ranks(size, run_cases, files.cases, folder)
        return [torch.load(folder / f"{rank}.pt") for rank in range(size)]

    return run


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_every_row_has_its_own_adapters_scores(
    files: Files, results: Callable[[int], Results], name: str, size: int
) -> None:
    ranks = [result[name] for result in results(size)]
    expected = files.expected[name]
    assert ranks[0]["logprobs"].keys() == expected.keys()
    for each, want in expected.items():
        found: Tensor = ranks[0]["logprobs"][each]
        assert found.shape == want.shape, each
        assert (found - want).abs().max() <= TOLERANCE, each
        for other in ranks[1:]:
            assert torch.equal(other["logprobs"][each], found), each


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
class TestOnGPUs:
    @staticmethod
    def run(files: Files, folder: Path, size: int, dtype: str) -> dict[str, dict[str, Tensor]]:
        """Rank 0's log-probabilities by model; all ranks have the same."""
        run_ranks(size, run_cases, files.cases, folder, "cuda", dtype, device="cuda")
        ranks = [torch.load(folder / f"{rank}.pt") for rank in range(size)]
        found = {name: ranks[0][name]["logprobs"] for name in MODELS}
        for name, by_adapter in found.items():
            for each, values in by_adapter.items():
                assert all(rank[name]["logprobs"][each].equal(values) for rank in ranks), each
        return found

    def test_in_float32_they_are_pefts(self, files: Files, tmp_path: Path) -> None:
        found = self.run(files, tmp_path, 2, "float32")
        for name, expected in files.expected.items():
            for each, want in expected.items():
                assert (found[name][each] - want).abs().max() <= TOLERANCE, (name, each)

    def test_in_bfloat16_two_are_as_close_as_one(self, files: Files, tmp_path: Path) -> None:
        errors = {}
        for size in (1, 2):
            folder = tmp_path / str(size)
            folder.mkdir()
            found = self.run(files, folder, size, "bfloat16")
            errors[size] = {
                name: torch.stack(
                    [(found[name][each] - want).abs().mean() for each, want in expected.items()]
                )
                for name, expected in files.expected.items()
            }
        for name in MODELS:
            assert errors[2][name].mean() < 1.1 * errors[1][name].mean(), name
            assert (errors[2][name] < 2 * errors[1][name] + 0.01).all(), name


@pytest.mark.parametrize("size", SIZES)
def test_padding_is_no_token(results: Callable[[int], Results], size: int) -> None:
    for result in results(size):
        for name, (_, config) in MODELS.items():
            assert result[name]["columns"]["base alone"] == config.get("vocab_size", VOCAB_SIZE)


@pytest.mark.parametrize("size", SIZES[1:])
def test_adapters_need_no_collective_of_their_own(
    results: Callable[[int], Results], size: int
) -> None:
    base = ["all_reduce"] * (1 + 2 * LAYERS) + ["all_gather"]
    for result in results(size):
        for name in MODELS:
            assert result[name]["calls"] == [base] * 4, name


@pytest.mark.parametrize("size", SIZES[1:])
def test_ranks_agree_on_what_an_adapter_is(results: Callable[[int], Results], size: int) -> None:
    """Whoever gives out rows and caches prompts does it for all ranks."""
    alone = results(1)[0]
    for result in results(size):
        for name in MODELS:
            for key in ("digests", "num_rows"):
                assert result[name][key] == alone[name][key]


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_rank_holds_its_share(results: Callable[[int], Results], size: int) -> None:
    """Of the weights a 1/N, but for norms, biases of sums and KV heads that several ranks hold."""
    alone = results(1)[0]["bias"]
    for result in results(size):
        assert result["bias"]["weight_bytes"] < 1.05 * alone["weight_bytes"] / size
        assert result["bias"]["row_bytes"] < alone["row_bytes"]


@pytest.mark.parametrize("size", SIZES)
def test_parts_and_ranks_are_summed_up_before_the_norm(
    results: Callable[[int], Results], size: int
) -> None:
    for result in results(size):
        normed, total = result["epilogue"]
        assert normed.dtype == total.dtype == torch.bfloat16
        assert normed.shape == total.shape == (5, 4)
        assert (total == 1 + sum(3.0 * (rank + 1) for rank in range(size))).all()
        assert (normed == 2).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collectives(results: Callable[[int], Results], size: int, dtype: torch.dtype) -> None:
    by_rank = [torch.arange(6.0).view(2, 3).to(dtype) + 10 * rank for rank in range(size)]
    want = {
        "sum": torch.stack(by_rank).sum(0),
        "sum of columns": torch.stack(by_rank).sum(0)[:, 1:],
        "gather 0": torch.cat(by_rank),
        "gather 1": torch.cat(by_rank, dim=1),
        "broadcast": by_rank[-1],
    }
    for result in results(size):
        for name, tensor in want.items():
            assert result["collectives"][f"{name} {dtype}"].equal(tensor), name


def test_who_waits_for_others_in_vain_is_told() -> None:
    with pytest.raises(ProcessGroupError, match=r"rank 0 of 2 .* within 1 seconds"):
        join(0, 2, listen(), torch.device("cpu"), timeout=1)


def test_one_rank_meets_nobody() -> None:
    with listen() as listener:
        assert join(0, 1, listener, torch.device("cpu"), timeout=1) == ProcessGroup()


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_ranks_are_below_the_size(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="no rank"):
        ProcessGroup(rank, size)


def test_every_adapter_changes_the_scores(files: Files) -> None:
    """Else parity would say nothing."""
    for case in files.cases:
        expected: Mapping[str, Tensor] = files.expected[case.name]
        base = {name: peft_logprobs(case.folder, None, case.prompts[name]) for name in expected}
        for name in case.adapters:
            columns = min(expected[name].shape[1], base[name].shape[1])
            difference = expected[name][:, :columns] - base[name][:, :columns]
            assert difference.abs().max() > 10 * TOLERANCE, (case.name, name)
