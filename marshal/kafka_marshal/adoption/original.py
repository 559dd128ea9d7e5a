"""Positions in the coordination topic of the Go original, by its text records.

A record is one line of fields with slashes between them:
``type/version/unix time/instance/client/group/topic/partition``, with the next
offset to process at the end of a Heartbeat and a ReleasingPartition. The format
quotes nothing, so a name with a slash makes a record unreadable; it is counted.
"""

from collections.abc import Iterable

import attrs

from kafka_marshal.protocol.types import OFFSET_MAX, PARTITION_MAX, TopicPartition

_WITH_OFFSET = ("Heartbeat", "ReleasingPartition")
_FIELDS_COUNT = 9
# The original's heartbeat interval is fixed; it counts an owner dead after two.
_LIVE_S = 2 * 60


@attrs.define
class OriginalGroup:
    """What the original's topic says of one group.

    Attributes:
        offsets: Next offset to process of each partition, by its last record.
        beats: Unix time of the last heartbeat of each partition still held.
        unreadable_count: Records that could not be read, of any group.
    """

    offsets: dict[TopicPartition, int] = attrs.field(factory=dict)
    beats: dict[TopicPartition, int] = attrs.field(factory=dict)
    unreadable_count: int = 0

    def is_active(self, now_s: int) -> bool:
        """Return whether somebody has beaten so lately that it counts as alive."""
        return any(now_s - beat_s < _LIVE_S for beat_s in self.beats.values())


def read_group(values: Iterable[bytes | None], group_id: str) -> OriginalGroup:
    """Fold the records of one coordinating partition, in log order."""
    group = OriginalGroup()
    for value in values:
        try:
            _fold(group, (value or b"").decode(), group_id)
        except ValueError:
            group.unreadable_count += 1
    return group


def merged(groups: Iterable[OriginalGroup]) -> OriginalGroup:
    """Return what several coordinating partitions say together."""
    whole = OriginalGroup()
    for group in groups:
        whole.offsets |= group.offsets
        whole.beats |= group.beats
        whole.unreadable_count += group.unreadable_count
    return whole


def _fold(group: OriginalGroup, text: str, group_id: str) -> None:
    kind, *rest = text.split("/")
    if kind not in _WITH_OFFSET:
        if kind not in ("ClaimingPartition", "ClaimingMessages", "ReleaseGroup"):
            raise ValueError(kind)
        return
    if len(rest) != _FIELDS_COUNT - 1:
        raise ValueError(text)
    _version, time_s, _instance, _client, group_name, topic, number, offset = rest
    place = TopicPartition(topic, _whole(number, PARTITION_MAX))
    position = _whole(offset, OFFSET_MAX)
    beat_s = _whole(time_s, OFFSET_MAX)
    if group_name != group_id:
        return
    group.offsets[place] = position
    group.beats.pop(place, None)
    if kind == "Heartbeat":
        group.beats[place] = beat_s


def _whole(text: str, most: int) -> int:
    # Not int() alone: it takes signs, spaces and underscores.
    if not (text.isascii() and text.isdecimal()) or int(text) > most:
        raise ValueError(text)
    return int(text)
