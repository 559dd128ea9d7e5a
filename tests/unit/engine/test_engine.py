"""How an engine starts, reads, and stops."""

from itertools import groupby

import msgspec
import pytest
from countkit import fence_to, level_two
from enginekit import (
    KEY,
    T0,
    H,
    Stepping,
    held_by,
    lines,
    of,
    owning,
    spec,
    world,
    write,
)
from logkit import claim

from kafka_marshal.errors import (
    CoordinationError,
    DeadlineExceeded,
    InvalidTransition,
    LogTruncated,
    LogUnreadable,
    TopicMisconfigured,
)
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.lease import Lease
from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    ClaimingPartition,
    Config,
    Heartbeat,
    Member,
)
from kafka_marshal.protocol.types import Key, Owner
from simulator.fakestore import AppendFate
from simulator.node import Cluster, Node


def blank(partitions=1):
    """Return a cluster whose coordination topic is empty."""
    cluster = Cluster(partitions=partitions)
    cluster.kafka.delete_topic("__marshal")
    cluster.kafka.create_topic("__marshal", partitions, is_log_append_time=True)
    cluster.fill("t", [1])
    return cluster


def changed(config, **fields) -> Config:
    return msgspec.structs.replace(config, **fields)


# --- Start ---


def test_the_engine_is_ready_at_the_end_of_the_log(cluster):
    node = cluster.node("a")
    assert not node.engine.is_ready
    node.step()
    assert node.engine.is_ready


def test_sessions_lists_the_sessions_that_the_engine_drives(cluster):
    node = cluster.node("a")
    assert node.engine.sessions == (node.session,)
    node.engine.remove_session(node.session)
    assert node.engine.sessions == ()


def test_nothing_is_kept_of_a_group_whose_sessions_have_ended(cluster):
    """A sidecar runs for weeks, and groups come and go."""
    node = owning(cluster)
    node.engine.remove_session(node.session)
    cluster.run(H)
    assert node.engine._by_group == {}


def test_a_slow_reader_is_not_ready_before_the_log_end(cluster):
    for _ in range(10):
        write(cluster, b"noise")
    node = cluster.node("a")
    node.log.poll_entries_max = 3
    steps = 0
    while not node.engine.is_ready:
        node.step()
        steps += 1
    assert steps == 4


def test_the_error_of_an_unformatted_topic_names_the_command():
    cluster = blank()
    node = cluster.node("a")
    node.step()
    assert isinstance(node.engine.failure, TopicMisconfigured)
    assert str(node.engine.failure).endswith("marshal topic format")


def test_the_command_in_the_error_names_a_custom_coordination_topic():
    cluster = blank()
    node = cluster.node("a")
    node.log.topic = "claims"
    node.step()
    option = "marshal topic format --coordination-topic claims"
    assert str(node.engine.failure).endswith(option)


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"format_id": b"x" * 16},
        {"generation": 2},
        {"partition_count": 4},
        {"feature_level": 1},
    ],
)
def test_a_torn_format_is_refused(other):
    cluster = blank(partitions=2)
    config = changed(cluster.config, partition_count=2)
    write(cluster, config)
    if other:
        write(cluster, changed(config, **other), 1)
    node = cluster.node("a")
    node.step()
    assert isinstance(node.engine.failure, TopicMisconfigured)
    assert "torn_format" in str(node.engine.failure)


def test_an_engine_starts_despite_two_intervals_in_one_generation():
    """A truncated log may have lost one; each partition judges by its own Config."""
    cluster = blank(partitions=2)
    config = changed(cluster.config, partition_count=2)
    write(cluster, config)
    write(cluster, changed(config, heartbeat_interval_ms=9_999), 1)
    node = cluster.node("a")
    node.step()
    assert node.engine.is_ready


def test_a_config_of_another_cluster_is_refused():
    cluster = blank()
    write(cluster, changed(cluster.config, cluster_id="elsewhere"))
    node = cluster.node("a")
    node.step()
    assert isinstance(node.engine.failure, TopicMisconfigured)
    assert "elsewhere" in str(node.engine.failure)


