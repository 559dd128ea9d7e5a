"""Faults of the fake coordination log: appends, leaders, readers."""

import pytest

from kafka_marshal.errors import (
    CoordinationError,
    InvalidTransition,
    LogTruncated,
    TopicMisconfigured,
)
from kafka_marshal.protocol.types import TimestampType, TopicPartition
from simulator.clock import EPOCH_MS, VirtualClock
from simulator.fakelog import (
    DELIVERY_TIMEOUT_MS,
    AppendFate,
    FakeKafka,
)

TOPIC = "__marshal"
T0 = TopicPartition(TOPIC, 0)


class Script:
    """Returns fates in the given order, then appends without faults."""

    def __init__(self):
        self.fates = []
        self.asked = []

    def of_append(self, writer, partition):
        self.asked.append((writer, partition))
        return self.fates.pop(0) if self.fates else AppendFate()


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def cluster(clock, script):
    made = FakeKafka(clock, policy=script)
    made.create_topic(TOPIC, 2, is_log_append_time=True)
    return made


@pytest.fixture
def log(cluster):
    return cluster.coordination_log(name="a")


def values(log):
    return [entry.value for _, entry in log.poll(0)]


def test_the_policy_gets_writer_and_partition_of_each_append(cluster, log, script):
    log.append(1, b"x")
    cluster.coordination_log().append(0, b"y")
    assert script.asked == [("a", 1), ("writer-1", 0)]


def test_a_delayed_append_gets_the_timestamp_of_its_arrival(log, clock, script):
    script.fates = [AppendFate(delay_ms=100)]
    append = log.append(0, b"x")
    clock.advance(99)
    assert values(log) == []
    assert not append.is_done()
    clock.advance(500)
    ((_, entry),) = log.poll(0)
    assert entry.timestamp_ms == EPOCH_MS + 100
    assert (append.is_done(), append.offset(), append.error()) == (True, 0, None)


def test_later_appends_wait_for_a_delayed_append(log, clock, script):
    script.fates = [AppendFate(delay_ms=100), AppendFate(delay_ms=10)]
    log.append(0, b"1")
    log.append(0, b"2")
    log.append(1, b"other")
    assert values(log) == [b"other"]
    clock.advance(100)
    assert values(log) == [b"1", b"2"]


def test_a_failed_append_may_arrive_late_without_delaying_others(log, clock, script):
    script.fates = [AppendFate(delay_ms=2_200, fails_after_ms=1_000)]
    append = log.append(0, b"late")
    assert log.append(0, b"next").offset() == 0
    clock.advance(1_000)
    assert append.is_done()
    assert isinstance(append.error(), CoordinationError)
    assert append.offset() is None
    clock.advance(1_200)
    assert values(log) == [b"next", b"late"]
    assert append.error() is not None


def test_an_append_with_a_lost_acknowledgement_is_written(log, clock, script):
    script.fates = [AppendFate(fails_after_ms=500)]
    append = log.append(0, b"x")
    assert values(log) == [b"x"]
    assert not append.is_done()
    clock.advance(500)
    assert append.error() is not None


def test_a_lost_append_fails_at_the_delivery_timeout(log, clock, script):
    script.fates = [AppendFate(is_lost=True), AppendFate(is_lost=True)]
    log.append(0, b"x")
    log.configure(10_000)
    append = log.append(0, b"x")
    clock.advance(4_999)
    assert not append.is_done()
    clock.advance(1)
    assert append.error() is not None
    assert values(log) == []


def test_an_append_after_the_delivery_timeout_fails_but_is_written(log, clock, script):
    script.fates = [AppendFate(delay_ms=DELIVERY_TIMEOUT_MS + 1)]
    append = log.append(0, b"x")
    clock.advance(DELIVERY_TIMEOUT_MS + 1)
    assert append.error() is not None
    assert values(log) == [b"x"]


def test_a_duplicated_append_is_written_several_times(log, script):
    script.fates = [AppendFate(copies=3)]
    append = log.append(0, b"x")
    assert append.offset() == 0
    assert values(log) == [b"x"] * 3


