"""A step while the scheduler puts it together."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from lorakeet.lora.adapter import Slot
from lorakeet.server.engine.request import Sequence
from lorakeet.server.engine.scheduler_config import SchedulerConfig
from lorakeet.server.engine.step import (
    NewSequence,
    ScheduledSequence,
    SequenceId,
    SlotLoad,
    Step,
)

_LEAST_SHARE = 4  # a quarter of a short step is for prompts, if there are any


@dataclass
class StepPlan:
    """What has been decided so far. `budget`: tokens that the step can still take.

    The step is to be a short one, until something comes for which it may be longer: then `spare`
    more are there.
    """

    budget: int
    spare: int = 0
    short_step_tokens: int | None = None  # see SchedulerConfig
    chunks: dict[SequenceId, ScheduledSequence] = field(default_factory=dict)
    new: list[NewSequence] = field(default_factory=list)

    def start(self, sequence: Sequence, slot: Slot) -> None:
        """The runner is to learn of a sequence; `block_ids` are from the prefix cache so far."""
        sequence.leave_queue()
        self.new.append(
            NewSequence(
                seq_id=sequence.seq_id,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                sampling=sequence.sampling,
                eos_token_ids=sequence.request.eos_token_ids,
                slot=slot,
                block_ids=tuple(sequence.block_ids),
                adapter_start=sequence.chain.content.start,
            )
        )

    @staticmethod
    def of(config: SchedulerConfig) -> "StepPlan":
        most, short = config.max_num_batched_tokens, config.short_step_tokens
        if short is None:
            return StepPlan(most)
        short = max(short, config.max_num_seqs)  # all decodes are in every step
        return StepPlan(min(most, short), max(most - short, 0), short)

    def tokens_for(self, num_left: int) -> int:
        """How many of a sequence's next tokens, of which `num_left` are to be computed, the step
        can take."""
        if self._goes_beyond(num_left):
            self.budget, self.spare = self.budget + self.spare, 0
        return min(num_left, self.budget)

    def _goes_beyond(self, num_left: int) -> bool:
        """A prompt is longer than a short step, or decodes leave the first one too little."""
        if (most := self.short_step_tokens) is None:
            return False
        is_crowded = self.budget < min(num_left, most // _LEAST_SHARE)
        return num_left > most or (is_crowded and not self._has_chunks)

    @property
    def _has_chunks(self) -> bool:
        return any(chunk.num_tokens > 1 for chunk in self.chunks.values())

    def add(self, chunk: ScheduledSequence) -> None:
        self.chunks[chunk.seq_id] = chunk
        self.budget -= chunk.num_tokens

    def remove(self, seq_id: SequenceId) -> None:
        """Take back the sequence's chunk, if it has one."""
        chunk = self.chunks.pop(seq_id, None)
        if chunk is not None:
            self.budget += chunk.num_tokens

    def to_step(
        self,
        loads: Iterable[SlotLoad],
        released: Iterable[SequenceId],
        cleared: tuple[Slot, ...] = (),
    ) -> Step:
        chunks = self.chunks.values()
        singles = [chunk for chunk in chunks if chunk.num_tokens == 1]
        return Step(
            cleared=cleared,
            loads=tuple(loads),
            released=tuple(released),
            new=tuple(self.new),
            sequences=(*singles, *(chunk for chunk in chunks if chunk.num_tokens > 1)),
        )
