"""What a service lets in, of requests under which claims."""

import json
import re
import threading
from io import BytesIO
from pathlib import Path
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.types import Key, Token
from kafka_marshal.receiving import (
    ACCEPTED,
    DONE,
    NEXT_HEADER,
    OVERLAPS,
    STALE,
    FencedApp,
    Known,
    SqliteFences,
    Write,
    headers_of,
    judge,
    parse_token,
    read_headers,
)

SOURCE = Key("billing", "payments", 3)
OLD, NEW = Token(1, 0, 7), Token(1, 0, 12)
WAIT_S = 20
ROOT = Path(__file__).resolve().parents[2]


def write(first, last, *, token=OLD):
    return Write(SOURCE, token, first, last)


# --- the rule


@pytest.mark.parametrize(
    ("known", "asked", "outcome", "then"),
    [
        pytest.param(None, write(5, 9), ACCEPTED, (OLD, 10), id="a new source"),
        pytest.param((OLD, 5), write(5, 9), ACCEPTED, (OLD, 10), id="the next rows"),
        pytest.param((OLD, 5), write(8, 9), ACCEPTED, (OLD, 10), id="rows left out"),
        pytest.param((OLD, 10), write(5, 9), DONE, (OLD, 10), id="twice"),
        pytest.param((OLD, 9), write(5, 9), OVERLAPS, (OLD, 9), id="in part"),
        pytest.param((NEW, 5), write(5, 9), STALE, (NEW, 5), id="a zombie"),
        pytest.param((NEW, 99), write(5, 9), STALE, (NEW, 99), id="a late zombie"),
        pytest.param(
            (OLD, 5), write(5, 9, token=NEW), ACCEPTED, (NEW, 10), id="a takeover"
        ),
        pytest.param(
            (OLD, 10), write(5, 9, token=NEW), DONE, (NEW, 10), id="it repeats"
        ),
        pytest.param(
            (OLD, 7), write(5, 9, token=NEW), OVERLAPS, (NEW, 7), id="it repeats a part"
        ),
    ],
)
def test_each_request_is_judged(known, asked, outcome, then):
    found = judge(known and Known(*known), asked)
    assert found == (outcome, then)


# --- headers


def test_headers_say_what_is_written():
    said = headers_of(write(5, 9))
    assert said == {
        "Marshal-Source": "billing/payments/3",
        "Marshal-Offsets": "5-9",
        "Marshal-Fencing-Token": "1.0.7",
    }
    assert read_headers(said) == write(5, 9)
    assert read_headers({name.upper(): text for name, text in said.items()})
    assert read_headers({"Content-Type": "text/plain"}) is None


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("Marshal-Source", None),
        ("Marshal-Source", "billing/payments"),
        ("Marshal-Source", "billing/pay ments/3"),
        ("Marshal-Source", "billing/payments/-1"),
        ("Marshal-Source", "bill ing/payments/3"),
        ("Marshal-Offsets", None),
        ("Marshal-Offsets", "9-5"),
        ("Marshal-Offsets", "5"),
        ("Marshal-Offsets", "5-99999999999999999999"),
        ("Marshal-Fencing-Token", None),
        ("Marshal-Fencing-Token", "7"),
    ],
)
def test_what_makes_no_sense_is_told(header, said):
    headers = headers_of(write(5, 9)) | {header: said}
    with pytest.raises(ConfigurationError, match="read"):
        read_headers({name: text for name, text in headers.items() if text is not None})


def test_tokens_order_like_tuples():
    assert parse_token("2.0.1") == Token(2, 0, 1)
    assert parse_token("1.0.10") > parse_token("1.0.9")


@pytest.mark.parametrize("text", ["", "1.2", "1.2.x", "1.2.3.4", "1.2.-3", "1.2.²"])
def test_what_is_no_token_is_told(text):
    with pytest.raises(ConfigurationError, match="no fencing token"):
        parse_token(text)


# --- the store


@pytest.fixture
def store(tmp_path):
    return SqliteFences(str(tmp_path / "fences.db"))


def kept(store):
    with store.entered(SOURCE) as slot:
        return slot.known


def test_fences_outlive_the_process(store, tmp_path):
    with store.entered(SOURCE) as slot:
        assert slot.known is None
        slot.keep(Known(OLD, 10))
    other = SqliteFences(str(tmp_path / "fences.db"))
    assert kept(other) == (OLD, 10)
    with other.entered(Key("billing", "payments", 4)) as slot:
        assert slot.known is None


def test_what_fails_keeps_nothing(store):
    def work():
        with store.entered(SOURCE) as slot:
            slot.keep(Known(OLD, 10))
            raise ValueError("the work failed")

    with pytest.raises(ValueError, match="work failed"):
        work()
    assert kept(store) is None


def test_one_at_a_time_is_in_it(store):
    is_in, may_leave, seen = threading.Event(), threading.Event(), []

    def first():
        with store.entered(SOURCE) as slot:
            is_in.set()
            assert may_leave.wait(WAIT_S)
            slot.keep(Known(OLD, 10))

    def second():
        seen.append(kept(store))

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert is_in.wait(WAIT_S)
    threads[1].start()
    may_leave.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert seen == [(OLD, 10)]


