"""Finds the newest checkpoint of each T in the log (PROTOCOL 7.2, 7.3).

Read backwards from the log's end, in windows that grow, and without folding: only
the headers of values are looked at until an End is found, which names its Begin.
"""

from collections.abc import Iterator, Mapping

from kafka_marshal.errors import CoordinationError
from kafka_marshal.ports import CoordinationLog, LogRange
from kafka_marshal.protocol.checkpoints import Assembly
from kafka_marshal.protocol.codec import decode, header_of
from kafka_marshal.protocol.records import CheckpointEnd
from kafka_marshal.protocol.types import LogEntry

from .restoring import POLL_MS, POLLS_MAX, KeptState, KeptStates

WINDOW_MIN = 2_000
WINDOW_GROWTH = 8
WINDOW_MAX = 500_000
# Beyond this many entries a log that is there from its start on is folded from
# there instead: reading it twice would take longer.
SEARCHED_MAX = 2_000_000
_END = header_of(CheckpointEnd)


class LogCheckpoints:
    """The checkpoints that stand in the log itself: ``restoring.KeptStates``.

    Args:
        only: Id of the one that is looked for; None for the newest.
        is_last_resort: Whether to look only where the log's start is gone: what is
            soft, such as members, does not stand in checkpoints, and who only
            looks wants to see it.
    """

    def __init__(
        self, only: bytes | None = None, *, is_last_resort: bool = False
    ) -> None:
        self._only = only
        self._is_last_resort = is_last_resort

    def find(
        self, wanted: Mapping[int, LogRange], *, log: CoordinationLog, timeout_ms: int
    ) -> Mapping[int, KeptState]:
        """Return the newest complete checkpoint of each partition that has one.

        Raises:
            CoordinationError: The log did not answer.
        """
        del timeout_ms  # every poll has its own limit, and so has their number
        found: dict[int, KeptState] = {}
        below = {
            t: span.end
            for t, span in wanted.items()
            if span.end > span.start and (span.start or not self._is_last_resort)
        }
        size = WINDOW_MIN
        while below:
            windows = {
                t: LogRange(max(wanted[t].start, end - size), end)
                for t, end in below.items()
            }
            ends = _ends(log, windows, self._only)
            for t, window in windows.items():
                kept = _newest(log, t, ends[t], start=wanted[t].start)
                if kept is not None:
                    found[t] = kept
                is_all = window.start == wanted[t].start
                searched = wanted[t].end - window.start
                gives_up = not wanted[t].start and searched >= SEARCHED_MAX
                if kept is not None or is_all or gives_up:
                    del below[t]
                else:
                    below[t] = window.start
            size = min(size * WINDOW_GROWTH, WINDOW_MAX)
        return found


def has_checkpoints(log: CoordinationLog, *, timeout_ms: int) -> bool:
    """Return whether each T of a log has a checkpoint, or nothing in it."""
    starts, ends = log.start_offsets(timeout_ms), log.end_offsets(timeout_ms)
    wanted = {t: LogRange(starts[t], end) for t, end in ends.items() if end}
    found = LogCheckpoints().find(wanted, log=log, timeout_ms=timeout_ms)
    return found.keys() == wanted.keys()


def kept_in(store: KeptStates | None) -> tuple[KeptStates, ...]:
    """Return where whoever only looks finds states: files, then a log cut short."""
    log = LogCheckpoints(is_last_resort=True)
    return (log,) if store is None else (store, log)


def _ends(
    log: CoordinationLog, windows: Mapping[int, LogRange], only: bytes | None
) -> dict[int, list[CheckpointEnd]]:
    """Return the Ends in these windows, in their order."""
    ends: dict[int, list[CheckpointEnd]] = {t: [] for t in windows}
    for t, entry in _read(log, windows):
        value = entry.value
        if value is not None and value.startswith(_END):
            record = decode(value)
            if not isinstance(record, CheckpointEnd):
                continue
            is_wanted = only is None or record.checkpoint_id == only
            if is_wanted and record.begin_offset < entry.offset:
                ends[t].append(record)
    return ends


def _newest(
    log: CoordinationLog, partition: int, ends: list[CheckpointEnd], *, start: int
) -> KeptState | None:
    """Return the last of these that is complete."""
    for end in reversed(ends):
        if end.begin_offset < start:
            continue
        assembly = Assembly(end)
        # Its chunks are not more than it says, other records between them may be;
        # where the End itself comes, all has been read.
        for _, entry in _read_to(log, partition, end):
            assembly.take(entry)
        value = assembly.state(partition)
        if isinstance(value, bytes):
            return KeptState(
                partition,
                end.begin_offset + 1,
                end.begin_leader_epoch,
                end.digest.hex(),
                value,
                f"checkpoint {end.checkpoint_id.hex()}",
                is_in_log=True,
            )
    return None


def _read_to(
    log: CoordinationLog, partition: int, end: CheckpointEnd
) -> Iterator[tuple[int, LogEntry]]:
    """Yield a checkpoint's entries, and what lies between them."""
    ends = log.end_offsets(POLL_MS * POLLS_MAX)
    for t, entry in _read(
        log, {partition: LogRange(end.begin_offset, ends[partition])}
    ):
        if decode(entry.value) == end:
            return
        yield t, entry


def _read(
    log: CoordinationLog, windows: Mapping[int, LogRange]
) -> Iterator[tuple[int, LogEntry]]:
    """Yield the entries in these windows.

    Raises:
        CoordinationError: Nothing came any more before all were there.
    """
    left = dict(windows)
    log.read_from({t: window.start for t, window in left.items()})
    silent = 0
    while left:
        entries = log.poll(POLL_MS)
        silent = 0 if entries else silent + 1
        if silent > POLLS_MAX:
            raise CoordinationError(
                f"the coordinating partitions {sorted(left)} sent nothing before "
                "their ends; check the brokers with: marshal doctor"
            )
        for t, entry in entries:
            window = left.get(t)
            if window is not None and window.start <= entry.offset < window.end:
                yield t, entry
        places = log.positions()
        for t, window in list(left.items()):
            if places.get(t, 0) >= window.end:
                del left[t]
