"""System calls of Linux, also on a Python that was built without them.

Builds of Python that run on every Linux, such as those that uv installs, are compiled
with headers and with a libc that are older than these calls.
"""

import errno
import os
import sys

# Number of the system call, the same on every architecture that PyPI has wheels for.
_PIDFD_OPEN = 434
_MFD_CLOEXEC = 1


def open_pidfd(pid: int) -> int:
    """Return a descriptor of a process, which is readable once the process has ended.

    Raises:
        OSError: There is no such process (``ESRCH``), the system has no pidfds
            (``ENOSYS``; Linux has them from 5.3), or it refuses to open one.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call("syscall", _PIDFD_OPEN, pid, 0)


def create_memory_file(name: str) -> int:
    """Return a descriptor of a file in memory, which other programs do not inherit.

    Args:
        name: Shown by tools for debugging; need not be unique.

    Raises:
        OSError: The system has no such files (``ENOSYS``), or it refuses to make one.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    return _call("memfd_create", name.encode(), _MFD_CLOEXEC)


def _call(name: str, *arguments: int | bytes) -> int:
    """Call a function of libc that returns a descriptor."""
    import ctypes

    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    found: int = function(*arguments)
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
