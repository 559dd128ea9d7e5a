"""The arithmetic of a lease, at exact milliseconds."""

import pytest

from kafka_marshal.protocol.lease import NO_LEASE, Lease


@pytest.mark.parametrize(
    ("heartbeat_interval_ms", "soft_ms", "hard_ms"),
    [
        pytest.param(60_000, 60_000, 120_000 - 120 - 6_000, id="default"),
        pytest.param(2_000, 2_000, 4_000 - 4 - 200, id="demo"),
        pytest.param(1_001, 1_001, 2_002 - 3 - 101, id="rounds-against-the-holder"),
        pytest.param(200, 200, 400 - 1 - 50, id="least-margin"),
        pytest.param(40, 29, 80 - 1 - 50, id="soft-is-never-after-hard"),
        pytest.param(10, 0, 0, id="too-short-to-hold"),
    ],
)
def test_a_lease_counts_from_the_sending(heartbeat_interval_ms, soft_ms, hard_ms):
    for base_ms in (0, 1, 7_000_000):
        lease = Lease.since(base_ms, heartbeat_interval_ms)
        assert lease.soft_until_ms == base_ms + soft_ms
        assert lease.hard_until_ms == base_ms + hard_ms


def test_no_lease_is_over_at_any_time():
    assert NO_LEASE.soft_until_ms < 0
    assert NO_LEASE.hard_until_ms < 0
