import itertools
import json
import os
import select
import socket
import threading

import attrs
import msgspec
import pytest
from enginekit import H, claim_of, held_by, owning, spec, world

from kafka_marshal.errors import CoordinationError, InvalidTransition, LogUnreadable
from kafka_marshal.protocol.checkpoints import Comparison
from kafka_marshal.protocol.text import NAMED_MAX
from kafka_marshal.sidecar import health
from kafka_marshal.sidecar.health import (
    EXTEND_MS,
    NEXT,
    ROUND_MS_MAX,
    Lifecycle,
    State,
    SystemdNotifier,
    View,
    livez,
    readyz,
    startupz,
)
from simulator.clock import VirtualClock

# --- Lifecycle ---


S = State
# Repeated on purpose: it is the expected value of the table in the product.
LEGAL = {
    (S.NOT_RUNNING, S.STARTING),
    (S.STARTING, S.RECOVERY),
    (S.STARTING, S.SHUTTING_DOWN),
    (S.RECOVERY, S.RUNNING),
    (S.RECOVERY, S.SHUTTING_DOWN),
    (S.RUNNING, S.PENDING_CONTROLLED_SHUTDOWN),
    (S.RUNNING, S.SHUTTING_DOWN),
    (S.PENDING_CONTROLLED_SHUTDOWN, S.SHUTTING_DOWN),
    (S.SHUTTING_DOWN, S.NOT_RUNNING),
}
PATHS = {
    S.NOT_RUNNING: (),
    S.STARTING: (S.STARTING,),
    S.RECOVERY: (S.STARTING, S.RECOVERY),
    S.RUNNING: (S.STARTING, S.RECOVERY, S.RUNNING),
    S.PENDING_CONTROLLED_SHUTDOWN: (
        *(S.STARTING, S.RECOVERY, S.RUNNING),
        S.PENDING_CONTROLLED_SHUTDOWN,
    ),
    S.SHUTTING_DOWN: (S.STARTING, S.SHUTTING_DOWN),
}


@pytest.fixture
def clock():
    return VirtualClock()


def states_in(state, clock):
    states = Lifecycle(clock)
    for step in PATHS[state]:
        states.move(step, reason="on the way")
    assert states.state is state
    return states


@pytest.mark.parametrize(
    ("before", "after"),
    list(itertools.product(State, State)),
    ids=lambda state: state.value,
)
def test_only_legal_changes_of_state_are_accepted(before, after, clock):
    states = states_in(before, clock)
    reason, since_ms = states.reason, states.view().since_ms
    clock.advance(7)
    if (before, after) in LEGAL:
        states.move(after, reason="asked to")
        assert (states.state, states.reason) == (after, "asked to")
        assert states.view().since_ms == clock.now_ms()
    else:
        with pytest.raises(InvalidTransition) as failed:
            states.move(after, reason="asked to")
        assert before.value in str(failed.value)
        assert after.value in str(failed.value)
        assert "asked to" in str(failed.value)
        assert (states.state, states.reason) == (before, reason)
        assert states.view().since_ms == since_ms


def test_states_are_named_as_in_kafka_and_change_as_listed():
    assert [state.value for state in State] == [
        "NOT_RUNNING",
        "STARTING",
        "RECOVERY",
        "RUNNING",
        "PENDING_CONTROLLED_SHUTDOWN",
        "SHUTTING_DOWN",
    ]
    assert {(a, b) for a, after in NEXT.items() for b in after} == LEGAL


def test_explain_replaces_the_reason_without_a_change_of_state(clock):
    changes = []
    states = Lifecycle(clock, lambda *change: changes.append(change))
    states.move(S.STARTING, reason="-")
    states.explain("9 of 10 partitions read")
    assert states.reason == "9 of 10 partitions read"
    assert changes == [(S.STARTING, "-")]


