"""Weighted sums of adapters in one request, against PEFT: alone, mixed, in any chunks."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lorakeet.lora.adapter import AdapterId
from support.adapters import base_model, make_adapter
from support.blends import combined_model, logprobs, summed_model
from support.copies import CopyThreads
from support.engines import Collected, StepEngine, prompt_of
from support.models import tiny_model
from support.parity import TOLERANCE, check_scores

# by id as the tests load them, from 1 on
_CONFIGS: list[dict[str, Any]] = [
    {"r": 8},
    {"r": 8, "lora_alpha": 3},
    {"r": 3, "target_modules": ["q_proj", "down_proj"]},
    {"r": 8, "use_rslora": True, "target_modules": ["v_proj", "up_proj", "o_proj"]},
    {
        "r": 4,
        "rank_pattern": {"layers.1.self_attn.q_proj": 12, "down_proj": 2},
        "alpha_pattern": {"gate_proj": 30},
    },
    {"r": 5, "target_modules": ["embed_tokens", "lm_head"]},
]
_BLENDS: list[tuple[tuple[int, float], ...]] = [
    ((1, 0.7), (2, -0.3)),
    ((1, 1.0), (3, 1.0)),
    ((3, 0.5), (4, -1.2)),
    ((2, -0.8), (5, 1.5)),
    ((1, 0.4), (3, 0.0), (6, 1.0)),
    ((1, 0.3), (2, 0.3), (3, -0.5), (4, 0.6), (5, 0.4), (6, -0.7)),
    ((5, -0.6),),
    ((6, 2.0),),
]


class Files:
    def __init__(self, folder: Path) -> None:
        self.model = tiny_model(folder / "model")
        self.adapters = [
            make_adapter(folder / str(seed), self.model, seed=seed, **config)
            for seed, config in enumerate(_CONFIGS, start=1)
        ]
        self._oracles: dict[tuple[tuple[int, float], ...], nn.Module] = {}

    def parts(self, blend: Sequence[tuple[int, float]]) -> list[tuple[Path, float]]:
        return [(self.adapters[adapter_id - 1], weight) for adapter_id, weight in blend]

    def oracle(self, blend: tuple[tuple[int, float], ...]) -> nn.Module:
        if blend not in self._oracles:
            self._oracles[blend] = summed_model(self.model, self.parts(blend))
        return self._oracles[blend]

    def engine(self, **settings: Any) -> StepEngine:
        engine = StepEngine(self.model, **settings)
        for path in self.adapters:
            engine.load(path)
        return engine


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Files(tmp_path_factory.mktemp("blends"))


def check(oracle: nn.Module, prompt: list[int], result: Collected) -> None:
    check_scores(logprobs(oracle, prompt + result.token_ids), prompt, result)


def test_the_oracle_is_pefts_cat_and_linear_is_another_thing(files: Files) -> None:
    """What server/blends.py says of PEFT: also that "cat" is wrong when the first has rsLoRA."""
    prompt = prompt_of(9, 0)
    base = logprobs(base_model(files.model), prompt)

    def difference(blend: tuple[tuple[int, float], ...], combination_type: str) -> float:
        combined = combined_model(files.model, files.parts(blend), combination_type)
        summed = logprobs(summed_model(files.model, files.parts(blend)), prompt)
        assert (summed - base).abs().max() > 50 * TOLERANCE
        return float((logprobs(combined, prompt) - summed).abs().max())

    for blend in (*_BLENDS[:2], *_BLENDS[3:5]):
        assert difference(blend, "cat") < TOLERANCE
    assert difference(((1, 0.5), (4, 0.5)), "cat") < TOLERANCE
    assert difference(((4, 0.5), (1, 0.5)), "cat") > 50 * TOLERANCE
    assert difference(((1, 0.7), (2, -0.3)), "linear") > 50 * TOLERANCE
    assert difference(((1, 0.7),), "linear") < TOLERANCE


@pytest.mark.parametrize("max_num_batched_tokens", [1, 7, 64])
@pytest.mark.parametrize("max_loras", [1, 3])
def test_mixed_batch_in_any_chunks_equals_peft(
    files: Files, max_num_batched_tokens: int, max_loras: int
) -> None:
    engine = files.engine(max_num_batched_tokens=max_num_batched_tokens, max_loras=max_loras)
    requests: dict[str, tuple[list[int], tuple[tuple[int, float], ...]]] = {}
    for number, blend in enumerate([*_BLENDS, (), *(((i, 1.0),) for i in range(1, 7))]):
        prompt = prompt_of(6 + 5 * (number % 4), number)
        requests[str(number)] = (prompt, blend)
        scores = None if number % 3 else 0
        if len(blend) == 1 and blend[0][1] == 1:  # as the API process sends it
            engine.add(
                str(number), prompt, blend[0][0], max_tokens=4, logprobs=0, prompt_logprobs=scores
            )
        else:
            engine.add(
                str(number),
                prompt,
                blend=tuple(part for part in blend if part[1]),
                max_tokens=4,
                logprobs=0,
                prompt_logprobs=scores,
            )
    results = engine.run()
    for name, (prompt, blend) in requests.items():
        check(files.oracle(blend), prompt, results[name])


def test_a_blend_is_the_same_alone_in_long_prompts_and_in_static_batches(files: Files) -> None:
    """Dense runs and pairs of the CPU backend, and the batches that CUDA graphs use."""
    for capture in (False, True):
        engine = files.engine(max_num_batched_tokens=256)
        if capture:
            engine.runner.capture_graphs()
        for number, blend in enumerate(_BLENDS):
            kept = tuple(part for part in blend if part[1])
            engine.add(str(number), prompt_of(50, number), blend=kept, max_tokens=4, logprobs=0)
            result = engine.run()[str(number)]
            check(files.oracle(blend), prompt_of(50, number), result)


def test_biases_are_weighed_too(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "llama_bias")
    folders = [
        make_adapter(tmp_path / "layers", model, seed=1, r=3, bias="lora_only"),
        make_adapter(tmp_path / "b", model, seed=2, r=4, lora_bias=True),
        make_adapter(tmp_path / "none", model, seed=3, r=2, target_modules=["v_proj"]),
    ]
    engine = StepEngine(model)
    ids = [engine.load(folder) for folder in folders]
    weights = [(0.7, -0.4, 0.0), (-1.3, 0.0, 0.6), (0.2, 0.9, -0.5)]
    for number, own in enumerate(weights):
        blend = tuple((int(id_), weight) for id_, weight in zip(ids, own, strict=True) if weight)
        engine.add(str(number), prompt_of(9, number), blend=blend, logprobs=0)
    results = engine.run()
    for number, own in enumerate(weights):
        oracle = summed_model(model, list(zip(folders, own, strict=True)))
        check(oracle, prompt_of(9, number), results[str(number)])


def test_prefix_cache_is_that_of_the_sum_whatever_the_order_or_the_names(files: Files) -> None:
    engine = files.engine()
    twin = engine.load(files.adapters[0])
    prompt = prompt_of(22, 5)
    visits: list[tuple[int, tuple[tuple[int, float], ...], int]] = [
        (1, (), 0),
        (0, ((1, 0.7), (2, -0.3)), 0),
        (0, ((1, -0.3), (2, 0.7)), 0),
        (0, ((1, 0.7),), 0),
        (0, ((1, 0.7), (2, -0.3)), 20),
        (0, ((2, -0.3), (twin, 0.7)), 20),
        (1, (), 20),
        (0, (), 0),
    ]
    for number, (adapter_id, blend, cached) in enumerate(visits):
        engine.add(str(number), prompt, adapter_id, blend, logprobs=0)
        result = engine.run()[str(number)]
        assert result.cached_tokens == cached
        same = tuple((1 if id_ == twin else id_, weight) for id_, weight in blend)
        check(files.oracle(((1, 1.0),) if adapter_id else tuple(sorted(same))), prompt, result)
    assert engine.scheduler.blocks.num_cached_blocks > 0
    for adapter_id in (AdapterId(1), AdapterId(2), twin):
        engine.scheduler.remove_adapter(adapter_id)
        engine.scheduler.take_unloaded()
    assert engine.scheduler.blocks.num_cached_blocks == (22 + 8 - 1) // 4  # the base
    engine.scheduler.check()


def test_blends_follow_their_adapters_when_these_move_in_the_pool(files: Files) -> None:
    """A pool that holds one blend: adapters come back in other rows and slots each time."""
    row_bytes = StepEngine(files.model).runner.memory_by_part()["adapter_pool"] // (4 * 66)
    engine = files.engine(max_loras=2, max_lora_rank=12, lora_memory=24 * row_bytes)
    assert engine.runner.pool.num_rows == 24
    for turn in range(2):
        for number in (0, 2, 3, 1, 4):
            kept = tuple(part for part in _BLENDS[number] if part[1])
            engine.add(f"{turn}-{number}", prompt_of(7, number), blend=kept, logprobs=0)
    for name, result in engine.run().items():
        number = int(name[-1])
        check(files.oracle(_BLENDS[number]), prompt_of(7, number), result)
    engine.scheduler.check()


def test_blends_wait_for_the_copies_of_their_parts(files: Files, copy_threads: CopyThreads) -> None:
    """Many are asked for at once, of which none begins at first; a blend's own needs no copy."""
    engine = files.engine(max_loras=12)
    blends = {f"blend {number}": blend for number, blend in enumerate(_BLENDS)}
    alone = {f"alone {number}": ((number, 1.0),) for number in range(1, 7)}
    prompt = prompt_of(9, 5)
    for name, blend in (blends | alone).items():
        parts = tuple(part for part in blend if part[1])
        engine.add(name, prompt, blend=parts, max_tokens=3, logprobs=0)
    with copy_threads.held():
        for _ in range(5):
            engine.step()
        assert engine.scheduler.stats().num_running == 0
    results = engine.run()
    for name, blend in (blends | alone).items():
        check(files.oracle(blend), prompt, results[name])


