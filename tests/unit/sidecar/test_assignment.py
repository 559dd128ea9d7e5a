"""Assignment of partitions to clients, alone and by services in a simulated cluster.

The assignment is balanced, sticky, within limits and deterministic.
"""

import random
from collections import Counter

import pytest
from countkit import is_over, placed, resize
from enginekit import (
    H,
    lines,
    of,
    spec,
    world,
)
from sidecarkit import (
    Local,
    Machine,
    find,
    having,
    leaving,
    releases,
    run,
    run_until,
    sharing,
    sizes,
)

from kafka_marshal.engine.session import Session
from kafka_marshal.errors import (
    ConfigurationError,
)
from kafka_marshal.protocol import records
from kafka_marshal.protocol.layout import MOVING
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.sidecar.assignment import assign
from kafka_marshal.sidecar.group import CHECK_MS

# --- The assignment ---


def keys(*numbers, topic="t"):
    return [Key("g", topic, number) for number in numbers]


def counts_of(placed):
    return dict(Counter(placed.values()))


@pytest.mark.parametrize(
    ("count", "seats", "expected"),
    [
        pytest.param(6, {"a": None, "b": None, "c": None}, (2, 2, 2), id="even"),
        pytest.param(7, {"a": None, "b": None, "c": None}, (3, 2, 2), id="one-more"),
        pytest.param(7, {"a": 1, "b": None, "c": None}, (1, 3, 3), id="limit"),
        pytest.param(7, {"a": 0, "b": 2, "c": None}, (0, 2, 5), id="full"),
        pytest.param(7, {"a": 1, "b": 2, "c": 1}, (1, 2, 1), id="no"),
        pytest.param(1, {"c": None, "b": None, "a": None}, (1, 0, 0), id="by-name"),
        pytest.param(3, {}, (0, 0, 0), id="nobody"),
        pytest.param(0, {"a": None}, (0, 0, 0), id="nothing"),
    ],
)
def test_clients_get_equal_shares_within_their_limits(count, seats, expected):
    placed = assign(keys(*range(count)), seats, present={})
    assert tuple(counts_of(placed).get(name, 0) for name in "abc") == expected


def test_only_the_surplus_partitions_of_a_client_move():
    present = dict.fromkeys(keys(0, 1, 2, 3), "a") | dict.fromkeys(keys(4, 5), "b")
    placed = assign(keys(*range(6)), {"a": None, "b": None}, present=present)
    moved = {key for key in present if placed[key] != present[key]}
    assert counts_of(placed) == {"a": 3, "b": 3}
    assert moved == set(keys(3)), "the last goes"


def test_keys_of_departed_clients_are_assigned_to_others():
    present = dict.fromkeys(keys(0, 1), "gone")
    assert counts_of(assign(keys(0, 1), {"a": None}, present=present)) == {"a": 2}


def test_assign_can_keep_each_topic_at_one_client():
    wanted = keys(0, 1, 2) + keys(0, 1, topic="u") + keys(0, topic="v")
    present = {Key("g", "t", 1): "b", Key("g", "u", 0): "b"}
    placed = assign(wanted, {"a": None, "b": 2}, present=present, whole_topics=True)
    by_topic = {key.topic: set() for key in wanted}
    for key, name in placed.items():
        by_topic[key.topic].add(name)
    assert by_topic == {"t": {"b"}, "u": {"b"}, "v": {"a"}}


