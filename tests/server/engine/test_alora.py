"""Activated LoRA: tokens before the invocation are the base model's. Against PEFT."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor

from lorakeet.lora.adapter import AdapterId
from support.adapters import (
    alora_logprobs,
    edit_config,
    make_adapter,
    peft_logprobs,
    peft_model,
)
from support.engines import Collected, StepEngine
from support.models import VOCAB_SIZE, tiny_model
from support.parity import TOLERANCE, check_scores

INVOCATION = [5, 6]
OTHER = [9]


class Files:
    def __init__(self, folder: Path) -> None:
        self.model = tiny_model(folder / "model")
        self.folders = [
            make_adapter(folder / "a", self.model, seed=1, r=6, alora_invocation_tokens=INVOCATION),
            make_adapter(
                folder / "b",
                self.model,
                seed=2,
                r=3,
                lora_bias=True,
                target_modules=["q_proj", "v_proj", "lm_head"],
                alora_invocation_tokens=OTHER,
            ),
            make_adapter(folder / "plain", self.model, seed=3, r=4),
        ]

    def engine(self, **settings: Any) -> StepEngine:
        engine = StepEngine(self.model, **settings)
        for path in self.folders:
            engine.load(path)
        return engine


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Files(tmp_path_factory.mktemp("alora"))


def filler(length: int, seed: int) -> list[int]:
    """Tokens without any invocation."""
    return [int(token) for token in np.random.default_rng(seed).integers(20, VOCAB_SIZE, length)]


PROMPTS = {
    "in the middle": [*filler(11, 1), *INVOCATION, *filler(7, 2)],
    "at a block's border": [*filler(8, 3), *INVOCATION, *filler(5, 4)],
    "across a block's border": [*filler(11, 5), *INVOCATION, *filler(5, 6)],
    "first": [*INVOCATION, *filler(9, 7)],
    "last": [*filler(13, 8), *INVOCATION],
    "twice": [*filler(3, 9), *INVOCATION, *filler(9, 10), *INVOCATION, *filler(2, 11)],
    "nowhere": [*filler(9, 12), INVOCATION[0], *filler(4, 13)],
    "the other's": [*filler(9, 14), *OTHER, *filler(4, 15)],
    "both": [*filler(6, 16), *OTHER, *filler(4, 17), *INVOCATION, *filler(3, 18)],
}


def scores_by_peft(files: Files, adapter: int, prompt: list[int], token_ids: list[int]) -> Tensor:
    """(len, vocab)."""
    folder = None if adapter == 0 else files.folders[adapter - 1]
    if folder is None or adapter == 3:
        return peft_logprobs(files.model, folder, token_ids)
    invocation = INVOCATION if adapter == 1 else OTHER
    return alora_logprobs(files.model, folder, invocation, prompt, token_ids)


def check(files: Files, adapter: int, prompt: list[int], result: Collected) -> None:
    check_scores(scores_by_peft(files, adapter, prompt, prompt + result.token_ids), prompt, result)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 3, 7, 64])
def test_any_chunks_equal_peft_in_a_mixed_batch(
    files: Files, max_num_batched_tokens: int, capture: bool
) -> None:
    engine = files.engine(max_num_batched_tokens=max_num_batched_tokens)
    if capture:
        engine.runner.capture_graphs()
    for name, prompt in PROMPTS.items():
        for adapter in range(4):
            scores = 0 if adapter == 1 else None
            engine.add(f"{name}/{adapter}", prompt, adapter, logprobs=0, prompt_logprobs=scores)
    results = engine.run()
    for name, prompt in PROMPTS.items():
        for adapter in range(4):
            check(files, adapter, prompt, results[f"{name}/{adapter}"])


def test_long_prompts_equal_peft(files: Files) -> None:
    """Dense runs of the CPU backend begin in the middle of a sequence."""
    engine = files.engine(max_num_batched_tokens=256)
    prompt = [*filler(50, 1), *INVOCATION, *filler(50, 2)]
    engine.add("r", prompt, 1, logprobs=0, prompt_logprobs=0)
    check(files, 1, prompt, engine.run()["r"])


@pytest.mark.parametrize("name", PROMPTS)
def test_pefts_generate_gives_the_same_tokens(files: Files, name: str) -> None:
    engine = files.engine()
    prompt = PROMPTS[name]
    engine.add("r", prompt, 1, max_tokens=8)
    oracle = peft_model(files.model, files.folders[0])
    assert isinstance(oracle, PeftModel)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = oracle.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=-1
        )[0, len(prompt) :].tolist()
    assert engine.run()["r"].token_ids == expected


def test_what_is_generated_invokes_nothing(files: Files) -> None:
    """The invocation that starts the adapter is one of the prompt's, whatever comes after it."""
    engine = files.engine()
    prompt = [*filler(7, 1), *INVOCATION, *filler(3, 2)]
    bias = {INVOCATION[0]: 60.0, INVOCATION[1]: 60.0}
    engine.add("r", prompt, 1, logit_bias=bias, logprobs=0)
    engine.add("base", filler(7, 1), 1, logit_bias=bias, logprobs=0)
    results = engine.run()
    for name, own in (("r", prompt), ("base", filler(7, 1))):
        token_ids = own + results[name].token_ids
        assert set(results[name].token_ids) <= set(INVOCATION)
        expected = scores_by_peft(files, 1, own, token_ids)
        for position, score in enumerate(results[name].logprobs, start=len(own)):
            row = expected[position - 1]
            assert score.logprob == pytest.approx(float(row[score.token_id]), abs=TOLERANCE)


