"""The arithmetic of a lease, at exact milliseconds."""

import pytest

from kafka_marshal.protocol.lease import (
    NO_LEASE,
    Freshness,
    Lease,
    freshness,
    is_stale,
)


@pytest.mark.parametrize(
    ("heartbeat_interval_ms", "soft_ms", "hard_ms"),
    [
        pytest.param(60_000, 105_000, 120_000 - 120 - 6_000, id="default"),
        pytest.param(2_000, 3_500, 4_000 - 4 - 200, id="demo"),
        pytest.param(1_001, 1_751, 2_002 - 3 - 101, id="rounds-against-the-holder"),
        pytest.param(1_000, 1_750, 2_000 - 2 - 100, id="one-second"),
        pytest.param(501, 876, 1_002 - 2 - 51, id="margin-rounded-up"),
        pytest.param(500, 875, 1_000 - 1 - 50, id="margins-meet"),
        pytest.param(200, 349, 400 - 1 - 50, id="least-margin"),
        pytest.param(40, 29, 80 - 1 - 50, id="soft-is-never-after-hard"),
        pytest.param(10, 0, 0, id="too-short-to-hold"),
        pytest.param(1, 0, 0, id="shortest"),
    ],
)
def test_lease_deadlines_count_from_the_send_time(
    heartbeat_interval_ms, soft_ms, hard_ms
):
    for base_ms in (0, 1, 7_000_000):
        lease = Lease.since(base_ms, heartbeat_interval_ms)
        assert lease.soft_until_ms == base_ms + soft_ms
        assert lease.hard_until_ms == base_ms + hard_ms


def test_claims_that_one_record_renews_share_a_lease():
    assert Lease.since(5, 1_000) is Lease.since(5, 1_000)
    assert Lease.since(5, 1_000) != Lease.since(6, 1_000)


def test_no_lease_has_deadlines_in_the_past():
    assert NO_LEASE.soft_until_ms < 0
    assert NO_LEASE.hard_until_ms < 0


# --- freshness


H = 1_000
AGES = [
    pytest.param(-(2**63), Freshness.FRESH, id="far in the future"),
    pytest.param(-1, Freshness.FRESH, id="negative"),
    pytest.param(0, Freshness.FRESH, id="just renewed"),
    pytest.param(H - 1, Freshness.FRESH, id="H - 1"),
    pytest.param(H, Freshness.UNKNOWN, id="H"),
    pytest.param(2 * H - 1, Freshness.UNKNOWN, id="2H - 1"),
    pytest.param(2 * H, Freshness.UNKNOWN, id="2H"),
    pytest.param(2 * H + 1, Freshness.STALE, id="2H + 1"),
    pytest.param(2**63, Freshness.STALE, id="long gone"),
]


@pytest.mark.parametrize(("age", "expected"), AGES)
def test_freshness_follows_the_age_of_the_renewal(age, expected):
    assert freshness(age, H) is expected


@pytest.mark.parametrize(("age", "expected"), AGES)
def test_is_stale_agrees_with_freshness(age, expected):
    assert is_stale(age, H) == (expected is Freshness.STALE)


def test_freshness_has_the_names_of_the_world_document():
    assert [one.value for one in Freshness] == ["fresh", "unknown", "stale"]


def test_freshness_is_exact_for_an_interval_of_one_millisecond():
    ages = [freshness(age, 1).value for age in range(4)]
    assert ages == ["fresh", "unknown", "unknown", "stale"]
