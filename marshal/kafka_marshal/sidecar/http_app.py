"""The HTTP application of a sidecar: routing, authorization and responses.

Every request gets the response that the table in ``routes`` names, or a ``Failure``
with a 4xx or 5xx status. No decision about claims is made here. Non-blocking requests
have an executor of their own, so that requests that wait cannot delay heartbeats; so
have probes, which are answered while heartbeats wait for a busy engine. A full executor
answers 503.
"""

import asyncio
import hmac
import logging
import re
import time
from collections.abc import (
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from typing import Any

import attrs
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kafka_marshal.errors import DeadlineExceeded, MarshalError
from kafka_marshal.observability.logs import LOGGER_NAME
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.remote.answers import (
    AsOf,
    ClientsNow,
    FenceNow,
    GroupLine,
    GroupNow,
    GroupsNow,
    Handoff,
    PlanNow,
    WorldNow,
)
from kafka_marshal.sidecar.config import CONNECTIONS_MAX
from kafka_marshal.sidecar.events import EventStream
from kafka_marshal.sidecar.executors import BoundedExecutor
from kafka_marshal.sidecar.group_actions import LIMIT_DEFAULT, GroupActions
from kafka_marshal.sidecar.health import Lifecycle, livez, readyz, startupz
from kafka_marshal.sidecar.http_errors import (
    http_error,
    to_http_error,
    unavailable,
)
from kafka_marshal.sidecar.metrics import OTHER, Counts
from kafka_marshal.sidecar.process_monitor import Caller, may_use
from kafka_marshal.sidecar.repeated_answers import RepeatedAnswers
from kafka_marshal.sidecar.requests import (
    PROBE_S_MAX,
    ApiRequest,
    Connection,
    LongBodies,
    caller_of,
    client_process,
    connection_of,
    declares_body,
    failed,
    parse_path,
    parse_queries,
    read_body,
    require_loopback_host,
    require_one_client,
)
from kafka_marshal.sidecar.routes import (
    EVENT_STREAM,
    OPENAPI_PATH,
    ROUTES,
    Route,
    openapi_text,
)
from kafka_marshal.sidecar.service import SidecarService

# --- Read models -----------------------------------------------------------------


World = Mapping[str, Any]
Item = dict[str, Any]


def as_of(world: World, wall_ms: int) -> AsOf:
    """Return the moment of a world document."""
    offsets = {t: part["next_offset"] for t, part in world["partitions"].items()}
    return AsOf(time_ms=wall_ms, offsets=offsets)


def world_now(world: World, wall_ms: int) -> WorldNow:
    """Return the whole document."""
    return WorldNow(
        as_of=as_of(world, wall_ms),
        schema=world["schema"],
        partitions=world["partitions"],
    )


def groups_now(world: World, pauses: list[Item], *, wall_ms: int) -> GroupsNow:
    """Return an entry for each group that has keys, is paused or will be."""
    keys: dict[str, list[Item]] = {}
    for claim in _claims(world):
        keys.setdefault(claim["group_id"], []).append(claim)
    paused = {p["group_id"] for p in pauses if p["state"] == "paused"}
    named = {p["group_id"] for p in pauses}
    lines = []
    for group in sorted(named | set(keys)):
        owners = [name for name in map(_owner, keys.get(group, ())) if name is not None]
        lines.append(
            GroupLine(
                group=group,
                keys=len(keys.get(group, ())),
                owned=len(owners),
                owners=tuple(sorted(set(owners))),
                is_paused=group in paused,
                pauses=tuple(p for p in pauses if p["group_id"] == group),
            )
        )
    return GroupsNow(as_of=as_of(world, wall_ms), groups=tuple(lines))


def group_now(
    world: World,
    pauses: list[Item],
    *,
    group: str,
    wall_ms: int,
    handoffs: Iterable[Handoff] = (),
) -> GroupNow:
    """Return claims, pauses and handoffs of a group; none for an unknown group."""
    claims = [claim for claim in _claims(world) if claim["group_id"] == group]
    return GroupNow(
        as_of=as_of(world, wall_ms),
        group=group,
        claims=tuple(sorted(claims, key=lambda c: (c["topic"], c["partition"]))),
        pauses=tuple(p for p in pauses if p["group_id"] == group),
        handoffs=tuple(handoffs),
    )


def _claims(world: World) -> Iterator[Item]:
    for part in world["partitions"].values():
        yield from part["claims"]


def _owner(claim: Item) -> str | None:
    owner = claim["owner"]
    return None if owner is None else str(owner["client_id"])


# --- The application -------------------------------------------------------------


CALL_S_MAX = api.WAIT_MS_MAX / 1000 + 30
KEEP_ALIVE_S = 10.0
QUICK_THREADS = 8
WAITING_THREADS = 64
STREAM_THREADS = 4
PROBE_THREADS = 2
CALLS_MAX = 256
STREAMS_MAX = CONNECTIONS_MAX
_ID = re.compile(r"[0-9a-f]{1,16}(\.[0-9]{1,20}){3}")
_PROBES = {"livez": livez, "readyz": readyz, "startupz": startupz}
_log = logging.getLogger(LOGGER_NAME)


@attrs.define(eq=False, kw_only=True, slots=False)
class App:
    """The application of one daemon, which sets ``service`` once it is connected.

    Attributes:
        states: State of the daemon, which probes show.
        metrics: Returns the metrics and their media type.
        service: Answers the requests; None until everything is connected.
        token: Token of TCP connections, None without TCP.
        socket_gid: Group whose members may also use the Unix socket.
        keep_alive_s: Longest time in which an event stream sends nothing.
        actions: Actions on groups, None if they are not allowed.
    """

    states: Lifecycle
    metrics: Callable[[], tuple[bytes, str]]
    service: SidecarService | None = None
    counts: Counts = attrs.field(factory=Counts)
    token: bytes | None = None
    socket_gid: int | None = None
    keep_alive_s: float = KEEP_ALIVE_S
    actions: GroupActions | None = None

    def __attrs_post_init__(self) -> None:
        """Start the threads, and make the routes."""
        self._quick = BoundedExecutor(
            "sidecar", threads=QUICK_THREADS, calls_max=CALLS_MAX
        )
        self._waiting = BoundedExecutor(
            "sidecar-wait", threads=WAITING_THREADS, calls_max=CALLS_MAX
        )
        self._streaming = BoundedExecutor(
            "sidecar-feed", threads=STREAM_THREADS, calls_max=2 * STREAMS_MAX
        )
        self._probing = BoundedExecutor(
            "sidecar-probe", threads=PROBE_THREADS, calls_max=CALLS_MAX
        )
        self._repeated = RepeatedAnswers(
            service=lambda: self.service,
            counts=self.counts,
            quick=self._quick,
            waiting=self._waiting,
            call=_call,
            call_fence=_fences,
            to_response=failure_of,
        )
        self._streams: dict[Caller, EventStream] = {}
        self._bodies = LongBodies()
        self._asgi: ASGIApp = self._starlette()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, as ASGI defines it.

        The connection closes after the response if the connection is not admitted, or
        if the request's body was not read to its end: nothing limits how long the rest
        may take.
        """
        connection = connection_of(Request(scope))
        is_unread = declares_body(scope)

        async def receive_body() -> Message:
            nonlocal is_unread
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                is_unread = False
            return message

        async def send_closing(message: Message) -> None:
            is_last = is_unread or not connection.is_admitted
            if message["type"] == "http.response.start" and is_last:
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        await self._asgi(scope, receive_body, send_closing)

    def end_streams(self) -> None:
        """End every stream after its current piece. On the event loop."""
        for stream in list(self._streams.values()):
            stream.end()

    def close(self) -> None:
        """Accept no further requests."""
        for each in (self._quick, self._waiting, self._streaming, self._probing):
            each.close()

    # --- routing

    def _starlette(self) -> Starlette:
        by_path: dict[str, dict[str, Route]] = {}
        for route in ROUTES:
            by_path.setdefault(route.path, {})[route.method] = route
        places = []
        for path, routes in by_path.items():
            place = StarletteRoute(
                path, partial(self._endpoint, routes), methods=list(routes)
            )
            # HEAD would run the whole GET.
            (place.methods or set()).discard("HEAD")
            places.append(place)
        found = Starlette(
            routes=places, exception_handlers={HTTPException: self._no_such_place}
        )
        found.router.redirect_slashes = False
        return found

    async def _endpoint(
        self, routes: Mapping[str, Route], request: Request
    ) -> Response:
        route = routes[request.method]
        response = await self._tried(route, request)
        self.counts.request(route.name, response.status_code)
        return response

    async def _tried(self, route: Route, request: Request) -> Response:
        try:
            return await self._answer(route, request)
        except ClientDisconnect:
            return Response(status_code=400)
        except TimeoutError:
            return failed(
                http_error(
                    504, "the request took too long; try again", error=MarshalError
                )
            )
        except Exception as error:  # noqa: BLE001 - answered, whatever it is
            return failure_of(route, error)

    async def _answer(self, route: Route, request: Request) -> Response:
        connection = connection_of(request)
        self._require_allowed(route, request, connection)
        special = _OF_DAEMON.get(route.name)
        if special is not None:
            return await special(self, route)
        if route.is_admin and self.actions is None:
            raise http_error(
                403,
                "this sidecar does not act on groups for its clients; start it with: "
                "marshal sidecar run --allow-admin",
                setting="allow-admin",
            )
        parts = parse_path(request.path_params)
        queries = parse_queries(route, request)
        caller = caller_of(route, request, parts=parts)
        # Read the body even without a service, so that the connection can be reused.
        body = await read_body(route, request, bodies=self._bodies)
        if isinstance(body, api.RegisterRequest):
            caller = attrs.evolve(caller, instance=body.instance)
        require_one_client(connection, caller)
        call = ApiRequest(
            route=route,
            service=self._require_service(),
            actions=self.actions,
            parts=parts,
            queries=queries,
            caller=caller,
            peer=connection.peer,
            body=body,
        )
        if route.name == "events":
            response: Response = await self._events(call, request)
        elif call.actions is not None and route.is_admin:
            response = _response(route, await self._act(call, call.actions))
        else:
            executor = self._waiting if call.waits else self._quick
            content = await executor.run(partial(_call, call), timeout_s=CALL_S_MAX)
            response = _response(route, content)
        if caller.client_id:
            connection.client = caller
        connection.answer = self._repeated.answer_to(call)
        return response

    def _require_service(self) -> SidecarService:
        """Return the service.

        Raises:
            HttpError: The daemon is still starting, or ending.
        """
        if self.service is None:
            why = f"{self.states.state.value}, {self.states.reason}"
            raise unavailable(f"the sidecar is not ready: {why}")
        return self.service

    def _require_allowed(
        self, route: Route, request: Request, connection: Connection
    ) -> None:
        """Allow permitted users on the Unix socket; over TCP, require the token."""
        if connection.is_local:
            if not may_use(connection.peer, self.socket_gid):
                raise http_error(
                    403,
                    "this sidecar serves the user that runs it, and its socket-group; "
                    "run your process as that user (yours is "
                    f"{connection.peer.uid}), or see: marshal sidecar run --help",
                    setting="sidecar",
                )
        else:
            require_loopback_host(request)
            if not self._shows_token(request):
                if route.is_open:
                    return
                is_other = _bearer_token(request) is not None
                problem = (
                    "the token is not that of this sidecar"
                    if is_other
                    else "over TCP the sidecar requires its token"
                )
                raise http_error(
                    401,
                    f"{problem}; send Authorization: Bearer with the content of its "
                    "token file",
                    setting="token",
                )
        if not connection.admit() and not route.is_open:
            raise unavailable(
                "the sidecar has reached its limit of connections; close one, or retry "
                "soon"
            )

    def _shows_token(self, request: Request) -> bool:
        given, token = _bearer_token(request), self.token
        return (
            token is not None
            and given is not None
            and hmac.compare_digest(given.encode(), token)
        )

    async def _no_such_place(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = error.headers if isinstance(error, HTTPException) else None
        method, path = request.method[:20], repr(request.scope["path"][:200])
        text = f"the API of the sidecar has no {method} {path}"
        if headers and "Allow" in headers:
            text = f"{path} accepts {headers['Allow']}, not {method}"
        response = failed(
            http_error(status, f"{text}; see {OPENAPI_PATH}", setting="path")
        )
        self.counts.request(OTHER, status)
        if headers:
            response.headers.update(headers)
        return response

    # --- endpoints of the daemon

    async def _probe(self, route: Route) -> Response:
        view = await self._probing.run(self.states.view, timeout_s=PROBE_S_MAX)
        found = _PROBES[route.name](view)
        status = 200 if found.ok else 503
        return Response(msgspec.json.encode(found), status, media_type=route.media)

    async def _metrics(self, route: Route) -> Response:
        del route
        found = await self._quick.run(self.metrics, timeout_s=PROBE_S_MAX)
        return Response(found[0], media_type=found[1])

    async def _openapi(self, route: Route) -> Response:
        return Response(openapi_text(), media_type=route.media)

    async def _events(self, call: ApiRequest, request: Request) -> Response:
        if len(self._streams) >= STREAMS_MAX:
            raise unavailable(
                f"{STREAMS_MAX} event streams are open at this sidecar, the most; "
                "close one"
            )
        after = request.headers.get(api.EVENT_ID_HEADER)
        if after is not None and not _ID.fullmatch(after):
            after = None
        feed = await self._quick.run(
            partial(call.service.feed, call.caller, after), timeout_s=CALL_S_MAX
        )
        run = partial(self._streaming.run, timeout_s=CALL_S_MAX)
        stream = EventStream(
            feed,
            take=run,
            keep_alive_s=self.keep_alive_s,
            on_sent=self._count_events,
        )
        before = self._streams.get(call.caller)
        if before is not None:
            # A client that connects again has lost its old stream.
            before.close()
        self._streams[call.caller] = stream
        self.counts.stream(1)
        return EventResponse(stream, partial(self._forget, call.caller, stream))

    async def _act(self, call: ApiRequest, actions: GroupActions) -> bytes | None:
        """Act on a group; the action continues even if the request ends."""
        name = f"{call.route.name} of group {call.parts['group']!r}"
        future = actions.runner.start(name, partial(_call, call))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), CALL_S_MAX)
        except TimeoutError:
            raise http_error(
                504,
                f"{name} has not ended after {CALL_S_MAX:.0f} s, and continues; see: "
                f"marshal groups history {call.parts['group']}",
                error=DeadlineExceeded,
            ) from None

    def _count_events(self, sent: int, snapshots: int) -> None:
        self.counts.events(sent, overruns=snapshots)

    def _forget(self, caller: Caller, stream: EventStream) -> None:
        self.counts.stream(-1)
        if self._streams.get(caller) is stream:
            del self._streams[caller]


class EventResponse(StreamingResponse):
    """A response that always closes its stream, even if sending fails."""

    def __init__(self, stream: EventStream, on_end: Callable[[], None]) -> None:
        super().__init__(
            stream.body(),
            media_type=EVENT_STREAM,
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )
        self._stream = stream
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, as ASGI defines it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()
            self._on_end()


# --- endpoints of the service


def _call(call: ApiRequest) -> bytes | None:
    """Call the service and encode its result, on a thread."""
    found = _HANDLERS[call.route.name](call)
    return None if found is None else msgspec.json.encode(found)


def _fences(calls: Sequence[ApiRequest]) -> Iterator[bytes]:
    """Yield the answers to ``fence`` requests of one timeout, after one log query."""
    service, keys = calls[0].service, [_key_of(call) for call in calls]
    service.catch_up(keys, timeout_ms=calls[0].timeout_ms)
    for key in keys:
        yield msgspec.json.encode(service.fence(key))


def _fence(call: ApiRequest) -> FenceNow:
    key = _key_of(call)
    call.service.catch_up([key], timeout_ms=call.timeout_ms)
    return call.service.fence(key)


def _key_of(call: ApiRequest) -> Key:
    parts = call.parts
    return Key(parts["group"], parts["topic"], int(parts["partition"]))


def _action(call: ApiRequest) -> msgspec.Struct:
    """Return the answer of an action on a group."""
    assert call.actions is not None
    act = getattr(call.actions, call.route.name)
    found: msgspec.Struct = act(call.parts["group"], call.body, timeout_ms=call.step_ms)
    return found


def _history(call: ApiRequest) -> msgspec.Struct:
    assert call.actions is not None
    return call.actions.history(
        call.parts["group"],
        limit=int(call.queries.get("limit", LIMIT_DEFAULT)),
        timeout_ms=call.step_ms,
    )


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


def _world(call: ApiRequest) -> tuple[World, list[Item]]:
    return call.service.world(timeout_ms=call.timeout_ms)


def _plan(call: ApiRequest) -> PlanNow:
    world, fields = call.service.plan(call.parts["group"], timeout_ms=call.timeout_ms)
    offsets = {str(t): offset for t, offset in sorted(world.items())}
    return PlanNow(as_of=AsOf(time_ms=_wall_ms(), offsets=offsets), **fields)


_HANDLERS: dict[str, Callable[[ApiRequest], msgspec.Struct | None]] = {
    "info": lambda call: call.service.info(),
    "register": lambda call: call.service.register(
        call.caller.group_id,
        call.caller.client_id,
        registration=call.body,
        peer=client_process(call.peer, call.body),
    ),
    "leave": lambda call: call.service.leave(call.caller, call.body),
    "beat": lambda call: call.service.beat(call.caller, call.body),
    "released": lambda call: call.service.release(call.caller, call.body),
    "ready": lambda call: call.service.ready(call.caller, call.body),
    "children": lambda call: call.service.children(call.caller, call.body),
    "subscribe": lambda call: call.service.subscribe(
        call.caller, call.parts["name"], spec=call.body
    ),
    "unsubscribe": lambda call: call.service.unsubscribe(
        call.caller,
        call.parts["name"],
        release=call.body,
        keep=bool(call.queries.get("keep", False)),
    ),
    "claim": lambda call: call.service.claim(
        call.caller,
        call.parts["topic"],
        partition=int(call.parts["partition"]),
        request=call.queries.get("request"),
    ),
    "unclaim": lambda call: call.service.unclaim(
        call.caller,
        call.parts["topic"],
        partition=int(call.parts["partition"]),
        request=call.queries.get("request"),
    ),
    "grant": lambda call: call.service.grant(call.parts["group"], call.body),
    "owners": lambda call: call.service.owners(
        call.parts["group"], call.parts["topic"], timeout_ms=call.timeout_ms
    ),
    "fence": _fence,
    "world": lambda call: world_now(_world(call)[0], _wall_ms()),
    "groups": lambda call: groups_now(*_world(call), wall_ms=_wall_ms()),
    "group": lambda call: group_now(
        *_world(call),
        handoffs=call.service.handoffs(call.parts["group"]),
        group=call.parts["group"],
        wall_ms=_wall_ms(),
    ),
    "plan": _plan,
    "pause": _action,
    "resume": _action,
    "reset": _action,
    "undo": _action,
    "finish": _action,
    "history": _history,
    "clients": lambda call: ClientsNow(
        as_of=AsOf(time_ms=_wall_ms(), offsets={}),
        clients=tuple(call.service.clients()),
    ),
}
_OF_DAEMON: dict[str, Callable[[App, Route], Awaitable[Response]]] = {
    "livez": App._probe,  # noqa: SLF001 - of this module
    "readyz": App._probe,  # noqa: SLF001 - of this module
    "startupz": App._probe,  # noqa: SLF001 - of this module
    "metrics": App._metrics,  # noqa: SLF001 - of this module
    "openapi": App._openapi,  # noqa: SLF001 - of this module
}


# --- responses


def _bearer_token(request: Request) -> str | None:
    """Return the token that a request shows, None without one."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given if given and scheme.lower() == "bearer" else None


def _response(route: Route, content: bytes | None) -> Response:
    if content is None:
        return Response(status_code=204)
    return Response(content, media_type=route.media)


def failure_of(route: Route, error: BaseException) -> Response:
    """Return the response to a failed request; log an unexpected error."""
    found = to_http_error(error)
    if found.status == 500:  # noqa: PLR2004 - of HTTP
        _log.error("a request to the sidecar failed: %s", route.name, exc_info=error)
    return failed(found)
