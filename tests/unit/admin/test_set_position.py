"""An admin executes a set position: all positions of its plan are set, or none."""

from contextlib import suppress

import msgspec
import pytest
from enginekit import H, fold, held_by, owning, spec, world, write
from logkit import schedule
from positionkit import (
    FOR_MS,
    HOME,
    KEYS,
    NEW,
    OLD,
    OP,
    TIMEOUT_MS,
    Died,
    K,
    Stepping,
    following,
    is_paused,
    key,
    locks,
    operation,
    place_of,
    plan,
    positions,
    run_plan,
    set_all,
    write_key,
    written,
)

from kafka_marshal.admin.pausing import PauseOperation, Period, Sender
from kafka_marshal.admin.set_position import (
    STAGE_BYTES_MAX,
    NotDrained,
    PositionPlan,
    SetPosition,
    Target,
    parts,
    plan_undo,
)
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    DeadlineExceeded,
    GroupPaused,
)
from kafka_marshal.protocol.codec import decode, encode, undone_of
from kafka_marshal.protocol.records import (
    DecidePosition,
    ResolvePosition,
    StagePosition,
)
from kafka_marshal.protocol.resolving import ABORTED, COMMITTED, UNDECIDED
from simulator.fakestore import AppendFate


@pytest.fixture(name="cluster")
def _cluster():
    return written()


def records(cluster):
    for t in range(K):
        for stored in cluster.kafka.log(cluster.place(t)).records:
            value = stored.entry().value
            if value is not None:
                yield decode(value)


# --- plans


def test_a_plan_is_read_back_from_its_bytes():
    one = plan(topic_id="ab" * 16)
    again = PositionPlan.from_bytes(one.to_bytes())
    assert (again, again.digest) == (one, one.digest)


def test_the_digest_covers_every_position_in_any_order():
    one = plan()
    turned = PositionPlan(op_id=OP, group_id="g", targets=one.targets[::-1])
    assert turned.digest == one.digest
    digests = {
        each.digest for each in (one, plan(3), plan(count=2), plan(topic_id="ab" * 16))
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"{", "not a plan"),
        (b'{"op_id":"xx","group_id":"g","targets":[]}', "not a plan|no position"),
        (plan().to_bytes().replace(b'"version":1', b'"version":9'), "version 9"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(value, text):
    with pytest.raises(ConfigurationError, match=text):
        PositionPlan.from_bytes(value)


def test_a_plan_names_each_partition_once():
    target = plan().targets[0]
    with pytest.raises(ConfigurationError, match="two positions"):
        PositionPlan(op_id=OP, group_id="g", targets=(target, target))
    with pytest.raises(ConfigurationError, match="no position"):
        PositionPlan(op_id=OP, group_id="g", targets=())


def test_positions_are_split_into_records_that_fit():
    targets = [
        Target(topic=f"{'t' * 200}-{n // 2}", topic_id=None, partition=n, position=n)
        for n in range(1_000)
    ]
    split = list(parts(targets))
    assert len(split) > 1
    assert sum(len(t.positions) for part in split for t in part) == len(targets)
    for part in split:
        record = StagePosition(
            **Sender("admin").fields("g"),
            op_id=bytes(16),
            plan_digest=bytes(16),
            topics=part,
        )
        assert len(encode(record)) < STAGE_BYTES_MAX + 1_000


def test_a_set_position_below_level_2_is_refused(cluster):
    config = msgspec.structs.replace(cluster.config, feature_level=1)
    with pytest.raises(ConfigurationError, match="marshal topic upgrade"):
        operation(cluster, config=config)


# --- commits


def test_all_positions_are_set(cluster):
    one = operation(cluster)
    result = one.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    assert result.outcome == COMMITTED
    assert result.moved == {key(p).topic_partition: (OLD, NEW) for p in range(KEYS)}
    assert positions(cluster) == [NEW] * KEYS
    assert (locks(cluster), is_paused(cluster)) == ([], False)
    assert not fold(cluster, HOME).groups["g"].unresolved


def test_a_consuming_group_resumes_from_the_new_positions():
    cluster = world(records=(20,))
    node = owning(cluster, most=100)
    assert [r.offset for rs in node.consumer.poll(0).values() for r in rs]
    one = SetPosition(
        follower := Stepping(cluster, "admin"),
        cluster.clock.view(),
        Sender("admin"),
        plan=plan(position=5, count=1),
        config=cluster.config,
        for_ms=FOR_MS,
    )
    follower.catch_up(100)
    cluster.on_step = lambda: node.consumer.poll(0)
    result = one.run(TIMEOUT_MS, drain_ms=10 * H)
    assert result.outcome == COMMITTED
    cluster.run_until(lambda: key(0) in node.held, 6 * H)
    assert node.session.holdings[key(0)].position == 5


def test_keys_that_the_log_does_not_know_are_created():
    cluster = world(partitions=K, records=(20,) * KEYS)
    result = operation(cluster).run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    assert result.moved == {key(p).topic_partition: (None, NEW) for p in range(KEYS)}
    assert positions(cluster) == [NEW] * KEYS


def test_an_operation_that_has_ended_writes_nothing(cluster):
    first = operation(cluster).run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    ends = [fold(cluster, t).next_offset for t in range(K)]
    again = operation(cluster, "again").run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    assert (again.outcome, again.moved) == (COMMITTED, first.moved)
    assert [fold(cluster, t).next_offset for t in range(K)] == ends


def test_steps_are_reported(cluster):
    steps = []
    one = operation(cluster, on_progress=steps.append)
    one.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    names = [each.step for each in steps]
    assert names == ["pause", "drain", "lock", "commit", "resolve", "resolve"]
    assert (steps[0].left_count, steps[1].left_count) == (K, 0)


# --- conditions


def test_an_at_most_once_group_goes_back_only_if_that_is_allowed():
    cluster = written(granted_to=OLD)
    one = operation(cluster)
    with pytest.raises(ClaimRejected, match="allow_reprocess=True") as raised:
        one.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    assert (raised.value.reason, one.outcome) == ("reprocess", UNDECIDED)
    assert not is_paused(cluster)
    assert positions(cluster) == [OLD + 1] * KEYS
    allowed = msgspec.structs.replace(plan(), allows_reprocess=True)
    two = operation(cluster, "two", wanted=allowed)
    assert two.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS).outcome == COMMITTED
    keys = [fold(cluster, place_of(p)).keys[key(p)] for p in range(KEYS)]
    assert {(k.position, k.granted) for k in keys} == {(NEW, NEW)}


