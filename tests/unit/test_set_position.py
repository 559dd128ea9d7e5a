"""A set position as an admin executes it: all of a plan, or nothing of it."""

from contextlib import suppress

import pytest
from enginekit import H, fold, owning, world

from kafka_marshal.engine.follower import Follower
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    DeadlineExceeded,
    GroupPaused,
)
from kafka_marshal.pausing import PauseOperation, Sender
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.hashing import coordinating_partition, home_partition
from kafka_marshal.protocol.records import (
    ClaimingPartition,
    DecidePosition,
    ReleasingPartition,
    ResolvePosition,
    StagePosition,
)
from kafka_marshal.protocol.types import Key
from kafka_marshal.set_position import (
    ABORTED,
    COMMITTED,
    STAGE_BYTES_MAX,
    UNDECIDED,
    PositionPlan,
    SetPosition,
    Target,
    parts,
)
from kafka_marshal.testing.fakestore import AppendFate

K = 4
KEYS = 6
HOME = home_partition("g", partition_count=K)
TIMEOUT_MS = 30_000
FOR_MS = 2 * H
OP = "0f" * 16
OLD, NEW = 9, 2


class Died(Exception):
    """The admin was killed."""


class Stepping(Follower):
    """Lets the world go on where production code would wait for the log."""

    def __init__(self, cluster, name):
        self.cluster = cluster
        self.own_log = cluster.kafka.coordination_log(name=name)
        self.left = None
        super().__init__(self.own_log, cluster.clock.view())

    def step(self, timeout_ms, **rest):
        if timeout_ms:
            self.cluster.run(20)
        return super().step(0, **rest)

    def append(self, partition, record):
        if self.left is not None:
            if self.left == 0:
                raise Died
            self.left -= 1
        return super().append(partition, record)


def plan(position=NEW, *, op=OP, count=KEYS, topic_id=None):
    targets = tuple(
        Target(topic="t", topic_id=topic_id, partition=p, position=position)
        for p in range(count)
    )
    return PositionPlan(op_id=op, group_id="g", targets=targets)


def operation(cluster, name="admin", *, wanted=None, **changes):
    follower = Stepping(cluster, name)
    follower.catch_up(100)
    return SetPosition(
        follower,
        cluster.clock.view(),
        Sender(name),
        plan=wanted or plan(),
        config=changes.pop("config", cluster.config),
        for_ms=FOR_MS,
        **changes,
    )


def key(partition):
    return Key("g", "t", partition)


def place_of(partition):
    return coordinating_partition("t", partition, partition_count=K)


def write_key(cluster, partition, *, client="old", granted=False):
    """Let a client claim a key, and release it at position ``OLD``."""
    follower = Stepping(cluster, client)
    follower.catch_up(100)
    t = place_of(partition)
    sender = Sender(client)
    claim = ClaimingPartition(
        **sender.fields("g"),
        generation=cluster.config.generation,
        topic="t",
        partition=partition,
        topic_id=None,
        resume_hash=None,
        expected_epoch=None,
        resume=None,
    )
    sent = follower.append(t, claim)
    follower.await_all([sent], TIMEOUT_MS)
    released = ReleasingPartition(
        **sender.fields("g"),
        topic="t",
        partition=partition,
        epoch=sent.transition.epoch,
        position=OLD,
        successor=None,
        reason=None,
    )
    follower.await_all([follower.append(t, released)], TIMEOUT_MS)


@pytest.fixture(name="cluster")
def _cluster():
    cluster = world(partitions=K, records=(20,) * KEYS)
    for partition in range(KEYS):
        write_key(cluster, partition)
    return cluster


def positions(cluster):
    return [fold(cluster, place_of(p)).keys[key(p)].position for p in range(KEYS)]


def locks(cluster):
    return [k for t in range(K) for ks in fold(cluster, t).locked.values() for k in ks]


def is_paused(cluster):
    return any(fold(cluster, t).active_pause("g") for t in range(K))


def of_kind(cluster, kind):
    found = []
    for t in range(K):
        log = cluster.kafka.log(cluster.place(t))
        found += [
            (t, stored) for stored in log.records if stored.value.startswith(kind)
        ]
    return found


# --- plans


def test_a_plan_survives_its_file():
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
        (b"{", "no plan"),
        (b'{"op_id":"xx","group_id":"g","targets":[]}', "no plan|no position"),
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


def test_a_topic_of_an_earlier_level_is_to_be_upgraded(cluster):
    import msgspec

    config = msgspec.structs.replace(cluster.config, feature_level=1)
    with pytest.raises(ConfigurationError, match="marshal topic upgrade"):
        operation(cluster, config=config)


# --- to the end


