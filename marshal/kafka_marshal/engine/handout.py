"""Fetches records and hands them out under claims, on the consumer's thread.

Before every hand-out the lease is looked at (PROTOCOL 5.2), under the lock that
the engine ends claims under; what was fetched under a claim that has ended is
dropped, not handed out.
"""

from collections.abc import Callable, Mapping

import attrs

from kafka_marshal.errors import (
    ClaimLost,
    ConfigurationError,
    CoordinationError,
    PositionError,
)
from kafka_marshal.ports import DataReader, Record
from kafka_marshal.protocol.claiming import Ending, Phase
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.granting import AtMostOnce
from kafka_marshal.protocol.types import Token, TopicPartition

from .engine import Engine
from .holding import Holding
from .pipeline import Pipeline
from .place import Place
from .session import Session
from .subscription import Subscription

BACKLOG_WARNING = 1_000
FETCH_SLICE_MS = 100
WAIT_SLICE_MS = 50

OnClaimed = Callable[[TopicPartition, Token], None]
OnLost = Callable[[TopicPartition, Ending], None]


@attrs.frozen
class ConsumerOptions:
    """How a consumer hands out.

    Attributes:
        max_poll_records: Most records of one poll; under at most once also the
            size of a batch, which is what a crash loses (PROTOCOL 6.2).
        max_uncommitted: Records in hand per partition at which fetching stops
            until some are committed.
        consumer_timeout_ms: Iteration ends after this long without a record;
            None waits for ever.
        on_claimed: Called on the application's thread for each new partition.
        on_lost: Called for each partition that goes while the consumer is open,
            however it ended; closing does not call it. Without it, a partition
            that is lost while records of it are in hand raises ``ClaimLost``
            from the next call.
    """

    max_poll_records: int = 500
    max_uncommitted: int = 10_000
    consumer_timeout_ms: int | None = None
    on_claimed: OnClaimed | None = None
    on_lost: OnLost | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("max_poll_records", "max_uncommitted"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1", setting=name)


class HandOut:
    """The partitions of one consumer: what is fetched, granted and handed out.

    Attributes:
        places: Every partition that is held, by name.
        paused: Partitions that the application holds back.
        lost: Losses that the application has yet to be told of.
    """

    def __init__(
        self,
        engine: Engine,
        session: Session,
        *,
        subscription: Subscription,
        reader: DataReader,
        options: ConsumerOptions,
    ) -> None:
        self.places: dict[TopicPartition, Place] = {}
        self.paused = subscription.paused
        self.lost: list[ClaimLost] = []
        self._engine = engine
        self._session = session
        self._subscription = subscription
        self._reader = reader
        self._options = options
        self._clock = engine.context.ports.clock
        self._pipeline = Pipeline(
            engine, session, reader=reader, most=options.max_poll_records
        )
        self._held_back: set[TopicPartition] = set()
        self._version = -1
        self._turn = 0

    def follow(self) -> None:
        """Take notice of claims that came and went."""
        if self._version == self._subscription.version:
            return
        gained: list[Place] = []
        with self._engine.changed:
            self._version = self._subscription.version
            held = {}
            for key, holding in self._session.holdings.items():
                mine = key.topic in self._subscription.topics
                if mine and holding.claim.phase is Phase.HELD:
                    held[key.topic_partition] = holding
        for partition, place in list(self.places.items()):
            if held.get(partition) is not place.holding:
                del self.places[partition]
                self._on_gone(place)
        for partition, holding in held.items():
            if partition not in self.places:
                gained.append(Place(partition, holding, start_of(holding)))
        for place in gained:
            self.places[place.partition] = place
        self._reader.assign(list(self.places))
        self._held_back.intersection_update(self.places)
        for place in gained:
            place.go_to(self._reader, place.next_offset)
            token = place.holding.claim.token
            if self._options.on_claimed is not None and token is not None:
                self._options.on_claimed(place.partition, token)

    def _on_gone(self, place: Place) -> None:
        ending = place.holding.claim.ending or Ending("replaced")
        had_work = place.holding.in_hand_count + place.buffered_count > 0
        self._pipeline.report_unused(place)
        if self._options.on_lost is not None:
            self._options.on_lost(place.partition, ending)
        elif ending.was_lost and had_work:
            self.lost.append(lost_claim(place.partition, ending))

    def _observe(self, name: str, fields: Mapping[str, object]) -> None:
        self._engine.context.observe(name, fields)

    # --- handing out

    def take_back(self) -> None:
        """Note that the application is done with all that it was handed.

        Under at most once nothing is committed, so asking for more is the only
        sign of it; a drain waits for that (PROTOCOL 8.1). Under at least once
        the commit may be yet to come: a surplus partition waits another H.
        """
        with self._engine.changed:
            self._subscription.back_at_ms = self._clock.now_ms()
            for place in self.places.values():
                holding = place.holding
                holding.lent_count = 0
                if holding.drain is not None and holding.drain.until_ms is None:
                    heartbeat_ms = self._engine.context.heartbeat_interval_ms
                    until_ms = self._clock.now_ms() + heartbeat_ms
                    holding.drain = attrs.evolve(holding.drain, until_ms=until_ms)

    def hand_out(self, most: int) -> dict[TopicPartition, list[Record]]:
        """Hand out up to ``most`` fetched records whose lease stands now."""
        handed: dict[TopicPartition, list[Record]] = {}
        places = list(self.places.values())
        if not any(place.buffered_count for place in places):
            return handed
        left = most
        with self._engine.changed:
            now_ms = self._clock.now_ms()
            for index in range(len(places)):
                place = places[(self._turn + index) % len(places)]
                if left <= 0:
                    break
                if place.buffered_count and place.partition not in self.paused:
                    records = self._hand_out_of(place, left, now_ms)
                    if records:
                        handed[place.partition] = records
                        left -= len(records)
            self._turn += 1
        return handed

    def _hand_out_of(self, place: Place, most: int, now_ms: int) -> list[Record]:
        holding = place.holding
        progress = holding.progress
        if isinstance(progress, AtMostOnce):
            if not holding.claim.may_hand_out(now_ms):
                return []
            records = self._pipeline.take(place, progress, most=most)
            holding.lent_count += len(records)
        else:
            if not holding.may_hand_out(now_ms):
                place.put_back(self._reader)
                return []
            records = list(place.take(most))
            if progress is not None:
                progress.hand_out(record.offset for record in records)
                self._watch_backlog(place, progress)
        if records:
            place.next_offset = records[-1].offset + 1
            holding.handed_count += len(records)
        return records

    def _watch_backlog(self, place: Place, progress: AtLeastOnce) -> None:
        count = progress.tracked_count
        if count > BACKLOG_WARNING and not place.has_warned:
            place.has_warned = True
            fields = {"key": place.holding.key, "uncommitted": count}
            self._observe("uncommitted_backlog", fields)
        elif count <= BACKLOG_WARNING:
            place.has_warned = False

    # --- fetching

    def fetch(self, left_ms: int) -> None:
        """Fetch more, or wait for what is under way, for at most a slice."""
        if self._pipeline.ask(self.places.values()):
            self._wait(min(left_ms, WAIT_SLICE_MS))
            return
        self._hold_back()
        if not set(self.places) - self._held_back:
            self._wait(min(left_ms, WAIT_SLICE_MS))
            return
        try:
            fetched = self._reader.poll(
                min(left_ms, FETCH_SLICE_MS), self._options.max_poll_records
            )
        except PositionError as error:
            self._on_out_of_range(error)
            return
        except CoordinationError as error:
            if not error.retriable:
                raise
            self._observe("fetch_failed", {"error": error})
            self._wait(min(left_ms, WAIT_SLICE_MS))
            return
        for partition, records in fetched.items():
            place = self.places.get(partition)
            if place is None or not records:
                continue
            if place.buffered_count:
                place.fetched = [*place.fetched[place.at :], *records]
            else:
                place.fetched = records
            place.at = 0
        self._pipeline.ask(self.places.values())

    def _hold_back(self) -> None:
        """Let the reader fetch only what could be handed out now."""
        now_ms = self._clock.now_ms()
        wanted = set()
        for partition, place in self.places.items():
            progress = place.holding.progress
            full = (
                isinstance(progress, AtLeastOnce)
                and progress.tracked_count >= self._options.max_uncommitted
            )
            if (
                full
                or place.buffered_count
                or partition in self.paused
                or not place.holding.may_hand_out(now_ms)
            ):
                wanted.add(partition)
        self._reader.pause(list(wanted - self._held_back))
        self._reader.resume(list(self._held_back - wanted))
        self._held_back = wanted

    def _on_out_of_range(self, error: PositionError) -> None:
        partition = TopicPartition(*(error.partition or ("", 0)))
        place = self.places.get(partition)
        if place is None:
            return
        fields: dict[str, object] = {"key": place.holding.key, "error": error}
        if error.log_start < 0:
            # The range could not be asked: try again, decide on nothing.
            self._observe("range_unknown", fields)
            place.put_back(self._reader)
            return
        if error.requested < error.log_start:
            # PROTOCOL 5.6: retention took what lies below; go on at log start.
            self._observe("position_jumped", fields)
            place.go_to(self._reader, error.log_start)
            with self._engine.changed:
                progress = place.holding.progress
                if isinstance(progress, AtMostOnce):
                    progress.next_first = max(progress.next_first, error.log_start)
                elif progress is not None and not progress.tracked_count:
                    progress.jump(error.log_start)
            return
        self._observe("position_out_of_range", fields)
        with self._engine.changed:
            self._subscription.shun(place.holding.key)
            self._session.release(place.holding, reason="position_out_of_range")
        raise error

    def report_unused(self) -> None:
        """Tell which granted offsets nobody will ever process (PROTOCOL 6.2)."""
        for place in self.places.values():
            self._pipeline.report_unused(place)

    def awaits_grants(self) -> bool:
        """Return whether a verdict on asked-for offsets is still to come.

        They may be granted yet, and nobody else will ever process them then.
        """
        with self._engine.changed:
            return self._pipeline.awaits(self.places.values())

    def holds_grants(self) -> bool:
        """Return whether records are, or may yet be, granted and not handed out."""
        with self._engine.changed:
            return self._pipeline.holds(self.places.values())

    def wait(self, timeout_ms: int) -> None:
        """Wait for news of the engine, for at most a slice."""
        self._wait(min(timeout_ms, WAIT_SLICE_MS))

    def _wait(self, timeout_ms: int) -> None:
        if timeout_ms > 0:
            with self._engine.changed:
                self._engine.changed.wait(timeout_ms / 1000)


def start_of(holding: Holding) -> int:
    """Return where to begin under a claim, or to go on for an earlier consumer."""
    progress = holding.progress
    if isinstance(progress, AtMostOnce):
        return progress.next_first
    return 0 if progress is None else progress.position or 0


def lost_claim(partition: TopicPartition, ending: Ending) -> ClaimLost:
    """Return the error that tells of a claim lost with records in hand."""
    by = f" by {ending.winner!r}" if ending.winner else ""
    at = f" at log offset {ending.at_offset}" if ending.at_offset is not None else ""
    return ClaimLost(
        f"the claim of {partition} ended ({ending.reason}{by}{at}) with records in "
        "hand; stop processing them, their next owner starts at the last position",
        winner=ending.winner,
        at_offset=ending.at_offset,
        reason=ending.reason,
    )
