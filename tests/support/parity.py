"""What an engine or a server answered, compared with PEFT in float32, one prompt at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lorakeet.server.engine.messages import TokenLogprob
from lorakeet.server.tokens import Tokenizer
from support.adapters import peft_logprobs
from support.engines import Collected
from support.models import TOKENIZER_SIZE, VOCAB_SIZE

TOLERANCE = 1e-3  # of a log-probability

# For requests over HTTP, whose answers tell tokens by their text: only tokens that have one.
ONLY_TEXT = {str(token_id): -100 for token_id in range(TOKENIZER_SIZE, VOCAB_SIZE)}


def check(
    model: Path,
    adapter: Path | None,
    prompt: list[int],
    result: Collected,
    vocab_size: int = VOCAB_SIZE,
) -> float:
    """As `check_scores`, of one adapter by PEFT."""
    token_ids = prompt + result.token_ids
    oracle = peft_logprobs(model, adapter, token_ids)
    worst = check_scores(oracle, prompt, result, vocab_size)
    if adapter is not None:  # the control: the base model would not pass
        base = peft_logprobs(model, None, token_ids)
        assert (base - oracle)[:-1].abs().max() > 50 * TOLERANCE
    return worst


def check_scores(
    oracle: Tensor, prompt: list[int], result: Collected, vocab_size: int | None = None
) -> float:
    """Assert that it has the oracle's greedy tokens below `vocab_size`, with the oracle's scores.

    `oracle`: log-probabilities (len, vocab) for prompt and tokens. The prompt's scores are checked
    where there are any. Returns the largest difference.
    """
    assert result.error is None
    oracle = oracle[:-1]
    generated = oracle[len(prompt) - 1 :]
    chosen = generated[torch.arange(len(generated)), torch.tensor(result.token_ids)]
    likeliest = generated[:, :vocab_size].max(dim=-1).values
    assert (likeliest - chosen).max() < TOLERANCE, "not the likeliest token"
    assert [score.token_id for score in result.logprobs] == result.token_ids
    worst = _difference(generated, result.logprobs)
    if result.prompt_logprobs is not None:
        assert result.prompt_logprobs[0] is None
        scored = [score.token_id for score in result.prompt_logprobs[1:] if score is not None]
        assert scored == prompt[1:]
        worst = max(worst, _difference(oracle[: len(prompt) - 1], result.prompt_logprobs[1:]))
    assert worst < TOLERANCE
    return worst


def agrees(result: Collected, checked: Collected) -> bool:
    """The same tokens and scores as one that is checked. False: a near tie went the other way."""
    if result.token_ids != checked.token_ids:
        return False
    pairs = zip(result.logprobs, checked.logprobs, strict=True)
    assert all(abs(one.logprob - other.logprob) < TOLERANCE for one, other in pairs)
    return True


def same_choice(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Two choices of completions with `logprobs` have the same tokens, and scores but for noise."""
    first, second = one["logprobs"], other["logprobs"]
    scores = zip(first["token_logprobs"], second["token_logprobs"], strict=True)
    return first["tokens"] == second["tokens"] and all(abs(a - b) < 1e-4 for a, b in scores)


def collected(choice: dict[str, Any], prompt: list[int], tokenizer: Tokenizer) -> Collected:
    """A choice of a completion with `logprobs` over HTTP, as the engine gives it."""
    ids = {tokenizer.token_text(token_id): token_id for token_id in range(TOKENIZER_SIZE)}
    token_ids = [ids[text] for text in choice["logprobs"]["tokens"]]
    logprobs = choice["logprobs"]["token_logprobs"]
    result = Collected(
        token_ids=token_ids,
        logprobs=[TokenLogprob(*one, []) for one in zip(token_ids, logprobs, strict=True)],
    )
    if "prompt_logprobs" in choice:
        scores = zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        result.prompt_logprobs = [
            None,
            *(TokenLogprob(token, score[str(token)]["logprob"], []) for token, score in scores),
        ]
    return result


def _difference(oracle: Tensor, scores: Sequence[TokenLogprob | None]) -> float:
    """The largest, over tokens and their likeliest others. `oracle`: (tokens, vocab)."""
    worst = 0.0
    for row, score in zip(oracle, scores, strict=True):
        assert score is not None
        for token_id, logprob in [(score.token_id, score.logprob), *score.top]:
            worst = max(worst, abs(float(row[token_id]) - logprob))
    return worst