def test_an_append_to_a_deleted_topic_fails(cluster, log, clock, script):
    script.fates = [AppendFate(delay_ms=10)]
    append = log.append(0, b"x")
    cluster.delete_topic(TOPIC)
    clock.advance(10)
    assert append.is_done()
    assert append.error() is not None
    with pytest.raises(CoordinationError):
        log.poll(0)


def test_appends_of_a_disconnected_client_arrive_after_reconnect(cluster, log, clock):
    other = cluster.coordination_log(name="b")
    log.cut = True
    early = log.append(0, b"early")
    clock.advance(DELIVERY_TIMEOUT_MS - 1)
    late = log.append(0, b"late")
    other.append(0, b"other")
    assert values(log) == []
    for ask in (log.end_offsets, log.start_offsets):
        with pytest.raises(CoordinationError, match="cut off"):
            ask(100)
    clock.advance(1)
    assert early.error() is not None
    assert not late.is_done()
    log.cut = False
    assert late.offset() == 1
    assert values(log) == [b"other", b"late"]
    assert not log.cut


def test_each_leader_sets_timestamps_by_its_own_clock(cluster, log):
    cluster.set_skew(0, 5_000)
    cluster.set_skew(7, -5_000)
    log.append(0, b"1")
    cluster.fail_over(T0, leader=7)
    log.append(0, b"2")
    stamps = [(e.leader_epoch, e.timestamp_ms - EPOCH_MS) for _, e in log.poll(0)]
    assert stamps == [(0, 5_000), (1, -5_000)]


def test_only_a_reader_beyond_a_truncation_raises(cluster, log):
    ahead, behind = log, cluster.coordination_log()
    for value in (b"1", b"2", b"3"):
        ahead.append(0, value)
    assert values(ahead) == [b"1", b"2", b"3"]
    cluster.truncate(T0, end=2, leader=1)
    assert values(behind) == [b"1", b"2"]
    for _ in range(2):
        with pytest.raises(LogTruncated):
            ahead.poll(0)


def test_a_truncation_raises_after_the_log_has_grown_again(cluster, log):
    for value in (b"1", b"2"):
        log.append(0, value)
    assert values(log) == [b"1", b"2"]
    cluster.truncate(T0, end=1, leader=1)
    for value in (b"x", b"y", b"z"):
        cluster.produce(T0, value)
    with pytest.raises(LogTruncated):
        log.poll(0)
    assert values(cluster.coordination_log()) == [b"1", b"x", b"y", b"z"]


def test_a_truncation_to_an_empty_log_raises(cluster, log):
    log.append(0, b"1")
    assert values(log) == [b"1"]
    cluster.truncate(T0, end=0, leader=1)
    with pytest.raises(LogTruncated):
        log.poll(0)


def test_positions_skip_control_records(cluster, log):
    log.append(0, b"1")
    cluster.skip_offsets(T0, count=2)
    cluster.fail_over(T0, leader=1)
    cluster.skip_offsets(T0)
    assert values(log) == [b"1"]
    assert log.positions() == {0: 4, 1: 0} == log.end_offsets(0)
    assert values(log) == []
    log.append(0, b"2")
    assert [(e.offset, e.leader_epoch) for _, e in log.poll(0)] == [(4, 1)]


def test_only_a_reader_below_deleted_records_raises(cluster, log):
    fresh = cluster.coordination_log()
    log.append(0, b"1")
    assert values(log) == [b"1"]
    log.append(0, b"2")
    log.append(0, b"3")
    cluster.delete_records(T0, before=2)
    # A reader that has read no record yet has lost none.
    assert values(fresh) == [b"3"]
    with pytest.raises(LogTruncated):
        log.poll(0)


def test_a_reader_with_a_lag_gets_records_later(cluster, log, clock):
    slow = cluster.coordination_log()
    slow.read_lag_ms = 100
    log.append(0, b"x")
    assert values(log) == [b"x"]
    assert values(slow) == []
    assert slow.positions()[0] == 0
    clock.advance(100)
    assert values(slow) == [b"x"]


