"""Saves the states of coordinating partitions for later starts, in the background.

Under the engine's lock states are only copied, one partition at a time, because the
fold changes them in place. Another thread encodes and writes them (PROTOCOL 7.1).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kafka_marshal.gc_pause import uncollected
from kafka_marshal.protocol.snapshot import freeze
from kafka_marshal.protocol.state import WorldState

from .context import Context
from .kept_states import KeptState, KeptStates, freeze_soft
from .pause_notes import PauseName, PauseNote
from .replica import Replica

if TYPE_CHECKING:
    from kafka_marshal.ports import Pending

# A state is saved after ENTRIES_MAX new entries, or ENTRIES_MIN after PERIOD_MS.
ENTRIES_MAX = 100_000
ENTRIES_MIN = 2_000
PERIOD_MS = 300_000
CHECK_MS = 1_000


class StateStore(KeptStates, Protocol):
    """A persistent store of kept states."""

    def save(self, state: KeptState) -> None:
        """Save a state, unless a newer one of its partition is saved.

        Thread-safe, blocking.

        Raises:
            OSError: Saving failed; the previous state is unchanged.
        """
        ...


def capture(
    world: WorldState,
    *,
    source: str,
    notes: Mapping[PauseName, PauseNote] | None = None,
) -> KeptState:
    """Return a state to save; it must have folded at least one entry.

    Args:
        world: The state.
        source: Description of its source, for people.
        notes: Notes about its pauses.
    """
    return capture_lazily(world, source=source, notes=notes)()


def capture_lazily(
    world: WorldState,
    *,
    source: str,
    notes: Mapping[PauseName, PauseNote] | None = None,
) -> Callable[[], KeptState]:
    """Copy a state; return a function that encodes it, on any thread."""
    partition, offset, epoch = world.partition, world.next_offset, world.leader_epoch
    assert epoch is not None
    with uncollected():
        hard, soft = freeze(world), freeze_soft(world.soft, notes)

    def encoded() -> KeptState:
        value = b"".join(hard.pieces())
        checksum = hard.digest()
        return KeptState(
            partition=partition,
            offset=offset,
            leader_epoch=epoch,
            digest=checksum,
            state=value,
            source=source,
            soft=soft(),
        )

    return encoded


def _captured(replica: Replica) -> Callable[[], KeptState]:
    notes = replica.notes.of(replica.world)
    return capture_lazily(replica.world, source="this process", notes=notes)


def _is_worth(world: WorldState, count: int) -> bool:
    """Return whether to save a state with ``count`` new entries.

    Many entries save time at the next start. At-most-once grants are saved however
    few the entries are: after a truncation they show what was lost (PROTOCOL 7.5).
    """
    if count >= ENTRIES_MIN or not count:
        return count > 0
    return any(known.granted is not None for known in world.keys.values())


def _keep(store: StateStore, make: Callable[[], KeptState]) -> None:
    store.save(make())


class Snapshotter:
    """Saves the states of one engine. Called under its lock."""

    def __init__(self, context: Context, store: StateStore | None) -> None:
        self._context = context
        self._store = store
        self._kept: dict[int, tuple[int, int]] = {}
        self._check_at_ms = 0
        self._saving: Pending[None] | None = None
        self._has_failed = False

    def record(self, partition: int, offset: int) -> None:
        """Record that a partition was saved, or started, at an offset."""
        self._kept[partition] = (offset, self._context.now_ms)

    def drive(self, now_ms: int) -> None:
        """Save a partition in the background, if one is due."""
        store = self._store
        if store is None or now_ms < self._check_at_ms:
            return
        self._check_at_ms = now_ms + CHECK_MS
        if self._saving is not None:
            if not self._saving.done():
                return
            self._report_failure(self._saving.exception())
            self._saving = None
        for t, replica in self._context.replicas.items():
            offset, kept_ms = self._kept.get(t, (0, 0))
            count = replica.world.next_offset - offset
            is_old = now_ms - kept_ms >= PERIOD_MS
            is_due = is_old and _is_worth(replica.world, count)
            if count >= ENTRIES_MAX or is_due:
                if self._may_keep(replica.world):
                    self._save(store, replica)
                    return
            elif is_old:
                self.record(t, offset)  # check again after another period

    def save_all(self) -> None:
        """Save all states that are worth it now, on this thread."""
        if self._store is None:
            return
        for t, replica in self._context.replicas.items():
            offset = self._kept.get(t, (0, 0))[0]
            if not _is_worth(replica.world, replica.world.next_offset - offset):
                continue
            if self._may_keep(replica.world):
                try:
                    self._store.save(_captured(replica)())
                except OSError as error:
                    self._report_failure(error)
                    return

    def _may_keep(self, world: WorldState) -> bool:
        context = self._context
        if world.partition in context.unreported:
            return False  # it would replace the evidence of lost grants
        is_whole = world.partition not in context.rebuilding
        return is_whole and world.halted is None and world.leader_epoch is not None

    def _save(self, store: StateStore, replica: Replica) -> None:
        self.record(replica.world.partition, replica.world.next_offset)
        call = partial(_keep, store, _captured(replica))
        self._saving = self._context.ports.background.submit(call)

    def _report_failure(self, error: BaseException | None) -> None:
        if error is not None and not self._has_failed:
            self._has_failed = True
            self._context.observe("snapshot_failed", {"error": error})
