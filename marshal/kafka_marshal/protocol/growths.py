"""Growing data topics: what their new partitions wait for (PROTOCOL 9.10).

A producer that hashes keys sends a key of the old partition ``p % old_count`` to the
new partition ``p`` once it knows the new count. So a new partition is not claimed
before the position of its source has passed the end that the source had when every
producer knew the count. Only then are all earlier records of its keys processed.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from kafka_marshal.protocol import judging
from kafka_marshal.protocol.items import Growth
from kafka_marshal.protocol.records import DataGrowth
from kafka_marshal.protocol.state import GROWTHS, KeyState, Step, Transitions
from kafka_marshal.protocol.types import Key, may_be_same_topic

ENDS_KEPT_MAX = 65_536
"""Maximum number of ends of old partitions that are kept, for all growths together."""


class Source(NamedTuple):
    """What a new partition of a data topic waits for.

    Attributes:
        key: The old partition whose record keys may move to the new one, in its group.
        end: The position that the source must reach, None while unknown.
    """

    key: Key
    end: int | None

    def has_passed(self, known: KeyState | None, *, topic_id: bytes | None) -> bool:
        """Return whether the source has reached its end.

        Args:
            known: The source, in its coordinating partition; None if it is unknown.
            topic_id: Kafka's id of the topic that grew. A position in an earlier topic
                of that name does not count.
        """
        position = position_in(known, topic_id=topic_id)
        if position is None or self.end is None:
            return False
        return position >= self.end


def position_in(known: KeyState | None, *, topic_id: bytes | None) -> int | None:
    """Return the position of a key in the topic with an id; None if it has none there.

    Args:
        known: The key, None if it is unknown.
        topic_id: Kafka's id of the topic, None for any topic of its name.
    """
    if known is None or not may_be_same_topic(topic_id, known.topic_id):
        return None
    return known.position


def growth_of(
    growths: Iterable[Growth], key: Key, *, topic_id: bytes | None
) -> Growth | None:
    """Return the growth that adds a partition of a topic, or None.

    Args:
        growths: The growths that partition 0 of the coordination topic knows.
        key: The partition.
        topic_id: Kafka's id of its topic, None if unknown.
    """
    for each in growths:
        if each.topic != key.topic or not _is_new(each, key.partition):
            continue
        if may_be_same_topic(topic_id, each.topic_id):
            return each
    return None


def _is_new(growth: Growth, partition: int) -> bool:
    return growth.old_count <= partition < growth.new_count


def source_of(growth: Growth, key: Key) -> Source:
    """Return what a new partition of a topic waits for."""
    number = key.partition % growth.old_count
    end = None if growth.ends is None else growth.ends[number]
    return Source(key._replace(partition=number), end)


def awaited_source(
    growths: Iterable[Growth],
    key: Key,
    *,
    topic_id: bytes | None,
    state_of: Callable[[Key], KeyState | None],
) -> Source | None:
    """Return what a new partition of a topic waits for.

    None for a partition that may be claimed: no growth has added it, the position of
    its source has reached the end in the growth, or it has a position itself.

    Args:
        growths: The growths that partition 0 of the coordination topic knows.
        key: The partition.
        topic_id: Kafka's id of its topic, None if unknown.
        state_of: Returns the state of a key, None if it is unknown.
    """
    growth = growth_of(growths, key, topic_id=topic_id)
    if growth is None or position_in(state_of(key), topic_id=topic_id) is not None:
        return None
    source = source_of(growth, key)
    id_of_topic = growth.topic_id if topic_id is None else topic_id
    known = state_of(source.key)
    return None if source.has_passed(known, topic_id=id_of_topic) else source


def judge(growths: tuple[Growth, ...], record: DataGrowth) -> str | None:
    """Return why a DataGrowth has no effect, or None (PROTOCOL 9.10)."""
    of_topic = growths_of(growths, record.topic, topic_id=record.topic_id)
    known = next((e for e in of_topic if e.old_count == record.old_count), None)
    if record.new_count == record.old_count:
        return "growth" if known is None else None
    if known is not None and known.new_count == record.new_count:
        return "known" if record.ends is None or known.ends is not None else None
    if record.ends is not None:
        return "growth"
    if any(each.ends is None for each in of_topic):
        return "busy"
    if any(record.old_count < each.new_count for each in of_topic):
        return "growth"
    return None


def with_growth(
    growths: tuple[Growth, ...], record: DataGrowth, *, offset: int
) -> tuple[Growth, ...]:
    """Return the growths after an accepted DataGrowth.

    Growths of an earlier topic of that name are dropped.
    """
    topic = record.topic
    mine = growths_of(growths, topic, topic_id=record.topic_id)
    of_topic = {each.old_count: each for each in mine}
    known = of_topic.pop(record.old_count, None)
    if record.new_count > record.old_count:
        of_topic[record.old_count] = Growth(
            topic=topic,
            old_count=record.old_count,
            new_count=record.new_count,
            topic_id=record.topic_id if known is None else known.topic_id,
            offset=offset if known is None else known.offset,
            ends=record.ends,
        )
    others = [each for each in growths if each.topic != topic]
    return tuple(sorted((*others, *of_topic.values()), key=lambda each: each[:2]))


def growths_of(
    growths: Iterable[Growth], topic: str, *, topic_id: bytes | None
) -> list[Growth]:
    """Return the growths of a topic, but not of an earlier topic of its name.

    Args:
        growths: All growths, by topic and count, as partition 0 of the coordination
            topic knows them; the result has the same order.
        topic: Name of the topic.
        topic_id: Kafka's id of the topic, None if unknown.
    """
    return [
        each
        for each in growths
        if each.topic == topic and may_be_same_topic(topic_id, each.topic_id)
    ]


def ends_count(growths: Iterable[Growth]) -> int:
    """Return the number of old partitions whose ends are kept or will be."""
    return sum(each.old_count for each in growths)


def are_of_a_log(growths: tuple[Growth, ...], *, next_offset: int) -> bool:
    """Return whether growths are as a fold would have left them."""
    return (
        ends_count(growths) <= ENDS_KEPT_MAX
        and all(_is_sound(each, next_offset) for each in growths)
        and all(_may_follow(one, other) for one, other in pairwise(growths))
    )


def _is_sound(growth: Growth, next_offset: int) -> bool:
    is_multiple = growth.new_count % growth.old_count == 0
    is_whole = growth.ends is None or len(growth.ends) == growth.old_count
    is_growth = is_multiple and growth.new_count > growth.old_count
    return is_growth and is_whole and growth.offset < next_offset


def _may_follow(one: Growth, other: Growth) -> bool:
    if one.topic != other.topic:
        return one.topic < other.topic
    is_one_topic = may_be_same_topic(one.topic_id, other.topic_id)
    return is_one_topic and one.ends is not None and one.new_count <= other.old_count


def _grow(step: Step, record: DataGrowth) -> Transitions:
    """Fold a growth: it changes no key; claimants decide what it means for claims."""
    state = step.state
    config = state.config
    assert config is not None  # the record needs level 2
    if state.partition != 0:
        return (step.refused(judging.misplaced_reason(state)),)
    reason = judge(state.growths, record)
    if reason == "known":
        return (step.ignored(reason),)
    if reason is not None:
        return (step.refused(reason),)
    growths = with_growth(state.growths, record, offset=step.entry.offset)
    is_withdrawn = record.new_count == record.old_count
    has_room = (
        len(growths) <= config.limit("operations")
        and ends_count(growths) <= ENDS_KEPT_MAX
    )
    if record.ends is None and not is_withdrawn and not has_room:
        return (step.refused("limits"),)
    state.growths = growths
    state.dirty[GROWTHS] = None
    if is_withdrawn:
        return (step.accepted("growth_withdrawn"),)
    return (step.accepted("grown" if record.ends is not None else "growing"),)


FOLDS: dict[type, Callable[[Step, Any], Transitions]] = {DataGrowth: _grow}
"""How a growth is folded, by ``rationalizer.apply`` alone."""
