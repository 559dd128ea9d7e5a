"""The settings of a sidecar: their valid values and defaults."""

import grp
import ipaddress
import os
import re
import resource
import secrets
import socket
import stat
from pathlib import Path
from typing import Literal

import attrs

from kafka_marshal.arguments import require_name
from kafka_marshal.config import Membership, checked_labels
from kafka_marshal.defaults import CHECKPOINT_INTERVAL_MS
from kafka_marshal.engine.checkpointing import checked_interval_ms
from kafka_marshal.errors import RAISE_OPEN_FILES, ConfigurationError
from kafka_marshal.identity import (
    home_of,
    make_private,
    require_private,
    state_home,
)
from kafka_marshal.kafka_io.settings import PORT_MAX
from kafka_marshal.kafka_io.settings import (
    ConnectionConfig as ConnectionConfig,  # noqa: PLC0414 - for the command, too
)
from kafka_marshal.remote.transport import TOKEN_BYTES_MAX
from kafka_marshal.sidecar.probe import default_socket

LOG_FORMATS = ("text", "json")
DRAIN_MS = 20_000
HANDOFF_MS = 10_000
OPEN_MS = 30_000
CONNECTIONS_MIN, CONNECTIONS_MAX = 64, 8_192
OPEN_FILES_MIN = 2 * CONNECTIONS_MIN
TOKEN_BYTES_MIN = 16
# The kernel's limit of an address is 108 bytes including the final NUL.
SOCKET_BYTES_MAX = 107
_HOST = re.compile(r"\[([0-9a-fA-F:]+)\]|([^:\[\]]+)")


