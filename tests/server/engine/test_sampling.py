"""Sampling rows over the life of sequences, against a recount of their tokens at every step."""

import random
import tracemalloc
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lorakeet.models.penalties import TokenCounts
from lorakeet.models.sampler import edit_logits
from lorakeet.server.engine.inputs import SequenceRows
from lorakeet.server.engine.messages import SamplingParams
from lorakeet.server.engine.sampling import SamplingRows
from lorakeet.server.engine.step import NewSequence, SequenceId

VOCAB, ROWS, DEPTH = 12, 4, 3
PENALTIES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 0.5, "logit_bias": {3: 2.0}},
    {"frequency_penalty": -0.25},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 0.8},
]


@dataclass
class Known:
    """A sequence as it really is: the last tokens may not have reached the host."""

    seq_id: SequenceId
    row: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams


def recounted(logits: torch.Tensor, known: Known) -> torch.Tensor:
    """The formulas of transformers and OpenAI, from nothing but the tokens."""
    params, want = known.params, logits.clone()
    for token in set(known.tokens):
        value, factor = want[token], params.repetition_penalty
        want[token] = value / factor if value > 0 else value * factor
    for token, count in Counter(known.tokens[known.num_prompt :]).items():
        want[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        want[token] += bias
    return want


class Engine:
    """What the runner does around sampling; the host knows no token of the last DEPTH steps."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rows = SequenceRows(ROWS, 64, 16)
        self.sampling = SamplingRows(
            self.rows, TokenCounts(ROWS, VOCAB - 2, "cpu"), torch.device("cpu")
        )
        self.running: list[Known] = []
        self.waiting: list[Known] = []  # preempted
        self.in_flight: list[tuple[Any, ...]] = []
        self.next_id = 0

    def start(self) -> None:
        if len(self.running) == ROWS:
            return
        if self.waiting:
            known = self.waiting.pop()
        else:
            prompt = [self.random.randrange(VOCAB) for _ in range(self.random.randint(1, 6))]
            params = SamplingParams(**self.random.choice(PENALTIES))
            known = Known(SequenceId(self.next_id), 0, prompt, len(prompt), params)
            self.next_id += 1
        tokens = tuple(known.tokens)
        sequence = NewSequence(known.seq_id, tokens, known.num_prompt, known.params, (), 0, ())  # type: ignore[arg-type]
        known.row = self.rows.add(sequence)
        self.sampling.add(known.row, sequence)
        self.running.append(known)

    def stop(self, preempt: bool) -> None:
        """A preempted sequence keeps only what the host knows of it."""
        if not self.running:
            return
        known = self.running.pop(self.random.randrange(len(self.running)))
        on_host = self.rows.token_ids[known.row, : len(known.tokens)].tolist()
        arrived = [token for token in on_host if token >= 0]
        assert arrived == known.tokens[: len(arrived)]
        self.rows.release(known.seq_id)
        if preempt:
            known.tokens = arrived
            self.waiting.append(known)

    def decode(self) -> None:
        """One token for some of the running ones, in any order; the logits are as recounted."""
        able = [known for known in self.running if len(known.tokens) < 64]
        chosen = self.random.sample(able, self.random.randint(0, len(able)))
        if not chosen or len(self.in_flight) == DEPTH:
            return
        rows = np.array([known.row for known in chosen])
        logits = torch.randn(
            len(rows), VOCAB, generator=torch.Generator().manual_seed(self.random.randrange(999))
        )
        batch = self.sampling.batch(rows, VOCAB)
        want = torch.stack(
            [recounted(row, known) for row, known in zip(logits, chosen, strict=True)]
        )
        torch.testing.assert_close(edit_logits(logits, batch), want, rtol=0, atol=1e-5)
        tokens = [self.random.randrange(VOCAB) for _ in chosen]
        if batch.penalties is not None:
            batch.penalties.count(torch.tensor(tokens))
        for known, token in zip(chosen, tokens, strict=True):
            known.tokens.append(token)
        places = self.rows.expect_tokens(rows)
        self.in_flight.append((rows, places, np.array(tokens)))

    def apply(self) -> None:
        if self.in_flight:
            self.rows.set_tokens(*self.in_flight.pop(0))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_penalties_are_a_recount_at_every_step(seed: int) -> None:
    """Sequences start, decode in changing company, are preempted with tokens in flight, and end."""
    engine = Engine(seed)
    for _ in range(120):
        action = engine.random.choices(
            [engine.start, engine.decode, engine.apply, lambda: engine.stop(True),
             lambda: engine.stop(False)], [3, 8, 6, 1, 1],
        )[0]  # fmt: skip
        action()


class Elements(TorchDispatchMode):
    """Counts elements of all tensors that operations make."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += result.numel() if isinstance(result, torch.Tensor) else 0
        return result


@pytest.mark.parametrize("penalties", PENALTIES[1:])
def test_the_work_of_a_step_does_not_grow_with_the_context(penalties: dict[str, Any]) -> None:
    """Neither what the host allocates nor what goes to the device and is made there."""

    def work(length: int) -> tuple[int, int]:
        rows = SequenceRows(ROWS, 8192, 16)
        sampling = SamplingRows(rows, TokenCounts(ROWS, 512, "cpu"), torch.device("cpu"))
        params = SamplingParams(**penalties)
        tokens = tuple(i % 512 for i in range(length))
        for seq_id in range(ROWS):
            sequence = NewSequence(seq_id, tokens, length // 2, params, (), 0, ())  # type: ignore[arg-type]
            sampling.add(rows.add(sequence), sequence)
        every = np.arange(ROWS)
        sampling.batch(every, 512)  # a sequence's first step counts what it comes with
        tracemalloc.start()
        with Elements() as elements:
            batch = sampling.batch(every, 512)
            assert batch.penalties is not None
            marks = batch.penalties.counts.read(batch.penalties.rows, 512)
            batch.penalties.apply_to_all(torch.zeros(ROWS, 512), marks)
            batch.penalties.count(torch.zeros(ROWS, dtype=torch.int64))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return elements.total, peak

    work(64)  # what is made once
    short, long = work(64), work(8000)
    assert long[0] == short[0]
    assert long[1] < short[1] + 2000
