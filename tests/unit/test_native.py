"""The compiled module is used if it exists and has the revision of the sources."""

import ctypes
import os
import select
import socket
import struct
import sys
from types import ModuleType

import pytest
from slowness import until

from kafka_marshal import native


def test_a_missing_module_is_loaded_as_none():
    assert native.load("kafka_marshal._no_such_module") is None


def test_a_module_of_another_revision_is_not_used(monkeypatch):
    """An editable install keeps a module that was compiled from earlier sources."""
    made = ModuleType("made_of_earlier_sources")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    assert native.load(made.__name__) is None
    monkeypatch.setattr(made, "REVISION", native.REVISION, raising=False)
    assert native.load(made.__name__) is made
    monkeypatch.setattr(made, "REVISION", native.REVISION + 1)
    assert native.load(made.__name__) is None


@pytest.fixture
def receiver(ends):
    if native.compiled is None:
        pytest.skip("nothing was compiled here")
    made = native.compiled.Receiver(ends[0].fileno())
    yield made
    made.close()


def wait(receiver):
    assert select.select([receiver], [], [], 30)[0]


def buffers(body, head=4):
    return memoryview(bytearray(head)), memoryview(bytearray(body)), 0, -1


def test_a_receiver_fills_a_buffer(ends, receiver):
    _, far = ends
    head, body, *rest = buffers(10, head=0)
    receiver.start(head, body, *rest)
    far.sendall(b"abcde")
    assert receiver.finish() is None
    assert not select.select([receiver], [], [], 0)[0]
    far.sendall(b"fghijklm")
    wait(receiver)
    assert receiver.finish() == (10, [])
    assert body.tobytes() == b"abcdefghij"
    assert not select.select([receiver], [], [], 0)[0]
    # Later bytes are left for the next call of start.
    receiver.start(*buffers(3, head=0))
    wait(receiver)
    assert receiver.finish() == (3, [])


def test_a_receiver_continues_within_a_buffer(ends, receiver):
    _, far = ends
    head, body, *_ = buffers(10, head=0)
    receiver.start(head, body, 7, -1)
    far.sendall(b"abcde")
    wait(receiver)
    assert receiver.finish() == (3, [])
    assert body.tobytes() == bytes(7) + b"abc"


@pytest.mark.parametrize("size", [50, 77, 100])
def test_a_receiver_reads_a_response_of_about_the_expected_size(ends, receiver, size):
    _, far = ends
    head, body, *rest = buffers(100)
    receiver.start(head, body, *rest)
    far.sendall(struct.pack(">i", size) + bytes(range(size)) + b"next")
    wait(receiver)
    assert receiver.finish() == (4 + size, [])
    assert struct.unpack(">i", head) == (size,)
    assert body[:size] == bytes(range(size))


@pytest.mark.parametrize("size", [-1, -(2**31), 0, 49, 101, 2**31 - 1])
def test_a_receiver_reads_only_the_head_of_a_response_of_another_size(
    ends, receiver, size
):
    near, far = ends
    head, body, *rest = buffers(100)
    receiver.start(head, body, *rest)
    far.sendall(struct.pack(">i", size) + b"x" * 200)
    wait(receiver)
    assert receiver.finish() == (4, [])
    assert struct.unpack(">i", head) == (size,)
    assert body.tobytes() == bytes(100)
    assert near.recv(500) == b"x" * 200


def test_a_refused_start_leaves_the_response_that_is_being_received(ends, receiver):
    _, far = ends
    head, body, *rest = buffers(10)
    receiver.start(head, body, *rest)
    with pytest.raises(ValueError, match="a response is being received"):
        receiver.start(head, body, 5, 12)
    far.sendall(struct.pack(">i", 10) + b"abcdefghij")
    wait(receiver)
    assert receiver.finish() == (14, [])
    assert body.tobytes() == b"abcdefghij"


@pytest.mark.parametrize("sent", [b"", b"\0\0", b"\0\0\0\x50", b"\0\0\0\x50abc"])
def test_a_receiver_counts_the_bytes_before_the_connection_ends(ends, receiver, sent):
    _, far = ends
    receiver.start(*buffers(100))
    far.sendall(sent)
    far.close()
    wait(receiver)
    assert receiver.finish() == (len(sent), [])


