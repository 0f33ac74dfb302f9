"""The scheduler, with a toy runner whose tokens show a wrong block, slot, row or prefix hit."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lorakeet.lora.adapter import AdapterId
from lorakeet.lora.slots import PoolError, Room
from lorakeet.server.engine.adapter_book import UnknownAdapterError
from lorakeet.server.engine.messages import AddRequest, SamplingParams
from lorakeet.server.engine.plan import StepPlan
from lorakeet.server.engine.scheduler_config import SchedulerConfig
from lorakeet.server.engine.step import ScheduledSequence, SequenceId, Step
from support.toy_engine import EOS, VOCAB, ToyEngine, solo

CONFIG = SchedulerConfig(
    num_blocks=64,
    block_size=4,
    max_model_len=64,
    max_num_seqs=8,
    max_num_batched_tokens=16,
    max_loras=2,
    num_slots=3,
    num_rows=8,
    max_lora_rank=4,
    adapter_wait_limit=20.0,
    adapter_quantum=10.0,
)
LONG = SamplingParams(max_tokens=40, ignore_eos=True)


def unloaded_ids(engine: ToyEngine) -> list[AdapterId]:
    return [unloaded.adapter_id for unloaded in engine.scheduler.take_unloaded()]


def replace_sampling(sampling: SamplingParams, **values: Any) -> SamplingParams:
    return msgspec.structs.replace(sampling, **values)


def prompt_of(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(vocab) for _ in range(length)]


def sound_prompt(value: int, length: int, sampling: SamplingParams = LONG) -> list[int]:
    """A prompt whose answer under the adapter has no fault and no early end."""
    for seed in range(1000):
        prompt = prompt_of(length, seed)
        request = AddRequest("", prompt, sampling, eos_token_ids=(EOS,))
        if solo(request, value, CONFIG.max_model_len).finish_reason == "length":
            return prompt
    raise AssertionError("none found")


def engine_with(
    *values: int, config: SchedulerConfig = CONFIG, depth: int = 1
) -> tuple[ToyEngine, list[AdapterId]]:
    engine = ToyEngine(config, depth=depth)
    return engine, [engine.add_adapter(value) for value in values]


def tokens_of(step: Step) -> list[int]:
    return [chunk.num_tokens for chunk in step.sequences]


def finish(engine: ToyEngine) -> None:
    """Run to the end; every request gave what it gives alone, and nothing is left."""
    engine.run()
    for request_id in engine.requests:
        engine.check_result(request_id)
    engine.check_idle()


# --- one request ---


def test_chunked_prefill_then_decode() -> None:
    engine, _ = engine_with()
    engine.add("r", sound_prompt(0, 37), sampling=LONG)
    steps = [engine.step() for _ in range(5)]
    assert [tokens_of(step) for step in steps] == [[16], [16], [5], [1], [1]]
    assert [step.sequences[0].samples for step in steps] == [False, False, True, True, True]
    finish(engine)
    assert len(engine.results["r"].token_ids) == 64 - 37


@pytest.mark.parametrize("budget", [1, 2, 7, 16, 64])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 33, 63])
def test_any_chunking_gives_the_same(budget: int, length: int) -> None:
    """B10: chunk borders anywhere, mixed with the base and another adapter."""
    config = replace(CONFIG, max_num_batched_tokens=budget)
    engine, (a, b) = engine_with(5, 11, config=config)
    for name, adapter_id in (("base", 0), ("a", a), ("b", b)):
        engine.add(name, prompt_of(length, seed=length), adapter_id)
    finish(engine)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=7),
        SamplingParams(max_tokens=50),
        SamplingParams(max_tokens=50, ignore_eos=True),
        SamplingParams(max_tokens=50, stop_token_ids=tuple(range(20, 40))),
        SamplingParams(max_tokens=50, min_tokens=9, stop_token_ids=tuple(range(20, 40))),
        SamplingParams(max_tokens=50, min_tokens=50),
        SamplingParams(max_tokens=0),
        SamplingParams(max_tokens=0, prompt_logprobs=0),
        SamplingParams(max_tokens=3, prompt_logprobs=2),
    ],
)
def test_endings(sampling: SamplingParams) -> None:
    engine, _ = engine_with()
    for seed in range(20):
        engine.add(f"r{seed}", prompt_of(10 + seed, seed), sampling=sampling)
    finish(engine)


def test_every_reason_to_end_is_met() -> None:
    """The oracle's cases are not all alike: EOS, stop token, both lengths, a fault."""
    reasons = set()
    for seed in range(400):
        request = AddRequest(
            "",
            prompt_of(10, seed),
            SamplingParams(max_tokens=50, stop_token_ids=(9,)),
            eos_token_ids=(EOS,),
        )
        result = solo(request, 0, 40)
        reasons.add((result.finish_reason, result.stop_token, len(result.token_ids) == 30))
    assert {("stop", EOS, False), ("stop", 9, False), ("length", None, True)} <= reasons
    assert ("error", None, False) in reasons


