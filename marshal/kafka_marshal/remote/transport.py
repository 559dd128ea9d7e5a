"""HTTP to the sidecar of this host: its address, requests, and the stream of events.

Every wait has a deadline. A refusal of the sidecar is raised as the error that an
engine in this process would raise.
"""

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, urlencode

import attrs
import msgspec

from kafka_marshal import errors, unix_sockets
from kafka_marshal.addresses import bracketed
from kafka_marshal.deadline import monotonic_ms
from kafka_marshal.errors import (
    ClaimLost,
    ClaimRejected,
    ClientFenced,
    ConfigurationError,
    CoordinationError,
    GroupPaused,
    IdentityConflict,
    MarshalError,
    PositionError,
)
from kafka_marshal.remote import api, paths
from kafka_marshal.remote.api import Failure

if TYPE_CHECKING:
    import httpx

    from kafka_marshal.remote.exchanges import Exchanges

UNIX = "unix:"
_HTTP = re.compile(r"http://(\[[0-9a-fA-F:]+\]|[^/:\[\]]+):([0-9]{1,5})/?")
TOKEN_BYTES_MAX = 4_096
_PLAIN = (
    "CoordinationError",
    "DeadlineExceeded",
    "InvalidTransition",
    "LogTruncated",
    "MalformedRecord",
    "MarshalError",
    "TopicMisconfigured",
    "WrongCluster",
)


class NotRunning(CoordinationError):
    """No sidecar runs at the address: connections are refused, or it has no socket."""


class NotRegistered(CoordinationError):
    """The sidecar does not know this process, or has removed it: register again."""


def error_of(failure: Failure) -> MarshalError:
    """Return the exception for a failure that the sidecar reported.

    A failure of unknown kind becomes a ``CoordinationError`` if it is retriable, else
    a plain ``MarshalError``.
    """
    message, reason = failure.message, failure.reason
    match failure.error:
        case "ConfigurationError":
            return ConfigurationError(message, setting=failure.setting or "")
        case "ClaimLost":
            return ClaimLost(
                message,
                winner=failure.holder,
                at_offset=failure.at_offset,
                reason=reason or "",
            )
        case "ClaimRejected":
            return ClaimRejected(
                message,
                holder=failure.holder,
                at_offset=failure.at_offset,
                reason=reason or "held",
            )
        case "IdentityConflict":
            return IdentityConflict(message, holder=failure.holder or "")
        case "ClientFenced":
            return ClientFenced(
                message,
                by=failure.holder or "",
                reason=reason or "",
                at_offset=failure.at_offset,
            )
        case "GroupPaused":
            return GroupPaused(message, until_ms=0, by=failure.holder or "")
        case "PositionError":
            return _position_error(failure)
        case "LogUnreadable" | "LogUnwritable" as name:
            # "This principal" in the message is the sidecar's, not this process's.
            refused: type[MarshalError] = getattr(errors, name)
            return refused(f"In the sidecar: {message}")
        case name if name in _PLAIN:
            kind: type[MarshalError] = getattr(errors, name)
            return kind(message)
    return CoordinationError(message) if failure.retriable else MarshalError(message)


def _position_error(failure: Failure) -> PositionError:
    place = None
    if failure.topic is not None and failure.partition is not None:
        place = (failure.topic, failure.partition)
    return PositionError(
        failure.message,
        requested=-1 if failure.requested is None else failure.requested,
        log_start=-1 if failure.log_start is None else failure.log_start,
        log_end=-1 if failure.log_end is None else failure.log_end,
        partition=place,
    )