def test_any_assignment_is_balanced_stable_and_independent_of_order():
    chance = random.Random(7)
    for _ in range(300):
        wanted = keys(*range(chance.randint(0, 20)))
        seats = {
            name: chance.choice([None, None, 0, 1, 5])
            for name in "abcd"[: chance.randint(0, 4)]
        }
        had = chance.sample(wanted, chance.randint(0, len(wanted)))
        present = {key: chance.choice("abcdx") for key in had}
        placed = assign(wanted, seats, present=present)
        counts = counts_of(placed)
        room = sum(len(wanted) if most is None else most for most in seats.values())
        assert len(placed) == min(len(wanted), room)
        limits = {name: most for name, most in seats.items() if most is not None}
        assert all(counts.get(name, 0) <= most for name, most in limits.items())
        open_seats = seats.keys() - limits
        shares = [counts.get(name, 0) for name in open_seats]
        assert max(shares, default=0) - min(shares, default=0) <= 1
        assert assign(wanted, seats, present=placed) == placed
        shuffled = chance.sample(wanted, len(wanted))
        assert (
            assign(shuffled, dict(reversed(seats.items())), present=present) == placed
        )


@pytest.fixture
def cluster():
    return world(partitions=2, records=[5] * 8)


@pytest.fixture
def machine(cluster):
    return Machine(cluster)


# --- Start offsets, and topics with takers ---


def test_a_partition_without_position_starts_at_the_given_offset(cluster, machine):
    start = api.Start(topic="t", partition=2, offset=3)
    client = having(machine, starts=(start,))
    found = {key.partition: at for key, at in client.positions.items()}
    assert (found[2], found[1]) == (3, 0)


def topics_with_takers(client):
    return client.service.beat(client.who, api.HeartbeatRequest()).topics_with_takers


def test_a_heartbeat_returns_topics_that_another_client_could_take(cluster, machine):
    a = having(machine)
    assert topics_with_takers(a) == ()
    b = Local(machine, "b", pid=2)
    b.subscribe(claims_max=2)
    assert topics_with_takers(a) == ("t",)
    run_until(cluster, [a, b], lambda: sizes(a, b) == [6, 2], 3 * H)
    assert topics_with_takers(a) == ()
    assert topics_with_takers(b) == ("t",)


def test_topics_with_takers_are_cached_for_the_check_interval(cluster, machine):
    a = having(machine)
    b = Local(machine, "b", pid=2)
    b.subscribe(claims_max=9)
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], 3 * H)
    run(cluster, [a, b], 200)
    assert topics_with_takers(a) == ("t",)
    client = machine.service.groups[0].table.clients["b"]
    client.excluded_until_ms = cluster.clock.now_ms() + 100 * H
    assert topics_with_takers(a) == ("t",)
    cluster.run(CHECK_MS)
    assert topics_with_takers(a) == ()


def test_another_host_counts_as_a_taker(cluster, machine):
    a = having(machine)
    other = Machine(cluster, "host-2")
    b = Local(other, "b", pid=2)
    b.subscribe()
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], 6 * H)
    assert topics_with_takers(a) == ("t",)


# --- Sharing ---


def test_half_of_the_partitions_move_to_a_new_client_under_new_tokens(cluster, machine):
    a, b = sharing(cluster, machine)
    assert all(a.tokens[key] != b.tokens[key] for key in b.held)
    found = [event for event in a.received if isinstance(event, api.Releasing)]
    assert {event.reason for event in found} == {"moved"}
    assert {event.successor for event in found} == {"host-1"}
    assert {r.reason for r in releases(cluster)} == {"moved"}
    run(cluster, [a, b], 3 * H)
    assert sizes(a, b) == [4, 4], "nothing moves once shared"
    assert len(releases(cluster)) == 4


def test_a_partition_moves_only_after_its_client_confirms_the_release(cluster, machine):
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


def test_claims_max_limits_each_client_and_adds_up_for_the_host(cluster, machine):
    a = having(machine, count=3, claims_max=3)
    b = Local(machine, "b", pid=2)
    b.subscribe(claims_max=2)
    run_until(cluster, [a, b], lambda: sizes(a, b) == [3, 2], 2 * H)
    run(cluster, [a, b], 2 * H)
    assert sizes(a, b) == [3, 2]
    members = [
        line.record
        for t in (0, 1)
        for line in of(cluster, "host-1", records.Member, partition=t)
    ]
    labels = {"weight": "2", "layout": "1"}
    assert (members[-1].capacity, members[-1].labels) == (5, labels)


