"""bfloat16 on a GPU: as close to PEFT in float32 as PEFT in bfloat16 is."""

import copy
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
    engine = StepEngine(
        model,
        device="cuda",
        dtype="bfloat16",
        block_size=16,
        gpu_memory_utilization=0.2,
        max_loras=len(cases),
        max_num_seqs=64,
        max_num_batched_tokens=256,
    )
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

    ours, theirs = [], []
    for name, (oracle, prompt) in prompts.items():
        exact = pick(peft_logprobs(model, oracle, prompt), prompt)
        served = [score.logprob for score in (results[name].prompt_logprobs or []) if score]
        ours.append(torch.tensor(served) - exact)
        theirs.append(scores_in_bfloat16(model, oracle, prompt) - exact)
    our_error = torch.cat(ours).square().mean().sqrt()
    their_error = torch.cat(theirs).square().mean().sqrt()
    print(f"{kind}: error {our_error:.5f}, PEFT's in bfloat16 {their_error:.5f}")
    assert our_error <= MARGIN * their_error
    for own, peft in zip(ours, theirs, strict=True):
        assert own.abs().max() <= 4 * peft.abs().max() + 0.02
