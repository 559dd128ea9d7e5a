"""Heads that can be repeated, and heads that require parsing."""

import pytest

from kafka_marshal.remote.repeated_heads import (
    BODY_BYTES_MAX,
    HEAD_BYTES_MAX,
    RepeatedHead,
)

HEAD = b"POST /beat HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nA: b\r\n\r\n"


def request(body=b"", head=HEAD):
    return head % len(body) + body


def test_a_message_has_the_length_of_its_body():
    head = RepeatedHead.of(request(b"{}"))
    assert head is not None
    for body in (b"", b"abc", b"x" * 1_000):
        assert head.message(body) == request(body)
        begin, end = head.body_of(request(body))
        assert request(body)[begin:end] == body
    plain = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
    found = RepeatedHead.of(plain)
    assert found is not None
    assert found.message(b"") == plain


def test_a_head_is_split_around_its_length():
    head = RepeatedHead.of(request(b"{}"))
    assert head is not None
    assert head.before + b"2" + head.after == HEAD % 2
    assert head.body_of(request(b"abc")) == (len(HEAD % 3), len(HEAD % 3) + 3)
    assert head.body_of(request()) == (len(HEAD % 0), len(HEAD % 0))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"POST /beat HTTP/1.1\r\nContent-Length: 2\r\n",
        b"POST /beat HTTP/1.1\r\nHost: " + b"x" * HEAD_BYTES_MAX + b"\r\n\r\n",
        b"P / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"P / HTTP/1.1\r\nX: content-length\r\n\r\n",
        b"P / HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n",
        b"P / HTTP/1.1\r\nContent-Length: 2\r\nX: content-length: 3\r\n\r\n",
        b"P / HTTP/1.1\r\nContent-Length: 12345678\r\n\r\n",
        b"P / HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"P / HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n",
        b"P / HTTP/1.1\r\nContent-Length: 2\r\nConnection: close\r\n\r\n",
        b"P / HTTP/1.1\r\nContent-Length: 2\r\nUpgrade: h2c\r\n\r\n",
        b"P / HTTP/1.1\r\nContent-Length: 2\r\nA: b\n\r\n\r\n",
    ],
)
def test_incomplete_and_special_heads_are_not_repeated(data):
    assert RepeatedHead.of(data) is None


def test_a_head_without_a_length_has_no_body():
    data = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
    head = RepeatedHead.of(data)
    assert head == RepeatedHead(data, None)
    assert head.body_of(data) == (len(data), len(data))
    assert head.body_of(data.replace(b"/x", b"/y")) is None


def test_a_head_with_connection_keep_alive_is_repeated():
    data = b"P / HTTP/1.1\r\nConnection: keep-alive\r\ncontent-length: 2\r\n\r\n"
    assert RepeatedHead.of(data) is not None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        HEAD[:30],
        b"GET " + request()[5:],
        request().replace(b"A: b", b"A: c"),
        request().replace(b": 0", b": +1"),
        request().replace(b": 0", b": "),
        request().replace(b": 0", b": 1_0"),
        request().replace(b": 0", b": 12345678"),
        HEAD % (BODY_BYTES_MAX + 1),
    ],
)
def test_bytes_that_differ_do_not_match_the_head(data):
    head = RepeatedHead.of(request())
    assert head is not None
    assert head.body_of(data) is None
