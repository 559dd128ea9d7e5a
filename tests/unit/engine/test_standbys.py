"""Members stand by for keys of others, and take them over first (PROTOCOL 9.9)."""

import pytest
from enginekit import Application, H, of, spec, takeovers, world, write
from logkit import settings

from kafka_marshal.engine import standbys
from kafka_marshal.protocol.records import Member


def standing(application, *, count=1, **rest):
    return spec(on_standby=application, standbys=count, **rest)


@pytest.fixture
def cluster():
    return world(partitions=2, records=(4, 4, 4, 4))


def duties(node):
    """Return the partitions that a member stands by for."""
    return {key.partition for key in node.session._standbys.keys}


def fleet(cluster, names, *, host=None, **rest):
    """Return members that share four keys evenly, and their applications."""
    applications = {name: Application() for name in names}
    nodes = {
        name: cluster.node(
            name, spec=standing(applications[name], **rest), host=host and host[name]
        )
        for name in names
    }
    share = 4 // len(names)
    cluster.run_until(
        lambda: all(len(node.held) >= share for node in nodes.values()), 9 * H
    )
    cluster.run(H)
    return nodes, applications


def test_each_key_has_one_standby_that_is_not_its_owner(cluster):
    nodes, applications = fleet(cluster, "ab")
    for name, other in (("a", "b"), ("b", "a")):
        held = {key.partition for key in nodes[other].held}
        assert duties(nodes[name]) == held
        calls = {(number, owner) for number, _, owner in applications[name].calls}
        assert {(number, other) for number in held} <= calls


def test_on_standby_is_called_with_the_position(cluster):
    a = cluster.node("a", spec=spec())
    cluster.run_until(lambda: len(a.held) == 4, 9 * H)
    cluster.run(100)  # all have their start positions
    a.consumer.poll(1000)
    a.consumer.commit()
    cluster.run(H)
    application = Application()
    cluster.node("b", spec=standing(application))
    cluster.run(3 * H)
    assert {position for _, position, _ in application.calls} == {4}


def test_members_announce_the_number_of_standbys_in_a_label(cluster):
    fleet(cluster, "ab", count=2)
    last = of(cluster, "a", Member, partition=1) or of(cluster, "a", Member)
    assert last[-1].record.labels["standbys"] == "2"


def test_a_member_without_a_callback_does_not_stand_by(cluster):
    cluster.node("a", spec=spec())
    b = cluster.node("b", spec=spec())
    cluster.run_until(lambda: len(b.held) == 2, 9 * H)
    assert not b.observer.named("standby_begun")
    assert not duties(b)


def test_the_standbys_take_over_the_keys_of_a_member_that_died(cluster):
    nodes, _ = fleet(cluster, "abcd")
    victim = nodes.pop("a")
    keys = {key.partition for key in victim.held}
    warm = {
        number: name for name, node in nodes.items() for number in duties(node) & keys
    }
    assert warm.keys() == keys
    cluster.crash(victim)
    cluster.run_until(
        lambda: sum(len(node.held) for node in nodes.values()) == 4, 9 * H
    )
    taken = {
        line.record.partition: line.record.client_id
        for t in (0, 1)
        for line in takeovers(cluster, t)
        if line.record.partition in keys
    }
    assert taken == warm


def test_plans_give_the_keys_of_a_dead_member_to_their_standbys(cluster):
    for t in (0, 1):
        write(cluster, settings(policy="planner"), t)
    nodes, _ = fleet(cluster, "abcd")
    assert nodes["a"].session._planner.is_in_force()
    victim = nodes.pop("a")
    (key,) = victim.held
    (warm,) = (
        name for name, node in nodes.items() if key in node.session._standbys.keys
    )
    cluster.crash(victim)
    cluster.run_until(lambda: key in nodes[warm].held, 9 * H)
    (first,) = (
        line.record.client_id
        for t in (0, 1)
        for line in takeovers(cluster, t)
        if line.record.partition == key.partition
    )
    assert first == warm


def test_another_member_takes_over_if_the_standby_cannot(cluster):
    """L1 and L6: a standby that cannot claim delays a takeover by the jitter."""
    nodes, _ = fleet(cluster, "abc")
    victim = nodes.pop("a")
    key = min(victim.held)
    (name,) = (n for n in "bc" if key.partition in duties(nodes[n]))
    standby = nodes.pop(name)
    (other,) = nodes.values()
    cluster.crash(victim)
    standby.log.cut = True
    # It counts as alive for two heartbeat intervals more than the dead owner.
    took_ms = cluster.run_until(lambda: key in other.held, 9 * H)
    assert took_ms < 5 * H


def test_the_second_standby_begins_after_the_first(cluster):
    nodes, _ = fleet(cluster, "abc", count=2)
    key = min(nodes["a"].held)
    delays = [
        nodes[name].session._standbys.delay_ms(key, "a", limit_ms=300) for name in "bc"
    ]
    assert sorted(delays) == [(0, 0), (150, 150)]