def test_stop_token_is_reported_and_eos_wins_over_length() -> None:
    engine, _ = engine_with()
    request = next(
        prompt
        for prompt in (prompt_of(6, seed) for seed in range(1000))
        if solo(AddRequest("", prompt, SamplingParams(), eos_token_ids=(EOS,)), 0, 64).stop_token
        == EOS
    )
    expected = solo(AddRequest("", request, SamplingParams(), eos_token_ids=(EOS,)), 0, 64)
    count = len(expected.token_ids)
    engine.add("exact", request, sampling=SamplingParams(max_tokens=count))
    engine.add("short", request, sampling=SamplingParams(max_tokens=max(count - 1, 0)))
    finish(engine)
    assert (engine.results["exact"].finish_reason, engine.results["exact"].stop_token) == (
        "stop",
        EOS,
    )
    assert engine.results["short"].finish_reason == "length"


def test_scoring_only_samples_nothing() -> None:
    engine, _ = engine_with()
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=0)
    engine.add("r", prompt_of(64), sampling=sampling)
    steps = [engine.step() for _ in range(4)]
    assert not any(chunk.samples for step in steps for chunk in step.sequences)
    finish(engine)
    scores = engine.results["r"].prompt_scores
    assert scores is not None
    assert (scores[0], len(scores)) == (None, 64)


@pytest.mark.parametrize(("length", "max_tokens"), [(0, 5), (64, 1), (65, 0), (65, 5)])
def test_requests_that_can_never_run_are_refused(length: int, max_tokens: int) -> None:
    engine, _ = engine_with()
    with pytest.raises(ValueError, match="context length"):
        engine.add("r", prompt_of(length), sampling=SamplingParams(max_tokens=max_tokens))
    engine.check_idle()


def test_unknown_adapter_and_double_request_are_refused() -> None:
    engine, _ = engine_with()
    with pytest.raises(UnknownAdapterError):
        engine.add("r", [1, 2], adapter_id=7)
    engine.add("r", [1, 2])
    with pytest.raises(ValueError, match="already"):
        engine.add("r", [1, 2])
    finish(engine)


def test_limits_that_no_sequence_fits_in_are_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        replace(CONFIG, num_blocks=15)
    with pytest.raises(ValueError, match="room"):
        replace(CONFIG, max_num_batched_tokens=0)


# --- order and budget ---


def test_decodes_come_before_prefills() -> None:
    engine, _ = engine_with()
    engine.add("first", sound_prompt(0, 4), sampling=LONG)
    engine.step()
    engine.add("second", prompt_of(40, 1))
    step = engine.step()
    assert tokens_of(step) == [1, 15]
    assert step.sequences[0].seq_id < step.sequences[1].seq_id
    finish(engine)


def test_no_more_sequences_than_allowed() -> None:
    engine, _ = engine_with()
    for number in range(20):
        engine.add(f"r{number}", prompt_of(3, number))
    engine.step()
    assert engine.scheduler.stats().num_running <= CONFIG.max_num_seqs
    finish(engine)


# --- prefix cache ---


def test_cache_is_per_adapter_and_per_content() -> None:
    """B01: second visit hits, first visit to another adapter does not."""
    engine, (a, b) = engine_with(5, 11)
    prompt = prompt_of(21, 3)
    for visit, expected in ((0, 0), (1, 20)):
        for name, adapter_id in (("base", 0), ("a", a), ("b", b)):
            engine.add(f"{name}{visit}", prompt, adapter_id)
            engine.run()
            assert engine.results[f"{name}{visit}"].cached_tokens == expected
    finish(engine)


def test_a_new_version_never_meets_old_cache_and_an_equal_one_shares_it() -> None:
    """B02: another content is another root; the same bytes under another name are one."""
    engine, (old,) = engine_with(5)
    prompt = prompt_of(21, 3)
    twin, changed = engine.add_adapter(5), engine.add_adapter(6)
    for name, adapter_id, cached in (("old", old, 0), ("changed", changed, 0), ("twin", twin, 20)):
        engine.add(name, prompt, adapter_id)
        engine.run()
        assert engine.results[name].cached_tokens == cached
    finish(engine)


def test_cache_of_an_unloaded_adapter_is_forgotten_unless_a_twin_lives() -> None:
    engine, (a,) = engine_with(5)
    twin = engine.add_adapter(5)
    engine.add("r", prompt_of(21, 3), a)
    engine.run()
    engine.scheduler.remove_adapter(a)
    assert unloaded_ids(engine) == [a]
    assert engine.scheduler.blocks.num_cached_blocks > 0
    engine.scheduler.remove_adapter(twin)
    assert unloaded_ids(engine) == [twin]
    assert engine.scheduler.blocks.num_cached_blocks == 0
    finish(engine)


def test_prompt_logprobs_do_not_read_the_cache() -> None:
    engine, _ = engine_with()
    sampling = SamplingParams(prompt_logprobs=0)
    for name in ("first", "second"):
        engine.add(name, prompt_of(21, 3), sampling=sampling)
        engine.run()
        assert engine.results[name].cached_tokens == 0
    finish(engine)