@pytest.mark.parametrize("look_ms", [0, H // 4])
def test_clients_keep_keys_that_move_to_another_coordinating_partition(
    cluster, machine, monkeypatch, look_ms
):
    """PROTOCOL 10.3: the host claims a key again for the client that had it.

    Also if the session checks all keys less often, as it does with many of them.
    """
    a, b = sharing(cluster, machine)
    before = {client.name: client.valid for client in (a, b)}
    monkeypatch.setattr(
        Session, "next_check_ms", lambda _, since_ms: since_ms + look_ms
    )
    a.subscribe(claims_max=4)
    cluster.run(1)
    resize(cluster, 4)
    run_until(cluster, [a, b], lambda: is_over(cluster), 6 * H)
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], H)
    assert {client.name: client.valid for client in (a, b)} == before
    assert {key: state.owner.client_id for key, state in placed(cluster).items()} == (
        dict.fromkeys(before["a"] | before["b"], "host-1")
    )


def layout_label(cluster, machine):
    """Return the generation that the sidecar announced last."""
    incarnation = machine.service.groups[0].session.claimant.owner.incarnation
    members = [
        line.record
        for t in range(len(cluster.kafka.topic("__marshal").partitions))
        for line in of(cluster, "host-1", records.Member, partition=t)
        if line.record.incarnation == incarnation
    ]
    return max(members, key=lambda member: member.seq).labels["layout"]


