"""Requests and connections on real sockets: validation, peers and limits."""

import asyncio
import contextlib
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
from functools import partial

import h11
import httpx
import msgspec
import pytest
from appkit import CLIENT, HEADERS, OURS, REQUESTS, Wire, failure
from fakeservice import FakeService, assigned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servedkit import REQUEST, TOKEN, Served, eventually, failure_of, read
from slices import HANG_S

from kafka_marshal.remote import api, paths
from kafka_marshal.sidecar import process_monitor, requests
from kafka_marshal.sidecar.http_errors import HttpError
from kafka_marshal.sidecar.requests import Connection

# --- Requests ---


INSTANCE = HEADERS[api.INSTANCE_HEADER]


@pytest.fixture
def wire():
    found = Wire(FakeService())
    found.service.instances["g", "c"] = INSTANCE
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
def test_unknown_paths_methods_and_parameters_are_refused(wire, method, path, status):
    response = wire.request(method, path, headers=HEADERS)
    assert response.status_code == status, response.text
    if method != "HEAD":
        assert failure(response).message
    assert wire.service.calls == []


def test_a_wrong_method_is_answered_with_the_allowed_ones(wire):
    response = wire.request("POST", "/v1/info", headers=HEADERS)
    assert response.headers["allow"] == "GET"
    assert failure(response).message.startswith("'/v1/info' accepts GET, not POST; see")


@pytest.mark.parametrize("value", [None, "", "CD" * 16, "cd" * 15, "cd" * 17])
def test_a_request_without_a_valid_instance_is_refused(wire, value):
    headers = {} if value is None else {api.INSTANCE_HEADER: value}
    response = wire.request("POST", CLIENT + "/beat", json={}, headers=headers)
    assert response.status_code == 400
    assert failure(response).setting == api.INSTANCE_HEADER


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"instance":1}', b'"\\ud800"', b"[" * 9_999],
)
def test_an_invalid_body_is_refused_with_a_reason(wire, body):
    response = wire.request("PUT", CLIENT, content=body)
    assert response.status_code == 400
    assert failure(response).message.startswith(
        "the body is not a valid RegisterRequest: "
    )
    assert wire.service.calls == []


def test_a_body_over_the_size_limit_is_refused(wire, monkeypatch):
    monkeypatch.setattr(requests, "BODY_BYTES_MAX", 1_000)

    async def pieces():
        for _ in range(100):
            yield b" " * 100

    for content in (b" " * 1_001, pieces()):
        response = wire.request("PUT", CLIENT, content=content)
        assert response.status_code == 413
        assert response.headers["connection"] == "close"
    assert wire.service.calls == []


def test_long_bodies_have_a_common_size_limit(wire, monkeypatch):
    monkeypatch.setattr(requests, "BODIES_BYTES_MAX", 1_000)
    monkeypatch.setattr(requests, "BODY_BYTES_FREE", 100)
    bodies = requests.LongBodies()
    with bodies.reading() as first, bodies.reading() as second:
        first.grow(600)
        first.grow(900)  # counts 800: the first 100 bytes are free
        second.grow(300)
        assert (first.charged, second.charged) == (800, 200)
        with pytest.raises(HttpError) as caught:
            second.grow(301)
        assert caught.value.status == 503
        with bodies.reading() as ordinary:
            ordinary.grow(100)
    with bodies.reading() as third:
        third.grow(1_100)


def test_a_body_over_the_common_limit_gets_a_retriable_error(wire, monkeypatch):
    monkeypatch.setattr(requests, "BODIES_BYTES_MAX", 20_000)
    response = wire.request("PUT", CLIENT, content=b" " * 40_000)
    assert response.status_code == 503
    assert failure(response).retriable
    assert wire.service.calls == []
    # The bytes of a refused body no longer count.
    assert wire.request("PUT", CLIENT, content=b" " * 30_000).status_code == 400


def test_a_slow_body_times_out(wire, monkeypatch):
    monkeypatch.setattr(requests, "BODY_S_MAX", 0.01)

    async def pieces():
        yield b"{"
        await asyncio.sleep(30)
        yield b"}"

    response = wire.request("PUT", CLIENT, content=pieces())
    assert response.status_code == 408


# --- arbitrary requests

