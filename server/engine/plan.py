"""A step while the scheduler puts it together."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from lorakeet.lora.adapter import Slot
from lorakeet.server.engine.request import Sequence
from lorakeet.server.engine.step import (
    NewSequence,
    ScheduledSequence,
    SequenceId,
    SlotLoad,
    Step,
)


@dataclass
class StepPlan:
    """What has been decided so far.

    `budget`: tokens that the step can still take; `spare`: how many more, if it is not to be
    replayed.
    """

    budget: int
    spare: int = 0
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

    def use_spare(self) -> None:
        self.budget += self.spare
        self.spare = 0

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
