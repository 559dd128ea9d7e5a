"""Looks up the log ends of held partitions in the background.

For people, for metrics, and to judge whether an owner keeps up. If a look-up fails, the
last figure stays until it is too old to count.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kafka_marshal.ports import Pending
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.granting import AtMostOnce
from kafka_marshal.protocol.types import Key, TopicPartition, lag_of

from .heartbeats import INTERVALS_PER_H
from .holding import Holding
from .interfaces import ClaimContext

ENDS_MS_MAX = 2_000
PARTITIONS_MAX = 1_000


class LogEnd(NamedTuple):
    """The end of a partition's log.

    Attributes:
        offset: Next offset to be written, or the last stable one; see ``StartRule``.
        asked_ms: Local time of the request.
    """

    offset: int
    asked_ms: int


class LagWatch:
    """Requests a session's log ends three times per heartbeat interval.

    One request is outstanding at a time, for at most ``PARTITIONS_MAX`` partitions; the
    next one for the rest follows its response. Called under the engine's lock.
    """

    __slots__ = (
        "_answer_count",
        "_asked",
        "_asked_ms",
        "_call",
        "_context",
        "_due_ms",
        "_ends",
        "_has_news",
        "_is_failing",
        "_levels",
        "_missing",
        "_todo",
    )

    def __init__(self, context: ClaimContext) -> None:
        self._context = context
        self._call: Pending[Mapping[TopicPartition, int]] | None = None
        self._asked: list[Key] = []
        self._asked_ms = 0
        self._todo: list[Key] = []
        self._levels: dict[Key, str] = {}
        self._ends: dict[Key, LogEnd] = {}
        self._due_ms = 0
        self._is_failing = False
        self._has_news = False
        self._answer_count = 0
        self._missing: set[str] = set()

    @property
    def answer_count(self) -> int:
        """Number of passes over all log ends in which a look-up succeeded."""
        return self._answer_count

    def drive(self, holdings: Iterable[Holding], now_ms: int) -> None:
        """Handle a response, and send a request if one is due."""
        if self._call is not None:
            if not self._call.done():
                return
            self._on_response(self._call)
            self._call = None
        if not self._todo:
            if now_ms < self._due_ms:
                return
            third_ms = self._context.heartbeat_interval_ms // INTERVALS_PER_H
            self._due_ms = now_ms + third_ms
            self._levels = {
                holding.key: holding.start_rule.isolation_level
                for holding in holdings
                if holding.claim.is_owned and holding.start_rule.is_needed
            }
            self._todo = list(self._levels)
            held = self._levels.keys()
            self._ends = {k: end for k, end in self._ends.items() if k in held}
        if self._todo:
            self._request(now_ms)

    def _request(self, now_ms: int) -> None:
        self._asked = self._todo[:PARTITIONS_MAX]
        self._todo = self._todo[PARTITIONS_MAX:]
        self._asked_ms = now_ms
        by_level: dict[str, list[TopicPartition]] = {}
        for key in self._asked:
            level = self._levels[key]
            by_level.setdefault(level, []).append(key.topic_partition)
        data = self._context.ports.data

        def request() -> Mapping[TopicPartition, int]:
            found: dict[TopicPartition, int] = {}
            for level, partitions in by_level.items():
                found |= data.ends(partitions, ENDS_MS_MAX, isolation_level=level)
            return found

        self._call = self._context.ports.background.submit(request)

    def _on_response(self, call: Pending[Mapping[TopicPartition, int]]) -> None:
        error = call.exception(0)
        if error is not None:
            if not self._is_failing:
                self._context.observe("lag_unknown", {"error": error})
            self._is_failing = True
            self._todo = []
            self._count_answers()
            return
        self._is_failing = False
        found = call.result(0)
        for key in self._asked:
            end = found.get(key.topic_partition)
            if end is None:
                self._missing.add(key.topic)
            else:
                self._ends[key] = LogEnd(end, self._asked_ms)
        self._has_news = True
        if not self._todo:
            self._count_answers()

    def _count_answers(self) -> None:
        """Count a pass, not each response: a check of the figures visits all keys."""
        self._answer_count += self._has_news
        self._has_news = False

    def take_missing(self) -> set[str]:
        """Return the topics with a missing partition since the last call."""
        missing, self._missing = self._missing, set()
        return missing

    def end_of(self, key: Key) -> LogEnd | None:
        """Return the last known log end of a held partition."""
        return self._ends.get(key)

    def lag_of(self, holding: Holding) -> int | None:
        """Return the number of offsets between position and end, None if unknown.

        The same as a consumer group's lag. With at-most-once delivery the position is
        the end of the grants.
        """
        end = self._ends.get(holding.key)
        position = holding.position
        if isinstance(holding.progress, AtMostOnce):
            seen = self._context.glance(holding.key)
            position = None if seen is None else seen.position
        return lag_of(position, None if end is None else end.offset, is_owned=True)


def reached(holding: Holding) -> int | None:
    """Return the offset up to which records were handed out, None before the start.

    In a log with gaps it is too low while many records are uncommitted.
    """
    progress = holding.progress
    if isinstance(progress, AtMostOnce):
        grant = progress.granted
        return progress.next_first if grant is None else grant.first
    if isinstance(progress, AtLeastOnce) and progress.position is not None:
        return progress.position + progress.tracked_count
    return None
