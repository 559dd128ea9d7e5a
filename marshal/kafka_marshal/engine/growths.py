"""New partitions of data topics that wait for their sources (PROTOCOL 9.10)."""

from kafka_marshal.engine.context import Context
from kafka_marshal.protocol.growths import (
    Source,
    growth_of,
    position_in,
    source_of,
)
from kafka_marshal.protocol.types import Key

GROWTH = "growth"
"""Reason of a release: a new partition waits for the one that had its keys."""


def awaited(context: Context, key: Key, *, topic_id: bytes | None) -> Source | None:
    """Return what a new partition of a data topic waits for, as far as the log is read.

    None for a partition that may be claimed: it is new in no growth, its source has
    passed its end, or it has begun already.

    Args:
        context: Its worlds.
        key: The partition.
        topic_id: Kafka's id of the topic, None if unknown.
    """
    growths = context.replicas[0].world.growths
    if not growths:
        return None  # the common case
    growth = growth_of(growths, key, topic_id=topic_id)
    if growth is None:
        return None
    known = context.replica_of(key).world.keys.get(key)
    if position_in(known, topic_id=topic_id) is not None:
        return None
    source = source_of(growth, key)
    found = context.replica_of(source.key).world.keys.get(source.key)
    id_of_topic = growth.topic_id if topic_id is None else topic_id
    return None if source.has_passed(found, topic_id=id_of_topic) else source
