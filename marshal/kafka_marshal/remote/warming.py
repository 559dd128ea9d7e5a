"""Warm-ups of a sidecar's client: the application loads state before a key comes."""

from collections.abc import Callable

import attrs

from kafka_marshal.engine import OfferedKey, Subscription
from kafka_marshal.engine.holding import Holding
from kafka_marshal.ports import Pending
from kafka_marshal.protocol.settings import TUNABLES
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.remote.context import RemoteContext

TASKS_MAX = 10_000
# The sidecar knows the group's own setting; so many are offered at a time by default.
FETCHED_MAX = TUNABLES["handoffs_max"].default


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
