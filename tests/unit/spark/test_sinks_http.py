"""What is posted under which claim, and what becomes of each answer."""

import json
import logging
import pickle
from types import SimpleNamespace

import httpx
import pytest

from kafka_marshal.errors import ConfigurationError, CoordinationError
from kafka_marshal.receiving import NEXT_HEADER, read_headers
from kafka_marshal.spark import sinks_http
from kafka_marshal.spark.sinks_http import HttpSink, _write_task

PLACE = ("t", 3)


def rows(*offsets, token="1.0.7", partition=3):
    return [
        SimpleNamespace(offset=n, token=token, topic="t", partition=partition)
        for n in offsets
    ]


def render(some):
    return json.dumps([row.offset for row in some]).encode()


def told(status, position=None):
    headers = {} if position is None else {NEXT_HEADER: str(position)}
    return httpx.Response(status, headers=headers, text="because")


class Service:
    """Answers what the test says, and notes what it was asked."""

    def __init__(self):
        self.answers = []
        self.asked = []
        self.headers = []

    def __call__(self, request):
        write = read_headers(dict(request.headers))
        self.asked.append((str(write.token), json.loads(request.content)))
        self.headers.append(request.headers)
        assert (write.source.group_id, write.source.topic) == ("g", "t")
        assert write.first == self.asked[-1][1][0]
        assert write.last == self.asked[-1][1][-1]
        answer = self.answers.pop(0) if self.answers else told(204)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def service(monkeypatch):
    made = Service()
    real = httpx.Client

    def client(timeout):
        assert timeout == 60
        return real(transport=httpx.MockTransport(made))

    monkeypatch.setattr(httpx, "Client", client)
    return made


@pytest.fixture
def sink():
    return HttpSink("http://bills/rows", render, "g", rows_at_once=3)


def write(sink, *offsets):
    return sink.write(PLACE, token="1.0.7", rows=iter(rows(*offsets)))


def test_rows_go_in_parts_in_order(service, sink):
    assert write(sink, 4, 5, 6, 9) == 4
    assert service.asked == [("1.0.7", [4, 5, 6]), ("1.0.7", [9])]


def test_headers_of_the_caller_go_along(service):
    made = HttpSink("http://b", render, "g", headers={"Authorization": "secret"})
    write(made, 1)
    assert service.headers[0]["authorization"] == "secret"
    assert "secret" not in repr(made)


def test_what_was_written_before_is_not_counted(service, sink):
    service.answers = [told(200, 7)]
    assert write(sink, 4, 5, 6, 7) == 1
    assert service.asked == [("1.0.7", [4, 5, 6]), ("1.0.7", [7])]


def test_the_rest_of_what_was_written_in_part_is_sent(service, sink):
    service.answers = [told(409, 5)]
    assert write(sink, 4, 5, 6, 7) == 3
    assert [offsets for _, offsets in service.asked] == [[4, 5, 6], [5, 6], [7]]


def test_rows_that_were_filtered_may_leave_nothing_to_send(service, sink):
    service.answers = [told(409, 7), told(204)]
    assert write(sink, 4, 6) == 0
    assert len(service.asked) == 1


def test_after_a_later_claim_nothing_more_is_sent(service, sink, caplog):
    service.answers = [told(204), told(412)]
    with caplog.at_level(logging.WARNING, "kafka_marshal"):
        assert write(sink, 1, 2, 3, 4, 5, 6, 7, 8) == 3
    assert len(service.asked) == 2
    assert "t-3 under token 1.0.7 are left out" in caplog.text


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (told(500), "answered 500 to offsets 1 to 2 of t-3: 'because'"),
        (told(302), "answered 302"),
        (httpx.ReadTimeout("late"), r"did not answer to .* ReadTimeout"),
        (told(409), "names no offset"),
        (told(409, 1), "names no offset"),
    ],
)
def test_what_another_try_may_mend_is_raised(service, sink, answer, says):
    service.answers = [answer]
    with pytest.raises(CoordinationError, match=says):
        write(sink, 1, 2)


def test_each_claim_of_each_partition_is_told_apart(service, sink):
    every = [
        *rows(1, 2),
        *rows(3, token="1.0.9"),
        *rows(1, token="1.0.8", partition=4),
    ]
    _write_task(sink, iter(every))
    assert service.asked == [("1.0.7", [1, 2]), ("1.0.9", [3]), ("1.0.8", [1])]
    assert [x["marshal-source"] for x in service.headers] == ["g/t/3"] * 2 + ["g/t/4"]


def test_it_travels_to_executors(sink):
    assert pickle.loads(pickle.dumps(sink)) == sink


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"url": "bills/rows"}, "begins with http:// or https://"),
        ({"rows_at_once": 0}, "at least 1"),
    ],
)
def test_what_could_never_work_is_refused(fields, says):
    made = {"url": "http://b", "render": render, "group": "g"} | fields
    with pytest.raises(ConfigurationError, match=says):
        HttpSink(**made)


def test_a_missing_extra_is_named(sink, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(sinks_http, "import_module", missing)
    with pytest.raises(ConfigurationError, match=r"kafka-marshal\[remote\]"):
        write(sink, 1)
