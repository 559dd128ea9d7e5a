"""Joins all records of admins in the log into actions.

An admin's operation has records in every coordinating partition, and a pause is renewed
again and again. ``ActionLog`` observes the fold of all partitions and joins the records
of one operation; no admin's record is left out.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from kafka_marshal.engine.pause_notes import By
from kafka_marshal.history.admin_records import (
    CONFIG,
    DIRECTIVES,
    FORGET,
    FORMAT,
    GROUP_RESET,
    GROW,
    LAYOUTS,
    PAUSE,
    RESIZE,
    RESUME,
    STATE_RESET,
    UNDO,
    UPGRADE,
    AdminRecord,
    Name,
    group_of,
    is_of_admin,
    name_of,
    text_of,
)
from kafka_marshal.history.pauses import Pauses
from kafka_marshal.history.rows import RAN_OUT, Moment
from kafka_marshal.protocol.codec import person_of, undone_of
from kafka_marshal.protocol.fold_beats import NO_EPOCH
from kafka_marshal.protocol.layout import config_of
from kafka_marshal.protocol.records import (
    Config,
    DataGrowth,
    DecidePosition,
    Directive,
    FencingClient,
    ForgettingPartition,
    GroupSettings,
    LayoutFence,
    PauseGroup,
    Plan,
    ReleaseGroup,
    Reset,
    ResolvePosition,
    StagePosition,
)
from kafka_marshal.protocol.state import (
    ACCEPTED,
    HALTED,
    Transition,
    Transitions,
    WorldState,
)
from kafka_marshal.protocol.text import scope_texts
from kafka_marshal.protocol.types import Key, LogEntry

ACTIONS_MAX = 10_000
RECORDS_PER_ACTION_MAX = 5_000
_POSITIONS = (StagePosition, DecidePosition, ResolvePosition)
# Steps of a change of the partition count and of a growth, by the effects of records.
STEPS = {
    "layout_fenced": "fenced",
    "imported": "imported",
    "group_imported": "groups",
    "layout_done": "done",
    "layout_final": "ended",
    "growing": "announced",
    "grown": "grown",
}

# Outcomes of actions.
REFUSED, PARTIAL = "refused", "partial"
COMMITTED, ABORTED, OPEN = "committed", "aborted", "open"

# How a pause ended.
RESUMED, EXPIRED, ENDED_BY_RESET = "resumed", "expired", "reset"
# How a directive ended before its time.
ENDED = "ended"
# How a growth ended, whether or not the topic has grown.
WITHDRAWN, RECREATED = "withdrawn", "recreated"


class ActionRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One record of an action.

    Attributes:
        partition: Coordinating partition.
        offset: Its offset.
        at_ms: Its append time, epoch ms.
        record: Name of its kind.
        client_id: Its sender, None for a Config.
        incarnation: The sender's process.
        person: Person in its tags, or None.
        outcome: ``accepted``, ``refused``, ``ignored`` or ``halted``.
        effect: Its effect if it was accepted, else the reason why not.
        reason: Reason in the record, for people.
        until_ms: End of the pause that it requests; None if it ends a pause.
    """

    partition: int
    offset: int
    at_ms: int
    record: str
    client_id: str | None
    incarnation: bytes | None
    person: str | None
    outcome: str
    effect: str
    reason: str | None
    until_ms: int | None


