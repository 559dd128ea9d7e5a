"""Fetches records and hands them out under claims, on the consumer's thread.

The lease is checked before every hand-out (PROTOCOL 5.2), under the lock that the
engine ends claims under. Records fetched under a claim that has ended are dropped.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import attrs

from kafka_marshal.config import Callbacks
from kafka_marshal.errors import (
    ClaimLost,
    CoordinationError,
    MarshalError,
    PositionError,
    UnknownTopicId,
)
from kafka_marshal.ports import (
    READ_UNCOMMITTED,
    DataReader,
    Record,
    column_of,
    offset_at,
)
from kafka_marshal.protocol.claiming import Ending, Phase
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.granting import AtMostOnce
from kafka_marshal.protocol.types import TopicPartition

from .fetch_state import FAIR_READ_MS, FetchState, Prefetch
from .grant_pipeline import GrantPipeline, has_unfetched, is_served
from .holding import Holding
from .holdings import ClaimSession
from .interfaces import ClaimEngine
from .read_turn import ReadTurn
from .subscription import Subscription
from .topics import TopicCallback
from .waits import WAIT_SLICE_MS

BACKLOG_WARNING = 1_000
FETCH_SLICE_MS = 100
# While a claim is expected, records of other partitions may wait this long.
CLAIM_SLICE_MS = 5
# Time between two polls of a reader while no partition may be fetched.
SERVE_MS = 1_000
RECHECK_MS = 1_000
# Minimum time between two checks for control records; each visits all partitions.
PASS_MS = 200
_NONE_APPLIED = -1  # no version of a subscription


class Dispatcher:
    """The partitions of one consumer: fetched, granted and handed-out records.

    Attributes:
        fetch_states: Fetch state of every held partition.
        paused: Partitions that the application has paused.
        lost: Losses not yet raised to the application.
        turn: Held by the thread that reads.
        taken: States with records that the call in progress has handed out; None if no
            call is in progress. The turn sets it to None as its last step: if a signal
            handler, or another thread, raises in the application's thread before that,
            the records are handed out again.
        thread: The only thread that applies changes of the claims and calls callbacks;
            None = any thread. With an event loop, other threads wait for this one.
    """

    def __init__(
        self,
        engine: ClaimEngine,
        session: ClaimSession,
        *,
        subscription: Subscription,
        reader: DataReader,
        callbacks: Callbacks,
    ) -> None:
        self.fetch_states: dict[TopicPartition, FetchState] = {}
        self.paused = subscription.paused
        self.lost: list[ClaimLost] = []
        self.taken: list[FetchState] | None = None
        self.turn = ReadTurn(self, engine.lock)
        self.thread: int | None = None
        self._engine = engine
        self._session = session
        self._subscription = subscription
        self._reader = reader
        self._config = config = subscription.config
        self._callbacks = callbacks
        self._clock = engine.context.ports.clock
        self._pipeline = GrantPipeline(
            engine,
            session,
            reader=reader,
            most=config.max_poll_records,
            batches_max=config.max_granted_batches,
            fetched_max=config.max_fetched,
            is_end_readable=config.isolation_level == READ_UNCOMMITTED,
        )
        self._is_at_most_once = config.is_at_most_once
        # Those with fetched records; the first is served next.
        self._ready: deque[FetchState] = deque()
        # At most once: holdings with records handed out since the last poll.
        self._polled: list[Holding] = []
        self._fault: MarshalError | None = None
        self._has_drains = False
        # The records of one poll are no backlog yet, whatever their number.
        self._backlog = max(BACKLOG_WARNING, config.max_poll_records)
        self._watched_count = min(self._backlog, config.max_uncommitted - 1)
        self._ahead = Prefetch(
            config.max_poll_records,
            config.max_fetched,
            is_needed=not (reader.fetches_ahead or reader.fetched_max),
        )
        # Partitions paused at the reader; whether the set may be outdated, and the
        # local time from which it must be checked in any case.
        self._reader_paused: set[TopicPartition] = set()
        self._is_stale = True
        self._leased_until_ms = 0
        self._pass_due_ms = self._serve_due_ms = 0
        self._looked_ms = -1
        self._version = _NONE_APPLIED
        # Calls of the application's callbacks that are due.
        self._reports: deque[Callable[[], None]] = deque()
        on_topics = callbacks.on_topics
        self._topic_callback = None if on_topics is None else TopicCallback(on_topics)

    def follow(self) -> None:
        """Apply claims won and ended since the last call, then report them.

        Does nothing on a thread other than ``thread``. An exception from a callback or
        a signal handler leaves nothing half done: the next call makes the remaining
        reports.
        """
        if self._version == self._subscription.version or self._is_foreign():
            return
        taken, self.taken = self.taken, self.taken or []
        try:
            self._apply_changes()
            self.taken = taken
            while self._reports:
                self._reports.popleft()()
            self.notify_topics(self.fetch_states)
        except BaseException:
            self._version = _NONE_APPLIED
            raise

    def _apply_changes(self) -> None:
        gained: list[FetchState] = []
        with self._engine.changed:
            self._version = self._subscription.version
            held = {}
            for key, holding in self._session.holdings.items():
                mine = key.topic in self._subscription.topics
                if mine and holding.claim.phase is Phase.HELD:
                    held[key.topic_partition] = holding
            self._has_drains = any(h.drain is not None for h in held.values())
        self._is_stale = True
        for partition, state in list(self.fetch_states.items()):
            if held.get(partition) is not state.holding:
                del self.fetch_states[partition]
                self._on_gone(state)
        for partition, holding in held.items():
            if partition not in self.fetch_states:
                gained.append(FetchState(partition, holding, start_of(holding)))
        for state in gained:
            self.fetch_states[state.partition] = state
        self._ready = deque(
            p for p in self._ready if self.fetch_states.get(p.partition) is p
        )
        self._reader.assign(list(self.fetch_states))
        self._reader_paused.intersection_update(self.fetch_states)
        room = self._room() if gained else 0
        for state in gained:
            state.begin(self._reader, room=room)
            room -= state.buffered_count
            self._note_fetched(state)
            token, on_claimed = state.holding.claim.token, self._callbacks.on_claimed
            if on_claimed is not None and token is not None:
                self._reports.append(partial(on_claimed, state.partition, token))

    def _room(self) -> int:
        """Return how many more records may be fetched before others are handed out."""
        is_granted = self._is_at_most_once
        most = self._pipeline.fetched_max if is_granted else self._config.max_fetched
        return most - sum(state.buffered_count for state in self.fetch_states.values())

    def notify_topics(self, partitions: Iterable[TopicPartition]) -> None:
        """Call ``on_topics`` if the set of held topics has changed."""
        if self._topic_callback is not None and not self._is_foreign():
            self._topic_callback.follow(partitions)

    def _is_foreign(self) -> bool:
        return self.thread is not None and self.thread != threading.get_ident()

    def _on_gone(self, state: FetchState) -> None:
        ending = state.holding.claim.ending or Ending("replaced")
        had_work = state.holding.uncommitted_count > 0
        if not self._is_at_most_once:
            had_work = had_work or state.buffered_count > 0
        if self._callbacks.on_lost is not None:
            report = partial(self._callbacks.on_lost, state.partition, ending)
            self._reports.append(report)
        elif ending.was_lost and had_work:
            self.lost.append(lost_claim(state.partition, ending))

    def _observe(self, name: str, fields: Mapping[str, object]) -> None:
        self._engine.context.observe(name, fields)

    # --- handing out

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop handing out records of partitions until they are resumed."""
        self.paused.update(partitions)
        self._is_stale = True

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out records of partitions again."""
        self.paused.difference_update(partitions)
        self._is_stale = True

    def take_back(self) -> None:
        """Record that the application has finished all records of earlier polls.

        At-most-once delivery has no commits, so the next poll is the only sign that
        records are finished. A drain waits for that poll, and until all granted records
        are handed out (PROTOCOL 6.2, 8.1). With at-least-once delivery, commits may
        follow the poll: a surplus partition waits another heartbeat interval for them.
        """
        self.recover()
        subscription = self._subscription
        with self._engine.lock:
            now_ms = self._clock.now_ms()
            subscription.back_at_ms = now_ms
            had_records = bool(self._polled)
            for holding in self._polled:
                holding.take_back()
                self._session.end_drain(holding)
            self._polled.clear()
            if not self._has_drains and self._version == subscription.version:
                return
            for state in self.fetch_states.values():
                drain = state.holding.drain
                if drain is not None and drain.until_ms is None:
                    until_ms = self._drained_until_ms(
                        state, now_ms, had_records=had_records
                    )
                    state.holding.drain = attrs.evolve(drain, until_ms=until_ms)

    def _drained_until_ms(
        self, state: FetchState, now_ms: int, *, had_records: bool
    ) -> int | None:
        """Return when to release a draining partition even with unfinished records.

        With at-most-once delivery, None while granted records will be handed out in
        their turn, however slow the application is (``had_records``: it was busy with
        records of any partition). They are given up after a heartbeat interval of calls
        in which no fetch brought them, or the application had the partition paused.
        """
        interval_ms = self._engine.context.heartbeat_interval_ms
        if not self._is_at_most_once:
            return now_ms + interval_ms
        is_coming = is_served(state) or (had_records and has_unfetched(state))
        if is_coming and state.partition not in self.paused:
            state.rest_since_ms = None
            return None
        if state.rest_since_ms is None:
            state.rest_since_ms = now_ms
        return now_ms if now_ms - state.rest_since_ms >= interval_ms else None

    def hand_out(
        self, most: int, *, partitions_max: int | None = None
    ) -> dict[TopicPartition, Sequence[Record]]:
        """Hand out up to ``most`` fetched records whose lease is valid now.

        Args:
            most: Most records in all.
            partitions_max: Most partitions that they come from; None = any.
        """
        handed: dict[TopicPartition, Sequence[Record]] = {}
        left = most
        ready = self._ready
        if not ready:
            return handed
        self.taken = []
        with self._engine.lock:
            now_ms = self._clock.now_ms()
            for _ in range(len(ready)):
                # A served partition goes to the end of the queue: no partition starves.
                state = ready.popleft()
                if state.partition not in self.paused:
                    records = self._hand_out_from(state, left, now_ms)
                    if records:
                        handed[state.partition] = records
                        left -= len(records)
                state.is_ready = state.buffered_count > 0
                if state.is_ready:
                    ready.append(state)
                if left <= 0 or len(handed) == partitions_max:
                    break
            if self._is_at_most_once:
                count, states = most - left, self.fetch_states.values()
                self._pipeline.measure(count, states, now_ms=now_ms)
        if not handed:
            self.taken = None
        return handed

    def hand_out_one(self) -> Record | None:
        """Hand out one fetched record on a fast path, with at-least-once delivery.

        Checks the lease now (PROTOCOL 5.2). Returns None if the slow path is needed:
        nothing is fetched, claims were won or ended, a partition is paused or drains,
        too many records are uncommitted, ranges must be granted, or a thread reads.
        """
        if not self._ready or self.taken is not None:
            return None
        state = self._ready[0]
        state.taken_at = None
        try:
            return self._hand_out_from_first(state)
        except BaseException:  # the caller does not get the record
            self.taken = [state]
            raise

    def _hand_out_from_first(self, state: FetchState) -> Record | None:
        holding = state.holding
        progress = holding.progress
        if not isinstance(progress, AtLeastOnce) or state.partition in self.paused:
            return None
        subscription = self._subscription
        with self._engine.lock:
            now_ms = self._clock.now_ms()
            if self._version != subscription.version or not state.fetched:
                return None
            if not holding.may_hand_out(now_ms) or now_ms >= self._ahead.due_ms:
                return None
            if progress.tracked_count >= self._config.max_uncommitted:
                return None
            if self.turn.depth:
                return None
            record = state.fetched[state.at]
            state.taken_at = offset = record.offset
            progress.hand_out(offset, offset)
            state.at += 1
            state.next_offset = offset + 1
            holding.handed_count += 1
            subscription.back_at_ms = now_ms
            if state.at == len(state.fetched):
                state.drop()
                state.is_ready = False
                self._ready.popleft()
        if progress.tracked_count > self._watched_count or state.has_warned:
            self._watch_backlog(state, progress)
        return record

    def _hand_out_from(
        self, state: FetchState, most: int, now_ms: int
    ) -> Sequence[Record]:
        holding = state.holding
        progress = holding.progress
        if isinstance(progress, AtMostOnce):
            if not holding.claim.may_hand_out(now_ms):
                return []
            self._take_from(state, None)
            records = self._pipeline.take(state, progress, most=most)
            if records:
                holding.unfinished_count += len(records)
                self._polled.append(holding)
        else:
            if not holding.may_hand_out(now_ms):
                state.put_back(self._reader)
                return []
            if progress is None:
                return []
            room = self._config.max_uncommitted - progress.tracked_count
            self._take_from(state, state.next_offset)
            records = state.take(min(most, room)) if room > 0 else []
            if records:
                for first, last in runs_of(records):
                    progress.hand_out(first, last)
                self._watch_backlog(state, progress)
        if records:
            state.next_offset = offset_at(records, -1) + 1
            holding.handed_count += len(records)
        return records

    def _take_from(self, state: FetchState, first: int | None) -> None:
        """Record that records of a partition are about to be handed out."""
        assert self.taken is not None, "a call hands out"
        state.taken_at = first
        self.taken.append(state)

    def recover(self) -> None:
        """Take back the records of a call that raised instead of returning them.

        Called on the application's thread. An exception from a signal handler, such as
        KeyboardInterrupt, may also have interrupted a read, so every record that was
        not handed out is fetched again.
        """
        if self.taken is None:
            return
        with self._engine.lock:
            for state in self.taken:
                state.take_back()
                self._session.end_drain(state.holding)
            self._polled = [each for each in self._polled if each.unfinished_count]
        self._ready.clear()
        self._reader.assign(list(self.fetch_states))
        self._reader.resume(list(self.fetch_states))
        self._reader_paused = set()
        for state in self.fetch_states.values():
            state.is_ready = False
            state.put_back(self._reader)
        self._is_stale = True
        self.taken = None

    def _watch_backlog(self, state: FetchState, progress: AtLeastOnce) -> None:
        count = progress.tracked_count
        if count >= self._config.max_uncommitted:
            self._is_stale = True
        if count > self._backlog and not state.has_warned:
            state.has_warned = True
            fields = {"key": state.holding.key, "uncommitted": count}
            self._observe("uncommitted_backlog", fields)
        elif count <= self._backlog:
            state.has_warned = False

    def seek(self, state: FetchState, position: int) -> None:
        """Continue at a position once the log confirms it; called under the lock.

        At least once only. Records fetched or handed out before are forgotten.
        """
        self._session.seek(state.holding, position)
        state.restart(self._reader, position)
        state.has_warned = False
        self._is_stale = True

    # --- fetching

    def fetch(self, left_ms: int) -> None:
        """Fetch more, or wait for pending requests, for at most a slice."""
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
        is_requested = self._is_at_most_once and self._pipeline.request_grants(
            self.unpaused()
        )
        slice_ms = min(left_ms, WAIT_SLICE_MS)
        self._pause_reader()
        if len(self._reader_paused) == len(self.fetch_states):
            self._serve_reader()
            self._wait(slice_ms)
        elif is_requested or self._subscription.expects_claim:
            # Fetch while waiting for the verdict or the claim, but do not wait for
            # records: a verdict or claim would not end that wait.
            wait_ms = min(left_ms, FETCH_SLICE_MS) if self._lacks_records() else 0
            if self._read(wait_ms):
                self._request_fetched()
            elif not wait_ms:
                self._wait(slice_ms if is_requested else min(left_ms, CLAIM_SLICE_MS))
        elif self._read(min(left_ms, FETCH_SLICE_MS)):
            self._request_fetched()

    def _serve_reader(self) -> None:
        """Poll the reader from time to time while nothing may be fetched.

        The client library queues errors and log lines until it is polled. While brokers
        are unreachable, that queue grows until adding to it occupies a processor.
        """
        now_ms = self._clock.now_ms()
        if now_ms >= self._serve_due_ms:
            self._serve_due_ms = now_ms + SERVE_MS
            self._read(0, self._read_any)

    def _lacks_records(self) -> bool:
        """Return whether granted records must be fetched and no records are fetched."""
        if self._subscription.expects_claim or not self._is_at_most_once:
            return False
        is_any_fetched = any(
            state.buffered_count for state in self.fetch_states.values()
        )
        return not is_any_fetched and bool(self._unfetched())

    def _request_fetched(self) -> None:
        """Request grants for fetched records, with at-most-once delivery."""
        if self._is_at_most_once:
            self._pipeline.request_grants(self.unpaused())

    def fetch_granted(self, left_ms: int) -> bool:
        """Fetch granted records or wait for verdicts, for a slice; send no requests.

        Also waits for the renewal or the end of a lease that is too old for hand-outs.

        Returns:
            False if there is nothing to wait for.
        """
        with self._engine.changed:
            is_awaited = self._pipeline.awaits(self.unpaused())
        unfetched = self._unfetched()
        if not (is_awaited or unfetched or self.holds_grants()):
            return False
        slice_ms = min(left_ms, WAIT_SLICE_MS)
        if not unfetched:
            self._wait(slice_ms)
            return True
        self._read(0 if is_awaited else slice_ms, self._read_rest)
        return True

    def _unfetched(self) -> set[TopicPartition]:
        """Return the partitions with granted records to fetch and hand out now."""
        now_ms = self._clock.now_ms()
        return {
            state.partition
            for state in self.unpaused()
            if has_unfetched(state) and state.holding.claim.may_hand_out(now_ms)
        }

    def _read_any(self, timeout_ms: int) -> bool:
        """Read all partitions that are not paused at the reader."""
        most = self._reader.fetched_max or self._config.max_poll_records
        return self._store(self._reader.poll(timeout_ms, most))

    def _read_rest(self, timeout_ms: int) -> bool:
        """Read only records that are granted, however many others are fetched.

        Fetched records may never be granted if their partition drains or the consumer
        stops: they must not keep granted records from being fetched.
        """
        self._pause_at_reader(self.fetch_states.keys() - self._unfetched())
        self._is_stale = True
        most = self._config.max_poll_records
        return self._store(self._reader.poll(timeout_ms, most))

    def read_ahead(self) -> None:
        """Request grants and fetch without waiting, for later hand-outs.

        With at-most-once delivery, acts once per millisecond, however small the polls
        are. With at-least-once delivery, acts only from time to time, so that
        partitions without fetched records do not wait for those with many. Never
        raises, because the application is about to receive records; the next fetch
        raises the error.
        """
        now_ms = self._clock.now_ms()
        if self._is_at_most_once:
            if now_ms == self._looked_ms:
                return
            self._looked_ms = now_ms
            is_due = self._reader.fetched_max > 0 and now_ms >= self._ahead.due_ms
            is_wanted = is_due or self._pipeline.needs_records(self.unpaused())
        else:
            is_wanted = now_ms >= self._ahead.due_ms
        if is_wanted:
            self._pause_reader()
            try:
                self._read(0)
            except MarshalError as error:
                self._fault = error
        if self._is_at_most_once:
            self._pipeline.request_ahead(self.unpaused())

    def _read(self, timeout_ms: int, read: Callable[[int], bool] | None = None) -> bool:
        """Fetch for up to ``timeout_ms``; return whether there were records.

        Args:
            timeout_ms: Longest wait.
            read: Reads for that long; by default as the delivery guarantee needs.
        """
        if read is None:
            is_at_most_once = self._is_at_most_once
            read = self._read_for_grants if is_at_most_once else self._read_plain
        # After any other exception, records may be read and not stored: see `recover`.
        taken, self.taken = self.taken, self.taken or []
        try:
            is_found = self._try_to_read(timeout_ms, read)
        except MarshalError:
            self.taken = taken
            raise
        self.taken = taken
        return is_found

    def _try_to_read(self, timeout_ms: int, read: Callable[[int], bool]) -> bool:
        try:
            is_found = read(timeout_ms)
        except PositionError as error:
            self._on_out_of_range(error)
            return False
        except UnknownTopicId as error:
            with self._engine.changed:
                self._subscription.doubt(error.partition[0])
            self._wait(min(timeout_ms, WAIT_SLICE_MS))
            return False
        except CoordinationError as error:
            if not error.retriable:
                raise
            self._observe("fetch_failed", {"error": error})
            self._wait(min(timeout_ms, WAIT_SLICE_MS))
            return False
        if self._clock.now_ms() >= self._pass_due_ms:
            self.pass_over()
        return is_found

    def pass_over(self) -> None:
        """Move positions past offsets without records, such as control records.

        Only in partitions without fetched records left to hand out. With at-least-once
        delivery, the position follows when the offsets before it are committed; with
        at-most-once delivery, these offsets are requested like records (PROTOCOL 6.1,
        6.2).
        """
        self._pass_due_ms = self._clock.now_ms() + PASS_MS
        reached = self._reader.positions()
        states = [
            state
            for partition, state in self.fetch_states.items()
            # At most once, offsets that were passed may be granted later.
            if self._is_at_most_once or reached.get(partition, 0) > state.next_offset
        ]
        if not states:
            return
        with self._engine.changed:
            for state in states:
                if state.buffered_count:
                    continue
                first = state.next_offset
                state.next_offset = max(first, reached.get(state.partition, first))
                state.holding.skip(first, state.next_offset - 1)

    def _read_for_grants(self, timeout_ms: int) -> bool:
        """Read as many records as may be fetched before they are granted.

        For at-most-once delivery. The limit is for all partitions together, unless the
        reader keeps the records that it fetched of a paused partition.
        """
        least = self._config.max_poll_records
        now_ms = self._clock.now_ms()
        is_due, self._ahead.due_ms = now_ms >= self._ahead.due_ms, now_ms + FAIR_READ_MS
        is_needed = self._pipeline.needs_records(self.unpaused())
        if at_once := self._reader.fetched_max:
            if is_needed or is_due:
                return self._store(self._reader.poll(timeout_ms, at_once))
            self._wait(min(timeout_ms, WAIT_SLICE_MS))
            return False
        fetched = sum(state.buffered_count for state in self.unpaused())
        room = self._pipeline.fetched_max - fetched
        if room < least or not is_needed:
            if room < least and self._unfetched():
                return self._read_rest(timeout_ms)
            self._wait(min(timeout_ms, WAIT_SLICE_MS))
            return False
        # Read more than one poll hands out, to get ahead. Read all available records at
        # once only if the reader has already fetched them.
        at_once = min(2 * least, room)
        if self._reader.fetches_ahead:
            at_once = self._pipeline.most_at_once(room)
        return self._store(self._reader.poll(timeout_ms, at_once))

    def _read_plain(self, timeout_ms: int) -> bool:
        """Read what the reader has; wait only if it has nothing."""
        ahead = self._ahead
        ready = (p for p in self._ready if p.partition not in self.paused)
        most = ahead.most(sum(state.buffered_count for state in ready))
        # Only partitions without fetched records are read, however many others have.
        most = self._reader.fetched_max or most
        if most <= 0:
            self._wait(min(timeout_ms, WAIT_SLICE_MS))
            return False
        is_found = self._store(self._reader.poll(0, most))
        now_ms = self._clock.now_ms()
        if is_found or not timeout_ms:
            ahead.note(now_ms, waited_ms=0, is_found=is_found)
            return is_found
        least = max(ahead.least, self._reader.fetched_max)
        is_found = self._store(self._reader.poll(timeout_ms, least))
        waited_ms = self._clock.now_ms() - now_ms
        if ahead.note(now_ms + waited_ms, waited_ms=waited_ms, is_found=is_found):
            # Read the rest as well, so that the next fetch starts now.
            self._store(self._reader.poll(0, ahead.most(ahead.least)))
        return is_found

    def _store(self, fetched: Mapping[TopicPartition, Sequence[Record]]) -> bool:
        """Store records from the reader; return whether there were any."""
        for partition, records in fetched.items():
            state = self.fetch_states.get(partition)
            if state is None or not records:
                continue
            state.add(records)
            state.is_read = True
            self._pipeline.note_fetched()
            self._note_fetched(state)
        return bool(fetched)

    def _note_fetched(self, state: FetchState) -> None:
        if state.buffered_count and not state.is_ready:
            state.is_ready = True
            self._ready.append(state)

    def _pause_reader(self) -> None:
        """Pause at the reader all partitions whose records cannot be handed out now.

        Acts only if that set may have changed. An outdated set costs a needless fetch,
        and never causes a wrong hand-out.
        """
        now_ms = self._clock.now_ms()
        if not (self._is_stale or self._ready or now_ms >= self._leased_until_ms):
            return
        self._is_stale = False
        self._leased_until_ms = now_ms + RECHECK_MS
        enough = self._enough_fetched()
        wanted = set()
        for partition, state in self.fetch_states.items():
            holding = state.holding
            progress = holding.progress
            if (
                isinstance(progress, AtLeastOnce)
                and progress.tracked_count >= self._config.max_uncommitted
            ):
                self._is_stale = True  # until a commit, on any thread
                wanted.add(partition)
            elif state.buffered_count >= enough:
                self._is_stale = True  # until a hand-out
                wanted.add(partition)
            elif partition in self.paused:
                wanted.add(partition)
            else:
                until_ms = holding.claim.lease.soft_until_ms
                self._leased_until_ms = min(self._leased_until_ms, until_ms)
                if self._is_rest(state, now_ms):
                    self._is_stale = True  # until all that is granted is fetched
                elif not holding.may_hand_out(now_ms):
                    wanted.add(partition)
        self._pause_at_reader(wanted)

    def _enough_fetched(self) -> int:
        """Return how many fetched records stop further reads of a partition.

        With at-most-once delivery there is no such number if the reader would fetch the
        records of a paused partition again.
        """
        if not self._is_at_most_once:
            return 1
        if not self._reader.fetched_max:
            return sys.maxsize
        return self._pipeline.enough_fetched(self.unpaused())

    def _pause_at_reader(self, wanted: set[TopicPartition]) -> None:
        """Make this the exact set of partitions that are paused at the reader."""
        if wanted != self._reader_paused:
            self._reader.pause(list(wanted - self._reader_paused))
            self._reader.resume(list(self._reader_paused - wanted))
            self._reader_paused = wanted

    def _is_rest(self, state: FetchState, now_ms: int) -> bool:
        """Return whether a partition that drains has granted records to fetch."""
        if state.holding.drain is None or not has_unfetched(state):
            return False
        return state.holding.claim.may_hand_out(now_ms)

    def unpaused(self) -> list[FetchState]:
        """Return the states of partitions that the application has not paused."""
        states = self.fetch_states.values()
        return [state for state in states if state.partition not in self.paused]

    def _on_out_of_range(self, error: PositionError) -> None:
        partition = TopicPartition(*(error.partition or ("", 0)))
        state = self.fetch_states.get(partition)
        if state is None:
            return
        fields: dict[str, object] = {"key": state.holding.key, "error": error}
        if error.log_start < 0:
            # The log's range is unknown: try again.
            self._observe("range_unknown", fields)
            self._seek(state, error.requested)
            return
        if self._is_in_doubt(state):
            self._seek(state, error.requested)
            self._wait(WAIT_SLICE_MS)
            return
        if error.requested < error.log_start:
            # PROTOCOL 5.6: retention deleted the records; continue at log start.
            self._observe("position_jumped", fields)
            self._seek(state, error.log_start)
            with self._engine.changed:
                progress = state.holding.progress
                if isinstance(progress, AtLeastOnce) and not progress.tracked_count:
                    progress.jump(error.log_start)
            return
        self._observe("position_out_of_range", fields)
        with self._engine.changed:
            self._subscription.exclude(state.holding.key)
            self._session.release(state.holding, reason="position_out_of_range")
        raise error

    def _is_in_doubt(self, state: FetchState) -> bool:
        """Return whether the topic must be looked up before its range counts.

        The range may belong to a topic that was created again under the same name.
        Then the look-up ends the claim; otherwise the next fetch reports the position
        as out of range again.
        """
        topic = state.partition.topic
        with self._engine.changed:
            if not state.is_in_doubt and state.holding.topic_id is not None:
                self._subscription.doubt(topic)
                state.is_in_doubt = True
            else:
                state.is_in_doubt = self._subscription.is_doubted(topic)
            return state.is_in_doubt

    def _seek(self, state: FetchState, offset: int) -> None:
        if self._is_at_most_once:
            # Records fetched before may be granted: keep them, do not fetch them twice.
            state.is_read, state.log_end = False, 0
            state.seek(self._reader, offset)
        else:
            state.restart(self._reader, offset)

    def end_polling(self, *, is_done: bool) -> None:
        """Record that the application will not poll again.

        Args:
            is_done: Whether it has finished the records of the last poll. Only then
                does the log record that (PROTOCOL 6.3).
        """
        with self._engine.changed:
            for holding in self._polled:
                if is_done:
                    holding.take_back()
                holding.unfinished_count = 0
            self._polled.clear()

    def holds_grants(self) -> bool:
        """Return whether granted records wait for hand-out, or verdicts are pending."""
        with self._engine.changed:
            return self._pipeline.holds(self.unpaused())

    def wait(self, timeout_ms: int) -> None:
        """Wait for the engine's next round, for at most a slice."""
        self._wait(min(timeout_ms, WAIT_SLICE_MS))

    def _wait(self, timeout_ms: int) -> None:
        if self._is_at_most_once:
            self._pipeline.await_grant(self.unpaused(), timeout_ms)
        elif timeout_ms > 0:
            with self._engine.changed:
                self._engine.changed.wait(timeout_ms / 1000)


