"""Cuts off the end of a log on disk, so that acknowledged records are lost.

This is what a power cut without replicas does, or an unclean election: the topic and
its id stay, the log is shorter, and what is written next has the same offsets again
under a higher leader epoch.
"""

import struct
from pathlib import Path

from kafka_marshal.testing.broker import EmbeddedBroker

# Of a record batch: base offset, length behind it, leader epoch, magic, CRC,
# attributes, offset of the last record less that of the first.
HEAD = struct.Struct(">qiiBIHi")
FRAME_BYTES = 12
MAGIC = 2


def cut_log(broker: EmbeddedBroker, topic: str, partition: int, *, at: int) -> int:
    """Kill the broker, drop an offset and all behind it, and start the broker.

    Whole batches are dropped, also records that were sent in one batch with it.

    Returns:
        Where the log ends then.
    """
    data = broker.log_path.parent / "data"
    folder = data / f"{topic}-{partition}"
    broker.kill()
    (segment,) = folder.glob("*.log")  # tests write less than one
    end, size = _end_below(segment.read_bytes(), at)
    with segment.open("r+b") as file:
        file.truncate(size)
    # All other files about the lost records; the broker rebuilds them.
    for path in [*folder.glob("*.index"), *folder.glob("*.timeindex")]:
        path.unlink()
    for path in [*folder.glob("*.snapshot"), data / "recovery-point-offset-checkpoint"]:
        path.unlink(missing_ok=True)
    broker.restart()
    return end


def _end_below(value: bytes, at: int) -> tuple[int, int]:
    """Return the offset and the place of the batch that holds an offset."""
    place = 0
    while place + HEAD.size <= len(value):
        first, size, _, magic, _, _, last = HEAD.unpack_from(value, place)
        assert magic == MAGIC
        if first <= at <= first + last:
            return first, place
        place += FRAME_BYTES + size
    raise AssertionError(f"the segment has no offset {at}")


def kept_files(home: Path) -> list[Path]:
    """Return the snapshots that are stored below a state directory."""
    return sorted(home.rglob("*.snapshot"))
