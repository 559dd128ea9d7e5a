"""Members that are drained hand off their partitions (PROTOCOL 9.7)."""

import pytest
from enginekit import H, fold, of, spec, world, write
from logkit import direct, ident

from kafka_marshal.protocol.records import (
    Directive,
    HandoffOffer,
    ReleasingPartition,
)
from simulator import node
from simulator.fakestore import AppendFate


@pytest.fixture
def cluster():
    return world(partitions=1, records=(4, 4, 4, 4))


def drain(cluster, client="a", *, for_ms=30 * H, **rest):
    until_ms = cluster.clock.wall_ms() + for_ms
    write(cluster, direct(client, until=until_ms, **rest))


def pair(cluster, **rest):
    """Return two members that share the partitions."""
    a, b = (cluster.node(name, spec=spec(**rest)) for name in "ab")
    cluster.run_until(lambda: len(a.held) == len(b.held) == 2, 8 * H)
    return a, b


def test_a_drained_member_releases_all_partitions_to_successors(cluster):
    a, b = pair(cluster)
    drain(cluster)
    cluster.run_until(lambda: len(b.held) == 4, H)
    assert not a.held
    releases = of(cluster, "a", ReleasingPartition)[-2:]
    assert {each.record.successor for each in releases} == {"b"}
    assert {each.record.reason.partition(":")[0] for each in releases} == {"drained"}
    cluster.run(3 * H)
    assert not a.held


def test_a_drain_may_name_a_host(cluster):
    a, b = pair(cluster)
    home = a.engine.context.replicas[0].world
    hosts = {each.record.client_id: each.record.host for each in home.live_members("g")}
    until_ms = cluster.clock.wall_ms() + 9 * H
    write(cluster, direct(host=hosts["a"], until=until_ms, group="marshal"))
    cluster.run_until(lambda: len(b.held) == 4, H)
    other = direct("b", until=until_ms, op=ident("other"))
    write(cluster, other)
    cluster.run(H)
    assert len(b.held) == 4, "nobody else may take them"


def test_a_member_takes_its_share_again_after_the_drain_ends(cluster):
    a, b = pair(cluster)
    drain(cluster, for_ms=2 * H)
    cluster.run_until(lambda: len(b.held) == 4, H)
    cluster.run_until(lambda: len(a.held) == 2, 6 * H)


def test_a_drain_can_be_ended_early(cluster):
    a, b = pair(cluster)
    drain(cluster)
    cluster.run_until(lambda: len(b.held) == 4, H)
    write(cluster, direct(until=0, seq=1))
    cluster.run_until(lambda: len(a.held) == 2, 6 * H)


def test_a_drain_applies_under_the_policy_greedy(cluster):
    a, b = pair(cluster, policy="greedy", claims_max=2)
    c = cluster.node("c", spec=spec(policy="greedy"))
    cluster.run(H)
    assert not c.held
    drain(cluster)
    cluster.run_until(lambda: len(c.held) == 2, 2 * H)
    assert (len(a.held), len(b.held)) == (0, 2)


def test_a_cordoned_member_keeps_its_partitions_and_claims_no_more(cluster):
    a, b = pair(cluster)
    drain(cluster, action="cordon")
    cluster.run(H)
    assert len(a.held) == 2
    cluster.crash(b)
    cluster.run(8 * H)
    assert len(a.held) == 2, "nothing new, whatever is free"
    write(cluster, direct(until=0, seq=1))
    cluster.run_until(lambda: len(a.held) == 4, 4 * H)


def test_a_client_drained_before_it_starts_claims_nothing(cluster):
    drain(cluster, "c")
    c = cluster.node("c", spec=spec())
    cluster.run(5 * H)
    assert not c.held


def test_a_drained_member_offers_its_keys_to_a_successor_that_warms_up(cluster):
    a = cluster.node("a", spec=spec())
    cluster.run_until(lambda: len(a.held) == 4, 3 * H)
    drain(cluster, action="cordon", op=ident("cordon"), client="b")
    b = cluster.node("b", spec=spec(on_warm=lambda *_: None))
    cluster.run(2 * H)
    assert not b.held
    write(cluster, direct("b", until=0, op=ident("cordon"), seq=1, action="cordon"))
    drain(cluster)
    cluster.run_until(lambda: len(b.held) == 4, 4 * H)
    assert len(of(cluster, "a", HandoffOffer)) == 4


