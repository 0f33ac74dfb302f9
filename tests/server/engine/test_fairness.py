"""Who waits how long, in simulated time: a step of the toy engine takes a second."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import pytest

from lorakeet.lora.adapter import AdapterId
from lorakeet.server.engine.adapter_entry import base_entry
from lorakeet.server.engine.fairness import OUTPUT_TOKEN, PROMPT_TOKEN, ActiveAdapters
from lorakeet.server.engine.messages import AddRequest, SamplingParams
from lorakeet.server.engine.scheduler_config import SchedulerConfig
from support.toy_engine import VOCAB, ToyEngine, solo

CONFIG = SchedulerConfig(
    num_blocks=400,
    block_size=4,
    max_model_len=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_loras=2,
    num_slots=9,
    num_rows=8,
    max_lora_rank=1,
    adapter_wait_limit=10.0,
    adapter_quantum=10.0,
)
BASE = AdapterId(0)


class Crowd:
    """Adapters that always have requests: each has `depth` of them, and asks again at their end."""

    def __init__(self, engine: ToyEngine, seed: int = 0) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.owner: dict[str, AdapterId] = {}
        self.depth: dict[AdapterId, int] = {}
        self.max_tokens: dict[AdapterId, Callable[[], int]] = {}
        self.prompt_len: dict[AdapterId, int] = {}
        self.waits: dict[AdapterId, list[float]] = defaultdict(list)  # for a first or next turn
        self._since: dict[AdapterId, float] = {}

    def join(
        self, adapter_id: AdapterId, depth: int, max_tokens: Callable[[], int], prompt_len: int = 4
    ) -> None:
        self.depth[adapter_id] = depth
        self.max_tokens[adapter_id] = max_tokens
        self.prompt_len[adapter_id] = prompt_len

    def ask(self, adapter_id: AdapterId) -> str:
        sampling = SamplingParams(max_tokens=self.max_tokens[adapter_id](), ignore_eos=True)
        value = self.engine.runner.host[adapter_id].value if adapter_id else 0
        while True:  # until the toy has no fault on the way
            prompt = [self.random.randrange(VOCAB) for _ in range(self.prompt_len[adapter_id])]
            if not solo(AddRequest("", prompt, sampling), value, CONFIG.max_model_len).error:
                break
        name = f"r{len(self.owner)}"
        self.engine.add(name, prompt, adapter_id, sampling)
        self.owner[name] = adapter_id
        return name

    def step(self) -> None:
        open_requests = Counter(
            owner
            for name, owner in self.owner.items()
            if not self.engine.results[name].finish_reason
        )
        for adapter_id, depth in self.depth.items():
            for _ in range(depth - open_requests[adapter_id]):
                self.ask(adapter_id)
        self.engine.step()
        self._note_waits()

    def _note_waits(self) -> None:
        """An adapter waits while it has requests and none of them runs."""
        for state in self.engine.scheduler.stats().adapters:
            adapter_id = AdapterId(state.adapter_id)
            if state.num_waiting and not state.num_running:
                self._since.setdefault(adapter_id, self.engine.now)
            elif adapter_id in self._since:
                self.waits[adapter_id].append(self.engine.now - self._since.pop(adapter_id))

    def tokens(self) -> Counter[AdapterId]:
        """Generated so far, by adapter."""
        counts: Counter[AdapterId] = Counter()
        for name, owner in self.owner.items():
            counts[owner] += len(self.engine.results[name].token_ids)
        return counts


def crowd_of(num_adapters: int, config: SchedulerConfig, seed: int = 0, depth: int = 1) -> Crowd:
    engine = ToyEngine(config, depth=depth)
    crowd = Crowd(engine, seed)
    for number in range(num_adapters):
        engine.add_adapter(2 + number)
    return crowd


def check_waits(crowd: Crowd) -> None:
    """The longest wait of any adapter is at most twice the mean of all waits."""
    assert set(crowd.waits) == set(crowd.depth) - {BASE}
    assert min(len(waits) for waits in crowd.waits.values()) >= 3
    every = [wait for waits in crowd.waits.values() for wait in waits]
    assert max(every) <= 2 * mean(every)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_loras", [1, 2, 4])
@pytest.mark.parametrize("kind", ["alike", "hot and cold", "all lengths", "with the base"])
def test_four_times_more_busy_adapters_than_places(seed: int, max_loras: int, kind: str) -> None:
    num_seqs = 32 if kind == "all lengths" else 8  # else short ones wait for sequences, not places
    config = replace(
        CONFIG,
        max_loras=max_loras,
        num_slots=max_loras + 1,
        num_rows=max_loras,
        max_num_seqs=num_seqs,
    )
    crowd = crowd_of(4 * max_loras, config, seed)
    draw = crowd.random
    for number in range(1, 4 * max_loras + 1):
        if kind == "hot and cold":
            depth = 12 if number % 4 == 1 else 1
            crowd.join(AdapterId(number), depth, lambda: 30)
        elif kind == "all lengths":
            longest = draw.choice([2, 10, 50])
            count = draw.choice([1, 2, 6])
            crowd.join(AdapterId(number), count, lambda most=longest: draw.randint(1, most))  # type: ignore[misc]
        else:
            crowd.join(AdapterId(number), 2, lambda: 30)
    if kind == "with the base":
        crowd.join(BASE, 3, lambda: 20)
    for _ in range(700):
        crowd.step()
    check_waits(crowd)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_hot_adapter_starves_neither_cold_ones_nor_the_base(depth: int) -> None:
    """Its 100 requests came first; five adapters share four sequences, so that the others' first
    tokens come within two requests' time."""
    config = replace(CONFIG, max_loras=4, max_num_seqs=4)
    crowd = crowd_of(4, config, depth=depth)
    hot, *cold = [AdapterId(number) for number in range(1, 5)]
    for adapter_id in (hot, *cold, BASE):
        crowd.join(adapter_id, 0, lambda: 20)
    for _ in range(100):
        crowd.ask(hot)
    for _ in range(10):
        crowd.engine.step()
    for _ in range(5):
        names = {crowd.ask(adapter_id): crowd.engine.now for adapter_id in (*cold, BASE)}
        for _ in range(60):
            crowd.engine.step()
            for name in [name for name in names if crowd.engine.results[name].token_ids]:
                assert crowd.engine.now - names.pop(name) <= 2 * 20 + 3 + depth
        assert not names
    assert crowd.tokens()[hot] > 300  # nor did they starve it
    crowd.engine.run()
    crowd.engine.check_idle()


