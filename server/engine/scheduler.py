"""What the engine does next: `schedule()` decides a step, `apply()` takes in its result.

The decision is plain data. Steps may be in flight: scheduled, and not applied yet. Their sequences
are scheduled on as if they were done; results come in the same order. The device runs one step
after the other, so what a sequence holds is free as soon as it ends or is preempted, even while a
step works on it: whoever gets its blocks or its slot next writes to them later. Results of such
steps are dropped. The prefix cache gets only what an applied step has computed.
"""

import time
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import attrgetter

from lorakeet.lora.adapter import MAX_EXTRA_ROWS, AdapterId
from lorakeet.lora.slots import Room, SlotManager
from lorakeet.server.engine.adapter_book import AdapterBook
from lorakeet.server.engine.adapter_entry import AdapterEntry
from lorakeet.server.engine.adapters import AdapterPlaces
from lorakeet.server.engine.blocks import BlockManager, HashChain
from lorakeet.server.engine.messages import (
    AddRequest,
    EngineStats,
    FinishReason,
    RequestOutput,
    TokenLogprob,
)
from lorakeet.server.engine.plan import StepPlan
from lorakeet.server.engine.request import Sequence
from lorakeet.server.engine.scheduler_config import SchedulerConfig
from lorakeet.server.engine.step import (
    BlockId,
    Sampled,
    ScheduledSequence,
    SequenceId,
    Step,
    StepResult,
)


@dataclass(frozen=True)
class Unloaded:
    """What the unloading of an adapter has freed."""

    adapter_id: AdapterId
    room: Room  # in the pool
    num_blocks: int  # of the KV cache: prefixes that nobody can use any more