SEGMENT = st.text(
    st.characters(codec="utf-8", exclude_characters="?#"), min_size=1, max_size=12
)
KNOWN_PATHS = st.sampled_from(
    [path.partition("?")[0] for _, path, *_ in REQUESTS.values()]
)
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
                st.sampled_from(["instance", "topics", "progress", "returned", "pids"]),
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
def test_any_request_gets_a_response(wire, method, path, rest):
    """Errors have a ``Failure`` as their body, and no request gets a 500."""
    query, headers, pieces = rest
    service = wire.service
    service.calls.clear()
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
        "state": {requests.CONNECTION: Connection(OURS, is_local=True)},
    }
    asyncio.run(asyncio.wait_for(wire.app(scope, receive, send), 30))
    status = sent[0]["status"]
    content = b"".join(message.get("body", b"") for message in sent[1:])
    assert status in {200, 204} or 400 <= status < 500 or status == 503
    if status >= 400 and method != "HEAD":
        msgspec.json.decode(content, type=api.Failure)
        assert len(content) < 10_000


# --- Connections ---


def test_the_service_gets_the_registering_process(served):
    with served.client() as client:
        body = {"instance": INSTANCE, "beat_ms": 100}
        assert client.put(CLIENT, json=body).status_code == 200
    peer = next(
        call for call in reversed(served.service.calls) if call[0] == "register"
    )[4]
    assert peer == process_monitor.Peer(
        os.getpid(), os.geteuid(), process_monitor.start_time(os.getpid())
    )


def test_each_connection_belongs_to_one_client(served):
    body = {"instance": INSTANCE, "beat_ms": 100}
    other = paths.CLIENT.format(group="g", client="other")
    with served.client() as client:
        assert client.put(CLIENT, json=body).is_success
        refused = client.put(other, json=body)
        assert refused.status_code == 409
        assert client.put(CLIENT, json=body).is_success
    with served.client() as client:
        assert client.put(other, json=body).is_success
        assert client.put(CLIENT, json=body).status_code == 409


def test_tcp_has_no_peer_and_needs_the_token(served):
    base = f"http://127.0.0.1:{served.port}"
    with httpx.Client(base_url=base, timeout=30) as client:
        assert client.get(paths.INFO).status_code == 401
        assert client.get(paths.LIVEZ).status_code == 200
        client.headers["authorization"] = f"Bearer {TOKEN.decode()}"
        body = {"instance": INSTANCE, "beat_ms": 100}
        assert client.put(CLIENT, json=body).is_success
    peer = next(
        call for call in reversed(served.service.calls) if call[0] == "register"
    )[4]
    assert peer == process_monitor.UNKNOWN_PEER


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser becomes another")
def test_another_user_is_refused_even_if_file_modes_allow_access(served):
    program = (
        "import http.client, os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "c = http.client.HTTPConnection('x')\n"
        "c.sock = socket.socket(socket.AF_UNIX)\n"
        "c.sock.connect(sys.argv[1])\n"
        "c.request('GET', '/v1/info')\n"
        "print(c.getresponse().status)\n"
    )
    command = [sys.executable, "-c", program, str(served.path)]
    # With the modes that the sidecar sets, another user cannot even connect.
    run = partial(
        subprocess.run,
        command,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    closed = run()
    assert "PermissionError" in closed.stderr
    upwards = [served.path, *served.path.parents[:-2]]
    modes = {path: path.stat().st_mode for path in upwards}
    try:
        for path in upwards:
            path.chmod(0o777)
        opened = run()
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert opened.stdout == "403\n", opened.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser becomes another")
def test_only_members_of_the_socket_group_are_admitted(tmp_path):
    gid = 4711
    program = (
        "import http.client, os, socket, sys\n"
        "os.setgroups([int(x) for x in sys.argv[2:]])\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "c = http.client.HTTPConnection('x')\n"
        "c.sock = socket.socket(socket.AF_UNIX)\n"
        "c.sock.connect(sys.argv[1])\n"
        "c.request('GET', '/v1/info')\n"
        "print(c.getresponse().status)\n"
    )

    def run(*groups):
        path = str(served.path)  # type: ignore[attr-defined]
        command = [sys.executable, "-c", program, path, *groups]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=HANG_S, check=False
        )

    served = Served(tmp_path / "own" / "s.sock", gid=gid)
    upwards = tmp_path.parents[:-2]
    modes = {path: path.stat().st_mode for path in (tmp_path, *upwards)}
    try:
        for path in modes:
            path.chmod(0o755)
        assert run(str(gid)).stdout == "200\n"
        assert "PermissionError" in run().stderr
        assert "PermissionError" in run(str(gid + 1)).stderr
    finally:
        for path, before in modes.items():
            path.chmod(before)
        served.close()