@attrs.frozen
class Address:
    """A sidecar's address.

    Attributes:
        text: As the application gave it; for messages.
        socket: Path of its Unix socket, None over TCP.
        host: Name or address of its TCP socket, without brackets.
        port: Port of its TCP socket.
    """

    text: str
    socket: str | None
    host: str = "sidecar"
    port: int = 80

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parse an address.

        Raises:
            ConfigurationError: The text is not a sidecar's address on this machine.
        """
        given: object = text
        if not isinstance(given, str):
            raise _wrong(str(given), "it is not a string")
        if text.startswith(UNIX):
            path = text.removeprefix(UNIX).removeprefix("//")
            if not Path(path).is_absolute():
                raise _wrong(text, "the path of a Unix socket must be absolute")
            return cls(text, path)
        found = _HTTP.fullmatch(text)
        if found is None:
            raise _wrong(text, "it is neither unix:PATH nor http://HOST:PORT")
        host, port = found[1].strip("[]"), int(found[2])
        # Deadlines are times of this machine's clock, so the sidecar must run here.
        if not is_loopback(host):
            raise _wrong(text, f"{host!r} is not this machine")
        if not 1 <= port <= 65_535:  # noqa: PLR2004 - what TCP has
            raise _wrong(text, f"{port} is not a valid port")
        return cls(text, None, host, port)

    @property
    def base_url(self) -> str:
        """Prefix of the paths of its API."""
        return f"http://{self.authority}"

    @property
    def authority(self) -> str:
        """The ``Host`` header of requests."""
        host = bracketed(self.host)
        return host if self.socket is not None else f"{host}:{self.port}"

    def token(self, file: str | Path | None) -> str | None:
        """Read the token from its file; a Unix socket needs none.

        Raises:
            ConfigurationError: A token is required and missing, or cannot be read.
        """
        if file is None:
            if self.socket is None:
                raise ConfigurationError(
                    f"a sidecar at {self.text} requires a token; name its file with "
                    "sidecar_token_file, or use its Unix socket",
                    setting="sidecar_token_file",
                )
            return None
        try:
            with Path(file).open("rb") as opened:
                text = opened.read(TOKEN_BYTES_MAX).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"the sidecar's token cannot be read from {str(file)!r}: {error}",
                setting="sidecar_token_file",
            ) from error
        if not text or not text.isprintable():
            raise ConfigurationError(
                f"the file {str(file)!r} has no token: it must be one line of text, as "
                "the sidecar writes it",
                setting="sidecar_token_file",
            )
        return text


def is_loopback(host: str) -> bool:
    """Return whether the host of a URL, without brackets, is a loopback address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _wrong(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"sidecar {text!r} is not a valid address: {why}; write "
        "unix:/path/of/the.sock or http://127.0.0.1:PORT",
        setting="sidecar",
    )


T = TypeVar("T", bound=msgspec.Struct)

CONNECT_S = 2.0
MARGIN_MS = 2_000
# How long no sidecar may run at the address before a client that ends stops waiting. A
# sidecar that was restarted is found again within this time.
GONE_MS_MAX = 2_000
# Longer than the sidecar's own keep-alive of a stream.
SILENCE_S = 30.0
CLOSED = "the connection to the sidecar was closed; open a new Marshal"
_NOT_KNOWN = frozenset({404, 410})
_ERRORS_FROM = 400
_NOBODY_LISTENS = (ConnectionRefusedError, FileNotFoundError)


