"""Requests and events over HTTP: addresses, tokens and errors."""

import socket
import threading
from contextlib import closing
from pathlib import Path

import httpx
import msgspec
import pytest
from fakesidecar import EMPTY, INSTANCE, FakeSidecar, connected, failure

from kafka_marshal import errors
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    CoordinationError,
    MarshalError,
)
from kafka_marshal.remote import api, paths, transport
from kafka_marshal.remote.api import Failure
from kafka_marshal.remote.transport import (
    Address,
    Connection,
    NotRegistered,
    NotRunning,
    error_of,
)
from kafka_marshal.sidecar.http_errors import to_http_error


@pytest.fixture
def sidecar():
    return FakeSidecar()


def info_of(connected_one):
    return connected_one.ask("GET", paths.INFO, answer=api.Info)


def test_requests_are_sent_and_answers_decoded(sidecar):
    with closing(connected(sidecar, token="secret")) as connection:
        assert info_of(connection).client_id == "host-a"
        path = connection.path(paths.CLAIM, {"topic": "t", "partition": 3})
        assert path == "/v1/groups/g/clients/c/claims/t/3"
        connection.send("PUT", path, body=api.Children(pids=(1,)), query={"a": "b"})
    assert sidecar.asked[-1] == ("PUT", path, {"pids": [1]})


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        pytest.param(
            httpx.ConnectError("Connection refused"),
            CoordinationError,
            "no sidecar answers at unix:/run/s.sock .Connection refused.; start one "
            "with: marshal sidecar run, or check it with: marshal sidecar status",
            id="nobody",
        ),
        pytest.param(
            httpx.ReadTimeout(""), CoordinationError, "ReadTimeout", id="no-answer"
        ),
        pytest.param(
            (409, failure("ClaimRejected", holder="h")),
            ClaimRejected,
            "^no$",
            id="refused",
        ),
        pytest.param((404, failure("ClaimLost")), NotRegistered, "^no$", id="unknown"),
        pytest.param((410, failure("ClaimLost")), NotRegistered, "^no$", id="gone"),
        pytest.param(
            (500, b"<html>"), CoordinationError, "answered 500", id="no-sidecar"
        ),
        pytest.param(b"{}", CoordinationError, "cannot be read", id="no-answer-of-it"),
    ],
)
def test_an_error_is_reported_in_one_sentence(sidecar, answer, kind, message):
    sidecar.answers["GET", "info"] = [answer]
    connection = connected(sidecar)
    with pytest.raises(kind, match=message):
        info_of(connection)
    connection.close()
    connection.close()


def test_a_closed_connection_raises(sidecar):
    connection = connected(sidecar)
    connection.close()
    with pytest.raises(CoordinationError, match="closed"):
        info_of(connection)
    with pytest.raises(CoordinationError, match="closed"), connection.events(None):
        pass


def test_requests_have_the_token_and_the_instance():
    """Over TCP, on one kept connection."""
    heads = []
    body = msgspec.json.encode(FakeSidecar().info())
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            opened, _ = listening.accept()
            with opened:
                for _ in range(2):
                    heads.append(opened.recv(65_536).decode())
                    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"
                    opened.sendall(head % len(body) + body)

        thread = threading.Thread(target=serve)
        thread.start()
        place = f"127.0.0.1:{listening.getsockname()[1]}"
        connection = Connection.open(
            Address.parse(f"http://{place}"),
            token="secret",
            group_id="g",
            client_id="c",
            instance=INSTANCE,
        )
        with closing(connection):
            assert info_of(connection).client_id == "host-a"
            assert connection.ask(
                "GET", "/a b", answer=api.Info, query={"t": "1&2"}
            ) == info_of_body(body)
        thread.join(10)
    lines = heads[1].split("\r\n")
    assert lines[0] == "GET /a%20b?t=1%262 HTTP/1.1"
    assert f"Host: {place}" in lines
    assert "Authorization: Bearer secret" in lines
    assert f"{api.INSTANCE_HEADER}: {INSTANCE}" in lines


def info_of_body(body):
    return msgspec.json.decode(body, type=api.Info)


def test_a_missing_socket_is_reported(tmp_path):
    address = Address.parse(f"unix:{tmp_path}/none.sock")
    connection = Connection.open(
        address, token=None, group_id="g", client_id="c", instance=INSTANCE
    )
    with pytest.raises(CoordinationError, match="no sidecar answers at unix:"):
        info_of(connection)
    connection.close()


@pytest.mark.parametrize("how", ["no-socket", "refused"])
def test_a_sidecar_that_does_not_run_counts_as_gone(tmp_path, monkeypatch, how):
    monkeypatch.setattr(transport, "GONE_MS_MAX", 0)
    place = tmp_path / "s.sock"
    if how == "refused":  # as after SIGKILL: the file is left, and no process listens
        with closing(socket.socket(socket.AF_UNIX)) as left:
            left.bind(str(place))
    link = Connection.open(
        Address.parse(f"unix:{place}"),
        token=None,
        group_id="g",
        client_id="c",
        instance="00",
    )
    with closing(link):
        assert not link.is_gone
        with pytest.raises(NotRunning):
            link.send("GET", "/v1/info")
        assert link.is_gone
        link.count_gone_again()
        assert not link.is_gone


