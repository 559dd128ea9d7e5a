"""Finds checkpoints of each coordinating partition in the log (PROTOCOL 7.2, 7.3).

The newest checkpoint is searched backwards from the log's end, or from a given offset.
The first checkpoint that remains is searched forwards from the log's start. Both
searches read growing windows and fold nothing: they only examine the headers of values
until an End is found, which names its Begin.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import attrs

from kafka_marshal.errors import CoordinationError
from kafka_marshal.ports import CoordinationLog, LogRange
from kafka_marshal.protocol.checkpoints import Assembly
from kafka_marshal.protocol.codec import decode, header_of
from kafka_marshal.protocol.records import CheckpointEnd
from kafka_marshal.protocol.snapshot import from_bytes
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import LogEntry, TimestampType

from .kept_states import POLL_MS, KeptState, KeptStates, polls_in

WINDOW_MIN = 2_000
WINDOW_GROWTH = 4
# A whole log of up to this length is folded without a search, which would read all of
# it and then begin again at its start.
SHORT_MAX = 2 * WINDOW_MIN
# If members write checkpoints, one is at most 50,000 to 200,000 entries away. On
# average half of the last window is read for nothing.
WINDOW_MAX = 50_000
# A log that still has offset 0 is searched backwards about this many entries: if
# members have written no checkpoint for so long, reading it from its start takes less
# than reading it twice.
SEARCHED_MAX = 200_000
_END = header_of(CheckpointEnd)


class LogCheckpoints(KeptStates):
    """The newest checkpoints in the log, as a source of kept states.

    Args:
        only: Id of the checkpoint to find; None for the newest.
        whole_max: Length up to which a log that still has offset 0 is folded from
            there instead of searched; None: always, for read-only views, which show
            soft state, such as members: checkpoints do not have it.
        before: Per partition, the offset below which the End must lie; by default the
            end of the log.
        fits: Returns whether a state is early enough; if not, an earlier one is
            searched. None: every state is.
    """

    def __init__(
        self,
        only: bytes | None = None,
        *,
        whole_max: int | None = 0,
        before: Mapping[int, int] | None = None,
        fits: Callable[[WorldState], bool] | None = None,
    ) -> None:
        self._only = only
        self._whole_max = whole_max
        self._before = before or {}
        self._fits = fits

    def find(
        self, wanted: Mapping[int, LogRange], *, log: CoordinationLog, timeout_ms: int
    ) -> Mapping[int, KeptState]:
        """Return the newest complete checkpoint of each partition that has one.

        Raises:
            CoordinationError: The log did not answer.
        """
        found: dict[int, KeptState] = {}
        below = {
            t: end
            for t, span in wanted.items()
            if (end := min(span.end, self._before.get(t, span.end))) > span.start
            and not self._is_left(span)
        }
        first = dict(below)
        size = WINDOW_MIN
        while below:
            # At their ends partitions return no entries.
            found_ends = {t: wanted[t].end for t in first.keys() - below.keys()}
            if found_ends:
                log.read_from(found_ends)
            windows = {
                t: LogRange(max(wanted[t].start, end - size), end)
                for t, end in below.items()
            }
            ends = _ends(log, windows, self._only, timeout_ms=timeout_ms)
            newest_first = {t: each[::-1] for t, each in ends.items()}
            found |= _first_whole(
                log, newest_first, wanted, fits=self._fits, timeout_ms=timeout_ms
            )
            for t, window in windows.items():
                is_all = window.start == wanted[t].start
                searched = first[t] - window.start
                gives_up = not wanted[t].start and searched >= SEARCHED_MAX
                if t in found or is_all or gives_up:
                    del below[t]
                else:
                    below[t] = window.start
            size = min(size * WINDOW_GROWTH, WINDOW_MAX)
        return found

    def _is_left(self, span: LogRange) -> bool:
        if span.start:
            return False
        return self._whole_max is None or span.end <= self._whole_max


class RetainedCheckpoints(KeptStates):
    """The first checkpoints of logs whose start is gone, as a source of kept states.

    For readers of the whole remaining log. A log that still has offset 0 needs no
    checkpoint and is not searched.

    Args:
        is_past: Whether an entry is beyond the requested point in time. No entry of a
            partition counts from the first such entry on, and a checkpoint counts
            only if its End comes before it. None: every entry counts.
    """

    def __init__(
        self, *, is_past: Callable[[int, LogEntry], bool] | None = None
    ) -> None:
        self._is_past = is_past

    def find(
        self, wanted: Mapping[int, LogRange], *, log: CoordinationLog, timeout_ms: int
    ) -> Mapping[int, KeptState]:
        """Return the first complete checkpoint of each partition that has one.

        Raises:
            CoordinationError: The log did not answer.
        """
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
            ends = _ends(
                log,
                windows,
                None,
                is_past=self._is_past,
                past=past,
                timeout_ms=timeout_ms,
            )
            found |= _first_whole(log, ends, wanted, timeout_ms=timeout_ms)
            for t, window in windows.items():
                if t in found or t in past or window.end == wanted[t].end:
                    del above[t]
                else:
                    above[t] = window.end
            size = min(size * WINDOW_GROWTH, WINDOW_MAX)
        return found


@attrs.frozen
class FirstKnown:
    """The first moment of a coordinating partition of which the state is known.

    Attributes:
        offset: Offset of the End of the first complete checkpoint.
        time_ms: The latest append time up to there, epoch ms.
    """

    offset: int
    time_ms: int


def first_known(
    log: CoordinationLog, wanted: Mapping[int, LogRange], *, timeout_ms: int
) -> dict[int, FirstKnown]:
    """Return the first known moment of each partition whose log start is missing.

    Partitions without a complete checkpoint are absent. ``timeout_ms`` is the longest
    time without an entry.

    Raises:
        CoordinationError: The log did not answer.
    """
    kept = RetainedCheckpoints().find(wanted, log=log, timeout_ms=timeout_ms)
    latest_ms = {t: from_bytes(each.state).append_time_ms for t, each in kept.items()}
    windows = {t: LogRange(each.offset, wanted[t].end) for t, each in kept.items()}
    found: dict[int, FirstKnown] = {}
    read = entries_in(log, windows, timeout_ms=timeout_ms) if windows else ()
    for t, entry in read:
        if t in found:
            continue
        if entry.timestamp_type == TimestampType.LOG_APPEND_TIME:
            latest_ms[t] = max(latest_ms[t], entry.timestamp_ms)
        value = entry.value
        if value is None or not value.startswith(_END):
            continue
        end = decode(value)
        names = (kept[t].offset - 1, kept[t].digest)
        if isinstance(end, CheckpointEnd) and names == (
            end.begin_offset,
            end.digest.hex(),
        ):
            found[t] = FirstKnown(entry.offset, latest_ms[t])
        if found.keys() == windows.keys():
            break
    return found


def has_checkpoints(log: CoordinationLog, *, timeout_ms: int) -> bool:
    """Return whether each coordinating partition has a checkpoint or is empty."""
    starts, ends = log.start_offsets(timeout_ms), log.end_offsets(timeout_ms)
    wanted = {t: LogRange(starts[t], end) for t, end in ends.items() if end}
    found = LogCheckpoints().find(wanted, log=log, timeout_ms=timeout_ms)
    return found.keys() == wanted.keys()


def kept_in(store: KeptStates | None) -> tuple[KeptStates, ...]:
    """Return the sources for read-only views: files, then checkpoints in the log."""
    log = LogCheckpoints(whole_max=None)
    return (log,) if store is None else (store, log)


def _ends(
    log: CoordinationLog,
    windows: Mapping[int, LogRange],
    only: bytes | None,
    *,
    timeout_ms: int,
    is_past: Callable[[int, LogEntry], bool] | None = None,
    past: set[int] | None = None,
) -> dict[int, list[tuple[int, CheckpointEnd]]]:
    """Return the Ends in these windows with their offsets, in log order.

    Args:
        log: The log.
        windows: Offsets to read, per partition.
        only: Id of the checkpoint to find; None for any.
        timeout_ms: Longest time without an entry.
        is_past: Whether an entry is beyond the requested point in time.
        past: Set to which the partitions with such an entry are added.
    """
    ends: dict[int, list[tuple[int, CheckpointEnd]]] = {t: [] for t in windows}
    beyond = set() if past is None else past
    # ``is_past`` must see every entry, not only those of checkpoints.
    head = _END if is_past is None else None
    for t, entry in entries_in(log, windows, head=head, timeout_ms=timeout_ms):
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
    *,
    timeout_ms: int,
    fits: Callable[[WorldState], bool] | None = None,
) -> dict[int, KeptState]:
    """Return the first complete checkpoint of each partition among these Ends.

    The partitions are read together, because each seek in the log may wait for a
    fetch in progress.

    Args:
        log: The log.
        ends: Ends with their offsets, in the order in which to try them.
        wanted: Offset ranges of the log.
        timeout_ms: Longest time without an entry.
        fits: Returns whether a state is acceptable; None: every state is.
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
        for t, entry in entries_in(log, windows, timeout_ms=timeout_ms):
            assemblies[t].take(entry)
        for t, assembly in assemblies.items():
            value, end = assembly.state(t), assembly.end
            if isinstance(value, bytes) and (fits is None or fits(from_bytes(value))):
                found[t] = KeptState(
                    partition=t,
                    offset=end.begin_offset + 1,
                    leader_epoch=end.begin_leader_epoch,
                    digest=end.digest.hex(),
                    state=value,
                    source=f"checkpoint {end.checkpoint_id.hex()}",
                    is_in_log=True,
                )


