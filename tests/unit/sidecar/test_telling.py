"""What clients are told, and what not."""

import pytest
from enginekit import (
    H,
    world,
    write,
)
from logkit import beat as foreign_beat
from sidecarkit import Local, Machine, having, run, run_until, sizes

from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api

# --- Events ---


def test_the_first_event_is_a_snapshot_even_of_nothing(machine):
    """Acceptance FR01, KA04."""
    a = Local(machine, "a")
    a.take()
    (first,) = a.told
    assert isinstance(first, api.Snapshot)
    assert first.assigned == ()
    incarnation, number, t, offset = a.after.split(".")
    assert incarnation == machine.hub.info().incarnation[:8]
    assert int(number) > 0
    assert t == ("1" if machine.node.engine.context.home_of("g") else "0")
    assert offset.isdigit()


def test_records_of_others_push_nothing(cluster, machine):
    """Acceptance FR03: 1000 unrelated records, 0 events."""
    a = having(machine)
    run(cluster, [a], H)
    before = len(a.told)
    for seq in range(1_000):
        write(cluster, foreign_beat(seq, client="z", key=Key("other", "t", 0)))
    run(cluster, [a], 2 * H)
    assert len(a.told) == before


def test_whoever_comes_again_is_told_what_it_missed(cluster, machine):
    a = having(machine)
    at = a.after
    b = Local(machine, "b", pid=2)
    b.subscribe()
    for _ in range(10):
        cluster.run(100)
        a.beat()
    missed = [frame.body for frame in machine.hub.feed(a.who, at).take()]
    assert [type(body) for body in missed] == [api.Releasing] * 4
    assert not machine.hub.feed(a.who, a.after).on_news


@pytest.mark.parametrize(
    "after", ["", "deadbeef.1.0.0", "x.y", "{own}.99.0.0", "{own}.x"]
)
def test_whoever_comes_from_elsewhere_is_told_everything(machine, after):
    a = having(machine)
    own = machine.hub.info().incarnation[:8]
    (frame,) = machine.hub.feed(a.who, after.format(own=own)).take()
    assert isinstance(frame.body, api.Snapshot)
    assert len(frame.body.assigned) == 8
    assert frame.body.subscriptions == ("s",)


def test_repeated_events_change_nothing(cluster, machine):
    """Acceptance KA28, FR04."""
    a = having(machine)
    b = Local(machine, "b", pid=2)
    b.subscribe()
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], H)
    held = set(a.held)
    for event in [e for e in a.told if not isinstance(e, api.Snapshot)]:
        if not isinstance(event, api.Assigned) or a.key(event) in held:
            a.apply(event)
    assert set(a.held) == held


def test_a_claim_is_told_with_the_one_before_it(cluster, machine):
    a = having(machine)
    first = next(e for e in a.told if isinstance(e, api.Snapshot) and e.assigned)
    before = first.assigned
    assert {each.follows for each in before} == {None}
    epochs = {each.partition: each.epoch for each in before}
    b = Local(machine, "b", pid=2)
    b.subscribe()
    run_until(cluster, [a, b], lambda: sizes(a, b) == [4, 4], H)
    told = [each for each in b.told if isinstance(each, api.Assigned)]
    assert len(told) == 4
    assert all(each.follows == epochs[each.partition] for each in told)


def test_a_slow_reader_of_five_thousand_partitions_converges():
    """Acceptance KA21."""
    cluster = world(partitions=2, records=[0] * 5_000, h=30_000)
    machine = Machine(cluster)
    a = Local(machine, "a", pid=1)
    a.take()
    a.subscribe()

    def lent():
        return sum(len(host.books.loans) for host in machine.hub.hosts)

    for _ in range(400):
        cluster.run(100)
        machine.hub.beat(a.who, api.Beat())
        if lent() == 5_000:
            break
    assert lent() == 5_000
    a.take()
    assert len(a.valid) == 5_000
    assert isinstance(a.told[-1], api.Snapshot), "what was missed is told at once"


def test_a_new_feed_ends_the_one_before(machine):
    a = Local(machine, "a")
    rung = []
    first = a.feed
    first.on_news = lambda: rung.append(True)
    a.follow()
    assert first.is_closed
    assert rung
    first.close()
    assert len(rung) == 1
