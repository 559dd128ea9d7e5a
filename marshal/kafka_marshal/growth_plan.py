"""What the growth of a keyed data topic does, and who waits (PROTOCOL 9.10).

All of it is judged from one reading of the log, and of the topic.
"""

from collections.abc import Iterable, Mapping

import attrs

from kafka_marshal.errors import ClaimRejected, ConfigurationError
from kafka_marshal.ports import TopicInfo
from kafka_marshal.protocol.growths import growths_of, position_in, source_of
from kafka_marshal.protocol.items import Growth
from kafka_marshal.protocol.placement import standing_keys
from kafka_marshal.protocol.records import ENDS_MAX
from kafka_marshal.protocol.state import KeyState, WorldState
from kafka_marshal.protocol.types import PARTITION_MAX, Key, TopicPartition

ANNOUNCE, ADD, SETTLE, END = "announce", "add", "settle", "end"
WITHDRAW = "withdraw"
Ends = Mapping[TopicPartition, int]


@attrs.frozen(kw_only=True)
class SourceReport:
    """How far a group is in one old partition, and what waits for that.

    Attributes:
        group_id: The group.
        topic: The topic.
        partition: The old partition.
        position: The group's position in it, None if it has none.
        end: The position that it has to reach; its log end as long as the growth is
            only announced; None if that is unknown.
        waiting: New partitions that the group does not begin before.
    """

    group_id: str
    topic: str
    partition: int
    position: int | None
    end: int | None
    waiting: tuple[int, ...]

    @property
    def lag(self) -> int | None:
        """Offsets up to the end, None if unknown."""
        if self.position is None or self.end is None:
            return None
        return max(0, self.end - self.position)


@attrs.frozen(kw_only=True)
class GrowthReport:
    """A growth that the log knows, and who waits.

    Attributes:
        growth: The growth.
        sources: Each old partition in each group with keys of the topic.
    """

    growth: Growth
    sources: tuple[SourceReport, ...]


@attrs.frozen(kw_only=True)
class GrowthPlan:
    """The effect of a growth, or of its withdrawal.

    Attributes:
        growth: The growth; its offset is -1 if the log does not know it yet.
        partition_count: Partitions of the topic now; None if it does not exist.
        is_withdrawal: Whether the growth is withdrawn.
        settle_ms: How long producers get to learn the new count.
        sources: Each old partition in each group with keys of the topic.
    """

    growth: Growth
    partition_count: int | None
    is_withdrawal: bool = False
    settle_ms: int
    sources: tuple[SourceReport, ...]

    @property
    def steps(self) -> tuple[str, ...]:
        """What is left to do: ``announce``, ``add``, ``settle``, ``end``, ``withdraw``.

        In this order; empty if nothing is left.
        """
        if self.is_withdrawal:
            return (WITHDRAW,)
        if self.growth.ends is not None:
            return ()
        announce = (ANNOUNCE,) if self.growth.offset < 0 else ()
        add = (ADD,) if self.added_count else ()
        return (*announce, *add, SETTLE, END)

    @property
    def added_count(self) -> int:
        """Partitions that are added to the topic."""
        if self.is_withdrawal or self.partition_count is None:
            return 0
        return max(0, self.growth.new_count - self.partition_count)

    @property
    def takes_ms(self) -> int:
        """How long it takes, apart from a few requests."""
        return self.settle_ms if SETTLE in self.steps else 0


def plan_growth(
    worlds: Mapping[int, WorldState],
    topic: str,
    *,
    count: int,
    info: TopicInfo | None,
    settle_ms: int,
    ends: Ends,
) -> GrowthPlan:
    """Return what is left to do until a topic has grown.

    Args:
        worlds: Every coordinating partition, folded to its end.
        topic: The topic.
        count: The partitions that it is to have.
        info: The topic in the cluster, None if it does not exist.
        settle_ms: How long producers get to learn the new count.
        ends: Log ends of its partitions, as far as they are known.

    Raises:
        ConfigurationError: There is no such topic, or it cannot have that number.
        ClaimRejected: Another growth of it is open, or it has that number without
            one.
    """
    if info is None:
        raise ConfigurationError(
            f"topic {topic!r} does not exist; see: kafka-topics --list", setting="topic"
        )
    known = growths_of(worlds[0].growths, topic, topic_id=info.topic_id)
    growth = _known(known, count, info) or Growth(
        topic=topic,
        old_count=info.partition_count,
        new_count=count,
        topic_id=info.topic_id,
        offset=-1,
        ends=None,
    )
    if growth.offset < 0:
        _require_possible(growth)
    return GrowthPlan(
        growth=growth,
        partition_count=info.partition_count,
        settle_ms=settle_ms,
        sources=_sources(growth, worlds, ends=ends),
    )


def _known(known: Iterable[Growth], count: int, info: TopicInfo) -> Growth | None:
    """Return the growth to a count that the log knows, None if it knows none.

    Raises:
        ClaimRejected: Another growth is open, or one of an earlier topic is known.
    """
    for each in known:
        reached = each.old_count if each.ends is None else each.new_count
        if info.partition_count < reached:
            raise ClaimRejected(
                f"topic {each.topic!r} has {info.partition_count} partitions, and the "
                f"log knows its growth from {each.old_count} to {each.new_count}: of "
                "an earlier topic of that name; to withdraw it, run: "
                f"{command(each)} --withdraw --execute",
                reason="growth",
            )
        if each.new_count == count and (
            each.ends is None or info.partition_count == count
        ):
            return each
        if each.ends is None:
            raise ClaimRejected(
                f"topic {each.topic!r} grows from {each.old_count} to "
                f"{each.new_count} partitions, and that has not ended; to continue "
                f"it, run: {command(each)} --execute; to withdraw it: "
                f"{command(each)} --withdraw --execute",
                reason="busy",
            )
    return None


