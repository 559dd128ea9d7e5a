"""Changes of the partition count that a partition has lost (PROTOCOL 10.9)."""

from hashlib import blake2b

import msgspec
import pytest
from logkit import H, Log, config, layout_done, layout_fence, layout_final

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.lost_changes import (
    LostChange,
    count_before,
    keeps_state,
    lost_before,
    lost_by,
    lost_change,
    restored_op,
    unclaimed,
)
from kafka_marshal.protocol.state import WorldState


def ended(before=2, after=4):
    """Return the logs of a change that has ended in all of them."""
    logs = {t: Log(t, configured=t < before, k=before, level=2) for t in range(4)}
    for t, log in logs.items():
        assert log.outcome_of(layout_fence(after, before)) == "layout_fenced"
        for source in log.state.layout.sources:
            log.append(layout_done(0, source=source.partition))
        assert log.outcome_of(layout_final()) == "layout_final"
        assert log.state.partition == t
    return logs


def lost_of(logs):
    return lost_change({t: log.state for t, log in logs.items()})


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
@pytest.mark.parametrize("t", [0, 1])
def test_a_partition_that_lacks_the_last_change(before, after, t):
    logs = ended(before, after)
    assert lost_of(logs) is None
    newest = logs[t].state.config
    logs[t] = Log(t, k=before, level=2)
    lost = lost_of(logs)
    assert (lost.from_count, lost.config) == (before, newest)
    frame = encode(newest)
    assert lost.op_id == blake2b(frame, digest_size=16).digest() == restored_op(newest)


def test_partition_0_is_needed():
    logs = ended()
    del logs[0]
    assert lost_of(logs) is None
    logs[0] = Log(0, configured=False)
    assert lost_of(logs) is None


def test_others_may_not_have_what_is_open_in_partition_0():
    logs = {t: Log(t, configured=t < 2, k=2, level=2) for t in range(4)}
    logs[0].append(layout_fence(4, 2))
    assert lost_of(logs) is None


def test_what_is_not_in_use_has_lost_nothing():
    logs = ended(4, 2)
    logs[3] = Log(3, k=4, level=2)
    assert lost_of(logs) is None


def test_several_partitions_one_after_the_other():
    """Those with the larger count first: no fence of another count reaches these."""
    logs = ended(4, 2)
    logs = {t: logs[t] for t in (0, 1)}
    logs[0].append(layout_fence(8, 2, generation=3, era=3))
    logs[0].append(layout_final())
    del logs[1]
    logs |= {1: Log(1, k=2, level=2), 3: Log(3, k=4, level=2)}
    assert lost_of(logs).from_count == 4
    del logs[3]
    assert lost_of(logs).from_count == 2


@pytest.mark.parametrize("k", [2, 4, 8])
@pytest.mark.parametrize("t", [2, 3])
def test_one_that_the_change_brought_into_use_begins_again(k, t):
    """PROTOCOL 10.2: of its earlier life, of whatever count, nothing is kept."""
    logs = ended(2, 4)
    logs[t] = Log(t, k=k, level=2)
    assert lost_of(logs).from_count == 2


@pytest.mark.parametrize("gone", [(2,), (2, 3)])
def test_what_nothing_shows_to_have_come_into_use_keeps_its_state(gone):
    """Its count is that of the newest Config: it has lost several changes."""
    logs = ended(2, 4)
    logs[1] = Log(1, k=4, level=2)
    assert lost_of(logs) is None
    for t in gone:
        logs[t] = Log(t, k=4, level=2)
    found = lost_by({t: log.state for t, log in logs.items()})
    assert found == ({2: 2} if gone == (2,) else {})


def test_others_of_another_log_show_nothing():
    logs = ended(2, 4)
    logs[3] = Log(3, k=4, level=2)
    logs[2] = Log(2, k=4, level=2, format_id=b"x" * 16)
    assert lost_of(logs) is None
    logs[2] = Log(2, configured=False)
    assert lost_of(logs) is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"k": 2}, {1}),
        ({"k": 4}, {1}),
        ({"k": 3}, {1}),
        ({"k": 4, "h": 7_000}, set()),
        ({"k": 4, "format_id": b"x" * 16}, set()),
    ],
)
def test_nothing_is_claimed_where_changes_are_lost(settings, expected):
    """One or several; a change of other settings may be on its way."""
    logs = ended(2, 4)
    states = {t: log.state for t, log in logs.items()}
    assert unclaimed(states) == set()
    states[1] = Log(1, **({"level": 2} | settings)).state
    states[9] = Log(9, k=2, level=2).state
    states[3] = Log(3, configured=False).state
    assert unclaimed(states) == expected
    logs[0].append(layout_fence(8, 4, generation=3, era=3))
    assert unclaimed(states) == set()
    states[0] = Log(0, configured=False).state
    assert unclaimed(states) == set()
    assert unclaimed({}) == set()


def test_where_the_count_has_not_changed_claims_go_on():
    """Partition 1 lacks two changes of other settings, which come to the same."""
    logs = {t: Log(t, k=4, level=2) for t in range(3)}
    for t, generation in ((0, 2), (0, 3), (2, 3)):
        h = 7_000 if generation == 2 else H
        record = config(generation, era=generation, k=4, level=2, h=h)
        assert logs[t].outcome_of(record) == "configured"
    states = {t: log.state for t, log in logs.items()}
    assert unclaimed(states) == set()
    retired = Log(4, k=4, level=2)
    assert unclaimed({**states, 4: retired.state}) == {1}
    other = Log(4, k=4, level=2, format_id=b"x" * 16)
    assert unclaimed({**states, 4: other.state}) == set()
    assert unclaimed({**states, 4: WorldState(4)}) == set()


def test_the_change_before_the_one_that_is_open():
    logs = ended(2, 4)
    states = {t: log.state for t, log in logs.items()}
    before = logs[1].state.config
    assert lost_before({}) == lost_before(states) == {}
    logs[0].append(layout_fence(8, 4, generation=3, era=3))
    assert lost_before(states) == {}
    for t, k in ((1, 2), (3, 4)):
        states[t] = Log(t, k=k, level=2).state
    found = LostChange(restored_op(before), 2, before)
    assert lost_before(states) == {1: found, 3: found}
    assert lost_by(states) == {}
    del states[0]
    assert lost_before(states) == {}
    states[0] = Log(0, configured=False).state
    assert lost_before(states) == {}


def test_what_leads_to_the_newest_config():
    newest = ended()[0].state.config
    before = Log(0, k=2, level=2).state.config
    assert count_before(1, before, newest=newest) == 2
    assert count_before(4, before, newest=newest) is None
    assert count_before(1, None, newest=newest) is None
    assert count_before(1, newest, newest=newest, from_count=1) is None
    assert count_before(1, before, newest=newest, from_count=1) == 1
    for changes in (
        {"generation": newest.generation},
        {"format_id": b"x" * 16},
        {"partition_count": 4},
        {"partition_count": 3},
    ):
        other = msgspec.structs.replace(before, **changes)
        assert count_before(1, other, newest=newest) is None


def test_a_fence_of_another_count_drops_no_keys():
    """PROTOCOL 10.2: a partition at or above the count begins with the fence."""
    config = Log(0, k=4, level=2).state.config
    assert keeps_state(3, config, from_count=2)
    assert not keeps_state(3, config, from_count=4)
    assert not keeps_state(5, config, from_count=2)
    assert not keeps_state(3, None, from_count=2)
    assert keeps_state(5, config, from_count=8)
