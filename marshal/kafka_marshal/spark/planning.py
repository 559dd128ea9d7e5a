"""How much one batch takes of each partition, and into how many tasks it is cut.

Pure: the same rules as in Spark's own Kafka source.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import attrs

from kafka_marshal.protocol.types import TopicPartition

from .offsets import Stretch

Span = tuple[int, int]


@attrs.frozen
class Limit:
    """How much one batch takes.

    Attributes:
        most: Most offsets, None = no limit.
        least: Fewest that are worth a batch, None = any.
    """

    most: int | None = None
    least: int | None = None


def within(
    spans: Mapping[TopicPartition, Span], most: int
) -> dict[TopicPartition, int]:
    """Return where each partition ends so that about ``most`` offsets are taken.

    Each gets a share in proportion to what waits there, and at least one offset: none
    is starved by another's backlog.

    Args:
        spans: First offset and end of what waits, by partition.
        most: Most offsets; at least one a partition is taken all the same.
    """
    total = sum(max(0, end - first) for first, end in spans.values())
    if total <= most:
        return {partition: end for partition, (_, end) in spans.items()}
    ends = {}
    for partition, (first, end) in spans.items():
        share = most * max(0, end - first) / total
        whole = math.ceil(share) if share < 1 else math.floor(share)
        ends[partition] = min(end, first + whole)
    return ends


def cut(stretches: Sequence[Stretch], least: int, *, most: int = 0) -> list[Stretch]:
    """Cut stretches so that there are at least ``least`` of them, where they can be.

    Larger ones are cut into more parts. Parts are as long as each other, but for one
    offset, and have ``most`` offsets at most; 0 is no limit.
    """
    if most:
        stretches = [
            part
            for each in stretches
            for part in _parts(each, math.ceil((each.end - each.first) / most))
        ]
    if not stretches or len(stretches) >= least:
        return list(stretches)
    total = sum(each.end - each.first for each in stretches)
    found: list[Stretch] = []
    for each in stretches:
        size = each.end - each.first
        found += _parts(each, min(size, max(1, round(size / total * least))))
    return found


def _parts(stretch: Stretch, count: int) -> list[Stretch]:
    """Cut a stretch into some parts that are as long as each other."""
    size = stretch.end - stretch.first
    edges = [stretch.first + size * at // count for at in range(count + 1)]
    return [stretch._replace(first=first, end=end) for first, end in pairwise(edges)]
