"""Log-probabilities on the wire: chat's shape, the older one of completions, prompt's."""

from collections.abc import Sequence

from lorakeet.server.engine.messages import TokenLogprob
from lorakeet.server.generation import ScoredToken
from lorakeet.server.tokens import Detokenizer, Tokenizer

LOWEST = -9999.0  # JSON has no infinity, and clients want a number


def chat_logprobs(
    scored: Sequence[ScoredToken], num_top: int, tokenizer: Tokenizer
) -> dict[str, object]:
    def entry(token_id: int, logprob: float) -> dict[str, object]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": max(logprob, LOWEST),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        {
            **entry(token.logprob.token_id, token.logprob.logprob),
            "top_logprobs": [entry(*top) for top in token.logprob.top[:num_top]],
        }
        for token in scored
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    scored: Sequence[tuple[int, int, TokenLogprob | None]], num_top: int, tokenizer: Tokenizer
) -> dict[str, object]:
    """`scored`: text offset, token id, and its score (None for a prompt's first token)."""
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for offset, token_id, score in scored:
        tokens.append(tokenizer.token_text(token_id))
        offsets.append(offset)
        if score is None:
            logprobs.append(None)
            tops.append(None)
            continue
        logprobs.append(max(score.logprob, LOWEST))
        top: dict[str, float] = {}
        for other, logprob in [*score.top[:num_top], (score.token_id, score.logprob)]:
            top.setdefault(tokenizer.token_text(other), max(logprob, LOWEST))
        tops.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def prompt_logprobs(
    scores: Sequence[TokenLogprob | None], num_top: int, tokenizer: Tokenizer
) -> list[dict[str, object] | None]:
    """vLLM's shape: for each prompt token its own score and the likeliest, by token id."""
    wire: list[dict[str, object] | None] = []
    for score in scores:
        if score is None:
            wire.append(None)
            continue
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(score.top, start=1)}
        wire.append(
            {
                str(token_id): {
                    "logprob": max(logprob, LOWEST),
                    "rank": ranks.get(token_id),
                    "decoded_token": tokenizer.token_text(token_id),
                }
                for token_id, logprob in [(score.token_id, score.logprob), *score.top[:num_top]]
            }
        )
    return wire


def text_offsets(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Where in the text of all of them each token begins."""
    detokenizer = Detokenizer(tokenizer, ())
    offsets, end = [], 0
    for token_id in token_ids:
        offsets.append(end)
        end += len(detokenizer.add(token_id))
    return offsets
