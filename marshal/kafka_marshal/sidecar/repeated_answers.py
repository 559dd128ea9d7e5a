"""Answers the requests that clients repeat most, without routing them again.

Heartbeats are answered on the event loop, or on a thread if they take longer. A fence
query (the newest claim of a key) waits for the log on a thread, together with other
fence queries. A grant is begun on the event loop, and answered once its verdict is
read. The thread that makes a response sends it.
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
from kafka_marshal.errors import DeadlineExceeded, MarshalError
from kafka_marshal.protocol.granting import GrantVerdict
from kafka_marshal.remote import api
from kafka_marshal.remote.grants import encode_verdict
from kafka_marshal.sidecar.executors import BoundedExecutor
from kafka_marshal.sidecar.http_errors import SHUTTING_DOWN, HttpError, unavailable
from kafka_marshal.sidecar.metrics import Counts
from kafka_marshal.sidecar.repeated_requests import Answer, Found, Later, response
from kafka_marshal.sidecar.requests import ApiRequest, response_bytes
from kafka_marshal.sidecar.routes import Route
from kafka_marshal.sidecar.service import SidecarService

# After this time a thread waits for the verdict, and notices a failed append.
THREAD_S = 0.05
_BEATS = msgspec.json.Decoder(api.HeartbeatRequest)
_GRANTS = msgspec.json.Decoder(api.GrantRequest)
_NO_NEWS = api.HeartbeatRequest()
# Queries that have waited this long behind another group get a thread of their own.
WAIT_S = 0.05


@attrs.frozen
class PendingRequest:
    """A request whose response is not made yet."""

    call: ApiRequest
    later: Later = attrs.field(factory=Later, init=False)


Respond = Callable[[PendingRequest, bytes | Exception], None]
"""Makes the response to a query from a JSON document or an error; on any thread."""


class FenceQueries:
    """Answers fence queries in groups; those of a group have the same timeout.

    Each must look up the end of the log. A single query is answered at once. Queries
    that arrive meanwhile wait, and then form the next group, which the same thread
    answers with one look-up. With a thread for each group, threads would wait for the
    interpreter lock, and make the event loop wait, longer than the look-ups take.

    Args:
        executor: Threads for requests that wait.
        call: Answers queries of one timeout, in order; on a thread.
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
        # Identifies the thread that answers waiting queries; None while there is none.
        self._server: object | None = None
        # Waiting queries by their timeout in milliseconds, the oldest first.
        self._waiting: dict[int, list[PendingRequest]] = {}
        # Number of groups that were taken from the waiting queries so far.
        self._taken_count = 0
        self._is_timed = False

    def add(self, call: ApiRequest) -> Later | None:
        """Answer a query; None if too many requests run. On the event loop."""
        query = PendingRequest(call)
        with self._lock:
            if self._server is not None:
                if not self._is_timed:
                    self._start_timer()
                # Each query is of another connection, so their number is limited.
                self._waiting.setdefault(call.timeout_ms, []).append(query)
                return query.later
        return query.later if self._start([query]) else None

    def _start(self, queries: list[PendingRequest]) -> bool:
        """Answer a group on a new thread; return whether a thread was available."""
        server = object()
        with self._lock:
            self._server = server
        try:
            self._executor.reserve()
            future = self._executor.submit(partial(self._run, server, queries))
        except HttpError:
            with self._lock:
                self._server = None
            return False
        future.add_done_callback(partial(self._on_end, queries))
        return True

    def _start_timer(self) -> None:
        """Check the waiting queries again soon. On the event loop, under the lock."""
        self._is_timed = True
        asyncio.get_running_loop().call_later(
            WAIT_S, self._start_late, self._taken_count
        )

    def _start_late(self, taken_count: int) -> None:
        """Start waiting queries if no group was taken since the timer was started."""
        with self._lock:
            self._is_timed = False
            if self._waiting and self._taken_count != taken_count:
                # The remaining queries wait behind the group that was taken since then.
                self._start_timer()
                return
            late, self._waiting = self._waiting, {}
            self._taken_count += 1
        for queries in late.values():
            if not self._start(queries):
                self._fail(queries, unavailable("the sidecar is busy; try again soon"))

    def _run(self, server: object, queries: list[PendingRequest]) -> None:
        """Answer a group, and then the groups that arrived meanwhile; on a thread."""
        while queries:
            self._answer(queries)
            queries = self._next(server)

    def _next(self, server: object) -> list[PendingRequest]:
        """Return the next group; an empty one if this thread has nothing more to do."""
        with self._lock:
            if self._server is not server:
                return []  # this thread was slow, and another one has replaced it
            if not self._waiting:
                self._server = None
                return []
            self._taken_count += 1
            return self._waiting.pop(next(iter(self._waiting)))

    def _answer(self, queries: list[PendingRequest]) -> None:
        left = iter(queries)
        try:
            contents = self._call([query.call for query in queries])
            # ``contents`` first: if it raises, no query is taken from ``left``.
            for content, query in zip(contents, left, strict=True):
                self._respond(query, content)
        except Exception as error:  # noqa: BLE001 - answered, whatever it is
            self._fail(left, error)

    def _on_end(self, queries: list[PendingRequest], ended: Future[None]) -> None:
        """Refuse queries whose thread was cancelled before it ran."""
        if not ended.cancelled():
            return
        with self._lock:
            late, self._waiting = self._waiting, {}
        for each in (queries, *late.values()):
            self._fail(each, unavailable(SHUTTING_DOWN))

    def _fail(self, queries: Iterable[PendingRequest], error: Exception) -> None:
        for query in queries:
            self._respond(query, error)


