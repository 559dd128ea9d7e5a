"""Opens a client's backend to a sidecar, and checks its options before any claim."""

from functools import partial
from pathlib import Path

import attrs

from kafka_marshal.clock import SystemClock, SystemEntropy
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.kafka_io import ConnectionConfig, choose, open_data_log
from kafka_marshal.ports import Observer
from kafka_marshal.remote import api
from kafka_marshal.remote.backend import ClientIdentity, SidecarBackend, greet
from kafka_marshal.remote.transport import Address, Connection

INSTANCE_BYTES = 16


@attrs.frozen(kw_only=True)
class ConnectOptions:
    """Options of a connection to a sidecar, and what the client expects of it.

    Attributes:
        sidecar: Address of the sidecar.
        token_file: File with its token, for TCP.
        has_servers: Whether the client names brokers; else it uses the sidecar's.
        coordination_topic: Expected name; None accepts any.
        heartbeat_interval_ms: Expected heartbeat interval; None accepts any.
        settings: Connection to the data.
        instance: Id of the process that this one replaces, which is dead; None draws
            a new one.
    """

    sidecar: str
    token_file: str | Path | None
    has_servers: bool
    coordination_topic: str | None
    heartbeat_interval_ms: int | None
    settings: ConnectionConfig
    instance: bytes | None = None


def open_backend(
    options: ConnectOptions,
    *,
    group_id: str,
    client_id: str,
    observer: Observer,
    timeout_ms: int,
) -> SidecarBackend:
    """Register with a sidecar, and start to follow its events.

    Raises:
        ConfigurationError: An address or a token is invalid, or the sidecar is not as
            expected.
        IdentityConflict: Another process of this name is alive.
        CoordinationError: The sidecar cannot be reached, or was not ready in time.
    """
    address = Address.parse(options.sidecar)
    clock, entropy = SystemClock(), SystemEntropy()
    instance = options.instance or entropy.random_bytes(INSTANCE_BYTES)
    identity = ClientIdentity(group_id, client_id, instance)
    connection = Connection.open(
        address,
        token=address.token(options.token_file),
        group_id=group_id,
        client_id=client_id,
        instance=identity.instance.hex(),
    )
    try:
        info = greet(
            connection,
            identity,
            clock=clock,
            check=partial(_require_expected, options),
            timeout_ms=timeout_ms,
        )
        settings = attrs.evolve(
            options.settings,
            coordination_topic=info.coordination_topic,
            bootstrap_servers=options.settings.bootstrap_servers
            if options.has_servers
            else info.bootstrap_servers,
        )
        backend = SidecarBackend(
            connection,
            info=info,
            identity=identity,
            data=open_data_log(settings),
            observer=observer,
            transport=choose(settings).name,
            clock=clock,
            entropy=entropy,
        )
    except BaseException:
        connection.close()
        raise
    backend.start()
    return backend


def _require_expected(options: ConnectOptions, info: api.Info) -> None:
    expected = options.coordination_topic
    if expected is not None and expected != info.coordination_topic:
        raise ConfigurationError(
            f"the sidecar at {options.sidecar} uses coordination topic "
            f"{info.coordination_topic!r}, not {expected!r}; omit coordination_topic, "
            "or use another sidecar",
            setting="coordination_topic",
        )
    h_ms = options.heartbeat_interval_ms
    if h_ms is not None and h_ms != info.heartbeat_interval_ms:
        raise ConfigurationError(
            f"heartbeat_interval_ms is {h_ms} here and {info.heartbeat_interval_ms} in "
            "the log, where it applies to all clients; omit it, or change that "
            "of the log with: marshal topic alter",
            setting="heartbeat_interval_ms",
        )
