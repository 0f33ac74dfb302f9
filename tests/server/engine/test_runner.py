"""The runner on tiny real models, against PEFT one prompt at a time."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from lorakeet.configs.settings import SettingsError
from lorakeet.lora.adapter import AdapterId, Slot
from lorakeet.models import sampler
from lorakeet.models.config import load_config
from lorakeet.models.sampler import SamplerOutput, SamplingBatch
from lorakeet.server.engine import memory
from lorakeet.server.engine.device_batch import DeviceRows, pack, upload_all
from lorakeet.server.engine.inputs import SequenceRows
from lorakeet.server.engine.messages import SamplingParams, TokenLogprob
from lorakeet.server.engine.step import (
    BlockId,
    NewSequence,
    ScheduledSequence,
    SequenceId,
    SlotLoad,
    Step,
)
from support.adapters import make_adapter, peft_greedy, peft_logprobs, peft_model
from support.engines import StepEngine, cpu_settings, overflowing_adapter, prompt_of
from support.models import VOCAB_SIZE, tiny_model

TOLERANCE = 1e-3
BYTES_PER_TOKEN = 2 * 3 * 2 * 16 * 4  # of KV


@dataclass(frozen=True)
class Files:
    model: Path
    adapters: tuple[Path | None, ...]  # by adapter id as the tests load them; the first is the base


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("runner")
    model = tiny_model(folder / "model")
    return Files(
        model,
        (
            None,
            make_adapter(folder / "all", model, seed=1, r=8),
            make_adapter(
                folder / "some", model, seed=2, r=3, target_modules=["q_proj", "down_proj"]
            ),
            make_adapter(
                folder / "ends", model, seed=3, target_modules=["embed_tokens", "lm_head"]
            ),
        ),
    )


def engine_with_adapters(files: Files, **settings: Any) -> StepEngine:
    engine = StepEngine(files.model, **settings)
    for path in files.adapters[1:]:
        assert path is not None
        engine.load(path)
    return engine


def check_scores(
    scores: list[TokenLogprob], expected: torch.Tensor, targets: list[int], num_top: int
) -> None:
    """Each score is PEFT's, and so are the likeliest tokens. `expected`: (len, vocab)."""
    assert [score.token_id for score in scores] == targets
    for score, row in zip(scores, expected, strict=True):
        assert score.logprob == pytest.approx(float(row[score.token_id]), abs=TOLERANCE)
        assert len(score.top) == num_top
        best = row.topk(num_top).values.tolist()
        assert [logprob for _, logprob in score.top] == pytest.approx(best, abs=TOLERANCE)
        for token_id, logprob in score.top:
            assert logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)


@pytest.mark.parametrize("max_num_batched_tokens", [1, 7, 16, 64])
def test_mixed_batch_in_any_chunks_equals_peft(files: Files, max_num_batched_tokens: int) -> None:
    engine = engine_with_adapters(files, max_num_batched_tokens=max_num_batched_tokens)
    prompts = {f"{n}-{a}": (prompt_of(n, n + a), a) for n in (1, 15, 33) for a in range(4)}
    for name, (prompt, adapter) in prompts.items():
        engine.add(name, prompt, adapter, max_tokens=5, logprobs=2, prompt_logprobs=3)
    results = engine.run()
    for name, (prompt, adapter) in prompts.items():
        path, result = files.adapters[adapter], results[name]
        assert result.token_ids == peft_greedy(files.model, path, prompt, 5)
        expected = peft_logprobs(files.model, path, prompt + result.token_ids)
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs[0] is None
        scores = [score for score in result.prompt_logprobs if score is not None]
        check_scores(scores, expected[: len(prompt) - 1], prompt[1:], 3)
        check_scores(result.logprobs, expected[len(prompt) - 1 : -1], result.token_ids, 2)