def test_changes_of_state_by_several_threads_are_reported_in_order(clock):
    changes, entered, go = [], threading.Event(), threading.Event()

    def note(state, reason):
        if state is S.STARTING:
            entered.set()
            assert go.wait(30)
        changes.append((state, reason))

    states = Lifecycle(clock, note)
    threads = [
        threading.Thread(target=lambda: states.move(S.STARTING, reason="one")),
        threading.Thread(target=lambda: states.move(S.RECOVERY, reason="two")),
    ]
    threads[0].start()
    assert entered.wait(30)
    threads[1].start()
    go.set()
    for each in threads:
        each.join(30)
    assert changes == [(S.STARTING, "one"), (S.RECOVERY, "two")]


# --- Probes ---


WELL = View(
    now_ms=1_000_000,
    state=S.RUNNING,
    reason="serving",
    since_ms=0,
    has_engine=True,
    round_at_ms=1_000_000,
    is_replayed=True,
    heartbeat_interval_ms=H,
)
OLD = {"round_at_ms": WELL.now_ms - ROUND_MS_MAX - 1}


def but(**changes):
    return attrs.evolve(WELL, **changes)


def test_a_healthy_sidecar_passes_all_probes():
    for probe in (livez, readyz, startupz):
        verdict = probe(WELL)
        assert verdict.ok
        assert (verdict.state, verdict.reasons) == ("RUNNING", ("serving",))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"log_start_missing": (1, 3)},
            "coordinating partitions [1, 3]: the log start is gone",
        ),
        ({"rebuilding": (2,)}, "coordinating partitions [2]: the log was truncated"),
        (
            {"diverged": (0,)},
            "coordinating partitions [0]: the checkpoint has another digest",
        ),
    ],
    ids=str,
)
def test_a_sidecar_with_an_incomplete_log_is_live_but_not_ready(change, words):
    view = but(**change)
    assert livez(view).ok
    (reason,) = readyz(view).reasons
    assert words in reason


def test_a_view_lists_truncated_and_diverged_partitions():
    cluster = world(2)
    node = owning(cluster)
    states = Lifecycle(cluster.clock.view())
    states.engine = node.engine
    view = states.view()
    assert (view.log_start_missing, view.rebuilding, view.diverged) == ((), (), ())
    replica = node.engine.context.replicas[1]
    replica.compared = Comparison(
        checkpoint_id=b"id", begin_offset=7, client_id="other", ours="aa", theirs="bb"
    )
    node.engine.context.rebuilding.add(0)
    view = states.view()
    assert (view.rebuilding, view.diverged) == ((0,), (1,))


def test_only_overdue_claims_are_named(monkeypatch):
    """A view is taken each second, and visits thousands of claims under the lock."""
    cluster = world(1, records=[1] * 3)
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 3), 2 * H)
    key, *_ = node.held
    states, named = Lifecycle(cluster.clock.view()), []
    states.engine = node.engine
    monkeypatch.setattr(health, "_name", lambda key: named.append(key) or str(key))
    view = states.view()
    assert (view.held_count, view.overdue, named) == (3, (), [])
    node.log.cut = True
    soft_ms = node.held[key].claim.lease.soft_until_ms
    cluster.run_until(lambda: cluster.clock.now_ms() >= soft_ms, 2 * H)
    view = states.view()
    assert len(view.overdue) == len(named) > 0


@pytest.mark.parametrize(
    ("state", "ready", "started"),
    [
        (S.NOT_RUNNING, False, False),
        (S.STARTING, False, False),
        (S.RECOVERY, False, False),
        (S.RUNNING, True, True),
        (S.PENDING_CONTROLLED_SHUTDOWN, False, True),
        (S.SHUTTING_DOWN, False, True),
    ],
)
def test_readyz_and_startupz_depend_on_the_state(state, ready, started):
    view = but(state=state, reason="so it is")
    assert livez(view).ok
    assert readyz(view).ok is ready
    assert startupz(view).ok is started
    if not ready:
        assert readyz(view).reasons == (f"the sidecar is {state.value}: so it is",)
    if not started:
        assert startupz(view).reasons == (f"the sidecar is {state.value}: so it is",)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("sick", [{"failure": "log truncated"}, OLD])
