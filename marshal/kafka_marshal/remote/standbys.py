"""Standbys of a sidecar's client: the application loads state as the sidecar asks."""

from collections.abc import Iterable

import attrs

from kafka_marshal.engine import Subscription
from kafka_marshal.engine.standbys import LOADING_MAX, StandingBy
from kafka_marshal.ports import Pending
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.remote.context import RemoteContext

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
