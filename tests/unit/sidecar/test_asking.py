"""Requests of any kind: what makes no sense is refused, with a reason and in bounds."""

import asyncio
import json

import msgspec
import pytest
from appkit import ASKS, CLIENT, HEADERS, OURS, Wire, failure
from fakehub import FakeHub
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kafka_marshal.remote import api
from kafka_marshal.sidecar import asking
from kafka_marshal.sidecar.asking import Connection

INSTANCE = HEADERS[api.INSTANCE_HEADER]


@pytest.fixture
def wire():
    found = Wire(FakeHub())
    found.hub.instances["g", "c"] = INSTANCE
    yield found
    found.app.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/info/", 404),
        ("GET", "/v2/info", 404),
        ("POST", "/v1/info", 405),
        ("HEAD", "/v1/info", 405),
        ("PATCH", CLIENT, 405),
        ("PUT", "/v1/groups/g%2Fh/clients/c", 404),
        ("PUT", "/v1/groups/g%20h/clients/c", 400),
        ("PUT", CLIENT + "/claims/a%0A/3", 400),
        ("PUT", CLIENT + "/claims/../3", 404),
        ("PUT", CLIENT + "/claims/t/x", 400),
        ("PUT", CLIENT + "/claims/t/-1", 400),
        ("PUT", CLIENT + "/claims/t/2147483648", 400),
        ("PUT", CLIENT + "/claims/t/٣", 400),
        ("GET", "/v1/world?timeout_ms=x", 400),
        ("GET", "/v1/world?timeout_ms=60001", 400),
        ("POST", CLIENT + "/subscriptions/s/end?keep=perhaps", 400),
    ],
)
def test_what_is_not_here_is_refused(wire, method, path, status):
    response = wire.ask(method, path, headers=HEADERS)
    assert response.status_code == status, response.text
    if method != "HEAD":
        assert failure(response).message
    assert wire.hub.said == []


@pytest.mark.parametrize("value", [None, "", "CD" * 16, "cd" * 15, "cd" * 17])
def test_a_client_shows_its_instance(wire, value):
    headers = {} if value is None else {api.INSTANCE_HEADER: value}
    response = wire.ask("POST", CLIENT + "/beat", json={}, headers=headers)
    assert response.status_code == 400
    assert failure(response).setting == api.INSTANCE_HEADER


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"instance":1}', b'"\\ud800"', b"[" * 9_999],
)
def test_a_body_that_is_none_is_refused_and_says_why(wire, body):
    response = wire.ask("PUT", CLIENT, content=body)
    assert response.status_code == 400
    assert failure(response).message.startswith("the body is no Registration: ")
    assert wire.hub.said == []


def test_a_body_has_an_end(wire, monkeypatch):
    monkeypatch.setattr(asking, "BODY_BYTES_MAX", 1_000)

    async def pieces():
        for _ in range(100):
            yield b" " * 100

    for content in (b" " * 1_001, pieces()):
        response = wire.ask("PUT", CLIENT, content=content)
        assert response.status_code == 413
        assert response.headers["connection"] == "close"
    assert wire.hub.said == []


def test_a_body_that_does_not_come_is_not_waited_for(wire, monkeypatch):
    monkeypatch.setattr(asking, "BODY_S_MAX", 0.01)

    async def pieces():
        yield b"{"
        await asyncio.sleep(30)
        yield b"}"

    response = wire.ask("PUT", CLIENT, content=pieces())
    assert response.status_code == 408


# --- anything at all

SEGMENT = st.text(
    st.characters(codec="utf-8", exclude_characters="?#"), min_size=1, max_size=12
)
KNOWN_PATHS = st.sampled_from([path.partition("?")[0] for _, path, *_ in ASKS.values()])
PATHS = st.one_of(
    KNOWN_PATHS,
    st.lists(SEGMENT, max_size=8).map(lambda parts: "/" + "/".join(parts)),
    st.tuples(KNOWN_PATHS, SEGMENT).map("/".join),
)
HEADER = st.tuples(
    st.one_of(
        st.sampled_from(
            [b"marshal-instance", b"content-length", b"content-type", b"last-event-id"]
        ),
        st.binary(min_size=1, max_size=10),
    ),
    st.binary(max_size=40),
)
BODIES = st.one_of(
    st.binary(max_size=200),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["instance", "topics", "standings", "returned", "pids"]
                ),
                inner,
                max_size=3,
            )
        ),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
)


@given(
    method=st.sampled_from(["GET", "PUT", "POST", "DELETE", "PATCH", "HEAD", "X"]),
    path=PATHS,
    rest=st.tuples(
        st.binary(max_size=30),
        st.lists(HEADER, max_size=4),
        st.lists(BODIES, max_size=3),
    ),
)
@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_whatever_comes_is_answered(wire, method, path, rest):
    """Any bytes, any path, any header: an answer of ours, and never a 500."""
    query, headers, pieces = rest
    hub = wire.hub
    hub.said.clear()
    messages = [
        {"type": "http.request", "body": piece, "more_body": True} for piece in pieces
    ]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    messages.append({"type": "http.disconnect"})
    sent = []

    async def receive():
        return messages.pop(0) if len(messages) > 1 else messages[0]

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "headers": headers,
        "state": {asking.CONNECTION: Connection(OURS, is_local=True)},
    }
    asyncio.run(asyncio.wait_for(wire.app(scope, receive, send), 30))
    status = sent[0]["status"]
    content = b"".join(message.get("body", b"") for message in sent[1:])
    assert status in {200, 204} or 400 <= status < 500 or status == 503
    if status >= 400 and method != "HEAD":
        msgspec.json.decode(content, type=api.Failure)
        assert len(content) < 10_000
