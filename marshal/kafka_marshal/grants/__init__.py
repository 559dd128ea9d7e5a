"""At-most-once delivery in processes that do not hold the claim (PROTOCOL 6.2).

The driver of a query holds the claims, and its tasks process. Each attempt of a task
requests its offsets itself: with a ClaimingMessages under the driver's claim, and a
grantee that no other attempt uses. Grants of a key are pairwise disjoint even if
records are late, duplicated or lost. So of all attempts at a range (retried,
speculative, or of an earlier driver) at most one is granted it, and only that one
processes it.

The verdict comes from the fold of the log, in this process or in the sidecar of this
host. It is found by the grantee, because sequence numbers belong to the owner.

A process has one grant client for each connection, created on first use.
"""

import atexit
import os
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from kafka_marshal.errors import MarshalError
from kafka_marshal.kafka_io.settings import ConnectionConfig, fields_of
from kafka_marshal.kafka_io.transport import open_coordination_log
from kafka_marshal.protocol.types import OffsetRange
from kafka_marshal.remote.transport import Address, Connection

from .client import ClaimRef, ClaimState, GrantClient
from .log import LogGrantClient
from .sidecar import NAMELESS, SidecarGrantClient

if TYPE_CHECKING:
    from kafka_marshal.kafka_io.topiclog import TopicLog

__all__ = [
    "ClaimRef",
    "ClaimState",
    "GrantClient",
    "OffsetRange",
    "close_grant_clients",
    "open_grant_client",
]

_lock = threading.Lock()
_clients: dict[object, GrantClient] = {}


def _forget_lock() -> None:
    """Replace the lock in a forked child, which lacks its holder (PROTOCOL 1.7)."""
    global _lock  # noqa: PLW0603 - the one place that may
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def open_grant_client(
    connection: Mapping[str, str], *, sidecar: str | None = None
) -> GrantClient:
    """Return this process's grant client for a connection.

    It connects with the first request.

    Args:
        connection: ``bootstrap_servers``; ``coordination_topic`` and ``transport``
            if not the defaults; ``sidecar_token_file`` for a sidecar over TCP;
            connection options by any of their names.
        sidecar: Address of this host's sidecar, such as ``unix:/run/...``. If it is
            not reached, requests go to the log instead.

    Raises:
        ConfigurationError: An option is missing or invalid, or the extra ``remote``
            is not installed.
    """
    settings = ConnectionConfig(**fields_of(connection))
    name = (os.getpid(), sidecar, *sorted(connection.items()))
    with _lock:
        found = _clients.get(name)
        if found is None:
            found = _create(
                settings, sidecar, token_file=connection.get("sidecar_token_file")
            )
            _clients[name] = found
            if len(_clients) == 1:
                atexit.register(close_grant_clients)
        return found


def close_grant_clients() -> None:
    """Close every grant client of this process; later calls create new ones."""
    with _lock:
        closed = list(_clients.items())
        _clients.clear()
    for name, client in closed:
        if isinstance(name, tuple) and name[0] == os.getpid():
            with suppress(MarshalError):
                client.close()


def _create(
    settings: ConnectionConfig, sidecar: str | None, *, token_file: str | None
) -> GrantClient:
    def open_log(only: Callable[[int], Collection[int]], timeout_ms: int) -> "TopicLog":
        return open_coordination_log(
            settings,
            heartbeat_interval_ms=None,
            timeout_ms=timeout_ms,
            only=only,
            # One request at a time, and a task waits for it.
            lingers=False,
        )

    client = LogGrantClient(open_log)
    if sidecar is None:
        return client
    address = Address.parse(sidecar)
    connection = Connection.open(
        address,
        token=address.token(token_file),
        group_id=NAMELESS,
        client_id=NAMELESS,
        instance=os.urandom(16).hex(),
    )
    return SidecarGrantClient(connection, client)
