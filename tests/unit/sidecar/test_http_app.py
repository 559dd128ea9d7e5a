"""Read models, and HTTP in front of a fake service."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import attrs
import msgspec
import pytest
from appkit import (
    CLIENT,
    GRANT,
    HEADERS,
    INSTANCE,
    OURS,
    REQUESTS,
    TOKEN,
    WHO,
    Wire,
    failure,
)
from fakeservice import PAUSES, WORLD, FakeService, assigned
from jsonschema import Draft202012Validator
from starlette.requests import Request

from kafka_marshal import errors
from kafka_marshal.remote import api, paths
from kafka_marshal.remote.answers import GroupLine
from kafka_marshal.sidecar import http_app, requests, routes
from kafka_marshal.sidecar.health import State
from kafka_marshal.sidecar.process_monitor import UNKNOWN_PEER, Peer
from kafka_marshal.sidecar.requests import Connection
from kafka_marshal.sidecar.routes import ROUTES

# --- Read models ---


WALL_MS = 1_700_000_000_000


def test_each_view_has_the_time_and_offsets_of_its_world():
    for found in (
        http_app.world_now(WORLD, WALL_MS),
        http_app.groups_now(WORLD, PAUSES, wall_ms=WALL_MS),
        http_app.group_now(WORLD, PAUSES, group="billing", wall_ms=WALL_MS),
    ):
        assert found.as_of.time_ms == WALL_MS
        assert found.as_of.offsets == {"0": 12, "1": 5}


def test_paused_groups_without_claims_are_listed():
    assert http_app.groups_now(WORLD, PAUSES, wall_ms=WALL_MS).groups == (
        GroupLine(
            group="billing",
            keys=3,
            owned=2,
            owners=("host-a", "host-b"),
            is_paused=False,
        ),
        GroupLine(
            group="halted",
            keys=0,
            owned=0,
            owners=(),
            is_paused=True,
            pauses=tuple(PAUSES),
        ),
    )


def test_a_group_has_its_claims_in_order_and_its_pauses_once():
    found = http_app.group_now(WORLD, PAUSES, group="billing", wall_ms=WALL_MS)
    assert [claim["partition"] for claim in found.claims] == [0, 1, 2]
    assert found.pauses == ()
    halted = http_app.group_now(WORLD, PAUSES, group="halted", wall_ms=WALL_MS)
    assert (halted.claims, len(halted.pauses)) == ((), 1)


def test_a_group_with_a_scheduled_pause_is_not_paused_yet():
    later = {**PAUSES[0], "state": "scheduled"}
    world = {"schema": 1, "partitions": {}}
    (line,) = http_app.groups_now(world, [later], wall_ms=WALL_MS).groups
    assert (line.group, line.is_paused, line.pauses) == ("halted", False, (later,))


# --- The application ---


@pytest.fixture
def wire():
    found = Wire(FakeService())
    found.service.instances["g", "c"] = INSTANCE
    yield found
    found.app.close()


# --- requests reach the service


def validator(kind):
    document = routes.openapi_document()
    schema = {"$ref": f"#/components/schemas/{kind.__name__}", **document}
    return Draft202012Validator(schema)


def test_every_route_has_a_test_request():
    assert set(REQUESTS) | {"events", "metrics"} == {route.name for route in ROUTES}


@pytest.mark.parametrize(
    "route",
    [each for each in ROUTES if each.name in REQUESTS],
    ids=lambda each: each.name,
)
def test_requests_reach_the_service_and_responses_match_the_schema(wire, route):
    method, path, body, expected = REQUESTS[route.name]
    response = wire.request(method, path, json=body, headers=HEADERS)
    if expected is None:
        assert wire.service.calls == []
    else:
        assert expected in wire.service.calls
    if route.answers is None and route.name != "openapi":
        assert (response.status_code, response.content) == (204, b"")
        return
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    if route.answers is not None:
        validator(route.answers).validate(response.json())
        msgspec.json.decode(response.content, type=route.answers)


def test_schemas_refuse_a_different_response():
    assert not validator(api.Info).is_valid({"level": "one"})
    assert not validator(api.Failure).is_valid({})


@pytest.mark.parametrize("is_local", [True, False])
def test_a_local_client_may_name_its_process(is_local):
    wire = Wire(FakeService(), token=TOKEN)
    connection = Connection(OURS if is_local else UNKNOWN_PEER, is_local=is_local)
    headers = {"authorization": f"Bearer {TOKEN.decode()}"}
    body = {"instance": INSTANCE, "beat_ms": 100, "pid": os.getpid()}
    options = {"connection": connection, "headers": headers}
    assert wire.request("PUT", CLIENT, json=body, **options).is_success
    expected = wire.service.calls[0][4]
    # Over TCP the sidecar cannot check whose process that is.
    assert expected.pid == (os.getpid() if is_local else None)
    absent = wire.request("PUT", CLIENT, json={**body, "pid": 2**31 - 1}, **options)
    assert absent.status_code == (400 if is_local else 200)
    if is_local:
        assert failure(absent).setting == "pid"
    wire.app.close()


def test_leaving_needs_no_body(wire):
    response = wire.request("DELETE", CLIENT, headers=HEADERS)
    assert response.json() == {"action": "shutdown_now"}
    assert ("leave", WHO, api.LeaveRequest()) in wire.service.calls


def test_metrics_are_served():
    wire = Wire(FakeService(), metrics=lambda: (b"up 1\n", "text/plain; version=1"))
    response = wire.request("GET", paths.METRICS)
    assert response.content == b"up 1\n"
    assert response.headers["content-type"].startswith("text/plain; version=1")
    wire.app.close()


def test_a_failing_probe_has_reasons(wire):
    states = wire.app.states
    states.found = attrs.evolve(states.found, state=State.RECOVERY, reason="r")
    response = wire.request("GET", paths.READYZ)
    reasons = response.json()["reasons"]
    assert (response.status_code, reasons[0]) == (503, "the sidecar is RECOVERY: r")


# --- events


def stream_of(wire, **headers):
    """Return the messages of a stream until the client disconnects."""

    async def main():
        received = []
        gone = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "path": CLIENT + "/events",
            "raw_path": CLIENT.encode() + b"/events",
            "query_string": b"",
            "headers": [
                (name.lower().encode(), value.encode())
                for name, value in {**HEADERS, **headers}.items()
            ],
            "state": {requests.CONNECTION: Connection(OURS, is_local=True)},
        }

        request = {"type": "http.request", "body": b"", "more_body": False}
        messages = [request]

        async def receive():
            if messages:
                return messages.pop()
            await asyncio.wait_for(gone.wait(), 30)
            return {"type": "http.disconnect"}

        async def send(message):
            received.append(message)
            if b"event: assigned" in message.get("body", b""):
                gone.set()
            elif b"event: snapshot" in message.get("body", b""):
                assert len(wire.app._streams) == 1
                wire.service.feeds[-1].push(assigned())

        await asyncio.wait_for(wire.app(scope, receive, send), 30)
        return received

    return asyncio.run(main())


def test_events_are_sent_until_the_client_disconnects(wire):
    start, *pieces = stream_of(wire)
    assert start["status"] == 200
    headers = dict(start["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    text = b"".join(piece.get("body", b"") for piece in pieces).decode()
    kinds = [line for line in text.splitlines() if line.startswith("event:")]
    assert kinds == ["event: snapshot", "event: assigned"]
    assert wire.service.feeds[-1].is_closed
    assert len(wire.app._streams) == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("abababab.7.3.4711", "abababab.7.3.4711"),
        ("nonsense", None),
        ("a.1.2.3\x0b", None),
        ("a" * 10_000, None),
    ],
)
def test_only_valid_event_ids_are_passed_on(wire, given, expected):
    stream_of(wire, **{api.EVENT_ID_HEADER: given})
    assert ("feed", WHO, expected) in wire.service.calls


def test_a_new_stream_replaces_the_old_one(wire):
    async def main():
        first = await wire.app._events(ask, request)
        second = await wire.app._events(ask, request)
        assert [feed.is_closed for feed in wire.service.feeds] == [True, False]
        assert len(wire.app._streams) == 1
        first._on_end()
        assert len(wire.app._streams) == 1
        second._on_end()
        assert len(wire.app._streams) == 0

    (route,) = [route for route in ROUTES if route.name == "events"]
    ask = requests.ApiRequest(
        route=route,
        service=wire.service,
        parts={},
        queries={},
        caller=WHO,
        peer=OURS,
    )
    request = Request({"type": "http", "headers": []})
    asyncio.run(main())


# --- access


def test_another_user_is_refused(wire):
    other = Connection(Peer(5, OURS.uid + 4711, 1), is_local=True)
    for path in (paths.INFO, paths.LIVEZ):
        response = wire.request("GET", path, connection=other)
        assert response.status_code == 403
        assert "as that user" in failure(response).message
    assert wire.service.calls == []


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        ("Bearer x", 401),
        ("Basic " + TOKEN.decode(), 401),
        ("Bearer " + TOKEN.decode(), 200),
        ("bearer " + TOKEN.decode(), 200),
    ],
)
def test_tcp_needs_the_token(header, status):
    wire = Wire(FakeService(), token=TOKEN)
    headers = {} if header is None else {"Authorization": header}
    response = wire.request("GET", paths.INFO, connection=Connection(), headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        is_other = header == "Bearer x"
        assert ("is not that of this sidecar" in failure(response).message) is is_other
        assert wire.service.calls == []
    assert wire.request("GET", paths.LIVEZ, connection=Connection()).status_code == 200
    wire.app.close()


def test_without_a_token_tcp_is_refused(wire):
    headers = {"Authorization": "Bearer None"}
    response = wire.request("GET", paths.INFO, connection=Connection(), headers=headers)
    assert response.status_code == 401


def test_a_second_client_on_one_connection_conflicts(wire):
    """Another connection may belong to another client."""
    connection = Connection(OURS, is_local=True)
    body = {"instance": INSTANCE, "beat_ms": 100}
    other = paths.CLIENT.format(group="g", client="other")

    def put(path, on):
        return wire.request("PUT", path, json=body, connection=on)

    assert put(CLIENT, connection).status_code == 200
    assert put(CLIENT, connection).status_code == 200
    before = len(wire.service.calls)
    refused = put(other, connection)
    assert refused.status_code == 409
    assert failure(refused).error == "IdentityConflict"
    assert failure(refused).holder == "c"
    assert len(wire.service.calls) == before
    # Requests of no particular client are still answered.
    assert wire.request("GET", paths.INFO, connection=connection).status_code == 200
    assert put(other, Connection(OURS, is_local=True)).status_code == 200


def test_another_process_of_the_same_name_conflicts_on_one_connection(wire):
    connection = Connection(OURS, is_local=True)
    first = {"instance": INSTANCE, "beat_ms": 100}
    assert wire.request("PUT", CLIENT, json=first, connection=connection).is_success
    second = {"instance": "ef" * 16, "beat_ms": 100}
    response = wire.request("PUT", CLIENT, json=second, connection=connection)
    assert response.status_code == 409


def test_a_refused_client_does_not_own_the_connection(wire):
    connection = Connection(OURS, is_local=True)
    wire.service.fault = errors.IdentityConflict("x", holder="c")
    body = {"instance": INSTANCE, "beat_ms": 100}
    assert wire.request("PUT", CLIENT, json=body, connection=connection).is_client_error
    wire.service.fault = None
    other = paths.CLIENT.format(group="g", client="other")
    assert wire.request("PUT", other, json=body, connection=connection).is_success


# --- errors


def test_without_a_service_requests_get_a_retriable_error():
    wire = Wire(None)
    wire.app.states.reason = "reading the log"
    response = wire.request("GET", paths.INFO)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert failure(response).retriable
    assert "reading the log" in failure(response).message
    assert wire.request("GET", paths.LIVEZ).status_code == 200
    wire.app.close()


def test_an_error_of_the_service_becomes_a_failure(wire):
    wire.service.fault = errors.ClaimRejected("held", holder="h", at_offset=3)
    response = wire.request("POST", CLIENT + "/beat", json={}, headers=HEADERS)
    assert response.status_code == 409
    assert failure(response) == api.Failure(
        error="ClaimRejected", message="held", reason="held", holder="h", at_offset=3
    )


def test_an_internal_error_is_logged_and_not_disclosed(wire, caplog):
    wire.service.fault = RuntimeError("hunter2")
    response = wire.request("GET", paths.INFO)
    assert response.status_code == 500
    assert "hunter2" not in response.text
    assert "hunter2" in caplog.text


class HeldCalls:
    """A method of the service whose calls wait until ``release``, and then are late."""

    def __init__(self):
        self._hold = threading.Event()
        self._entered = threading.Semaphore(0)

    def __call__(self, *_):
        self._entered.release()
        assert self._hold.wait(30)
        raise errors.DeadlineExceeded("late")

    async def wait_for(self, count):
        """Wait until this many calls have begun."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor() as pool:
            for _ in range(count):
                begun = partial(self._entered.acquire, timeout=30)
                assert await loop.run_in_executor(pool, begun)

    def release(self):
        self._hold.set()


