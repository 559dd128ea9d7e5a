"""What worlds of direct members and worlds of sidecars have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kafka_marshal.ports import Record
from kafka_marshal.protocol.types import Key, TopicPartition
from simulator.checkers import Folded, HandOuts, LogWatcher, Violation
from simulator.node import Cluster

GROUP = "g"
TOPIC = "t"
BACKOFF_HS_MAX = 300


def is_of_one_claim(one: Record, other: Record) -> bool:
    """Return whether two records were handed out under the same claim.

    Claims of two partitions may have equal tokens.
    """
    return (one.topic, one.partition, one.token) == (
        other.topic,
        other.partition,
        other.token,
    )


class BaseWorld:
    """A cluster in memory on virtual time, and what judges who works on it.

    Attributes:
        cluster: The cluster in memory.
        places: The data partitions.
        watcher: Folds the log and has it judged.
        hand_outs: Has judged what applications get.
        transcript: Everything that happened, one line each.
    """

    def __init__(
        self,
        cluster: Cluster,
        places: Sequence[TopicPartition],
        *,
        is_at_most_once: bool,
    ) -> None:
        """Start at the beginning of the logs."""
        self.cluster = cluster
        self.places = places
        self.transcript: list[str] = []
        self.watcher = LogWatcher(
            cluster.kafka,
            cluster.config.partition_count,
            note=self.transcript.append,
            on_fold=self._on_fold,
        )
        self.hand_outs = HandOuts(self.watcher, is_at_most_once=is_at_most_once)

    @property
    def now_ms(self) -> int:
        """True time."""
        return self.cluster.clock.at_ms

    @property
    def topic_id(self) -> bytes | None:
        """Id of the data topic, None while there is none."""
        kafka = self.cluster.kafka
        return kafka.topic(TOPIC).topic_id if kafka.has_topic(TOPIC) else None

    def trace(self, line: str) -> None:
        """Add a line to the transcript."""
        self.transcript.append(f"{self.now_ms} {line}")

    def left(self) -> dict[str, tuple[int, int]]:
        """Return position and end of every partition that is not done."""
        found, topic_id = {}, self.topic_id
        for place in self.places:
            key = Key(GROUP, *place)
            end = self.cluster.kafka.log(place).end
            position = 0
            for world in self.watcher.worlds:
                known = world.keys.get(key)
                if known is not None and known.topic_id == topic_id:
                    position = max(position, known.next_unclaimed() or 0)
            if position < end:
                found[f"{place.topic}-{place.partition}"] = (position, end)
        return found

    def _on_fold(self, folded: Folded) -> None:
        self.hand_outs.on_fold(folded)


class Liveness(ABC):
    """Demands of a world that is healed that it gets well, within bounds."""

    def __init__(self, world: BaseWorld, *, h_ms: int) -> None:
        """Demand it of a world; each bound is a multiple of the heartbeat interval."""
        self._base = world
        self._h_ms = h_ms

    @abstractmethod
    def _gets(self, limit_ms: int, is_done: Callable[[], bool]) -> bool:
        """Let time pass until something is done; return whether it is, in time."""

    @abstractmethod
    def _live(self, duration_ms: int) -> None:
        """Let time pass."""

    @abstractmethod
    def _missing(self) -> list[TopicPartition]:
        """Return the partitions that nobody uses."""

    def _demand_owned(self, invariant: str, limit_ms: int) -> None:
        """Every partition is used.

        Raises:
            Violation: Not in time.
        """
        if not self._gets(limit_ms, lambda: not self._missing()):
            raise Violation(invariant, f"{self._missing()} unused for {limit_ms} ms")

    def _demand_done(self, *, base_ms: int, record_ms: int) -> None:
        """Everything gets processed, however slow it has been before.

        Args:
            base_ms: How long it may take, whatever there is to do.
            record_ms: How much longer for each record.

        Raises:
            Violation: Not in time.
        """
        left = self._base.left()
        todo = sum(end - position for position, end in left.values())
        if not self._gets(base_ms + record_ms * todo, lambda: not self._base.left()):
            raise Violation("liveness", f"not all consumed: {self._base.left()}")

    @abstractmethod
    def _is_calm(self) -> bool:
        """Return whether nobody holds back, having released something."""

    def _demand_calm(self) -> None:
        """L6: each member that was too slow claims again in the end.

        Raises:
            Violation: Somebody still holds back.
        """
        if not self._gets(BACKOFF_HS_MAX * self._h_ms, self._is_calm):
            raise Violation("L6", "somebody never takes anything again")

    def _demand_rest(self) -> None:
        """L2: nothing fails, so nothing moves.

        A member that was too slow for the last records gets keys back once it claims
        again, so it is waited for.

        Raises:
            Violation: Claims changed hands.
        """
        self._demand_calm()
        self._live(2 * self._h_ms)
        claims = self._base.watcher.claims
        self._live(4 * self._h_ms)
        moved = self._base.watcher.claims - claims
        if moved:
            raise Violation("L2", f"{moved} keys moved although nothing failed")
