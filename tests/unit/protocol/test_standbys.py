"""Which members stand by for a key: by digest, over distinct hosts."""

import json
from pathlib import Path

import pytest

from kafka_marshal.protocol.standbys import Candidate, standbys_of
from kafka_marshal.protocol.types import Key

VECTORS = json.loads(Path(__file__).with_name("standbys_vectors.json").read_text())
KEY = Key("g", "t", 0)


def order(members, *, owner="o", host="h0", key=KEY):
    """Return the standbys of a key among members, given as names and hosts."""
    candidates = [Candidate(name, at, len(members)) for name, at in members]
    return standbys_of(key, owner=owner, host=host, candidates=candidates)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_the_order_of_standbys_equals_the_vectors(vector):
    """Members of different releases compute the same standbys."""
    found = standbys_of(
        Key(*vector["key"]),
        owner=vector["owner"],
        host=vector["host"],
        candidates=[Candidate(*each) for each in vector["candidates"]],
    )
    assert list(found) == vector["standbys"]


def test_each_host_comes_once_before_any_comes_twice():
    members = [(f"{host}{n}", host) for host in ("h1", "h2", "h3") for n in range(3)]
    for number in range(20):
        found = order(members, key=Key("g", "t", number))
        assert len(found) == 9
        assert {name[:2] for name in found[:3]} == {"h1", "h2", "h3"}


def test_members_on_the_owners_host_come_last():
    members = [("a", "h0"), ("b", "h1"), ("c", "h1"), ("d", "h0")]
    for number in range(20):
        found = order(members, key=Key("g", "t", number))
        assert set(found[:2]) == {"b", "c"}


def test_the_owner_does_not_stand_by_for_itself():
    assert order([("o", "h0"), ("p", "h1")]) == ("p",)
    assert order([("o", "h0")]) == ()


def test_a_member_stands_by_only_within_the_number_it_announced():
    ranked = order([("a", "h1"), ("b", "h2"), ("c", "h3")])
    first, second, third = ranked
    counts = {first: 1, second: 1, third: 3}
    candidates = [Candidate(name, f"h{name}", counts[name]) for name in "abc"]
    found = standbys_of(KEY, owner="o", host="h0", candidates=candidates)
    assert found == (first, third)


def test_a_new_member_keeps_the_order_of_the_other_standbys():
    members = [(name, f"h-{name}") for name in "abcde"]
    for number in range(50):
        key = Key("g", "t", number)
        before = order(members, key=key)
        after = order([*members, ("f", "h-f")], key=key)
        assert tuple(name for name in after if name != "f") == before


def test_first_standbys_are_spread_evenly_over_members():
    members = [(name, f"h-{name}") for name in "abcd"]
    firsts = [order(members, key=Key("g", "t", number))[0] for number in range(400)]
    assert all(60 < firsts.count(name) < 140 for name in "abcd")
