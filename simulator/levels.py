"""Judges records and Configs above a level in a simulated world (S6, PROTOCOL 3.3).

The judge does not rely on the fold: it reads the headers of records by itself, keeps
its own book of the Configs that an admin wrote, and folds each log a second time,
without the records above the level in force. Every reader of the log must have the
state of that second fold, its twin.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy

import attrs
import msgspec

from kafka_marshal.engine import Engine
from kafka_marshal.protocol.codec import decode, encode
from kafka_marshal.protocol.items import Halt
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import SUPPORTED_LEVEL, Config
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import Transitions, WorldState
from kafka_marshal.protocol.types import Owner
from simulator.checkers import LogWatcher, Violation
from simulator.fakestore import Stored

FRAME_VERSION = 1
LEVEL_BY_TYPE: Mapping[int, int] = {
    **dict.fromkeys((1, 2, 3, 4, 5, 6, 13, 14, 18, 128, 130, 131, 132), 1),
    **dict.fromkeys((7, 8, 9, 10, 11, 12, 15, 16, 17, 19, 20, 21, 22, 23, 24, 129), 2),
}
"""Levels of record types of version 0 (PROTOCOL 3.3), independent of the product."""
BEYOND = 2**31
"""The level of types and versions that no release up to this one knows."""
NO_RECORD = 0
CONFIG = 13
FENCE = 15
"""Type of a LayoutFence, which also brings a Config to a partition without one."""
IGNORING = frozenset({"undecodable", "level"})
UNCHANGED = frozenset({*IGNORING, "halted"})
BEHIND = {"claimed": "above_behind_claim", "granted": "above_behind_grant"}
NUMBER_BYTES_MAX = 5
MORE = 128  # in each byte of a number but the last


def level_of(value: bytes | None) -> int:
    """Return the level that a record belongs to, by its header.

    ``BEYOND`` for a record that a later release may know, ``NO_RECORD`` for a value
    without a header.
    """
    header = _header_of(value)
    if header is None:
        return NO_RECORD
    frame, kind, version = header
    if (frame, version) != (FRAME_VERSION, 0):
        return BEYOND
    return LEVEL_BY_TYPE.get(kind, BEYOND)


def _header_of(value: bytes | None) -> tuple[int, int, int] | None:
    """Return frame, type and version of a record, None without a header."""
    numbers: list[int] = []
    rest = value or b""
    for _ in ("frame", "type", "version"):
        size = next((at for at, byte in enumerate(rest) if byte < MORE), None)
        if size is None or size >= NUMBER_BYTES_MAX or (size and not rest[size]):
            return None
        digits = enumerate(rest[: size + 1])
        numbers.append(sum((byte & ~MORE) << 7 * at for at, byte in digits))
        rest = rest[size + 1 :]
    frame, kind, version = numbers
    return frame, kind, version


@attrs.frozen
class Stop:
    """An accepted Config above the level of all readers, at which they halt.

    Attributes:
        offset: Offset of the Config.
        config: The Config.
        at_ms: True time at which it could be read.
        digest: Digest of a reader that has halted there.
    """

    offset: int
    config: Config
    at_ms: int
    digest: str


class Levels:
    """Keeps the book and the twins of one world, and judges all readers by them.

    Attributes:
        stops: The Config at which every reader must halt, by coordinating partition.
        is_active: Whether this world has records or Configs above a level.
        may_lose: Whether logs lose Configs, which members then write again.
    """

    def __init__(
        self,
        watcher: LogWatcher,
        *,
        config: Config,
        note: Callable[[str], None],
        now_ms: Callable[[], int],
    ) -> None:
        """Begin with the Config that the topic was formatted with.

        Args:
            watcher: Folds the log like any other reader; it is judged, too.
            config: That Config.
            note: Counts a situation.
            now_ms: Returns true time.
        """
        self.stops: dict[int, Stop] = {}
        self.is_active = False
        self.may_lose = False
        self._watcher = watcher
        self._note = note
        self._now_ms = now_ms
        self._configs = {encode(config): config}
        self._appended: dict[int, list[Config]] = {}
        self._twins: dict[int, WorldState] = {}
        self._read: dict[int, int] = {}
        self._effects: dict[int, str | None] = {}
        # Processes that started behind a Config above their level; those that wrote.
        self._beside: set[bytes] = set()
        self._wrote: set[bytes] = set()
        for number in range(len(watcher.worlds)):
            self._begin(number)

    def activate(self) -> None:
        """Judge each record from the beginning of the log on."""
        self.is_active = True
        self._watcher.on_entry = self._on_entry

    def _begin(self, number: int) -> None:
        self._appended[number] = []
        self._twins[number] = WorldState(number)
        self._read[number] = -1
        self._effects[number] = None
        self.stops.pop(number, None)

    # --- what the admin wrote

    def wrote(self, config: Config) -> None:
        """Add a Config that is valid wherever it follows the one before it."""
        self._configs[encode(config)] = config

    def config(self, number: int) -> Config | None:
        """Return the last Config of a coordinating partition, by the judge's book."""
        book = self.book(number)
        return book[-1] if book else None

    def book(self, number: int) -> Sequence[Config]:
        """Return the Configs that a coordinating partition has accepted, in order."""
        return self._appended.get(number, ())

    def in_force(self, number: int) -> int:
        """Return the level in force in a coordinating partition."""
        config = self.config(number)
        return 1 if config is None else config.feature_level

    def state_behind(self, number: int) -> WorldState:
        """Return the state that a program of the new level has at a stop."""
        state, stop = deepcopy(self._twins[number]), self.stops[number]
        state.end_era(stop.offset)
        state.halted, state.config = None, stop.config
        return state

    # --- the log

    def _on_entry(self, number: int, stored: Stored, transitions: Transitions) -> None:
        if stored.offset <= self._read.get(number, stored.offset):
            self._begin(number)  # it was added, or was cut back and is read again
        self._read[number] = stored.offset
        stop = self.stops.get(number)
        if stop is not None:
            self._note("behind_a_halt")
        else:
            self._fold_twin(number, stored, transitions=transitions)
            self._effects[number] = transitions[0].effect if transitions else None
        if self._watcher.is_strict:
            self._compare(number, stored.offset)

    def _fold_twin(
        self, number: int, stored: Stored, *, transitions: Transitions
    ) -> None:
        twin, entry = self._twins[number], stored.entry()
        config = self._accepted(number, stored.value)
        is_above = self._is_above(number, stored.value)
        halts = config is not None and config.feature_level > SUPPORTED_LEVEL
        if is_above or halts:
            entry = msgspec.structs.replace(entry, value=None)
        apply(twin, entry)
        if twin.layout is not None and twin.layout.offset == stored.offset:
            self._on_fence(number, twin)
        if config is not None:
            before = None if halts else self.config(number)
            self._appended[number].append(config)
            if before is not None:
                self._note("level_changed")
                if before.heartbeat_interval_ms != config.heartbeat_interval_ms:
                    self._note("interval_changed")
        if config is not None and halts:
            twin.next_offset = stored.offset
            twin.halted = Halt(stored.offset, config.feature_level)
            stop = Stop(
                offset=stored.offset,
                config=config,
                at_ms=self._now_ms(),
                digest=digest(twin),
            )
            self.stops[number] = stop
        elif is_above:
            self._on_above(number, stored, transitions=transitions)
        elif transitions and transitions[0].reason == "config":
            self._note("config_refused")

    def _is_above(self, number: int, value: bytes | None) -> bool:
        header, config = _header_of(value), self.config(number)
        if config is None and header == (FRAME_VERSION, FENCE, 0):
            return False  # PROTOCOL 10.2: it is judged even if level 1 is in force
        return level_of(value) > self.in_force(number)

    def _on_fence(self, number: int, twin: WorldState) -> None:
        """Add the Config of a change of the count; the twin has judged it."""
        assert twin.config is not None
        self.wrote(twin.config)
        self._appended[number].append(twin.config)

    def _accepted(self, number: int, value: bytes | None) -> Config | None:
        """Return the Config in a value, None if this partition does not accept it."""
        known, config = self.config(number), self._configs.get(value or b"")
        if config is None and self.may_lose:
            config = self._between(value or b"")
        if config is None:
            return None
        if number == 0 and self._twins[number].layout is not None:
            return None  # PROTOCOL 10.2: it is busy
        if known is not None and known.partition_count != config.partition_count:
            return None  # PROTOCOL 4.12
        ahead = config.generation - (0 if known is None else known.generation)
        # PROTOCOL 4.12: partition 0 has decided the order of the generations.
        is_next = ahead == 1 or (number != 0 and ahead > 0)
        return config if is_next else None

    def _between(self, value: bytes) -> Config | None:
        """Return a Config that members wrote on the way to an admin's (10.9)."""
        header = _header_of(value)
        if header != (FRAME_VERSION, CONFIG, 0):
            return None
        config = decode(value)
        if not isinstance(config, Config):
            return None  # a fault has corrupted it
        return config if config.feature_level <= SUPPORTED_LEVEL else None

    def _on_above(
        self, number: int, stored: Stored, *, transitions: Transitions
    ) -> None:
        is_known = level_of(stored.value) < BEYOND
        self._note("known_above_level" if is_known else "above_ignored")
        behind = BEHIND.get(self._effects[number] or "")
        if behind is not None:
            self._note(behind)
        if any(group.pause for group in self._twins[number].groups.values()):
            self._note("above_in_pause")
        if not self._watcher.is_strict:
            return
        reasons = [transition.reason for transition in transitions]
        if len(reasons) != 1 or not IGNORING.issuperset(reasons):
            where = f"{number}/{stored.offset}"
            raise Violation("S6", f"{where} is above the level and did {transitions}")

    def _compare(self, number: int, offset: int) -> None:
        """Demand that the world equals that of the twin, except for counters."""
        world, twin = self._watcher.worlds[number], self._twins[number]
        if world != twin:
            raise Violation("S6", f"{number}/{offset}: {_difference(world, twin)}")
        ours, theirs = world.soft, twin.soft
        if (ours.members, ours.notes) != (theirs.members, theirs.notes):
            raise Violation("S6", f"{number}/{offset} changed who is a member")
        if _counted(world) != _counted(twin):
            raise Violation("S6", f"{number}/{offset} counts as more than ignored")

    # --- readers

    def check_reader(self, owner: Owner, engine: Engine) -> bool:
        """Demand that a reader has not read past a Config that it cannot follow.

        Returns:
            Whether it has halted at one.

        Raises:
            Violation: It read further, halted somewhere else, or has another state.
        """
        has_halted = False
        for number, replica in engine.context.replicas.items():
            world, stop = replica.world, self.stops.get(number)
            is_behind = stop is not None and world.next_offset > stop.offset
            if world.halted is None and not is_behind:
                continue
            has_halted = True
            found = (world.next_offset, world.halted)
            where = f"{owner.client_id} is at {number}/{found}"
            if stop is None:
                raise Violation("S6", f"{where}, and no Config says so")
            level = stop.config.feature_level
            if found != (stop.offset, (stop.offset, level)):
                raise Violation("S6", f"{where}, and has to halt at {stop.offset}")
            if digest(world) != stop.digest:
                raise Violation("S6", f"{where}, with another digest than others")
        if has_halted and engine.failure is None:
            raise Violation("S6", f"{owner.client_id} has halted, but continues")
        if owner.incarnation in self._wrote:
            raise Violation("S6", f"{owner.client_id} wrote behind a halt")
        return has_halted

    def is_torn(self, engine: Engine) -> bool:
        """Return whether a start came while only some partitions had a Config."""
        replicas = engine.context.replicas.values()
        # Added partitions have no Config yet.
        configs = {replica.world.config for replica in replicas} - {None}
        is_ours = configs <= {*self._configs.values()}
        return engine.context.config is None and is_ours and len(configs) > 1

    def started(self, owner: Owner) -> None:
        """Record that a process starts."""
        if self.stops:
            self._beside.add(owner.incarnation)

    def is_beside(self, owner: Owner) -> bool:
        """Return whether a process started behind a Config above its level."""
        return owner.incarnation in self._beside

    def on_append(self, owner: Owner) -> None:
        """Record that a process writes to the log, for ``check_reader``."""
        if self.is_beside(owner):
            self._wrote.add(owner.incarnation)

    def check_use(self, owner: Owner, number: int, *, h_ms: int) -> None:
        """Demand that no process uses a claim that must have run out since a halt.

        A claim that was renewed before the halt is over two intervals later, by any
        clock; no claim was renewed behind it.

        Raises:
            Violation: A process does.
        """
        stop = self.stops.get(number)
        if self.is_beside(owner):
            raise Violation("S6", f"{owner.client_id} works behind a halt")
        if stop is not None and self._now_ms() > stop.at_ms + 2 * h_ms:
            raise Violation(
                "S4", f"{owner.client_id} works behind {stop.offset} with a stale claim"
            )


def _difference(world: WorldState, twin: WorldState) -> str:
    names = [
        field.name
        for field in attrs.fields(WorldState)
        if field.eq and getattr(world, field.name) != getattr(twin, field.name)
    ]
    pairs = [f"{n} {getattr(world, n)}, not {getattr(twin, n)}" for n in names]
    return "; ".join(pairs)


def _counted(world: WorldState) -> tuple[dict[str, int], int]:
    """Return all other counters, and the sum of those for records without effect."""
    counters = world.soft.counters
    rest = {name: n for name, n in counters.items() if name not in UNCHANGED}
    return rest, sum(counters.get(name, 0) for name in UNCHANGED)