def _require_possible(growth: Growth) -> None:
    topic, old, new = growth.topic, growth.old_count, growth.new_count
    if new == old:
        raise ClaimRejected(
            f"topic {topic!r} has {old} partitions already, and the log knows no "
            "growth to that number: members claimed the new ones at once; nothing is "
            f"left to do; see: marshal groups grow --topic {topic}",
            reason="growth",
        )
    if new < old or new % old or new > PARTITION_MAX:
        raise ConfigurationError(
            f"topic {topic!r} has {old} partitions and cannot get {new}; give a "
            f"multiple, such as {2 * old}: else it is not known which partition had "
            "the keys of a new one",
            setting="partitions",
        )
    if old > ENDS_MAX:
        raise ConfigurationError(
            f"topic {topic!r} has {old} partitions; one with more than {ENDS_MAX} "
            "cannot grow, because the log keeps the end of each",
            setting="topic",
        )


def plan_withdrawal(
    worlds: Mapping[int, WorldState],
    topic: str,
    *,
    count: int | None,
    info: TopicInfo | None,
    ends: Ends,
) -> GrowthPlan:
    """Return the effect of the withdrawal of a growth: nothing waits for it any more.

    Args:
        worlds: Every coordinating partition, folded to its end.
        topic: The topic, also one that does not exist any more.
        count: The partitions that it has or gets by the growth; None for the growth
            that is open, or the only one.
        info: The topic in the cluster, None if it does not exist.
        ends: Log ends of its partitions, as far as they are known.

    Raises:
        ClaimRejected: The log knows no such growth, or several.
    """
    known = growths_of(worlds[0].growths, topic, topic_id=None)
    found = [each for each in known if count in {None, each.new_count}]
    if len(found) > 1:
        found = [each for each in found if each.ends is None]
    if len(found) != 1:
        texts = [f"from {each.old_count} to {each.new_count}" for each in known]
        numbers = f"of these: {', '.join(texts)}" if texts else "none"
        to = "" if count is None else f" to {count} partitions"
        raise ClaimRejected(
            f"name the growth{to} of topic {topic!r} to withdraw, by its --partitions; "
            f"the log knows {numbers}; see: marshal groups grow --topic {topic}",
            reason="growth",
        )
    (growth,) = found
    return GrowthPlan(
        growth=growth,
        partition_count=None if info is None else info.partition_count,
        is_withdrawal=True,
        settle_ms=0,
        sources=_sources(growth, worlds, ends=ends),
    )


def command(growth: Growth) -> str:
    """Return the command that continues a growth, without ``--execute``."""
    return f"marshal groups grow --topic {growth.topic} --partitions {growth.new_count}"


def old_partitions(growths: Iterable[Growth]) -> list[TopicPartition]:
    """Return the old partitions of growths that have no ends yet."""
    return [
        TopicPartition(each.topic, number)
        for each in growths
        if each.ends is None
        for number in range(each.old_count)
    ]


def reports(
    worlds: Mapping[int, WorldState], growths: Iterable[Growth], *, ends: Ends
) -> tuple[GrowthReport, ...]:
    """Return who waits in growths.

    Args:
        worlds: Every coordinating partition, folded to its end.
        growths: The growths.
        ends: Log ends of their old partitions, as far as they are known.
    """
    return tuple(
        GrowthReport(growth=each, sources=_sources(each, worlds, ends=ends))
        for each in growths
    )


def waiting(
    worlds: Mapping[int, WorldState], group_id: str
) -> tuple[SourceReport, ...]:
    """Return the old partitions that new ones wait for in a group.

    Args:
        worlds: Coordinating partitions, folded to a moment; without partition 0
            growths are unknown.
        group_id: The group.
    """
    growths = worlds[0].growths if 0 in worlds else ()
    return tuple(
        source
        for each in growths
        for source in _sources(each, worlds, ends={})
        if source.group_id == group_id and source.waiting
    )


def _sources(
    growth: Growth, worlds: Mapping[int, WorldState], *, ends: Ends
) -> tuple[SourceReport, ...]:
    states = {
        key: world.keys[key]
        for key, world in standing_keys(worlds).items()
        if key.topic == growth.topic
    }
    return tuple(
        _source(growth, Key(group_id, growth.topic, number), states, ends=ends)
        for group_id in sorted({key.group_id for key in states})
        for number in range(growth.old_count)
    )


def _source(
    growth: Growth, key: Key, states: Mapping[Key, KeyState], *, ends: Ends
) -> SourceReport:
    topic_id, known = growth.topic_id, states.get(key)
    source = source_of(growth, key)
    waiting: list[int] = []
    if not source.has_passed(known, topic_id=topic_id):
        waiting = [
            number
            for number in range(
                key.partition + growth.old_count, growth.new_count, growth.old_count
            )
            # One with a position has begun.
            if position_in(
                states.get(key._replace(partition=number)), topic_id=topic_id
            )
            is None
        ]
    end = source.end
    if growth.ends is None:
        end = ends.get(TopicPartition(key.topic, key.partition))
    return SourceReport(
        group_id=key.group_id,
        topic=key.topic,
        partition=key.partition,
        position=position_in(known, topic_id=topic_id),
        end=end,
        waiting=tuple(waiting),
    )
