"""Snapshot files: written as a whole, and refused if damaged."""

import os
import pickle
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest
from enginekit import fold, owning, pause_record, world, write
from keptkit import kept

from kafka_marshal.engine.checkpoint_reader import kept_in
from kafka_marshal.engine.follower import Follower
from kafka_marshal.engine.kept_states import LogView, freeze_soft
from kafka_marshal.errors import DeadlineExceeded, MalformedRecord
from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.snapshots import (
    FILE_BYTES_MAX,
    MAGIC,
    Snapshot,
    SnapshotFolder,
    keep_read,
    open_store,
    read_file,
    read_sections,
    read_to_end,
    to_file_bytes,
    write_file,
)
from simulator.clock import VirtualClock

TOPIC_ID = bytes(range(16))


class Slow(LogView):
    """Reads ``count`` entries, and then waits until the timeout."""

    def __init__(self, log, clock, count):
        super().__init__(log)
        self.clock, self.count = clock, count

    def poll(self, timeout_ms):
        if self.count <= 0:
            self.clock.advance(timeout_ms)
            return []
        found = super().poll(timeout_ms)[: min(self.count, 10)]
        self.count -= len(found)
        if found:
            self.read_from({found[-1][0]: found[-1][1].offset + 1})
        return found


@pytest.fixture(scope="module")
def states():
    """Two states of one log, the second later."""
    cluster = world()
    owning(cluster)
    first = fold(cluster)
    early = kept(first, soft=freeze_soft(first.soft)())
    for number in range(20):
        write(cluster, b"noise %d" % number)
    return early, kept(fold(cluster))


@pytest.fixture
def folder(tmp_path):
    return SnapshotFolder(tmp_path / "state", cluster_id="c", topic_id=TOPIC_ID)


def found(folder, partition=0):
    kept_there = folder.find({partition: LogRange(0, 9)}, log=None, timeout_ms=0)
    return kept_there.get(partition)


def same(one, other):
    return attrs.evolve(one, source="") == attrs.evolve(other, source="")


def test_a_saved_state_is_found(folder, states):
    assert found(folder) is None
    folder.save(states[0])
    assert same(found(folder), states[0])
    assert found(folder).source == str(folder.file_of(0))
    assert found(folder, 1) is None


def test_only_the_owner_may_read_snapshots(folder, states):
    folder.save(states[0])
    assert stat.S_IMODE(folder.file_of(0).stat().st_mode) == 0o600
    for path in (folder.path, folder.path.parent, folder.path.parent.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_the_newest_state_wins_regardless_of_the_last_writer(folder, states):
    early, late = states
    folder.save(late)
    folder.save(early)
    assert same(found(folder), late)
    again = attrs.evolve(early, leader_epoch=late.leader_epoch + 1)
    folder.save(again)
    assert same(found(folder), again)


def test_a_discarded_state_is_removed_unless_it_was_replaced(folder, states):
    early, late = states
    folder.save(early)
    old = found(folder)
    folder.save(late)
    folder.discard(old)
    assert same(found(folder), late)
    folder.discard(found(folder))
    assert found(folder) is None
    folder.discard(old)


@pytest.mark.parametrize(
    "other", [{"cluster_id": "d", "topic_id": TOPIC_ID}, {"topic_id": b"x" * 16}]
)
def test_a_file_of_another_log_is_ignored(tmp_path, folder, states, other):
    folder.save(states[0])
    stranger = SnapshotFolder(tmp_path / "state", **{"cluster_id": "c"} | other)
    stranger.path.mkdir(parents=True, exist_ok=True)
    if not stranger.file_of(0).exists():
        folder.file_of(0).rename(stranger.file_of(0))
    assert found(stranger) is None


def test_every_truncation_is_detected(states):
    value = to_file_bytes(Snapshot("c", TOPIC_ID, states[0]))
    for size in range(1, len(value)):
        with pytest.raises(MalformedRecord):
            list(read_sections(value[:size], source="it"))
    assert list(read_sections(b"", source="it")) == []


def test_every_changed_byte_is_detected(states):
    value = to_file_bytes(Snapshot("c", TOPIC_ID, states[0]))
    for at in range(len(value)):
        for bit in (1, 128):
            bad = value[:at] + bytes([value[at] ^ bit]) + value[at + 1 :]
            with pytest.raises(MalformedRecord):
                list(read_sections(bad, source="it"))


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(b"\0" * 200, id="zeroes"),
        pytest.param(MAGIC, id="magic alone"),
        pytest.param(MAGIC + b"\xff" * 60, id="endless head"),
        pytest.param(MAGIC + b"\0\0\0\x01\xc1" + b"x" * 20, id="no head"),
        pytest.param(MAGIC + b"\0\0\0\x00" + b"x" * 20, id="empty head"),
    ],
)
def test_hostile_bytes_are_no_snapshot(folder, value):
    with pytest.raises(MalformedRecord):
        list(read_sections(value, source="it"))
    folder.path.mkdir(parents=True)
    folder.file_of(0).write_bytes(value)
    assert found(folder) is None