def runs_of(records: Sequence[Record]) -> Iterator[tuple[int, int]]:
    """Yield the first and last offset of each run of consecutive offsets.

    Offsets only grow within a partition, so the two ends show whether there is a gap.
    """
    first, end = offset_at(records, 0), offset_at(records, -1)
    if end - first == len(records) - 1:
        yield first, end
        return
    last = first
    for offset in column_of(records, "offset")[1:]:
        if offset != last + 1:
            yield first, last
            first = offset
        last = offset
    yield first, last


def start_of(holding: Holding) -> int:
    """Return the first offset to fetch under a claim that was started."""
    progress = holding.progress
    if isinstance(progress, AtMostOnce):
        return progress.resume_at
    return 0 if progress is None else progress.position or 0


def lost_claim(partition: TopicPartition, ending: Ending) -> ClaimLost:
    """Return the error for a claim that was lost with uncommitted records."""
    by = f" by {ending.winner!r}" if ending.winner else ""
    at = f" at log offset {ending.at_offset}" if ending.at_offset is not None else ""
    return ClaimLost(
        f"the claim of {partition} ended ({ending.reason}{by}{at}) with uncommitted "
        "records; stop processing them: the next owner starts at the last position",
        winner=ending.winner,
        at_offset=ending.at_offset,
        reason=ending.reason,
    )
