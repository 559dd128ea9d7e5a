"""Identifies the processes of clients, and detects with certainty that they died.

When a client connects to the Unix socket, the kernel reports its process, user and
groups. A process id can be reused, so it is kept with the start time of its process.
Over TCP the kernel reports no peer: clients send a token, and no process is watched.

A pidfd reports the death of a process (PROTOCOL 12). Unlike a process id, it refers to
one process for ever. A process that cannot be watched counts as alive.
"""

import errno
import logging
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs

from kafka_marshal.observability.logs import LOGGER_NAME
from kafka_marshal.system_calls import open_pidfd

# --- Peers -----------------------------------------------------------------------


_UCRED = struct.Struct("3i")
# macOS: struct xucred of sys/ucred.h, with the level and options of sys/un.h.
_XUCRED = struct.Struct("=IIh2x16I")
_SOL_LOCAL = 0
_LOCAL_PEERCRED = 1
_LOCAL_PEERPID = 2
# Linux; the socket module lacks it.
_SO_PEERGROUPS = 59
_GROUPS_MAX = 256
_START_FIELD = 19  # field 22 of /proc/PID/stat, counted after the command's name


@attrs.frozen
class Peer:
    """The process at the other end of a connection.

    Attributes:
        pid: Its id, None if unknown (TCP, another namespace).
        uid: Its user, None if unknown.
        started: Its start time in clock ticks since the boot, which distinguishes
            processes with the same id. None if the process was gone already.
        gids: Its groups.
    """

    pid: int | None
    uid: int | None
    started: int | None
    gids: frozenset[int] = attrs.field(default=frozenset(), eq=False, kw_only=True)


@attrs.frozen
class Caller:
    """The client that a request names.

    Attributes:
        group_id: Its group.
        client_id: Its name in the group, known to this sidecar only.
        instance: Identifies its process among the processes of this name, 16 bytes in
            hex.
    """

    group_id: str
    client_id: str
    instance: str


UNKNOWN_PEER = Peer(None, None, None)


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot, None if gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command is in parentheses, and may itself contain parentheses.
    fields = text.rpartition(b")")[2].split()
    return int(fields[_START_FIELD]) if len(fields) > _START_FIELD else None


def peer_of(connection: socket.socket) -> Peer:
    """Return the peer as the kernel saw it; ``UNKNOWN_PEER`` over TCP."""
    if connection.family != socket.AF_UNIX:
        return UNKNOWN_PEER
    has_ucred = hasattr(socket, "SO_PEERCRED")
    try:
        return _linux_peer(connection) if has_ucred else _macos_peer(connection)
    except (OSError, struct.error):
        return UNKNOWN_PEER


def _linux_peer(connection: socket.socket) -> Peer:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(found)
    gids = _groups_of(connection) | {gid}
    # The id is 0 for a process that this namespace cannot see.
    return Peer(pid or None, uid, start_time(pid) if pid else None, gids=gids)


def _macos_peer(connection: socket.socket) -> Peer:
    """Return a peer; macOS reports its process separately from user and groups."""
    found = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size)
    version, uid, count, *gids = _XUCRED.unpack(found)
    if version:
        return UNKNOWN_PEER  # the layout of this version is not known
    try:
        pid = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID)
    except OSError:
        pid = 0
    started = start_time(pid) if pid else None
    return Peer(pid or None, uid, started, gids=frozenset(gids[:count]))


def _groups_of(connection: socket.socket) -> frozenset[int]:
    """Return the supplementary groups of a peer, empty if unknown."""
    size = _GROUPS_MAX * 4
    try:
        found = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, size)
    except OSError:  # not Linux, or more groups than ``_GROUPS_MAX``
        return frozenset()
    return frozenset(gid for (gid,) in struct.iter_unpack("I", found))


def represented_process(peer: Peer, pid: int) -> Peer | None:
    """Return the process that a peer names as the client, None if it may not.

    The process must be of the peer's user; the superuser may name any process.
    Otherwise a client could depend on the life of another user's process.
    """
    found_at = start_time(pid)
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
    if found_at is None or peer.uid not in {uid, 0}:
        return None
    return Peer(pid, uid, found_at)


