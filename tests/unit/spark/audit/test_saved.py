"""What a run keeps for the next one."""

import msgspec
import pytest
from logkit import Log, claim, config, member

from kafka_marshal.errors import LogUnreadable, MalformedRecord
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.history import Historian
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.spark.audit.saved import VERSION, restore, save


def played():
    log, historian = Log(), Historian()
    for record in (claim(), member("c1", seq=3), member("c2", seq=1)):
        transitions = log.append(record)
        historian.take(log.state, log.entries[-1], transitions=transitions)
    return log, historian


def test_a_fold_goes_on_with_its_members():
    log, historian = played()
    world, back = restore(save(log.state, historian), partition=0)
    assert digest(world) == digest(log.state)
    assert back.to_bytes() == historian.to_bytes()
    assert list(world.soft.members) == list(log.state.soft.members)
    assert world.soft.members == log.state.soft.members
    transitions = log.append(member("c1", seq=2))
    (told,) = apply(world, log.entries[-1])
    assert told == transitions[0]
    assert told.reason == "old_seq"


def test_a_fold_that_halted_cannot_go_on():
    log = Log()
    log.append(config(2, era=2, level=9))
    assert save(log.state, Historian()) is None
    with pytest.raises(LogUnreadable, match="partition 4 halted in the last run"):
        restore(None, partition=4)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        pytest.param({0: VERSION + 1}, "audit into a new directory", id="version"),
        pytest.param({1: b"\xff"}, "not a snapshot", id="snapshot"),
        pytest.param({2: b"\xff"}, "not a history", id="history"),
        pytest.param({3: [(encode(claim()), 0, 0, 0)]}, "no Member", id="member"),
        pytest.param({3: 5}, "not a saved audit", id="shape"),
    ],
)
def test_what_was_not_saved_by_us_is_refused(change, match):
    log, historian = played()
    fields = [VERSION, to_bytes(log.state), historian.to_bytes(), []]
    for at, value in change.items():
        fields[at] = value
    with pytest.raises(MalformedRecord, match=match):
        restore(msgspec.msgpack.encode(fields), partition=0)
