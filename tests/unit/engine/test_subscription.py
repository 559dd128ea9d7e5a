"""How members share keys, over a whole log."""

from types import SimpleNamespace

import msgspec
import pytest
from enginekit import (
    KEY,
    H,
    fold,
    held_by,
    lines,
    of,
    pause_for,
    spec,
    takeovers,
    world,
    write,
)
from logkit import settings

from kafka_marshal.errors import MarshalError
from kafka_marshal.policies import Plan, greedy
from kafka_marshal.protocol.labels import weight_of
from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    ClaimingPartition,
    Heartbeat,
    Member,
    ReleasingPartition,
)
from kafka_marshal.protocol.types import Key

KEYS = [Key("g", "t", number) for number in range(4)]

# --- Sharing ---


def test_a_new_member_is_named_successor_of_its_share():
    cluster = world(partitions=2, records=[1] * 8)
    a = cluster.node("a", spec=spec())
    cluster.run_until(held_by(a, 8), H)
    cluster.run(H)
    b = cluster.node("b", spec=spec())
    took_ms = cluster.run_until(held_by(b, 4), 2 * H)
    assert took_ms < H
    assert len(a.held) == 4
    released = [
        x.record
        for t in range(2)
        for x in of(cluster, "a", ReleasingPartition, partition=t)
    ]
    assert {r.reason.partition(":")[0] for r in released} == {"surplus"}
    assert released[0].reason == "surplus: 8 held, share 4 of 8 among 2"
    first, *_ = a.observer.named("release_planned")
    assert first.fields["detail"] == "8 held, share 4 of 8 among 2"
    assert (first.fields["reason"], first.fields["successor"]) == ("surplus", "b")
    assert {r.successor for r in released} == {"b"}
    assert not takeovers(cluster, 0)
    assert not takeovers(cluster, 1)


def claims_in(cluster):
    """Return how many claims were accepted."""
    return sum(
        line.transition.effect == "claimed"
        for number in range(cluster.config.partition_count)
        for line in lines(cluster, number)
    )


def test_a_burst_of_joins_moves_each_key_once():
    """Three members join within 0.9 s; 48 of 64 keys have to move."""
    h = 10_000
    cluster = world(partitions=2, records=[1] * 64, h=h)
    cluster.run_until(held_by(cluster.node("a", spec=spec()), 64), h)
    cluster.run(h)
    before = claims_in(cluster)
    for name in "bcd":
        cluster.node(name, spec=spec())
        cluster.run(440)
    cluster.run(2 * h)
    assert [len(node.held) for node in cluster.nodes] == [16] * 4
    assert claims_in(cluster) - before == 48


@pytest.mark.parametrize(
    ("debounce_ms", "least", "most"),
    [
        pytest.param(0, 0, 2_000, id="none"),
        pytest.param(6_000, 6_000, 8_000, id="long"),
    ],
)
def test_debounce_ms_of_the_group_delays_the_release_of_surplus(
    debounce_ms, least, most
):
    h = 10_000
    cluster = world(partitions=1, records=[1] * 4, h=h)
    write(cluster, settings(debounce_ms=debounce_ms))
    cluster.run_until(held_by(cluster.node("a", spec=spec()), 4), h)
    cluster.run(h)
    b = cluster.node("b", spec=spec())
    assert least <= cluster.run_until(held_by(b, 2), h) <= most


def test_free_keys_are_claimed_at_once_while_members_join():
    cluster = world(records=[1] * 2)
    a = cluster.node("a", spec=spec())
    cluster.run_until(held_by(a, 2), H)
    b = cluster.node("b", spec=spec())
    cluster.run(100)
    assert not b.held
    a.session.release(a.session.holdings[KEY], reason="closed")
    assert cluster.run_until(held_by(b, 1), H) <= H // 10 + 100


def test_no_key_moves_once_shares_are_even():
    cluster = world(partitions=2, records=[1] * 7)
    nodes = [cluster.node(name, spec=spec()) for name in "abc"]
    cluster.run_until(lambda: sum(len(n.held) for n in nodes) == 7, 3 * H)
    cluster.run(3 * H)
    ends = [cluster.kafka.log(cluster.place(t)).end for t in range(2)]
    cluster.run(10 * H, step_ms=50)
    later = {
        type(line.record)
        for t in range(2)
        for line in lines(cluster, t)
        if line.offset >= ends[t]
    }
    assert later == {Heartbeat, BatchHeartbeat, Member}


