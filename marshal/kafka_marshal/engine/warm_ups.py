"""Warm-ups of the application for keys offered to this process (PROTOCOL 9.5)."""

import attrs

from kafka_marshal.engine.holding import Holding, OfferedKey
from kafka_marshal.engine.interfaces import ClaimContext
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.ports import Pending
from kafka_marshal.protocol.types import Key


@attrs.define(kw_only=True)
class WarmUp:
    """A key that the application warms up for.

    Attributes:
        offered: The key, as its owner offers it.
        sub: The subscription that wants it.
        begun_ms: Local time at which the application was called.
        outcome: Outcome of that call.
        is_ready: Whether that call has returned.
        is_failed: Whether that call has raised an error; the offer ends by itself.
        sent_ms: Local time at which HandoffReady was last sent, None before.
    """

    offered: OfferedKey
    sub: Subscription
    begun_ms: int
    outcome: Pending[None]
    is_ready: bool = False
    is_failed: bool = False
    sent_ms: int | None = None

    def stop_fetching(self) -> None:
        """Drop the records that were fetched of the key."""
        if self.sub.warm_fetcher is not None:
            self.sub.warm_fetcher.end(self.offered.key.topic_partition)


class WarmUps:
    """Has the application warm up, and fetches records of the keys meanwhile.

    Subclasses know which keys are offered, and report keys that are ready. Every method
    is called under the engine's lock.
    """

    __slots__ = ("_context", "_tasks")

    def __init__(self, context: ClaimContext) -> None:
        self._context = context
        self._tasks: dict[Key, WarmUp] = {}

    def finish(self, holding: Holding) -> bool:
        """Forget a key that was claimed; return whether it was ready.

        The holding gets the records that were fetched of it.
        """
        task = self._tasks.pop(holding.key, None)
        if task is None:
            return False
        self._note_expected(task.sub)
        fetcher = task.sub.warm_fetcher
        if fetcher is not None:
            holding.warm_records = fetcher.take(holding.key.topic_partition)
        return task.is_ready

    def _begin(self, offered: OfferedKey, sub: Subscription) -> None:
        """Call the application, unless it does not warm up."""
        outcome = sub.warm_up(offered)
        if outcome is None:
            return
        key = offered.key
        if key in self._tasks:
            self._drop(key)
        self._tasks[key] = WarmUp(
            offered=offered,
            sub=sub,
            begun_ms=self._context.now_ms,
            outcome=outcome,
        )
        fields = {"key": key, "from": offered.owner, "position": offered.position}
        self._context.observe("warming", fields)

    def _fetch(
        self, task: WarmUp, position: int | None, *, topic_id: bytes | None, most: int
    ) -> None:
        """Fetch records from a position on, for at most ``most`` keys at a time."""
        fetcher = task.sub.warm_fetcher
        if fetcher is not None and not task.is_failed:
            fetcher.follow(
                task.offered.key.topic_partition,
                topic_id=topic_id,
                position=position,
                most=most,
                now_ms=self._context.now_ms,
            )

    def _is_ready(self, task: WarmUp) -> bool:
        """Return whether the application is ready; report once how its call ended."""
        if task.is_ready or task.is_failed or not task.outcome.done():
            return task.is_ready
        key, error = task.offered.key, task.outcome.exception()
        if error is not None:
            task.is_failed = True
            task.stop_fetching()
            if not task.sub.is_closing:
                self._context.observe("warm_failed", {"key": key, "error": error})
            return False
        took_ms = self._context.now_ms - task.begun_ms
        self._context.observe("warmed", {"key": key, "warm_ms": took_ms})
        task.is_ready = task.sub.expects_claim = True
        return True

    def _drop(self, key: Key) -> None:
        task = self._tasks.pop(key)
        task.stop_fetching()
        self._note_expected(task.sub)

    def _note_expected(self, sub: Subscription) -> None:
        tasks = self._tasks.values()
        sub.expects_claim = any(task.sub is sub and task.is_ready for task in tasks)
