"""Kept rows equal computed ones: every round of every test here compares them."""

import pytest
import rowkit
from countkit import is_over, level_two, resize
from enginekit import KEY, H, fold, held_by, pause_for, pause_scope, spec, world, write
from logkit import OP, beat, claim, schedule, settings, stage

from kafka_marshal.engine.key_rows import KeyRows
from kafka_marshal.policies import topic as whole_topics
from simulator.fakestore import AppendFate

COUNT = 8


@pytest.fixture(autouse=True)
def seen(monkeypatch):
    found = rowkit.check_rows(monkeypatch)
    yield found
    assert not found.wrong


def computed_in(seen, cluster, for_ms):
    """Let time pass; return how often a wanted key had its row computed."""
    before = seen.computed
    cluster.run(for_ms)
    return (seen.computed - before) / COUNT


def sharing(names="ab", *, partitions=2):
    """Return a cluster whose nodes hold equal parts, and the nodes."""
    cluster = level_two(partitions, records=[1] * COUNT)
    nodes = [cluster.node(name, spec=spec()) for name in names]
    share = COUNT // len(names)
    cluster.run_until(lambda: all(held_by(node, share)() for node in nodes), 5 * H)
    cluster.run(H)
    return cluster, nodes


def rows_of(node):
    (sub,) = node.session.subscriptions
    return {row.key: row for row in sub._rows.rows}


def test_rows_of_live_owners_are_computed_about_once_an_interval(seen):
    cluster, nodes = sharing()
    rounds = seen.rounds
    computed = computed_in(seen, cluster, 10 * H)
    assert seen.rounds - rounds > 100
    # Two members; a third of an interval after a renewal, none is late.
    assert computed <= 2 * 10 * 3 / 2
    nodes[0].session._apply_policies(nodes[0].clock.now_ms())
    before = seen.computed
    nodes[0].session._apply_policies(nodes[0].clock.now_ms())
    assert seen.computed == before, "nothing has changed"


def test_the_keys_of_a_dead_owner_become_stale_in_time():
    cluster, (a, b) = sharing()
    cluster.crash(a)
    cluster.run_until(held_by(b, COUNT), 4 * H)


def test_a_release_updates_the_row_of_its_key():
    cluster, (a, b) = sharing()
    key = next(iter(a.held))
    assert rows_of(b)[key].owner == "a"
    a.session.release(a.session.holdings[key], reason="surplus", successor="b")
    cluster.run_until(lambda: key in b.held, H)
    cluster.run(100)
    assert rows_of(a)[key].owner == "b"
    assert rows_of(b)[key].is_mine


