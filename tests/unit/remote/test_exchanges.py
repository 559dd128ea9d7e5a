"""Requests over kept connections: reuse, limits and invalid responses."""

import contextlib
import socket
import threading
import time

import pytest
from fakesidecar import WAIT_S
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interrupting import interrupted
from slowness import is_over

from kafka_marshal.remote import exchanges
from kafka_marshal.remote.exchanges import (
    Answer,
    ExchangeError,
    Exchanges,
    open_tcp,
)
from kafka_marshal.unix_sockets import connect

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
LAST = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nhi"


class Server:
    """Answers each request with the next of ``answers``; None closes the connection.

    An answer is bytes, or an iterable of pieces to send one by one.

    Attributes:
        requests: The bytes received, by connection.
    """

    def __init__(self, path, answers=()):
        self.answers = list(answers)
        self.requests = []
        self.held = threading.Event()
        self.held.set()
        self._open = []
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                opened, _ = self._listening.accept()
                self._open.append(opened)
                mine = []
                self.requests.append(mine)
                threading.Thread(
                    target=self._serve, args=(opened, mine), daemon=True
                ).start()

    def _serve(self, opened, mine):
        with contextlib.suppress(OSError):
            while data := opened.recv(65_536):
                mine.append(data)
                assert self.held.wait(WAIT_S)
                answer = self.answers.pop(0) if self.answers else OK
                if answer is None:
                    break
                for piece in [answer] if isinstance(answer, bytes) else answer:
                    opened.sendall(piece)
                if answer is LAST:
                    break
            opened.close()

    def close(self):
        self.held.set()
        self._listening.close()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.fixture
def served(tmp_path):
    """Return a server, and exchanges with it."""
    path = tmp_path / "s.sock"
    server = Server(path)
    found = Exchanges(
        lambda timeout_s: connect(str(path), timeout_s),
        host="sidecar",
        headers={"Marshal-Instance": "ab"},
    )
    yield server, found
    found.close()
    server.close()


def ask(found, *, body=None, timeout_ms=WAIT_S * 1000):
    method = "GET" if body is None else "POST"
    return found.request(method, "/v1/x?a=b", body=body, timeout_ms=timeout_ms)


def test_a_request_is_one_write_on_a_kept_connection(served):
    server, found = served
    assert ask(found) == Answer(200, b"hi")
    assert ask(found, body=b"{}") == Answer(200, b"hi")
    (requests,) = server.requests
    assert len(requests) == 2
    head = requests[0].decode().lower()
    assert head.startswith("get /v1/x?a=b http/1.1\r\nhost: sidecar\r\n")
    assert "marshal-instance: ab\r\n" in head
    assert requests[1].endswith(b"\r\n\r\n{}")
    assert b"content-length: 2\r\n" in requests[1].lower()


def test_a_request_without_a_body_has_content_length_0(served):
    server, found = served
    found.request("DELETE", "/", body=None, timeout_ms=WAIT_S * 1000)
    assert b"content-length: 0\r\n" in server.requests[0][0].lower()


def test_an_interrupted_request_frees_its_connection_slot(served):
    """Otherwise no request could be sent after a number of interrupts."""
    _, found = served
    at = 0
    while interrupted(lambda: ask(found), at, everywhere=True)[0]:
        assert found._busy == {}, at
        at += 1
    assert at > exchanges.CONNECTIONS_MAX
    assert ask(found) == Answer(200, b"hi")


def test_a_response_is_returned_whatever_its_status(served):
    server, found = served
    server.answers = [b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n"]
    assert ask(found) == Answer(503, b"")


def test_chunks_and_informational_responses_are_read(served):
    server, found = served
    chunked = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    )
    server.answers = [b"HTTP/1.1 102 Wait\r\n\r\n" + chunked]
    assert ask(found) == ask(found) == Answer(200, b"hi")
    assert len(server.requests) == 1


def eventually(is_done):
    since_s = time.monotonic()
    while not is_done():
        assert not is_over(since_s, WAIT_S)
        time.sleep(0.01)


def test_a_connection_that_the_server_closes_is_not_used_again(served):
    server, found = served
    server.answers = [LAST, OK]
    assert ask(found) == ask(found) == Answer(200, b"hi")
    assert len(server.requests) == 2
    # A connection that is closed while idle is replaced before the next request.
    server.answers = [OK]
    server._open[1].shutdown(socket.SHUT_RDWR)
    assert ask(found) == Answer(200, b"hi")
    assert len(server.requests) == 3


