"""One coordinating partition as this process knows it, with local timing."""

from kafka_marshal.errors import LogUnreadable
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.transition import Transition
from kafka_marshal.protocol.types import LogEntry


class Replica:
    """World state of one T, and when this process learnt of it.

    Attributes:
        world: The fold so far.
        folded_at_ms: Local time at which the last entry was folded.
    """

    __slots__ = ("folded_at_ms", "world")

    def __init__(self, partition: int, *, now_ms: int) -> None:
        self.world = WorldState(partition)
        self.folded_at_ms = now_ms

    def fold(self, entry: LogEntry, now_ms: int) -> tuple[Transition, ...]:
        """Fold one entry that was received at local time ``now_ms``."""
        transitions = apply(self.world, entry)
        self.folded_at_ms = now_ms
        return transitions

    @property
    def heartbeat_interval_ms(self) -> int:
        """H in force in this T as of the entry folded last; 0 without a Config."""
        config = self.world.config
        return 0 if config is None else config.heartbeat_interval_ms

    def elapsed_ms(self, now_ms: int) -> int:
        """Return the local time since the last entry (PROTOCOL 4.11)."""
        return max(0, now_ms - self.folded_at_ms)


def check_halt(replica: Replica) -> None:
    """Refuse to go on behind a Config that this release cannot follow.

    Raises:
        LogUnreadable: The partition halted (PROTOCOL 3.3).
    """
    halt = replica.world.halted
    if halt is not None:
        raise LogUnreadable(
            f"coordinating partition {replica.world.partition} needs feature level "
            f"{halt.feature_level} from offset {halt.offset} on, which this "
            "release does not know; upgrade kafka-marshal"
        )