def test_a_sidecar_announces_the_least_generation_of_its_clients(cluster, machine):
    """PROTOCOL 10.7: a client acknowledges a change once it has applied its events."""
    a, b = sharing(cluster, machine)
    a.acknowledges = b.acknowledges = True
    run(cluster, [a, b], H)
    assert [each.generation for each in (a, b)] == [1, 1]
    resize(cluster, 4)
    b.acknowledges = False
    run_until(cluster, [a, b], lambda: a.generation == 2, H)
    run(cluster, [a, b], H)
    assert layout_label(cluster, machine) == "1"
    b.acknowledges = True
    # Announced at once, not with the next regular announcement.
    run_until(cluster, [a, b], lambda: layout_label(cluster, machine) == "2", H // 10)
    events = [getattr(each, "reason", type(each)) for each in a.received]
    assert events.index(MOVING) < events.index(api.Layout)


def test_clients_that_report_no_generation_count_as_their_sidecar(cluster, machine):
    a, b = sharing(cluster, machine)
    resize(cluster, 4)
    run_until(cluster, [a, b], lambda: layout_label(cluster, machine) == "2", H)
    # A generation that the sidecar has not reached does not raise the label.
    b.beat(generation=7)
    run(cluster, [a], H)
    assert layout_label(cluster, machine) == "2"
    b.beat(generation=1)
    run(cluster, [a], H)
    assert layout_label(cluster, machine) == "1"
    leaving(b)
    run_until(cluster, [a], lambda: layout_label(cluster, machine) == "2", H)


def test_a_restarted_sidecar_restores_the_generations_of_its_clients(tmp_path, cluster):
    machine = Machine(cluster, state_dir=tmp_path)
    a = having(machine)
    a.beat(generation=1)
    run(cluster, [a], H)
    machine.crash()
    resize(cluster, 4)
    machine.start()
    assert find(machine, a).generation == 1
    cluster.run(H // 10)
    assert layout_label(cluster, machine) == "1"
    a.acknowledges = True
    a.register()
    run_until(cluster, [a], lambda: layout_label(cluster, machine) == "2", H)


def test_hosts_share_partitions_by_their_numbers_of_clients(cluster, machine):
    """A sidecar of three clients counts as three members."""
    clients = [Local(machine, name, pid=n) for n, name in enumerate("abc", 1)]
    for client in clients:
        client.subscribe()
    alone = cluster.node("alone", spec=spec())
    run_until(
        cluster,
        clients,
        lambda: len(alone.held) == 2 and sorted(sizes(*clients)) == [2, 2, 2],
        4 * H,
    )


def test_the_topic_policy_gives_each_topic_to_one_client(cluster, machine):
    cluster.fill("u", [1, 1])
    a = having(machine, "a", "t", "u", count=10, policy="topic")
    assert machine.service.subscribe(
        a.who, "s", spec=api.SubscriptionSpec(topics=("t", "u"), policy="topic")
    ).counts_topics
    b = Local(machine, "b", pid=2)
    b.subscribe("t", "u", policy="topic")
    run_until(cluster, [a, b], lambda: sorted(sizes(a, b)) == [2, 8], 2 * H)
    for client in (a, b):
        assert len({key.topic for key in client.valid}) == 1


def test_each_group_has_a_session_and_an_owner_of_its_own(cluster, machine):
    a = having(machine)
    other = Local(machine, "a", pid=2, group="h")
    other.subscribe()
    run_until(cluster, [a, other], lambda: sizes(a, other) == [8, 8], H)
    assert len(machine.service.groups) == 2
    assert len({host.session.claimant.owner for host in machine.service.groups}) == 2


def test_fifty_clients_write_as_many_records_as_one(cluster):
    """The number of records does not depend on the number of clients."""

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


def test_a_partition_can_be_claimed_without_consuming_it(cluster, machine):
    a = Local(machine, "a", pid=1)
    machine.service.claim(a.who, "t", partition=3)
    machine.service.claim(a.who, "t", partition=3)
    key = Key("g", "t", 3)
    run_until(cluster, [a], lambda: a.valid == {key}, H)
    (assigned,) = machine.service.groups[0].snapshot(find(machine, a))[0].assigned
    assert (assigned.subscription, assigned.position) == ("", None)
    b = Local(machine, "b", pid=2)
    machine.service.claim(b.who, "t", partition=3)
    run(cluster, [a, b], H)
    assert not b.valid, "who asked first has it"
    a.positions[key] = 7
    a.beat()
    a.drop(key)
    machine.service.unclaim(a.who, "t", partition=3)
    machine.service.unclaim(a.who, "t", partition=3)
    run_until(cluster, [b], lambda: b.valid == {key}, H)
    assert b.positions[key] == 7
    assert a.tokens[key] != b.tokens[key]
    machine.watch.kill(2)
    cluster.run(200)
    c = Local(machine, "c", pid=3)
    c.subscribe()
    run_until(cluster, [c], lambda: sizes(c) == [8], H)
    with pytest.raises(Exception, match="already claimed"):
        machine.service.claim(c.who, "t", partition=3)
    with pytest.raises(ConfigurationError, match="not a valid data partition"):
        machine.service.claim(c.who, "no topic", partition=3)


def test_a_late_claim_request_with_an_older_number_is_ignored(cluster, machine):
    """Requests may arrive out of order, also those that the client gave up."""
    a = Local(machine, "a", pid=1)
    key = Key("g", "t", 3)
    service = machine.service
    service.claim(a.who, "t", partition=3, request=2)
    service.unclaim(a.who, "t", partition=3, request=1)
    run_until(cluster, [a], lambda: a.valid == {key}, H)
    service.unclaim(a.who, "t", partition=3, request=1)
    run(cluster, [a], H)
    assert a.valid == {key}
    a.drop(key)
    service.unclaim(a.who, "t", partition=3, request=2)
    service.claim(a.who, "t", partition=3, request=2)
    run(cluster, [a], H)
    assert not a.valid
    assert not service.groups[0].session.holdings
    service.claim(a.who, "t", partition=3, request=3)
    run_until(cluster, [a], lambda: a.valid == {key}, H)


def requests_of(a):
    return [
        each.request
        for event in a.received
        for each in getattr(event, "assigned", (event,))
        if isinstance(each, api.Assignment)
    ]


def test_an_assignment_names_the_request_that_it_answers(cluster, machine):
    a = Local(machine, "a", pid=1)
    key = Key("g", "t", 3)
    service = machine.service
    service.claim(a.who, "t", partition=3, request=1)
    run_until(cluster, [a], lambda: a.valid == {key}, H)
    # Arrives before the request that ends the first claim.
    service.claim(a.who, "t", partition=3, request=2)
    run(cluster, [a], H)
    assert requests_of(a) == [1]
    service.unclaim(a.who, "t", partition=3, request=1)
    service.unclaim(a.who, "t", partition=3, request=1)
    run_until(cluster, [a], lambda: requests_of(a) == [1, 2], H)
    run(cluster, [a], H)
    assert a.valid == {key}


def test_request_numbers_restart_with_a_new_process_of_the_client(cluster, machine):
    a = Local(machine, "a", pid=1)
    machine.service.claim(a.who, "t", partition=3, request=2)
    machine.service.unclaim(a.who, "t", partition=3, request=2)
    a.pid = 2
    a.register()
    machine.service.claim(a.who, "t", partition=3, request=1)
    run_until(cluster, [a], lambda: a.valid == {Key("g", "t", 3)}, H)


def test_requests_keep_their_numbers_when_the_sidecar_restarts(tmp_path, cluster):
    machine = Machine(cluster, state_dir=tmp_path)
    a = Local(machine, "a", pid=1)
    key = Key("g", "t", 3)
    machine.service.claim(a.who, "t", partition=3, request=4)
    run_until(cluster, [a], lambda: a.valid == {key}, H)
    machine.restart()
    a.register()
    run_until(cluster, [a], lambda: requests_of(a)[1:] == [4], H)


def test_a_silent_client_must_request_its_lost_claim_again(cluster, machine):
    a = Local(machine, "a", pid=1)
    machine.service.claim(a.who, "t", partition=3)
    run_until(cluster, [a], lambda: len(a.valid) == 1, H)
    cluster.run(2 * H)
    a.take()
    assert [e.reason for e in a.named(api.Lost)] == ["client_silent"]
    run(cluster, [a], H) if machine.service.clients() else a.register()
    assert not a.valid
    machine.service.claim(a.who, "t", partition=3)
    run_until(cluster, [a], lambda: len(a.valid) == 1, H)


def claim_count(cluster):
    kind = records.ClaimingPartition
    return sum(len(of(cluster, "host-1", kind, partition=t)) for t in (0, 1))


def test_a_single_partition_that_is_given_back_is_not_claimed_again(cluster, machine):
    """The request that ends its claim arrives a moment later."""
    a = Local(machine, "a", pid=1)
    key, service = Key("g", "t", 3), machine.service
    service.claim(a.who, "t", partition=3, request=1)
    run_until(cluster, [a], lambda: a.valid == {key}, H)
    a.give_back(key, reason="released")
    run(cluster, [a], H)
    assert claim_count(cluster) == 1
    service.unclaim(a.who, "t", partition=3, request=1)
    service.claim(a.who, "t", partition=3, request=2)
    run_until(cluster, [a], lambda: a.valid == {key}, H)
    assert claim_count(cluster) == 2


def test_single_partitions_of_a_client_that_leaves_are_not_claimed_again(
    cluster, machine
):
    a = Local(machine, "a", pid=1)
    for partition in (3, 4):
        machine.service.claim(a.who, "t", partition=partition)
    run_until(cluster, [a], lambda: len(a.valid) == 2, H)
    leaving(a)
    run(cluster, [], H)
    assert claim_count(cluster) == 2


def test_a_request_sent_before_the_previous_claim_ends_is_answered(cluster, machine):
    a = Local(machine, "a", pid=1)
    key, service = Key("g", "t", 3), machine.service
    service.claim(a.who, "t", partition=3, request=1)
    run_until(cluster, [a], lambda: a.valid == {key}, H)
    service.claim(a.who, "t", partition=3, request=2)  # before the first one ends
    a.give_back(key, reason="released")
    run_until(cluster, [a], lambda: requests_of(a) == [1, 2], H)
