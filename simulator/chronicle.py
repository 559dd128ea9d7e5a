"""The history of a simulated world: the operations that its processes would note.

An operation begins when its process sends a record, and ends when the record is read
from the log: only then does the sender know the outcome (PROTOCOL 1.4). Until then, or
for ever, the outcome is unknown.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from kafka_marshal.ports import Append, Record
from kafka_marshal.protocol.codec import decode
from kafka_marshal.protocol.losses import marks_of
from kafka_marshal.protocol.placement import place_under
from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    ReleaseGroup,
    ResolvePosition,
)
from kafka_marshal.protocol.state import ACCEPTED, Transition, WorldState
from kafka_marshal.protocol.types import Key, Token
from simulator.checkers import Folded
from simulator.operation_judge import (
    BEAT,
    CLAIM,
    FAIL,
    GRANT,
    HAND_OUT,
    INVOKE,
    OK,
    PAUSE,
    PROCESS,
    SEEK,
    SET,
    SOUGHT,
    UNKNOWN,
    UNPAUSE,
    Operation,
)

Span = tuple[int | None, int | None]
NOWHERE: Span = (None, None)
Held = Mapping[int, tuple[Key, Token | None]]
Sent = ClaimingPartition | Heartbeat | BatchHeartbeat | ClaimingMessages
SENT = (ClaimingPartition, Heartbeat, BatchHeartbeat, ClaimingMessages)


class Surroundings(Protocol):
    """What a chronicle needs to know about its world.

    Attributes:
        attempts: Processes that request offsets under claims of other processes.
    """

    attempts: set[bytes]

    @property
    def now_ms(self) -> int:
        """True time."""
        ...

    def name_of(self, incarnation: bytes) -> str:
        """Return the name of the process with an incarnation."""
        ...

    def keys_of(self, partition: int) -> Sequence[Key]:
        """Return the keys of a coordinating partition that the history covers."""
        ...


class Chronicle:
    """Collects the operations of all processes, in the order of true time.

    Attributes:
        operations: All operations so far.
    """

    def __init__(self, world: Surroundings) -> None:
        """Start with an empty history of a world."""
        self.operations: list[Operation] = []
        self._world = world
        # Key and token of each claim that was won, by coordinating partition and epoch.
        self._won: dict[tuple[int, int], tuple[Key, Token | None]] = {}
        self._open: dict[str, list[tuple[Append, list[Operation]]]] = {}
        # Keys that are paused, by their coordinating partition; no key moves meanwhile.
        self._paused: dict[int, list[Key]] = {}
        # Records that a process is working on; their outcome is unknown if it dies.
        self._begun: dict[str, dict[tuple[Key, int], Operation]] = {}

    # --- what is sent

    def on_append(
        self, partition: int, value: bytes, *, append: Append | None, held: Held
    ) -> None:
        """Record that a process sends a record.

        Args:
            partition: Coordinating partition.
            value: The record.
            append: Its result; None if the process never gets one.
            held: The keys that the process holds, by the epoch of the claim.
        """
        record = decode(value)
        if not isinstance(record, SENT):
            return
        begun = list(self._begin(partition, record, held=held))
        self.operations += begun
        if begun and append is not None:
            name = begun[0].process
            self._give_up(name)
            self._open[name].append((append, begun))

    def _begin(
        self, partition: int, record: Sent, *, held: Held
    ) -> Iterator[Operation]:
        name = self._world.name_of(record.incarnation)
        if isinstance(record, ClaimingPartition):
            key = Key(record.group_id, record.topic, record.partition)
            if key in self._world.keys_of(partition):
                yield self._operation(CLAIM, INVOKE, of=(name, key), number=record.seq)
            return
        marks = marks_of(record)
        for at, (epoch, first, last) in enumerate(_asked(record)):
            # The process may have read just now that it has won.
            won = held.get(epoch) or self._won.get((partition, epoch))
            if won is None:
                continue  # a key that the history does not cover
            kind = GRANT if isinstance(record, ClaimingMessages) else _beats(record)
            yield self._operation(
                kind,
                INVOKE,
                of=(name, won[0]),
                token=won[1],
                span=(first, last),
                number=record.seq,
                done=marks.get(at) if kind == BEAT else None,
            )

    def _give_up(self, name: str) -> None:
        """Record appends that were reported as failed; they may still be written."""
        still = []
        for append, begun in self._open.get(name, ()):
            if not append.is_done():
                still.append((append, begun))
            elif append.error() is not None:
                self.operations += map(self._unknown, begun)
        self._open[name] = still

    def _unknown(self, begun: Operation) -> Operation:
        return self._operation(
            begun.kind,
            UNKNOWN,
            of=(begun.process, begun.key),
            token=begun.token,
            span=(begun.first, begun.last),
            number=begun.number,
        )

    # --- what the log says

    def on_fold(self, folded: Folded, world: WorldState) -> None:
        """Record the outcome of a record that was folded."""
        transition, partition = folded.transition, folded.partition
        self._note_pause(partition, world, transition)
        record, key = transition.record, transition.key
        if key is None or key not in self._world.keys_of(partition):
            return
        if isinstance(record, ResolvePosition) and transition.effect == "position_set":
            state = world.keys[key]
            span = state.position, None
            self._end(SET, OK, of=("admin", key), span=span, topic_id=state.topic_id)
        if not isinstance(record, SENT):
            return
        is_ok = transition.outcome == ACCEPTED
        outcome = OK if is_ok else FAIL
        name = self._world.name_of(record.incarnation)
        known = world.keys.get(key)
        position = None if known is None else known.next_unclaimed()
        if isinstance(record, ClaimingPartition):
            token = world.token(key) if is_ok else None
            if is_ok:
                self._won[partition, transition.offset] = key, token
            self._end(
                CLAIM,
                outcome,
                of=(name, key),
                token=token,
                span=(position if is_ok else None, None),
                number=record.seq,
                topic_id=known.topic_id if is_ok and known is not None else None,
            )
        elif isinstance(record, ClaimingMessages):
            if is_ok:
                self._granted(partition, record, transition, key=key)
            elif record.grantee not in self._world.attempts:
                self._end(GRANT, FAIL, of=(name, key), number=record.seq)
        else:
            epoch = record.epoch if isinstance(record, Heartbeat) else transition.epoch
            token = self._won.get((partition, epoch or 0), (key, None))[1]
            self._end(
                _beats(record),
                outcome,
                of=(name, key),
                token=token,
                span=(position if is_ok else None, None),
                number=record.seq,
                renews=transition.effect == "renewed",
            )

    def _granted(
        self,
        partition: int,
        record: ClaimingMessages,
        transition: Transition,
        *,
        key: Key,
    ) -> None:
        """Record a grant for its grantee, which may not be the sender."""
        detail = transition.detail or {}
        span = detail["first"], detail["last"]
        token = self._won.get((partition, record.epoch), (key, None))[1]
        if record.grantee not in self._world.attempts:
            of = self._world.name_of(record.incarnation), key
            self._end(GRANT, OK, of=of, token=token, span=span, number=record.seq)
            return
        # The grantee is another process, which processes at once what it is granted.
        name = f"attempt {record.grantee.hex()[:8]}"
        for kind in (GRANT, HAND_OUT, PROCESS):
            self._end(kind, OK, of=(name, key), token=token, span=span)

    def _note_pause(
        self, partition: int, world: WorldState, transition: Transition
    ) -> None:
        """Record when a pause of a group begins and ends, as its admin would."""
        record = transition.record
        is_paused = isinstance(record, ReleaseGroup) and transition.effect == "paused"
        was_paused = partition in self._paused
        if is_paused and not was_paused:
            assert world.config is not None
            count = world.config.partition_count
            keys = [
                key
                for key in self._world.keys_of(partition)
                if place_under(key, count) == partition
            ]
            self._paused[partition] = keys
            for key in keys:
                self._end(PAUSE, OK, of=("admin", key))
        elif was_paused:
            keys = self._paused[partition]
            if keys and world.active_pause(keys[0].group_id) is not None:
                return
            for key in self._paused.pop(partition):
                self._end(UNPAUSE, OK, of=("admin", key))

    # --- what applications do

    def on_handed(
        self,
        name: str,
        key: Key,
        *,
        records: Sequence[Record],
        topic_id: bytes | None = None,
    ) -> None:
        """Record that an application was handed records, and begins with them."""
        token, of = records[0].token, (name, key)
        span = records[0].offset, records[-1].offset
        self._end(HAND_OUT, OK, of=of, token=token, span=span, topic_id=topic_id)
        for record in records:
            at = record.offset, record.offset
            begun = self._operation(
                PROCESS, INVOKE, of=(name, key), token=record.token, span=at
            )
            self.operations.append(begun)
            self._begun.setdefault(name, {})[key, record.offset] = begun

    def on_processed(self, name: str, key: Key, *, record: Record) -> None:
        """Record that an application has processed a record."""
        self._begun.get(name, {}).pop((key, record.offset), None)
        at = record.offset, record.offset
        self._end(PROCESS, OK, of=(name, key), token=record.token, span=at)

    def on_sought(self, name: str, key: Key, *, token: Token, offset: int) -> None:
        """Record that a process has read that its seek is done."""
        self._end(SOUGHT, OK, of=(name, key), token=token, span=(offset, None))

    def on_gone(self, name: str) -> None:
        """Record the end of a process: outcomes of open operations are unknown."""
        for _, begun in self._open.pop(name, ()):
            self.operations += map(self._unknown, begun)
        self.operations += map(self._unknown, self._begun.pop(name, {}).values())

    # --- operations

    def _end(
        self,
        kind: str,
        outcome: str,
        *,
        of: tuple[str, Key],
        token: Token | None = None,
        span: Span = NOWHERE,
        number: int | None = None,
        renews: bool = False,
        topic_id: bytes | None = None,
    ) -> None:
        operation = self._operation(
            kind, outcome, of=of, token=token, span=span, number=number
        )
        if renews or topic_id is not None:
            operation = msgspec.structs.replace(
                operation, renews=renews, topic_id=topic_id
            )
        self.operations.append(operation)

    def _operation(
        self,
        kind: str,
        outcome: str,
        *,
        of: tuple[str, Key],
        token: Token | None = None,
        span: Span = NOWHERE,
        number: int | None = None,
        done: int | None = None,
    ) -> Operation:
        (name, key), (first, last) = of, span
        at_ms = self._world.now_ms
        return Operation(
            kind=kind,
            outcome=outcome,
            process=name,
            key=key,
            token=token,
            at_ms=at_ms,
            first=first,
            last=last,
            number=number,
            done=done,
        )


def _beats(record: Heartbeat | BatchHeartbeat) -> str:
    """Return the kind of a heartbeat: a rewind is a seek of the owner."""
    return SEEK if isinstance(record, Heartbeat) and record.rewind else BEAT


def _asked(
    record: Heartbeat | BatchHeartbeat | ClaimingMessages,
) -> Iterator[tuple[int, int | None, int | None]]:
    """Yield epoch, first and last offset of each operation that a record requests."""
    if isinstance(record, BatchHeartbeat):
        for epoch, position in record.beats:
            yield epoch, position, None
    elif isinstance(record, Heartbeat):
        yield record.epoch, record.position, None
    else:
        yield record.epoch, record.first, record.proposed_last_offset
