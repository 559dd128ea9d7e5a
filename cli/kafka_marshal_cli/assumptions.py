"""What the safety argument takes for granted, checked here and on the cluster.

docs/TESTING.md lists the assumptions, and which check of ``marshal doctor`` looks at
each. A check measures where it can: a clock is read, a lock is taken, a question is
timed.
"""

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from kafka_marshal import World
from kafka_marshal.admin import TopicReport, set_command
from kafka_marshal_cli.checks import Check, Result
from kafka_marshal_cli.render import duration

NS_PER_S = 1_000_000_000
# PROTOCOL 11, S4: clocks drift by at most 0.1 %.
DRIFT_PPM_MAX = 1_000
# Two clocks are read one after the other, some microseconds apart.
READING_NS = 20_000
DRIFT_S_MIN = 0.25
NAMES_SHOWN = 5


@attrs.frozen
class ClockReading:
    """The boot clock that leases run by, and the oscillator under it, in ns."""

    boot_ns: int
    raw_ns: int

    @classmethod
    def take(cls) -> "ClockReading | None":
        """Read both; None where this system has no such clocks."""
        boot = getattr(time, "CLOCK_BOOTTIME", None)
        raw = getattr(time, "CLOCK_MONOTONIC_RAW", None)
        if boot is None or raw is None:
            return None
        return cls(time.clock_gettime_ns(boot), time.clock_gettime_ns(raw))


