"""Gives the history of workers on a cluster to the checker of the simulations.

Workers note when operations begin and end (`worker_notes`); the coordination log has
the verdicts on the records that they sent. Both are put into one order and passed to
the chronicle of the simulator, so that the same history is judged by the same rules.

All notes use one boot clock. Of records in the log only the order is used, never the
clock of a broker: a record was appended after it was sent, and before its sender, or
the sender of a later record, read it back. An entry up to the source offset of an
import was appended before the import. Each record gets the latest possible time.
"""

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from kafka_marshal.clock import NS_PER_MS
from kafka_marshal.config import Delivery
from kafka_marshal.errors import CoordinationError
from kafka_marshal.protocol.codec import decode
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import (
    ClaimingPartition,
    LayoutDone,
    LayoutImport,
)
from kafka_marshal.protocol.state import ACCEPTED, WorldState
from kafka_marshal.protocol.types import Key, LogEntry, Token, TopicPartition
from simulator.checkers import Folded
from simulator.chronicle import SENT, Chronicle
from simulator.operation_judge import Operation, Verdict, check

# From the check of the lease to the note of a hand-out, on a busy machine.
LATE_MS = 300
SHOWN_MAX = 20


@attrs.define
class Sender:
    """One process: its notes, and when it had read up to which offset.

    Attributes:
        name: Its name in the history.
        group_id: The group that it worked for.
        notes: What it noted, oldest first.
        incarnation: Its incarnation in the log, None if it sent nothing.
        reads: By coordinating partition: offset and time of each advance.
    """

    name: str
    group_id: str
    notes: list[dict]
    incarnation: bytes | None = None
    reads: dict[int, list[tuple[int, int]]] = attrs.field(
        factory=lambda: defaultdict(list)
    )

    @classmethod
    def of(cls, path: Path, group_id: str) -> "Sender":
        """Read a file of notes; a line cut off by a kill does not count."""
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        made = cls(path.stem, group_id, [json.loads(line) for line in lines])
        for note in made.notes:
            if note["event"] == "sent" and made.incarnation is None:
                made.incarnation = decode(bytes.fromhex(note["value"])).incarnation
            for t, offset in note.get("ends", {}).items():
                steps = made.reads[int(t)]
                if not steps or offset > steps[-1][0]:
                    steps.append((offset, note["ns"]))
        return made

    def read_ns(self, t: int, offset: int) -> int | None:
        """Return when it had read up to an offset, None if it never did."""
        steps = self.reads[t]
        at = bisect_left(steps, (offset, 0))
        return steps[at][1] if at < len(steps) else None


class _Fate:
    """The result of an append: that it failed, was read back, or is unknown."""

    def __init__(self) -> None:
        self.has_failed = self.is_over = False

    def is_done(self) -> bool:
        return self.has_failed or self.is_over

    def offset(self) -> int | None:
        return None

    def error(self) -> CoordinationError | None:
        return CoordinationError("it was reported so") if self.has_failed else None


@attrs.frozen
class _Noted:
    """A data record as a worker noted it."""

    offset: int
    token: Token


Event = tuple[int, Callable[[], None]]