def may_use(peer: Peer, gid: int | None = None) -> bool:
    """Return whether a peer of the Unix socket may use this sidecar.

    Its user must be the sidecar's own user, or the superuser.

    Args:
        peer: The peer.
        gid: Group whose members may use it as well.
    """
    return peer.uid in {os.geteuid(), 0} or gid in peer.gids


# --- The death watch -------------------------------------------------------------


PROCESSES_MAX = 4096
CHILDREN_MAX = 256
EVENTS_MAX = 64
WAIT_S_MAX = 60
CLOSE_S = 5

Call = Callable[[], None]


@attrs.define(eq=False)
class _Process:
    """A process and its pidfd; without a pidfd, it is known dead or never will be."""

    pid: int
    fd: int | None = None
    is_dead: bool = False


class Watched:
    """A process, and the children that work for it. Made by ``DeathWatch.watch``."""

    def __init__(
        self,
        watch: "DeathWatch",
        pid: int,
        *,
        started: int,
        children: Iterable[int],
        on_dead: Call,
    ) -> None:
        self._watch = watch
        self._children: dict[int, _Process] = {}
        self._on_dead = on_dead
        self._is_due = False
        self._is_over = False
        with watch.lock:
            self._main = watch.open(pid, started, on_exit=self._check_dead)
            self.replace(children)

    @property
    def is_dead(self) -> bool:
        """Return whether the process and all its children are known dead."""
        with self._watch.lock:
            return all(process.is_dead for process in self._all())

    def replace(self, pids: Iterable[int]) -> None:
        """Watch exactly these children; an id that is given twice counts once."""
        with self._watch.lock:
            wanted = [] if self._is_over else [*dict.fromkeys(pids)]
            for pid in self._children.keys() - {*wanted}:
                self._watch.drop(self._children.pop(pid))
            for pid in wanted:
                if pid != self._main.pid:
                    self._add(pid)
            self._check_dead()

    def _add(self, pid: int) -> None:
        found = self._children.get(pid)
        if found is not None and (found.is_dead or found.fd is not None):
            return
        if found is not None or len(self._children) < CHILDREN_MAX:
            self._children[pid] = self._watch.open(pid, on_exit=self._check_dead)
        else:  # one entry for all beyond the limit; it never counts as dead
            self._children.setdefault(-1, _Process(-1))

    def without_dead(self, pids: Iterable[int]) -> tuple[int, ...]:
        """Return these ids without children that are known dead."""
        with self._watch.lock:
            dead = {pid for pid, each in self._children.items() if each.is_dead}
        return tuple(pid for pid in pids if pid not in dead)

    def close(self) -> None:
        """Stop watching. A running ``on_dead`` continues."""
        with self._watch.lock:
            self._is_over = True
            for each in self._all():
                self._watch.drop(each)

    def _all(self) -> tuple[_Process, ...]:
        return (self._main, *self._children.values())

    def _check_dead(self) -> None:
        """Schedule ``on_dead`` if all these processes are dead; the lock is held."""
        is_settled = self._is_over or self._is_due
        if not is_settled and all(each.is_dead for each in self._all()):
            self._is_due = True
            self._watch.call_soon(self._report)

    def _report(self) -> None:
        with self._watch.lock:
            self._is_due = False
            # Meanwhile a child may have been added, or the watch closed.
            if self._is_over or not all(each.is_dead for each in self._all()):
                return
            self._is_over = True
        self._on_dead()


