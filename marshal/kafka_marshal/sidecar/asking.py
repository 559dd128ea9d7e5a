"""Requests, checked and bounded before anybody is asked.

What is wrong with one is told in a sentence; nothing is kept that grows.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import msgspec
from starlette.requests import Request
from starlette.types import Scope

from kafka_marshal.errors import IdentityConflict, MarshalError
from kafka_marshal.protocol.codec import is_identifier, is_topic
from kafka_marshal.remote import api
from kafka_marshal.remote.address import is_loopback
from kafka_marshal.sidecar.face import HubFace
from kafka_marshal.sidecar.failures import Answered, answered, refusal
from kafka_marshal.sidecar.peers import NOBODY, Caller, Peer, stood_for
from kafka_marshal.sidecar.routes import Route

BODY_BYTES_MAX = 4 * 1024 * 1024
BODY_S_MAX = 10.0
TIMEOUT_MS_DEFAULT = 10_000
CONNECTION = "connection"
_HEX = re.compile(r"[0-9a-f]{32}")
_NUMBER = re.compile(r"[0-9]{1,10}")
_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(:[0-9]*)?")
_PARTITION_MAX = 2**31 - 1
_FLAGS = {"true": True, "1": True, "": True, "false": False, "0": False}


@attrs.define(eq=False)
class Connection:
    """One connection, for as long as it stands.

    Attributes:
        peer: Who is at the other end.
        is_local: Whether it is of the Unix socket, where the kernel tells that.
        client: Which client uses it, once one did (row FC13).
        is_admitted: Whether it has shown that it may use the sidecar, and has a
            place among those that do.
    """

    peer: Peer = NOBODY
    is_local: bool = False
    client: Caller | None = None
    _find_place: Callable[[], bool] | None = None
    is_admitted: bool = attrs.field(init=False)

    @is_admitted.default
    def _admitted_at_first(self) -> bool:
        return self._find_place is None

    def admit(self) -> bool:
        """Return whether there is a place for it, now that it may have one."""
        if not self.is_admitted and self._find_place is not None:
            self.is_admitted = self._find_place()
        return self.is_admitted


@attrs.frozen
class Ask:
    """One request, checked.

    Attributes:
        route: What is asked.
        hub: Who is asked.
        parts: Parts of the path.
        queries: What stands behind the question mark, known names only.
        caller: Which client asks, where one does.
        peer: Which process asks.
        body: What it says, None where nothing is said.
    """

    route: Route
    hub: HubFace
    parts: Mapping[str, str]
    queries: Mapping[str, int | bool]
    caller: Caller
    peer: Peer
    body: Any = None

    @property
    def timeout_ms(self) -> int:
        """How long it may take."""
        return int(self.queries.get("timeout_ms", TIMEOUT_MS_DEFAULT))

    @property
    def waits(self) -> bool:
        """Whether it may wait, so that it must not keep those that do not."""
        # A body that has a timeout says itself whether it waits.
        return self.route.waits and getattr(self.body, "timeout_ms", 1) > 0


def connection_of(request: Request) -> Connection:
    """Return the connection of a request; of one that nobody knows, a stranger's."""
    found = request.scope.get("state", {}).get(CONNECTION)
    return found if isinstance(found, Connection) else Connection()


def require_loopback_host(request: Request) -> None:
    """Refuse a request over TCP that names another host than this machine.

    A web page whose name resolves to a loopback address (DNS rebinding) reaches the
    socket with its own name in the header.

    Raises:
        Answered: The Host header is not a loopback address or ``localhost``.
    """
    given = request.headers.get("host")
    if given is None:
        return  # HTTP/1.0, which no browser speaks
    found = _HOST.fullmatch(given)
    if found is None or not is_loopback(found[1].strip("[]")):
        raise refusal(
            403,
            f"the Host header is {given[:200]!r}, which is not this machine; use the "
            "address that the sidecar listens on, such as 127.0.0.1",
            setting="host",
        )


def declares_body(scope: Scope) -> bool:
    """Return whether a request declares a body."""
    headers = dict(scope["headers"])
    return headers.get(b"content-length", b"0").strip(b"0 ") != b"" or (
        b"transfer-encoding" in headers
    )


