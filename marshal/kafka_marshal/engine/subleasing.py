"""What a session needs of a part that uses its claims for other processes."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from kafka_marshal.errors import PositionError
from kafka_marshal.protocol.types import Key

from .subscription import Subscription


class Subleaser(Protocol):
    """Grants subleases of a session's claims to other processes: a sidecar's group.

    Called under the engine's lock.
    """

    def drive(self, now_ms: int) -> None:
        """Act after each round of the session, and after it was fenced."""
        ...

    def is_reserved(self, key: Key) -> bool:
        """Return whether a process may still use a key under an earlier claim."""
        ...

    def foresee(self, sub: Subscription, keys: Iterable[Key]) -> Mapping[Key, str]:
        """Return the process that each key will probably be subleased to."""
        ...

    def on_no_position(self, key: Key, error: PositionError) -> None:
        """Note that a key was released because it has no start position."""
        ...

    def has_warmed(self, key: Key) -> bool:
        """Return whether the process that a key moves to has warmed up for it."""
        ...

    def acted_on(self, generation: int) -> int:
        """Return the least Config generation that these processes act on.

        Args:
            generation: That of this process, which is the most.
        """
        ...

    @property
    def handoff_counts(self) -> Mapping[str, int]:
        """Open handoffs between these processes, by phase."""
        ...