class ActionKey(msgspec.Struct, kw_only=True, gc=False):
    """A key that an action names.

    Attributes:
        key: The key.
        position: Position that it sets, or None.
        before: Position before it, None if unknown.
        outcome: Effect of the last record about the key, or the reason of its refusal.
    """

    key: Key
    position: int | None
    before: int | None
    outcome: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a pause, a directive or a growth ended in one coordinating partition.

    Attributes:
        how: For a pause ``resumed``, ``expired``, or ``reset`` if the state of a Reset
            does not have it; for a directive ``ended``; for a growth ``withdrawn``, or
            ``recreated`` once another topic of its name grows.
        partition: The partition.
        offset: Offset of the entry that ended it; None if it is only known that its
            time is over.
        at_ms: Append time of that entry, epoch ms, or the end of the pause.
        client_id: The client that ended it, None if time did.
        person: Person in the tags of that record.
    """

    how: str
    partition: int
    offset: int | None
    at_ms: int
    client_id: str | None = None
    person: str | None = None


class ActionStep(msgspec.Struct, kw_only=True, gc=False):
    """One step of a change of the partition count (PROTOCOL 10), or a growth (9.10).

    Attributes:
        name: ``fenced``, ``imported``, ``groups``, ``done`` or ``ended``; for a growth
            ``announced`` or ``grown``.
        count: Number of partitions that were fenced or ended, of keys, or settings and
            directives of groups, that were imported, or of pairs of a source and a
            target that were done; for a growth of partitions that were announced, or
            whose ends were recorded.
        first_ms: Append time of the step's first record, epoch ms.
        last_ms: Append time of its last record, epoch ms.
    """

    name: str
    count: int
    first_ms: int
    last_ms: int


class Action(msgspec.Struct, kw_only=True, gc=False):
    """Something that an admin did, or tried to do.

    Attributes:
        kind: ``pause``, ``resume``, ``reset`` (of a group), ``undo``, ``forget``,
            ``fence``, ``drain``, ``cordon``, ``settings``, ``state_reset`` (of a
            coordinating partition), ``format``, ``upgrade``, ``config``, ``resize``,
            ``grow`` or ``rebalance``.
        group_id: The group; None if it concerns all groups.
        op_id: The operation, None for records without one.
        first: Its first record, by append time.
        outcome: ``accepted``, ``refused`` or ``partial`` (accepted in some partitions);
            for a set position ``committed``, ``aborted`` or ``open``. A change of the
            partition count is ``open`` until it has ended in every partition; a growth
            until the ends are known, and ``aborted`` if it ended before.
        refusals: Number of its records that were refused or ignored, by reason.
        reason: The first reason in its records, for people.
        begin_ms: Begin of a scheduled pause, None if it began with its first record.
        topics: Topics that a pause is limited to, like ``orders:0,1``.
        until_ms: End of the pause, as of the last renewal.
        renewals_count: Number of accepted records that only extended the pause.
        renewed_by: Person, else client, of the last of these; None if it also began
            the pause.
        ended: How the pause ended in the partition in which it ended last; None while
            it is active in any. For a growth, why nothing waits for it any more.
        lasting: Coordinating partitions in which the pause is active.
        scheduled: Coordinating partitions in which it has not begun.
        undoes: The operation that an undo reverts, by the tags of its records.
        keys: Keys that it names, with their positions.
        text: The settings of a Config, the fenced process, the drained or cordoned
            client or host, the partition counts before and after, or the generation of
            a plan; else None.
        steps: Steps of a change of the partition count or of a growth, in order of the
            protocol.
        records: Its records, by append time; at most ``RECORDS_PER_ACTION_MAX``.
        records_count: Number of all its records.
    """

    kind: str
    group_id: str | None
    op_id: bytes | None
    first: ActionRecord
    outcome: str
    refusals: dict[str, int]
    reason: str | None
    begin_ms: int | None = None
    topics: tuple[str, ...] = ()
    until_ms: int | None = None
    renewals_count: int = 0
    renewed_by: str | None = None
    ended: Ended | None = None
    lasting: tuple[int, ...] = ()
    scheduled: tuple[int, ...] = ()
    undoes: bytes | None = None
    keys: tuple[ActionKey, ...] = ()
    text: str | None = None
    steps: tuple[ActionStep, ...] = ()
    records: tuple[ActionRecord, ...] = ()
    records_count: int = 0

    @property
    def last_ms(self) -> int:
        """Append time of its last record or of its end, epoch ms."""
        ended_ms = 0 if self.ended is None else self.ended.at_ms
        return max(ended_ms, *(record.at_ms for record in self.records))


class _Operation(msgspec.Struct, gc=False):
    """The records that belong together, as they are collected."""

    name: Name
    records: list[ActionRecord] = []
    count: int = 0
    keys: dict[Key, ActionKey] = {}
    undoes: bytes | None = None
    lasting: dict[int, int] = {}
    scheduled: dict[int, int] = {}
    begin_ms: int | None = None
    topics: tuple[str, ...] = ()
    ended: list[Ended] = []
    kind: str = ""
    text: str | None = None
    steps: dict[str, ActionStep] = {}
    # Partitions that have the fence of the change: it is open there, or has ended.
    changing: set[int] = set()


class ActionLog:
    """Collects the actions of admins from the fold of all coordinating partitions.

    The partitions may be folded in any order; the result is the same.

    Attributes:
        group_id: Keeps only actions on this group, or on all groups; None for every
            group.
        records_count: Number of records of admins about these groups.
        dropped_count: Number of actions beyond ``ACTIONS_MAX``, which are not kept.
    """

    def __init__(self, group_id: str | None = None) -> None:
        self.group_id = group_id
        self.records_count = 0
        self.dropped_count = 0
        self._operations: dict[Name, _Operation] = {}
        self._configs: dict[int, Config] = {}
        # By coordinating partition.
        self._pauses: dict[int, Pauses] = {}
        # Offset of the announcement of each growth in the state, by topic and count.
        self._growths: dict[tuple[str, int], int] = {}

    def begin(self, world: WorldState) -> None:
        """Start a partition from the state of a checkpoint.

        Its pauses and growths began earlier; only their ends can be part of an action.
        """
        if world.partition == 0:
            self._growths = _announced(world)
        if world.config is not None:
            self._configs[world.partition] = world.config
        at = Moment(world.next_offset - 1, world.now_ms, world.append_time_ms)
        self._pauses[world.partition] = pauses = Pauses()
        pauses.restore(world, at=at)

    def epoch(self, _: WorldState) -> int:
        """Return ``NO_EPOCH``: ``take`` needs no Heartbeats."""
        return NO_EPOCH

    def take(
        self, world: WorldState, entry: LogEntry, *, transitions: Transitions
    ) -> None:
        """Observe an entry that was folded.

        Args:
            world: The state after the entry.
            entry: The entry.
            transitions: Its transitions.
        """
        record = transitions[0].record if transitions else None
        admins = record if is_of_admin(record) else None
        pauses = self._pauses.setdefault(world.partition, Pauses())
        if admins is None and not pauses:
            return
        if admins is not None and self._is_wanted(admins):
            self._note(world, entry, transitions=transitions)
        is_accepted = any(each.outcome == ACCEPTED for each in transitions)
        self._note_ends(world, entry, record=admins if is_accepted else None)

    def _is_wanted(self, record: AdminRecord) -> bool:
        group_id = group_of(record)
        return self.group_id is None or group_id in {None, self.group_id}

    def _note(
        self, world: WorldState, entry: LogEntry, *, transitions: Transitions
    ) -> None:
        record = transitions[0].record
        assert isinstance(record, AdminRecord)
        operation = self._operation(self._name(world, transitions[0]))
        self.records_count += 1
        operation.count += 1
        operation.records.append(_record(world, entry, transitions[0]))
        if len(operation.records) > RECORDS_PER_ACTION_MAX:
            del operation.records[1]  # keeps the first record and the last ones
        if isinstance(record, StagePosition):
            for key, position in _staged(record):
                row = _key(operation, key, position)
                row.outcome = transitions[0].reason or "staged"
        if isinstance(record, StagePosition | DecidePosition):
            operation.undoes = operation.undoes or undone_of(record)
        for transition in transitions:
            self._note_key(operation, world, transition)
        if isinstance(record, PauseGroup):
            operation.begin_ms = record.begin_time or None
            operation.topics = scope_texts(record.scope)
        elif isinstance(record, FencingClient | GroupSettings | Directive | Plan):
            operation.text = text_of(record)
        elif isinstance(record, Config):
            self._note_config(operation, world, transitions[0])
        elif isinstance(record, LAYOUTS):
            _note_layout(operation, world, entry, transitions=transitions)
        elif isinstance(record, DataGrowth):
            _note_growth(operation, entry, transitions[0])
        if world.partition == 0 and isinstance(record, DataGrowth | Reset):
            self._note_dropped(world, operation)

    def _note_dropped(self, world: WorldState, operation: _Operation) -> None:
        """Record the growths that another growth of the topic, or a Reset, ended."""
        before, self._growths = self._growths, _announced(world)
        for place, offset in before.items() - self._growths.items():
            dropped = self._operations.get((GROW, None, f"{place}/{offset}"))
            if dropped is None or dropped is operation:
                continue
            by = operation.records[-1]
            end = Ended(
                how=ENDED_BY_RESET if by.record == Reset.__name__ else RECREATED,
                partition=0,
                offset=by.offset,
                at_ms=by.at_ms,
                client_id=by.client_id,
                person=by.person,
            )
            dropped.ended.append(end)

    def _name(self, world: WorldState, transition: Transition) -> Name:
        """Return what the records of one operation have in common.

        Records of a growth have its announcement in common; a refused one has none.
        """
        record = transition.record
        assert isinstance(record, AdminRecord)
        if not isinstance(record, DataGrowth) or transition.outcome == REFUSED:
            return name_of(record)
        place = record.topic, record.old_count
        offset = _announced(world).get(place, self._growths.get(place))
        return GROW, None, f"{place}/{offset}"

    def _note_config(
        self, operation: _Operation, world: WorldState, transition: Transition
    ) -> None:
        config, before = transition.record, self._configs.get(world.partition)
        assert isinstance(config, Config)
        kind = FORMAT if config.generation == 1 else CONFIG
        if before is not None and config.feature_level > before.feature_level:
            kind = UPGRADE
        operation.kind = kind
        operation.text = (
            f"generation {config.generation}, heartbeat interval "
            f"{config.heartbeat_interval_ms} ms, feature level {config.feature_level}"
        )
        if transition.outcome == ACCEPTED:
            self._configs[world.partition] = config

    def _operation(self, name: Name) -> _Operation:
        found = self._operations.get(name)
        if found is None:
            found = self._operations[name] = _Operation(name)
            if len(self._operations) > ACTIONS_MAX:
                del self._operations[next(iter(self._operations))]
                self.dropped_count += 1
        return found

    @staticmethod
    def _note_key(
        operation: _Operation, world: WorldState, transition: Transition
    ) -> None:
        key, record = transition.key, transition.record
        if key is None or not isinstance(
            record, StagePosition | ResolvePosition | ForgettingPartition
        ):
            return
        row, known = _key(operation, key, None), world.keys.get(key)
        row.outcome = transition.effect or transition.reason or ""
        if transition.effect == "staged" and known is not None:
            row.before = known.position

    def _note_ends(
        self, world: WorldState, entry: LogEntry, *, record: AdminRecord | None
    ) -> None:
        """Record the pauses of a partition that ended, also those that never began."""
        number, pauses = world.partition, self._pauses[world.partition]
        at = Moment(entry.offset, world.now_ms, entry.timestamp_ms)
        ahead = dict(pauses.scheduled)
        over = {
            (row.group_id, row.op_id): row.ending == RAN_OUT
            for row in pauses.take(world, at=at, record=record)
        }
        for name in ahead.keys() - pauses.scheduled.keys() - pauses.lasting.keys():
            over.setdefault(name, ahead[name].until_ms <= world.append_time_ms)
        for name, is_expired in sorted(over.items()):
            operation = self._operations.get((PAUSE, *name))
            if operation is not None:
                by = None if is_expired else record
                operation.ended.append(_end(number, entry, by, op_id=name[1]))

    def actions(self, elapsed: Mapping[int, int] | None = None) -> list[Action]:
        """Return the actions, by the append time of their first records.

        Args:
            elapsed: Estimated append time of the next entry of each partition: a pause
                that ends before it counts as expired.
        """
        self._note_pauses()
        found = [
            action
            for operation in self._operations.values()
            for action in _actions(operation, elapsed or {})
        ]
        found.sort(key=lambda action: _place(action.first))
        return found

    def _note_pauses(self) -> None:
        """Record in which partitions the pause of each operation lasts, until when."""
        for operation in self._operations.values():
            operation.lasting, operation.scheduled = {}, {}
        for number, pauses in self._pauses.items():
            for name, row in pauses.lasting.items():
                if (found := self._operations.get((PAUSE, *name))) is not None:
                    found.lasting[number] = row.until_ms
            for name, planned in pauses.scheduled.items():
                if (found := self._operations.get((PAUSE, *name))) is not None:
                    found.scheduled[number] = planned.until_ms


def _note_layout(
    operation: _Operation,
    world: WorldState,
    entry: LogEntry,
    *,
    transitions: Transitions,
) -> None:
    """Record the progress of a change of the partition count."""
    record = transitions[0].record
    if isinstance(record, LayoutFence):
        count = config_of(record).partition_count
        operation.text = f"from {record.from_count} to {count} coordinating partitions"
    for name in filter(None, (STEPS.get(each.effect or "") for each in transitions)):
        _note_step(operation, name, entry.timestamp_ms)
        if name == STEPS["layout_final"]:
            operation.changing.discard(world.partition)
        else:
            operation.changing.add(world.partition)


def _note_growth(
    operation: _Operation, entry: LogEntry, transition: Transition
) -> None:
    """Record the progress of a growth."""
    record, effect = transition.record, transition.effect or ""
    assert isinstance(record, DataGrowth)
    old, new = record.old_count, record.new_count
    if new > old:
        operation.text = f"topic {record.topic} from {old} to {new} partitions"
    elif operation.text is None:
        operation.text = f"topic {record.topic} from {old} partitions"
    if effect in STEPS:
        count = new - old if record.ends is None else old
        _note_step(operation, STEPS[effect], entry.timestamp_ms, count=count)


def _announced(world: WorldState) -> dict[tuple[str, int], int]:
    """Return the offset of each growth's announcement, by topic and old count."""
    return {each[:2]: each.offset for each in world.growths}