def ask(port, path, *headers, body=b"", length=None):
    """Return a connection over TCP that has sent a request with part of its body."""
    lines = [b"PUT " if body else b"GET ", path.encode(), b" HTTP/1.1\r\n"]
    lines += [header + b"\r\n" for header in (b"host: 127.0.0.1", *headers)]
    if body:
        lines.append(b"content-length: %d\r\n" % (length or len(body)))
    found = socket.create_connection(("127.0.0.1", port), 30)
    found.sendall(b"".join([*lines, b"\r\n", body]))
    return found


SHOWN = b"authorization: Bearer " + TOKEN


def test_excess_connections_are_refused_and_probes_answered(tmp_path):
    served = Served(tmp_path / "own" / "s.sock", connections_max=3)
    try:
        standing = [served.connect() for _ in range(3)]
        eventually(lambda: served.connection_count == 3)
        with served.connect() as one_more:
            one_more.sendall(b"GET /v1/info HTTP/1.1\r\nhost: x\r\n\r\n")
            response = read(one_more)
        assert response.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in response
        assert "limit of connections" in failure_of(response).message
        with served.connect() as one_more:
            one_more.sendall(REQUEST)
            assert read(one_more).startswith(b"HTTP/1.1 200 ")
        standing.pop().close()
        eventually(lambda: served.connection_count == 2)
        with served.client() as client:
            assert client.get(paths.INFO).is_success
        for connection in standing:
            connection.close()
    finally:
        served.close()


def test_tcp_connections_leave_room_for_the_unix_socket(tmp_path):
    served = Served(tmp_path / "own" / "s.sock", connections_max=8)
    try:
        standing = []
        for _ in range(7):
            standing.append(ask(served.port, paths.INFO, SHOWN))
            assert standing[-1].recv(65_536).startswith(b"HTTP/1.1 200 ")
        with ask(served.port, paths.INFO, SHOWN) as one_more:
            assert read(one_more).startswith(b"HTTP/1.1 503 ")
        with ask(served.port, paths.LIVEZ) as probe:
            assert read(probe).startswith(b"HTTP/1.1 200 ")
        with served.client() as client:
            assert client.get(paths.INFO).is_success
        for connection in standing:
            connection.close()
    finally:
        served.close()


def test_guest_connections_do_not_displace_clients(tmp_path):
    served = Served(tmp_path / "own" / "s.sock", connections_max=64)
    strangers = [
        socket.create_connection(("127.0.0.1", served.port), 30) for _ in range(100)
    ]
    try:
        # The oldest guests are closed; a client that connects now is the newest.
        eventually(lambda: 0 < served.connection_count <= 16)
        for _ in range(3):
            with ask(served.port, paths.INFO, SHOWN) as client:
                assert client.recv(65_536).startswith(b"HTTP/1.1 200 ")
            with ask(served.port, paths.LIVEZ) as probe:
                assert read(probe).startswith(b"HTTP/1.1 200 ")
            with served.client() as client:
                assert client.get(paths.INFO).is_success
    finally:
        for each in strangers:
            each.close()
        served.close()


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (CLIENT, (), b"401"),
        (paths.LIVEZ, (), b"405"),
        (CLIENT, (SHOWN, b"marshal-instance: " + INSTANCE.encode()), b"413"),
        (CLIENT + "/beat%20", (SHOWN,), b"404"),
        (CLIENT + "/claims/t/x", (SHOWN,), b"400"),
    ],
)
def test_an_unread_body_closes_the_connection(served, path, headers, status):
    length = 10**9 if status == b"413" else 1_000
    with ask(served.port, path, *headers, body=b"{", length=length) as connection:
        response = read(connection)
    assert response.startswith(b"HTTP/1.1 " + status), response
    assert b"connection: close\r\n" in response
    eventually(lambda: served.connection_count == 0)


def test_a_guest_connection_gets_one_response_and_a_deadline(served, monkeypatch):
    with ask(served.port, paths.INFO) as connection:
        assert read(connection).startswith(b"HTTP/1.1 401 ")
    with ask(served.port, paths.LIVEZ) as connection:
        assert b"connection: close\r\n" in read(connection)
    monkeypatch.setattr(requests, "GUEST_S_MAX", 0.2)
    # It never reads the response, which is larger than all buffers.
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1_024)
        connection.connect(("127.0.0.1", served.port))
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: [::1]\r\n\r\n")
        eventually(lambda: served.connection_count == 0)


