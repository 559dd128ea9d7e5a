"""Peer credentials from the kernel, and the detection of deaths."""

import errno
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from slowness import until

from kafka_marshal.sidecar import process_monitor
from kafka_marshal.sidecar.process_monitor import (
    UNKNOWN_PEER,
    DeathWatch,
    Peer,
)

# --- Peers ---


@pytest.fixture
def pair():
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        yield one, other


def test_a_peer_is_a_process_with_its_start_time(pair):
    found = process_monitor.peer_of(pair[0])
    assert found == Peer(
        os.getpid(), os.getuid(), process_monitor.start_time(os.getpid())
    )
    assert found.started > 0


def test_a_tcp_peer_is_unknown():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        with socket.create_connection(address, 5), listening.accept()[0] as accepted:
            assert process_monitor.peer_of(accepted) == UNKNOWN_PEER


def test_the_peer_of_a_closed_connection_is_unknown():
    one, other = socket.socketpair(socket.AF_UNIX)
    other.close()
    one.close()
    assert process_monitor.peer_of(one) == UNKNOWN_PEER


class MacSocket:
    """A Unix socket with the options of macOS."""

    family = socket.AF_UNIX

    def __init__(self, *, version=0, pid=1, fails=()):
        self.pid, self.fails = pid, fails
        gids = [20, 12, *[0] * 14]
        self.found = struct.pack("=IIh2x16I", version, 501, 2, *gids)

    def getsockopt(self, level, option, size=None):
        assert level == 0, "SOL_LOCAL"
        if option in self.fails:
            raise OSError(errno.ENOTCONN, "gone")
        if option == 1:  # LOCAL_PEERCRED
            return self.found[:size]
        assert (option, size) == (2, None), "LOCAL_PEERPID"
        return self.pid


def test_a_peer_on_macos_is_a_process_with_user_and_groups(monkeypatch):
    monkeypatch.delattr(socket, "SO_PEERCRED")
    found = process_monitor.peer_of(MacSocket(pid=os.getpid()))
    started = process_monitor.start_time(os.getpid())
    assert found == Peer(os.getpid(), 501, started)
    assert found.gids == {20, 12}


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"fails": {2}}, Peer(None, 501, None)),
        ({"pid": 0}, Peer(None, 501, None)),
        ({"fails": {1}}, UNKNOWN_PEER),
        ({"version": 1}, UNKNOWN_PEER),
    ],
)
def test_fields_that_macos_does_not_report_are_unknown(monkeypatch, options, found):
    monkeypatch.delattr(socket, "SO_PEERCRED")
    assert process_monitor.peer_of(MacSocket(**options)) == found


def test_an_ended_process_has_no_start_time():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    assert process_monitor.start_time(ended.pid) is None


