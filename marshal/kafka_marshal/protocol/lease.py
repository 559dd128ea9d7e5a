"""Until when a claim may be used, by the local clock alone (PROTOCOL 5.2)."""

import attrs

MARGIN_MS_MIN = 50


@attrs.frozen
class Lease:
    """Until when to hand out (soft) and to go on at all (hard), in local ms."""

    soft_until_ms: int
    hard_until_ms: int

    @classmethod
    def since(cls, base_ms: int, heartbeat_interval_ms: int) -> "Lease":
        """Return the lease of a renewal that was **sent** at ``base_ms``.

        PROTOCOL 5.2: 2H less 0.1 % of drift, less a margin for what a leader's
        clock may step.
        """
        span_ms = 2 * heartbeat_interval_ms
        drift_ms = -(-span_ms // 1000)
        margin_ms = max(MARGIN_MS_MIN, -(-span_ms // 20))
        hard_ms = max(0, span_ms - drift_ms - margin_ms)
        return cls(base_ms + min(heartbeat_interval_ms, hard_ms), base_ms + hard_ms)


NO_LEASE = Lease(-1, -1)