def test_negative_sizes_are_refused(states):
    state = attrs.evolve(states[0], state=b"", soft=None)
    value = to_file_bytes(Snapshot("c", TOPIC_ID, state))
    # The two sizes end the head as single bytes, zero here: -1 is 0xff.
    at = value.rindex(b"\0\0")
    bad = value[:at] + b"\xff\xff" + value[at + 2 :]
    with pytest.raises(MalformedRecord):
        list(read_sections(bad, source="it"))


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "big"
    with path.open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    with pytest.raises(MalformedRecord, match="bytes at most"):
        read_file(path)


def test_a_file_may_hold_several_snapshots(tmp_path, states):
    sections = [Snapshot("c", TOPIC_ID, state) for state in states]
    path = tmp_path / "both"
    write_file(path, b"".join(map(to_file_bytes, sections)))
    assert [same(s.state, k) for s, k in zip(read_file(path), states, strict=True)]


def test_links_and_pipes_are_written_to_and_not_replaced(tmp_path):
    link, target = tmp_path / "link", tmp_path / "target"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_file(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_file(pipe, b"a snapshot")
        assert os.read(reader, 100) == b"a snapshot"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "link",
        "pipe",
        "target",
    ]


# --- Crashes ---


class Broken(OSError):
    """The disk fails here."""


@contextmanager
def breaking(step):
    """Make the call with this number fail; a write has then written a half."""
    left = [step]
    plain = {"fdopen": os.fdopen, "fsync": os.fsync, "replace": Path.replace}

    def due():
        left[0] -= 1
        return left[0] < 0

    def fsync(handle):
        if due():
            raise Broken
        plain["fsync"](handle)

    def replace(self, target):
        if due():
            raise Broken
        return plain["replace"](self, target)

    class File:
        def __init__(self, handle, mode):
            self._file = plain["fdopen"](handle, mode, buffering=0)
            self.flush, self.fileno = self._file.flush, self._file.fileno

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._file.close()

        def write(self, value):
            for start in range(0, len(value), 100):
                if due():
                    self._file.write(value[start : start + 50])
                    raise Broken
                self._file.write(value[start : start + 100])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdopen", File)
        patch.setattr(os, "fsync", fsync)
        patch.setattr(Path, "replace", replace)
        yield


def test_a_fault_at_any_step_leaves_the_old_or_the_new_file(tmp_path, states):
    early, late = states
    outcomes = []
    for step in range(200):
        home = tmp_path / str(step)
        SnapshotFolder(home, cluster_id="c", topic_id=TOPIC_ID).save(early)
        folder = SnapshotFolder(home, cluster_id="c", topic_id=TOPIC_ID)
        try:
            with breaking(step):
                folder.save(late)
        except Broken:
            pass
        else:
            break
        outcomes.append(same(found(folder), late))
        assert outcomes[-1] or same(found(folder), early)
        assert [path.name for path in folder.path.iterdir()] == ["0.snapshot"]
    # At least one write, then fsync, rename and the folder's fsync.
    assert len(outcomes) > 4
    # Only the last step, the folder's fsync, follows the rename to the new file.
    assert outcomes == [False] * (len(outcomes) - 1) + [True]


WRITER = """
import pickle, sys
from pathlib import Path
from kafka_marshal.snapshots import SnapshotFolder
states = pickle.loads(sys.stdin.buffer.read())
folder = SnapshotFolder(Path(sys.argv[1]), cluster_id="c", topic_id=bytes(range(16)))
print("ready", flush=True)
while True:
    for state in states:
        folder.save(state)
    for state in folder.find({0: None}, log=None, timeout_ms=0).values():
        folder.discard(state)
"""


