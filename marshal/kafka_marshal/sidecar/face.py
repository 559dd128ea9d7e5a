"""What the daemon's outside needs of its inside, as Protocols.

The hub satisfies these, and so does the fake of the tests; nothing else of it may
be called from a request.
"""

from collections.abc import Callable
from typing import Any, Protocol

from kafka_marshal.remote import api
from kafka_marshal.remote.looking import LocalClient
from kafka_marshal.sidecar.health import Verdict
from kafka_marshal.sidecar.peers import Caller, Peer


class FeedFace(Protocol):
    """The events of one client, as they come.

    Attributes:
        on_news: Called on any thread when there is something to take.
    """

    on_news: Callable[[], None] | None

    @property
    def is_closed(self) -> bool:
        """Whether it has ended: closed, replaced by a newer one, its client gone."""
        ...

    def take(self) -> list[api.Frame]:
        """Return what has come since, oldest first, without waiting."""
        ...

    def close(self) -> None:
        """End it. Idempotent."""
        ...


class HubFace(Protocol):
    """What requests are answered from. Thread-safe; each wait has an end."""

    def info(self) -> api.Info:
        """Return what a client has to know before it registers."""
        ...

    def register(
        self, group_id: str, client_id: str, *, said: api.Registration, peer: Peer
    ) -> api.Registered:
        """Take a process in, or take it in again."""
        ...

    def subscribe(self, who: Caller, name: str, *, wants: api.Wants) -> api.Subscribed:
        """Pursue topics for a client. Idempotent."""
        ...

    def unsubscribe(
        self, who: Caller, name: str, *, release: api.Release, keep: bool
    ) -> None:
        """Pursue them no longer."""
        ...

    def claim(
        self, who: Caller, topic: str, *, partition: int, wish: int | None = None
    ) -> None:
        """Pursue one partition without consuming it. Idempotent."""
        ...

    def unclaim(
        self, who: Caller, topic: str, *, partition: int, wish: int | None = None
    ) -> None:
        """Pursue it no longer."""
        ...

    def beat(self, who: Caller, beat: api.Beat) -> api.Beaten:
        """Take a sign of life."""
        ...

    def release(self, who: Caller, said: api.Release) -> None:
        """Take back what a client has stopped to use."""
        ...

    def children(self, who: Caller, said: api.Children) -> None:
        """Note processes that work for a client."""
        ...

    def leave(self, who: Caller, said: api.Leaving) -> api.Left:
        """Let a client go."""
        ...

    def feed(self, who: Caller, after: str | None) -> FeedFace:
        """Return the events of a client, from where it was."""
        ...

    def grant(self, group_id: str, ask: api.GrantAsk) -> api.Granted:
        """Ask the log for offsets at most once."""
        ...

    def world(self, *, timeout_ms: int) -> dict[str, Any]:
        """Return the world document as of now."""
        ...

    def clients(self) -> list[LocalClient]:
        """Return who is registered here."""
        ...


class HealthFace(Protocol):
    """Whether the daemon is well: a verdict for each question of a probe."""

    def live(self) -> Verdict:
        """Return whether it should go on running."""
        ...

    def ready(self) -> Verdict:
        """Return whether clients should use it."""
        ...

    def started(self) -> Verdict:
        """Return whether it has come up."""
        ...