def test_the_bases_prefix_cache_is_shared_both_ways(files: Files) -> None:
    engine = files.engine()
    head = filler(13, 1)  # blocks of 4: three are wholly before the invocation
    prompt = [*head, *INVOCATION, *filler(8, 2)]
    visits = [
        (0, [*head, *filler(3, 3)], 0),  # base
        (1, prompt, 12),  # the adapter reads the base's
        (1, prompt, 20),  # and its own
        (1, [*head, *INVOCATION, *INVOCATION, *filler(4, 4)], 12),
        (2, [*head, *OTHER, *filler(4, 5)], 12),
        (3, prompt, 0),  # a plain LoRA shares nothing
        (0, prompt, 12),
        (2, prompt, 20),  # without its invocation: the base's
    ]
    for number, (adapter, own, cached) in enumerate(visits):
        engine.add(str(number), own, adapter, logprobs=0)
        result = engine.run()[str(number)]
        assert result.cached_tokens == cached, number
        check(files, adapter, own, result)
    fresh = files.engine()
    fresh.add("adapter", prompt, 1)
    fresh.run()
    fresh.add("base", [*head, *filler(5, 6)], logprobs=0)  # the base reads what an aLoRA computed
    result = fresh.run()["base"]
    assert result.cached_tokens == 12
    check(files, 0, [*head, *filler(5, 6)], result)


def test_equal_blocks_with_another_start_are_not_shared(files: Files) -> None:
    """A block that ends inside of the later invocation has the tokens of both prompts."""
    engine = files.engine()
    tokens = [*filler(4, 1), *INVOCATION, *filler(1, 2), INVOCATION[0]]  # two whole blocks
    early = [*tokens, *filler(4, 3)]  # the adapter starts at 4
    late = [*tokens, INVOCATION[1], *filler(3, 4)]  # at 7
    for number, (own, cached) in enumerate(((early, 0), (late, 4), (early, 8), (late, 8))):
        engine.add(str(number), own, 1, logprobs=0)
        result = engine.run()[str(number)]
        assert result.cached_tokens == cached
        check(files, 1, own, result)


def test_unloading_keeps_the_bases_blocks(files: Files) -> None:
    engine = files.engine()
    prompt = [*filler(13, 1), *INVOCATION, *filler(8, 2)]
    engine.add("r", prompt, 1, max_tokens=1)
    engine.run()
    engine.scheduler.remove_adapter(AdapterId(1))
    assert [gone.num_blocks for gone in engine.scheduler.take_unloaded()] == [2]
    engine.add("base", prompt, logprobs=0)
    result = engine.run()["base"]
    assert result.cached_tokens == 12
    check(files, 0, prompt, result)


def test_preempted_sequences_end_as_if_alone(files: Files) -> None:
    bytes_per_token = 2 * 3 * 2 * 16 * 4
    engine = files.engine(cpu_kv_memory=64 * bytes_per_token)
    for number, prompt in enumerate(PROMPTS.values()):
        engine.add(str(number), prompt, 1 + number % 2, max_tokens=20, logprobs=0)
    results = engine.run()
    assert engine.scheduler.stats().num_preemptions > 0
    for number, prompt in enumerate(PROMPTS.values()):
        check(files, 1 + number % 2, prompt, results[str(number)])


def test_without_its_invocation_it_needs_no_slot(files: Files) -> None:
    engine = files.engine()
    engine.add("r", PROMPTS["nowhere"], 1)
    engine.run()
    assert engine.scheduler.stats().lora_rows_used == 0


def test_it_cannot_be_blended(files: Files) -> None:
    engine = files.engine()
    with pytest.raises(ValueError, match="aLoRA"):
        engine.add("r", PROMPTS["first"], blend=((1, 0.5), (3, 0.5)))
    assert not engine.runner.host_store.get(AdapterId(1)).blendable
    assert engine.runner.host_store.get(AdapterId(3)).blendable


def test_other_invocations_are_another_content(files: Files, tmp_path: Path) -> None:
    engine = files.engine()
    store = engine.runner.host_store
    settings: dict[str, Any] = {"seed": 1, "r": 6}
    changed = make_adapter(tmp_path / "c", files.model, alora_invocation_tokens=[7], **settings)
    empty = make_adapter(tmp_path / "e", files.model, **settings)
    edit_config(empty, alora_invocation_tokens=[])  # as in PEFT: a plain LoRA
    own = store.get(AdapterId(1))
    for folder, invocation in ((changed, (7,)), (empty, ())):
        adapter = store.get(engine.load(folder))
        assert adapter.invocation == invocation
        assert adapter.digest != own.digest