def test_a_poll_returns_at_most_its_limit_of_entries(log):
    for number in range(5):
        log.append(number % 2, b"%d" % number)
    log.poll_entries_max = 2
    assert [len(log.poll(0)) for _ in range(4)] == [2, 2, 1, 0]
    log.append(0, b"x")
    log.poll_entries_max = 0
    assert list(log.poll(0)) == []


def test_only_create_time_records_keep_their_own_timestamp(cluster, log):
    cluster.produce(T0, b"x", timestamp_ms=5)
    cluster.produce(T0, b"y", timestamp_ms=5, timestamp_type=TimestampType.CREATE_TIME)
    first, second = [entry for _, entry in log.poll(0)]
    assert (first.timestamp_ms, first.timestamp_type) == (EPOCH_MS, 1)
    assert (second.timestamp_ms, second.timestamp_type) == (5, 0)


def test_a_missing_topic_or_partition_raises(cluster):
    with pytest.raises(TopicMisconfigured, match="format"):
        cluster.coordination_log("other")
    with pytest.raises(CoordinationError, match="no partition"):
        cluster.log(TopicPartition(TOPIC, 9))
    assert cluster.coordination_log().append(9, b"").error() is not None


def test_a_topic_created_again_has_another_id(cluster, log):
    assert log.cluster_id == cluster.cluster_id != FakeKafka().cluster_id
    first = log.topic_id
    cluster.delete_topic(TOPIC)
    cluster.create_topic(TOPIC, 2)
    assert cluster.coordination_log().topic_id != first


def test_a_closed_log_refuses_appends_and_polls(log):
    log.close(0)
    log.close(0)
    assert isinstance(log.append(0, b"").error(), InvalidTransition)
    with pytest.raises(InvalidTransition):
        log.poll(0)


def test_unreplicated_records_are_neither_visible_nor_acknowledged(
    cluster, log, clock, script
):
    script.fates = [AppendFate(replicates_ms=50), AppendFate()]
    append = log.append(0, b"1")
    clock.advance(1)
    behind = log.append(0, b"2")
    assert values(log) == []
    assert log.end_offsets(10)[0] == 0
    assert not append.is_done()
    assert not behind.is_done()
    assert cluster.next_change_ms() == 50
    clock.advance(49)
    ((_, first), (_, second)) = log.poll(0)
    assert (first.timestamp_ms, second.timestamp_ms) == (EPOCH_MS, EPOCH_MS + 1)
    assert (append.offset(), behind.offset()) == (0, 1)
    assert cluster.next_change_ms() is None


def test_a_failover_loses_records_not_replicated(cluster, log, clock, script):
    script.fates = [AppendFate(), AppendFate(replicates_ms=50)]
    log.append(0, b"kept")
    lost = log.append(0, b"lost")
    assert cluster.fail_over(T0, leader=1, retry_ms=30) == 1
    assert log.end_offsets(10)[0] == 1
    assert lost.offset() is None
    # The writer retries: the record gets a new offset and leader epoch.
    clock.advance(100)
    assert [(e.value, e.leader_epoch) for _, e in log.poll(0)] == [
        (b"kept", 0),
        (b"lost", 1),
    ]
    assert lost.offset() == 1


def test_a_failover_to_a_complete_replica_loses_no_record(cluster, log, clock, script):
    script.fates = [AppendFate(replicates_ms=50)]
    append = log.append(0, b"1")
    assert cluster.fail_over(T0, leader=1) == 0
    clock.advance(50)
    assert [(e.value, e.leader_epoch) for _, e in log.poll(0)] == [(b"1", 0)]
    assert append.offset() == 0


def test_a_fast_clock_of_a_leader_shifts_its_timestamps(cluster, log, clock):
    cluster.clocks.set_drift(0, 1_000)
    clock.advance(10_000)
    log.append(0, b"x")
    cluster.clocks.set_drift(0, 0)
    clock.advance(10_000)
    log.append(0, b"y")
    assert [entry.timestamp_ms for _, entry in log.poll(0)] == [
        EPOCH_MS + 10_010,
        EPOCH_MS + 20_010,
    ]


def test_added_partitions_count_as_a_change(cluster):
    before = cluster.changes
    cluster.add_partitions(TOPIC, 1)
    assert cluster.changes > before