def _note_step(operation: _Operation, name: str, at_ms: int, *, count: int = 1) -> None:
    found = operation.steps.get(name)
    if found is None:
        found = ActionStep(name=name, count=0, first_ms=at_ms, last_ms=at_ms)
        operation.steps[name] = found
    found.count += count
    # Partitions are read in any order.
    found.first_ms = min(found.first_ms, at_ms)
    found.last_ms = max(found.last_ms, at_ms)


def _place(record: ActionRecord) -> tuple[int, int, int]:
    return record.at_ms, record.partition, record.offset


def _record(world: WorldState, entry: LogEntry, transition: Transition) -> ActionRecord:
    record = transition.record
    assert isinstance(record, AdminRecord)
    until_ms: int | None = None
    if isinstance(record, ReleaseGroup | PauseGroup):
        until_ms = _until_ms(world, record, transition)
    elif isinstance(record, Directive) and transition.effect == "directed":
        known = world.groups[record.group_id].directive(record.op_id)
        until_ms = None if known is None else known.until_ms
    return ActionRecord(
        partition=world.partition,
        offset=entry.offset,
        at_ms=entry.timestamp_ms,
        record=type(record).__name__,
        client_id=getattr(record, "client_id", None),
        incarnation=getattr(record, "incarnation", None),
        person=person_of(record),
        outcome=transition.outcome,
        effect=transition.effect or transition.reason or "",
        reason=getattr(record, "reason", None),
        until_ms=until_ms or None,
    )