def test_all_positions_are_set(cluster):
    one = operation(cluster)
    result = one.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    assert result.outcome == COMMITTED
    assert result.moved == {key(p): (OLD, NEW) for p in range(KEYS)}
    assert positions(cluster) == [NEW] * KEYS
    assert (locks(cluster), is_paused(cluster)) == ([], False)
    assert not fold(cluster, HOME).groups["g"].unresolved


def test_a_group_that_consumes_goes_on_from_the_new_positions():
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


def test_keys_that_the_log_does_not_know_are_made():
    cluster = world(partitions=K, records=(20,) * KEYS)
    result = operation(cluster).run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    assert result.moved == {key(p): (None, NEW) for p in range(KEYS)}
    assert positions(cluster) == [NEW] * KEYS


def test_an_operation_that_is_over_changes_nothing(cluster):
    operation(cluster).run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    again = operation(cluster, "again").run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    assert (again.outcome, again.moved) == (COMMITTED, {})
    assert positions(cluster) == [NEW] * KEYS


# --- nothing is set


def test_a_check_that_fails_after_the_drain_ends_it(cluster):
    def check(known):
        assert {k: s.position for k, s in known.items()} == {
            key(p): OLD for p in range(KEYS)
        }
        raise ClaimRejected("not forward", reason="grants")

    one = operation(cluster)
    with pytest.raises(ClaimRejected, match="not forward"):
        one.run(TIMEOUT_MS, check=check, drain_ms=TIMEOUT_MS)
    assert one.outcome == ABORTED
    assert positions(cluster) == [OLD] * KEYS
    assert (locks(cluster), is_paused(cluster)) == ([], False)


def test_an_owner_that_does_not_let_go_is_waited_for_until_the_deadline():
    cluster = world(partitions=K, records=(20,) * KEYS)
    for partition in range(1, KEYS):
        write_key(cluster, partition)
    node = cluster.node("stuck")
    cluster.run(H)
    follower = Stepping(cluster, "stuck-owner")
    follower.catch_up(100)
    one = operation(cluster)
    del node
    one._is_drained = lambda: False
    with pytest.raises(DeadlineExceeded, match="still owns partitions"):
        one.run(TIMEOUT_MS, drain_ms=H)
    assert one.outcome == ABORTED


def test_a_topic_with_another_id_is_refused(cluster):
    one = operation(cluster, wanted=plan(topic_id="ab" * 16))
    # The keys have no topic id in the log: the first one is taken over by a commit.
    assert one.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS).outcome == COMMITTED
    other = operation(cluster, "two", wanted=plan(7, op="1f" * 16, topic_id="cd" * 16))
    result = other.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    # It is claimed for the newer topic before, as a consumer would.
    assert result.moved == {key(p): (None, 7) for p in range(KEYS)}


def test_another_pause_keeps_it_out(cluster):
    follower = Stepping(cluster, "other")
    follower.catch_up(100)
    pause = PauseOperation(
        follower,
        cluster.clock.view(),
        Sender("other"),
        group_id="g",
        partition_count=K,
        for_ms=10 * H,
    )
    pause.begin(TIMEOUT_MS)
    with pytest.raises(GroupPaused, match="'other'"):
        operation(cluster).run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
    assert positions(cluster) == [OLD] * KEYS
    assert fold(cluster, HOME).active_pause("g").op_id == pause.op_id


def test_an_operation_that_is_not_resolved_keeps_others_out(cluster):
    one = operation(cluster)
    one._resolve = lambda *_, **__: (_ for _ in ()).throw(Died)
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
def test_an_admin_killed_at_any_step_leaves_all_or_nothing(
    cluster, left, goes_on, after_ms
):
    ended = killed(cluster, left)
    cluster.run(20 + after_ms)
    two = operation(cluster, "two")
    if goes_on:
        with suppress(ClaimRejected):  # its pause may be over, and then it gives up
            two.run(TIMEOUT_MS, drain_ms=TIMEOUT_MS)
        outcome = two.outcome
    else:
        outcome = two.finish(TIMEOUT_MS).outcome
    assert outcome == COMMITTED if ended else outcome in {COMMITTED, ABORTED}
    expected = NEW if outcome == COMMITTED else OLD
    assert positions(cluster) == [expected] * KEYS
    assert locks(cluster) == []
    assert not fold(cluster, HOME).groups["g"].unresolved


def test_the_steps_reach_every_record(cluster):
    """The kills above are before, between and behind all records of an operation."""
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


def test_a_decide_that_lands_late_is_obeyed(cluster):
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


def test_a_straggling_stage_finds_that_the_operation_is_over(cluster):
    one = operation(cluster)
    operation(cluster, "two").finish(TIMEOUT_MS)
    record = one._stage_record(next(parts(one._targets[place_of(0)])))
    sent = one._follower.append(place_of(0), record)
    one._follower.await_all([sent], TIMEOUT_MS)
    assert sent.transition.reason == "op_over"
    assert locks(cluster) == []
