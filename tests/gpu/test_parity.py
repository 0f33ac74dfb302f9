"""bfloat16 on a GPU: as close to PEFT in float32 as PEFT in bfloat16 is."""

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.adapter_kinds import adapters_of_every_kind
from support.adapters import peft_logprobs, peft_model
from support.engines import StepEngine
from support.models import tiny_model

pytestmark = pytest.mark.gpu

KINDS = ["llama", "llama_tied", "mistral", "qwen2", "qwen3", "rope_llama3"]
MARGIN = 1.15  # over PEFT's own error: the two round in other places


def scores_in_bfloat16(model: Path, adapter: Path | None, token_ids: list[int]) -> Tensor:
    """PEFT's log-probability of each token but the first, model and adapter in bfloat16."""
    peft = copy.deepcopy(peft_model(model, adapter)).to("cuda", torch.bfloat16)
    with torch.inference_mode():
        logits = peft(torch.tensor([token_ids], device="cuda")).logits[0].float()
    return pick(torch.log_softmax(logits, dim=-1).cpu(), token_ids)


def pick(logprobs: Tensor, token_ids: list[int]) -> Tensor:
    return logprobs[torch.arange(len(token_ids) - 1), torch.tensor(token_ids[1:])]


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_batch_is_as_close_as_peft(kind: str, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", kind, hidden_size=256, intermediate_size=512)
    cases = adapters_of_every_kind(tmp_path / "adapters", model)
    engine = engine_of(model, len(cases))
    generator = torch.Generator().manual_seed(0)
    prompts: dict[str, tuple[Path | None, list[int]]] = {}
    for number, case in enumerate([None, *cases]):
        adapter_id = 0 if case is None else engine.load(case.folder)
        length = 40 + 3 * number
        prompt = torch.randint(3, 300, (length,), generator=generator).tolist()
        name = "base" if case is None else case.name
        prompts[name] = (None if case is None else case.oracle, prompt)
        engine.add(name, prompt, adapter_id, max_tokens=1, prompt_logprobs=0)
    results = engine.run()

    check_errors(
        model,
        [
            (oracle, prompt, 1, [one.logprob for one in results[name].prompt_logprobs or [] if one])
            for name, (oracle, prompt) in prompts.items()
        ],
    )


def test_a_large_batch_that_ends_one_by_one_is_as_close_as_peft(tmp_path: Path) -> None:
    """Decodes in graphs of every size: the last requests are there in all of them."""
    model = tiny_model(tmp_path / "model", hidden_size=256, intermediate_size=512)
    cases = adapters_of_every_kind(tmp_path / "adapters", model)
    engine, size = engine_of(model, 1 + len(cases), max_num_seqs=300), 300
    users = [(0, None), *((engine.load(case.folder), case.oracle) for case in cases)]
    prompt = [7, 3, 250, 9, 11]
    for number in range(size):
        adapter_id, _ = users[number % len(users)]
        engine.add(str(number), prompt, adapter_id, max_tokens=4 + number, logprobs=0)
    results = engine.run()
    served = []
    for number in range(size - 2 * len(users), size):
        result = results[str(number)]
        logprobs = [score.logprob for score in result.logprobs]
        oracle = users[number % len(users)][1]
        served.append((oracle, prompt + result.token_ids, len(prompt), logprobs))
    check_errors(model, served)


def check_errors(
    model: Path, served: Sequence[tuple[Path | None, list[int], int, list[float]]]
) -> None:
    """`served`: PEFT's adapter, tokens, the first that is scored, and our log-probabilities."""
    ours, theirs = [], []
    for oracle, token_ids, first, logprobs in served:
        exact = pick(peft_logprobs(model, oracle, token_ids), token_ids)[first - 1 :]
        ours.append(torch.tensor(logprobs) - exact)
        theirs.append(scores_in_bfloat16(model, oracle, token_ids)[first - 1 :] - exact)
    our_error = torch.cat(ours).square().mean().sqrt()
    their_error = torch.cat(theirs).square().mean().sqrt()
    print(f"error {our_error:.5f}, PEFT's in bfloat16 {their_error:.5f}")
    assert our_error <= MARGIN * their_error
    for own, peft in zip(ours, theirs, strict=True):
        assert own.abs().max() <= 4 * peft.abs().max() + 0.02


def engine_of(model: Path, max_loras: int, **settings: int) -> StepEngine:
    return StepEngine(
        model,
        device="cuda",
        dtype="bfloat16",
        block_size=16,
        gpu_memory_utilization=0.2,
        max_loras=max_loras,
        **{"max_num_seqs": 64, "max_num_batched_tokens": 256} | settings,
    )
