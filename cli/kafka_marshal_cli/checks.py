"""The checks of ``marshal doctor``: one line for each assumption.

docs/TESTING.md lists the assumptions of the guarantees and their checks. A check
measures where it can: it reads a clock, takes a lock, times a request.
"""

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import attrs

from kafka_marshal import World
from kafka_marshal.admin.client import set_command
from kafka_marshal.admin.formatting import TopicReport
from kafka_marshal.admin.growing import command
from kafka_marshal.clock import duration
from kafka_marshal.counting import counted
from kafka_marshal.errors import RAISE_OPEN_FILES, ConfigurationError
from kafka_marshal.protocol.text import abbreviated
from kafka_marshal.views.log_scan import Arrival


class Result(StrEnum):
    """Result of a check; only ``failed`` fails the command."""

    OK = "ok"
    NOTE = "note"
    FAILED = "failed"
    SKIPPED = "skipped"


@attrs.frozen
class Check:
    """One line of the report.

    Attributes:
        check: What was checked.
        result: Result of the check.
        found: What was found.
        run: Command or advice to correct the problem; None if nothing is wrong.
    """

    check: str
    result: Result
    found: str
    run: str | None = None


OPEN_FILES_MIN = 256
# PROTOCOL 11, S4: clocks drift by at most 0.1 %.
DRIFT_PPM_MAX = 1_000
# The clocks are read one after the other, some microseconds apart.
READING_NS = 20_000
DRIFT_S_MIN = 0.25
# Certificates may live for days, and are renewed with a third of their life left.
CERTIFICATE_S_MIN = 24 * 60 * 60
CERTIFICATE_REMEDY = "renew it; running members read the new file"
CLOCK_REMEDY = "chronyc tracking, here and on the brokers"


@attrs.frozen
class ClockReading:
    """The boot clock, which leases use, and the raw clock of its oscillator, in ns."""

    boot_ns: int
    raw_ns: int

    @classmethod
    def now(cls) -> "ClockReading | None":
        """Read both clocks; None if this system does not have them."""
        boot = getattr(time, "CLOCK_BOOTTIME", None)
        raw = getattr(time, "CLOCK_MONOTONIC_RAW", None)
        if boot is None or raw is None:
            return None
        return cls(time.clock_gettime_ns(boot), time.clock_gettime_ns(raw))


