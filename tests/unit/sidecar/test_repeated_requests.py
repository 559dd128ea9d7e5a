"""Requests with a repeated head, and requests that must be parsed again."""

import contextlib
import socket
import threading
from types import SimpleNamespace

import pytest
from appkit import CLIENT, HEADERS
from conformancekit import WAIT_S
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servedkit import REQUEST, TOKEN, eventually, failure_of, read

from kafka_marshal.remote import api
from kafka_marshal.sidecar import repeated_requests, requests
from kafka_marshal.sidecar.repeated_requests import (
    HEADS_MAX,
    Later,
    RepeatedRequests,
    SocketWriter,
)

HEAD = b"POST /beat HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nA: b\r\n\r\n"


def request(body=b"", head=HEAD):
    return head % len(body) + body


def taught(answer=lambda body: repeated_requests.response(b"<" + body + b">")):
    found = RepeatedRequests()
    assert found.feed(request()) == (b"", request())
    found.on_response(answer)
    return found


def test_requests_without_a_direct_answer_are_parsed_each_time():
    found = RepeatedRequests()
    for _ in range(2):
        assert found.feed(request()) == (b"", request())
        found.on_response(None)


def test_a_repeated_request_is_answered_without_parsing():
    answered, rest = taught().feed(request(b"x"))
    assert rest == b""
    assert answered.startswith(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n")
    assert answered.endswith(b"\r\n\r\n<x>")


def test_a_body_may_arrive_in_pieces():
    found = taught()
    whole = request(b"body")
    assert found.feed(whole[:-4]) == found.feed(b"bo") == (b"", b"")
    answered, rest = found.feed(b"dy")
    assert (answered[-6:], rest) == (b"<body>", b"")


def test_a_body_that_stays_incomplete_is_left_to_the_parser():
    found = taught()
    assert found.feed(request(b"body")[:-1]) == (b"", b"")
    assert found.give_up() == request(b"body")[:-1]
    assert found.feed(b"y") == (b"", b"y")


def test_a_request_without_an_answer_at_once_is_parsed():
    assert taught(lambda _: None).feed(request(b"x")) == (b"", request(b"x"))


def test_several_requests_received_together_are_parsed():
    both = request(b"x") + request(b"x")
    assert taught().feed(both) == (b"", both)
    found = taught()
    assert found.feed(both[:-200]) == (b"", both[:-200])


def test_no_head_is_learned_from_requests_received_together():
    found = RepeatedRequests()
    found.feed(b"GET / HTTP/1.1\r\n\r\n" + request())
    found.on_response(None)
    found.on_response(
        lambda _: b"{}"
    )  # answers the second, which was parsed with the first
    assert found.feed(request()) == (b"", request())


def test_only_the_latest_heads_are_kept():
    found = RepeatedRequests()
    heads = [HEAD.replace(b"A: b", b"A: %d" % n) for n in range(HEADS_MAX + 1)]
    for head in [heads[0], heads[0], *heads[1:]]:
        found.feed(request(head=head))
        found.on_response(lambda _: b"{}")
    answered = [bool(found.feed(request(head=head))[0]) for head in heads]
    assert answered == [False] + [True] * HEADS_MAX


def test_a_delayed_response_is_sent_by_the_thread_that_makes_it():
    early, late, sent = Later(), Later(), []
    early.put(b"a")
    assert sent == []

    def send(later, found):
        sent.append((later, found, threading.current_thread()))

    early.send_by(send)
    late.send_by(send)
    maker = threading.Thread(target=late.put, args=(b"b",))
    maker.start()
    maker.join(WAIT_S)
    assert sent == [(early, b"a", threading.current_thread()), (late, b"b", maker)]


def test_a_sent_response_wakes_the_event_loop_only_if_it_waits():
    early, late = Later(), Later()
    assert not early.on_sent()
    assert early.is_sent()
    assert not late.is_sent()
    assert late.on_sent()
    assert not late.is_sent()  # the loop was woken, and ends it


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(WAIT_S)
    with ours, theirs:
        yield ours, theirs


def test_a_writer_returns_the_bytes_that_do_not_fit(pair):
    ours, theirs = pair
    writer, data = SocketWriter(ours.fileno()), bytes(range(256)) * 16_384
    rest = writer.write(data)
    assert 0 < len(rest) < len(data)
    assert writer.write(rest) == rest, "there is no room"
    sent, received = len(data) - len(rest), b""
    while len(received) < sent:
        received += theirs.recv(65_536)
    assert received == data[:sent]
    assert writer.write(b"x") == b""
    assert theirs.recv(1) == b"x"


def test_a_writer_of_a_lost_connection_writes_nothing(pair):
    ours, theirs = pair
    writer = SocketWriter(ours.fileno())
    theirs.close()
    assert writer.write(b"x") == b""


def test_a_closed_writer_writes_nothing(pair):
    ours, theirs = pair
    writer = SocketWriter(ours.fileno())
    for _ in range(2):
        writer.close()
    assert writer.write(b"x") == b""
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)


