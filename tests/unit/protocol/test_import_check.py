"""Imports that differ from the state of their source."""

import msgspec
import pytest
from changekit import Change
from logkit import H, fold, imported, layout_done, layout_import

from kafka_marshal.protocol import import_check
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.import_check import Divergence, ImportCheck
from kafka_marshal.protocol.layout import digest_of, item_of, moving_keys
from kafka_marshal.protocol.rationalizer import apply


class Bench:
    """A change with one moving key, and a check of what is imported."""

    def __init__(self, before=2, after=4):
        self.check = ImportCheck()
        self.change = Change(before, after)
        (self.key,) = self.change.moving()
        self.change.claimed(self.key)
        self.change.fence()
        self.source = self.change.place(self.key)
        self.target = self.change.target(self.key)

    def append(self, record):
        transitions = self.target.append(record)
        self.check.take(self.target.state, transitions)
        return transitions[0]

    def imports(self, *, at=None, **changes):
        known = self.source.key(self.key)
        item = msgspec.structs.replace(item_of(self.key, known), **changes)
        offset = self.source.state.next_offset if at is None else at
        record = layout_import(item, source=self.source.state.partition)
        return msgspec.structs.replace(record, source_offset=offset)

    def done(self, count, **changes):
        record = layout_done(count, source=self.source.state.partition)
        offset = self.source.state.next_offset
        return msgspec.structs.replace(record, source_offset=offset, **changes)

    def found(self, worlds=None):
        states = self.change.states
        known = {s.partition: s for s in states} if worlds is None else worlds
        return list(self.check.compare(known))


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_an_import_equal_to_its_source_is_no_difference(before, after):
    bench = Bench(before, after)
    bench.change.released(bench.key, position=5)
    bench.append(bench.imports())
    assert bench.check.is_waiting
    assert bench.found() == []
    assert not bench.check.is_waiting
    assert moving_keys(bench.source.state) == [bench.key]
    items = [item_of(bench.key, bench.source.key(bench.key))]
    assert bench.append(bench.done(1, digest=digest_of(items))).effect == "layout_done"
    bench.check.take(bench.target.state, ())
    assert bench.found() == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"position": 4}, "the source has left the key in another state"),
        ({"granted": 9}, "the source has left the key in another state"),
        ({"successor": "c9"}, "the source has left the key in another state"),
    ],
)
def test_an_import_with_other_fields_is_a_difference(changes, why):
    bench = Bench()
    bench.change.released(bench.key, position=5)
    transition = bench.append(bench.imports(**changes))
    assert bench.found() == [
        Divergence(
            bench.target.state.partition,
            transition.offset,
            bench.source.state.partition,
            bench.key,
            why,
        )
    ]
    assert bench.found() == []


def test_an_import_of_a_non_final_or_unknown_key_is_a_difference():
    bench = Bench()
    bench.append(bench.imports())
    (found,) = bench.found()
    assert found.why == "the key may still change in the source"
    change = bench.change
    places = [(change.place(key), change.target(key)) for key in change.moving(9)]
    index = places.index((bench.source, bench.target), 1)
    other = change.moving(9)[index]
    record = layout_import(imported(other), source=bench.source.state.partition)
    bench.append(msgspec.structs.replace(record, source_offset=0))
    (found,) = bench.found()
    assert (found.key, found.why) == (other, "the source does not know the key")


def test_the_check_waits_until_the_source_is_read_up_to_the_import():
    bench = Bench()
    bench.change.tick(3 * H)
    bench.append(bench.imports(at=bench.source.state.next_offset + 1, position=7))
    assert bench.found() == []
    assert bench.check.is_waiting
    bench.source.append(b"")
    assert len(bench.found()) == 1


def test_an_unknown_source_or_one_that_ended_the_change_is_not_compared():
    bench = Bench()
    bench.change.tick(3 * H)
    bench.append(bench.imports(position=7))
    assert bench.found({}) == []
    assert not bench.check.is_waiting
    bench = Bench()
    bench.change.tick(3 * H)
    bench.append(bench.imports(position=7))
    bench.change.done()
    bench.change.final()
    assert bench.found() == []


def test_a_done_with_another_digest_is_a_difference():
    bench = Bench()
    bench.change.tick(3 * H)
    bench.append(bench.imports())
    assert bench.found() == []
    bench.append(bench.done(1))  # with another digest
    (found,) = bench.found()
    assert (found.key, found.offset) == (None, bench.target.entries[-1].offset)
    assert "1 keys that move here" in found.why


def test_refused_and_repeated_imports_are_not_compared():
    bench = Bench()
    bench.change.released(bench.key, position=5)
    bench.append(bench.imports())
    assert bench.append(bench.imports(position=9)).reason == "known"
    other = bench.imports(position=9)
    other = msgspec.structs.replace(other, op_id=bytes(16))
    assert bench.append(other).reason == "layout"
    assert bench.append(bench.done(5)).reason == "incomplete"
    assert bench.found() == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"position": 9}, "the source has left the key in another state"),
        ({"partition": None}, "the source does not know the key"),
    ],
)
def test_a_source_read_past_its_final_is_still_compared(changes, why):
    bench = Bench()
    bench.change.released(bench.key, position=5)
    if "partition" in changes:
        places = [(bench.change.place(k), bench.change.target(k)) for k in others()]
        at = places.index((bench.source, bench.target))
        changes = {"partition": others()[at].partition}
    record = bench.imports(**changes)
    bench.change.imported(bench.key)
    bench.change.done()
    for log in bench.change.logs:
        bench.check.keep(log.state)
    done = bench.target.entries[-1]
    target = fold(bench.target.entries[:1], bench.target.state.partition)
    bench.change.final()
    entry = msgspec.structs.replace(done, offset=1, value=encode(record))
    bench.check.take(target, apply(target, entry))
    assert [each.why for each in bench.found()] == ([] if why is None else [why])
    entry = msgspec.structs.replace(done, offset=2)
    bench.check.take(target, apply(target, entry))
    assert bench.found() == []


def others():
    """Return keys that move, other than the one of the bench."""
    return Change(2, 4).moving(9)[1:]


def test_a_key_that_is_not_final_in_the_kept_source_is_a_difference():
    bench = Bench()
    record = bench.imports()
    bench.check.keep(bench.source.state)
    bench.append(record)
    bench.source.state.layout = None
    (found,) = bench.found()
    assert found.why == "the key may still change in the source"


def test_the_number_of_kept_sources_is_limited(monkeypatch):
    monkeypatch.setattr(import_check, "KEPT_MAX", 1)
    bench = Bench()
    bench.change.released(bench.key, position=5)
    bench.append(bench.imports(position=9))
    bench.check.keep(bench.source.state)
    other = next(s for s in bench.change.states[:2] if s is not bench.source.state)
    bench.check.keep(other)
    bench.change.imported()
    bench.change.done()
    bench.change.final()
    assert bench.found() == []


def test_an_import_before_the_fence_of_its_source_is_a_difference():
    change, check = Change(2, 4), ImportCheck()
    (key,) = change.moving()
    change.claimed(key)
    source, target = change.place(key), change.target(key)
    change.fence(target.state.partition)
    record = layout_import(imported(key), source=source.state.partition)
    record = msgspec.structs.replace(record, source_offset=0)
    check.take(target.state, target.append(record))
    (found,) = check.compare({s.partition: s for s in change.states})
    assert found.why == "the change had not reached the source"