def test_a_topic_with_too_few_partitions_is_refused():
    cluster = blank()
    write(cluster, changed(cluster.config, partition_count=3))
    node = cluster.node("a")
    node.step()
    assert isinstance(node.engine.failure, TopicMisconfigured)


def test_partitions_added_to_the_coordination_topic_are_not_used():
    """PROTOCOL 2.5: the Config states the number of coordinating partitions."""
    cluster = world(records=[1, 1, 1])
    cluster.kafka.add_partitions("__marshal", 2)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 3), H)
    assert cluster.kafka.log(cluster.place(1)).end == 0


def test_a_reader_without_the_log_start_claims_nothing(cluster):
    """PROTOCOL 7.3: the winning claims may have been deleted."""
    write(cluster, b"x")
    cluster.kafka.delete_records(cluster.place(0), before=1)
    node = cluster.node("a", spec=spec())
    cluster.run(H)
    assert node.engine.failure is None
    assert node.engine.log_start_missing == (0,)
    assert not node.engine.is_ready
    assert not node.session.holdings
    with pytest.raises(LogUnreadable, match="begins above offset 0"):
        node.engine.wait_ready(H)
    assert len(node.observer.named("log_start_missing")) == 1


def test_an_unavailable_log_is_retried(cluster):
    node = cluster.node("a", spec=spec())
    node.cut(is_cut=True)
    cluster.run(H)
    assert node.engine.failure is None
    assert node.observer.named("log_poll_failed")
    node.cut(is_cut=False)
    cluster.run_until(held_by(node, 1), H)


def test_waiting_for_readiness_has_a_deadline(cluster):
    node = cluster.node("a")
    node.engine.changed = Stepping(cluster)
    node.engine.wait_ready(1_000)
    other = cluster.node("b")
    other.engine.changed = Stepping(cluster)
    other.cut(is_cut=True)
    with pytest.raises(DeadlineExceeded):
        other.engine.wait_ready(1_000)


def test_waiting_for_readiness_raises_the_failure_of_the_engine():
    cluster = blank()
    node = cluster.node("a")
    node.engine.changed = Stepping(cluster)
    with pytest.raises(TopicMisconfigured):
        node.engine.wait_ready(1_000)


# --- Reading to the end ---


def test_catching_up_reads_entries_written_before_the_call(cluster):
    """The state is never older than the call."""
    node = cluster.node("a")
    node.step()
    node.engine.changed = Stepping(cluster)
    offset = write(cluster, b"noise")
    node.engine.catch_up(1_000)
    assert node.engine.context.replicas[0].world.next_offset > offset


def test_catching_up_at_the_log_end_returns_at_once(cluster):
    """The stepping thread may be in a poll that returns nothing."""
    node = cluster.node("a")
    write(cluster, b"noise")
    node.step()
    node.step()  # its own announcement, sent once ready, is folded too
    before = cluster.clock.now_ms()
    node.engine.changed = Stepping(cluster)
    node.engine.catch_up(1_000)
    assert cluster.clock.now_ms() == before


def counted(partitions, monkeypatch):
    """Return a cluster, a node at the end of the log, and the ends it requests."""
    cluster, asked = level_two(partitions, records=[1] * 8), []
    node = cluster.node("a")
    cluster.run(H)
    node.engine.changed = Stepping(cluster)
    log = node.engine.context.ports.log
    ask = log.end_offsets

    def note(timeout_ms, of=None):
        asked.append(of)
        return ask(timeout_ms, of)

    monkeypatch.setattr(log, "end_offsets", note)
    return cluster, node, asked


def test_catching_up_for_a_key_requests_the_end_of_its_partition_alone(monkeypatch):
    cluster, node, asked = counted(2, monkeypatch)
    for key in (Key("g", "t", number) for number in range(8)):
        place = place_of(key, partition_count=2)
        offset = write(cluster, b"noise", place)
        node.engine.catch_up_keys([key], 1_000)
        assert asked.pop() == {place}
        assert asked == []
        assert node.engine.context.replicas[place].world.next_offset > offset


