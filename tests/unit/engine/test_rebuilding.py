"""A truncated coordinating partition: fenced, folded again, grants restored."""

import pytest
from countkit import Reading, is_over, level_two, moving, resize, worlds
from enginekit import (
    AMO,
    KEY,
    T0,
    H,
    fold,
    held_by,
    lines,
    of,
    owning,
    pause_for,
    spec,
    values,
    world,
    write,
)
from keptkit import Shelf, kept
from logkit import OP, decide, resolve, stage

from kafka_marshal.engine.awaited_ends import RETRY_MS
from kafka_marshal.engine.checkpoint_reader import LogCheckpoints
from kafka_marshal.errors import ClaimLost, LogUnreadable, TopicMisconfigured
from kafka_marshal.ports import WrongSetting
from kafka_marshal.protocol.records import (
    ClaimingMessages,
    ReleasingPartition,
    ResolvePosition,
)
from kafka_marshal.protocol.types import Key
from simulator.fakestore import AppendFate


@pytest.fixture
def cluster():
    return world(records=(50,))


def truncate(cluster, *, end, partition=0):
    cluster.kafka.truncate(cluster.place(partition), end=end, leader=1)


def offset_of(cluster, client_id, kind, effect=None):
    """Return the offset of the first accepted record of a kind."""
    return next(
        line.offset
        for line in of(cluster, client_id, kind)
        if effect is None or line.transition.effect == effect
    )


def polled(node, cluster):
    """Poll until records arrive."""
    for _ in range(100):
        found = values(node.consumer.poll(0))
        cluster.run(20)
        if found:
            return found
    raise AssertionError("nothing was handed out")


def test_a_truncation_ends_claims_at_once_and_the_engine_continues(cluster):
    lost = []
    node = owning(cluster, on_lost=lambda _, ending: lost.append(ending))
    node.consumer.poll(0)
    node.consumer.commit()
    truncate(cluster, end=1)
    node.step()
    assert not node.held
    assert node.engine.failure is None
    assert len(node.observer.named("log_truncated")) == 1
    cluster.run_until(held_by(node, 1), 3 * H)
    assert fold(cluster).keys[KEY].epoch == node.session.holdings[KEY].claim.epoch
    node.consumer.poll(0)
    assert [ending.reason for ending in lost] == ["fenced"]
    token = node.session.holdings[KEY].claim.token
    assert token.leader_epoch == 1


def test_a_truncation_with_uncommitted_records_raises_claim_lost(cluster):
    node = owning(cluster)
    assert polled(node, cluster)
    truncate(cluster, end=1)
    node.step()
    with pytest.raises(ClaimLost):
        node.consumer.poll(0)


def test_claims_in_other_coordinating_partitions_continue():
    """Only the truncated coordinating partition is folded again."""
    cluster = world(partitions=2, records=(10,) * 8)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 8), 3 * H)
    cluster.run(100)
    place_of = node.engine.context.partition_of
    theirs = {k: h for k, h in node.held.items() if place_of(k) == 1}
    assert 0 < len(theirs) < 8
    truncate(cluster, end=1, partition=0)
    node.step()
    assert node.held == theirs
    cluster.run_until(held_by(node, 8), 3 * H)
    assert {k: node.held[k] for k in theirs} == theirs


def test_a_truncation_during_another_restore_is_folded_again():
    cluster = world(partitions=2, records=(10,) * 8)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 8), 3 * H)
    node.engine.rebuilder.sources = (LogCheckpoints(),)
    truncate(cluster, end=1, partition=0)
    node.step()  # detects that 0 was truncated
    truncate(cluster, end=1, partition=1)
    cluster.run_until(held_by(node, 8), 3 * H)
    events = node.observer.named("log_truncated")
    assert [event.fields["partition"] for event in events] == [0, 1]
    assert node.observer.named("log_poll_failed") == []


def test_a_truncation_before_the_engine_is_ready_is_folded_again():
    cluster = world(partitions=2, records=(10,) * 8)
    first = cluster.node("a", spec=spec())
    cluster.run_until(held_by(first, 8), 3 * H)
    node = cluster.node("b", spec=spec())
    node.log.lags_ms[1] = H
    node.step()
    assert not node.engine.is_ready
    truncate(cluster, end=1, partition=0)
    node.step()
    node.log.lags_ms.clear()
    cluster.run_until(held_by(node, 4), 5 * H)
    assert len(node.observer.named("log_truncated")) == 1