def test_a_dead_engine_fails_liveness_except_during_shutdown(state, sick):
    view = but(state=state, **sick)
    is_stopping = state in {S.SHUTTING_DOWN, S.NOT_RUNNING}
    assert livez(view).ok is is_stopping
    assert not readyz(view).ok


def test_liveness_fails_once_the_last_round_is_too_old():
    at = WELL.now_ms - ROUND_MS_MAX
    assert livez(but(round_at_ms=at)).ok
    verdict = livez(but(round_at_ms=at - 1))
    assert not verdict.ok
    assert str(ROUND_MS_MAX + 1) in verdict.reasons[0]


def test_an_engine_without_a_round_is_judged_by_the_last_state_change():
    view = but(state=S.RECOVERY, round_at_ms=None, since_ms=WELL.now_ms - ROUND_MS_MAX)
    assert livez(view).ok
    assert not livez(attrs.evolve(view, since_ms=view.since_ms - 1)).ok


@pytest.mark.parametrize(
    ("sick", "word"),
    [
        ({"is_replayed": False}, "not read to its end"),
        ({"is_busy": True, "is_replayed": False}, "lock was busy"),
        ({"failed": (("billing", "identity conflict"),)}, "group billing"),
        ({"overdue": ("t-0 of group g",), "held_count": 3}, "1 of 3 claims"),
        ({"failure": "log truncated"}, "log truncated"),
    ],
)
def test_each_cause_of_unreadiness_has_its_reason(sick, word):
    verdict = readyz(but(**sick))
    assert not verdict.ok
    (reason,) = verdict.reasons
    assert word in reason


def test_all_reasons_are_reported():
    verdict = readyz(but(failed=(("a", "x"), ("b", "y")), overdue=("t-0 of group c",)))
    assert len(verdict.reasons) == 3


def test_reasons_are_bounded_and_escaped():
    many = tuple((f"g{n}\x1b[31m", "\n" * 9_999) for n in range(50))
    late = tuple(f"t-{n} of group g" for n in range(50))
    verdict = readyz(but(failed=many, overdue=late, held_count=60))
    assert len(verdict.reasons) == NAMED_MAX + 1
    assert f"and {50 - NAMED_MAX} more" in verdict.reasons[-1]
    assert all(reason.isprintable() for reason in verdict.reasons)
    assert len(msgspec.json.encode(verdict)) < 10_000


def test_the_response_of_a_probe_is_json_with_a_list_of_reasons():
    assert json.loads(msgspec.json.encode(readyz(but(is_replayed=False)))) == {
        "ok": False,
        "state": "RUNNING",
        "reasons": ["the coordination log is not read to its end"],
    }


# --- Views of an engine


@pytest.fixture
def cluster():
    return world()


def well(node):
    states = Lifecycle(node.engine.context.ports.clock)
    for step in (S.STARTING, S.RECOVERY, S.RUNNING):
        states.move(step, reason="serving")
    states.engine = node.engine
    return states


def test_a_lifecycle_without_an_engine_is_live_but_not_ready(clock):
    """However long its start takes: only an engine can be silent for too long."""
    found = states_in(S.STARTING, clock)
    clock.advance(ROUND_MS_MAX + 1)
    assert livez(found.view()).ok
    assert not readyz(found.view()).ok
    assert not startupz(found.view()).ok


def test_a_sidecar_is_ready_once_the_engine_has_read_the_log(cluster):
    node = cluster.node("a")
    found = well(node)
    assert found.view().round_at_ms is None
    assert readyz(found.view()).reasons == (
        "the coordination log is not read to its end",
    )
    cluster.run(40)
    assert readyz(found.view()).ok
    assert found.view().heartbeat_interval_ms == H
    assert found.view().beat_at_ms is None


def test_a_view_counts_claims_and_has_the_time_of_the_last_heartbeat(cluster):
    node = owning(cluster)
    found = well(node)
    before = found.view()
    assert (before.held_count, before.overdue) == (1, ())
    cluster.run(H)
    assert found.view().beat_at_ms > before.beat_at_ms