@pytest.mark.parametrize("is_known", [False, True])
def test_catching_up_for_a_key_requests_all_ends_while_the_count_changes(
    monkeypatch, is_known
):
    """If the partition of a key shows that it moves, all others are read, too."""
    cluster, node, asked = counted(2, monkeypatch)
    key = Key("g", "t", 0)
    place = place_of(key, partition_count=2)
    fence = fence_to(cluster, 4)
    for t in (0, 1):
        write(cluster, fence, t)
    if is_known:
        cluster.run(200)
    node.engine.catch_up_keys([key], 1_000)
    # The start of the added partitions requests all ends, too.
    wanted = [None] if is_known else [{place}, None]
    assert [of for of, _ in groupby(asked)] == wanted


def test_an_end_below_the_folded_offset_is_not_trusted(cluster, monkeypatch):
    """A new leader may lag; a truncated log is folded again."""
    node = cluster.node("a")
    offset = write(cluster, b"noise")
    node.step()
    node.engine.changed = Stepping(cluster)
    log = node.engine.context.ports.log
    answers, ask = [{0: offset - 1}], log.end_offsets

    def ask_again(timeout_ms, partitions=None):
        return answers.pop(0) if answers else ask(timeout_ms, partitions)

    monkeypatch.setattr(log, "end_offsets", ask_again)
    node.engine.catch_up(1_000)
    assert answers == []


def test_catching_up_raises_the_error_of_an_unreadable_log(cluster, monkeypatch):
    node = cluster.node("a")
    node.step()

    def ask(timeout_ms, partitions=None):
        raise LogUnreadable("no right")

    monkeypatch.setattr(node.engine.context.ports.log, "end_offsets", ask)
    with pytest.raises(LogUnreadable, match="no right"):
        node.engine.catch_up(1_000)


def test_catching_up_waits_for_a_refold(cluster, monkeypatch):
    """The folded offset of a truncated coordinating partition does not count."""
    node = cluster.node("a")
    write(cluster, b"noise")
    node.step()
    node.engine.changed = Stepping(cluster)
    lost = {0}
    monkeypatch.setattr(node.engine.rebuilder, "is_lost", lost.__contains__)
    monkeypatch.setattr(node.engine.rebuilder, "is_due", lambda now_ms: False)
    node.step()
    with pytest.raises(DeadlineExceeded, match="not read to its end within 500 ms"):
        node.engine.catch_up(500)
    lost.clear()
    node.engine.catch_up(500)


def test_catching_up_has_a_deadline(cluster):
    node = cluster.node("a")
    node.step()
    node.engine.changed = Stepping(cluster)
    node.cut(is_cut=True)
    with pytest.raises(DeadlineExceeded):
        node.engine.catch_up(500)
    node.cut(is_cut=False)
    node.engine.catch_up(500)


# --- Sessions ---


def test_a_client_cannot_be_opened_twice_in_a_process(cluster):
    node = cluster.node("a")
    with pytest.raises(InvalidTransition, match="already open"):
        node.engine.add_session(node.session)
    node.engine.remove_session(node.session)
    node.engine.remove_session(node.session)
    node.engine.add_session(node.session)


def test_one_client_id_may_be_open_in_two_groups(cluster):
    a = cluster.node("a", spec=spec())
    b = cluster.node("a", group_id="h", spec=spec())
    cluster.run_until(lambda: a.held and b.held, H)
    cluster.run(3 * H)
    assert a.session.failure is b.session.failure is None


# --- The end ---


def test_a_config_above_the_supported_level_stops_the_engine(cluster):
    node = owning(cluster)
    config = changed(cluster.config, generation=2, era=2, feature_level=9)
    write(cluster, config)
    cluster.run(20)
    assert isinstance(node.engine.failure, LogUnreadable)
    assert "level 9" in str(node.engine.failure)
    assert not node.held
    with pytest.raises(LogUnreadable):
        node.consumer.poll(0)


