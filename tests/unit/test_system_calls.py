"""System calls, by functions of Python and of libc."""

import errno
import os
import select
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from kafka_marshal.system_calls import create_memory_file, open_pidfd

WAIT_MS = 60_000

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux has these calls"
)


CALLS = ["pidfd_open", "memfd_create"]


@pytest.fixture(params=["Python", "libc"], autouse=True)
def _way(request, monkeypatch):
    if request.param == "libc":
        for name in CALLS:
            monkeypatch.delattr(os, name, raising=False)


def is_readable(fd, timeout_ms=0):
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def test_a_pidfd_is_readable_once_its_process_has_ended():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        fd = open_pidfd(child.pid)
        assert not os.get_inheritable(fd)
        assert not is_readable(fd)
        child.stdin.close()
        assert is_readable(fd, WAIT_MS)
        os.close(fd)


@pytest.mark.parametrize(("pid", "code"), [(0, errno.EINVAL), (-1, errno.EINVAL)])
def test_an_invalid_process_id_is_an_error(pid, code):
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        open_pidfd(pid)
    assert caught.value.errno == code


def test_a_process_that_was_reaped_is_an_error():
    with subprocess.Popen(["true"]) as child:
        pass
    with pytest.raises(ProcessLookupError):
        open_pidfd(child.pid)


def test_a_memory_file_keeps_what_is_written():
    fd = create_memory_file("name")
    assert not os.get_inheritable(fd)
    assert "/memfd:name" in str(Path(f"/proc/self/fd/{fd}").readlink())
    assert os.write(fd, b"bytes") == 5
    assert os.pread(fd, 9, 0) == b"bytes"
    os.close(fd)


def test_too_long_a_name_of_a_memory_file_is_an_error():
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        create_memory_file("x" * 300)


@pytest.mark.parametrize(
    "call", [partial(open_pidfd, 1), partial(create_memory_file, "name")]
)
def test_another_system_has_no_such_calls(call, monkeypatch):
    for name in CALLS:
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
        call()