def test_a_conversation_hits_its_own_answers() -> None:
    engine, _ = engine_with()
    engine.add("turn1", sound_prompt(0, 9, SamplingParams()))
    engine.run()
    longer = [*engine.requests["turn1"].prompt, *engine.results["turn1"].token_ids, 5]
    engine.add("turn2", longer)
    finish(engine)
    assert engine.results["turn2"].cached_tokens == 24


def test_faulty_content_is_not_shared() -> None:
    """A sequence that ended with an error leaves nothing in the prefix cache."""
    engine, _ = engine_with()
    prompt = next(
        prompt
        for prompt in (prompt_of(20, seed) for seed in range(1000))
        if solo(AddRequest("", prompt, LONG, eos_token_ids=(EOS,)), 0, 64).error
    )
    engine.add("neighbour", sound_prompt(0, 6), sampling=LONG)
    engine.add("faulty", prompt, sampling=LONG)
    engine.run()
    assert engine.results["faulty"].finish_reason == "error"
    engine.add("again", prompt, sampling=LONG)
    finish(engine)
    assert engine.results["again"].cached_tokens in (0, None)


# --- adapters ---


def test_base_and_resident_adapters_pass_one_that_waits() -> None:
    """C09: queue [A running, B, base, A]: nobody runnable stands behind B."""
    engine, (a, b) = engine_with(5, 11, config=replace(CONFIG, max_loras=1))
    engine.add("a", sound_prompt(5, 4), a, LONG)
    engine.step()
    engine.step()
    engine.add("b", prompt_of(4), b)
    engine.add("base", prompt_of(4))
    engine.add("a2", prompt_of(4), a)
    step = engine.step()
    assert {new.slot for new in step.new} == {0, 1}
    assert len(step.new) == 2
    finish(engine)


@pytest.mark.parametrize("depth", [1, 2])
def test_bounded_wait(depth: int) -> None:
    """C09: one place, a never-ending stream of A; B's first token comes within the bound."""
    config = replace(CONFIG, max_loras=1)
    engine, (a, b) = engine_with(5, 11, config=config, depth=depth)
    waits = {}
    for number in range(150):
        engine.add(f"a{number}", prompt_of(4, number), a, SamplingParams(max_tokens=12))
        if number % 50 == 5:
            engine.add(f"b{number}", sound_prompt(11, 4), b, LONG)
            waits[f"b{number}"] = engine.now
        engine.step()
        for name, since in list(waits.items()):
            if engine.results[name].token_ids:
                assert engine.now - since <= config.adapter_wait_limit + 1 + 2 * depth
                del waits[name]
    assert not waits
    assert engine.scheduler.stats().num_preemptions > 0
    finish(engine)


def test_many_adapters_take_turns_on_one_place() -> None:
    """Each waits at most the limit and then one quantum for each adapter before it."""
    config = replace(CONFIG, max_loras=1, adapter_wait_limit=5.0, adapter_quantum=4.0)
    values = [5, 11, 20, 33]
    engine, ids = engine_with(*values, config=config)
    for value, adapter_id in zip(values, ids, strict=True):
        engine.add(f"r{adapter_id}", sound_prompt(value, 4), adapter_id, LONG)
    last_progress = dict.fromkeys(engine.requests, 0.0)
    counts = dict.fromkeys(engine.requests, 0)
    while engine.scheduler.has_work:
        engine.step()
        for name, result in engine.results.items():
            if len(result.token_ids) > counts[name] or result.finish_reason:
                counts[name], last_progress[name] = len(result.token_ids), engine.now
            assert engine.now - last_progress[name] <= 5 + 4 * (4 + 3)
    finish(engine)


def test_an_adapter_is_not_displaced_before_its_quantum() -> None:
    config = replace(CONFIG, max_loras=1, adapter_wait_limit=0.0, adapter_quantum=10.0)
    engine, (a, b) = engine_with(5, 11, config=config)
    engine.add("a", sound_prompt(5, 4), a, LONG)
    engine.add("b", sound_prompt(11, 4), b, LONG)
    steps = [engine.step() for _ in range(14)]
    starts = [index for index, step in enumerate(steps) if step.new]
    assert len(starts) == 2
    assert starts[1] - starts[0] >= 10
    finish(engine)


def test_a_large_adapter_is_not_starved_of_rows_by_small_ones() -> None:
    config = replace(CONFIG, max_loras=4, num_slots=9, num_rows=4)
    engine, small = engine_with(5, 11, 20, 33, config=config)
    large = engine.add_adapter(44, rank=4)
    since = 0.0
    for number in range(120):
        adapter_id = small[number % 4]
        engine.add(f"s{number}", prompt_of(4, number), adapter_id, SamplingParams(max_tokens=9))
        if number == 10:
            engine.add("large", sound_prompt(44, 4), large, LONG)
            since = engine.now
        engine.step()
        if number > 10 and engine.results["large"].token_ids:
            break
    assert engine.now - since <= config.adapter_wait_limit + config.adapter_quantum + 3
    finish(engine)


