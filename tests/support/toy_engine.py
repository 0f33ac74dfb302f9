"""A toy runner whose tokens show every mistake of the scheduler, and an engine around it.

The next token is an exact function of all tokens before it and of the adapter, worked out from a
simulated KV cache and pool: a wrong block table, prefix hit, eviction, slot or row gives another
token than `solo`, which computes one request with neither blocks nor slots.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lorakeet.lora.adapter import AdapterId, Slot
from lorakeet.server.engine.messages import (
    AddRequest,
    FinishReason,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from lorakeet.server.engine.scheduler import Scheduler
from lorakeet.server.engine.scheduler_config import SchedulerConfig
from lorakeet.server.engine.step import (
    NewSequence,
    Sampled,
    ScheduledSequence,
    SequenceId,
    SlotLoad,
    Step,
    StepResult,
)

VOCAB = 97
EOS = 1
FAULT = 13  # sampling this token is an error
MODULUS = 2**61 - 1
GARBAGE = -12345


@dataclass(frozen=True)
class ToyAdapter:
    """Adapter k adds k: to every KV entry, and to every token. A blend adds its weighted sum.

    With an `invocation` it does so from the last occurrence in the prompt on.
    """

    value: int
    rank: int = 1
    invocation: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.value}".encode()).hexdigest()


def kv_entry(context: int, token_id: int, value: int) -> int:
    return (context * 31 + token_id * 1009 + value * 65537 + 7) % MODULUS


def add_to_context(context: int, entry: int, position: int) -> int:
    return (context + entry * (position + 1)) % MODULUS


def next_token(context: int, value: int, num_generated: int, sampling: SamplingParams) -> int:
    """EOS is held back until `min_tokens` are there."""
    token_id = (context + value) % VOCAB
    return EOS + 1 if token_id == EOS and num_generated < sampling.min_tokens else token_id


@dataclass
class Collected:
    """All that came out of one request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    prompt_scores: list[float | None] | None = None
    cached_tokens: int | None = None
    error: str | None = None
    num_outputs: int = 0

    def take(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "an output after the last one"
        assert (output.cached_tokens is None) or self.num_outputs == 0
        if output.prompt_logprobs is not None:
            assert self.prompt_scores is None
            scores = output.prompt_logprobs
            self.prompt_scores = [None if score is None else score.logprob for score in scores]
        if self.num_outputs == 0:
            self.cached_tokens = output.cached_tokens
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        self.stop_token = output.stop_token
        self.error = output.error
        self.num_outputs += 1


def solo(request: AddRequest, value: int, max_model_len: int, start: int = 0) -> Collected:
    """The oracle: what the request gives when it is alone; `start`: first token with `value`."""
    sampling = request.sampling
    result = Collected()
    tokens = list(request.prompt)
    scores: list[float | None] = [None]
    context = 0
    for position in range(max_model_len):
        own = value if position >= start else 0
        context = add_to_context(context, kv_entry(context, tokens[position], own), position)
        if position + 1 < len(request.prompt):
            scores.append(float(context % 1000))
            continue
        generated = result.token_ids
        if sampling.max_tokens == 0:
            result.finish_reason = "length"
            break
        token_id = next_token(context, value, len(generated), sampling)
        if token_id == FAULT:
            result.finish_reason, result.error = "error", "fault"
            break
        tokens.append(token_id)
        generated.append(token_id)
        is_eos = token_id in request.eos_token_ids and not sampling.ignore_eos
        if (is_eos or token_id in sampling.stop_token_ids) and len(generated) > sampling.min_tokens:
            result.finish_reason, result.stop_token = "stop", token_id
            break
        if len(generated) == sampling.max_tokens or len(tokens) == max_model_len:
            result.finish_reason = "length"
            break
    # no output was sent: neither were the scores
    if sampling.prompt_logprobs is not None and (
        result.token_ids or result.finish_reason == "length"
    ):
        result.prompt_scores = scores
    return result


@dataclass
class _Known:
    new: NewSequence
    tokens: list[int]
    blocks: list[int]
    num_computed: int


class ToyRunner:
    """Executes steps on dictionaries, and asserts that every step keeps its contract.

    `load_steps()` is how many steps a slot load takes: 0, it is there with the step that asks.
    """

    def __init__(self, config: SchedulerConfig, load_steps: Callable[[], int] = lambda: 0) -> None:
        self.config = config
        self.host: dict[AdapterId, ToyAdapter] = {}
        self.failing: set[AdapterId] = set()  # their slot loads fail
        self.known: dict[SequenceId, _Known] = {}
        self._load_steps = load_steps
        self._kv = {block: [GARBAGE] * config.block_size for block in range(config.num_blocks)}
        self._rows = [GARBAGE] * config.num_rows
        # of each slot: rows and weight of each of its adapters, one unless it is a blend
        self._row_table: dict[Slot, list[tuple[tuple[int, ...], int]]] = {}
        self._parts: dict[Slot, set[Slot]] = {}
        self._loading: dict[Slot, tuple[SlotLoad, int]] = {}
        self._in_flight: deque[Step] = deque()

    def launch(self, step: Step) -> Callable[[], StepResult]:
        """As on a device, all is done in order of launch; the result is to be had in that order."""
        result = self._execute(step)
        self._in_flight.append(step)

        def wait() -> StepResult:
            assert self._in_flight.popleft() is step
            return result

        return wait

    def _execute(self, step: Step) -> StepResult:
        for seq_id in step.released:
            del self.known[seq_id]
        self._begin_loads(step)
        loaded, errors = self._end_loads()
        for new in step.new:
            assert new.seq_id not in self.known
            computed = len(new.block_ids) * self.config.block_size
            assert computed < len(new.token_ids)
            known = _Known(new, list(new.token_ids), list(new.block_ids), computed)
            self.known[new.seq_id] = known
        self._check_limits(step)
        sampled: list[Sampled] = []
        scores: dict[SequenceId, list[TokenLogprob]] = {}
        for chunk in step.sequences:
            context = self._compute(chunk, scores)
            if chunk.samples:
                sampled.append(self._sample(chunk.seq_id, context))
        return StepResult(tuple(sampled), scores, loaded, load_errors=errors)

    def value_in(self, slot: Slot) -> int:
        """What the kernels would read: the slot's rows, where each list must be one adapter's."""
        if slot == 0:
            return 0
        total = 0
        for rows, weight in self._row_table[slot]:
            values = {self._rows[row] for row in rows}
            if len(values) > 1 or GARBAGE in values:
                return GARBAGE
            total += weight * values.pop()
        return total

    def _begin_loads(self, step: Step) -> None:
        in_use = {known.new.slot for known in self.known.values()}
        in_use |= {part for slot in in_use for part in self._parts.get(slot, ())}
        for load in step.loads:
            assert 0 < load.slot < self.config.num_slots
            assert load.slot not in in_use, "a slot in use is overwritten"
            assert load.slot not in self._loading
            self._parts[load.slot] = {part.slot for part in load.parts}
            if load.parts:
                self._begin_blend(load)
            else:
                assert len(load.rows) == self.host[load.adapter_id].rank
                self._row_table[load.slot] = [(load.rows, 1)]
            for row in load.rows:
                self._rows[row] = GARBAGE
            self._loading[load.slot] = (load, self._load_steps())

    def _begin_blend(self, load: SlotLoad) -> None:
        """As on a device, the rows are those that the parts have now."""
        assert not load.rows
        table = []
        for part in load.parts:
            ((rows, weight),) = self._row_table[part.slot]
            assert (len(rows), weight) == (part.num_rows, 1)
            table.append((rows, int(part.weight)))
        assert sum(len(rows) for rows, _ in table) <= self.config.max_blend_rows
        assert len({row for rows, _ in table for row in rows}) == sum(len(r) for r, _ in table)
        self._row_table[load.slot] = table

    def _end_loads(self) -> tuple[tuple[Slot, ...], dict[Slot, str]]:
        loaded, errors = [], {}
        for slot, (load, steps) in list(self._loading.items()):
            if steps > 0:
                self._loading[slot] = (load, steps - 1)
                continue
            del self._loading[slot]
            if load.adapter_id in self.failing:
                errors[slot] = "copy failed"
                continue
            for row in load.rows:
                self._rows[row] = self.host[load.adapter_id].value
            loaded.append(slot)
        return tuple(loaded), errors

    def _check_limits(self, step: Step) -> None:
        config = self.config
        counts = [chunk.num_tokens for chunk in step.sequences]
        assert all(count > 0 for count in counts)
        assert sum(counts) == step.num_tokens <= config.max_num_batched_tokens
        assert counts[: counts.count(1)] == [1] * counts.count(1), "single tokens come first"
        assert len(self.known) <= config.max_num_seqs
        assert len({chunk.seq_id for chunk in step.sequences}) == len(counts)
        slots = {known.new.slot for known in self.known.values()} - {Slot(0)}
        assert len(slots) <= config.max_loras
        slots |= {part for slot in slots for part in self._parts[slot]}
        assert not slots & self._loading.keys(), "a slot is used before it is ready"

    def _compute(
        self, chunk: ScheduledSequence, scores: dict[SequenceId, list[TokenLogprob]]
    ) -> int:
        known = self.known[chunk.seq_id]
        size = self.config.block_size
        known.blocks += chunk.new_block_ids
        end = chunk.start + chunk.num_tokens
        assert chunk.start == known.num_computed
        assert len(known.blocks) == -(-end // size)
        asks = known.new.sampling.max_tokens > 0
        assert chunk.samples == (end == len(known.tokens) and asks)
        written = set(known.blocks[chunk.start // size :])
        for seq_id, other in self.known.items():
            assert seq_id == chunk.seq_id or not written & set(other.blocks), "a shared block"

        context = 0
        for position in range(chunk.start):
            entry = self._kv[known.blocks[position // size]][position % size]
            context = add_to_context(context, entry, position)
        wants = known.new.sampling.prompt_logprobs is not None
        for position in range(chunk.start, end):
            has_adapter = position >= known.new.adapter_start
            value = self.value_in(known.new.slot) if has_adapter else 0
            entry = kv_entry(context, known.tokens[position], value)
            self._kv[known.blocks[position // size]][position % size] = entry
            context = add_to_context(context, entry, position)
            if wants and position + 1 < known.new.num_prompt_tokens:
                score = TokenLogprob(known.tokens[position + 1], float(context % 1000), [])
                scores.setdefault(chunk.seq_id, []).append(score)
        known.num_computed = end
        return context

    def _sample(self, seq_id: SequenceId, context: int) -> Sampled:
        known = self.known[seq_id]
        num_generated = len(known.tokens) - known.new.num_prompt_tokens
        value = self.value_in(known.new.slot)
        token_id = next_token(context, value, num_generated, known.new.sampling)
        known.tokens.append(token_id)
        if token_id == FAULT:
            return Sampled(seq_id, 0, error="fault")
        return Sampled(seq_id, token_id, TokenLogprob(token_id, 0.0, []))


class ToyEngine:
    """A scheduler and a toy runner in one thread. A step takes one second of its clock.

    `depth` steps may be in flight: with 2, the next one is scheduled before the last is applied.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        load_steps: Callable[[], int] = lambda: 0,
        depth: int = 1,
    ) -> None:
        self.depth = depth
        self.flying: deque[tuple[Step, Callable[[], StepResult]]] = deque()
        self.now = 0.0
        self.config = config
        self.scheduler = Scheduler(config, clock=lambda: self.now)
        self.runner = ToyRunner(config, load_steps)
        self.requests: dict[str, AddRequest] = {}
        self.results: dict[str, Collected] = {}
        self.values: dict[str, int] = {}
        self.starts: dict[str, int] = {}
        self._next_adapter_id = 1

    def add_adapter(
        self,
        value: int,
        rank: int = 1,
        pinned: bool = False,
        invocation: tuple[int, ...] = (),
        vocabulary_bytes: int = 0,
    ) -> AdapterId:
        adapter_id = AdapterId(self._next_adapter_id)
        self._next_adapter_id += 1
        adapter = ToyAdapter(value, rank, invocation)
        self.scheduler.add_adapter(
            adapter_id, adapter.digest, rank, pinned, invocation, vocabulary_bytes
        )
        self.runner.host[adapter_id] = adapter
        return adapter_id

    def add(
        self,
        request_id: str,
        prompt: list[int],
        adapter_id: int = 0,
        sampling: SamplingParams | None = None,
        blend: tuple[tuple[int, float], ...] = (),
    ) -> None:
        sampling = sampling or SamplingParams()
        request = AddRequest(request_id, prompt, sampling, adapter_id, (EOS,), blend)
        self.scheduler.add(request)
        self.requests[request_id] = request
        self.results[request_id] = Collected()
        self.values[request_id], self.starts[request_id] = self._effect(request)

    def _effect(self, request: AddRequest) -> tuple[int, int]:
        """What its adapters add to its tokens, and to which of them first."""
        host = self.runner.host
        if request.blend:
            return sum(int(w) * host[AdapterId(id_)].value for id_, w in request.blend), 0
        if request.adapter_id == 0:
            return 0, 0
        adapter = host[AdapterId(request.adapter_id)]
        size = len(adapter.invocation)
        starts = [
            start
            for start in range(len(request.prompt) - size + 1)
            if tuple(request.prompt[start : start + size]) == adapter.invocation
        ]
        if not size:
            return adapter.value, 0
        return (adapter.value, starts[-1]) if starts else (0, 0)

    def abort(self, request_ids: list[str]) -> None:
        self._take(self.scheduler.abort(request_ids))

    def step(self, in_flight: Callable[[], None] = lambda: None) -> Step:
        """One step; `in_flight` is called between schedule and apply."""
        step = Step()
        if self.scheduler.has_work:
            step = self.schedule()
        in_flight()
        if self.flying and not (step.sequences and len(self.flying) < self.depth):
            self.apply()
        self.now += 1
        self.take_unloaded()
        return step

    def schedule(self) -> Step:
        step = self.scheduler.schedule()
        self.flying.append((step, self.runner.launch(step)))
        return step

    def apply(self) -> None:
        """Take in the oldest step in flight."""
        step, wait = self.flying.popleft()
        self._take(self.scheduler.apply(step, wait()))

    def take_unloaded(self) -> None:
        for unloaded in self.scheduler.take_unloaded():
            del self.runner.host[unloaded.adapter_id]

    def run(self, max_steps: int = 100_000) -> int:
        """Step until there is nothing to do; returns the number of steps."""
        for count in range(max_steps):
            self.take_unloaded()
            if not (self.scheduler.has_work or self.flying):
                return count
            self.step()
        raise AssertionError("the engine does not come to an end")

    def expected(self, request_id: str) -> Collected:
        return solo(
            self.requests[request_id],
            self.values[request_id],
            self.config.max_model_len,
            self.starts[request_id],
        )

    def check_result(self, request_id: str) -> None:
        """Assert that the request ended, and exactly as it does alone (or before, if aborted)."""
        result, expected = self.results[request_id], self.expected(request_id)
        if result.finish_reason == "abort":
            assert result.token_ids == expected.token_ids[: len(result.token_ids)]
            return
        assert result.token_ids == expected.token_ids
        assert result.finish_reason == expected.finish_reason
        assert result.stop_token == expected.stop_token
        assert result.prompt_scores == expected.prompt_scores
        assert result.error == expected.error

    def check_idle(self) -> None:
        """Assert that nothing is left: sequences, blocks, slot uses, places."""
        scheduler = self.scheduler
        assert not scheduler.has_work
        assert not self.flying
        scheduler.check()
        stats = scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
        assert all(s.num_running == s.num_waiting == 0 for s in stats.adapters)
        assert not self.runner.known

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.results[output.request_id].take(output)
