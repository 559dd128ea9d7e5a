"""A key that does not move while the partition count changes (PROTOCOL 10).

The product folds each entry twice: in a partition with the change, and in one without,
where entries without a record replace those of the change and of the moving key. Both
must give the same verdict about the staying key and the same state of it; only the
generation in its claims differs. So the model keeps the key once.
"""

from functools import cache
from typing import NamedTuple

from layoutfold import (
    BASE,
    CLIENTS,
    DONE,
    ENTRY,
    H_MS,
    NOBODY,
    NOW_MS,
    OPEN,
    OVER,
    STALE,
    TICK,
)
from logkit import (
    KEY,
    OP,
    SECRET,
    STAYS,
    batch,
    beat,
    claim,
    config,
    hashed,
    ident,
    imported,
    layout_done,
    layout_fence,
    layout_final,
    layout_import,
    messages,
    offer,
    ready,
    release,
    resume,
)
from search import Broken

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.items import Layout, LayoutSource, Offer
from kafka_marshal.protocol.layout import place_of, sources_of
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import GroupState, KeyState, WorldState
from kafka_marshal.protocol.types import Key, LogEntry, Owner

NEXT_OFFSET, EPOCH, MOVING_EPOCH, OLD_EPOCH = 1_000, 900, 850, 800
BEFORE = "before"
NOTICED = "10.3: a key that stays notices the change"
GRANTS = 1


class Kept(NamedTuple):
    """The key that stays, as ``apply`` left it."""

    owner: int = NOBODY
    is_resumed: bool = False  # whether a second process of its client resumed it
    step: int = 0  # index of the count at its last claim
    age: int = 0
    position: int | None = None
    granted: int | None = None
    successor: int = NOBODY
    is_preferred: bool = False
    offered: int = NOBODY
    is_ready: bool = False


class Partition(NamedTuple):
    """The partition with the change."""

    phase: str = BEFORE
    kept: Kept | None = None  # the staying key, None before its first claim
    moving: int | None = None  # age of the moving key, if known here