def test_rows_freed_for_a_large_adapter_are_not_taken_by_those_behind_it() -> None:
    config = replace(CONFIG, max_loras=4, num_slots=9, num_rows=4, adapter_wait_limit=3.0)
    engine, small = engine_with(5, 11, 20, 33, 44, 46, config=config)
    large = engine.add_adapter(47, rank=4)
    for value, adapter_id in zip((5, 11, 20, 33), small, strict=False):
        engine.add(f"s{adapter_id}", sound_prompt(value, 4), adapter_id, LONG)
        engine.step()
        engine.step()
    engine.add("large", sound_prompt(47, 4), large, LONG)
    for value, adapter_id in zip((44, 46), small[4:], strict=True):
        engine.add(f"s{adapter_id}", sound_prompt(value, 4), adapter_id, LONG)
    since = engine.now
    while not engine.results["large"].token_ids:
        engine.step()
    assert engine.now - since <= config.adapter_wait_limit + config.adapter_quantum + 3
    finish(engine)


def test_an_adapter_has_its_whole_turn() -> None:
    """Until the end of its turn it starts what comes; then all of it stops for who is overdue."""
    config = replace(CONFIG, max_loras=1, adapter_wait_limit=2.0, adapter_quantum=20.0)
    engine, (a, b) = engine_with(5, 11, config=config)
    engine.add("a1", sound_prompt(5, 4), a, LONG)
    engine.step()
    engine.add("b", sound_prompt(11, 4), b, LONG)
    for _ in range(5):
        engine.step()
    engine.add("a2", sound_prompt(5, 5), a, LONG)
    assert [new.seq_id for new in engine.step().new] == [2]
    while not (step := engine.step()).new:
        assert not step.released
    assert (step.released, [new.seq_id for new in step.new]) == ((0, 2), [1])
    assert 20 <= engine.now <= 23
    finish(engine)


def test_the_longest_holder_is_displaced() -> None:
    engine, (a, b, c) = engine_with(5, 11, 20, config=replace(CONFIG, adapter_wait_limit=5.0))
    engine.add("a", sound_prompt(5, 4), a, LONG)
    for _ in range(3):
        engine.step()
    engine.add("b", sound_prompt(11, 4), b, LONG)
    engine.add("c", sound_prompt(20, 4), c, LONG)
    while not (released := engine.step().released):
        pass
    assert released == (0,)
    finish(engine)


def test_slow_loads_hold_up_nobody_else() -> None:
    engine = ToyEngine(CONFIG, load_steps=lambda: 6)
    a = engine.add_adapter(5)
    engine.add("a", sound_prompt(5, 4), a, LONG)
    engine.add("base", sound_prompt(0, 4), sampling=LONG)
    for number in range(6):
        engine.step()
        assert len(engine.results["base"].token_ids) == number + 1
        assert not engine.results["a"].token_ids
    finish(engine)


def test_a_failed_slot_load_ends_that_adapters_requests_only() -> None:
    engine, (a, b) = engine_with(5, 11)
    engine.runner.failing.add(b)
    engine.add("a", sound_prompt(5, 4), a, LONG)
    for name in ("b1", "b2"):
        engine.add(name, prompt_of(4), b)
    engine.step()
    assert [engine.results[name].error for name in ("b1", "b2")] == ["copy failed"] * 2
    engine.runner.failing.clear()
    engine.add("b3", prompt_of(4), b)
    engine.run()
    for name in ("a", "b3"):
        engine.check_result(name)
    engine.check_idle()


def test_unload_waits_for_running_and_waiting_requests() -> None:
    engine, (a,) = engine_with(5, config=replace(CONFIG, max_num_seqs=1))
    engine.add("running", sound_prompt(5, 4), a, LONG)
    engine.step()
    engine.add("waiting", prompt_of(4), a)
    engine.scheduler.remove_adapter(a)
    with pytest.raises(UnknownAdapterError):
        engine.add("late", prompt_of(4), a)
    assert engine.scheduler.take_unloaded() == []
    finish(engine)
    assert a not in engine.runner.host
    assert engine.scheduler.stats().lora_rows_used == 0


@pytest.mark.parametrize("ending", ["finish", "abort waiting", "abort in flight", "abort running"])
def test_unload_after_every_kind_of_ending(ending: str) -> None:
    """C03: children of one request, one of which ends otherwise."""
    engine = ToyEngine(CONFIG, load_steps=lambda: 2)
    a = engine.add_adapter(5)
    names = [f"child{number}" for number in range(12)]
    for name in names:
        engine.add(name, sound_prompt(5, 8), a, LONG)
    if ending == "abort waiting":
        engine.abort(names)
    elif ending != "finish":
        for _ in range(4):
            engine.step()
        if ending == "abort running":
            engine.abort(names)
        else:
            engine.step(in_flight=lambda: engine.abort(names))
    engine.scheduler.remove_adapter(a)
    finish(engine)
    assert a not in engine.runner.host


