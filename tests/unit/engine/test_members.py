"""One client_id in several processes (PROTOCOL 4.4, 5.5), over a whole log."""

import pytest
from enginekit import (
    H,
    fold,
    held_by,
    holders,
    lines,
    of,
    owning,
    spec,
    takeovers,
    world,
)
from keptkit import Shelf, kept
from logkit import beat, ident, member, transition
from msgspec.structs import replace

from kafka_marshal import World
from kafka_marshal.config import ConsumerConfig
from kafka_marshal.engine import members
from kafka_marshal.errors import IdentityConflict
from kafka_marshal.protocol.applied import applied_of
from kafka_marshal.protocol.records import ClaimingPartition, Member
from simulator.fakestore import AppendFate
from simulator.node import ConsumerSpec

# --- Announcements ---


def announced(record):
    return transition("member", key=None, epoch=None, record=record)


def test_only_a_changed_announcement_is_news(cluster):
    announcer = owning(cluster).session._announcer

    def is_news(record):
        return announcer.is_news(announced(record))

    first = replace(member("b"), capacity=0)
    assert is_news(first)
    assert not is_news(replace(first, seq=1, load=5))
    for change in (
        {"topics": ("t", "u")},
        {"capacity": 3},
        {"draining": True},
        {"labels": {"lagging": "yes"}},
        {"incarnation": ident("another life")},
    ):
        assert is_news(replace(first, **change))
        assert is_news(first) or "incarnation" in change
    # The load counts if the capacity is limited.
    assert is_news(replace(first, capacity=3, load=1))
    assert is_news(replace(first, capacity=3, load=2))
    assert not is_news(beat(0))


def test_the_number_of_remembered_members_is_bounded(cluster, monkeypatch):
    monkeypatch.setattr(members, "ANNOUNCED_MAX", 3)
    announcer = owning(cluster).session._announcer
    for number in range(10):
        news = announced(member(f"b{number}"))
        assert announcer.is_news(news)
        assert not announcer.is_news(news)
    assert len(announcer._announced) <= 3


@pytest.mark.parametrize("text", ["x", "\N{CJK UNIFIED IDEOGRAPH-5024}", "\N{ROCKET}"])
def test_topics_and_labels_of_any_length_fit_a_record(cluster, text):
    """A record that is too long would stop the engine by an internal error."""
    topics = [f"{number:03}".ljust(249, "-") for number in range(200)]
    for topic in topics:
        cluster.kafka.create_topic(topic, 1)
    labels = {f"{number:02}".ljust(255, text): 255 * text for number in range(16)}
    node = cluster.node(
        "a", spec=ConsumerSpec(ConsumerConfig(topics=tuple(topics))), labels=labels
    )
    cluster.run_until(held_by(node, 200), 4 * H)
    named = of(cluster, "a", Member, partition=0)[-1].record.topics
    assert named
    assert list(named) == topics[: len(named)]


def test_the_name_of_a_host_that_is_not_utf_8_is_announced_all_the_same(cluster):
    node = cluster.node("a", spec=spec(), host="h\udc80")
    cluster.run_until(lambda: node.held, 2 * H)
    assert {line.record.host for line in of(cluster, "a", Member)} == {"h?"}


def test_a_member_announces_how_far_it_has_applied_the_log():
    """It lags by the entries in flight; while stopped, by all later entries, too."""
    cluster = world(partitions=2, records=[1] * 4)
    a = cluster.node("a", spec=spec())
    b = cluster.node("b", spec=spec())
    cluster.run_until(held_by(b, 2), 3 * H)
    cluster.run(H)

    def applied(client_id):
        states = [fold(cluster, t) for t in range(2)]
        view = World(states, {})
        (member,) = (m for _, m in view.members("g") if m.record.client_id == client_id)
        return view, member

    ends = {t: fold(cluster, t).next_offset for t in range(2)}
    view, known = applied("b")
    assert applied_of(known.record).began == {0: 0, 1: 0}
    announced = dict(applied_of(known.record).applied)
    assert announced.keys() == {0, 1}
    assert all(0 < announced[t] <= ends[t] for t in ends)
    written = max(view.log_lags(known).values())
    # Stopped: what others write meanwhile is not applied.
    cluster.nodes.remove(b)
    cluster.run(H)
    view, stopped = applied("b")
    assert max(view.log_lags(stopped).values()) > written + 3
    assert max(view.log_lags(applied("a")[1]).values()) < 5
    # Continued: the lag is as small as before.
    cluster.nodes.append(b)
    cluster.run(H)
    view, awake = applied("b")
    assert max(view.log_lags(awake).values()) < 5
    assert a.held


def test_a_member_announces_which_kept_state_it_began_at(cluster):
    owning(cluster)
    cluster.run(H)
    state = fold(cluster)
    cluster.node("b", sources=(Shelf(kept(state)),), spec=spec())
    cluster.run(H)
    found = [applied_of(line.record).began for line in of(cluster, "b", Member)]
    assert found
    assert all(began == {0: state.next_offset} for began in found)


# --- Identity (PROTOCOL 4.4, 5.5) ---


