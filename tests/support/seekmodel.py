"""One key whose owner seeks: every interleaving of its records (PROTOCOL 6.6).

The fold is the product's ``apply``. The owner is modelled: it sends heartbeats, seeks,
waits, processes, or gives its claim up and claims the key again. Every record lands at
once, at any later time, or never; the owner crashes and another one takes over.

There are few offsets. A takeover skips the records below its position; these must not
include the position of a confirmed seek.
"""

from functools import cache
from typing import NamedTuple

from logkit import KEY, beat, claim, config, ident, release

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import GroupState, KeyState, WorldState
from kafka_marshal.protocol.types import LogEntry, Owner

H_MS = 1_000
NOW_MS = 10**9
NEXT_OFFSET = 1_000
EPOCHS = (500, 600, 700)
CONFIG = config(h=H_MS)
OWNER, OTHER = "c1", "c2"
BEAT, REWIND, RELEASE = "beat", "rewind", "release"

# Mistakes of the owner in the model.
# A seek counts as confirmed while an earlier record may land.
CONFIRM_WITH_RECORDS_ON_THEIR_WAY = "confirm_with_records_on_their_way"
# A seek counts as confirmed without regard to the position in the log.
CONFIRM_WITHOUT_THE_LOG = "confirm_without_the_log"


class Sent(NamedTuple):
    """A record that may land.

    ``is_old`` is true if its sender no longer waits for it.
    """

    number: int
    kind: str
    claim: int
    position: int
    is_old: bool = False


class World(NamedTuple):
    """The key as ``apply`` left it, its owner, and records in flight.

    Attributes:
        claims: Claims so far; the key has the last one.
        owner: The owner of the key in the log.
        position: The position in the log.
        own: The owner's claim, None after it gave the claim up or crashed.
        at: The owner's position.
        seek: Number of the first record of a seek that is not confirmed.
        confirmed: The position of the last confirmed seek, advanced by the owner's
            processing; a takeover must start there or below.
        sent: Records that may land.
        count: Numbers used so far.
    """

    claims: int = 0
    owner: str | None = OWNER
    position: int = 0
    own: int | None = 0
    at: int = 0
    seek: int | None = None
    confirmed: int | None = None
    sent: tuple[Sent, ...] = ()
    count: int = 0


class SeekModel:
    """6.6: no takeover skips the record at the position of a confirmed seek."""

    def __init__(self, *, offsets=2, records=5, mistake=None):
        self.offsets, self.records, self.mistake = offsets, records, mistake
        self.append = cache(self._append)

    def start(self):
        return World()

    def broken(self, world):
        is_over = world.confirmed is not None and world.position > world.at
        if is_over and world.seek is None:
            return "6.6: a takeover would skip what the owner sought to"
        return None

    def steps(self, world):
        for each in world.sent:
            rest = world._replace(sent=tuple(x for x in world.sent if x is not each))
            yield f"{each} lands", self._land(rest, each)
            if not each.is_old:
                old = each._replace(is_old=True)
                sent = tuple(old if x is each else x for x in world.sent)
                yield f"{each} counts as failed", world._replace(sent=sent)
        if world.owner == OWNER and world.own is not None:
            yield "the owner crashes, another claims", self._take_over(world)
        if world.own is None or world.own != world.claims:
            if world.owner is None and world.claims + 1 < len(EPOCHS):
                yield "the owner claims again", self._claim_again(world)
            return
        if world.seek is not None:
            yield from self._confirm(world)
        elif world.at < self.offsets:
            yield "the owner goes on", world._replace(at=world.at + 1)
        if world.count < self.records:
            yield "the owner beats", self._send(world, BEAT)
            for to in range(self.offsets + 1):
                sought = world._replace(at=to, seek=world.count, confirmed=None)
                yield f"the owner seeks to {to}", self._send(sought, REWIND)

    # --- the owner

    def _send(self, world, kind):
        sent = Sent(world.count, kind, world.own, world.at)
        return world._replace(sent=(*world.sent, sent), count=world.count + 1)

    def _confirm(self, world):
        mine = [each for each in world.sent if each.claim == world.own]
        if any(not each.is_old for each in mine):
            return  # the owner waits
        if world.position != world.at and self.mistake != CONFIRM_WITHOUT_THE_LOG:
            if world.count < self.records:
                yield "the owner sends the rewind again", self._send(world, REWIND)
            return
        is_safe = all(each.number >= world.seek for each in mine)
        if is_safe or self.mistake is not None:
            done = world._replace(seek=None, confirmed=world.at)
            yield "the seek is confirmed", done
        elif world.count < self.records:
            given = self._send(world._replace(seek=None), RELEASE)
            yield "the owner gives its claim up", given._replace(own=None)

    def _claim_again(self, world):
        position, owner = self.append(world.claims, None, world.position, None)
        assert owner == OWNER
        claims = world.claims + 1
        return world._replace(
            claims=claims, owner=owner, own=claims, at=position, confirmed=None
        )

    def _take_over(self, world):
        """Return the world after a takeover, which starts at the log's position."""
        # ``broken`` has judged its start; earlier seeks no longer count.
        return world._replace(owner=OTHER, own=None, seek=None, confirmed=None)

    # --- the log

    def _land(self, world, sent):
        if world.owner == OTHER:
            return world  # the record has an earlier epoch
        position, owner = self.append(world.claims, world.owner, world.position, sent)
        return world._replace(position=position, owner=owner)

    def _append(self, claims, owner, position, sent):
        """Fold a record with the product; None is a claim of the free key."""
        state = WorldState(
            0,
            next_offset=NEXT_OFFSET,
            leader_epoch=1,
            epoch_time_ms=NOW_MS,
            log_time_ms=NOW_MS,
            append_time_ms=NOW_MS,
            config=CONFIG,
        )
        state.groups["g"] = GroupState()
        known = state.keys[KEY] = KeyState(
            owner=None if owner is None else Owner(owner, ident(owner)),
            epoch=EPOCHS[claims],
            epoch_leader_epoch=0,
            renewed_ms=NOW_MS,
            heartbeat_interval_ms=H_MS,
            active_ms=NOW_MS,
            position=position,
        )
        state.rebuild_derived()
        entry = LogEntry(
            offset=NEXT_OFFSET,
            leader_epoch=1,
            timestamp_ms=NOW_MS,
            timestamp_type=1,
            value=encode(self._record(sent)),
        )
        apply(state, entry)
        known = state.keys[KEY]
        return known.position, None if known.owner is None else known.owner.client_id

    def _record(self, sent):
        if sent is None:
            return claim(OWNER)
        epoch = EPOCHS[sent.claim]
        if sent.kind == RELEASE:
            return release(epoch, sent.position, successor=OWNER)
        return beat(epoch, sent.position, rewind=sent.kind == REWIND)