def _until_ms(
    world: WorldState, record: ReleaseGroup | PauseGroup, transition: Transition
) -> int | None:
    """Return the end of a pause after its record; None for a record that ends it."""
    group = world.groups.get(record.group_id)
    pause = world.lasting_pause(record.group_id, record.op_id)
    if transition.effect == "unpaused":
        return None
    if transition.effect == "paused" and pause is not None:
        return pause.until_ms
    known = None if group is None else group.scheduled_as(record.op_id)
    return record.msg_expire_time if known is None else known.until_ms


def _staged(record: StagePosition) -> Iterator[tuple[Key, int]]:
    for topic in record.topics:
        for partition, position in topic.positions:
            yield Key(record.group_id, topic.topic, partition), position


def _key(operation: _Operation, key: Key, position: int | None) -> ActionKey:
    row = operation.keys.get(key)
    if row is None:
        row = ActionKey(key=key, position=position, before=None, outcome="")
        operation.keys[key] = row
    return row


def _end(
    partition: int, entry: LogEntry, record: AdminRecord | None, *, op_id: bytes
) -> Ended:
    is_resumed = (
        isinstance(record, ReleaseGroup | ResolvePosition) and record.op_id == op_id
    )
    is_reset = isinstance(record, Reset)
    by = record if is_resumed or is_reset else None
    how = ENDED_BY_RESET if is_reset else RESUMED if is_resumed else EXPIRED
    return Ended(
        how=how,
        partition=partition,
        offset=entry.offset,
        at_ms=entry.timestamp_ms,
        client_id=getattr(by, "client_id", None),
        person=None if by is None else person_of(by),
    )


