import attrs
import msgspec
import pytest
from adminkit import InMemory
from enginekit import KEY, H, fold, follower, owning, spec, world, write
from logkit import claim, messages, release

from kafka_marshal.admin.state_reset import (
    ForgetPlan,
    KeyChange,
    Overriding,
    find_checkpoint,
    plan_forgetting,
    plan_state_reset,
    require_harmless,
    topics_of,
)
from kafka_marshal.engine.checkpoint_reader import LogCheckpoints
from kafka_marshal.engine.checkpointing import CheckpointRule
from kafka_marshal.errors import ClaimRejected, ConfigurationError, LogUnwritable
from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.codec import decode, encode, person_of
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import (
    Reset,
)
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.types import Key, LogEntry

RULE = CheckpointRule(interval_ms=H, entries=10_000)


def checkpointed(cluster, node):
    """Let a node write one checkpoint, and no further ones."""
    node.engine.write_checkpoints("writer", RULE)
    cluster.run_until(lambda: node.observer.named("checkpoint_written"), 4 * H)
    node.engine.checkpointer.rule = CheckpointRule(interval_ms=0)
    cluster.run(100)


class OverridingAdmin(InMemory, Overriding):
    """An admin that overrides states."""


def admin(cluster):
    """Return an admin that has read the log; members do not run while it waits."""
    found = OverridingAdmin(cluster, person="ada")
    found.follower = follower(cluster)
    return found


def find(cluster, checkpoint_id=None, partition=0):
    log = cluster.kafka.coordination_log()
    return find_checkpoint(log, partition, checkpoint_id=checkpoint_id, timeout_ms=100)


def last_record(cluster):
    return decode(cluster.kafka.log(cluster.place(0)).records[-1].value)


def plan_of(cluster):
    replica = follower(cluster).replicas[0]
    return plan_state_reset(replica, find(cluster), now_ms=cluster.clock.now_ms())


def story(records=(10, 5)):
    """Return a cluster whose only member consumed further after a checkpoint."""
    cluster = world(records=records)
    node = cluster.node("a", spec=spec())
    cluster.run_until(lambda: len(node.held) == len(records), 3 * H)
    checkpointed(cluster, node)
    node.consumer.poll(H)
    cluster.run(20)
    return cluster, node


def test_a_plan_names_the_checkpoint_and_the_held_keys():
    cluster, node = story()
    plan = plan_of(cluster)
    assert set(plan.held) == set(node.held)
    assert (plan.changes, plan.repeats_count) == ((), 0)
    assert plan.offset <= plan.next_offset == fold(cluster).next_offset
    assert plan.checkpoint_id == find(cluster).source.split()[1]


@pytest.mark.parametrize(
    ("now", "then", "repeats"),
    [
        pytest.param((5, None), (3, None), True, id="position"),
        pytest.param((5, 5), (5, 3), True, id="granted"),
        pytest.param((3, None), (5, None), False, id="forward"),
        pytest.param((None, None), (5, 5), False, id="back"),
        pytest.param((5, 5), (None, None), True, id="gone"),
    ],
)
def test_a_change_repeats_records_if_a_position_goes_back_or_is_gone(
    now, then, repeats
):
    assert KeyChange(KEY, "moved", *now, *then).repeats == repeats


def changed(cluster):
    """Return a plan with one key moved, one gone, and one that comes back."""
    replica = follower(cluster).replicas[0]
    keys = replica.world.keys
    other = Key("g", "t", 1)
    keys[Key("g", "new", 0)] = keys.pop(other)
    keys[KEY].position = 9
    now_ms = cluster.clock.now_ms() + 5 * H
    return plan_state_reset(replica, find(cluster), now_ms=now_ms)


def test_each_kind_of_change_is_listed():
    cluster, _ = story()
    plan = changed(cluster)
    assert [(c.key.topic, c.key.partition, c.change) for c in plan.changes] == [
        ("new", 0, "gone"),
        ("t", 0, "moved"),
        ("t", 1, "back"),
    ]
    assert plan.held == ()  # all claims are stale by then
    with pytest.raises(ClaimRejected, match="allow_reprocess=True"):
        require_harmless(plan, allow_held=False, allow_reprocess=False)
    require_harmless(plan, allow_held=False, allow_reprocess=True)


def test_a_checkpoint_of_an_earlier_topic_gives_no_position():
    """The next claim names the present topic, and would not use the position."""
    cluster, _ = story()
    replica = follower(cluster).replicas[0]
    known = replica.world.keys[KEY]
    assert known.topic_id is not None
    known.position, known.topic_id = 1, b"made again".ljust(16, b".")
    plan = plan_state_reset(
        replica, find(cluster), now_ms=cluster.clock.now_ms() + 5 * H
    )
    (change,) = plan.changes
    assert (change.position, change.position_then, change.repeats) == (1, None, True)
    with pytest.raises(ClaimRejected, match="allow_reprocess=True"):
        require_harmless(plan, allow_held=False, allow_reprocess=False)


def test_a_reset_of_held_keys_needs_force():
    cluster, _ = story()
    plan = plan_of(cluster)
    with pytest.raises(ClaimRejected, match=r"example t-0 of group 'g': .*--force"):
        require_harmless(plan, allow_held=False, allow_reprocess=True)
    require_harmless(plan, allow_held=True, allow_reprocess=False)


