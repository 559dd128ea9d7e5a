"""Processes: peer credentials, and certain knowledge of their death.

The kernel names the peer of a Unix socket at the moment of connecting: process, user
and groups. A process id can be reused, so it goes with the start time of its process.
Over TCP the kernel names nobody; a token takes its place, and no process is watched.

A pidfd reports a death (PROTOCOL 12). It belongs to one process for ever, unlike its
number. Nothing is guessed: a process that cannot be watched is reported as such, and
counts as alive.
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
_START_FIELD = 19  # the 22nd of proc(5), counted behind the command's name


@attrs.frozen
class Peer:
    """The process at the other end of a connection.

    Attributes:
        pid: Its id, None if unknown (TCP, another namespace).
        uid: Its user, None if unknown.
        started: Its start time in clock ticks since the boot, which distinguishes
            processes with the same id. None once it is gone.
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
        instance: Its process among those of this name, 16 bytes in hex.
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
    # The command is in parentheses and may contain any byte, including these.
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
    # 0 is a process that this namespace cannot see.
    return Peer(pid or None, uid, start_time(pid) if pid else None, gids=gids)


def _macos_peer(connection: socket.socket) -> Peer:
    """Return a peer as macOS reports it: its process apart from user and groups."""
    found = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size)
    version, uid, count, *gids = _XUCRED.unpack(found)
    if version:
        return UNKNOWN_PEER  # of a layout that is not known
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
    except OSError:  # not Linux, or more groups than that
        return frozenset()
    return frozenset(gid for (gid,) in struct.iter_unpack("I", found))


