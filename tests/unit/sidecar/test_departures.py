"""The last client of a sidecar in a group hands its partitions off as it leaves."""

import pytest
from enginekit import H, fold, spec, world, write
from logkit import settings
from sidecarkit import (
    Local,
    Machine,
    find,
    having,
    records,
    releases,
    run,
    run_until,
    sizes,
)

from kafka_marshal.protocol.records import Directive, HandoffOffer
from kafka_marshal.remote import api
from kafka_marshal.sidecar.config import HANDOFF_MS

DOWNSCALE = api.LeaveRequest(reason="downscale", timeout_ms=1_000)
SHARE = 4


@pytest.fixture
def cluster():
    return world(partitions=2, records=(3,) * 8)


@pytest.fixture
def machine(cluster):
    return Machine(cluster)


def beside(cluster, machine, **rest):
    """Return the only client here, and a member elsewhere whose warm-ups are held."""
    a = having(machine)
    other = cluster.node("other")
    other.warming.is_held = True
    other.consume(spec(**rest))

    def has_share():
        return SHARE in {len(other.held), other.warming.waiting_count}

    run_until(cluster, [a], has_share, 4 * H)
    return a, other


def warming(cluster, machine):
    return beside(cluster, machine, on_warm=lambda *_: None)


def leave(machine, client, ask=DOWNSCALE):
    return machine.service.leave(client.who, ask).action


def is_drained(cluster, machine):
    return bool(fold(cluster, machine.node.engine.context.home_of("g")).directed)


def test_the_last_client_works_until_another_host_has_warmed_up(cluster, machine):
    a, other = warming(cluster, machine)
    assert leave(machine, a) == "wait_for_drain"
    run(cluster, [a], H)
    assert sizes(a) == [8]
    assert is_drained(cluster, machine)
    assert leave(machine, a) == "wait_for_drain"
    other.warming.is_held = False
    other.warming.run_waiting()
    run_until(cluster, [a], lambda: len(other.held) == 8, 3 * H)
    assert not a.valid
    assert leave(machine, a) == "shutdown_now"
    run(cluster, [], H)
    assert not is_drained(cluster, machine)
    assert len(other.held) == 8
    # Each offer and each release names the other host as successor.
    assert {r.successor for r in records(cluster, HandoffOffer)} == {"other"}
    assert {r.successor for r in releases(cluster)} == {"other"}


def test_partitions_not_taken_within_the_handoff_timeout_are_released(cluster, machine):
    a, other = warming(cluster, machine)
    begun_ms = cluster.clock.now_ms()
    leave(machine, a)
    run_until(cluster, [a], lambda: a.named(api.Releasing), HANDOFF_MS + H)
    assert cluster.clock.now_ms() - begun_ms >= HANDOFF_MS
    run_until(cluster, [a], lambda: not a.held, H)
    run_until(cluster, [], lambda: len(other.held) == 8, 4 * H)
    run(cluster, [], H)
    assert not is_drained(cluster, machine)


def test_without_another_host_partitions_are_released_at_once(cluster, machine):
    a = having(machine)
    assert leave(machine, a) == "wait_for_drain"
    run_until(cluster, [a], lambda: not a.held, H)
    assert leave(machine, a) == "shutdown_now"
    assert not records(cluster, Directive)


@pytest.mark.parametrize("reason", ["shutdown", "downscale"])
def test_without_a_handoff_timeout_partitions_are_released_at_once(
    cluster, machine, reason
):
    a, _ = warming(cluster, machine)
    machine.service.groups[0]._departure._handoff_ms = 0
    leave(machine, a, api.LeaveRequest(reason=reason))
    run_until(cluster, [a], lambda: len(a.named(api.Releasing)) == 8, H)
    assert not records(cluster, Directive)


def test_below_the_level_of_directives_partitions_are_released_at_once(
    cluster, machine, monkeypatch
):
    a, _ = warming(cluster, machine)
    drain = machine.service.groups[0].session.self_drain
    monkeypatch.setattr(type(drain), "begin", lambda *_: False)
    leave(machine, a)
    run_until(cluster, [a], lambda: len(a.named(api.Releasing)) == 8, H)


def test_a_client_that_joins_takes_its_share_of_the_partitions(cluster, machine):
    a, other = warming(cluster, machine)
    leave(machine, a)
    run(cluster, [a], 200)
    b = Local(machine, "b", pid=2)
    run(cluster, [a, b], 200)
    assert is_drained(cluster, machine), "it consumes nothing yet"
    b.subscribe()
    run_until(cluster, [a, b], lambda: len(b.valid) == SHARE, 4 * H)
    # The remaining partitions are offered to the other host, as its share.
    assert sizes(a) == [8 - SHARE]
    other.warming.is_held = False
    other.warming.run_waiting()
    run_until(cluster, [a, b], lambda: not a.held, 4 * H)
    run_until(cluster, [b], lambda: len(other.held) == SHARE, 4 * H)
    assert sizes(b) == [SHARE]
    assert not is_drained(cluster, machine)


def test_a_client_that_reconnects_cancels_its_departure(cluster, machine):
    a, _ = warming(cluster, machine)
    leave(machine, a)
    run(cluster, [a], 200)
    assert is_drained(cluster, machine)
    a.register()
    run(cluster, [a], 200)
    assert not is_drained(cluster, machine)
    run(cluster, [a], HANDOFF_MS + H)
    assert sizes(a) == [8]
    assert not find(machine, a).is_leaving


def test_the_death_of_the_leaving_client_ends_the_drain(cluster, machine):
    a, other = warming(cluster, machine)
    leave(machine, a)
    run(cluster, [a], 200)
    machine.watch.kill(1)
    run_until(cluster, [], lambda: len(other.held) == 8, 3 * H)
    run(cluster, [], 200)
    assert not is_drained(cluster, machine)


def test_the_shutdown_of_the_sidecar_continues_the_drain(cluster, machine):
    a, _ = warming(cluster, machine)
    leave(machine, a)
    run(cluster, [a], 200)
    machine.service.start_handoff(for_ms=20 * H)
    run(cluster, [a], HANDOFF_MS + H)
    assert sizes(a) == [8]
    assert is_drained(cluster, machine)


def test_partitions_are_released_to_a_member_that_does_not_warm_up(cluster, machine):
    a, other = beside(cluster, machine)
    leave(machine, a)
    run_until(cluster, [a], lambda: len(other.held) == 8, 3 * H)
    assert {record.successor for record in releases(cluster)} == {"other"}


def test_partitions_are_handed_off_under_the_planner_policy_too(cluster, machine):
    for t in (0, 1):
        write(cluster, settings(policy="planner"), t)
    a, other = warming(cluster, machine)
    leave(machine, a)
    other.warming.is_held = False
    other.warming.run_waiting()
    run_until(cluster, [a], lambda: len(other.held) == 8, 6 * H)
    assert {r.successor for r in records(cluster, HandoffOffer)} == {"other"}