def default_connections() -> int:
    """Return the connection limit: half of the process's file limit.

    The rest is for watched processes, Kafka, and other files.
    """
    limit = open_files_max()
    return CONNECTIONS_MAX if limit is None else min(limit // 2, CONNECTIONS_MAX)


def open_files_max() -> int | None:
    """Return how many files this process may have open, None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def default_client_id() -> str:
    """Return this host's name as a valid client id."""
    name = re.sub(r"[^A-Za-z0-9._:-]", "-", socket.gethostname())[:200]
    return name or "sidecar"


@attrs.frozen(kw_only=True)
class Settings:
    """The settings of one sidecar; ``check`` validates them.

    Attributes:
        connection: The cluster, and how to connect to it.
        client_id: Name of the sidecar in the log.
        state_dir: Directory of identities and lease journals; None for the user's
            state directory, ``""`` to keep no state.
        socket: Path of the Unix socket.
        socket_group: Group of the system, by name or number, whose members may use
            the Unix socket as well; None for no group.
        tcp: Loopback address to listen on as well, None for none.
        token_file: File with the token of TCP; created if missing.
        open_ms: How long to try to connect.
        drain_ms: How long a controlled shutdown waits for clients.
        handoff_ms: How much of that time clients continue to work, while partitions are
            handed off to other hosts; 0 recalls everything at once.
        checkpoint_interval_ms: How often to write a checkpoint to the log, unless
            another member does; 0 writes none.
        log_format: ``text`` or ``json``.
        connections_max: Most connections at a time.
        allow_admin: Whether clients may pause and reset groups, and read their history.
        member: Labels and role of the sidecar as a member of its groups.
    """

    connection: ConnectionConfig = attrs.field(factory=ConnectionConfig)
    client_id: str = attrs.field(factory=default_client_id)
    state_dir: str | Path | None = None
    socket: Path = attrs.field(factory=lambda: Path(default_socket()))
    socket_group: str | None = None
    tcp: str | None = None
    token_file: Path | None = None
    open_ms: int = OPEN_MS
    drain_ms: int = DRAIN_MS
    handoff_ms: int = HANDOFF_MS
    checkpoint_interval_ms: int = CHECKPOINT_INTERVAL_MS
    log_format: Literal["text", "json"] = "text"
    connections_max: int = attrs.field(factory=default_connections)
    allow_admin: bool = False
    member: Membership = attrs.field(factory=Membership)

    def check(self) -> None:
        """Check the settings without connecting.

        Raises:
            ConfigurationError: A setting is invalid.
        """
        checked_interval_ms(self.checkpoint_interval_ms, setting="checkpoint-interval")
        checked_labels(self.member.labels)
        require_name("client-id", self.client_id)
        if not self.socket.is_absolute():
            raise ConfigurationError(
                f"socket {str(self.socket)!r} must be an absolute path",
                setting="socket",
            )
        if len(os.fsencode(self.socket)) > SOCKET_BYTES_MAX:
            raise ConfigurationError(
                f"socket {str(self.socket)!r} is longer than the {SOCKET_BYTES_MAX} "
                "bytes that a Unix socket's path may have; name a shorter one",
                setting="socket",
            )
        _ = self.socket_gid
        if self.log_format not in LOG_FORMATS:
            raise ConfigurationError(
                f"log-format is {self.log_format!r}; write {' or '.join(LOG_FORMATS)}",
                setting="log-format",
            )
        limit = open_files_max()
        if limit is not None and limit < OPEN_FILES_MIN:
            raise ConfigurationError(
                f"this process may have {limit} files and connections open, and a "
                f"sidecar needs {OPEN_FILES_MIN} at least; {RAISE_OPEN_FILES}"
            )
        if (self.tcp is None) != (self.token_file is None):
            raise ConfigurationError(
                "tcp and token-file go together: over TCP the kernel does not name the "
                "client's user, so clients send a token",
                setting="token-file" if self.token_file is None else "tcp",
            )
        if self.tcp is not None:
            tcp_address(self.tcp)

    @property
    def socket_gid(self) -> int | None:
        """Id of ``socket_group``, None without one.

        Raises:
            ConfigurationError: This system has no such group.
        """
        name = self.socket_group
        if name is None:
            return None
        try:
            is_number = name.isascii() and name.isdecimal()
            return int(name) if is_number else grp.getgrnam(name).gr_gid
        except (KeyError, ValueError) as error:
            raise ConfigurationError(
                f"socket-group {name!r} is no group of this system; see: getent group",
                setting="socket-group",
            ) from error

    @property
    def state_path(self) -> Path | None:
        """State directory, None to keep no state."""
        return home_of(self.state_dir)

    def require_state_path(self) -> None:
        """Create the state directory, and check that it can be used.

        Without this check the sidecar would start, and then refuse each client.

        Raises:
            ConfigurationError: This process cannot create or write it, or others can.
        """
        home = state_home() if self.state_dir is None else self.state_path
        if home is None:
            return
        why: object = "it is not writable"
        try:
            make_private(home)
            require_private(home)
            if os.access(home, os.W_OK | os.X_OK):
                return
        except OSError as error:
            why = error
        raise ConfigurationError(
            f"state_dir {str(home)!r} cannot be used: {why}; name a writable directory "
            "with --state-dir, or '' to keep no state",
            setting="state-dir",
        )


def tcp_address(text: str) -> tuple[str, int]:
    """Return the host and port of a loopback address to listen on.

    Raises:
        ConfigurationError: The text is not a loopback address with a port.
    """
    host, colon, port = text.rpartition(":")
    found = _HOST.fullmatch(host)
    is_port = colon and re.fullmatch("[0-9]{1,5}", port) and int(port) <= PORT_MAX
    if found is None or not is_port:
        raise ConfigurationError(
            f"tcp is {text!r}; write it like 127.0.0.1:7070", setting="tcp"
        )
    name = found[1] or found[2]
    try:
        is_ours = ipaddress.ip_address(name).is_loopback
    except ValueError:
        is_ours = False
    if not is_ours:
        raise ConfigurationError(
            f"tcp is {text!r}, which other hosts can reach; a sidecar serves its own: "
            "write 127.0.0.1 or [::1], or leave it out and use the Unix socket",
            setting="tcp",
        )
    return name, int(port)


def token_of(path: Path) -> bytes:
    """Return the token in a file; a missing file is created with a random token.

    Raises:
        ConfigurationError: The file cannot be read or created, others may read it, or
            it has no valid token.
    """
    try:
        _make_token(path)
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(TOKEN_BYTES_MAX + 1).strip()
    except OSError as error:
        raise ConfigurationError(
            f"token-file {str(path)!r} cannot be used: {error}", setting="token-file"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError(
            f"token-file {str(path)!r} can be read by others; run: chmod 600 {path}",
            setting="token-file",
        )
    is_token = token.isascii() and token.decode("latin-1").isprintable()
    if not is_token or not TOKEN_BYTES_MIN <= len(token) <= TOKEN_BYTES_MAX:
        raise ConfigurationError(
            f"token-file {str(path)!r} holds no token: one line of at least "
            f"{TOKEN_BYTES_MIN} characters; remove it to have one created",
            setting="token-file",
        )
    return token


def _make_token(path: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        found = os.open(path, flags, 0o600)
    except FileExistsError:
        return
    with os.fdopen(found, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32) + "\n")
