"""A coordinating partition in the small worlds of a changing partition count.

The model keeps the part of the product's state that affects the key, with times in
heartbeat intervals. To fold an entry, it builds a state and calls the product's
``apply``.
"""

from itertools import pairwise
from typing import NamedTuple

from logkit import (
    KEY,
    OP,
    beat,
    claim,
    config,
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
    resolve,
)

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.items import Layout, LayoutSource, Lock, Offer
from kafka_marshal.protocol.layout import is_final, place_of, sources_of
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import GroupState, KeyState, WorldState
from kafka_marshal.protocol.types import Key, LogEntry, Owner

H_MS = 1_000
NOW_MS = 10**9
BASE = 2
"""Generation and era under the first count."""
NOBODY = -1
CLIENTS = (0, 1)
GRANTS = 2
"""Offsets that can be granted, unless a world has fewer."""
STALE, LEASE = 3, 2
OPEN, DONE, OVER = "open", "done", "over"


class Part(NamedTuple):
    """A coordinating partition, as ``apply`` left it."""

    step: int  # index of the count in force, -1 without a Config
    phase: str = OVER
    op: int = 0  # number of the operation that fenced the partition
    knows: bool = False  # whether the key is known here
    owner: int = NOBODY
    claimed: int = -1  # step of the last claim here, -1 without
    age: int = 0  # log time since the last renewal
    quiet: int = 0
    is_locked: bool = False
    position: int | None = None
    granted: int | None = None
    successor: int = NOBODY  # client that the last release named
    is_preferred: bool = False  # whether no other client can claim yet
    offered: int = NOBODY  # the client that the owner offers the key to
    is_ready: bool = False
    leader: int = 1  # leader epoch of the log
    claim_leader: int = 1  # leader epoch of the last claim
    is_cut: bool = False  # whether the log went back and has no entry since then

    @property
    def has_clock(self):
        """Whether the passing of log time changes anything."""
        is_waiting = self.owner != NOBODY or self.quiet or self.is_preferred
        return bool(is_waiting and not self.is_cut)