@pytest.mark.parametrize("max_loras", [1, 2])
def test_a_hot_adapter_starves_nobody_of_places(max_loras: int) -> None:
    """It has requests enough for ever; each cold one has a single request now and then."""
    config = replace(CONFIG, max_loras=max_loras, num_slots=max_loras + 1)
    crowd = crowd_of(5, config)
    hot, *cold = [AdapterId(number) for number in range(1, 6)]
    crowd.join(hot, 100, lambda: 30)
    for adapter_id in cold:
        crowd.join(adapter_id, 0, lambda: 8)
    asked: dict[str, float] = {}
    for turn in range(800):
        if turn % 40 == 5:
            asked |= {crowd.ask(adapter_id): crowd.engine.now for adapter_id in cold}
        crowd.step()
        for name in [name for name in asked if crowd.engine.results[name].token_ids]:
            # the limit, and a turn of everybody before it
            bound = config.adapter_wait_limit + (len(cold) + 1) * (config.adapter_quantum + 3)
            assert crowd.engine.now - asked.pop(name) <= bound
    tokens = crowd.tokens()
    assert min(tokens[adapter_id] for adapter_id in cold) >= 8 * 10
    assert tokens[hot] > 1000


def test_backlogged_adapters_get_equal_service() -> None:
    """VTC's theorem: while both have requests waiting, the difference is bounded by what can run
    at once, however many requests each has and however long they are."""
    config = replace(CONFIG, max_loras=3, max_num_seqs=6, num_slots=4)
    crowd = crowd_of(3, config)
    lengths = {1: (30, 4, 40), 2: (10, 20, 4), 3: (60, 12, 16)}  # requests, prompt, output
    for number, (depth, prompt_len, most) in lengths.items():
        crowd.join(AdapterId(number), depth, lambda most=most: most, prompt_len)  # type: ignore[misc]
    entries = crowd.engine.scheduler.adapters.entries
    bound = 2 * config.max_num_seqs * (PROMPT_TOKEN * 20 + OUTPUT_TOKEN * 40)
    for step in range(900):
        crowd.step()
        services = [entries[AdapterId(number)].account.service for number in lengths]
        if step > 10:
            assert max(services) - min(services) <= bound
    assert min(services) > 3 * bound


