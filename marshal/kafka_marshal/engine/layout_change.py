"""Takes part in a change of the partition count, also if its admin died (PROTOCOL 10).

Any member may write the next records: the fence in a partition that lacks it, imports
of final keys, the Dones and Finals that end imports and the change; also a Config that
a partition lacks. An owner at once imports the keys that it has released; a member
imports the free keys that it wants after some milliseconds. Other records are delayed
further, since another process will probably write them first. A record that is written
twice does no harm: each is judged.
"""

from collections.abc import Callable, Collection, Sequence
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING

import attrs

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP
from kafka_marshal.protocol.layout_reading import Change, Moving, Reading, read
from kafka_marshal.protocol.layout_steps import (
    Fields,
    Import,
    Steps,
    done_of,
    fence_of,
    final_of,
    grouped,
    groups_import_of,
    import_of,
    next_steps,
)
from kafka_marshal.protocol.lost_changes import lost_configs
from kafka_marshal.protocol.records import Config, Record
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key

from .context import Context
from .session import Session

if TYPE_CHECKING:
    from kafka_marshal.ports import Pending

SOON_MS_MAX = 50
"""How long a member waits at most before it imports a free key that it wants."""
SOON_PART = 10  # at most this part of an interval
PATIENT_FACTOR = 10  # times longer, for steps that a live admin writes itself
REST_PART = 4  # at least this part of an interval, for steps not needed here
READ_ADDED_MS_MAX = 10_000
RETRY_MS = 500
COST_FACTOR = 4  # steps are computed in a fifth of the time at most

_StepId = tuple[str, int, int]
"""Kind of a step, the partition that it is written to, and its source or -1."""
_Make = Callable[..., Record]


class _Need(IntEnum):
    """How much this process needs a step."""

    AT_ONCE = 0
    SOON = 1
    LATER = 2
    REST = 3


@attrs.frozen
class _Task:
    """A step that this process writes unless another one does.

    Attributes:
        need: How much this process needs the step.
        due_ms: Local time at which it is written.
        makes: Functions that make its records for a sender.
    """

    need: _Need
    due_ms: int
    makes: Sequence[_Make]


