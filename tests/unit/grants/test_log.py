"""Grant requests that are appended to the log, and their verdicts."""

import threading
from typing import Any

import attrs
import msgspec
import pytest
from changekit import Change
from enginekit import (
    ALO,
    AMO,
    KEY,
    H,
    claim_of,
    fold,
    lines,
    of,
    owning,
    pause_for,
    values,
    world,
    write,
)
from grantkit import Log, MemoryGrantClient, ref_of
from logkit import ident, messages
from pastlogs import cluster_of

from kafka_marshal.engine.checkpointing import CheckpointRule
from kafka_marshal.errors import (
    CoordinationError,
    DeadlineExceeded,
    LogTruncated,
    LogUnreadable,
    LogUnwritable,
    TopicMisconfigured,
    WrongCluster,
)
from kafka_marshal.grants import ClaimRef
from kafka_marshal.grants.client import PAUSED_MS
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.granting import GrantVerdict
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.types import OffsetRange, TopicPartition
from simulator.fakestore import AppendFate

SOON_MS = 5_000


@pytest.fixture
def cluster():
    return world(records=(20,))


def stopped(cluster):
    """Return an owner that never runs again, so it keeps its claim during a pause."""
    node = owning(cluster)
    node.step = lambda: None
    return node


def lowered(cluster, **limits):
    """Return the next Config, with other limits."""
    before = fold(cluster).config
    changed = msgspec.structs.replace(before.limits, **limits)
    return msgspec.structs.replace(
        before, generation=before.generation + 1, era=before.era + 1, limits=changed
    )


def acquire(client, ref, first, last, timeout_ms=SOON_MS):
    wanted = OffsetRange.through(first, last)
    granted = client.acquire(ref, wanted, timeout_ms=timeout_ms)
    return None if granted is None else (granted.first, granted.last)


# --- verdicts


def test_no_offset_is_granted_twice(cluster):
    ref = ref_of(owning(cluster))
    client, other = MemoryGrantClient(cluster), MemoryGrantClient(cluster, "other")
    assert acquire(client, ref, 0, 9) == (0, 9)
    assert acquire(client, ref, 0, 9) is None
    assert acquire(other, ref, 5, 14) == (10, 14)
    assert fold(cluster).keys[KEY].granted == 15


def test_a_grant_begins_at_the_first_offset_not_granted(cluster):
    ref = ref_of(owning(cluster))
    assert acquire(MemoryGrantClient(cluster), ref, 6, 9) == (0, 9)


def test_each_request_has_its_own_grantee_and_sequence_number(cluster):
    ref = ref_of(owning(cluster))
    client = MemoryGrantClient(cluster)
    for last in (3, 3, 7):
        acquire(client, ref, 0, last)
    asked = [line.record for line in of(cluster, "a", ClaimingMessages)]
    assert len({record.grantee for record in asked}) == 3
    assert len({record.seq for record in asked}) == 3
    assert ref.incarnation not in {record.grantee for record in asked}


def test_a_refusal_has_a_reason(cluster):
    ref = ref_of(owning(cluster))
    client = MemoryGrantClient(cluster)
    acquire(client, ref, 0, 9)
    verdict = client.request(ref, OffsetRange.through(0, 9), timeout_ms=SOON_MS)
    assert (verdict.granted, verdict.reason) == (None, "nothing_left")
    pause_for(cluster, 10 * H)
    assert (
        client.request(ref, OffsetRange.through(10, 12), timeout_ms=SOON_MS).reason
        == "paused"
    )


@pytest.mark.parametrize(("first", "last"), [(5, 4), (-1, 3)])
def test_an_empty_range_is_refused_without_a_request(cluster, first, last):
    ref = ref_of(owning(cluster))
    before = len(lines(cluster))
    client = MemoryGrantClient(cluster)
    assert acquire(client, ref, first, last) is None
    assert (len(lines(cluster)), client.logs) == (before, [])


def test_a_request_is_cut_to_the_span_of_the_config():
    cluster = world(records=(20,), span=4)
    ref = ref_of(owning(cluster))
    client = MemoryGrantClient(cluster)
    assert acquire(client, ref, 0, 19) == (0, 3)
    assert acquire(client, ref, 10, 19) == (4, 7), "from the head, not from its first"