def test_a_killed_writer_leaves_a_whole_file_or_none(tmp_path, states):
    """SIGKILL at a random moment of the writes, several times."""
    big = attrs.evolve(states[1], soft=os.urandom(300_000))
    seen = set()
    for round_ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        writer.stdin.write(pickle.dumps([states[0], big]))
        writer.stdin.close()
        assert writer.stdout.readline() == b"ready\n"
        folder = SnapshotFolder(tmp_path, cluster_id="c", topic_id=TOPIC_ID)
        deadline = time.monotonic() + 60
        while not folder.path.exists() or not any(folder.path.iterdir()):
            assert time.monotonic() < deadline
        # Another moment in each round: the delay is this many reads of the folder.
        for _ in range(round_ * 20):
            list(folder.path.iterdir())
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=60)
        writer.stdout.close()
        state = found(folder)
        path = folder.file_of(0)
        if state is None:
            assert not path.exists()
            seen.add("none")
        else:
            assert same(state, states[0]) or same(state, big)
            seen.add(state.offset)
    assert seen


def test_old_temporary_files_are_removed_at_the_next_save(folder, states):
    folder.save(states[0])
    old, new = folder.path / ".0old", folder.path / ".0new"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (0, 0))
    folder.save(states[1])
    assert not old.exists()
    assert new.exists()


def test_an_unwritable_folder_is_an_error(tmp_path, states):
    (tmp_path / "state").write_bytes(b"a file")
    folder = SnapshotFolder(tmp_path / "state", cluster_id="c", topic_id=TOPIC_ID)
    with pytest.raises(OSError):
        folder.save(states[0])
    assert found(folder) is None


def test_without_a_home_or_a_topic_id_nothing_is_kept(tmp_path):
    assert open_store(None, "c", topic_id=TOPIC_ID) is None
    assert open_store(tmp_path, "c", topic_id=None) is None
    assert isinstance(open_store(tmp_path, "c", topic_id=TOPIC_ID), SnapshotFolder)


def test_replay_from_a_file_equals_replay_of_the_whole_log(folder):
    """PROTOCOL 7.4, from a file, including the soft state."""
    cluster = world()
    owning(cluster)
    middle = fold(cluster)
    folder.save(kept(middle, soft=freeze_soft(middle.soft)()))
    cluster.run(5_000)
    node = cluster.node("b")
    node.engine.rebuilder.sources = (folder,)
    whole = fold(cluster)
    node.step()
    there = node.engine.context.replicas[0].world
    assert node.observer.named("restored")
    assert digest(there) == digest(whole)
    assert there.soft == whole.soft
    assert Path(folder.path).name == TOPIC_ID.hex()


# --- What a read that times out stores ---


@pytest.fixture(scope="module")
def long():
    """A log of a claim, a pause and 300 entries more."""
    cluster = world()
    owning(cluster)
    write(cluster, pause_record(cluster, cluster.clock.wall_ms() + 9_000_000))
    for number in range(300):
        write(cluster, b"noise %d" % number)
    return cluster


def reading(cluster, folder, count):
    """Read a log; the time is sufficient for ``count`` entries."""
    clock = VirtualClock()
    log = cluster.kafka.coordination_log()
    follower = Follower(Slow(log, clock, count), clock, sources=kept_in(folder))
    try:
        read_to_end(follower, folder, timeout_ms=1_000)
    except DeadlineExceeded as error:
        return follower, str(error)
    return follower, ""


def test_a_read_that_times_out_is_continued_by_the_next(long, folder):
    """Else each read would begin at the log start, and never reach the end."""
    attempts, message = 0, "first"
    while message:
        follower, message = reading(long, folder, 100)
        attempts += 1
        assert not message or message.endswith(
            "what was read is stored; repeat the command to continue from there"
        )
        assert attempts < 9
    assert attempts > 2
    assert follower.began_at[0] >= 100
    whole = fold(long)
    assert digest(follower.worlds[0]) == digest(whole)
    assert follower.worlds[0].soft.members.keys() == whole.soft.members.keys()
    assert not follower.is_pause_unknown
    (note,) = follower.began_notes[0].values()
    assert note.begin_ms is not None


def test_a_timeout_without_a_stored_state_does_not_mention_one(long, folder):
    assert "stored" not in reading(long, None, 100)[1]
    assert "stored" not in reading(long, folder, 0)[1]
    folder.path.parent.parent.mkdir()
    folder.path.parent.write_text("no directory")
    assert "stored" not in reading(long, folder, 100)[1]


def test_a_state_is_kept_after_a_complete_read_of_a_long_log(long, folder):
    follower, message = reading(long, folder, 10_000)
    assert message == ""
    assert found(folder) is None
    assert keep_read(follower, folder, entries_min=10_000) == 0
    assert keep_read(follower, folder, entries_min=100) == 1
    assert found(folder).offset == follower.worlds[0].next_offset