def test_an_outage_fails_readiness_only_once_leases_are_overdue(cluster):
    """Clients continue with held partitions while the brokers are unreachable."""
    node = owning(cluster)
    found = well(node)
    node.cut(is_cut=True)
    soft_ms = claim_of(node).lease.soft_until_ms
    cluster.run(H)
    assert readyz(found.view()).ok
    cluster.run_until(lambda: node.clock.now_ms() >= soft_ms, H)
    verdict = readyz(found.view())
    assert "1 of 1 claims were not renewed" in verdict.reasons[0]
    assert "t-0 of group g" in verdict.reasons[0]
    assert livez(found.view()).ok, "a restart would not help"
    node.cut(is_cut=False)
    cluster.run(2 * H)
    assert readyz(found.view()).ok


def test_readyz_notes_why_the_log_cannot_be_written(cluster):
    """Also once all leases have ended, so that no held claim fails the probe."""
    node = owning(cluster)
    found = well(node)
    node.cut(is_cut=True)
    cluster.run(4 * H)
    verdict = readyz(found.view())
    assert verdict.ok
    first, note = verdict.reasons
    assert first == "serving"
    assert note.startswith("an append to the coordination log failed: ")
    assert len(livez(found.view()).reasons) == 1
    node.cut(is_cut=False)
    cluster.run(4 * H)
    assert readyz(found.view()).reasons == ("serving",)


def test_readyz_notes_why_a_group_is_drained(cluster):
    """For example because its lease journal cannot be written."""
    node = owning(cluster)
    found = well(node)
    node.session.self_drain.begin(H, why="its lease journal cannot be written")
    verdict = readyz(found.view())
    assert verdict.ok
    assert verdict.reasons == (
        "serving",
        (
            "the sidecar hands its partitions of group g to other hosts: its lease "
            "journal cannot be written"
        ),
    )
    node.session.self_drain.end()
    assert readyz(found.view()).reasons == ("serving",)


def test_an_engine_that_runs_no_rounds_fails_liveness(cluster):
    node = owning(cluster)
    found = well(node)
    assert livez(found.view()).ok
    cluster.crash(node)
    cluster.run(ROUND_MS_MAX + 1_000)
    assert not livez(found.view()).ok


def test_a_failed_session_fails_readiness_but_not_liveness(cluster):
    node = owning(cluster)
    found = well(node)
    node.session.fail(CoordinationError("not allowed"))
    assert readyz(found.view()).reasons == (
        "this sidecar can hold no partitions of group g any more: not allowed",
    )
    assert livez(found.view()).ok


def test_a_failed_engine_fails_liveness(cluster):
    node = owning(cluster)
    found = well(node)
    node.engine._fail(LogUnreadable("gone"))
    assert livez(found.view()).reasons == ("the engine has failed: gone",)


def test_a_busy_lock_fails_readiness_but_not_liveness(cluster, monkeypatch):
    node = owning(cluster)
    found = well(node)
    monkeypatch.setattr(health, "LOCK_MS_MAX", 1)
    held, go = threading.Event(), threading.Event()

    def hold():
        with node.engine.changed:
            held.set()
            go.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    assert found.view().is_busy
    assert livez(found.view()).ok
    assert "lock was busy" in readyz(found.view()).reasons[0]
    go.set()
    holder.join(60)
    assert readyz(found.view()).ok


# --- systemd ---


BEATING = View(
    now_ms=1_000,
    state=S.RUNNING,
    reason="serving",
    since_ms=0,
    has_engine=True,
    round_at_ms=900,
    is_replayed=True,
    heartbeat_interval_ms=3_000,
)