def entries_in(
    log: CoordinationLog,
    windows: Mapping[int, LogRange],
    *,
    timeout_ms: int,
    head: bytes | None = None,
) -> Iterator[tuple[int, LogEntry]]:
    """Yield the entries in these windows.

    Args:
        log: The log.
        windows: Offsets to read, per partition.
        timeout_ms: Longest time in which these partitions send nothing, for instance
            since one was cut back; at most 10 s count.
        head: Entries whose value does not begin with this may be left out.

    Raises:
        CoordinationError: The log sent nothing more before the windows were read.
    """
    left = dict(windows)
    silent_max = polls_in(timeout_ms)
    log.read_from({t: window.start for t, window in left.items()})
    silent, before = 0, {t: window.start for t, window in left.items()}
    while left:
        entries = log.poll(POLL_MS) if head is None else log.skim(POLL_MS, head=head)
        for t, entry in entries:
            window = left.get(t)
            if window is not None and window.start <= entry.offset < window.end:
                yield t, entry
        positions = log.positions()
        # Other partitions may send entries all the time.
        at = {t: positions.get(t, 0) for t in left}
        silent = silent + 1 if at == before else 0
        if silent > silent_max:
            raise CoordinationError(
                f"the coordinating partitions {sorted(left)} sent nothing more before "
                "they were read to their ends; check the brokers with: marshal doctor"
            )
        left = {t: window for t, window in left.items() if at[t] < window.end}
        before = {t: at[t] for t in left}
