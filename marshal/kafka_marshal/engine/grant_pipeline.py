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

from .fetch_state import FetchState
from .heartbeats import INTERVALS_PER_H
from .interfaces import ClaimEngine, ClaimSession

# What is fetched ahead is held in memory: so many records, or so many batches.
RECORDS_AHEAD_MAX = 16_000
FEW_BATCHES = 4


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

    def needs_records(self, place: FetchState) -> bool:
        """Return whether a partition has too few fetched records for what follows."""
        return place.buffered_count < self._meter(place).pace.depth * self._most

    # --- requesting

    def request_grants(self, places: Iterable[FetchState]) -> bool:
        """Request grants for fetched records; return whether a verdict is pending."""
        ladders = [
            (place, progress)
            for place in places
            if isinstance(progress := place.holding.progress, AtMostOnce)
        ]
        with self._engine.changed:
            now_ms = self._clock.now_ms()
            unused = {place: progress.unused_count for place, progress in ladders}
            supply = sum(unused.values())
            is_busy = supply > 0 or any(p.outstanding_count for _, p in ladders)
            share = self.fetched_max // max(1, len(ladders))
            for place, progress in ladders:
                if place.buffered_count:
                    # How long the other partitions' grants last while this one waits.
                    spare_us = (supply - unused[place]) * self._work_us // self._most
                    is_covered = spare_us > progress.round_trip_us > 0
                    self._request(
                        place,
                        progress,
                        now_ms,
                        is_busy=is_busy,
                        at_once=share if is_covered else 0,
                    )
                else:
                    self._request_gap(place, progress, now_ms)
            return any(progress.outstanding_count for _, progress in ladders)

    def _request(
        self,
        place: FetchState,
        progress: AtMostOnce,
        now_ms: int,
        *,
        is_busy: bool,
        at_once: int,
    ) -> None:
        holding = place.holding
        is_idle = progress.granted is None and not progress.outstanding_count
        if not is_idle and offset_at(place.fetched, -1) < progress.next_first:
            return  # all fetched records are requested
        self._session.grants.update_anchor(holding)
        meter = self._meter(place)
        pace = meter.pace
        if not progress.may_request(pace.depth):
            return
        fresh = place.find(progress.next_first)
        if is_idle and fresh > place.at:
            self._drop_foreign(place, progress, fresh - place.at)
            fresh = place.at
        unrequested = len(place.fetched) - fresh
        if not unrequested or not holding.may_hand_out(now_ms):
            return
        # If others hide the round trip, wait until more can be requested at once.
        bound = pace.depth * self._most
        wanted = max(pace.step * self._most, min(at_once, bound))
        room = bound - holding.unfinished_count - (fresh - place.at)
        if room < wanted:
            return
        count = min(unrequested, room)
        if count < wanted:
            # Let the request grow while there are unused grants here, or, for a moment,
            # grants or requests in another partition.
            is_soon = now_ms - meter.requested_ms < WORK_PER_REQUEST_US // US_PER_MS
            if progress.resume_at < progress.next_first or (is_busy and is_soon):
                return
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
            end = place.find(grant.last + 1)
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
