"""Slow or stuck owners release partitions that another member can take."""

import itertools
from collections import Counter

import pytest
from enginekit import AMO, KEY, H, held_by, lines, of, spec, world

from kafka_marshal.engine.coverage import best_taker
from kafka_marshal.engine.dispatcher import Dispatcher
from kafka_marshal.engine.slow_consumers import SlowConsumerPolicy
from kafka_marshal.errors import ClaimLost
from kafka_marshal.protocol.planner import MemberView
from kafka_marshal.protocol.records import Member, ReleasingPartition
from kafka_marshal.protocol.types import Key, TopicPartition

STEP_MS = 100


class App:
    """An application with a fixed processing rate, or one that has stopped."""

    def __init__(self, node, per_s):
        self.node = node
        self.per_s = per_s
        self.credit = 0

    def act(self):
        if self.per_s is None:
            return
        self.credit = min(self.credit + self.per_s * STEP_MS, 100_000)
        most = self.credit // 1_000
        if most:
            polled = self.node.consumer.poll(0, most)
            for records in polled.values():
                self.node.consumer.commit(records)
                self.credit -= 1_000 * len(records)


class Load:
    """Records that arrive at a steady rate in every partition."""

    def __init__(self, cluster, count, per_s):
        self.cluster = cluster
        self.places = [TopicPartition("t", n) for n in range(count)]
        self.per_s = per_s
        self.due = 0

    def act(self):
        self.due += self.per_s * STEP_MS
        while self.due >= 1_000:
            self.due -= 1_000
            for place in self.places:
                self.cluster.kafka.produce(place, b"x")


