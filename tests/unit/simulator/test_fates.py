"""The effect of each kind of fault on appends."""

import pytest

from simulator.fakestore import AppendFate
from simulator.fates import KINDS, Fates, Window

H_MS = 10_000


def fates(latency_ms=0):
    return Fates(1, h_ms=H_MS, latency_ms=latency_ms)


def test_an_append_without_faults_has_only_latency():
    assert fates().of_append("a", 0) == AppendFate()
    delays = {
        fates.of_append("a", 0).delay_ms for fates in [fates(20)] for _ in range(99)
    }
    assert min(delays) >= 0
    assert 0 < max(delays) <= 20


@pytest.mark.parametrize(
    ("kind", "is_hit"),
    [
        ("delay", lambda fate: 0 < fate.delay_ms <= H_MS // 2 + 1),
        ("late", lambda fate: 0 < fate.fails_after_ms <= H_MS // 2 + 1),
        ("loss", lambda fate: fate.is_lost),
        ("mute", lambda fate: fate.is_lost),
        ("copies", lambda fate: fate.copies == 2),
        ("slow", lambda fate: fate.replicates_ms > 0),
    ],
)
def test_each_kind_of_fault_affects_the_appends_of_its_writer(kind, is_hit):
    made, window = fates(), Window(kind, "a", 1.0)
    made.open(window)
    assert is_hit(made.of_append("a", 0))
    assert made.of_append("b", 0) == AppendFate()
    made.close(window)
    made.close(window)
    assert made.of_append("a", 0) == AppendFate()


def test_every_kind_of_fault_is_tested():
    assert {"delay", "late", "loss", "mute", "copies", "slow"} == KINDS


def test_healing_ends_all_faults():
    made = fates()
    made.open(Window("loss", None, 1.0))
    assert made.of_append("anybody", 0).is_lost
    made.heal()
    assert not made.of_append("anybody", 0).is_lost


def test_a_fault_does_not_change_the_latency_drawn_later():
    plain, troubled = fates(1_000), fates(1_000)
    window = Window("loss", "a", 1.0)
    troubled.open(window)
    plain.of_append("a", 0)
    troubled.of_append("a", 0)
    troubled.close(window)
    assert plain.of_append("a", 0) == troubled.of_append("a", 0)


def test_a_fault_may_be_limited_to_one_partition():
    made = fates()
    made.open(Window("mute", None, 1.0, 1))
    assert made.of_append("a", 1).is_lost
    assert made.of_append("a", 0) == AppendFate()
