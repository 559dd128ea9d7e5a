"""The past of a key from the chains of several partitions."""

from changekit import Change

from kafka_marshal.history.chain import KeyChain
from kafka_marshal.history.path import counts_in, joined, places_of
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import from_bytes, to_bytes
from kafka_marshal.protocol.state import WorldState


def chain_of(log, key, *, skip=0):
    """Return the chain of a log, from a checkpoint after some entries."""
    chain, world = KeyChain(key), WorldState(log.state.partition)
    for index, entry in enumerate(log.entries):
        if index == skip and skip:
            world = from_bytes(to_bytes(world))
            chain.begin(world)
        transitions = apply(world, entry)
        if index >= skip:
            chain.take(world, entry, transitions=transitions)
    return chain, world


def test_where_a_key_was():
    change = Change(2, 4)
    (key,) = change.moving()
    source, target = (change.place(key, n).state.partition for n in (2, 4))
    chains = {t: chain_of(change.logs[t], key) for t in (target,)}
    assert places_of(key, chains) == {0}, "only partition 0 has the count"
    change.fence()
    chains = {t: chain_of(change.logs[t], key) for t in (target,)}
    assert places_of(key, chains) == {source, target}
    assert counts_in(chains) == {2, 4}
    (stays,) = change.staying()
    log = change.place(stays)
    chains = {log.state.partition: chain_of(log, stays)}
    assert places_of(stays, chains) == {log.state.partition}


def test_a_past_that_begins_at_a_checkpoint_within_a_change():
    change = Change(2, 4)
    (key,) = change.moving()
    change.claimed(key)
    change.fence()
    change.released(key, position=5)
    change.imported(key)
    source, target = change.place(key), change.target(key)
    begun = len(target.entries)
    change.reclaimed(key)
    change.tick(1)
    change.done()
    change.final()
    chains = {
        source.state.partition: chain_of(source, key, skip=2),
        target.state.partition: chain_of(target, key, skip=begun),
    }
    path = joined(key, chains)
    assert [e.what for e in path.events] == [
        "restored",
        "layout_fenced",
        "released",
        "restored",
        "claimed",
        "layout_final",
        "layout_final",
    ]
    assert path.began_at == 2
    assert path.events_count == 7
    assert path.world is chains[target.state.partition][1]


def test_a_partition_that_knows_nothing_of_the_key_is_left_out():
    change = Change(2, 4)
    (key,) = change.moving()
    change.claimed(key)
    change.released(key)
    change.fence()
    change.imported(key)
    change.done()
    change.final()
    source, target = change.place(key), change.target(key)
    source.append(b"")
    chains = {
        source.state.partition: chain_of(source, key, skip=len(source.entries) - 1),
        target.state.partition: chain_of(target, key),
    }
    path = joined(key, chains)
    assert {e.partition for e in path.events} == {target.state.partition}
    assert path.began_at is None
    at = source.state.partition
    assert joined(key, chains, at=at).world.partition == at
