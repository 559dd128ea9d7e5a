"""Which coordinating partition arbitrates a key (PROTOCOL 2.3, 2.4)."""

from functools import lru_cache

import mmh3

CHECKPOINT_TOPIC = "/checkpoint"
CHECKPOINT_GROUP = "marshal"
PLANNER_TOPIC = "/planner"
RESERVED_TOPICS = frozenset({CHECKPOINT_TOPIC, PLANNER_TOPIC})
"""Topics of reserved keys: no real topic can have such a name (PROTOCOL 2.3)."""
GROUPS_REMEMBERED_MAX = 4_096


def coordinating_partition(topic: str, partition: int, *, partition_count: int) -> int:
    """Return the coordinating partition of a data partition.

    Args:
        topic: Data topic.
        partition: Data partition.
        partition_count: Number of coordinating partitions, from the Config in force.
    """
    name = f"{topic}\0{partition}".encode()
    return mmh3.hash(name, 0, signed=False) % partition_count


def key_partition(topic: str, partition: int, *, partition_count: int) -> int:
    """Return the coordinating partition of a key; a reserved key names its own."""
    if topic in RESERVED_TOPICS:
        return partition
    return coordinating_partition(topic, partition, partition_count=partition_count)


@lru_cache(
    maxsize=GROUPS_REMEMBERED_MAX
)  # called for each Member record that is folded
def home_partition(group_id: str, *, partition_count: int) -> int:
    """Return the coordinating partition that orders records about a whole group."""
    name = f"\0group\0{group_id}".encode()
    return mmh3.hash(name, 0, signed=False) % partition_count
