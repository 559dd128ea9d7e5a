"""Views and histories over random changes of the partition count (PROTOCOL 10).

The records of a change are written in a random order that the protocol allows, with
claims, releases, crashes and late records between them.
"""

import random

import pytest
from changekit import Change
from logkit import H, beat, claim, ident, messages, release

from kafka_marshal import World
from kafka_marshal.history.chain import KeyChain
from kafka_marshal.history.reading import joined, places_of
from kafka_marshal.history.wording import text_of, why
from kafka_marshal.protocol.import_check import ImportCheck
from kafka_marshal.protocol.layout import is_final, moving_keys
from kafka_marshal.protocol.losses import LossBook
from kafka_marshal.protocol.placement import by_partition, standing_keys, standing_of
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import from_bytes, to_bytes
from kafka_marshal.protocol.state import WorldState

COUNTS = (2, 4, 2, 1, 2)
STEPS = 220
CLIENTS = ("c1", "c2", "c3")


class Walk:
    """Random steps of changes and members; ``check`` is called after each step."""

    def __init__(self, seed, check):
        self.rng = rng = random.Random(seed)
        start = rng.randrange(len(COUNTS) - 1)
        self.counts = list(COUNTS[start:])
        self.change = Change(self.counts[0], self.counts[1], spare=2)
        self.keys = [*self.change.moving(2), *self.change.staying(1)]
        self.is_open = False
        for _ in range(STEPS):
            self._step()
            check(self)

    def _step(self):
        rng, change = self.rng, self.change
        for log in change.logs:
            log.now_ms += rng.choice(
                (0, 0, 1, H // 3, 3 * H if rng.random() < 0.1 else 0)
            )
        if rng.random() < 0.7:
            self._work()
        elif not self.is_open and len(self.counts) > 1 and rng.random() < 0.3:
            self._begin()
        elif self.is_open:
            self._go_on()

    def _work(self):
        """Append a member's record to the key's source or target.

        A member that has not read the newest count still writes to the source.
        """
        rng, key = self.rng, self.rng.choice(self.keys)
        log = rng.choice((self.change.place(key), self.change.target(key)))
        config, client = log.state.config, rng.choice(CLIENTS)
        known = log.state.keys.get(key)
        epoch = rng.choice((0, 1, 5)) if known is None else known.epoch
        if known is not None and known.owner is not None and rng.random() < 0.8:
            client = known.owner.client_id
        at = rng.randrange(40)
        record = rng.choice(
            (
                claim(
                    client,
                    key=key,
                    generation=1 if config is None else config.generation,
                ),
                claim(client, key=key, generation=rng.choice((1, 2, 3))),
                beat(epoch, at, client=client, key=key),
                release(epoch, at, client=client, key=key),
                messages(epoch, at, at + 3, client=client, key=key),
            )
        )
        log.append(record)

    def _begin(self):
        change = self.change
        change.before, change.after = self.counts[:2]
        change.op = ident(f"op {len(self.counts)}")
        self.unfenced = [*range(1, max(change.before, change.after))]
        self.rng.shuffle(self.unfenced)
        change.fence(0)
        self.is_open = True

    def _go_on(self):
        """Append a record of the change: a fence, an import, a Done or a Final."""
        change, rng = self.change, self.rng
        if self.unfenced:
            change.fence(self.unfenced.pop())
            return
        states = [log.state for log in change.logs if log.state.layout is not None]
        moving = {key: state for state in states for key in moving_keys(state)}
        final = [key for key, state in moving.items() if is_final(state, key)]
        if any(x.done_ms is None for state in states for x in state.layout.sources):
            is_imported = all(key in change.target(key).state.keys for key in moving)
            if is_imported and len(final) == len(moving):
                change.done()
            elif final:
                change.imported(rng.choice(final))
            return
        numbers = [state.partition for state in states]
        change.final(0 if 0 in numbers else rng.choice(numbers))
        if len(numbers) == 1:
            self._end()

    def _end(self):
        self.is_open = False
        self.change.generation += 1
        self.counts.pop(0)
        # Until the next change begins, no key moves.
        self.change.before = self.change.after = self.counts[0]


def shown_once(walk):
    """Check that both views show a key once, from a partition that knows it."""
    worlds = by_partition(walk.change.states)
    every = standing_keys(worlds)
    for key in walk.keys:
        found = standing_of(worlds, key)
        assert every.get(key) is found
        owners = [
            state
            for state in walk.change.states
            if key in state.keys
            and state.keys[key].owner is not None
            and not is_final(state, key)
        ]
        assert len(owners) <= 1, "two own the key"
        if owners:
            assert found is owners[0]
    world = World(walk.change.states, {}, cluster_id="cluster")
    world.config()
    assert [key for key, _ in world.claims("g")] == sorted(every)
    for key in walk.keys:
        world.partition_of(key)
        world.moving_to(key)


@pytest.mark.parametrize("seed", range(40))
def test_a_view_shows_each_key_once_while_the_count_changes(seed):
    Walk(seed, shown_once)


def readers_of(walk, *, skips=None):
    """Read all logs, each from a checkpoint after ``skips`` entries."""
    chains = {key: {} for key in walk.keys}
    historians, check = {}, ImportCheck()
    for log in walk.change.logs:
        t = log.state.partition
        skip = 0 if skips is None else skips[t]
        world = WorldState(t)
        for entry in log.entries[:skip]:
            apply(world, entry)
        made = {key: KeyChain(key) for key in walk.keys}
        book = LossBook(t, begun=world)
        if skip:
            world = from_bytes(to_bytes(world))
            for chain in made.values():
                chain.begin(world)
        for entry in log.entries[skip:]:
            check.keep(world)
            transitions = apply(world, entry)
            book.take(entry, transitions, keys=world.keys)
            for chain in made.values():
                chain.take(world, entry, transitions=transitions)
            check.take(world, transitions)
        assert to_bytes(world) == to_bytes(log.state) if log.entries else True
        book.open_ones(world)
        historians[t] = book
        for key, chain in made.items():
            chains[key][t] = chain, world
    worlds = {t: world for t, (_, world) in chains[walk.keys[0]].items()}
    assert list(check.compare(worlds)) == []
    return chains, worlds


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("is_whole", [True, False])
def test_the_history_of_a_key_ends_with_the_claim_that_views_show(seed, is_whole):
    walk = Walk(seed, lambda _: None)
    skips = None
    if not is_whole:
        skips = [walk.rng.randrange(len(log.entries) + 1) for log in walk.change.logs]
    chains, worlds = readers_of(walk, skips=skips)
    for key, found in chains.items():
        assert places_of(key, found) <= found.keys()
        path = joined(key, found)
        tokens = [each.token for each in path.claims]
        assert tokens == sorted(set(tokens)) or not is_whole
        standing = standing_of(worlds, key)
        assert all(text_of(event) for event in path.events)
        assert why(path, path.world)
        if standing is None:
            continue
        assert path.world is standing
        owner = standing.keys[key].owner
        last = path.claims[-1] if path.claims else None
        if owner is not None:
            assert last is not None
            assert (last.client_id, last.ending) == (owner.client_id, "open")
            assert last.token == standing.token(key)
        elif last is not None and last.ending == "open":
            # The owner crashed, and the source has not dropped its key yet.
            assert last.token < standing.token(key)


def test_the_random_walks_reach_moves_and_owners_that_died():
    found = {"moves": 0, "claims in two": 0, "dead owners": 0, "changes": 0}
    for seed in range(40):
        walk = Walk(seed, lambda _: None)
        chains, _ = readers_of(walk)
        for key, made in chains.items():
            path = joined(key, made)
            what = [each.what for each in path.events]
            found["moves"] += what.count("imported")
            epochs = [each.token.era for each in path.claims]
            found["claims in two"] += len(set(epochs)) > 1
            found["dead owners"] += any(c.reason == "moved" for c in path.claims)
        found["changes"] += len(COUNTS) - len(walk.counts)
    assert all(count > 20 for count in found.values()), found
