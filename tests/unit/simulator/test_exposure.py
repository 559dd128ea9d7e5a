"""Repeated hand-outs need a truncation, a reset or a set position as their cause."""

import pytest

from kafka_marshal.protocol.types import Key
from simulator.checkers import Violation
from simulator.exposure import Cuts, Exposures
from simulator.node import Cluster

KEY = Key("g", "t", 0)
PLACE = KEY, b"id"


def handed_twice(*, late=False):
    """Return exposures of an offset handed out to a, and to b after a truncation.

    If late, that to b is recorded first.
    """
    exposures = Exposures()
    hands = [("a", 0), ("b", 1)]
    for name, cuts in reversed(hands) if late else hands:
        exposures.on_handed(name, PLACE, offset=4, cuts=cuts)
    return exposures


def test_offsets_handed_out_once_need_no_report():
    exposures = Exposures()
    for offset in range(3):
        exposures.on_handed("a", PLACE, offset=offset, cuts=0)
    exposures.judge()
    assert exposures.excused_count == 0


def test_a_second_hand_out_without_a_truncation_is_a_violation():
    exposures = Exposures()
    exposures.on_handed("a", PLACE, offset=4, cuts=1)
    with pytest.raises(Violation, match="S3"):
        exposures.on_handed("b", PLACE, offset=4, cuts=1)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_an_unreported_repeat_after_a_truncation_is_a_violation(late):
    exposures = handed_twice(late=late)
    with pytest.raises(Violation, match=r"7\.5.*handed out to a and.*to b"):
        exposures.judge()
    exposures.on_reported(KEY, first=5, last=9)
    with pytest.raises(Violation):
        exposures.judge()
    exposures.on_reported(KEY, first=2, last=4)
    exposures.judge()
    assert exposures.excused_count == 0


@pytest.mark.parametrize(("settled", "is_excused"), [(0, True), (1, False)])
def test_a_process_that_ended_before_it_could_report_is_excused(settled, is_excused):
    exposures = handed_twice()
    exposures.on_ended("a", KEY, cuts=settled)
    if is_excused:
        exposures.judge()
    else:
        with pytest.raises(Violation):
            exposures.judge()
    assert exposures.excused_count == is_excused


FIRST, SECOND = (b"first", 2), (b"second", 0)


def hand(exposures, *hands):
    """Hand out one offset under each set of truncations and set positions."""
    for name, cuts, sets in hands:
        exposures.on_handed(name, PLACE, offset=4, cuts=cuts, sets=sets)


@pytest.mark.parametrize("cuts", [0, 1])
def test_a_set_position_lets_offsets_be_handed_out_again(cuts):
    exposures = Exposures()
    hand(exposures, ("a", 0, ()), ("b", cuts, (FIRST,)), ("c", 1, (FIRST, SECOND)))
    exposures.judge()


def hand_by_resets(exposures, *hands):
    """Hand out one offset under claims made after the given resets."""
    for name, cuts, heads in hands:
        exposures.on_handed(name, PLACE, offset=4, cuts=cuts, resets=heads)


@pytest.mark.parametrize("cuts", [0, 1], ids=["in-the-log", "lost"])
def test_a_reset_lets_offsets_be_handed_out_again(cuts):
    exposures = Exposures()
    hand_by_resets(exposures, ("a", 0, ()), ("b", cuts, (4,)), ("c", cuts, (4, 3)))
    exposures.judge()


@pytest.mark.parametrize("heads", [(5,), ()], ids=["below-its-head", "without"])
def test_a_repeat_below_or_without_a_reset_is_a_violation(heads):
    exposures = Exposures()
    hand_by_resets(exposures, ("a", 0, ()))
    with pytest.raises(Violation, match="S3"):
        hand_by_resets(exposures, ("b", 0, heads))


def test_a_repeat_after_the_same_reset_is_a_violation():
    exposures = Exposures()
    hand_by_resets(exposures, ("a", 0, ()), ("b", 0, (3,)))
    with pytest.raises(Violation, match="S3"):
        hand_by_resets(exposures, ("c", 0, (3,)))


def test_an_unreported_repeat_after_a_reset_is_a_violation():
    exposures = Exposures()
    hand_by_resets(exposures, ("a", 0, (3,)), ("b", 1, (3,)))
    with pytest.raises(Violation, match=r"7\.5"):
        exposures.judge()


def test_a_repeat_after_the_same_set_position_is_a_violation():
    exposures = Exposures()
    hand(exposures, ("a", 0, ()), ("b", 0, (FIRST,)))
    with pytest.raises(Violation, match="S3"):
        hand(exposures, ("c", 0, (FIRST,)))


def test_a_repeat_by_a_claim_before_a_set_position_is_a_violation():
    exposures = Exposures()
    hand(exposures, ("a", 0, (FIRST,)))
    with pytest.raises(Violation, match="S3"):
        hand(exposures, ("b", 0, ()))


@pytest.mark.parametrize("now", [(), (FIRST,)], ids=["lost", "set-again"])
def test_a_repeat_after_a_lost_set_position_must_be_reported(now):
    exposures = Exposures()
    hand(exposures, ("a", 0, (FIRST,)), ("b", 1, now))
    with pytest.raises(Violation, match=r"7\.5.*handed out to a and.*to b"):
        exposures.judge()


def test_a_lost_set_position_does_not_excuse_earlier_hand_outs():
    exposures = Exposures()
    hand(exposures, ("a", 0, ()), ("b", 0, (FIRST,)), ("c", 1, ()))
    exposures.on_ended("b", KEY, cuts=0)
    with pytest.raises(Violation, match=r"7\.5.*handed out to a and.*to c"):
        exposures.judge()


def test_processed_offsets_are_kept_per_set_position():
    exposures = Exposures()
    exposures.on_processed(PLACE, offset=1, sets=())
    exposures.on_processed(PLACE, offset=3, sets=(FIRST,))
    assert exposures.processed(PLACE, ()) == {1}
    assert exposures.processed(PLACE, (FIRST,)) == {0, 1, 3}
    assert exposures.processed(PLACE, (FIRST, SECOND)) == set()
    assert exposures.processed_by_any(PLACE) == {1, 3}
    assert exposures.processed_by_any((KEY, None)) == set()


def test_a_process_knows_a_truncation_once_it_reads_the_new_epoch():
    cluster, cuts = Cluster(), Cuts()
    node = cluster.node("a")
    cuts.on_noticed(node, 0)
    assert cuts.is_known(node, 0)
    place = cluster.place(0)
    cluster.kafka.produce(place, b"lost")
    cluster.run(100)
    cluster.kafka.truncate(place, end=1, leader=1)
    cuts.on_cut(0, cluster.kafka.log(place).leader_epoch)
    assert (cuts.known_to(node, 0), cuts.count(0)) == (0, 1)
    cluster.kafka.produce(place, b"new")
    cluster.run(1_000)
    assert cuts.is_known(node, 0)


def test_a_process_knows_a_truncation_that_it_has_noticed():
    cluster, cuts = Cluster(), Cuts()
    node = cluster.node("a")
    cuts.on_cut(0, 3)
    assert not cuts.is_known(node, 0)
    cuts.on_noticed(node, 0)
    assert cuts.is_known(node, 0)
