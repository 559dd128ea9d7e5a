"""Answers to the requests that clients repeat most, without routing them again.

Heartbeats are answered on the event loop, or on a thread where that takes longer. A
look at a claim waits for the log on a thread, with others; a grant is begun on the
event loop, and its verdict makes the response. The thread that makes a response sends
it.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial

import attrs
import msgspec
from starlette.responses import Response

from kafka_marshal.deadline import Deadline
from kafka_marshal.engine.proxy_grants import PendingGrant
from kafka_marshal.errors import MarshalError
from kafka_marshal.protocol.granting import GrantVerdict
from kafka_marshal.remote import api
from kafka_marshal.remote.grants import encode_verdict
from kafka_marshal.sidecar.executors import BoundedExecutor
from kafka_marshal.sidecar.http_errors import HttpError, unavailable
from kafka_marshal.sidecar.metrics import Counts
from kafka_marshal.sidecar.repeated_requests import Answer, Found, Later, response
from kafka_marshal.sidecar.requests import ApiRequest, response_bytes
from kafka_marshal.sidecar.routes import Route
from kafka_marshal.sidecar.service import SidecarService

# A verdict that takes longer is awaited by a thread, which notices a failed append.
THREAD_S = 0.05
_BEATS = msgspec.json.Decoder(api.HeartbeatRequest)
_GRANTS = msgspec.json.Decoder(api.GrantRequest)
_NO_NEWS = api.HeartbeatRequest()
# Looks that have waited so long for the end of a group get a thread of their own.
WAIT_S = 0.05


@attrs.frozen
class Look:
    """One look in progress."""

    call: ApiRequest
    later: Later


Respond = Callable[[Look, bytes | Exception], None]
"""Makes the response to a look, of a JSON document or an error; any thread."""


class Looks:
    """Answers looks in groups, each of which has one timeout.

    Each look asks the log for its end. A task alone waits for nobody. Looks that come
    while one is under way wait for its end, and are the next group, on the same thread
    and with one query: threads of several groups would take the interpreter lock from
    each other, and from the event loop, longer than the queries take.

    Args:
        executor: Threads for what waits.
        call: Answers looks of one timeout, in order; on a thread.
        respond: Makes each response.
    """

    def __init__(
        self,
        *,
        executor: BoundedExecutor,
        call: Callable[[Sequence[ApiRequest]], Iterable[bytes]],
        respond: Respond,
    ) -> None:
        self._executor = executor
        self._call = call
        self._respond = respond
        self._lock = threading.Lock()
        # Stands for the thread that answers what waits, None without one.
        self._server: object | None = None
        # By their timeout, in milliseconds; the oldest first.
        self._waiting: dict[int, list[Look]] = {}
        # Of the groups that were taken from the waiting looks.
        self._taken_count = 0
        self._is_timed = False

    def add(self, call: ApiRequest) -> Later | None:
        """Answer a look; None if too many requests are at work. On the event loop."""
        look = Look(call, Later())
        with self._lock:
            if self._server is not None:
                if not self._is_timed:
                    self._start_timer()
                # Each is of another connection, so that there is a limit.
                self._waiting.setdefault(call.timeout_ms, []).append(look)
                return look.later
        return look.later if self._start([look]) else None

    def _start(self, looks: list[Look]) -> bool:
        """Answer a group on a new thread; return whether there was one for it."""
        server = object()
        with self._lock:
            self._server = server
        try:
            self._executor.reserve()
            future = self._executor.submit(partial(self._run, server, looks))
        except HttpError:
            with self._lock:
                self._server = None
            return False
        future.add_done_callback(partial(self._on_end, looks))
        return True

    def _start_timer(self) -> None:
        """Look again soon. On the event loop, under the lock."""
        self._is_timed = True
        asyncio.get_running_loop().call_later(
            WAIT_S, self._start_late, self._taken_count
        )

    def _start_late(self, taken_count: int) -> None:
        """Start the looks that wait behind a group that has been slow since then."""
        with self._lock:
            self._is_timed = False
            if self._waiting and self._taken_count != taken_count:
                # Of another timeout: they wait behind the group that was taken.
                self._start_timer()
                return
            late, self._waiting = self._waiting, {}
            self._taken_count += 1
        for looks in late.values():
            if not self._start(looks):
                self._fail(looks, unavailable("the sidecar is busy; try again soon"))

    def _run(self, server: object, looks: list[Look]) -> None:
        """Answer a group, and those that came meanwhile; on a thread."""
        while looks:
            self._answer(looks)
            looks = self._next(server)

    def _next(self, server: object) -> list[Look]:
        """Return the next group, none where the thread has nothing more to do."""
        with self._lock:
            if self._server is not server:
                return []  # it was slow, and another thread has replaced it
            if not self._waiting:
                self._server = None
                return []
            self._taken_count += 1
            return self._waiting.pop(next(iter(self._waiting)))

    def _answer(self, looks: list[Look]) -> None:
        left = iter(looks)
        try:
            contents = self._call([look.call for look in looks])
            # In this order: an error takes no look from those that are left.
            for content, look in zip(contents, left, strict=True):
                self._respond(look, content)
        except Exception as error:  # noqa: BLE001 - answered, whatever it is
            self._fail(left, error)

    def _on_end(self, looks: list[Look], ended: Future[None]) -> None:
        """Refuse looks whose thread will not run any more."""
        if not ended.cancelled():
            return
        with self._lock:
            late, self._waiting = self._waiting, {}
        for each in (looks, *late.values()):
            self._fail(each, unavailable("the sidecar is shutting down"))

    def _fail(self, looks: Iterable[Look], error: Exception) -> None:
        for look in looks:
            self._respond(look, error)


class RepeatedAnswers:
    """Makes the answers. ``answer_to`` and what it returns run on the event loop.

    Args:
        service: Returns the service, None while there is none.
        counts: Counts the requests.
        quick: Threads for what does not wait.
        waiting: Threads for what waits.
        call: Answers a request on a thread.
        look: Answers looks of one timeout on a thread, in order.
        to_response: Makes the response to a failed request.
    """

    def __init__(
        self,
        *,
        service: Callable[[], SidecarService | None],
        counts: Counts,
        quick: BoundedExecutor,
        waiting: BoundedExecutor,
        call: Callable[[ApiRequest], bytes | None],
        look: Callable[[Sequence[ApiRequest]], Iterable[bytes]],
        to_response: Callable[[Route, BaseException], Response],
    ) -> None:
        self._service = service
        self._counts = counts
        self._quick = quick
        self._waiting = waiting
        self._call = call
        self._to_response = to_response
        self._looks = Looks(executor=waiting, call=look, respond=self._respond_look)

    def answer_to(self, call: ApiRequest) -> Answer | None:
        """Return what answers repetitions of a request; None where it is parsed."""
        match call.route.name:
            case "beat":
                return partial(self._beat, call)
            case "grant":
                return partial(self._grant, call)
            case "fence":
                return partial(self._look, call)
        return None

    def _beat(self, call: ApiRequest, body: bytes) -> Found:
        """Answer a heartbeat at once, or on a thread; None if it must be parsed."""
        service = self._service()
        if service is None:
            return None
        try:
            beat = _BEATS.decode(body) if body else _NO_NEWS
            found = service.beat_at_once(call.caller, beat)
        except (MarshalError, msgspec.MsgspecError, RecursionError):
            return None  # refused with a reason, as the first one would be
        if found is None:
            return self._on_thread(attrs.evolve(call, service=service, body=beat))
        self._counts.request("beat", 200)
        return response(msgspec.json.encode(found))

    def _look(self, call: ApiRequest, body: bytes) -> Found:
        """Answer a query of the log, on a thread."""
        if self._service() is not call.service or body:
            return None
        return self._looks.add(call)

    def _respond_look(self, look: Look, found: bytes | Exception) -> None:
        request = _Pending(look.call.route, look.call.service, look.later)
        if isinstance(found, bytes):
            self.succeed(request, found)
        else:
            self.fail(request, found)

    def _on_thread(self, call: ApiRequest) -> Later | None:
        """Answer a request on a thread; None if too many are at work."""
        executor = self._waiting if call.waits else self._quick
        try:
            executor.reserve()
            future = executor.submit(partial(self._call, call))
        except HttpError:
            return None
        pending = _Pending(call.route, call.service, Later())
        future.add_done_callback(partial(self._respond, pending))
        return pending.later

    def _grant(self, call: ApiRequest, body: bytes) -> Found:
        """Begin a grant, which the verdict answers; on a thread if that must wait."""
        service = self._service()
        if service is None:
            return None
        try:
            message = _GRANTS.decode(body)
            self._waiting.reserve()
        except (msgspec.MsgspecError, RecursionError, HttpError):
            return None
        deadline = service.deadline(message.timeout_ms)
        grant = _Grant(self, _Pending(call.route, service, Later()))
        pending = None
        with contextlib.suppress(MarshalError):  # nothing was appended
            pending = service.grant_at_once(
                call.parts["group"], message, on_verdict=grant.on_verdict
            )
        if pending is None:
            self._waiting.leave()
            # The thread waits for what was busy, or has the reason of a refusal.
            return self._on_thread(attrs.evolve(call, service=service, body=message))
        grant.begin(pending, deadline)
        return grant.request.later

    def _respond(self, request: "_Pending", ended: Future[bytes | None]) -> None:
        """Respond with the outcome of a call, on its thread."""
        try:
            content = ended.result(0)
        except CancelledError:
            self.fail(request, unavailable("the sidecar is shutting down"))
        except Exception as error:  # noqa: BLE001 - answered, whatever it is
            self.fail(request, error)
        else:
            self.succeed(request, content or b"")

    def succeed(self, request: "_Pending", content: bytes) -> None:
        """Respond with a JSON document; any thread."""
        self._counts.request(request.route.name, 200)
        request.later.put(response(content))

    def fail(self, request: "_Pending", error: Exception) -> None:
        """Respond with an error; any thread."""
        found = self._to_response(request.route, error)
        self._counts.request(request.route.name, found.status_code)
        request.later.put(response_bytes(found))

    def leave(self) -> None:
        """Give the reserved thread back; any thread."""
        self._waiting.leave()

    def await_verdict(
        self, grant: "_Grant", pending: PendingGrant, *, deadline: Deadline
    ) -> None:
        """Wait for a verdict on a thread, in the reserved place."""

        def wait() -> bytes | None:
            service = grant.request.service
            found = service.await_grant(pending, deadline)
            return msgspec.json.encode(found)

        try:
            future = self._waiting.submit(wait)
        except HttpError as error:
            self.fail(grant.request, error)
            return
        future.add_done_callback(partial(self._respond, grant.request))


@attrs.frozen
class _Pending:
    """A request whose response is not made yet."""

    route: Route
    service: SidecarService
    later: Later


class _Grant:
    """One grant in flight: the verdict answers it, or a thread that waits for that."""

    def __init__(self, answers: RepeatedAnswers, request: _Pending) -> None:
        self.request = request
        self._answers = answers
        self._lock = threading.Lock()
        self._is_taken = False

    def begin(self, pending: PendingGrant, deadline: Deadline) -> None:
        """Wait for the verdict: for a moment, then on a thread. On the event loop."""
        if pending.verdict is not None:
            self.on_verdict(pending.verdict)
            return
        # If the verdict is there by then, this does nothing.
        asyncio.get_running_loop().call_later(
            min(THREAD_S, deadline.left_s), partial(self._hand_over, pending, deadline)
        )

    def on_verdict(self, verdict: GrantVerdict) -> None:
        """Respond with the verdict, unless a thread does; any thread, never blocks."""
        if self._take():
            self._answers.leave()
            found = msgspec.json.encode(encode_verdict(verdict))
            self._answers.succeed(self.request, found)

    def _hand_over(self, pending: PendingGrant, deadline: Deadline) -> None:
        if self._take():
            self._answers.await_verdict(self, pending, deadline=deadline)

    def _take(self) -> bool:
        """Return whether the caller is the first, which responds."""
        with self._lock:
            is_taken, self._is_taken = self._is_taken, True
        return not is_taken