class RepeatedAnswers:
    """Answers repeated requests. ``answer_to`` and its results run on the event loop.

    Args:
        service: Returns the service, None while there is none.
        counts: Counts the requests.
        quick: Threads for requests that do not wait.
        waiting: Threads for requests that wait.
        call: Answers a request on a thread.
        call_fence: Answers fence queries of one timeout on a thread, in order.
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
        call_fence: Callable[[Sequence[ApiRequest]], Iterable[bytes]],
        to_response: Callable[[Route, BaseException], Response],
    ) -> None:
        self._service = service
        self._counts = counts
        self._quick = quick
        self._waiting = waiting
        self._call = call
        self._to_response = to_response
        self._fence_queries = FenceQueries(
            executor=waiting, call=call_fence, respond=self.respond
        )

    def answer_to(self, call: ApiRequest) -> Answer | None:
        """Return what answers repetitions of a request, None if they must be parsed."""
        match call.route.name:
            case "beat":
                return partial(self._beat, call)
            case "grant":
                return partial(self._grant, call)
            case "fence":
                return partial(self._fence, call)
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
            return None  # it is parsed again, and then refused with a reason
        if found is None:
            return self._on_thread(attrs.evolve(call, service=service, body=beat))
        self._counts.request("beat", 200)
        return response(msgspec.json.encode(found))

    def _fence(self, call: ApiRequest, body: bytes) -> Found:
        """Answer a fence query, on a thread."""
        if self._service() is not call.service or body:
            return None
        return self._fence_queries.add(call)

    def _on_thread(self, call: ApiRequest) -> Later | None:
        """Answer a request on a thread; None if too many requests run."""
        executor = self._waiting if call.waits else self._quick
        try:
            executor.reserve()
            future = executor.submit(partial(self._call, call))
        except HttpError:
            return None
        pending = PendingRequest(call)
        future.add_done_callback(partial(self._on_end, pending))
        return pending.later

    def _grant(self, call: ApiRequest, body: bytes) -> Found:
        """Begin a grant, to be answered by its verdict; on a thread if it must wait."""
        service = self._service()
        if service is None:
            return None
        try:
            message = _GRANTS.decode(body)
            self._waiting.reserve()
        except (msgspec.MsgspecError, RecursionError, HttpError):
            return None
        deadline = service.deadline(message.timeout_ms)
        call = attrs.evolve(call, service=service, body=message)
        grant = _Grant(self, PendingRequest(call))
        pending = None
        with contextlib.suppress(MarshalError):  # nothing was appended
            pending = service.grant_at_once(
                call.parts["group"], message, on_verdict=grant.on_verdict
            )
        if pending is None:
            self._waiting.leave()
            # The thread waits for the busy engine, or raises the reason of a refusal.
            return self._on_thread(call)
        grant.begin(pending, deadline)
        return grant.request.later

    def _on_end(
        self,
        request: PendingRequest,
        ended: Future[bytes | None],
        *,
        is_sent: bool = False,
    ) -> None:
        """Respond with the outcome of a call; runs on its thread.

        ``is_sent``: whether a record was sent before the call, which only waits.
        """
        try:
            content = ended.result(0)
        except CancelledError:
            failure = _unread() if is_sent else unavailable(SHUTTING_DOWN)
            self.respond(request, failure)
        except Exception as error:  # noqa: BLE001 - answered, whatever it is
            self.respond(request, error)
        else:
            self.respond(request, content or b"")

    def respond(self, request: PendingRequest, found: bytes | Exception) -> None:
        """Respond with a JSON document, or an error; on any thread."""
        name = request.call.route.name
        if isinstance(found, bytes):
            self._counts.request(name, 200)
            request.later.put(response(found))
        else:
            failed = self._to_response(request.call.route, found)
            self._counts.request(name, failed.status_code)
            request.later.put(response_bytes(failed))

    def leave(self) -> None:
        """Give the reserved place of a thread back; on any thread."""
        self._waiting.leave()

    def await_verdict(
        self, grant: "_Grant", pending: PendingGrant, *, deadline: Deadline
    ) -> None:
        """Wait for a verdict on a thread, which takes the reserved place."""

        def wait() -> bytes | None:
            found = grant.request.call.service.await_grant(pending, deadline)
            return msgspec.json.encode(found)

        try:
            future = self._waiting.submit(wait)
        except HttpError:
            self.respond(grant.request, _unread())
            return
        future.add_done_callback(partial(self._on_end, grant.request, is_sent=True))


def _unread() -> MarshalError:
    """Return the error of a grant that was sent, and may still be accepted."""
    return DeadlineExceeded(
        "the sidecar is shutting down and waits no longer for the log's verdict; the "
        "offsets may still be granted"
    )


class _Grant:
    """One grant in flight, answered by its verdict or by a thread that waits for it."""

    def __init__(self, answers: RepeatedAnswers, request: PendingRequest) -> None:
        self.request = request
        self._answers = answers
        self._lock = threading.Lock()
        self._is_taken = False

    def begin(self, pending: PendingGrant, deadline: Deadline) -> None:
        """Wait for the verdict; after a moment, on a thread. On the event loop."""
        if pending.verdict is not None:
            self.on_verdict(pending.verdict)
            return
        # If the verdict has arrived by then, this does nothing.
        asyncio.get_running_loop().call_later(
            min(THREAD_S, deadline.left_s), partial(self._hand_over, pending, deadline)
        )

    def on_verdict(self, verdict: GrantVerdict) -> None:
        """Respond with the verdict, unless a thread does; any thread, never blocks."""
        if self._take():
            self._answers.leave()
            found = msgspec.json.encode(encode_verdict(verdict))
            self._answers.respond(self.request, found)

    def _hand_over(self, pending: PendingGrant, deadline: Deadline) -> None:
        if self._take():
            self._answers.await_verdict(self, pending, deadline=deadline)

    def _take(self) -> bool:
        """Return whether the caller is the first, which must respond."""
        with self._lock:
            is_taken, self._is_taken = self._is_taken, True
        return not is_taken
