"""Listening sockets: permissions, one sidecar on each, stale ones replaced."""

import errno
import os
import socket
import stat
import subprocess
import sys

import pytest
from slices import HANG_S

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.sidecar.sockets import open_tcp, open_unix


@pytest.fixture
def path(tmp_path):
    return tmp_path / "made" / "sidecar.sock"


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_socket_and_its_folder_are_private_by_default(path):
    place = open_unix(path)
    assert mode(path) == 0o600
    assert mode(path.parent) == 0o700
    place.listening.listen()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    place.close()
    place.close()
    assert not path.exists()


def test_the_mode_does_not_depend_on_the_umask(path):
    before = os.umask(0)
    try:
        place = open_unix(path)
    finally:
        os.umask(before)
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    place.close()


def test_members_of_the_socket_group_have_access(path):
    gid = os.getgid()
    below = path.parent / "own" / path.name
    open_unix(below, gid=gid).close()
    # The folders stay, and are accepted at the next start.
    place = open_unix(below, gid=gid)
    assert (mode(below), below.stat().st_gid) == (0o660, gid)
    assert (mode(below.parent), below.parent.stat().st_gid) == (0o750, gid)
    assert mode(below.with_name(below.name + ".lock")) == 0o600
    place.close()


@pytest.mark.parametrize("wrong", [0o700, 0o770, 0o755, 0o751])
def test_a_group_folder_with_a_wrong_mode_or_group_is_refused(path, wrong):
    path.parent.mkdir()
    path.parent.chmod(wrong)
    with pytest.raises(ConfigurationError, match=f"chmod 750 {path.parent}"):
        open_unix(path, gid=os.getgid())
    path.parent.chmod(0o750)
    with pytest.raises(ConfigurationError, match=f"chgrp {os.getgid() + 1} "):
        open_unix(path, gid=os.getgid() + 1)
    open_unix(path, gid=os.getgid()).close()


def test_a_folder_that_other_users_may_enter_is_refused(path):
    path.parent.mkdir()
    path.parent.chmod(0o755)
    with pytest.raises(ConfigurationError, match=f"chmod 700 {path.parent}"):
        open_unix(path)
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser gives files away")
def test_a_folder_of_another_user_is_refused(path):
    path.parent.mkdir(mode=0o700)
    os.chown(path.parent, 65_534, 65_534)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        open_unix(path)


def test_a_living_sidecar_keeps_its_socket(path):
    place = open_unix(path)
    with pytest.raises(ConfigurationError) as found:
        open_unix(path)
    assert f"a living sidecar (process {os.getpid()})" in str(found.value)
    assert found.value.setting == "socket"
    assert path.exists()
    place.close()
    open_unix(path).close()


def test_on_a_full_disk_a_socket_is_opened_and_kept(path, monkeypatch):
    def full(number, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    place = open_unix(path)
    with pytest.raises(ConfigurationError, match="in use by a living sidecar;"):
        open_unix(path)
    place.close()


def test_a_socket_of_another_program_is_kept(path):
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigurationError, match="in use by another program"):
            open_unix(path)
    assert path.exists()


def test_the_socket_of_a_dead_sidecar_is_replaced(path):
    program = (
        "import os, sys, pathlib\n"
        "from kafka_marshal.sidecar.sockets import open_unix\n"
        "open_unix(pathlib.Path(sys.argv[1]))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    assert subprocess.run(command, timeout=HANG_S, check=False).returncode == -9
    assert path.exists()
    place = open_unix(path)
    place.listening.listen()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    place.close()


def test_the_removal_of_the_socket_is_detected(path):
    place = open_unix(path)
    assert place.is_there()
    path.unlink()
    assert not place.is_there()
    place.close()


def test_closing_keeps_a_socket_that_replaced_its_own(path):
    place = open_unix(path)
    for (
        each
    ) in path.parent.iterdir():  # as by a clean-up, which removes the lock file too
        each.unlink()
    other = open_unix(path)
    assert (place.is_there(), other.is_there()) == (False, True)
    place.close()
    assert other.is_there()
    other.close()
    assert not path.exists()


def test_a_file_that_is_not_a_socket_is_kept(path):
    path.parent.mkdir(mode=0o700)
    path.write_text("mine")
    with pytest.raises(ConfigurationError, match="not a socket; remove it"):
        open_unix(path)
    assert path.read_text() == "mine"


def test_an_unusable_path_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        open_unix(tmp_path / "file" / "sidecar.sock")


def test_a_tcp_address_that_cannot_be_used_is_refused():
    with open_tcp("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigurationError, match="in use by another program"):
            open_tcp("127.0.0.1", port)
    with pytest.raises(ConfigurationError, match="cannot be used"):
        open_tcp("203.0.113.1", 0)
