"""Follows the data topics of one consumer: new partitions, new topics, deleted ones."""

from collections.abc import Callable, Collection, Mapping
from functools import partial

from kafka_marshal.ports import DataLog, Pending, TopicInfo

from .context import Context

LOOK_MS_MAX = 10_000
TOPICS_MAX = 1_000
LOOKS_UNTIL_GONE = 2

Matches = Callable[[str], bool]


class TopicWatch:
    """Looks topics up in the background, every ``refresh_ms``.

    Attributes:
        topics: What is known of each topic; grows and shrinks where they are
            chosen by a pattern.
    """

    __slots__ = (
        "_absent",
        "_call",
        "_due_ms",
        "_has_told_limit",
        "_matches",
        "_refresh_ms",
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
        self._matches = matches
        self._refresh_ms = refresh_ms
        self._call: Pending[Mapping[str, TopicInfo]] | None = None
        self._due_ms: int | None = None
        self._absent: dict[str, int] = {}
        self._has_told_limit = False

    def look_again(
        self, context: Context, now_ms: int, *, taken: Collection[str]
    ) -> tuple[bool, list[str]]:
        """Look the topics up where that is due.

        Args:
            context: Where to look.
            now_ms: Local time.
            taken: Topics that this process consumes otherwise.

        Returns:
            Whether any topic is new or has changed, and those that are gone:
            the caller gives them up and then calls ``drop``.
        """
        changed = False
        gone: list[str] = []
        call = self._call
        if call is not None and call.done():
            self._call = None
            if call.exception(0) is None:
                found = call.result(0)
                changed = self._adopt(context, found, taken)
                gone = self._find_gone(found)
        if self._due_ms is None:
            self._due_ms = now_ms + self._refresh_ms
        elif self._call is None and now_ms >= self._due_ms:
            self._due_ms = now_ms + self._refresh_ms
            data = context.ports.data
            look = partial(data.describe, [*self.topics], LOOK_MS_MAX)
            if self._matches is not None:
                look = partial(
                    matching_topics, data, self._matches, timeout_ms=LOOK_MS_MAX
                )
            self._call = context.ports.background.submit(look)
        return changed, gone

    def drop(self, topic: str) -> None:
        """Forget a topic that is gone."""
        self.topics.pop(topic, None)
        self._absent.pop(topic, None)

    def _adopt(
        self, context: Context, found: Mapping[str, TopicInfo], taken: Collection[str]
    ) -> bool:
        changed = False
        for topic, info in found.items():
            known = self.topics.get(topic)
            if known == info or topic in taken or info.partition_count < 1:
                continue
            if known is None and len(self.topics) >= TOPICS_MAX:
                if not self._has_told_limit:
                    fields = {"topic": topic, "most": TOPICS_MAX}
                    context.observe("topics_limit", fields)
                self._has_told_limit = True
                continue
            fields = {"topic": topic, "partition_count": info.partition_count}
            context.observe("topic_changed", fields)
            self.topics[topic] = info
            changed = True
        return changed

    def _find_gone(self, found: Mapping[str, TopicInfo]) -> list[str]:
        """Return the topics of a pattern that were missing in two looks in a row.

        Once is no evidence: a broker that has just started may not know them yet.
        """
        if self._matches is None:
            return []
        self._absent = {
            topic: self._absent.get(topic, 0) + 1
            for topic in self.topics
            if topic not in found
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
