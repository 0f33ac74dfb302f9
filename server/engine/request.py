"""One request inside the engine: its tokens, how far they are computed, and when it ends."""

import time
from collections import deque
from dataclasses import dataclass, field

from lorakeet.lora.adapter import AdapterId
from lorakeet.server.engine.blocks import HashChain
from lorakeet.server.engine.messages import (
    AddRequest,
    FinishReason,
    RequestOutput,
    TokenLogprob,
)
from lorakeet.server.engine.step import BlockId, Sampled, ScheduledSequence, SequenceId


@dataclass(eq=False)
class Sequence:
    """`num_computed_tokens` chases the number of tokens: there are no phases.

    `token_ids` is the prompt and what is known to be generated; `num_in_flight` more tokens are
    being sampled. The KV of the first `num_computed_tokens` of all these is in `block_ids`, or will
    be once the steps in flight are done.
    """

    seq_id: SequenceId  # also its place in the order of arrival
    request: AddRequest
    chain: HashChain
    max_model_len: int
    adapter_id: AdapterId  # whose sequence it is: a blend has an id of its own
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    block_ids: list[BlockId] = field(default_factory=list)
    num_cached_tokens: int | None = None  # found in the prefix cache when it first started
    arrival: float = field(init=False)
    queue_seconds: float | None = None  # from its arrival to its first start
    has_output: bool = False  # an output has been sent
    chunks: deque[ScheduledSequence] = field(default_factory=deque)  # in flight, oldest first
    num_in_flight: int = 0  # tokens that `chunks` sample
    finish_reason: FinishReason | None = None
    _prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt)
        self.sampling = self.request.sampling
        self.samples = self.sampling.max_tokens > 0  # else its prompt is only scored
        self.num_prompt_tokens = len(self.token_ids)
        self._max_num_tokens = min(
            self.num_prompt_tokens + self.sampling.max_tokens, self.max_model_len
        )
        # nothing follows the last token that can come, so it is never computed
        self._num_to_compute = max(self._max_num_tokens - 1, self.num_prompt_tokens)
        self.arrival = time.monotonic()

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens, also ones in flight, that no step computes yet."""
        num_tokens = len(self.token_ids) + self.num_in_flight
        return min(num_tokens, self._num_to_compute) - self.num_computed_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """Scores of the prompt come only from computing it."""
        return self.sampling.prompt_logprobs is None

    def launch(self, chunk: ScheduledSequence) -> None:
        """A step will compute the chunk."""
        self.chunks.append(chunk)
        self.num_computed_tokens = chunk.end
        self.num_in_flight += chunk.samples

    def land(self, chunk: ScheduledSequence) -> bool:
        """The chunk is computed. False: it is of no use, for it was launched before a reset."""
        if not self.chunks or self.chunks[0] is not chunk:
            return False
        self.chunks.popleft()
        self.num_in_flight -= chunk.samples
        return True

    def leave_queue(self) -> None:
        """It starts, perhaps again after a preemption: the first time counts."""
        if self.queue_seconds is None:
            self.queue_seconds = time.monotonic() - self.arrival

    def append(self, token_id: int) -> int | None:
        """Add a generated token and see whether it is the last: then `finish_reason` is set.

        Returns the token if it is an EOS or stop token that ends the sequence.
        """
        self.token_ids.append(token_id)
        sampling = self.sampling
        ends = token_id in sampling.stop_token_ids or (
            token_id in self.request.eos_token_ids and not sampling.ignore_eos
        )
        num_tokens = len(self.token_ids)
        if ends and num_tokens - self.num_prompt_tokens > sampling.min_tokens:
            self.finish_reason = "stop"
            return token_id
        if num_tokens >= self._max_num_tokens:
            self.finish_reason = "length"
        return None

    def collect_prompt_logprobs(self, start: int, scores: list[TokenLogprob]) -> None:
        """Keep a chunk's scores, of tokens `start + 1` on. After a preemption they come again."""
        self._prompt_logprobs.extend(scores[len(self._prompt_logprobs) - start - 1 :])

    def output(self, sampled: Sampled | None, stop_token: int | None) -> RequestOutput:
        """What to send after `append`; the first time with what is known of the prompt."""
        logprob = sampled.logprob if sampled is not None else None
        asked = self.sampling.logprobs is not None
        output = RequestOutput(
            request_id=self.request.request_id,
            token_ids=[] if sampled is None else [sampled.token_id],
            finish_reason=self.finish_reason,
            stop_token=stop_token,
            logprobs=[logprob] if asked and logprob is not None else None,
            prompt_logprobs=None if self.has_output else self._all_prompt_logprobs(),
            cached_tokens=None if self.has_output else self.num_cached_tokens,
            queue_seconds=None if self.has_output else self.queue_seconds,
        )
        self.has_output = True
        return output

    def reset(self) -> None:
        """All tokens are to be computed again, in other blocks; those in flight are given up."""
        self.num_computed_tokens = 0
        self.block_ids = []
        self.chunks.clear()
        self.num_in_flight = 0

    def _all_prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        if self.sampling.prompt_logprobs is None:
            return None
        assert len(self._prompt_logprobs) == self.num_prompt_tokens
        return self._prompt_logprobs
