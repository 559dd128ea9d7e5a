"""Whether an owner keeps up, as a sans-IO machine over samples (PROTOCOL 1.6).

Rates are signed integers: a rewind counts against the owner. The result is advice to
release a partition; no record is at risk either way.
"""

from collections import deque
from typing import NamedTuple

SAMPLES_MAX = 10
CYCLES_MAX = 3
CATCH_UP_FACTOR = 2
DOUBLINGS_MAX = 8
FORGIVE_LENGTHS = 4
FORGIVE_INTERVALS = 20


class Sample(NamedTuple):
    """A partition's progress at one moment.

    Attributes:
        at_ms: Local time.
        reached: Next offset that the owner processes.
        end: Next offset to be written.
    """

    at_ms: int
    reached: int
    end: int


class LagTrend(NamedTuple):
    """Progress of an owner over several samples.

    Attributes:
        lag: Offsets left at the last sample.
        consumed: Offsets processed between the first and the last sample.
        produced: Offsets written meanwhile.
        span_ms: Time between the first and the last sample, at least 1.
    """

    lag: int
    consumed: int
    produced: int
    span_ms: int

    @property
    def consumed_per_s(self) -> int:
        """Consumption velocity, rounded towards zero."""
        return _per_s(self.consumed, self.span_ms)

    @property
    def produced_per_s(self) -> int:
        """Production velocity, rounded towards zero."""
        return _per_s(self.produced, self.span_ms)

    def keeps_up(self, interval_ms: int) -> bool:
        """Return whether the lag is small or falls.

        A lag is small if it takes less than two intervals at the present rate. An owner
        also keeps up if nothing is consumed or produced: some logs end in offsets
        without a record for readers.
        """
        if self.lag <= 0 or (self.consumed == 0 and self.produced <= 0):
            return True
        near = CATCH_UP_FACTOR * self.consumed * interval_ms
        return self.lag * self.span_ms <= near or self.produced < self.consumed


def _per_s(count: int, span_ms: int) -> int:
    rate = abs(count) * 1_000 // span_ms
    return rate if count >= 0 else -rate


class Health:
    """The last samples of one held partition, and how often in a row it lagged.

    Attributes:
        bad_cycles: Evaluations in a row that found it lagging.
        trend: Figures of the last evaluation, None before the first.
    """

    __slots__ = ("_samples", "bad_cycles", "trend")

    def __init__(self) -> None:
        self.bad_cycles = 0
        self.trend: LagTrend | None = None
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)

    def add(self, sample: Sample, *, interval_ms: int) -> None:
        """Add a sample, and evaluate once there are enough.

        A sample that is not later than the last one is ignored.
        """
        samples = self._samples
        if samples and sample.at_ms <= samples[-1].at_ms:
            return
        samples.append(sample)
        if len(samples) < SAMPLES_MAX:
            return
        first = samples[0]
        self.trend = LagTrend(
            sample.end - sample.reached,
            sample.reached - first.reached,
            sample.end - first.end,
            sample.at_ms - first.at_ms,
        )
        is_well = self.trend.keeps_up(interval_ms)
        self.bad_cycles = 0 if is_well else self.bad_cycles + 1

    @property
    def is_behind(self) -> bool:
        """Whether the partition lagged for enough cycles to be released."""
        return self.bad_cycles >= CYCLES_MAX

    def restart(self) -> None:
        """Drop all samples."""
        self.bad_cycles = 0
        self.trend = None
        self._samples.clear()


def handler_limit_ms(limit_ms: int, *, stuck_count: int) -> int:
    """Return how long a handler may take before its partition is released.

    The limit doubles with each owner in a row that was stuck at the same position. So
    work that takes longer than the limit is finished eventually, and a record that
    hangs every handler moves ever more rarely. 0 = no limit.
    """
    return limit_ms << min(stuck_count, DOUBLINGS_MAX)


def is_stuck(
    quiet_ms: int, *, limit_ms: int, uncommitted_count: int, lag: int | None
) -> bool:
    """Return whether an application has work and no longer polls for it."""
    has_work = uncommitted_count > 0 or (lag is not None and lag > 0)
    return limit_ms > 0 and quiet_ms >= limit_ms and has_work


class Backoff:
    """How long a member that released a partition claims nothing new.

    Each wait is twice the last one, unless the member kept up long enough in between.
    So partitions of a slow member move ever more rarely.

    Attributes:
        until_ms: Local time until which it claims nothing; 0 = it never released.
    """

    __slots__ = ("_length_ms", "_strikes", "_struck_ms", "until_ms")

    def __init__(self) -> None:
        self.until_ms = 0
        self._strikes = 0
        self._struck_ms = 0
        self._length_ms = 0

    def strike(self, now_ms: int, *, interval_ms: int) -> None:
        """Record a release; several within one interval count as one."""
        if self._strikes and now_ms < self._struck_ms + interval_ms:
            return
        forgiven_ms = FORGIVE_LENGTHS * self._length_ms
        forgiven_ms += FORGIVE_INTERVALS * interval_ms
        if now_ms > self.until_ms + forgiven_ms:
            self._strikes = 0
        self._length_ms = interval_ms << min(self._strikes, DOUBLINGS_MAX)
        self._strikes += 1
        self._struck_ms = now_ms
        self.until_ms = max(self.until_ms, now_ms + self._length_ms)

    def hold(self, until_ms: int) -> None:
        """Claim nothing new before ``until_ms``, without counting a release."""
        self.until_ms = max(self.until_ms, until_ms)

    def is_on(self, now_ms: int) -> bool:
        """Return whether the member claims nothing new at this local time."""
        return now_ms < self.until_ms
