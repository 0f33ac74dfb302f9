"""One engine step as plain data: what the scheduler decides, and what the runner reports."""

from dataclasses import dataclass, field
from typing import NewType

import msgspec

from lorakeet.lora.adapter import AdapterId, Slot
from lorakeet.server.engine.messages import SamplingParams, TokenLogprob

SequenceId = NewType("SequenceId", int)  # one request in the engine; never used again
BlockId = NewType("BlockId", int)  # one block of the KV cache


@dataclass(frozen=True)
class SlotPart:
    slot: Slot  # loaded, or being loaded since before
    num_rows: int
    weight: float


@dataclass(frozen=True)
class SlotLoad:
    """Copy an adapter from host memory into a slot of the pool, beside the passes from now on: the
    slot may be used once a step's result names it as loaded.

    Or, with `parts`, make the slot list the rows of other slots' adapters, each times its weight.
    """

    adapter_id: AdapterId
    slot: Slot
    rows: tuple[int, ...] = ()  # of the pool, for its weights
    parts: tuple[SlotPart, ...] = ()  # of a blend, which has no weights of its own


@dataclass(frozen=True)
class NewSequence:
    """A sequence that the runner does not know yet, or knew before it was preempted."""

    seq_id: SequenceId
    token_ids: tuple[int, ...]  # prompt, and what was generated before a preemption
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]  # held back until min_tokens are there
    slot: Slot
    block_ids: tuple[BlockId, ...]  # KV blocks found in the prefix cache
    adapter_start: int = 0  # tokens before it have no adapter (aLoRA)


class ScheduledSequence(msgspec.Struct, frozen=True):
    """`num_tokens` tokens of one sequence, from `start` on, that this step computes.

    The last of them may be in flight: sampled by the step before, not known to the host yet.
    """

    seq_id: SequenceId
    start: int
    num_tokens: int
    new_block_ids: tuple[BlockId, ...]
    samples: bool  # the chunk reaches the end of the tokens: one more is sampled

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True)
class Step:
    """Sequences with one token come first. With no sequences, only loads and releases are done.

    Steps run on the device in the order in which they are launched.
    """

    cleared: tuple[Slot, ...] = ()  # free their vocabularies, before the loads
    loads: tuple[SlotLoad, ...] = ()
    released: tuple[SequenceId, ...] = ()  # finished, aborted or preempted: forget them first
    new: tuple[NewSequence, ...] = ()
    sequences: tuple[ScheduledSequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)


class Sampled(msgspec.Struct, frozen=True):
    """A new token of one sequence; or an error that ends this sequence alone."""

    seq_id: SequenceId
    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


@dataclass(frozen=True)
class StepResult:
    sampled: tuple[Sampled, ...] = ()
    # for sequences that asked: scores of prompt tokens that this chunk predicts, in order
    # (position p predicts token p + 1, so a whole prompt gives one fewer than its tokens)
    prompt_logprobs: dict[SequenceId, list[TokenLogprob]] = field(default_factory=dict)
    loaded: tuple[Slot, ...] = ()  # slots whose copy has completed
    load_seconds: tuple[float, ...] = ()
    load_errors: dict[Slot, str] = field(default_factory=dict)  # slots whose copy failed, and why
