import pytest

from kafka_marshal.protocol.health import (
    CYCLES_MAX,
    DOUBLINGS_MAX,
    SAMPLES_MAX,
    Backoff,
    Health,
    LagTrend,
    Sample,
    handler_limit_ms,
    is_stuck,
)

H = 1_000


# --- LagTrend ---


@pytest.mark.parametrize(
    ("lag", "consumed", "produced", "keeps_up"),
    [
        pytest.param(0, 0, 100, True, id="at-the-end"),
        pytest.param(-5, 0, 100, True, id="beyond-the-end-we-knew"),
        pytest.param(200, 100, 500, True, id="two-intervals-away"),
        pytest.param(201, 100, 500, False, id="one-more-and-falling-behind"),
        pytest.param(10**9, 101, 100, True, id="far-and-gaining"),
        pytest.param(10**9, 100, 100, False, id="far-and-not-gaining"),
        pytest.param(10**9, 100, 101, False, id="far-and-losing"),
        pytest.param(10**9, 100, 0, True, id="a-backlog-and-nothing-new"),
        pytest.param(5, 0, 0, True, id="nothing-moves"),
        pytest.param(5, 0, 1, False, id="stuck-while-more-comes"),
        pytest.param(5, -1, 0, False, id="a-rewind-is-no-progress"),
        pytest.param(500, -100, -200, True, id="a-rewind-of-less-than-was-cut"),
        pytest.param(500, 300, -10, True, id="a-log-that-was-cut"),
    ],
)
def test_an_owner_keeps_up_if_it_is_near_the_end_or_gains(
    lag, consumed, produced, keeps_up
):
    assert LagTrend(lag, consumed, produced, H).keeps_up(H) is keeps_up


def test_velocities_are_per_second_and_signed():
    trend = LagTrend(0, 150, -150, 2_000)
    assert (trend.consumed_per_s, trend.produced_per_s) == (75, -75)
    assert LagTrend(0, -1, 1, 3_000).consumed_per_s == 0


def test_the_span_of_a_trend_does_not_change_the_result():
    for span_ms in (1, 333, 3_333, 10**7):
        assert LagTrend(14, span_ms, 9 * span_ms, span_ms).keeps_up(7) is True
        assert LagTrend(15, span_ms, 9 * span_ms, span_ms).keeps_up(7) is False


# --- Health ---


def run(health, paces, *, step_ms=333, start=(0, 1_000)):
    """Add samples by (consumed, produced) since the last; return bad cycles of each."""
    reached, end = start
    at_ms = 0
    seen = []
    for consumed, produced in paces:
        at_ms += step_ms
        reached, end = reached + consumed, end + produced
        health.add(Sample(at_ms, reached, end), interval_ms=H)
        seen.append(health.bad_cycles)
    return seen


def test_there_is_no_trend_before_ten_samples():
    health = Health()
    assert run(health, [(0, 10)] * (SAMPLES_MAX - 1)) == [0] * (SAMPLES_MAX - 1)
    assert health.trend is None


def test_an_owner_is_behind_after_three_bad_cycles():
    health = Health()
    seen = run(health, [(1, 10)] * (SAMPLES_MAX + CYCLES_MAX - 1))
    assert seen[-3:] == [1, 2, 3]
    assert health.is_behind
    assert not (Health().is_behind)
    two = Health()
    run(two, [(1, 10)] * (SAMPLES_MAX + CYCLES_MAX - 2))
    assert not two.is_behind


def test_one_good_cycle_resets_the_count():
    health = Health()
    seen = run(health, [(1, 10)] * (SAMPLES_MAX + 1) + [(2_000, 0), *[(1, 10)] * 2])
    assert seen[-5:] == [1, 2, 0, 0, 0]
    assert not health.is_behind


def test_the_oldest_sample_is_dropped_with_an_early_burst():
    health = Health()
    paces = [(0, 10), (500, 10)] + [(0, 10)] * (SAMPLES_MAX + 2)
    seen = run(health, paces, start=(0, 10_000))
    assert health.trend.consumed == 0
    assert seen[-1] == CYCLES_MAX + 1


