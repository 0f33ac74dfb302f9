"""Adapters with embedding and head rows of their own, beside all others: as in PEFT."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from lorakeet.lora.adapter import AdapterId
from lorakeet.lora.slots import PoolError
from lorakeet.models.sampler import SamplingRow, build, sample, score
from support.adapters import make_adapter, peft_logprobs
from support.engines import Collected, StepEngine
from support.models import VOCAB_SIZE, tiny_model
from support.parity import check, check_scores
from support.vocabularies import (
    ADDED,
    GROWN,
    KINDS,
    SHRUNK,
    VocabularyKind,
    make_vocabulary_adapter,
    vocabulary_logprobs,
)

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("vocabulary") / "model")


def prompt_for(size: int, seed: int) -> list[int]:
    """Ends with the last ids of the vocabulary, and some that kinds train."""
    generator = Random(seed)
    return [
        *(generator.randrange(size) for _ in range(14)),
        *range(size - 4, size),
        *(3, 7, 250, 9),
    ]


def check_vocabulary(
    model: Path, adapter: Path, kind: VocabularyKind, prompt: list[int], result: Collected
) -> None:
    """Assert PEFT's greedy tokens with PEFT's scores, those of the prompt too if there are any."""
    oracle = vocabulary_logprobs(model, adapter, kind, prompt + result.token_ids)
    assert oracle.shape[1] == kind.size
    check_scores(oracle, prompt, result)


@pytest.mark.parametrize("model_kind", ["llama", "llama_tied", "qwen2"])
def test_every_kind_at_once_is_as_with_peft(model_kind: str, tmp_path: Path) -> None:
    """Cold and from the prefix cache, in chunks, with the base and a plain LoRA between them."""
    model = tiny_model(tmp_path / "model", model_kind)
    engine = StepEngine(model, max_num_seqs=64, max_num_batched_tokens=24, max_loras=4)
    folders = {
        name: make_vocabulary_adapter(tmp_path / name, model, kind, seed=seed, loud=loud)
        for seed, (name, kind) in enumerate(KINDS.items())
        for loud in [ADDED[:2] if kind.size == GROWN else ()]
    }
    plain = make_adapter(tmp_path / "plain", model, seed=99)
    plain_id, plain_prompt = engine.load(plain), prompt_for(VOCAB_SIZE, 99)
    ids = {name: engine.load(folder) for name, folder in folders.items()}
    prompts = {name: prompt_for(kind.size, seed) for seed, (name, kind) in enumerate(KINDS.items())}
    for turn in ("cold", "warm"):
        scored = {"prompt_logprobs": 2} if turn == "cold" else {}
        fields: dict[str, Any] = {"max_tokens": NUM_TOKENS, "logprobs": 2, **scored}
        for number, (name, adapter_id) in enumerate(ids.items()):
            engine.add(f"{name} {turn}", prompts[name], adapter_id, **fields)
            if number % 4 == 0:
                engine.add(f"base {number} {turn}", plain_prompt, 0, **fields)
                engine.add(f"plain {number} {turn}", plain_prompt, plain_id, **fields)
        engine.run()
    for name, kind in KINDS.items():
        for turn in ("cold", "warm"):
            result = engine.results[f"{name} {turn}"]
            check_vocabulary(model, folders[name], kind, prompts[name], result)
            assert max(result.token_ids) < kind.size
        assert engine.results[f"{name} warm"].cached_tokens
    for name, result in engine.results.items():
        if name.startswith(("base", "plain")):
            check(model, plain if name.startswith("plain") else None, plain_prompt, result)
            assert max(result.token_ids) < VOCAB_SIZE
    if model_kind != "llama_tied":  # the loud rows would be the embedding's too
        loud = [engine.results[f"{name} cold"].token_ids for name in KINDS if "resized" in name]
        assert any(set(tokens) & set(ADDED) for tokens in loud), "no added token was generated"


def most_vocabulary_bytes(engine: StepEngine) -> int:
    """Run all that there is to do; the most memory that vocabularies took after a step."""
    most = 0
    while engine.scheduler.has_work:
        engine.step()
        most = max(most, engine.runner.pool.vocabularies.num_bytes)
    return most


def test_vocabularies_share_bounded_memory(model: Path, tmp_path: Path) -> None:
    """Room for one and a half: they take turns, and all of it is free in the end."""
    kind = KINDS["both"]
    one = 2 * VOCAB_SIZE * (64 * 4 + 8)
    engine = StepEngine(model, max_loras=4, lora_vocabulary_memory=one * 3 // 2)
    folders = [
        make_vocabulary_adapter(tmp_path / str(seed), model, kind, seed=seed) for seed in range(3)
    ]
    ids = [engine.load(folder) for folder in folders]
    prompt = prompt_for(VOCAB_SIZE, 0)
    for number, adapter_id in enumerate(ids):
        engine.add(str(number), prompt, adapter_id, logprobs=0)
    assert most_vocabulary_bytes(engine) == one
    for number, folder in enumerate(folders):
        check_vocabulary(model, folder, kind, prompt, engine.results[str(number)])
    for adapter_id in ids:
        engine.scheduler.remove_adapter(AdapterId(adapter_id))
        engine.scheduler.take_unloaded()
    most_vocabulary_bytes(engine)
    assert engine.runner.pool.vocabularies.num_bytes == 0
    engine.scheduler.check()


def test_a_vocabulary_that_can_never_fit_is_refused(model: Path, tmp_path: Path) -> None:
    engine = StepEngine(model, lora_vocabulary_memory=1000)
    folder = make_vocabulary_adapter(tmp_path / "large", model, KINDS["head"])
    with pytest.raises(PoolError) as refused:
        engine.load(folder)
    assert (refused.value.limit, refused.value.room) == ("vocabulary_bytes", 1000)
    small = make_vocabulary_adapter(tmp_path / "small", model, KINDS["tokens"])
    engine.load(small)


@pytest.mark.parametrize("name", ["head", "resized", "shrunk"])
def test_a_slot_keeps_nothing_of_its_last_vocabulary(
    model: Path, tmp_path: Path, name: str
) -> None:
    """Two slots in all; a plain adapter gets that of one with added tokens."""
    engine = StepEngine(model, max_loras=1, max_lora_rank=8)
    with_rows = engine.load(make_vocabulary_adapter(tmp_path / "own", model, KINDS[name]))
    folder = make_adapter(tmp_path / "plain", model)
    plain, prompt = engine.load(folder), prompt_for(SHRUNK, 1)
    for turn in range(2):
        engine.add(f"own {turn}", prompt, with_rows)
        engine.run()
        engine.add(f"plain {turn}", prompt, plain, logprobs=2)
        engine.run()
        check(model, folder, prompt, engine.results[f"plain {turn}"])


def test_graphs_replay_steps_with_embeddings_of_their_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the static batches of graphs, without a GPU: all at once, alone, and after one another, so
    that none finds another's embeddings. Added tokens are sampled, too, with a second step in
    flight: then their ids are known to the device alone."""
    engine = StepEngine(model, depth=2, max_loras=4)
    names = ("head", "resized", "tokens", "shrunk")
    folders = {
        name: make_vocabulary_adapter(tmp_path / name, model, KINDS[name], loud=loud)
        for name in names
        for loud in [ADDED[:2] if KINDS[name].size == GROWN else ()]
    }
    ids = {name: engine.load(folder) for name, folder in folders.items()}
    engine.runner.capture_graphs()

    def run_eagerly(*args: Any) -> torch.Tensor:
        raise AssertionError("a step ran eagerly")

    monkeypatch.setattr(engine.runner, "_run_model", run_eagerly)

    def add(name: str, turn: str) -> None:
        prompt = prompt_for(KINDS[name].size, 5)
        engine.add(f"{name} {turn}", prompt, ids[name], logprobs=0, max_tokens=6)

    for name in names:
        add(name, "together")
    engine.add("base", prompt_for(VOCAB_SIZE, 5), 0, logprobs=0, max_tokens=6)
    engine.run()
    for name in names:
        add(name, "alone")
        engine.run()
    check(model, None, prompt_for(VOCAB_SIZE, 5), engine.results["base"])
    for name in names:
        for turn in ("together", "alone"):
            prompt, result = prompt_for(KINDS[name].size, 5), engine.results[f"{name} {turn}"]
            check_vocabulary(model, folders[name], KINDS[name], prompt, result)
            if name == "resized":
                assert max(result.token_ids) >= VOCAB_SIZE


