"""Warm-ups and standbys of a sidecar's client.

If the sidecar asks for it, the application loads state before this client gets a key,
or in case the owner of a key dies. Separate from ``session``, because no claim depends
on it.
"""

from collections.abc import Callable, Collection, Iterable

import attrs

from kafka_marshal.engine import OfferedKey, Subscription
from kafka_marshal.engine.standbys import StandbyDuties
from kafka_marshal.engine.warm_ups import WarmUps
from kafka_marshal.protocol.settings import TUNABLES
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.remote.context import RemoteContext

TASKS_MAX = 10_000
# Default number of keys offered at a time; only the sidecar knows the group's setting.
FETCHED_MAX = TUNABLES["handoffs_max"].default
STANDBYS_MAX = 100_000


class RemoteStandbys(StandbyDuties):
    """Makes the application stand by, a few keys at a time.

    An event that is repeated, for example after a reconnect, does not call the
    application again.
    """

    __slots__ = ("_waiting",)

    def __init__(self, context: RemoteContext) -> None:
        super().__init__(context)
        # Keys for which the application does not stand by yet.
        self._waiting: dict[Key, tuple[api.Standby, Subscription]] = {}

    @property
    def keys(self) -> Collection[Key]:
        """The keys that this client stands by for, or will stand by for."""
        return self._duties.keys() | self._waiting.keys()

    def on_event(
        self, event: api.Standby, *, key: Key, sub: Subscription | None
    ) -> None:
        """Begin or end standing by for a key."""
        if event.owner is None:
            self._forget(key, is_owner=False)
        elif sub is not None and sub.standby is not None:
            is_known = key in self._duties or key in self._waiting
            count = len(self._duties) + len(self._waiting)
            if not is_known and count < STANDBYS_MAX:
                self._waiting[key] = event, sub

    def keep(self, keys: Iterable[Key]) -> None:
        """End all standbys except these, which are those of a snapshot."""
        for key in {*self.keys} - {*keys}:
            self._forget(key, is_owner=False)

    def on_assigned(self, key: Key) -> None:
        """Forget a key that this client holds now."""
        self._forget(key, is_owner=True)

    def _forget(self, key: Key, *, is_owner: bool) -> None:
        self._waiting.pop(key, None)
        self._end(key, is_owner=is_owner)

    def drive(self) -> None:
        """Report failed standbys; begin waiting ones while there is room."""
        self._report()
        while self._waiting and self._has_room:
            key = next(iter(self._waiting))
            event, sub = self._waiting.pop(key)
            self._begin(key, sub, owner=event.owner or "", position=event.position)


class RemoteWarmer(WarmUps):
    """Makes the application warm up when the sidecar asks, and reports the result.

    An event that is repeated, for example after a reconnect, does not call the
    application again; if the application was ready, that is reported again.
    """

    __slots__ = ("_send_ready",)

    def __init__(
        self, context: RemoteContext, *, send_ready: Callable[[Key, int], None]
    ) -> None:
        """Begin without keys.

        Args:
            context: State shared by all parts of this client.
            send_ready: Reports a key and the claim of its owner to the sidecar.
        """
        super().__init__(context)
        self._send_ready = send_ready

    @property
    def warming_count(self) -> int:
        """Number of keys for which the application has not finished yet."""
        tasks = self._tasks.values()
        return sum(not (task.is_ready or task.is_failed) for task in tasks)

    def on_warm(self, event: api.Warm, *, key: Key, sub: Subscription | None) -> None:
        """Begin to warm up for a key, unless that has begun."""
        task = self._tasks.get(key)
        if task is not None and task.offered.epoch == event.epoch:
            task.offered = attrs.evolve(task.offered, until_ms=event.until_ms)
            if task.is_ready:
                self._send_ready(key, event.epoch)
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
        self._begin(offered, sub)

    def drive(self, now_ms: int) -> None:
        """Report keys that have warmed up; drop keys that are not offered any more."""
        for key, task in list(self._tasks.items()):
            offered = task.offered
            if now_ms >= offered.until_ms:
                self._drop(key)
                continue
            self._fetch(
                task, offered.position, topic_id=offered.topic_id, most=FETCHED_MAX
            )
            was_ready = task.is_ready
            if self._is_ready(task) and not was_ready:
                self._send_ready(key, offered.epoch)
