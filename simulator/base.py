"""Base classes of simulated worlds, with or without sidecars."""

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

    Claims of two data partitions may have equal tokens.
    """
    return (one.topic, one.partition, one.token) == (
        other.topic,
        other.partition,
        other.token,
    )


class BaseWorld:
    """A cluster in memory on virtual time, with the judges of its processes.

    Attributes:
        cluster: The cluster in memory.
        places: The data partitions.
        watcher: Folds the log and passes it to the log judge.
        hand_outs: Passes hand-outs to applications to the operation judge.
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
        """Return position and end of every partition with records left to process."""
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
    """Demands that a world recovers within bounds once all faults are healed."""

    def __init__(self, world: BaseWorld, *, h_ms: int) -> None:
        """Demand liveness of a world; bounds are multiples of ``h_ms``."""
        self._base = world
        self._h_ms = h_ms

    @abstractmethod
    def _gets(self, limit_ms: int, is_done: Callable[[], bool]) -> bool:
        """Let time pass until a condition holds; return whether it does, in time."""

    @abstractmethod
    def _live(self, duration_ms: int) -> None:
        """Let time pass."""

    @abstractmethod
    def _missing(self) -> list[TopicPartition]:
        """Return the partitions that no process uses."""

    def _demand_owned(self, invariant: str, limit_ms: int) -> None:
        """Demand that every partition is in use within a time.

        Raises:
            Violation: A partition is not in use in time.
        """
        if not self._gets(limit_ms, lambda: not self._missing()):
            raise Violation(invariant, f"{self._missing()} unused for {limit_ms} ms")

    def _demand_done(self, *, base_ms: int, record_ms: int) -> None:
        """Demand that all records get processed, however slow processing was before.

        Args:
            base_ms: Time that it may take without any records.
            record_ms: Additional time for each record.

        Raises:
            Violation: Records are left after that time.
        """
        left = self._base.left()
        todo = sum(end - position for position, end in left.values())
        if not self._gets(base_ms + record_ms * todo, lambda: not self._base.left()):
            raise Violation("liveness", f"not all consumed: {self._base.left()}")

    @abstractmethod
    def _is_calm(self) -> bool:
        """Return whether no member still holds back after it released keys."""

    def _demand_calm(self) -> None:
        """L6: demand that each member that was too slow claims again in the end.

        Raises:
            Violation: A member still holds back.
        """
        if not self._gets(BACKOFF_HS_MAX * self._h_ms, self._is_calm):
            raise Violation("L6", "a member claims no key any more")

    def _demand_rest(self) -> None:
        """L2: demand that no key moves while nothing fails.

        A member that was too slow for the last records gets keys back once it claims
        again, so this waits for it first.

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