def test_a_command_with_parentheses_has_a_start_time(tmp_path):
    program = tmp_path / "a) 1 (b) "
    program.symlink_to(sys.executable)
    command = [str(program), "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as running:
        assert process_monitor.start_time(running.pid) >= process_monitor.start_time(
            os.getpid()
        )
        running.communicate(b"\n", timeout=30)


@pytest.mark.parametrize(
    ("uid", "may"),
    [(os.geteuid(), True), (0, True), (os.geteuid() + 4711, False), (None, False)],
)
def test_only_its_own_user_and_the_superuser_may_use_the_sidecar(uid, may):
    assert process_monitor.may_use(Peer(1, uid, 1)) is may


def test_members_of_the_socket_group_may_use_the_sidecar(pair):
    other = os.geteuid() + 4711
    member = Peer(1, other, 1, gids=frozenset({7, 8}))
    assert [process_monitor.may_use(member, gid) for gid in (7, 9, None)] == [
        True,
        False,
        False,
    ]
    assert not process_monitor.may_use(UNKNOWN_PEER, 7)
    assert not process_monitor.may_use(UNKNOWN_PEER)
    # Supplementary groups count.
    assert process_monitor.peer_of(pair[0]).gids == {os.getgid(), *os.getgroups()}


def test_a_peer_represents_processes_of_its_user():
    ours = Peer(1, os.getuid(), 1)
    me = Peer(os.getpid(), os.getuid(), process_monitor.start_time(os.getpid()))
    assert process_monitor.represented_process(ours, os.getpid()) == me
    assert process_monitor.represented_process(Peer(1, 0, 1), os.getpid()) == me
    assert (
        process_monitor.represented_process(Peer(1, os.getuid() + 4711, 1), os.getpid())
        is None
    )
    assert (
        process_monitor.represented_process(process_monitor.UNKNOWN_PEER, os.getpid())
        is None
    )
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    assert process_monitor.represented_process(ours, ended.pid) is None


# --- The death watch ---


def pids_of(watched):
    return tuple(each.pid for each in watched._all())


def living(watched):
    return tuple(each.pid for each in watched._all() if not each.is_dead)


LIMIT_S = 30


@pytest.fixture
def watch():
    watch = DeathWatch()
    yield watch
    watch.close()


@contextmanager
def process(*command):
    """Run a process that is not reaped before the end of the block."""
    child = subprocess.Popen(command or ("sleep", "600"))
    try:
        yield child
    finally:
        child.kill()
        child.wait(LIMIT_S)


def gone():
    """Return pid and start time of a process that has ended and was reaped."""
    with process() as child:
        started = process_monitor.start_time(child.pid)
    return child.pid, started


class Bell:
    """Counts calls, and records the thread of the last one."""

    def __init__(self):
        self.rung = threading.Event()
        self.count = 0
        self.thread = None

    def __call__(self):
        self.count += 1
        self.thread = threading.current_thread().name
        self.rung.set()

    def wait(self):
        assert self.rung.wait(LIMIT_S), "no death was reported"


def watch_process(watch, pid, bell):
    return watch.watch(pid, process_monitor.start_time(pid), on_dead=bell)


def let_another_die(watch):
    """Wait for the report of a later death, which follows all earlier ones."""
    bell = Bell()
    with process() as canary:
        watch_process(watch, canary.pid, bell)
        canary.kill()
        bell.wait()


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_death_is_reported_once_before_reaping(watch, how):
    bell = Bell()
    with process() as child:
        watched = watch_process(watch, child.pid, bell)
        assert (pids_of(watched), living(watched)) == ((child.pid,), (child.pid,))
        assert not watched.is_dead
        assert watch.process_count == 1
        child.send_signal(how)
        bell.wait()
        # Its parent has not reaped it: a zombie counts as dead.
        assert state_of(child.pid) == "Z"
        assert (watched.is_dead, living(watched)) == (True, ())
    let_another_die(watch)
    assert bell.count == 1
    assert bell.thread == "marshal-deathwatch"
    assert watch.process_count == 0


def test_an_orderly_exit_is_a_death(watch):
    bell = Bell()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        watched = watch_process(watch, child.pid, bell)
        assert not watched.is_dead
        child.stdin.close()
        bell.wait()
        assert watched.is_dead


def test_a_zombie_is_dead_from_the_start(watch):
    bell = Bell()
    with process() as child:
        started = process_monitor.start_time(child.pid)
        child.kill()
        until(lambda: state_of(child.pid) == "Z")
        watch.watch(child.pid, started, on_dead=bell)
        bell.wait()


def test_a_stopped_process_is_not_dead(watch):
    bell = Bell()
    with process() as child:
        watched = watch_process(watch, child.pid, bell)
        child.send_signal(signal.SIGSTOP)
        until(lambda: state_of(child.pid) == "T")
        let_another_die(watch)
        assert (bell.count, watched.is_dead) == (0, False)
        child.send_signal(signal.SIGCONT)
        let_another_die(watch)
        assert bell.count == 0
        child.kill()
        bell.wait()


def test_exec_of_another_program_is_not_a_death(watch, tmp_path):
    bell, go = Bell(), tmp_path / "go"
    os.mkfifo(go)
    with process("sh", "-c", f"read x < {go}; exec sleep 600") as child:
        watched = watch_process(watch, child.pid, bell)
        go.write_text("\n")
        until(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "sleep\n")
        let_another_die(watch)
        assert (bell.count, watched.is_dead) == (0, False)
        child.kill()
        bell.wait()


def test_exec_by_a_thread_is_not_a_death(watch):
    program = (
        "import os, threading;"
        "threading.Thread(target=os.execvp, args=('cat', ['cat'])).start();"
        "threading.Event().wait()"
    )
    bell = Bell()
    with subprocess.Popen(
        [sys.executable, "-c", f"input();{program}"], stdin=subprocess.PIPE
    ) as child:
        watched = watch_process(watch, child.pid, bell)
        child.stdin.write(b"\n")
        child.stdin.flush()
        until(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "cat\n")
        let_another_die(watch)
        assert (bell.count, watched.is_dead) == (0, False)
        child.kill()
        bell.wait()


def test_a_missing_process_with_a_start_time_is_dead(watch):
    bell = Bell()
    pid, started = gone()
    watched = watch.watch(pid, started, on_dead=bell)
    bell.wait()
    assert watched.is_dead


def test_a_process_whose_pid_was_reused_is_dead(watch):
    bell = Bell()
    with process() as other:
        started = process_monitor.start_time(other.pid) - 1
        watched = watch.watch(other.pid, started, on_dead=bell)
        bell.wait()
    assert watched.is_dead


def test_an_unreadable_start_time_is_no_proof_of_death(watch, monkeypatch):
    bell = Bell()
    with process() as child, process() as other:
        started = process_monitor.start_time(child.pid)
        monkeypatch.setattr(process_monitor, "start_time", lambda pid: None)
        watched = watch.watch(child.pid, started, on_dead=bell)
        assert not watched.is_dead
        other.kill()
        until(lambda: state_of(other.pid) == "Z")
        watch.watch(other.pid, started, on_dead=bell)
        bell.wait()
    assert bell.count == 1


@pytest.mark.parametrize("pid", [0, -1])
def test_an_invalid_pid_is_never_reported_dead(watch, pid):
    bell = Bell()
    watched = watch.watch(pid, 7, on_dead=bell)
    let_another_die(watch)
    assert (bell.count, watched.is_dead) == (0, False)


def test_a_child_that_is_a_thread_is_never_reported_dead(watch):
    bell = Bell()
    with process() as child:
        watched = watch_process(watch, child.pid, bell)
        stop, ids = threading.Event(), []
        thread = threading.Thread(
            target=lambda: (ids.append(threading.get_native_id()), stop.wait(LIMIT_S))
        )
        thread.start()
        until(lambda: ids)
        watched.replace(ids)
        assert pids_of(watched) == (child.pid, *ids)
        stop.set()
        thread.join(LIMIT_S)
        child.kill()
        let_another_die(watch)
        assert (bell.count, watched.is_dead) == (0, False)


@pytest.mark.parametrize(
    "code", [errno.ENOSYS, errno.EMFILE, errno.ENFILE, errno.EPERM]
)
def test_a_process_that_cannot_be_watched_is_never_reported_dead(
    watch, code, monkeypatch
):
    def refuse(pid):
        raise OSError(code, os.strerror(code))

    bell = Bell()
    with process() as child:
        started = process_monitor.start_time(child.pid)
        with monkeypatch.context() as patch:
            patch.setattr(process_monitor, "open_pidfd", refuse)
            watched = watch.watch(child.pid, started, on_dead=bell)
        child.kill()
        let_another_die(watch)
    assert (bell.count, watched.is_dead) == (0, False)


def test_a_system_without_pidfd_watches_nothing(watch, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    _, started = gone()
    for pid in (os.getpid(), 10_000_000):
        assert not watch.watch(pid, started, on_dead=Bell()).is_dead
    assert watch.process_count == 0


def test_with_a_foreign_proc_a_missing_process_is_not_dead(watch, monkeypatch):
    monkeypatch.setattr(Path, "readlink", lambda path: Path("1"))
    bell = Bell()
    pid, started = gone()
    watched = watch.watch(pid, started, on_dead=bell)
    assert (bell.count, watched.is_dead) == (0, False)
    monkeypatch.undo()
    let_another_die(watch)
    assert bell.count == 0


def test_a_missing_proc_counts_as_foreign(monkeypatch):
    assert process_monitor._is_proc_ours()

    def fail(path):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "readlink", fail)
    assert not process_monitor._is_proc_ours()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_death_is_reported_once_the_last_child_has_died(watch, order):
    bell = Bell()
    with process() as main, process() as first, process() as second:
        family = (main, first, second)
        watched = watch_process(watch, main.pid, bell)
        watched.replace([first.pid, second.pid, first.pid, main.pid])
        assert pids_of(watched) == tuple(each.pid for each in family)
        for index in order[:-1]:
            family[index].kill()
            pid = family[index].pid
            until(lambda pid=pid: pid not in living(watched))
        let_another_die(watch)
        assert (bell.count, watched.is_dead) == (0, False)
        family[order[-1]].kill()
        bell.wait()
    let_another_die(watch)
    assert bell.count == 1


def test_an_unknown_child_counts_as_alive_until_it_is_removed(watch):
    bell = Bell()
    pid, _ = gone()
    with process() as main, process() as child:
        watched = watch_process(watch, main.pid, bell)
        watched.replace([child.pid, pid])
        main.kill()
        child.kill()
        let_another_die(watch)
        assert (bell.count, watched.is_dead) == (0, False)
        watched.replace([child.pid])
        bell.wait()


def test_a_child_that_could_not_be_watched_is_tried_again(watch, monkeypatch):
    bell = Bell()
    with process() as main, process() as child:
        watched = watch_process(watch, main.pid, bell)
        with monkeypatch.context() as patch:
            patch.setattr(process_monitor, "PROCESSES_MAX", 1)
            watched.replace([child.pid])
        assert watch.process_count == 1
        watched.replace([child.pid])
        assert watch.process_count == 2
        main.kill()
        child.kill()
        bell.wait()


def test_a_dead_process_with_a_living_child_is_not_reported(watch):
    bell = Bell()
    pid, started = gone()
    with process() as child:
        watched = watch.watch(pid, started, children=[child.pid], on_dead=bell)
        let_another_die(watch)
        assert (bell.count, watched.is_dead) == (0, False)
        assert watched.without_dead([child.pid]) == (child.pid,)
        child.kill()
        bell.wait()
        assert watched.without_dead([pid, child.pid]) == (pid,)


def test_removed_children_do_not_count(watch):
    bell = Bell()
    with process() as main, process() as child:
        watched = watch_process(watch, main.pid, bell)
        watched.replace([child.pid])
        main.kill()
        until(lambda: living(watched) == (child.pid,))
        watched.replace([])
        bell.wait()
        assert child.poll() is None
    assert watch.process_count == 0


def test_children_are_bounded_and_the_excess_counts_as_alive(watch, monkeypatch):
    bell = Bell()
    monkeypatch.setattr(process_monitor, "CHILDREN_MAX", 2)
    with process() as main, process() as one, process() as two, process() as three:
        watched = watch_process(watch, main.pid, bell)
        watched.replace([one.pid, two.pid, three.pid, 20_000_000])
        assert pids_of(watched) == (main.pid, one.pid, two.pid, -1)
        for each in (main, one, two, three):
            each.kill()
        let_another_die(watch)
        assert (bell.count, watched.is_dead) == (0, False)


def test_processes_are_bounded_and_the_excess_counts_as_alive(watch, monkeypatch):
    monkeypatch.setattr(process_monitor, "PROCESSES_MAX", 1)
    with process() as first, process() as second:
        one = watch_process(watch, first.pid, Bell())
        two = watch_process(watch, second.pid, Bell())
        assert (living(two), watch.process_count) == ((second.pid,), 1)
        one.close()
        watch_process(watch, second.pid, Bell())
        assert watch.process_count == 1


def test_a_watched_process_that_is_closed_is_not_reported_dead(watch):
    bell = Bell()
    with process() as child:
        watched = watch_process(watch, child.pid, bell)
        watched.close()
        watched.close()
        child.kill()
        let_another_die(watch)
        assert not watched.is_dead
        watched.replace([child.pid, os.getpid()])
    assert (bell.count, watch.process_count) == (0, 0)


def test_a_child_added_late_delays_the_report(watch):
    """Deaths are checked again when they are reported."""
    bell, busy, go = Bell(), threading.Event(), threading.Event()

    def hold():
        busy.set()
        assert go.wait(LIMIT_S)

    with process() as blocker, process() as main, process() as child:
        watch_process(watch, blocker.pid, hold)
        blocker.kill()
        assert busy.wait(LIMIT_S)
        watched = watch.watch(main.pid, 7, on_dead=bell)  # dead, not reported yet
        assert watched.is_dead
        watched.replace([child.pid])
        go.set()
        let_another_die(watch)
        assert bell.count == 0
        child.kill()
        bell.wait()


def test_closing_ends_the_thread_and_reports_nothing():
    watch, bell = DeathWatch(), Bell()
    with process() as child:
        watched = watch_process(watch, child.pid, bell)
        (thread,) = [t for t in threading.enumerate() if t.name == "marshal-deathwatch"]
        watch.close()
        assert not thread.is_alive()
        watch.close()
        child.kill()
        child.wait(LIMIT_S)
        assert not watched.is_dead
        assert not watch.watch(child.pid, 7, on_dead=bell).is_dead
    assert bell.count == 0


def test_an_unused_watch_can_be_closed():
    DeathWatch().close()


def test_closing_from_the_callback_does_not_deadlock():
    watch, closed = DeathWatch(), threading.Event()

    def on_dead():
        watch.close()
        closed.set()

    with process() as child:
        watch_process(watch, child.pid, on_dead)
        child.kill()
        assert closed.wait(LIMIT_S)


def test_a_failing_callback_does_not_end_the_watch(watch, caplog):
    def fail():
        raise OSError("no room")

    with caplog.at_level(logging.ERROR), process() as child:
        watch_process(watch, child.pid, fail)
        child.kill()
        # Its death may be reported after that of a process killed later.
        until(lambda: "no room" in caplog.text)
        let_another_die(watch)


def test_closing_the_watch_closes_all_descriptors():
    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    watch = DeathWatch()
    for _ in range(3):
        let_another_die(watch)
        with process() as child:
            watch_process(watch, child.pid, Bell()).replace([child.pid])
            watch.watch(child.pid, 7, on_dead=Bell())
    watch.close()
    assert count() == before


def test_a_stale_event_of_a_reused_descriptor_is_ignored(watch):
    bell = Bell()
    with process() as child:
        watch_process(watch, child.pid, bell)
        with watch.lock:
            (fd,) = watch._by_fd
            watch._note(fd)
            watch._note(10_000)
        assert bell.count == 0
        assert watch.process_count == 1
