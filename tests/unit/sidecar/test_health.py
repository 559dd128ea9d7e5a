import json
import threading

import attrs
import pytest
from enginekit import H, owning, world

from kafka_marshal.errors import CoordinationError, LogUnreadable
from kafka_marshal.protocol.checkpoints import Comparison
from kafka_marshal.sidecar import health
from kafka_marshal.sidecar.health import (
    NAMED_MAX,
    ROUND_MS_MAX,
    Health,
    View,
    livez,
    readyz,
    startupz,
)
from kafka_marshal.sidecar.states import State, States

S = State
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


def test_a_sidecar_that_is_well_says_so_three_times():
    for probe in (livez, readyz, startupz):
        verdict = probe(WELL)
        assert (verdict.ok, verdict.status) == (True, 200)
        assert (verdict.state, verdict.reasons) == ("RUNNING", ("serving",))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"log_start_missing": (1, 3)}, "partitions [1, 3] begins above offset 0"),
        ({"rebuilding": (2,)}, "partitions [2] went back"),
        ({"diverged": (0,)}, "partitions [0] say another digest"),
    ],
    ids=str,
)
def test_who_does_not_know_the_log_is_alive_and_not_ready(change, words):
    view = but(**change)
    assert livez(view).ok
    (reason,) = readyz(view).reasons
    assert words in reason


def test_what_an_engine_does_not_know_is_seen():
    cluster = world(2)
    node = owning(cluster)
    states = States(cluster.clock.view())
    view = health.look(node.engine, states, clock=cluster.clock.view())
    assert (view.log_start_missing, view.rebuilding, view.diverged) == ((), (), ())
    replica = node.engine.context.replicas[1]
    replica.compared = Comparison(b"id", 7, "other", "aa", "bb")
    node.engine.context.rebuilding.add(0)
    view = health.look(node.engine, states, clock=cluster.clock.view())
    assert (view.rebuilding, view.diverged) == ((0,), (1,))


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
def test_every_state_and_every_probe(state, ready, started):
    view = but(state=state, reason="so it is")
    assert livez(view).ok
    assert readyz(view).ok is ready
    assert startupz(view).ok is started
    if not ready:
        assert readyz(view).reasons == (f"it is {state.value}: so it is",)
    if not started:
        assert startupz(view).reasons == (f"it is {state.value}: so it is",)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("sick", [{"failure": "log truncated"}, OLD])
def test_a_dead_engine_is_for_a_restart_unless_it_stops_anyhow(state, sick):
    view = but(state=state, **sick)
    is_stopping = state in {S.SHUTTING_DOWN, S.NOT_RUNNING}
    assert livez(view).ok is is_stopping
    assert not readyz(view).ok


def test_the_bound_of_a_round_is_exact():
    at = WELL.now_ms - ROUND_MS_MAX
    assert livez(but(round_at_ms=at)).ok
    verdict = livez(but(round_at_ms=at - 1))
    assert not verdict.ok
    assert str(ROUND_MS_MAX + 1) in verdict.reasons[0]


def test_an_engine_that_never_turned_is_judged_from_the_state_on():
    view = but(state=S.RECOVERY, round_at_ms=None, since_ms=WELL.now_ms - ROUND_MS_MAX)
    assert livez(view).ok
    assert not livez(attrs.evolve(view, since_ms=view.since_ms - 1)).ok


def test_without_an_engine_there_is_nothing_to_be_dead():
    view = but(state=S.STARTING, has_engine=False, round_at_ms=None, is_replayed=False)
    assert livez(view).ok
    assert not readyz(view).ok


@pytest.mark.parametrize(
    ("sick", "word"),
    [
        ({"is_replayed": False}, "not read to its end"),
        ({"is_busy": True, "is_replayed": False}, "did not answer"),
        ({"failed": (("billing", "identity conflict"),)}, "group billing"),
        ({"overdue": ("t-0 of group g",), "held_count": 3}, "1 of 3 claims"),
        ({"failure": "log truncated"}, "log truncated"),
    ],
)
def test_each_thing_that_is_wrong_has_its_reason(sick, word):
    verdict = readyz(but(**sick))
    assert (verdict.ok, verdict.status) == (False, 503)
    (reason,) = verdict.reasons
    assert word in reason


