"""Responses received into one buffer each: in pieces, damaged, in the background."""

import errno
import os
import random
import select
import struct
import threading
import time
import uuid
from types import SimpleNamespace

import pytest
from batchkit import new_batch
from kafka.errors import KafkaProtocolError
from kafka.protocol.consumer import FetchRequest, FetchResponse
from kafka.protocol.metadata import ApiVersionsRequest, ApiVersionsResponse
from kafka.protocol.parser import KafkaProtocol
from slowness import until

from kafka_marshal.kafka_io import responses as module
from kafka_marshal.kafka_io.responses import (
    KEPT_MAX,
    Buffers,
    ResponseBuffer,
    ResponseReader,
    find_records,
    take_index,
)
from kafka_marshal.native import compiled

TOPIC = FetchResponse.FetchableTopicResponse
PART = TOPIC.PartitionData
VERSIONS = range(4, 14)
BYTES_MAX = 10_000_000
# Sizes of records in random responses.
SMALL = (0, 1, 126, 127, 128, 20_000)
SIZES = (*SMALL, 300_000, 2_100_000)


def new_reader():
    return ResponseReader(client_id="one", bytes_max=BYTES_MAX)


def requests(reader, version, count=1):
    for _ in range(count):
        request = FetchRequest(topics=[], forgotten_topics_data=[], rack_id="")
        request.API_VERSION = version
        reader.send_request(request)
    return reader


def partition(draw, version, sizes=SMALL):
    aborted = [
        PART.AbortedTransaction(producer_id=draw.getrandbits(40), first_offset=each)
        for each in range(draw.choice((0, 0, 1, 3)))
    ]
    tags = {}
    if version >= 12:
        if draw.random() < 0.3:
            tags["diverging_epoch"] = PART.EpochEndOffset(epoch=3, end_offset=9)
        if draw.random() < 0.3:
            tags["current_leader"] = PART.LeaderIdAndEpoch(leader_id=2, leader_epoch=7)
    return PART(
        partition_index=draw.randrange(1_000),
        error_code=draw.choice((0, 0, 6)),
        high_watermark=draw.getrandbits(40),
        last_stable_offset=draw.getrandbits(40),
        log_start_offset=draw.getrandbits(20),
        aborted_transactions=draw.choice((None, aborted)),
        preferred_read_replica=draw.choice((-1, 2)),
        records=draw.choice((None, draw.randbytes(draw.choice(sizes)))),
        **tags,
    )


def response(draw, version, sizes=SIZES):
    """Return the bytes of a random fetch response, with their size in front."""
    topics = [
        TOPIC(
            topic="t" * draw.choice((1, 200)),
            topic_id=uuid.UUID(int=draw.getrandbits(128)),
            partitions=[
                partition(draw, version, sizes) for _ in range(draw.choice((0, 1, 3)))
            ],
        )
        for _ in range(draw.choice((0, 1, 1, 2)))
    ]
    made = FetchResponse[version](
        throttle_time_ms=5, error_code=0, session_id=4, responses=topics
    )
    return framed(1, bytes(made.encode(header=False, framed=False)), version >= 12)


def framed(number, body, is_flexible):
    frame = struct.pack(">i", number) + (b"\0" if is_flexible else b"") + body
    return struct.pack(">i", len(frame)) + frame


def send_in_pieces(draw, far, raw):
    """Send bytes in pieces on another thread; return the thread."""

    def send():
        at = 0
        while at < len(raw):
            end = at + draw.choice((1, 5, 700, 4_000, 500_000))
            far.sendall(raw[at:end])
            at = end

    sender = threading.Thread(target=send)
    sender.start()
    return sender


def in_pieces(draw, reader, raw):
    """Receive bytes in pieces, into the buffer or as kafka-python passes them."""
    found = []
    while raw:
        size = draw.choice((1, 3, 1_000, 100_000, len(raw)))
        if draw.random() < 0.5:
            found += reader.receive_bytes(raw[:size])
            raw = raw[size:]
            continue
        missing = reader.missing()
        size = min(size, len(missing), len(raw))
        missing[:size] = raw[:size]
        reader.advance(size)
        raw = raw[size:]
    return found + reader.receive_bytes(b"")