def test_more_load_and_unload_cycles_than_slots() -> None:
    """C02, and the books at the end are those of the start."""
    engine, _ = engine_with()
    for number in range(30):
        adapter_id = engine.add_adapter(number + 2, rank=number % 4 + 1)
        if number % 3 == 1:
            engine.runner.failing.add(adapter_id)
        if number % 3:
            engine.add(f"r{number}", prompt_of(9, number), adapter_id, SamplingParams(max_tokens=3))
        engine.run()
        engine.scheduler.remove_adapter(adapter_id)
        engine.step()
    assert engine.runner.host == {}
    engine.check_idle()
    assert engine.scheduler.slots.available == Room(2, 8)
    assert engine.scheduler.stats().adapters == []


def test_running_adapters_keep_their_slots_while_others_come_and_go() -> None:
    """B05: two long requests on two places, many adapters loaded, asked for and unloaded."""
    engine, (a, b) = engine_with(5, 11)
    engine.add("a", sound_prompt(5, 4), a, LONG)
    engine.add("b", sound_prompt(11, 4), b, LONG)
    for number in range(15):
        other = engine.add_adapter(50 + number)
        engine.add(f"r{number}", prompt_of(4), other, SamplingParams(max_tokens=2))
        engine.step()
        engine.scheduler.remove_adapter(other)
    finish(engine)


def test_pinned_adapter_stays_resident() -> None:
    engine, ids = engine_with(5, 11, 20)
    pinned = engine.add_adapter(33, rank=2, pinned=True)
    for number, adapter_id in enumerate([pinned, *ids, *ids]):
        engine.add(f"r{number}", prompt_of(4, number), adapter_id)
        engine.run()
    tiers = {state.adapter_id: state.tier for state in engine.scheduler.stats().adapters}
    assert tiers[pinned] == "gpu"
    with pytest.raises(PoolError):
        engine.add_adapter(44, pinned=True)
    finish(engine)


# --- blocks run out ---


def test_latest_arrival_is_preempted_and_loses_nothing() -> None:
    config = replace(CONFIG, num_blocks=16, max_num_seqs=4, enable_prefix_caching=False)
    engine, _ = engine_with(config=config)
    for number in range(4):
        engine.add(f"r{number}", sound_prompt(0, 10 + number), sampling=LONG)
    released: list[int] = []
    while not engine.results["r0"].finish_reason:
        released += engine.step().released
    assert released[0] == 3
    assert 0 not in released
    assert engine.scheduler.stats().num_preemptions > 0
    finish(engine)


def test_a_preempted_sequence_keeps_its_turn() -> None:
    """Nobody who came later starts before it, though a short one would fit."""
    config = replace(CONFIG, num_blocks=16, max_num_seqs=4, enable_prefix_caching=False)
    engine, _ = engine_with(config=config)
    for number in range(4):
        engine.add(f"r{number}", sound_prompt(0, 10 + number), sampling=LONG)
    engine.add("late", [3], sampling=SamplingParams(max_tokens=1))
    started: list[int] = []
    while engine.scheduler.has_work:
        started += [new.seq_id for new in engine.step().new]
    assert started[: started.index(4)].count(3) > 1
    finish(engine)


def test_a_chunk_taken_back_gives_its_tokens_back() -> None:
    plan = StepPlan(budget=10)
    chunk = ScheduledSequence(SequenceId(1), 0, 6, (), samples=False)
    plan.add(chunk)
    assert plan.budget == 4
    plan.remove(chunk.seq_id)
    plan.remove(SequenceId(2))
    assert plan.budget == 10
    assert plan.to_step([], []) == Step()


def test_scores_survive_a_preemption() -> None:
    config = replace(CONFIG, num_blocks=16, max_num_seqs=4, max_num_batched_tokens=5)
    engine, _ = engine_with(config=config)
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, prompt_logprobs=0)
    for number in range(6):
        engine.add(f"r{number}", sound_prompt(0, 16 + number, sampling), sampling=sampling)
    finish(engine)
    assert engine.scheduler.stats().num_preemptions > 0


# --- short steps ---

SHORT = replace(CONFIG, max_num_seqs=6, short_step_tokens=6)


def test_short_prompts_fill_short_steps() -> None:
    engine, _ = engine_with(config=SHORT)
    for number, length in enumerate((4, 5, 3)):
        engine.add(f"r{number}", sound_prompt(0, length), sampling=LONG)
    assert tokens_of(engine.step()) == [4, 2]
    assert tokens_of(engine.step()) == [1, 3, 2]  # the first one's next token
    assert tokens_of(engine.step()) == [1, 1, 1]
    finish(engine)


def test_a_long_prompt_takes_all_that_a_step_may_have() -> None:
    """Also of a step that has begun with short ones."""
    engine, _ = engine_with(config=SHORT)
    for number, length in enumerate((4, 30)):
        engine.add(f"r{number}", sound_prompt(0, length), sampling=LONG)
    assert tokens_of(engine.step()) == [4, 12]
    assert tokens_of(engine.step()) == [1, 15]
    assert tokens_of(engine.step()) == [1, 3]
    finish(engine)


