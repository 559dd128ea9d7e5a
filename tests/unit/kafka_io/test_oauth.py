"""Tokens from a token endpoint, and extensions of token providers."""

import base64
import json
import threading
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs

import pytest

from kafka_marshal.errors import CoordinationError
from kafka_marshal.kafka_io import oauth as module
from kafka_marshal.kafka_io.oauth import ClientCredentials, extensions_of


class Endpoint(HTTPServer):
    """Gives the answers of ``answers`` in order; notes login and body of requests.

    An answer without a status is sent as it is.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = []
        self.answers = []


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        login = base64.b64decode(self.headers["Authorization"].split()[1]).decode()
        self.server.requests.append((login, parse_qs(body)))
        status, answer = self.server.answers.pop(0)
        if status is None:
            self.wfile.write(answer)
            return
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        """Log nothing."""


@pytest.fixture
def endpoint():
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def clock():
    """The wall clock, and the one that is never set."""
    return SimpleNamespace(now_s=1_000.0, clock_s=5.0)


@pytest.fixture
def tokens(endpoint, clock):
    return ClientCredentials(
        f"http://127.0.0.1:{endpoint.server_port}/token",
        client_id="billing",
        client_secret="s/ecret",
        scope="kafka",
        now_s=lambda: clock.now_s,
        clock_s=lambda: clock.clock_s,
    )


def test_a_token_is_renewed_before_it_expires(endpoint, tokens, clock):
    endpoint.answers += [
        (200, {"access_token": "one", "expires_in": 100}),
        (200, {"access_token": "two"}),
    ]
    assert [tokens.token(), tokens.token()] == ["one", "one"]
    assert tokens.expires_at_s == 1_100
    clock.now_s = 1_075.0
    assert tokens.token() == "two"
    assert tokens.expires_at_s == 1_375  # the default lifetime is 300 s
    wanted = {"grant_type": ["client_credentials"], "scope": ["kafka"]}
    assert endpoint.requests == [("billing:s%2Fecret", wanted)] * 2


def test_a_token_is_renewed_although_the_wall_clock_was_set_back(
    endpoint, tokens, clock
):
    """Brokers refuse an expired one, which is taken for a wrong login."""
    endpoint.answers += [
        (200, {"access_token": "one", "expires_in": 100}),
        (200, {"access_token": "two", "expires_in": 100}),
    ]
    assert tokens.token() == "one"
    clock.now_s -= 3_600
    assert tokens.token() == "one"
    clock.clock_s += 75
    assert tokens.token() == "two"
    assert tokens.expires_at_s == clock.now_s + 100


def test_a_token_is_used_until_it_expires_while_the_endpoint_fails(
    endpoint, tokens, clock
):
    endpoint.answers += [
        (200, {"access_token": "one", "expires_in": 100}),
        (503, b"later"),
        (503, b"later"),
        (200, {"access_token": "two", "expires_in": 100}),
    ]
    tokens.token()
    clock.now_s = 1_090.0
    assert tokens.token() == "one"
    clock.now_s = 1_100.0
    with pytest.raises(CoordinationError, match="503: Service Unavailable: later"):
        tokens.token()
    assert tokens.token() == "two"


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (401, {"error": "invalid_client"}, "401.*invalid_client"),
        (200, b"<html>", "JSONDecodeError"),
        (200, {"token": "x"}, "access_token"),
        (200, [], "TypeError"),
    ],
)
def test_the_error_shows_the_answer_of_the_endpoint(
    endpoint, tokens, status, answer, words
):
    endpoint.answers.append((status, answer))
    with pytest.raises(CoordinationError, match=words) as caught:
        tokens.token()
    assert "returned no token" in str(caught.value)
    assert "ecret" not in str(caught.value)


def test_an_answer_that_is_no_http_is_no_token(endpoint, tokens, clock):
    """The last token stays in use as while the endpoint does not answer."""
    endpoint.answers += [
        (200, {"access_token": "one", "expires_in": 100}),
        (None, b"SSH-2.0-x\r\n"),
        (None, b"SSH-2.0-x\r\n"),
    ]
    tokens.token()
    clock.now_s = 1_090.0
    assert tokens.token() == "one"
    clock.now_s = 1_100.0
    with pytest.raises(CoordinationError, match="returned no token: BadStatusLine"):
        tokens.token()


def test_an_invalid_address_of_the_endpoint_is_in_the_error():
    tokens = ClientCredentials("http://127.0.0.1:p", client_id="a", client_secret="b")
    with pytest.raises(CoordinationError, match="returned no token: InvalidURL"):
        tokens.token()


@pytest.fixture
def silent(monkeypatch):
    """Make the endpoint answer nothing, and waits for it short; return its requests."""
    asked, may_end = [], threading.Event()

    def post(*_, **__):
        asked.append(threading.current_thread())
        may_end.wait(60)
        return b""

    monkeypatch.setattr(module, "_post", post)
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 0.01)
    yield asked
    may_end.set()
    for thread in asked:
        thread.join(60)


def test_the_wait_for_a_token_has_a_deadline(tokens, silent):
    """The timeout of a socket is for each byte, and none is for a name's look-up."""
    with pytest.raises(CoordinationError, match=r"no answer within 0\.01 s"):
        tokens.token()
    assert len(silent) == 1