def test_a_response_states_its_content_length():
    assert b"content-length: 2\r\n" in repeated_requests.response(b"{}")


INSTANCE = HEADERS[api.INSTANCE_HEADER]
# --- Repeated heartbeats ---


BEAT = CLIENT + "/beat"
PROGRESS = b'{"progress":[{"topic":"t","partition":0,"epoch":1,"position":%d}]}'


def beat_bytes(body=b"", *headers, length=None):
    lines = [
        f"POST {BEAT} HTTP/1.1",
        "Host: sidecar",
        f"{api.INSTANCE_HEADER}: {INSTANCE}",
        *headers,
        f"Content-Length: {len(body) if length is None else length}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def receive(connection):
    """Return the next response of known length."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += connection.recv(65_536)
    head, _, body = found.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    while len(body) < length:
        body += connection.recv(65_536)
    return head + b"\r\n\r\n" + body


def names_of(service):
    return [call[0] for call in service.calls]


@pytest.fixture
def beating(served):
    """Return a connection on which a heartbeat was answered."""
    served.service.calls.clear()
    served.service.is_slow = False
    with served.connect() as connection:
        connection.sendall(beat_bytes())
        first = receive(connection)
        assert first.startswith(b"HTTP/1.1 200 ")
        assert names_of(served.service) == ["beat"]
        served.service.calls.clear()
        state = served.server.server_state
        eventually(lambda: any(each._repeated._known for each in state.connections))
        yield SimpleNamespace(connection=connection, first=first, served=served)
    served.service.is_slow = False


def test_a_repeated_heartbeat_gets_the_same_answer_at_once(beating):
    connection, service = beating.connection, beating.served.service
    before = beating.served.server.server_state.total_requests
    for position in (7, 12_345):
        body = PROGRESS % position
        connection.sendall(beat_bytes(body))
        assert receive(connection) == beating.first
        assert service.calls[-1][2].progress[0].position == position
    assert names_of(service) == ["beat_at_once", "beat"] * 2
    assert beating.served.server.server_state.total_requests == before + 2
    counts = beating.served.app.counts.requests()
    assert counts["beat", 200] >= 3


def test_head_and_body_of_a_heartbeat_may_arrive_separately(beating):
    connection = beating.connection
    sent = beat_bytes(PROGRESS % 5)
    head = sent.index(b"\r\n\r\n") + 4
    for pieces in ((sent[:head], sent[head:]), (sent[: head + 9], sent[head + 9 :])):
        for piece in pieces:
            connection.sendall(piece)
            threading.Event().wait(0.01)
        assert receive(connection) == beating.first
    assert names_of(beating.served.service) == ["beat_at_once", "beat"] * 2


def test_a_slow_body_of_a_repeated_heartbeat_times_out(beating, monkeypatch):
    monkeypatch.setattr(requests, "BODY_S_MAX", 0.2)
    connection = beating.connection
    connection.sendall(beat_bytes(length=9))
    assert failure_of(read(connection)).message.startswith(
        "the request body did not arrive"
    )
    assert names_of(beating.served.service) == []


@pytest.mark.parametrize("body", [b"", b'{"flush": true, "timeout_ms": 5000}'])
def test_a_repeated_heartbeat_that_may_block_runs_on_a_thread(
    beating, body, monkeypatch
):
    monkeypatch.setattr(beating.served.app, "_asgi", None)  # nothing is routed
    beating.served.service.is_slow = True
    beating.connection.sendall(beat_bytes(body))
    assert receive(beating.connection) == beating.first
    assert names_of(beating.served.service) == ["beat"]
    (call,) = beating.served.service.calls
    assert call[2].flush == bool(body)
    app = beating.served.app
    eventually(lambda: app._quick._count == app._waiting._count == 0)


def test_without_a_service_a_repeated_heartbeat_is_refused(beating):
    serving = beating.served.app
    service, serving.service = serving.service, None
    try:
        beating.connection.sendall(beat_bytes())
        assert receive(beating.connection).startswith(b"HTTP/1.1 503 ")
    finally:
        serving.service = service


@pytest.mark.parametrize("body", [b"{", b'{"progress":1}', b"[" * 2_000])
def test_an_invalid_repeated_heartbeat_is_refused_with_a_reason(beating, body):
    beating.connection.sendall(beat_bytes(body))
    response = receive(beating.connection)
    assert response.startswith(b"HTTP/1.1 400 ")
    assert failure_of(response).setting == "body"


def test_a_repeated_heartbeat_of_a_removed_client_is_refused(beating):
    service = beating.served.service
    service.gone.add(("g", "c"))
    try:
        beating.connection.sendall(beat_bytes())
        assert receive(beating.connection).startswith(b"HTTP/1.1 410 ")
    finally:
        service.gone.clear()


def test_other_requests_between_heartbeats_are_parsed(beating):
    connection, service = beating.connection, beating.served.service
    connection.sendall(REQUEST)
    assert receive(connection).startswith(b"HTTP/1.1 200 ")
    connection.sendall(beat_bytes())
    assert receive(connection) == beating.first
    connection.sendall(beat_bytes() + beat_bytes())  # two at once
    eventually(lambda: len(names_of(service)) == 4)
    assert names_of(service) == ["beat_at_once", "beat", "beat", "beat"]


def test_another_instance_on_the_connection_is_refused(beating):
    other = beat_bytes().replace(INSTANCE.encode(), b"ef" * 16)
    beating.connection.sendall(other)
    assert receive(beating.connection).startswith(b"HTTP/1.1 409 ")


def test_over_tcp_a_repeated_heartbeat_needs_its_token(served):
    served.service.calls.clear()
    token = f"Authorization: Bearer {TOKEN.decode()}"
    local = [line.replace(b"sidecar", b"localhost", 1) for line in [beat_bytes()]]
    with_token = local[0].replace(
        b"Content-Length", token.encode() + b"\r\nContent-Length"
    )
    with socket.create_connection(("127.0.0.1", served.port), 30) as connection:
        for _ in range(2):
            connection.sendall(with_token)
            assert receive(connection).startswith(b"HTTP/1.1 200 ")
        assert names_of(served.service) == ["beat", "beat_at_once", "beat"]
        connection.sendall(local[0])
        assert receive(connection).startswith(b"HTTP/1.1 401 ")


def on_loop(served, call):
    """Make a call on the event loop of the server."""
    done = []
    (any_one, *_) = served.server.server_state.connections
    any_one.loop.call_soon_threadsafe(lambda: done.append(call()))
    eventually(lambda: bool(done))
    return done[0]


def test_repeated_heartbeats_keep_the_connection_open(beating):
    """The timer of an idle connection counts from the last heartbeat."""
    state = beating.served.server.server_state
    (one,) = (each for each in state.connections if each._repeated._known)
    timer = one.timeout_keep_alive_task
    beating.connection.sendall(beat_bytes())
    assert receive(beating.connection) == beating.first
    assert one.timeout_keep_alive_task is timer
    assert one._head_timer is one._body_timer is None
    on_loop(beating.served, one.timeout_keep_alive_handler)
    again = one.timeout_keep_alive_task
    assert again is not timer
    assert not again.cancelled()
    beating.connection.sendall(beat_bytes())
    assert receive(beating.connection) == beating.first


def test_a_connection_without_further_heartbeats_is_closed(beating):
    state = beating.served.server.server_state
    (one,) = (each for each in state.connections if each._repeated._known)
    one._used_at = on_loop(beating.served, one.loop.time) - requests.IDLE_S
    on_loop(beating.served, one.timeout_keep_alive_handler)
    assert read(beating.connection) == b""


CLOSING = beat_bytes(b"", "Connection: close")


@given(
    pieces=st.lists(
        st.sampled_from(
            [
                *(beat_bytes(), beat_bytes(PROGRESS % 3), beat_bytes(b"{}")),
                *(beat_bytes()[:40], beat_bytes()[40:], beat_bytes(length=2), b"{}"),
                beat_bytes(b"", "Expect: 100-continue"),
                CLOSING,
                beat_bytes().replace(b"\r\n", b"\n"),
                *(b"0\r\n\r\n", b"\r\n", b"x", REQUEST),
            ]
        ),
        max_size=5,
    )
)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_bytes_after_a_heartbeat_are_answered_as_if_all_were_parsed(served, pieces):
    if CLOSING in pieces:
        # Bytes after such a request are refused if they arrive before its answer.
        pieces = pieces[: pieces.index(CLOSING) + 1]
    answers = []
    for known in (True, False):
        served.service.is_slow = not known
        with served.connect() as connection:
            connection.sendall(beat_bytes())
            receive(connection)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for piece in pieces:
                    connection.sendall(piece)
                connection.shutdown(socket.SHUT_WR)
            answers.append(read(connection))
    served.service.is_slow = False
    # Bytes after the last complete request may get an error response or none.
    one, other = (each.split(b"HTTP/1.1 ") for each in answers)
    assert one[: len(other)] == other[: len(one)]
