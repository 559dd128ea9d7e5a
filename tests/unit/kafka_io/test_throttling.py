"""Delays by quotas are logged once a minute; the longest is kept."""

import logging

from kafka_marshal.kafka_io.throttling import REPEATED_AFTER_S, Throttling


def test_throttling_is_logged_at_most_once_a_minute(caplog):
    now_s = [5.0]
    throttling = Throttling(clock_s=lambda: now_s[0])
    with caplog.at_level(logging.WARNING, logger="kafka_marshal"):
        for delay_ms in (0, 99.9, 700, 2_000):
            throttling.note("broker 1", delay_ms)
        now_s[0] += REPEATED_AFTER_S
        throttling.note("broker 2", 1_200)
    first, second = caplog.messages
    assert first.startswith("throttled: broker 1 delays requests by 700 ms")
    assert "kafka-configs --describe" in first
    assert second.startswith("throttled: broker 2 delays requests by 1200 ms")
    assert throttling.longest_ms == 2_000
