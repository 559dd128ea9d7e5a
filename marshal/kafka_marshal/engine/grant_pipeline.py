"""Requests grants for records on the consumer's thread, for at-most-once delivery.

PROTOCOL 6.2, 6.3. Records are handed out only when they are both fetched and granted,
in log order. While the application works on one batch, the next batches are requested:
enough to hide the round trip and to last a while. Requests cover fetched records, and
records below the log's end that are not fetched yet, which take no memory. A crash
loses the records that are requested, granted or handed out and not finished: never more
than ``max_granted_batches`` times ``max_poll_records`` records of a partition.
"""

from collections.abc import Iterable, Sequence

import attrs

from kafka_marshal.ports import DataReader, Record, offset_at
from kafka_marshal.protocol.granting import US_PER_MS, AtMostOnce, GrantDepth

from .fetch_state import FetchState
from .heartbeats import INTERVALS_PER_H
from .holdings import ClaimSession
from .interfaces import ClaimEngine

# Limits of the records that are fetched ahead, because they are held in memory.
RECORDS_AHEAD_MAX = 16_000
FEW_BATCHES = 4
# Grants are requested when those of all partitions last for fewer round trips.
ROUND_TRIPS_AHEAD = 2
# While verdicts are pending, the next request of a partition waits this long, to grow.
GROW_MS = 20
# Minimum time of a sample: the clock counts whole milliseconds.
SAMPLE_MS = 5
# Minimum time between two look-ups of log ends, and the time for each partition.
LOOK_MS, LOOK_EACH_US = 20, 100