class Manager:
    """Stands in for systemd: a socket that receives datagrams."""

    def __init__(self, address):
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address[0] == "@" else address)
        self.socket.setblocking(False)

    def received(self):
        """Return the lines of each datagram that has arrived."""
        found = []
        while True:
            try:
                found.append(self.socket.recv(4096).decode().split("\n"))
            except BlockingIOError:
                return found

    def fed(self):
        return sum(lines.count("WATCHDOG=1") for lines in self.received())

    def environ(self, **more):
        return {"NOTIFY_SOCKET": self.address} | more


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    name = f"@marshal-{os.getpid()}-{tmp_path.name}"
    found = Manager(str(tmp_path / "n") if request.param == "path" else name)
    yield found
    found.socket.close()


@pytest.fixture
def watched(manager):
    found = SystemdNotifier(manager.environ(WATCHDOG_USEC="60000000"))
    yield found
    found.close()


def test_systemd_is_notified_of_every_change_of_state(manager):
    notifier = SystemdNotifier(manager.environ())
    states = Lifecycle(VirtualClock(), notifier.on_change)
    for state, reason in (
        (S.STARTING, "connecting"),
        (S.RECOVERY, "reading"),
        (S.RUNNING, "serving"),
        (S.PENDING_CONTROLLED_SHUTDOWN, "SIGTERM"),
        (S.SHUTTING_DOWN, "drained"),
        (S.NOT_RUNNING, "closed"),
    ):
        states.move(state, reason=reason)
    assert manager.received() == [
        ["STATUS=STARTING: connecting"],
        ["STATUS=RECOVERY: reading"],
        ["STATUS=RUNNING: serving", "READY=1"],
        ["STATUS=PENDING_CONTROLLED_SHUTDOWN: SIGTERM", "STOPPING=1"],
        ["STATUS=SHUTTING_DOWN: drained", "STOPPING=1"],
        ["STATUS=NOT_RUNNING: closed"],
    ]
    notifier.close()


def test_a_status_is_sent_only_when_it_changes(manager):
    notifier = SystemdNotifier(manager.environ())
    for view in (
        BEATING,
        BEATING,
        attrs.evolve(BEATING, held_count=3),
        attrs.evolve(BEATING, held_count=3),
    ):
        notifier.update(view)
    assert manager.received() == [
        ["STATUS=RUNNING: serving"],
        ["STATUS=RUNNING: serving; 3 held"],
    ]
    notifier.close()


def test_a_reason_cannot_add_lines_to_a_notification(manager):
    notifier = SystemdNotifier(manager.environ())
    notifier.update(attrs.evolve(BEATING, reason="x\nREADY=1\nMAINPID=1"))
    ((line,),) = manager.received()
    assert line.startswith("STATUS=")
    notifier.close()


@pytest.mark.parametrize("state", [S.RECOVERY, S.PENDING_CONTROLLED_SHUTDOWN])
def test_recovery_and_shutdown_extend_the_timeout_of_systemd(manager, state):
    notifier = SystemdNotifier(manager.environ())
    notifier.update(attrs.evolve(BEATING, state=state))
    ((_, line),) = manager.received()
    assert line == f"EXTEND_TIMEOUT_USEC={EXTEND_MS * 1000}"
    notifier.close()


def test_only_confirmed_heartbeats_feed_the_watchdog_of_held_claims(manager, watched):
    held = attrs.evolve(BEATING, held_count=1, beat_at_ms=100)
    watched.update(held)
    assert manager.fed() == 1
    for now_ms in range(1_000, 60_000, 1_000):
        # The engine runs rounds, but none of its heartbeats is confirmed.
        watched.update(attrs.evolve(held, now_ms=now_ms, round_at_ms=now_ms))
    assert manager.fed() == 0
    watched.update(attrs.evolve(held, beat_at_ms=200))
    watched.update(attrs.evolve(held, beat_at_ms=200))
    assert manager.fed() == 1


def test_rounds_feed_the_watchdog_while_nothing_is_held(manager, watched):
    watched.update(attrs.evolve(BEATING, round_at_ms=1))
    watched.update(attrs.evolve(BEATING, round_at_ms=2))
    watched.update(attrs.evolve(BEATING, round_at_ms=2))
    assert manager.fed() == 2
    watched.update(attrs.evolve(BEATING, round_at_ms=None))
    assert manager.fed() == 0