def test_service_is_what_was_computed() -> None:
    """Prompt tokens that came from the cache are free, and those computed again for a preemption
    are not charged twice."""
    engine = ToyEngine(replace(CONFIG, num_blocks=16, max_num_seqs=3))
    a = engine.add_adapter(5)
    prompt = [20 + n for n in range(21)]
    entry = engine.scheduler.adapters.entries[a]
    engine.add("first", prompt, a, SamplingParams(max_tokens=3, ignore_eos=True))
    engine.run()
    tokens = len(engine.results["first"].token_ids)
    assert entry.account.service == 21 * PROMPT_TOKEN + tokens * OUTPUT_TOKEN
    engine.add("second", prompt, a, SamplingParams(max_tokens=0))
    engine.run()
    assert entry.account.service == 22 * PROMPT_TOKEN + tokens * OUTPUT_TOKEN
    before = entry.account.service
    for number in range(3):
        own = [30 + number] * 15
        engine.add(f"r{number}", own, a, SamplingParams(max_tokens=40, ignore_eos=True))
    engine.run()
    assert engine.scheduler.stats().num_preemptions > 0
    generated = sum(len(engine.results[f"r{number}"].token_ids) for number in range(3))
    assert entry.account.service == before + 45 * PROMPT_TOKEN + generated * OUTPUT_TOKEN


def test_an_idle_adapter_saves_nothing_up() -> None:
    config = replace(CONFIG, max_loras=2, max_num_seqs=4, num_slots=3)
    crowd = crowd_of(2, config)
    busy, late = AdapterId(1), AdapterId(2)
    crowd.join(busy, 20, lambda: 10)
    for _ in range(300):
        crowd.step()
    crowd.join(late, 20, lambda: 10)
    before = crowd.tokens()[busy]
    for _ in range(200):
        crowd.step()
    tokens = crowd.tokens()
    assert tokens[busy] - before > 0.8 * tokens[late]


def test_counters_are_lifted_to_the_least_of_the_active_ones() -> None:
    active = ActiveAdapters()
    entries = [base_entry() for _ in range(4)]
    for number, (entry, service) in enumerate(zip(entries, (7.0, 3.0, 0.0, 9.0), strict=True)):
        entry.adapter_id, entry.account.service = AdapterId(number), service
    first, second, third, fourth = entries
    active.add(first)
    active.add(second)
    assert second.account.service == 7
    second.account.service = 12.0
    active.add(second)  # it is there already
    active.add(third)
    active.add(fourth)
    assert [entry.account.service for entry in entries] == [7, 12, 7, 9]
    for entry in (first, third, fourth, second):
        active.discard(entry)
    active.add(first)  # nobody is left: as the last one that was
    assert first.account.service == 12


def test_who_has_nothing_running_comes_first_once_it_is_overdue() -> None:
    """Though it has had much more service: it does not wait until the others have caught up."""
    crowd = crowd_of(2, replace(CONFIG, max_num_seqs=2))
    served, other = AdapterId(1), AdapterId(2)
    crowd.join(other, 10, lambda: 5)
    crowd.join(served, 0, lambda: 5)
    crowd.step()
    name = crowd.ask(served)
    crowd.engine.scheduler.adapters.entries[served].account.service = 1e9
    limit = int(CONFIG.adapter_wait_limit)
    for _ in range(limit):
        crowd.step()
    assert not crowd.engine.results[name].token_ids
    for _ in range(8):
        crowd.step()
    assert crowd.engine.results[name].token_ids


def test_a_free_place_goes_to_the_one_with_the_least_service() -> None:
    crowd = crowd_of(3, replace(CONFIG, max_loras=1, adapter_wait_limit=1000.0))
    for number in (1, 2, 3):
        crowd.join(AdapterId(number), 0, lambda: 6)
    crowd.ask(AdapterId(1))
    crowd.engine.step()
    late, early = crowd.ask(AdapterId(2)), crowd.ask(AdapterId(3))
    crowd.engine.scheduler.adapters.entries[AdapterId(2)].account.service += 500
    while not crowd.engine.results[early].finish_reason:
        crowd.engine.step()
        assert not crowd.engine.results[late].token_ids
    crowd.engine.run()


