"""Reading and appending by hand: what tests of the coordination log share."""

from collections.abc import Callable

from slowness import until

from kafka_marshal.errors import MarshalError
from kafka_marshal.ports import CoordinationLog

TIMEOUT_MS = 30_000
# What may pass on a busy machine; clients that keep no time wait longer by default.
LATE_S = 8.0


def read(log: CoordinationLog, count: int, *, timeout_s: float = 60) -> list:
    found: list = []

    def has_all() -> bool:
        found.extend(log.poll(100))
        return len(found) >= count

    until(has_all, timeout_s=timeout_s)
    return found


def fails(call: Callable[[], object], kind: type[MarshalError]) -> MarshalError:
    """Call until it raises; return what it raised."""
    caught: list[MarshalError] = []

    def is_refused() -> bool:
        try:
            call()
        except kind as error:
            caught.append(error)
        return bool(caught)

    until(is_refused)
    return caught[0]


def sent(log: CoordinationLog, value: bytes, *, partition: int = 0) -> bool:
    append = log.append(partition, value)
    until(append.is_done)
    return append.error() is None