def test_on_standby_gets_none_when_another_member_becomes_the_standby(cluster):
    nodes, applications = fleet(cluster, "ab")
    for name in "cdefgh":
        nodes[name] = cluster.node(name, spec=standing(Application()))
    cluster.run(6 * H)
    forgotten = [
        (number, None, None)
        for name in "ab"
        for event in nodes[name].observer.named("standby_ended")
        if not event.fields["is_owner"]
        for number in [event.fields["key"].partition]
    ]
    assert forgotten
    calls = [*applications["a"].calls, *applications["b"].calls]
    assert sorted(call for call in calls if call[2] is None) == sorted(forgotten)


def test_on_standby_does_not_get_none_for_a_key_that_was_claimed(cluster):
    nodes, applications = fleet(cluster, "ab")
    cluster.crash(nodes.pop("a"))
    cluster.run_until(lambda: len(nodes["b"].held) == 4, 9 * H)
    cluster.run(H)
    assert all(owner for _, _, owner in applications["b"].calls)
    fields = [
        event.fields["is_owner"] for event in nodes["b"].observer.named("standby_ended")
    ]
    assert set(fields) == {True}


def test_a_failing_on_standby_is_reported_and_keys_are_claimed(cluster):
    a = cluster.node("a", spec=spec())
    cluster.run_until(lambda: len(a.held) == 4, 9 * H)
    b = cluster.node("b", spec=standing(Application(ValueError("no disk"))))
    cluster.run(2 * H)
    failed = b.observer.named("standby_failed")
    assert {str(event.fields["error"]) for event in failed} == {"no disk"}
    assert len(b.held) == 2


def test_calls_of_on_standby_that_a_close_drops_are_not_reported(cluster):
    a = cluster.node("a", spec=spec())
    cluster.run_until(lambda: len(a.held) == 4, 9 * H)
    b = cluster.node("b")
    b.standing_by.is_held = True
    b.consume(standing(Application()))
    cluster.run_until(lambda: b.standing_by.waiting_count, 2 * H)
    b.consumer.close(timeout_ms=0)
    cluster.run(H)
    assert not b.observer.named("standby_failed")


def test_few_keys_are_loaded_at_a_time(cluster, monkeypatch):
    monkeypatch.setattr(standbys, "LOADING_MAX", 1)
    a = cluster.node("a", spec=spec())
    cluster.run_until(lambda: len(a.held) == 4, 9 * H)
    application = Application()
    b = cluster.node("b")
    b.standing_by.is_held = True
    b.consume(standing(application))
    cluster.run(2 * H)
    assert b.standing_by.waiting_count == 1
    for _ in range(2):
        b.standing_by.run_waiting()
        cluster.run(H)
    assert len(duties(b)) == 2


def test_all_keys_get_standbys_when_checked_in_small_portions(cluster, monkeypatch):
    monkeypatch.setattr(standbys, "DIGESTS_MAX", 1)
    monkeypatch.setattr(standbys, "KEYS_MAX", 2)
    nodes, _ = fleet(cluster, "ab")
    cluster.run(H)
    assert sum(len(duties(node)) for node in nodes.values()) == 4


def test_hosts_of_live_members_are_kept_beyond_the_limit(cluster, monkeypatch):
    monkeypatch.setattr(standbys, "HOSTS_MAX", 1)
    nodes, _ = fleet(cluster, "ab")
    nodes["c"] = cluster.node("c", spec=standing(Application()))
    cluster.run(4 * H)
    assert nodes["a"].session._standbys._hosts.keys() == {"a", "b", "c"}


def test_hosts_of_members_that_are_gone_are_forgotten_beyond_the_limit(
    cluster, monkeypatch
):
    """Until then they are kept: such a member may still own keys."""
    monkeypatch.setattr(standbys, "HOSTS_MAX", 3)
    nodes, _ = fleet(cluster, "abc")
    cluster.crash(nodes["c"])
    cluster.run(4 * H)
    hosts = nodes["a"].session._standbys._hosts
    assert hosts.keys() == {"a", "b", "c"}
    cluster.node("d", spec=standing(Application()))
    cluster.run(4 * H)
    assert hosts.keys() == {"a", "b", "d"}


def test_a_member_on_another_host_stands_by(cluster):
    host = {"a": "h1", "b": "h1", "c": "h2", "d": "h2"}
    nodes, _ = fleet(cluster, "abcd", host=host)
    assert sum(len(duties(node)) for node in nodes.values()) == 4
    for name, node in nodes.items():
        beside = {n for n in "abcd" if host[n] == host[name]}
        near = {key.partition for n in beside for key in nodes[n].held}
        assert not duties(node) & near


def test_a_standby_at_claims_max_takes_nothing_over(cluster):
    nodes, _ = fleet(cluster, "ab", claims_max=2)
    cluster.crash(nodes.pop("a"))
    cluster.run(5 * H)
    assert len(nodes["b"].held) == 2


def test_a_closed_consumer_stands_by_for_no_key(cluster):
    nodes, _ = fleet(cluster, "ab")
    node = nodes["b"]
    node.consumer.close(timeout_ms=0)
    cluster.run(H)
    assert not duties(node)
    assert not node.observer.named("standby_failed")