@pytest.mark.parametrize(
    "sick", [{"failure": "gone"}, {"is_busy": True}], ids=["failed", "hangs"]
)
def test_a_failed_or_busy_engine_does_not_feed_the_watchdog(manager, watched, sick):
    for now_ms in range(3):
        watched.update(attrs.evolve(BEATING, now_ms=now_ms, round_at_ms=now_ms, **sick))
    assert manager.fed() == 0


@pytest.mark.parametrize(
    "view",
    [
        attrs.evolve(BEATING, state=S.STARTING, has_engine=False, round_at_ms=None),
        attrs.evolve(BEATING, state=S.SHUTTING_DOWN, failure="closed"),
        attrs.evolve(BEATING, state=S.SHUTTING_DOWN, beat_at_ms=7),
    ],
    ids=["no-engine-yet", "no-engine-any-more", "engine-at-rest"],
)
def test_the_watchdog_is_fed_during_startup_and_shutdown(manager, watched, view):
    watched.update(view)
    watched.update(attrs.evolve(view, now_ms=view.now_ms + 1))
    assert manager.fed() == 2


def test_a_short_watchdog_is_extended_to_three_heartbeat_intervals(manager):
    notifier = SystemdNotifier(manager.environ(WATCHDOG_USEC="10000000"))
    assert notifier.watchdog_ms == 10_000
    notifier.update(attrs.evolve(BEATING, heartbeat_interval_ms=None))
    notifier.update(BEATING)
    assert not any(
        "WATCHDOG_USEC" in line for each in manager.received() for line in each
    )
    notifier.update(attrs.evolve(BEATING, heartbeat_interval_ms=60_000))
    notifier.update(attrs.evolve(BEATING, heartbeat_interval_ms=60_000))
    lines = [line for each in manager.received() for line in each]
    assert lines.count("WATCHDOG_USEC=180000000") == 1
    assert notifier.watchdog_ms == 180_000
    notifier.close()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
        ({"WATCHDOG_USEC": "10"}, 1),
        ({"WATCHDOG_USEC": "5000000"}, 5_000),
        ({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": str(os.getpid())}, 5_000),
        ({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "1"}, None),
    ],
)
def test_the_watchdog_limit_comes_from_the_environment(environ, expected):
    assert SystemdNotifier(environ).watchdog_ms == expected


@pytest.mark.parametrize(
    "address", ["", "relative", "vsock:2:99", "/nowhere/at/all", "@nobody-is-here"]
)
def test_without_a_socket_nothing_is_sent(address):
    notifier = SystemdNotifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "5000000"})
    assert notifier._socket is None
    notifier.update(BEATING)
    notifier.close()
    notifier.close()


def test_a_stalled_or_closed_notify_socket_raises_no_error(manager):
    notifier = SystemdNotifier(manager.environ(WATCHDOG_USEC="60000000"))
    for number in range(1_000):  # more than the queue of a socket holds
        notifier.update(attrs.evolve(BEATING, round_at_ms=number))
    assert manager.received()
    manager.socket.close()
    notifier.update(attrs.evolve(BEATING, round_at_ms=-1))
    notifier.close()


def test_a_change_of_state_waits_for_room_in_the_notify_socket(manager):
    notifier = SystemdNotifier(manager.environ())
    number = 0
    while select.select([], [notifier._socket], [], 0)[1]:
        notifier.update(attrs.evolve(BEATING, reason=f"{number}"))
        number += 1
    received = []
    reader = threading.Timer(0, lambda: received.extend(manager.received()))
    reader.start()
    notifier.on_change(S.RUNNING, "serving")
    reader.join(60)
    received += manager.received()
    assert received[-1] == ["STATUS=RUNNING: serving", "READY=1"]
    notifier.close()


def test_the_notify_socket_comes_from_the_process_environment(manager, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    notifier = SystemdNotifier()
    notifier.update(BEATING)
    assert manager.received() == [["STATUS=RUNNING: serving"]]
    notifier.close()
