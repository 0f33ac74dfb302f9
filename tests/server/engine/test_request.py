"""What a sequence tells of itself."""

import time

import pytest

from lorakeet.lora.adapter import AdapterId, Slot
from lorakeet.server.engine.blocks import BASE_CONTENT, HashChain
from lorakeet.server.engine.messages import AddRequest, SamplingParams
from lorakeet.server.engine.plan import StepPlan
from lorakeet.server.engine.request import Sequence
from lorakeet.server.engine.step import Sampled, SequenceId


def test_the_time_in_the_queue_is_that_before_the_first_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    request = AddRequest("r", [1, 2], SamplingParams(max_tokens=3))
    chain = HashChain(BASE_CONTENT, 4)
    sequence = Sequence(SequenceId(0), request, chain, max_model_len=9, adapter_id=AdapterId(0))
    plan = StepPlan(budget=8)
    now = 102.5
    plan.start(sequence, Slot(0))
    sequence.reset()  # preempted before it had a token
    now = 110.0
    plan.start(sequence, Slot(0))
    outputs = [sequence.output(Sampled(SequenceId(0), token), None) for token in (5, 6)]
    assert [output.queue_seconds for output in outputs] == [2.5, None]