@pytest.mark.parametrize("restarts", [1, 3])
def test_a_restart_with_its_identity_keeps_all_keys(restarts):
    """Within a heartbeat interval, no takeover in the log."""
    cluster = world(records=[1] * 6)
    cluster.node("b", spec=spec())
    a = cluster.node("a", spec=spec())
    cluster.run_until(held_by(a, 3), 2 * H)
    kept = set(a.held)
    for _ in range(restarts):
        cluster.run(H // 3)
        cluster.crash(a)
        cluster.run(H // 4)
        before = cluster.kafka.log(cluster.place(0)).end
        a = cluster.node("a", spec=spec(), lives=a.lives)
        cluster.run_until(held_by(a, 3), H // 4)
        assert set(a.held) == kept
        since = [x for x in lines(cluster) if x.offset >= before]
        assert {x.transition.effect for x in since} & {"claimed", "resumed"} == {
            "resumed"
        }
    assert not takeovers(cluster)


def test_a_restart_without_its_identity_waits_until_its_claim_is_stale(cluster):
    a = owning(cluster)
    cluster.crash(a)
    again = cluster.node("a", spec=spec())
    cluster.run(H)
    assert not again.held
    cluster.run_until(held_by(again, 1), 3 * H)
    assert len(takeovers(cluster)) == 1


def test_a_restart_after_more_than_an_interval_resumes_nothing(cluster):
    a = owning(cluster)
    cluster.crash(a)
    cluster.run(int(1.5 * H))
    again = cluster.node("a", spec=spec(), lives=a.lives)
    cluster.run_until(held_by(again, 1), 2 * H)
    effects = [x.transition.effect for x in of(cluster, "a", ClaimingPartition)]
    assert "resumed" not in effects


def test_a_wrong_secret_resumes_nothing_and_claims_normally(cluster):
    a = owning(cluster)
    cluster.crash(a)
    (life,) = a.lives
    wrong = (type(life)(life.incarnation, b"w" * 32),)
    again = cluster.node("a", spec=spec(), lives=wrong)
    cluster.run_until(held_by(again, 1), 3 * H)
    reasons = [x.transition.reason for x in of(cluster, "a", ClaimingPartition)]
    assert reasons.count("resume_mismatch") == 1


@pytest.mark.parametrize("first", [0, 1], ids=["older-holds", "younger-holds"])
def test_one_of_two_live_sessions_with_one_client_id_fails(first):
    """Exactly one holds, and the other fails, whichever claims first."""
    cluster = world(records=[1] * 3)
    nodes = [cluster.node("a"), cluster.node("a")]
    cluster.run(H)  # both have announced themselves
    nodes[first].consume(spec())
    cluster.run(H // 2)
    nodes[1 - first].consume(spec())
    cluster.run(5 * H)
    failed = [node for node in nodes if node.session.failure is not None]
    assert len(failed) == 1
    assert isinstance(failed[0].session.failure, IdentityConflict)
    (alive,) = [node for node in nodes if node not in failed]
    assert len(alive.held) == 3
    assert not failed[0].held
    with pytest.raises(IdentityConflict, match="another live process"):
        failed[0].consumer.poll(0)


def test_a_second_start_of_a_live_client_fails_and_takes_nothing(cluster):
    a = owning(cluster)
    twin = cluster.node("a", spec=spec())
    cluster.run_until(lambda: twin.session.failure is not None, 2 * H)
    with pytest.raises(IdentityConflict, match="host-of-a"):
        twin.consumer.poll(0)
    cluster.run(5 * H)
    assert a.held
    assert not takeovers(cluster)


def test_a_process_whose_claims_another_resumed_fails(cluster):
    """PROTOCOL 5.5: a copied identity; the first process does not resume in turn."""
    a = owning(cluster)
    copy = cluster.node("a", spec=spec(), lives=a.lives)
    cluster.run_until(held_by(copy, 1), H)
    cluster.run(H)
    assert isinstance(a.session.failure, IdentityConflict)
    assert holders(cluster) == ["a"]
    assert copy.held
    resumed = [x for x in lines(cluster) if x.transition.effect == "resumed"]
    assert len(resumed) == 1


def test_a_twin_is_reported_with_the_age_of_its_record(cluster):
    old = owning(cluster)
    old.cut(is_cut=True)
    successor = cluster.node("a", spec=spec())
    cluster.run_until(held_by(successor, 1), 3 * H)
    cluster.run(2 * H)
    old.cut(is_cut=False)
    cluster.run(H)
    assert 2 * H <= old.session.failure.age_ms <= 3 * H


def test_a_late_announcement_of_a_dead_process_is_no_conflict(cluster):
    """One record may still be in flight; only a second one shows a live process."""
    a = owning(cluster)
    cluster.fates["a"] = AppendFate(delay_ms=H // 2)
    cluster.run(H // 3 + 100)  # announces once more; that record is in flight
    cluster.crash(a)
    cluster.fates.clear()
    again = cluster.node("a", spec=spec())
    cluster.run(3 * H)
    assert again.session.failure is None
    assert again.held


@pytest.mark.parametrize("lead_ms", range(0, H // 2, 200))
def test_a_disconnected_process_yields_to_its_successor(cluster, lead_ms):
    """Its claims expire before it reads their new owner, and its group may still
    remember it, so that it is the earlier instance of the two."""
    old = owning(cluster)
    cluster.run(lead_ms)
    old.cut(is_cut=True)
    successor = cluster.node("a", spec=spec())
    cluster.run_until(held_by(successor, 1), 3 * H)
    old.cut(is_cut=False)
    cluster.run(2 * H)
    assert isinstance(old.session.failure, IdentityConflict)
    assert successor.session.failure is None
    assert successor.held
