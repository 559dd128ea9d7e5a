"""The offsets that a consumer may seek to (PROTOCOL 6.6)."""

from collections.abc import Callable, Iterable, Mapping

from kafka_marshal.errors import PositionError
from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.types import TopicPartition


def offsets_within(
    wanted: Iterable[TopicPartition],
    ranges: Mapping[TopicPartition, LogRange],
    *,
    choose: Callable[[LogRange], int],
) -> dict[TopicPartition, int]:
    """Return the chosen offset of each partition, which its log has or ends at.

    Beyond the end the claim would be released and not taken again (PROTOCOL 5.6).

    Args:
        wanted: The partitions.
        ranges: Start and end of their logs.
        choose: Returns the offset for a log.

    Raises:
        PositionError: A partition does not exist, or its log does not have the offset.
    """
    return {each: _within(each, ranges.get(each), choose) for each in wanted}


def _within(
    partition: TopicPartition,
    found: LogRange | None,
    choose: Callable[[LogRange], int],
) -> int:
    offset = choose(found or LogRange(0, 0))
    if found is not None and found.start <= offset <= found.end:
        return offset
    has = "does not exist"
    if found is not None:
        has = f"has the offsets {found.start} to {found.end}"
    raise PositionError(
        f"{partition} {has}, so it cannot seek to {offset}; its position is unchanged",
        requested=offset,
        log_start=-1 if found is None else found.start,
        log_end=-1 if found is None else found.end,
        partition=partition,
    )