def test_a_receiver_needs_no_interpreter_lock(ends, receiver):
    near, far = ends
    receiver.start(*buffers(1_000_000, head=0))
    done = (ctypes.c_byte * 8).from_buffer(
        bytearray(struct.pack("ihh", receiver.fileno(), select.POLLIN, 0))
    )
    # Functions of PyDLL are called with the lock.
    library = ctypes.PyDLL(None)
    block = bytes(10_000)
    for _ in range(100):
        sent = 0
        while sent < len(block):
            sent += far.send(block[sent:])
    assert library.poll(done, 1, 30_000) == 1
    assert receiver.finish() == (1_000_000, [])
    assert near.fileno() >= 0


def test_a_receiver_refuses_calls_out_of_turn(receiver):
    with pytest.raises(ValueError, match="nothing is being received"):
        receiver.finish()
    with pytest.raises(ValueError, match="four bytes, or none"):
        receiver.start(*buffers(100, head=3))
    with pytest.raises(BufferError):
        receiver.start(bytes(4), bytearray(9), 0, -1)
    with pytest.raises(BufferError):
        receiver.start(bytearray(4), bytes(9), 0, -1)
    for size, at in [(4, 1), (0, -1), (0, 10)]:
        with pytest.raises(ValueError, match="begins within its body"):
            receiver.start(bytearray(size), bytearray(9), at, -1)
    head, body = bytearray(4), bytearray(9)
    receiver.start(head, body, 0, -1)
    with pytest.raises(ValueError, match="is being received"):
        receiver.start(head, body, 0, -1)
    with pytest.raises(BufferError):
        body.clear()
    receiver.close()
    body.clear()
    head.clear()
    receiver.close()
    with pytest.raises(ValueError, match="closed"):
        receiver.start(*buffers(9))
    with pytest.raises(ValueError, match="closed"):
        receiver.finish()


@pytest.mark.parametrize("how", ["closed", "freed"])
def test_a_receiver_that_ends_early_ends_the_connection(ends, how):
    if native.compiled is None:
        pytest.skip("nothing was compiled here")
    near, far = ends
    made = native.compiled.Receiver(near.fileno())
    made.start(*buffers(100))
    if how == "closed":
        made.close()
    del made
    assert far.recv(1) == b""


def test_a_receiver_keeps_its_socket_when_the_number_is_used_again(ends, receiver):
    near, far = ends
    number = near.fileno()
    receiver.start(*buffers(3, head=0))
    near.close()
    other, end = socket.socketpair()
    with other, end:
        assert number in (other.fileno(), end.fileno())
        end.sendall(b"xyz")
        far.sendall(b"abc")
        wait(receiver)
        assert receiver.finish() == (3, [])


def test_a_receiver_needs_a_valid_socket():
    if native.compiled is None:
        pytest.skip("nothing was compiled here")
    with pytest.raises(OSError, match="Bad file descriptor"):
        native.compiled.Receiver(-1)
    with pytest.raises(ValueError, match="named"):
        native.compiled.Receiver(sock=1)
    with pytest.raises(TypeError):
        native.compiled.Receiver()


def test_a_receiver_works_in_the_parent_after_a_forked_child_closes_it(ends, receiver):
    _, far = ends
    head, body, *rest = buffers(4, head=0)
    receiver.start(head, body, *rest)
    child = os.fork()
    if not child:
        code = 1
        try:
            receiver.finish()
        except ValueError:
            receiver.close()
            code = 0
        finally:
            os._exit(code)
    ended = []

    def has_ended():
        ended[:] = os.waitpid(child, os.WNOHANG)
        return ended[0]

    until(has_ended)
    assert ended == [child, 0]
    far.sendall(b"abcd")
    wait(receiver)
    assert receiver.finish() == (4, [])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such marks")
def test_a_receiver_restores_the_receive_low_water_mark():
    if native.compiled is None:
        pytest.skip("nothing was compiled here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname(), timeout=10)
        near, _ = server.accept()
    with far, near:
        near.setblocking(False)
        made = native.compiled.Receiver(near.fileno())
        made.start(*buffers(500_000, head=0))
        far.sendall(bytes(300_000))
        assert made.finish() is None
        far.sendall(bytes(200_000))
        wait(made)
        assert made.finish() == (500_000, [])
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        far.sendall(b"x")
        assert select.select([near], [], [], 30)[0]
        made.close()
