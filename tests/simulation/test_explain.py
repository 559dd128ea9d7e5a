"""Answers about the past of simulated fleets, against independent accounts.

The expected answers come not from the fold, the historian or the chain, but from the
processes (which was handed records, under which token), from admins (the positions that
they set), from the appended records, and from the naive twin's verdicts.
"""

import random
from collections import Counter

import pytest
import slices
from msgspec import structs
from naive import ANYTHING, Naive

from kafka_marshal.clock import instant
from kafka_marshal.history import chain as chain_of
from kafka_marshal.history import wording
from kafka_marshal.history.chain import KeyChain
from kafka_marshal.history.historian import Historian
from kafka_marshal.history.reading import fold_run
from kafka_marshal.history.wording import state_of, why
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.text import entry_to_object
from simulator import simulate as simulation
from simulator.operation_judge import HAND_OUT, OK
from simulator.plan import DAMAGE, FAULTS, KEPT, LEVELS, MINUTE_MS, POSITIONS, draw
from simulator.world import World

QUESTIONS = slices.slice_of(quick=500, full=1_000)
SEEDS = range(9_000, slices.slice_of(quick=9_007, full=9_024))
MOMENTS, SAMPLES = 8, 3
# The twin knows neither the records of checkpoints and Resets nor other levels.
KINDS = [name for name in FAULTS if name not in {*KEPT, *LEVELS, DAMAGE}]


class Story:
    """One simulated fleet: its logs, the actions of its processes, answers about it."""

    def __init__(self, seed, monkeypatch):
        self.rng = random.Random(seed)
        kinds = [name for name in KINDS if self.rng.random() < 0.5]
        self.world = run(seed, [*kinds, POSITIONS], monkeypatch)
        self.asked = Counter()
        self.places = {}
        for number in range(self.world.plan.coordinators):
            place = self.world.cluster.place(number)
            records = self.world.cluster.kafka.log(place).records
            entries = [record.entry() for record in records]
            for key in self.world.keys_of(number):
                self.places[key] = Truth(number, entries, key)

    def ask(self):
        for key, truth in self.places.items():
            moments = self.rng.sample(
                range(len(truth.entries)), min(MOMENTS, len(truth.entries))
            )
            chain = truth.follow(frozenset(moments), self.asked)
            self.ask_why_it_moved(truth, chain)
            self.ask_who_was_refused(truth, chain)
            self.ask_who_worked(key, chain)
            self.ask_what_was_set(key, truth, chain)
        return self.asked

    def some(self, found):
        return self.rng.sample(found, min(SAMPLES, len(found)))

    def ask_why_it_moved(self, truth, chain):
        claims = {claim.token.offset: claim for claim in chain.claims}
        assert list(claims) == [change["offset"] for change in truth.won]
        for change in self.some(truth.won):
            claim = claims[change["offset"]]
            owner = (claim.client_id, claim.incarnation.hex())
            assert owner == change["owner"], change
            assert claim.ending == change["ending"], change
            if change["ending"] == "open":
                assert claim.end is None
            else:
                assert claim.end.offset == change["until"], change
                assert claim.ended_by == change["by"], change
            if change["is_release"]:
                assert claim.reason == change["reason"], change
            # The same record may have ended a pause before it was judged.
            at = [e for e in chain.events if e.offset == change["offset"]]
            assert (at[-1].what, at[-1].owner) == (change["what"], change["before"])
            self.asked["moved"] += 1

    def ask_who_was_refused(self, truth, chain):
        events = [
            e
            for e in chain.events
            if e.what == "refused" and e.record == "ClaimingPartition"
        ]
        assert sum(e.count for e in events) == len(truth.refused)
        for offset, client_id, reason, owner in self.some(truth.refused):
            (event,) = [
                e
                for e in events
                if e.offset <= offset <= e.last_offset
                and (e.client_id, e.reason) == (client_id, reason)
            ]
            assert event.owner == owner
            self.asked["refused"] += 1

    def ask_who_worked(self, key, chain):
        """Check that the process handed records under a token owned the key with it."""
        worked = [
            each
            for each in self.world.chronicle.operations
            if each.kind == HAND_OUT and each.outcome == OK and each.key == key
        ]
        claims = {claim.token: claim for claim in chain.claims}
        for operation in self.some(worked):
            claim = claims[operation.token]
            assert self.world.name_of(claim.incarnation) == operation.process
            self.asked["worked"] += 1

    def ask_what_was_set(self, key, truth, chain):
        events = {e.op_id: e for e in chain.events if e.what == "position_set"}
        assert {op.hex(): e.position for op, e in events.items()} == truth.moved
        for op_id, operation in self.world.positions.operations.items():
            if key not in operation.targets:
                assert op_id not in events
                continue
            assert (op_id in events) == (key in operation.moved)
            if op_id in events:
                assert events[op_id].position == operation.targets[key]
                assert events[op_id].before == operation.moved[key]
            self.asked["set"] += 1


