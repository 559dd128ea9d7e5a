"""Notes about pauses: reason, person and begin, which the fold does not keep.

The notes inform people only. They are taken from the records of pauses and directives,
while the log is followed live or a moment of the past is read.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kafka_marshal.protocol.codec import person_of
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP
from kafka_marshal.protocol.records import (
    Directive,
    PauseGroup,
    Record,
    ReleaseGroup,
)
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.text import scope_texts

if TYPE_CHECKING:
    from kafka_marshal.protocol.items import Pause, Scheduled

NOTES_MAX = 1_000
"""Most pauses with notes of one coordinating partition."""

PauseName = tuple[str, bytes]
"""Group and op_id of a pause, or of a directive."""


class By(NamedTuple):
    """The sender of a record of a pause, for people.

    Attributes:
        client_id: The client, None if unknown.
        person: Person in the tags of the record, None without one.
    """

    client_id: str | None
    person: str | None

    def if_other(self, first: "By") -> str | None:
        """Return the person, else the client; None if the same one began the pause."""
        if self.person is None:
            return None if self.client_id == first.client_id else self.client_id
        return None if self.person == first.person else self.person


class PauseNote(NamedTuple):
    """The information in the log about one pause.

    Attributes:
        reason: Why the group is paused, None if unknown.
        person: Person for whom it was paused, None if unknown.
        begin_ms: Its begin, also in the future, epoch ms; None if unknown.
        client_id: Client that sent its first record, None if unknown.
        incarnation: Process of that client, None if unknown.
        last: Sender of its last record, None if unknown.
    """

    reason: str | None = None
    person: str | None = None
    begin_ms: int | None = None
    client_id: str | None = None
    incarnation: bytes | None = None
    last: By | None = None

    @property
    def renewed_by(self) -> str | None:
        """Person or client that renewed it last; None if the same one began it."""
        if self.last is None:
            return None
        return self.last.if_other(By(self.client_id, self.person))


class PauseNotes:
    """The notes of one coordinating partition, of its newest operations."""

    __slots__ = ("_notes",)

    def __init__(self) -> None:
        self._notes: dict[PauseName, PauseNote] = {}

    @property
    def by_name(self) -> Mapping[PauseName, PauseNote]:
        """The notes, by group and op_id."""
        return self._notes

    def forget(self, names: Collection[PauseName] | None = None) -> None:
        """Forget the notes of some pauses; None for all."""
        for name in [*self._notes] if names is None else names:
            self._notes.pop(name, None)

    def add(self, kept: Mapping[PauseName, PauseNote]) -> None:
        """Add earlier notes; notes that exist already stay."""
        for name, note in kept.items():
            self._notes.setdefault(name, note)

    def begin(
        self, world: WorldState, kept: Mapping[PauseName, PauseNote] | None = None
    ) -> None:
        """Note the pauses of a state: they began before the entries read next.

        Args:
            world: The state.
            kept: Notes that were kept with the state.
        """
        self.add(kept or {})
        for group_id, group in world.groups.items():
            for pause in group.pauses:
                first = PauseNote(incarnation=pause.incarnations[0])
                self._notes.setdefault((group_id, pause.op_id), first)
            for each in group.directives:
                first = PauseNote(incarnation=each.incarnation)
                self._notes.setdefault((group_id, each.op_id), first)

    def of(self, world: WorldState) -> dict[PauseName, PauseNote]:
        """Return the notes of the pauses that a state has, to be kept with it."""
        return {
            name: self._notes[name] for name in names_in(world) if name in self._notes
        }

    def add_later(self, name: PauseName, later: PauseNote) -> None:
        """Add the last sender of a pause from a note of later records."""
        self._notes[name] = self._notes.get(name, PauseNote())._replace(last=later.last)

    def take(
        self,
        record: Record,
        at_ms: int,
        *,
        wanted: Collection[PauseName] | None = None,
    ) -> None:
        """Note the information that a record has about its pause; ignore other records.

        Reason and person are those of the process that began the pause.

        Args:
            record: The record.
            at_ms: Timestamp of its entry, epoch ms.
            wanted: Only these pauses; None for all.
        """
        if not isinstance(record, ReleaseGroup | PauseGroup | Directive):
            return
        name = (record.group_id, record.op_id)
        if wanted is not None and name not in wanted:
            return
        if record.msg_expire_time <= at_ms:
            return  # an end, or refused as expired
        if isinstance(record, PauseGroup):
            at_ms = max(at_ms, record.begin_time)
        person, sender = person_of(record), record.incarnation
        known = self._notes.get(name, PauseNote(begin_ms=at_ms, incarnation=sender))
        if known.incarnation == sender:
            known = known._replace(
                reason=known.reason or record.reason,
                person=known.person or person,
                client_id=record.client_id,
            )
        self._notes[name] = known._replace(last=By(record.client_id, person))
        if len(self._notes) > NOTES_MAX:
            del self._notes[next(iter(self._notes))]


def names_in(world: WorldState) -> list[PauseName]:
    """Return the pauses and directives that a state has."""
    found = []
    for group_id, group in world.groups.items():
        op_ids = [each.op_id for each in group.pauses]
        op_ids += [each.op_id for each in group.scheduled]
        op_ids += [each.op_id for each in group.directives]
        found += [(group_id, op_id) for op_id in op_ids]
    return found


def joined(notes: Mapping[int, PauseNotes]) -> dict[PauseName, PauseNote]:
    """Return the notes of all partitions; of one pause, the lowest partition's."""
    found: dict[PauseName, PauseNote] = {}
    for t in sorted(notes, reverse=True):
        found.update(notes[t].by_name)
    return found


