"""The history of operations: records sent, read back, or lost."""

import pytest
from logkit import (
    START_MS,
    H,
    Log,
    beat,
    claim,
    decide,
    ident,
    messages,
    pause,
    release,
    resolve,
    stage,
)

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.placement import place_under
from kafka_marshal.protocol.records import SECOND_LEVEL
from kafka_marshal.protocol.types import Key, Owner
from simulator.checkers import Folded
from simulator.chronicle import Chronicle
from simulator.fakestore import Stored

OWNER = Owner("c1", ident("c1"))


class Pending:
    """An append whose result the test sets."""

    def __init__(self, *, is_done=False, error=None):
        self._is_done, self._error = is_done, error

    def is_done(self):
        return self._is_done

    def error(self):
        return self._error


class Surroundings:
    now_ms = 7

    def __init__(self, key):
        self.attempts, self._key = set(), key

    def name_of(self, incarnation):
        return "p1" if incarnation == OWNER.incarnation else "p2"

    def keys_of(self, partition):
        return [self._key]


class Recording:
    """A log, and the chronicle of its operations."""

    def __init__(self, **settings):
        self.log = Log(**settings)
        self.key = key_of(claim("c1"))
        self.chronicle = Chronicle(Surroundings(self.key))

    def send(self, record, **rest):
        append = Pending(**rest)
        self.chronicle.on_append(0, encode(record), append=append, held={})

    def land(self, record):
        transition = self.log.one(record)
        stored = Stored(
            offset=0,
            leader_epoch=0,
            timestamp_ms=1_000,
            timestamp_type=1,
            key=None,
            value=encode(record),
            headers=(),
            landed_ms=0,
        )
        folded = Folded(0, stored, transition, None, 0, False)
        self.chronicle.on_fold(folded, self.log.state)
        return transition

    @property
    def outcomes(self):
        operations = self.chronicle.operations
        return [(each.kind, each.outcome, each.number) for each in operations]


def key_of(record):
    return Key(record.group_id, record.topic, record.partition)


def test_a_sent_record_is_completed_when_read_back():
    recording, first = Recording(), claim("c1")
    recording.send(first)
    recording.land(first)
    recording.land(first)
    assert recording.outcomes == [
        ("claim", "invoke", first.seq),
        ("claim", "ok", first.seq),
        ("claim", "fail", first.seq),
    ]
    assert recording.chronicle.operations[1].token is not None


@pytest.mark.parametrize("make", [beat, lambda epoch: messages(epoch, 0, 4)])
def test_a_record_sent_under_a_claim_has_its_token(make):
    recording = Recording()
    epoch = recording.land(claim("c1")).offset
    recording.send(make(epoch))
    recording.land(make(epoch))
    won, begun, ended = recording.chronicle.operations
    assert (begun.outcome, ended.outcome) == ("invoke", "ok")
    assert begun.token == ended.token == won.token is not None


def test_a_failed_append_is_unknown_until_its_record_is_read_back():
    recording, first = Recording(), claim("c1")
    recording.send(first, is_done=True, error=TimeoutError())
    recording.send(first)
    recording.land(first)
    outcomes = [outcome for _, outcome, _ in recording.outcomes]
    assert outcomes == ["invoke", "invoke", "unknown", "ok"]


def test_records_of_a_dead_process_stay_unknown():
    recording, first = Recording(), claim("c1")
    recording.send(first)
    recording.chronicle.on_gone("p1")
    recording.chronicle.on_gone("p1")
    assert [outcome for _, outcome, _ in recording.outcomes] == ["invoke", "unknown"]


def test_a_grant_is_recorded_for_its_grantee():
    recording = Recording()
    epoch = recording.land(claim("c1")).offset
    asked = messages(epoch, 0, 4)
    recording.chronicle._world.attempts.add(asked.grantee)
    recording.land(asked)
    kinds = [(each.kind, each.process) for each in recording.chronicle.operations[1:]]
    name = f"attempt {asked.grantee.hex()[:8]}"
    assert kinds == [("grant", name), ("hand_out", name), ("process", name)]


def test_a_committed_set_position_is_an_operation_of_the_admin():
    recording = Recording(level=SECOND_LEVEL)
    epoch = recording.land(claim("c1")).offset
    recording.land(release(epoch, 5))
    recording.land(pause(START_MS + 100 * H))
    for record in (stage((0, 2)), decide(), resolve(commit=True)):
        recording.land(record)
    kinds = [each.kind for each in recording.chronicle.operations]
    assert kinds == ["claim", "pause", "unpause", "set"]
    done = recording.chronicle.operations[3]
    assert (done.process, done.first, done.topic_id) == ("admin", 2, None)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_pause_is_recorded_only_for_keys_of_its_partition(k):
    recording = Recording(k=k)
    recording.land(pause(START_MS + H))
    recording.log.now_ms += 2 * H
    recording.land(pause(START_MS))
    kinds = [each.kind for each in recording.chronicle.operations]
    is_here = place_under(recording.key, k) == 0
    assert kinds == (["pause", "unpause"] if is_here else [])


def test_an_abort_records_no_set_position():
    recording = Recording(level=SECOND_LEVEL)
    epoch = recording.land(claim("c1")).offset
    recording.land(release(epoch, 5))
    recording.land(pause(START_MS + 100 * H))
    for record in (stage((0, 2)), resolve(commit=False)):
        recording.land(record)
    kinds = [each.kind for each in recording.chronicle.operations]
    assert kinds == ["claim", "pause", "unpause"]