def test_a_refused_config_ends_no_claim(cluster):
    node = owning(cluster)
    write(cluster, changed(cluster.config, generation=7, era=2, feature_level=9))
    cluster.run(H)
    assert node.held


def test_a_new_config_changes_the_interval_of_held_claims(cluster):
    node = owning(cluster)
    write(
        cluster,
        changed(cluster.config, generation=2, era=2, heartbeat_interval_ms=1_500),
    )
    cluster.run(2 * H)
    assert node.held
    claim = node.session.holdings[KEY].claim
    assert claim.heartbeat_interval_ms == 1_500


@pytest.mark.parametrize("t", [0, 1])
def test_a_member_writes_a_config_to_a_partition_that_lacks_it(t):
    """An admin died while writing, or a log lost it; partition 0 decides."""
    cluster = world(partitions=2, records=[1] * 4)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 4), H)
    config = changed(cluster.config, generation=2, era=cluster.config.era + 1)
    write(cluster, config, 1 - t)
    cluster.run_until(lambda: node.engine.context.replicas[t].world.config == config, H)
    cluster.run(2 * H)
    assert not node.observer.named("config_torn")
    assert len(node.held) == 4
    assert node.engine.context.settled == config
    found = [line.record for line in lines(cluster, t)]
    assert found.count(config) == 1


def without(node, config):
    """Replace what a node appends for a Config by noise; return the real append."""
    written = node.log.append

    def append(partition, value):
        return written(partition, b"x" if value == encode(config) else value)

    node.log.append = append
    return written


def test_a_config_missing_in_a_partition_for_an_interval_is_reported():
    cluster = world(partitions=2, records=[1] * 4)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 4), H)
    config = changed(cluster.config, generation=2, era=cluster.config.era + 1)
    written = without(node, config)
    write(cluster, config, 0)
    cluster.run(H // 2)
    assert not node.observer.named("config_torn"), "it may be on its way"
    cluster.run(H)
    (torn,) = node.observer.named("config_torn")
    assert "behind partition 0's Config" in str(torn.fields["error"])
    assert len(node.held) == 4
    node.log.append = written
    cluster.run(2 * H)
    assert len(node.observer.named("config_torn")) == 1
    assert len(node.held) == 4
    assert node.engine.context.settled.generation == 2


def test_no_key_is_claimed_in_a_partition_without_the_newest_config():
    """Its log may have lost that Config, and claims under it with larger tokens."""
    cluster = world(partitions=2, records=[1] * 4)
    config = changed(cluster.config, generation=2, era=cluster.config.era + 1)
    node = cluster.node("a", spec=spec())
    written = without(node, config)
    write(cluster, config, 0)
    cluster.run(3 * H)
    claimed = {
        t: [each for each in lines(cluster, t) if is_claim(each.record)]
        for t in range(2)
    }
    assert claimed[0]
    assert not claimed[1]
    node.log.append = written
    cluster.run_until(held_by(node, 4), 2 * H)


def is_claim(record):
    return isinstance(record, ClaimingPartition) and record.topic == "t"


@pytest.mark.parametrize("t", [0, 1])
def test_a_partition_that_lost_all_entries_gets_its_config_again(t):
    """Without a Config its claims would be refused for ever."""
    cluster = world(partitions=2, records=[1] * 4)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 4), H)
    cluster.kafka.truncate(cluster.place(t), end=0, leader=5)
    cluster.run_until(held_by(node, 4), 4 * H)
    reasons = {each.transition.reason for each in lines(cluster, t)}
    assert "no_config" not in reasons - {None}
    assert node.engine.context.replicas[t].world.config == cluster.config


def test_a_truncated_log_ends_its_claims_and_not_the_engine(cluster):
    """It is folded again, see test_rebuilding."""
    node = owning(cluster)
    cluster.kafka.truncate(cluster.place(0), end=2, leader=1)
    cluster.run(20)
    assert node.engine.failure is None
    assert not node.held