@attrs.define
class _Meter:
    """Measures how fast an application works, without waits for grants."""

    since_ms: int
    count: int = 0
    starved_ms: int = 0
    starving_since_ms: int | None = None

    def starve(self, now_ms: int) -> None:
        """Record that fetched records wait for a grant."""
        if self.starving_since_ms is None:
            self.starving_since_ms = now_ms

    def take(self, count: int, now_ms: int, *, round_trip_us: int) -> None:
        """Record that ``count`` records were handed out."""
        if self.starving_since_ms is not None:
            # An application that polls much later did not wait all this time.
            waited_ms = now_ms - self.starving_since_ms
            self.starved_ms += min(waited_ms, round_trip_us // US_PER_MS + 1)
            self.starving_since_ms = None
        self.count += count

    def work_us(self, batch: int, now_ms: int) -> int | None:
        """Return the time of work on a batch; None until enough is measured."""
        if self.count < batch or now_ms - self.since_ms < SAMPLE_MS:
            return None
        busy_ms = max(0, now_ms - self.since_ms - self.starved_ms)
        found_us = busy_ms * US_PER_MS * batch // self.count
        self.since_ms, self.count, self.starved_ms = now_ms, 0, 0
        return found_us


class GrantPipeline:
    """Requests and uses the grants of one consumer's partitions.

    Attributes:
        fetched_max: Most records that are fetched ahead of their hand-out.
    """

    def __init__(
        self,
        engine: ClaimEngine,
        session: ClaimSession,
        *,
        reader: DataReader,
        most: int,
        batches_max: int,
        fetched_max: int,
        is_end_readable: bool,
    ) -> None:
        """Start without any partition.

        Args:
            engine: Drives the session.
            session: Sends the requests.
            reader: Fetches the records.
            most: Records of a batch.
            batches_max: Batches of a partition that a crash may lose.
            fetched_max: Records that may be fetched ahead, of all partitions
                together. Raised to what ``batches_max`` batches need, but at most to
                ``FEW_BATCHES`` batches or ``RECORDS_AHEAD_MAX`` records, if more.
            is_end_readable: Whether every record below the end of a log can be fetched
                now. With ``read_committed``, records of open transactions cannot.
        """
        self._engine = engine
        self._session = session
        self._reader = reader
        self._most = most
        few = most * min(batches_max, FEW_BATCHES)
        ahead = min(most * batches_max, RECORDS_AHEAD_MAX)
        self.fetched_max = max(fetched_max, few, ahead)
        self._is_end_readable = is_end_readable
        # Otherwise only fetched records are requested.
        depth_max = batches_max if is_end_readable else self.fetched_max // most
        self._pace = GrantDepth(min(batches_max, depth_max))
        self._clock = engine.context.ports.clock
        self._meter: _Meter | None = None  # before the first hand-out
        # As of the last requests: longest round trip, and partitions with records.
        self._round_trip_us = 0
        self._sharing_count = 1
        self._look_ms = self._quiet_until_ms = 0
        # Until when a fetch is expected to bring granted records, None if unchecked.
        self._rest_until_ms: int | None = None

    def needs_records(self, states: Sequence[FetchState]) -> bool:
        """Return whether to fetch more records: to request or to hand them out.

        A reader that fetches ahead by itself need not be polled for records below the
        known end of the log. A reader that returns whole responses is polled once
        nothing is left to hand out: its next request would leave out a partition that
        has a few records left.
        """
        if self._reader.fetched_max:
            if not any(map(is_served, states)):
                return True
            enough = self.enough_fetched(states)
            return enough > 1 and any(each.buffered_count < enough for each in states)
        wanted, fetched = self._pace.depth * self._most, 0
        is_ahead = self._reader.fetches_ahead
        is_short = False
        for state in states:
            count = state.buffered_count
            fetched += count
            known = state.log_end - state.next_offset if is_ahead else 0
            if count < wanted and known < wanted:
                is_short = True
        if is_short:
            return self.fetched_max - fetched >= self._most
        if fetched < self._most:
            return True
        return _served_count(states) < self._most and any(map(has_unfetched, states))

    def enough_fetched(self, states: Sequence[FetchState]) -> int:
        """Return how many fetched records of a partition are enough.

        If the end of the log is readable, records can be requested before they are
        fetched, so one is enough. Otherwise they must be fetched first.
        """
        if self._is_end_readable:
            return 1
        fetched = sum(state.buffered_count for state in states)
        if self.fetched_max - fetched < self._most:
            return 1
        return self._pace.depth * self._most

    def most_at_once(self, room: int) -> int:
        """Return how many records to fetch at once, from a reader that has them.

        Records that can be requested before they are fetched are best fetched just
        before their hand-out: records held for long leave the processor's cache.
        """
        return min(self._most, room) if self._is_end_readable else room

    # --- requesting

    def _look_at_ends(self, states: Sequence[FetchState]) -> None:
        """Look up which records are in the logs and not fetched yet.

        Only for partitions of which a fetch under the claim has brought records: before
        that, the end may be that of an earlier topic of this name.
        """
        now_ms = self._clock.now_ms()
        if not self._is_end_readable or now_ms < self._look_ms:
            return
        read = [state for state in states if state.is_read]
        if not read:
            return
        each_ms = len(states) * LOOK_EACH_US // US_PER_MS
        self._look_ms = now_ms + max(LOOK_MS, each_ms)
        ends = self._reader.ends()
        for state in read:
            state.log_end = ends.get(state.partition, 0)

    def request_ahead(self, states: Sequence[FetchState]) -> None:
        """Request more grants, unless the present ones last for a while."""
        if not self._is_quiet():
            self.request_grants(states)

    def _is_quiet(self) -> bool:
        """Return whether the grants of all partitions last for a while."""
        return self._clock.now_ms() < self._quiet_until_ms

    def request_grants(self, states: Sequence[FetchState]) -> bool:
        """Request grants for known records; return whether a verdict is pending.

        Each request costs every reader of the log a little, and requests that are sent
        together cost less. So nothing is requested while the grants of all partitions
        last for ``ROUND_TRIPS_AHEAD`` round trips. Then every partition requests all
        that it may.
        """
        with self._engine.changed:
            if self._is_quiet() and not _is_unserved(states):
                return self.awaits(states)
        self._look_at_ends(states)
        pairs = [
            (state, progress)
            for state in states
            if isinstance(progress := state.holding.progress, AtMostOnce)
        ]
        with self._engine.changed:
            now_ms = self._clock.now_ms()
            self._round_trip_us = longest_round_trip_us(states)
            self._sharing_count = max(1, sum(has_records(state) for state, _ in pairs))
            is_due = self._is_due(pairs, now_ms)
            is_busy = any(progress.outstanding_count for _, progress in pairs)
            for state, progress in pairs:
                if not has_records(state):
                    self._request_gap(state, progress, now_ms)
                elif is_due:
                    self._request(state, progress, now_ms, is_busy=is_busy)
            return any(progress.outstanding_count for _, progress in pairs)

    def _is_due(
        self, pairs: Sequence[tuple[FetchState, AtMostOnce]], now_ms: int
    ) -> bool:
        """Return whether the grants that can be used now are nearly used up.

        Also if the fetched and the granted records are of different partitions.
        """
        ahead = _usable_count(pairs)
        lasts_us = ahead * self._pace.work_us // self._most
        spare_us = lasts_us - self._round_trip_us * ROUND_TRIPS_AHEAD
        self._quiet_until_ms = now_ms
        if not ahead or spare_us < 0:
            return True
        if _is_unserved([state for state, _ in pairs]):
            return True
        # An application may become faster, but hardly twice as fast.
        self._quiet_until_ms += spare_us // (2 * US_PER_MS)
        return False

    def _request(
        self, state: FetchState, progress: AtMostOnce, now_ms: int, *, is_busy: bool
    ) -> None:
        holding = state.holding
        if is_busy and now_ms - state.requested_ms < GROW_MS:
            return  # let the request grow for a moment, while verdicts are pending
        is_idle = progress.granted is None and not progress.outstanding_count
        end = max(state.fetched_end, state.log_end)
        if not is_idle and end <= progress.next_first:
            return  # all known records are requested
        self._session.grants.update_anchor(holding)
        if not progress.may_request(self._pace.depth):
            return
        fresh = state.find(progress.next_first)
        if is_idle and fresh > state.at:
            self._drop_foreign(state, progress, fresh - state.at)
            fresh = state.at
        if not holding.may_hand_out(now_ms):
            return
        unfetched = max(0, progress.next_first - state.fetched_end)
        bound = self._pace.depth * self._most
        room = bound - holding.unfinished_count - (fresh - state.at) - unfetched
        if room < self._most:
            return
        last = last_known(state, fresh, room=room, first=progress.next_first)
        if last >= progress.next_first:
            state.requested_ms = now_ms
            self._session.grants.request(holding, last)

    def _request_gap(
        self, state: FetchState, progress: AtMostOnce, now_ms: int
    ) -> None:
        """Request the offsets without records after the last one (PROTOCOL 6.2).

        This moves the position to the log's end. It is delayed, so that the next
        records are requested together with these offsets.
        """
        holding = state.holding
        wait_ms = self._engine.context.heartbeat_interval_ms // INTERVALS_PER_H
        if (
            state.next_offset > progress.next_first
            and not progress.outstanding_count
            and now_ms - state.requested_ms >= wait_ms
            and holding.may_hand_out(now_ms)
        ):
            state.requested_ms = now_ms
            self._session.grants.update_anchor(holding)
            self._session.grants.request(holding, state.next_offset - 1)

    def _drop_foreign(
        self, state: FetchState, progress: AtMostOnce, count: int
    ) -> None:
        """Drop records that were granted to others; this owner never gets them."""
        if count < state.buffered_count:
            state.take(count)
        else:
            state.restart(self._reader, progress.next_first)

    # --- using

    def take(
        self, state: FetchState, progress: AtMostOnce, *, most: int
    ) -> Sequence[Record]:
        """Return records that are both fetched and granted, in log order."""
        records: Sequence[Record] = []
        while most > 0 and (fetched_count := state.buffered_count):
            grant = progress.granted
            if grant is None:
                break
            fetched, at = state.fetched, state.at
            first = offset_at(fetched, at)
            if first >= grant.end:
                progress.skip_through(grant.last)
                continue
            if first < grant.first:
                if records:
                    break  # the ends of a batch must describe one whole range
                # Granted to an earlier owner; this owner never gets them.
                start = state.find(grant.first)
                state.next_offset = max(state.next_offset, grant.first)
                state.take(start - at)
                continue
            count = min(fetched_count, most)
            last = offset_at(fetched, at + count - 1)
            if last >= grant.end:
                count = state.find(grant.end) - at
                last = offset_at(fetched, at + count - 1)
            if not records:
                state.taken_at = first
            chunk = state.take(count)
            progress.hand_out(last)
            most -= count
            records = [*records, *chunk] if records else chunk
        return records

    def measure(self, count: int, states: Iterable[FetchState], *, now_ms: int) -> None:
        """Record that records were fetched, and ``count`` of them handed out."""
        round_trip_us = self._round_trip_us or longest_round_trip_us(states)
        meter = self._meter
        if meter is None:
            self._meter = _Meter(now_ms) if count else None
            return
        if not count:
            if self.awaits(states):
                meter.starve(now_ms)
            return
        meter.take(count, now_ms, round_trip_us=round_trip_us)
        work_us = meter.work_us(self._most, now_ms)
        if work_us is not None:
            self._pace.on_sample(
                work_us, round_trip_us=round_trip_us, partitions=self._sharing_count
            )

    def await_grant(self, states: Iterable[FetchState], timeout_ms: int) -> None:
        """Wait for the engine's next round, unless there are records to hand out.

        Records under a lease that is too old for hand-outs do not count: the lease is
        renewed, or ends.
        """
        with self._engine.changed:
            now_ms = self._clock.now_ms()
            can_hand_out = any(
                is_served(state) and state.holding.claim.may_hand_out(now_ms)
                for state in states
            )
            if timeout_ms > 0 and not can_hand_out:
                self._engine.changed.wait(timeout_ms / 1000)

    def awaits(self, states: Iterable[FetchState]) -> bool:
        """Return whether a verdict on requested offsets is pending."""
        return any(
            isinstance(state.holding.progress, AtMostOnce)
            and state.holding.progress.outstanding_count > 0
            for state in states
        )

    def holds(self, states: Sequence[FetchState]) -> bool:
        """Return whether granted records wait for hand-out, or may still be granted.

        True while a verdict is pending: it may grant records that are not fetched yet,
        and a request that was sent is in the log or will be. Once every fetched record
        is handed out, granted records that no fetch brings within a heartbeat interval
        do not count.
        """
        if any(map(is_served, states)) or self.awaits(states):
            self._rest_until_ms = None
            return True
        return any(map(has_unfetched, states)) and self._is_rest_expected()

    def _is_rest_expected(self) -> bool:
        now_ms = self._clock.now_ms()
        if self._rest_until_ms is None:
            interval_ms = self._engine.context.heartbeat_interval_ms
            self._rest_until_ms = now_ms + interval_ms
        return now_ms < self._rest_until_ms

    def note_fetched(self) -> None:
        """Record that a fetch brought records."""
        self._rest_until_ms = None
        self._quiet_until_ms = 0  # the grants may be of other partitions


def is_served(state: FetchState) -> bool:
    """Return whether a partition has fetched records and a grant."""
    progress = state.holding.progress
    if not isinstance(progress, AtMostOnce):
        return False
    return state.buffered_count > 0 and progress.granted is not None


def _served_count(states: Iterable[FetchState]) -> int:
    """Return how many records are both fetched and granted."""
    return sum(
        min(state.buffered_count, state.holding.granted_count) for state in states
    )


def _usable_count(pairs: Iterable[tuple[FetchState, AtMostOnce]]) -> int:
    """Return the number of granted or requested offsets that can be used now.

    If a partition has fetched records that are neither granted nor requested, offsets
    that are not fetched do not count: its records would wait for a round trip.
    """
    count = usable = 0
    is_short = False
    for state, progress in pairs:
        ahead, fetched = progress.ahead_count, state.buffered_count
        count += ahead
        usable += min(ahead, fetched)
        is_short = is_short or ahead < fetched
    return usable if is_short else count


def _is_unserved(states: Iterable[FetchState]) -> bool:
    """Return whether records are fetched, and none of their partitions has grants."""
    fetched = [state for state in states if state.buffered_count]
    return bool(fetched) and not any(map(is_served, fetched))


def longest_round_trip_us(states: Iterable[FetchState]) -> int:
    """Return the longest average time from request to verdict, 0 if none is known."""
    progresses = (state.holding.progress for state in states)
    found = (each.round_trip_us for each in progresses if isinstance(each, AtMostOnce))
    return max(found, default=0)


def has_unfetched(state: FetchState) -> bool:
    """Return whether a partition has granted offsets that are not fetched yet.

    Called on the consumer's thread, with or without the engine's lock.
    """
    progress = state.holding.progress
    return isinstance(progress, AtMostOnce) and progress.granted_end > state.fetched_end


def has_records(state: FetchState) -> bool:
    """Return whether a partition has records that are not handed out."""
    return state.buffered_count > 0 or state.log_end > state.next_offset


def last_known(state: FetchState, fresh: int, *, room: int, first: int) -> int:
    """Return the last offset to request, of a record that is fetched or in the log.

    Args:
        state: The partition.
        fresh: Index of the first fetched record that is not requested.
        room: Most records to request; an offset that is not fetched counts as one.
        first: First offset that is not requested.
    """
    unrequested = len(state.fetched) - fresh
    if unrequested >= room:
        return offset_at(state.fetched, fresh + room - 1)
    behind = max(first, state.fetched_end)
    return min(max(state.log_end, behind), behind + room - unrequested) - 1