def test_records_of_a_topic_created_again_are_not_granted_again():
    cluster = written(granted_to=OLD)
    one = operation(cluster, wanted=plan(OLD + 1, topic_id="ab" * 16))
    assert one.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS).outcome == COMMITTED
    newer = plan(op="1f" * 16, topic_id="cd" * 16)
    other = operation(cluster, "two", wanted=newer)
    assert other.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS).outcome == COMMITTED
    keys = [fold(cluster, place_of(p)).keys[key(p)] for p in range(KEYS)]
    assert {(k.position, k.granted) for k in keys} == {(NEW, None)}


def test_an_at_most_once_group_may_always_go_forward():
    cluster = written(granted_to=OLD)
    one = operation(cluster, wanted=plan(OLD + 1))
    assert one.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS).outcome == COMMITTED


def test_a_grant_beyond_the_new_position_before_the_pause_aborts():
    """What would be processed again is checked once more after the drain."""
    cluster = written(granted_to=OLD)
    one = operation(cluster, wanted=plan(OLD + 5))
    begin = one._pause.begin

    def granted_meanwhile(timeout_ms):
        write_key(cluster, 0, granted_to=OLD + 9)
        begin(timeout_ms)

    one._pause.begin = granted_meanwhile
    with pytest.raises(ClaimRejected, match="up to offset 19"):
        one.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    assert one.outcome == ABORTED
    assert positions(cluster) == [OLD + 10] + [OLD + 1] * (KEYS - 1)
    assert (locks(cluster), is_paused(cluster)) == ([], False)


