"""What new partitions of a data topic wait for."""

import pytest
from logkit import growth, ident

from kafka_marshal.protocol.growths import (
    ENDS_KEPT_MAX,
    Source,
    are_of_a_log,
    growth_of,
    judge,
    source_of,
    with_growth,
)
from kafka_marshal.protocol.items import Growth
from kafka_marshal.protocol.state import KeyState
from kafka_marshal.protocol.types import Key

ID, OTHER = ident("topic"), ident("other")


def grown(*records):
    growths = ()
    for offset, record in enumerate(records, 5):
        assert judge(growths, record) is None
        growths = with_growth(growths, record, offset=offset)
    return growths


def test_a_growth_is_announced_and_then_has_ends():
    announced = grown(growth(8, 4, topic_id=ID))
    assert announced == (Growth("t", 4, 8, ID, 5, None),)
    whole = grown(growth(8, 4, topic_id=ID), growth(8, 4, ends=(1, 2, 3, 4)))
    assert whole == (Growth("t", 4, 8, ID, 5, (1, 2, 3, 4)),)


def test_growths_are_sorted_by_topic_and_count():
    found = grown(
        growth(2, 1, topic="u"),
        growth(8, 4),
        growth(8, 4, ends=(0,) * 4),
        growth(32, 8),
    )
    assert [each[:3] for each in found] == [("t", 4, 8), ("t", 8, 32), ("u", 1, 2)]


@pytest.mark.parametrize(
    ("before", "record", "reason"),
    [
        ([growth()], growth(), "known"),
        ([growth(), growth(ends=(1,) * 4)], growth(), "known"),
        ([growth(), growth(ends=(1,) * 4)], growth(ends=(2,) * 4), "known"),
        ([], growth(ends=(1,) * 4), "growth"),
        ([growth(16)], growth(8), "busy"),
        ([growth()], growth(16, 8), "busy"),
        ([growth()], growth(16, 8, ends=(1,) * 8), "growth"),
        ([growth(), growth(ends=(1,) * 4)], growth(12, 6), "growth"),
        ([growth(), growth(ends=(1,) * 4)], growth(12, 4), "growth"),
        ([growth(8, 4, topic_id=ID)], growth(8, 4), "known"),
        ([], growth(4, 4), "growth"),
        ([growth()], growth(8, 8), "growth"),
        ([growth(8, 4, topic_id=ID)], growth(4, 4, topic_id=OTHER), "growth"),
    ],
)
def test_what_does_not_follow_the_growths_of_a_topic(before, record, reason):
    assert judge(grown(*before), record) == reason


def test_a_topic_created_again_has_no_growths_of_its_earlier_life():
    found = grown(growth(8, 4, topic_id=ID), growth(2, 1, topic_id=OTHER))
    assert [each[1:4] for each in found] == [(1, 2, OTHER)]


def test_a_growth_is_withdrawn():
    assert grown(growth(), growth(4, 4)) == ()
    # One of several: the others stay.
    ended = (growth(), growth(ends=(1,) * 4), growth(16, 8), growth(4, 4))
    assert [each[:3] for each in grown(*ended)] == [("t", 8, 16)]


GROWTHS = grown(growth(8, 4, topic_id=ID), growth(8, 4, topic_id=ID, ends=(9, 8, 7, 6)))


@pytest.mark.parametrize("partition", [0, 3, 8, 100])
def test_other_partitions_are_new_in_no_growth(partition):
    assert growth_of(GROWTHS, Key("g", "t", partition), topic_id=ID) is None


def test_a_new_partition_waits_for_the_one_that_had_its_keys():
    key = Key("g", "t", 6)
    found = growth_of(GROWTHS, key, topic_id=ID)
    assert growth_of(GROWTHS, key, topic_id=None) == found == GROWTHS[0]
    assert source_of(found, key) == Source(Key("g", "t", 2), 7)
    assert growth_of(GROWTHS, key, topic_id=OTHER) is None
    assert growth_of(GROWTHS, key._replace(topic="u"), topic_id=ID) is None
    announced = GROWTHS[0]._replace(ends=None)
    assert source_of(announced, key) == Source(Key("g", "t", 2), None)


def known(position, topic_id=ID):
    fields = ("epoch", "epoch_leader_epoch", "renewed_ms", "active_ms")
    return KeyState(
        owner=None,
        heartbeat_interval_ms=1,
        position=position,
        topic_id=topic_id,
        **dict.fromkeys(fields, 1),
    )


@pytest.mark.parametrize(
    ("end", "state", "topic_id", "has_passed"),
    [
        (7, known(7), ID, True),
        (7, known(6), ID, False),
        (0, known(0), ID, True),
        (7, known(None), ID, False),
        (0, None, ID, False),
        (None, known(7), ID, False),
        (7, known(7), OTHER, False),
        (7, known(7), None, True),
        (7, known(7, None), OTHER, True),
    ],
)
def test_when_a_source_has_passed_its_end(end, state, topic_id, has_passed):
    source = Source(Key("g", "t", 2), end)
    assert source.has_passed(state, topic_id=topic_id) is has_passed


ONE = Growth("t", 4, 8, ID, 5, (1, 2, 3, 4))
TWO = Growth("t", 8, 16, None, 6, None)


@pytest.mark.parametrize(
    ("growths", "is_sound"),
    [
        ((), True),
        ((ONE, TWO), True),
        ((ONE, TWO._replace(topic="u")), True),
        ((TWO, ONE), False),
        ((TWO._replace(topic="u"), ONE), False),
        ((ONE._replace(ends=None), TWO), False),
        ((ONE, TWO._replace(topic_id=OTHER)), False),
        ((ONE, TWO._replace(old_count=6, new_count=12)), False),
        ((ONE._replace(new_count=4),), False),
        ((ONE._replace(new_count=6),), False),
        ((ONE._replace(ends=(1, 2, 3)),), False),
        ((ONE._replace(offset=9),), False),
        (
            tuple(
                Growth(f"t{n:02}", 4096, 8192, None, 1, None)
                for n in range(ENDS_KEPT_MAX // 4096 + 1)
            ),
            False,
        ),
    ],
)
def test_growths_that_a_fold_gives(growths, is_sound):
    assert are_of_a_log(growths, next_offset=9) is is_sound