def test_a_truncation_of_unknown_partition_stops_the_engine(cluster):
    node = owning(cluster)

    def poll(timeout_ms):
        raise LogTruncated("somewhere")

    node.log.poll = poll
    cluster.run(20)
    assert isinstance(node.engine.failure, LogTruncated)
    assert not node.held


def test_an_entry_without_a_leader_epoch_stops_the_engine(cluster):
    node = owning(cluster)
    cluster.kafka.log(cluster.place(0)).leader_epoch = None
    write(cluster, b"x")
    cluster.run(20)
    assert isinstance(node.engine.failure, CoordinationError)
    assert not node.held


def test_an_exception_in_a_session_stops_the_engine(cluster, monkeypatch):
    node = owning(cluster)
    monkeypatch.setattr(node.session, "tick", lambda now_ms: 1 / 0)
    node.step()
    assert isinstance(node.engine.failure, InvalidTransition)
    assert isinstance(node.engine.failure.__cause__, ZeroDivisionError)
    assert not node.held


def test_an_exception_while_reading_stops_the_engine(cluster, monkeypatch):
    """Otherwise the thread would end, and no one would notice."""
    node = owning(cluster)
    monkeypatch.setattr(node.log, "poll_runs", lambda timeout_ms: 1 / 0)
    node.step()
    assert isinstance(node.engine.failure, InvalidTransition)
    assert not node.held


def test_act_drives_a_session_between_rounds_once_the_log_is_read(cluster):
    node = cluster.node("a", spec=spec())
    node.engine.act(node.session)
    assert of(cluster, "a") == []  # not before the log is read to its end
    cluster.run(20)
    before = len(of(cluster, "a"))
    node.session.want(KEY._replace(topic="other"))
    node.engine.act(node.session)
    assert len(of(cluster, "a")) == before + 1


def test_act_is_skipped_for_a_while_after_one_that_took_long(cluster, monkeypatch):
    node = owning(cluster)
    acts = []

    def tick(now_ms):
        acts.append(now_ms)
        cluster.clock.advance(10)

    monkeypatch.setattr(node.session, "tick", tick)
    for _ in range(3):
        node.engine.act(node.session)
    assert len(acts) == 1
    cluster.clock.advance(4 * 10)
    node.engine.act(node.session)
    assert len(acts) == 2


def test_an_exception_in_act_stops_the_engine(cluster, monkeypatch):
    node = owning(cluster)
    monkeypatch.setattr(node.session, "tick", lambda now_ms: 1 / 0)
    node.engine.act(node.session)
    assert isinstance(node.engine.failure, InvalidTransition)
    assert not node.held


def test_a_claim_in_use_that_another_owns_in_the_log_stops_the_engine(cluster):
    node = owning(cluster)
    known = node.engine.context.replicas[0].world.keys[KEY]
    known.owner = Owner("b", b"b" * 16)
    node.step()
    assert node.held  # nothing has named the key since
    write(cluster, claim("c"))
    node.step()
    assert isinstance(node.engine.failure, InvalidTransition)
    assert "is in use under epoch" in str(node.engine.failure)
    assert not node.held