# --- actions of the records that belong together


def _actions(operation: _Operation, now_ms: Mapping[int, int]) -> Iterator[Action]:
    kind, *_ = operation.name
    if kind in DIRECTIVES:
        yield _with_end(_action(operation))
    elif kind == GROW:
        yield _growth_action(_action(operation), operation)
    elif kind != PAUSE:
        yield _action(operation, operation.kind or kind)
    elif any(record.record in _POSITION_NAMES for record in operation.records):
        yield _position_action(operation, now_ms)
    else:
        yield from _pause_actions(operation, now_ms)


_POSITION_NAMES = frozenset(kind.__name__ for kind in _POSITIONS)


def _action(
    operation: _Operation,
    kind: str | None = None,
    *,
    records: Iterable[ActionRecord] | None = None,
) -> Action:
    """Return the action that these records form, with its outcome over all of them."""
    named, group_id, op_id = operation.name
    kind = kind or named
    mine = sorted(operation.records if records is None else records, key=_place)
    accepted = {record.partition for record in mine if record.outcome == ACCEPTED}
    everywhere = {record.partition for record in mine}
    outcome = ACCEPTED if accepted == everywhere else PARTIAL if accepted else REFUSED
    refusals = Counter(r.effect for r in mine if r.outcome != ACCEPTED)
    keys = [operation.keys[key] for key in sorted(operation.keys)]
    if kind == FORGET:
        has_lost = any(each.outcome == "forgotten" for each in keys)
        is_all = all(each.outcome == "forgotten" for each in keys)
        outcome = ACCEPTED if is_all else PARTIAL if has_lost else REFUSED
    elif kind == STATE_RESET:
        done = any(record.effect == "reset" for record in mine)
        is_staged = mine[-1].effect == "reset_staged"
        outcome = ACCEPTED if done else OPEN if is_staged else REFUSED
    elif kind == RESIZE:
        outcome = OPEN if operation.changing else ACCEPTED if accepted else REFUSED
    elif any(record.outcome == HALTED for record in mine):
        outcome = HALTED
    return Action(
        kind=kind,
        group_id=group_id,
        op_id=op_id if isinstance(op_id, bytes) and kind != FORGET else None,
        first=mine[0],
        outcome=outcome,
        refusals=dict(sorted(refusals.items())),
        reason=next((r.reason for r in mine if r.reason is not None), None),
        keys=tuple(keys),
        text=operation.text,
        steps=tuple(
            operation.steps[name] for name in STEPS.values() if name in operation.steps
        ),
        records=tuple(mine),
        records_count=operation.count if records is None else len(mine),
    )


