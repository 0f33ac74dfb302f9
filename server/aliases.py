"""Aliases: names that stand for an adapter, or share their requests out among several."""

import hashlib
import random
from collections.abc import Sequence

import msgspec


class Target(msgspec.Struct, frozen=True):
    adapter: str
    weight: float = 1.0  # its share of the requests, relative to those of the other targets


class Aliases:
    """Names → targets. A change is atomic: a request sees the targets before or after it."""

    def __init__(self) -> None:
        self._targets: dict[str, tuple[Target, ...]] = {}

    def __contains__(self, alias: str) -> bool:
        return alias in self._targets

    def __getitem__(self, alias: str) -> tuple[Target, ...]:
        return self._targets[alias]

    def all(self) -> dict[str, tuple[Target, ...]]:
        return dict(self._targets)

    def put(self, alias: str, targets: Sequence[Target]) -> None:
        self._targets[alias] = tuple(targets)

    def remove(self, alias: str) -> None:
        del self._targets[alias]

    def naming(self, adapter: str) -> list[str]:
        """The aliases that have this adapter among their targets."""
        return [
            alias
            for alias, targets in self._targets.items()
            if any(target.adapter == adapter for target in targets)
        ]

    def choose(self, alias: str, user: str | None) -> str:
        """A target by weight: at random, or always the same one for the same user."""
        targets = self._targets[alias]
        if user is None:
            share = random.random()
        else:
            digest = hashlib.sha256(f"{alias}\0{user}".encode()).digest()
            share = int.from_bytes(digest[:7]) / 2**56
        left = share * sum(target.weight for target in targets)
        for target in targets:
            left -= target.weight
            if left < 0:
                return target.adapter
        return targets[-1].adapter  # rounding