def test_all_claims_are_compared_with_the_log_periodically(cluster):
    node = owning(cluster)
    known = node.engine.context.replicas[0].world.keys[KEY]
    known.owner = Owner("b", b"b" * 16)
    cluster.clock.advance(H // 3)
    node.step()
    assert isinstance(node.engine.failure, InvalidTransition)
    assert not node.held


def test_a_simulated_node_runs_the_production_engine(cluster):
    node = cluster.node("a")
    assert type(node) is Node
    assert type(node.engine).__module__ == "kafka_marshal.engine.engine"


def altered(cluster, h, generation=2):
    return msgspec.structs.replace(
        cluster.config,
        generation=generation,
        era=generation,
        heartbeat_interval_ms=h,
    )


def sent_after(cluster, offset, *kinds):
    return [
        line
        for line in lines(cluster)
        if line.offset > offset and isinstance(line.record, kinds)
    ]


@pytest.fixture(name="cluster")
def _cluster():
    return world()


def test_members_beat_and_announce_at_once_after_a_changed_interval(cluster):
    node = owning(cluster)
    cluster.run(H)
    write(cluster, altered(cluster, H // 4))
    at = lines(cluster)[-1]
    cluster.run(100)
    for kinds in ((Heartbeat, BatchHeartbeat), (Member,)):
        assert sent_after(cluster, at.offset, *kinds)[0].time_ms <= at.time_ms + 100
    assert node.observer.named("interval_changed")
    assert node.log.delivery_timeout_ms == H // 8


def test_a_lower_interval_ends_no_claim_and_moves_no_deadline_back(cluster):
    node = owning(cluster)
    cluster.run(H)
    claim = node.session.holdings[next(iter(node.held))].claim
    before = claim.lease
    write(cluster, altered(cluster, H // 5))
    cluster.run(200)
    assert claim.lease.hard_until_ms >= before.hard_until_ms
    cluster.run(6 * H)
    assert claim.lease == Lease.since(claim.base_ms, H // 5)
    assert not node.observer.named("claim_ended")
    assert not node.observer.named("clock_step")


def test_a_higher_interval_slows_heartbeats_down(cluster):
    node = owning(cluster)
    write(cluster, altered(cluster, 4 * H))
    cluster.run(H)
    at = lines(cluster)[-1]
    cluster.run(8 * H)
    assert len(sent_after(cluster, at.offset, Heartbeat, BatchHeartbeat)) <= 8
    assert node.held


def test_members_use_the_least_interval_of_all_partitions():
    cluster = world(partitions=2, records=[1] * 4)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 4), H)
    context = node.engine.context
    write(cluster, altered(cluster, 4 * H), 0)
    cluster.run(100)
    assert context.heartbeat_interval_ms == H
    assert not node.observer.named("interval_changed")
    write(cluster, altered(cluster, 4 * H), 1)
    cluster.run(100)
    assert (context.heartbeat_interval_ms, context.least_interval_ms) == (4 * H, None)
    write(cluster, altered(cluster, H, 3), 0)
    cluster.run(100)
    assert context.heartbeat_interval_ms == H
    cluster.run(20 * H)
    assert len(node.held) == 4


def test_a_member_starts_while_a_partition_lacks_the_newest_config():
    cluster = world(partitions=2, records=[1] * 4)
    write(cluster, altered(cluster, 2 * H), 0)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 4), 2 * H)
    assert node.engine.failure is None


def test_timeouts_that_could_not_be_changed_are_set_again(cluster, monkeypatch):
    node = owning(cluster)
    plain, tried = node.log.configure, []

    def configure(interval_ms):
        tried.append(interval_ms)
        if len(tried) == 1:
            raise CoordinationError("no answer")
        plain(interval_ms)

    monkeypatch.setattr(node.log, "configure", configure)
    write(cluster, altered(cluster, H // 3))
    cluster.run(100)
    assert node.observer.named("timeouts_unchanged")
    cluster.run(H)
    assert tried == [H // 3, H // 3]
    assert node.log.delivery_timeout_ms == H // 6
    assert T0 in {key.topic_partition for key in node.held}


def test_a_heartbeat_batch_above_a_lowered_limit_is_split_and_sent_again(cluster):
    cluster = world(records=[1] * 4)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 4), H)
    config = altered(cluster, H)
    limits = msgspec.structs.replace(config.limits, beats=2)
    # The heartbeats are on their way when the limit is lowered.
    cluster.fates["a"] = AppendFate(delay_ms=200)
    node.session.on_interval()
    cluster.run(50)
    write(cluster, msgspec.structs.replace(config, limits=limits))
    at = lines(cluster)[-1]
    cluster.run(250)
    cluster.fates.clear()
    (refused,) = sent_after(cluster, at.offset, BatchHeartbeat)
    assert refused.transition.reason == "limits"
    cluster.run(200)
    again = sent_after(cluster, refused.offset, BatchHeartbeat)
    assert {len(line.record.beats) for line in again} == {2}
    assert len(node.held) == 4
    assert not node.observer.named("claim_ended")
