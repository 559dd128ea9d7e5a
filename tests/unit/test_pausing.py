"""Pauses of a group in all partitions, as an admin writes and renews them."""

import pytest
from enginekit import H, fold, lines, world, write

from kafka_marshal.engine.follower import Follower
from kafka_marshal.errors import (
    ClaimRejected,
    DeadlineExceeded,
    GroupPaused,
    LogUnreadable,
    LogUnwritable,
)
from kafka_marshal.pausing import ENDED, PauseOperation, Sender, in_order
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.records import ReleaseGroup
from kafka_marshal.testing.fakestore import AppendFate

K = 4
FOR_MS = 900
HOME = home_partition("g", partition_count=K)
OTHERS = [t for t in range(K) if t != HOME]
TIMEOUT_MS = 30_000


class Stepping(Follower):
    """Lets the world go on where production code would wait for the log."""

    def __init__(self, cluster, name):
        self.cluster = cluster
        log = cluster.kafka.coordination_log(name=name)
        self.own_log = log
        super().__init__(log, cluster.clock.view())

    def step(self, timeout_ms, **rest):
        if timeout_ms:
            self.cluster.run(20)
        return super().step(0, **rest)


@pytest.fixture(name="cluster")
def _cluster():
    return world(partitions=K, groups=3)


def operation(cluster, client="admin", **changes):
    follower = Stepping(cluster, client)
    follower.catch_up(100)
    wanted = {"group_id": "g", "partition_count": K, "for_ms": FOR_MS} | changes
    return PauseOperation(follower, cluster.clock.view(), Sender(client), **wanted)


def sent(cluster, client="admin"):
    """Return what an admin wrote: partition, whether it ends, and what came of it."""
    found = []
    for t in range(K):
        for line in lines(cluster, t):
            record = line.record
            if isinstance(record, ReleaseGroup) and record.client_id == client:
                message = line.transition.effect or line.transition.reason
                found.append((line.time_ms, t, message))
    return [each[1:] for each in sorted(found)]


def paused(cluster):
    return {t for t in range(K) if fold(cluster, t).active_pause("g") is not None}


def slow_once(cluster, operation, *, partition, delay_ms):
    """Let the first append to one partition land late."""
    log = operation._follower.own_log
    plain = log.append

    def append(to, value):
        is_slow = to == partition and not slow
        if is_slow:
            slow.append(value)
            cluster.fates["admin"] = AppendFate(delay_ms=delay_ms)
        done = plain(to, value)
        cluster.fates.pop("admin", None)
        return done

    slow = []
    log.append = append


def test_the_home_partition_comes_first(cluster):
    cluster.fates["admin"] = AppendFate(delay_ms=40)
    one = operation(cluster)
    one.begin(TIMEOUT_MS)
    order = sent(cluster)
    assert order[0] == (HOME, "paused")
    assert sorted(order[1:]) == [(t, "paused") for t in OTHERS]
    pauses = [fold(cluster, t).active_pause("g") for t in range(K)]
    assert {pause.op_id for pause in pauses} == {one.op_id}


def test_one_of_two_admins_wins_everywhere(cluster):
    # Neither has read what the other writes.
    one, two = operation(cluster, "one"), operation(cluster, "two")
    one.begin(TIMEOUT_MS)
    with pytest.raises(GroupPaused, match="'one'") as raised:
        two.begin(TIMEOUT_MS)
    assert raised.value.by == "one"
    assert sent(cluster, "two") == [(HOME, "busy")]
    assert paused(cluster) == set(range(K))