def test_an_admitted_connection_stays_open(served):
    eventually(lambda: served.connection_count == 0)
    base = f"http://127.0.0.1:{served.port}"
    headers = {"authorization": f"Bearer {TOKEN.decode()}"}
    with httpx.Client(base_url=base, timeout=30) as client:
        assert client.get(paths.INFO, headers=headers).is_success
        (one,) = served.server.server_state.connections
        assert one._guest_timer is None
        assert client.get(paths.LIVEZ).is_success
        assert served.server.server_state.connections == {one}


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        *((b"127.0.0.1", True), (b"127.0.0.1:7070", True), (b"[::1]:7070", True)),
        *((b"localhost", True), (b"LOCALHOST:1", True), (b"evil.example", False)),
        *((b"127.0.0.1.evil.example", False), (b"10.0.0.1", False), (b"", False)),
        *((b"[::1", False), (b"evil.example:7070", False)),
    ],
)
def test_a_foreign_host_header_is_refused_over_tcp(served, host, is_ours):
    with socket.create_connection(("127.0.0.1", served.port), 30) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nhost: " + host + b"\r\n\r\n")
        response = read(connection)
    assert response.startswith(b"HTTP/1.1 200 " if is_ours else b"HTTP/1.1 403 ")
    if not is_ours:
        assert failure_of(response).setting == "host"


INFO = b"GET /v1/info HTTP/1.1\r\nhost: [::1]\r\n" + SHOWN + b"\r\n\r\n"
BODY = b'{"instance":"%b","beat_ms":100}' % INSTANCE.encode()
PLAIN_REGISTRATION = (
    b"PUT %b HTTP/1.1\r\nhost: [::1]\r\n%b\r\ncontent-length: %d\r\n\r\n%b"
    % (CLIENT.encode(), SHOWN, len(BODY), BODY)
)


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(INFO, id="no-body"),
        pytest.param(PLAIN_REGISTRATION, id="body"),
        pytest.param(INFO + PLAIN_REGISTRATION, id="two"),
    ],
)
def test_a_client_that_half_closes_after_its_request_is_answered(
    served, sent, is_local
):
    """As ``nc -N`` does."""
    tcp = ("127.0.0.1", served.port)
    connect = served.connect if is_local else partial(socket.create_connection, tcp, 30)
    with connect() as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        response = read(connection)
    assert response.count(b"HTTP/1.1 200 ") == sent.count(b"HTTP/1.1"), response
    assert response.endswith(b"}")
    eventually(lambda: served.connection_count == 0)


def test_a_client_that_half_closed_gets_a_delayed_response(served):
    served.service.hold = threading.Event()
    try:
        with served.connect() as connection:
            connection.sendall(INFO)
            connection.shutdown(socket.SHUT_WR)
            eventually(lambda: served.connection_count == 1)
            (one,) = served.server.server_state.connections
            eventually(lambda: one._has_ended)
            served.service.hold.set()
            assert read(connection).startswith(b"HTTP/1.1 200 ")
    finally:
        served.service.hold = None


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET /livez HT", id="head"),
        pytest.param(PLAIN_REGISTRATION[:-1], id="body"),
    ],
)
def test_an_incomplete_request_is_refused(served, sent):
    with served.connect() as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        response = read(connection)
    assert response.startswith(b"HTTP/1.1 400 ")
    assert "before the request was complete" in failure_of(response).message
    eventually(lambda: served.connection_count == 0)


def test_an_event_stream_ends_when_the_client_half_closes(served):
    count = len(served.service.feeds)
    with served.connect() as connection:
        connection.sendall(EVENTS.encode() + b"\r\n\r\n")
        eventually(lambda: len(served.service.feeds) > count)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
        connection.shutdown(socket.SHUT_WR)
        read(connection)
    eventually(lambda: served.service.feeds[-1].is_closed)


@pytest.mark.parametrize("begun", [b"", b"GET /livez HT", REQUEST + b"GET /li"])
def test_a_slow_request_head_times_out(served, monkeypatch, begun):
    monkeypatch.setattr(requests, "HEAD_S_MAX", 0.5)
    with served.connect() as connection:
        connection.sendall(begun)
        response = read(connection)
    *_, last = response.split(b"HTTP/1.1 ")
    assert last.startswith(b"408 ")
    assert "no complete request head arrived" in failure_of(last).message