def test_several_things_are_all_told():
    verdict = readyz(but(failed=(("a", "x"), ("b", "y")), overdue=("t-0 of group c",)))
    assert len(verdict.reasons) == 3


def test_reasons_are_bounded_and_fit_to_be_shown():
    many = tuple((f"g{n}\x1b[31m", "\n" * 9_999) for n in range(50))
    late = tuple(f"t-{n} of group g" for n in range(50))
    verdict = readyz(but(failed=many, overdue=late, held_count=60))
    assert len(verdict.reasons) == NAMED_MAX + 1
    assert f"and {50 - NAMED_MAX} more" in verdict.reasons[-1]
    assert all(reason.isprintable() for reason in verdict.reasons)
    assert len(verdict.to_json()) < 10_000


def test_the_body_is_json_with_a_list_of_reasons():
    assert json.loads(readyz(but(is_replayed=False)).to_json()) == {
        "ok": False,
        "state": "RUNNING",
        "reasons": ["the coordination log is not read to its end"],
    }


# --- Looking


@pytest.fixture
def cluster():
    return world()


def well(node):
    states = States(node.engine.context.ports.clock)
    for step in (S.STARTING, S.RECOVERY, S.RUNNING):
        states.move(step, reason="serving")
    found = Health(states, node.engine.context.ports.clock)
    found.engine = node.engine
    return found


def test_before_there_is_an_engine(cluster):
    node = cluster.node("a")
    found = Health(
        States(node.engine.context.ports.clock), node.engine.context.ports.clock
    )
    assert found.live().ok
    assert not found.ready().ok
    assert not found.started().ok


def test_it_follows_an_engine_from_its_first_round_on(cluster):
    node = cluster.node("a")
    found = well(node)
    assert found.look().round_at_ms is None
    assert found.ready().reasons == ("the coordination log is not read to its end",)
    cluster.run(40)
    assert found.ready().ok
    assert found.look().heartbeat_interval_ms == H
    assert found.look().beat_at_ms is None


def test_a_claim_counts_with_its_beats(cluster):
    node = owning(cluster)
    found = well(node)
    before = found.look()
    assert (before.held_count, before.overdue) == (1, ())
    cluster.run(H)
    assert found.look().beat_at_ms > before.beat_at_ms


def test_an_outage_shorter_than_the_lease_is_no_reason(cluster):
    """What is held is served on while the brokers are away (row FC19)."""
    node = owning(cluster)
    found = well(node)
    node.cut(is_cut=True)
    cluster.run(H // 2)
    assert found.ready().ok
    cluster.run(H)
    verdict = found.ready()
    assert "1 of 1 claims were not renewed" in verdict.reasons[0]
    assert "t-0 of group g" in verdict.reasons[0]
    assert found.live().ok, "a restart would not help"
    node.cut(is_cut=False)
    cluster.run(2 * H)
    assert found.ready().ok


def test_a_loop_that_rests_is_seen(cluster):
    node = owning(cluster)
    found = well(node)
    assert found.live().ok
    cluster.crash(node)
    cluster.run(ROUND_MS_MAX + 1_000)
    assert not found.live().ok


def test_a_failed_session_makes_it_unready(cluster):
    node = owning(cluster)
    found = well(node)
    node.session.fail(CoordinationError("not allowed"))
    assert found.ready().reasons == ("group g can hold nothing any more: not allowed",)
    assert found.live().ok


def test_a_failed_engine_makes_it_dead(cluster):
    node = owning(cluster)
    found = well(node)
    node.engine._fail(LogUnreadable("gone"))
    assert found.live().reasons == ("the engine can go no further: gone",)


def test_a_lock_that_cannot_be_had_is_told_and_not_waited_for(cluster, monkeypatch):
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
    assert found.look().is_busy
    assert found.live().ok
    assert "did not answer" in found.ready().reasons[0]
    go.set()
    holder.join(60)
    assert found.ready().ok