def test_decodes_leave_prompts_a_share_of_a_short_step_or_it_is_longer() -> None:
    config = replace(CONFIG, short_step_tokens=8)
    for num_decodes, expected in ((6, 2), (7, 6)):
        engine, _ = engine_with(config=config)
        for number in range(num_decodes):
            engine.add(f"r{number}", sound_prompt(0, 1), sampling=LONG)
        engine.step()
        engine.add("prompt", prompt_of(6, seed=2000), sampling=LONG)
        assert tokens_of(engine.step()) == [1] * num_decodes + [expected]
        finish(engine)


def test_only_the_first_prompt_makes_a_step_longer_for_its_share() -> None:
    engine, _ = engine_with(config=replace(CONFIG, short_step_tokens=8))
    for number in range(5):
        engine.add(f"r{number}", sound_prompt(0, 1), sampling=LONG)
    engine.step()
    for length in (2, 6):
        engine.add(f"prompt{length}", prompt_of(length, seed=2000 + length), sampling=LONG)
    assert tokens_of(engine.step()) == [1] * 5 + [1, 2]
    finish(engine)


def test_all_decodes_are_in_a_short_step() -> None:
    engine, _ = engine_with(config=replace(CONFIG, short_step_tokens=3))
    for number in range(8):
        engine.add(f"r{number}", sound_prompt(0, 1), sampling=LONG)
    for _ in range(5):
        assert tokens_of(engine.step()) == [1] * 8
    finish(engine)


def test_an_adapter_with_a_vocabulary_has_short_steps_as_others_have() -> None:
    config = replace(SHORT, vocabulary_bytes=10)
    for vocabulary_bytes in (0, 5):
        engine, _ = engine_with(config=config)
        adapter_id = engine.add_adapter(3, vocabulary_bytes=vocabulary_bytes)
        engine.add("load", [5], adapter_id, sampling=SamplingParams(max_tokens=1))
        finish(engine)
        for number in range(2):
            engine.add(f"r{number}", prompt_of(4, seed=1000 + number), adapter_id, sampling=LONG)
        assert tokens_of(engine.step()) == [4, 2]
        finish(engine)


def test_a_short_step_has_no_more_than_a_step_may_have() -> None:
    config = replace(CONFIG, short_step_tokens=100)
    engine, _ = engine_with(config=config)
    engine.add("r", sound_prompt(0, 20), sampling=LONG)
    assert tokens_of(engine.step()) == [16]
    finish(engine)


# --- aborts ---


def test_abort_between_schedule_and_apply_frees_at_once() -> None:
    """The device runs steps in order: who gets the blocks next writes to them later."""
    engine, _ = engine_with()
    engine.add("r", sound_prompt(0, 20), sampling=LONG)
    engine.add("other", sound_prompt(0, 5), sampling=LONG)

    def abort() -> None:
        engine.abort(["r", "r", "nobody"])
        assert engine.results["r"].finish_reason == "abort"
        assert engine.scheduler.stats().kv_blocks_used == 0
        engine.scheduler.check()

    engine.step(in_flight=abort)
    assert engine.scheduler.blocks.num_cached_blocks == 0
    step = engine.step()
    assert step.released == (0,)
    engine.abort(["other"])
    finish(engine)


def test_abort_while_the_slot_is_loading() -> None:
    engine = ToyEngine(CONFIG, load_steps=lambda: 5)
    a = engine.add_adapter(5)
    engine.add("a", prompt_of(4), a)
    engine.step()
    engine.abort(["a"])
    assert engine.scheduler.has_work
    finish(engine)
    assert engine.scheduler.slots.available == Room(2, 8)


# --- two steps in flight ---


def test_the_next_step_is_scheduled_before_the_last_one_is_applied() -> None:
    engine, _ = engine_with(depth=2)
    engine.add("r", sound_prompt(0, 37), sampling=LONG)
    steps = [engine.step() for _ in range(5)]
    assert [tokens_of(step) for step in steps] == [[16], [16], [5], [1], [1]]
    assert len(engine.results["r"].token_ids) == 2  # of three that are sampled
    finish(engine)
    assert len(engine.results["r"].token_ids) == 64 - 37


def test_length_ends_a_sequence_without_a_token_too_many() -> None:
    engine, _ = engine_with(depth=2)
    engine.add("r", sound_prompt(0, 8), sampling=SamplingParams(max_tokens=5, ignore_eos=True))
    engine.add("scored", prompt_of(8), sampling=SamplingParams(max_tokens=0))
    steps = [step for step in (engine.step() for _ in range(9)) if step.sequences]
    assert [tokens_of(step) for step in steps] == [[8, 8], [1], [1], [1], [1]]
    finish(engine)