def local_clock(begun: ClockReading | None, ended: ClockReading | None) -> Check:
    """Check the drift of the boot clock from its oscillator between two readings.

    A clock that is slewed by more than 0.1 % would stretch leases.
    """
    name = "local clock"
    if begun is None or ended is None:
        found = (
            "this system has no boot clock; the larger of elapsed monotonic and "
            "elapsed wall time is used, so a suspension is detected late"
        )
        return Check(name, Result.NOTE, found, "do not suspend machines of consumers")
    span_ns = ended.raw_ns - begun.raw_ns
    off_ns = abs(ended.boot_ns - begun.boot_ns - span_ns)
    # A difference within the error of two readings is not drift.
    ppm = round(max(0, off_ns - READING_NS) * 1_000_000 / max(1, span_ns))
    span = duration(span_ns // 1_000_000)
    found = (
        f"drifts {ppm} ppm from its oscillator, measured over {span}; leases allow "
        f"{DRIFT_PPM_MAX}"
    )
    if ppm > DRIFT_PPM_MAX:
        return Check(name, Result.FAILED, found, "chronyc tracking, or timedatectl")
    return Check(name, Result.OK, found)


def state_folder(find: Callable[[], Path]) -> Check:
    """Check that the state directory supports locks and atomic replacement.

    If two processes could hold the lock of one client_id, both could resume its claims.

    Args:
        find: Returns the directory.
    """
    name = "identities"
    try:
        home = find()
    except ConfigurationError as error:
        return Check(name, Result.NOTE, str(error), "set MARSHAL_STATE_DIR")
    remedy = "set MARSHAL_STATE_DIR to a folder of a local disk that you may write"
    place = home
    try:
        place = _nearest(home)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as folder:
            if not _locks_exclude(Path(folder, "lock")):
                found = (
                    f"two processes can hold one lock in {place}: locks there do not "
                    "exclude other processes"
                )
                return Check(name, Result.FAILED, found, remedy)
            _replace_durably(Path(folder))
    except OSError as error:
        found = f"{place} cannot be used: {error.strerror or error}"
        return Check(name, Result.FAILED, found, remedy)
    return Check(
        name,
        Result.OK,
        f"{home}: locks exclude other processes, files are replaced atomically",
    )


def _nearest(home: Path) -> Path:
    """Return the folder if it exists, else its nearest parent that exists."""
    return next(each for each in (home, *home.parents) if each.is_dir())


def _locks_exclude(path: Path) -> bool:
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
                raise
            return True
        return False
    finally:
        os.close(first)
        os.close(second)


def _replace_durably(folder: Path) -> None:
    path = folder / "new"
    with path.open("wb") as file:
        file.write(b"identity")
        file.flush()
        os.fsync(file.fileno())
    path.replace(folder / "kept")


def death_watch(open_pid: Callable[[int], int]) -> Check:
    """Check that a sidecar can detect the death of a process (PROTOCOL 12).

    Args:
        open_pid: Opens the pidfd of a process.
    """
    name = "death watch"
    try:
        os.close(open_pid(os.getpid()))
    except OSError as error:
        why = error.strerror or str(error)
        found = f"{why}: a sidecar here detects a client's death only by its deadline"
        return Check(name, Result.NOTE, found, "run sidecars on Linux 5.3 or later")
    return Check(name, Result.OK, "the death of a process is detected at once")


def open_files(limit: int | None) -> Check:
    """Check how many files and connections this process may have open.

    Each client of Kafka needs some connections to each broker.

    Args:
        limit: The soft limit, None for none.
    """
    name = "open files"
    if limit is None:
        return Check(name, Result.OK, "no limit")
    if limit < OPEN_FILES_MIN:
        found = f"at most {limit}: too few for several brokers, or for a sidecar"
        return Check(name, Result.NOTE, found, RAISE_OPEN_FILES)
    return Check(name, Result.OK, f"at most {limit}")


def certificate(path: str, *, expires_at_s: float, now_s: float) -> Check:
    """Report when the certificate of the client expires, by this machine's clock."""
    left_s = expires_at_s - now_s
    name, left = "certificate", duration(round(abs(left_s) * 1_000))
    if left_s <= 0:
        found = f"{path} expired {left} ago: brokers refuse new connections"
        return Check(name, Result.FAILED, found, CERTIFICATE_REMEDY)
    found = f"{path} expires in {left}"
    if left_s < CERTIFICATE_S_MIN:
        return Check(name, Result.NOTE, found, CERTIFICATE_REMEDY)
    return Check(name, Result.OK, found)


def rights(report: TopicReport) -> Iterator[Check]:
    """Report if this principal may not write to the topic, as members must."""
    if not report.topic.can_write:
        name = report.topic.name
        found = (
            f"this principal may not write to {name}: a member with this login ends "
            "with LogUnwritable, and commands that change something fail"
        )
        run = f"to run members or such commands, grant WRITE on topic {name}"
        yield Check("rights", Result.NOTE, found, run)


def copies(report: TopicReport, *, servers: str) -> Iterator[Check]:
    """Check that the death of a broker loses no acknowledged record."""
    topic, name = report.topic, "copies"
    needed = int(topic.configs.get("min.insync.replicas", "1"))
    if topic.in_sync < needed:
        found = (
            f"partitions {abbreviated(topic.behind)} have fewer copies in sync than "
            f"min.insync.replicas={needed}: no client can write to them"
        )
        yield Check(name, Result.FAILED, found, "bring the missing brokers back")
    elif topic.behind:
        found = (
            f"partitions {abbreviated(topic.behind)} have copies that are out of sync"
        )
        run = (
            f"kafka-topics --bootstrap-server {servers} --describe "
            "--under-replicated-partitions"
        )
        yield Check(name, Result.NOTE, found, run)
    elif topic.replication == 1:
        found = "one copy of each partition: the loss of its disk loses the claims"
        run = "add brokers, then kafka-reassign-partitions"
        yield Check(name, Result.NOTE, found, run)
    else:
        found = f"{topic.replication} copies of each partition, all in sync"
        yield Check(name, Result.OK, found)


def round_trips(
    took_ms: Sequence[float], heartbeat_interval_ms: int, *, read_ms: int
) -> Check:
    """Compare round trips with the heartbeat interval.

    A request that takes longer than a quarter of the interval is abandoned (PROTOCOL
    2.1). A read of the log may wait for seconds, because a busy broker may need them.
    If the interval is short, leases end before the read is given up.

    Args:
        took_ms: Round trips.
        heartbeat_interval_ms: Heartbeat interval.
        read_ms: How long members wait for a read of the log.
    """
    name, worst = "round trip", max(took_ms)
    limit_ms = heartbeat_interval_ms / 4
    found = (
        f"at most {worst:.1f} ms in {counted(len(took_ms), 'request')}; a request is "
        f"abandoned after {duration(round(limit_ms))}, a quarter of the heartbeat "
        "interval"
    )
    if worst >= limit_ms:
        run = (
            "find what slows the brokers, or format a topic with a longer "
            "heartbeat interval"
        )
        return Check(name, Result.FAILED, found, run)
    if worst >= limit_ms / 5:
        return Check(
            name, Result.NOTE, found, "format a topic with a longer heartbeat interval"
        )
    if read_ms > heartbeat_interval_ms * 3 // 2:
        found += (
            f"; a broken connection may be noticed only after {duration(read_ms)}; all "
            "claims are lost by then"
        )
        run = "marshal topic alter --heartbeat 2s --execute"
        return Check(name, Result.NOTE, found, run)
    return Check(name, Result.OK, found)


def quota(longest_ms: int) -> Iterator[Check]:
    """Report if brokers delay requests for a quota, which members may share.

    Args:
        longest_ms: The longest delay of a request of this command; 0 without delays.
    """
    if longest_ms:
        found = (
            f"a broker delayed requests by {duration(longest_ms)}, for a quota of this "
            "user or client id: such delays can make members with the same quota lose "
            "claims"
        )
        run = "kafka-configs --describe --entity-type users (and clients)"
        yield Check("quota", Result.NOTE, found, run)


CLOCK_OFF_MS_MIN = 2_000
"""Smaller differences are not reported: a record may take as long to arrive."""
CLOCK_WAIT_MS = 5_000


def leaders_clocks(world: World, leaders: Mapping[int, int]) -> Check | None:
    """Return a note if brokers are ahead of this machine, else None.

    Claims are judged by log time, within the term of one leader. After a change of
    leader, skew delays takeovers by up to two heartbeat intervals; it also misleads
    people. Small differences are ignored: records may be appended after ``read_at_ms``.
    """
    ahead_ms: dict[int, int] = {}
    for state in world.partitions:
        leader = leaders.get(state.partition, -1)
        by_ms = state.append_time_ms - world.read_at_ms
        ahead_ms[leader] = max(by_ms, ahead_ms.get(leader, 0))
    found = [
        f"broker {broker} is {duration(by_ms)} ahead"
        for broker, by_ms in sorted(ahead_ms.items())
        if by_ms >= CLOCK_OFF_MS_MIN
    ]
    if not found:
        return None
    text = "this machine is behind the brokers: " + ", ".join(found)
    return Check("clock", Result.NOTE, text, CLOCK_REMEDY)


def clock_wait_ms(world: World, *, age_ms: int) -> int:
    """Return how long to wait for a new record, to compare this machine's clock with.

    Live members write within a third of a heartbeat interval. If the last record is
    older by this machine's clock, the members are dead, or this clock is ahead.

    Args:
        world: The world now.
        age_ms: Age of the last record by this machine's clock.
    """
    longest_ms = 0
    for state in world.partitions:
        if state.config is None:
            continue
        interval_ms = state.config.heartbeat_interval_ms
        for member in state.soft.members.values():
            is_live = state.now_ms - member.seen_ms <= 2 * interval_ms
            if is_live and not member.record.draining:
                longest_ms = interval_ms // 3 + CLOCK_OFF_MS_MIN
    is_old = age_ms > longest_ms
    return longest_ms if is_old else min(longest_ms, CLOCK_WAIT_MS)


def own_clock(arrival: Arrival, leaders: Mapping[int, int]) -> Check:
    """Compare this machine's clock with a broker's, by a record just appended."""
    ahead_ms = arrival.read_ms - arrival.append_ms
    broker = f"broker {leaders.get(arrival.partition, -1)}"
    if abs(ahead_ms) < CLOCK_OFF_MS_MIN:
        found = (
            f"within {duration(CLOCK_OFF_MS_MIN)} of {broker}, by a record that it "
            "just appended"
        )
        return Check("clock", Result.OK, found)
    side = "ahead of" if ahead_ms > 0 else "behind"
    found = (
        f"this machine is {duration(abs(ahead_ms))} {side} {broker}, by a record that "
        "it just appended: times given here, such as --at and the end of a pause, are "
        "off by as much"
    )
    return Check("clock", Result.NOTE, found, CLOCK_REMEDY)


def timestamps(world: World, topic: str, *, servers: str) -> Iterator[Check]:
    """Report records with a time set by their writer: they do not move log time."""
    count = sum(
        state.soft.counters.get("timestamp_type", 0) for state in world.partitions
    )
    if count:
        found = counted(count, "record was", many="records were")
        found += " not dated by a broker and did not move log time"
        kind = {"setting": "message.timestamp.type", "value": "LogAppendTime"}
        run = set_command(topic, servers, **kind)
        yield Check("timestamps", Result.NOTE, found, run)


def levels(world: World) -> Iterator[Check]:
    """Report live members that the feature level halts (PROTOCOL 3.3)."""
    old = set()
    for state in world.partitions:
        if state.config is None:
            continue
        limit_ms = 2 * state.config.heartbeat_interval_ms
        for member in state.soft.members.values():
            is_live = state.now_ms - member.seen_ms <= limit_ms
            if is_live and member.record.feature_level_max < state.feature_level:
                old.add(f"{member.record.group_id}/{member.record.client_id}")
    if old:
        found = f"members that do not support level {world.config().feature_level}: "
        run = "upgrade kafka-marshal on their hosts"
        yield Check("levels", Result.FAILED, found + abbreviated(sorted(old)), run)


def growths(world: World) -> Iterator[Check]:
    """Report growths of data topics that were begun and have not ended (9.10)."""
    for state in world.partitions:
        for each in state.growths:
            if each.ends is None:
                found = (
                    f"topic {each.topic} grows from {each.old_count} to "
                    f"{each.new_count} partitions, and no member claims the new "
                    "partitions until the command `groups grow` has ended"
                )
                run = (
                    f"{command(each)} --execute, if that command does not run any more"
                )
                yield Check("growths", Result.NOTE, found, run)
