"""`benchmarks/peer.py` asks a server as it says."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.toy_server import adapter_folder, model_folder, toy_server


@pytest.fixture
def peer(script: Callable[[str], Any]) -> Any:
    return script("peer")


@pytest.mark.parametrize(("point", "rows"), [("6:3", [2, 2, 2]), ("4:0", [4])])
def test_a_batch_takes_the_adapters_in_turn(
    peer: Any, point: str, rows: list[int], tmp_path: Path
) -> None:
    folders = {name: adapter_folder(tmp_path / name, k) for k, name in enumerate("abc", 1)}
    with toy_server(model_folder(tmp_path / "model"), adapters=folders) as toy:
        asyncio.run(peer.measure([toy.url], [point], vocab_size=300))
        batch, requests = int(point.split(":")[0]), toy.engine.requests
    lengths = [request.sampling.max_tokens for request in requests]
    assert lengths == [64] * 2 * batch + ([320] * batch + [64] * batch) * 2 + [320] * batch
    for start in range(0, len(requests), batch):
        asked = [request.adapter_id for request in requests[start : start + batch]]
        assert sorted(asked.count(adapter) for adapter in set(asked)) == rows
    prompts = {tuple(request.prompt) for request in requests}
    assert len(prompts) == len(requests)
    assert {len(prompt) for prompt in prompts} == {128}


def test_a_step_leaves_out_what_a_request_costs_once(
    peer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = {"http://ours": 0.004, "http://peer": 0.010}

    async def seconds(self: Any, models: list[str], batch: int, tokens: int) -> float:
        return 0.5 + step[self.url] * tokens * batch

    async def models(self: Any, adapters: int) -> list[str]:
        return ["a"]

    monkeypatch.setattr(peer.Server, "seconds", seconds)
    monkeypatch.setattr(peer.Server, "models", models)
    asyncio.run(peer.measure(["http://ours", "http://peer/"], ["1:1", "2:1"], 300))
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.split() == ["1:1", "4.00", "ms", "10.00", "ms"]
    assert second.split() == ["2:1", "8.00", "ms", "20.00", "ms"]
    assert last == "the last server's step over the first's, least, at 1:1: 2.50"