class ClusterHistory:
    """Puts notes and log into one order, and passes them to a chronicle."""

    def __init__(
        self, entries: Mapping[int, Sequence[LogEntry]], senders: Sequence[Sender]
    ) -> None:
        """Take the notes and the log.

        Args:
            entries: The coordination log, by partition.
            senders: All worker processes.
        """
        self._entries = entries
        self._senders = senders
        self._by_incarnation = {s.incarnation: s for s in senders if s.incarnation}
        self._worlds = {t: WorldState(t) for t in entries}
        self._keys = {t: _claimed(t, senders) for t in entries}
        self._fates: dict[tuple[str, int], _Fate] = {}
        self._sent: dict[tuple[bytes, int], _Fate] = {}
        self._now_ns = 0
        self.attempts: set[bytes] = set()
        self._chronicle = Chronicle(self)

    # --- queries of the chronicle

    @property
    def now_ms(self) -> int:
        """The boot clock of the machine, as of the present event."""
        return self._now_ns // NS_PER_MS

    def name_of(self, incarnation: bytes) -> str:
        """Return the name of a process."""
        known = self._by_incarnation.get(incarnation)
        return f"stranger {incarnation.hex()[:8]}" if known is None else known.name

    def keys_of(self, partition: int) -> Sequence[Key]:
        """Return the keys of a coordinating partition that workers tried to claim."""
        return self._keys[partition]

    # --- the order

    def operations(self) -> list[Operation]:
        """Return the operations of all workers, in order."""
        events: list[Event] = []
        times = self.append_times()
        for t, entries in self._entries.items():
            events += [
                (ns, lambda t=t, entry=entry: self._fold(t, entry))
                for ns, entry in zip(times[t], entries, strict=True)
            ]
        for sender in self._senders:
            events += self._own_events(sender)
        # Events of the same time keep their order: a read is known before its reader
        # acts on it.
        for self._now_ns, handle in sorted(events, key=lambda event: event[0]):
            handle()
        return self._chronicle.operations

    def append_times(self) -> dict[int, list[int]]:
        """Return the latest time at which each entry can have been appended.

        The last entries of a partition that is no longer used have no readers.
        """
        times = {t: self._read_times(t, each) for t, each in self._entries.items()}
        imports = [
            (t, index, record)
            for t, entries in self._entries.items()
            for index, entry in enumerate(entries)
            if isinstance(record := decode(entry.value), LayoutImport | LayoutDone)
        ]
        is_settled = False
        while not is_settled:
            is_settled = True
            for t, index, record in imports:
                before, latest = times[record.source], times[t][index] - 1
                at = bisect_left(
                    self._entries[record.source],
                    record.source_offset,
                    key=lambda entry: entry.offset,
                )
                while at and before[at - 1] > latest:
                    at -= 1
                    before[at], is_settled = latest, False
        return times

    def _read_times(self, t: int, entries: Sequence[LogEntry]) -> list[int]:
        latest = max((s.notes[-1]["ns"] for s in self._senders if s.notes), default=0)
        found: list[int] = []
        for entry in reversed(entries):
            record = decode(entry.value)
            own = self._by_incarnation.get(getattr(record, "incarnation", None))
            read = own.read_ns(t, entry.offset) if own else None
            latest = latest if read is None else min(latest, read)
            found.append(latest)
        return found[::-1]

    def _own_events(self, sender: Sender) -> list[Event]:
        tellers = {
            "sent": self._on_sent,
            "failed": self._on_failed,
            "handed": self._on_handed,
            "done": self._on_done,
        }
        found: list[Event] = []
        for note in sender.notes:
            describe = tellers.get(note["event"])
            if describe is not None:
                ns = note.get("looked_ns", note["ns"])
                found.append(
                    (ns, lambda n=note, describe=describe: describe(sender, n))
                )
        if sender.notes:
            gone = sender.notes[-1]["ns"]
            found.append((gone, lambda: self._chronicle.on_gone(sender.name)))
        return found

    # --- handling events

    def _on_sent(self, sender: Sender, note: dict) -> None:
        fate = self._fates[sender.name, note["number"]] = _Fate()
        value = bytes.fromhex(note["value"])
        record = decode(value)
        self._sent[record.incarnation, record.seq] = fate
        self._chronicle.on_append(note["t"], value, append=fate, held={})

    def _on_failed(self, sender: Sender, note: dict) -> None:
        self._fates[sender.name, note["number"]].has_failed = True

    def _on_handed(self, sender: Sender, note: dict) -> None:
        key, records = self._noted(sender, note)
        self._chronicle.on_handed(sender.name, key, records=records)

    def _on_done(self, sender: Sender, note: dict) -> None:
        key, records = self._noted(sender, note)
        for record in records:
            self._chronicle.on_processed(sender.name, key, record=record)

    @staticmethod
    def _noted(sender: Sender, note: dict) -> tuple[Key, list[_Noted]]:
        key = Key(sender.group_id, note["topic"], note["partition"])
        token = Token(*map(int, note["token"].split(".")))
        offsets = range(note["first"], note["last"] + 1)
        return key, [_Noted(offset, token) for offset in offsets]

    def _fold(self, t: int, entry: LogEntry) -> None:
        world = self._worlds[t]
        for transition in apply(world, entry):
            record = transition.record
            if not isinstance(record, SENT):
                continue
            is_ours = record.incarnation in self._by_incarnation
            # Refused records of foreign processes are omitted. Accepted ones are
            # included: no worker noted them, which the checker reports.
            if is_ours or transition.outcome == ACCEPTED:
                folded = Folded(t, None, transition, None, 0, False)
                self._chronicle.on_fold(folded, world)
            if fate := self._sent.get((record.incarnation, record.seq)):
                fate.is_over = True


def _claimed(t: int, senders: Iterable[Sender]) -> list[Key]:
    """Return the keys that workers tried to claim in a coordinating partition."""
    records = (
        decode(bytes.fromhex(note["value"]))
        for sender in senders
        for note in sender.notes
        if note["event"] == "sent" and note["t"] == t
    )
    return sorted(
        {
            Key(record.group_id, record.topic, record.partition)
            for record in records
            if isinstance(record, ClaimingPartition)
        }
    )


def judge(
    operations: Iterable[Operation],
    *,
    group_id: str,
    delivery: Delivery,
    ends: Mapping[TopicPartition, int],
    h_ms: int,
) -> Verdict:
    """Check one group's history by the rules for simulations.

    Args:
        operations: The operations of all workers, in order.
        group_id: The group.
        delivery: Its guarantee.
        ends: How many records each of its partitions has; all are processed.
        h_ms: The heartbeat interval.
    """
    keys = {Key(group_id, *place): (0, end) for place, end in ends.items()}
    ours = (each for each in operations if each.key.group_id == group_id)
    return check(ours, delivery=delivery, ends=keys, h_ms=h_ms, late_ms=LATE_MS)


def as_figures(verdict: Verdict) -> dict:
    """Return a verdict for the report."""
    texts = [f"{found.invariant}: {found.message}" for found in verdict.findings]
    figures = attrs.asdict(verdict, filter=lambda field, _: field.name != "findings")
    return figures | {"violations": len(texts), "told": texts[:SHOWN_MAX]}
