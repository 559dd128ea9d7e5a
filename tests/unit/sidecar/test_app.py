"""HTTP in front of a hub: what is asked reaches it, and nothing else does."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from appkit import (
    ASKS,
    CLIENT,
    GRANT,
    HEADERS,
    INSTANCE,
    OURS,
    TOKEN,
    WHO,
    Wire,
    failure,
)
from fakehub import FakeHub, assigned
from jsonschema import Draft202012Validator
from starlette.requests import Request

from kafka_marshal import errors
from kafka_marshal.remote import api, paths
from kafka_marshal.sidecar import app as apps
from kafka_marshal.sidecar import asking, openapi
from kafka_marshal.sidecar.asking import Connection
from kafka_marshal.sidecar.health import Verdict
from kafka_marshal.sidecar.peers import NOBODY, Peer
from kafka_marshal.sidecar.routes import ROUTES


@pytest.fixture
def wire():
    found = Wire(FakeHub())
    found.hub.instances["g", "c"] = INSTANCE
    yield found
    found.app.close()


# --- what is asked reaches the hub


def validator(kind):
    document = openapi.document()
    schema = {"$ref": f"#/components/schemas/{kind.__name__}", **document}
    return Draft202012Validator(schema)


def test_every_route_is_asked_somewhere():
    assert set(ASKS) | {"events", "metrics"} == {route.name for route in ROUTES}


@pytest.mark.parametrize(
    "route", [each for each in ROUTES if each.name in ASKS], ids=lambda each: each.name
)
def test_a_request_reaches_the_hub_and_its_answer_is_as_published(wire, route):
    method, path, body, told = ASKS[route.name]
    response = wire.ask(method, path, json=body, headers=HEADERS)
    if told is None:
        assert wire.hub.said == []
    else:
        assert told in wire.hub.said
    if route.answers is None and route.name != "openapi":
        assert (response.status_code, response.content) == (204, b"")
        return
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    if route.answers is not None:
        validator(route.answers).validate(response.json())
        msgspec.json.decode(response.content, type=route.answers)


def test_schemas_would_refuse_another_answer():
    assert not validator(api.Info).is_valid({"level": "one"})
    assert not validator(api.Failure).is_valid({})


@pytest.mark.parametrize("is_local", [True, False])
def test_a_client_may_name_its_process(is_local):
    wire = Wire(FakeHub(), token=TOKEN)
    connection = Connection(OURS if is_local else NOBODY, is_local=is_local)
    headers = {"authorization": f"Bearer {TOKEN.decode()}"}
    body = {"instance": INSTANCE, "beat_ms": 100, "pid": os.getpid()}
    options = {"connection": connection, "headers": headers}
    assert wire.ask("PUT", CLIENT, json=body, **options).is_success
    told = wire.hub.said[0][4]
    # Over TCP nobody can say whose process that is.
    assert told.pid == (os.getpid() if is_local else None)
    absent = wire.ask("PUT", CLIENT, json={**body, "pid": 2**31 - 1}, **options)
    assert absent.status_code == (400 if is_local else 200)
    if is_local:
        assert failure(absent).setting == "pid"
    wire.app.close()


def test_to_leave_needs_no_words(wire):
    response = wire.ask("DELETE", CLIENT, headers=HEADERS)
    assert response.json() == {"action": "shutdown_now"}
    assert ("leave", WHO, api.Leaving()) in wire.hub.said


def test_figures_come_as_they_are_made():
    wire = Wire(FakeHub(), metrics=lambda: (b"up 1\n", "text/plain; version=1"))
    response = wire.ask("GET", paths.METRICS)
    assert response.content == b"up 1\n"
    assert response.headers["content-type"].startswith("text/plain; version=1")
    wire.app.close()


def test_there_may_be_no_figures_yet(wire):
    assert wire.ask("GET", paths.METRICS).status_code == 503


def test_a_probe_that_fails_says_why(wire):
    wire.serving.health.verdict = Verdict(ok=False, state="RECOVERY", reasons=("r",))
    response = wire.ask("GET", paths.READYZ)
    assert (response.status_code, response.json()["reasons"]) == (503, ["r"])


# --- events


def stream_of(wire, **headers):
    """Return the first events of a stream that is read until the client goes."""

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
            "state": {asking.CONNECTION: Connection(OURS, is_local=True)},
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
                assert wire.app.stream_count == 1
                wire.hub.feeds[-1].push(assigned())

        await asyncio.wait_for(wire.app(scope, receive, send), 30)
        return received

    return asyncio.run(main())


def test_events_flow_until_the_client_goes(wire):
    start, *pieces = stream_of(wire)
    assert start["status"] == 200
    headers = dict(start["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    text = b"".join(piece.get("body", b"") for piece in pieces).decode()
    kinds = [line for line in text.splitlines() if line.startswith("event:")]
    assert kinds == ["event: snapshot", "event: assigned"]
    assert wire.hub.feeds[-1].is_closed
    assert wire.app.stream_count == 0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("abababab.7.3.4711", "abababab.7.3.4711"),
        ("nonsense", None),
        ("a.1.2.3\x0b", None),
        ("a" * 10_000, None),
    ],
)
def test_the_last_event_is_told_where_it_makes_sense(wire, given, told):
    stream_of(wire, **{api.EVENT_ID_HEADER: given})
    assert ("feed", WHO, told) in wire.hub.said


def test_a_client_has_one_stream_the_latest(wire):
    async def main():
        first = await wire.app._events(ask, request)
        second = await wire.app._events(ask, request)
        assert [feed.is_closed for feed in wire.hub.feeds] == [True, False]
        assert wire.app.stream_count == 1
        first._on_end()
        assert wire.app.stream_count == 1
        second._on_end()
        assert wire.app.stream_count == 0

    (route,) = [route for route in ROUTES if route.name == "events"]
    ask = asking.Ask(route, wire.hub, {}, {}, WHO, OURS)
    request = Request({"type": "http", "headers": []})
    asyncio.run(main())


# --- who may


def test_another_user_is_turned_away(wire):
    other = Connection(Peer(5, OURS.uid + 4711, 1), is_local=True)
    for path in (paths.INFO, paths.LIVEZ):
        response = wire.ask("GET", path, connection=other)
        assert response.status_code == 403
        assert "as that user" in failure(response).message
    assert wire.hub.said == []


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
    wire = Wire(FakeHub(), token=TOKEN)
    headers = {} if header is None else {"Authorization": header}
    response = wire.ask("GET", paths.INFO, connection=Connection(), headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        assert wire.hub.said == []
    assert wire.ask("GET", paths.LIVEZ, connection=Connection()).status_code == 200
    wire.app.close()


def test_without_a_token_nobody_comes_in_over_tcp(wire):
    headers = {"Authorization": "Bearer None"}
    response = wire.ask("GET", paths.INFO, connection=Connection(), headers=headers)
    assert response.status_code == 401


def test_a_second_client_on_one_connection_conflicts(wire):
    """Row FC13: one identity per connection; another connection is another matter."""
    connection = Connection(OURS, is_local=True)
    body = {"instance": INSTANCE, "beat_ms": 100}
    other = paths.CLIENT.format(group="g", client="other")

    def put(path, on):
        return wire.ask("PUT", path, json=body, connection=on)

    assert put(CLIENT, connection).status_code == 200
    assert put(CLIENT, connection).status_code == 200
    before = len(wire.hub.said)
    refused = put(other, connection)
    assert refused.status_code == 409
    assert failure(refused).error == "IdentityConflict"
    assert failure(refused).holder == "c"
    assert len(wire.hub.said) == before
    # What is nobody's in particular is answered all the same.
    assert wire.ask("GET", paths.INFO, connection=connection).status_code == 200
    assert put(other, Connection(OURS, is_local=True)).status_code == 200


def test_another_process_of_the_same_name_conflicts_on_one_connection(wire):
    connection = Connection(OURS, is_local=True)
    first = {"instance": INSTANCE, "beat_ms": 100}
    assert wire.ask("PUT", CLIENT, json=first, connection=connection).is_success
    second = {"instance": "ef" * 16, "beat_ms": 100}
    response = wire.ask("PUT", CLIENT, json=second, connection=connection)
    assert response.status_code == 409


def test_a_refused_client_does_not_keep_the_connection(wire):
    connection = Connection(OURS, is_local=True)
    wire.hub.fault = errors.IdentityConflict("x", holder="c")
    body = {"instance": INSTANCE, "beat_ms": 100}
    assert wire.ask("PUT", CLIENT, json=body, connection=connection).is_client_error
    wire.hub.fault = None
    other = paths.CLIENT.format(group="g", client="other")
    assert wire.ask("PUT", other, json=body, connection=connection).is_success


# --- what goes wrong


def test_as_long_as_there_is_no_hub_clients_come_again():
    wire = Wire(None, explain=lambda: "reading the log")
    response = wire.ask("GET", paths.INFO)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert failure(response).retriable
    assert "reading the log" in failure(response).message
    assert wire.ask("GET", paths.LIVEZ).status_code == 200
    wire.app.close()


def test_an_error_of_the_hub_is_answered(wire):
    wire.hub.fault = errors.ClaimRejected("held", holder="h", at_offset=3)
    response = wire.ask("POST", CLIENT + "/beat", json={}, headers=HEADERS)
    assert response.status_code == 409
    assert failure(response) == api.Failure(
        error="ClaimRejected", message="held", reason="held", holder="h", at_offset=3
    )


def test_a_fault_of_ours_is_logged_and_not_told(wire, caplog):
    wire.hub.fault = RuntimeError("hunter2")
    response = wire.ask("GET", paths.INFO)
    assert response.status_code == 500
    assert "hunter2" not in response.text
    assert "hunter2" in caplog.text


def test_those_who_wait_do_not_keep_a_beat_from_being_taken(wire, monkeypatch):
    """As many waits as there are threads for them, then a beat, then release."""
    hold = threading.Event()
    entered = threading.Semaphore(0)

    def grant(group_id, ask):
        entered.release()
        assert hold.wait(30)
        raise errors.DeadlineExceeded("late")

    wire.hub.grant = grant

    async def main():
        async with wire.connect() as client:
            grants = [
                asyncio.create_task(client.post("/v1/groups/g/grants", json=GRANT))
                for _ in range(apps.CALLS_MAX)
            ]
            with ThreadPoolExecutor() as pool:
                for _ in range(apps.WAITING_THREADS):
                    await asyncio.get_running_loop().run_in_executor(
                        pool, entered.acquire, True, 30
                    )
            beat = await client.post(CLIENT + "/beat", json={}, headers=HEADERS)
            more = await client.post("/v1/groups/g/grants", json=GRANT)
            hold.set()
            return beat, more, await asyncio.gather(*grants)

    beat, more, grants = asyncio.run(main())
    assert beat.status_code == 200
    assert (more.status_code, more.headers["retry-after"]) == (503, "1")
    assert {response.status_code for response in grants} == {504}
