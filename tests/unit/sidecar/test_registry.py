"""Registration, replacement and removal of clients (PROTOCOL 12)."""

import pytest
from enginekit import (
    H,
)
from sidecarkit import (
    FakeWatched,
    Local,
    Machine,
    having,
    leaving,
    run,
    run_until,
)

from kafka_marshal.errors import (
    ClaimLost,
    ConfigurationError,
    CoordinationError,
    IdentityConflict,
)
from kafka_marshal.remote import api
from kafka_marshal.sidecar import registry
from kafka_marshal.sidecar.process_monitor import UNKNOWN_PEER, Caller

# --- Joining ---


def test_info_describes_the_sidecar_its_log_and_its_clock(machine):
    info = machine.service.info()
    assert (info.client_id, info.state, info.level) == ("host-1", "RUNNING", 1)
    assert info.cluster_id == "simulated"
    assert info.coordination_topic == "__marshal"
    assert info.heartbeat_interval_ms == H
    assert info.client_beat_ms_max == H // 6
    assert info.now_ms == machine.clock.now_ms()
    assert len(info.incarnation) == 32


@pytest.mark.parametrize("beat_ms", [0, H // 6 + 1])
def test_a_heartbeat_interval_out_of_bounds_is_refused(machine, beat_ms):
    registration = api.RegisterRequest(instance="00" * 16, beat_ms=beat_ms)
    with pytest.raises(ConfigurationError, match="it must be 1 to 500") as caught:
        machine.service.register("g", "a", registration=registration, peer=UNKNOWN_PEER)
    assert caught.value.setting == "beat_ms"


@pytest.mark.parametrize(("group", "name"), [("g", "no name"), ("a/b", "a")])
def test_malformed_names_of_groups_and_clients_are_refused(machine, group, name):
    registration = api.RegisterRequest(instance="00" * 16, beat_ms=100)
    with pytest.raises(ConfigurationError, match="is no valid name"):
        machine.service.register(
            group, name, registration=registration, peer=UNKNOWN_PEER
        )


def test_a_process_can_register_again(machine):
    a = Local(machine, "a", pid=1)
    assert not a.registered.was_known
    a.register()
    assert a.registered.was_known


def test_living_children_stay_with_a_client_whose_process_changes(cluster, machine):
    a = having(machine)
    machine.service.children(a.who, api.Children(pids=(7, 8, 9)))
    machine.watch.watched[-1].dead.add(8)
    a.pid = 2
    a.register()
    assert machine.watch.watched[-1].children == (7, 9)


def test_a_late_report_of_a_death_does_not_evict_the_next_process(cluster, machine):
    """The death is reported while that process continues with the same instance."""
    a = having(machine)
    (dead,) = machine.watch.watched
    a.pid = 2
    a.register()
    dead.is_dead = True
    dead.on_dead()
    run(cluster, [a], H)
    assert len(a.valid) == 8


def test_a_restarted_sidecar_watches_children_from_the_start(
    cluster, tmp_path, monkeypatch
):
    """If their parent died meanwhile, its death could be reported before."""
    machine = Machine(cluster, state_dir=tmp_path)
    a = having(machine)
    machine.service.children(a.who, api.Children(pids=(7, 8)))
    run(cluster, [a], H)
    monkeypatch.delattr(FakeWatched, "replace")
    machine.restart()
    assert machine.watch.watched[-1].children == (7, 8)


def test_two_living_processes_of_one_name_conflict(machine):
    having(machine)
    with pytest.raises(IdentityConflict, match="process 1 of this host") as caught:
        Local(machine, "a", pid=2)
    assert caught.value.holder == "a"


def test_a_process_may_take_the_name_of_a_dead_one(cluster, machine):
    a = having(machine)
    machine.watch.kill(1)
    again = Local(machine, "a", pid=2)
    again.subscribe()
    run_until(cluster, [again], lambda: len(again.valid) == 8, H)
    with pytest.raises(ClaimLost) as caught:
        a.beat()
    assert caught.value.reason == "gone"


def test_an_unreported_death_frees_the_name(cluster, machine):
    having(machine)
    machine.watch.watched[-1].is_dead = True
    again = Local(machine, "a", pid=2)
    again.subscribe()
    run_until(cluster, [again], lambda: len(again.valid) == 8, H)


def test_a_client_that_left_frees_its_name(machine):
    """At once, not only in the next round: the same process may register again."""
    a = Local(machine, "a", pid=1)
    a.subscribe()
    machine.service.leave(a.who, api.LeaveRequest())
    again = Local(machine, "a", pid=1)
    assert not again.registered.was_known
    with pytest.raises(ClaimLost):
        a.beat()


def test_a_leaving_client_with_leases_keeps_its_name(cluster, machine):
    a = having(machine)
    machine.service.leave(a.who, api.LeaveRequest())
    with pytest.raises(IdentityConflict):
        Local(machine, "a", pid=2)


def test_over_tcp_a_name_is_free_after_the_last_deadline(cluster, machine):
    having(machine, pid=None)
    with pytest.raises(IdentityConflict, match="by a process of this host"):
        Local(machine, "a")
    cluster.run(2 * H)
    Local(machine, "a")


def test_an_unregistered_client_is_refused(machine):
    stranger = Caller("g", "nobody", "00" * 16)
    with pytest.raises(ClaimLost) as caught:
        machine.service.beat(stranger, api.HeartbeatRequest())
    assert caught.value.reason == "unknown"
    Local(machine, "a")
    with pytest.raises(ClaimLost) as caught:
        machine.service.beat(stranger, api.HeartbeatRequest())
    assert caught.value.reason == "unknown"
    with pytest.raises(ClaimLost) as caught:
        machine.service.beat(Caller("g", "a", "11" * 16), api.HeartbeatRequest())
    assert caught.value.reason == "gone"


def test_a_removed_client_that_registers_again_gets_its_partitions(cluster, machine):
    """Although its last event id belongs to an event buffer that no longer exists."""
    a = having(machine)
    cluster.run(4 * H)
    assert machine.service.clients() == []
    assert not a.valid
    a.received.clear()
    a.register()
    a.subscribe()
    run_until(cluster, [a], lambda: len(a.valid) == 8, 3 * H)
    assert isinstance(a.received[0], api.Snapshot)


def test_the_list_of_clients_shows_state_leases_and_last_heartbeat(cluster, machine):
    a = having(machine, count=8)
    Local(machine, "b", group="h")
    run(cluster, [a], 100)
    first, second = machine.service.clients()
    assert (first.group, first.client, first.pid, first.state) == ("g", "a", 1, "ready")
    assert len(first.assigned) == 8
    assert first.subscriptions == ("s",)
    assert first.lease_until_ms == max(until for _, until in a.held.values())
    assert second.beat_age_ms is None
    cluster.run(2_000)
    assert [line.state for line in machine.service.clients()] == ["silent", "silent"]


def test_a_restarted_client_needs_no_further_place(cluster, machine, monkeypatch):
    a = having(machine)
    monkeypatch.setattr(registry, "CLIENTS_MAX", 1)
    leaving(a, release=False)
    with pytest.raises(CoordinationError, match="1 clients are registered"):
        Local(machine, "b", pid=2)
    again = Local(machine, "a", pid=1)
    run_until(cluster, [again], lambda: len(again.valid) == 8, H)
    # The same living process may restart many times.
    assert [each.is_closed for each in machine.watch.watched] == [True, False]
