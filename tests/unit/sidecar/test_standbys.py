"""Clients of a sidecar stand by for partitions of other hosts."""

import pytest
from enginekit import H, spec
from sidecarkit import Local, Machine, run, run_until

from kafka_marshal.remote import api

HELD = 8


def other_owner(cluster, name="other"):
    """Return an owner on another host that keeps everything, its surplus included."""
    other = cluster.node(name, spec=spec(policy="greedy"))
    cluster.run_until(lambda: len(other.held) == HELD, 3 * H)
    return other


def standing(machine, name="b", *, pid=2, count=1, **rest):
    client = Local(machine, name, pid=pid)
    client.subscribe(standbys=count, policy="greedy", **rest)
    return client


def placed(machine):
    return machine.service.groups[0]._warm_ups.standbys


def test_a_client_loads_the_state_of_partitions_of_another_host(cluster, machine):
    other = other_owner(cluster)
    b = standing(machine)
    run_until(cluster, [b], lambda: len(b.standbys) == HELD, 3 * H)
    assert not b.held
    event = min(b.standbys.items())[1]
    assert (event.owner, event.position, event.subscription) == ("other", 0, "s")
    cluster.crash(other)
    run_until(cluster, [b], lambda: len(b.valid) == HELD, 5 * H)
    run(cluster, [b], 500)
    assert not b.standbys
    assert not placed(machine).by_key
    assert all(each.owner for each in b.named(api.Standby))


def test_each_partition_goes_to_the_client_that_loaded_it(cluster, machine):
    other = other_owner(cluster)
    b, c = standing(machine), standing(machine, "d", pid=3)
    run_until(cluster, [b, c], lambda: len(b.standbys) + len(c.standbys) == HELD, 3 * H)
    run(cluster, [b, c], H)
    loaded = {key: client for client in (b, c) for key in client.standbys}
    assert len(loaded) == HELD
    assert b.standbys
    cluster.crash(other)
    first = {}

    def has_all():
        for client in (b, c):
            for key in client.valid:
                first.setdefault(key, client)
        return len(b.valid) + len(c.valid) == HELD

    run_until(cluster, [b, c], has_all, 5 * H)
    assert first == loaded


def test_a_client_without_standbys_loads_nothing(cluster, machine):
    other_owner(cluster)
    b, c = standing(machine), standing(machine, "c", pid=3, count=0)
    run_until(cluster, [b, c], lambda: len(b.standbys) == HELD, 3 * H)
    assert not c.named(api.Standby)


def test_another_client_is_asked_if_the_first_dies(cluster, machine):
    other_owner(cluster)
    b, c = standing(machine), standing(machine, "d", pid=3)
    run_until(cluster, [b, c], lambda: len(b.standbys) + len(c.standbys) == HELD, 3 * H)
    machine.watch.kill(2)
    run_until(cluster, [c], lambda: len(c.standbys) == HELD, 2 * H)


def test_without_a_client_nobody_is_asked(cluster, machine):
    other = other_owner(cluster)
    b = standing(machine)
    run_until(cluster, [b], lambda: len(b.standbys) == HELD, 3 * H)
    machine.watch.kill(2)
    cluster.run(3 * H)
    assert len(other.held) == HELD
    assert not placed(machine).by_key


def test_a_client_forgets_what_another_host_stands_by_for(cluster, machine):
    other_owner(cluster)
    b = standing(machine)
    run_until(cluster, [b], lambda: len(b.standbys) == HELD, 3 * H)
    second = Machine(cluster, "host-2")
    c = standing(second, "c", pid=4)
    run_until(cluster, [b, c], lambda: len(c.standbys) > 0, 4 * H)
    run(cluster, [b, c], 2 * H)
    assert not b.standbys.keys() & c.standbys.keys()
    assert len(b.standbys) + len(c.standbys) == HELD


def test_a_snapshot_has_what_a_client_stands_by_for(cluster, machine):
    other_owner(cluster)
    b = standing(machine)
    run_until(cluster, [b], lambda: len(b.standbys) == HELD, 3 * H)
    before = dict(b.standbys)
    b.after = None
    b.follow()
    b.take()
    assert b.standbys == before


def test_a_partition_that_went_elsewhere_is_forgotten(cluster, machine):
    """The sidecar had it and lost it before a client got it."""
    other_owner(cluster)
    b = standing(machine)
    run_until(cluster, [b], lambda: len(b.standbys) == HELD, 3 * H)
    key = min(b.standbys)
    placed(machine).end(key, has_come=True)
    run(cluster, [b], H)
    assert b.named(api.Standby)[-1].owner is None
    placed(machine).end(key, has_come=False)
    assert key not in placed(machine).by_key


def test_a_partition_that_another_client_got_is_forgotten(cluster, machine):
    b = standing(machine, count=0)
    run_until(cluster, [b], lambda: len(b.valid) == HELD, 3 * H)
    c = standing(machine, "c", pid=3, claims_max=1)
    run(cluster, [b, c], H)
    key = next(key for key in b.valid if key not in c.held)
    placed(machine).begin(key, owner="other", position=None)
    run(cluster, [b, c], H)
    assert [each.owner for each in c.named(api.Standby)] == ["other", None]


def test_what_the_client_makes_of_it_is_never_known(cluster, machine):
    standing(machine)
    session = machine.service.groups[0].session
    (sub,) = session.subscriptions
    key = next(iter(sub.all_keys()))
    outcome = sub.standby.begin(key, owner="other", position=1)
    assert outcome.done()
    assert outcome.exception() is None
    assert outcome.result() is None
    sub.standby.close()
    assert sub.standby.count == 1


@pytest.mark.parametrize("count", [0, 2])
def test_the_largest_number_of_the_clients_counts(cluster, machine, count):
    b = standing(machine, count=count)
    run(cluster, [b], H)
    (sub,) = machine.service.groups[0].session.subscriptions
    assert (sub.standby.count if sub.standby else 0) == count