def test_a_drain_updates_the_row_of_its_key():
    cluster, (a, _) = sharing()
    holding = next(iter(a.session.holdings.values()))
    holding.is_subleased = True  # so that the drain does not end
    a.session.drain(holding, reason="lagging")
    cluster.run(H // 5)
    assert rows_of(a)[holding.key].is_leaving


def test_a_paused_key_has_no_row_until_the_pause_ends():
    cluster, (a, _) = sharing(partitions=1)
    pause_scope(cluster, H, {"t": (0,)})
    cluster.run(H // 2)
    assert KEY not in rows_of(a)
    cluster.run(2 * H)
    assert len(rows_of(a)) == COUNT


def test_a_scheduled_pause_removes_the_row_when_it_begins(seen):
    cluster, (a, b) = sharing(partitions=1)
    begin_ms = cluster.clock.wall_ms() + 4 * H
    write(cluster, schedule(begin_ms, begin_ms + 2 * H, scope={"t": (0,)}))
    cluster.run(H)
    assert computed_in(seen, cluster, 2 * H) < 2 * COUNT, "rows are kept meanwhile"
    cluster.run(H + H // 2)
    assert KEY not in rows_of(a)
    pause_for(cluster, H)
    cluster.run_until(lambda: not a.held and not b.held, 3 * H)
    cluster.run_until(lambda: len(a.held) + len(b.held) == COUNT, 6 * H)


def test_the_lock_of_a_set_position_makes_the_row_unclaimable():
    cluster, (a,) = sharing("a", partitions=1)
    pause_for(cluster, 2 * H, op=OP)
    cluster.run_until(held_by(a, 0), 2 * H)
    write(cluster, stage((0, 5)))
    cluster.run_until(held_by(a, COUNT - 1), 4 * H)
    cluster.run(H)
    assert not rows_of(a)[KEY].is_claimable


def test_rows_follow_a_change_of_the_partition_count():
    cluster, nodes = sharing()
    resize(cluster, 4)
    cluster.run_until(lambda: is_over(cluster), 8 * H)
    cluster.run_until(lambda: all(held_by(n, COUNT // 2)() for n in nodes), 4 * H)
    cluster.run(H)
    cluster.crash(nodes[0])
    cluster.run_until(held_by(nodes[1], COUNT), 4 * H)


def test_rows_follow_a_truncated_log():
    cluster, nodes = sharing(partitions=1)
    place = cluster.place(0)
    cluster.kafka.groups.clear()
    cluster.kafka.truncate(place, end=1, leader=1)  # nothing but the Config is left
    cluster.run(100)
    cluster.run_until(lambda: sum(len(n.held) for n in nodes) == COUNT, 8 * H)


def test_a_row_has_its_owner_again_after_a_lost_claim():
    """The owner's heartbeat precedes the claim of a member that has not read it."""
    cluster, (a, b) = sharing(partitions=1)
    key = next(iter(a.held))
    a.cut(is_cut=True)
    epoch = a.session.holdings[key].claim.epoch
    cluster.run_until(lambda: key in b.session.holdings, 3 * H)
    cluster.fates["b"] = AppendFate(delay_ms=H // 2)
    cluster.run_until(lambda: rows_of(b)[key].is_mine, H)
    cluster.fates.clear()
    write(cluster, beat(epoch, client="a", key=key, inc=a.owner.incarnation))
    cluster.run(H // 4)
    assert (rows_of(b)[key].owner, rows_of(b)[key].is_mine) == ("a", True)
    cluster.run_until(lambda: not rows_of(b)[key].is_mine, H)


def test_a_lost_part_of_a_whole_topic_is_marked_until_none_is_held():
    cluster = world(records=[1] * COUNT)
    node = cluster.node("a", spec=spec(policy=whole_topics))
    cluster.run_until(held_by(node, COUNT), 2 * H)
    cluster.run(100)
    other = KEY._replace(partition=1)
    node.session.release(node.session.holdings[other], reason="lagging")
    write(cluster, claim("x", key=other))
    cluster.run_until(lambda: rows_of(node)[other].is_lost, H)
    assert rows_of(node)[other].owner == "x"
    cluster.run_until(lambda: not rows_of(node)[other].is_lost, H)


def test_rows_follow_the_plans_of_the_group():
    cluster, nodes = sharing(partitions=4)
    for t in range(4):
        write(cluster, settings(policy="planner"), t)
    cluster.run(2 * H)
    named = set()
    cluster.node("c", spec=spec())
    for _ in range(4 * H // 20):
        cluster.run(20)
        named |= {row.planned for node in nodes for row in rows_of(node).values()}
    assert named == {None, "c"}
    assert {len(node.held) for node in cluster.nodes} == {2, 3}


def test_a_new_state_of_a_partition_recomputes_all_rows(seen):
    cluster, (a, _) = sharing(partitions=1)
    replica, now_ms = a.engine.context.replicas[0], a.clock.now_ms()
    replica.begin(fold(cluster), now_ms)
    before = seen.computed
    a.session._apply_policies(now_ms)
    assert seen.computed == before + COUNT


def test_without_wanted_keys_there_are_no_rows():
    cluster = world(records=[])
    node = cluster.node("a", spec=spec())
    cluster.run(H)
    assert rows_of(node) == {}
    assert KeyRows().rows == ()