def content(response):
    """Return the text of a response, with its records as bytes."""
    for topic in response.responses:
        for each in topic.partitions:
            each.records = None if each.records is None else bytes(each.records)
    return repr(response)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_fetch_received_in_pieces_equals_that_of_kafka_python(version):
    draw = random.Random(version)
    for _ in range(25):
        raw = response(draw, version)
        reader = requests(new_reader(), version)
        ((number, ours),) = in_pieces(draw, reader, raw)
        ((_, theirs),) = requests(KafkaProtocol(), version).receive_bytes(raw)
        places = [each for topic in ours.responses for each in topic.partitions]
        kinds = {type(each.records) for each in places if each.records}
        assert kinds <= {memoryview}
        assert (number, content(ours)) == (1, content(theirs))
        assert not reader.in_flight_requests


@pytest.mark.parametrize("version", VERSIONS)
def test_damaged_fetches_are_accepted_or_refused_like_kafka_python(version):
    draw = random.Random(version)
    outcomes = set()
    for _ in range(150):
        raw = bytearray(response(draw, version, SMALL))
        size = min(len(raw), 200)
        for _ in range(draw.choice((1, 1, 4))):
            raw[draw.randrange(4, size)] = draw.randrange(256)
        if draw.random() < 0.3:
            del raw[draw.randrange(5, size) :]
            raw[:4] = struct.pack(">i", len(raw) - 4)
        outcome = read(requests(new_reader(), version), raw)
        theirs = read(requests(KafkaProtocol(), version), raw)
        assert outcome == theirs
        outcomes.add(outcome is None)
    assert outcomes == {True, False}


def read(reader, raw):
    """Return the content of a response; None if it is refused."""
    try:
        ((_, found),) = reader.receive_bytes(bytes(raw))
        return content(found)
    except KafkaProtocolError:
        return None
    except Exception:
        if isinstance(reader, ResponseReader):
            raise
        return None


def test_a_response_other_than_a_fetch_is_decoded():
    reader = new_reader()
    request = ApiVersionsRequest(version=0)
    reader.send_request(request)
    made = ApiVersionsResponse[0](error_code=35, api_keys=[])
    raw = framed(1, bytes(made.encode(header=False, framed=False)), is_flexible=False)
    ((number, found),) = reader.receive_bytes(raw)
    assert (number, found.error_code) == (1, 35)


def test_several_responses_in_one_receive_are_all_returned():
    reader = requests(new_reader(), 12, 2)
    first = response(random.Random(1), 12)
    second = first[:4] + struct.pack(">i", 2) + first[8:]
    assert [number for number, _ in reader.receive_bytes(first + second)] == [1, 2]


def test_a_replaced_parser_keeps_its_requests_in_flight():
    other = requests(KafkaProtocol(), 12)
    config = {"client_id": "one", "receive_message_max_bytes": 100_000_000}
    reader = ResponseReader.replace(other, config)
    raw = response(random.Random(1), 12)
    assert [number for number, _ in reader.receive_bytes(raw)] == [1]


@pytest.mark.parametrize("size", [-1, BYTES_MAX + 1])
def test_an_impossible_size_is_refused(size):
    reader = requests(new_reader(), 12)
    with pytest.raises(KafkaProtocolError, match="frame length"):
        reader.receive_bytes(struct.pack(">i", size) + b"more")
    assert len(reader.missing()) == 0


def test_an_unrequested_response_is_refused():
    reader = new_reader()
    with pytest.raises(KafkaProtocolError, match="No in-flight-request"):
        reader.receive_bytes(framed(1, b"", is_flexible=False) * 2)


def test_an_empty_response_is_refused():
    with pytest.raises(KafkaProtocolError):
        requests(new_reader(), 12).receive_bytes(bytes(4))


def test_bytes_after_the_end_of_a_response_raise():
    raw = response(random.Random(1), 12)[4:]
    assert find_records(memoryview(raw), 12)
    with pytest.raises(ValueError, match="1 bytes are left"):
        find_records(memoryview(raw + b"x"), 12)


MEGABYTE = 1_048_576


def test_an_endless_varint_raises():
    """Decoding it to its end would take quadratic time."""
    with pytest.raises(ValueError, match="no end"):
        find_records(memoryview(b"\0" * 4 + b"\xff" * 1_000_000), 12)


def test_a_buffer_is_reused_once_no_view_refers_to_it():
    buffers = Buffers()
    first = buffers.take(3 * MEGABYTE + 5)
    assert len(first) == 3 * MEGABYTE + 5
    whole, part = first.obj, first[7:9]
    first.release()
    second = buffers.take(2 * MEGABYTE)
    assert second.obj is not whole
    part.release()
    again = buffers.take(4 * MEGABYTE)
    assert again.obj is whole
    assert (len(again), len(whole)) == (4 * MEGABYTE, 4 * MEGABYTE)
    assert buffers.take(MEGABYTE).obj not in (whole, second.obj)


