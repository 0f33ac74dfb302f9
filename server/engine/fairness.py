"""Who is served next: virtual token counters, one for each adapter and one for the base model.
Blends of the same adapters share one.

A counter is the service that its adapter has had, in weighted tokens; whoever has had least comes
next. An adapter that was idle may not save up: when it gets requests again, its counter is lifted
to the least of those that have some. (VTC: Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024, arXiv:2401.00588, whose weights these are.)
"""

from lorakeet.lora.adapter import AdapterId
from lorakeet.server.engine.adapter_entry import AdapterEntry

PROMPT_TOKEN = 1.0  # one that was computed: those from the prefix cache are free
OUTPUT_TOKEN = 2.0


class ActiveAdapters:
    """The adapters that have requests."""

    def __init__(self) -> None:
        self._entries: dict[AdapterId, AdapterEntry] = {}
        self._last_service = 0.0  # of the one that became idle last

    def add(self, entry: AdapterEntry) -> None:
        """It has requests again; nothing happens if it had some already."""
        if entry.adapter_id not in self._entries:
            counters = (other.account.service for other in self._entries.values())
            entry.account.service = max(
                entry.account.service, min(counters, default=self._last_service)
            )
            self._entries[entry.adapter_id] = entry

    def discard(self, entry: AdapterEntry) -> None:
        """It has no requests any more."""
        if self._entries.pop(entry.adapter_id, None) is not None:
            self._last_service = entry.account.service
