"""Follows one consumer's data topics: new, changed and deleted ones."""

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from kafka_marshal.config import TOPICS_MAX, Matches, OnTopics
from kafka_marshal.engine.interfaces import ClaimContext
from kafka_marshal.ports import DataLog, Pending, TopicInfo
from kafka_marshal.protocol.planner import LEAD
from kafka_marshal.protocol.types import TopicPartition

DESCRIBE_MS_MAX = 10_000
MISSES_UNTIL_GONE = 2
# Time until a missing or doubted topic is looked up again.
RECHECK_MS = 500


class TopicChanges(NamedTuple):
    """The result of one look-up of the topics.

    Attributes:
        has_changed: Whether a topic is new, has changed, or is no longer in doubt.
        ended: Topics whose claims end: deleted, or deleted and created again.
    """

    has_changed: bool
    ended: list[str]


class TopicWatch:
    """Looks topics up in the background, every ``refresh_ms``.

    Attributes:
        topics: Metadata of each topic. Topics selected by a pattern come and go; a
            named topic that is deleted stays, without partitions.
        doubted: Topics that a fetch could not find by their id. They are looked up
            at once, and none of their keys is claimed before the response.
    """

    __slots__ = (
        "_absent",
        "_call",
        "_due_ms",
        "_in_doubt",
        "_is_limit_reported",
        "_looked_ms",
        "_matches",
        "_refresh_ms",
        "_retired",
        "_seen_ms",
        "doubted",
        "topics",
    )

    def __init__(
        self,
        topics: dict[str, TopicInfo],
        *,
        refresh_ms: int,
        matches: Matches | None = None,
    ) -> None:
        self.topics = topics
        self.doubted: set[str] = set()
        self._matches = matches
        self._refresh_ms = refresh_ms
        self._call: Pending[Mapping[str, TopicInfo]] | None = None
        # Doubts older than the pending look-up, which therefore resolves them.
        self._in_doubt: set[str] = set()
        self._due_ms: int | None = None
        self._looked_ms = 0
        self._absent: dict[str, int] = {}
        # Earlier ids of each topic: a broker that lags may still return them.
        self._retired: dict[str, set[bytes]] = {}
        self._is_limit_reported = False
        # Start of the last look-up that confirmed each topic's metadata.
        self._seen_ms: dict[str, int] = {}

    def seen_ms(self, topic: str) -> int:
        """Return the start of the last look-up that confirmed a topic; 0 before it."""
        return self._seen_ms.get(topic, 0)

    def doubt(self, topic: str) -> bool:
        """Look up a topic that was not found by its id, or that lacks a partition.

        Returns:
            Whether the topic was not in doubt before.
        """
        known = self.topics.get(topic)
        if known is None or not known.partition_count or topic in self.doubted:
            return False
        self.doubted.add(topic)
        soon_ms = self._looked_ms + RECHECK_MS
        self._due_ms = soon_ms if self._due_ms is None else min(soon_ms, self._due_ms)
        return True

    def refresh(
        self, context: ClaimContext, now_ms: int, *, taken: Collection[str]
    ) -> TopicChanges:
        """Refresh the topics' metadata when due.

        Args:
            context: Access to Kafka and background work.
            now_ms: Local time.
            taken: Topics that other consumers or claims of this process use.

        Returns:
            The changes. The caller ends the claims of ``ended`` topics and then calls
            ``drop`` for those that ``is_gone``.
        """
        changes = TopicChanges(has_changed=False, ended=[])
        call = self._call
        if call is not None and call.done():
            self._call = None
            if call.exception(0) is None:
                changes = self._on_response(context, call.result(0), taken)
            if self.doubted or self._absent:
                soon_ms = min(RECHECK_MS, self._refresh_ms)
                self._due_ms = min(self._due_ms or 0, self._looked_ms + soon_ms)
        if self._due_ms is None:
            self._due_ms = now_ms + self._refresh_ms
        elif self._call is None and now_ms >= self._due_ms:
            self._due_ms = now_ms + self._refresh_ms
            data = context.ports.data
            describe = partial(data.describe, [*self.topics], DESCRIBE_MS_MAX)
            if self._matches is not None:
                describe = partial(
                    matching_topics, data, self._matches, timeout_ms=DESCRIBE_MS_MAX
                )
            self._looked_ms = now_ms
            self._in_doubt = set(self.doubted)
            self._call = context.ports.background.submit(describe)
        return changes

    def is_gone(self, topic: str) -> bool:
        """Return whether the topic was missing in the last look-ups."""
        return topic in self._absent

    def drop(self, topic: str) -> None:
        """Forget a deleted topic; a named one stays, without partitions."""
        known = self.topics.pop(topic, None)
        if known is not None and self._matches is None:
            self.topics[topic] = TopicInfo(0, known.topic_id)
        self._absent.pop(topic, None)
        self._seen_ms.pop(topic, None)
        self.doubted.discard(topic)

    def _on_response(
        self,
        context: ClaimContext,
        found: Mapping[str, TopicInfo],
        taken: Collection[str],
    ) -> TopicChanges:
        settled = self._in_doubt & self.doubted & found.keys()
        has_changed, replaced = self._adopt(context, found, taken)
        for topic, info in found.items():
            if self.topics.get(topic) == info:
                self._seen_ms[topic] = self._looked_ms
        gone = self._find_gone(found)
        self.doubted -= settled
        return TopicChanges(has_changed or bool(settled), [*replaced, *gone])

    def _adopt(
        self,
        context: ClaimContext,
        found: Mapping[str, TopicInfo],
        taken: Collection[str],
    ) -> tuple[bool, list[str]]:
        """Apply new metadata; return whether it changed, and the recreated topics."""
        changed = False
        replaced = []
        for topic, info in found.items():
            known = self.topics.get(topic)
            if known == info or topic in taken or info.partition_count < 1:
                continue
            if info.topic_id in self._retired.get(topic, ()):
                continue
            if known is None and len(self.topics) >= TOPICS_MAX:
                if not self._is_limit_reported:
                    fields = {"topic": topic, "most": TOPICS_MAX}
                    context.observe("topics_limit", fields)
                self._is_limit_reported = True
                continue
            fields = {"topic": topic, "partition_count": info.partition_count}
            earlier_id = None if known is None else known.topic_id
            if earlier_id is not None and info.topic_id != earlier_id:
                self._retired.setdefault(topic, set()).add(earlier_id)
                replaced.append(topic)
                context.observe("topic_recreated", fields)
            else:
                context.observe("topic_changed", fields)
            self.topics[topic] = info
            changed = True
        return changed, replaced

    def _find_gone(self, found: Mapping[str, TopicInfo]) -> list[str]:
        """Return the topics that were missing in two look-ups in a row.

        One look-up is no evidence: a broker that has just started may not know them
        yet. It is enough if a fetch did not find the topic either.
        """
        self._absent = {
            topic: self._absent.get(topic, 0) + 1 + (topic in self._in_doubt)
            for topic, info in self.topics.items()
            if topic not in found and info.partition_count > 0
        }
        return [t for t, looks in self._absent.items() if looks >= MISSES_UNTIL_GONE]


def matching_topics(
    data: DataLog, matches: Matches, *, timeout_ms: int
) -> Mapping[str, TopicInfo]:
    """Return the metadata of all matching topics, in name order, up to a limit."""
    names = sorted(name for name in data.topics(timeout_ms) if matches(name))
    # One more than the limit, so that an excess is noticed.
    found = data.describe(names[: TOPICS_MAX + 1], timeout_ms)
    return dict(sorted(found.items()))


class TopicCallback:
    """Calls ``on_topics`` on the consumer's thread when the set of topics changes.

    A topic belongs to the set while its partition 0 is held. The owner of partition 0
    claims the other partitions as they become free.
    """

    __slots__ = ("_call", "_topics")

    def __init__(self, call: OnTopics) -> None:
        self._call = call
        self._topics: frozenset[str] = frozenset()

    def follow(self, partitions: Iterable[TopicPartition]) -> None:
        """Call back if the set of held topics has changed."""
        topics = frozenset(topic for topic, number in partitions if number == LEAD)
        if topics != self._topics:
            self._topics = topics
            self._call(topics)
