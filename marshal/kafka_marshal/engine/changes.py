"""Which keys have changed, for readers that look now and then."""

from collections.abc import Sequence

from kafka_marshal.protocol.types import Key

KEPT_MAX = 10_000


class Changes:
    """The keys that changed, in order. Each reader remembers how far it has read.

    Used under the engine's lock. A reader that falls too far behind, and each reader
    after ``note_all``, has to assume that every key has changed.

    Attributes:
        end: Number of changes so far: where a reader that has read all goes on.
    """

    __slots__ = ("_keys", "end")

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self.end = 0

    def note(self, key: Key) -> None:
        """Note that a key has changed."""
        self._keys.append(key)
        self.end += 1
        if len(self._keys) > 2 * KEPT_MAX:
            del self._keys[:KEPT_MAX]

    def note_all(self) -> None:
        """Note that every key may have changed."""
        self._keys.clear()
        self.end += 1

    def since(self, end: int) -> Sequence[Key] | None:
        """Return the keys that changed after an earlier ``end``; None = every key."""
        count = self.end - end
        if not count:
            return ()
        return self._keys[-count:] if count <= len(self._keys) else None