def live(cluster, actors, duration_ms, *, until=lambda: False):
    for _ in range(duration_ms // STEP_MS):
        cluster.run(STEP_MS, step_ms=STEP_MS)
        for actor in actors:
            actor.act()
        if until():
            return
    if until is not live.__kwdefaults__["until"]:
        raise TimeoutError("not within the limit")


def careful(*topics, **rest):
    """Return a subscription with all policies enabled, as in production."""
    return spec(*topics, max_handling_ms=None, release_behind=True, **rest)


def start(cluster, name, per_s, **rest):
    return App(cluster.node(name, spec=careful(**rest)), per_s)


def releases(cluster, reason=None):
    found = [
        (line.record.client_id, line.record.partition, line.record.reason, line.time_ms)
        for line in lines(cluster)
        if isinstance(line.record, ReleasingPartition)
        and line.transition.effect == "released"
    ]
    return [each for each in found if reason is None or each[2].startswith(reason)]


# --- Lagging ---


def slow_and_fast(*, partitions=2, arriving=10, slow=5, fast=200, **rest):
    cluster = world(records=[0] * partitions)
    a, b = start(cluster, "a", slow, **rest), start(cluster, "b", fast, **rest)
    load = Load(cluster, partitions, arriving)
    nodes = (a.node, b.node)
    both = partitions // 2
    live(cluster, [a, b], 4 * H, until=lambda: {len(n.held) for n in nodes} == {both})
    return cluster, a, b, load


def test_a_slow_owner_releases_and_the_lag_falls():
    cluster, a, b, load = slow_and_fast()
    (key,) = a.node.held
    live(cluster, [a, b, load], 8 * H, until=lambda: key in b.node.held)
    ((who, number, reason, _),) = releases(cluster, "lagging")
    assert (who, number) == ("a", key.partition)
    lag, consumed, produced = (
        int("".join(c for c in part if c.isdigit())) for part in reason.split(",")[:3]
    )
    assert reason.startswith("lagging: lag ")
    assert reason.endswith("/s, behind in 3 checks in a row")
    assert lag > consumed * 2 * H // 1_000
    assert consumed < produced
    (event,) = a.node.observer.named("lagging")
    assert event.fields["successor"] == "b"
    assert event.fields["cycles"] == 3
    live(
        cluster,
        [a, b, load],
        2 * H,
        until=lambda: b.node.session.lag_of(key) in range(20),
    )
    assert not takeovers_of(cluster, key)


def takeovers_of(cluster, key):
    claims = [
        line.record.client_id
        for line in lines(cluster)
        if line.transition.key == key and line.transition.effect == "claimed"
    ]
    return [pair for pair in itertools.pairwise(claims) if pair[0] == pair[1]]


def test_no_partition_is_released_before_enough_samples():
    cluster, a, b, load = slow_and_fast()
    since_ms = cluster.clock.now_ms()
    live(cluster, [a, b, load], 8 * H, until=lambda: bool(releases(cluster, "lagging")))
    samples = (cluster.clock.now_ms() - since_ms) // (H // 3)
    assert samples >= 11


@pytest.mark.parametrize("seed", range(3))
def test_an_overloaded_partition_does_not_oscillate(seed):
    """The number of moves grows with the logarithm of time: the backoff doubles."""
    cluster, a, b, load = slow_and_fast(partitions=4, slow=3 + 2 * seed)
    live(cluster, [a, b, load], 60 * H)
    early = len(releases(cluster))
    live(cluster, [a, b, load], 120 * H)
    late = len(releases(cluster)) - early
    assert len(releases(cluster, "lagging")) <= 9
    assert early + late <= 24
    assert late <= early
    assert all(b.node.session.lag_of(key) < 100 for key in b.node.held)


def test_a_single_member_releases_nothing():
    cluster = world(records=[0])
    a = start(cluster, "a", 2)
    load = Load(cluster, 1, 10)
    cluster.run_until(held_by(a.node, 1), H)
    live(cluster, [a, load], 12 * H)
    assert releases(cluster) == []
    (event,) = a.node.observer.named("lagging")
    assert event.fields["successor"] is None, "reported once"


def test_no_partition_moves_if_all_members_lag():
    cluster, a, b, load = slow_and_fast(fast=5)
    live(cluster, [a, b, load], 20 * H)
    assert releases(cluster, "lagging") == []
    labels = [line.record.labels for line in of(cluster, "b", Member)][-1]
    assert labels == {"lagging": "yes", "layout": "1"}


def test_no_lagging_partition_is_released_to_a_full_member():
    cluster, a, b, load = slow_and_fast(claims_max=1)
    live(cluster, [a, b, load], 12 * H)
    assert releases(cluster, "lagging") == []


def test_a_member_that_keeps_up_keeps_its_partition():
    cluster, a, b, load = slow_and_fast(slow=15)
    live(cluster, [a, b, load], 15 * H)
    assert releases(cluster, "lagging") == []


def test_releasing_lagging_partitions_can_be_disabled():
    cluster = world(records=[0] * 2)
    wished = spec(max_handling_ms=None, release_behind=False)
    apps = [App(cluster.node(name, spec=wished), 3) for name in "ab"]
    apps[1].per_s = 200
    load = Load(cluster, 2, 10)
    live(cluster, [*apps, load], 12 * H)
    assert releases(cluster, "lagging") == []


def test_paused_partitions_are_not_judged():
    cluster, a, b, load = slow_and_fast()
    (key,) = a.node.held
    a.node.consumer.pause(key.topic_partition)
    live(cluster, [a, b, load], 12 * H)
    assert releases(cluster, "lagging") == []


def test_no_partition_is_released_without_log_ends():
    cluster, a, b, load = slow_and_fast()
    a.node.data.ranges = cut
    live(cluster, [a, b, load], 12 * H)
    assert releases(cluster, "lagging") == []
    assert len(a.node.held) == 1


def cut(_partitions, _timeout_ms, **_rest):
    raise TimeoutError("no answer")


def test_whole_topics_are_not_judged_by_their_speed():
    cluster = world(records=[0] * 2)
    cluster.fill("u", [0])
    wished = careful("t", "u", policy="topic")
    a, b = (
        App(cluster.node("a", spec=wished), 3),
        App(cluster.node("b", spec=wished), 200),
    )
    load = Load(cluster, 2, 10)
    live(cluster, [a, b, load], 12 * H)
    assert releases(cluster, "lagging") == []


# --- Stuck ---


def blocked(cluster, name="a", **rest):
    """Return an application that got records and does not poll again."""
    app = start(cluster, name, 1_000, **rest)
    cluster.run_until(lambda: bool(app.node.held), 3 * H)
    taken = []
    while not taken:
        cluster.run(20)
        for records in app.node.consumer.poll(0, 1).values():
            taken += records
    app.per_s = None
    return app, taken


@pytest.mark.parametrize("policy", ["fair", "greedy", "topic"])
def test_a_blocked_handler_loses_its_partition_within_h_and_jitter(policy):
    cluster = world(records=[9])
    a, taken = blocked(cluster, policy=policy)
    since_ms = cluster.clock.now_ms()
    b = start(cluster, "b", 100, policy=policy)
    live(cluster, [b], 2 * H, until=lambda: KEY in b.node.held)
    assert cluster.clock.now_ms() - since_ms <= H + H // 3
    ((who, _, reason, _),) = releases(cluster)
    assert who == "a"
    assert reason.startswith("stuck: the application has neither polled nor ")
    assert reason.endswith("1 uncommitted, lag 9")
    with pytest.raises(ClaimLost, match="stuck"):
        a.node.consumer.commit(taken)
    live(cluster, [b], H, until=lambda: b.node.session.lag_of(KEY) == 0)


def test_a_late_poll_reports_the_loss():
    cluster = world(records=[9])
    a, _ = blocked(cluster)
    b = start(cluster, "b", 100)
    live(cluster, [b], 2 * H, until=lambda: KEY in b.node.held)
    with pytest.raises(ClaimLost, match="stuck"):
        a.node.consumer.poll(0)


def test_a_stuck_consumer_claims_nothing_until_it_polls():
    cluster = world(records=[9, 9, 9])
    a, _ = blocked(cluster)
    cluster.run_until(held_by(a.node, 3), H)
    b = start(cluster, "b", 100)
    live(cluster, [b], 2 * H, until=lambda: len(b.node.held) == 3)
    # The third one moves for balance.
    (event,) = [
        e.fields for e in a.node.observer.named("stuck") if e.fields["successor"]
    ]
    assert (event["topic"], event["count"], event["partitions"]) == ("t", 2, [0, 1])
    assert event["uncommitted_count"] == 1
    live(cluster, [b], 6 * H)
    assert not a.node.held
    assert [line.record.topics for line in of(cluster, "a", Member)][-1] == ()
    a.per_s = 100
    with pytest.raises(ClaimLost):
        a.act()
    live(cluster, [a, b], 6 * H, until=lambda: len(a.node.held) == 1)
    back = [each for each in releases(cluster, "surplus") if each[0] == "b"]
    assert len(back) == 1


def test_a_blocked_handler_keeps_its_claim_without_a_taker():
    cluster = world(records=[9])
    a, taken = blocked(cluster)
    cluster.run(5 * H)
    assert KEY in a.node.held
    (event,) = a.node.observer.named("stuck")
    assert event.fields["successor"] is None
    b = start(cluster, "b", 100)
    live(cluster, [b], H, until=lambda: KEY in b.node.held)
    assert len(a.node.observer.named("stuck")) == 2
    del taken


def test_an_application_that_commits_record_by_record_is_not_stuck():
    cluster = world(records=[9])
    a = start(cluster, "a", None)
    cluster.run_until(held_by(a.node, 1), H)
    start(cluster, "b", 100)
    (records,) = poll_until(cluster, a).values()
    for record in records:
        cluster.run(H // 2)
        a.node.consumer.commit(record)
    assert releases(cluster) == []


def poll_until(cluster, app):
    polled = {}
    while not polled:
        cluster.run(20)
        polled = app.node.consumer.poll(0)
    return polled


def test_a_stopped_process_is_not_stuck():
    """The handler's progress meanwhile is unknown: the limit starts again."""
    cluster = world(records=[9])
    a, _ = blocked(cluster)
    b = start(cluster, "b", 100)
    cluster.run(H // 2)
    cluster.nodes.remove(a.node)
    cluster.run(H)
    cluster.nodes.append(a.node)
    cluster.run(H // 2)
    assert releases(cluster) == []
    live(cluster, [b], H, until=lambda: KEY in b.node.held)


def test_an_idle_consumer_is_not_stuck():
    cluster = world(records=[0])
    a = start(cluster, "a", None)
    cluster.run_until(held_by(a.node, 1), H)
    start(cluster, "b", 100)
    cluster.run(5 * H)
    assert KEY in a.node.held
    assert a.node.observer.named("stuck") == []


def test_checks_take_a_tenth_of_the_time_at_most(monkeypatch):
    """With thousands of partitions a check takes as long as the time between two."""
    cluster = world(records=[0])
    a = start(cluster, "a", None)
    cluster.run_until(held_by(a.node, 1), H)
    checks = []

    def sample(self, sub, holding, now_ms):
        checks.append(now_ms)
        cluster.clock.advance(50)

    monkeypatch.setattr(SlowConsumerPolicy, "_sample", sample)
    cluster.run(4 * H)
    gaps = [later - earlier for earlier, later in itertools.pairwise(checks)]
    assert len(gaps) > 3
    assert min(gaps) >= 500


def test_a_long_poll_shows_that_the_application_polls(monkeypatch):
    """Otherwise all its partitions are checked, 20 times in an interval."""
    cluster = world(records=[0])
    a = start(cluster, "a", None)
    cluster.run_until(held_by(a.node, 1), H)
    (sub,) = a.node.session._wanted.subs
    ages = []

    def wait(*_):
        ages.append(cluster.clock.now_ms() - sub.back_at_ms)
        cluster.run(100)

    monkeypatch.setattr(Dispatcher, "fetch", wait)
    assert a.node.consumer.poll(H) == {}
    assert len(ages) == H // 100
    assert max(ages) == 0


def test_an_idle_consumer_without_polls_loses_partitions_with_records():
    cluster = world(records=[0, 5])
    a = start(cluster, "a", None)
    cluster.run_until(held_by(a.node, 2), H)
    b = start(cluster, "b", 100)
    live(cluster, [b], 3 * H, until=lambda: Key("g", "t", 1) in b.node.held)


@pytest.mark.parametrize(("limit_ms", "least_ms"), [(0, 8 * H), (3 * H, 3 * H)])
def test_max_handling_ms_extends_the_limit(limit_ms, least_ms):
    cluster = world(records=[9])
    wished = spec(max_handling_ms=limit_ms, release_behind=True)
    a = cluster.node("a", spec=wished)
    cluster.run_until(held_by(a, 1), H)
    a.consumer.poll(0)
    cluster.node("b", spec=wished)
    cluster.run(least_ms - H // 2)
    assert KEY in a.held


def test_a_partition_that_blocks_all_handlers_moves_ever_more_rarely():
    """The limit doubles with each owner that is stuck at the same position."""
    cluster = world(records=[9])
    apps = [start(cluster, name, 1_000) for name in "ab"]
    hung = {}
    for _ in range(100 * H // STEP_MS):
        cluster.run(STEP_MS, step_ms=STEP_MS)
        for app in apps:
            name = app.node.owner.client_id
            if KEY in app.node.held and name not in hung:
                if app.node.consumer.poll(0, 1):
                    hung[name] = cluster.clock.now_ms()
            elif name in hung and KEY not in app.node.held:
                # An operator kills it, and it starts again.
                del hung[name]
                with pytest.raises(ClaimLost):
                    app.node.consumer.poll(0)
    gone = releases(cluster, "stuck")
    limits = [f"(limit {H << number} ms)" for number in range(6)]
    for (_, _, reason, _), limit in zip(gone, limits, strict=True):
        assert limit in reason
    gaps = [b[3] - a[3] for a, b in itertools.pairwise(gone)]
    assert gaps == sorted(gaps)
    assert Counter(who for who, *_ in gone).keys() == {"a", "b"}


def test_grants_lost_by_the_release_of_a_stuck_partition_are_reported():
    cluster = world(records=[9])
    a = start(cluster, "a", None, delivery=AMO, most=4)
    cluster.run_until(held_by(a.node, 1), H)
    handed = []
    while not handed:
        cluster.run(20)
        for records in a.node.consumer.poll(0, 2).values():
            handed += [record.offset for record in records]
    b = start(cluster, "b", 100, delivery=AMO)
    live(cluster, [b], 2 * H, until=lambda: KEY in b.node.held)
    (lost,) = a.node.observer.named("grant_lost")
    assert lost.fields["ranges"][0][0] == handed[-1] + 1


# --- Possible takers ---


def member(name, **rest):
    return MemberView(client_id=name, topics=frozenset({"t"}), **rest)


@pytest.mark.parametrize(
    ("members", "may_be_behind", "expected"),
    [
        pytest.param([member("a")], True, None, id="only-we"),
        pytest.param([member("b", held=3), member("c", held=1)], True, "c", id="room"),
        pytest.param([member("c"), member("b")], True, "b", id="by-name"),
        pytest.param([member("b", is_draining=True)], True, None, id="leaving"),
        pytest.param([member("b", claims_max=2, held=2)], True, None, id="full"),
        pytest.param([member("b", claims_max=2, held=1)], True, "b", id="not-full"),
        pytest.param(
            [MemberView(client_id="b", topics=frozenset({"u"}))],
            True,
            None,
            id="other-topic",
        ),
        pytest.param([member("b", is_behind=True)], False, None, id="lagging"),
        pytest.param([member("b", is_behind=True)], True, "b", id="better-than-none"),
        pytest.param(
            [member("b", is_behind=True), member("c", held=9)], True, "c", id="worse"
        ),
    ],
)
def test_best_taker_prefers_members_that_keep_up_and_hold_least(
    members, may_be_behind, expected
):
    assert best_taker(members, "t", me="a", may_be_behind=may_be_behind) == expected