def test_what_is_computed_past_a_stop_is_dropped_and_never_shared() -> None:
    engine, _ = engine_with(depth=2, config=replace(CONFIG, block_size=1))
    prompt = sound_prompt(0, 6)
    request = AddRequest("", prompt, LONG, eos_token_ids=(EOS,))
    third = solo(request, 0, CONFIG.max_model_len).token_ids[2]
    stop = replace_sampling(LONG, stop_token_ids=(third,))
    engine.add("r", prompt, sampling=stop)
    chunks = [chunk for _ in range(8) for chunk in engine.step().sequences]
    expected = engine.expected("r").token_ids
    assert len(chunks) == len(expected) + 1
    # prompt and answer, less the last token: the extra step would have computed that
    assert engine.scheduler.blocks.num_cached_blocks == len(prompt) + len(expected) - 1
    finish(engine)


@pytest.mark.parametrize("depth", [2, 3])
def test_penalties_never_hold_a_step_up(depth: int) -> None:
    """Their tokens are counted on the device, so any number of them may be in flight."""
    engine, _ = engine_with(depth=depth)
    for number, penalty in enumerate((0.0, 0.5, 0.0)):
        sampling = replace_sampling(LONG, frequency_penalty=penalty, max_tokens=10)
        engine.add(str(number), sound_prompt(0, 4 + number), sampling=sampling)
    most, steps = 0, []
    for _ in range(60):
        steps.append(engine.step())
        most = max(most, len(engine.flying))
    assert [len(step.sequences) for step in steps[:10]] == [3] * 10
    assert not any(step.sequences for step in steps[10:])
    assert most == depth - 1  # counted after the oldest one is applied
    finish(engine)


def test_a_preempted_sequence_gives_up_what_is_in_flight() -> None:
    config = replace(CONFIG, num_blocks=16, max_num_seqs=4, enable_prefix_caching=False)
    engine, _ = engine_with(config=config, depth=2)
    for number in range(4):
        engine.add(f"r{number}", sound_prompt(0, 10 + number), sampling=LONG)
    given_up = 0
    while engine.scheduler.has_work:
        before = [chunk.seq_id for step, _ in engine.flying for chunk in step.sequences]
        given_up += len(set(before) & set(engine.step().released))
    assert given_up > 0
    finish(engine)


# --- random workloads against the oracle ---


class Workload:
    """Requests, aborts and unloads as they come, from one random generator."""

    def __init__(self, seed: int, depth: int = 1) -> None:
        self.random = generator = random.Random(seed)
        block_size = generator.choice([1, 2, 4, 7])
        max_model_len = generator.randint(12, 40)
        num_blocks = -(-max_model_len // block_size) + generator.choice([0, 1, 5, 30])
        max_rank = generator.randint(1, 4)
        num_rows = max_rank + generator.randint(0, 6)
        max_blend = generator.choice([0, 2, 3])
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=generator.randint(1, 8),
            max_num_batched_tokens=generator.choice([1, 3, 8, 20]),
            max_loras=generator.randint(1, 3),
            num_slots=generator.randint(2, 5) + max_blend,
            num_rows=num_rows,
            max_lora_rank=max_rank,
            max_blend=max_blend,
            max_blend_rows=min(num_rows, 2 * max_rank),
            enable_prefix_caching=generator.random() < 0.8,
            short_step_tokens=generator.choice([None, 4, 12]),
            adapter_wait_limit=generator.choice([0.0, 5.0, 30.0]),
            adapter_quantum=generator.choice([1.0, 5.0, 20.0]),
        )
        slowest = generator.choice([0, 0, 3])
        self.engine = ToyEngine(
            config, load_steps=lambda: generator.randint(0, slowest), depth=depth
        )
        self.prefix = prompt_of(max_model_len, seed)
        self.live: list[AdapterId] = [AdapterId(0)]
        for _ in range(generator.randint(1, 6)):
            self.load()

    def load(self) -> None:
        value = self.random.choice([3, 8, 21, 34, 55, 60])  # some are twins
        rank = self.random.randint(1, self.engine.config.max_lora_rank)
        try:
            pinned = self.random.random() < 0.1
            invocation = self.random.choice([(), (), (), (2,), (1, 3)])
            self.live.append(self.engine.add_adapter(value, rank, pinned, invocation))
        except PoolError:
            assert pinned

    def unload(self) -> None:
        if len(self.live) > 1:
            adapter_id = self.live.pop(self.random.randrange(1, len(self.live)))
            self.engine.scheduler.remove_adapter(adapter_id)

    def ask(self) -> None:
        draw = self.random
        max_model_len = self.engine.config.max_model_len
        length = draw.randint(1, max_model_len - 1)
        shared = draw.randint(0, length) if draw.random() < 0.7 else 0
        prompt = self.prefix[:shared] + prompt_of(length - shared, draw.randrange(50), 5)
        sampling = SamplingParams(
            max_tokens=draw.choice([0, 1, 5, 20]),
            min_tokens=draw.choice([0, 0, 4]),
            ignore_eos=draw.random() < 0.3,
            stop_token_ids=draw.choice([(), (7, 8, 9)]),
            logprobs=draw.choice([None, 0]),
            presence_penalty=draw.choice([0.0, 0.0, 0.0, 0.0, 0.5]),
            prompt_logprobs=draw.choice([None, None, None, 0]),
        )
        name = f"r{len(self.engine.requests)}"
        blend = self.blend() if draw.random() < 0.3 else ()
        if blend:
            self.engine.add(name, prompt, 0, sampling, blend)
        else:
            self.engine.add(name, prompt, draw.choice(self.live), sampling)

    def blend(self) -> tuple[tuple[int, float], ...]:
        """Few different weights, so that the same sum is asked for again; () if none is possible"""
        config, host = self.engine.config, self.engine.runner.host
        possible = [one for one in self.live[1:] if not host[one].invocation]
        count = min(len(possible), self.random.randint(1, 3), config.max_blend)
        chosen = sorted(self.random.sample(possible, count))
        if sum(host[one].rank for one in chosen) > config.max_blend_rows:
            return ()
        return tuple((int(one), self.random.choice([-2.0, 3.0])) for one in chosen)

    def abort(self) -> None:
        unfinished = [
            name for name, result in self.engine.results.items() if not result.finish_reason
        ]
        if unfinished:
            self.engine.abort([self.random.choice(unfinished)])

    def maybe(self, action: Callable[[], None], probability: float) -> None:
        if self.random.random() < probability:
            action()

    def step(self) -> None:
        self.engine.step(in_flight=lambda: self.maybe(self.abort, 0.05))
        self.engine.scheduler.check()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(100))
