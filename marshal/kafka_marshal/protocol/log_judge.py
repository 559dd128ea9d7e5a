"""Checks the invariants of a log (PROTOCOL 11), record by record as it is folded.

The judge keeps its own account of each key and compares it with the fold's result for
the next record. This detects a fold that breaks a rule. It judges the log alone; the
simulator's judge of operations checks what applications did with their claims.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kafka_marshal.protocol.items import Lock, Planned
from kafka_marshal.protocol.records import (
    FencingClient,
    Heartbeat,
    Plan,
    ResolvePosition,
    StagePosition,
)
from kafka_marshal.protocol.state import (
    ACCEPTED,
    FENCES_MAX,
    KeyState,
    MemberName,
    Transition,
    WorldState,
)
from kafka_marshal.protocol.types import Key, Owner, Token

Place = tuple[Key, bytes | None]
"""A key, and the id of its topic. A topic that is created again under its name has
another id, and its offsets start again."""

CLAIMS = frozenset({"claimed", "resumed"})
SETS = frozenset({"staged", "position_set", "unlocked"})
FORBIDDEN = CLAIMS | {"granted", "renewed"}
"""Effects that no record of a fenced process may have."""


class Finding(NamedTuple):
    """A broken invariant.

    Attributes:
        invariant: Its name, such as ``S3``.
        message: What happened, and where.
    """

    invariant: str
    message: str


class Known(NamedTuple):
    """A key after the last record about it; fields as in ``KeyState``."""

    owner: Owner | None
    epoch: int
    position: int | None
    granted: int | None
    topic_id: bytes | None
    renewed_ms: int
    active_ms: int
    lock: Lock | None

    @classmethod
    def of(cls, state: KeyState) -> "Known":
        """Copy the fields of a key's state."""
        return cls(
            owner=state.owner,
            epoch=state.epoch,
            position=state.position,
            granted=state.granted,
            topic_id=state.topic_id,
            renewed_ms=state.renewed_ms,
            active_ms=state.active_ms,
            lock=state.lock,
        )