def checked_parts(given: Mapping[str, str]) -> dict[str, str]:
    """Return the parts of a path.

    Raises:
        Answered: One of them is no name, topic or number.
    """
    parts = dict(given)
    for name, value in parts.items():
        if name == "partition":
            is_good = _NUMBER.fullmatch(value) and int(value) <= _PARTITION_MAX
        else:
            is_good = (is_topic if name == "topic" else is_identifier)(value)
        if not is_good:
            raise refusal(
                400, f"{value[:200]!r} is no valid {name} in the path", setting=name
            )
    return parts


def checked_queries(route: Route, request: Request) -> dict[str, int | bool]:
    """Return what stands behind the question mark; unknown names are passed over.

    Raises:
        Answered: A value is no number, or neither true nor false.
    """
    found: dict[str, int | bool] = {}
    for query in route.queries:
        value = request.query_params.get(query.name)
        if value is None:
            continue
        if query.kind == "boolean":
            if value.lower() not in _FLAGS:
                raise refusal(
                    400,
                    f"{query.name} is {value[:50]!r}; write true or false",
                    setting=query.name,
                )
            found[query.name] = _FLAGS[value.lower()]
        elif not _NUMBER.fullmatch(value) or int(value) > query.most:
            raise refusal(
                400,
                f"{query.name} is {value[:50]!r}; write 0 to {query.most}",
                setting=query.name,
            )
        else:
            found[query.name] = int(value)
    return found


def caller_of(route: Route, request: Request, *, parts: Mapping[str, str]) -> Caller:
    """Return which client asks; one without a name where none does."""
    if "client" not in parts:
        return Caller("", "", "")
    instance = request.headers.get(api.INSTANCE_HEADER, "")
    if route.is_of_client and not _HEX.fullmatch(instance):
        raise refusal(
            400,
            f"the header {api.INSTANCE_HEADER} must have the instance that was "
            "registered: 16 bytes in lower-case hex",
            setting=api.INSTANCE_HEADER,
        )
    return Caller(parts["group"], parts["client"], instance)


def client_process(peer: Peer, said: api.Registration) -> Peer:
    """Return whose life is the client's: the peer's, or the one that it names.

    Raises:
        Answered: There is no such process, or it is another user's.
    """
    if said.pid is None or peer.pid is None:
        return peer
    found = stood_for(peer, said.pid)
    if found is None:
        raise refusal(
            400,
            f"there is no process {said.pid} of your user to stand for the client; "
            "leave pid out to have the one that connects watched",
            setting="pid",
        )
    return found


def require_one_client(connection: Connection, caller: Caller) -> None:
    """Keep a connection to the client that used it first (row FC13)."""
    known = connection.client
    if caller.client_id and known is not None and known != caller:
        raise answered(
            IdentityConflict(
                f"this connection is that of client {known.client_id!r} of group "
                f"{known.group_id!r}; open another one for {caller.client_id!r}",
                holder=known.client_id,
            )
        )


async def body_of(route: Route, request: Request) -> msgspec.Struct | None:
    """Return what a request says, read and checked within bounds.

    Raises:
        Answered: It is too long, comes too slowly, or is not what is taken here.
    """
    data = await _read(request)
    if route.takes is None:
        return None
    if not data and route.name == "leave":
        return api.Leaving()
    try:
        found: msgspec.Struct = msgspec.json.decode(data, type=route.takes)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refusal(
            400, f"the body is no {route.takes.__name__}: {error}", setting="body"
        ) from error
    return found


async def _read(request: Request) -> bytes:
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > BODY_BYTES_MAX:
        raise _too_long()
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S_MAX):
            async for chunk in request.stream():
                data += chunk
                if len(data) > BODY_BYTES_MAX:
                    raise _too_long()
    except TimeoutError:
        raise refusal(
            408, f"the body did not come within {BODY_S_MAX:.0f} s", error=MarshalError
        ) from None
    return bytes(data)


def _too_long() -> Answered:
    return refusal(
        413,
        f"a body is at most {BODY_BYTES_MAX} bytes; say it in several requests",
        setting="body",
    )
