"""Actions on groups for clients of a sidecar, the same as those of ``marshal groups``.

They use an ``Admin`` with connections of its own, never the sidecar's engine. One at a
time runs, on a thread of its own, to its end: neither a client that disconnects nor a
response that times out stops it. If the process ends first, members finish the
operation (PROTOCOL 8.5).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kafka_marshal.admin.client import Admin
from kafka_marshal.admin.finishing import ResetResult
from kafka_marshal.admin.group_reset import (
    PLANS_FOLDER,
    RULES,
    PartitionReset,
    PositionSpec,
    ResetPlan,
    stored_plan,
)
from kafka_marshal.closing import begin
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    MarshalError,
)
from kafka_marshal.history.reading import GroupHistory
from kafka_marshal.history.wording import action_to_object
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.observability.logs import LOGGER_NAME
from kafka_marshal.protocol.types import Key, TopicPartition
from kafka_marshal.remote import api
from kafka_marshal.remote.answers import (
    AsOf,
    FinishedReset,
    FinishNow,
    HistoryNow,
    PauseNow,
    ResetNow,
    ResetRow,
    ResumeNow,
)
from kafka_marshal.sidecar.http_errors import SHUTTING_DOWN, http_error, unavailable

if TYPE_CHECKING:
    from concurrent.futures import Future

TIMEOUT_MS = 30_000
LIMIT_DEFAULT = 100
_log = logging.getLogger(LOGGER_NAME)
T = TypeVar("T")


# --- one at a time


class ActionRunner:
    """Runs one action at a time, each on a daemon thread. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: str | None = None
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """Whether an action runs."""
        return self._current is not None

    def start(self, name: str, action: Callable[[], T]) -> "Future[T]":
        """Start an action; its future cannot be cancelled.

        Raises:
            HttpError: Another action runs, or the sidecar is shutting down.
        """
        with self._lock:
            if self._is_closed:
                raise unavailable(SHUTTING_DOWN)
            if self._current is not None:
                raise http_error(
                    409,
                    f"busy, try again: this sidecar runs one action on groups at a "
                    f"time, and {self._current} has not ended",
                    error=CoordinationError,
                )
            self._current = name
        try:
            return begin(partial(self._run, action), name="sidecar-admin")
        except RuntimeError as error:
            self._current = None
            raise unavailable(f"no thread can be started ({error}); retry") from error

    def _run(self, action: Callable[[], T]) -> T:
        try:
            return action()
        finally:
            self._current = None

    def close(self) -> None:
        """Start no further action; a running one continues."""
        with self._lock:
            self._is_closed = True


# --- the actions