def test_staged_parts_of_another_reset_are_not_restored():
    cluster, _ = story()
    kept = find(cluster)
    state = from_bytes(kept.state)
    part = Reset(
        client_id="other",
        group_id="marshal",
        incarnation=b"i" * 16,
        seq=1,
        op_id=b"o" * 16,
        number=0,
        part_count=2,
        size_bytes=9,
        digest=b"d" * 16,
        data=b"?",
    )
    entry = LogEntry(
        offset=state.next_offset,
        leader_epoch=state.leader_epoch,
        timestamp_ms=0,
        timestamp_type=1,
        value=encode(part),
    )
    (staged,) = apply(state, entry)
    assert staged.effect == "reset_staged"
    state.next_offset = entry.offset
    kept = attrs.evolve(kept, state=to_bytes(state), digest=digest(state))
    admin(cluster)._write_state(kept)
    assert fold(cluster).soft.counters["reset"] == 1
    assert fold(cluster).staging is None


def test_a_reset_is_written_and_read_back():
    cluster, node = story()
    before = fold(cluster)
    kept = find(cluster)
    offset = admin(cluster)._write_state(kept)
    after = fold(cluster)
    assert after.next_offset == offset + 1 > before.next_offset
    assert person_of(last_record(cluster)) == "ada"
    assert {known.owner for known in after.keys.values()} == {None}
    assert after.quiet_until_ms is not None
    cluster.run_until(lambda: len(node.held) == 2, 5 * H)


def test_a_refused_reset_is_an_error():
    cluster, _ = story()
    kept = find(cluster)
    write(cluster, msgspec.structs.replace(cluster.config, generation=2, era=2))
    with pytest.raises(LogUnwritable, match="reset_foreign"):
        admin(cluster)._write_state(kept)


@pytest.mark.parametrize(
    ("checkpoint_id", "partition", "match"),
    [
        pytest.param("ab" * 16, 0, "no complete checkpoint 'abab", id="unknown"),
        pytest.param("ab", 0, "32 hex digits", id="short"),
        pytest.param("no hex" * 5, 0, "32 hex digits", id="no hex"),
        pytest.param(None, 1, "0 to 0, not 1", id="partition"),
    ],
)
def test_an_unknown_checkpoint_is_refused(checkpoint_id, partition, match):
    cluster = world()
    with pytest.raises(ConfigurationError, match=match):
        find(cluster, checkpoint_id, partition)


def test_a_log_without_a_checkpoint_refuses_a_reset():
    match = "--from start --type CheckpointEnd"
    with pytest.raises(ClaimRejected, match=match) as refused:
        find(world())
    assert refused.value.reason == "no_checkpoint"


def test_one_of_several_checkpoints_is_found_by_its_id():
    cluster = world()
    node = owning(cluster)
    kept = []
    for _ in range(2):
        checkpointed(cluster, node)
        node.observer.events.clear()
        kept.append(find(cluster))
    first, second = kept
    assert first.offset < second.offset
    assert find(cluster, first.source.split()[1]) == first
    assert find(cluster) == second
    source = LogCheckpoints(whole_max=None)
    log = cluster.kafka.coordination_log()
    ends = log.end_offsets(1)
    whole = {0: LogRange(0, ends[0])}
    assert source.find(whole, log=log, timeout_ms=1) == {}
    cut = {0: LogRange(1, ends[0])}
    assert source.find(cut, log=log, timeout_ms=1) == {0: second}


# --- forgetting keys


GONE = Key("g", "gone", 0)


def owning_what_is_gone():
    """Return a cluster with a held key, and a released one with granted records."""
    cluster = world()
    node = owning(cluster)
    who = {"key": GONE, "client": "z", "inc": bytes(16)}
    write(cluster, claim(**who, seq=1))
    epoch = fold(cluster).keys[GONE].epoch
    write(cluster, messages(epoch, 0, 9, **who, seq=2))
    write(cluster, release(epoch, **who, seq=3))
    assert fold(cluster).keys[GONE].granted == 10
    return cluster, node, epoch


def plan_for(cluster, found, *, existing=("t",)):
    worlds = [replica.world for replica in found.replicas.values()]
    topics = topics_of(worlds, "g", topic=None)
    return plan_forgetting(
        found.replicas.values(),
        "g",
        topics=topics,
        existing=existing,
        now_ms=cluster.clock.now_ms(),
    )


def test_keys_of_topics_that_are_gone_are_forgotten():
    cluster, node, epoch = owning_what_is_gone()
    one = admin(cluster)
    plan = plan_for(cluster, one.follower)
    assert plan == ForgetPlan(((GONE, epoch),), (KEY,), ("t",))
    assert one._forget(plan, 1) == (GONE,)
    assert fold(cluster).keys.keys() == {KEY}
    assert person_of(last_record(cluster)) == "ada"
    cluster.run(H)
    assert node.held
    assert one._forget(plan, 1) == ()


def test_only_keys_of_topics_that_do_not_exist_are_forgotten():
    cluster, _, epoch = owning_what_is_gone()
    found = follower(cluster)
    assert plan_for(cluster, found, existing=("gone", "t")).keys == ()
    worlds = [replica.world for replica in found.replicas.values()]
    assert topics_of(worlds, "g", topic="gone") == ["gone"]
    assert topics_of(worlds, "h", topic=None) == []
    assert plan_for(cluster, found, existing=()).keys == ((GONE, epoch),)