def test_heartbeats_that_wait_for_the_engine_do_not_delay_probes(wire):
    wire.service.beat = held = HeldCalls()

    async def main():
        async with wire.connect() as client:
            beats = [
                asyncio.create_task(
                    client.post(CLIENT + "/beat", json={}, headers=HEADERS)
                )
                for _ in range(2 * http_app.QUICK_THREADS)
            ]
            await held.wait_for(http_app.QUICK_THREADS)
            probes = [await client.get(place) for place in (paths.LIVEZ, paths.READYZ)]
            held.release()
            await asyncio.gather(*beats)
            return probes

    assert [each.status_code for each in asyncio.run(main())] == [200, 200]


def test_waiting_requests_do_not_delay_heartbeats(wire, monkeypatch):
    """A heartbeat is answered while grants occupy all threads that may wait."""
    wire.service.grant = held = HeldCalls()

    async def main():
        async with wire.connect() as client:
            grants = [
                asyncio.create_task(client.post("/v1/groups/g/grants", json=GRANT))
                for _ in range(http_app.CALLS_MAX)
            ]
            await held.wait_for(http_app.WAITING_THREADS)
            beat = await client.post(CLIENT + "/beat", json={}, headers=HEADERS)
            more = await client.post("/v1/groups/g/grants", json=GRANT)
            held.release()
            return beat, more, await asyncio.gather(*grants)

    beat, more, grants = asyncio.run(main())
    assert beat.status_code == 200
    assert (more.status_code, more.headers["retry-after"]) == (503, "1")
    assert {response.status_code for response in grants} == {504}