def test_a_socket_of_another_user_names_who_may_connect(monkeypatch):
    def refuse(path, timeout_s):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(transport.unix_sockets, "connect", refuse)
    link = Connection.open(
        Address.parse("unix:/run/s.sock"),
        token=None,
        group_id="g",
        client_id="c",
        instance="00",
    )
    with closing(link), pytest.raises(CoordinationError) as caught:
        link.send("GET", "/v1/info")
    assert "may not connect to the sidecar at unix:/run/s.sock" in str(caught.value)
    assert "run --socket-group" in str(caught.value)


def test_a_sidecar_that_answers_is_not_gone(sidecar, monkeypatch):
    monkeypatch.setattr(transport, "GONE_MS_MAX", 0)
    link = connected(sidecar)
    for error in (None, httpx.ReadTimeout("late")):
        sidecar.answers["GET", "info"] = [httpx.ConnectError("refused")]
        with pytest.raises(NotRunning):
            link.send("GET", "/v1/info")
        assert link.is_gone
        if error is None:
            link.send("GET", "/v1/info")
        else:
            sidecar.answers["GET", "info"] = [error]
            with pytest.raises(CoordinationError):
                link.send("GET", "/v1/info")
        assert not link.is_gone


def test_a_missing_extra_is_named(monkeypatch, sidecar):
    monkeypatch.setitem(__import__("sys").modules, "httpx_sse", None)
    with pytest.raises(ConfigurationError, match=r"kafka-marshal\[remote\]"):
        connected(sidecar)


# --- Events ---


def test_events_arrive_in_order_and_unknown_ones_are_skipped(sidecar):
    with (
        closing(connected(sidecar)) as connection,
        connection.events("a.1.0.0") as stream,
    ):
        served = sidecar.stream()
        assert served.after == "a.1.0.0"
        served.push_raw(": hello\n\nretry: 200\n\n")
        served.push(EMPTY)
        served.push_raw("event: warmed\ndata: {}\n\n")
        served.push(api.Paused(is_paused=True))
        served.end()
        found = list(stream.frames())
    assert [frame.body for frame in found] == [EMPTY, api.Paused(is_paused=True)]
    assert found[0].id.startswith("abababab.1.")


def test_an_event_that_cannot_be_decoded_raises_an_error(sidecar):
    with closing(connected(sidecar)) as connection, connection.events(None) as stream:
        sidecar.stream().push_raw("event: lost\ndata: {}\n\n")
        with pytest.raises(CoordinationError, match="'lost' that cannot be read"):
            list(stream.frames())


def test_a_response_that_is_no_event_stream_raises_an_error(sidecar):
    sidecar.answers["GET", "events"] = [b"{}"]
    with (
        closing(connected(sidecar)) as connection,
        connection.events(None) as stream,
        pytest.raises(CoordinationError, match="did not send a stream of events"),
    ):
        list(stream.frames())


def broken_off(connection, sidecar):
    with connection.events(None) as stream:
        sidecar.stream().end(httpx.ReadError("reset"))
        list(stream.frames())


def test_a_broken_event_stream_raises_an_error(sidecar):
    with closing(connected(sidecar)) as connection:
        with pytest.raises(CoordinationError, match="reset"):
            broken_off(connection, sidecar)
        sidecar.answers["GET", "events"] = [(410, failure("ClaimLost"))]
        with pytest.raises(NotRegistered), connection.events(None):
            pass


def test_no_certificates_are_loaded_for_plain_http(monkeypatch):
    """They take 25 ms of each start."""
    monkeypatch.setattr("ssl.create_default_context", pytest.fail)
    address = Address.parse("unix:/run/s.sock")
    Connection.open(
        address, token=None, group_id="g", client_id="c", instance=INSTANCE
    ).close()


def test_ending_a_stream_wakes_its_reader(tmp_path):
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        connection = Connection.open(
            Address.parse(f"unix:{path}"),
            token=None,
            group_id="g",
            client_id="c",
            instance=INSTANCE,
        )
        accepted = []

        def serve():
            server, _ = listening.accept()
            server.recv(65_536)
            head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            server.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
            accepted.append(server)

        thread = threading.Thread(target=serve)
        thread.start()
        with connection.events(None) as stream:
            thread.join(10)
            ender = threading.Timer(0.05, stream.end)
            ender.start()
            assert list(stream.frames()) == []
            ender.join(10)
        connection.close()
        accepted[0].close()


def test_an_event_of_an_unknown_kind_is_not_decoded():
    assert transport.decoded("later", "no json") is None


