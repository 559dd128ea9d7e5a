import pytest
from enginekit import KEY, H, fold, holders, lines, of, owning, world, write

from kafka_marshal.engine import checkpointing
from kafka_marshal.engine.checkpoint_reader import LogCheckpoints
from kafka_marshal.engine.checkpointing import UNDER_WAY_MAX, CheckpointRule
from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.checkpoints import checkpoint_key
from kafka_marshal.protocol.codec import decode, header_of
from kafka_marshal.protocol.records import (
    CHUNK_BYTES_MAX,
    CheckpointBegin,
    CheckpointChunk,
    CheckpointEnd,
    ClaimingPartition,
    Heartbeat,
    Reset,
)
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import GroupState, KeyState
from kafka_marshal.protocol.types import Key
from simulator.fakestore import AppendFate

PLACE = checkpoint_key(0)
SOON = CheckpointRule(interval_ms=2 * H, entries=10_000)
OURS = (CheckpointBegin, CheckpointChunk, CheckpointEnd)


def writing(cluster, name="a", rule=SOON):
    """Start a node that consumes and writes checkpoints as ``w-NAME``."""
    node = owning(cluster, name) if not cluster.nodes else cluster.node(name)
    node.engine.write_checkpoints(f"w-{name}", rule)
    return node


def written(cluster, kind=CheckpointEnd):
    """Return the records of one kind in the log, of all writers."""
    head = header_of(kind)
    values = [each.value for each in cluster.kafka.log(cluster.place(0)).records]
    return [decode(value) for value in values if value.startswith(head)]


def checkpointed(cluster, count=1):
    return lambda: len(written(cluster)) >= count


def find(cluster):
    log = cluster.kafka.coordination_log()
    starts, ends = log.start_offsets(100), log.end_offsets(100)
    wanted = {t: LogRange(starts[t], ends[t]) for t in starts}
    return LogCheckpoints().find(wanted, log=log, timeout_ms=100)


def events(node, name):
    return [event.fields for event in node.observer.events if event.name == name]