class GroupActions:
    """The actions behind the API's endpoints of groups. For one thread at a time.

    Args:
        connection: The cluster, and how to connect to it.
        client_id: Name of the admin in the log.
        state_dir: Directory with the snapshots of the log. A plan is stored below it
            before the plan's first record. With None no plan is stored, and an
            interrupted operation can only be finished, not continued.
        admin: Makes an ``Admin``.
        history: Reads the history of a group, as ``GroupHistory.open`` does.

    Attributes:
        plans: Directory of the plans of operations that may be open, None for none.
        runner: Runs the actions.
    """

    def __init__(
        self,
        connection: ConnectionConfig,
        *,
        client_id: str,
        state_dir: Path | None,
        admin: Callable[..., Admin] = Admin,
        history: Callable[..., GroupHistory] = GroupHistory.open,
    ) -> None:
        self._connection = connection
        self._client_id = client_id
        self._state_dir = "" if state_dir is None else state_dir
        self.plans = None if state_dir is None else state_dir / PLANS_FOLDER
        self._open_admin = admin
        self._open_history = history
        self.runner = ActionRunner()

    def pause(
        self, group: str, request: api.PauseRequest, *, timeout_ms: int | None
    ) -> PauseNow:
        """Pause a group; see ``Admin.pause_group``.

        Raises:
            DeadlineExceeded: The group is paused, but not all its claims are released.
        """
        wait_ms = 0
        if request.wait and not request.dry_run:
            length_ms = request.for_ms or (request.until_ms or 0) - _wall_ms()
            longest_ms = api.WAIT_MS_MAX if timeout_ms is None else timeout_ms
            wait_ms = max(1, min(length_ms, longest_ms))
        with self._admin(request.person, timeout_ms) as admin:
            result = admin.pause_group(
                group,
                for_ms=request.for_ms,
                until_ms=request.until_ms,
                begin_ms=request.begin_ms,
                topics=request.topics,
                reason=request.reason,
                wait_ms=wait_ms,
                dry_run=request.dry_run,
            )
        held = _texts(result.held)
        if wait_ms and held:
            raise DeadlineExceeded(
                f"group {group!r} is paused ({result.op_id}), but {', '.join(held)} "
                f"was not released within {wait_ms} ms"
            )
        return PauseNow(
            group=group,
            is_executed=not request.dry_run,
            op_id=result.op_id,
            begin_ms=result.begin_ms,
            until_ms=result.until_ms,
            held=held,
            topics=result.topics,
        )

    def resume(
        self, group: str, request: api.ResumeRequest, *, timeout_ms: int | None
    ) -> ResumeNow:
        """End a group's pause; see ``Admin.resume_group``."""
        with self._admin(request.person, timeout_ms) as admin:
            count = admin.resume_group(
                group,
                operation=request.operation,
                reason=request.reason,
                dry_run=request.dry_run,
            )
        return ResumeNow(
            group=group, is_executed=not request.dry_run, partitions_count=count
        )

    def reset(
        self, group: str, request: api.ResetRequest, *, timeout_ms: int | None
    ) -> ResetNow:
        """Plan new positions of a group, or set them; see ``Admin.plan_reset``."""
        spec, topics = spec_of(request), topics_of(request)
        with self._admin(request.person, timeout_ms) as admin:
            plan = admin.plan_reset(
                group,
                spec,
                topics=topics,
                clamp=request.clamp,
                allow_reprocess=request.allow_reprocess,
            )
            return self._executed(admin, plan, request, timeout_ms=timeout_ms)

    def undo(
        self, group: str, request: api.UndoRequest, *, timeout_ms: int | None
    ) -> ResetNow:
        """Plan the undo of a reset, or execute it; see ``Admin.plan_undo``.

        Raises:
            ConfigurationError: The reset is of another group.
        """
        with self._admin(request.person, timeout_ms) as admin:
            plan = admin.plan_undo(
                request.op_id,
                partial=request.partial,
                allow_reprocess=request.allow_reprocess,
            )
            if plan.group_id != group:
                raise ConfigurationError(
                    f"operation {request.op_id} is of group {plan.group_id!r}, and not "
                    f"of {group!r}",
                    setting="op_id",
                )
            return self._executed(admin, plan, request, timeout_ms=timeout_ms)

    def finish(
        self, group: str, request: api.FinishRequest, *, timeout_ms: int | None
    ) -> FinishNow:
        """End the open resets of a group; see ``Admin.finish``."""
        with self._admin(request.person, timeout_ms) as admin:
            results = admin.finish(group, reason=request.reason)
        return FinishNow(
            group=group,
            operations=tuple(
                FinishedReset(
                    op_id=each.op_id,
                    outcome=each.outcome,
                    moved_count=len(each.moved),
                )
                for each in results
            ),
        )

    def history(
        self, group: str, *, limit: int = LIMIT_DEFAULT, timeout_ms: int | None
    ) -> HistoryNow:
        """Return the last ``limit`` actions of admins on a group; 0 for all.

        Raises:
            ClaimRejected: The log does not know the group.
        """
        found = self._open_history(
            **self._connection.arguments,
            group_id=group,
            timeout_ms=TIMEOUT_MS if timeout_ms is None else timeout_ms,
        )
        worlds = found.world.partitions
        is_known = any(group in state.groups for state in worlds)
        if not is_known and not any(each.group_id == group for each in found.actions):
            raise ClaimRejected(
                f"group {group!r} is not in the log; see: GET /v1/groups",
                reason="unknown_group",
            )
        shown = found.actions[-limit:] if limit else found.actions
        return HistoryNow(
            as_of=AsOf(
                time_ms=found.world.read_at_ms,
                offsets={str(each.partition): each.next_offset for each in worlds},
            ),
            group=group,
            actions_count=len(found.actions) + found.dropped_count,
            records_count=found.records_count,
            began_at={str(n): offset for n, offset in found.began_at.items()},
            actions=tuple(map(action_to_object, shown)),
        )

    # --- internals

    @contextmanager
    def _admin(self, person: str, timeout_ms: int | None) -> Iterator[Admin]:
        with self._open_admin(
            **self._connection.arguments,
            client_id=self._client_id,
            person=person,
            state_dir=self._state_dir,
            timeout_ms=TIMEOUT_MS if timeout_ms is None else timeout_ms,
        ) as admin:
            yield admin

    def _executed(
        self,
        admin: Admin,
        plan: ResetPlan,
        request: api.ResetRequest | api.UndoRequest,
        *,
        timeout_ms: int | None,
    ) -> ResetNow:
        """Execute a plan if the request demands it; return the answer."""
        if not request.execute:
            return _answer(plan, None)
        _log.info("executing operation %s on group %s", plan.op_id, plan.group_id)
        with self._stored(plan) as file:
            # Without a timeout in the request, the admin waits two heartbeat intervals
            # and a step, after which every owner is stale.
            result = admin.execute(
                plan, plan_file=file, reason=request.reason, drain_ms=timeout_ms
            )
        result.require_committed()
        return _answer(plan, result)

    def _stored(self, plan: ResetPlan) -> AbstractContextManager[Path | None]:
        """Yield the file for a plan, which stays if the operation may be open."""
        if self.plans is None:
            return nullcontext()

        def on_open(error: BaseException, command: str) -> None:
            if isinstance(error, MarshalError):
                _log.warning(
                    "operation %s may be open: %s; continue it with: %s",
                    *(plan.op_id, error, command),
                )

        return stored_plan(plan, self.plans / f"{plan.op_id}.json", on_open=on_open)