def local_clock(begun: ClockReading | None, ended: ClockReading | None) -> Check:
    """Judge how far the boot clock runs off its oscillator, between two readings.

    A clock that is being slewed faster than 0.1 % would stretch leases.
    """
    name = "local clock"
    if begun is None or ended is None:
        found = (
            "this system has no boot clock; the larger of elapsed monotonic and "
            "elapsed wall time stands in, so a suspended machine notices it late"
        )
        return Check(name, Result.NOTE, found, "let no consumer's machine be suspended")
    span_ns = ended.raw_ns - begun.raw_ns
    off_ns = abs(ended.boot_ns - begun.boot_ns - span_ns)
    # What lies within the error of reading twice is no drift.
    ppm = round(max(0, off_ns - READING_NS) * 1_000_000 / max(1, span_ns))
    span = duration(span_ns // 1_000_000)
    found = (
        f"runs {ppm} ppm off its oscillator, measured over {span}; leases allow "
        f"{DRIFT_PPM_MAX}"
    )
    if ppm > DRIFT_PPM_MAX:
        return Check(name, Result.FAILED, found, "chronyc tracking, or timedatectl")
    return Check(name, Result.OK, found)


def state_folder(home: Path) -> Check:
    """Judge whether identities can be locked and replaced where they are kept.

    Two processes that both hold the lock of one client_id could both resume it.
    """
    name = "identities"
    mend = "set MARSHAL_STATE_DIR to a folder of a local disk that you may write"
    place = _nearest(home)
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as folder:
            if not _locks_exclude(Path(folder, "lock")):
                found = f"two holders of one lock in {place}: locks do not exclude"
                return Check(name, Result.FAILED, found, mend)
            _replace_durably(Path(folder))
    except OSError as error:
        found = f"{place} cannot be used: {error.strerror or error}"
        return Check(name, Result.FAILED, found, mend)
    return Check(name, Result.OK, f"{home}: locks exclude, files are replaced whole")


def _nearest(home: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
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


def death_watch(open_pid: Callable[[int], int] | None) -> Check:
    """Judge whether a sidecar can know that a process is dead (PROTOCOL 12).

    Args:
        open_pid: ``os.pidfd_open`` where Python has it.
    """
    name = "death watch"
    why = "this system has no pidfd"
    if open_pid is not None:
        try:
            os.close(open_pid(os.getpid()))
        except OSError as error:
            why = error.strerror or str(error)
        else:
            return Check(name, Result.OK, "the death of a process is seen at once")
    found = f"{why}: a sidecar here learns of a client's death by its deadline only"
    return Check(name, Result.NOTE, found, "run sidecars on Linux 5.3 or later")


def copies(report: TopicReport) -> Iterator[Check]:
    """Judge whether acknowledged records are where a dead broker does not take them."""
    topic, name = report.topic, "copies"
    needed = int(topic.configs.get("min.insync.replicas", "1"))
    if topic.in_sync < needed:
        found = (
            f"partitions {shown(topic.behind)} have fewer copies in sync than "
            f"min.insync.replicas={needed}: nothing can be written there"
        )
        yield Check(name, Result.FAILED, found, "bring the missing brokers back")
    elif topic.behind:
        found = f"partitions {shown(topic.behind)} have copies that are out of sync"
        run = "kafka-topics --describe --under-replicated-partitions"
        yield Check(name, Result.NOTE, found, run)
    elif topic.replication == 1:
        found = "one copy of each partition: with its disk the claims are gone"
        run = "add brokers, then kafka-reassign-partitions"
        yield Check(name, Result.NOTE, found, run)
    else:
        found = f"{topic.replication} of each partition, all in sync"
        yield Check(name, Result.OK, found)


def round_trips(took_ms: Sequence[float], heartbeat_interval_ms: int) -> Check:
    """Judge the brokers' answers by H: beats and takeovers wait for them.

    PROTOCOL 2.1: a request that takes longer than H/4 is given up.
    """
    name, worst = "round trip", max(took_ms)
    limit_ms = heartbeat_interval_ms / 4
    found = (
        f"at most {worst:.1f} ms of {len(took_ms)} questions; a request is given up "
        f"after H/4 = {duration(round(limit_ms))}"
    )
    if worst >= limit_ms:
        run = "look for what slows the brokers, or format a topic with a longer H"
        return Check(name, Result.FAILED, found, run)
    if worst >= limit_ms / 5:
        return Check(name, Result.NOTE, found, "format a topic with a longer H")
    return Check(name, Result.OK, found)


def leaders_clocks(world: World, leaders: Mapping[int, int]) -> Check | None:
    """Tell of brokers that are ahead of this machine, None where none is.

    Claims are judged by log time, which counts inside one leader's term only; skew
    makes takeovers after a change of leaders later by up to 2H, and misleads people.
    """
    ahead_ms: dict[int, int] = {}
    for state in world.partitions:
        leader = leaders.get(state.partition, -1)
        by_ms = state.append_time_ms - world.read_at_ms
        ahead_ms[leader] = max(by_ms, ahead_ms.get(leader, 0))
    found = [
        f"broker {broker} is {duration(by_ms)} ahead"
        for broker, by_ms in sorted(ahead_ms.items())
        if by_ms > 0
    ]
    if not found:
        return None
    told = "this machine is behind the brokers: " + ", ".join(found)
    return Check("clock", Result.NOTE, told, "chronyc tracking, here and there")


def timestamps(world: World, topic: str, *, servers: str) -> Iterator[Check]:
    """Tell of records whose time their writers chose: they moved no clock."""
    count = sum(
        state.soft.counters.get("timestamp_type", 0) for state in world.partitions
    )
    if count:
        found = (
            f"{count} records were not dated by a broker; log time stood still for them"
        )
        kind = {"setting": "message.timestamp.type", "value": "LogAppendTime"}
        run = set_command(topic, servers, **kind)
        yield Check("timestamps", Result.NOTE, found, run)


def levels(world: World) -> Iterator[Check]:
    """Name members that a later level would halt (PROTOCOL 3.3)."""
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
        found = f"members that know no level {world.config().feature_level}: "
        run = "upgrade kafka-marshal there"
        yield Check("levels", Result.FAILED, found + shown(sorted(old)), run)


def shown(names: Iterable[object]) -> str:
    """Return names for a line: the first few, and how many more."""
    every = [str(each) for each in names]
    more = len(every) - NAMES_SHOWN
    return ", ".join(every[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
