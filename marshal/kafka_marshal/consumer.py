"""The consumer: hands out records of the partitions that its claims hold.

It runs on the application's thread; the engine's thread keeps the claims
alive meanwhile, however long a handler takes. Before every hand-out the lease
is looked at (PROTOCOL 5.2), and what was fetched under a claim that has ended
is dropped, not handed out.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self

import attrs

from kafka_marshal.engine import Engine, Session, Subscription
from kafka_marshal.engine.handout import (
    FETCH_SLICE_MS,
    WAIT_SLICE_MS,
    ConsumerOptions,
    HandOut,
    lost_claim,
)
from kafka_marshal.engine.place import Place
from kafka_marshal.errors import (
    ClaimLost,
    DeadlineExceeded,
    InvalidTransition,
    MarshalError,
)
from kafka_marshal.ports import DataReader, Record
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.types import Token, TopicPartition

CLOSE_MS_MAX = 10_000


@attrs.frozen
class Batch:
    """Records of one partition, handed out together under one claim.

    Attributes:
        partition: Data partition.
        records: At least one record, in offset order.
        token: Fencing token of the claim.
    """

    partition: TopicPartition
    records: tuple[Record, ...]
    token: Token
    _consumer: "Consumer"

    @property
    def first_offset(self) -> int:
        """Offset of the first record."""
        return self.records[0].offset

    @property
    def last_offset(self) -> int:
        """Offset of the last record."""
        return self.records[-1].offset

    def commit(self) -> None:
        """Note every record of the batch as processed; see ``Consumer.commit``."""
        self._consumer.commit(self.records)


class Consumer:
    """Consumes topics in a group; made by ``Marshal.consumer``.

    Not thread-safe: one thread uses it at a time. Only ``stop`` may be called
    from anywhere, signal handlers included.

    Attributes:
        is_close_confirmed: False once closing got no answer from the log.
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
        self._engine = engine
        self._session = session
        self._subscription = subscription
        self._reader = reader
        self._options = options
        self._clock = engine.context.ports.clock
        self._hands = HandOut(
            engine,
            session,
            subscription=subscription,
            reader=reader,
            options=options,
        )
        self._places = self._hands.places
        self._is_stopped = False
        self._is_closed = False
        self.is_close_confirmed = True
        self._pid = os.getpid()

    # --- reading

    def poll(
        self, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Record]]:
        """Return records that are now handed out to the caller.

        Args:
            timeout_ms: How long to wait for the first record.
            max_records: Most records to return; by default ``max_poll_records``.

        Returns:
            Records by partition, in offset order; empty when none came in time
            and while the group is paused. After ``stop`` nothing more is fetched
            or asked for: what comes then was fetched or granted before.

        Raises:
            ClaimLost: A partition was lost while records of it were in hand,
                and there is no ``on_lost``. Other partitions are unaffected.
            PositionError: A position lies beyond the end of its log.
            IdentityConflict: Another live process uses our client_id.
            CoordinationError: The engine failed for good.
        """
        most = max_records or self._options.max_poll_records
        deadline_ms = self._clock.now_ms() + timeout_ms
        self._hands.take_back()
        while True:
            self._sync()
            handed = self._hands.hand_out(most)
            if handed:
                return handed
            left_ms = max(0, deadline_ms - self._clock.now_ms())
            if self._is_stopped:
                if not left_ms or not self._hands.awaits_grants():
                    return handed
                self._hands.wait(left_ms)
                continue
            self._hands.fetch(left_ms)
            handed = self._hands.hand_out(most)
            if handed:
                return handed
            if self._clock.now_ms() >= deadline_ms:
                return {}

    def __iter__(self) -> Iterator[Record]:
        """Iterate over records, one hand-out at a time, until ``stop``.

        Under at most once, what was granted before is still handed out.
        """
        return self

    def __next__(self) -> Record:
        """Return the next record; its lease is looked at now, not when fetched."""
        for record in self._forever(1):
            return record[1][0]
        raise StopIteration

    def batches(self, max_records: int | None = None) -> Iterator[Batch]:
        """Iterate over batches of one partition each, until ``stop``."""
        most = max_records or self._options.max_poll_records
        for partition, records in self._forever(most):
            token = records[0].token
            if token is not None:
                yield Batch(partition, tuple(records), token, self)

    def _forever(self, most: int) -> Iterator[tuple[TopicPartition, list[Record]]]:
        timeout_ms = self._options.consumer_timeout_ms
        since_ms = self._clock.now_ms()
        # What was granted is nobody else's: it is finished after a stop, too.
        while not self._is_stopped or self._hands.holds_grants():
            handed = self.poll(FETCH_SLICE_MS, most)
            yield from handed.items()
            now_ms = self._clock.now_ms()
            if handed:
                since_ms = now_ms
            elif timeout_ms is not None and now_ms - since_ms >= timeout_ms:
                return

    # --- committing

    def commit(self, records: Record | Iterable[Record] | None = None) -> None:
        """Note records as processed; the next beat carries the position.

        Out of order is fine: the position moves over the contiguous prefix
        (PROTOCOL 6.1). Under at most once the grant was the commit, so nothing
        is written, and the call only tells of a claim that has ended.

        Args:
            records: What is processed; None = everything handed out so far.

        Raises:
            ClaimLost: A record was handed out under a claim that has ended;
                somebody else may process it again.
            InvalidTransition: A record was never handed out by this consumer.
        """
        self._require_usable()
        if records is None:
            self._commit_everything()
            return
        if isinstance(records, Record):
            records = (records,)
        now_ms = self._clock.now_ms()
        with self._engine.changed:
            for record in records:
                place = self._place_of(record, now_ms)
                if isinstance(place.holding.progress, AtLeastOnce):
                    place.holding.progress.commit(record.offset)

    def _commit_everything(self) -> None:
        now_ms = self._clock.now_ms()
        with self._engine.changed:
            for place in self._places.values():
                progress = place.holding.progress
                if isinstance(progress, AtLeastOnce) and progress.tracked_count:
                    self._require_valid(place, now_ms)
                    progress.commit_all()
        self._sync()

    def _place_of(self, record: Record, now_ms: int) -> Place:
        partition = TopicPartition(record.topic, record.partition)
        place = self._places.get(partition)
        if place is None or place.holding.claim.token != record.token:
            raise ClaimLost(
                f"{partition} offset {record.offset} was handed out under token "
                f"{record.token}, which has ended; do not count it as processed",
                reason="stale_token",
            )
        self._require_valid(place, now_ms)
        return place

    def _require_valid(self, place: Place, now_ms: int) -> None:
        claim = place.holding.claim
        if not claim.is_valid(now_ms):
            # What is told as lost stays lost: a beat that is read back later would
            # revive the claim, and nobody would ever commit what was dropped.
            with self._engine.changed:
                self._session.check_lease(place.holding, now_ms)
            raise lost_claim(place.partition, claim.ending or Ending("lease_expired"))

    def flush(self, timeout_ms: int = CLOSE_MS_MAX) -> None:
        """Write every position to the log and wait until it stands there.

        Raises:
            ClaimLost: A claim ended meanwhile; its position was not taken.
            DeadlineExceeded: Not in time; the positions may still land.
        """
        self._require_usable()
        with self._engine.changed:
            held = list(self._places.values())
            seqs = self._session.beat_now()
        self._await(lambda: not self._session.is_pending(seqs), timeout_ms)
        now_ms = self._clock.now_ms()
        for place in held:
            if place.holding.drain is None:
                self._require_valid(place, now_ms)

    # --- questions

    def assignment(self) -> set[TopicPartition]:
        """Return the partitions that this consumer holds now."""
        self._sync(quiet=True)
        return set(self._places)

    def tokens(self) -> dict[TopicPartition, Token]:
        """Return the fencing token of every partition held."""
        self._sync(quiet=True)
        return {
            partition: place.holding.claim.token
            for partition, place in self._places.items()
            if place.holding.claim.token is not None
        }

    def position(self, partition: TopicPartition) -> int | None:
        """Return the next offset to be handed out, None where it is not held."""
        self._sync(quiet=True)
        place = self._places.get(TopicPartition(*partition))
        return None if place is None else place.next_offset

    def committed(self, partition: TopicPartition) -> int | None:
        """Return the position of the partition: everything below is processed."""
        self._sync(quiet=True)
        place = self._places.get(TopicPartition(*partition))
        if place is None:
            return None
        progress = place.holding.progress
        if isinstance(progress, AtLeastOnce):
            return progress.position
        world = self._engine.context.replica_of(place.holding.key).world
        return world.keys[place.holding.key].next_unclaimed()

    def pause(self, *partitions: TopicPartition) -> None:
        """Stop handing out records of these partitions; the claims are kept."""
        self._require_usable()
        self._hands.paused.update(
            TopicPartition(*partition) for partition in partitions
        )

    def resume(self, *partitions: TopicPartition) -> None:
        """Undo ``pause``."""
        self._require_usable()
        self._hands.paused.difference_update(TopicPartition(*p) for p in partitions)

    def paused(self) -> set[TopicPartition]:
        """Return the partitions that ``pause`` holds back."""
        return set(self._hands.paused)

    # --- ending

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    def stop(self) -> None:
        """End iteration and polling soon. For signal handlers and other threads."""
        self._is_stopped = True

    def close(self, *, release: bool = True, timeout_ms: int = CLOSE_MS_MAX) -> None:
        """Give every partition up at its committed position. Idempotent.

        Args:
            release: False keeps the claims for a restart of the same client_id
                within H: a last beat is sent and nothing is released. They are
                kept alive until the ``Marshal`` closes.
            timeout_ms: How long to wait until the log shows it.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = self._is_stopped = True
        session = self._session
        with self._engine.changed:
            self._hands.report_unused()
            seqs = session.unsubscribe(self._subscription, release=release)
        try:
            self._await(
                lambda: not session.leaving_count and not session.is_pending(seqs),
                timeout_ms,
            )
        except MarshalError:
            # The claims run out by themselves; somebody takes them after 2H.
            self._engine.context.observe("close_unconfirmed", {})
            self.is_close_confirmed = False
        self._places.clear()
        self._reader.close(timeout_ms)

    def __enter__(self) -> Self:
        """Return the consumer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; what was not committed is handed out again, by somebody."""
        self.close()

    # --- following the session

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            # PROTOCOL 1.7: nothing inherits.
            raise InvalidTransition(
                "this consumer belongs to the parent process; open a Marshal of its "
                "own after fork"
            )
        failure = self._engine.failure or self._session.failure
        if failure is not None:
            raise failure
        if self._is_closed:
            raise InvalidTransition("the consumer is closed")

    def _sync(self, *, quiet: bool = False) -> None:
        """Take notice of claims that came and went."""
        self._require_usable()
        self._hands.follow()
        if not quiet and self._hands.lost:
            raise self._hands.lost.pop(0)

    def _await(self, is_done: Callable[[], bool], timeout_ms: int) -> None:
        deadline_ms = self._clock.now_ms() + timeout_ms
        with self._engine.changed:
            while not is_done():
                failure = self._engine.failure
                if failure is not None:
                    raise failure
                left_ms = deadline_ms - self._clock.now_ms()
                if left_ms <= 0:
                    raise DeadlineExceeded(
                        f"the log did not confirm within {timeout_ms} ms; check the "
                        "brokers with: marshal doctor"
                    )
                self._engine.changed.wait(min(left_ms, WAIT_SLICE_MS) / 1000)
