"""A step while the scheduler puts it together."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from lorakeet.lora.adapter import Slot
from lorakeet.server.engine.request import Sequence
from lorakeet.server.engine.scheduler_config import ReplayLimits, SchedulerConfig
from lorakeet.server.engine.step import (
    NewSequence,
    ScheduledSequence,
    SequenceId,
    SlotLoad,
    Step,
)

_LEAST_SHARE = 4  # a quarter of a replayed step is for prompts, if there are any


@dataclass
class StepPlan:
    """What has been decided so far. `budget`: tokens that the step can still take.

    It is within what can be replayed, until something comes that goes beyond it anyway: then
    `spare` more are there.
    """

    budget: int
    spare: int = 0
    replayed: ReplayLimits | None = None
    chunks: dict[SequenceId, ScheduledSequence] = field(default_factory=dict)
    new: list[NewSequence] = field(default_factory=list)
    num_reread: int = 0  # see ReplayLimits

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
        most, replayed = config.max_num_batched_tokens, config.replayed
        budget = most if replayed is None else min(most, replayed.num_tokens)
        return StepPlan(budget, most - budget, replayed)

    def use_spare(self) -> None:
        """The step will not be replayed."""
        self.budget += self.spare
        self.spare = 0

    def tokens_for(self, start: int, num_left: int) -> int:
        """How many of a sequence's next tokens the step can take: from `start` on, `num_left` are
        to be computed."""
        if num_left > 1 and self.replayed is not None and self._goes_beyond(start, num_left):
            self.use_spare()
        return min(num_left, self.budget)

    def _goes_beyond(self, start: int, num_left: int) -> bool:
        """A prompt is too long to be replayed, those of the step reread too much together, or
        decodes leave them too little."""
        assert self.replayed is not None
        most, num_tokens = self.replayed.num_tokens, min(num_left, self.budget)
        num_reread = self.num_reread + num_tokens * (start + num_tokens)
        is_first = self.num_reread == 0
        is_crowded = is_first and self.budget < min(num_left, most // _LEAST_SHARE)
        return num_left > most or num_reread > self.replayed.num_reread or is_crowded

    def add(self, chunk: ScheduledSequence) -> None:
        self.chunks[chunk.seq_id] = chunk
        self.budget -= chunk.num_tokens
        self.num_reread += chunk.num_reread

    def remove(self, seq_id: SequenceId) -> None:
        """Take back the sequence's chunk, if it has one."""
        chunk = self.chunks.pop(seq_id, None)
        if chunk is not None:
            self.budget += chunk.num_tokens
            self.num_reread -= chunk.num_reread

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
