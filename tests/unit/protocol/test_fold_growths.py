"""How growths of data topics change the state."""

import msgspec
import pytest
from logkit import Log, growth, ident, layout_fence, resets

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol.fold_growths import FOLDS
from kafka_marshal.protocol.growths import ENDS_KEPT_MAX
from kafka_marshal.protocol.records import KINDS, SECOND_LEVEL, DataGrowth
from kafka_marshal.protocol.snapshot import (
    bytes_max,
    digest,
    freeze,
    from_bytes,
    outline,
    to_bytes,
)


def test_its_kind_and_level():
    assert set(FOLDS) == {DataGrowth}
    (kind,) = (kind for kind in KINDS if kind.record is DataGrowth)
    assert (kind.number, kind.level) == (21, SECOND_LEVEL)
    assert Log(level=1).outcome_of(growth()) == "level"


def test_only_partition_0_keeps_growths():
    assert Log(1, level=2, k=2).outcome_of(growth()) == "wrong_partition"
    retired = Log(3, level=2, k=2)
    assert retired.outcome_of(growth()) == "retired"
    assert retired.state.growths == ()


def test_the_life_of_a_growth():
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


def test_a_growth_is_in_the_digest():
    log, other = Log(level=2), Log(level=2)
    digests = {digest(log.state)}
    assert log.outcome_of(growth()) == "growing"
    assert other.outcome_of(growth(topic="u")) == "growing"
    assert digest(log.state) != digest(other.state)
    assert freeze(log.state).digest() == digest(log.state)
    digests.add(digest(log.state))
    assert len(digests) == 2


def test_growths_are_bounded():
    log = Log(level=2, operations=2)
    for topic in ("t", "u"):
        assert log.outcome_of(growth(topic=topic)) == "growing"
    assert log.outcome_of(growth(topic="v")) == "limits"
    # What is known goes on, and makes room.
    assert log.outcome_of(growth(topic="u", ends=(0,) * 4)) == "grown"
    assert log.outcome_of(growth(4, 4, topic="t")) == "growth_withdrawn"
    assert log.outcome_of(growth(topic="v")) == "growing"


def test_their_ends_are_bounded():
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


def test_a_fence_and_a_reset_leave_them():
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


def test_growths_are_an_operation():
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
def test_growths_that_no_fold_gives_are_no_snapshot(change):
    with pytest.raises(MalformedRecord):
        from_bytes(with_growths(change))