def test_the_holder_with_the_most_service_is_displaced() -> None:
    crowd = crowd_of(3, replace(CONFIG, max_num_seqs=20))
    lone, busy, third = [AdapterId(number) for number in (1, 2, 3)]
    for adapter_id in (lone, busy, third):
        crowd.join(adapter_id, 0, lambda: 50)
    for _ in range(3):
        crowd.ask(busy)
    crowd.engine.step()
    crowd.ask(lone)
    for _ in range(int(CONFIG.adapter_quantum) + 2):
        crowd.engine.step()
    crowd.ask(third)
    crowd.engine.now += 2 * CONFIG.adapter_wait_limit
    assert crowd.engine.step().released == (0, 1, 2)
    crowd.engine.run()


# --- prefetch ---


def tiers(engine: ToyEngine) -> dict[int, str]:
    return {state.adapter_id: state.tier for state in engine.scheduler.stats().adapters}


def long_request(engine: ToyEngine, name: str, adapter_id: AdapterId) -> None:
    engine.add(name, [20, 21, 22], adapter_id, SamplingParams(max_tokens=30, ignore_eos=True))


def test_who_waits_for_a_place_is_in_the_pool_when_it_gets_it() -> None:
    config = replace(CONFIG, max_loras=1, num_slots=3, adapter_wait_limit=1000.0)
    engine = ToyEngine(config, load_steps=lambda: 4)
    a, b, c = (engine.add_adapter(value) for value in (40, 41, 42))
    for name, adapter_id in (("a", a), ("b", b), ("c", c)):
        long_request(engine, name, adapter_id)
    for _ in range(8):
        engine.step()
    assert tiers(engine) == {a: "gpu", b: "gpu", c: "host"}  # two slots, and b comes first
    while not engine.results["a"].finish_reason:
        step = engine.step()
    assert not step.loads
    step = engine.step()  # b starts at once, and c is fetched into the slot of a
    assert [load.adapter_id for load in step.loads] == [c]
    assert len(step.new) == 1
    engine.run()
    for name in "abc":
        engine.check_result(name)


def test_nothing_is_fetched_over_what_runs_or_waits_in_front() -> None:
    config = replace(CONFIG, max_loras=2, num_slots=6, num_rows=6, max_lora_rank=3)
    engine = ToyEngine(config)
    a, b = engine.add_adapter(40, 1), engine.add_adapter(41, 1)
    large, small = engine.add_adapter(42, 3), engine.add_adapter(43, 3)
    late = engine.add_adapter(44, 1)
    for name, adapter_id in (("a", a), ("b", b)):
        long_request(engine, name, adapter_id)
    engine.step()
    for name, adapter_id in (("large", large), ("small", small), ("late", late)):
        long_request(engine, name, adapter_id)
    for _ in range(5):
        engine.step()
    # of four rows left, the first takes three; the second does not fit, and nobody passes it
    assert tiers(engine) == {a: "gpu", b: "gpu", large: "gpu", small: "host", late: "host"}
    engine.run()
    engine.check_idle()


def test_what_the_next_one_needs_is_not_evicted_for_those_behind_it() -> None:
    engine = ToyEngine(replace(CONFIG, max_num_seqs=20, num_slots=4, adapter_wait_limit=1000.0))
    a, b, c, d = (engine.add_adapter(value) for value in (40, 41, 42, 43))
    engine.add("early", [20, 21], c, SamplingParams(max_tokens=1))
    engine.run()
    long_request(engine, "a", a)
    long_request(engine, "b", b)
    engine.step()
    long_request(engine, "c", c)
    long_request(engine, "d", d)
    for _ in range(5):
        assert not engine.step().loads
    assert tiers(engine) == {a: "gpu", b: "gpu", c: "gpu", d: "host"}
    engine.run()
    engine.check_idle()


def test_an_abort_leaves_no_trace_of_a_prefetch() -> None:
    engine = ToyEngine(replace(CONFIG, max_loras=1, num_slots=3), load_steps=lambda: 5)
    a, b = engine.add_adapter(40), engine.add_adapter(41)
    long_request(engine, "a", a)
    long_request(engine, "b", b)
    engine.step()
    assert tiers(engine)[b] == "loading"
    engine.abort(["b"])
    engine.scheduler.remove_adapter(b)
    engine.run()
    assert b not in engine.runner.host
    engine.check_idle()