# --- Addresses, tokens and errors ---


@pytest.mark.parametrize(
    ("text", "socket", "url"),
    [
        pytest.param("unix:/run/s.sock", "/run/s.sock", "http://sidecar", id="unix"),
        pytest.param("unix:///run/s", "/run/s", "http://sidecar", id="unix-url"),
        pytest.param(
            "http://127.0.0.1:9876", None, "http://127.0.0.1:9876", id="loopback"
        ),
        pytest.param("http://[::1]:80/", None, "http://[::1]:80", id="loopback-6"),
        pytest.param("http://localhost:1", None, "http://localhost:1", id="name"),
    ],
)
def test_valid_addresses_are_parsed(text, socket, url):
    found = Address.parse(text)
    assert (found.socket, found.base_url) == (socket, url)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("unix:s.sock", "must be absolute", id="relative"),
        pytest.param("unix:", "must be absolute", id="empty-path"),
        pytest.param("http://10.0.0.1:80", "not this machine", id="elsewhere"),
        pytest.param("http://example.org:80", "not this machine", id="a-name"),
        pytest.param("https://127.0.0.1:80", "neither unix:PATH nor", id="scheme"),
        pytest.param("http://127.0.0.1", "neither unix:PATH nor", id="no-port"),
        pytest.param("http://127.0.0.1:0", "not a valid port", id="port-0"),
        pytest.param("http://127.0.0.1:99999", "not a valid port", id="port"),
        pytest.param("http://u@127.0.0.1:80", "not this machine", id="user"),
        pytest.param("", "neither unix:PATH nor", id="nothing"),
        pytest.param(5, "not a string", id="number"),
        pytest.param(Path("/run/s.sock"), "not a string", id="path"),
    ],
)
def test_an_invalid_address_is_refused(text, why):
    with pytest.raises(ConfigurationError, match=why) as caught:
        Address.parse(text)
    assert caught.value.setting == "sidecar"


def test_a_token_is_read_from_its_file_and_required_over_tcp(tmp_path):
    file = tmp_path / "token"
    file.write_text("abc\n")
    tcp, unix = Address.parse("http://127.0.0.1:1"), Address.parse("unix:/s")
    assert (tcp.token(file), unix.token(file), unix.token(None)) == ("abc", "abc", None)
    with pytest.raises(ConfigurationError, match="requires a token"):
        tcp.token(None)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"a\nb", id="two-lines"),
        pytest.param(b"\xff", id="no-text"),
        pytest.param(None, id="no-file"),
    ],
)
def test_an_invalid_token_file_is_refused(tmp_path, content):
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match="token") as caught:
        Address.parse("http://127.0.0.1:1").token(file)
    assert caught.value.setting == "sidecar_token_file"


REAL = [
    pytest.param(each, id=type(each).__name__)
    for each in (
        errors.ConfigurationError("m", setting="policy"),
        errors.ClaimLost("m", winner="w", at_offset=3, reason="taken_over"),
        errors.ClaimRejected("m", holder="h", at_offset=4, reason="paused"),
        errors.IdentityConflict("m", holder="h"),
        errors.ClientFenced("m", by="alice", reason="hung", at_offset=5),
        errors.ClientFenced("m"),
        errors.GroupPaused("m", until_ms=0, by="admin"),
        errors.PositionError("m", requested=-1, log_start=-1, log_end=-1),
        errors.PositionError(
            "m", requested=9, log_start=1, log_end=5, partition=("t", 7)
        ),
        errors.DeadlineExceeded("m"),
        errors.InvalidTransition("m"),
        errors.CoordinationError("m"),
        errors.TopicMisconfigured("m"),
        errors.WrongCluster("m"),
        errors.LogTruncated("m"),
    )
]


@pytest.mark.parametrize("error", REAL)
def test_an_error_survives_its_encoding(error):
    found = error_of(to_http_error(error).failure)
    assert type(found) is type(error)
    assert (str(found), vars(found)) == (str(error), vars(error))


@pytest.mark.parametrize("kind", [errors.LogUnreadable, errors.LogUnwritable])
def test_log_errors_of_the_sidecar_are_marked_as_its_own(kind):
    """Sidecar and client have different principals, with different rights."""
    found = error_of(to_http_error(kind("this principal is not authorized")).failure)
    assert type(found) is kind
    assert str(found) == "In the sidecar: this principal is not authorized"


@pytest.mark.parametrize(
    ("retriable", "kind"),
    [
        pytest.param(True, CoordinationError, id="later"),
        pytest.param(False, MarshalError, id="never"),
    ],
)
@pytest.mark.parametrize("name", ["Unheard", "ClaimError", "annotations", "__doc__"])
def test_an_unknown_error_becomes_a_general_one(retriable, kind, name):
    served = Failure(error=name, message="m", retriable=retriable)
    assert type(error_of(served)) is kind
