"""The plan of who has what: balanced, sticky, within limits, the same for the same."""

import random
from collections import Counter

import pytest

from kafka_marshal.protocol.types import Key
from kafka_marshal.sidecar.placing import Seat, place


def keys(*numbers, topic="t"):
    return [Key("g", topic, number) for number in numbers]


def sizes(placed):
    return dict(Counter(placed.values()))


@pytest.mark.parametrize(
    ("count", "seats", "expected"),
    [
        pytest.param(6, [Seat("a"), Seat("b"), Seat("c")], (2, 2, 2), id="even"),
        pytest.param(7, [Seat("a"), Seat("b"), Seat("c")], (3, 2, 2), id="one-more"),
        pytest.param(7, [Seat("a", 1), Seat("b"), Seat("c")], (1, 3, 3), id="limit"),
        pytest.param(7, [Seat("a", 0), Seat("b", 2), Seat("c")], (0, 2, 5), id="full"),
        pytest.param(7, [Seat("a", 1), Seat("b", 2), Seat("c", 1)], (1, 2, 1), id="no"),
        pytest.param(1, [Seat("c"), Seat("b"), Seat("a")], (1, 0, 0), id="by-name"),
        pytest.param(3, [], (0, 0, 0), id="nobody"),
        pytest.param(0, [Seat("a")], (0, 0, 0), id="nothing"),
    ],
)
def test_shares(count, seats, expected):
    placed = place(keys(*range(count)), seats, present={})
    assert tuple(sizes(placed).get(name, 0) for name in "abc") == expected


def test_whoever_has_something_keeps_it():
    present = dict.fromkeys(keys(0, 1, 2, 3), "a") | dict.fromkeys(keys(4, 5), "b")
    placed = place(keys(*range(6)), [Seat("a"), Seat("b")], present=present)
    moved = {key for key in present if placed[key] != present[key]}
    assert sizes(placed) == {"a": 3, "b": 3}
    assert moved == set(keys(3)), "the last goes"


def test_what_was_a_strangers_is_free():
    present = dict.fromkeys(keys(0, 1), "gone")
    assert sizes(place(keys(0, 1), [Seat("a")], present=present)) == {"a": 2}


def test_whole_topics_stay_together():
    wanted = keys(0, 1, 2) + keys(0, 1, topic="u") + keys(0, topic="v")
    present = {Key("g", "t", 1): "b", Key("g", "u", 0): "b"}
    placed = place(
        wanted, [Seat("a"), Seat("b", 2)], present=present, whole_topics=True
    )
    by_topic = {key.topic: set() for key in wanted}
    for key, name in placed.items():
        by_topic[key.topic].add(name)
    assert by_topic == {"t": {"b"}, "u": {"b"}, "v": {"a"}}


def test_any_plan_is_fair_sticky_and_comes_to_rest():
    chance = random.Random(7)
    for _ in range(300):
        wanted = keys(*range(chance.randint(0, 20)))
        seats = [
            Seat(name, chance.choice([None, None, 0, 1, 5]))
            for name in "abcd"[: chance.randint(0, 4)]
        ]
        had = chance.sample(wanted, chance.randint(0, len(wanted)))
        present = {key: chance.choice("abcdx") for key in had}
        placed = place(wanted, seats, present=present)
        counts = sizes(placed)
        room = sum(len(wanted) if s.most is None else s.most for s in seats)
        assert len(placed) == min(len(wanted), room)
        limits = {s.name: s.most for s in seats if s.most is not None}
        assert all(counts.get(name, 0) <= most for name, most in limits.items())
        open_seats = [s.name for s in seats if s.most is None]
        shares = [counts.get(name, 0) for name in open_seats]
        assert max(shares, default=0) - min(shares, default=0) <= 1
        assert place(wanted, seats, present=placed) == placed
        shuffled = chance.sample(wanted, len(wanted))
        assert place(shuffled, seats[::-1], present=present) == placed
