"""Who is let in, and who is not (PROTOCOL 12), over a whole log."""

import pytest
from enginekit import (
    H,
)
from sidecarkit import Local, having, run, run_until

from kafka_marshal.errors import (
    ClaimLost,
    ConfigurationError,
    IdentityConflict,
)
from kafka_marshal.remote import api
from kafka_marshal.sidecar.process_monitor import UNKNOWN_PEER, Caller

# --- Joining ---


def test_it_says_what_a_client_has_to_know(machine):
    info = machine.service.info()
    assert (info.client_id, info.state, info.level) == ("host-1", "RUNNING", 1)
    assert info.cluster_id == "simulated"
    assert info.coordination_topic == "__marshal"
    assert info.heartbeat_interval_ms == H
    assert info.client_beat_ms_max == H // 6
    assert info.now_ms == machine.clock.now_ms()
    assert len(info.incarnation) == 32


@pytest.mark.parametrize("beat_ms", [0, H // 6 + 1])
def test_beats_must_come_well_before_the_deadlines(machine, beat_ms):
    """Acceptance KA05."""
    said = api.Registration(instance="00" * 16, beat_ms=beat_ms)
    with pytest.raises(ConfigurationError, match="it must be 1 to 500") as caught:
        machine.service.register("g", "a", registration=said, peer=UNKNOWN_PEER)
    assert caught.value.setting == "beat_ms"


@pytest.mark.parametrize(("group", "name"), [("g", "no name"), ("a/b", "a")])
def test_malformed_names_are_refused(machine, group, name):
    """Acceptance FC13."""
    said = api.Registration(instance="00" * 16, beat_ms=100)
    with pytest.raises(ConfigurationError, match="is no valid name"):
        machine.service.register(group, name, registration=said, peer=UNKNOWN_PEER)


def test_a_process_that_comes_again_is_known(machine):
    a = Local(machine, "a", pid=1)
    assert not a.registered.was_known
    a.register()
    assert a.registered.was_known


def test_two_processes_of_one_name_do_not_live_together(machine):
    having(machine)
    with pytest.raises(IdentityConflict, match="process 1 of this host") as caught:
        Local(machine, "a", pid=2)
    assert caught.value.holder == "a"


def test_the_next_process_may_have_a_dead_ones_name(cluster, machine):
    a = having(machine)
    machine.watch.kill(1)
    again = Local(machine, "a", pid=2)
    again.subscribe()
    run_until(cluster, [again], lambda: len(again.valid) == 8, H)
    with pytest.raises(ClaimLost) as caught:
        a.beat()
    assert caught.value.reason == "gone"


def test_a_death_that_was_not_told_yet_makes_room_as_well(cluster, machine):
    having(machine)
    machine.watch.watched[-1].is_dead = True
    again = Local(machine, "a", pid=2)
    again.subscribe()
    run_until(cluster, [again], lambda: len(again.valid) == 8, H)


def test_whoever_has_left_makes_room_at_once(machine):
    """Not only in the next round: the same process may open the next at once."""
    a = Local(machine, "a", pid=1)
    a.subscribe()
    machine.service.leave(a.who, api.Leaving())
    again = Local(machine, "a", pid=1)
    assert not again.registered.was_known
    with pytest.raises(ClaimLost):
        a.beat()


def test_whoever_leaves_and_has_something_left_is_in_the_way(cluster, machine):
    a = having(machine)
    machine.service.leave(a.who, api.Leaving())
    with pytest.raises(IdentityConflict):
        Local(machine, "a", pid=2)


def test_over_tcp_a_name_is_free_once_nothing_was_promised_any_more(cluster, machine):
    having(machine, pid=None)
    with pytest.raises(IdentityConflict, match="is a process of this host"):
        Local(machine, "a")
    cluster.run(2 * H)
    Local(machine, "a")


def test_whoever_is_not_registered_is_told_so(machine):
    stranger = Caller("g", "nobody", "00" * 16)
    with pytest.raises(ClaimLost) as caught:
        machine.service.beat(stranger, api.Beat())
    assert caught.value.reason == "unknown"
    Local(machine, "a")
    with pytest.raises(ClaimLost) as caught:
        machine.service.beat(stranger, api.Beat())
    assert caught.value.reason == "unknown"
    with pytest.raises(ClaimLost) as caught:
        machine.service.beat(Caller("g", "a", "11" * 16), api.Beat())
    assert caught.value.reason == "gone"


def test_whoever_was_forgotten_and_comes_again_is_told_everything(cluster, machine):
    """What it names as the last it heard is of a ring that is no more."""
    a = having(machine)
    cluster.run(4 * H)
    assert machine.service.clients() == []
    after = a.after
    a.register()
    a.subscribe()
    assert a.after == after
    run_until(cluster, [a], lambda: len(a.valid) == 8, 3 * H)


def test_clients_are_listed(cluster, machine):
    a = having(machine, count=8)
    Local(machine, "b", group="h")
    run(cluster, [a], 100)
    first, second = machine.service.clients()
    assert (first.group, first.client, first.pid, first.state) == ("g", "a", 1, "ready")
    assert len(first.assigned) == 8
    assert first.subscriptions == ("s",)
    assert first.promised_until_ms == max(until for _, until in a.held.values())
    assert second.beat_age_ms is None
    cluster.run(2_000)
    assert [line.state for line in machine.service.clients()] == ["silent", "silent"]