def pause_rows(
    states: Iterable[WorldState],
    notes: Mapping[PauseName, PauseNote],
    *,
    elapsed_ms: Callable[[int], int],
    group_id: str | None = None,
) -> list[dict[str, Any]]:
    """Return every pause that is not over, with person, client, reason, begin and end.

    ``renewed_by`` is the last sender, unless the same one began the pause. ``state`` is
    ``scheduled`` or ``paused``, which is an estimate if no entry has begun the pause
    yet. Person, reason and begin are None if unknown.

    Args:
        states: The coordinating partitions.
        notes: Notes about the pauses.
        elapsed_ms: Returns the time since the last entry of a partition.
        group_id: Only pauses of this group; None for all.
    """
    found: dict[PauseName, dict[str, Any]] = {}
    for state in states:
        append_ms = state.append_time_ms + elapsed_ms(state.partition)
        names = sorted(state.groups) if group_id is None else [group_id]
        for name in names:
            group = state.groups.get(name)
            if group is None:
                continue
            pauses: list[tuple[Pause | Scheduled, int | None]]
            pauses = [(each, None) for each in group.pauses]
            pauses += [(each, each.begin_ms) for each in group.scheduled]
            for pause, begin_ms in pauses:
                if pause.until_ms <= append_ms:
                    continue  # It is over: the next entry ends it.
                place = (name, pause.op_id)
                note = notes.get(place, PauseNote())
                last = None if note.last is None else note.last.client_id
                is_last = last == pause.client_id
                is_begun = begin_ms is None or begin_ms <= append_ms
                row = found.setdefault(
                    place,
                    {
                        "group_id": name,
                        "op_id": pause.op_id.hex(),
                        "state": "scheduled",
                        "client_id": note.client_id or pause.client_id,
                        "person": note.person,
                        "renewed_by": note.renewed_by if is_last else None,
                        "reason": note.reason,
                        "begin_ms": begin_ms or note.begin_ms,
                        "until_ms": pause.until_ms,
                        "topics": list(scope_texts(pause.scope)),
                        "partitions_count": 0,
                    },
                )
                row["until_ms"] = max(row["until_ms"], pause.until_ms)
                row["partitions_count"] += 1
                if is_begun:
                    row["state"] = "paused"
    return [row for _, row in sorted(found.items())]


def directive_rows(
    states: Iterable[WorldState],
    notes: Mapping[PauseName, PauseNote],
    *,
    elapsed_ms: Callable[[int], int],
    group_id: str | None = None,
) -> list[dict[str, Any]]:
    """Return every directive in force (PROTOCOL 9.7), with who, why and until when.

    It drains or cordons ``client`` or ``host``; ``client_id`` and ``person`` sent it.
    Person, reason and begin are None if unknown.

    Args:
        states: The coordinating partitions.
        notes: Notes about the directives.
        elapsed_ms: Returns the time since the last entry of a partition.
        group_id: Only directives of this group and those for all groups; None for any.
    """
    found: dict[PauseName, dict[str, Any]] = {}
    for state in states:
        append_ms = state.append_time_ms + elapsed_ms(state.partition)
        for name, op_id in state.directed:
            each = state.groups[name].directive(op_id)
            if group_id not in {None, name} and name != CHECKPOINT_GROUP:
                continue
            if each is None or each.until_ms <= append_ms:
                continue  # it is over: the next entry ends it
            note = notes.get((name, op_id), PauseNote())
            row = found.setdefault(
                (name, op_id),
                {
                    "group_id": None if name == CHECKPOINT_GROUP else name,
                    "op_id": op_id.hex(),
                    "action": each.action,
                    "client": each.client,
                    "host": each.host,
                    "client_id": note.client_id or each.client_id,
                    "person": note.person,
                    "reason": note.reason,
                    "begin_ms": note.begin_ms,
                    "until_ms": each.until_ms,
                    "partitions_count": 0,
                },
            )
            row["until_ms"] = max(row["until_ms"], each.until_ms)
            row["partitions_count"] += 1
    return [row for _, row in sorted(found.items())]