def test_a_cut_request_below_the_head_is_repeated():
    """The client cuts by an old head, so its request lies below the present one."""
    cluster = world(records=(20,), span=4)
    ref = ref_of(owning(cluster))
    client, other = MemoryGrantClient(cluster), MemoryGrantClient(cluster, "other")
    assert acquire(client, ref, 0, 1) == (0, 1)
    for first in (2, 6):
        assert acquire(other, ref, first, first + 3) == (first, first + 3)
    assert acquire(client, ref, 10, 13) == (10, 13)
    assert acquire(client, ref, 2, 13) is None


def test_a_request_wider_than_a_lowered_span_is_cut_again(cluster):
    """The client learns of the lowered limit only from the verdict."""
    ref = ref_of(owning(cluster))
    client = MemoryGrantClient(cluster)
    assert acquire(client, ref, 0, 1) == (0, 1)
    client.before_request = lambda: write(cluster, lowered(cluster, span=4))
    assert acquire(client, ref, 2, 19) == (2, 5)


def test_a_request_waits_for_the_end_of_a_pause(cluster):
    """If the task skipped a refused range, no process would handle its records."""
    ref = ref_of(stopped(cluster))
    client = MemoryGrantClient(cluster)
    assert acquire(client, ref, 0, 1) == (0, 1)
    pause_for(cluster, H // 2)
    assert acquire(client, ref, 2, 9) == (2, 9)


def test_a_pause_beyond_the_deadline_raises(cluster):
    ref = ref_of(stopped(cluster))
    client = MemoryGrantClient(cluster)
    pause_for(cluster, 100 * H)
    with pytest.raises(DeadlineExceeded, match="marshal groups resume"):
        acquire(client, ref, 0, 9)
    assert len(of(cluster, "a", ClaimingMessages)) <= 1 + SOON_MS // PAUSED_MS


def test_an_unexpected_refusal_raises(cluster, monkeypatch):
    ref = ref_of(owning(cluster))
    client = MemoryGrantClient(cluster)
    strange = GrantVerdict(outcome="refused", reason="no_config", head=None, offset=9)
    monkeypatch.setattr(client, "request", lambda *_, **__: strange)
    with pytest.raises(CoordinationError, match="'no_config'"):
        acquire(client, ref, 0, 9)


def test_a_request_under_a_released_claim_is_not_appended(cluster):
    node = owning(cluster)
    ref = ref_of(node)
    client = MemoryGrantClient(cluster)
    assert client.is_current(ref, timeout_ms=SOON_MS)
    node.leave()
    cluster.run_until(lambda: node.has_left, 3 * H)
    assert not client.is_current(ref, timeout_ms=SOON_MS)
    before = len(of(cluster, "a", ClaimingMessages))
    verdict = client.request(ref, OffsetRange.through(0, 9), timeout_ms=SOON_MS)
    assert (verdict.granted, verdict.reason, verdict.offset) == (
        None,
        "not_owner",
        None,
    )
    assert len(of(cluster, "a", ClaimingMessages)) == before


def test_a_request_under_a_claim_taken_over_is_refused(cluster):
    node = owning(cluster)
    ref = ref_of(node)
    client = MemoryGrantClient(cluster)
    assert acquire(client, ref, 0, 3) == (0, 3)
    cluster.crash(node)
    owning(cluster, "b")
    assert acquire(client, ref, 4, 9) is None
    assert not client.is_current(ref, timeout_ms=SOON_MS)


def test_another_incarnation_or_an_old_epoch_is_not_current(cluster):
    node = owning(cluster)
    client = MemoryGrantClient(cluster)
    stranger = ref_of(node, incarnation=b"x" * 16)
    assert not client.is_current(stranger, timeout_ms=SOON_MS)
    assert acquire(client, stranger, 0, 3) is None
    old = ref_of(node, epoch=claim_of(node).epoch - 1)
    verdict = client.request(old, OffsetRange.through(0, 3), timeout_ms=SOON_MS)
    assert (verdict.reason, verdict.offset) == ("old_epoch", None)


# --- late, lost and duplicated requests


def test_a_late_verdict_raises_and_its_range_stays_granted(cluster):
    ref = ref_of(owning(cluster))
    cluster.fates["task"] = AppendFate(delay_ms=1_000)
    with pytest.raises(DeadlineExceeded, match="nothing is processed"):
        acquire(MemoryGrantClient(cluster), ref, 0, 9, timeout_ms=500)
    cluster.run(1_000)
    # The range is granted after all, so it is lost: no process may have it again.
    assert fold(cluster).keys[KEY].granted == 10
    assert acquire(MemoryGrantClient(cluster, "retry"), ref, 0, 9) is None


def test_the_range_of_a_lost_request_is_granted_to_the_retry(cluster):
    ref = ref_of(owning(cluster))
    cluster.fates["task"] = AppendFate(is_lost=True)
    with pytest.raises(DeadlineExceeded):
        acquire(MemoryGrantClient(cluster), ref, 0, 9, timeout_ms=500)
    assert acquire(MemoryGrantClient(cluster, "retry"), ref, 0, 9) == (0, 9)


def test_a_duplicated_request_is_granted_once(cluster):
    ref = ref_of(owning(cluster))
    cluster.fates["task"] = AppendFate(copies=2)
    client = MemoryGrantClient(cluster)
    assert acquire(client, ref, 0, 4) == (0, 4)
    assert acquire(client, ref, 0, 9) == (5, 9)


def test_a_failed_append_is_repeated_with_the_same_grantee(cluster):
    ref = ref_of(owning(cluster))
    fate = AppendFate(is_lost=True, fails_after_ms=50)

    class Once:
        def of_append(self, writer, partition):
            if writer != "task":
                return AppendFate()
            found, self.now = self.now, AppendFate()
            return found

        now = fate

    cluster.kafka.policy = Once()
    assert acquire(MemoryGrantClient(cluster), ref, 0, 9) == (0, 9)


def test_a_permanent_refusal_of_the_log_is_raised_at_once(cluster):
    ref = ref_of(owning(cluster))
    client = MemoryGrantClient(cluster)
    acquire(client, ref, 0, 1)

    class Refused:
        def is_done(self):
            return True

        def error(self):
            return LogUnwritable("no right to write")

    client.logs[0].append = lambda partition, value: Refused()
    with pytest.raises(LogUnwritable):
        acquire(client, ref, 2, 3)


# --- reading the log


def test_only_the_coordinating_partitions_of_the_claims_are_read():
    cluster = world(8, records=(5, 5))
    node = cluster.node("a")
    client = MemoryGrantClient(cluster)
    for number in range(2):
        key = KEY._replace(partition=number)
        node.session.want(key)
        cluster.run_until(lambda key=key: key in node.held, 3 * H)
        acquire(client, ref_of(node, key), 0, 1)
    (log,) = client.logs
    assert log.read == {
        node.engine.context.partition_of(KEY._replace(partition=n)) for n in range(2)
    }
    assert len(log.read) == 2
    assert log.h_ms == H


@pytest.mark.parametrize("added", [1, 3])
def test_added_partitions_of_the_topic_do_not_affect_grants(added):
    cluster = world(2, records=(20,))
    ref = ref_of(owning(cluster))
    cluster.kafka.add_partitions("__marshal", added)
    assert acquire(MemoryGrantClient(cluster), ref, 0, 9) == (0, 9)


def test_a_log_without_its_start_raises(cluster):
    ref = ref_of(owning(cluster))
    cluster.kafka.delete_records(cluster.place(0), before=1)
    with pytest.raises(LogUnreadable, match="begins above offset 0"):
        acquire(MemoryGrantClient(cluster), ref, 0, 9)


def checkpointed(cluster, node):
    """Wait for a checkpoint of each coordinating partition."""
    node.engine.write_checkpoints("w", CheckpointRule(interval_ms=H, entries=10_000))
    count = len(node.engine.context.replicas)
    events = node.observer.named
    cluster.run_until(lambda: len(events("checkpoint_written")) >= count, 6 * H)


@pytest.mark.parametrize("number", [0, 1])
def test_a_log_without_its_start_is_read_from_a_checkpoint(number):
    cluster = world(2, records=(20, 20))
    node = cluster.node("a")
    keys = [KEY._replace(partition=n) for n in range(2)]
    for key in keys:
        node.session.want(key)
    cluster.run_until(lambda: len(node.held) == 2, 3 * H)
    checkpointed(cluster, node)
    for t in range(2):
        cluster.kafka.delete_records(cluster.place(t), before=2)
    client = MemoryGrantClient(cluster)
    one, other = keys[number], keys[1 - number]
    for key, first in ((one, 0), (other, 0), (one, 5)):
        last = first + 4
        assert acquire(client, ref_of(node, key), first, last) == (first, last)
    began = client._follower.began_at
    assert began.keys() == {node.engine.context.partition_of(key) for key in keys}
    assert min(began.values()) > 2


def test_an_unformatted_topic_raises(cluster):
    ref = ref_of(owning(cluster))
    cluster.kafka.create_topic("bare", 1, is_log_append_time=True)
    client = MemoryGrantClient(cluster)
    client._open_log = lambda only, timeout_ms: Bare(cluster, only)
    with pytest.raises(TopicMisconfigured, match="marshal topic format"):
        acquire(client, ref, 0, 9)


class Bare(Log):
    def __init__(self, cluster, only):
        super().__init__(cluster, "task", only)
        self._log = cluster.kafka.coordination_log("bare")


def test_a_log_of_another_cluster_raises(cluster):
    ref = ref_of(owning(cluster))
    client = MemoryGrantClient(cluster)
    acquire(client, ref, 0, 1)
    client.logs[0].cluster_id = "elsewhere"
    with pytest.raises(WrongCluster):
        acquire(client, ref, 2, 3)


def test_a_truncated_log_raises_and_is_opened_again(cluster):
    ref = ref_of(owning(cluster))
    client = MemoryGrantClient(cluster)
    assert acquire(client, ref, 0, 3) == (0, 3)
    end = cluster.kafka.range(cluster.place(0)).end
    cluster.nodes.clear()
    cluster.kafka.truncate(cluster.place(0), end=end - 1, leader=1)
    with pytest.raises(LogTruncated):
        acquire(client, ref, 4, 9)
    assert client.logs[0].is_closed
    # The request (4 to 9) was written and granted, but its verdict was lost.
    assert acquire(client, ref, 4, 12) == (10, 12)
    assert len(client.logs) == 2


# --- the owner beside its tasks


def test_the_owner_never_hands_out_offsets_granted_to_a_task(cluster):
    node = owning(cluster, delivery=AMO, most=3, batches=1)
    client, ref = MemoryGrantClient(cluster), ref_of(node)
    first = values(node.consumer.poll(0))
    cluster.run(40)
    seen = first.get(0, []) or values(node.consumer.poll(0))[0]
    granted = acquire(client, ref, 0, 9)
    for _ in range(50):
        seen += values(node.consumer.poll(0)).get(0, [])
        cluster.run(20)
    theirs = set(range(granted[0], granted[1] + 1))
    assert len(seen) == len(set(seen))
    assert not theirs & set(seen)
    assert theirs | set(seen) == set(range(20))
    assert not node.observer.named("claim_ended")


def test_a_task_request_does_not_complete_a_heartbeat_of_equal_seq(cluster):
    node = owning(cluster)
    session = node.session
    cluster.fates["a"] = AppendFate(delay_ms=300)
    (seq,) = session.beat_now()
    ref = ref_of(node)
    record = ClaimingMessages(
        client_id=ref.client_id,
        group_id=ref.group_id,
        incarnation=ref.incarnation,
        seq=seq,
        topic=ref.topic,
        partition=ref.partition,
        epoch=ref.epoch,
        grantee=b"g" * 16,
        first=0,
        proposed_last_offset=3,
    )
    write(cluster, encode(record))
    cluster.run(100)
    assert session.is_pending([seq])
    cluster.run(300)
    assert not session.is_pending([seq])


def test_an_at_least_once_owner_keeps_its_claim_after_a_grant(cluster):
    node = owning(cluster, delivery=ALO)
    assert acquire(MemoryGrantClient(cluster), ref_of(node), 0, 9) == (0, 9)
    cluster.run(3 * H)
    assert KEY in node.held
    assert fold(cluster).keys[KEY].granted == 10


# --- grant clients of a process


def test_a_thread_waits_for_another_one_until_its_deadline(cluster):
    ref = ref_of(owning(cluster))
    client = MemoryGrantClient(cluster)
    entered, done = threading.Event(), threading.Event()

    def occupy():
        with client._locked(SOON_MS):
            entered.set()
            done.wait(timeout=30)

    thread = threading.Thread(target=occupy)
    thread.start()
    try:
        assert entered.wait(timeout=30)
        with pytest.raises(DeadlineExceeded, match="another thread"):
            acquire(client, ref, 0, 9, timeout_ms=10)
    finally:
        done.set()
        thread.join(timeout=30)
    assert acquire(client, ref, 0, 9) == (0, 9)


# --- while the partition count changes (PROTOCOL 10)

DIRECTIONS = [pytest.param(2, 4, id="growing"), pytest.param(4, 2, id="shrinking")]


class Moving:
    """A change of the partition count with a key that moves, and a task's claim of it.

    One client is used throughout; ``write`` copies new entries of the change to Kafka.
    """

    def __init__(self, before, after):
        self.change = Change(before, after, cluster_id="simulated")
        (self.key,) = self.change.moving()
        (self.epoch,) = self.change.claimed(self.key)
        self.kafka = cluster_of(*self.change.logs)
        self.clock: Any = self.kafka.clock
        self.client = MemoryGrantClient(self)
        self.written = [len(log.entries) for log in self.change.logs]

    def run(self, ms):
        self.clock.advance(ms)

    def write(self):
        for t, log in enumerate(self.change.logs):
            for entry in log.entries[self.written[t] :]:
                place = TopicPartition("__marshal", t)
                self.kafka.produce(place, entry.value)
            self.written[t] = len(log.entries)

    def ref(self, log, client="c1"):
        known = log.key(self.key)
        return ClaimRef(
            **self.key._asdict(),
            client_id=client,
            incarnation=ident(client),
            epoch=known.epoch,
            token=str(log.state.token(self.key)),
            secret="",
        )


@pytest.mark.parametrize(("before", "after"), DIRECTIONS)
def test_a_claim_ends_when_its_key_moves_to_another_partition(before, after):
    moving = Moving(before, after)
    change, client, key = moving.change, moving.client, moving.key
    ref = moving.ref(change.place(key))
    assert acquire(client, ref, 0, 4) == (0, 4)
    assert client.is_current(ref, timeout_ms=SOON_MS)
    change.place(key).append(messages(moving.epoch, 0, 4, key=key))
    moving.written[change.place(key).state.partition] += 1  # the task has written it
    change.fence()
    moving.write()
    assert acquire(client, ref, 5, 9) is None
    change.place(key).append(b"the request above")
    moving.written[change.place(key).state.partition] += 1
    change.released(key, position=5)
    change.imported(key)
    moving.write()
    found = client.newest(key, timeout_ms=SOON_MS)
    assert (found.epoch, found.owner) == (0, None)
    assert not client.is_current(ref, timeout_ms=SOON_MS)
    assert acquire(client, ref, 5, 9) is None
    change.reclaimed(key, client="c1")
    moving.write()
    later = moving.ref(change.target(key))
    assert acquire(client, later, 5, 9) == (5, 9)
    assert client.is_current(later, timeout_ms=SOON_MS)
    assert not client.is_current(ref, timeout_ms=SOON_MS)
    assert acquire(client, ref, 10, 14) is None


@pytest.mark.parametrize(("before", "after"), DIRECTIONS)
def test_an_equal_epoch_in_another_partition_is_another_claim(before, after):
    moving = Moving(before, after)
    change, key = moving.change, moving.key
    old = moving.ref(change.place(key))
    change.fence()
    change.released(key, position=5)
    change.imported(key)
    change.done()
    change.final()
    target = change.target(key)
    while target.state.next_offset <= old.epoch:
        target.append(b"")
    change.reclaimed(key, client="c1")
    moving.write()
    new = moving.ref(target)
    # As if one process had claimed the key at the same offset of both partitions.
    old = attrs.evolve(old, epoch=new.epoch)
    assert acquire(moving.client, old, 5, 9) is None
    assert not moving.client.is_current(old, timeout_ms=SOON_MS)
    assert acquire(moving.client, new, 5, 9) == (5, 9)


def test_a_never_claimed_key_has_no_newest_claim():
    moving = Moving(2, 4)
    other = moving.key._replace(group_id="nobody")
    assert moving.client.newest(other, timeout_ms=SOON_MS) is None


def test_a_client_follows_a_key_to_a_partition_added_later():
    moving = Moving(2, 4)
    change, key = moving.change, moving.key
    logs, change.logs = change.logs, change.logs[:2]
    moving.kafka = cluster_of(*change.logs)
    moving.clock = moving.kafka.clock
    moving.client = MemoryGrantClient(moving)
    assert moving.client.newest(key, timeout_ms=SOON_MS).owner is not None
    change.logs = logs
    moving.kafka.add_partitions("__marshal", 2)
    change.fence()
    change.released(key, position=5)
    change.imported(key)
    change.reclaimed(key)
    moving.written = [*moving.written[:2], 0, 0]
    moving.write()
    assert moving.client.newest(key, timeout_ms=SOON_MS).owner.client_id == "c2"
    assert len(moving.client.logs) == 2
