"""Stores states of coordinating partitions in files (PROTOCOL 7.1).

A file has one section for each coordinating partition: a head, the canonical bytes and
a checksum. A truncated or altered section is rejected. Whether a section is a valid
starting point is checked against the log (``engine.kept_states``).
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import attrs
import msgspec

from kafka_marshal.engine.follower import Follower
from kafka_marshal.engine.kept_states import KeptState, world_of
from kafka_marshal.engine.snapshotter import StateStore, capture
from kafka_marshal.errors import DeadlineExceeded, MalformedRecord
from kafka_marshal.identity import make_private, replace_file
from kafka_marshal.ports import CoordinationLog, LogRange
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import LogEntry

MAGIC = b"kafka-marshal snapshot 1\n"
CHECK_BYTES = 16
HEAD_BYTES_MAX = 4_096
FILE_BYTES_MAX = 1 << 30
LEFTOVER_S = 3_600


class _Head(msgspec.Struct, array_like=True, forbid_unknown_fields=True, kw_only=True):
    cluster_id: str
    topic_id: bytes
    partition: int
    offset: int
    leader_epoch: int
    digest: str
    state_bytes: int
    soft_bytes: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Head).decode


@attrs.frozen
class Snapshot:
    """One section of a file.

    Attributes:
        cluster_id: Cluster of the log; empty if unknown.
        topic_id: Id of the coordination topic; empty if unknown.
        state: The encoded state.
    """

    cluster_id: str
    topic_id: bytes
    state: KeptState

    def world(self) -> WorldState:
        """Return the decoded state.

        Raises:
            MalformedRecord: The bytes are not a state, or do not match the digest.
        """
        kept = self.state
        found = world_of(kept, LogRange(0, kept.offset))
        if isinstance(found, str):
            raise MalformedRecord(f"{kept.source}, partition {kept.partition}: {found}")
        return found


def snapshot_of(world: WorldState, *, cluster_id: str, topic_id: bytes) -> Snapshot:
    """Return a section for a state that has folded an entry and has not halted."""
    return Snapshot(cluster_id, topic_id, capture(world, source="a fold"))


def to_file_bytes(snapshot: Snapshot) -> bytes:
    """Return the bytes of a section; a file is a sequence of sections."""
    state = snapshot.state
    soft = state.soft or b""
    head = _encode(
        _Head(
            cluster_id=snapshot.cluster_id,
            topic_id=snapshot.topic_id,
            partition=state.partition,
            offset=state.offset,
            leader_epoch=state.leader_epoch,
            digest=state.digest,
            state_bytes=len(state.state),
            soft_bytes=len(soft),
        )
    )
    body = b"".join((MAGIC, len(head).to_bytes(4, "big"), head, state.state, soft))
    return body + _check(body)


def read_sections(value: bytes, *, source: str) -> Iterator[Snapshot]:
    """Yield the sections of a file.

    Raises:
        MalformedRecord: It is not a snapshot, or was truncated or altered.
    """
    view = memoryview(value)
    while view:
        head, at = _head(view, source)
        end = at + head.state_bytes + head.soft_bytes
        if head.state_bytes < 0 or head.soft_bytes < 0 or end > len(view):
            raise MalformedRecord(f"{source} is not a snapshot: it is truncated")
        check = bytes(view[end : end + CHECK_BYTES])
        if check != _check(view[:end]):
            raise MalformedRecord(f"{source} is not a snapshot: its checksum is wrong")
        middle = at + head.state_bytes
        state = KeptState(
            partition=head.partition,
            offset=head.offset,
            leader_epoch=head.leader_epoch,
            digest=head.digest,
            state=bytes(view[at:middle]),
            source=source,
            soft=bytes(view[middle:end]) or None,
        )
        yield Snapshot(head.cluster_id, head.topic_id, state)
        view = view[end + CHECK_BYTES :]


def _head(view: memoryview, source: str) -> tuple[_Head, int]:
    at = len(MAGIC) + 4
    if bytes(view[: len(MAGIC)]) != MAGIC or len(view) < at:
        raise MalformedRecord(
            f"{source} is not a snapshot: it does not begin as one; write one "
            "with: marshal log snapshot"
        )
    size = int.from_bytes(view[len(MAGIC) : at], "big")
    if size > HEAD_BYTES_MAX:
        raise MalformedRecord(f"{source} is not a snapshot: its head has {size} bytes")
    try:
        return _decode(view[at : at + size]), at + size
    except (msgspec.MsgspecError, ValueError) as error:
        raise MalformedRecord(f"{source} is not a snapshot: {error}") from error


def _check(body: bytes | memoryview) -> bytes:
    return blake2b(body, digest_size=CHECK_BYTES).digest()


def read_file(path: Path) -> list[Snapshot]:
    """Return the sections of a file.

    Raises:
        OSError: It cannot be read.
        MalformedRecord: It is not a snapshot.
    """
    if path.stat().st_size > FILE_BYTES_MAX:
        raise MalformedRecord(
            f"{path} is not a snapshot: {FILE_BYTES_MAX} bytes at most"
        )
    return list(read_sections(path.read_bytes(), source=str(path)))


def write_file(path: Path, value: bytes, *, is_durable: bool = True) -> None:
    """Replace a file atomically; only write to it if it is a device or a pipe.

    Args:
        path: The file.
        value: The new content.
        is_durable: Whether the content must survive a crash of the machine.

    Raises:
        OSError: It could not be written; the old file is still there.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        # Renaming a file over /dev/null would remove that for the whole machine.
        path.write_bytes(value)
        return
    replace_file(path, value, is_durable=is_durable)
    if not is_durable:
        return
    # The rename must survive a loss of power as well.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class SnapshotFolder(StateStore):
    """The snapshot files of one coordination topic, shared by the processes of a host.

    There is one file for each coordinating partition. A process writes a temporary
    file and renames it, so readers always see a complete file. The newest state is
    kept. After a race of two processes it may be an older one; then the next start
    reads more.
    """

    def __init__(
        self, home: Path, *, cluster_id: str, topic_id: bytes, is_durable: bool = True
    ) -> None:
        """Use a folder below ``home``; the first write creates it.

        Args:
            home: Directory of all states.
            cluster_id: Cluster of the log.
            topic_id: Id of the coordination topic.
            is_durable: Whether files must survive a crash of the machine.
        """
        self.path = home / "snapshots" / topic_id.hex()
        self._cluster_id = cluster_id
        self._topic_id = topic_id
        self._is_durable = is_durable

    def file_of(self, partition: int) -> Path:
        """Return the file of a coordinating partition."""
        return self.path / f"{partition}.snapshot"

    def find(
        self, wanted: Mapping[int, LogRange], *, log: CoordinationLog, timeout_ms: int
    ) -> Mapping[int, KeptState]:
        """Return the stored states; ignore invalid files and files of other logs."""
        del log, timeout_ms
        found = {}
        for partition in wanted:
            state = self._read(partition)
            if state is not None:
                found[partition] = state
        return found

    def save(self, state: KeptState) -> None:
        """Store a state unless a newer one is stored; see ``StateStore``."""
        known = self._read(state.partition)
        if known is not None and _age(known) >= _age(state):
            return
        make_private(self.path)
        self._sweep()
        section = Snapshot(self._cluster_id, self._topic_id, state)
        file, value = self.file_of(state.partition), to_file_bytes(section)
        write_file(file, value, is_durable=self._is_durable)

    def discard(self, state: KeptState) -> None:
        """Remove a state that does not fit the log, if it is still stored."""
        known = self._read(state.partition)
        if known == state:
            with suppress(OSError):
                self.file_of(state.partition).unlink()

    def _read(self, partition: int) -> KeptState | None:
        try:
            sections = read_file(self.file_of(partition))
        except (OSError, MalformedRecord):
            return None
        for section in sections:
            names = (section.cluster_id, section.topic_id, section.state.partition)
            if names == (self._cluster_id, self._topic_id, partition):
                return section.state
        return None

    def _sweep(self) -> None:
        """Remove temporary files of processes that were killed."""
        before_s = time.time() - LEFTOVER_S
        for path in self.path.glob(".*"):
            with suppress(OSError):
                if path.stat().st_mtime < before_s:
                    path.unlink()