def test_a_due_checkpoint_is_written_and_its_key_released():
    cluster = world()
    node = writing(cluster)
    cluster.run(H)
    assert [kind for kind in OURS if written(cluster, kind)] == []
    cluster.run_until(checkpointed(cluster), 3 * H)
    cluster.run(H // 4)
    names = [
        type(line.record).__name__
        for line in lines(cluster)
        if getattr(line.record, "client_id", "") == "w-a"
    ]
    assert names == [
        "ClaimingPartition",
        "Heartbeat",
        "CheckpointBegin",
        "CheckpointChunk",
        "CheckpointEnd",
        "ReleasingPartition",
    ]
    assert fold(cluster).keys[PLACE].owner is None
    assert holders(cluster) == ["a"]
    (reported,) = events(node, "checkpoint_written")
    assert reported["partition"] == 0
    assert events(node, "replica_diverged") == []
    kept = find(cluster)[0]
    assert kept.is_in_log
    assert (kept.offset, kept.source[:11]) == (reported["offset"] + 1, "checkpoint ")
    assert digest(from_bytes(kept.state)) == kept.digest


def test_a_fleet_writes_only_one_checkpoint():
    cluster = world()
    writing(cluster)
    for number in range(9):
        writing(cluster, f"n{number}")
    cluster.run_until(checkpointed(cluster), 3 * H)
    cluster.run(H)
    assert len(written(cluster, CheckpointBegin)) == 1
    claims = [c for c in written(cluster, ClaimingPartition) if c.topic == PLACE.topic]
    assert len(claims) <= 3
    cluster.run_until(checkpointed(cluster, 2), 3 * H)


def test_many_entries_make_a_checkpoint_due():
    cluster = world()
    writing(cluster, rule=CheckpointRule(interval_ms=100 * H, entries=50))
    for _ in range(60):
        write(cluster, b"?")
    cluster.run_until(checkpointed(cluster), 12 * H)


@pytest.mark.parametrize(
    ("keys", "entries"),
    [(0, 50_000), (4_999, 50_000), (5_000, 100_000), (15_000, 200_000)],
)
def test_the_entries_between_checkpoints_grow_with_the_keys(keys, entries):
    assert CheckpointRule().entries_of(keys) == entries
    assert CheckpointRule().entries_of(10**6) == 200_000


def test_without_new_entries_no_checkpoint_is_written():
    cluster = world()
    node = cluster.node("a")
    node.engine.write_checkpoints("w-a", SOON)
    cluster.run_until(lambda: node.engine.is_ready, H)
    node.engine.remove_session(node.session)
    write(cluster, b"?")
    cluster.run_until(checkpointed(cluster), 3 * H)
    cluster.run(5 * H)
    assert len(written(cluster)) == 1


def test_an_idle_partition_gets_a_new_checkpoint_periodically(monkeypatch):
    monkeypatch.setattr(checkpointing, "IDLE_MS", 4 * H)
    cluster = world()
    node = cluster.node("a")
    node.engine.write_checkpoints("w-a", SOON)
    cluster.run_until(lambda: node.engine.is_ready, H)
    node.engine.remove_session(node.session)
    cluster.run_until(checkpointed(cluster, 2), 9 * H)
    cluster.crash(node)
    fresh = cluster.node("b")  # as if its state were after both
    fresh.engine.write_checkpoints("w-b", SOON)
    cluster.run_until(lambda: fresh.engine.is_ready, H)
    fresh.engine.remove_session(fresh.session)
    replica = fresh.engine.context.replicas[0]
    replica.begin(replica.world, cluster.clock.now_ms())
    cluster.run_until(checkpointed(cluster, 3), 3 * H)


def test_a_process_with_checkpoints_disabled_writes_none():
    cluster = world()
    writing(cluster, rule=CheckpointRule(interval_ms=0))
    cluster.run(4 * H)
    assert [kind for kind in OURS if written(cluster, kind)] == []


def crowd(node):
    """Create so many keys that a checkpoint has more chunks than may be in flight."""
    count = (UNDER_WAY_MAX * 5 * CHUNK_BYTES_MAX) // 450
    state = node.engine.context.replicas[0].world
    for number in range(count):
        state.keys[Key("x" * 200, "y" * 200, number)] = KeyState(
            owner=None,
            epoch=number,
            epoch_leader_epoch=0,
            renewed_ms=0,
            heartbeat_interval_ms=0,
            active_ms=0,
        )
    state.groups["x" * 200] = GroupState()
    return state


def test_a_checkpoint_encoded_over_several_rounds_has_one_offset(monkeypatch):
    """Other threads get the lock between rounds; entries folded then are left out."""
    cluster = world(keys=100_000)
    node = writing(cluster)
    cluster.fates["a"] = AppendFate(delay_ms=H // 4)
    state = crowd(node)
    expected, taken, per_round = [], [], []
    plain_parts, plain_drive = checkpointing.parts_of, checkpointing.Checkpointer.drive

    def parts_of(pieces):
        expected.append(to_bytes(state))
        return (taken.append(part) or part for part in plain_parts(pieces))

    def drive(self, now_ms):
        before = len(taken)
        plain_drive(self, now_ms)
        per_round.append(len(taken) - before)

    monkeypatch.setattr(checkpointing, "parts_of", parts_of)
    monkeypatch.setattr(checkpointing.Checkpointer, "drive", drive)
    cluster.run_until(checkpointed(cluster), 12 * H)
    assert max(per_round) <= UNDER_WAY_MAX
    assert len(taken) >= 5 * UNDER_WAY_MAX
    chunks = [record.data for record in written(cluster, CheckpointChunk)]
    assert b"".join(chunks) == expected[0] != to_bytes(state)
    (end,) = written(cluster)
    assert (end.part_count, end.size_bytes) == (len(chunks), len(expected[0]))


def test_chunks_are_sent_a_few_at_a_time_and_the_lease_is_renewed():
    cluster = world(keys=100_000)
    node = writing(cluster)
    cluster.fates["a"] = AppendFate(delay_ms=H // 4)
    crowd(node)
    under_way = []

    def is_done():
        work = node.engine.checkpointer._schedules[0].work
        under_way.append(0 if work is None else len(work.pending))
        return written(cluster)

    cluster.run_until(is_done, 12 * H)
    assert max(under_way) == UNDER_WAY_MAX
    chunks = written(cluster, CheckpointChunk)
    assert [record.number for record in chunks] == list(range(len(chunks)))
    beats = [
        line
        for line in of(cluster, "w-a", Heartbeat)
        if line.transition.effect == "renewed"
    ]
    assert len(beats) > 2
    assert holders(cluster) == ["a"]


def test_a_record_that_is_not_read_back_ends_the_checkpoint():
    cluster = world()
    node = writing(cluster)
    cluster.run_until(lambda: written(cluster, CheckpointBegin), 4 * H)
    cluster.fates["a"] = AppendFate(is_lost=True)
    cluster.run(2 * H)
    cluster.fates.clear()
    assert written(cluster) == []
    cluster.run_until(checkpointed(cluster), 8 * H)
    assert node.engine.failure is None
    assert find(cluster)[0].offset == written(cluster)[-1].begin_offset + 1


def test_another_member_writes_the_checkpoint_after_the_writer_dies():
    cluster = world()
    first = writing(cluster)
    cluster.run_until(lambda: written(cluster, CheckpointBegin), 4 * H)
    second = writing(cluster, "b")
    cluster.run_until(lambda: second.engine.is_ready, H)
    cluster.crash(first)
    cluster.run_until(checkpointed(cluster), 8 * H)
    (end,) = written(cluster)
    assert end.client_id == "w-b"
    assert find(cluster)[0].digest == end.digest.hex()


def test_a_claim_of_the_checkpoint_key_accepted_too_late_is_released():
    cluster = world()
    node = writing(cluster)
    cluster.run(H)
    cluster.fates["a"] = AppendFate(delay_ms=2 * H, fails_after_ms=H)
    works = node.engine.checkpointer
    cluster.run_until(lambda: works._schedules[0].work is not None, 2 * H)
    cluster.run_until(lambda: works._schedules[0].work is None, 2 * H)
    cluster.fates.clear()
    works.rule = CheckpointRule(interval_ms=0)
    cluster.run(3 * H)
    assert fold(cluster).keys[PLACE].owner is None
    assert written(cluster, CheckpointBegin) == []


def test_a_diverged_reader_reports_itself_and_continues():
    cluster = world()
    writer = writing(cluster)
    other = cluster.node("b")
    cluster.run_until(lambda: other.engine.is_ready, H)
    world_of = other.engine.context.replicas[0].world
    world_of.keys[KEY].active_ms -= 1
    world_of.append_time_ms += 10**9
    cluster.run_until(lambda: events(writer, "checkpoint_written"), 4 * H)
    cluster.run(200)
    (reported,) = events(other, "replica_diverged")
    assert reported["ours"] != reported["theirs"]
    assert (reported["partition"], reported["client_id"]) == (0, "w-a")
    assert events(writer, "replica_diverged") == []
    assert other.engine.failure is None


def test_a_reset_ends_all_claims_for_two_intervals():
    cluster = world()
    node = owning(cluster, "a")
    state = fold(cluster)
    value, checksum = to_bytes(state), bytes.fromhex(digest(state))
    write(
        cluster,
        Reset(
            client_id="admin",
            group_id="marshal",
            incarnation=b"i" * 16,
            seq=0,
            op_id=b"o" * 16,
            number=0,
            part_count=1,
            size_bytes=len(value),
            digest=checksum,
            data=value,
        ),
    )
    at_ms = cluster.clock.now_ms()
    cluster.run_until(lambda: events(node, "state_reset"), H)
    assert holders(cluster) == []
    (ended,) = events(node, "claim_ended")
    assert ended["ending"].reason == "fenced"
    cluster.run_until(lambda: node.held, 4 * H)
    assert cluster.clock.now_ms() - at_ms > 2 * H
    assert node.engine.failure is None


def test_a_checkpoint_is_restored_after_retention_deletes_earlier_entries():
    cluster = world()
    writing(cluster)
    cluster.run_until(checkpointed(cluster), 4 * H)
    cluster.run(H // 4)
    kept = find(cluster)[0]
    place = cluster.place(0)
    cluster.kafka.delete_records(place, before=kept.offset - 1)
    assert find(cluster)[0] == kept
    fresh = cluster.node("z")
    fresh.engine.rebuilder.sources = (LogCheckpoints(),)
    cluster.run_until(lambda: fresh.engine.is_ready, H)
    before = cluster.nodes[0].engine.context.replicas[0].world
    assert digest(fresh.engine.context.replicas[0].world) == digest(before)
    cluster.kafka.delete_records(place, before=kept.offset)
    assert find(cluster) == {}


def test_a_checkpoint_is_due_once_retention_leaves_none():
    cluster = world()
    rule = CheckpointRule(interval_ms=40 * H, entries=10_000)
    node = writing(cluster, rule=rule)
    cluster.run(H)
    assert not written(cluster)
    log = cluster.kafka.log(cluster.place(0))
    cluster.kafka.delete_records(cluster.place(0), before=log.end)
    cluster.run_until(checkpointed(cluster), 39 * H)
    found = find(cluster)[0]
    assert found.offset > log.start
    assert node.held
    cluster.run(35_000, step_ms=100)
    assert len(written(cluster)) == 1, "the one that remains is enough"