def test_biases_and_penalties_reach_added_tokens(model: Path, tmp_path: Path) -> None:
    """And only where the row has them: the same ids mean nothing to its neighbour."""
    engine = StepEngine(model)
    folder = make_vocabulary_adapter(tmp_path / "own", model, KINDS["resized"])
    adapter_id = engine.load(folder)
    likely: dict[str, Any] = {"logit_bias": {GROWN - 1: 100.0}, "max_tokens": 3}
    prompt = prompt_for(VOCAB_SIZE, 2)
    engine.add("own", prompt, adapter_id, **likely)
    engine.add("base", prompt, 0, logprobs=2, **likely)
    engine.add("sampled", prompt, adapter_id, temperature=1.0, top_p=0.9, top_k=5, **likely)
    engine.add("stops", prompt, adapter_id, stop_token_ids=(GROWN - 1,), **likely)
    engine.run()
    assert engine.results["own"].token_ids == [GROWN - 1] * 3
    assert engine.results["sampled"].token_ids == [GROWN - 1] * 3
    assert engine.results["stops"].token_ids == [GROWN - 1]
    assert engine.results["stops"].finish_reason == "stop"
    base = engine.results["base"]
    assert max(base.token_ids) < VOCAB_SIZE
    oracle = peft_logprobs(model, None, prompt + base.token_ids)[len(prompt) - 1 : -1]
    assert [int(row.argmax()) for row in oracle] == base.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_columns_that_a_row_does_not_have_are_never_chosen(temperature: float) -> None:
    logits = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    logits[:, 7:] = -torch.inf
    rows = [
        SamplingRow(
            seed=seed,
            temperature=temperature,
            top_p=0.99 if seed % 2 else 1.0,
            top_k=9 if seed % 3 else 0,
            min_p=0.01 if seed % 5 else 0.0,
            repetition_penalty=1.5,
            prompt_ids=range(10),
            logit_bias={9: 100.0},
            num_logprobs=2,
        )
        for seed in range(64)
    ]
    output = sample(logits, build(rows, 10))
    assert not output.failed.any()
    assert output.token_ids.max() < 7
    logprobs, _, top = score(logits, torch.full((64,), 8), 3)
    assert (logprobs == -torch.inf).all()
    assert top.isfinite().all()
    alone, _, _ = score(logits[:, :7], output.token_ids, 0)
    torch.testing.assert_close(score(logits, output.token_ids, 0)[0], alone)