# --- actions on groups

ADMIN = [route for route in ROUTES if route.is_admin]


@pytest.mark.parametrize("route", ADMIN, ids=lambda each: each.name)
def test_actions_are_refused_without_allow_admin(route):
    wire = Wire(FakeService(), actions=None)
    method, path, body, _ = REQUESTS[route.name]
    response = wire.request(method, path, json=body)
    assert response.status_code == 403
    assert failure(response).setting == "allow-admin"
    assert "marshal sidecar run --allow-admin" in failure(response).message
    assert wire.service.calls == []
    wire.app.close()


@pytest.mark.parametrize(
    ("name", "body", "named"),
    [
        ("pause", {"for_ms": -1}, "for_ms"),
        ("pause", None, "PauseRequest"),
        ("resume", {"operation": "x"}, "operation"),
        ("reset", {"topics": "orders"}, "topics"),
        ("reset", {"to_datetime": "soon"}, "to_datetime"),
        ("reset", {"offsets": [{"topic": "orders", "partition": -1}]}, "offsets"),
        ("reset", {"person": "a" * 201}, "person"),
        ("undo", {}, "op_id"),
        ("finish", {"reason": 1}, "reason"),
    ],
)
def test_an_action_with_an_invalid_body_is_not_started(wire, name, body, named):
    response = wire.request("POST", f"/v1/groups/billing/{name}", json=body)
    assert response.status_code == 400
    assert named in failure(response).message
    assert wire.service.calls == []


