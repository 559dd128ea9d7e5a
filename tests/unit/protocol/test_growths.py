"""Growths of data topics, and the partitions that wait for them (PROTOCOL 9.10)."""

import msgspec
import pytest
from logkit import Log, growth, ident, layout_fence, resets

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.growths import (
    ENDS_KEPT_MAX,
    FOLDS,
    Source,
    are_of_a_log,
    awaited_source,
    growth_of,
    judge,
    source_of,
    with_growth,
)
from kafka_marshal.protocol.items import Growth
from kafka_marshal.protocol.records import (
    GROWN_MAX,
    KINDS,
    SECOND_LEVEL,
    DataGrowth,
)
from kafka_marshal.protocol.snapshot import (
    bytes_max,
    digest,
    freeze,
    from_bytes,
    outline,
    to_bytes,
)
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
def test_a_growth_that_does_not_follow_those_of_its_topic_is_rejected(
    before, record, reason
):
    assert judge(grown(*before), record) == reason


def test_a_topic_created_again_drops_the_growths_of_the_earlier_topic():
    found = grown(growth(8, 4, topic_id=ID), growth(2, 1, topic_id=OTHER))
    assert [each[1:4] for each in found] == [(1, 2, OTHER)]


def test_a_withdrawn_growth_is_dropped_and_others_stay():
    assert grown(growth(), growth(4, 4)) == ()
    # One of several growths of a topic.
    ended = (growth(), growth(ends=(1,) * 4), growth(16, 8), growth(4, 4))
    assert [each[:3] for each in grown(*ended)] == [("t", 8, 16)]


GROWTHS = grown(growth(8, 4, topic_id=ID), growth(8, 4, topic_id=ID, ends=(9, 8, 7, 6)))


@pytest.mark.parametrize("partition", [0, 3, 8, 100])
def test_a_partition_that_a_growth_does_not_add_has_no_growth(partition):
    assert growth_of(GROWTHS, Key("g", "t", partition), topic_id=ID) is None


def test_a_new_partition_waits_for_the_partition_that_had_its_keys():
    key = Key("g", "t", 6)
    found = growth_of(GROWTHS, key, topic_id=ID)
    assert growth_of(GROWTHS, key, topic_id=None) == found == GROWTHS[0]
    assert source_of(found, key) == Source(Key("g", "t", 2), 7)
    assert growth_of(GROWTHS, key, topic_id=OTHER) is None
    assert growth_of(GROWTHS, key._replace(topic="u"), topic_id=ID) is None
    announced = GROWTHS[0]._replace(ends=None)
    assert source_of(announced, key) == Source(Key("g", "t", 2), None)


def test_a_growth_to_more_partitions_than_tools_can_list_is_undecodable():
    """Once, one process could make every reset of a group list billions of keys."""
    encode(growth(GROWN_MAX, 4))
    with pytest.raises(MalformedRecord, match="<= 100000"):
        encode(growth(2**31 - 4, 4))


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
def test_a_source_has_passed_once_its_position_reaches_the_end(
    end, state, topic_id, has_passed
):
    source = Source(Key("g", "t", 2), end)
    assert source.has_passed(state, topic_id=topic_id) is has_passed


ONE = Growth("t", 4, 8, ID, 5, (1, 2, 3, 4))
TWO = Growth("t", 8, 16, None, 6, None)


@pytest.mark.parametrize("topic_id", [None, ID])
def test_a_partition_waits_until_it_or_its_source_has_a_position(topic_id):
    growths = grown(growth(8, 4, topic_id=ID), growth(8, 4, ends=(1, 2, 3, 4)))
    old, new = Key("g", "t", 1), Key("g", "t", 5)

    def awaited(key, **positions):
        states = {
            each: known(positions.get(name))
            for each, name in ((old, "old"), (new, "new"))
        }
        return awaited_source(growths, key, topic_id=topic_id, state_of=states.get)

    assert awaited(old) is None
    assert awaited(new) == awaited(new, old=1) == Source(old, 2)
    assert awaited(new, old=2) is None
    assert awaited(new, new=0) is None


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
def test_only_growths_that_a_fold_can_give_are_sound(growths, is_sound):
    assert are_of_a_log(growths, next_offset=9) is is_sound


def test_data_growth_is_record_21_of_level_2():
    assert set(FOLDS) == {DataGrowth}
    (kind,) = (kind for kind in KINDS if kind.record is DataGrowth)
    assert (kind.number, kind.level) == (21, SECOND_LEVEL)
    assert Log(level=1).outcome_of(growth()) == "level"


def test_only_partition_0_keeps_growths():
    assert Log(1, level=2, k=2).outcome_of(growth()) == "wrong_partition"
    retired = Log(3, level=2, k=2)
    assert retired.outcome_of(growth()) == "retired"
    assert retired.state.growths == ()