# --- around an application


class App:
    """Notes what it is asked to write."""

    def __init__(self):
        self.status = "201 Created"
        self.bodies = []
        self.is_closed = False

    def __call__(self, environ, start_response):
        if self.status is None:
            raise ValueError("no database")
        length = int(environ["CONTENT_LENGTH"])
        self.bodies.append(environ["wsgi.input"].read(length))
        put = start_response(self.status, [("Content-Type", "text/plain")])
        put(b"well ")
        return self

    def __iter__(self):
        return iter([b"do", b"ne"])

    def close(self):
        self.is_closed = True


@pytest.fixture
def app():
    return App()


@pytest.fixture
def ask(app, store):
    def ask(asked=None, *, body=b"rows", headers=(), **options):
        environ = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": str(len(body))}
        setup_testing_defaults(environ)
        environ["QUERY_STRING"] = ""
        environ["wsgi.input"] = BytesIO(body)
        said = {} if asked is None else headers_of(asked)
        for name, text in {**said, **dict(headers)}.items():
            environ["HTTP_" + name.upper().replace("-", "_")] = text
        environ |= options.pop("environ", {})
        told, parts = [], []

        def start_response(status, headers, exc_info=None):
            told.append((int(status[:3]), dict(headers)))
            return parts.append

        made = validator(FencedApp(app, store, **options))
        answer = made(environ, start_response)
        parts.extend(answer)
        answer.close()
        ((status, headers),) = told
        return status, b"".join(parts), headers

    return ask


def test_what_is_new_reaches_the_application(ask, app, store):
    assert ask(write(5, 9))[:2] == (201, b"well done")
    assert app.bodies == [b"rows"]
    assert app.is_closed
    assert kept(store) == (OLD, 10)


def test_what_comes_twice_does_not(ask, app):
    ask(write(5, 9))
    status, _, headers = ask(write(5, 9))
    assert (status, headers[NEXT_HEADER]) == (200, "10")
    status, _, headers = ask(write(5, 12))
    assert (status, headers[NEXT_HEADER]) == (409, "10")
    assert len(app.bodies) == 1
    assert ask(write(10, 12))[0] == 201


def test_a_zombie_does_not_though_the_next_owner_wrote_nothing_yet(ask, app, store):
    ask(write(5, 9))
    assert ask(write(5, 9, token=NEW))[0] == 200
    status, text, _ = ask(write(10, 12))
    assert status == 412
    assert b"1.0.7 is over: 1.0.12 came later" in text
    assert len(app.bodies) == 1
    assert kept(store) == (NEW, 10)


def test_what_the_application_refuses_may_come_again(ask, app, store):
    app.status = "503 Service Unavailable"
    assert ask(write(5, 9))[0] == 503
    assert kept(store) is None
    app.status = "200 OK"
    assert ask(write(5, 9))[0] == 200
    assert len(app.bodies) == 2


def test_an_application_that_raises_has_written_nothing(ask, app, store):
    app.status = None
    with pytest.raises(ValueError, match="no database"):
        ask(write(5, 9))
    assert kept(store) is None


def test_a_body_is_read_before_anything_is_locked(ask, store):
    """Whoever sends it may be stopped in the midst of it."""

    class Body(BytesIO):
        def read(self, size=-1):
            assert kept(store) is None  # it would wait for itself
            return super().read(size)

    assert ask(write(5, 9), environ={"wsgi.input": Body(b"rows")})[0] == 201


@pytest.mark.parametrize(
    ("asked", "more", "status"),
    [
        pytest.param(None, {}, 428, id="no headers"),
        pytest.param(None, {"is_optional": True}, 201, id="none are needed"),
        pytest.param(None, {"headers": {"Marshal-Offsets": "5-9"}}, 400, id="too few"),
        pytest.param(write(5, 9), {"body_bytes_max": 3}, 413, id="a long body"),
        pytest.param(
            write(5, 9), {"environ": {"CONTENT_LENGTH": "9"}}, 400, id="a cut body"
        ),
    ],
)
def test_what_is_no_write_is_answered(ask, app, asked, more, status):
    assert ask(asked, **more)[0] == status
    assert len(app.bodies) == (status == 201)


def test_the_document_s_service_refuses_zombies_and_repeats(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    marked = r"<!-- run: sink_http_service -->\n```python\n(.*?)\n```"
    (code,) = re.findall(marked, text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(compile(code, "sink_http_service", "exec"), scope)

    def post(token, first, *bills):
        body, said = json.dumps(bills).encode(), []
        environ = {"CONTENT_LENGTH": str(len(body)), "wsgi.input": BytesIO(body)}
        asked = write(first, first + len(bills) - 1, token=token)
        for name, value in headers_of(asked).items():
            environ["HTTP_" + name.upper().replace("-", "_")] = value
        scope["app"](environ, lambda status, headers: said.append(int(status[:3])))
        return said

    assert post(OLD, 0, "a", "b") == [204]
    assert post(OLD, 0, "a", "b") == [200]
    assert post(NEW, 1, "b", "c") == [409]
    assert post(NEW, 2, "c") == [204]
    assert post(OLD, 3, "d") == [412]
    assert scope["bills"] == ["a", "b", "c"]