def test_an_idle_connection_stays_open(served, monkeypatch):
    # Longer than from the connection to the request, shorter than the pause below.
    monkeypatch.setattr(requests, "HEAD_S_MAX", 0.5)
    with served.client() as client:
        for _ in range(2):
            assert client.get(paths.LIVEZ).is_success
            (one,) = served.server.server_state.connections
            threading.Event().wait(0.7)
            assert served.server.server_state.connections == {one}


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\n\r\nnonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 5_000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_invalid_http_is_answered_and_closed(served, sent):
    with served.connect() as connection:
        connection.sendall(sent)
        response = read(connection)
    assert response.startswith(b"HTTP/1.1 400 ")
    assert failure_of(response).message


def test_a_broken_body_closes_only_its_connection(served):
    head = b"PUT " + CLIENT.encode() + b" HTTP/1.1\r\nhost: x\r\n"
    with served.connect() as connection:
        connection.sendall(head + b"transfer-encoding: chunked\r\n\r\nzz\r\n")
        assert read(connection).startswith(b"HTTP/1.1 400 ")
    with served.client() as client:
        assert client.get(paths.LIVEZ).is_success


def test_a_long_request_is_parsed_in_small_pieces(served, monkeypatch):
    """Otherwise a body in chunks of one byte delays heartbeats of other clients."""
    sizes, plain = [], h11.Connection.receive_data

    def receive(parser, data):
        sizes.append(len(data))
        plain(parser, data)

    monkeypatch.setattr(h11.Connection, "receive_data", receive)
    head = b"PUT " + CLIENT.encode() + b" HTTP/1.1\r\nhost: x\r\n"
    with served.connect() as connection:
        connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        connection.sendall(b"1\r\n \r\n" * 20_000 + b"0\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert read(connection).startswith(b"HTTP/1.1 400 ")
    assert sum(sizes) > 100_000
    assert max(sizes) <= requests.READ_BYTES_MAX


@given(
    pieces=st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.sampled_from(
                [
                    REQUEST,
                    b"PUT /v1/groups/g/clients/c HTTP/1.1\r\nhost: x\r\n",
                    b"POST /v1/groups/g/pause HTTP/1.1\r\nhost: x\r\n",
                    b"POST /v1/groups/g/reset HTTP/1.1\r\nhost: x\r\n",
                    b"GET /v1/groups/g/history HTTP/1.1\r\nhost: x\r\n\r\n",
                    b'content-length: 12\r\n\r\n{"for_ms":9}',
                    b"content-length: 5\r\n\r\n",
                    b"transfer-encoding: chunked\r\n\r\n",
                    b"5\r\n{}{}{\r\n0\r\n\r\n",
                    b"connection: upgrade\r\nupgrade: websocket\r\n\r\n",
                    b"expect: 100-continue\r\n\r\n",
                    b"\r\n",
                ]
            ),
        ),
        max_size=6,
    ),
    is_reset=st.booleans(),
)
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_arbitrary_bytes_do_not_stop_the_server(served, pieces, is_reset):
    with served.connect() as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                connection.sendall(piece)
        if is_reset:
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    with served.connect() as connection:
        connection.sendall(REQUEST)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")


def test_a_connection_that_breaks_leaves_no_timer(served, monkeypatch):
    """The timer would keep the connection in memory for as long as an idle one."""
    lost, end = [], requests.GuardedProtocol.connection_lost

    def connection_lost(self, exc):
        end(self, exc)
        lost.append((type(exc), self.timeout_keep_alive_task))

    monkeypatch.setattr(requests.GuardedProtocol, "connection_lost", connection_lost)
    with served.connect() as connection:
        connection.sendall(REQUEST)
        # A whole response that nobody reads makes the close a reset.
        eventually(lambda: connection.recv(65_536, socket.MSG_PEEK).endswith(b"}"))
    # The connection of the fixture may end meanwhile, too.
    eventually(lambda: any(kind is ConnectionResetError for kind, _ in lost))
    assert not any(timer for _, timer in lost)


