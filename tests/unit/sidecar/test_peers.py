"""The kernel tells who connected; a token stands in for it over TCP."""

import os
import socket
import subprocess
import sys

import pytest

from kafka_marshal.sidecar import peers
from kafka_marshal.sidecar.peers import NOBODY, Peer


@pytest.fixture
def pair():
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        yield one, other


def test_the_other_end_is_a_process_with_its_start(pair):
    found = peers.peer_of(pair[0])
    assert found == Peer(os.getpid(), os.getuid(), peers.started(os.getpid()))
    assert found.started > 0


def test_nobody_is_known_over_tcp():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        with socket.create_connection(address, 5), listening.accept()[0] as accepted:
            assert peers.peer_of(accepted) == NOBODY


def test_a_closed_connection_is_nobody_s():
    one, other = socket.socketpair(socket.AF_UNIX)
    other.close()
    one.close()
    assert peers.peer_of(one) == NOBODY


def test_a_process_that_is_gone_never_started():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    assert peers.started(ended.pid) is None


def test_a_name_with_parentheses_does_not_hide_the_start(tmp_path):
    program = tmp_path / "a) 1 (b) "
    program.symlink_to(sys.executable)
    command = [str(program), "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as running:
        assert peers.started(running.pid) >= peers.started(os.getpid())
        running.communicate(b"\n", timeout=30)


@pytest.mark.parametrize(
    ("uid", "may"),
    [(os.geteuid(), True), (0, True), (os.geteuid() + 4711, False), (None, False)],
)
def test_only_our_user_and_the_superuser_may(uid, may):
    assert peers.may_use(Peer(1, uid, 1)) is may


def test_the_members_of_a_named_group_may_too(pair):
    other = os.geteuid() + 4711
    member = Peer(1, other, 1, frozenset({7, 8}))
    assert [peers.may_use(member, gid) for gid in (7, 9, None)] == [True, False, False]
    assert not peers.may_use(NOBODY, 7)
    assert not peers.may_use(NOBODY)
    # Supplementary groups count.
    assert peers.peer_of(pair[0]).gids == {os.getgid(), *os.getgroups()}


@pytest.mark.parametrize(
    ("given", "same"), [(b"abc", True), (b"abd", False), (b"", False), (b"\xff", False)]
)
def test_tokens_are_compared(given, same):
    assert peers.is_same(given, b"abc") is same


def test_a_peer_speaks_for_processes_of_its_user():
    ours = Peer(1, os.getuid(), 1)
    me = Peer(os.getpid(), os.getuid(), peers.started(os.getpid()))
    assert peers.stood_for(ours, os.getpid()) == me
    assert peers.stood_for(Peer(1, 0, 1), os.getpid()) == me
    assert peers.stood_for(Peer(1, os.getuid() + 4711, 1), os.getpid()) is None
    assert peers.stood_for(peers.NOBODY, os.getpid()) is None
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    assert peers.stood_for(ours, ended.pid) is None