def extra() -> ModuleType:
    """Return httpx, which reads the stream of events.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        import h11  # noqa: F401 - fail here, before anything is open
        import httpx
        import httpx_sse  # noqa: F401 - as above
    except ImportError as error:
        raise ConfigurationError(
            "connecting to a sidecar needs the extra 'remote'; run: pip install "
            f"'kafka-marshal[remote]' ({error})",
            setting="sidecar",
        ) from error
    return httpx


class Stream:
    """One open stream of events; ``end`` may be called from any thread."""

    def __init__(self, response: "httpx.Response") -> None:
        self._response = response
        self._is_ended = False

    def frames(self) -> Iterator[api.Frame]:
        """Yield each event that this release knows.

        Raises:
            CoordinationError: The response is no stream of events.
        """
        from httpx_sse import EventSource, SSEError

        httpx = extra()
        try:
            for event in EventSource(self._response).iter_sse():
                body = decoded(event.event, event.data)
                if body is not None:
                    yield api.Frame(event.id, body)
        except SSEError as error:
            raise CoordinationError(
                f"the sidecar did not send a stream of events: {error}"
            ) from error
        except httpx.HTTPError:
            # After ``end`` the broken connection is expected.
            if not self._is_ended:
                raise

    def end(self) -> None:
        """Shut the connection down, which wakes the reading thread. Idempotent."""
        self._is_ended = True
        network = self._response.extensions.get("network_stream")
        connection = None if network is None else network.get_extra_info("socket")
        if isinstance(connection, socket.socket):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def decoded(kind: str, data: str) -> api.EventBody | None:
    """Decode an event; return None if its kind is not known.

    Raises:
        CoordinationError: The kind is known, but the body cannot be decoded.
    """
    known = _KINDS.get(kind)
    if known is None:
        return None
    try:
        return msgspec.json.decode(data, type=known)
    except msgspec.MsgspecError as error:
        raise CoordinationError(
            f"the sidecar sent an event {kind!r} that cannot be read: {error}"
        ) from error


_KINDS: Mapping[str, type[api.EventBody]] = {
    "snapshot": api.Snapshot,
    "warm": api.Warm,
    "standby": api.Standby,
    "assigned": api.Assignment,
    "release": api.Releasing,
    "lost": api.Lost,
    "paused": api.Paused,
    "layout": api.Layout,
    "failed": api.Failed,
}


@attrs.define(eq=False)
class Connection:
    """Connections of one process to a sidecar. Thread-safe.

    Attributes:
        address: Address of the sidecar.
        group_id: Group of the client.
        client_id: Name of the client.
        instance: Random id of the client's process, in hex.
    """

    address: Address
    group_id: str
    client_id: str
    instance: str
    _requests: "Exchanges"
    _http: "httpx.Client"
    _gone_since_ms: float | None = None

    @classmethod
    def open(
        cls,
        address: Address,
        *,
        token: str | None,
        group_id: str,
        client_id: str,
        instance: str,
        requests: "Exchanges | None" = None,
        transport: "httpx.BaseTransport | None" = None,
    ) -> "Connection":
        """Prepare the connections; the first request connects.

        Args:
            address: Address of the sidecar.
            token: Token of TCP connections, None without one.
            group_id: Group of the client.
            client_id: Name of the client.
            instance: Random id of the client's process, in hex.
            requests: Makes requests; by default over sockets.
            transport: Opens the stream of events; by default over a socket.

        Raises:
            ConfigurationError: The extra is not installed.
        """
        httpx = extra()
        from kafka_marshal.remote.exchanges import Exchanges, open_tcp

        headers = {api.INSTANCE_HEADER: instance}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        http = httpx.Client(
            base_url=address.base_url,
            headers=headers,
            # Never through a proxy: the sidecar runs on this machine.
            trust_env=False,
            transport=transport
            or httpx.HTTPTransport(
                uds=address.socket,
                trust_env=False,
                # Addresses are http:// or sockets. With True, httpx loads certificates,
                # which takes 25 ms.
                verify=False,
            ),
        )
        if address.socket is None:
            connect = partial(open_tcp, (address.host, address.port))
        else:
            connect = partial(unix_sockets.connect, address.socket)
        requests = requests or Exchanges(
            connect, host=address.authority, headers=headers
        )
        return cls(address, group_id, client_id, instance, requests, http)

    @property
    def is_gone(self) -> bool:
        """Whether no sidecar has run for so long that a client that ends stops waiting.

        The time begins with the first connection that was refused after the last answer
        or ``count_gone_again``.
        """
        since_ms = self._gone_since_ms
        return since_ms is not None and monotonic_ms() - since_ms >= GONE_MS_MAX

    def count_gone_again(self) -> None:
        """Forget refused connections, because the sidecar may run again."""
        self._gone_since_ms = None

    def path(self, template: str, parts: Mapping[str, object] | None = None) -> str:
        """Return a path of the API, with this client's names and these parts."""
        own = {"group": self.group_id, "client": self.client_id}
        # Names of groups, clients and topics have no character that needs escaping.
        return template.format_map(own | dict(parts or {}))

    def ask(
        self,
        method: str,
        path: str,
        *,
        answer: type[T],
        body: msgspec.Struct | None = None,
        timeout_ms: int = 0,
        query: Mapping[str, str] | None = None,
    ) -> T:
        """Make a request and return its answer.

        Args:
            method: HTTP method.
            path: Path of the API.
            answer: Type of the answer.
            body: Body of the request.
            timeout_ms: How long the sidecar may take to answer.
            query: Query parameters.

        Raises:
            NotRegistered: The sidecar does not know this client.
            CoordinationError: The sidecar cannot be reached, or is not ready.
            MarshalError: The sidecar refused the request.
        """
        content = self._request(
            method, path, body=body, timeout_ms=timeout_ms, query=query
        )
        try:
            return msgspec.json.decode(content, type=answer)
        except msgspec.MsgspecError as error:
            raise CoordinationError(
                f"the answer of the sidecar at {self.address.text} to {method} {path} "
                f"cannot be read ({error}); is it a sidecar of this release? See: "
                "marshal sidecar status"
            ) from error

    def send(
        self,
        method: str,
        path: str,
        *,
        body: msgspec.Struct | None = None,
        timeout_ms: int = 0,
        query: Mapping[str, str] | None = None,
    ) -> None:
        """Make a request whose answer has no content; raises the errors of ``ask``."""
        self._request(method, path, body=body, timeout_ms=timeout_ms, query=query)

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: msgspec.Struct | None,
        timeout_ms: int,
        query: Mapping[str, str] | None,
    ) -> bytes:
        from kafka_marshal.remote.exchanges import ExchangeError

        target = quote(path)
        if query:
            target = f"{target}?{urlencode(query)}"
        content = None if body is None else msgspec.json.encode(body)
        try:
            answer = self._requests.request(
                method, target, body=content, timeout_ms=timeout_ms + MARGIN_MS
            )
        except ExchangeError as error:
            failure = self._unreachable(error)
            if not isinstance(failure, NotRunning):
                self._gone_since_ms = None
            elif self._gone_since_ms is None:
                self._gone_since_ms = monotonic_ms()
            raise failure from error
        except RuntimeError as error:
            raise CoordinationError(CLOSED) from error
        self._gone_since_ms = None
        if answer.status >= _ERRORS_FROM:
            raise self._refused(answer.status, answer.content)
        return answer.content

    @contextlib.contextmanager
    def events(self, after: str | None) -> Iterator[Stream]:
        """Open the stream of events after the event with the id ``after``.

        Raises:
            NotRegistered: The sidecar does not know this client.
            CoordinationError: The sidecar cannot be reached, or the stream broke off.
        """
        httpx = extra()
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if after is not None:
            headers[api.EVENT_ID_HEADER] = after
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        path = self.path(paths.EVENTS)
        try:
            with self._http.stream(
                "GET", path, headers=headers, timeout=timeout
            ) as response:
                if response.status_code >= _ERRORS_FROM:
                    content = response.read()
                    raise self._refused(response.status_code, content)
                yield Stream(response)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except RuntimeError as error:
            raise CoordinationError(CLOSED) from error

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._requests.close()
        with contextlib.suppress(RuntimeError):
            self._http.close()

    def _unreachable(self, error: Exception) -> CoordinationError:
        why = str(error) or type(error).__name__
        if isinstance(error.__cause__, PermissionError):
            return CoordinationError(
                f"user {os.geteuid()} may not connect to the sidecar at "
                f"{self.address.text} ({why}); run as the user that runs the sidecar, "
                "or start it with: marshal sidecar run --socket-group"
            )
        is_gone = isinstance(error.__cause__, _NOBODY_LISTENS)
        kind = NotRunning if is_gone else CoordinationError
        return kind(
            f"no sidecar answers at {self.address.text} ({why}); start one with: "
            "marshal sidecar run, or check it with: marshal sidecar status"
        )

    def _refused(self, status: int, content: bytes) -> MarshalError:
        try:
            failure = msgspec.json.decode(content, type=api.Failure)
        except msgspec.MsgspecError:
            return CoordinationError(
                f"the sidecar at {self.address.text} answered {status} without a "
                "reason; is it a sidecar? See: marshal sidecar status"
            )
        if status in _NOT_KNOWN:
            return NotRegistered(failure.message)
        return error_of(failure)
