"""Who is at the other end of a connection, and whether that may be.

Over a Unix socket the kernel tells: process, user and group of whoever connected,
at the moment of connecting. A process id can be used again by another process, so
it goes with the time at which its process started. Over TCP nobody tells; a token
takes its place, and there is no process that could be watched.

Knows when a process has died, for certain and at once (PROTOCOL 12).

The kernel tells of a death by a pidfd, which means one process for ever: its number
may be used again, the descriptor never. What cannot be known is never guessed: a
process that cannot be watched is told as such, and counts as alive.
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
# Of Linux; the module socket does not name it.
_SO_PEERGROUPS = 59
_GROUPS_MAX = 256
_START_FIELD = 19  # the 22nd of proc(5), counted behind the command's name


@attrs.frozen
class Peer:
    """The process at the other end.

    Attributes:
        pid: Its id, None where nobody tells (TCP, another namespace).
        uid: Its user, None where nobody tells.
        started: When it started, in clock ticks since the boot; with it a ``pid``
            that was used again is another process. None where it is gone.
        gids: Its groups.
    """

    pid: int | None
    uid: int | None
    started: int | None
    gids: frozenset[int] = attrs.field(default=frozenset(), eq=False)


@attrs.frozen
class Caller:
    """Which client asks: what its requests say of it.

    Attributes:
        group_id: Its group.
        client_id: Its name in the group, known to this sidecar only.
        instance: Which process of that name it is, 16 bytes in hex.
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
    # The command stands in parentheses and may hold any byte, these as well.
    fields = text.rpartition(b")")[2].split()
    return int(fields[_START_FIELD]) if len(fields) > _START_FIELD else None


def peer_of(connection: socket.socket) -> Peer:
    """Return who connected, as the kernel saw it; ``NOBODY`` over TCP."""
    if connection.family != socket.AF_UNIX:
        return UNKNOWN_PEER
    try:
        found = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size
        )
    except OSError:
        return UNKNOWN_PEER
    pid, uid, gid = _UCRED.unpack(found)
    gids = _groups_of(connection) | {gid}
    # The kernel says 0 of a process that this one's namespace cannot see.
    return Peer(pid or None, uid, start_time(pid) if pid else None, gids)


def _groups_of(connection: socket.socket) -> frozenset[int]:
    """Return the supplementary groups of a peer; none where the kernel names none."""
    size = _GROUPS_MAX * 4
    try:
        found = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, size)
    except OSError:  # not Linux, or more groups than that
        return frozenset()
    return frozenset(gid for (gid,) in struct.iter_unpack("I", found))


