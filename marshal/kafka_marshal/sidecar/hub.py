"""The hub: what a sidecar's requests are answered from, the only part they call."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kafka_marshal.remote import api
from kafka_marshal.remote.looking import LocalClient
from kafka_marshal.runtime import Runtime
from kafka_marshal.sidecar.deathwatch import DeathWatch
from kafka_marshal.sidecar.peers import Caller, Peer
from kafka_marshal.sidecar.states import States


class Feed:
    """The events of one client, from where it was. Thread-safe.

    Attributes:
        on_news: Called on any thread, under the engine's lock, when there is
            something to take: it must not block.
    """

    def __init__(self) -> None:
        self.on_news: Callable[[], None] | None = None

    @property
    def is_closed(self) -> bool:
        """Whether it has ended: closed, replaced by a newer one, or its client gone."""
        raise NotImplementedError

    def take(self) -> list[api.Frame]:
        """Return what has come since, oldest first, without waiting."""
        raise NotImplementedError

    def close(self) -> None:
        """End it. Idempotent."""
        raise NotImplementedError


class Hub:
    """Holds the claims of many local clients: one session per group on one engine.

    Thread-safe; calls are short, and each wait has an end.

    Args:
        runtime: The engine with its connections, ready.
        client_id: Name of this sidecar in the log.
        state_dir: Where identities and promises are kept; None keeps none, and a
            restart waits until what it held is stale.
        version: Release, for people.
        states: What the sidecar is doing; read only.
        watch: Tells when a client's process is dead.
        bootstrap_servers: What clients are told to find the cluster by.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        client_id: str,
        state_dir: Path | None,
        version: str,
        states: States,
        watch: DeathWatch,
        bootstrap_servers: Sequence[str] = (),
    ) -> None:
        raise NotImplementedError

    def recover(self, *, timeout_ms: int) -> int:
        """Take up what an earlier life of this sidecar had promised its clients.

        Called once, before clients are let in, in state ``RECOVERY``.

        Returns:
            How many clients are expected back.

        Raises:
            IdentityConflict: Another sidecar of this name runs on this machine.
        """
        raise NotImplementedError

    def info(self) -> api.Info:
        """Return what a client has to know before it registers."""
        raise NotImplementedError

    def register(
        self, group_id: str, client_id: str, said: api.Registration, *, peer: Peer
    ) -> api.Registered:
        """Take a process in, or take it in again.

        Raises:
            ConfigurationError: It means to beat too seldom.
            IdentityConflict: Another process of that name is alive.
            CoordinationError: The sidecar is leaving, or not ready yet.
        """
        raise NotImplementedError

    def subscribe(self, who: Caller, name: str, wants: api.Wants) -> api.Subscribed:
        """Pursue topics for a client. Idempotent.

        Raises:
            ConfigurationError: A setting is impossible, or not that of the other
                clients of these topics.
            ClaimLost: The client is not registered (``unknown``, ``gone``).
        """
        raise NotImplementedError

    def unsubscribe(
        self, who: Caller, name: str, release: api.Release, *, keep: bool
    ) -> None:
        """Pursue them no longer; with ``keep`` the claims stay with the client."""
        raise NotImplementedError

    def claim(self, who: Caller, topic: str, partition: int) -> None:
        """Pursue one partition without consuming it. Idempotent."""
        raise NotImplementedError

    def unclaim(self, who: Caller, topic: str, partition: int) -> None:
        """Pursue it no longer: the client has stopped to use it. Idempotent."""
        raise NotImplementedError

    def beat(self, who: Caller, beat: api.Beat) -> api.Beaten:
        """Take a sign of life with positions; tell the new deadlines.

        Raises:
            ClaimLost: The client is not registered; or a flush names a claim that
                is not its own any more.
            DeadlineExceeded: The log did not show a flush in time.
        """
        raise NotImplementedError

    def release(self, who: Caller, said: api.Release) -> None:
        """Take back what a client has stopped to use. Idempotent.

        Raises:
            DeadlineExceeded: The log did not show it in time.
        """
        raise NotImplementedError

    def children(self, who: Caller, said: api.Children) -> None:
        """Note processes that work for a client, instead of those named before."""
        raise NotImplementedError

    def leave(self, who: Caller, said: api.Leaving) -> api.Left:
        """Let a client go, or have it wait until all of its work was handed over."""
        raise NotImplementedError

    def feed(self, who: Caller, after: str | None) -> Feed:
        """Return the events of a client, from behind the id ``after``.

        An older feed of the same client ends.
        """
        raise NotImplementedError

    def grant(self, group_id: str, ask: api.GrantAsk) -> api.Granted:
        """Ask the log for offsets at most once, and wait for the fold's verdict.

        Raises:
            DeadlineExceeded: There was none in time; it may come later.
        """
        raise NotImplementedError

    def world(self, *, timeout_ms: int) -> dict[str, Any]:
        """Return the world document, never older than this call (PROTOCOL 3.8)."""
        raise NotImplementedError

    def clients(self) -> list[LocalClient]:
        """Return who is registered here, by group and name."""
        raise NotImplementedError

    def start_drain(self) -> None:
        """Ask every client to give back what it has; take nothing new. Idempotent."""
        raise NotImplementedError

    @property
    def is_drained(self) -> bool:
        """Whether nothing is in use any more, and the log shows it."""
        raise NotImplementedError

    def close(self, *, timeout_ms: int) -> None:
        """Release what nobody uses and leave every group. Idempotent.

        What is still in use then is not released: it runs out by itself, or a
        restart takes it up.
        """
        raise NotImplementedError
