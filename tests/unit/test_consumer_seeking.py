"""Seeking (PROTOCOL 6.6), over whole nodes in memory, on virtual time."""

import pickle

import numpy as np
import pytest
from enginekit import (
    AMO,
    KEY,
    T0,
    H,
    Stepping,
    fold,
    held_by,
    of,
    owning,
    pause_for,
    spec,
    values,
    world,
)

from kafka_marshal.engine.heartbeats import Heartbeater
from kafka_marshal.engine.outbox import Outbox
from kafka_marshal.errors import (
    ClaimLost,
    DeadlineExceeded,
    InvalidTransition,
    PositionError,
)
from kafka_marshal.protocol.records import Heartbeat
from kafka_marshal.protocol.types import TopicPartition
from simulator.fakestore import AppendFate


def polled(node):
    """Poll once; return the records of the one partition."""
    return node.consumer.poll(0).get(T0, [])


def stepping(cluster, client_id="a", **rest):
    """Return an owner; each of its waits advances the cluster."""
    node = owning(cluster, client_id, **rest)
    node.engine.changed = Stepping(cluster)
    return node


def position_in_log(cluster):
    return fold(cluster).keys[KEY].position


def committed_up_to(cluster, node, end):
    """Commit records below an offset, and check that the log has this position."""
    while node.consumer.committed(T0) < end:
        node.consumer.commit(polled(node))
    node.consumer.flush()
    assert position_in_log(cluster) == end


def test_a_seek_back_returns_once_the_log_has_the_position(cluster):
    node = stepping(cluster, most=4)
    committed_up_to(cluster, node, 8)
    node.consumer.seek(T0, 3)
    assert position_in_log(cluster) == 3
    assert node.consumer.position(T0) == node.consumer.committed(T0) == 3
    assert [record.offset for record in polled(node)] == [3, 4, 5, 6]
    cluster.run(2 * H)
    assert position_in_log(cluster) == 3


def test_after_a_rewind_the_next_owner_starts_at_the_lower_offset(cluster):
    node = stepping(cluster, most=4)
    committed_up_to(cluster, node, 8)
    node.consumer.seek(T0, 3)
    polled(node)
    cluster.crash(node)
    successor = cluster.node("b", spec=spec(most=4))
    cluster.run_until(held_by(successor, 1), 4 * H)
    cluster.run(40)
    assert [record.offset for record in polled(successor)] == [3, 4, 5, 6]


def test_seeking_forward_skips_records(cluster):
    node = stepping(cluster, most=4)
    polled(node)
    node.consumer.seek(T0, np.int64(7))
    assert position_in_log(cluster) == 7
    assert [record.offset for record in polled(node)] == [7, 8, 9]


def test_seeks_to_the_beginning_and_end_move_the_position():
    cluster = world(records=(10, 5))
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 2), 3 * H)
    cluster.run(40)
    node.engine.changed = Stepping(cluster)
    cluster.kafka.delete_records(T0, before=2)
    node.consumer.seek_to_end()
    assert [node.consumer.position(TopicPartition("t", n)) for n in (0, 1)] == [10, 5]
    assert values(node.consumer.poll(0)) == {}
    node.consumer.seek_to_beginning(T0)
    assert values(node.consumer.poll(0)) == {0: list(range(2, 10))}


def test_records_from_before_a_seek_cannot_be_committed(cluster):
    node = stepping(cluster, most=4)
    before = polled(node)
    node.consumer.seek(T0, 0)
    again = polled(node)
    assert [r.offset for r in again] == [r.offset for r in before]
    assert again == before  # sinks compare tokens, which have not changed
    for late in (
        before[0],
        [before[0], *again[1:]],
        node.consumer.commit_token(before[0]),
    ):
        with pytest.raises(ClaimLost) as caught:
            node.consumer.commit(late)
        assert caught.value.reason == "seek"
        assert node.consumer.committed(T0) == 0
    node.consumer.commit(again)
    assert node.consumer.committed(T0) == 4


def test_a_commit_token_made_after_a_seek_can_be_pickled(cluster):
    node = stepping(cluster, most=4)
    polled(node)
    node.consumer.seek(T0, 0)
    tokens = [node.consumer.commit_token(record) for record in polled(node)]
    node.consumer.commit(pickle.loads(pickle.dumps(tokens)))
    assert node.consumer.committed(T0) == 4


def test_a_batch_from_before_a_seek_cannot_be_committed(cluster):
    node = stepping(cluster, most=4)
    batches = node.consumer.batches()
    batch = next(batches)
    node.consumer.seek(T0, 0)
    with pytest.raises(ClaimLost):
        batch.commit()
    next(batches).commit()
    assert node.consumer.committed(T0) == 4


def test_commit_without_arguments_ignores_records_before_a_seek(cluster):
    node = stepping(cluster, most=4)
    polled(node)
    node.consumer.seek(T0, 2)
    node.consumer.commit()
    assert node.consumer.committed(T0) == 2


def test_nothing_is_handed_out_before_the_log_has_the_position(cluster):
    node = stepping(cluster, most=4)
    committed_up_to(cluster, node, 8)
    node.log.read_lag_ms = H
    with pytest.raises(DeadlineExceeded):
        node.consumer.seek(T0, 3, timeout_ms=100)
    assert polled(node) == []
    node.log.read_lag_ms = 0
    cluster.run(H)
    assert position_in_log(cluster) == 3
    assert [record.offset for record in polled(node)] == [3, 4, 5, 6]


