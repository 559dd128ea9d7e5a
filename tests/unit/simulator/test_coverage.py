"""The situations that records and events count as."""

import attrs
import msgspec
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

from kafka_marshal.engine.resolver import REASON
from kafka_marshal.ports import Event
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.records import SECOND_LEVEL
from kafka_marshal.protocol.types import Owner
from simulator.checkers import Folded
from simulator.coverage import (
    FENCED,
    GREW,
    RECREATED,
    SCHEDULED,
    SELDOM,
    SET,
    SITUATIONS,
    SOUGHT,
    TRUNCATED,
    Coverage,
)
from simulator.fakestore import Stored

H_MS = 3_000
OWNER = Owner("c1", ident("c1"))


def stored(record, **rest):
    value = None if record is None else encode(record)
    return attrs.evolve(
        Stored(
            offset=0,
            leader_epoch=0,
            timestamp_ms=1_000,
            timestamp_type=1,
            key=None,
            value=value,
            headers=(),
            landed_ms=0,
        ),
        **rest,
    )


def folded(record, *, transition=None, age_ms=0, owner=OWNER, moved=False, **rest):
    if transition is None:
        transition = Log().one(record)
    at = stored(record, **rest)
    return Folded(0, at, transition, owner, age_ms, moved)


def counted(*steps):
    coverage = Coverage(H_MS)
    for step in steps:
        coverage.on_fold(step)
    return dict(coverage.counts)


def test_claims_count_as_claimed_duplicate_or_late():
    first = claim("c1")
    assert counted(folded(first, owner=None), folded(first, owner=None)) == {
        "claimed": 2,
        "duplicate_claim": 1,
    }
    ghost = counted(folded(first, owner=None, is_ghost=True))
    assert ghost == {"claimed": 1, "ghost_claim_won": 1, "landed_after_failure": 1}


@pytest.mark.parametrize(
    ("age_ms", "names"),
    [
        (2 * H_MS + 1, {"claimed", "taken_over", "takeover_at_2h_1"}),
        (2 * H_MS + 2, {"claimed", "taken_over"}),
    ],
)
def test_a_takeover_just_after_two_intervals_is_counted(age_ms, names):
    assert set(counted(folded(claim("c2"), age_ms=age_ms))) == names


@pytest.mark.parametrize(("age_ms", "count"), [(2 * H_MS, 1), (2 * H_MS - 1, 0)])
def test_a_refused_claim_at_two_intervals_is_counted(age_ms, count):
    log = Log()
    log.claimed("c1")
    refused = folded(claim("c2"), transition=log.one(claim("c2")), age_ms=age_ms)
    assert counted(refused).get("refused_at_2h", 0) == count


def test_late_heartbeats_and_ignored_grants_are_counted():
    log = Log()
    epoch = log.claimed()
    entries = [
        folded(beat(epoch), transition=log.one(beat(epoch)), age_ms=2 * H_MS + 1),
        folded(beat(epoch - 1), transition=log.one(beat(epoch - 1))),
    ]
    asked = messages(epoch, 0, 9)
    entries.append(folded(asked, transition=log.one(asked)))
    late = messages(epoch - 1, 0, 9)
    entries.append(folded(late, transition=log.one(late)))
    assert counted(*entries) == {
        "beat_after_2h": 1,
        "late_beat_ignored": 1,
        "granted": 1,
        "grant_ignored": 1,
    }
    gone = release(epoch)
    assert counted(folded(gone, transition=log.one(gone))) == {}


def test_claims_with_another_topic_id_are_counted():
    log = Log()
    one, two = ident("topic 1"), ident("topic 2")
    epoch = log.one(claim("c1", topic_id=one)).offset
    log.one(release(epoch))
    changed = claim("c1", topic_id=two, expected=epoch)
    entry = folded(changed, transition=log.one(changed), owner=None)
    assert counted(entry) == {"claimed": 1, "topic_changed": 1}
    log.one(release(log.state.next_offset - 1))
    late = claim("c1", topic_id=one)
    assert counted(folded(late, transition=log.one(late))) == {"old_topic": 1}


def test_leader_clocks_that_go_back_are_counted():
    steps = [
        folded(claim("c1"), owner=None, timestamp_ms=5_000),
        folded(claim("c2"), owner=None, timestamp_ms=4_000),
        folded(
            claim("c3"), owner=None, timestamp_ms=3_000, leader_epoch=1, sent_epoch=0
        ),
    ]
    found = counted(*steps)
    assert found["clock_went_back"] == found["leader_behind"] == 1
    assert found["landed_after_failover"] == 1


