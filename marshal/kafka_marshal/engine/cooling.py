"""Keeps a session from taking at once what it has just given up."""

from kafka_marshal.protocol.records import ReleasingPartition
from kafka_marshal.protocol.transition import Transition
from kafka_marshal.protocol.types import Key

# Given up for a reason that has nothing to do with who holds it.
ORDERLY = frozenset(
    {
        *("closed", "failed", "paused", "topic_gone"),
        # By a sidecar, whose other clients may take it at once.
        *("moved", "client_died", "client_left", "client_silent", "shutdown"),
    }
)


class Cooldowns:
    """Own released keys, and until when they are left to others.

    An H of local time, from the moment at which the release was read back: by the
    log's time it is never less (but for the drift of clocks). Whoever comes back
    as a new process has no memory of it, and needs none.
    """

    __slots__ = ("_until_ms",)

    def __init__(self) -> None:
        self._until_ms: dict[Key, int] = {}

    def begin(self, key: Key, reason: str, *, until_ms: int) -> None:
        """Note a release that is on its way."""
        if reason not in ORDERLY:
            self._until_ms[key] = until_ms

    def extend(self, key: Key, *, until_ms: int) -> None:
        """Note that a release was read back, if the key is to cool down at all."""
        if key in self._until_ms:
            self._until_ms[key] = until_ms

    def ends_by(self, transition: Transition) -> bool:
        """Take an accepted record of somebody else about a key.

        Where they had the key since, and released it for a reason that has nothing
        to do with it, our turn was over and so is theirs: nobody else may be there.

        Returns:
            Whether the key cools down no longer.
        """
        key, record = transition.key, transition.record
        if key not in self._until_ms or not isinstance(record, ReleasingPartition):
            return False
        if (record.reason or "").partition(":")[0] not in ORDERLY:
            return False
        del self._until_ms[key]
        return True

    def is_cooling(self, key: Key, now_ms: int) -> bool:
        """Return whether to leave a key to others at this local time."""
        until_ms = self._until_ms.get(key)
        return until_ms is not None and now_ms < until_ms

    def forget_past(self, now_ms: int) -> int | None:
        """Forget what is over; return when the next ends, None without any."""
        if not self._until_ms:
            return None
        self._until_ms = {k: ms for k, ms in self._until_ms.items() if now_ms < ms}
        return min(self._until_ms.values(), default=None)