def test_a_set_position_aborts_if_an_owner_does_not_release_in_time():
    cluster = written(first=1)
    node = cluster.node("stuck", spec=spec())
    cluster.run_until(held_by(node, KEYS), 3 * H)
    cluster.crash(node)
    one = operation(cluster)
    with pytest.raises(NotDrained, match="still owns partitions"):
        one.run(TIMEOUT_MS, drain_ms=H // 2)
    assert one.outcome == ABORTED


def test_positions_for_another_topic_id_replace_no_earlier_position(cluster):
    one = operation(cluster, wanted=plan(topic_id="ab" * 16))
    # The keys have no topic id in the log: the first commit sets it.
    assert one.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS).outcome == COMMITTED
    other = operation(cluster, "two", wanted=plan(7, op="1f" * 16, topic_id="cd" * 16))
    result = other.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    # The admin first claims the keys for the newer topic, as a consumer would.
    assert result.moved == {key(p).topic_partition: (None, 7) for p in range(KEYS)}


def test_a_set_position_is_refused_while_another_pause_is_active(cluster):
    follower = following(cluster, "other")
    pause = PauseOperation(
        follower,
        cluster.clock.view(),
        Sender("other"),
        group_id="g",
        partition_count=K,
        period=Period(for_ms=10 * H),
    )
    pause.begin(TIMEOUT_MS)
    with pytest.raises(GroupPaused, match="'other'"):
        operation(cluster).run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    assert positions(cluster) == [OLD] * KEYS
    assert fold(cluster, HOME).active_pause("g").op_id == pause.op_id


def test_a_set_position_under_different_configs_is_refused(cluster):
    """PROTOCOL 8.4: a change of the count may have moved the home in between."""
    other = next(t for t in range(K) if t not in {HOME, 0})
    later = msgspec.structs.replace(cluster.config, generation=2, era=2)
    cluster.kafka.produce(cluster.place(other), encode(later))
    with pytest.raises(ClaimRejected, match=f"partition {other} has another") as raised:
        operation(cluster).run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    assert raised.value.reason == "wrong_generation"
    assert positions(cluster) == [OLD] * KEYS
    assert locks(cluster) == []


def test_an_unresolved_operation_prevents_another(cluster):
    one = operation(cluster)
    one._resolution._resolve = lambda *_, **__: (_ for _ in ()).throw(Died)
    with pytest.raises(Died):
        one.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    cluster.run(2 * FOR_MS)
    two = operation(cluster, "two", wanted=plan(7, op="1f" * 16))
    with pytest.raises(ClaimRejected, match="not resolved") as raised:
        two.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    assert raised.value.reason == "busy"
    assert operation(cluster, "three").finish(TIMEOUT_MS).outcome == COMMITTED
    assert positions(cluster) == [NEW] * KEYS
    assert two.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS).outcome == COMMITTED
    assert positions(cluster) == [7] * KEYS


# --- an admin that dies


STEPS = 20


def killed(cluster, left):
    """Run an operation until it has appended ``left`` records; return if it ended."""
    one = operation(cluster)
    one._follower.left = left
    try:
        one.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    except Died:
        return False
    return True


@pytest.mark.parametrize("after_ms", [0, 3 * FOR_MS], ids=["at once", "later"])
@pytest.mark.parametrize("goes_on", [True, False], ids=["continued", "finished"])
@pytest.mark.parametrize("left", range(STEPS))
def test_an_admin_killed_at_any_step_leaves_all_positions_set_or_none(
    cluster, left, goes_on, after_ms
):
    ended = killed(cluster, left)
    cluster.run(20 + after_ms)
    two = operation(cluster, "two")
    if goes_on:
        with suppress(ClaimRejected):  # it gives up if its pause has ended
            two.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
        outcome = two.outcome
    else:
        outcome = two.finish(TIMEOUT_MS).outcome
    assert outcome == COMMITTED if ended else outcome in {COMMITTED, ABORTED}
    expected = NEW if outcome == COMMITTED else OLD
    assert positions(cluster) == [expected] * KEYS
    assert locks(cluster) == []
    assert not fold(cluster, HOME).groups["g"].unresolved


def test_the_steps_at_which_an_admin_is_killed_cover_every_record(cluster):
    """The test above kills the admin before, between and after all its records."""
    one = operation(cluster)
    sent = []
    plain = one._follower.append
    one._follower.append = lambda t, r: sent.append((t, type(r))) or plain(t, r)
    one.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    assert len(sent) < STEPS
    kinds = [kind for _, kind in sent]
    assert kinds.index(DecidePosition) > kinds.index(StagePosition)
    assert sent[-1] == (HOME, ResolvePosition)
    (decided,) = [t for t, kind in sent if kind is DecidePosition]
    assert decided == HOME