class DeathWatch:
    """Watches processes, on one thread that starts with the first. Thread-safe.

    Attributes:
        lock: Guards this watch and each ``Watched``. Reentrant, because a callback may
            query other processes.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._by_fd: dict[int, tuple[_Process, Call]] = {}
        self._calls: deque[Call] = deque()  # at most one for each watched process
        self._epoll: select.epoll | None = None
        self._wake = -1
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def process_count(self) -> int:
        """Return how many living processes are watched."""
        return len(self._by_fd)

    def watch(
        self, pid: int, started: int, *, children: Iterable[int] = (), on_dead: Call
    ) -> Watched:
        """Watch a process and its children, which can be replaced later.

        A process that cannot be watched raises no error, and never counts as dead.

        Args:
            pid: Its id.
            started: Its start time from ``start_time``, which proves that it existed.
            children: Ids of its children.
            on_dead: Called once, on the watch's thread, as soon as the process and all
                its children are known dead. It must not block.
        """
        return Watched(self, pid, started=started, children=children, on_dead=on_dead)

    def open(self, pid: int, started: int | None = None, *, on_exit: Call) -> _Process:
        """Start waiting for the end of a process; the lock is held.

        Args:
            pid: Its id.
            started: Its start time, None if unknown: then a missing process does not
                count as dead.
            on_exit: Called under the lock.
        """
        unknown = _Process(pid)
        is_full = len(self._by_fd) >= PROCESSES_MAX
        if self._is_closed or is_full:
            return unknown
        if started is not None and not _is_proc_ours():
            return unknown
        try:
            fd = open_pidfd(pid)
        except OSError as error:
            is_missing = error.errno == errno.ESRCH
            return _Process(pid, is_dead=is_missing and started is not None)
        if started is not None and (found := start_time(pid)) != started:
            # The id belongs to another process now, or the start time cannot be read.
            # In the second case only the end of the pidfd's process proves a death.
            is_dead = found is not None or _is_over(fd)
            os.close(fd)
            return _Process(pid, is_dead=is_dead)
        process = _Process(pid, fd)
        self._by_fd[fd] = (process, on_exit)
        self._start().register(fd, select.EPOLLIN)
        return process

    def drop(self, process: _Process) -> None:
        """Stop waiting for a process; the lock is held."""
        fd, process.fd = process.fd, None
        if fd is not None and self._by_fd.pop(fd, None) is not None:
            if self._epoll is not None:
                self._epoll.unregister(fd)
            os.close(fd)

    def call_soon(self, call: Call) -> None:
        """Run a callback on the thread, without the lock; the lock is held."""
        if not self._is_closed:
            self._calls.append(call)
            self._start()
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread; nothing is reported any more. Idempotent."""
        with self.lock:
            self._is_closed = True
            self._calls.clear()
            for process, _ in list(self._by_fd.values()):
                self.drop(process)
            thread = self._thread
            if thread is not None and self._epoll is not None:
                os.eventfd_write(self._wake, 1)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=CLOSE_S)

    def _start(self) -> select.epoll:
        if self._epoll is None:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._epoll = select.epoll()
            self._epoll.register(self._wake, select.EPOLLIN)
            self._thread = threading.Thread(
                target=self._run,
                args=(self._epoll,),
                name="marshal-deathwatch",
                daemon=True,
            )
            self._thread.start()
        return self._epoll

    def _run(self, epoll: select.epoll) -> None:
        while True:
            events = epoll.poll(WAIT_S_MAX, EVENTS_MAX)
            with self.lock:
                if self._is_closed:
                    self._epoll = None
                    epoll.close()
                    os.close(self._wake)
                    return
                for fd, _ in events:
                    self._note(fd)
                calls = list(self._calls)
                self._calls.clear()
            for call in calls:
                _run_callback(call)

    def _note(self, fd: int) -> None:
        if fd == self._wake:
            os.eventfd_read(fd)
            return
        found = self._by_fd.get(fd)
        # The event may be of an earlier descriptor whose number was reused.
        if found is not None and _is_over(fd):
            process, on_exit = found
            self.drop(process)
            process.is_dead = True
            on_exit()


def _is_proc_ours() -> bool:
    """Return whether /proc shows the process ids of this process's namespace."""
    try:
        return Path("/proc/self").readlink() == Path(str(os.getpid()))
    except OSError:
        return False


def _is_over(fd: int) -> bool:
    """Return whether the process of a pidfd has ended, reaped or not."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _run_callback(call: Call) -> None:
    """Run a callback; if it fails, other processes are still watched."""
    try:
        call()
    except Exception:
        logging.getLogger(LOGGER_NAME).exception(
            "handling the death of a process of a client failed"
        )
