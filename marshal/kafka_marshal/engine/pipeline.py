"""At most once on the consumer's thread: asks for what was fetched (PROTOCOL 6.2).

What is handed out is both fetched and granted, in log order.
"""

from collections.abc import Iterable

from kafka_marshal.ports import DataReader, Record
from kafka_marshal.protocol.granting import AtMostOnce

from .engine import Engine
from .place import Place
from .session import Session


class Pipeline:
    """The grants of one consumer's partitions."""

    def __init__(
        self, engine: Engine, session: Session, *, reader: DataReader, most: int
    ) -> None:
        self._engine = engine
        self._session = session
        self._reader = reader
        self._most = most
        self._clock = engine.context.ports.clock

    def ask(self, places: Iterable[Place]) -> bool:
        """Ask for what was fetched; return whether a verdict is awaited."""
        is_waiting = False
        with self._engine.changed:
            now_ms = self._clock.now_ms()
            for place in places:
                progress = place.holding.progress
                if not isinstance(progress, AtMostOnce):
                    continue
                if progress.outstanding_count:
                    is_waiting = True
                elif progress.granted is None and place.buffered_count:
                    if place.holding.may_hand_out(now_ms):
                        self._ask_for(place, progress)
                        is_waiting = True
                    else:
                        place.put_back(self._reader)
        return is_waiting

    def _ask_for(self, place: Place, progress: AtMostOnce) -> None:
        most = place.at + self._most
        last = place.fetched[min(most, len(place.fetched)) - 1].offset
        if last >= progress.next_first:
            self._session.grants.request(place.holding, last)
        else:
            # Others were granted all of it.
            place.go_to(self._reader, progress.next_first)

    def take(self, place: Place, progress: AtMostOnce, *, most: int) -> list[Record]:
        """Take what is both fetched and granted, in log order."""
        records: list[Record] = []
        while place.buffered_count and len(records) < most:
            grant = progress.granted
            if grant is None:
                break
            record = place.fetched[place.at]
            if record.offset > grant.last:
                progress.skip_through(grant.last)
            elif record.offset < grant.first:
                place.take(1)  # granted to an earlier owner: never ours
            else:
                records.extend(place.take(1))
                progress.hand_out(record.offset)
        return records

    def awaits(self, places: Iterable[Place]) -> bool:
        """Return whether a verdict on asked-for offsets is still to come."""
        return any(
            isinstance(place.holding.progress, AtMostOnce)
            and place.holding.progress.outstanding_count > 0
            for place in places
        )

    def holds(self, places: Iterable[Place]) -> bool:
        """Return whether records are, or may yet be, granted and not handed out."""
        return any(
            place.buffered_count > 0
            and (progress.granted is not None or progress.outstanding_count > 0)
            for place in places
            if isinstance(progress := place.holding.progress, AtMostOnce)
        )

    def report_unused(self, place: Place) -> None:
        """Tell which granted offsets nobody will ever process (PROTOCOL 6.2)."""
        progress = place.holding.progress
        if not isinstance(progress, AtMostOnce):
            return
        ranges = [(grant.first, grant.last) for grant in progress.discard()]
        if ranges:
            fields = {"key": place.holding.key, "ranges": ranges}
            self._engine.context.observe("granted_unprocessed", fields)
