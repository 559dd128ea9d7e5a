"""Follows the pauses of one coordinating partition from begin to end."""

import msgspec
from msgspec.structs import replace

from kafka_marshal.engine.pause_notes import By, PauseName
from kafka_marshal.history.rows import RAN_OUT, UNPAUSED, Moment, PauseRow, Planned
from kafka_marshal.protocol.codec import person_of
from kafka_marshal.protocol.items import Pause
from kafka_marshal.protocol.losses import RESET
from kafka_marshal.protocol.records import (
    LayoutFence,
    LayoutFinal,
    PauseGroup,
    Record,
    ReleaseGroup,
    Reset,
    ResolvePosition,
)
from kafka_marshal.protocol.state import WorldState

_OF_AN_OPERATION = (ReleaseGroup, PauseGroup, ResolvePosition)
_OF_ALL_GROUPS = (Reset, LayoutFence, LayoutFinal)


class Pauses(msgspec.Struct, gc=False):
    """The pauses in the states of one coordinating partition.

    A pause whose record was not read starts with the first state that has it, with an
    unknown reason: that of a checkpoint, or of a Reset (PROTOCOL 7.6).

    Attributes:
        lasting: Active pauses, by group and op_id.
        scheduled: Pauses that have not begun.
    """

    lasting: dict[PauseName, PauseRow] = {}
    scheduled: dict[PauseName, Planned] = {}

    def __bool__(self) -> bool:
        """Return whether time alone may begin or end a pause."""
        return bool(self.lasting or self.scheduled)

    def take(
        self, world: WorldState, *, at: Moment, record: Record | None = None
    ) -> list[PauseRow]:
        """Return the pauses that an entry ended: by its time (4.8), then its record.

        Args:
            world: The state after the entry.
            at: Place and time of the entry.
            record: Its record if it was accepted, else None.
        """
        ended = []
        for name, row in sorted(self.lasting.items()):
            is_over = row.until_ms <= world.append_time_ms
            if is_over or world.lasting_pause(*name) is None:
                del self.lasting[name]
                how = UNPAUSED if isinstance(record, _OF_AN_OPERATION) else RESET
                row.ending, row.end = RAN_OUT if is_over else how, at
                ended.append(row)
        for name in sorted(self.scheduled):
            group = world.groups.get(name[0])
            if group is None or group.scheduled_as(name[1]) is None:
                # The pause begins before the record is judged (4.14), or it has ended.
                planned, pause = self.scheduled.pop(name), world.lasting_pause(*name)
                if pause is not None:
                    self._begin(name, pause, at=at, planned=planned)
        if isinstance(record, ReleaseGroup | PauseGroup):
            self._apply(world, record, at=at)
        elif isinstance(record, _OF_ALL_GROUPS):
            self.restore(world, at=at)
        return ended

    def restore(self, world: WorldState, *, at: Moment) -> None:
        """Add the pauses of a state whose records may not have been read."""
        for group_id, group in sorted(world.groups.items()):
            for pause in group.pauses:
                name = (group_id, pause.op_id)
                if name in self.lasting:
                    self.lasting[name].until_ms = pause.until_ms
                else:
                    self._begin(name, pause, at=at, planned=Planned())
            for each in group.scheduled:
                planned = Planned(begin_ms=each.begin_ms, until_ms=each.until_ms)
                self.scheduled.setdefault((group_id, each.op_id), planned)

    def _apply(
        self, world: WorldState, record: ReleaseGroup | PauseGroup, *, at: Moment
    ) -> None:
        """Apply an accepted record, which schedules, starts or extends a pause."""
        name = (record.group_id, record.op_id)
        group = world.groups.get(record.group_id)
        scheduled = None if group is None else group.scheduled_as(record.op_id)
        pause, row = world.lasting_pause(*name), self.lasting.get(name)
        stated = Planned(reason=record.reason, person=person_of(record))
        if scheduled is not None:
            begin_ms, until_ms = scheduled.begin_ms, scheduled.until_ms
            planned = replace(stated, begin_ms=begin_ms, until_ms=until_ms)
            self.scheduled.setdefault(name, planned)
        elif pause is not None and row is None:
            self._begin(name, pause, at=at, planned=stated)
        elif pause is not None and row is not None:
            row.until_ms = pause.until_ms
            row.renewals_count += 1
            last = By(record.client_id, stated.person)
            row.renewed_by = last.if_other(By(row.client_id, row.person))

    def _begin(
        self, name: PauseName, pause: Pause, *, at: Moment, planned: Planned
    ) -> None:
        self.lasting[name] = PauseRow(
            group_id=name[0],
            op_id=pause.op_id,
            client_id=pause.client_id,
            reason=planned.reason,
            person=planned.person,
            begin_ms=planned.begin_ms,
            start=at,
            until_ms=pause.until_ms,
            scope=pause.scope,
        )