def test_a_growth_is_announced_completed_and_withdrawn():
    log = Log(level=2)
    before = digest(log.state)
    assert log.outcome_of(growth(ends=(1, 2, 3, 4))) == "growth"
    assert log.outcome_of(growth()) == "growing"
    assert log.state.growths[0].ends is None
    (transition,) = log.append(growth())
    assert (transition.outcome, transition.reason) == ("ignored", "known")
    assert log.outcome_of(growth(16)) == "busy"
    assert log.outcome_of(growth(ends=(1, 2, 3, 4))) == "grown"
    assert log.state.growths[0].ends == (1, 2, 3, 4)
    assert digest(log.state) == digest(from_bytes(to_bytes(log.state)))
    assert log.outcome_of(growth(4, 4)) == "growth_withdrawn"
    assert log.state.growths == ()
    assert digest(log.state) != before  # the clock and the offset moved


def test_the_digest_depends_on_growths():
    log, other = Log(level=2), Log(level=2)
    digests = {digest(log.state)}
    assert log.outcome_of(growth()) == "growing"
    assert other.outcome_of(growth(topic="u")) == "growing"
    assert digest(log.state) != digest(other.state)
    assert freeze(log.state).digest() == digest(log.state)
    digests.add(digest(log.state))
    assert len(digests) == 2


def test_growths_are_limited():
    log = Log(level=2, operations=2)
    for topic in ("t", "u"):
        assert log.outcome_of(growth(topic=topic)) == "growing"
    assert log.outcome_of(growth(topic="v")) == "limits"
    # A known growth may get its ends, or be withdrawn, which makes room.
    assert log.outcome_of(growth(topic="u", ends=(0,) * 4)) == "grown"
    assert log.outcome_of(growth(4, 4, topic="t")) == "growth_withdrawn"
    assert log.outcome_of(growth(topic="v")) == "growing"


def test_the_ends_of_all_growths_are_limited():
    log = Log(level=2)
    most = ENDS_KEPT_MAX // 4096
    for number in range(most):
        assert log.outcome_of(growth(8192, 4096, topic=f"t{number}")) == "growing"
    assert log.outcome_of(growth(topic="one-more")) == "limits"
    ends = (2**63 - 1,) * 4096
    for number in range(most):
        record = growth(8192, 4096, topic=f"t{number}", ends=ends)
        assert log.outcome_of(record) == "grown"
    assert log.state.config is not None
    size = len(to_bytes(log.state))
    assert size > 9 * ENDS_KEPT_MAX
    assert size <= bytes_max(log.state.config)


def test_a_fence_and_a_reset_keep_growths():
    log = Log(level=2)
    log.append(growth())
    carried = to_bytes(log.state)
    assert outline(carried).digest() == digest(log.state)
    for record in resets(carried, digest(log.state)):
        log.append(record)
    assert len(log.state.growths) == 1
    assert log.outcome_of(layout_fence(2)) == "layout_fenced"
    assert len(log.state.growths) == 1
    assert log.outcome_of(growth(ends=(1,) * 4)) == "grown"
    again = from_bytes(to_bytes(log.state))
    assert again == log.state
    assert digest(again) == digest(log.state)


def with_growths(change):
    """Return the bytes of a state with two growths, changed."""
    log = Log(level=2)
    log.append(growth())
    log.append(growth(ends=(1, 2, 3, 4)))
    log.append(growth(2, 1, topic="u", topic_id=ident("topic")))
    world = msgspec.msgpack.decode(to_bytes(log.state))
    change(world, world[4][0])
    return msgspec.msgpack.encode(world)


def test_canonical_bytes_have_growths_as_an_operation():
    state = from_bytes(with_growths(lambda *_: None))
    assert msgspec.msgpack.decode(to_bytes(state))[4] == [
        [
            "growths",
            [
                ["t", 4, 8, None, 1, [1, 2, 3, 4]],
                ["u", 1, 2, ident("topic"), 3, None],
            ],
        ]
    ]
    assert freeze(state).digest() == digest(state)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda world, _: world[1].__setitem__(1, 1), id="elsewhere"),
        pytest.param(lambda world, _: world[1].__setitem__(7, None), id="no-Config"),
        pytest.param(lambda _, item: item[1].reverse(), id="out-of-order"),
        pytest.param(lambda _, item: item[1].clear(), id="none"),
        pytest.param(lambda _, item: item[1][0].__setitem__(0, "a b"), id="a-name"),
        pytest.param(lambda _, item: item[1][0].__setitem__(2, 6), id="no-multiple"),
        pytest.param(lambda _, item: item[1][0].__setitem__(1, 0), id="from-nothing"),
    ],
)
def test_a_snapshot_with_impossible_growths_is_malformed(change):
    with pytest.raises(MalformedRecord):
        from_bytes(with_growths(change))