def test_a_decide_that_lands_after_the_abort_sets_nothing(cluster):
    one = operation(cluster)
    cluster.fates["admin"] = AppendFate()
    plain = one._follower.append

    def append(t, record):
        if isinstance(record, DecidePosition):
            cluster.fates["admin"] = AppendFate(delay_ms=5 * FOR_MS)
        return plain(t, record)

    one._follower.append = append
    with pytest.raises((DeadlineExceeded, ClaimRejected)):
        one.run(H, drain_ms=TIMEOUT_MS)
    cluster.fates.pop("admin")
    assert one.outcome in {UNDECIDED, ABORTED}
    outcome = operation(cluster, "two").finish(TIMEOUT_MS).outcome
    cluster.run(6 * FOR_MS)
    assert outcome == ABORTED
    assert positions(cluster) == [OLD] * KEYS
    assert (locks(cluster), is_paused(cluster)) == ([], False)


def test_a_stage_that_lands_after_the_abort_is_refused(cluster):
    one = operation(cluster)
    operation(cluster, "two").finish(TIMEOUT_MS)
    record = one._stage_record(next(parts(one._targets[place_of(0)])))
    sent = one._follower.append(place_of(0), record)
    one._follower.await_all([sent], TIMEOUT_MS)
    assert sent.transition.reason == "op_over"
    assert locks(cluster) == []


# --- undo

UNDO, REDO = "2f" * 16, "3f" * 16


def undo_plan(cluster, *, op=OP, new_op=UNDO, **changes):
    worlds = [fold(cluster, t) for t in range(K)]
    return plan_undo(worlds, group_id="g", op_id=op, new_op_id=new_op, **changes)


def test_an_undo_restores_the_positions_and_can_be_undone():
    cluster = written()
    before = positions(cluster)
    set_all(cluster)
    wanted = undo_plan(cluster)
    assert (wanted.undoes, wanted.left_out) == (OP, ())
    assert PositionPlan.from_bytes(wanted.to_bytes()) == wanted
    assert run_plan(cluster, wanted).outcome == COMMITTED
    assert positions(cluster) == before
    marked = {
        (type(record).__name__, record.op_id.hex(), undone.hex())
        for record in records(cluster)
        if (undone := undone_of(record))
    }
    assert marked == {(name, UNDO, OP) for name in ("StagePosition", "DecidePosition")}
    run_plan(cluster, undo_plan(cluster, op=UNDO, new_op=REDO), "redoing")
    assert positions(cluster) == [NEW] * KEYS


def test_an_undo_of_an_at_most_once_group_restores_the_granted_end():
    cluster = written(granted_to=OLD)
    allowed = msgspec.structs.replace(plan(), allows_reprocess=True)
    run_plan(cluster, allowed, "admin")
    assert {t.position for t in undo_plan(cluster).targets} == {OLD + 1}
    run_plan(cluster, undo_plan(cluster))
    assert positions(cluster) == [OLD + 1] * KEYS


def test_an_undo_lists_and_leaves_out_keys_without_an_earlier_position(cluster):
    fresh = written(first=1)
    set_all(fresh)
    wanted = undo_plan(fresh)
    assert wanted.left_out == (("t", 0),)
    assert [each.partition for each in wanted.targets] == list(range(1, KEYS))
    run_plan(fresh, wanted)
    assert positions(fresh) == [NEW] + [OLD] * (KEYS - 1)


def test_an_undo_of_an_unknown_operation_is_refused(cluster):
    with pytest.raises(ClaimRejected, match="not committed") as raised:
        undo_plan(cluster)
    assert raised.value.reason == "unknown_operation"


def test_an_undo_needs_every_key_of_the_operation(cluster):
    set_all(cluster)
    follower = following(cluster, "admin-2")
    worlds = follower.worlds
    del worlds[place_of(0)].keys[key(0)]
    names = {"group_id": "g", "op_id": OP, "new_op_id": UNDO}
    with pytest.raises(ClaimRejected, match="6 partitions, and 5 of them") as raised:
        plan_undo(worlds, **names)
    assert raised.value.reason == "partial"
    assert len(plan_undo(worlds, **names, is_partial=True).targets) == KEYS - 1


