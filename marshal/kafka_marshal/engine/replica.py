"""One coordinating partition as this process knows it, with local timing."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from kafka_marshal.errors import LogUnreadable
from kafka_marshal.protocol.checkpoints import Comparison, Watch
from kafka_marshal.protocol.fold_beats import fold_beats
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import Transition, WorldState
from kafka_marshal.protocol.types import Key, LogEntry


class Glance(NamedTuple):
    """What is known of a key without asking anybody.

    Attributes:
        holder: client_id of the owner by the log, None where it has none.
        freshness: ``fresh``, ``unknown`` or ``stale``; None without an owner.
        age_ms: Time since the owner's last renewal, None where that is not known.
        position: Next offset that is neither processed nor granted, None likewise.
        noted: Offset of the record by which it last changed hands, None likewise.
        follows: Epoch before the claim that this record made, None likewise.
    """

    holder: str | None
    freshness: str | None = None
    age_ms: int | None = None
    position: int | None = None
    noted: int | None = None
    follows: int | None = None


class LastClaim(NamedTuple):
    """The newest claim of a key by the log.

    Attributes:
        owner: client_id that holds it, None where it was released.
        epoch: Offset of the claim in the log.
        may_be_ours: Whether it is of the very session, or sidecar, of whoever asks,
            and of nobody else there: perhaps it is won and not told yet.
    """

    owner: str | None
    epoch: int
    may_be_ours: bool = False


class Replica:
    """World state of one T, and when this process learnt of it.

    Attributes:
        world: The fold so far.
        began_at: Offset from which on it has folded: that of the state it began at.
        folded_at_ms: Local time at which the last entry was folded.
        checkpoints: What it sees of checkpoints.
        compared: The last checkpoint that was compared with our own state.
    """

    __slots__ = (
        "_is_news",
        "began_at",
        "checkpoints",
        "compared",
        "folded_at_ms",
        "world",
    )

    def __init__(self, partition: int, *, now_ms: int) -> None:
        self.begin(WorldState(partition), now_ms)

    def begin(self, world: WorldState, now_ms: int) -> None:
        """Go on from another state, whatever was known before."""
        self.world = world
        self.began_at = world.next_offset
        self.folded_at_ms = now_ms
        self.checkpoints = Watch()
        self.compared: Comparison | None = None
        self._is_news = False

    def fold(self, entry: LogEntry, now_ms: int) -> tuple[Transition, ...]:
        """Fold one entry that was received at local time ``now_ms``."""
        transitions = apply(self.world, entry)
        self.folded_at_ms = now_ms
        compared = self.checkpoints.on_entry(self.world, transitions)
        if compared is not None:
            self.compared = compared
            self._is_news = True
        return transitions

    def fold_run(
        self, entries: Sequence[LogEntry], now_ms: int
    ) -> Iterator[tuple[LogEntry, tuple[Transition, ...]]]:
        """Fold entries in order, for whoever reads up to an end.

        Yields:
            Each entry with what it did, right after it was folded; ordinary beats
            are folded in between, and not told of.
        """
        start = 0
        while True:
            stop = fold_beats(self.world, entries, start=start)
            if stop > start:
                self.checkpoints.pass_beats(stop - start)
                self.folded_at_ms = now_ms
            if stop == len(entries):
                return
            yield entries[stop], self.fold(entries[stop], now_ms)
            start = stop + 1

    def take_compared(self) -> Comparison | None:
        """Return a comparison that was not taken yet, if the last entry made one."""
        compared = self.compared if self._is_news else None
        self._is_news = False
        return compared

    @property
    def heartbeat_interval_ms(self) -> int:
        """H in force in this T as of the entry folded last; 0 without a Config."""
        config = self.world.config
        return 0 if config is None else config.heartbeat_interval_ms

    def glance(self, key: Key, now_ms: int) -> Glance | None:
        """Return what is known of a key at a local time, None where nothing is."""
        known = self.world.keys.get(key)
        if known is None:
            return None
        log_ms = self.world.now_ms + self.elapsed_ms(now_ms)
        age_ms, position = known.age_ms(log_ms), known.next_unclaimed()
        note = self.world.soft.notes.get(key)
        at = (None, None) if note is None else (note.offset, note.follows)
        if known.owner is None:
            return Glance(None, None, age_ms, position, *at)
        fresh = known.freshness(log_ms).value
        return Glance(known.owner.client_id, fresh, age_ms, position, *at)

    def elapsed_ms(self, now_ms: int) -> int:
        """Return the local time since the last entry (PROTOCOL 4.11)."""
        return max(0, now_ms - self.folded_at_ms)


def runs_of(
    entries: Iterable[tuple[int, LogEntry]],
) -> Iterator[tuple[int, list[LogEntry]]]:
    """Yield entries as they follow each other in one partition, with its number."""
    for partition, run in groupby(entries, key=itemgetter(0)):
        yield partition, [entry for _, entry in run]


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