def test_a_prefetch_that_fails_ends_its_requests_only() -> None:
    engine = ToyEngine(replace(CONFIG, max_loras=1, num_slots=3))
    a, b = engine.add_adapter(40), engine.add_adapter(41)
    engine.runner.failing.add(b)
    long_request(engine, "a", a)
    long_request(engine, "b", b)
    engine.step()
    engine.step()
    assert engine.results["b"].error == "copy failed"
    assert not engine.results["a"].finish_reason
    engine.run()
    engine.check_result("a")
    engine.check_idle()


# --- blends ---


def test_a_blend_takes_one_place_and_its_adapters_stay() -> None:
    config = replace(CONFIG, max_loras=2, max_blend=3, max_blend_rows=4, num_slots=6, num_rows=6)
    engine = ToyEngine(config)
    a, b, c = (engine.add_adapter(value) for value in (3, 5, 7))
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    engine.add("ab", [20, 21], sampling=sampling, blend=((a, 2.0), (b, -1.0)))
    engine.add("c", [20, 21], c, sampling)
    engine.add("a", [20, 21], a, sampling)
    engine.step()
    step = engine.step()
    assert len(step.new) + len(step.sequences) > 0
    assert engine.scheduler.stats().num_running == 2  # places for two: the blend, and c
    assert engine.scheduler.slots.uses(a) == 1
    engine.run()
    for name in ("ab", "c", "a"):
        engine.check_result(name)
    engine.check_idle()
    assert engine.scheduler.slots.uses(a) == engine.scheduler.slots.uses(b) == 0
    assert len(engine.scheduler.adapters.entries) == 4  # the blend is forgotten


def test_a_blend_that_comes_back_before_its_old_slot_is_free() -> None:
    """Its adapters' copies are done at once, its own table takes long; then all requests go."""
    config = replace(CONFIG, max_loras=1, max_blend=2, max_blend_rows=2, num_slots=6, num_rows=2)
    steps = iter([0, 0, 9])
    engine = ToyEngine(config, load_steps=lambda: next(steps, 0))
    a, b, c = (engine.add_adapter(value) for value in (3, 5, 7))
    blend = ((int(a), 2.0), (int(b), 3.0))
    engine.add("gone", [20, 21], blend=blend)
    engine.step()
    engine.abort(["gone"])
    engine.add("c", [20, 21], c, SamplingParams(max_tokens=2))  # takes a row of theirs
    engine.step()
    engine.add("back", [20, 21], blend=blend)
    engine.run()
    for name in ("c", "back"):
        engine.check_result(name)
    engine.check_idle()


def test_nobody_is_displaced_for_what_two_blends_share() -> None:
    config = replace(CONFIG, max_loras=4, max_blend=2, max_blend_rows=2, num_slots=6, num_rows=3)
    engine = ToyEngine(config)
    a, b, c = (engine.add_adapter(value) for value in (40, 41, 7))
    long_request(engine, "a", a)
    long_request(engine, "b", b)
    for _ in range(int(config.adapter_quantum) + 2):
        engine.step()
    for name, weight in (("two", 2.0), ("three", 3.0)):
        engine.add(name, [20, 21], blend=((int(c), weight),))
    engine.now += 100
    assert not engine.step().released  # one row and three slots are free, and that is enough
    assert engine.scheduler.stats().num_preemptions == 0
    engine.run()
    for name in ("a", "b", "two", "three"):
        engine.check_result(name)
    engine.check_idle()


def test_a_blend_whose_adapter_fails_ends_and_its_other_adapters_go_on() -> None:
    config = replace(CONFIG, max_loras=2, max_blend=3, max_blend_rows=4, num_slots=6, num_rows=6)
    engine = ToyEngine(config)
    a, b = engine.add_adapter(3), engine.add_adapter(5)
    engine.runner.failing.add(b)
    long_request(engine, "a", a)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    for name in ("blend", "again"):
        engine.add(name, [20, 21], sampling=sampling, blend=((a, 2.0), (b, 3.0)))
    engine.step()
    engine.step()
    assert [engine.results[name].error for name in ("blend", "again")] == ["copy failed"] * 2
    engine.runner.failing.clear()
    engine.add("later", [20, 21], sampling=sampling, blend=((a, 2.0), (b, 3.0)))
    engine.run()
    for name in ("a", "later"):
        engine.check_result(name)
    engine.check_idle()


