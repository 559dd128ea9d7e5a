"""The only coordinating partition, and a Config that its log loses (PROTOCOL 10.9).

No other log has the Config: only a member that has read it can write it again. The log
goes back once, to any record after its first Config but a claim, in a new leader epoch.
An admin writes the second Config once. A member claims the only key by its reading,
which may be old; its claim lands at any later time. The fold, the records of the
member, and whether it may claim are the product's.

The model judges the claims of a member that had read the Config of the largest token. A
member that had not is excused: its token may be lower.
"""

from functools import cache
from typing import NamedTuple

from logkit import Log, claim, config, release
from lostchangemodel import Best, Entries
from search import Broken

from kafka_marshal.engine.placement import Placement
from kafka_marshal.engine.replica import Replica
from kafka_marshal.protocol import lost_changes
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.types import Key

KEY = Key("g", "t", 0)
CONFIGS = {number: config(number, k=1, era=number, level=2) for number in (1, 2)}
EARLY_MAX, LATE_MAX = 4, 7
"""Behind how many entries claims land at first, and under the second Config."""


class World(NamedTuple):
    """The log, the reading of the member, and its claim in flight.

    Attributes:
        entries: The entries after the first Config.
        is_altered: Whether the admin has written the second Config.
        has_lost: Whether the log went back.
        best: The largest token of the key.
        seen: The entries that the member has read.
        read: The highest generation that the member has ever read.
        sent: Generation of the claim in flight, and ``read`` when it was sent.
    """

    entries: Entries = ()
    is_altered: bool = False
    has_lost: bool = False
    best: Best | None = None
    seen: Entries = ()
    read: int = 1
    sent: tuple[int, int] | None = None


class LostConfigModel:
    """S7, and a claim under the newest Config that the member read stays reachable."""

    def __init__(self):
        self.fold = cache(_fold)
        self.placement = cache(self._placement)

    def start(self):
        return World()

    def broken(self, world):
        del world

    def is_over(self, world):
        """Return whether the newest Config is in force, was read, and has a claim."""
        generation = self.fold(world.entries).config.generation
        return (
            world.is_altered
            and world.seen == world.entries
            and world.read == generation
            and world.best is not None
            and world.best.generation == generation
        )

    def steps(self, world):
        read = max(world.read, self.fold(world.entries).config.generation)
        yield "the member reads", world._replace(seen=world.entries, read=read)
        yield from self._configs(world)
        yield from self._claims(world)
        if not world.has_lost:
            for kept in range(len(world.entries)):
                back = world._replace(entries=world.entries[:kept], has_lost=True)
                known = self.fold(back.entries).keys.get(KEY)
                if known is None or known.owner is None:
                    yield f"the log goes back to {kept}", back

    def _configs(self, world):
        if not world.is_altered:
            altered = _appended(world, CONFIGS[2])
            yield "an admin writes a Config", altered._replace(is_altered=True)
        placement = self.placement(world.seen, world.read)
        state = self.fold(world.entries)
        read = {0: self.fold(world.seen)}
        for record in lost_changes.lost_configs(read, placement.read).values():
            if record.generation > state.config.generation:  # not refused
                yield "the member writes a Config", _appended(world, record)

    def _claims(self, world):
        if world.sent is None:
            if not self.placement(world.seen, world.read).awaits_import(KEY):
                sent = self.fold(world.seen).config.generation, world.read
                yield "the member sends a claim", world._replace(sent=sent)
            return
        yield "its claim is lost", world._replace(sent=None)
        generation = self.fold(world.entries).config.generation
        has_room = len(world.entries) <= (LATE_MAX if generation > 1 else EARLY_MAX)
        if has_room and world.sent[0] == generation:
            yield "its claim lands", self._claimed(world)

    def _claimed(self, world):
        assert world.sent is not None
        (generation, read), best = world.sent, world.best
        offset = self.fold(world.entries).next_offset
        records = claim(key=KEY, generation=generation), release(offset, key=KEY)
        after = _appended(world, *records)
        token = self.fold(after.entries).token(KEY)
        has_grown = best is None or token > best.token
        if not has_grown and read >= best.generation:
            raise Broken("S7: a token that does not grow")
        best = Best(token, generation) if has_grown else best
        return after._replace(best=best, sent=None)

    def _placement(self, seen, read):
        """Return the member's placement, by its reading and the highest generation."""
        replica = Replica(0, now_ms=0)
        placement = Placement({0: replica})
        for entries in (((0, encode(CONFIGS[read])),) if read > 1 else (), seen):
            replica.world = self.fold(entries)
            placement.follow(replica.world.config)
        return placement


def _appended(world, *records):
    epoch = int(world.has_lost)
    added = tuple((epoch, encode(record)) for record in records)
    return world._replace(entries=world.entries + added)


def _fold(entries):
    log = Log(0, k=1, level=2)
    for epoch, value in entries:
        log.append(value, epoch=epoch)
    return log.state


def forget_what_was_read(patch):
    """A member forgets a Config that the log has lost."""
    unclaimed, lost_configs = lost_changes.unclaimed, lost_changes.lost_configs
    name = "kafka_marshal.engine.placement.unclaimed"
    patch.setattr(name, lambda worlds, _: unclaimed(worlds))
    patch.setattr(lost_changes, "lost_configs", lambda worlds, _: lost_configs(worlds))
