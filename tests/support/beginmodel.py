"""Readers of a partition that comes into use, without its log start (PROTOCOL 10.2).

The fold is the product's ``apply``; the product also decides from which entry on a
reader knows the state. Any process may append: probes of two changes, one of them
abandoned, fences, imports, claims. Retention deletes the start of the log, the log may
go back once, and a new leader may have an earlier clock. A reader may start at any
offset; one that knows the state must have the state of a reader of all entries.
"""

from functools import cache
from typing import NamedTuple

import msgspec
from logkit import (
    KEY,
    OP,
    START_MS,
    claim,
    config,
    ident,
    imported,
    layout_done,
    layout_fence,
    layout_import,
    member,
)

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.layout import Probes
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import to_bytes
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key, LogEntry

PARTITION = 1
# The mistake of a writer: probes are also appended after the fence.
PROBE_LATE = "probe_late"

NOISE, GIVEN_UP, PROBE, FENCE = "noise", "given up", "probe", "fence"
IMPORT, DONE, CLAIM = "import", "done", "claim"
CONFIG, RESERVED, SHRINK = "config", "reserved", "shrink"
EARLIER_LIFE = (CONFIG, RESERVED, SHRINK)


def _probe(op):
    return msgspec.structs.replace(member("admin", group="marshal"), incarnation=op)


VALUES = {
    kind: b"" if record is None else encode(record)
    for kind, record in {
        NOISE: None,
        GIVEN_UP: _probe(ident("given up")),
        PROBE: _probe(OP),
        FENCE: layout_fence(2, generation=3, era=3),
        IMPORT: layout_import(imported(KEY, 5)),
        DONE: layout_done(0),
        CLAIM: claim("c1", generation=3),
        CONFIG: config(k=2, level=2),
        RESERVED: claim("c1", key=Key("marshal", "/checkpoint", PARTITION)),
        SHRINK: layout_fence(1, 2, op=ident("before")),
    }.items()
}


class Entry(NamedTuple):
    """An entry of the log."""

    kind: str
    leader: int
    ms: int


class World(NamedTuple):
    """The log of the partition, its deleted entries, and the state of partition 0."""

    log: tuple = ()
    start: int = 0
    is_fenced: bool = False  # whether partition 0 has accepted the fence
    has_gone_back: bool = False


class BeginModel:
    """All readers that know the state agree, and each that can know it does.

    Args:
        length: Most entries after those of the earlier use.
        lived: Whether the partition was in use before.
        cuts: Whether the log may go back, once.
        mistake: The mistake of a writer, if any.
    """

    def __init__(self, *, length=6, lived=False, cuts=False, mistake=None):
        self.before = EARLIER_LIFE if lived else ()
        self.length, self.cuts, self.mistake = length, cuts, mistake
        self.folded, self.read = cache(self._folded), cache(self._read)

    def start(self):
        entries = (Entry(kind, 0, 0) for kind in self.before)
        return World(tuple(entries), start=len(self.before))

    # --- invariants

    def broken(self, world):
        log, start = world.log, world.start
        if not log:
            return None
        whole = self.folded(log)
        for at in range(len(self.before), len(log)):
            known = self.read(log, at)
            if known is not None and known != whole:
                return "10.2: two readers know different states"
        if start < len(log) and self._can_know(log[start:]):
            return None if self.read(log, start) else "10.7: a state that is not known"
        return None

    def _can_know(self, left):
        kinds = [entry.kind for entry in left]
        return PROBE in kinds and FENCE in kinds[kinds.index(PROBE) :]

    def _folded(self, log):
        state = WorldState(PARTITION)
        for offset, entry in enumerate(log):
            apply(state, _entry(offset, entry))
        return to_bytes(state)

    def _read(self, log, at):
        """Return the state known to a reader that starts at an offset, or None."""
        state, probes, is_known = WorldState(PARTITION), Probes(PARTITION), False
        for offset in range(at, len(log)):
            for transition in apply(state, _entry(offset, log[offset])):
                is_known = probes.take(transition) or is_known
        return to_bytes(state) if is_known else None

    # --- possible steps

    def steps(self, world):
        log, end = world.log, len(world.log)
        if world.start < end:
            yield "retention", world._replace(start=world.start + 1)
        if self.cuts and not world.has_gone_back:
            for at in range(world.start, end):
                cut = world._replace(log=log[:at], has_gone_back=True)
                yield f"the log goes back to {at}", cut
        has_probe = any(entry.kind == PROBE for entry in log)
        if not world.is_fenced and has_probe:
            yield "partition 0 is fenced", world._replace(is_fenced=True)
        if end == self.length + len(self.before):
            return
        for kind in self._kinds(world, has_probe=has_probe):
            yield kind, self._with(world, kind)
        if all(entry.leader < 2 for entry in log):
            yield "another leader, behind", self._with(world, NOISE, leader=2, ms=-5)

    def _kinds(self, world, *, has_probe):
        yield from (NOISE, GIVEN_UP)
        if self.mistake == PROBE_LATE:
            yield from (PROBE, FENCE)
        elif not world.is_fenced:
            yield from () if has_probe else (PROBE,)
        else:
            yield FENCE
        if any(entry.kind == FENCE for entry in world.log):
            yield from (IMPORT, DONE, CLAIM)

    def _with(self, world, kind, *, leader=0, ms=1):
        last = world.log[-1] if world.log else Entry(NOISE, 0, 0)
        leader = max(leader, last.leader, int(world.has_gone_back))
        entry = Entry(kind, leader, last.ms + ms)
        return world._replace(log=(*world.log, entry))


def _entry(offset, entry):
    return LogEntry(
        offset=offset,
        leader_epoch=entry.leader,
        timestamp_ms=START_MS + entry.ms,
        timestamp_type=1,
        value=VALUES[entry.kind],
    )
