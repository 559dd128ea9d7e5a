"""Who gets what, and how it moves, over a whole log."""

import pytest
from enginekit import (
    H,
    lines,
    of,
    wish,
    world,
)
from sidecarkit import Local, Machine, find, having, releases, run, run_until, sizes

from kafka_marshal.errors import (
    ConfigurationError,
)
from kafka_marshal.protocol.records import (
    Member,
)
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api

# --- Sharing ---


def test_clients_share_and_tokens_are_never_shared(cluster, machine):
    a = having(machine)
    b = Local(machine, "b", pid=2)
    b.subscribe()
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], H)
    assert all(a.tokens[key] != b.tokens[key] for key in b.held)
    told = [event for event in a.told if isinstance(event, api.Releasing)]
    assert {event.reason for event in told} == {"moved"}
    assert {event.successor for event in told} == {"host-1"}
    assert {r.reason for r in releases(cluster)} == {"moved"}
    run(cluster, [a, b], 3 * H)
    assert sizes(a, b) == [4, 4], "nothing moves once shared"
    assert len(releases(cluster)) == 4


def test_a_client_that_works_on_is_waited_for(cluster, machine):
    a = having(machine)
    b = Local(machine, "b", pid=2)
    b.subscribe()
    for _ in range(40):
        cluster.run(200)
        a.beat()
        b.live()
    assert sizes(a, b) == [8, 0], "it has confirmed nothing"
    a.take()
    key = min(a.leaving)
    a.positions[key] = 3
    a.give_back(key)
    run_until(cluster, [b], lambda: key in b.valid, H)
    assert b.positions[key] == 3


def test_limits_add_up_and_hold_for_each(cluster, machine):
    a = having(machine, count=3, claims_max=3)
    b = Local(machine, "b", pid=2)
    b.subscribe(claims_max=2)
    run_until(cluster, [a, b], lambda: sizes(a, b) == [3, 2], 2 * H)
    run(cluster, [a, b], 2 * H)
    assert sizes(a, b) == [3, 2]
    members = [
        line.record
        for t in (0, 1)
        for line in of(cluster, "host-1", Member, partition=t)
    ]
    assert (members[-1].capacity, members[-1].labels) == (5, {"weight": "2"})


def test_hosts_share_by_their_clients(cluster, machine):
    """A sidecar of three clients counts as three members."""
    clients = [Local(machine, name, pid=n) for n, name in enumerate("abc", 1)]
    for client in clients:
        client.subscribe()
    alone = cluster.node("alone", wish=wish())
    run_until(
        cluster,
        clients,
        lambda: len(alone.held) == 2 and sorted(sizes(*clients)) == [2, 2, 2],
        4 * H,
    )


def test_whole_topics_go_to_one_client(cluster, machine):
    cluster.fill("u", [1, 1])
    a = having(machine, "a", "t", "u", count=10, policy="topic")
    assert machine.hub.subscribe(
        a.who, "s", wants=api.Wants(topics=("t", "u"), policy="topic")
    ).counts_topics
    b = Local(machine, "b", pid=2)
    b.subscribe("t", "u", policy="topic")
    run_until(cluster, [a, b], lambda: sorted(sizes(a, b)) == [2, 8], 2 * H)
    for client in (a, b):
        assert len({key.topic for key in client.valid}) == 1


def test_different_groups_have_sessions_of_their_own_on_one_engine(cluster, machine):
    """Acceptance U04: one fetch session, whatever the number of clients."""
    a = having(machine)
    other = Local(machine, "a", pid=2, group="h")
    other.subscribe()
    run_until(cluster, [a, other], lambda: sizes(a, other) == [8, 8], H)
    assert len(machine.hub.hosts) == 2
    assert len({host.session.claimant.owner for host in machine.hub.hosts}) == 2


def test_fifty_clients_write_no_more_than_one(cluster):
    """Acceptance U04: records per second do not depend on the number of clients."""

    def written(count):
        cluster = world(partitions=2, records=[1] * 50)
        machine = Machine(cluster)
        clients = [Local(machine, f"c{n}", pid=n + 1) for n in range(count)]
        for client in clients:
            client.subscribe()
        run_until(cluster, clients, lambda: sum(sizes(*clients)) == 50, 3 * H)
        run(cluster, clients, H, step_ms=200)
        before = sum(len(lines(cluster, t)) for t in (0, 1))
        run(cluster, clients, 3 * H, step_ms=200)
        return sum(len(lines(cluster, t)) for t in (0, 1)) - before

    assert written(50) <= written(1) + 2


# --- Claims without consumption ---


def test_a_partition_may_be_claimed_alone(cluster, machine):
    a = Local(machine, "a", pid=1)
    machine.hub.claim(a.who, "t", partition=3)
    machine.hub.claim(a.who, "t", partition=3)
    key = Key("g", "t", 3)
    run_until(cluster, [a], lambda: a.valid == {key}, H)
    (said,) = machine.hub.hosts[0].snapshot(find(machine, a))[0].assigned
    assert (said.subscription, said.position) == ("", None)
    b = Local(machine, "b", pid=2)
    machine.hub.claim(b.who, "t", partition=3)
    run(cluster, [a, b], H)
    assert not b.valid, "who asked first has it"
    a.positions[key] = 7
    a.beat()
    a.drop(key)
    machine.hub.unclaim(a.who, "t", partition=3)
    machine.hub.unclaim(a.who, "t", partition=3)
    run_until(cluster, [b], lambda: b.valid == {key}, H)
    assert b.positions[key] == 7
    assert a.tokens[key] != b.tokens[key]
    machine.watch.kill(2)
    cluster.run(200)
    c = Local(machine, "c", pid=3)
    c.subscribe()
    run_until(cluster, [c], lambda: sizes(c) == [8], H)
    with pytest.raises(Exception, match="already claimed"):
        machine.hub.claim(c.who, "t", partition=3)
    with pytest.raises(ConfigurationError, match="no data partition"):
        machine.hub.claim(c.who, "no topic", partition=3)


def test_what_is_said_late_of_an_earlier_wish_counts_not(cluster, machine):
    """Requests overtake each other, and one that was given up on may still come."""
    a = Local(machine, "a", pid=1)
    key = Key("g", "t", 3)
    hub = machine.hub
    hub.claim(a.who, "t", partition=3, wish=2)
    hub.unclaim(a.who, "t", partition=3, wish=1)
    run_until(cluster, [a], lambda: a.valid == {key}, H)
    hub.unclaim(a.who, "t", partition=3, wish=1)
    run(cluster, [a], H)
    assert a.valid == {key}
    a.drop(key)
    hub.unclaim(a.who, "t", partition=3, wish=2)
    hub.claim(a.who, "t", partition=3, wish=2)
    run(cluster, [a], H)
    assert not a.valid
    assert not hub.hosts[0].session.holdings
    hub.claim(a.who, "t", partition=3, wish=3)
    run_until(cluster, [a], lambda: a.valid == {key}, H)


def test_a_claim_that_is_lost_has_to_be_asked_for_again(cluster, machine):
    a = Local(machine, "a", pid=1)
    machine.hub.claim(a.who, "t", partition=3)
    run_until(cluster, [a], lambda: len(a.valid) == 1, H)
    cluster.run(2 * H)
    a.take()
    assert [e.reason for e in a.named(api.Lost)] == ["client_silent"]
    run(cluster, [a], H) if machine.hub.clients() else a.register()
    assert not a.valid
    machine.hub.claim(a.who, "t", partition=3)
    run_until(cluster, [a], lambda: len(a.valid) == 1, H)