def _with_pause(
    action: Action, operation: _Operation, now_ms: Mapping[int, int]
) -> Action:
    """Add the end of the pause, its renewals, and how it ended."""
    renewed = [r for r in action.records if r.effect in {"paused", "scheduled"}]
    firsts = {record.partition for record in renewed}
    action.until_ms = max((r.until_ms or 0 for r in renewed), default=None)
    action.renewals_count = len(renewed) - len(firsts)
    by = [By(record.client_id, record.person) for record in renewed]
    action.renewed_by = by[-1].if_other(by[0]) if by else None
    action.begin_ms, action.topics = operation.begin_ms, operation.topics
    over = {
        number: until_ms
        for number, until_ms in (operation.lasting | operation.scheduled).items()
        if until_ms <= now_ms.get(number, -1)
    }
    action.lasting = tuple(sorted(operation.lasting.keys() - over.keys()))
    action.scheduled = tuple(sorted(operation.scheduled.keys() - over.keys()))
    ends = [
        *operation.ended,
        *(
            Ended(how=EXPIRED, partition=number, offset=None, at_ms=until_ms)
            for number, until_ms in over.items()
        ),
    ]
    if ends and not action.lasting and not action.scheduled:
        # If it was resumed in any partition, an admin ended it, not time.
        ends.sort(key=lambda end: (end.how != EXPIRED, end.at_ms, end.partition))
        action.ended = ends[-1]
    return action


