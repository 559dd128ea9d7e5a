"""Large answers of a broker, read by kafka-python where they are to lie."""

import asyncio
import socket
import struct
from types import SimpleNamespace

import pytest
from kafka.net.transport import KafkaTCPTransport
from kafka.protocol.frame import KafkaBytes

from kafka_marshal.kafka_io import inplace as module
from kafka_marshal.kafka_io.inplace import LARGE, Answer, read_in_place, receive


class Parser:
    """kafka-python's, as far as it receives; it keeps what came whole."""

    def __init__(self):
        self._receiving = False
        self._rbuffer = None
        self._head = b""
        self.whole = []
        self.pieces = []

    def take(self, data):
        self.pieces.append(len(data))
        while data:
            if not self._receiving:
                missing = 4 - len(self._head)
                self._head, data = self._head + data[:missing], data[missing:]
                if len(self._head) == 4:
                    (size,) = struct.unpack(">i", self._head)
                    self._head, self._receiving = b"", True
                    self._rbuffer = KafkaBytes(size)
                continue
            missing = len(self._rbuffer) - self._rbuffer.tell()
            self._rbuffer.write(data[:missing])
            data = data[missing:]
            if self._rbuffer.tell() == len(self._rbuffer):
                self._rbuffer.seek(0)
                self.whole.append(self._rbuffer)
                self._receiving = False


@pytest.fixture
def line():
    """A transport of kafka-python's, its parser, and the broker's end."""
    near, far = socket.socketpair()
    near.setblocking(False)
    far.settimeout(10)
    parser = Parser()
    transport = KafkaTCPTransport(None, near)
    transport.set_protocol(SimpleNamespace(parser=parser))
    yield transport, parser, far
    near.close()
    far.close()


def framed(body):
    return struct.pack(">i", len(body)) + body


def pump(line, data):
    """Send data, and have it received meanwhile."""
    transport, parser, far = line
    ordinary = transport._sock_recv
    far.setblocking(False)
    left = memoryview(data)
    while True:
        sent = 0
        if left:
            try:
                sent = far.send(left)
            except BlockingIOError:
                sent = 0
            left = left[sent:]
        got, error = receive(transport, ordinary)
        assert error is None
        if got:
            parser.take(got)
        elif not left and not sent:
            return


def test_answers_of_any_size_come_as_they_were_sent(line):
    bodies = [
        bytes([at]) * size
        for at, size in enumerate((1, 50, 3 * LARGE, LARGE, 1_000_000, 10, 4 * LARGE))
    ]
    pump(line, b"".join(map(framed, bodies)))
    parser = line[1]
    assert [bytes(each.read()) for each in parser.whole] == bodies
    large = [isinstance(each, Answer) for each in parser.whole]
    assert large == [False, False, True, False, True, False, True]
    assert sum(parser.pieces) < len(b"".join(bodies)) / 2, "the rest came in place"


def test_a_large_answer_is_decoded_where_it_lies():
    buffer = KafkaBytes(2 * LARGE)
    buffer[:] = bytes(range(256)) * (2 * LARGE // 256)
    answer = Answer(buffer)
    assert answer.read(4) == bytes(range(4))
    rest = answer.read()
    assert isinstance(rest, memoryview)
    assert rest[:2] == bytes([4, 5])
    assert (len(rest), answer.tell()) == (2 * LARGE - 4, 2 * LARGE)
    assert answer.read() == b""


def test_an_end_within_an_answer_is_told_the_ordinary_way(line):
    transport, parser, far = line
    pump(line, framed(bytes(10 * LARGE))[: 5 * LARGE])
    assert isinstance(parser._rbuffer, Answer)
    place = parser._rbuffer.tell()
    far.close()
    assert receive(transport, lambda: (b"", EOFError()))[1].__class__ is EOFError
    assert parser._rbuffer.tell() == place


def test_a_fault_of_the_socket_is_left_to_the_ordinary_way(line):
    transport, _, far = line
    far.close()
    transport._sock.close()
    assert receive(transport, lambda: (b"", "told")) == (b"", "told")


@pytest.mark.parametrize(
    ("sock", "protocol"),
    [(object(), None), (None, SimpleNamespace(parser=Parser()))],
    ids=["before anybody listens", "once it is closed"],
)
def test_without_an_end_all_goes_the_ordinary_way(sock, protocol):
    transport = SimpleNamespace(_sock=sock, get_protocol=lambda: protocol)
    assert receive(transport, lambda: (b"x", None)) == (b"x", None)


def test_tls_begins_the_ordinary_way(line, monkeypatch):
    """What it has deciphered and nobody has taken, no selector tells of."""
    transport, _, far = line
    monkeypatch.setattr(module.ssl, "SSLSocket", socket.socket)
    far.send(b"abc")
    assert receive(transport, lambda: (b"ordinary", None)) == (b"ordinary", None)


def test_connections_that_are_opened_from_now_on_read_in_place():
    made = SimpleNamespace(_sock_recv=lambda: (b"", None))

    async def build():
        return made

    manager = SimpleNamespace(_build_transport=build)
    read_in_place(SimpleNamespace(_client=SimpleNamespace(_manager=manager)))
    assert asyncio.run(manager._build_transport()) is made
    assert made._sock_recv.func is receive
