"""Finds checkpoints of each coordinating partition in the log (PROTOCOL 7.2, 7.3).

The newest checkpoint is searched backwards from the log's end; the first that
remains, or the last before a point in time, forwards from the log's start. Both
searches read growing windows and fold nothing: only the headers of values are
examined until an End is found, which names its Begin.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from kafka_marshal.errors import CoordinationError
from kafka_marshal.ports import CoordinationLog, LogRange
from kafka_marshal.protocol.checkpoints import Assembly
from kafka_marshal.protocol.codec import decode, header_of
from kafka_marshal.protocol.records import CheckpointEnd
from kafka_marshal.protocol.types import LogEntry

from .kept_states import POLL_MS, POLLS_MAX, KeptState, KeptStates

WINDOW_MIN = 2_000
WINDOW_GROWTH = 8
WINDOW_MAX = 500_000
# A log that still has offset 0 is searched backwards this many entries at most: beyond
# that, folding it from its start is faster than reading it twice.
SEARCHED_MAX = 2_000_000
_END = header_of(CheckpointEnd)


class LogCheckpoints:
    """The newest checkpoints in the log, as a source of kept states (``KeptStates``).

    Args:
        only: Id of the checkpoint to find; None for the newest.
        is_last_resort: Whether to search only logs whose start is gone. Checkpoints
            have no soft state, such as members, and read-only views show it.
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
        del timeout_ms  # each poll has a timeout, and the number of polls is limited
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
            newest_first = {t: each[::-1] for t, each in ends.items()}
            found |= _first_whole(log, newest_first, wanted)
            for t, window in windows.items():
                is_all = window.start == wanted[t].start
                searched = wanted[t].end - window.start
                gives_up = not wanted[t].start and searched >= SEARCHED_MAX
                if t in found or is_all or gives_up:
                    del below[t]
                else:
                    below[t] = window.start
            size = min(size * WINDOW_GROWTH, WINDOW_MAX)
        return found


class RetainedCheckpoints:
    """Checkpoints of logs whose start is gone, as a source of kept states.

    For views of the past and for readers of everything that remains. A log that
    still has offset 0 needs none and is not searched.

    Args:
        newest: Whether to return the last checkpoint before the point in time,
            instead of the first that remains.
        is_past: Whether an entry is beyond the requested point in time. No entry of a
            partition counts from the first such entry on, and a checkpoint counts
            only if its End comes before it. None: every entry counts.
    """

    def __init__(
        self,
        *,
        newest: bool = False,
        is_past: Callable[[int, LogEntry], bool] | None = None,
    ) -> None:
        self._newest = newest
        self._is_past = is_past

    def find(
        self, wanted: Mapping[int, LogRange], *, log: CoordinationLog, timeout_ms: int
    ) -> Mapping[int, KeptState]:
        """Return the selected checkpoint of each partition that has one.

        Raises:
            CoordinationError: The log did not answer.
        """
        del timeout_ms  # as above
        found: dict[int, KeptState] = {}
        above = {
            t: span.start
            for t, span in wanted.items()
            if span.start and span.end > span.start
        }
        size = WINDOW_MIN
        while above:
            windows = {
                t: LogRange(first, min(wanted[t].end, first + size))
                for t, first in above.items()
            }
            past: set[int] = set()
            ends = _ends(log, windows, None, is_past=self._is_past, past=past)
            step = -1 if self._newest else 1
            ordered = {t: each[::step] for t, each in ends.items()}
            whole = _first_whole(log, ordered, wanted)
            found |= whole
            for t, window in windows.items():
                is_enough = t in whole and not self._newest
                if is_enough or t in past or window.end == wanted[t].end:
                    del above[t]
                else:
                    above[t] = window.end
            size = min(size * WINDOW_GROWTH, WINDOW_MAX)
        return found


def has_checkpoints(log: CoordinationLog, *, timeout_ms: int) -> bool:
    """Return whether each coordinating partition has a checkpoint or is empty."""
    starts, ends = log.start_offsets(timeout_ms), log.end_offsets(timeout_ms)
    wanted = {t: LogRange(starts[t], end) for t, end in ends.items() if end}
    found = LogCheckpoints().find(wanted, log=log, timeout_ms=timeout_ms)
    return found.keys() == wanted.keys()


def kept_in(store: KeptStates | None) -> tuple[KeptStates, ...]:
    """Return the sources for read-only views: files, then checkpoints in the log."""
    log = LogCheckpoints(is_last_resort=True)
    return (log,) if store is None else (store, log)


def _ends(
    log: CoordinationLog,
    windows: Mapping[int, LogRange],
    only: bytes | None,
    *,
    is_past: Callable[[int, LogEntry], bool] | None = None,
    past: set[int] | None = None,
) -> dict[int, list[tuple[int, CheckpointEnd]]]:
    """Return the Ends in these windows with their offsets, in log order.

    Args:
        log: The log.
        windows: Offsets to read, per partition.
        only: Id of the checkpoint to find; None for any.
        is_past: Whether an entry is beyond the requested point in time.
        past: The partitions that have such an entry are added to it.
    """
    ends: dict[int, list[tuple[int, CheckpointEnd]]] = {t: [] for t in windows}
    beyond = set() if past is None else past
    for t, entry in _read(log, windows):
        if t in beyond:
            continue
        if is_past is not None and is_past(t, entry):
            beyond.add(t)
            continue
        value = entry.value
        if value is not None and value.startswith(_END):
            record = decode(value)
            if not isinstance(record, CheckpointEnd):
                continue
            is_wanted = only is None or record.checkpoint_id == only
            if is_wanted and record.begin_offset < entry.offset:
                ends[t].append((entry.offset, record))
    return ends


def _first_whole(
    log: CoordinationLog,
    ends: Mapping[int, Iterable[tuple[int, CheckpointEnd]]],
    wanted: Mapping[int, LogRange],
) -> dict[int, KeptState]:
    """Return the first complete checkpoint of each partition, of these Ends.

    The partitions are read together, because each seek in the log may wait for a
    fetch in progress.

    Args:
        log: The log.
        ends: Ends with their offsets, in the order in which to try them.
        wanted: Offset ranges of the log.
    """
    untried = {t: iter(each) for t, each in ends.items()}
    found: dict[int, KeptState] = {}
    while True:
        windows: dict[int, LogRange] = {}
        assemblies: dict[int, Assembly] = {}
        for t, each in untried.items():
            readable = (
                (offset, end)
                for offset, end in each
                if t not in found and end.begin_offset >= wanted[t].start
            )
            offset, end = next(readable, (0, None))
            if end is not None:
                windows[t] = LogRange(end.begin_offset, offset)
                assemblies[t] = Assembly(end)
        if not windows:
            return found
        # The End limits the number of chunks, but not of other records among them.
        for t, entry in _read(log, windows):
            assemblies[t].take(entry)
        for t, assembly in assemblies.items():
            value, end = assembly.state(t), assembly.end
            if isinstance(value, bytes):
                found[t] = KeptState(
                    partition=t,
                    offset=end.begin_offset + 1,
                    leader_epoch=end.begin_leader_epoch,
                    digest=end.digest.hex(),
                    state=value,
                    source=f"checkpoint {end.checkpoint_id.hex()}",
                    is_in_log=True,
                )


def _read(
    log: CoordinationLog, windows: Mapping[int, LogRange]
) -> Iterator[tuple[int, LogEntry]]:
    """Yield the entries in these windows.

    Raises:
        CoordinationError: The log sent nothing more before the windows were read.
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