def test_a_buffer_that_is_too_large_raises():
    with pytest.raises(MemoryError, match="bytes for a response"):
        ResponseBuffer(2**62)


@pytest.mark.parametrize("error", [SystemError, None])
def test_a_buffer_is_reused_where_memory_cannot_be_resized(error, monkeypatch):
    """Some systems raise SystemError, but only once no view refers to the buffer."""
    monkeypatch.setattr(module, "_HAS_HUGE_PAGES", False)

    class Fixed(ResponseBuffer):
        def resize(self, size):
            super().resize(size)
            if error is not None:
                raise error("resizing not available")

    monkeypatch.setattr(module, "ResponseBuffer", Fixed)
    buffers = Buffers()
    view = buffers.take(MEGABYTE)
    whole = view.obj
    view[:3] = b"abc"
    assert buffers.take(MEGABYTE).obj is not whole
    view.release()
    again = buffers.take(MEGABYTE)
    assert again.obj is whole
    assert bytes(again[:4]) == b"abc\0", "nothing was moved"


def test_few_buffers_are_kept_and_none_after_a_small_response():
    buffers = Buffers()
    views = [buffers.take(MEGABYTE) for _ in range(KEPT_MAX + 1)]
    kept = [each.obj for each in views[:-1]]
    assert [id(each) for each in buffers._kept] == [id(each) for each in kept]
    views.clear()
    assert buffers.take(MEGABYTE).obj is kept[0]
    assert buffers.take(3 * MEGABYTE).obj not in kept
    assert len(buffers._kept) == 1, "the others are too small from now on"
    assert len(buffers.take(10)) == 10
    assert buffers._kept == []


class Waiting:
    """A fake selector, which waits for a socket or for its background receiver."""

    def __init__(self):
        self.receiver = None
        self.changes = 0

    def set_receiver(self, sock, receiver):
        assert sock.fileno() >= 0
        assert (receiver is None) != (self.receiver is None)
        self.receiver = receiver
        self.changes += 1

    def wait(self, sock):
        target = sock if self.receiver is None else self.receiver
        assert select.select([target], [], [], 30)[0]


@pytest.fixture
def background(monkeypatch):
    """Lower the limit of large responses to 2,000 bytes; return a fake selector."""
    if compiled is None:
        pytest.skip("nothing was compiled here")
    monkeypatch.setattr(module, "BACKGROUND_BYTES", 2_000)
    monkeypatch.setattr(module, "_LARGE_BYTES", 2_000)
    return Waiting()


def receive_all(reader, sock, waiting, count):
    """Receive and return a number of responses."""
    found = []
    while len(found) < count:
        waiting.wait(sock)
        assert reader.receive_from(sock, waiting)
        found += reader.receive_bytes(b"")
    return found


def sized(number, size):
    """Return a fetch response with ``size`` bytes of records."""
    return of_records(number, bytes([number % 256]) * size)


def of_records(number, records):
    part = PART(
        partition_index=number,
        error_code=0,
        high_watermark=1,
        last_stable_offset=1,
        log_start_offset=0,
        aborted_transactions=None,
        preferred_read_replica=-1,
        records=records,
    )
    made = FetchResponse[12](
        throttle_time_ms=0,
        error_code=0,
        session_id=4,
        responses=[TOPIC(topic="t", partitions=[part])],
    )
    body = bytes(made.encode(header=False, framed=False))
    return framed(number, body, is_flexible=True)


def records_of(response):
    ((only,),) = [topic.partitions for topic in response.responses]
    return only.records