def test_a_blend_that_overflows_is_an_error_of_its_row_alone(files: Files) -> None:
    engine = files.engine()
    for number, weight in enumerate((0.5, 1e30)):
        engine.add(str(number), prompt_of(9, 1), blend=((1, weight), (2, 0.5)), logprobs=0)
    engine.add("base", prompt_of(9, 1), logprobs=0)
    results = engine.run()
    assert "not finite" in str(results["1"].error)
    check(files.oracle(((1, 0.5), (2, 0.5))), prompt_of(9, 1), results["0"])
    check(base_model(files.model), prompt_of(9, 1), results["base"])


def test_preempted_blends_end_as_if_alone(files: Files) -> None:
    bytes_per_token = 2 * 3 * 2 * 16 * 4
    engine = files.engine(cpu_kv_memory=64 * bytes_per_token)
    for number in range(6):
        kept = tuple(part for part in _BLENDS[number] if part[1])
        engine.add(str(number), prompt_of(9, number), blend=kept, max_tokens=20, logprobs=0)
    results = engine.run()
    assert engine.scheduler.stats().num_preemptions > 0
    for number in range(6):
        check(files.oracle(_BLENDS[number]), prompt_of(9, number), results[str(number)])


def test_the_slot_of_a_blend_lists_rows_with_their_weights(files: Files) -> None:
    """The pool's own slot: its scales and ranks, without an engine around it."""
    engine = files.engine()
    engine.add("r", prompt_of(3, 0), blend=((3, 0.5), (4, -1.2)), max_tokens=30)
    for _ in range(4):
        engine.step()
    pool = engine.runner.pool
    slot = int(engine.runner.rows.slots[0])
    scales = pool.tables.scales[slot]
    assert scales[:11].tolist() == pytest.approx([0.5] * 3 + [-1.2] * 8)
    assert not scales[11:].any()
    down, up = pool.layer("down_proj", 0), pool.layer("gate_up_proj", 0)
    assert (int(down.ranks[slot]), int(up.ranks[slot])) == (3, 11)
    engine.run()
