"""Follows the data topics of one consumer: new partitions, new topics, deleted ones."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kafka_marshal.ports import DataLog, Pending, TopicInfo
from kafka_marshal.protocol.planner import LEAD
from kafka_marshal.protocol.types import TopicPartition

if TYPE_CHECKING:
    from kafka_marshal.engine.interfaces import ClaimContext

LOOK_MS_MAX = 10_000
TOPICS_MAX = 1_000
LOOKS_UNTIL_GONE = 2
# A topic that is missing, or in doubt, is looked up again this soon.
LOOK_AGAIN_MS = 500

Matches = Callable[[str], bool]


class Look(NamedTuple):
    """What one look at the topics found.

    Attributes:
        has_changed: Whether a topic is new, has changed, or is in doubt no more.
        ended: Topics whose claims end: deleted, or deleted and created again.
    """

    has_changed: bool
    ended: list[str]


class TopicWatch:
    """Looks topics up in the background, every ``refresh_ms``.

    Attributes:
        topics: What is known of each topic; grows and shrinks where they are
            chosen by a pattern. One that was named and is deleted stays, without
            partitions.
        doubted: Topics that a fetch could not find by their id. They are looked up
            at once, and nothing of them is claimed before.
    """

    __slots__ = (
        "_absent",
        "_call",
        "_due_ms",
        "_has_told_limit",
        "_in_doubt",
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
        # Doubts that are older than the look under way, which therefore settles them.
        self._in_doubt: set[str] = set()
        self._due_ms: int | None = None
        self._looked_ms = 0
        self._absent: dict[str, int] = {}
        # Earlier ids of each topic: a broker that lags behind may still tell them.
        self._retired: dict[str, set[bytes]] = {}
        self._has_told_limit = False
        # When the last look began that found a topic as it is known.
        self._seen_ms: dict[str, int] = {}

    def seen_ms(self, topic: str) -> int:
        """Return when a look began that confirms what is known; 0 before the first."""
        return self._seen_ms.get(topic, 0)

    def doubt(self, topic: str) -> bool:
        """Look a topic up soon: it could not be found by its id, or its partitions.

        Returns:
            Whether that is news.
        """
        known = self.topics.get(topic)
        if known is None or not known.partition_count or topic in self.doubted:
            return False
        self.doubted.add(topic)
        soon_ms = self._looked_ms + LOOK_AGAIN_MS
        self._due_ms = soon_ms if self._due_ms is None else min(soon_ms, self._due_ms)
        return True

    def look_again(
        self, context: "ClaimContext", now_ms: int, *, taken: Collection[str]
    ) -> Look:
        """Look the topics up where that is due.

        Args:
            context: Where to look.
            now_ms: Local time.
            taken: Topics that this process consumes otherwise.

        Returns:
            What has changed. The caller ends the claims of the topics named there
            and then calls ``drop`` for those that ``is_gone``.
        """
        look = Look(has_changed=False, ended=[])
        call = self._call
        if call is not None and call.done():
            self._call = None
            if call.exception(0) is None:
                look = self._take(context, call.result(0), taken)
            if self.doubted or self._absent:
                soon_ms = min(LOOK_AGAIN_MS, self._refresh_ms)
                self._due_ms = min(self._due_ms or 0, self._looked_ms + soon_ms)
        if self._due_ms is None:
            self._due_ms = now_ms + self._refresh_ms
        elif self._call is None and now_ms >= self._due_ms:
            self._due_ms = now_ms + self._refresh_ms
            data = context.ports.data
            ask = partial(data.describe, [*self.topics], LOOK_MS_MAX)
            if self._matches is not None:
                ask = partial(
                    matching_topics, data, self._matches, timeout_ms=LOOK_MS_MAX
                )
            self._looked_ms = now_ms
            self._in_doubt = set(self.doubted)
            self._call = context.ports.background.submit(ask)
        return look

    def is_gone(self, topic: str) -> bool:
        """Return whether the topic does not exist as of the last look."""
        return topic in self._absent

    def drop(self, topic: str) -> None:
        """Forget a topic that is gone; one that was named is waited for."""
        known = self.topics.pop(topic, None)
        if known is not None and self._matches is None:
            self.topics[topic] = TopicInfo(0, known.topic_id)
        self._absent.pop(topic, None)
        self._seen_ms.pop(topic, None)
        self.doubted.discard(topic)

    def _take(
        self,
        context: "ClaimContext",
        found: Mapping[str, TopicInfo],
        taken: Collection[str],
    ) -> Look:
        settled = self._in_doubt & self.doubted & found.keys()
        has_changed, replaced = self._adopt(context, found, taken)
        for topic, info in found.items():
            if self.topics.get(topic) == info:
                self._seen_ms[topic] = self._looked_ms
        gone = self._find_gone(found)
        self.doubted -= settled
        return Look(has_changed or bool(settled), [*replaced, *gone])

    def _adopt(
        self,
        context: "ClaimContext",
        found: Mapping[str, TopicInfo],
        taken: Collection[str],
    ) -> tuple[bool, list[str]]:
        """Take what was found; return whether that is news, and what was replaced."""
        changed = False
        replaced = []
        for topic, info in found.items():
            known = self.topics.get(topic)
            if known == info or topic in taken or info.partition_count < 1:
                continue
            if info.topic_id in self._retired.get(topic, ()):
                continue
            if known is None and len(self.topics) >= TOPICS_MAX:
                if not self._has_told_limit:
                    fields = {"topic": topic, "most": TOPICS_MAX}
                    context.observe("topics_limit", fields)
                self._has_told_limit = True
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
        """Return the topics that were missing in two looks in a row.

        Once is no evidence: a broker that has just started may not know them yet.
        Once is enough where a fetch did not find the topic either.
        """
        self._absent = {
            topic: self._absent.get(topic, 0) + 1 + (topic in self._in_doubt)
            for topic, info in self.topics.items()
            if topic not in found and info.partition_count > 0
        }
        return [t for t, looks in self._absent.items() if looks >= LOOKS_UNTIL_GONE]


def matching_topics(
    data: DataLog, matches: Matches, *, timeout_ms: int
) -> Mapping[str, TopicInfo]:
    """Return what is known of every topic that matches, by name, up to a limit."""
    names = sorted(name for name in data.topics(timeout_ms) if matches(name))
    # One more than is taken, so that the limit does not pass unnoticed.
    found = data.describe(names[: TOPICS_MAX + 1], timeout_ms)
    return dict(sorted(found.items()))


OnTopics = Callable[[frozenset[str]], None]


class TopicCallback:
    """Calls ``on_topics`` on the consumer's thread; never twice with the same set.

    A topic counts from when its partition 0 is held, which is its key; the rest
    of it follows as it becomes free.
    """

    __slots__ = ("_call", "_told")

    def __init__(self, call: OnTopics) -> None:
        self._call = call
        self._told: frozenset[str] = frozenset()

    def follow(self, partitions: Iterable[TopicPartition]) -> None:
        """Tell what is held now, if that is not what was told last."""
        topics = frozenset(topic for topic, number in partitions if number == LEAD)
        if topics != self._told:
            self._told = topics
            self._call(topics)
