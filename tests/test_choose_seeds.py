"""The choice of a few seeds that reach every situation and fault."""

import json

import choose_seeds
from choose_seeds import choose, main

from simulator.campaign import Broken, Outcome

REACHED = {1: {"a", "b"}, 2: {"a"}, 3: {"c", "b"}, 4: {"a", "b", "c"}}


def test_seeds_that_reach_every_name_at_the_least_cost_are_chosen():
    dear = {1: 2, 2: 1, 3: 2, 4: 9}
    assert choose(REACHED, dear, times=1) == [1, 3]
    assert choose(REACHED, dear | {4: 1}, times=1) == [4]


def test_each_name_is_reached_as_often_as_required_or_possible():
    same = dict.fromkeys(REACHED, 1)
    assert choose(REACHED, same, times=2) == [1, 3, 4]
    assert choose(REACHED, same, times=9) == [1, 2, 3, 4]


def outcome(seed, _):
    broken = Broken(seed=seed, invariant="S4", message="", faults=()) if seed else None
    seen = {"claimed": 1, "nothing that is asked for": 1}
    return Outcome(broken=broken, seen=seen, faults={}, virtual_ms=1, cpu_ms=seed)


def test_the_chosen_seeds_are_printed(monkeypatch, capsys):
    monkeypatch.setattr(choose_seeds, "judge", outcome)
    assert main(["--seeds", "0:1"]) == 0
    assert json.loads(capsys.readouterr().out) == [0]


def test_a_seed_that_breaks_a_rule_is_named(monkeypatch, capsys):
    monkeypatch.setattr(choose_seeds, "judge", outcome)
    assert main(["--seeds", "0:3"]) == 1
    assert "[1, 2]" in capsys.readouterr().err