class Truth:
    """The account of one key by the twin and the appended records."""

    def __init__(self, number, entries, key):
        self.number, self.entries, self.key = number, entries, key
        self.won, self.refused, self.moved = [], [], {}
        self.paused_by = {}

    def follow(self, moments, asked):
        """Fold the log with both folds, compare at some moments; return the chain."""
        twin, chain = Naive(self.number), KeyChain(self.key)
        world = WorldState(self.number)
        for index, entry in enumerate(self.entries):
            line = entry_to_object(self.number, entry)
            before = self.owner(twin)
            found = twin.apply(line)
            if found != ANYTHING:
                for transition in found:
                    self.note(line, transition, before, after=self.owner(twin))
            fold_run(chain, world, entries=[entry])
            if index in moments:
                self.compare(twin, chain, world)
                asked["owner"] += 1
        return chain

    def owner(self, twin):
        state = twin.keys.get(tuple(self.key))
        return None if state is None else state["owner"]

    def note(self, line, transition, before, *, after):
        named = transition["key"]
        if transition["effect"] == "paused":
            data = line["payload"]["data"]
            self.paused_by.setdefault(data["op_id"], data["client_id"])
        if named is None or tuple(named.values()) != tuple(self.key):
            return
        payload = line["payload"]
        kind, data = payload["type"], payload["data"]
        effect, offset = transition["effect"], line["offset"]
        if kind == "ClaimingPartition" and effect is None:
            owner = None if before is None else before[0]
            at = (offset, data["client_id"], transition["reason"], owner)
            self.refused.append(at)
            return
        if effect == "position_set":
            self.moved[data["op_id"]] = transition["detail"]["position"]
        if effect in {"claimed", "resumed"}:
            is_taken = effect == "claimed" and before is not None
            if before is not None:
                ending = "taken_over" if is_taken else "resumed"
                self.end(ending, offset, data["client_id"])
            self.won.append(
                {
                    "offset": offset,
                    "owner": (data["client_id"], data["incarnation"]),
                    "what": "taken_over" if is_taken else effect,
                    "before": None if before is None else before[0],
                    "ending": "open",
                    "until": None,
                    "by": None,
                    "is_release": False,
                    "reason": None,
                }
            )
        elif before is not None and after is None and self.won[-1]["until"] is None:
            self.end("released", offset, data["client_id"])
            if kind == "ReleasingPartition":
                self.won[-1] |= {"is_release": True, "reason": data["reason"]}

    def end(self, ending, offset, by):
        self.won[-1] |= {"ending": ending, "until": offset, "by": by}

    def compare(self, twin, chain, world):
        """Compare the owner and state of the key in the answer with the twin's."""
        state = twin.keys.get(tuple(self.key))
        text, word = why(chain, world), state_of(chain, world)
        paused = twin.pauses.get(self.key.group_id)
        assert ("the group is paused" in text) == (paused is not None), text
        if paused is not None:
            # Another admin may have renewed it since.
            by = self.paused_by[paused["op_id"]]
            assert f"until {instant(paused['until'])} by {by}" in text
        if state is None:
            assert word == "unclaimed", text
        elif state["lock"] is not None:
            assert word == "locked"
            assert f"operation {state['lock']['op_id']} sets the position" in text
        elif state["owner"] is None:
            assert word == "free"
            assert text.startswith("free since ")
        else:
            stale = twin.age(state) > 2 * state["h"]
            assert word == ("stale" if stale else "owned"), text
            token = ".".join(map(str, state["token"]))
            assert text.startswith(f"owned by {state['owner'][0]} since "), text
            assert f"(offset {state['epoch']}), token {token}: " in text


def run(seed, kinds, monkeypatch):
    """Run a fleet with these kinds of faults; return its world."""
    worlds = []

    class Kept(World):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            worlds.append(self)

    monkeypatch.setattr(simulation, "World", Kept)
    simulation.run_plan(draw(seed, faults=kinds, duration_ms=3 * MINUTE_MS))
    return worlds[0]


def ask_all(monkeypatch, asked):
    for seed in SEEDS:
        asked += Story(seed, monkeypatch).ask()


@pytest.mark.slow
def test_answers_about_the_past_agree_with_what_happened(monkeypatch, record_property):
    asked = Counter()
    ask_all(monkeypatch, asked)
    record_property("questions", dict(asked))
    assert sum(asked.values()) >= QUESTIONS
    kinds = {"owner", "moved", "refused", "worked", "set"}
    assert {kind for kind, count in asked.items() if count >= 20} == kinds


def without_refusals(monkeypatch):
    monkeypatch.setattr(KeyChain, "_unsuccessful", lambda *_, **__: None)


def with_takeovers_as_claims(monkeypatch):
    monkeypatch.setattr(chain_of, "TAKEN", "claimed")


def with_the_last_owner_of_a_free_key(monkeypatch):
    monkeypatch.setattr(wording, "FREE", wording.OWNED)


def without_reasons(monkeypatch):
    released = Historian._released

    def nameless(self, world, track, *, record, at):
        nameless_record = structs.replace(record, reason="?")
        return released(self, world, track, record=nameless_record, at=at)

    monkeypatch.setattr(Historian, "_released", nameless)


def without_pauses(monkeypatch):
    monkeypatch.setattr(wording, "is_paused", lambda *_: False)


@pytest.mark.parametrize(
    "plant",
    [
        without_refusals,
        with_takeovers_as_claims,
        with_the_last_owner_of_a_free_key,
        without_reasons,
        without_pauses,
    ],
)
def test_each_kind_of_wrong_answer_fails_the_comparison(monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        ask_all(monkeypatch, Counter())