def test_only_a_few_requests_go_on_after_their_deadline(tokens, silent):
    for _ in range(module.LATE_MAX):
        with pytest.raises(CoordinationError, match="no answer within"):
            tokens.token()
    with pytest.raises(CoordinationError, match="4 earlier requests have no answer"):
        tokens.token()
    assert len(silent) == module.LATE_MAX == 4


def test_the_body_of_a_refusal_is_read_within_the_deadline(
    endpoint, tokens, monkeypatch
):
    """A refusal is read where its request was made: only that wait has a deadline."""
    readers = []
    read = HTTPResponse.read

    def note(self, *size):
        readers.append(threading.current_thread())
        return read(self, *size)

    monkeypatch.setattr(HTTPResponse, "read", note)
    endpoint.answers.append((503, b"later"))
    with pytest.raises(CoordinationError, match=r"token: HTTP Error 503: .*: later"):
        tokens.token()
    assert [each.name for each in readers] == ["marshal-token"]


def test_a_valid_token_is_used_if_no_thread_can_be_started(
    endpoint, tokens, clock, monkeypatch
):
    endpoint.answers.append((200, {"access_token": "one", "expires_in": 100}))
    tokens.token()
    clock.now_s = 1_080.0

    def refuse(*_, **__):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "begin", refuse)
    assert tokens.token() == "one"
    clock.now_s = 1_100.0
    with pytest.raises(CoordinationError, match="can't start new thread"):
        tokens.token()


def test_requests_for_a_new_token_are_rare_while_the_last_one_is_valid(
    endpoint, tokens, clock, silent, monkeypatch
):
    with monkeypatch.context() as patch:
        answer = json.dumps({"access_token": "one", "expires_in": 100}).encode()
        patch.setattr(module, "_post", lambda *_, **__: answer)
        patch.setattr(module, "REQUEST_TIMEOUT_S", 60.0)
        assert tokens.token() == "one"
    clock.now_s = 1_080.0
    assert [tokens.token() for _ in range(3)] == ["one"] * 3
    assert len(silent) == 1
    clock.now_s += module.RETRY_S
    assert tokens.token() == "one"
    assert len(silent) == 2


def test_only_one_thread_waits_for_the_successor_of_a_valid_token(
    tokens, clock, monkeypatch
):
    answers = iter(
        json.dumps({"access_token": each, "expires_in": 100}).encode()
        for each in ("one", "two")
    )
    monkeypatch.setattr(module, "_post", lambda *_, **__: next(answers))
    assert tokens.token() == "one"
    clock.now_s = 1_080.0
    found, is_asked, may_answer = [], threading.Event(), threading.Event()

    def post(*_, **__):
        is_asked.set()
        may_answer.wait(60)
        return next(answers)

    monkeypatch.setattr(module, "_post", post)
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 60.0)
    renewing = threading.Thread(target=lambda: found.append(tokens.token()))
    renewing.start()
    assert is_asked.wait(60)
    assert tokens.token() == "one"
    may_answer.set()
    renewing.join(60)
    assert (found, tokens.token()) == (["two"], "two")


def test_the_error_names_an_unreachable_endpoint(endpoint):
    endpoint.server_close()
    netloc = f"127.0.0.1:{endpoint.server_port}"
    tokens = ClientCredentials(f"http://{netloc}", client_id="a", client_secret="b")
    with pytest.raises(CoordinationError, match=f"{netloc} returned no token.*refused"):
        tokens.token()


def test_the_ca_file_is_loaded_for_the_endpoint(endpoint, tmp_path):
    """An empty file raises an error, which shows that it was loaded."""
    nothing = tmp_path / "ca.pem"
    nothing.write_text("")
    tokens = ClientCredentials(
        f"http://127.0.0.1:{endpoint.server_port}",
        client_id="a",
        client_secret="b",
        cafile=str(nothing),
    )
    with pytest.raises(CoordinationError, match="returned no token"):
        tokens.token()
    assert endpoint.requests == []


def test_extensions_are_optional():
    assert extensions_of(object()) == {}
    assert extensions_of(SimpleNamespace(extensions=lambda: {"a": "b"})) == {"a": "b"}