def test_an_undo_after_a_later_operation_on_some_keys_must_be_partial(cluster):
    """The log no longer shows how many keys the first operation had."""
    set_all(cluster)
    set_all(cluster, 7, op="1f" * 16, count=1)
    with pytest.raises(ClaimRejected, match=r"^5 partitions .* set t-0; ") as raised:
        undo_plan(cluster)
    assert raised.value.reason == "partial"
    wanted = undo_plan(cluster, is_partial=True)
    assert [each.partition for each in wanted.targets] == [1, 2, 3, 4, 5]
    set_all(cluster, 8, op="2f" * 16, count=KEYS)
    with pytest.raises(ClaimRejected, match="set its partitions"):
        undo_plan(cluster)


def test_a_refused_undo_names_the_keys_that_a_later_operation_has_set(cluster):
    set_all(cluster)
    set_all(cluster, 7, op="1f" * 16, count=KEYS - 1)
    with pytest.raises(ClaimRejected, match="set t-0, t-1, t-2, t-3, t-4; "):
        undo_plan(cluster)


def test_an_undo_is_refused_if_a_key_has_changed_since_its_plan(cluster):
    set_all(cluster)
    wanted = undo_plan(cluster)
    set_all(cluster, 7, op="1f" * 16, count=1)
    with pytest.raises(ClaimRejected, match="has changed") as raised:
        run_plan(cluster, wanted)
    assert raised.value.reason == "changed"
    assert positions(cluster) == [7] + [NEW] * (KEYS - 1)


def test_an_undo_does_not_create_keys_that_are_gone(cluster):
    set_all(cluster)
    one = operation(cluster, "undoing", wanted=undo_plan(cluster))
    keys = one._world(place_of(0)).keys
    kept = keys.pop(key(0))
    one._create_keys(TIMEOUT_MS)
    assert key(0) not in keys
    keys[key(0)] = kept


# --- beside pauses with a scope (PROTOCOL 4.15)


def pause_topic(cluster, numbers):
    """Pause partitions of the topic for longer than an operation takes."""
    until_ms = cluster.clock.wall_ms() + 100 * H
    record = schedule(0, until_ms, op=b"s" * 16, scope={"t": numbers})
    for t in range(K):
        write(cluster, record, t)
    return until_ms


def owners(cluster):
    """Return the partitions with an owner."""
    keys = {p: fold(cluster, place_of(p)).keys[key(p)] for p in range(KEYS)}
    return {p for p, known in keys.items() if known.owner is not None}


def test_partitions_that_are_already_paused_are_set_without_a_wait(cluster):
    node = cluster.node("a", spec=spec())
    cluster.run_until(lambda: len(node.held) == KEYS, 4 * H)
    pause_topic(cluster, (0, 1))
    rest = set(range(2, KEYS))
    cluster.run_until(lambda: owners(cluster) == rest, 4 * H)
    seen = []
    one = operation(cluster, on_progress=seen.append)
    assert one.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS).outcome == COMMITTED
    assert positions(cluster) == [NEW] * KEYS
    drain = [each.left_count for each in seen if each.step == "drain"]
    assert drain[-1] == 0
    assert max(drain) <= len(rest)
    cluster.run_until(lambda: owners(cluster) == rest, 4 * H)
    # The other pause is still active: no member claims its partitions.
    cluster.run(4 * H)
    assert owners(cluster) == rest


def test_the_error_of_a_paused_partition_without_a_key_names_the_pause():
    cluster = written(first=1)
    until_ms = pause_topic(cluster, (0,))
    with pytest.raises(GroupPaused, match=r"t-0 .*73737373") as raised:
        operation(cluster).run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    assert (raised.value.until_ms, raised.value.by) == (until_ms, "admin")
    assert (is_paused(cluster), locks(cluster)) == (False, [])
    # Partitions that have keys can be set.
    rest = PositionPlan(op_id=OP, group_id="g", targets=plan().targets[1:])
    assert run_plan(cluster, rest, "other").outcome == COMMITTED
