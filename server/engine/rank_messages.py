"""What rank 0 says to the other ranks (orders), and what they answer (reports).

Msgpack over a socket pair for each of them, in order. Orders are the same for all ranks.
"""

from typing import Literal, get_args

import msgspec

from lorakeet.lora.adapter import Slot
from lorakeet.server.engine.step import Step

Stage = Literal["starting", "started", "joined", "loaded", "ready"]
STAGES: tuple[Stage, ...] = get_args(Stage)


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    """Do what the step says, now: rank 0 does the same."""

    step: Step


class ReadAdapter(msgspec.Struct, frozen=True, tag="read"):
    """Keep the adapter in host memory. Answered by AdapterRead."""

    adapter_id: int
    path: str


class ReleaseAdapter(msgspec.Struct, frozen=True, tag="release"):
    """Forget it, if it is there."""

    adapter_id: int


Order = Launch | ReadAdapter | ReleaseAdapter


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Of its start."""

    stage: Stage


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Several times a second, between its steps, from a rank that is ready."""


class AdapterRead(msgspec.Struct, frozen=True, tag="adapter"):
    adapter_id: int
    digest: str | None  # None: it could not be read, for this reason
    error: str = ""


class SlotsFilled(msgspec.Struct, frozen=True, tag="slots"):
    """Copies into slots that have completed, and those that have failed."""

    loaded: tuple[Slot, ...]
    errors: dict[Slot, str]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank cannot go on, and ends."""

    message: str


Report = Progress | Alive | AdapterRead | SlotsFilled | Failed