def test_a_log_truncated_ahead_of_its_reader_is_read_to_its_new_end():
    """The reader is not beyond the new end, and gets no error."""
    cluster = world(partitions=2, records=(10,) * 8)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 8), 3 * H)
    cluster.run(2 * H)
    truncate(cluster, end=3, partition=1)
    node.step()
    node.log.lags_ms[1] = 99 * H
    cluster.run(H // 2)
    assert node.engine.context.rebuilding == {1}
    cluster.kafka.truncate(cluster.place(1), end=1, leader=2)
    node.log.lags_ms.clear()
    cluster.run_until(held_by(node, 8), RETRY_MS + 3 * H)
    assert len(node.observer.named("log_truncated")) == 1


def test_a_starting_reader_reads_a_truncated_log_to_its_new_end():
    cluster = world(partitions=2, records=(10,) * 8)
    first = cluster.node("a", spec=spec())
    cluster.run_until(held_by(first, 8), 3 * H)
    cluster.crash(first)
    node = cluster.node("b", spec=spec())
    node.log.lags_ms[1] = 99 * H
    node.step()
    truncate(cluster, end=1, partition=1)
    cluster.run(H)
    node.log.lags_ms.clear()
    cluster.run_until(held_by(node, 8), RETRY_MS + 3 * H)
    assert node.observer.named("log_truncated") == []


def test_a_refold_starts_from_a_fitting_state():
    cluster = world(records=(10,))
    node = owning(cluster)
    good = fold(cluster)
    cluster.run(H)
    future = fold(cluster)
    assert future.next_offset > good.next_offset
    truncate(cluster, end=good.next_offset)
    node.engine.rebuilder.sources = (Shelf(kept(future)), Shelf(kept(good)))
    node.step()
    node.step()
    assert node.observer.named("restored")[0].fields["offset"] == good.next_offset
    assert "ends at offset" in node.observer.named("state_unfit")[0].fields["why"]


def test_a_claim_that_survives_in_the_log_is_released(cluster):
    """At least once: the claim survived, and this process no longer uses it."""
    node = owning(cluster)
    epoch = node.session.holdings[KEY].claim.epoch
    cluster.run(H)
    truncate(cluster, end=epoch + 1)
    node.step()
    assert not node.held
    cluster.run_until(held_by(node, 1), 3 * H)
    released = of(cluster, "a", ReleasingPartition)[0]
    assert released.record.epoch == epoch
    assert released.record.reason == "ghost"


def test_at_most_once_lost_grants_are_requested_again(cluster):
    """PROTOCOL 7.5: it is still the owner, and granted is below its own grants."""
    node = owning(cluster, delivery=AMO, most=5, batches=1)
    first = polled(node, cluster)[0]
    granted = fold(cluster).keys[KEY].granted
    assert granted > first[-1]
    truncate(cluster, end=offset_of(cluster, "a", ClaimingMessages, "granted"))
    assert fold(cluster).keys[KEY].granted is None
    node.step()
    assert not node.held
    cluster.run_until(held_by(node, 1), 5 * H)
    again = of(cluster, "a", ClaimingMessages)[0]
    assert again.transition.effect == "granted"
    assert again.record.proposed_last_offset == granted - 1
    assert again.record.grantee != node.owner.incarnation
    release = of(cluster, "a", ReleasingPartition)[0]
    assert again.offset < release.offset
    seen = first + [o for os in polled(node, cluster).values() for o in os]
    assert len(set(seen)) == len(seen)
    assert min(seen[len(first) :]) >= granted
    assert node.observer.named("grant_exposed") == []


def moved_away(before=1):
    """Return a cluster, a reader at most once, and a key that the change will move."""
    cluster = level_two(before, records=[20] * 8)
    reading = Reading(cluster, "a", delivery=AMO)
    cluster.run_until(held_by(reading.node, 8), 3 * H)
    key = moving(before, 2 * before)[0]
    for _ in range(5):
        reading.step()
        cluster.run(20)
    return cluster, reading, key


def test_lost_grants_of_a_key_that_has_moved_are_not_requested_again():
    """PROTOCOL 10.9: an epoch has no meaning in the log of another partition."""
    cluster, reading, key = moved_away()
    node = reading.node
    source = fold(cluster).keys[key]
    resize(cluster, 2)

    def is_claimed_again():
        reading.step()
        return key in node.held and node.session.holdings[key].coordinator == 1

    cluster.run_until(is_claimed_again, 9 * H, step_ms=1)
    assert fold(cluster).keys[key].granted, "the change is open there"
    token = node.session.holdings[key].claim.token
    at = fold(cluster, 1).keys[key].epoch
    truncate(cluster, end=source.epoch + 1)
    worlds(cluster).clear()
    kept = fold(cluster).keys[key]
    assert (kept.epoch, kept.granted) == (source.epoch, None)
    assert source.granted
    cluster.run_until(lambda: not reading.step() and is_over(cluster), 9 * H)
    cluster.run(2 * H)
    assert node.engine.failure is None
    assert node.session.holdings[key].claim.token == token
    for line in lines(cluster, 1):
        if isinstance(line.record, ClaimingMessages | ReleasingPartition):
            is_of_key = line.record.partition == key.partition
            assert not is_of_key or line.record.epoch == at
    assert len(set(reading.offsets)) == len(reading.offsets)


def test_lost_grants_of_a_key_that_moves_meanwhile_are_not_requested_again():
    cluster, reading, key = moved_away()
    node = reading.node
    source = fold(cluster).keys[key]
    cluster.fates["a"] = AppendFate(is_lost=True)
    truncate(cluster, end=source.epoch + 1)
    cluster.run(200)
    other = Reading(cluster, "b", delivery=AMO)
    resize(cluster, 2)

    def is_moved():
        other.step()
        return key in other.node.held and is_over(cluster)

    cluster.run_until(is_moved, 60 * H)
    cluster.fates.clear()
    cluster.run(4 * H)
    assert node.engine.failure is None
    assert not [
        line
        for line in lines(cluster, 1)
        if line.record.client_id == "a"
        and isinstance(line.record, ClaimingMessages | ReleasingPartition)
        and line.record.partition == key.partition
    ]


def test_a_range_wider_than_span_is_requested_in_parts():
    cluster = world(records=(50,), span=4)
    node = owning(cluster, delivery=AMO, most=4, batches=1)
    done = []
    while len(done) < 16:
        done += polled(node, cluster)[0]
    granted = fold(cluster).keys[KEY].granted
    truncate(cluster, end=offset_of(cluster, "a", ClaimingMessages, "granted"))
    node.step()
    cluster.run_until(held_by(node, 1), 8 * H)
    assert fold(cluster).keys[KEY].granted >= granted
    after = [o for os in polled(node, cluster).values() for o in os]
    assert not set(after) & set(done)


def test_lost_grants_are_reported_as_exposed_if_the_claim_is_lost(cluster):
    """PROTOCOL 7.5: others may be granted what was processed here."""
    node = owning(cluster, delivery=AMO, most=5, batches=1)
    done = polled(node, cluster)[0]
    granted = fold(cluster).keys[KEY].granted
    truncate(cluster, end=1)
    cluster.run(3 * H)
    (event,) = node.observer.named("grant_exposed")
    assert event.fields == {"key": KEY, "first": 0, "last": granted - 1}
    assert set(done) <= set(range(granted))


def drain_to(cluster, node, offset):
    """Poll until the node has been handed that offset; return all it was handed."""
    cluster.run_until(held_by(node, 1), 4 * H)
    seen = []
    while not seen or seen[-1] < offset:
        seen += polled(node, cluster)[0]
    return seen


def test_grants_that_the_next_owner_repeats_are_reported_as_exposed(cluster):
    """Its grants are beyond the lost ones when this process reads the log again."""
    node = owning(cluster, delivery=AMO, most=5, batches=1)
    done = polled(node, cluster)[0]
    granted = fold(cluster).keys[KEY].granted
    other = cluster.node("b", spec=spec(delivery=AMO, most=5, batches=1))
    node.cut(is_cut=True)
    truncate(cluster, end=offset_of(cluster, "a", ClaimingMessages, "granted"))
    again = drain_to(cluster, other, granted + 5)
    assert set(done) <= set(again)
    node.cut(is_cut=False)
    cluster.run(H)
    (event,) = node.observer.named("grant_exposed")
    assert event.fields == {"key": KEY, "first": 0, "last": granted - 1}


def test_grants_repeated_in_entries_that_a_restore_skips_are_exposed(cluster):
    node = owning(cluster, delivery=AMO, most=5, batches=1)
    polled(node, cluster)
    granted = fold(cluster).keys[KEY].granted
    other = cluster.node("b", spec=spec(delivery=AMO, most=5, batches=1))
    node.cut(is_cut=True)
    truncate(cluster, end=offset_of(cluster, "a", ClaimingMessages, "granted"))
    drain_to(cluster, other, granted + 5)
    node.engine.rebuilder.sources = (Shelf(kept(fold(cluster))),)
    node.cut(is_cut=False)
    cluster.run(H)
    assert node.observer.named("restored")
    (event,) = node.observer.named("grant_exposed")
    assert event.fields == {"key": KEY, "first": 0, "last": granted - 1}


def test_lost_grants_of_a_key_taken_over_before_a_request_are_exposed(cluster):
    """Still the owner in the log, until another member claims before the request."""
    node = owning(cluster, delivery=AMO, most=5, batches=1)
    done = polled(node, cluster)[0]
    granted = fold(cluster).keys[KEY].granted
    truncate(cluster, end=offset_of(cluster, "a", ClaimingMessages, "granted"))
    cluster.fates["a"] = AppendFate(is_lost=True)
    other = cluster.node("b", spec=spec(delivery=AMO, most=5, batches=1))
    again = drain_to(cluster, other, granted + 5)
    assert set(done) <= set(again)
    cluster.fates.clear()
    cluster.run(3 * H)
    (event,) = node.observer.named("grant_exposed")
    assert event.fields == {"key": KEY, "first": 0, "last": granted - 1}


def test_a_lost_request_for_lost_grants_is_sent_again(cluster):
    node = owning(cluster, delivery=AMO, most=5, batches=1)
    polled(node, cluster)
    granted = fold(cluster).keys[KEY].granted
    truncate(cluster, end=offset_of(cluster, "a", ClaimingMessages, "granted"))
    cluster.fates["a"] = AppendFate(is_lost=True)
    cluster.run(H)
    assert of(cluster, "a", ClaimingMessages) == []
    cluster.fates.clear()
    cluster.run_until(held_by(node, 1), 5 * H)
    assert fold(cluster).keys[KEY].granted >= granted


@pytest.mark.parametrize("is_requested", [False, True])
def test_lost_grants_are_restored_after_a_second_truncation(cluster, is_requested):
    """It comes while the log is read again, or takes the request for them away."""
    node = owning(cluster, delivery=AMO, most=5, batches=1)
    polled(node, cluster)
    granted = fold(cluster).keys[KEY].granted
    at = offset_of(cluster, "a", ClaimingMessages, "granted")
    truncate(cluster, end=at)
    node.step()
    if is_requested:
        cluster.run_until(lambda: of(cluster, "a", ClaimingMessages), H)
    truncate(cluster, end=at - 1)
    cluster.run_until(held_by(node, 1), 5 * H)
    cluster.run(H)
    (request,) = of(cluster, "a", ClaimingMessages)
    assert request.transition.effect == "granted"
    assert request.record.proposed_last_offset == granted - 1
    assert fold(cluster).keys[KEY].granted == granted
    assert node.observer.named("grant_exposed") == []
    assert polled(node, cluster)[0][0] == granted


def granted_and_released(cluster):
    """Return a node that released a key for a pause, and what it had been granted."""
    node = owning(cluster, delivery=AMO, most=5, batches=1)
    polled(node, cluster)
    pause_for(cluster, 6 * H, op=OP)
    read = node.engine.context.replicas[0].world.keys
    cluster.run_until(lambda: read[KEY].owner is None, 3 * H)
    return node, read[KEY].granted


def test_lost_grants_of_a_key_that_was_released_are_exposed(cluster):
    node, granted = granted_and_released(cluster)
    truncate(cluster, end=1)
    cluster.run(3 * H)
    (event,) = node.observer.named("grant_exposed")
    assert event.fields == {"key": KEY, "first": 0, "last": granted - 1}


def set_to_0(cluster, node):
    """Set the position of a key that nobody owns to 0, and let a node read it."""
    for record in (stage((0, 0)), decide(), resolve(commit=True)):
        write(cluster, record)
    read = node.engine.context.replicas[0].world.keys
    cluster.run_until(lambda: read[KEY].granted == 0, H)


def test_grants_before_a_lost_set_position_are_requested_again(cluster):
    """The set position had replaced them, and the log has neither any more."""
    node, granted = granted_and_released(cluster)
    set_to_0(cluster, node)
    truncate(cluster, end=offset_of(cluster, "a", ClaimingMessages, "granted"))
    cluster.run_until(lambda: fold(cluster).keys[KEY].granted == granted, 5 * H)
    cluster.run_until(held_by(node, 1), 5 * H)
    assert polled(node, cluster)[0][0] == granted
    assert not node.observer.named("grant_exposed")


def test_grants_after_a_set_position_that_is_lost_and_set_again_are_exposed(cluster):
    """Its lock is left in the log, so members set it once more."""
    node, _ = granted_and_released(cluster)
    set_to_0(cluster, node)
    cluster.run_until(held_by(node, 1), 5 * H)
    again = polled(node, cluster)[0]
    truncate(cluster, end=offset_of(cluster, "admin", ResolvePosition, "position_set"))
    cluster.run_until(lambda: node.observer.named("grant_exposed"), 3 * H)
    (event,) = node.observer.named("grant_exposed")
    assert event.fields == {"key": KEY, "first": 0, "last": again[-1]}
    cluster.run_until(held_by(node, 1), 8 * H)
    assert polled(node, cluster)[0][0] == 0


def test_no_record_is_sent_before_the_refold_ends():
    cluster = world(records=(10,))
    node = owning(cluster)
    truncate(cluster, end=2)
    node.log.poll_entries_max = 1
    node.step()
    assert node.engine.context.rebuilding == {0}
    assert node.engine.is_ready
    held_back = of(cluster, "a")
    node.step()
    assert of(cluster, "a") == held_back


def test_a_recreated_coordination_topic_stops_the_engine(cluster):
    """PROTOCOL 7.5: the record of all owners is lost."""
    node = owning(cluster)
    cluster.kafka.delete_topic("__marshal")
    cluster.kafka.create_topic("__marshal", 1, is_log_append_time=True)
    cluster.run(H)
    assert isinstance(node.engine.failure, TopicMisconfigured)
    assert "created again" in str(node.engine.failure)
    assert not node.held


def test_a_longer_recreated_coordination_topic_is_detected(cluster):
    """No offset goes back: only the topic's id shows it."""
    node = owning(cluster)
    values_before = [r.value for r in cluster.kafka.log(cluster.place(0)).records]
    cluster.kafka.delete_topic("__marshal")
    cluster.kafka.create_topic("__marshal", 1, is_log_append_time=True)
    for value in values_before * 2:
        cluster.kafka.produce(cluster.place(0), value)
    cluster.run(32_000, step_ms=100)
    assert isinstance(node.engine.failure, TopicMisconfigured)


WRONG = WrongSetting("retention.ms", "retention.ms is 1000", "kafka-configs ...")


def test_a_changed_setting_is_reported_once(cluster):
    node = owning(cluster)
    node.data.wrong = [WRONG]
    named = node.observer.named
    cluster.run_until(lambda: named("topic_misconfigured"), 32_000)
    (event,) = named("topic_misconfigured")
    assert event.fields == {"topic": "__marshal", **WRONG._asdict()}
    cluster.run(32_000, step_ms=100)
    assert len(named("topic_misconfigured")) == 1
    assert node.engine.context.wrong_settings == (WRONG,)
    node.data.wrong = []
    cluster.run(32_000, step_ms=100)
    assert node.engine.context.wrong_settings == ()
    node.data.wrong = [WRONG]
    cluster.run_until(lambda: len(named("topic_misconfigured")) == 2, 32_000)
    assert node.held


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_settings_check_knows_whether_a_state_was_restored(cluster, is_kept):
    """A restored state counts as a checkpoint, so a retention of a week is valid."""
    owning(cluster)
    asked = []

    def wrong_settings(topic, *, has_checkpoints, timeout_ms):
        asked.append((topic, has_checkpoints, timeout_ms > 0))
        return ()

    shelf = Shelf(kept(fold(cluster))) if is_kept else Shelf()
    node = cluster.node("b", sources=(shelf,))
    node.data.wrong_settings = wrong_settings
    cluster.run_until(lambda: asked, 32_000)
    assert asked[0] == ("__marshal", is_kept, True)


def test_unreadable_settings_keep_the_last_result(cluster, monkeypatch):
    node = owning(cluster)

    def deny(*_, **__):
        raise LogUnreadable("denied")

    node.data.wrong = [WRONG]
    cluster.run(32_000, step_ms=100)
    monkeypatch.setattr(node.data, "wrong_settings", deny)
    cluster.run(32_000, step_ms=100)
    assert node.engine.context.wrong_settings == (WRONG,)
    assert node.held


def test_a_rebuild_is_retried_while_the_topic_cannot_be_looked_up(cluster):
    node = owning(cluster)
    truncate(cluster, end=1)
    node.data.cut = True
    cluster.run(H)
    assert node.engine.failure is None
    assert not node.held
    node.data.cut = False
    cluster.run_until(held_by(node, 1), 3 * H)


def test_a_config_lost_by_a_truncation_is_written_again_by_its_reader(cluster):
    """No key is claimed before, so tokens grow (PROTOCOL 10.9)."""
    node = owning(cluster)
    config, token = fold(cluster).config, fold(cluster).token(Key("g", "t", 0))
    truncate(cluster, end=0)
    cluster.run(H)
    assert node.held
    assert fold(cluster).config == config
    assert fold(cluster).token(Key("g", "t", 0)) > token


def recreated(cluster, node):
    """Create the topic again and hand out all of it; return its offsets."""
    cluster.kafka.recreate_topic("t", 1)
    for _ in range(3):
        cluster.kafka.produce(T0, b"x")
    seen = []
    cluster.run_until(held_by(node, 0), 3 * H)
    while len(seen) < 3:
        seen += polled(node, cluster)[0]
    return seen


def test_lost_grants_of_a_recreated_topic_are_exposed(cluster):
    """Grants of the earlier topic were higher; they do not apply to the later one."""
    node = owning(cluster, delivery=AMO, most=5, batches=1, metadata_refresh_ms=500)
    drain_to(cluster, node, 9)
    end = fold(cluster).next_offset
    assert recreated(cluster, node) == [0, 1, 2]
    truncate(cluster, end=end)
    cluster.run(3 * H)
    assert fold(cluster).keys[KEY].granted in {None, 3}
    (event,) = node.observer.named("grant_exposed")
    assert event.fields == {"key": KEY, "first": 0, "last": 2}


# --- grants that a kept state shows and the log has lost


def restarted(cluster, state):
    """Start a process with a kept state."""
    cluster.crash(cluster.nodes[0])
    return cluster.node("b", spec=spec(delivery=AMO), sources=(Shelf(kept(state)),))


def granted_and_kept(cluster):
    """Return the log's end before the grants, and the state after them."""
    node = owning(cluster, delivery=AMO, most=5, batches=1)
    polled(node, cluster)
    state = fold(cluster)
    assert state.keys[KEY].granted
    return offset_of(cluster, "a", ClaimingMessages, "granted"), state


@pytest.mark.parametrize("is_claim_lost", [False, True])
def test_lost_grants_of_a_kept_state_are_reported(cluster, is_claim_lost):
    at, state = granted_and_kept(cluster)
    truncate(cluster, end=1 if is_claim_lost else at)
    node = restarted(cluster, state)
    named = node.observer.named
    cluster.run_until(lambda: named("grant_exposed"), 4 * H)
    (event,) = named("grant_exposed")
    granted = state.keys[KEY].granted
    assert event.fields == {"key": KEY, "first": 0, "last": granted - 1}


def test_grants_of_a_kept_state_that_another_owner_repeats_are_reported(cluster):
    _, state = granted_and_kept(cluster)
    truncate(cluster, end=1)
    cluster.crash(cluster.nodes[0])
    other = cluster.node("c", spec=spec(delivery=AMO))
    cluster.run_until(held_by(other, 1), 4 * H)
    polled(other, cluster)
    assert fold(cluster).keys[KEY].granted
    node = restarted(cluster, state)
    cluster.run(H)
    (event,) = node.observer.named("grant_exposed")
    assert (event.fields["first"], event.fields["last"]) == (
        0,
        state.keys[KEY].granted - 1,
    )


def test_lost_grants_of_an_earlier_topic_are_not_reported(cluster):
    """They cannot be granted again: the log has retired their topic."""
    at, state = granted_and_kept(cluster)
    truncate(cluster, end=at)
    cluster.crash(cluster.nodes[0])
    cluster.kafka.recreate_topic("t", 1)
    other = cluster.node("c", spec=spec(delivery=AMO))
    cluster.run_until(held_by(other, 1), 4 * H)
    assert fold(cluster).keys[KEY].retired_topic_ids == (state.keys[KEY].topic_id,)
    cluster.crash(other)
    node = cluster.node("b", spec=spec(delivery=AMO), sources=(Shelf(kept(state)),))
    cluster.run(4 * H)
    assert node.observer.named("state_unfit")
    assert node.observer.named("grant_exposed") == []


def test_a_live_owner_restores_its_grants_itself(cluster):
    at, state = granted_and_kept(cluster)
    truncate(cluster, end=at)
    node = cluster.node("b", sources=(Shelf(kept(state)),))
    cluster.run(3 * H)
    assert fold(cluster).keys[KEY].granted >= state.keys[KEY].granted
    assert node.observer.named("state_unfit")
    assert not node.observer.named("grant_exposed")


@pytest.mark.parametrize("changes", [{"digest": "00" * 16}, {"state": b"?"}])
def test_a_damaged_kept_state_reports_no_lost_grants(cluster, changes):
    _, state = granted_and_kept(cluster)
    truncate(cluster, end=1)
    cluster.crash(cluster.nodes[0])
    shelf = Shelf(kept(state, **changes))
    node = cluster.node("b", spec=spec(delivery=AMO), sources=(shelf,))
    cluster.run(4 * H)
    assert node.observer.named("state_unfit")
    assert not node.observer.named("grant_exposed")


def test_unreported_losses_are_kept_for_the_next_start(cluster):
    """An owner may restore its grants within two heartbeat intervals; a restart in
    between must not lose the evidence."""
    at, state = granted_and_kept(cluster)
    truncate(cluster, end=at)
    cluster.crash(cluster.nodes[0])
    shelf = Shelf(kept(state))
    early = cluster.node("b", spec=spec(delivery=AMO), sources=(shelf,))
    cluster.run(H)
    assert early.observer.named("state_unfit")
    assert not early.observer.named("grant_exposed")
    assert shelf.discarded == []
    cluster.crash(early)
    node = cluster.node("c", spec=spec(delivery=AMO), sources=(shelf,))
    cluster.run_until(lambda: node.observer.named("grant_exposed"), 4 * H)
    cluster.run_until(lambda: shelf.discarded == [0], H)


@pytest.mark.parametrize("is_claim_lost", [False, True])
def test_a_kept_state_is_removed_once_its_losses_are_reported(cluster, is_claim_lost):
    at, state = granted_and_kept(cluster)
    truncate(cluster, end=1 if is_claim_lost else at)
    cluster.crash(cluster.nodes[0])
    shelf = Shelf(kept(state))
    node = cluster.node("b", spec=spec(delivery=AMO), sources=(shelf,))
    cluster.run_until(lambda: node.observer.named("grant_exposed"), 4 * H)
    cluster.run(H)
    assert shelf.discarded == [0]
    assert len(node.observer.named("grant_exposed")) == 1


def test_a_damaged_kept_state_is_removed_at_once(cluster):
    _, state = granted_and_kept(cluster)
    truncate(cluster, end=1)
    cluster.crash(cluster.nodes[0])
    shelf = Shelf(kept(state, digest="00" * 16))
    cluster.node("b", spec=spec(delivery=AMO), sources=(shelf,))
    cluster.run(H)
    assert shelf.discarded == [0]
