"""Waits until what changes again and again has stayed the same for a while."""

from collections.abc import Iterable

import attrs

from kafka_marshal.protocol.planner import MemberView

DEBOUNCES_MAX = 5  # most delays after the first change, if there are ever more changes


@attrs.define
class Debounce:
    """Delays the release of surplus until the members of a group stay the same.

    A burst of joins then moves each key once. Free keys are claimed meanwhile.
    """

    _members: frozenset[object] | None = None
    _first_ms: int = 0
    _until_ms: int = 0

    def update(
        self, members: Iterable[MemberView], now_ms: int, *, debounce_ms: int
    ) -> int | None:
        """Compare the members with the last ones; return the end of the delay.

        Args:
            members: The members now.
            now_ms: Local time.
            debounce_ms: Length of the delay; changes may renew it a few times.
        """
        seen = frozenset(
            (each.client_id, each.topics, each.is_draining, each.weight)
            for each in members
        )
        if self._members is not None and self._members != seen:
            if not self.is_on(now_ms):
                self._first_ms = now_ms
            latest_ms = self._first_ms + DEBOUNCES_MAX * debounce_ms
            self._until_ms = min(now_ms + debounce_ms, latest_ms)
        self._members = seen
        return self._until_ms if self.is_on(now_ms) else None

    def is_on(self, now_ms: int) -> bool:
        """Return whether surplus is kept at this local time."""
        return now_ms < self._until_ms