def test_a_rewind_counts_against_the_owner():
    """A trend compares the first and the last sample, not the least and the largest."""
    health = Health()
    run(health, [(50, 10)] * 5 + [(-300, 10)] + [(0, 10)] * 6)
    assert health.trend.consumed < 0
    assert health.is_behind


def test_a_sample_that_is_not_later_is_ignored():
    health = Health()
    for _ in range(30):
        health.add(Sample(5, 0, 100), interval_ms=H)
    assert health.trend is None


def test_a_restart_drops_all_samples():
    health = Health()
    run(health, [(1, 10)] * 20)
    health.restart()
    assert (health.bad_cycles, health.trend, health.is_behind) == (0, None, False)
    assert run(health, [(1, 10)] * 9) == [0] * 9


# --- Stuck applications ---


@pytest.mark.parametrize(
    ("quiet_ms", "limit_ms", "count", "lag", "expected"),
    [
        pytest.param(1_000, 1_000, 1, 5, True, id="work-in-hand"),
        pytest.param(1_000, 1_000, 0, 5, True, id="work-waiting"),
        pytest.param(1_000, 1_000, 1, None, True, id="in-hand-and-lag-unknown"),
        pytest.param(999, 1_000, 1, 5, False, id="not-long-enough"),
        pytest.param(9_999, 1_000, 0, 0, False, id="nothing-to-do"),
        pytest.param(9_999, 1_000, 0, None, False, id="nothing-known-to-do"),
        pytest.param(9_999, 0, 1, 5, False, id="no-limit"),
    ],
)
def test_an_application_is_stuck_if_it_is_quiet_with_work_to_do(
    quiet_ms, limit_ms, count, lag, expected
):
    found = is_stuck(quiet_ms, limit_ms=limit_ms, uncommitted_count=count, lag=lag)
    assert found is expected


def test_the_limit_doubles_with_each_owner_stuck_at_the_same_position():
    assert [handler_limit_ms(H, stuck_count=n) for n in range(4)] == [
        H,
        2 * H,
        4 * H,
        8 * H,
    ]
    assert handler_limit_ms(H, stuck_count=10**6) == H << DOUBLINGS_MAX
    assert handler_limit_ms(0, stuck_count=3) == 0


# --- Backoff ---


def test_each_strike_doubles_the_backoff_up_to_a_maximum():
    backoff = Backoff()
    assert not backoff.is_on(0)
    lengths, now_ms = [], 7
    for _ in range(12):
        backoff.strike(now_ms, interval_ms=H)
        lengths.append(backoff.until_ms - now_ms)
        assert backoff.is_on(backoff.until_ms - 1)
        assert not backoff.is_on(backoff.until_ms)
        now_ms = backoff.until_ms + 5 * H
    assert lengths[:4] == [H, 2 * H, 4 * H, 8 * H]
    assert max(lengths) == H << DOUBLINGS_MAX


def test_strikes_during_a_backoff_count_once():
    backoff = Backoff()
    for now_ms in (100, 100, 100 + H - 1):
        backoff.strike(now_ms, interval_ms=H)
    assert backoff.until_ms == 100 + H
    backoff.strike(100 + H, interval_ms=H)
    assert backoff.until_ms == 100 + 3 * H


def test_a_hold_does_not_count_as_a_strike():
    backoff = Backoff()
    backoff.hold(500)
    backoff.hold(100)
    assert backoff.is_on(499)
    assert not backoff.is_on(500)
    backoff.strike(1_000, interval_ms=H)
    assert backoff.until_ms == 1_000 + H


def test_a_backoff_shrinks_after_a_long_time_without_strikes():
    backoff = Backoff()
    backoff.strike(0, interval_ms=H)
    backoff.strike(2 * H, interval_ms=H)
    now_ms = backoff.until_ms + (4 * 2 + 20) * H
    twin = Backoff()
    twin.strike(0, interval_ms=H)
    twin.strike(2 * H, interval_ms=H)
    backoff.strike(now_ms, interval_ms=H)
    assert backoff.until_ms - now_ms == 4 * H
    twin.strike(now_ms + 1, interval_ms=H)
    assert twin.until_ms - now_ms - 1 == H