def represented_process(peer: Peer, pid: int) -> Peer | None:
    """Return the process that a peer speaks for, None where it may not.

    That is a process of its own user; the superuser may speak for any. Otherwise
    somebody could have a stranger's life stand for a client's.
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

    Its user must be ours, or the superuser, who could do anything anyhow.

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
    errno.ESRCH: "it is not there: it ended before, or lives in another namespace",
    errno.EINVAL: "that is no process of this namespace",
    errno.ENOENT: "that is a thread, not a process",
    errno.ENOSYS: "this system has no pidfd",
    errno.EMFILE: "no file descriptor is left to this process; raise its limit",
    errno.ENFILE: "no file descriptor is left to this machine",
}
Call = Callable[[], None]


@attrs.define(eq=False)
class _Process:
    """One process.

    Attributes:
        pid: Its id.
        fd: Its pidfd, None once it is known dead, or where it cannot be watched.
        problem: Why it cannot be watched.
    """

    pid: int
    fd: int | None = None
    problem: str | None = None

    @property
    def is_dead(self) -> bool:
        return self.fd is None and self.problem is None


class _Poller:
    """Waits for the ends of processes, and makes calls, on one thread."""

    def __init__(self, processes_max: int) -> None:
        # Reentrant: what is told of an end may look at other processes.
        self.lock = threading.RLock()
        self.by_fd: dict[int, tuple[_Process, Call]] = {}
        self._processes_max = processes_max
        self._calls: deque[Call] = deque()  # one for each that is watched, at most
        self._epoll: select.epoll | None = None
        self._wake = -1
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def open(self, pid: int, started: int | None, *, on_exit: Call) -> _Process:
        """Begin to wait for the end of a process; the lock is held.

        Args:
            pid: Its id.
            started: When it started, None where nobody knows.
            on_exit: Called under the lock.
        """
        if self._is_closed:
            return _Process(pid, problem="the watch is closed")
        if not hasattr(os, "pidfd_open"):
            return _Process(pid, problem=_WHY_NOT[errno.ENOSYS])
        if len(self.by_fd) >= self._processes_max:
            return _Process(pid, problem=f"{self._processes_max} are watched already")
        if started is not None and not _is_proc_ours():
            return _Process(pid, problem="/proc is that of another namespace")
        try:
            fd = os.pidfd_open(pid)
        except OSError as error:
            if error.errno == errno.ESRCH and started is not None:
                return _Process(pid)  # it was there, and is there no more
            why = _WHY_NOT.get(error.errno or 0, str(error))
            return _Process(pid, problem=why)
        if started is not None and (found := start_time(pid)) != started:
            # The id belongs to another process by now; or nobody can read to whom:
            # then only its end would tell.
            is_dead = found is not None or _is_over(fd)
            os.close(fd)
            why = "when it started cannot be read"
            return _Process(pid, problem=None if is_dead else why)
        process = _Process(pid, fd)
        self.by_fd[fd] = (process, on_exit)
        self._start().register(fd, select.EPOLLIN)
        return process

    def drop(self, process: _Process) -> None:
        """Wait for a process no more; the lock is held."""
        fd, process.fd = process.fd, None
        if fd is not None and self.by_fd.pop(fd, None) is not None:
            if self._epoll is not None:
                self._epoll.unregister(fd)
            os.close(fd)

    def call_soon(self, call: Call) -> None:
        """Make a call on the thread, without the lock; the lock is held."""
        if not self._is_closed:
            self._calls.append(call)
            self._start()
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread; what waits is forgotten. Idempotent."""
        with self.lock:
            self._is_closed = True
            self._calls.clear()
            for process, _ in list(self.by_fd.values()):
                problem = process.problem or "the watch is closed"
                self.drop(process)
                process.problem = problem  # never known dead by closing
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
                _make(call)

    def _note(self, fd: int) -> None:
        if fd == self._wake:
            os.eventfd_read(fd)
            return
        found = self.by_fd.get(fd)
        # The event may be older than the descriptor, whose number was used again.
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
                why = "nobody knows which process it is"
                self._main = _Process(pid or 0, problem=why)
            else:
                self._main = poller.open(pid, started, on_exit=self._judge)
            self._judge()

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the process, then its children."""
        with self._poller.lock:
            return tuple(process.pid for process in self._all())

    @property
    def alive(self) -> tuple[int, ...]:
        """Return those that are not known dead."""
        with self._poller.lock:
            return tuple(each.pid for each in self._all() if not each.is_dead)

    @property
    def is_dead(self) -> bool:
        """Return whether all of them are known dead."""
        with self._poller.lock:
            return all(process.is_dead for process in self._all())

    @property
    def problem(self) -> str | None:
        """Return why their death will not be known as things are, None if it will."""
        with self._poller.lock:
            for each in self._all():
                if each.problem is not None:
                    return f"process {each.pid} cannot be watched: {each.problem}"
            return None

    def add(self, pid: int, *, started: int | None = None) -> bool:
        """Wait for the end of one more process; one that is there counts once.

        Args:
            pid: Its id.
            started: When it started, as of ``peers.started``, where that is known.

        Returns:
            Whether its end is known, or will be; ``problem`` says why not.
        """
        with self._poller.lock:
            if pid == self._main.pid:
                return self._main.problem is None
            found = self._children.get(pid)
            if found is None or found.problem is not None:
                found = self._look(pid, started)
            return found.problem is None

    def replace(self, pids: Iterable[int]) -> bool:
        """Wait for these children from now on, and for no others.

        Returns:
            Whether the ends of all of them are known, or will be.
        """
        with self._poller.lock:
            wanted = dict.fromkeys(pids)
            for pid in [pid for pid in self._children if pid not in wanted]:
                self._poller.drop(self._children.pop(pid))
            known = [self.add(pid) for pid in wanted]
            self._judge()
            return all(known)

    def close(self) -> None:
        """Watch them no more. A call of ``on_dead`` that is under way goes on."""
        with self._poller.lock:
            self._is_over = True
            for each in self._all():
                if each.fd is not None:
                    each.problem = "it is watched no more"
                self._poller.drop(each)

    def _all(self) -> tuple[_Process, ...]:
        return (self._main, *self._children.values())

    def _look(self, pid: int, started: int | None) -> _Process:
        if self._is_over:
            return _Process(pid, problem="it is watched no more")
        # One place beyond the limit is kept by the one that says so.
        if len(self._children) < CHILDREN_MAX or pid in self._children:
            found = self._poller.open(pid, started, on_exit=self._judge)
            self._children[pid] = found
        else:
            found = _Process(pid, problem=f"more than {CHILDREN_MAX} children")
            self._children.setdefault(-1, found)
        return found

    def _judge(self) -> None:
        """Tell once that all of them are dead; the lock is held."""
        is_settled = self._is_over or self._is_due
        if not is_settled and all(each.is_dead for each in self._all()):
            self._is_due = True
            self._poller.call_soon(self._tell)

    def _tell(self) -> None:
        with self._poller.lock:
            self._is_due = False
            # Another may have been added since, or all of it closed.
            if self._is_over or not all(each.is_dead for each in self._all()):
                return
            self._is_over = True
        self._on_dead()


class DeathWatch:
    """Watches processes, on one thread that starts with the first. Thread-safe.

    Args:
        processes_max: Most processes at a time; what exceeds them is not watched,
            and said so.
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
        """Wait for the end of a process, and of the children that are added later.

        It never raises for a process that cannot be watched: see ``problem`` of
        what it returns. One that is gone is dead only if ``started`` shows that it
        was there; without it, an id proves nothing.

        Args:
            pid: Its id, None where nobody knows.
            started: When it started, as of ``peers.started``: tells it from another
                process that got its id since.
            on_dead: Called once, on the watch's thread, as soon as the process and
                all its children are known dead. It must not block.
        """
        return Watched(self._poller, pid, started=started, on_dead=on_dead)

    def close(self) -> None:
        """End the thread and tell nothing any more. Idempotent."""
        self._poller.close()


def _is_proc_ours() -> bool:
    """Return whether /proc is that of our namespace: ids mean the same there."""
    try:
        return Path("/proc/self").readlink() == Path(str(os.getpid()))
    except OSError:
        return False


def _is_over(fd: int) -> bool:
    """Return whether the process of a pidfd has ended, reaped or not."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _make(call: Call) -> None:
    """Make a call; one that fails does not end the watch of all others."""
    try:
        call()
    except Exception:
        logging.getLogger(LOGGER_NAME).exception("telling of a death failed")
