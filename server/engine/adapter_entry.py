"""An adapter as the scheduler sees it, or a blend of several: whose requests, which content."""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lorakeet.lora.adapter import AdapterId, Slot
from lorakeet.lora.slots import Room
from lorakeet.server.engine.blocks import BASE_CONTENT, Content


@dataclass(eq=False)
class Account:
    """Of one adapter, and of what is blended of it alone; blends of the same adapters share one,
    whatever their weights."""

    service: float = 0.0  # see fairness.py
    last_place: float = float("-inf")  # when it last got one


@dataclass(eq=False)
class AdapterEntry:
    """An adapter in host memory or on disk, and its requests.

    A blend is a weighted sum of adapters, its `components`. It has a slot of its own, which lists
    their rows, and uses theirs too.
    """

    adapter_id: AdapterId  # below 0: a blend
    content: Content
    num_rows: int  # of the pool; 0 for a blend
    components: tuple[AdapterId, ...]  # what must be in the pool: itself, or what it is made of
    weights: tuple[float, ...] = ()  # of a blend's components
    invocation: tuple[int, ...] = ()  # of an aLoRA: its tokens start with these
    in_host: bool = True  # else it must be read again before it can be copied to a slot
    freed: Room = field(default_factory=Room)  # in the pool, by its unloading
    num_blends: int = 0  # that it is a component of
    num_waiting: int = 0
    num_running: int = 0
    account: Account = field(default_factory=Account)
    waiting_since: float = 0.0  # for a place, or else for its first waiting sequence to start
    started: float | None = None  # when it started its first sequence in its present place
    has_progressed: bool = False  # by a token or a finished sequence, in its present place
    slot: Slot | None = None  # while it holds a place

    @property
    def has_requests(self) -> bool:
        return self.num_waiting > 0 or self.num_running > 0

    @property
    def is_idle(self) -> bool:
        return not self.has_requests and self.num_blends == 0

    @property
    def is_blend(self) -> bool:
        return bool(self.weights)

    @property
    def held(self) -> tuple[AdapterId, ...]:
        """Whose slots it uses while it holds a place."""
        return (self.adapter_id, *self.components) if self.is_blend else self.components


def base_entry() -> AdapterEntry:
    return AdapterEntry(AdapterId(0), BASE_CONTENT, 0, components=(), slot=Slot(0))


def blend_content(parts: Iterable[tuple[bytes, float]]) -> Content:
    """Of (digest, weight) of each component: equal for equal sums, in whatever order."""
    ordered = sorted(parts)
    packed = b"".join(digest + struct.pack("<d", weight) for digest, weight in ordered)
    owners = tuple(dict.fromkeys(digest for digest, _ in ordered))
    return Content(hashlib.sha256(b"blend" + packed).digest(), owners)


def last_occurrence(tokens: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Where the last run of `tokens` that equals `wanted` begins."""
    size, run = len(wanted), list(wanted)
    for start in range(len(tokens) - size, -1, -1):
        if tokens[start] == run[0] and tokens[start : start + size] == run:
            return start
    return None