class StayingModel:
    """A partition that is a source or a target of the change.

    Args:
        counts: Partition count before and after; the partition is number 0.
    """

    def __init__(self, counts):
        self.counts = counts
        self.is_target = counts[1] < counts[0]
        self.key = STAYS if not self.is_target else _staying(counts)
        self.moves = KEY if not self.is_target else _leaving(counts)
        self.plain = cache(self._plain)

    def start(self):
        return Partition(moving=None if self.is_target else 0)

    def broken(self, world):
        del world

    def steps(self, world):
        phase = world.phase
        for what in self._records(world):
            yield what, self._fold(world, what)
        if phase == BEFORE:
            yield "fence", self._fold(world, ("fence",))
            return
        for what in (("import",), ("done",), ("final",)):
            yield what, self._fold(world, what)

    def _records(self, world):
        kept = world.kept
        yield TICK
        for kind in ("claim", "beat", "release"):
            yield (f"moving {kind}",)
        for client in CLIENTS:
            yield "claim", client
            yield "resume", client
            yield "beat", client, OLD_EPOCH
            yield "ready", client
            if kept is not None and kept.owner == client:
                for kind in ("beat", "batch", "grant"):
                    yield kind, client, EPOCH
                for to in (NOBODY, *CLIENTS):
                    yield "release", client, to
                    yield "offer", client, to

    # --- the fold

    def _fold(self, world, what):
        """Fold an entry in both partitions; return the one with the change."""
        state = self._state(world)
        token = self._token(state)
        verdict = self._append(state, what, self._record(world, what))
        is_about = what[0] in ABOUT
        is_same = is_about or what == TICK
        expected, bare = self.plain(world.kept, what if is_same else ENTRY)
        if is_about and verdict != expected:
            raise Broken(f"{NOTICED}: {verdict} of {what}, not {expected}")
        kept = self._view(world, state)
        if (kept and kept._replace(step=0)) != (bare and bare._replace(step=0)):
            raise Broken(f"{NOTICED}: {what} leaves {kept}, not {bare}")
        after = self._token(state)
        if token is not None and after != token:
            is_claim = verdict in {"claimed", "resumed"}
            if not is_claim or after < token:
                raise Broken(f"S7: {what} turns {token} into {after}")
        return self._after(world, state, kept)

    def _plain(self, kept, what):
        """Return the verdict and the key in the partition without the change."""
        world = Partition(kept=kept)
        state = self._state(world)
        verdict = self._append(state, what, self._record(world, what))
        return verdict, self._view(world, state)

    def _append(self, state, what, record):
        """Append an entry; return the verdict about the key that stays, if any."""
        entry = LogEntry(
            offset=NEXT_OFFSET,
            leader_epoch=1,
            timestamp_ms=NOW_MS + H_MS * (what == TICK),
            timestamp_type=1,
            value=b"" if record is None else encode(record),
        )
        found = [
            transition.effect or transition.reason
            for transition in apply(state, entry)
            if transition.key == self.key or what[0] in {"ready", "resume"}
        ]
        return found[0] if found else None

    def _record(self, world, what):
        kind, *rest = what
        generation = BASE if world.phase == BEFORE else BASE + 1
        if kind in CHANGES:
            return self._record_of_change(kind)
        if kind.startswith("moving"):
            named = {"client": "c0", "key": self.moves}
            if kind == "moving claim":
                return claim(generation=generation, **named)
            if kind == "moving beat":
                return beat(MOVING_EPOCH, 1, **named)
            return release(MOVING_EPOCH, **named)
        if what in {TICK, ENTRY}:
            return None
        return self._record_of_client(world, kind, rest, generation)

    def _record_of_client(self, world, kind, rest, generation):
        client, key = rest[0], self.key
        name, inc = f"c{client}", self._incarnation(world, client)
        named = {"client": name, "key": key}
        if kind == "claim":
            return claim(generation=generation, resume_hash=hashed(SECRET), **named)
        if kind == "resume":
            fresh = ident(f"{name} again")
            new = {"inc": fresh, "before": inc, "generation": generation}
            return resume(EPOCH, resume_hash=hashed(SECRET), **new, **named)
        if kind == "beat":
            return beat(rest[1], 1, inc=inc, **named)
        if kind == "batch":
            beats = ((EPOCH, 1), (MOVING_EPOCH, 1))
            return batch(*beats, client=name, inc=inc)
        if kind == "grant":
            kept = world.kept
            first = max(kept.position or 0, kept.granted or 0)
            return messages(EPOCH, first, min(first, GRANTS - 1), inc=inc, **named)
        if kind == "ready":
            return ready(EPOCH, inc=inc, **named)
        to = None if rest[1] == NOBODY else f"c{rest[1]}"
        if kind == "offer":
            return offer(EPOCH, to, within_ms=H_MS, inc=inc, **named)
        return release(EPOCH, successor=to, inc=inc, **named)

    def _incarnation(self, world, client):
        kept = world.kept
        is_again = kept is not None and kept.owner == client and kept.is_resumed
        return ident(f"c{client} again" if is_again else f"c{client}")

    def _record_of_change(self, kind):
        before, after = self.counts
        if kind == "fence":
            return layout_fence(
                after, before, generation=BASE + 1, era=BASE + 1, h=H_MS
            )
        if kind == "import":
            return layout_import(imported(self.moves, 1, 1), source=1)
        return layout_done(1, source=1) if kind == "done" else layout_final()

    # --- the product's state

    def _state(self, world):
        before, after = self.counts
        step = int(world.phase != BEFORE)
        state = WorldState(
            0,
            next_offset=NEXT_OFFSET,
            leader_epoch=1,
            epoch_time_ms=NOW_MS,
            log_time_ms=NOW_MS,
            append_time_ms=NOW_MS,
            config=config(
                BASE + step, era=BASE + step, h=H_MS, k=self.counts[step], level=2
            ),
        )
        if step:
            is_old = world.kept is not None and world.kept.step == 0
            state.eras = ((EPOCH + (1 if is_old else -1), BASE),)
        if world.phase in {OPEN, DONE}:
            done_ms = NOW_MS if world.phase == DONE else None
            places = sources_of(0, from_count=before, to_count=after)
            count = int(world.moving is not None)
            sources = tuple(LayoutSource(place, count, done_ms) for place in places)
            state.layout = Layout(OP, before, 1, sources)
        if world.kept is not None:
            state.keys[self.key] = self._key_state(world)
        if world.moving is not None:
            state.keys[self.moves] = _moving_state(world.moving)
        state.groups = {key.group_id: GroupState() for key in state.keys}
        state.rebuild_derived()
        return state

    def _key_state(self, world):
        kept = world.kept
        known = KeyState(
            owner=None,
            epoch=EPOCH,
            epoch_leader_epoch=1,
            renewed_ms=NOW_MS - kept.age * H_MS,
            heartbeat_interval_ms=H_MS,
            active_ms=NOW_MS,
            position=kept.position,
            granted=kept.granted,
            resume_hash=hashed(SECRET),
        )
        if kept.owner != NOBODY:
            inc = self._incarnation(world, kept.owner)
            known.owner = Owner(f"c{kept.owner}", inc)
        if kept.successor != NOBODY:
            until_ms = NOW_MS + H_MS // 2 * kept.is_preferred
            known.handoff = (f"c{kept.successor}", until_ms)
        if kept.offered != NOBODY:
            inc = ident(f"c{kept.offered}") if kept.is_ready else None
            known.offer = Offer(f"c{kept.offered}", NOW_MS + H_MS, 1, inc)
        return known

    def _token(self, state):
        return state.token(self.key) if self.key in state.keys else None

    def _after(self, world, state, kept):
        moving = None
        known = state.keys.get(self.moves)
        if known is not None:
            moving = -1 if known.owner is None else _age(known, state)
        phase = world.phase
        if state.layout is not None:
            is_done = any(each.done_ms is not None for each in state.layout.sources)
            phase = DONE if is_done else OPEN
        elif state.config.generation > BASE:
            phase = OVER
        return Partition(phase, kept, moving)

    def _view(self, world, state):
        known, now_ms = state.keys.get(self.key), state.now_ms
        if known is None:
            return None
        before = world.kept or Kept()
        owner = NOBODY if known.owner is None else int(known.owner.client_id[1:])
        is_new = known.epoch == NEXT_OFFSET
        successor = NOBODY if known.handoff is None else int(known.handoff[0][1:])
        is_offered = known.offer is not None and now_ms < known.offer.until_ms
        is_here = world.phase != BEFORE
        return Kept(
            owner=owner,
            is_resumed=owner != NOBODY and known.owner.incarnation.count(b"again") > 0,
            step=int(is_here) if is_new else before.step,
            age=_age(known, state) if owner != NOBODY else 0,
            position=known.position,
            granted=known.granted,
            successor=successor,
            is_preferred=successor != NOBODY and now_ms < known.handoff[1],
            offered=int(known.offer.successor[1:]) if is_offered else NOBODY,
            is_ready=is_offered and known.offer.ready is not None,
        )


CHANGES = frozenset({"fence", "import", "done", "final"})
ABOUT = frozenset(
    {"claim", "resume", "beat", "batch", "grant", "release", "offer", "ready"}
)


def _moving_state(age):
    """Return the key that moves, with an owner unless its age is negative."""
    return KeyState(
        owner=Owner("c0", ident("c0")) if age >= 0 else None,
        epoch=MOVING_EPOCH,
        epoch_leader_epoch=1,
        renewed_ms=NOW_MS - max(0, age) * H_MS,
        heartbeat_interval_ms=H_MS,
        active_ms=NOW_MS,
    )


def _age(known, state):
    return min(STALE, known.age_ms(state.now_ms) // H_MS)


def _keys():
    return (Key("g", "t", number) for number in range(64))


def _staying(counts):
    return next(k for k in _keys() if place_of(k, partition_count=counts[0]) == 0)


def _leaving(counts):
    return next(k for k in _keys() if place_of(k, partition_count=counts[0]) == 1)