class LayoutFold:
    """Folds records about a key that each change of the count moves.

    Attributes:
        partitions: Partition 0, and each that the key is ever placed in.
        places: For each count, the index in ``partitions`` of the key's partition.
    """

    def __init__(self, counts, *, grants=GRANTS, keeps_the_era=False):
        self.counts, self.grants = counts, grants
        self.keeps_the_era = keeps_the_era
        self.key = next(
            key
            for number in range(64)
            for key in (Key(KEY.group_id, KEY.topic, number),)
            if _moves(key, counts)
        )
        found = [place_of(self.key, partition_count=count) for count in counts]
        self.partitions = tuple(sorted({0, *found}))
        self.places = tuple(map(self.partitions.index, found))

    # --- used by the model

    def append(self, at, part, what):
        """Fold one record; return the partition and the verdict."""
        state = self.state(at, part)
        record = self._record(at, part, what)
        entry = LogEntry(
            offset=self._offset(at, 0),
            leader_epoch=part.leader,
            timestamp_ms=NOW_MS + H_MS * (what == TICK),
            timestamp_type=1,
            value=b"" if record is None else encode(record),
        )
        (transition,) = apply(state, entry)
        return self._view(at, part, state), transition.effect or transition.reason

    def is_final(self, at, part):
        return is_final(self.state(at, part), self.key)

    def token(self, at, part):
        return tuple(self.state(at, part).token(self.key))

    def is_fenced(self, at, step):
        """Return whether a partition needs the fence of a change."""
        return self.partitions[at] < max(self.counts[step - 1 : step + 1])

    # --- records

    def _offset(self, at, back):
        """Return the next offset, or an earlier one.

        Later partitions of the key have shorter logs, so that only the era makes their
        tokens larger.
        """
        return 1_000 - 300 * self.places.index(at) - back if at in self.places else 9

    def _record(self, at, part, what):
        kind, *rest = what
        if what in {TICK, ENTRY}:
            return None
        if kind in CHANGES:
            return self._record_of_change(part, kind, rest)
        if kind == "resolve":
            return resolve(commit=True)
        client, key = f"c{rest[0]}", self.key
        named = {"client": client, "key": key}
        if kind == "claim":
            return claim(generation=BASE + part.step, **named)
        epoch = self._offset(at, 200 if rest[1:] == [True] else 100)
        if kind == "release":
            to = None if rest[1] == NOBODY else f"c{rest[1]}"
            return release(epoch, successor=to, **named)
        if kind == "offer":
            return offer(epoch, f"c{rest[1]}", within_ms=H_MS, **named)
        if kind == "ready":
            return ready(epoch, **named)
        if kind == "beat":
            return beat(epoch, 1 if at == self.places[0] else None, **named)
        offset = head_of(part)
        return messages(epoch, offset, min(offset, self.grants - 1), **named)

    def _record_of_change(self, part, kind, rest):
        if kind == "fence":
            step, op = rest
            counts = self.counts[step], self.counts[step - 1]
            generation = BASE + step
            return layout_fence(
                *counts,
                generation=generation,
                era=self._era(step),
                h=H_MS,
                op=_op(step, op),
            )
        if kind == "import":
            step, (position, granted, successor) = rest
            to = None if successor == NOBODY else f"c{successor}"
            item = imported(self.key, position, granted, successor=to)
            return layout_import(item, source=self._source(step), op=_op(step, part.op))
        step, op = part.step, _op(part.step, part.op)
        if kind == "done":
            return layout_done(rest[0], source=self._source(step), op=op)
        return layout_final(op=op)

    def _era(self, step):
        return BASE if self.keeps_the_era else BASE + step

    def _source(self, step):
        return self.partitions[self.places[step - 1]]

    # --- the product's state

    def state(self, at, part):
        """Return the product's state of a partition."""
        state = WorldState(
            self.partitions[at],
            next_offset=self._offset(at, 0),
            leader_epoch=part.leader - part.is_cut,
            epoch_time_ms=NOW_MS,
            log_time_ms=NOW_MS,
            append_time_ms=NOW_MS,
        )
        if part.step >= 0:
            self._set_config(state, at, part)
        if part.quiet:
            state.quiet_until_ms = NOW_MS + (part.quiet - 1) * H_MS + 1
        if part.knows:
            state.keys[self.key] = self._key_state(at, part)
            state.groups[self.key.group_id] = GroupState()
        state.rebuild_derived()
        return state

    def _set_config(self, state, at, part):
        step = part.step
        count, era = self.counts[step], self._era(step)
        state.config = config(BASE + step, era=era, h=H_MS, k=count, level=2)
        state.eras = tuple(
            (self._offset(at, 100) + (-9 if each < part.claimed else 1 + each), era)
            for each in range(step)
            for era in (self._era(each),)
        )
        if part.phase == OVER:
            return
        before = self.counts[step - 1]
        places = sources_of(state.partition, from_count=before, to_count=count)
        sources = tuple(
            LayoutSource(place, int(part.knows), None if part.phase == OPEN else NOW_MS)
            if (place, at) == (self._source(step), self.places[step])
            else LayoutSource(place, 0, NOW_MS)
            for place in places
        )
        state.layout = Layout(_op(step, part.op), before, 1, sources)

    def _key_state(self, at, part):
        is_claimed = part.claimed >= 0
        known = KeyState(
            owner=None,
            epoch=self._offset(at, 100) if is_claimed else 0,
            epoch_leader_epoch=part.claim_leader if is_claimed else 0,
            renewed_ms=NOW_MS - part.age * H_MS,
            heartbeat_interval_ms=H_MS,
            active_ms=NOW_MS,
            position=part.position,
            granted=part.granted,
        )
        if part.owner != NOBODY:
            known.owner = _owner(part.owner)
        if part.is_locked:
            known.lock = Lock(OP, ident("plan"), 0, None)
        if part.successor != NOBODY:
            until_ms = NOW_MS + H_MS // 2 * part.is_preferred
            known.handoff = (f"c{part.successor}", until_ms)
        if part.offered != NOBODY:
            incarnation = _owner(part.offered).incarnation if part.is_ready else None
            known.offer = Offer(f"c{part.offered}", NOW_MS + H_MS, 1, incarnation)
        return known

    def _view(self, at, before, state):
        """Return the state of the product in the form of the model."""
        step = NOBODY if state.config is None else state.config.generation - BASE
        quiet_ms = 0
        if state.quiet_until_ms is not None:
            quiet_ms = state.quiet_until_ms - state.now_ms
        part = Part(
            step,
            phase=self._phase(at, step, state.layout),
            op=int(state.layout is not None and state.layout.op_id == _op(step, 1)),
            quiet=min(STALE, -(-quiet_ms // H_MS)),
            leader=before.leader,
        )
        known = state.keys.get(self.key)
        return part if known is None else self._view_of_key(before, part, state, known)

    def _phase(self, at, step, layout):
        if layout is None:
            return OVER
        source = layout.source(self._source(step))
        is_target = at == self.places[step] and source is not None
        return DONE if is_target and source.done_ms is not None else OPEN

    def _view_of_key(self, before, part, state, known):
        now_ms, owner, offered = state.now_ms, NOBODY, NOBODY
        successor, claimed, claim_leader = NOBODY, before.claimed, before.claim_leader
        if known.owner is not None:
            owner = int(known.owner.client_id[1:])
        if known.epoch == state.next_offset - 1:
            claimed, claim_leader = part.step, known.epoch_leader_epoch
        elif known.epoch == 0:
            claimed, claim_leader = -1, 1
        if known.handoff is not None:
            successor = int(known.handoff[0][1:])
        if known.offer is not None and now_ms < known.offer.until_ms:
            offered = int(known.offer.successor[1:])
        is_owned = owner != NOBODY
        return part._replace(
            knows=True,
            owner=owner,
            claimed=claimed,
            claim_leader=claim_leader,
            age=min(STALE, known.age_ms(now_ms) // H_MS) if is_owned else 0,
            is_locked=known.lock is not None,
            position=known.position,
            granted=known.granted,
            successor=successor,
            is_preferred=successor != NOBODY and now_ms < known.handoff[1],
            offered=offered,
            is_ready=offered != NOBODY and known.offer.ready is not None,
        )


TICK, ENTRY = ("tick",), ("entry",)
"""An entry without a record, an interval after the last one or at once."""
CHANGES = frozenset({"fence", "import", "done", "final"})


def head_of(part):
    """Return the first offset that can still be granted."""
    return max(part.position or 0, part.granted or 0)


def _owner(client):
    return Owner(f"c{client}", ident(f"c{client}"))


def _op(step, op):
    return ident(f"change {step}, {op}")


def _moves(key, counts):
    places = [place_of(key, partition_count=count) for count in counts]
    return all(a != b for a, b in pairwise(places))
