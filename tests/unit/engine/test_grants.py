"""Requests for grants and their verdicts, and the marks that go with them."""

import msgspec
import pytest
from enginekit import (
    AMO,
    KEY,
    H,
    claim_of,
    of,
    owning,
    spec,
    values,
    world,
    write,
)

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.losses import LossBook, marks_of
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    ClaimingMessages,
    Heartbeat,
    ReleasingPartition,
)
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key, OffsetRange
from simulator.fakestore import AppendFate


@pytest.fixture
def cluster():
    return world(records=(20,))


def marks(cluster, kind, client_id="a"):
    """Return the mark of each record of a kind, None where it has none."""
    found = of(cluster, client_id, kind)
    return [marks_of(line.record).get(0) for line in found]


def losses(cluster):
    """Return the losses that the log shows, and the ranges at risk."""
    state, book, lost = WorldState(0), LossBook(0), []
    for stored in cluster.kafka.log(cluster.place(0)).records:
        entry = stored.entry()
        lost += book.take(entry, apply(state, entry), keys=state.keys)
    return lost, book.open_ones(state)


def handed(node, cluster):
    """Poll until records are handed out, and let sent records reach the log."""
    polled = {}
    for _ in range(50):
        polled = values(node.consumer.poll(0))
        cluster.run(20)
        if polled:
            break
    return polled[0]


def reported(node):
    return [
        each
        for event in node.observer.named("grant_lost")
        for each in event.fields["ranges"]
    ]


# --- marks


def test_requests_carry_the_mark_of_the_application(cluster):
    node = owning(cluster, delivery=AMO, most=3, batches=1)
    for first in (0, 3, 6):
        assert handed(node, cluster) == [first, first + 1, first + 2]
    assert marks(cluster, ClaimingMessages) == [0, 3, 6]


def test_without_requests_heartbeats_carry_the_mark(cluster):
    node = owning(cluster, delivery=AMO, most=500)
    assert handed(node, cluster) == list(range(20))
    cluster.run(H)
    assert marks(cluster, Heartbeat)[-1] == 0
    assert node.consumer.poll(0) == {}
    cluster.run(H)
    assert marks(cluster, Heartbeat)[-1] == 20
    assert losses(cluster) == ([], [])


def test_at_least_once_no_record_carries_a_mark(cluster):
    node = owning(cluster)
    node.consumer.poll(0)
    cluster.run(H)
    assert set(marks(cluster, Heartbeat)) == {None}
    node.leave()
    cluster.run(100)
    assert marks(cluster, ReleasingPartition) == [None]


def test_a_heartbeat_batch_carries_as_many_marks_as_fit(monkeypatch):
    monkeypatch.setattr("kafka_marshal.protocol.losses.MARKS_PER_BATCH_MAX", 2)
    cluster = world(records=(4, 4, 4, 4))
    node = cluster.node("a", spec=spec(delivery=AMO))
    cluster.run_until(lambda: len(node.held) == 4, H)
    for _ in range(20):
        node.consumer.poll(0)
        cluster.run(20)
    cluster.run(2 * H)
    marks_sent = {}
    for line in of(cluster, "a", BatchHeartbeat):
        found = marks_of(line.record)
        assert len(found) <= 2
        marks_sent |= {
            line.record.beats[index][0]: mark for index, mark in found.items()
        }
    epochs = {holding.claim.epoch for holding in node.held.values()}
    assert {epoch for epoch, mark in marks_sent.items() if mark == 4} == epochs


def test_a_member_that_leaves_sends_its_final_mark(cluster):
    node = owning(cluster, delivery=AMO, most=500)
    assert handed(node, cluster) == list(range(20))
    node.leave()
    cluster.run(100)
    assert marks(cluster, ReleasingPartition) == [20]
    assert losses(cluster) == ([], [])


def test_a_close_on_an_error_leaves_the_last_batch_unconfirmed(cluster):
    node = owning(cluster, delivery=AMO, most=5, batches=1)
    assert handed(node, cluster) == [0, 1, 2, 3, 4]
    assert handed(node, cluster) == [5, 6, 7, 8, 9]
    try:
        int("what a handler chokes on")
    except ValueError:
        node.consumer.close(timeout_ms=0)
    cluster.run(100)
    assert marks(cluster, ReleasingPartition) == [5]
    (loss,), at_risk = losses(cluster)
    assert loss.ranges == (OffsetRange(5, 10),)
    assert (loss.ending, at_risk) == ("released", [])