def represented_process(peer: Peer, pid: int) -> Peer | None:
    """Return the process that a peer may represent, None if it may not.

    It must be of the peer's user; the superuser may represent any. Otherwise a client
    could depend on the life of a stranger's process.
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

    Its user must be ours, or the superuser.

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

_WHY_NOT = {
    errno.ESRCH: "it does not exist: it has ended, or is in another namespace",
    errno.EINVAL: "it is not a process of this namespace",
    errno.ENOENT: "it is a thread, not a process",
    errno.ENOSYS: "this system has no pidfd",
    errno.EMFILE: "this process has no file descriptors left; raise its limit",
    errno.ENFILE: "this machine has no file descriptors left",
}
Call = Callable[[], None]


@attrs.define(eq=False)
class _Process:
    """A process and its pidfd; without one it is dead, or has a ``problem``."""

    pid: int
    fd: int | None = None
    problem: str | None = None

    @property
    def is_dead(self) -> bool:
        return self.fd is None and self.problem is None


class _Poller:
    """Waits for the ends of processes and runs callbacks, on one thread."""

    def __init__(self, processes_max: int) -> None:
        # Reentrant: a callback may query other processes.
        self.lock = threading.RLock()
        self.by_fd: dict[int, tuple[_Process, Call]] = {}
        self._processes_max = processes_max
        self._calls: deque[Call] = deque()  # at most one for each watched process
        self._epoll: select.epoll | None = None
        self._wake = -1
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def open(self, pid: int, started: int | None, *, on_exit: Call) -> _Process:
        """Start waiting for the end of a process; the lock is held.

        Args:
            pid: Its id.
            started: Its start time, None if unknown.
            on_exit: Called under the lock.
        """
        if self._is_closed:
            return _Process(pid, problem="the watch is closed")
        if not hasattr(os, "pidfd_open"):
            return _Process(pid, problem=_WHY_NOT[errno.ENOSYS])
        if len(self.by_fd) >= self._processes_max:
            return _Process(
                pid, problem=f"{self._processes_max} processes are watched already"
            )
        if started is not None and not _is_proc_ours():
            return _Process(pid, problem="/proc shows another namespace")
        try:
            fd = os.pidfd_open(pid)
        except OSError as error:
            if error.errno == errno.ESRCH and started is not None:
                return _Process(pid)  # it existed, and does no longer
            why = _WHY_NOT.get(error.errno or 0, str(error))
            return _Process(pid, problem=why)
        if started is not None and (found := start_time(pid)) != started:
            # The id belongs to another process, or its start cannot be read: then
            # only the end of the process proves anything.
            is_dead = found is not None or _is_over(fd)
            os.close(fd)
            why = "its start time cannot be read"
            return _Process(pid, problem=None if is_dead else why)
        process = _Process(pid, fd)
        self.by_fd[fd] = (process, on_exit)
        self._start().register(fd, select.EPOLLIN)
        return process

    def drop(self, process: _Process) -> None:
        """Stop waiting for a process; the lock is held."""
        fd, process.fd = process.fd, None
        if fd is not None and self.by_fd.pop(fd, None) is not None:
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
        """End the thread; pending callbacks are dropped. Idempotent."""
        with self.lock:
            self._is_closed = True
            self._calls.clear()
            for process, _ in list(self.by_fd.values()):
                problem = process.problem or "the watch is closed"
                self.drop(process)
                process.problem = problem  # closing never makes it dead
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
        found = self.by_fd.get(fd)
        # The event may be older than the descriptor, whose number was reused.
        if found is not None and _is_over(fd):
            process, on_exit = found
            self.drop(process)
            on_exit()


class Watched:
    """A process and those that work for it. Made by ``DeathWatch.watch``."""

    def __init__(
        self, poller: _Poller, pid: int | None, *, started: int | None, on_dead: Call
    ) -> None:
        self._poller = poller
        self._children: dict[int, _Process] = {}
        self._on_dead = on_dead
        self._is_due = False
        self._is_over = False
        with poller.lock:
            if pid is None or started is None:
                why = "its process is unknown"
                self._main = _Process(pid or 0, problem=why)
            else:
                self._main = poller.open(pid, started, on_exit=self._check_dead)
            self._check_dead()

    @property
    def is_dead(self) -> bool:
        """Return whether all of them are known dead."""
        with self._poller.lock:
            return all(process.is_dead for process in self._all())

    @property
    def problem(self) -> str | None:
        """Return why their death cannot be detected, None if it can."""
        with self._poller.lock:
            for each in self._all():
                if each.problem is not None:
                    return f"process {each.pid} cannot be watched: {each.problem}"
            return None

    def add(self, pid: int, *, started: int | None = None) -> bool:
        """Watch one more process; a process that is already watched counts once.

        Args:
            pid: Its id.
            started: Its start time, as of ``start_time``, if known.

        Returns:
            Whether its end is known, or will be; else see ``problem``.
        """
        with self._poller.lock:
            if pid == self._main.pid:
                return self._main.problem is None
            found = self._children.get(pid)
            if found is None or found.problem is not None:
                found = self._watch_child(pid, started)
            return found.problem is None

    def replace(self, pids: Iterable[int]) -> bool:
        """Watch these children, and no others.

        Returns:
            Whether the ends of all of them are known, or will be.
        """
        with self._poller.lock:
            wanted = dict.fromkeys(pids)
            for pid in [pid for pid in self._children if pid not in wanted]:
                self._poller.drop(self._children.pop(pid))
            known = [self.add(pid) for pid in wanted]
            self._check_dead()
            return all(known)

    def close(self) -> None:
        """Stop watching. A running ``on_dead`` continues."""
        with self._poller.lock:
            self._is_over = True
            for each in self._all():
                if each.fd is not None:
                    each.problem = "it is no longer watched"
                self._poller.drop(each)

    def _all(self) -> tuple[_Process, ...]:
        return (self._main, *self._children.values())

    def _watch_child(self, pid: int, started: int | None) -> _Process:
        if self._is_over:
            return _Process(pid, problem="it is no longer watched")
        # One entry beyond the limit reports the problem.
        if len(self._children) < CHILDREN_MAX or pid in self._children:
            found = self._poller.open(pid, started, on_exit=self._check_dead)
            self._children[pid] = found
        else:
            found = _Process(pid, problem=f"more than {CHILDREN_MAX} children")
            self._children.setdefault(-1, found)
        return found

    def _check_dead(self) -> None:
        """Schedule ``on_dead`` once all of them are dead; the lock is held."""
        is_settled = self._is_over or self._is_due
        if not is_settled and all(each.is_dead for each in self._all()):
            self._is_due = True
            self._poller.call_soon(self._report)

    def _report(self) -> None:
        with self._poller.lock:
            self._is_due = False
            # Meanwhile a child may have been added, or the watch closed.
            if self._is_over or not all(each.is_dead for each in self._all()):
                return
            self._is_over = True
        self._on_dead()


class DeathWatch:
    """Watches processes, on one thread that starts with the first. Thread-safe.

    Args:
        processes_max: Most processes at a time; any other has a ``problem``.
    """

    def __init__(self, *, processes_max: int = PROCESSES_MAX) -> None:
        self._poller = _Poller(processes_max)

    @property
    def process_count(self) -> int:
        """Return how many living processes are watched."""
        return len(self._poller.by_fd)

    def watch(
        self, pid: int | None, started: int | None, *, on_dead: Callable[[], None]
    ) -> Watched:
        """Watch a process and its children, which are added later.

        It never raises for a process that cannot be watched: see ``problem`` of the
        result. A missing process counts as dead only if ``started`` proves that it
        existed.

        Args:
            pid: Its id, None if unknown.
            started: Its start time, as of ``start_time``.
            on_dead: Called once, on the watch's thread, as soon as the process and all
                its children are known dead. It must not block.
        """
        return Watched(self._poller, pid, started=started, on_dead=on_dead)

    def close(self) -> None:
        """End the thread; nothing is reported any more. Idempotent."""
        self._poller.close()


def _is_proc_ours() -> bool:
    """Return whether /proc shows our namespace, so that ids mean the same there."""
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
    """Run a callback; a failure does not end the watch of the others."""
    try:
        call()
    except Exception:
        logging.getLogger(LOGGER_NAME).exception("the callback of a death failed")