def test_prompt_scores_in_small_chunks_of_logits(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorakeet.server.engine.runner._SCORED_LOGITS", 3 * VOCAB_SIZE)
    engine = engine_with_adapters(files, max_num_batched_tokens=16)
    prompt = prompt_of(40, 0)
    for adapter in range(4):
        engine.add(str(adapter), prompt, adapter, max_tokens=0, prompt_logprobs=0)
    results = engine.run()
    for adapter in range(4):
        scores = results[str(adapter)].prompt_logprobs
        assert scores is not None
        assert results[str(adapter)].token_ids == []
        expected = peft_logprobs(files.model, files.adapters[adapter], prompt)[:-1]
        check_scores([s for s in scores if s is not None], expected, prompt[1:], 0)


def test_prefix_hits_change_nothing_and_never_cross_adapters(files: Files) -> None:
    engine = engine_with_adapters(files)
    prompt = prompt_of(22, 5)
    for turn in range(2):
        for adapter in (0, 1, 2, 3):
            name = f"{turn}-{adapter}"
            engine.add(name, prompt, adapter)
            result = engine.run()[name]
            assert result.cached_tokens == (20 if turn else 0)
            assert result.token_ids == peft_greedy(files.model, files.adapters[adapter], prompt, 8)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preempted_sequences_end_as_if_alone(files: Files, depth: int) -> None:
    """With steps in flight too, whose tokens only the device knows."""

    def run(kv_tokens: int, names: list[str]) -> StepEngine:
        engine = engine_with_adapters(files, cpu_kv_memory=kv_tokens * BYTES_PER_TOKEN, depth=depth)
        for index, name in enumerate(names):
            # seeded, unseeded greedy and penalised rows, in the same batch
            sampling = [
                {"seed": index, "temperature": 1.0},
                {},
                {"frequency_penalty": 0.5, "repetition_penalty": 1.3},
            ][index % 3]
            prompt = prompt_of(9 + index, index)
            engine.add(name, prompt, index % 4, max_tokens=20, logprobs=0, **sampling)
        engine.run()
        return engine

    names = [str(index) for index in range(7)]
    tight, roomy = run(64, names), run(4096, names)
    assert tight.scheduler.stats().num_preemptions > 0
    assert roomy.scheduler.stats().num_preemptions == 0
    for name in names:
        assert tight.results[name].token_ids == roomy.results[name].token_ids
    for index in (1, 4):
        prompt = prompt_of(9 + index, index)
        expected = peft_greedy(files.model, files.adapters[index % 4], prompt, 20)
        assert tight.results[str(index)].token_ids == expected


def penalised_greedy(
    files: Files,
    adapter: int,
    prompt: list[int],
    num_tokens: int,
    *,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> list[int]:
    """PEFT's logits, transformers' repetition penalty, and OpenAI's formula of the other two."""
    model = peft_model(files.model, files.adapters[adapter])
    repetition = RepetitionPenaltyLogitsProcessor(repetition_penalty)
    output: list[int] = []
    for _ in range(num_tokens):
        token_ids = torch.tensor([prompt + output])
        with torch.no_grad():
            logits = repetition(token_ids, model(token_ids).logits[:, -1].float())[0]
        for token_id, count in Counter(output).items():
            logits[token_id] -= presence_penalty + frequency_penalty * count
        output.append(int(logits.argmax()))
    return output


@pytest.mark.parametrize(("kv_tokens", "preempts"), [(4096, False), (64, True)])
def test_penalised_decodes_equal_a_plain_computation(
    files: Files, kv_tokens: int, preempts: bool
) -> None:
    """With two steps in flight, as on CUDA: what was sampled last is not on the host."""
    engine = engine_with_adapters(files, cpu_kv_memory=kv_tokens * BYTES_PER_TOKEN, depth=2)
    requests: list[tuple[int, dict[str, float]]] = [  # tokens made likelier come again, at once too
        (0, {"repetition_penalty": 1.3}),
        (0, {"presence_penalty": -2.0, "frequency_penalty": 0.5}),
        (3, {"frequency_penalty": -1.0}),
        (1, {"repetition_penalty": 0.5, "presence_penalty": 0.5, "frequency_penalty": 0.3}),
        (2, {"presence_penalty": -2.0}),
        (1, {}),
    ]
    prompts = [prompt_of(9 + index, index) for index in range(len(requests))]
    for index, (adapter, penalties) in enumerate(requests):
        engine.add(str(index), prompts[index], adapter, max_tokens=20, **penalties)
    results = engine.run()
    assert (engine.scheduler.stats().num_preemptions > 0) == preempts
    for index, (adapter, penalties) in enumerate(requests):
        expected = penalised_greedy(files, adapter, prompts[index], 20, **penalties)
        assert results[str(index)].token_ids == expected
        free = peft_greedy(files.model, files.adapters[adapter], prompts[index], 20)
        assert (expected == free) == (not penalties), "penalties that change nothing test nothing"


def test_requests_without_a_seed_differ(files: Files) -> None:
    engine = StepEngine(files.model)
    for name in "abc":
        engine.add(name, [5, 6, 7], temperature=1.0, max_tokens=12)
    results = engine.run()
    assert len({tuple(result.token_ids) for result in results.values()}) > 1


def test_adapters_take_turns_in_one_slot(files: Files) -> None:
    engine = engine_with_adapters(files, max_loras=1, max_lora_rank=8, lora_memory=8 * 3552 * 4)
    assert engine.runner.pool.num_rows == 8
    for turn in range(2):
        for adapter in range(4):
            engine.add(f"{turn}-{adapter}", prompt_of(6, adapter), adapter, max_tokens=3)
    for name, result in engine.run().items():
        adapter = int(name[-1])
        expected = peft_greedy(files.model, files.adapters[adapter], prompt_of(6, adapter), 3)
        assert result.token_ids == expected


def test_min_tokens_hold_back_eos_and_stop_tokens(files: Files) -> None:
    prompt = prompt_of(6, 1)
    free = peft_greedy(files.model, None, prompt, 3)
    engine = StepEngine(files.model)
    engine.add("stop", prompt, stop_token_ids=(free[0],))
    engine.add("held", prompt, stop_token_ids=(free[0],), min_tokens=2, max_tokens=3)
    results = engine.run()
    assert results["stop"].token_ids == [free[0]]
    logprobs = peft_logprobs(files.model, None, prompt)[-1]
    logprobs[free[0]] = -math.inf
    assert results["held"].token_ids[0] == int(logprobs.argmax())
    assert free[0] not in results["held"].token_ids[:2]


def test_overflow_is_an_error_of_its_row_alone(files: Files, tmp_path: Path) -> None:
    engine = engine_with_adapters(files)
    broken = engine.load(overflowing_adapter(tmp_path / "broken", files.model))
    for adapter in (1, 0, broken, 2):
        engine.add(str(adapter), prompt_of(9, adapter), adapter)
    engine.add("scores", prompt_of(9, 7), broken, max_tokens=0, prompt_logprobs=1)
    results = engine.run()
    for name in (str(broken), "scores"):
        assert results[name].finish_reason == "error"
        assert "not finite" in str(results[name].error)
    for adapter in (0, 1, 2):
        expected = peft_greedy(files.model, files.adapters[adapter], prompt_of(9, adapter), 8)
        assert results[str(adapter)].token_ids == expected


def test_a_copy_that_fails_is_reported_and_the_slot_can_be_used_again(files: Files) -> None:
    engine = engine_with_adapters(files)
    adapter_id = AdapterId(1)
    too_few = SlotLoad(adapter_id, Slot(1), (0,))
    result = engine.runner.launch(Step(loads=(too_few,)))()
    assert list(result.load_errors) == [1]
    assert result.loaded == ()
    rows = tuple(range(engine.runner.host_store.get(adapter_id).rank))
    result = engine.runner.launch(Step(loads=(SlotLoad(adapter_id, Slot(1), rows),)))()
    assert result.loaded == (1,)
    assert len(result.load_seconds) == 1


def test_copies_start_before_the_pass_of_their_step(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that they are made beside it."""
    runner = engine_with_adapters(files).runner
    order: list[str] = []

    def recorded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recording(*args: Any) -> Any:
            order.append(name)
            return call(*args)

        return recording

    monkeypatch.setattr(runner.pool, "write", recorded("copy", runner.pool.write))
    monkeypatch.setattr(runner, "_run_model", recorded("pass", runner._run_model))
    prompt, seq_id = prompt_of(6, 1), SequenceId(0)
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    loads, first_row = [], 0
    for number in (1, 2):
        num_rows = runner.host_store.get(AdapterId(number)).num_rows
        rows = tuple(range(first_row, first_row + num_rows))
        loads.append(SlotLoad(AdapterId(number), Slot(number), rows))
        first_row += num_rows
    step = Step(
        loads=tuple(loads),
        new=(NewSequence(seq_id, tuple(prompt), len(prompt), sampling, (), Slot(0), ()),),
        sequences=(
            ScheduledSequence(seq_id, 0, len(prompt), (BlockId(0), BlockId(1)), samples=True),
        ),
    )
    result = runner.launch(step)()
    assert order == ["copy", "copy", "pass"]
    assert result.loaded == (1, 2)
    token_ids = [sampled.token_id for sampled in result.sampled]
    assert token_ids == peft_greedy(files.model, None, prompt, 1)


# --- rows and arrays ---


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_arrays_say_what_a_plain_loop_says(data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 5))
    rows = SequenceRows(num_rows=4, max_model_len=24, block_size=block_size)
    blocks = iter(data.draw(st.permutations(range(200))))
    scheduled, expected = [], []
    for index in range(data.draw(st.integers(1, 4))):
        total = data.draw(st.integers(1, 24))
        cached = data.draw(st.integers(0, (total - 1) // block_size))
        count = data.draw(st.integers(1, total - cached * block_size))
        start, end = cached * block_size, cached * block_size + count
        tokens = tuple(data.draw(st.integers(0, 999)) for _ in range(total))
        table = [BlockId(next(blocks)) for _ in range(-(-end // block_size))]
        seq_id = SequenceId(10 * index)
        rows.add(
            NewSequence(
                seq_id, tokens, total, SamplingParams(), (), Slot(index), tuple(table[:cached])
            )
        )
        scheduled.append(
            ScheduledSequence(seq_id, start, count, tuple(table[cached:]), samples=end == total)
        )
        expected.append((tokens, table, start, end, index))
    decodes_first = sorted(range(len(scheduled)), key=lambda i: scheduled[i].num_tokens > 1)
    expected = [expected[i] for i in decodes_first]
    arrays = rows.arrays([scheduled[i] for i in decodes_first])
    flat = [
        (tokens[p], p, table[p // block_size] * block_size + p % block_size, slot)
        for tokens, table, start, end, slot in expected
        for p in range(start, end)
    ]
    token_slots = rows.slots[arrays.token_rows].tolist()
    columns = arrays.token_ids, arrays.positions, arrays.kv_slots
    assert list(zip(*(c.tolist() for c in columns), token_slots, strict=True)) == flat
    assert arrays.context_lens.tolist() == [end for _, _, _, end, _ in expected]
    starts = np.cumsum([0, *(end - start for _, _, start, end, _ in expected)])
    assert arrays.query_starts.tolist() == starts.tolist()
    on_device = DeviceRows(4, rows.blocks.shape[1], torch.device("cpu"))
    on_device.set_blocks(*map(torch.from_numpy, rows.take_new_blocks()))
    tables = on_device.block_tables[arrays.rows].tolist()
    for row, (_, table, _, _, _) in zip(tables, expected, strict=True):
        assert row[: len(table)] == table


def test_rows_are_used_again_and_hold_nothing_of_the_last_sequence() -> None:
    rows = SequenceRows(num_rows=1, max_model_len=8, block_size=2)
    for number in range(3):
        seq_id = SequenceId(number)
        prompt = (number,) * 3
        assert rows.add(NewSequence(seq_id, prompt, 3, SamplingParams(), (), Slot(0), ())) == 0
        blocks = (BlockId(number), BlockId(number + 5))
        arrays = rows.arrays([ScheduledSequence(seq_id, 0, 3, blocks, samples=True)])
        places, block_ids = rows.take_new_blocks()
        assert (places.tolist(), block_ids.tolist()) == ([0, 1], list(blocks))
        rows.expect_tokens(arrays.rows)
        assert rows.num_tokens.tolist() == [4]
        rows.release(seq_id)
        rows.release(seq_id)  # it is forgotten already


def test_tokens_in_flight_reach_only_the_sequence_that_they_are_for() -> None:
    rows = SequenceRows(num_rows=2, max_model_len=4, block_size=2)
    for number in range(2):
        seq_id = SequenceId(number)
        rows.add(NewSequence(seq_id, (5, 6), 2, SamplingParams(), (), Slot(0), (BlockId(0),)))
    both = np.arange(2)
    places = rows.expect_tokens(both)
    assert rows.token_ids[both, 2].tolist() == [-1, -2]
    decode = rows.arrays([ScheduledSequence(SequenceId(1), 2, 1, (BlockId(1),), samples=True)])
    on_device = DeviceRows(2, 2, torch.device("cpu"))
    on_device.set_last_tokens(torch.tensor([0, 1]), torch.tensor([70, 80]))
    assert on_device.resolve(torch.from_numpy(decode.token_ids)).tolist() == [80]
    assert on_device.resolve(torch.tensor([3, -2, -1])).tolist() == [3, 80, 70]

    rows.release(SequenceId(0))
    rows.add(NewSequence(SequenceId(2), (7, 8, 9), 3, SamplingParams(), (), Slot(0), ()))
    rows.set_tokens(both, places, np.array([70, 80]))
    assert rows.token_ids[:, :3].tolist() == [[7, 8, 9], [5, 6, 80]]


def test_a_sequence_that_is_back_in_its_row_gets_no_token_that_it_has_dropped() -> None:
    rows = SequenceRows(num_rows=1, max_model_len=4, block_size=2)
    sequence = NewSequence(SequenceId(0), (5, 6), 2, SamplingParams(), (), Slot(0), ())
    row = np.array([rows.add(sequence)])
    dropped = [rows.expect_tokens(row) for _ in range(3)]  # the last past the end of the row
    rows.release(sequence.seq_id)
    rows.set_tokens(row, dropped[0], np.array([70]))
    assert rows.add(sequence) == row
    awaited = [rows.expect_tokens(row) for _ in range(2)]
    for places in dropped:
        rows.set_tokens(row, places, np.array([80]))
    assert rows.token_ids.tolist() == [[5, 6, -1, -1]]
    for places, token_id in zip(awaited, (90, 91), strict=True):
        rows.set_tokens(row, places, np.array([token_id]))
    assert rows.token_ids.tolist() == [[5, 6, 90, 91]]


def test_too_few_blocks_are_found_out() -> None:
    rows = SequenceRows(num_rows=1, max_model_len=8, block_size=2)
    rows.add(NewSequence(SequenceId(0), (1, 2, 3), 3, SamplingParams(), (), Slot(0), ()))
    with pytest.raises(AssertionError, match="too few KV blocks"):
        rows.arrays([ScheduledSequence(SequenceId(0), 0, 3, (BlockId(0),), samples=True)])


def test_one_buffer_holds_all_arrays_each_aligned() -> None:
    arrays = [np.arange(6), np.arange(5) - 2, np.arange(0), np.arange(1)]
    packed = pack(arrays)
    for tensor, array in zip(packed.views(torch.from_numpy(packed.values)), arrays, strict=True):
        assert tensor.tolist() == array.tolist()
        assert tensor.dtype == torch.int32
        assert tensor.storage_offset() * 4 % 16 == 0
    uploaded = upload_all(arrays, torch.device("cpu"))
    assert [tensor.tolist() for tensor in uploaded] == [array.tolist() for array in arrays]


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**32])
def test_a_value_that_the_buffer_would_change_is_found_out(value: int) -> None:
    pack([np.array([2**31 - 1, -(2**31)])])
    with pytest.raises(AssertionError):
        pack([np.arange(3), np.array([5, value])])


# --- memory ---


def test_cache_is_no_larger_than_all_sequences_need(files: Files) -> None:
    config = load_config(files.model)
    plan = cpu_settings(files.model, max_model_len=10, max_num_seqs=3)
    size = memory.cache_size(plan, config, torch.float32, 2**40)
    assert size == memory.CacheSize(num_blocks=3 * 3, max_model_len=10)


def test_max_model_len_gives_way_only_if_it_was_left_out(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(files.model)
    room = 10 * 4 * 768  # ten blocks of four tokens
    caplog.set_level("WARNING", "lorakeet")
    size = memory.cache_size(cpu_settings(files.model), config, torch.float32, room)
    assert size == memory.CacheSize(num_blocks=10, max_model_len=40)
    assert "max_model_len is lowered to 40" in caplog.text
    given_length = cpu_settings(files.model, max_model_len=41)
    with pytest.raises(SettingsError, match="max_model_len: a sequence of 41 tokens"):
        memory.cache_size(given_length, config, torch.float32, room)
    with pytest.raises(SettingsError, match="max_model_len"):
        memory.cache_size(cpu_settings(files.model), config, torch.float32, -5)


def test_settings_that_the_model_has_no_room_for(files: Files) -> None:
    with pytest.raises(SettingsError, match="max_model_len: 513; the model's limit is 512"):
        StepEngine(files.model, max_model_len=513)
    with pytest.raises(SettingsError, match="lora_memory: an adapter of rank 64"):
        StepEngine(files.model, lora_memory=1000)


def test_worst_pass_fits_the_model(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured on CUDA runs here: every token with an adapter, all that sampling takes."""
    engine = StepEngine(files.model, max_num_seqs=5, max_num_batched_tokens=40)
    sampled: list[tuple[Tensor, SamplingBatch]] = []
    sample = sampler.sample

    def note(logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
        sampled.append((logits, batch))
        return sample(logits, batch)

    monkeypatch.setattr(sampler, "sample", note)
    engine.runner._worst_pass()
    ((logits, batch),) = sampled
    assert len(logits) == 5
    assert batch.num_ordered == logits.shape[1]  # all are sorted
    assert batch.num_logprobs == memory.MAX_LOGPROBS
    assert batch.top_p is not None
    assert batch.min_p is not None
    assert batch.penalties is not None
    assert all(
        penalty is not None
        for penalty in (
            batch.penalties.repetition,
            batch.penalties.presence,
            batch.penalties.frequency,
        )
    )
    assert engine.runner.pool.vocabularies.num_bytes == 0
    arrays = memory.worst_arrays(engine.settings, engine.runner.config)
    assert np.diff(arrays.query_starts).tolist() == [1, 1, 1, 1, 36]
    assert arrays.context_lens.tolist() == [512] * 5
    columns = engine.runner.config.vocab_size + memory.ADDED_TOKENS
    assert engine.runner.memory_by_part()["token_counts"] == 5 * columns * 4
