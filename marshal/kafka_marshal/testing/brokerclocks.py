"""Wall clocks of simulated brokers, with offsets, drifts and steps."""

import attrs

from kafka_marshal.ports import Clock

_MILLION = 1_000_000


@attrs.define
class _Hand:
    """One broker's clock relative to true time, from a moment on."""

    ahead_ms: int = 0
    drift_ppm: int = 0
    since_ms: int = 0

    def ahead_at(self, at_ms: int) -> int:
        return self.ahead_ms + (at_ms - self.since_ms) * self.drift_ppm // _MILLION


class BrokerClocks:
    """The wall clocks for timestamps by leaders."""

    def __init__(self, clock: Clock) -> None:
        """Start with exact clocks."""
        self._clock = clock
        self._hands: dict[int, _Hand] = {}

    def wall_ms(self, broker: int, at_ms: int) -> int:
        """Return a broker's wall clock at a moment of true time."""
        wall_ms = self._clock.wall_ms() - (self._clock.now_ms() - at_ms)
        hand = self._hands.get(broker)
        return wall_ms if hand is None else wall_ms + hand.ahead_at(at_ms)

    def ahead_ms(self, broker: int) -> int:
        """Return by how much a broker's clock is ahead of true time now."""
        hand = self._hands.get(broker)
        return 0 if hand is None else hand.ahead_at(self._clock.now_ms())

    def set_ahead(self, broker: int, ahead_ms: int) -> None:
        """Step a broker's clock to be ahead by ``ahead_ms`` now."""
        hand = self._hands.setdefault(broker, _Hand())
        hand.ahead_ms, hand.since_ms = ahead_ms, self._clock.now_ms()

    def set_drift(self, broker: int, drift_ppm: int) -> None:
        """Let a broker's clock run faster from now on, or slower below 0.

        Args:
            broker: The broker.
            drift_ppm: Parts per million.
        """
        ahead_ms = self.ahead_ms(broker)
        self._hands[broker] = _Hand(ahead_ms, drift_ppm, self._clock.now_ms())