def test_without_a_service_actions_are_refused():
    wire = Wire(None)
    response = wire.request("POST", "/v1/groups/billing/finish")
    assert response.status_code == 503
    wire.app.close()


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (errors.GroupPaused("paused by another operation", until_ms=9), 423),
        (errors.ClaimRejected("no positions", reason="unknown_group"), 409),
        (errors.PositionError("outside", requested=9, log_start=0, log_end=5), 409),
        (errors.ConfigurationError("no such topic", setting="--topic"), 400),
        (errors.DeadlineExceeded("the log did not answer"), 504),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_error_of_an_action_becomes_a_failure(wire, fault, status):
    wire.service.fault = fault
    response = wire.request("POST", "/v1/groups/billing/finish")
    assert response.status_code == status
    assert failure(response).error == type(fault).__name__
    # It has ended, so the next one may start.
    wire.service.fault = None
    assert wire.request("POST", "/v1/groups/billing/finish").is_success


def test_one_action_runs_at_a_time_and_delays_no_other_request(wire):
    async def main():
        wire.service.hold = hold = threading.Event()
        async with wire.connect() as client:
            first = asyncio.create_task(client.post("/v1/groups/billing/finish"))
            assert await asyncio.to_thread(wire.app.actions.entered.wait, 30)
            second = await client.post("/v1/groups/other/resume")
            wire.service.hold = None
            info = await client.get(paths.INFO)
            hold.set()
            return second, info, await first

    second, info, first = asyncio.run(main())
    assert (second.status_code, first.status_code) == (409, 200)
    assert "busy, try again" in failure(second).message
    assert "finish of group 'billing'" in failure(second).message
    assert failure(second).retriable
    assert info.is_success
    assert [call[0] for call in wire.service.calls] == ["finish", "info"]


def test_an_action_continues_without_its_client(wire):
    ended = threading.Event()

    def finish(group, request, *, timeout_ms):
        entered.set()
        assert hold.wait(30)
        ended.set()

    entered, hold = threading.Event(), threading.Event()
    actions = wire.app.actions
    actions.finish = finish

    async def main():
        async with wire.connect() as client:
            task = asyncio.create_task(client.post("/v1/groups/billing/finish"))
            assert await asyncio.to_thread(entered.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert actions.runner.is_busy
            hold.set()

    asyncio.run(main())
    assert ended.wait(30)


def test_a_late_response_reports_that_the_action_continues(wire, monkeypatch):
    monkeypatch.setattr(http_app, "CALL_S_MAX", 0.01)
    wire.service.hold = hold = threading.Event()
    response = wire.request("POST", "/v1/groups/billing/finish")
    assert response.status_code == 504
    assert "continues" in failure(response).message
    assert wire.app.actions.runner.is_busy
    hold.set()
