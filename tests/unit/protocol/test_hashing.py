from collections import Counter

import mmh3
import pytest

from kafka_marshal.protocol.hashing import (
    CHECKPOINT_TOPIC,
    PLANNER_TOPIC,
    RESERVED_TOPICS,
    coordinating_partition,
    home_partition,
    key_partition,
)

WHOLE = 2**32  # with so many partitions the result is the hash itself

VECTORS = [
    pytest.param("events", 0, 9, 3838325209, id="events-0"),
    pytest.param("events", 1, 15, 623624015, id="events-1"),
    pytest.param("orders", 7, 41, 716769291, id="orders-7"),
    pytest.param("日本", 3, 33, 2709125333, id="more than ASCII"),
]


@pytest.mark.parametrize(("topic", "partition", "of_50", "unsigned"), VECTORS)
def test_placement_matches_the_frozen_vectors(topic, partition, of_50, unsigned):
    assert coordinating_partition(topic, partition, partition_count=50) == of_50
    assert coordinating_partition(topic, partition, partition_count=WHOLE) == unsigned


def test_a_single_coordinating_partition_has_all_keys():
    assert {coordinating_partition("t", n, partition_count=1) for n in range(50)} == {0}


def test_the_hash_separates_the_topic_from_the_partition():
    near = coordinating_partition("t1", 1, partition_count=WHOLE)
    assert near != coordinating_partition("t", 11, partition_count=WHOLE)


def test_the_hash_is_of_topic_nul_and_decimal_partition():
    expected = mmh3.hash(b"orders\x0012", 0, signed=False)
    assert coordinating_partition("orders", 12, partition_count=WHOLE) == expected


def test_ten_thousand_partitions_are_spread_evenly():
    counts = Counter(
        coordinating_partition("events", partition, partition_count=50)
        for partition in range(10_000)
    )
    assert len(counts) == 50
    assert (min(counts.values()), max(counts.values())) == (172, 231)


def test_a_group_is_hashed_apart_from_topics():
    expected = mmh3.hash(b"\x00group\x00g", 0, signed=False)
    assert home_partition("g", partition_count=WHOLE) == expected
    assert home_partition("g", partition_count=50) == expected % 50
    assert home_partition("g", partition_count=1) == 0


def test_reserved_topics_begin_with_a_slash():
    assert {CHECKPOINT_TOPIC, PLANNER_TOPIC} == RESERVED_TOPICS
    assert all(topic.startswith("/") for topic in RESERVED_TOPICS)


def test_a_key_of_a_reserved_topic_names_its_coordinating_partition():
    assert key_partition(CHECKPOINT_TOPIC, 7, partition_count=3) == 7
    assert key_partition("orders", 7, partition_count=50) == 41
