"""What this process was granted at most once, also of keys that it released (7.5)."""

from collections.abc import Callable

from kafka_marshal.protocol.state import KeyState, WorldState
from kafka_marshal.protocol.types import Key

# Topics and set positions of one key, of those that this process was granted last.
KEPT_MAX = 8
# Keys, of those that this process was granted last: a sidecar may run for years.
KEYS_MAX = 100_000

_Count = tuple[bytes | None, bytes | None]


def _count_of(known: KeyState) -> _Count:
    """Return what an end is counted by: the topic, and what set the position last."""
    previous = known.previous
    return known.topic_id, None if previous is None else previous.op_id


class OwnGrants:
    """Up to where this process was granted each key, for as long as it runs.

    The log shows grants of a released key as nobody's. And a set position replaces
    them: where the log loses it, those of before count again.
    """

    def __init__(self) -> None:
        self._ends: dict[Key, dict[_Count, int]] = {}

    def take(self, world: WorldState, key: Key) -> None:
        """Record that a session of this process was granted offsets of a key."""
        known = world.keys[key]
        ends, count = self._ends.pop(key, {}), _count_of(known)
        ends.pop(count, None)
        ends[count] = known.granted or 0
        if len(ends) > KEPT_MAX:
            del ends[next(iter(ends))]
        self._ends[key] = ends
        if len(self._ends) > KEYS_MAX:
            del self._ends[next(iter(self._ends))]

    def end(self, key: Key, known: KeyState) -> int:
        """Return the first offset that was not granted, by the count of a state."""
        return self._ends.get(key, {}).get(_count_of(known), 0)

    def end_by_lock(self, key: Key, known: KeyState) -> int:
        """Return the end by the operation that has locked a key: the log lost it."""
        lock = known.lock
        if lock is None:
            return 0
        topic_id = lock.topic_id if known.topic_id is None else known.topic_id
        return self._ends.get(key, {}).get((topic_id, lock.op_id), 0)

    def forget(self, is_reset: Callable[[Key], bool]) -> None:
        """Forget keys whose grants a Reset has taken back (PROTOCOL 7.6)."""
        for key in [key for key in self._ends if is_reset(key)]:
            del self._ends[key]