def test_events_of_engines_are_counted():
    coverage = Coverage(H_MS)
    coverage.observe(Event("clock_step", {}))
    coverage.observe(Event("claim_ended", {"ending": Ending("lease_expired")}))
    coverage.observe(Event("claim_ended", {"ending": Ending("released")}))
    coverage.observe(Event("claim_ended", {"ending": Ending("topic_gone")}))
    coverage.observe(Event("ready", {}))
    coverage.observe(Event("restored", {"source": "checkpoint 00"}))
    coverage.observe(Event("restored", {"source": "its host"}))
    coverage.observe(Event("checkpoint_written", {}))
    coverage.observe(Event("grant_exposed", {}))
    coverage.observe(Event("state_unfit", {"why": "it needs feature level 3"}))
    coverage.observe(
        Event("state_unfit", {"why": "its content has digest 00, its header 01"})
    )
    assert coverage.counts == {
        "clock_step_detected": 1,
        "lease_expired": 1,
        "topic_ended": 1,
        "began_from_checkpoint": 1,
        "began_from_kept": 1,
        "checkpoint_written": 1,
        "exposed": 1,
        "checkpoint_above": 1,
    }


def test_claims_of_the_checkpoint_key_are_not_counted():
    name = {"group_id": "marshal", "topic": "/checkpoint", "partition": 0}
    reserved = msgspec.structs.replace(claim("c1"), **name)
    log = Log()
    assert log.one(reserved).effect == "claimed"
    transition = log.one(reserved)
    assert counted(folded(reserved, transition=transition, owner=None)) == {}


def test_only_listed_situations_can_be_counted():
    coverage = Coverage(H_MS)
    with pytest.raises(AssertionError):
        coverage.note("nonsense")
    for name in (
        *SITUATIONS,
        *TRUNCATED,
        *RECREATED,
        *SET,
        *FENCED,
        *SCHEDULED,
        *GREW,
        *SOUGHT,
        *SELDOM,
    ):
        coverage.note(name)


class Setting:
    """A log with a key that was released at 5, and a pause."""

    def __init__(self):
        self.log, self.coverage = Log(level=SECOND_LEVEL), Coverage(H_MS)
        self.epoch = self.log.claimed()
        self.log.append(release(self.epoch, 5))
        self.log.append(pause(START_MS + 100 * H))

    def land(self, *records, head=5):
        for record in records:
            for transition in self.log.append(record):
                entry = folded(record, transition=transition)
                self.coverage.on_fold(entry._replace(head=head))
        return dict(self.coverage.counts)


@pytest.mark.parametrize(
    ("position", "counted_too"),
    [
        (2, {"set_back"}),
        (5, set()),
        (9, {"set_forward"}),
        (0, {"set_back", "set_to_zero"}),
    ],
)
def test_committed_set_positions_are_counted_by_direction(position, counted_too):
    setting = Setting()
    found = setting.land(stage((0, position)), decide(), resolve(commit=True))
    assert found == dict.fromkeys({"set_committed", *counted_too}, 1)
    found = setting.land(resolve(commit=True), beat(setting.epoch))
    assert found["resolved_twice"] == found["late_beat_after_set"] == 1


def test_an_aborted_set_position_is_counted():
    found = Setting().land(stage((0, 2)), resolve(commit=False))
    assert found == {"set_aborted": 1}


@pytest.mark.parametrize("commit", [True, False])
def test_a_set_position_resolved_by_a_member_is_counted(commit):
    setting = Setting()
    setting.land(stage((0, 5)), *([decide()] if commit else []))
    record = msgspec.structs.replace(resolve(commit=commit), reason=REASON)
    found = setting.land(record)
    assert found["commit_by_member" if commit else "abort_by_member"] == 1


def test_refused_records_of_a_set_position_are_counted():
    setting = Setting()
    setting.land(pause(START_MS + 100 * H, op=ident("other")), resolve(commit=False))
    found = setting.land(stage((0, 2)), decide())
    assert found == {"pause_busy": 1, "stage_too_late": 1, "decide_refused": 1}
    setting = Setting()
    setting.log = Log(level=SECOND_LEVEL)
    setting.log.claimed()
    setting.log.append(pause(START_MS + 100 * H))
    assert setting.land(stage((0, 2))) == {"stage_held": 1}
