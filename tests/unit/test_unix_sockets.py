"""Connections to a Unix socket, whose queue may be full."""

import contextlib
import errno
import socket
import threading

import pytest

from kafka_marshal.unix_sockets import connect


@pytest.fixture
def listener(tmp_path):
    """A socket that nobody accepts from, with a full queue."""
    path = str(tmp_path / "s")
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(1)
        is_full = False
        while not is_full:
            one = opened.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            is_full = one.connect_ex(path) == errno.EAGAIN
        yield listener, path


def test_a_connection_waits_for_room_in_a_full_queue(listener):
    listening, path = listener
    made = []
    thread = threading.Thread(target=lambda: made.append(connect(path, 60)))
    thread.start()
    accepted = []
    listening.settimeout(0.05)
    while thread.is_alive():
        with contextlib.suppress(TimeoutError):
            accepted.append(listening.accept()[0])
    with made[0] as connection:
        assert connection.gettimeout() == 60
    for each in accepted:
        each.close()


def test_a_queue_that_stays_full_is_named_in_the_error(listener):
    with pytest.raises(
        TimeoutError, match=r"no connection for 0\.05 s: its listen queue"
    ):
        connect(listener[1], 0.05)


def test_a_connection_without_a_listener_fails_at_once(tmp_path):
    with pytest.raises(FileNotFoundError):
        connect(str(tmp_path / "none"), 60)
