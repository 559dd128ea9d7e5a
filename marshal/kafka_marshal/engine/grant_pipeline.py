"""Requests grants for fetched records, at most once, on the consumer's thread.

PROTOCOL 6.3. Records are handed out only when they are both fetched and granted, in
log order. While the application works on one batch, the next ones are requested, as
many as hide the round trip. A crash loses what is requested, granted or handed out and
not finished: never more than ``max_granted_batches`` times ``max_poll_records`` records
of a partition.
"""

from collections.abc import Iterable, Sequence

import attrs

from kafka_marshal.ports import DataReader, Record, offset_at
from kafka_marshal.protocol.granting import (
    US_PER_MS,
    WORK_PER_REQUEST_US,
    AtMostOnce,
    Pace,
    averaged,
)
from kafka_marshal.protocol.types import OffsetRange

from .fetch_state import FetchState
from .heartbeats import INTERVALS_PER_H
from .interfaces import ClaimEngine, ClaimSession

# What is fetched ahead is held in memory: so many records, or so many batches.
RECORDS_AHEAD_MAX = 16_000
FEW_BATCHES = 4
# Grants are requested when those of all partitions last no longer than so many.
ROUND_TRIPS_AHEAD = 2


@attrs.define(kw_only=True)
class _Meter:
    """Measures how fast one partition is consumed, without waits for its grants."""

    place: FetchState
    pace: Pace
    since_ms: int
    count: int = 0
    starved_ms: int = 0
    starving_since_ms: int | None = None
    requested_ms: int = 0

    def starve(self, now_ms: int) -> None:
        """Record that records are fetched and none of them is granted yet."""
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

    def batch_ms(self, batch: int, now_ms: int) -> int | None:
        """Return the time that a batch took; None before one is complete."""
        if self.count < batch:
            return None
        busy_ms = max(0, now_ms - self.since_ms - self.starved_ms)
        taken_ms = busy_ms * batch // self.count
        self.since_ms, self.count, self.starved_ms = now_ms, 0, 0
        return taken_ms


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
    ) -> None:
        """Start without any partition.

        Args:
            engine: Drives the session.
            session: Sends the requests.
            reader: Fetches the records.
            most: Records of a batch.
            batches_max: Batches of a partition that may be at risk.
            fetched_max: Records that may be fetched ahead, of all partitions
                together; more if small batches are at risk, or few large ones.
        """
        self._engine = engine
        self._session = session
        self._reader = reader
        self._most = most
        few = most * min(batches_max, FEW_BATCHES)
        ahead = min(most * batches_max, RECORDS_AHEAD_MAX)
        self.fetched_max = max(fetched_max, few, ahead)
        # Only fetched records are requested.
        self._batches_max = min(batches_max, self.fetched_max // most)
        self._clock = engine.context.ports.clock
        self._meters: dict[object, _Meter] = {}
        # All partitions together: average work of a batch, and since when it counts.
        self._work_us = 0
        self._work_since_ms = self._clock.now_ms()
        self._work_count = 0

    def _meter(self, place: FetchState) -> _Meter:
        meter = self._meters.get(place.partition)
        if meter is None or meter.place is not place:
            meter = _Meter(
                place=place, pace=Pace(self._batches_max), since_ms=self._clock.now_ms()
            )
            self._meters[place.partition] = meter
        return meter

    def needs_records(self, places: Iterable[FetchState]) -> bool:
        """Return whether more is to be fetched for what follows."""
        fetched, is_short = 0, False
        for place in places:
            count = place.buffered_count
            fetched += count
            is_short = is_short or count < self._meter(place).pace.depth * self._most
        return is_short and self.fetched_max - fetched >= self._most

    # --- requesting

    def request_grants(self, places: Iterable[FetchState]) -> bool:
        """Request grants for fetched records; return whether a verdict is pending.

        Each request costs every reader of the log a little, and those that are sent
        together cost less. So nothing is requested while the grants of all partitions
        outlast a round trip; then everything that may be is, of every partition.
        """
        ladders = [
            (place, progress)
            for place in places
            if isinstance(progress := place.holding.progress, AtMostOnce)
        ]
        with self._engine.changed:
            now_ms = self._clock.now_ms()
            is_due = self._is_due([progress for _, progress in ladders])
            is_busy = any(progress.outstanding_count for _, progress in ladders)
            for place, progress in ladders:
                if not place.buffered_count:
                    self._request_gap(place, progress, now_ms)
                elif is_due:
                    self._request(place, progress, now_ms, is_busy=is_busy)
            return any(progress.outstanding_count for _, progress in ladders)

    def _is_due(self, ladders: Sequence[AtMostOnce]) -> bool:
        """Return whether all grants together are nearly used up."""
        unused = sum(progress.unused_count for progress in ladders)
        round_trip_us = max((each.round_trip_us for each in ladders), default=0)
        lasts_us = unused * self._work_us // self._most
        return not unused or lasts_us <= round_trip_us * ROUND_TRIPS_AHEAD

    def _request(
        self, place: FetchState, progress: AtMostOnce, now_ms: int, *, is_busy: bool
    ) -> None:
        holding = place.holding
        meter = self._meter(place)
        if is_busy and now_ms - meter.requested_ms < WORK_PER_REQUEST_US // US_PER_MS:
            return  # let the request grow for a moment, while verdicts are pending
        is_idle = progress.granted is None and not progress.outstanding_count
        if not is_idle and offset_at(place.fetched, -1) < progress.next_first:
            return  # all fetched records are requested
        self._session.grants.update_anchor(holding)
        if not progress.may_request(meter.pace.depth):
            return
        fresh = place.find(progress.next_first)
        if is_idle and fresh > place.at:
            self._drop_foreign(place, progress, fresh - place.at)
            fresh = place.at
        unrequested = len(place.fetched) - fresh
        if not unrequested or not holding.may_hand_out(now_ms):
            return
        bound = meter.pace.depth * self._most
        room = bound - holding.unfinished_count - (fresh - place.at)
        if room < self._most:
            return
        count = min(unrequested, room)
        meter.requested_ms = now_ms
        last = offset_at(place.fetched, fresh + count - 1)
        self._session.grants.request(holding, last)

    def _request_gap(
        self, place: FetchState, progress: AtMostOnce, now_ms: int
    ) -> None:
        """Request the offsets without records after the last one (PROTOCOL 6.2).

        This moves the position to the log's end. It is delayed, so that the next
        records are requested together with these offsets.
        """
        holding = place.holding
        meter = self._meter(place)
        wait_ms = self._engine.context.heartbeat_interval_ms // INTERVALS_PER_H
        if (
            place.next_offset > progress.next_first
            and not progress.outstanding_count
            and now_ms - meter.requested_ms >= wait_ms
            and holding.may_hand_out(now_ms)
        ):
            meter.requested_ms = now_ms
            self._session.grants.update_anchor(holding)
            self._session.grants.request(holding, place.next_offset - 1)

    def _drop_foreign(
        self, place: FetchState, progress: AtMostOnce, count: int
    ) -> None:
        """Drop records that were granted to others; this owner never gets them."""
        if count < place.buffered_count:
            place.take(count)
        else:
            place.restart(self._reader, progress.next_first)

    # --- using

    def take(
        self, place: FetchState, progress: AtMostOnce, *, most: int
    ) -> Sequence[Record]:
        """Return records that are both fetched and granted, in log order."""
        records: Sequence[Record] = []
        while place.buffered_count and len(records) < most:
            grant = progress.granted
            if grant is None:
                break
            first = offset_at(place.fetched, place.at)
            if first > grant.last:
                progress.skip_through(grant.last)
                continue
            if first < grant.first:
                # Granted to an earlier owner; this owner never gets them.
                start = place.find(grant.first)
                place.take(start - place.at)
                continue
            end = place.find(_end_of_run(progress.unused))
            chunk = place.take(min(end - place.at, most - len(records)))
            progress.hand_out(offset_at(chunk, -1))
            records = [*records, *chunk] if records else chunk
        self._measure(place, progress, len(records))
        return records

    def _measure(self, place: FetchState, progress: AtMostOnce, count: int) -> None:
        meter = self._meter(place)
        now_ms = self._clock.now_ms()
        round_trip_us = progress.round_trip_us
        if count:
            self._measure_work(count, now_ms)
            meter.take(count, now_ms, round_trip_us=round_trip_us)
            batch_ms = meter.batch_ms(self._most, now_ms)
            if batch_ms is not None:
                meter.pace.on_batch(
                    batch_ms, round_trip_us=round_trip_us, work_us=self._work_us
                )
        elif progress.outstanding_count:
            meter.starve(now_ms)

    def _measure_work(self, count: int, now_ms: int) -> None:
        self._work_count += count
        if self._work_count >= self._most:
            took_us = (now_ms - self._work_since_ms) * US_PER_MS
            sample_us = max(1, took_us * self._most // self._work_count)
            self._work_us = averaged(self._work_us, sample_us)
            self._work_since_ms, self._work_count = now_ms, 0

    def await_grant(self, places: Iterable[FetchState], timeout_ms: int) -> None:
        """Wait for the engine's next round, unless fetched records are granted."""
        with self._engine.changed:
            if timeout_ms > 0 and not any(map(self._is_served, places)):
                self._engine.changed.wait(timeout_ms / 1000)

    def _is_served(self, place: FetchState) -> bool:
        progress = place.holding.progress
        if not isinstance(progress, AtMostOnce):
            return False
        return place.buffered_count > 0 and progress.granted is not None

    def awaits(self, places: Iterable[FetchState]) -> bool:
        """Return whether a verdict on requested offsets is pending."""
        return any(
            isinstance(place.holding.progress, AtMostOnce)
            and place.holding.progress.outstanding_count > 0
            for place in places
        )

    def holds(self, places: Iterable[FetchState]) -> bool:
        """Return whether records are, or may yet be, granted and not handed out."""
        return any(
            place.buffered_count > 0
            and (progress.granted is not None or progress.outstanding_count > 0)
            for place in places
            if isinstance(progress := place.holding.progress, AtMostOnce)
        )


def _end_of_run(grants: Sequence[OffsetRange]) -> int:
    """Return the end of the first grant, and of those that adjoin it."""
    end = grants[0].end
    for grant in grants[1:]:
        if grant.first != end:
            break
        end = grant.end
    return end
