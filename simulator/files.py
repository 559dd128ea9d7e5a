"""Files of kept states on the hosts of a simulated world, and damage to them.

The files are those of the product, in a folder that is deleted with the world. A
process may start from a file that its host kept, but never from a damaged file, or
from one of another log (PROTOCOL 7.1).
"""

import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs

from kafka_marshal.engine.kept_states import KeptState
from kafka_marshal.engine.snapshotter import capture
from kafka_marshal.ports import Event
from kafka_marshal.protocol.snapshot import from_bytes
from kafka_marshal.snapshots import (
    Snapshot,
    SnapshotFolder,
    read_sections,
    to_file_bytes,
)

FAR = 10**6
FLIPS_MAX = 8
TAIL_BYTES_MAX = 40

Damage = Callable[[bytes, random.Random], bytes]


def _cut(value: bytes, rng: random.Random) -> bytes:
    return value[: rng.randrange(len(value))]


def _flip(value: bytes, rng: random.Random) -> bytes:
    bent = bytearray(value)
    for at in rng.sample(range(len(value)), rng.randint(1, FLIPS_MAX)):
        bent[at] ^= 1 << rng.randrange(8)
    return bytes(bent)


def _lengthen(value: bytes, rng: random.Random) -> bytes:
    return value + rng.randbytes(rng.randint(1, TAIL_BYTES_MAX))


def _overwrite(value: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(len(value))


def _section(value: bytes) -> Snapshot:
    (section,) = read_sections(value, source="a file to be damaged")
    return section


def _of_another_cluster(value: bytes, rng: random.Random) -> bytes:
    del rng
    return to_file_bytes(attrs.evolve(_section(value), cluster_id="another"))


def _of_another_topic(value: bytes, rng: random.Random) -> bytes:
    return to_file_bytes(attrs.evolve(_section(value), topic_id=rng.randbytes(16)))


def _with_another_digest(value: bytes, rng: random.Random) -> bytes:
    section = _section(value)
    state = attrs.evolve(section.state, digest=rng.randbytes(16).hex())
    return to_file_bytes(attrs.evolve(section, state=state))


def _of_another_epoch(value: bytes, rng: random.Random) -> bytes:
    """Return the state of a log that diverged from this one, and is as long."""
    section = _section(value)
    world = from_bytes(section.state.state)
    world.leader_epoch = (world.leader_epoch or 0) + rng.randint(1, 9)
    state = capture(world, source=section.state.source)
    return to_file_bytes(attrs.evolve(section, state=state))


def _of_a_longer_log(value: bytes, rng: random.Random) -> bytes:
    section = _section(value)
    world = from_bytes(section.state.state)
    world.next_offset += FAR + rng.randrange(FAR)
    state = capture(world, source=section.state.source)
    return to_file_bytes(attrs.evolve(section, state=state))


DAMAGES: Mapping[str, Damage] = {
    "cut off": _cut,
    "changed": _flip,
    "lengthened": _lengthen,
    "overwritten": _overwrite,
    "of another cluster": _of_another_cluster,
    "of another topic": _of_another_topic,
    "with another digest": _with_another_digest,
    "of another leader epoch": _of_another_epoch,
    "of a longer log": _of_a_longer_log,
}
"""The kinds of damage to a file."""


class HostFiles:
    """The folders of all hosts, each as one client uses it.

    Attributes:
        misled: The process that began from a damaged file, None if there is none.
    """

    def __init__(self, *, cluster_id: str, topic_id: bytes) -> None:
        """Create a folder for all hosts; ``close`` removes it."""
        self.misled: str | None = None
        self._home = Path(tempfile.mkdtemp(prefix="marshal-simulated-"))
        self._names = (cluster_id, topic_id)
        self._damaged: dict[Path, bytes] = {}

    def close(self) -> None:
        """Remove all folders."""
        shutil.rmtree(self._home, ignore_errors=True)

    def folder(self, client_id: str) -> SnapshotFolder:
        """Return the folder of a client's processes; each client is its own host."""
        cluster_id, topic_id = self._names
        # Files here need not survive a loss of power.
        return SnapshotFolder(
            self._home / client_id,
            cluster_id=cluster_id,
            topic_id=topic_id,
            is_durable=False,
        )

    def save(self, client_id: str, state: KeptState) -> None:
        """Save a state, as a process of a client does."""
        self.folder(client_id).save(state)

    def damage(self, client_id: str, number: int, *, rng: random.Random) -> str | None:
        """Damage a host's file of a partition; return how, None without such a file."""
        path = self.folder(client_id).file_of(number)
        if not path.exists() or self._is_damaged(path):
            return None
        value = path.read_bytes()
        name = rng.choice(list(DAMAGES))
        bent = DAMAGES[name](value, rng)
        path.write_bytes(bent)
        self._damaged[path] = bent
        return name

    def is_hurt(self, client_id: str) -> bool:
        """Return whether a file of a host is damaged now."""
        folder = self.folder(client_id).path
        mine = [path for path in self._damaged if path.parent == folder]
        return any(map(self._is_damaged, mine))

    def observe(self, client_id: str, event: Event) -> None:
        """Note from the events of an engine the state that it begins from."""
        if event.name != "restored":
            return
        path = self.folder(client_id).file_of(event.fields["partition"])
        if event.fields["source"] == str(path) and self._is_damaged(path):
            at = event.fields["offset"]
            self.misled = f"{client_id} began at {at}, from a damaged {path.name}"

    def _is_damaged(self, path: Path) -> bool:
        """Return whether a file is damaged and was not replaced since."""
        bent = self._damaged.get(path)
        return bent is not None and path.exists() and path.read_bytes() == bent
