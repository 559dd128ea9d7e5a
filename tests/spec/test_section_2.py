"""PROTOCOL 2: topic and placement."""

from collections import Counter

import pytest
from logkit import Log, beat, claim, config, messages, pause, release

from kafka_marshal.protocol.codec import decode, encode
from kafka_marshal.protocol.hashing import coordinating_partition, home_partition
from kafka_marshal.protocol.types import Key

DEFAULTS = {
    "span": 2**24,
    "max_pause_ms": 24 * 3_600_000,
    "keys": 100_000,
    "groups": 10_000,
    "beats": 4_096,
    "forget_ms": 30 * 24 * 3_600_000,
    "locks": 10_000,
    "operations": 1_000,
}


@pytest.mark.parametrize(("name", "value"), DEFAULTS.items())
def test_2_2_each_limit_is_optional_and_has_its_default(name, value):
    record = decode(encode(config()))
    assert getattr(record.limits, name) is None
    assert record.limit(name) == value
    assert decode(encode(config(**{name: 7}))).limit(name) == 7


@pytest.mark.parametrize(
    ("topic", "partition", "of_50", "unsigned"),
    [
        ("events", 0, 9, 3838325209),
        ("events", 1, 15, 623624015),
        ("orders", 7, 41, 716769291),
        ("日本", 3, 33, 2709125333),
    ],
)
def test_2_3_placement_matches_the_frozen_vectors(topic, partition, of_50, unsigned):
    assert coordinating_partition(topic, partition, partition_count=50) == of_50
    assert coordinating_partition(topic, partition, partition_count=2**32) == unsigned


def test_2_3_ten_thousand_partitions_are_spread_over_fifty():
    counts = Counter(
        coordinating_partition("events", number, partition_count=50)
        for number in range(10_000)
    )
    assert len(counts) == 50
    assert all(172 <= count <= 231 for count in counts.values())


ELSEWHERE = Key("g", "events", 0)  # 3838325209 is odd: partition 1 of 2


@pytest.mark.parametrize(
    "record", [beat, release, lambda e, **k: messages(e, 0, 1, **k)]
)
def test_2_3_records_of_owners_in_another_partition_are_ignored(record):
    assert Log(0, k=2).outcome_of(record(0, key=ELSEWHERE)) == "wrong_partition"
    assert Log(1, k=2).outcome_of(record(0, key=ELSEWHERE)) == "not_owner"


def test_2_3_a_claim_in_another_partition_is_refused_after_its_generation():
    log = Log(0, k=2, keys=1)
    assert log.outcome_of(claim(key=ELSEWHERE, generation=2)) == "wrong_generation"
    assert log.outcome_of(claim(key=ELSEWHERE)) == "wrong_partition"
    assert Log(1, k=2).outcome_of(claim(key=ELSEWHERE)) == "claimed"


def test_2_3_without_a_config_claims_and_pauses_are_refused():
    log = Log(0, configured=False)
    assert log.outcome_of(claim(key=ELSEWHERE)) == "no_config"
    assert log.outcome_of(pause(2**40)) == "no_config"
    for record in (beat(0), release(0), messages(0, 0, 1)):
        transition = log.one(record)
        assert (transition.outcome, transition.reason) == ("ignored", "not_owner")


@pytest.mark.parametrize("topic", ["/checkpoint", "/planner"])
def test_2_3_reserved_keys_must_name_their_t(topic):
    log = Log(1, k=4)
    assert log.outcome_of(claim(key=Key("marshal", topic, 1))) == "claimed"
    assert log.outcome_of(claim(key=Key("marshal", topic, 0))) == "wrong_partition"
    assert log.outcome_of(beat(0, key=Key("marshal", topic, 0))) == "wrong_partition"


def test_2_3_a_pause_does_not_affect_the_planner_key():
    log = Log()
    planner = Key("g", "/planner", 0)
    log.append(pause(2**40))
    epoch = log.claimed(key=planner)
    assert log.outcome_of(beat(epoch, key=planner)) == "renewed"
    assert log.outcome_of(claim()) == "paused"


@pytest.mark.parametrize(
    ("group", "unsigned"),
    [("billing", 2154717404), ("g", 1421860928), ("日本", 1724022129)],
)
def test_2_4_the_home_of_a_group_matches_the_frozen_vectors(group, unsigned):
    assert home_partition(group, partition_count=2**32) == unsigned
    assert home_partition(group, partition_count=8) == unsigned % 8


def test_2_5_a_config_with_another_k_is_refused():
    assert Log(k=2).outcome_of(config(2, era=2, k=4)) == "config"