def is_as_sent(found, sizes):
    return [(number, bytes(records_of(each) or b"")) for number, each in found] == [
        (number, bytes([number % 256]) * size)
        for number, size in enumerate(sizes, start=1)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_responses_of_any_size_are_received_in_the_background(background, ends, seed):
    draw = random.Random(seed)
    near, far = ends
    large = [3_000, 3_100, 5_000, 9_000, 60_000, 300_000]
    sizes = [draw.choice((0, 10, 900, *large, *large)) for _ in range(60)]
    reader = requests(new_reader(), 12, len(sizes))
    raw = b"".join(sized(number, size) for number, size in enumerate(sizes, start=1))

    sender = send_in_pieces(draw, far, raw)
    found = receive_all(reader, near, background, len(sizes))
    sender.join(timeout=60)
    assert is_as_sent(found, sizes)
    assert background.changes > 10
    assert not reader.in_flight_requests


def test_a_response_after_a_large_one_is_received_between_polls(background, ends):
    """The background thread reads its header: the application may not poll."""
    near, far = ends
    reader = requests(new_reader(), 12, 3)
    sizes = [50_000, 51_000, 40]
    far.sendall(sized(1, sizes[0]))
    found = receive_all(reader, near, background, 1)
    far.sendall(sized(2, sizes[1]))
    background.wait(near)
    assert reader.receive_from(near, background)
    found += reader.receive_bytes(b"")
    assert len(found) == 2, "all of it was there"
    far.sendall(sized(3, sizes[2]))
    found += receive_all(reader, near, background, 1)
    assert is_as_sent(found, sizes)
    assert background.receiver is None, "what follows may be small as well"


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EMFILE])
def test_a_response_is_received_directly_if_no_receiver_can_be_made(
    background, ends, code, monkeypatch
):
    """The process may be at its limit of threads (EAGAIN) or of files."""

    def refuse(_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module, "compiled", SimpleNamespace(Receiver=refuse))
    near, far = ends
    sizes = [3_000, 60_000, 5_000]
    reader = requests(new_reader(), 12, len(sizes))
    found = []
    for number, size in enumerate(sizes, start=1):
        reader.receive_from(near, background)  # nothing is there yet
        far.sendall(sized(number, size))
        for _ in range(100):
            if len(found) < number and select.select([near], [], [], 60)[0]:
                assert reader.receive_from(near, background), "bytes were received"
                found += reader.receive_bytes(b"")
    assert is_as_sent(found, sizes)


@pytest.mark.parametrize("sent", [0, 2, 4, 9, 30_000])
@pytest.mark.parametrize("is_begun", [False, True], ids=["first", "next"])
def test_the_end_of_a_connection_in_the_background_is_detected(
    background, ends, sent, is_begun
):
    near, far = ends
    reader = requests(new_reader(), 12, 2)
    if is_begun:
        far.sendall(sized(1, 50_000))
        receive_all(reader, near, background, 1)
    far.sendall(sized(2, 60_000)[:sent])
    far.close()
    for _ in range(5):
        background.wait(near)
        if not reader.receive_from(near, background):
            break
    else:
        pytest.fail("the end was not noticed")
    assert reader.receive_bytes(b"") == []


def test_a_response_is_received_directly_without_a_selector(background, ends):
    near, far = ends
    reader = requests(new_reader(), 12)
    sender = threading.Thread(target=far.sendall, args=(sized(1, 50_000),))
    sender.start()
    found = []
    while not found:
        assert select.select([near], [], [], 30)[0]
        assert reader.receive_from(near)
        found += reader.receive_bytes(b"")
    sender.join(timeout=60)
    assert is_as_sent(found, [50_000])
    assert background.changes == 0


# --- records that are indexed as they arrive


def new_batches(count, *, values):
    """Return consecutive batches with a number of values each."""
    found = bytearray()
    for number in range(count):
        builder = new_batch()
        for at in range(values):
            builder.append(at, timestamp=at, key=None, value=b"v" * 50, headers=[])
        made = bytearray(builder.build())
        struct.pack_into(">q", made, 0, number * values)
        found += made
    return bytes(found)


def batches(draw):
    """Return some consecutive batches; one may be damaged, the last cut off."""
    found = bytearray()
    for _ in range(draw.choice((1, 3, 20))):
        builder = new_batch()
        for at in range(draw.choice((1, 30))):
            value = draw.randbytes(draw.choice((0, 9, 2_000)))
            builder.append(at, timestamp=at, key=None, value=value, headers=[])
        made = bytearray(builder.build())
        struct.pack_into(">q", made, 0, 100 + len(found))
        struct.pack_into(">i", made, 12, draw.choice((4, 4, 4, 5)))
        found += made
    if draw.random() < 0.3:
        found[draw.randrange(len(found))] ^= 1
    if draw.random() < 0.3:
        del found[draw.randrange(len(found)) :]
    return bytes(found)


def with_batches(draw, version):
    """Return a random fetch response whose records are batches."""
    made = FetchResponse[version](
        throttle_time_ms=5,
        error_code=0,
        session_id=4,
        responses=[
            TOPIC(
                topic="topic",
                topic_id=uuid.UUID(int=draw.getrandbits(128)),
                partitions=[partition(draw, version) for _ in range(count)],
            )
            for count in draw.choice(((1,), (3,), (0, 2), (2, 0, 3)))
        ],
    )
    for topic in made.responses:
        for each in topic.partitions:
            each.records = draw.choice((None, b"", batches(draw), batches(draw)))
    body = bytes(made.encode(header=False, framed=False))
    return framed(1, body, is_flexible=version >= 12)