def test_a_pause_is_renewed_while_one_partition_is_slow(cluster):
    one = operation(cluster)
    slow_once(cluster, one, partition=OTHERS[0], delay_ms=5 * FOR_MS // 3)
    one.begin(TIMEOUT_MS)
    assert paused(cluster) == set(range(K))
    reported = sent(cluster)
    # It came after its time, and was sent again; the others were renewed meanwhile.
    assert reported.count((OTHERS[0], "expired")) == 1
    assert reported.count((HOME, "paused")) >= 4
    assert all(outcome in {"paused", "expired"} for _, outcome in reported)


def test_a_pause_is_renewed_as_long_as_it_is_waited_for(cluster):
    one = operation(cluster)
    one.begin(TIMEOUT_MS)
    end_ms = cluster.clock.now_ms() + 10 * FOR_MS
    assert one.hold_until(lambda: cluster.clock.now_ms() >= end_ms, 20 * FOR_MS)
    assert paused(cluster) == set(range(K))
    renewals = sent(cluster).count((HOME, "paused")) - 1
    assert 25 <= renewals <= 30
    assert not one.hold_until(lambda: False, FOR_MS)


def test_nothing_stays_paused_behind_a_dead_admin(cluster):
    one = operation(cluster)
    slow_once(cluster, one, partition=OTHERS[0], delay_ms=100 * FOR_MS)
    with pytest.raises(DeadlineExceeded, match="groups resume g"):
        one.begin(3 * FOR_MS)
    assert paused(cluster) == {t for t in range(K) if t != OTHERS[0]}
    cluster.run(FOR_MS)
    for t in range(K):
        write(cluster, b"time passes", t)
    assert paused(cluster) == set()


def test_a_refusal_in_one_partition_is_undone_in_all(cluster):
    held = OTHERS[0]
    other = Sender("other").record("g", b"o" * 16, expire_ms=2**60, reason=None)
    one = operation(cluster)
    write(cluster, other, held)
    cluster.fates["admin"] = AppendFate(delay_ms=40)
    with pytest.raises(GroupPaused, match="'other'"):
        one.begin(TIMEOUT_MS)
    assert paused(cluster) == {held}
    reported = sent(cluster)
    assert (held, "busy") in reported
    # Home goes last: up to there no other admin gets anywhere.
    assert reported[-1] == (HOME, "unpaused")
    assert {t for t, outcome in reported if outcome == "unpaused"} == set(range(K)) - {
        held
    }


def test_an_admin_that_lost_its_pause_fails_and_ends_the_rest(cluster):
    one = operation(cluster)
    one.begin(TIMEOUT_MS)
    other = Sender("other").record("g", one.op_id, expire_ms=ENDED, reason=None)
    write(cluster, other, OTHERS[1])
    with pytest.raises(ClaimRejected, match="is over in coordinating") as raised:
        one.hold_until(lambda: False, TIMEOUT_MS)
    assert raised.value.reason == "op_over"
    assert paused(cluster) == set()


def test_a_partition_that_has_no_room_for_the_group(cluster):
    one = operation(cluster)
    for number in range(3):
        other = Sender("other").record(
            f"h{number}", b"o" * 16, expire_ms=2**60, reason=None
        )
        write(cluster, other, OTHERS[0])
    with pytest.raises(LogUnwritable, match="limits"):
        one.begin(TIMEOUT_MS)
    assert paused(cluster) == set()


@pytest.mark.parametrize("lands", [False, True], ids=["lost", "late"])
def test_a_record_that_failed_is_sent_again(cluster, lands):
    one = operation(cluster)
    fate = AppendFate(delay_ms=FOR_MS // 2, is_lost=not lands, fails_after_ms=10)
    cluster.fates["admin"] = fate
    plain = one._renew

    def renew():
        cluster.fates.pop("admin", None)
        plain()

    one._renew = renew
    one.begin(TIMEOUT_MS)
    assert paused(cluster) == set(range(K))


def test_a_halted_partition_keeps_nobody_waiting(cluster):
    one = operation(cluster)
    above = cluster.config.__class__(
        **{
            name: getattr(cluster.config, name)
            for name in cluster.config.__struct_fields__
        }
        | {"generation": 2, "era": 2, "feature_level": 9}
    )
    write(cluster, above, HOME)
    with pytest.raises(LogUnreadable, match="level 9"):
        one.begin(H)


def test_a_pause_is_ended_at_home_last():
    assert in_order(range(4), home=1) == [0, 2, 3, 1]