def test_an_adapter_is_unloaded_after_the_blends_that_wait_for_it() -> None:
    config = replace(CONFIG, max_loras=1, max_blend=2, max_blend_rows=2, num_slots=4, num_rows=3)
    engine = ToyEngine(config)
    a, b, c = (engine.add_adapter(value) for value in (3, 5, 7))
    long_request(engine, "c", c)
    engine.step()
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    engine.add("blend", [20, 21], sampling=sampling, blend=((a, 2.0), (b, 3.0)))
    engine.scheduler.remove_adapter(a)
    assert engine.scheduler.take_unloaded() == []
    engine.run()
    engine.check_result("blend")
    assert set(engine.runner.host) == {b, c}
    engine.check_idle()


@pytest.mark.parametrize(
    ("blend", "message"),
    [
        (((1, 1.0), (1, 2.0)), "different"),
        (((0, 1.0), (1, 2.0)), "different"),
        (((1, 1.0), (2, 1.0), (3, 1.0)), "at most 2"),
        (((3, 1.0), (4, 1.0)), "rows"),
    ],
)
def test_blends_that_can_never_run_are_refused(
    blend: tuple[tuple[int, float], ...], message: str
) -> None:
    config = replace(CONFIG, max_blend=2, max_blend_rows=5, max_lora_rank=3)
    engine = ToyEngine(config)
    for rank in (1, 1, 3, 3):
        engine.add_adapter(rank, rank)
    with pytest.raises(ValueError, match=message):
        engine.add("r", [1, 2], blend=blend)
    assert len(engine.scheduler.adapters.entries) == 5
    engine.check_idle()


def test_a_blend_that_comes_again_has_its_service_still() -> None:
    """Its last request had ended. Beside two adapters that always have requests it gets a third."""
    config = replace(CONFIG, max_loras=1, num_slots=6, num_rows=8, max_blend=2, max_blend_rows=2)
    crowd = crowd_of(4, config)
    engine = crowd.engine
    for number in (3, 4):
        crowd.join(AdapterId(number), 4, lambda: 20)
    crowd.join(AdapterId(1), 0, lambda: 20)
    names: list[str] = []
    for _ in range(900):
        if not names or engine.results[names[-1]].finish_reason:
            names.append(f"blend {len(names)}")
            sampling = SamplingParams(max_tokens=20, ignore_eos=True)
            blend = ((1, float(len(names))), (2, 1.0))
            engine.add(names[-1], [1, 2, 3, 4], sampling=sampling, blend=blend)
        crowd.step()
    tokens = sum(len(engine.results[name].token_ids) for name in names)
    assert tokens <= 1.2 * min(crowd.tokens()[AdapterId(number)] for number in (3, 4))


@pytest.mark.parametrize("components", [(1,), (1, 2)])
def test_blends_of_many_weights_are_as_one_adapter(components: tuple[int, ...]) -> None:
    """Thirty of them always have a request, each a blend of its own, and so has a cold adapter: it
    is next as soon as it is overdue, and gets no less than half of what all of them get."""
    config = replace(CONFIG, num_slots=6, num_rows=8, max_blend=2, max_blend_rows=2)
    crowd = crowd_of(3, config)
    engine, cold = crowd.engine, AdapterId(3)
    crowd.join(cold, 1, lambda: 20)
    crowd.join(AdapterId(components[0]), 0, lambda: 20)
    open_blends: dict[int, str] = {}
    for step in range(600):
        for weight in range(1, 31):
            name = open_blends.get(weight)
            if name is None or engine.results[name].finish_reason:
                open_blends[weight] = name = f"blend {weight} at {step}"
                sampling = SamplingParams(max_tokens=20, ignore_eos=True)
                blend = tuple((one, float(weight)) for one in components)
                engine.add(name, [1, 2, 3, 4], sampling=sampling, blend=blend)
        crowd.step()
    assert len(crowd.waits[cold]) >= 8
    assert max(crowd.waits[cold]) <= config.adapter_wait_limit + config.adapter_quantum
    of_blends = sum(
        len(engine.results[name].token_ids) for name in engine.results if "blend" in name
    )
    assert crowd.tokens()[cold] >= 0.5 * of_blends