def test_nothing_is_released_for_a_dead_member():
    """The keys of a dead member go stale one coordinating partition after another."""
    cluster = world(partitions=2, records=[1] * 8)
    a, b = (cluster.node(name, spec=spec()) for name in "ab")
    cluster.run_until(lambda: len(a.held) == len(b.held) == 4, 3 * H)
    cluster.run(H)
    cluster.crash(a)
    last = [x.record for t in range(2) for x in of(cluster, "a", Member, partition=t)]
    home = a.engine.context.home_of("g")
    cluster.run(H // 2)
    # Its earlier records arrive late, in one of the two and in its home partition.
    write(cluster, msgspec.structs.replace(last[-1], seq=10**6), partition=home)
    for key, holding in a.session.holdings.items():
        if a.engine.context.partition_of(key) == 1:
            late = Heartbeat(
                client_id="a",
                group_id="g",
                incarnation=a.owner.incarnation,
                seq=10**6,
                topic=key.topic,
                partition=key.partition,
                epoch=holding.claim.epoch,
                position=None,
                rewind=False,
            )
            write(cluster, late, partition=1)
    cluster.run_until(held_by(b, 8), 3 * H)
    assert not b.observer.named("release_planned")


def test_surplus_is_processed_before_it_is_released():
    cluster = world(records=[4, 4])
    a = cluster.node("a", spec=spec(most=100))
    cluster.run_until(held_by(a, 2), H)
    polled = a.consumer.poll(0)
    b = cluster.node("b", spec=spec())
    cluster.run(H // 2)
    assert not b.held
    for records in polled.values():
        a.consumer.commit(records)
    cluster.run_until(held_by(b, 1), H)
    (key,) = b.held
    assert fold(cluster).keys[key].position == 4


def test_surplus_waits_for_a_slow_handler_and_not_for_one_that_never_commits():
    cluster = world(records=[4, 4])
    a = cluster.node("a", spec=spec(most=100))
    cluster.run_until(held_by(a, 2), H)
    a.consumer.poll(0)
    b = cluster.node("b", spec=spec())
    cluster.run(5 * H)  # busy with the records of the poll
    assert not b.held
    assert len(a.held) == 2
    a.consumer.poll(0)  # polls again, and commits nothing
    cluster.run(H // 2)
    assert not b.held
    cluster.run_until(held_by(b, 1), H)


def test_a_leaving_member_releases_all_at_once():
    cluster = world(records=[1] * 4)
    a, b = (cluster.node(name, spec=spec()) for name in "ab")
    cluster.run_until(lambda: len(a.held) == len(b.held) == 2, 3 * H)
    a.leave()
    assert cluster.run_until(held_by(b, 4), H) <= 500
    assert a.has_left


# --- Weights ---


def test_a_sidecar_counts_as_many_members_as_it_has_clients():
    cluster = world(partitions=2, records=[1] * 8)
    a = cluster.node("a", spec=spec())
    cluster.run_until(held_by(a, 8), H)
    b = cluster.node("b", spec=spec())
    b.session.subscriptions[0].weight = 3
    cluster.run_until(held_by(b, 6), 2 * H)
    cluster.run(H)
    assert (len(a.held), len(b.held)) == (2, 6)


@pytest.mark.parametrize(
    ("text", "weight"),
    [
        pytest.param("3", 3, id="number"),
        pytest.param("1000", 1000, id="most"),
        pytest.param("9999", 1000, id="too-much"),
        pytest.param("9" * 99, 1, id="far-too-much"),
        pytest.param("0", 1, id="nothing"),
        pytest.param("-3", 1, id="negative"),
        pytest.param("\u0663", 1, id="other-digits"),
        pytest.param("many", 1, id="no-number"),
    ],
)
def test_announced_weights_are_bounded(text, weight):
    assert weight_of({"weight": text}) == weight
    assert weight_of({}) == 1


# --- Whole topics ---


def topics_of(node):
    counts = {}
    for key in node.held:
        counts[key.topic] = counts.get(key.topic, 0) + 1
    return counts


def whole(cluster, name, *topics, **rest):
    return cluster.node(name, spec=spec(*topics, policy="topic", **rest))


def test_whole_topics_are_shared_and_kept_together():
    cluster = world(partitions=2, records=[1] * 4)
    cluster.fill("u", [1] * 3)
    a, b = (whole(cluster, name, "t", "u") for name in "ab")
    cluster.run_until(lambda: len(a.held) + len(b.held) == 7, 4 * H)
    assert sorted([topics_of(a), topics_of(b)], key=len) in (
        [{"t": 4}, {"u": 3}],
        [{"u": 3}, {"t": 4}],
    )


def test_when_the_owner_dies_the_whole_topic_moves():
    cluster = world(partitions=2, records=[1] * 5)
    a = whole(cluster, "a", "t")
    cluster.run_until(held_by(a, 5), H)
    b, c = whole(cluster, "b", "t"), whole(cluster, "c", "t")
    cluster.run(H)
    assert not b.held
    assert not c.held
    cluster.crash(a)
    cluster.run_until(lambda: 5 in {len(b.held), len(c.held)}, 4 * H)
    assert sorted([len(b.held), len(c.held)]) == [0, 5]


def test_losing_one_partition_releases_the_topic():
    cluster = world(records=[1] * 3)
    a = whole(cluster, "a", "t")
    cluster.run_until(held_by(a, 3), H)
    b = whole(cluster, "b", "t")
    cluster.run(H)
    lost = a.session.holdings[Key("g", "t", 1)]
    a.session.release(lost, reason="released")
    cluster.run_until(held_by(b, 3), 3 * H)
    assert not a.held
    reported = {x.record.reason for x in of(cluster, "a", ReleasingPartition)}
    assert reported == {"released", "topic: lost t-1"}


def test_claims_max_counts_topics_under_the_policy_topic():
    cluster = world(records=[1] * 3)
    for name in "uv":
        cluster.fill(name, [1] * 2)
    a = whole(cluster, "a", "t", "u", "v", claims_max=2)
    cluster.run(4 * H)
    assert len(topics_of(a)) == 2
    member = of(cluster, "a", Member)[-1].record
    assert (member.capacity, member.load) == (2, 2)


# --- The last owner, and the cooldown ---


def claims_of(cluster, name, number):
    return [
        line.time_ms
        for line in of(cluster, name, ClaimingPartition)
        if line.transition.effect == "claimed" and line.record.partition == number
    ]


def test_a_returning_member_gets_its_keys_back():
    cluster = world(records=[1] * 6)
    nodes = {name: cluster.node(name, spec=spec()) for name in "abc"}
    cluster.run_until(lambda: {len(n.held) for n in nodes.values()} == {2}, 4 * H)
    before = set(nodes["b"].held)
    nodes["b"].leave()
    cluster.run_until(lambda: nodes["b"].has_left, H)
    cluster.crash(nodes["b"])
    rest = (nodes["a"], nodes["c"])
    cluster.run_until(lambda: [len(n.held) for n in rest] == [3, 3], 2 * H)
    again = cluster.node("b", spec=spec())
    cluster.run_until(held_by(again, 2), 2 * H)
    assert set(again.held) == before


@pytest.mark.parametrize("before", [bytes(16), b"\xff" * 16], ids=["low", "high"])
def test_a_member_that_left_and_returns_gets_its_share_at_once(before):
    """Its leave counts for two intervals, but only for the earlier process."""
    cluster = world(records=[1, 1])
    a = cluster.node("a", spec=spec())
    cluster.run_until(held_by(a, 2), H)
    left = of(cluster, "a", Member)[-1].record
    write(
        cluster,
        msgspec.structs.replace(
            left, client_id="b", incarnation=before, seq=1, draining=True
        ),
    )
    b = cluster.node("b", spec=spec())
    assert cluster.run_until(held_by(b, 1), 3 * H) < H


def test_a_released_key_is_not_claimed_again_within_an_interval():
    cluster = world(records=[1])
    a = cluster.node("a", spec=spec())
    cluster.run_until(held_by(a, 1), H)
    a.session.release(a.session.holdings[KEY], reason="released")
    cluster.run_until(held_by(a, 1), 3 * H)
    (gone,) = [x.time_ms for x in of(cluster, "a", ReleasingPartition)]
    _, again = claims_of(cluster, "a", 0)
    assert H <= again - gone <= H + H // 5


def test_the_cooldown_does_not_apply_to_other_members():
    cluster = world(records=[1])
    a = cluster.node("a", spec=spec())
    cluster.run_until(held_by(a, 1), H)
    b = cluster.node("b", spec=spec())
    cluster.run(H // 2)
    a.session.release(a.session.holdings[KEY], reason="released")
    assert cluster.run_until(held_by(b, 1), H) < H


@pytest.mark.parametrize(
    ("reason", "is_at_once"),
    [
        pytest.param("client_died", True, id="died"),
        pytest.param("closed", True, id="closed"),
        pytest.param("lagging: 9 s", False, id="too-slow-as-well"),
    ],
)
def test_an_orderly_release_by_others_ends_the_cooldown(reason, is_at_once):
    """A released surplus returns when the other member leaves."""
    cluster = world(records=[1, 1])
    a = cluster.node("a", spec=spec())
    cluster.run_until(held_by(a, 2), H)
    b = cluster.node("b", spec=spec())
    cluster.run_until(held_by(b, 1), H)
    (theirs,) = b.held
    b.session.release(b.session.holdings[theirs], reason=reason)
    b.leave()
    took_ms = cluster.run_until(held_by(a, 2), 3 * H)
    assert (took_ms < H // 6) is is_at_once


def test_a_pause_starts_no_cooldown():
    cluster = world(records=[1])
    a = cluster.node("a", spec=spec())
    cluster.run_until(held_by(a, 1), H)
    pause_for(cluster, H)
    cluster.run_until(held_by(a, 0), H)
    assert cluster.run_until(held_by(a, 1), 3 * H) <= H + H // 5


def test_the_application_can_claim_again_at_once():
    cluster = world(records=[1])
    a = cluster.node("a")
    cluster.run(100)
    holding = a.session.want(KEY)
    cluster.run_until(held_by(a, 1), H)
    a.session.unwant(holding)
    cluster.run(100)
    a.session.want(KEY)
    assert cluster.run_until(held_by(a, 1), H) < H // 2


# --- Named successors (PROTOCOL 5.1) ---


def gaps_ms(cluster):
    """Return the log time between each release and the next claim of its key."""
    released, found = {}, []
    for line in lines(cluster):
        key, effect = line.transition.key, line.transition.effect
        if effect == "released":
            released[key] = line.time_ms
        elif effect == "claimed" and key in released:
            found.append(line.time_ms - released.pop(key))
    return found


@pytest.mark.parametrize("h", [H, 10_000], ids=["short", "long"])
def test_a_named_successor_claims_as_soon_as_it_reads_the_release(h):
    """Neither jitter nor the interval of policies delays it."""
    cluster = world(records=[1] * 8, h=h)
    a = cluster.node("a", spec=spec())
    cluster.run_until(held_by(a, 8), h)
    cluster.run(h)
    b = cluster.node("b", spec=spec())
    cluster.run_until(held_by(b, 4), 3 * h, step_ms=2)
    assert len(gaps_ms(cluster)) == 4
    assert max(gaps_ms(cluster)) <= 2


def only(*numbers):
    """Return a policy that claims these partitions, and releases nothing."""

    def policy(view):
        return Plan(
            tuple(
                each.key
                for each in view.keys
                if each.is_claimable and each.key.partition in numbers
            )
        )

    return policy


def test_a_named_successor_waits_for_no_cooldown():
    cluster = world(records=[1])
    a = cluster.node("a", spec=spec())
    cluster.run_until(held_by(a, 1), H)
    b = cluster.node("b", spec=spec(policy=only()))
    cluster.run(100)
    for owner, successor in ((a, b), (b, a), (a, b)):
        holding = owner.session.holdings[KEY]
        successor_id = successor.owner.client_id
        owner.session.release(holding, reason="surplus", successor=successor_id)
        assert cluster.run_until(held_by(successor, 1), H, step_ms=2) <= 10


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param({"claims_max": 1}, id="full"),
        pytest.param({"claims_max": 1, "policy": "topic"}, id="full-of-topics"),
    ],
)
def test_a_named_successor_keeps_its_limit(rest):
    cluster = world(records=[1])
    cluster.fill("u", [1])
    a = cluster.node("a", spec=spec("t"))
    b = cluster.node("b", spec=spec("t", "u", **rest))
    cluster.run_until(lambda: len(a.held) == len(b.held) == 1, 3 * H)
    a.session.release(a.session.holdings[KEY], reason="lagging", successor="b")
    cluster.run(H // 3)
    assert len(b.held) == 1


def test_a_named_successor_that_failed_claims_nothing():
    cluster = world(records=[1])
    a = cluster.node("a", spec=spec())
    cluster.run_until(held_by(a, 1), H)
    b = cluster.node("b", spec=spec())
    cluster.run(100)
    b.session.fail(MarshalError("over"))
    a.session.release(a.session.holdings[KEY], reason="lagging", successor="b")
    cluster.run(100)
    assert not of(cluster, "b", ClaimingPartition)


# --- Reasons ---


def test_claims_and_releases_have_reasons():
    cluster = world(records=[1] * 2)
    a = cluster.node("a", spec=spec())
    cluster.run_until(held_by(a, 2), H)
    notes = fold(cluster).soft.notes
    assert notes[KEY].reason == (
        "fair: 0 held, share 2 of 2 among 1; never claimed before"
    )
    (event, _) = a.observer.named("claimed")
    assert event.fields["why"] == notes[event.fields["key"]].reason
    b = cluster.node("b", spec=spec())
    cluster.run_until(held_by(b, 1), H)
    (key,) = b.held
    (release,) = of(cluster, "a", ReleasingPartition)
    assert release.record.reason == "surplus: 2 held, share 1 of 2 among 2"
    assert fold(cluster).soft.notes[key].reason == "handed over by a; free"
    cluster.crash(a)
    cluster.run_until(held_by(b, 2), 4 * H)
    assert fold(cluster).soft.notes[KEY].reason.endswith("; a is stale")


def test_a_claim_without_a_policy_has_a_reason():
    cluster = world(records=[1])
    a = cluster.node("a")
    cluster.run(100)
    a.session.want(KEY)
    cluster.run_until(held_by(a, 1), H)
    assert fold(cluster).soft.notes[KEY].reason == (
        "asked for by the application; never claimed before"
    )


def test_members_of_a_view_have_hosts_and_labels():
    cluster = world(records=[1])
    a, b = (cluster.node(name, spec=spec()) for name in "ab")
    cluster.run(H)
    weighty = next(m for m in a.session.subscriptions[0].members if m.client_id == "b")
    assert weighty.host == "host-of-b"
    assert weighty.labels == (("layout", "1"),)
    b.session.subscriptions[0].weight = 3
    cluster.run(H)
    weighty = next(m for m in a.session.subscriptions[0].members if m.client_id == "b")
    assert weighty.labels == (("layout", "1"), ("weight", "3"))


def test_a_consumer_survives_a_failing_policy():
    """Over a whole log: the engine keeps running and keeps its claims."""
    cluster = world(records=[3, 3])
    mood = []

    def policy(view):
        if mood:
            raise RuntimeError(mood[0])
        return greedy(view)

    node = cluster.node("a", spec=spec(policy=policy))
    cluster.run_until(held_by(node, 2), H)
    mood.append("no")
    polled = {}
    for _ in range(3 * H // 20):
        cluster.run(20)
        polled |= node.consumer.poll(0)
    assert node.engine.failure is None
    assert len(node.held) == 2
    assert len(polled) == 2
    (event,) = node.observer.named("policy_failed")
    assert event.fields == {"policy": "policy", "error": "RuntimeError('no')"}
    mood.clear()
    cluster.node("b", spec=spec())
    cluster.run(2 * H)
    assert len(node.observer.named("policy_failed")) == 1


# --- Keys that nobody can claim ---


def test_uncovered_keys_that_change_are_reported_once_an_interval():
    cluster = world(records=[1] * 4)
    node = cluster.node("a", spec=spec(claims_max=1))
    cluster.run_until(held_by(node, 1), H)
    cluster.run_until(lambda: node.observer.named("partitions_uncovered"), 3 * H)
    (subscription,) = node.session.subscriptions
    context = node.engine.context
    members, subscription.members = subscription.members, ()
    rows = [SimpleNamespace(key=key, is_orphan=True, is_mine=False) for key in KEYS]
    seen = len(node.observer.named("partitions_uncovered"))

    def reported(*numbers):
        subscription._note_uncovered([rows[number] for number in numbers], context)
        return len(node.observer.named("partitions_uncovered")) - seen

    cluster.clock.advance(H)
    assert reported(0) == 1
    # As in an outage: each claim that a member tries takes a key away for a moment.
    for _ in range(5):
        assert reported(0, 1) == 1
        assert reported(0) == 1
    assert reported(0, 1) == 1
    assert len(subscription.uncovered) == 2
    cluster.clock.advance(H)
    assert reported(0, 1) == 2
    assert reported(0, 1) == 2
    # Each moment in which the only keys are claimed is no coverage.
    for _ in range(5):
        assert reported() == 2
        assert subscription.uncovered == {}
        assert reported(0, 1) == 2
        cluster.clock.advance(H // 2)
    assert not node.observer.named("partitions_covered")
    assert reported() == 2
    assert not node.observer.named("partitions_covered")
    cluster.clock.advance(H // 2)
    assert reported() == 2
    assert node.observer.named("partitions_covered")
    assert reported(0) == 3, "it begins again"
    subscription.members = members
