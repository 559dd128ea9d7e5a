"""What a consumer wants, and when it looks again."""

import pytest
from enginekit import H, held_by, of, takeovers, wish, world

from kafka_marshal.protocol.records import Heartbeat

STEP_MS = 10


@pytest.mark.parametrize("later_ms", range(0, H // 10, H // 150))
def test_a_dead_owner_is_replaced_as_soon_as_the_log_allows(later_ms):
    """PROTOCOL 11, L1: 2H, jitter and three round trips, whenever policies run."""
    cluster = world()
    dead = cluster.node("a", wish=wish())
    cluster.run_until(held_by(dead, 1), 3 * H)
    cluster.run(later_ms, step_ms=STEP_MS)
    heir = cluster.node("b", wish=wish())
    heir.entropy.below = lambda limit: max(0, limit - 1)  # the longest delays
    cluster.run(H, step_ms=STEP_MS)
    cluster.crash(dead)
    cluster.run_until(held_by(heir, 1), 3 * H, step_ms=STEP_MS)
    (claim,) = takeovers(cluster)
    last_beat = of(cluster, "a", Heartbeat)[-1]
    age_ms = claim.time_ms - last_beat.time_ms
    assert 2 * H < age_ms <= 2 * H + H // 10 + 3 * STEP_MS