@pytest.mark.parametrize("fails", [False, True])
def test_an_error_handled_before_the_work_does_not_count_as_its_error(cluster, fails):
    """The consumer is opened and closed while an earlier error is handled."""
    try:
        int("no broker")
    except ValueError:
        node = owning(cluster, delivery=AMO, most=5, batches=1)
        assert handed(node, cluster) == [0, 1, 2, 3, 4]
        try:
            if fails:
                int("what a handler chokes on")
        except ValueError:
            node.consumer.close(timeout_ms=0)
        else:
            node.consumer.close(timeout_ms=0)
    cluster.run(100)
    assert marks(cluster, ReleasingPartition) == [0 if fails else 5]


def test_the_last_heartbeat_before_a_restart_carries_the_mark(cluster):
    node = owning(cluster, delivery=AMO, most=500)
    assert handed(node, cluster) == list(range(20))
    node.consumer.close(release=False, timeout_ms=0)
    cluster.run(40)
    assert marks(cluster, Heartbeat)[-1] == 20


def test_closing_a_session_without_a_release_reports_unused_grants(cluster):
    node = owning(cluster, delivery=AMO, most=5)
    node.consumer.poll(0)
    cluster.run(40)
    node.consumer.close(release=False, timeout_ms=0)
    assert reported(node) == []
    node.session.begin_close(release=False)
    assert reported(node) == [(0, 4)]


def test_unconfirmed_records_are_counted(cluster):
    node = owning(cluster, delivery=AMO, most=5, batches=1)
    holding = node.session.holdings[KEY]
    assert holding.unconfirmed_count == 0
    node.consumer.poll(0)
    cluster.run(40)
    assert holding.unconfirmed_count == 5
    assert values(node.consumer.poll(0, 2)) == {0: [0, 1]}
    assert (holding.unconfirmed_count, holding.mark) == (5, 0)
    assert values(node.consumer.poll(0, 1)) == {0: [2]}
    assert (holding.unconfirmed_count, holding.mark) == (3, 2)
    plain = owning(world(), client_id="b")
    plain.consumer.poll(0)
    other = plain.session.holdings[KEY]
    assert (other.unconfirmed_count, other.mark) == (0, None)


# --- verdicts


def test_a_grant_read_after_the_end_of_its_claim_is_reported_as_lost(cluster):
    node = owning(cluster, delivery=AMO, most=3)
    cluster.fates["a"] = AppendFate(delay_ms=H // 4)
    node.consumer.poll(0)
    cluster.fates.clear()
    claim = claim_of(node)
    with node.engine.changed:
        # The claim ends in this process; the log does not show that yet.
        node.session.holdings[KEY].claim.end(Ending("lease_expired"))
        node.session._held.after_end(node.session.holdings[KEY])
    cluster.run(H // 2)
    assert reported(node) == [(0, 2)]
    assert of(cluster, "a", ClaimingMessages)[0].transition.epoch == claim.epoch


def test_a_grant_of_another_process_is_not_reported_as_lost(cluster):
    node = owning(cluster, delivery=AMO, most=3)
    node.consumer.poll(0)
    cluster.run(40)
    record = of(cluster, "a", ClaimingMessages)[0].record
    task = msgspec.structs.replace(
        record, grantee=b"task".ljust(16, b"."), proposed_last_offset=9
    )
    node.leave()
    write(cluster, task)
    cluster.run(100)
    assert reported(node) == [(0, 2)]


def test_a_request_without_a_verdict_is_sent_again(cluster):
    node = owning(cluster, delivery=AMO, most=3)
    cluster.fates["a"] = AppendFate(is_lost=True)
    node.consumer.poll(0)
    cluster.fates.clear()
    cluster.run(H // 4)
    assert node.session.holdings[KEY].progress.outstanding_count == 1
    cluster.run(H // 2)
    assert node.session.holdings[KEY].progress.outstanding_count == 0
    assert handed(node, cluster) == [0, 1, 2]


def test_a_key_consumed_at_least_once_requests_no_grants(cluster):
    node = owning(cluster)
    with pytest.raises(InvalidTransition, match="not consumed at most once"):
        node.session.grants.request(node.session.holdings[KEY], 5)
    node.session.grants.update_anchor(node.session.holdings[KEY])
    node.session.grants.expire(node.session.holdings[KEY], 0)
    assert Key("g", "t", 0) in node.held
