"""Repeated fence queries and grants, over real sockets."""

import asyncio
import socket
import threading
from types import SimpleNamespace

import msgspec
import pytest
from appkit import GRANT
from conformancekit import WAIT_S, until
from servedkit import eventually, read

from kafka_marshal.errors import CoordinationError, DeadlineExceeded
from kafka_marshal.protocol.granting import GrantVerdict
from kafka_marshal.protocol.types import OffsetRange
from kafka_marshal.remote import api
from kafka_marshal.sidecar import repeated_answers
from kafka_marshal.sidecar.executors import BoundedExecutor
from kafka_marshal.sidecar.repeated_answers import FenceQueries

LOOK = (
    b"GET /v1/groups/billing/owners/orders/1?timeout_ms=50 HTTP/1.1\r\nhost: x\r\n\r\n"
)


GRANTED = GrantVerdict(
    outcome="accepted", reason=None, granted=OffsetRange(7, 9), head=9, offset=1
)


def grant_bytes(**rest):
    body = msgspec.json.encode(GRANT | rest)
    head = "POST /v1/groups/billing/grants HTTP/1.1\r\nhost: x\r\ncontent-length: {}"
    return head.format(len(body)).encode() + b"\r\n\r\n" + body


def receive(connection):
    """Return status and body of the next response of known length."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        piece = connection.recv(1)
        assert piece, "it was closed"
        head += piece
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    body = b""
    while len(body) < length:
        body += connection.recv(length - len(body))
    return int(head.split()[1]), body


def names_of(service):
    return [call[0] for call in service.calls]


@pytest.fixture
def known(served):
    """Return a connection on which a fence query and a grant were answered."""
    service = served.service
    service.calls.clear()
    service.begun.clear()
    with served.connect() as connection:
        first = []
        for request in (LOOK, grant_bytes()):
            connection.sendall(request)
            first.append(receive(connection))
        assert [status for status, _ in first] == [200, 200]
        state = served.server.server_state
        eventually(
            lambda: any(len(each._repeated._known) == 2 for each in state.connections)
        )
        service.calls.clear()
        yield SimpleNamespace(
            served=served, service=service, connection=connection, first=first
        )
    service.is_slow, service.verdict, service.fault, service.hold = (
        False,
        None,
        None,
        None,
    )


def without_time(body):
    found = msgspec.json.decode(body)
    found.get("as_of", {}).pop("time_ms", None)
    return found


def test_a_repeated_fence_query_gets_the_same_answer(known):
    for _ in range(2):
        known.connection.sendall(LOOK)
        status, body = receive(known.connection)
        assert status == 200
        assert without_time(body) == without_time(known.first[0][1])
    assert names_of(known.service) == ["catch_up"] * 2
    assert known.service.calls[-1] == ("catch_up", [("billing", "orders", 1)], 50)
    eventually(lambda: known.served.app._waiting._count == 0)


def test_a_failed_fence_query_is_answered_with_its_reason(known):
    known.service.fault = CoordinationError("no broker answers")
    known.connection.sendall(LOOK)
    status, body = receive(known.connection)
    failure = msgspec.json.decode(body, type=api.Failure)
    assert (status, failure.message) == (503, "no broker answers")
    known.service.fault = None
    known.connection.sendall(LOOK)
    assert receive(known.connection)[0] == 200


def test_an_unexpected_error_is_answered_with_500_and_logged(known, caplog):
    known.service.fault = ZeroDivisionError("a bug")
    known.connection.sendall(LOOK)
    assert receive(known.connection)[0] == 500
    assert "a request to the sidecar failed: fence" in caplog.text


def test_a_fence_query_with_a_body_is_parsed_each_time(known, monkeypatch):
    direct = []
    monkeypatch.setattr(FenceQueries, "add", lambda _, call: direct.append(call))
    request = LOOK.replace(b"\r\n\r\n", b"\r\ncontent-length: 1\r\n\r\nx")
    for _ in range(2):
        known.connection.sendall(request)
        assert receive(known.connection)[0] == 200
    assert direct == []
    known.connection.sendall(LOOK)
    assert receive(known.connection)[0] == 200
    assert len(direct) == 1, "only without a body"


def begun(known, count=1):
    eventually(lambda: len(known.service.begun) == count)
    return known.service.begun[-1]


def test_a_repeated_grant_is_answered_with_its_verdict(known):
    known.connection.sendall(grant_bytes(first=7))
    found = begun(known)
    assert found.ask.first == 7
    found.verdict = GRANTED
    found.on_verdict(GRANTED)
    status, body = receive(known.connection)
    assert (status, msgspec.json.decode(body)["first"]) == (200, 7)
    assert names_of(known.service) == ["grant_at_once"]
    eventually(lambda: known.served.app._waiting._count == 0)
    # A second notification changes nothing.
    found.on_verdict(GRANTED)
    known.service.verdict = GRANTED
    known.connection.sendall(grant_bytes())
    status, body = receive(known.connection)
    assert (status, msgspec.json.decode(body)["last"]) == (200, 8)
    assert begun(known, 2).verdict is not None


def test_a_slow_verdict_is_awaited_by_a_thread(known):
    known.connection.sendall(grant_bytes(timeout_ms=60_000))
    found = begun(known)
    assert receive(known.connection)[0] == 200
    assert names_of(known.service)[:2] == ["grant_at_once", "await_grant"]
    assert 0 < known.service.calls[1][1].left_ms <= 60_000
    # The request was answered: its verdict sends no second response.
    found.verdict = GRANTED
    found.on_verdict(GRANTED)
    known.connection.sendall(LOOK)
    assert receive(known.connection)[0] == 200
    eventually(lambda: known.served.app._waiting._count == 0)


def test_a_grant_without_a_verdict_in_time_is_answered_with_504(known, monkeypatch):
    def await_grant(pending, deadline):
        del pending, deadline
        raise DeadlineExceeded("no verdict in time")

    monkeypatch.setattr(known.service, "await_grant", await_grant, raising=False)
    known.connection.sendall(grant_bytes(timeout_ms=0))
    status, body = receive(known.connection)
    failure = msgspec.json.decode(body, type=api.Failure)
    assert (status, failure.message) == (504, "no verdict in time")
    eventually(lambda: known.served.app._waiting._count == 0)


@pytest.mark.parametrize("reason", ["slow", "refused"])
def test_a_grant_that_cannot_begin_at_once_runs_on_a_thread(known, reason):
    if reason == "slow":
        known.service.is_slow = True
    else:
        known.service.grant_at_once = refuse
    try:
        known.connection.sendall(grant_bytes())
        assert receive(known.connection) == known.first[1]
    finally:
        vars(known.service).pop("grant_at_once", None)
    assert names_of(known.service) == ["grant"]
    eventually(lambda: known.served.app._waiting._count == 0)


def refuse(*_, **__):
    raise CoordinationError("too many requests")


@pytest.mark.parametrize("body", [b"{", b"{}", b"[" * 2_000])
def test_an_invalid_grant_is_refused_with_a_reason(known, body):
    head = grant_bytes().partition(b"content-length")[0]
    request = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
    known.connection.sendall(request)
    status, found = receive(known.connection)
    assert status == 400
    assert msgspec.json.decode(found, type=api.Failure).setting == "body"


@pytest.mark.parametrize("request_bytes", [LOOK, grant_bytes()])
def test_without_a_service_queries_and_grants_are_refused(known, request_bytes):
    serving = known.served.app
    service, serving.service = serving.service, None
    try:
        known.connection.sendall(request_bytes)
        assert receive(known.connection)[0] == 503
    finally:
        serving.service = service


@pytest.mark.parametrize("request_bytes", [LOOK, grant_bytes()])
def test_a_busy_sidecar_refuses_queries_and_grants(known, request_bytes, monkeypatch):
    monkeypatch.setattr(known.served.app._waiting, "_calls_max", 0)
    known.connection.sendall(request_bytes)
    status, body = receive(known.connection)
    assert status == 503
    assert "busy" in msgspec.json.decode(body, type=api.Failure).message


def test_a_request_sent_before_the_response_is_answered_after_it(known):
    known.connection.sendall(grant_bytes(first=1))
    found = begun(known)
    known.connection.sendall(LOOK)
    found.verdict = GRANTED
    found.on_verdict(GRANTED)
    assert msgspec.json.decode(receive(known.connection)[1])["first"] == 7
    assert receive(known.connection)[0] == 200


def test_a_long_response_is_sent_to_its_end(known, monkeypatch):
    body = b" " * 4_000_000 + b"{}"
    monkeypatch.setattr(
        known.served.app._repeated._fence_queries, "_call", lambda _: [body]
    )
    for _ in range(2):
        known.connection.sendall(LOOK)
        assert receive(known.connection) == (200, body)


def test_a_client_that_disconnects_early_does_not_affect_others(known):
    known.service.hold = threading.Event()
    known.connection.sendall(LOOK)
    eventually(lambda: names_of(known.service) == ["catch_up"])
    known.connection.shutdown(socket.SHUT_RDWR)
    known.connection.close()
    known.service.hold.set()
    eventually(lambda: known.served.app._waiting._count == 0)
    with known.served.connect() as other:
        other.sendall(LOOK)
        assert receive(other)[0] == 200


def test_a_client_that_half_closes_after_its_request_is_answered(known):
    known.connection.sendall(grant_bytes(first=1))
    found = begun(known)
    known.connection.shutdown(socket.SHUT_WR)
    (one,) = (each for each in known.served.server.server_state.connections)
    eventually(lambda: one._has_ended)
    found.on_verdict(GRANTED)
    rest = read(known.connection)
    assert msgspec.json.decode(rest.partition(b"\r\n\r\n")[2])["first"] == 7


def test_a_request_sent_in_pieces_before_the_response_is_answered(known):
    known.connection.sendall(grant_bytes(first=1))
    found = begun(known)
    (one,) = (each for each in known.served.server.server_state.connections)
    known.connection.sendall(LOOK[:9])
    eventually(lambda: one._early == LOOK[:9])
    known.connection.sendall(LOOK[9:])
    found.on_verdict(GRANTED)
    assert [receive(known.connection)[0] for _ in range(2)] == [200, 200]


def test_a_closing_server_sends_the_response_first(known, monkeypatch):
    monkeypatch.setattr(repeated_answers, "THREAD_S", 30.0)
    known.connection.sendall(grant_bytes(first=3))
    found = begun(known)
    server = known.served.server
    (one,) = (each for each in server.server_state.connections if each._later)
    one.loop.call_soon_threadsafe(one.shutdown)
    eventually(lambda: one._is_ending)
    found.verdict = GRANTED
    found.on_verdict(GRANTED)
    rest = read(known.connection)
    assert msgspec.json.decode(rest.partition(b"\r\n\r\n")[2])["first"] == 7


def test_a_grant_that_was_sent_may_still_happen_if_the_executor_has_ended(
    known, monkeypatch
):
    closed = SimpleNamespace(submit=lambda call: (_ for _ in ()).throw(RuntimeError()))
    known.connection.sendall(grant_bytes(timeout_ms=60_000))
    monkeypatch.setattr(known.served.app._waiting, "_executor", closed)
    begun(known)
    status, body = receive(known.connection)
    assert status == 504
    assert "may still be granted" in msgspec.json.decode(body, type=api.Failure).message


class Harness:
    """Fence queries in groups that a test answers one by one."""

    def __init__(self, *, calls_max=20):
        self.executor = BoundedExecutor("fence", threads=8, calls_max=calls_max)
        self.groups, self.found = [], {}
        self.may_answer = threading.Semaphore(0)
        self.may_end_slow = threading.Semaphore(0)
        self.loop = asyncio.new_event_loop()
        self.queries = FenceQueries(
            executor=self.executor, call=self._call, respond=self._respond
        )

    def _call(self, calls):
        names = [call.name for call in calls]
        self.groups.append(names)
        gate = self.may_end_slow if "slow" in names else self.may_answer
        assert gate.acquire(timeout=WAIT_S)
        for call in calls:
            if call.name == "bad":
                raise CoordinationError("no broker")
            yield call.name.encode()

    def _respond(self, query, found):
        assert query.call.name not in self.found
        self.found[query.call.name] = found

    def add(self, *names, timeout_ms=9):
        async def add():
            return [
                self.queries.add(SimpleNamespace(name=name, timeout_ms=timeout_ms))
                for name in names
            ]

        return self.loop.run_until_complete(add())

    def started(self, count):
        until(lambda: len(self.groups) == count, f"{count} groups")

    def answered(self, count):
        until(lambda: len(self.found) == count, f"{count} answers")

    def rest(self):
        """Let the event loop run its timers."""
        self.loop.run_until_complete(asyncio.sleep(2 * repeated_answers.WAIT_S))

    def close(self):
        self.may_answer.release(99)
        self.may_end_slow.release()
        until(lambda: self.executor._count == 0, "all have ended")
        self.executor.close()
        self.loop.close()


@pytest.fixture
def harness():
    made = Harness()
    yield made
    made.close()


def test_a_single_fence_query_is_answered_at_once(harness):
    harness.may_answer.release()
    assert all(harness.add("a"))
    harness.answered(1)
    assert (harness.groups, harness.found) == ([["a"]], {"a": b"a"})
    until(lambda: harness.executor._count == 0, "its thread is free")


def test_waiting_queries_form_the_next_group_on_the_same_thread(harness, monkeypatch):
    monkeypatch.setattr(repeated_answers, "WAIT_S", 2 * WAIT_S)
    harness.add("a", "b", "c", "d")
    harness.started(1)
    assert harness.executor._count == 1
    harness.may_answer.release()
    harness.started(2)
    assert harness.groups == [["a"], ["b", "c", "d"]]
    assert harness.executor._count == 1
    harness.may_answer.release()
    harness.answered(4)


def test_queries_with_different_timeouts_are_in_different_groups(harness, monkeypatch):
    monkeypatch.setattr(repeated_answers, "WAIT_S", 2 * WAIT_S)
    harness.add("a", "b")
    harness.add("c", timeout_ms=10)
    harness.add("d")
    harness.may_answer.release(3)
    harness.answered(4)
    assert harness.groups == [["a"], ["b", "d"], ["c"]]


def test_queries_do_not_wait_for_a_slow_group(harness):
    harness.add("a", "b", "c")
    harness.add("d", timeout_ms=10)
    harness.started(1)
    harness.rest()
    harness.started(3)
    assert sorted(harness.groups[1:]) == [["b", "c"], ["d"]]
    harness.may_answer.release(3)
    harness.answered(4)
    until(lambda: harness.queries._server is None, "its thread is free")


def test_a_slow_group_delays_no_later_queries(harness, monkeypatch):
    harness.add("slow", "b")
    harness.rest()
    harness.may_answer.release()
    harness.answered(1)
    until(lambda: harness.queries._server is None, "the second thread is free")
    monkeypatch.setattr(repeated_answers, "WAIT_S", 2 * WAIT_S)
    for count, name in enumerate("cd", 2):
        harness.add(name)
        harness.may_answer.release()
        harness.answered(count)
        until(lambda: harness.queries._server is None, "its thread is free")
    harness.may_end_slow.release()
    harness.answered(4)


def test_an_error_answers_the_remaining_queries_of_its_group(harness):
    harness.add("x", "y", "a", "bad", "b")
    harness.may_answer.release(3)
    harness.answered(5)
    assert harness.found["a"] == b"a"
    for name in ("bad", "b"):
        assert str(harness.found[name]) == "no broker"


def test_without_a_free_thread_a_fence_query_is_not_accepted():
    harness = Harness(calls_max=0)
    assert harness.add("a") == [None]
    assert harness.queries._server is None
    harness.close()


def test_waiting_queries_without_a_free_thread_are_refused():
    harness = Harness(calls_max=1)
    harness.add("a", "b")
    harness.rest()
    assert "busy" in harness.found["b"].failure.message
    harness.may_answer.release()
    harness.answered(2)
    harness.close()


def test_with_a_closed_executor_no_fence_query_is_accepted():
    harness = Harness()
    harness.executor.close()
    assert harness.add("a") == [None]
    harness.loop.close()


def test_queries_whose_queued_call_is_cancelled_are_refused():
    harness = Harness()
    busy = threading.Event()
    for _ in range(8):
        harness.executor.reserve()
        harness.executor.submit(lambda: busy.wait(WAIT_S))
    harness.add("a", "b", "c")
    harness.executor.close()
    busy.set()
    harness.answered(3)
    assert all("shutting" in found.failure.message for found in harness.found.values())
    harness.loop.close()


def test_queries_do_not_wait_for_a_slow_group_of_another_timeout(harness):
    harness.add("a")
    harness.started(1)
    harness.add("slow")
    harness.add("d", timeout_ms=10)
    harness.may_answer.release(2)
    harness.started(2)
    # When the first timer fired, a group had just begun; the second starts the other.
    harness.rest()
    harness.rest()
    harness.answered(2)
    assert harness.groups == [["a"], ["slow"], ["d"]]