def spec_of(request: api.ResetRequest) -> PositionSpec:
    """Return the rule for new positions that a request names.

    Raises:
        ConfigurationError: It names none, or several, or an invalid one.
    """
    given = {name: getattr(request, name) for name in RULES}
    chosen = [
        name
        for name, value in given.items()
        if value is not None and value is not False and value != ()
    ]
    if len(chosen) != 1:
        raise ConfigurationError(
            f"{', '.join(chosen) or 'nothing'} is given; give one of "
            f"{', '.join(RULES)}",
            setting="positions",
        )
    name = chosen[0]
    if name == "offsets":
        return PositionSpec.from_offsets(_offsets(request.offsets))
    if name in {"to_datetime", "by_duration"}:
        return PositionSpec.of(name, _time_ms(request))
    return PositionSpec.of(name, given[name])


def topics_of(request: api.ResetRequest) -> Sequence[str] | None:
    """Return the topics of a request, None for all of the group.

    Raises:
        ConfigurationError: The request has neither topics nor ``all_topics``, or both.
    """
    if request.offsets:
        if request.topics or request.all_topics:
            raise ConfigurationError(
                "offsets name their partitions; leave out topics and all_topics",
                setting="topics",
            )
        return None
    if bool(request.topics) == request.all_topics:
        raise ConfigurationError(
            "give topics, or all_topics for every topic of the group", setting="topics"
        )
    return request.topics or None


def _time_ms(request: api.ResetRequest) -> int:
    if request.by_duration is not None:
        if request.by_duration < timedelta():
            raise ConfigurationError(
                "by_duration is how long ago, and not below 0", setting="by_duration"
            )
        return max(0, _wall_ms() - int(request.by_duration.total_seconds() * 1000))
    moment = request.to_datetime
    assert moment is not None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0, int(moment.timestamp() * 1000))


def _offsets(given: Iterable[api.PartitionOffset]) -> dict[TopicPartition, int]:
    found: dict[TopicPartition, int] = {}
    for each in given:
        place = TopicPartition(each.topic, each.partition)
        if place in found:
            raise ConfigurationError(
                f"offsets name {place} more than once", setting="offsets"
            )
        found[place] = each.offset
    return found


def _answer(plan: ResetPlan, result: ResetResult | None) -> ResetNow:
    return ResetNow(
        group=plan.group_id,
        op_id=plan.op_id,
        undoes=plan.positions.undoes,
        is_executed=result is not None,
        outcome=None if result is None else result.outcome,
        undo_id=None if result is None else result.op_id,
        mirror_error=None if result is None else result.mirror_error,
        left_out=tuple(f"{topic}-{n}" for topic, n in plan.positions.left_out),
        rows=tuple(map(_row, plan.executed(result))),
    )


def _row(row: PartitionReset) -> ResetRow:
    return ResetRow(
        topic=row.partition.topic,
        partition=row.partition.partition,
        before=row.before,
        after=row.after,
        lag_before=row.lag_before,
        lag_after=row.lag_after,
        repeats=row.repeats,
        note=row.note,
    )


def _texts(keys: Iterable[Key]) -> tuple[str, ...]:
    return tuple(str(key.topic_partition) for key in keys)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
