"""One coordinating partition as this process knows it, with local timing."""

from kafka_marshal.errors import LogUnreadable
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.transition import Transition
from kafka_marshal.protocol.types import LogEntry

STEP_MARGIN_MS = 50


class Replica:
    """World state of one T, and when this process learnt of it.

    Attributes:
        world: The fold so far.
        folded_at_ms: Local time at which the last entry was folded.
    """

    __slots__ = ("_lead", "folded_at_ms", "world")

    def __init__(self, partition: int, *, now_ms: int) -> None:
        self.world = WorldState(partition)
        self.folded_at_ms = now_ms
        self._lead: tuple[int | None, int] | None = None

    def fold(self, entry: LogEntry, now_ms: int) -> tuple[Transition, ...]:
        """Fold one entry that was received at local time ``now_ms``."""
        transitions = apply(self.world, entry)
        self.folded_at_ms = now_ms
        return transitions

    def elapsed_ms(self, now_ms: int) -> int:
        """Return the local time since the last entry (PROTOCOL 4.11)."""
        return max(0, now_ms - self.folded_at_ms)

    def forward_step_ms(self, now_ms: int) -> int:
        """Return by how much log time ran ahead of local time since last asked.

        Called after live entries were folded. An entry that arrives late makes
        log time look slow, never fast, so the largest lead seen in this leader
        epoch is the baseline, and only what exceeds it by a margin is a step of
        the leader's clock (PROTOCOL S4). A false alarm only shortens leases.
        """
        lead_ms = self.world.now_ms - now_ms
        epoch = self.world.leader_epoch
        if self._lead is None or self._lead[0] != epoch:
            self._lead = (epoch, lead_ms)
            return 0
        surplus_ms = lead_ms - self._lead[1]
        if surplus_ms > 0:
            self._lead = (epoch, lead_ms)
        return surplus_ms if surplus_ms > STEP_MARGIN_MS else 0


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
