"""Aliases: names that stand for an adapter, or share their requests out among several.

What an alias may be named, and what it may lead to, is the registry's to say.
"""

import hashlib
import random
from collections.abc import Sequence

import msgspec

from lorakeet.server.errors import BadRequestError, NotFoundError

MAX_ALIASES = 10_000


class Target(msgspec.Struct, frozen=True):
    adapter: str
    weight: float = 1.0  # its share of the requests, relative to those of the other targets


class Aliases:
    """Names → targets. A change is atomic: a request sees the targets before or after it."""

    def __init__(self) -> None:
        self._targets: dict[str, tuple[Target, ...]] = {}

    def __contains__(self, alias: str) -> bool:
        return alias in self._targets

    def get(self, alias: str) -> tuple[Target, ...]:
        """Raises NotFoundError."""
        if alias not in self._targets:
            raise NotFoundError(f"The alias {alias!r} does not exist", code="alias_not_found")
        return self._targets[alias]

    def all(self) -> dict[str, tuple[Target, ...]]:
        return dict(self._targets)

    def put(self, alias: str, targets: Sequence[Target]) -> None:
        """Raises BadRequestError when there are too many."""
        if alias not in self._targets and len(self._targets) >= MAX_ALIASES:
            message = f"There are {MAX_ALIASES} aliases: delete some before you add others"
            raise BadRequestError(message, param="alias", code="too_many_aliases")
        self._targets[alias] = tuple(targets)

    def remove(self, alias: str) -> None:
        """Raises NotFoundError."""
        self.get(alias)
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