def test_a_rewind_whose_append_is_lost_is_sent_again(cluster):
    node = stepping(cluster, most=4)
    committed_up_to(cluster, node, 8)
    cluster.fates["a"] = AppendFate(is_lost=True)
    with pytest.raises(DeadlineExceeded):
        node.consumer.seek(T0, 3, timeout_ms=100)
    cluster.fates.clear()
    cluster.run_until(lambda: node.session.holdings[KEY].rewind is None, 2 * H)
    assert position_in_log(cluster) == 3


def seek_behind_a_late_heartbeat(cluster):
    """Seek while a heartbeat counts as failed, but will be appended later."""
    node = stepping(cluster, most=4)
    committed_up_to(cluster, node, 4)
    node.consumer.commit(polled(node))
    cluster.fates["a"] = AppendFate(delay_ms=400, fails_after_ms=50)
    node.session.beat_now()  # with position 8
    cluster.fates.clear()
    node.consumer.seek(T0, 3)


def test_a_seek_is_undone_if_pending_heartbeats_are_ignored(cluster, monkeypatch):
    monkeypatch.setattr(Outbox, "pending_to", lambda *_: [])
    monkeypatch.setattr(Outbox, "may_land", lambda *_, **__: False)
    seek_behind_a_late_heartbeat(cluster)
    cluster.run(2 * H)
    assert position_in_log(cluster) == 8


def test_an_earlier_heartbeat_that_is_appended_late_does_not_undo_a_seek(cluster):
    seek_behind_a_late_heartbeat(cluster)
    assert position_in_log(cluster) == 3
    cluster.run(2 * H)
    assert position_in_log(cluster) == 3
    rewinds = [x for x in of(cluster, "a", Heartbeat) if x.record.rewind]
    assert [each.record.position for each in rewinds] == [3, 3]


def stepping_with_a_ghost(cluster, **rest):
    """Return an owner with a heartbeat that failed long ago, and is appended later."""
    node = stepping(cluster, most=4, **rest)
    committed_up_to(cluster, node, 8)
    cluster.fates["a"] = AppendFate(delay_ms=5 * H, fails_after_ms=50)
    node.session.beat_now()  # with position 8
    cluster.fates.clear()
    cluster.run(2 * H)
    return node


def test_a_confirmed_seek_is_undone_if_a_late_heartbeat_is_ignored(
    cluster, monkeypatch
):
    monkeypatch.setattr(Heartbeater, "may_undo_rewind", lambda *_: False)
    node = stepping_with_a_ghost(cluster)
    node.consumer.seek(T0, 3)
    cluster.run(5 * H)
    assert position_in_log(cluster) == 8


def test_a_seek_ends_the_claim_while_an_old_heartbeat_may_be_appended(cluster):
    node = stepping_with_a_ghost(cluster)
    epoch = node.held[KEY].claim.epoch
    with pytest.raises(ClaimLost) as caught:
        node.consumer.seek(T0, 3)
    assert caught.value.reason == "seek_unconfirmed"
    cluster.run_until(held_by(node, 1), H // 2)  # as the former owner, without a wait
    cluster.run(40)
    assert node.held[KEY].claim.epoch > epoch
    assert [record.offset for record in polled(node)] == [3, 4, 5, 6]
    node.consumer.seek(T0, 2)  # under the new claim
    cluster.run(5 * H)
    ghosts = [
        x for x in of(cluster, "a", Heartbeat) if x.transition.reason == "old_epoch"
    ]
    assert [each.record.position for each in ghosts] == [8]
    assert position_in_log(cluster) == 2


def test_a_seek_after_the_late_heartbeat_is_appended_keeps_the_claim(cluster):
    node = stepping_with_a_ghost(cluster)
    cluster.run(5 * H)
    node.consumer.seek(T0, 3)
    cluster.run(2 * H)
    assert position_in_log(cluster) == 3


def test_a_seek_outside_the_log_changes_nothing(cluster):
    node = stepping(cluster, most=4)
    polled(node)
    for offset in (-1, 11, 2**70):
        with pytest.raises(PositionError, match="has the offsets 0 to 10"):
            node.consumer.seek(T0, offset)
    assert node.consumer.position(T0) == 4
    node.consumer.commit()
    assert node.consumer.committed(T0) == 4


def test_a_seek_in_a_partition_not_held_is_refused(cluster):
    node = stepping(cluster)
    with pytest.raises(InvalidTransition, match="t-1 is not held"):
        node.consumer.seek(TopicPartition("t", 1), 0)


def test_at_most_once_a_seek_is_refused(cluster):
    node = stepping(cluster, delivery=AMO)
    with pytest.raises(InvalidTransition, match=r"reset g --topic t --to-earliest"):
        node.consumer.seek(T0, 0)
    with pytest.raises(InvalidTransition, match="at most once"):
        node.consumer.seek_to_end()


def test_a_seek_raises_claim_lost_if_the_claim_ends(cluster):
    node = stepping(cluster, most=4)
    committed_up_to(cluster, node, 8)
    node.cut(is_cut=True)
    node.data.cut = False
    with pytest.raises(ClaimLost, match="lease_expired"):
        node.consumer.seek(T0, 3, timeout_ms=10 * H)


def test_a_pause_releases_at_the_position_of_a_seek(cluster):
    node = stepping(cluster, most=4)
    committed_up_to(cluster, node, 8)
    polled(node)
    pause_for(cluster, 20 * H)
    cluster.run(100)
    node.consumer.seek(T0, 3)
    cluster.run_until(held_by(node, 0), 2 * H)
    assert position_in_log(cluster) == 3