class LogJudge:
    """Judges one coordinating partition: S1, S3, S7, S10, 4.3, 4.13, 8, 9.2.

    Attributes:
        known: Every key after the last record about it.
        granted: First offset above all granted ones, by key and topic.
        tokens: The greatest token of each key. Tokens grow across a truncation of the
            log (PROTOCOL 4.10), so the caller may pass them to the judge of the rest.
    """

    def __init__(self, world: WorldState) -> None:
        """Start from a state, whose keys are trusted; an empty one is the log's start.

        Args:
            world: The caller folds one record into it before each ``take``.
        """
        self._world = world
        self.known: dict[Key, Known] = {}
        self.granted: dict[Place, int] = {}
        self.tokens: dict[Key, Token] = {}
        # Fenced processes, in the order of their fences.
        self._fenced = _fenced_in(world)
        self._planned = _planned_in(world)
        for key, state in world.keys.items():
            token = world.token(key)
            if token is not None:
                self.known[key], self.tokens[key] = Known.of(state), token
                self.granted[key, state.topic_id] = state.granted or 0

    def take(self, transition: Transition) -> list[Finding]:
        """Check the transition of a record; return the invariants that it breaks."""
        if transition.effect == "reset":
            self._reset()
        if isinstance(transition.record, FencingClient) and transition.effect:
            self._fence(transition.record)
        if isinstance(transition.record, Plan) and transition.effect:
            return self._check_plan(transition.record, transition.offset)
        if transition.effect in {"layout_fenced", "layout_final"}:
            # PROTOCOL 10: keys that moved away, or are from before the fence, are gone.
            self._fenced = _fenced_in(self._world)
            self._planned = _planned_in(self._world)
            for gone in [each for each in self.known if each not in self._world.keys]:
                self._forget(gone)
        key = transition.key
        if key is None:
            return []
        if transition.effect == "imported":
            self._import(key, self._world.keys[key])
            return []
        if transition.effect == "forgotten":
            self._forget(key)
            return []
        state = self._world.keys.get(key)
        found = [
            Finding(invariant, f"offset {transition.offset}: {key} {text}")
            for invariant, text in self._check(transition, key, state=state)
        ]
        if state is not None:
            self.known[key] = Known.of(state)
        return found

    def _reset(self) -> None:
        """Start from the state that a Reset installed (PROTOCOL 7.6).

        Tokens still grow. Offsets above the positions of that state may be granted
        again.
        """
        keys = self._world.keys
        for key, topic_id in self.granted:
            state, head = keys.get(key), 0
            if state is not None and state.topic_id == topic_id:
                head = state.next_unclaimed() or 0
            self.granted[key, topic_id] = head
        self.known = {key: Known.of(state) for key, state in keys.items()}
        self._fenced = _fenced_in(self._world)
        self._planned = _planned_in(self._world)

    def _check_plan(self, record: Plan, offset: int) -> list[Finding]:
        """Check that an accepted Plan follows the last one of its group."""
        config, group_id = self._world.config, record.group_id
        assert config is not None
        was = self._planned.get(group_id, Planned(0, self._world.now_ms))
        now = Planned(record.follows + 1, self._world.now_ms)
        self._planned[group_id] = now
        # A group that was dropped begins again at 0 (PROTOCOL 4.9).
        is_old = now.log_time_ms - was.log_time_ms > config.limit("forget_ms")
        if record.follows == was.generation or (record.follows == 0 and is_old):
            return []
        text = f"a Plan of {group_id} follows {record.follows}, not {was.generation}"
        return [Finding("9.2", f"offset {offset}: {text}")]

    def _fence(self, record: FencingClient) -> None:
        """Remember a fenced process, within the bounds of PROTOCOL 4.13."""
        config, group_id = self._world.config, record.group_id
        assert config is not None
        self._fenced[group_id, record.fenced, record.fenced_incarnation] = None
        mine = [name for name in self._fenced if name[0] == group_id]
        excess = len(self._fenced) - config.limit("operations")
        for name in [*mine[:-FENCES_MAX], *[*self._fenced][: max(0, excess)]]:
            self._fenced.pop(name, None)

    def _import(self, key: Key, state: KeyState) -> None:
        """Trust a key as its source left it; another judge has followed the source."""
        self._forget(key)
        self.known[key] = Known.of(state)
        self.granted[key, state.topic_id] = state.next_unclaimed() or 0

    def _forget(self, key: Key) -> None:
        """Treat a key that was dropped as one that never was claimed."""
        self.known.pop(key, None)
        for place in [place for place in self.granted if place[0] == key]:
            del self.granted[place]

    def _check(
        self, transition: Transition, key: Key, *, state: KeyState | None
    ) -> Iterator[tuple[str, str]]:
        was = self.known.get(key)
        if transition.outcome != ACCEPTED:
            now = None if state is None else Known.of(state)[:4]
            if now != (None if was is None else was[:4]) and now is not None:
                yield "S1", "was changed by a refused or ignored record"
            return
        if state is None:
            yield "S1", "does not exist after an accepted record"
            return
        name = (key.group_id, *_sender(transition))
        if transition.effect in FORBIDDEN and name in self._fenced:
            yield "4.13", f"is {transition.effect} by {name[1]}, which is fenced"
        if transition.effect in CLAIMS:
            if was is not None and self._is_forgotten(was):
                self._forget(key)
                was = None
            yield from self._check_claim(transition, key, state=state)
        elif was is None:
            yield "S1", f"is {transition.effect}, but was never claimed"
            return
        elif transition.effect == "ready":
            if Known.of(state)[:4] != was[:4]:
                yield "9.4", "is changed by its successor's Ready"
        elif transition.effect in SETS:
            yield from self._check_set(transition, was, state=state)
        else:
            yield from self._check_owner(transition, was, state=state)
        if transition.effect == "granted":
            yield from self._check_grant(transition, (key, state.topic_id))
        yield from _check_position(transition, was, state=state)

    def _is_forgotten(self, was: Known) -> bool:
        """Return whether a key was dropped for its silence (PROTOCOL 4.9)."""
        config = self._world.config
        if config is None or was.owner is not None or was.granted is not None:
            return False
        return self._world.now_ms - was.active_ms > config.limit("forget_ms")

    def _check_claim(
        self, transition: Transition, key: Key, *, state: KeyState
    ) -> Iterator[tuple[str, str]]:
        was = self.known.get(key)
        if state.epoch != transition.offset or (was and state.epoch <= was.epoch):
            yield "S1", f"has epoch {state.epoch} after a claim at {transition.offset}"
        if state.owner != _sender(transition):
            yield "S1", f"belongs to {state.owner}, not to the claimant"
        if was is not None and was.lock is not None:
            yield "8.3", "is claimed while it is locked"
        if was is not None and was.topic_id not in {None, state.topic_id}:
            position = state.next_unclaimed()
            if position is not None:
                yield "4.3", f"has position {position} of an earlier topic id"
        if was is not None and was.topic_id is None:
            head = self.granted.get((key, None), 0)
            self.granted.setdefault((key, state.topic_id), head)
        token, latest = self._world.token(key), self.tokens.get(key)
        if token is None:
            yield "S7", "is owned without a token"
            return
        if latest is not None and token <= latest:
            yield "S7", f"has token {token} after {latest}"
        self.tokens[key] = token

    def _check_owner(
        self, transition: Transition, was: Known, *, state: KeyState
    ) -> Iterator[tuple[str, str]]:
        """Check that only the owner changes a key, and a pause prevents renewals."""
        effect, key = transition.effect, transition.key
        if state.owner not in {was.owner, None}:
            yield "S1", f"got the owner {state.owner} by {effect}"
        if state.epoch != was.epoch:
            yield "S1", f"got the epoch {state.epoch} by {effect}"
        sender = _sender(transition)
        if was.owner != sender:
            yield "S1", f"is {effect} by {sender}, but {was.owner} owns it"
        assert key is not None
        is_renewed = state.renewed_ms != was.renewed_ms
        if is_renewed and self._world.pause_of(key) is not None:
            yield "8.1", "is renewed while its group is paused"

    def _check_set(
        self, transition: Transition, was: Known, *, state: KeyState
    ) -> Iterator[tuple[str, str]]:
        """Check that a set position locks free keys, and moves only locked ones."""
        effect, key, record = transition.effect, transition.key, transition.record
        assert key is not None
        assert isinstance(record, StagePosition | ResolvePosition)
        if (state.owner, state.epoch) != (None, was.epoch):
            yield "S1", f"is {effect}, but has the owner {state.owner}"
        is_locked = state.lock is not None
        if is_locked != (effect == "staged"):
            yield "8.3", f"is {effect} with the lock {state.lock}"
        if effect == "staged":
            age_ms = self._world.now_ms - was.renewed_ms
            if was.owner is not None and age_ms <= 2 * state.heartbeat_interval_ms:
                yield "8.3", f"is staged {age_ms} ms after its owner's heartbeat"
            if (state.position, state.granted) != (was.position, was.granted):
                yield "8.3", "changes its position before the commit"
            return
        if was.lock is None or was.lock.op_id != record.op_id:
            yield "8.5", f"is {effect} by an operation that has not locked it"
            return
        is_set = effect == "position_set"
        if state.position != (was.lock.position if is_set else was.position):
            yield "8.5", f"is {effect}, but has position {state.position}"
        if is_set and state.granted is not None:
            # Offsets from the position on may be granted again.
            self.granted[key, state.topic_id] = state.position or 0

    def _check_grant(
        self, transition: Transition, place: Place
    ) -> Iterator[tuple[str, str]]:
        detail = transition.detail or {}
        first, last = detail.get("first", 0), detail.get("last", -1)
        head = self.granted.get(place, 0)
        if first < head or last < first:
            text = f"was granted {first} to {last}, but all below {head} was before"
            yield "S3", text
        self.granted[place] = max(head, last + 1)


def _check_position(
    transition: Transition, was: Known | None, *, state: KeyState
) -> Iterator[tuple[str, str]]:
    before, now = None if was is None else was.position, state.position
    record = transition.record
    if was is None or before is None or (now is not None and now >= before):
        return
    is_rewind = isinstance(record, Heartbeat) and record.rewind
    is_rewind = is_rewind or transition.effect == "position_set"
    is_of_another = now is None and was.topic_id not in {None, state.topic_id}
    if not (is_rewind or is_of_another):
        yield "S10", f"fell from position {before} to {now}"


def _sender(transition: Transition) -> tuple[str, bytes]:
    record = transition.record
    return getattr(record, "client_id", ""), getattr(record, "incarnation", b"")


def _fenced_in(world: WorldState) -> dict[MemberName, None]:
    return dict.fromkeys(sorted(world.fences, key=lambda name: world.fences[name]))


def _planned_in(world: WorldState) -> dict[str, Planned]:
    return {
        group_id: group.planned
        for group_id, group in world.groups.items()
        if group.planned is not None
    }
