"""Warm-ups and standbys of a sidecar's client.

The application loads state, as the sidecar asks, before a key comes, or in case its
owner dies.
"""

from collections.abc import Callable, Iterable

import attrs

from kafka_marshal.engine import OfferedKey, Subscription
from kafka_marshal.engine.holding import Holding
from kafka_marshal.engine.standbys import LOADING_MAX
from kafka_marshal.engine.subscription import StandingBy
from kafka_marshal.ports import Pending
from kafka_marshal.protocol.settings import TUNABLES
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.remote.context import RemoteContext

TASKS_MAX = 10_000
# The sidecar knows the group's own setting; so many are offered at a time by default.
FETCHED_MAX = TUNABLES["handoffs_max"].default
STANDBYS_MAX = 100_000


@attrs.define(kw_only=True)
class _Duty:
    """A key that this client stands by for; without an outcome its turn is to come."""

    event: api.Standby
    application: StandingBy
    outcome: Pending[None] | None = None


class RemoteStandbys:
    """Has the application stand by, a few keys at a time.

    Called under the engine's lock. An event that is repeated, as after a reconnect,
    calls the application once.
    """

    def __init__(self, context: RemoteContext) -> None:
        self._context = context
        self._duties: dict[Key, _Duty] = {}
        # Those whose call has not ended, or not begun.
        self._open: dict[Key, _Duty] = {}

    @property
    def keys(self) -> Iterable[Key]:
        """The keys that this client stands by for."""
        return self._duties.keys()

    def on_event(
        self, event: api.Standby, *, key: Key, sub: Subscription | None
    ) -> None:
        """Begin or end standing by for a key."""
        if event.owner is None:
            self._end(key)
            return
        is_known = key in self._duties or len(self._duties) >= STANDBYS_MAX
        if sub is not None and sub.standby is not None and not is_known:
            duty = _Duty(event=event, application=sub.standby)
            self._duties[key] = self._open[key] = duty

    def keep(self, keys: Iterable[Key]) -> None:
        """End all but these: a snapshot names everything."""
        for key in self._duties.keys() - set(keys):
            self._end(key)

    def on_assigned(self, key: Key) -> None:
        """Forget a key that has come."""
        if self._forget(key) is not None:
            fields = {"key": key, "is_owner": True}
            self._context.observe("standby_ended", fields)

    def _forget(self, key: Key) -> _Duty | None:
        self._open.pop(key, None)
        return self._duties.pop(key, None)

    def _end(self, key: Key) -> None:
        duty = self._forget(key)
        if duty is None:
            return
        if duty.outcome is not None:
            duty.application.end(key, has_come=False)
        self._context.observe("standby_ended", {"key": key, "is_owner": False})

    def drive(self) -> None:
        """Begin what has its turn; report what failed."""
        loading = 0
        for key, duty in list(self._open.items()):
            if duty.outcome is None:
                if loading < LOADING_MAX:
                    loading += 1
                    self._begin(key, duty)
            elif duty.outcome.done():
                del self._open[key]
                error = duty.outcome.exception()
                if error is not None:
                    fields = {"key": key, "error": error}
                    self._context.observe("standby_failed", fields)
            else:
                loading += 1
            if loading >= LOADING_MAX:
                break

    def _begin(self, key: Key, duty: _Duty) -> None:
        owner, position = duty.event.owner or "", duty.event.position
        duty.outcome = duty.application.begin(key, owner=owner, position=position)
        fields = {"key": key, "from": owner, "position": position}
        self._context.observe("standby_begun", fields)


@attrs.define(kw_only=True)
class _Task:
    """A key that this client warms up for."""

    epoch: int
    until_ms: int
    begun_ms: int
    outcome: Pending[None]
    offered: OfferedKey
    sub: Subscription
    is_over: bool = False
    is_ready: bool = False

    def stop_fetching(self) -> None:
        if self.sub.warm_fetcher is not None:
            self.sub.warm_fetcher.end(self.offered.key.topic_partition)


class RemoteWarmer:
    """Has the application warm up as the sidecar asks, and reports ready.

    Called under the engine's lock. An event that is repeated, as after a reconnect,
    calls the application once; a client that was ready reports it again.
    """

    def __init__(
        self, context: RemoteContext, *, send_ready: Callable[[Key, int], None]
    ) -> None:
        """Begin without keys.

        Args:
            context: State shared by all parts of this client.
            send_ready: Reports a key and the claim of its owner to the sidecar.
        """
        self._context = context
        self._send_ready = send_ready
        self._tasks: dict[Key, _Task] = {}

    @property
    def warming_count(self) -> int:
        """Number of keys for which the application has not finished yet."""
        return sum(not task.is_over for task in self._tasks.values())

    def on_warm(self, event: api.Warm, *, key: Key, sub: Subscription | None) -> None:
        """Begin to warm up for a key, unless that has begun."""
        task = self._tasks.get(key)
        if task is not None and task.epoch == event.epoch:
            task.until_ms = event.until_ms
            if task.is_ready:
                self._send_ready(key, task.epoch)
            return
        if sub is None or (task is None and len(self._tasks) >= TASKS_MAX):
            return
        offered = OfferedKey(
            key=key,
            epoch=event.epoch,
            owner=event.owner,
            position=event.position,
            until_ms=event.until_ms,
            topic_id=None if event.topic_id is None else bytes.fromhex(event.topic_id),
        )
        outcome = sub.warm_up(offered)
        if outcome is None:
            return
        if task is not None:
            self._drop(key)
        self._tasks[key] = _Task(
            epoch=event.epoch,
            until_ms=event.until_ms,
            begun_ms=self._context.now_ms,
            outcome=outcome,
            offered=offered,
            sub=sub,
        )
        fields = {"key": key, "from": event.owner, "position": event.position}
        self._context.observe("warming", fields)

    def on_assigned(self, holding: Holding) -> None:
        """Forget a key that has come; the holding gets what was fetched of it."""
        task = self._tasks.pop(holding.key, None)
        if task is None:
            return
        self._note_expected(task.sub)
        fetcher = task.sub.warm_fetcher
        if fetcher is not None:
            holding.warm_records = fetcher.take(holding.key.topic_partition)

    def _drop(self, key: Key) -> None:
        task = self._tasks.pop(key)
        task.stop_fetching()
        self._note_expected(task.sub)

    def _note_expected(self, sub: Subscription) -> None:
        tasks = self._tasks.values()
        sub.expects_claim = any(task.sub is sub and task.is_ready for task in tasks)

    def drive(self, now_ms: int) -> None:
        """Report what has warmed up; drop what is not offered any more."""
        for key, task in list(self._tasks.items()):
            if now_ms >= task.until_ms:
                self._drop(key)
                continue
            fetcher = task.sub.warm_fetcher
            if fetcher is not None and (task.is_ready or not task.is_over):
                fetcher.follow(
                    key.topic_partition,
                    topic_id=task.offered.topic_id,
                    position=task.offered.position,
                    most=FETCHED_MAX,
                    now_ms=now_ms,
                )
            if not task.is_over and task.outcome.done():
                task.is_over = True
                self._finish(key, task, now_ms)

    def _finish(self, key: Key, task: _Task, now_ms: int) -> None:
        error = task.outcome.exception()
        if error is not None:
            task.stop_fetching()  # the offer ends by itself
            self._context.observe("warm_failed", {"key": key, "error": error})
            return
        took_ms = now_ms - task.begun_ms
        self._context.observe("warmed", {"key": key, "warm_ms": took_ms})
        task.is_ready = task.sub.expects_claim = True
        self._send_ready(key, task.epoch)
