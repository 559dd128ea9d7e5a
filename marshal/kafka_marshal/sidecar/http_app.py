"""Where requests do what may block: bounded pools of threads.

What only looks or notes has a pool of its own, so that those who wait for the log
never keep a beat from being taken. Whoever finds a pool full is told to come again.

Views of the world document, for whoever only looks, and of verdicts. Pure.

The sidecar's HTTP: requests checked and bounded, answered by the service.

Whatever comes in, what goes out is an answer of the table in ``routes`` or a
``Failure`` with a 4xx status. Nothing here decides about claims.
"""

import asyncio
import hmac
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import attrs
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kafka_marshal.errors import MarshalError
from kafka_marshal.observability.logs import LOGGER_NAME
from kafka_marshal.remote import api
from kafka_marshal.remote.looking import (
    AsOf,
    ClientsNow,
    FenceNow,
    GroupLine,
    GroupNow,
    GroupsNow,
    OwnersNow,
    WorldNow,
)
from kafka_marshal.sidecar.config import CONNECTIONS_MAX
from kafka_marshal.sidecar.events import EventStream
from kafka_marshal.sidecar.http_errors import (
    RETRY_AFTER_S,
    HttpError,
    http_error,
    to_http_error,
    unavailable,
)
from kafka_marshal.sidecar.metrics import OTHER, Counts
from kafka_marshal.sidecar.process_monitor import Caller, may_use
from kafka_marshal.sidecar.requests import (
    PROBE_S_MAX,
    ApiRequest,
    Connection,
    HealthChecks,
    Service,
    caller_of,
    client_process,
    connection_of,
    declares_body,
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

# --- Bounded executors -----------------------------------------------------------


T = TypeVar("T")


class BoundedExecutor:
    """Threads for calls, with a limit to how many may queue.

    Args:
        name: Name of the threads.
        threads: How many calls run at a time.
        calls_max: How many may run or queue.
    """

    def __init__(self, name: str, *, threads: int, calls_max: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._calls_max = calls_max
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """Number of calls that run or queue."""
        return self._count

    async def run(self, call: Callable[[], T], *, timeout_s: float) -> T:
        """Return what a call returns, made on a thread.

        Raises:
            Answered: Too many calls wait; come again.
            TimeoutError: It took too long; it goes on all the same.
        """
        with self._lock:
            if self._count >= self._calls_max:
                raise unavailable(
                    f"the sidecar is busy with {self._count} requests; try again soon"
                )
            self._count += 1
        try:
            future = self._executor.submit(call)
        except RuntimeError:
            self._done(None)
            raise unavailable(
                "the sidecar is about to end; look for its next"
            ) from None
        future.add_done_callback(self._done)
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)

    def close(self) -> None:
        """Take no further call; what runs goes on, what queues does not begin."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _done(self, future: Future[T] | None) -> None:
        del future
        with self._lock:
            self._count -= 1


# --- Read models -----------------------------------------------------------------


World = Mapping[str, Any]
Item = dict[str, Any]


def as_of(world: World, wall_ms: int) -> AsOf:
    """Return which moment a world document is of."""
    offsets = {t: part["next_offset"] for t, part in world["partitions"].items()}
    return AsOf(time_ms=wall_ms, offsets=offsets)


def world_now(world: World, wall_ms: int) -> WorldNow:
    """Return the whole document."""
    return WorldNow(
        as_of=as_of(world, wall_ms),
        schema=world["schema"],
        partitions=world["partitions"],
    )


def groups_now(world: World, wall_ms: int) -> GroupsNow:
    """Return a line for each group that has keys or is paused."""
    keys: dict[str, list[Item]] = {}
    for claim in _claims(world):
        keys.setdefault(claim["group_id"], []).append(claim)
    paused = {pause["group_id"] for pause in _pauses(world)}
    lines = []
    for group in sorted(paused | set(keys)):
        owners = [name for name in map(_owner, keys.get(group, ())) if name is not None]
        lines.append(
            GroupLine(
                group=group,
                keys=len(keys.get(group, ())),
                owned=len(owners),
                owners=tuple(sorted(set(owners))),
                is_paused=group in paused,
            )
        )
    return GroupsNow(as_of=as_of(world, wall_ms), groups=tuple(lines))


def group_now(world: World, group: str, *, wall_ms: int) -> GroupNow:
    """Return the claims and pauses of one group; of one that never was, none."""
    claims = [claim for claim in _claims(world) if claim["group_id"] == group]
    return GroupNow(
        as_of=as_of(world, wall_ms),
        group=group,
        claims=tuple(sorted(claims, key=lambda c: (c["topic"], c["partition"]))),
        pauses=tuple(p for p in _pauses(world) if p["group_id"] == group),
    )


def owners_now(world: World, group: str, *, topic: str, wall_ms: int) -> OwnersNow:
    """Return who owns each partition of a topic that was ever claimed."""
    owners = {
        claim["partition"]: _owner(claim)
        for claim in _claims(world)
        if (claim["group_id"], claim["topic"]) == (group, topic)
    }
    return OwnersNow(as_of=as_of(world, wall_ms), owners=dict(sorted(owners.items())))


def fence_now(
    world: World, group: str, *, topic: str, partition: int, wall_ms: int
) -> FenceNow:
    """Return the newest claim of a partition; nothing where there never was one."""
    key = (group, topic, partition)
    for claim in _claims(world):
        if (claim["group_id"], claim["topic"], claim["partition"]) == key:
            owner = claim["owner"] or {}
            return FenceNow(
                as_of=as_of(world, wall_ms),
                token=claim["token"],
                epoch=claim["epoch"],
                client_id=owner.get("client_id"),
                incarnation=owner.get("incarnation"),
                position=claim["position"],
            )
    return FenceNow(
        as_of=as_of(world, wall_ms),
        token=None,
        epoch=None,
        client_id=None,
        incarnation=None,
        position=None,
    )


def _claims(world: World) -> Iterator[Item]:
    for part in world["partitions"].values():
        yield from part["claims"]


def _pauses(world: World) -> list[Item]:
    """Return each pause once: every coordinating partition tells of it."""
    found: dict[tuple[str, str], Item] = {}
    for part in world["partitions"].values():
        for pause in part["pauses"]:
            found.setdefault((pause["group_id"], pause["op_id"]), pause)
    return list(found.values())


def _owner(claim: Item) -> str | None:
    owner = claim["owner"]
    return None if owner is None else str(owner["client_id"])


# --- The application -------------------------------------------------------------


CALL_S_MAX = api.WAIT_MS_MAX / 1000 + 30
KEEP_ALIVE_S = 5.0
QUICK_THREADS = 8
WAITING_THREADS = 64
STREAM_THREADS = 4
CALLS_MAX = 256
STREAMS_MAX = CONNECTIONS_MAX
_ID = re.compile(r"[0-9a-f]{1,16}(\.[0-9]{1,20}){3}")
_log = logging.getLogger(LOGGER_NAME)


@attrs.define(eq=False)
class AppContext:
    """What there is to serve; it grows while the daemon starts.

    Attributes:
        health: Answers probes.
        service: Answers the requests; None as long as nothing is connected.
        metrics: Returns the figures and their media type.
        counts: What is counted on the way.
        explain: Says what the daemon is doing, where there is no service.
        token: What TCP connections have to show, None where there is no TCP.
        socket_gid: Group whose members may use the Unix socket, too.
        keep_alive_s: Longest silence of a stream.
    """

    health: HealthChecks
    service: Service | None = None
    metrics: Callable[[], tuple[bytes, str]] | None = None
    counts: Counts = attrs.field(factory=Counts)
    explain: Callable[[], str] = lambda: "it is starting"
    token: bytes | None = None
    socket_gid: int | None = None
    keep_alive_s: float = KEEP_ALIVE_S

    def require_service(self) -> Service:
        """Return the service.

        Raises:
            Answered: There is none yet.
        """
        if self.service is None:
            raise unavailable(f"the sidecar is not ready: {self.explain()}")
        return self.service


class App:
    """The application of one daemon.

    Args:
        serving: What there is to serve.
    """

    def __init__(self, serving: AppContext) -> None:
        self._serving = serving
        self._quick = BoundedExecutor(
            "sidecar", threads=QUICK_THREADS, calls_max=CALLS_MAX
        )
        self._waiting = BoundedExecutor(
            "sidecar-wait", threads=WAITING_THREADS, calls_max=CALLS_MAX
        )
        self._streaming = BoundedExecutor(
            "sidecar-feed", threads=STREAM_THREADS, calls_max=2 * STREAMS_MAX
        )
        self._streams: dict[Caller, EventStream] = {}
        self._asgi: ASGIApp = self._starlette()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request as ASGI has it.

        The connection ends with the response where the body was not read to its end,
        because nothing bounds how long the rest may take, and where it is not
        admitted.
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

    @property
    def stream_count(self) -> int:
        """Number of open streams."""
        return len(self._streams)

    def end_streams(self) -> None:
        """End every stream after what it is sending. On the event loop."""
        for stream in list(self._streams.values()):
            stream.end()

    def close(self) -> None:
        """Take no further work."""
        for executor in (self._quick, self._waiting, self._streaming):
            executor.close()

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
            # It would stand for a GET that is carried out for nothing.
            (place.methods or set()).discard("HEAD")
            places.append(place)
        found = Starlette(
            routes=places,
            exception_handlers={HTTPException: self._no_such_place},
        )
        found.router.redirect_slashes = False
        return found

    async def _endpoint(
        self, routes: Mapping[str, Route], request: Request
    ) -> Response:
        route = routes[request.method]
        response = await self._tried(route, request)
        self._serving.counts.request(route.name, response.status_code)
        return response

    async def _tried(self, route: Route, request: Request) -> Response:
        try:
            return await self._answer(route, request)
        except ClientDisconnect:
            return Response(status_code=400)
        except TimeoutError:
            return failed(
                http_error(504, "it took too long; try again", error=MarshalError)
            )
        except Exception as error:  # noqa: BLE001 - answered, whatever it is
            found = to_http_error(error)
            if found.status == 500:  # noqa: PLR2004 - of HTTP
                _log.exception("a request failed: %s", route.name)
            return failed(found)

    async def _answer(self, route: Route, request: Request) -> Response:
        connection = connection_of(request)
        self._require_allowed(route, request, connection)
        special = _OF_DAEMON.get(route.name)
        if special is not None:
            return await special(self, route)
        parts = parse_path(request.path_params)
        queries = parse_queries(route, request)
        caller = caller_of(route, request, parts=parts)
        # Read all the same where there is no service: the connection goes on.
        body = await read_body(route, request)
        if isinstance(body, api.Registration):
            caller = attrs.evolve(caller, instance=body.instance)
        require_one_client(connection, caller)
        ask = ApiRequest(
            route,
            self._serving.require_service(),
            parts,
            queries,
            caller,
            connection.peer,
            body,
        )
        if route.name == "events":
            response: Response = await self._events(ask, request)
        else:
            executor = self._waiting if ask.waits else self._quick
            content = await executor.run(partial(_call, ask), timeout_s=CALL_S_MAX)
            response = _response(route, content)
        if caller.client_id:
            connection.client = caller
        return response

    def _require_allowed(
        self, route: Route, request: Request, connection: Connection
    ) -> None:
        """Let in our own user over the Unix socket, and the token over TCP."""
        if connection.is_local:
            if not may_use(connection.peer, self._serving.socket_gid):
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
                raise http_error(
                    401,
                    "over TCP the sidecar asks for its token; send Authorization: "
                    "Bearer with what its token file holds",
                    setting="token",
                )
        if not connection.admit() and not route.is_open:
            raise unavailable(
                "as many connections stand already as may; close one, or try again soon"
            )

    def _shows_token(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer"
        token = self._serving.token
        return (
            token is not None
            and is_bearer
            and hmac.compare_digest(given.encode(), token)
        )

    async def _no_such_place(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        what = f"{request.method[:20]} {request.scope['path'][:200]!r}"
        response = failed(
            http_error(
                status,
                f"there is no {what} here; see {OPENAPI_PATH}",
                setting="path",
            )
        )
        self._serving.counts.request(OTHER, status)
        if isinstance(error, HTTPException) and error.headers:
            response.headers.update(error.headers)
        return response

    # --- what the daemon answers itself

    async def _probe(self, route: Route) -> Response:
        health = self._serving.health
        look = {
            "livez": health.live,
            "readyz": health.ready,
            "startupz": health.started,
        }[route.name]
        found = await self._quick.run(look, timeout_s=PROBE_S_MAX)
        return Response(found.to_json(), found.status, media_type=route.media)

    async def _metrics(self, route: Route) -> Response:
        del route
        if self._serving.metrics is None:
            raise unavailable(f"no figures yet: {self._serving.explain()}")
        found = await self._quick.run(self._serving.metrics, timeout_s=PROBE_S_MAX)
        return Response(found[0], media_type=found[1])

    async def _openapi(self, route: Route) -> Response:
        return Response(openapi_text(), media_type=route.media)

    async def _events(self, ask: ApiRequest, request: Request) -> Response:
        if len(self._streams) >= STREAMS_MAX:
            raise unavailable(f"{STREAMS_MAX} streams are open; close one")
        after = request.headers.get(api.EVENT_ID_HEADER)
        if after is not None and not _ID.fullmatch(after):
            after = None
        feed = await self._quick.run(
            partial(ask.service.feed, ask.caller, after), timeout_s=CALL_S_MAX
        )
        run = partial(self._streaming.run, timeout_s=CALL_S_MAX)
        stream = EventStream(
            feed,
            take=run,
            keep_alive_s=self._serving.keep_alive_s,
            on_sent=self._count_events,
        )
        before = self._streams.get(ask.caller)
        if before is not None:
            # Who comes anew has lost the old one, whether or not we know it.
            before.close()
        self._streams[ask.caller] = stream
        self._serving.counts.stream(1)
        return EventResponse(stream, partial(self._forget, ask.caller, stream))

    def _count_events(self, sent: int, anew: int) -> None:
        self._serving.counts.events(sent)
        for _ in range(anew):
            self._serving.counts.overrun()

    def _forget(self, caller: Caller, stream: EventStream) -> None:
        self._serving.counts.stream(-1)
        if self._streams.get(caller) is stream:
            del self._streams[caller]


class EventResponse(StreamingResponse):
    """A stream that lets go of its feed however it ends."""

    def __init__(self, stream: EventStream, on_end: Callable[[], None]) -> None:
        super().__init__(
            stream.body(),
            media_type=EVENT_STREAM,
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )
        self._stream = stream
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, as ASGI has it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()
            self._on_end()


# --- what the service answers


def _call(ask: ApiRequest) -> bytes | None:
    """Ask the service, on a thread; the answer is written there, too."""
    found = _HANDLERS[ask.route.name](ask)
    return None if found is None else msgspec.json.encode(found)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


def _world(ask: ApiRequest) -> World:
    return ask.service.world(timeout_ms=ask.timeout_ms)


_HANDLERS: dict[str, Callable[[ApiRequest], msgspec.Struct | None]] = {
    "info": lambda ask: ask.service.info(),
    "register": lambda ask: ask.service.register(
        ask.caller.group_id,
        ask.caller.client_id,
        registration=ask.body,
        peer=client_process(ask.peer, ask.body),
    ),
    "leave": lambda ask: ask.service.leave(ask.caller, ask.body),
    "beat": lambda ask: ask.service.beat(ask.caller, ask.body),
    "released": lambda ask: ask.service.release(ask.caller, ask.body),
    "children": lambda ask: ask.service.children(ask.caller, ask.body),
    "subscribe": lambda ask: ask.service.subscribe(
        ask.caller, ask.parts["name"], wants=ask.body
    ),
    "unsubscribe": lambda ask: ask.service.unsubscribe(
        ask.caller,
        ask.parts["name"],
        release=ask.body,
        keep=bool(ask.queries.get("keep", False)),
    ),
    "claim": lambda ask: ask.service.claim(
        ask.caller,
        ask.parts["topic"],
        partition=int(ask.parts["partition"]),
        wish=ask.queries.get("wish"),
    ),
    "unclaim": lambda ask: ask.service.unclaim(
        ask.caller,
        ask.parts["topic"],
        partition=int(ask.parts["partition"]),
        wish=ask.queries.get("wish"),
    ),
    "grant": lambda ask: ask.service.grant(ask.parts["group"], ask.body),
    "owners": lambda ask: owners_now(
        _world(ask), ask.parts["group"], topic=ask.parts["topic"], wall_ms=_wall_ms()
    ),
    "fence": lambda ask: fence_now(
        _world(ask),
        ask.parts["group"],
        topic=ask.parts["topic"],
        partition=int(ask.parts["partition"]),
        wall_ms=_wall_ms(),
    ),
    "world": lambda ask: world_now(_world(ask), _wall_ms()),
    "groups": lambda ask: groups_now(_world(ask), _wall_ms()),
    "group": lambda ask: group_now(_world(ask), ask.parts["group"], wall_ms=_wall_ms()),
    "clients": lambda ask: ClientsNow(
        as_of=AsOf(time_ms=_wall_ms(), offsets={}), clients=tuple(ask.service.clients())
    ),
}
_OF_DAEMON: dict[str, Callable[[App, Route], Awaitable[Response]]] = {
    "livez": App._probe,  # noqa: SLF001 - of this module
    "readyz": App._probe,  # noqa: SLF001 - of this module
    "startupz": App._probe,  # noqa: SLF001 - of this module
    "metrics": App._metrics,  # noqa: SLF001 - of this module
    "openapi": App._openapi,  # noqa: SLF001 - of this module
}


# --- answers


def _response(route: Route, content: bytes | None) -> Response:
    if content is None:
        return Response(status_code=204)
    return Response(content, media_type=route.media)


def failed(found: HttpError) -> Response:
    """Return the response of an answer that is no success."""
    headers = {}
    if found.status == 503:  # noqa: PLR2004 - of HTTP
        headers["retry-after"] = str(RETRY_AFTER_S)
    if found.status == 401:  # noqa: PLR2004 - of HTTP
        headers["www-authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(found.failure),
        found.status,
        headers=headers,
        media_type="application/json",
    )