def test_an_offer_to_a_drained_member_is_withdrawn(cluster):
    a = cluster.node("a", spec=spec())
    cluster.run_until(lambda: len(a.held) == 4, 3 * H)
    b = cluster.node("b")
    b.warming.is_held = True
    b.consume(spec(on_warm=lambda *_: None))
    cluster.run_until(lambda: b.warming.waiting_count == 2, 3 * H)
    drain(cluster, "b")
    cluster.run_until(lambda: a.observer.named("handoff_withdrawn"), H)
    assert len(a.held) == 4


def test_a_drained_member_keeps_partitions_that_no_other_has_room_for(cluster):
    a = cluster.node("a", spec=spec())
    cluster.run_until(lambda: len(a.held) == 4, 3 * H)
    drain(cluster)
    cluster.fates["b"] = AppendFate(delay_ms=300)
    b = cluster.node("b", spec=spec(claims_max=1))
    cluster.run_until(lambda: len(b.held) == 1, 3 * H)
    cluster.run(3 * H)
    # A partition on its way to another member counts as held by that member.
    assert (len(a.held), len(b.held)) == (3, 1)
    assert len(of(cluster, "a", ReleasingPartition)) == 1


# --- a member drains itself


def shown(cluster):
    group = fold(cluster).groups.get("g")
    return () if group is None else group.directives


def test_a_member_that_shuts_down_drains_itself(cluster):
    a, b = pair(cluster)
    assert a.session.self_drain.begin(20 * H)
    assert a.session.self_drain.begin(20 * H)
    cluster.run_until(lambda: len(b.held) == 4, H)
    assert a.session.self_drain.is_in_force
    (record,) = [each.record for each in of(cluster, "a", Directive)]
    (standing,) = shown(cluster)
    assert (record.client, record.action) == ("a", "drain")
    assert standing.op_id == record.op_id
    a.session.begin_close(release=True)
    cluster.run_until(lambda: not shown(cluster), H)
    assert [each.transition.effect for each in of(cluster, "a", Directive)] == [
        "directed",
        "directive_ended",
    ]
    cluster.run(3 * H)
    assert len(b.held) == 4


def test_a_lost_directive_of_a_member_is_sent_again(cluster):
    a, b = pair(cluster)
    cluster.fates["a"] = AppendFate(is_lost=True)
    a.session.self_drain.begin(20 * H)
    cluster.run(100)
    del cluster.fates["a"]
    assert not shown(cluster)
    cluster.run_until(lambda: len(b.held) == 4, 2 * H)
    (standing,) = shown(cluster)
    cluster.run(3 * H)
    assert len(of(cluster, "a", Directive)) == 1
    assert standing.client == "a"


def test_the_self_drain_of_a_dead_member_expires(cluster):
    a, b = pair(cluster)
    a.session.self_drain.begin(2 * H)
    cluster.run_until(lambda: len(b.held) == 4, H)
    cluster.crash(a)
    cluster.run_until(lambda: not shown(cluster), 4 * H)


def test_a_self_drain_is_not_sent_again_after_its_end(cluster):
    a, _ = pair(cluster)
    a.session.self_drain.begin(H)
    cluster.run(4 * H)
    assert len(of(cluster, "a", Directive)) == 1


def test_below_level_2_a_member_cannot_drain_itself(monkeypatch):
    monkeypatch.setattr(node, "SUPPORTED_LEVEL", 1)
    cluster = world(partitions=1, records=(4, 4, 4, 4))
    a, _ = pair(cluster)
    assert not a.session.self_drain.begin(H)
    a.session.begin_close(release=True)
    cluster.run(H)
    assert not of(cluster, "a", Directive)


def test_a_restarted_member_ends_its_earlier_self_drain(cluster):
    a, b = pair(cluster)
    a.session.self_drain.begin(30 * H)
    cluster.run_until(lambda: len(b.held) == 4, H)
    cluster.crash(a)
    assert shown(cluster)
    again = cluster.node("a", spec=spec())
    cluster.run_until(lambda: not shown(cluster), H)
    cluster.run_until(lambda: len(again.held) == 2, 6 * H)
    assert len(of(cluster, "a", Directive)) == 2


def test_a_drained_member_does_not_end_a_directive_of_an_admin(cluster):
    pair(cluster)
    drain(cluster)
    cluster.run(2 * H)
    assert shown(cluster)
    assert not of(cluster, "a", Directive)