class Scheduler:
    """Owns sequences, KV blocks and adapter slots."""

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.blocks = BlockManager(
            config.num_blocks, config.block_size, config.enable_prefix_caching
        )
        most_rows = min(config.max_lora_rank + MAX_EXTRA_ROWS, config.num_rows)
        self.slots = SlotManager(
            config.num_slots,
            config.num_rows,
            most_rows,
            reserved_slots=1 + config.max_blend,
            reserved_rows=config.max_blend_rows,
            vocabulary_bytes=config.vocabulary_bytes,
        )
        self.adapters = AdapterBook(self.slots)
        self.places = AdapterPlaces(
            self.adapters,
            self.slots,
            config.max_loras,
            config.adapter_wait_limit,
            config.adapter_quantum,
        )
        self._clock = clock
        self._next_seq_id = 0
        self._by_request: dict[str, Sequence] = {}
        self._waiting: dict[AdapterId, list[Sequence]] = {}  # in order of arrival, none empty
        self._running: dict[SequenceId, Sequence] = {}
        self._released: list[SequenceId] = []  # for the runner to forget
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._num_preemptions = 0
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """A step would do something, or tell how slot loads are going."""
        slots = self.slots
        changes = self._released or slots.num_loading or slots.num_to_clear
        return bool(self._waiting or self._running or changes)

    # --- commands ---

    def add_adapter(
        self,
        adapter_id: AdapterId,
        digest: str,
        num_rows: int,
        pinned: bool = False,
        invocation: tuple[int, ...] = (),
        vocabulary_bytes: int = 0,
    ) -> None:
        """An adapter is in host memory. Raises PoolError when the pool can never hold it."""
        self.adapters.register(adapter_id, digest, num_rows, pinned, invocation, vocabulary_bytes)

    def remove_adapter(self, adapter_id: AdapterId) -> None:
        """Take no more requests for it; `take_unloaded` tells when its last one has ended."""
        self.adapters.unload(adapter_id)

    def take_unloaded(self) -> list[Unloaded]:
        """Removed adapters that nothing uses any more: their host memory can be freed."""
        unloaded = []
        for entry in self.adapters.take_unloaded():
            root = entry.content.root
            num_blocks = 0 if self.adapters.holds_root(root) else self.blocks.forget(root)
            unloaded.append(Unloaded(entry.adapter_id, entry.freed, num_blocks))
        return unloaded

    def fail_adapter(self, adapter_id: AdapterId, error: str) -> list[RequestOutput]:
        """End the requests that wait for an adapter which cannot be brought to the pool."""
        users = self.adapters.users(adapter_id)
        failed = [sequence for user in users for sequence in self._waiting.get(user, ())]
        return [self._finish(sequence, "error", error) for sequence in failed]

    def add(self, request: AddRequest) -> None:
        """Raises ValueError for a request that could never run, UnknownAdapterError."""
        needed = len(request.prompt) + min(request.sampling.max_tokens, 1)
        if not request.prompt or needed > self.config.max_model_len:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens does not go with a context length "
                f"of {self.config.max_model_len}"
            )
        if request.request_id in self._by_request:
            raise ValueError(f"request {request.request_id} is there already")
        entry, start = self._entry_for(request)
        sequence = Sequence(
            SequenceId(self._next_seq_id),
            request,
            HashChain(replace(entry.content, start=start), self.config.block_size),
            self.config.max_model_len,
            entry.adapter_id,
        )
        self._next_seq_id += 1
        self._by_request[request.request_id] = sequence
        self._enqueue(sequence)
        self.places.add_waiting(sequence.adapter_id, self._clock())

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests in whatever state they are; those that are not there are ignored."""
        sequences = [self._by_request.get(request_id) for request_id in request_ids]
        return [self._finish(seq, "abort") for seq in dict.fromkeys(sequences) if seq is not None]

    # --- a step ---

    def schedule(self) -> Step:
        now = self._clock()
        plan = StepPlan.of(self.config)
        displaced = self.places.rotate(now)
        for sequence in list(self._running.values()):
            if sequence.adapter_id in displaced:
                self._preempt(sequence)
        num_preemptions = self._num_preemptions
        self._schedule_running(plan)
        loads = self.places.grant(now)
        if self._num_preemptions == num_preemptions:  # blocks are not short
            self._admit(plan, now)
        for seq_id, chunk in plan.chunks.items():
            self._running[seq_id].launch(chunk)
        self._num_steps += bool(plan.chunks)
        released, self._released = self._released, []
        return plan.to_step(loads, released, self.slots.take_cleared())

    def apply(self, step: Step, result: StepResult) -> list[RequestOutput]:
        """Take in what the runner reports of the oldest step; returns what there is to send."""
        for slot in result.loaded:
            self.slots.loaded(slot)
        outputs = []
        for slot, error in result.load_errors.items():
            adapter_id = self.places.load_failed(slot, self._clock())
            outputs += self.fail_adapter(adapter_id, error)
        sampled_by_id = {sampled.seq_id: sampled for sampled in result.sampled}
        for chunk in step.sequences:
            sequence = self._running.get(chunk.seq_id)
            if sequence is None or not sequence.land(chunk):
                continue
            scores = result.prompt_logprobs.get(chunk.seq_id, [])
            output = self._advance(sequence, chunk, sampled_by_id.get(chunk.seq_id), scores)
            if output is not None:
                outputs.append(output)
        return outputs

    # --- metrics ---

    def stats(self) -> EngineStats:
        """All but `slot_load_seconds`, which the loop collects."""
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._by_request) - len(self._running),
            kv_blocks_used=self.blocks.num_used_blocks,
            kv_blocks_total=self.blocks.num_blocks,
            prefix_cache_queries=self._prefix_queries,
            prefix_cache_hits=self._prefix_hits,
            num_preemptions=self._num_preemptions,
            num_steps=self._num_steps,
            lora_rows_used=self.slots.num_used_rows,
            lora_rows_total=self.slots.num_rows,
            adapters=self.adapters.states(),
        )

    def check(self) -> None:
        """Assert that all books agree: for tests, and for when the engine is idle."""
        self.blocks.check(sequence.block_ids for sequence in self._running.values())
        self.adapters.check()
        self.places.check()

    # --- the queue ---

    def _entry_for(self, request: AddRequest) -> tuple[AdapterEntry, int]:
        """Whose sequence it is, and which token is the first with the adapter."""
        if not request.blend:
            return self.adapters.entry_for(AdapterId(request.adapter_id), request.prompt)
        if len(request.blend) > self.config.max_blend:
            raise ValueError(f"a blend has at most {self.config.max_blend} adapters")
        return self.adapters.blend_for(request.blend, self.config.max_blend_rows), 0

    def _enqueue(self, sequence: Sequence) -> None:
        queue = self._waiting.setdefault(sequence.adapter_id, [])
        insort(queue, sequence, key=attrgetter("seq_id"))

    def _dequeue(self, sequence: Sequence) -> None:
        queue = self._waiting[sequence.adapter_id]
        queue.remove(sequence)
        if not queue:
            del self._waiting[sequence.adapter_id]

    # --- parts of schedule ---

    def _schedule_running(self, plan: StepPlan) -> None:
        """One token for each sequence that decodes, then chunks of running prefills."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self._running.values():
            num_tokens = sequence.num_uncomputed_tokens
            if num_tokens > 0:
                (decodes if num_tokens == 1 else prefills).append(sequence)
        by_arrival = attrgetter("seq_id")
        for sequence in [*sorted(decodes, key=by_arrival), *sorted(prefills, key=by_arrival)]:
            if plan.budget == 0:
                break
            if sequence.seq_id in self._running:  # else it was preempted just now
                self._plan_chunk(plan, sequence)

    def _make_room(self, sequence: Sequence, num_blocks: int, plan: StepPlan) -> bool:
        """Preempt the latest arrivals until so many blocks are free; False: itself was one.

        The earliest arrival is never preempted for another, so it always gets on.
        """
        while num_blocks > self.blocks.num_free_blocks:
            latest = self._running[max(self._running)]
            plan.remove(latest.seq_id)
            self._preempt(latest)
            if latest is sequence:
                return False
        return True

    def _admit(self, plan: StepPlan, now: float) -> None:
        """Start waiting sequences: those of the adapter with the least service first.

        One that lacks blocks is not passed: it would wait for ever behind smaller ones.
        """
        while plan.budget > 0 and len(self._running) < self.config.max_num_seqs:
            entry = self.places.next_to_start(now)
            if entry is None:
                return
            assert entry.slot is not None
            sequence = self._waiting[entry.adapter_id][0]
            found = []
            if sequence.reads_prefix_cache:
                found = self.blocks.lookup(sequence.chain, sequence.token_ids)
            if not self.blocks.fits(found, len(sequence.token_ids)):
                return
            self._start(sequence, found, now)
            plan.start(sequence, entry.slot)
            self._plan_chunk(plan, sequence)

    def _start(self, sequence: Sequence, found: list[BlockId], now: float) -> None:
        self.blocks.share(found)
        self._dequeue(sequence)
        self._running[sequence.seq_id] = sequence
        sequence.block_ids = found
        sequence.num_computed_tokens = len(found) * self.config.block_size
        num_new_tokens = 0
        if sequence.num_cached_tokens is None:  # not after a preemption
            sequence.num_cached_tokens = sequence.num_computed_tokens
            num_new_tokens = sequence.num_prompt_tokens - sequence.num_cached_tokens
            if sequence.reads_prefix_cache:
                self._prefix_queries += sequence.num_prompt_tokens
                self._prefix_hits += sequence.num_cached_tokens
        self.places.start(sequence.adapter_id, now, num_new_tokens)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, in its old place; what it has computed stays in the prefix cache."""
        self._stop(sequence)
        self.places.preempt(sequence.adapter_id)
        self._enqueue(sequence)
        self._num_preemptions += 1

    def _stop(self, sequence: Sequence) -> None:
        del self._running[sequence.seq_id]
        self._released.append(sequence.seq_id)
        self.blocks.release(sequence.block_ids)
        sequence.reset()

    def _plan_chunk(self, plan: StepPlan, sequence: Sequence) -> None:
        """As much of the sequence as the budget allows, if there is room for it."""
        start, num_uncomputed = sequence.num_computed_tokens, sequence.num_uncomputed_tokens
        num_tokens = plan.tokens_for(num_uncomputed)
        num_blocks = self.blocks.blocks_for(start + num_tokens) - len(sequence.block_ids)
        new_blocks: tuple[BlockId, ...] = ()
        if num_blocks > 0:
            if not self._make_room(sequence, num_blocks, plan):
                return
            new_blocks = self.blocks.allocate(num_blocks)
            sequence.block_ids.extend(new_blocks)
        samples = num_tokens == num_uncomputed and sequence.samples
        plan.add(ScheduledSequence(sequence.seq_id, start, num_tokens, new_blocks, samples))

    # --- parts of apply ---

    def _advance(
        self,
        sequence: Sequence,
        chunk: ScheduledSequence,
        sampled: Sampled | None,
        scores: list[TokenLogprob],
    ) -> RequestOutput | None:
        """Move one sequence on by its chunk, and by the token that was sampled, if any."""
        if sampled is not None and sampled.error is not None:
            self.blocks.withdraw(sequence.block_ids)  # nobody else shall read what is wrong
            return self._finish(sequence, "error", sampled.error)
        block_size = self.blocks.block_size
        first, last = chunk.start // block_size, chunk.end // block_size
        if first < last:
            self.blocks.publish(sequence.chain, sequence.token_ids, sequence.block_ids, first, last)
        if scores:
            sequence.collect_prompt_logprobs(chunk.start, scores)
        if chunk.end < len(sequence.token_ids):
            return None
        self.places.progress(sequence.adapter_id, num_tokens=int(chunk.samples))
        stop_token = None
        if chunk.samples:
            assert sampled is not None
            stop_token = sequence.append(sampled.token_id)
        else:
            sequence.finish_reason = "length"
        output = sequence.output(sampled, stop_token)
        if sequence.finish_reason is not None:
            self._end(sequence)
        return output

    def _finish(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None
    ) -> RequestOutput:
        """End it before its time."""
        sequence.finish_reason = reason
        self._end(sequence)
        return RequestOutput(sequence.request.request_id, [], finish_reason=reason, error=error)

    def _end(self, sequence: Sequence) -> None:
        del self._by_request[sequence.request.request_id]
        now = self._clock()
        if sequence.seq_id in self._running:
            self._stop(sequence)
            self.places.remove_running(sequence.adapter_id, now)
        else:
            self._dequeue(sequence)
            self.places.remove_waiting(sequence.adapter_id, now)