def indexed(view):
    return compiled.index_records(view, 0, 0, True)


def is_begun(view, index):
    """Return whether an index equals one of the first batches of some records."""
    _, _, behind, *_ = index
    return index == indexed(view[:behind])


@pytest.mark.parametrize("version", VERSIONS)
def test_an_index_built_on_arrival_equals_an_index_of_the_records(
    background, ends, version
):
    draw = random.Random(version)
    near, far = ends
    known = 0
    reader = new_reader()
    for _ in range(40):
        raw = with_batches(draw, version)
        requests(reader, version)
        raw = (
            raw[:4]
            + struct.pack(">i", reader.in_flight_requests[0].correlation_id)
            + raw[8:]
        )
        sender = send_in_pieces(draw, far, raw)
        ((_, found),) = receive_all(reader, near, background, 1)
        sender.join(timeout=60)
        for topic in found.responses:
            for each in topic.partitions:
                index = take_index(each.records) if each.records else None
                if index is not None:
                    known += 1
                    assert is_begun(each.records, index)
                    assert take_index(each.records) is None, "only once"
    assert known > 20


@pytest.mark.parametrize("version", [3, *VERSIONS, 14, -1])
def test_a_damaged_response_has_only_correct_indexes(ends, version):
    """An index may also end early, if the response is taken while it is built."""
    if compiled is None:
        pytest.skip("nothing was compiled here")
    draw = random.Random(version)
    near, far = ends
    receiver = compiled.Receiver(near.fileno())
    known = 0
    for _ in range(60):
        raw = bytearray(with_batches(draw, min(13, max(4, version)))[4:])
        for _ in range(draw.choice((0, 1, 1, 4))):
            raw[draw.randrange(min(len(raw), 200))] = draw.choice(
                (0, 1, 127, 128, 255, draw.randrange(256))
            )
        body = memoryview(bytearray(len(raw)))
        receiver.start(memoryview(bytearray()), body, 0, version)
        sender = send_in_pieces(draw, far, bytes(raw))
        assert select.select([receiver], [], [], 30)[0]
        count, indexes = receiver.finish()
        sender.join(timeout=60)
        assert (count, body) == (len(raw), raw)
        begin = compiled.address_of(body)
        for address, size, index in indexes:
            known += 1
            at = address - begin
            assert 0 <= at < at + size <= len(body)
            assert is_begun(body[at : at + size], index)
    receiver.close()
    assert (known > 50) == (version in VERSIONS)


def test_a_response_is_indexed_completely_if_not_taken_at_once(ends):
    if compiled is None:
        pytest.skip("nothing was compiled here")
    near, far = ends
    receiver = compiled.Receiver(near.fileno())
    raw = of_records(1, new_batches(200, values=30))[4:]
    body = memoryview(bytearray(len(raw)))
    pause_s = 0.0

    def has_all():
        nonlocal pause_s
        receiver.start(memoryview(bytearray()), body, 0, 12)
        sender = send_in_pieces(random.Random(1), far, raw)
        assert select.select([receiver], [], [], 30)[0]
        sender.join(timeout=60)
        time.sleep(pause_s)
        pause_s = 2 * pause_s + 0.001
        _, [(address, size, index)] = receiver.finish()
        at = address - compiled.address_of(body)
        assert is_begun(body[at : at + size], index)
        return index == indexed(body[at : at + size])

    until(has_all)
    receiver.close()


def test_an_index_belongs_to_one_view_of_one_response():
    """Buffers are reused, and other views may begin at the same byte."""
    if compiled is None:
        pytest.skip("nothing was compiled here")
    buffers = Buffers()
    view = buffers.take(2 * MEGABYTE)
    whole, size = view.obj, len(view)
    assert isinstance(whole, ResponseBuffer)
    known = (compiled.address_of(view), size, (b"places", 1, 2, 3, 4, 5))
    whole.set_indexes([known])
    assert take_index(view[1:]) is None
    assert take_index(view) == known[2]
    whole.set_indexes([known])
    assert take_index(view[:-1]) is None
    whole.set_indexes([known])
    view.release()
    again = buffers.take(size)
    assert again.obj is whole
    assert take_index(again) is None
    assert take_index(memoryview(bytearray(5))) is None