def test_an_expired_connection_is_not_used_again(served, monkeypatch):
    server, found = served
    ask(found)
    monkeypatch.setattr(exchanges, "IDLE_S", -1.0)
    ask(found)
    assert len(server.requests) == 2
    assert not found._idle


def test_unexpected_bytes_end_a_connection(served):
    server, found = served
    server.answers = [OK + OK, OK]
    assert ask(found) == ask(found) == Answer(200, b"hi")
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(None, id="closed"),
        pytest.param(b"\0" * 100 + b"\r\n\r\n", id="no-http"),
        pytest.param(b"HTTP/1.1 200 OK\r\na: " + b"b" * 100_000, id="endless-head"),
    ],
)
def test_a_request_without_a_complete_response_counts_as_sent(served, answer):
    server, found = served
    server.answers = [answer]
    with pytest.raises(ExchangeError) as caught:
        ask(found)
    assert caught.value.was_sent
    assert ask(found) == Answer(200, b"hi")


def test_a_response_over_the_size_limit_is_refused(served, monkeypatch):
    server, found = served
    monkeypatch.setattr(exchanges, "ANSWER_BYTES_MAX", 1)
    with pytest.raises(ExchangeError, match="exceeds 1 bytes"):
        ask(found)
    assert not server.answers


def test_a_response_has_a_deadline(served):
    server, found = served
    server.held.clear()
    with pytest.raises(ExchangeError, match="timed out") as caught:
        ask(found, timeout_ms=50)
    assert caught.value.was_sent
    with pytest.raises(ExchangeError):
        ask(found, timeout_ms=0)


def test_bytes_that_trickle_in_do_not_prolong_the_deadline(served):
    def trickle():
        yield b"HTTP/1.1 200 OK\r\ncontent-length: 200\r\n\r\n"
        for _ in range(200):
            time.sleep(0.005)
            yield b"x"

    server, found = served
    server.answers = [trickle()]
    with pytest.raises(ExchangeError, match="timed out") as caught:
        ask(found, timeout_ms=200)
    assert caught.value.was_sent


def test_a_refusal_is_read_before_the_server_has_read_the_request(tmp_path):
    """A server may answer a long body before it has read it."""
    path = tmp_path / "early.sock"
    with socket.socket(socket.AF_UNIX) as listening, contextlib.ExitStack() as opened:
        listening.bind(str(path))
        listening.listen()

        def refuse():
            # Open until the end: a close with unread bytes may reset the connection.
            connection = opened.enter_context(listening.accept()[0])
            connection.recv(10)
            connection.sendall(b"HTTP/1.1 413 No\r\ncontent-length: 0\r\n\r\n")
            connection.shutdown(socket.SHUT_RDWR)

        thread = threading.Thread(target=refuse)
        thread.start()
        found = Exchanges(lambda s: connect(str(path), s), host="x", headers={})
        assert ask(found, body=b"x" * 10_000_000) == Answer(413, b"")
        thread.join(WAIT_S)
        found.close()


def test_without_a_listener_nothing_was_sent(tmp_path):
    found = Exchanges(
        lambda timeout_s: connect(str(tmp_path / "none"), timeout_s),
        host="sidecar",
        headers={},
    )
    for _ in range(exchanges.CONNECTIONS_MAX + 1):
        with pytest.raises(ExchangeError, match="No such file") as caught:
            ask(found)
        assert not caught.value.was_sent


def test_concurrent_requests_use_separate_connections_up_to_a_limit(
    served, monkeypatch
):
    server, found = served
    monkeypatch.setattr(exchanges, "CONNECTIONS_MAX", 2)
    server.held.clear()
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(found))) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: len(server.requests) == 2)
    with pytest.raises(ExchangeError, match="wait for their answers") as caught:
        ask(found, timeout_ms=50)
    assert not caught.value.was_sent
    server.held.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert answers == [Answer(200, b"hi")] * 5
    assert len(server.requests) == 2


def test_closing_wakes_the_threads_that_wait(served):
    server, found = served
    server.held.clear()
    errors = []

    def wait():
        try:
            ask(found)
        except (ExchangeError, RuntimeError) as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: bool(server.requests and server.requests[0]))
    found.close()
    found.close()
    thread.join(WAIT_S)
    assert len(errors) == 1
    with pytest.raises(RuntimeError, match="closed"):
        ask(found)