class LayoutChange:
    """Writes the next records of an open change. Called under the engine's lock."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._moving = Moving()
        self._tasks: dict[_StepId, _Task] = {}
        # Keys that this process has released and not seen imported.
        self._released: set[Key] = set()
        # Local time at which this process wrote an import of each key.
        self._imported_ms: dict[Key, int] = {}
        self._seen: tuple[int, ...] = ()
        self._look_at_ms = 0
        self._torn: bytes | None = None
        self._incarnation = b""
        self._seq = 0

    def on_released(self, key: Key) -> None:
        """Note that a key of this process was released, as its partition shows."""
        if self._context.has_layout:
            self._released.add(key)

    def next_due_ms(self) -> int | None:
        """Return when the next step is due, None without one."""
        return min((task.due_ms for task in self._tasks.values()), default=None)

    def drive(self, now_ms: int, *, sessions: Collection[Session]) -> None:
        """Write the steps that are due.

        Args:
            now_ms: Local time.
            sessions: The sessions of the engine; if all have failed, writes nothing.
        """
        placement = self._context.placement
        if not placement.has_layouts:
            if self._seen:
                self._forget()
            return
        alive = [each for each in sessions if each.failure is None]
        if not alive:
            return
        client_id = min(each.claimant.owner.client_id for each in alive)
        if self._is_due(now_ms):
            self._look(alive, now_ms)
            now_ms, began_ms = self._context.now_ms, now_ms
            self._look_at_ms = now_ms + COST_FACTOR * (now_ms - began_ms)
        self._write_due(now_ms, client_id)

    def _forget(self) -> None:
        """Forget a change that has ended everywhere."""
        self._moving = Moving()
        self._tasks.clear()
        self._released.clear()
        self._imported_ms.clear()
        self._seen = ()
        self._context.placement.is_torn = False

    def _is_due(self, now_ms: int) -> bool:
        """Return whether to look for steps: a log has grown, or time has passed."""
        replicas = self._context.replicas
        phase = now_ms // max(1, self._soon_ms)
        seen = (phase, *(each.world.next_offset for each in replicas.values()))
        if now_ms < self._look_at_ms or seen == self._seen:
            return False
        self._seen = seen
        return True

    def _look(self, sessions: Sequence[Session], now_ms: int) -> None:
        """Find the next steps, and decide when this process writes each."""
        replicas, rebuilding = self._context.replicas, self._context.rebuilding
        reading = read(
            {
                t: each.world
                for t, each in replicas.items()
                # Other partitions are still being read to their ends.
                if t not in rebuilding or not each.is_known
            },
            unread=rebuilding,
            elapsed_ms={t: each.elapsed_ms(now_ms) for t, each in replicas.items()},
            moving=self._moving,
        )
        found: dict[_StepId, tuple[_Need, list[_Make]]] = {}
        if reading is not None:
            found = self._steps(reading, sessions, now_ms)
        known = {t: each.world for t, each in replicas.items() if t not in rebuilding}
        for t, config in lost_configs(known, self._context.placement.read).items():
            found["config", t, -1] = _Need.LATER, [partial(_config_of, config)]
        self._tasks = {
            step_id: self._task(step_id, need, makes, now_ms=now_ms)
            for step_id, (need, makes) in found.items()
        }

    def _steps(
        self, reading: Reading, sessions: Sequence[Session], now_ms: int
    ) -> dict[_StepId, tuple[_Need, list[_Make]]]:
        """Return the next steps of a change, and how much this process needs each."""
        awaits_import = self._context.placement.awaits_import
        self._released = {key for key in self._released if awaits_import(key)}
        steps = next_steps(reading, wanted=self._released)
        self._note_torn(steps)
        change = steps.change
        found: dict[_StepId, tuple[_Need, list[_Make]]] = {}
        for t in steps.fences:
            found["fence", t, -1] = _Need.LATER, [partial(fence_of, change)]
        for t, lost in steps.earlier:
            found["earlier", t, -1] = _Need.LATER, [partial(fence_of, lost)]
        for t in steps.repeat_fences:
            found["nudge", t, -1] = _Need.LATER, [partial(fence_of, change)]
        for group in steps.groups:
            step_id = ("groups", group.target, group.source)
            _, makes = found.setdefault(step_id, (_Need.LATER, []))
            makes.append(partial(groups_import_of, change, group))
        for done in steps.dones:
            step_id = ("done", done.target, done.source)
            found[step_id] = _Need.LATER, [partial(done_of, change, done)]
        for final in steps.finals:
            step_id = ("final", final.partition, -1)
            found[step_id] = _Need.REST, [partial(final_of, final)]
        for (target, source), keys in self._fresh(steps.imports, now_ms).items():
            state = reading.known[source]
            need = min(self._need(key, state, sessions) for key in keys)
            found["import", target, source] = (
                need,
                [
                    partial(self._import, change, each)
                    for each in grouped(state, keys, target=target)
                ],
            )
        return found

    def _task(
        self, step_id: _StepId, need: _Need, makes: Sequence[_Make], *, now_ms: int
    ) -> _Task:
        """Return the task of a step; its time is drawn when the step is first found."""
        before = self._tasks.get(step_id)
        if before is not None and before.need <= need:
            return attrs.evolve(before, makes=makes)
        return _Task(need, now_ms + self._delay_ms(need), makes)

    def _delay_ms(self, need: _Need) -> int:
        interval_ms = self._context.heartbeat_interval_ms
        below, soon_ms = self._context.ports.entropy.below, self._soon_ms
        if need is _Need.AT_ONCE:
            return 0
        if need is _Need.SOON:
            return below(soon_ms + 1)
        if need is _Need.LATER:
            return soon_ms + below(PATIENT_FACTOR * soon_ms + 1)
        least_ms = interval_ms // REST_PART
        return least_ms + below(interval_ms - least_ms)

    @property
    def _soon_ms(self) -> int:
        interval_ms = self._context.heartbeat_interval_ms
        return max(1, min(interval_ms // SOON_PART, SOON_MS_MAX))

    def _fresh(
        self, imports: Sequence[Import], now_ms: int
    ) -> dict[tuple[int, int], list[Key]]:
        """Return the keys to import by target and source, without imports in flight.

        An append ends within half an interval.
        """
        since_ms = now_ms - self._context.heartbeat_interval_ms // 2
        found: dict[tuple[int, int], list[Key]] = {}
        for each in imports:
            for key in each.keys:
                if self._imported_ms.get(key, since_ms) <= since_ms:
                    found.setdefault((each.target, each.source), []).append(key)
        return found

    def _need(self, key: Key, state: WorldState, sessions: Sequence[Session]) -> _Need:
        """Return how much this process needs the import of a final key."""
        if key in self._released:
            return _Need.AT_ONCE
        mine = [each for each in sessions if each.claimant.group_id == key.group_id]
        handoff = state.keys[key].handoff
        if handoff is not None and state.now_ms < handoff[1]:
            # Its last owner imports it.
            names = {each.claimant.owner.client_id for each in mine}
            return _Need.SOON if handoff[0] in names else _Need.REST
        is_wanted = any(each.is_wanted(key) for each in mine)
        return _Need.SOON if is_wanted else _Need.REST

    def _import(self, change: Change, step: Import, *, sender: Fields) -> Record:
        self._imported_ms.update(dict.fromkeys(step.keys, self._context.now_ms))
        return import_of(change, step, sender=sender)

    def _note_torn(self, steps: Steps) -> None:
        placement, op_id = self._context.placement, steps.change.op_id
        placement.is_torn = steps.is_torn
        if steps.is_torn and self._torn != op_id:
            self._torn = op_id
            fields = {"op_id": op_id.hex(), "generation": steps.change.generation}
            self._context.observe("layout_torn", fields)

    def _write_due(self, now_ms: int, client_id: str) -> None:
        again_ms = now_ms + max(1, self._context.heartbeat_interval_ms // 2)
        for step_id, task in self._tasks.items():
            if now_ms < task.due_ms or not self._context.is_written_to(step_id[1]):
                continue
            self._tasks[step_id] = attrs.evolve(task, due_ms=again_ms)
            for make in task.makes:
                record = make(sender=self._sender(client_id))
                self._context.ports.log.append(step_id[1], encode(record))

    def _sender(self, client_id: str) -> Fields:
        if not self._incarnation:
            self._incarnation = self._context.ports.entropy.random_bytes(16)
        self._seq += 1
        return {
            "client_id": client_id,
            "group_id": CHECKPOINT_GROUP,
            "incarnation": self._incarnation,
            "seq": self._seq,
        }


def _config_of(config: Config, *, sender: Fields) -> Config:
    del sender  # a Config has none
    return config


class AddedPartitions:
    """Makes the log client read partitions that have replicas and that it lacks.

    The look-up runs in the background; methods are called under the engine's lock.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._call: Pending[None] | None = None
        self._due_ms = 0

    def drive(self, now_ms: int) -> None:
        """Begin a look-up when needed; repeat it if it failed."""
        call, log = self._call, self._context.ports.log
        if call is not None:
            if not call.done():
                return
            self._call = None
            error = call.exception(0)
            if error is not None:
                self._context.observe("log_poll_failed", {"error": error})
                self._due_ms = now_ms + RETRY_MS
        count = len(self._context.replicas)
        if log.partition_count >= count or now_ms < self._due_ms:
            return
        # The next poll begins to read them.
        self._due_ms = now_ms + RETRY_MS
        self._call = self._context.ports.background.submit(
            partial(log.read_added, count, timeout_ms=READ_ADDED_MS_MAX)
        )