def open_store(
    home: Path | None, cluster_id: str, *, topic_id: bytes | None
) -> SnapshotFolder | None:
    """Return the store of a coordination topic, None for no store.

    For a topic without an id there is no store: it cannot be distinguished from a topic
    that was created again.
    """
    if home is None or topic_id is None:
        return None
    return SnapshotFolder(home, cluster_id=cluster_id, topic_id=topic_id)


def keep_read(follower: Follower, store: StateStore, *, entries_min: int = 1) -> int:
    """Store the states that a follower has folded, so that the next one starts there.

    Args:
        follower: Has read the log, to its end or not.
        store: Where to store the states. States that it cannot store are left out.
        entries_min: Fewest entries, newly read from a partition, to store its state.

    Returns:
        The number of partitions stored.
    """
    count, beside = 0, (*follower.log_start_missing, *follower.unfit)
    for t, replica in follower.replicas.items():
        world = replica.world
        read = world.next_offset - follower.began_at.get(t, 0)
        if read < entries_min or world.halted is not None or t in beside:
            continue
        with suppress(OSError):  # the next follower reads as much again
            notes = replica.notes.of(world)
            store.save(capture(world, source="this process", notes=notes))
            count += 1
    return count


def read_to_end(
    follower: Follower,
    store: StateStore | None,
    *,
    timeout_ms: int,
    note: Callable[[int, LogEntry], None] | None = None,
) -> None:
    """Read the log to its end; if the time is too short, store the states so far.

    Args:
        follower: Reads the log.
        store: Where to store the states; None for nowhere.
        timeout_ms: Limit for the whole call, without the time to store states.
        note: As in ``Follower.catch_up``.

    Raises:
        DeadlineExceeded: The log's end was not reached in time. If states were stored,
            the next call continues there.
    """
    try:
        follower.catch_up(timeout_ms, note=note)
    except DeadlineExceeded as error:
        if store is None or not keep_read(follower, store):
            raise
        raise DeadlineExceeded(
            f"{error}; what was read is stored; repeat the command to continue from "
            "there"
        ) from error


def _age(state: KeptState) -> tuple[int, int]:
    return state.leader_epoch, state.offset