def _with_end(action: Action) -> Action:
    """Add the end of a directive, and the client that ended it earlier, if any."""
    directed_until = [r.until_ms for r in action.records if r.until_ms is not None]
    action.until_ms = max(directed_until, default=None)
    action.ended = _last_of(action, "directive_ended", how=ENDED)
    return action


def _last_of(action: Action, effect: str, *, how: str) -> Ended | None:
    """Return the end of an action by its last record with an effect, if any."""
    ends = [record for record in action.records if record.effect == effect]
    if not ends:
        return None
    last = ends[-1]
    return Ended(
        how=how,
        partition=last.partition,
        offset=last.offset,
        at_ms=last.at_ms,
        client_id=last.client_id,
        person=last.person,
    )


def _growth_action(action: Action, operation: _Operation) -> Action:
    """Add the outcome and the end of a growth."""
    action.ended = _last_of(action, "growth_withdrawn", how=WITHDRAWN)
    if operation.ended:
        action.ended = operation.ended[-1]
    steps = {each.name for each in action.steps}
    if STEPS["grown"] in steps:
        action.outcome = ACCEPTED
    elif STEPS["growing"] in steps:
        action.outcome = OPEN if action.ended is None else ABORTED
    return action


def _pause_actions(
    operation: _Operation, now_ms: Mapping[int, int]
) -> Iterator[Action]:
    """Yield the action of a pause, and the action of each admin that ended it."""
    resumes: dict[bytes | None, list[ActionRecord]] = {}
    pauses: list[ActionRecord] = []
    for record in operation.records:
        mine = pauses if record.until_ms else resumes.setdefault(record.incarnation, [])
        mine.append(record)
    if pauses:
        action = _action(operation, records=pauses)
        action.records_count += operation.count - len(operation.records)
        yield _with_pause(action, operation, now_ms)
    for records in resumes.values():
        yield _action(operation, RESUME, records=records)


def _position_action(operation: _Operation, now_ms: Mapping[int, int]) -> Action:
    action = _action(operation, GROUP_RESET)
    _with_pause(action, operation, now_ms)
    effects = {record.effect for record in action.records}
    if effects & {"decided", "position_set"}:
        action.outcome = COMMITTED
    else:
        # 8.4: once its pause is over without a verdict, it can never be committed.
        action.outcome = OPEN if action.lasting else ABORTED
    if operation.undoes is not None:
        action.kind, action.undoes = UNDO, operation.undoes
    return action