def test_tcp_connections_have_tcp_nodelay_set():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = listening.getsockname()
        with open_tcp(place, WAIT_S) as opened:
            assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    with pytest.raises(OSError, match="refused"):
        open_tcp(place, WAIT_S)


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    noise=st.one_of(
        st.binary(min_size=1, max_size=300),
        st.builds(
            lambda at, byte: OK[:at] + bytes([byte]) + OK[at + 1 :],
            st.integers(0, len(OK) - 1),
            st.integers(0, 255),
        ),
        st.builds(lambda length: OK[:length], st.integers(1, len(OK))),
    )
)
def test_arbitrary_bytes_from_a_server_give_a_response_or_an_error(served, noise):
    server, found = served
    server.answers = [noise]
    with contextlib.suppress(ExchangeError):
        assert isinstance(ask(found, timeout_ms=50), Answer)
    server.answers = []
    assert ask(found) == Answer(200, b"hi")


def outcome(found, **how):
    try:
        answer = ask(found, **how)
    except ExchangeError as error:
        return type(error), error.was_sent
    return answer


def without_parsing(monkeypatch):
    def refuse(_):
        raise AssertionError("it was parsed")

    monkeypatch.setattr(exchanges.h11.Connection, "next_event", refuse)


def test_a_repeated_exchange_is_neither_composed_nor_parsed_again(served, monkeypatch):
    server, found = served
    for body in (None, b"{}"):
        ask(found, body=body)
    longer = OK.replace(b": 2", b": 11").replace(b"hi", b"hello world")
    server.answers = [OK, longer, OK]
    without_parsing(monkeypatch)
    assert ask(found) == Answer(200, b"hi")
    assert ask(found, body=b'{"a": 1}') == Answer(200, b"hello world")
    assert ask(found, body=b"{}") == Answer(200, b"hi")
    (requests,) = server.requests
    assert requests[2] == requests[0]
    assert requests[4] == requests[1]
    assert requests[3] == requests[1].replace(b": 2", b": 8").replace(
        b"{}", b'{"a": 1}'
    )


DIFFERENT = [
    b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nno",
    b"HTTP/1.1 204 None\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi",
    b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nhi",
    b"HTTP/1.1 200 OK\r\ncontent-length: +2\r\n\r\nhi",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx: y\r\n\r\nhi",
    b"HTTP/1.1 200 OK\r\ncontent-length: 20000\r\n\r\n" + b"x" * 20_000,
    LAST,
    OK[:20],
    b"nonsense\r\n\r\n",
    None,
]


@pytest.mark.parametrize("different", DIFFERENT)
@pytest.mark.parametrize("body", [None, b"{}"])
def test_a_response_that_differs_from_earlier_ones_is_parsed(served, different, body):
    server, found = served
    server.answers = [different]
    expected = outcome(found, body=body, timeout_ms=300)
    for _ in range(2):
        assert ask(found, body=body) == Answer(200, b"hi")
    server.answers = [different]
    assert outcome(found, body=body, timeout_ms=300) == expected
    # After any of them the next request is answered.
    assert ask(found, body=body) == Answer(200, b"hi")


def test_a_response_in_pieces_is_awaited(served):
    server, found = served
    ask(found)
    server.answers = [OK[:-1]]
    with pytest.raises(ExchangeError, match="timed out"):
        ask(found, timeout_ms=200)
    sent = []

    def later(opened, _):
        with contextlib.suppress(OSError):
            while data := opened.recv(65_536):
                sent.append(data)
                opened.sendall(OK[: 10 * len(sent)])
                threading.Event().wait(0.02)
                opened.sendall(OK[10 * len(sent) :])

    server._serve = later
    for _ in range(4):
        assert ask(found) == Answer(200, b"hi")


def test_a_repeated_error_response_is_returned_each_time(served):
    server, found = served
    refusal = b"HTTP/1.1 409 No\r\ncontent-length: 2\r\n\r\nno"
    server.answers = [refusal] * 3
    assert [ask(found) for _ in range(3)] == [Answer(409, b"no")] * 3
    assert ask(found) == Answer(200, b"hi")


def test_kept_heads_of_requests_are_bounded(served, monkeypatch):
    monkeypatch.setattr(exchanges, "HEADS_MAX", 2)
    _, found = served
    for number in range(5):
        found.request("GET", f"/{number}", body=None, timeout_ms=WAIT_S * 1000)
    assert [target for _, target, _ in found._heads] == ["/4"]
    with pytest.raises(ExchangeError):
        found.request("GET", "/\n", body=None, timeout_ms=WAIT_S * 1000)
    assert len(found._heads) == 1
