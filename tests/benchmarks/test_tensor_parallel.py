"""How the ranks of a benchmark are started."""

import io
import subprocess
from collections.abc import Callable
from typing import Any

import pytest


class Started:
    """A rank that has ended well already."""

    def __init__(self, command: list[str], pass_fds: list[int], **_: object) -> None:
        (self.meeting,) = (each[10:] for each in command if each.startswith("--meeting="))
        self.pass_fds, self.stdout = pass_fds, io.StringIO("{}\n")

    def poll(self) -> int:
        return 0

    kill = wait = poll


def test_rank_0_gets_the_socket_and_the_others_its_address(
    script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Started] = []

    def start(*args: Any, **options: Any) -> Started:
        started.append(Started(*args, **options))
        return started[-1]

    tensor_parallel = script("tensor_parallel")
    monkeypatch.setattr(subprocess, "Popen", start)
    tensor_parallel.measure(3, [], {})
    first, *others = started
    assert first.pass_fds == [int(first.meeting)]
    assert [rank.pass_fds for rank in others] == [[], []]
    assert {rank.meeting.partition(":")[0] for rank in others} == {"127.0.0.1"}