def test_random_workload_equals_solo(seed: int, depth: int) -> None:
    """C08 and all the rest: budgets, distinct adapters and slots are checked by the toy runner."""
    workload = Workload(seed, depth)
    for _ in range(60):
        workload.maybe(workload.ask, 0.6)
        workload.maybe(workload.abort, 0.04)
        workload.maybe(workload.load, 0.04)
        workload.maybe(workload.unload, 0.04)
        workload.step()
    finish(workload.engine)


def test_random_workloads_reach_the_hard_cases() -> None:
    """The workloads preempt, hit the cache, load slots and abort: else they would prove little."""
    preemptions = hits = aborts = errors = 0
    for seed in range(30):
        workload = Workload(seed, depth=1 + seed % 2)
        for _ in range(60):
            workload.maybe(workload.ask, 0.6)
            workload.maybe(workload.abort, 0.04)
            workload.step()
        workload.engine.run()
        stats = workload.engine.scheduler.stats()
        preemptions += stats.num_preemptions
        hits += stats.prefix_cache_hits
        results = workload.engine.results.values()
        aborts += sum(result.finish_reason == "abort" for result in results)
        errors += sum(result.finish_reason == "error" for result in results)
    assert min(preemptions, hits, aborts, errors) > 20


def test_a_wrong_prefix_hit_would_show() -> None:
    """The toy engine can see what it is there for: with one root for all, tokens are wrong."""
    engine, (a,) = engine_with(5)
    entries = engine.scheduler.adapters.entries
    entries[a].content = entries[AdapterId(0)].content
    engine.add("base", prompt_of(20))
    engine.run()
    engine.add("a", prompt_of(20), a)
    engine.run()
    with pytest.raises(AssertionError):
        engine.check_result("a")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 2))
def test_every_request_ends_once_after_mass_abort(seed: int, depth: int) -> None:
    workload = Workload(seed, depth)
    for _ in range(15):
        workload.ask()
        workload.step()
    names = list(workload.engine.requests)
    workload.engine.step(in_flight=lambda: workload.engine.abort(names))
    finish(workload.engine)
    assert all(result.finish_reason for result in workload.engine.results.values())


class SchedulerMachine(RuleBasedStateMachine):
    """All commands in any order, also between schedule and apply; up to three steps in flight."""

    workload: Workload
    engine: ToyEngine

    @initialize(seed=st.integers(0, 10**6), depth=st.integers(1, 3))
    def start(self, seed: int, depth: int) -> None:
        self.workload = Workload(seed, depth)
        self.engine = self.workload.engine

    @rule(seed=st.integers(0, 10**6), count=st.integers(1, 3))
    def ask(self, seed: int, count: int) -> None:
        self.workload.random.seed(seed)
        for _ in range(count):
            self.workload.ask()

    @rule()
    def abort(self) -> None:
        self.workload.abort()

    @rule()
    def load(self) -> None:
        self.workload.load()

    @rule()
    def unload(self) -> None:
        self.workload.unload()

    @rule()
    def swap(self) -> None:
        """A new version takes the place of an old one, whose requests go on."""
        self.workload.load()
        self.workload.unload()

    @rule()
    def take_unloaded(self) -> None:
        self.engine.take_unloaded()

    @precondition(lambda self: len(self.engine.flying) < self.engine.depth)
    @rule()
    def schedule(self) -> None:
        self.engine.schedule()

    @precondition(lambda self: self.engine.flying)
    @rule(seconds=st.sampled_from([0, 1, 10]))
    def apply(self, seconds: int) -> None:
        self.engine.apply()
        self.engine.now += seconds

    @invariant()
    def books_agree(self) -> None:
        self.engine.scheduler.check()

    def teardown(self) -> None:
        while self.engine.flying:
            self.apply(0)
        finish(self.engine)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