def test_without_file_descriptors_connections_wait_and_one_line_is_logged(
    served, caplog
):
    """Otherwise asyncio logs thousands of tracebacks a minute."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, files[1]))
        try:
            for each in connections:
                each.connect(str(served.path))
            eventually(lambda: caplog.records)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, files)
        for each in connections:
            each.settimeout(HANG_S)
            each.sendall(REQUEST)
            assert each.recv(65_536).startswith(b"HTTP/1.1 200 ")
    finally:
        for each in connections:
            each.close()
    (line,) = caplog.messages
    assert "Too many open files; raise the limit" in line


def test_other_errors_of_the_event_loop_are_logged(served, caplog):
    loop = served.server.servers[0].get_loop()
    loop.call_soon_threadsafe(lambda: 1 / 0)
    eventually(lambda: caplog.records)
    assert "ZeroDivisionError" in caplog.text


def test_no_connection_or_task_is_left_over(served):
    eventually(lambda: served.connection_count == 0)
    assert served.server.server_state.tasks == set()


def test_a_stalled_event_reader_uses_bounded_memory_and_catches_up(served):
    """Unread events stay in the event buffer of the service, which is bounded."""
    head = f"GET {CLIENT}/events HTTP/1.1\r\nhost: x\r\n"
    head += f"{api.INSTANCE_HEADER}: {INSTANCE}\r\n\r\n"
    count = len(served.service.feeds)
    with served.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.sendall(head.encode())
        eventually(lambda: len(served.service.feeds) > count)
        feed = served.service.feeds[-1]
        eventually(lambda: feed.taken)
        pushed = 0
        # Until no new event is taken any more: the buffers are full.
        while True:
            before = feed.taken
            for _ in range(1_000):
                feed.push(assigned(pushed % 7))
                pushed += 1
                if not pushed % 50:
                    threading.Event().wait(0.001)
            if feed.taken == before:
                break
            assert feed.taken < 100_000
        (one,) = served.server.server_state.connections
        assert one.transport.get_write_buffer_size() < 400_000
        # Once it reads, a snapshot replaces the missed events, and new ones follow.
        feed.push(assigned(4_711))
        text = bytearray()
        while b'"partition":4711' not in text:
            text += connection.recv(65_536)
        assert text.count(b"event: snapshot") >= 2
    eventually(lambda: feed.is_closed and len(served.app._streams) == 0)


OPENAPI = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n"
EVENTS = f"GET {CLIENT}/events HTTP/1.1\r\nhost: x\r\n{api.INSTANCE_HEADER}: {INSTANCE}"


def fill(served, connection, sent):
    """Send requests until responses wait to be sent; return the server's connection."""
    eventually(lambda: served.connection_count == 1)
    (one,) = served.server.server_state.connections

    def is_waiting():
        # On a busy machine the deadline of its responses may have closed it by now.
        if one.transport.get_write_buffer_size() or one.transport.is_closing():
            return True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(sent)
        return False

    eventually(is_waiting)
    return one


@pytest.mark.parametrize("sent", [REQUEST * 100, OPENAPI, b"nonsense\r\n\r\n"])
def test_an_unread_response_times_out(served, monkeypatch, sent):
    """The connection is admitted: only the deadline of its responses closes it."""
    eventually(lambda: served.connection_count == 0)
    monkeypatch.setattr(requests, "WRITE_S_MAX", 0.5)
    with served.connect() as connection:
        filled = REQUEST * 100 if sent.startswith(b"nonsense") else sent
        one = fill(served, connection, filled)
        if filled != sent:
            with contextlib.suppress(OSError):
                connection.sendall(sent)  # its response is the last one
        eventually(lambda: served.connection_count == 0)
        assert one.transport.get_write_buffer_size() == 0


def test_an_unread_event_stream_times_out(served, monkeypatch):
    eventually(lambda: served.connection_count == 0)
    monkeypatch.setattr(requests, "WRITE_S_MAX", 0.5)
    count = len(served.service.feeds)
    with served.connect() as connection:
        connection.sendall(EVENTS.encode() + b"\r\n\r\n")
        eventually(lambda: len(served.service.feeds) > count)
        feed = served.service.feeds[-1]

        def is_closed():
            feed.push(assigned())
            return feed.is_closed

        eventually(is_closed)
    eventually(lambda: served.connection_count == len(served.app._streams) == 0)


def test_a_slowly_read_response_is_complete(served):
    eventually(lambda: served.connection_count == 0)
    with served.connect() as connection:
        one = fill(served, connection, OPENAPI)
        eventually(lambda: one._write_timer is not None)
        connection.sendall(b"GET /last HTTP/1.1\r\nhost: x\r\n\r\n")
        text = bytearray()
        while b"HTTP/1.1 404 " not in text:
            text += connection.recv(65_536)
        eventually(lambda: one._write_timer is None)
        assert served.server.server_state.connections == {one}


def test_a_silent_stream_sends_keep_alives(served):
    with (
        served.client() as client,
        client.stream("GET", CLIENT + "/events", headers=HEADERS) as response,
    ):
        assert response.headers["cache-control"] == "no-store"
        lines = response.iter_lines()
        while next(lines) != ": keep-alive":
            pass
