"""Changes of the partition count that a partition has lost (PROTOCOL 10.9)."""

from hashlib import blake2b

import msgspec
import pytest
from logkit import Log, config, layout_done, layout_fence, layout_final

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.lost_changes import (
    LostChange,
    count_before,
    keeps_state,
    lost_before,
    lost_by,
    lost_change,
    lost_configs,
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
def test_a_partition_without_the_last_change_has_lost_it(before, after, t):
    logs = ended(before, after)
    assert lost_of(logs) is None
    newest = logs[t].state.config
    logs[t] = Log(t, k=before, level=2)
    lost = lost_of(logs)
    assert (lost.from_count, lost.config) == (before, newest)
    frame = encode(newest)
    assert lost.op_id == blake2b(frame, digest_size=16).digest() == restored_op(newest)


def test_no_lost_change_is_concluded_without_partition_0():
    logs = ended()
    del logs[0]
    assert lost_of(logs) is None
    logs[0] = Log(0, configured=False)
    assert lost_of(logs) is None


def test_partitions_without_the_open_change_have_lost_nothing():
    logs = {t: Log(t, configured=t < 2, k=2, level=2) for t in range(4)}
    logs[0].append(layout_fence(4, 2))
    assert lost_of(logs) is None


def test_a_retired_partition_has_lost_nothing():
    logs = ended(4, 2)
    logs[3] = Log(3, k=4, level=2)
    assert lost_of(logs) is None


def test_the_lost_change_from_the_larger_count_comes_first():
    """No fence of another count reaches the partitions above that count."""
    logs = ended(4, 2)
    logs = {t: logs[t] for t in (0, 1)}
    logs[0].append(layout_fence(8, 2, generation=3, era=3))
    logs[0].append(layout_final())
    del logs[1]
    logs |= {1: Log(1, k=2, level=2), 3: Log(3, k=4, level=2)}
    assert lost_of(logs).from_count == 4
    del logs[3]
    assert lost_of(logs).from_count == 2


@pytest.mark.parametrize("k", [2, 8])
@pytest.mark.parametrize("t", [2, 3])
def test_a_partition_that_the_change_brought_into_use_begins_again(k, t):
    """PROTOCOL 10.2: it keeps nothing, whatever the count of its earlier Config."""
    logs = ended(2, 4)
    logs[t] = Log(t, k=k, level=2)
    assert lost_of(logs).from_count == 2


@pytest.mark.parametrize("gone", [(2,), (2, 3)])
def test_a_partition_not_shown_to_have_come_into_use_keeps_its_state(gone):
    logs = ended(2, 4)
    for t in gone:
        logs[t] = Log(t, k=8, level=2)
    found = lost_by({t: log.state for t, log in logs.items()})
    assert found == ({2: 2} if gone == (2,) else {2: 8, 3: 8})


@pytest.mark.parametrize("t", [1, 2])
def test_a_partition_with_the_newest_count_keeps_its_state(t):
    """It may lack only later settings, which other partitions got with the fence."""
    logs = ended(2, 4)
    logs[t] = Log(t, k=4, level=2)
    states = {each: log.state for each, log in logs.items()}
    assert lost_by(states) == {}
    assert lost_configs(states) == {t: states[0].config}


def test_partitions_of_another_format_are_no_evidence():
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
        ({"k": 4, "h": 7_000}, {1}),
        ({"configured": False}, {1}),
        ({"k": 4, "format_id": b"x" * 16}, set()),
    ],
)
def test_nothing_is_claimed_where_the_newest_config_is_missing(settings, expected):
    logs = ended(2, 4)
    states = {t: log.state for t, log in logs.items()}
    assert unclaimed(states) == set()
    states[1] = Log(1, **({"level": 2} | settings)).state
    states[9] = Log(9, k=2, level=2).state
    assert unclaimed(states) == expected
    logs[0].append(layout_fence(8, 4, generation=3, era=3))
    assert unclaimed(states) == set()
    del states[0]
    assert unclaimed(states) == unclaimed({}) == set()


def altered(*, to=(0,), h=7_000, count=3, level=2):
    """Return worlds of which some have another interval, and their newest Config."""
    logs = {t: Log(t, k=count, level=level) for t in range(count)}
    newest = config(2, era=5, k=count, level=2, h=h)
    for t in to:
        assert logs[t].outcome_of(newest) == "configured"
    return {t: log.state for t, log in logs.items()}, newest


def test_a_lost_config_is_written_again():
    states, newest = altered(to=(0, 2))
    assert lost_configs(states) == {1: newest}
    states[1] = Log(1, configured=False).state
    assert lost_configs(states) == {1: newest}
    states[1] = Log(1, k=3, level=2, format_id=b"x" * 16).state
    assert lost_configs(states) == {}
    states[7] = Log(7, k=3, level=2).state
    assert lost_configs(states) == {}, "it is not in use"
    assert lost_configs({}) == {}
    del states[0]
    assert lost_configs(states) == {}


def test_a_config_is_not_written_over_one_of_an_equal_era():
    """It would be refused (PROTOCOL 4.12)."""
    states, _ = altered()
    states[1] = Log(1, k=3, level=2, era=5).state
    assert set(lost_configs(states)) == {2}


def test_partition_0_gets_a_lost_config_first():
    states, newest = altered(to=(1, 2))
    assert lost_configs(states) == {0: newest}
    assert unclaimed(states) == {0}


def test_partition_0_gets_lost_configs_one_generation_at_a_time():
    """No partition shows the Config between; it gets the newest settings."""
    states, _ = altered(to=())
    log = Log(1, k=3, level=2)
    newest = config(3, era=5, k=3, level=2, h=9_000)
    assert log.outcome_of(newest) == "configured"
    states[1] = log.state
    between = msgspec.structs.replace(newest, generation=2, era=2)
    assert lost_configs(states) == {0: between}
    first = Log(0, k=3, level=2)
    states[0] = first.state
    assert first.outcome_of(between) == "configured"
    assert lost_configs(states) == {0: newest}
    assert first.outcome_of(newest) == "configured"
    assert lost_configs(states) == {2: newest}


@pytest.mark.parametrize("is_open", [False, True])
def test_partition_0_gets_a_config_before_a_fence(is_open):
    """It has lost a Config with other settings, and then a change of the count."""
    logs = {t: Log(t, configured=t < 2, k=2, level=2) for t in range(4)}
    for t in (1, 2, 3):
        if t < 2:
            logs[t].append(config(2, era=4, k=2, level=2, h=7_000))
        fence = layout_fence(4, 2, generation=3, era=5)
        assert logs[t].outcome_of(fence) == "layout_fenced"
        for source in () if is_open else logs[t].state.layout.sources:
            logs[t].append(layout_done(0, source=source.partition))
        if not is_open:
            assert logs[t].outcome_of(layout_final()) == "layout_final"
    states = {t: log.state for t, log in logs.items()}
    newest = states[1].config
    between = msgspec.structs.replace(newest, generation=2, era=2, partition_count=2)
    assert lost_configs(states) == {0: between}
    assert logs[0].outcome_of(between) == "configured"
    assert lost_configs(states) == {}, "the fence is next"
    if is_open:
        states[0] = Log(0, k=4, level=2).state
        assert lost_configs(states) == {}, "no fence leads there"
    states[0] = Log(0, k=3, level=2).state
    assert lost_configs(states) == {}
    logs[0] = Log(0, k=2, level=2)
    logs[0].append(layout_fence(6, 2, generation=2, era=2))
    assert lost_configs({**states, 0: logs[0].state}) == {}, "its Final is next"


def test_partition_0_gets_a_config_although_a_restoring_fence_has_it():
    """Partition 3 lost the change before; the restoring fence brought both."""
    logs = ended(2, 4)
    logs[1].append(config(3, era=5, k=4, level=2, h=7_000))
    newest = logs[1].state.config
    restored = layout_fence(4, 2, generation=3, era=5)
    restored = msgspec.structs.replace(restored, config=encode(newest))
    logs[3] = Log(3, configured=False)
    assert logs[3].outcome_of(restored) == "layout_fenced"
    states = {t: log.state for t, log in logs.items()}
    assert lost_configs(states) == {0: newest}
    logs[0] = Log(0, k=4, level=2)
    assert lost_configs({**states, 0: logs[0].state}) == {}, "it has lost two changes"


@pytest.mark.parametrize("count", [1, 3])
def test_a_config_that_all_lost_is_written_again_by_a_process_that_read_it(count):
    states, newest = altered(to=(), count=count)
    assert lost_configs(states) == {}
    assert unclaimed(states) == set()
    assert lost_configs(states, newest) == {0: newest}
    assert unclaimed(states, newest) == set(range(count))
    states, _ = altered(count=count)
    assert lost_configs(states, newest) == lost_configs(states)
    assert lost_configs({0: WorldState(0)}, newest) == {0: newest}
    assert unclaimed({0: WorldState(0)}, newest) == {0}
    assert lost_configs({}, newest) == {}


@pytest.mark.parametrize("has_lost_it", [False, True])
def test_nothing_is_claimed_where_partition_0_has_lost_a_final_and_a_config(
    has_lost_it,
):
    """The change is open there again; the Config followed its Final."""
    logs = {t: Log(t, configured=t < 2, k=2, level=2) for t in range(4)}
    newest = config(3, era=5, k=4, level=2, h=7_000)
    for t, log in logs.items():
        log.append(layout_fence(4, 2))
        for source in log.state.layout.sources:
            log.append(layout_done(0, source=source.partition))
        if t:
            assert log.outcome_of(layout_final()) == "layout_final"
        if t and not has_lost_it:
            assert log.outcome_of(newest) == "configured"
    states = {t: log.state for t, log in logs.items()}
    assert unclaimed(states) == (set() if has_lost_it else {0})
    assert unclaimed(states, newest) == (set(states) if has_lost_it else {0})
    assert lost_configs(states, newest) == {}, "its Final is next"
    assert logs[0].outcome_of(layout_final()) == "layout_final"
    assert lost_configs(states, newest) == {0: newest}


def test_a_config_that_all_lost_comes_one_generation_at_a_time():
    states, _ = altered(to=(), count=1)
    newest = config(3, era=5, k=1, level=2, h=9_000)
    between = msgspec.structs.replace(newest, generation=2, era=2)
    assert lost_configs(states, newest) == {0: between}


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(config(1, era=9, k=4, level=2), id="one-of-this-generation"),
        pytest.param(config(4, era=9, k=2, level=2), id="another-count"),
        pytest.param(
            config(4, era=9, k=4, level=2, format_id=b"x" * 16), id="another-log"
        ),
    ],
)
def test_a_config_once_read_counts_only_if_it_follows_the_newest(read):
    states = {t: log.state for t, log in ended(2, 4).items()}
    assert lost_configs(states, read) == {}
    assert unclaimed(states, read) == set()


def test_a_config_once_read_waits_for_the_lost_change_before_it():
    """First the change that others still show is restored, then the Config follows."""
    logs = ended(2, 4)
    read = config(3, era=9, k=4, level=2, h=9_000)
    first = logs[0]
    logs[0] = Log(0, k=2, level=2)
    states = {t: log.state for t, log in logs.items()}
    assert lost_configs(states, read) == {}
    assert lost_of(logs).from_count == 2
    assert lost_configs({**states, 0: first.state}, read) == {0: read}
    first.append(layout_fence(8, 4, generation=3, era=3))
    assert lost_configs({**states, 0: first.state}, read) == {}


def test_partition_0_without_a_config_gets_the_newest():
    states, newest = altered(to=(1, 2))
    states[0] = WorldState(0)
    assert lost_configs(states) == {0: newest}
    assert unclaimed(states) == {0}
    assert lost_by(states) == lost_before(states) == {}
    log = Log(0, configured=False)
    assert log.outcome_of(newest) == "configured"
    none = {t: WorldState(t) for t in range(2)}
    assert lost_configs(none) == {}
    assert unclaimed(none) == set()


def test_partition_0_without_a_config_gets_the_one_before_the_open_change():
    logs = {t: Log(t, configured=t < 2, k=2, level=2) for t in range(4)}
    fence = layout_fence(4, 2, generation=2, era=5)
    for t in (1, 2, 3):
        assert logs[t].outcome_of(fence) == "layout_fenced"
    logs[0] = Log(0, configured=False)
    states = {t: log.state for t, log in logs.items()}
    before = lost_configs(states)[0]
    assert (before.generation, before.partition_count, before.era) == (1, 2, 4)
    assert logs[0].outcome_of(before) == "configured"
    assert lost_configs(states) == {}
    assert logs[0].outcome_of(fence) == "layout_fenced"


def test_partition_0_may_have_lost_the_change_that_added_partitions():
    """It was the only partition in use; the Config of the others counts."""
    logs = {t: Log(t, configured=t < 1, k=1, level=2) for t in range(2)}
    for log in logs.values():
        assert log.outcome_of(layout_fence(2, 1)) == "layout_fenced"
        for source in log.state.layout.sources:
            log.append(layout_done(0, source=source.partition))
        assert log.outcome_of(layout_final()) == "layout_final"
    states = {0: Log(0, k=1, level=2).state, 1: logs[1].state}
    assert lost_by(states) == {0: 1}
    assert unclaimed(states) == {0}
    assert lost_configs(states) == {}


def test_no_config_is_written_while_a_change_is_open():
    logs = ended(2, 4)
    logs[0].append(config(3, era=5, k=4, level=2, h=7_000))
    states = {t: log.state for t, log in logs.items()}
    assert set(lost_configs(states)) == {1, 2, 3}
    open_log = Log(3, configured=False)
    open_log.append(layout_fence(4, 2))
    assert lost_configs({**states, 3: open_log.state}) == {}
    logs = ended(2, 4)
    states = {
        **{t: log.state for t, log in logs.items()},
        1: Log(1, k=4, level=2).state,
    }
    assert set(lost_configs(states)) == {1}
    assert (
        logs[0].outcome_of(layout_fence(8, 4, generation=3, era=3)) == "layout_fenced"
    )
    assert lost_configs(states) == {}


def test_a_partition_below_level_2_gets_a_config_before_the_fence():
    """Below level 2 it would be ignored (PROTOCOL 3.3)."""
    logs = ended(2, 4)
    states = {t: log.state for t, log in logs.items()}
    newest = states[0].config
    low = Log(1, k=2)
    states[1] = low.state
    assert lost_configs(states) == {}, "nothing fits between the two"
    assert lost_by(states) == {1: 2}
    logs[0].append(layout_fence(8, 4, generation=3, era=3))
    between = msgspec.structs.replace(
        logs[0].state.config, generation=2, era=2, partition_count=2
    )
    assert lost_configs(states) == {1: between}
    assert low.outcome_of(between) == "configured"
    assert lost_configs(states) == {}
    assert newest.feature_level == 2
    states[9] = Log(9, k=8).state
    assert lost_configs(states) == {}, "it is not in use"
    states[1] = Log(1, k=2, format_id=b"x" * 16).state
    assert lost_configs(states) == {}


def test_at_level_1_a_partition_gets_the_newest_config():
    logs = {t: Log(t, k=3) for t in range(3)}
    newest = config(3, era=5, k=3, level=1, h=9_000)
    logs[0].append(config(2, era=4, k=3, level=1, h=8_000))
    logs[0].append(newest)
    assert lost_configs({t: log.state for t, log in logs.items()}) == {
        1: newest,
        2: newest,
    }


def test_a_change_lost_before_the_open_one_is_restored():
    logs = ended(2, 4)
    states = {t: log.state for t, log in logs.items()}
    before = logs[1].state.config
    assert lost_before({}) == lost_before(states) == {}
    logs[0].append(layout_fence(8, 4, generation=3, era=3))
    assert lost_before(states) == {}
    for t, k in ((1, 2), (3, 8)):
        states[t] = Log(t, k=k, level=2).state
    found = LostChange(restored_op(before), 2, before)
    assert lost_before(states) == {1: found, 3: found}
    assert lost_by(states) == {}
    del states[0]
    assert lost_before(states) == {}
    states[0] = Log(0, configured=False).state
    assert lost_before(states) == {}


def test_count_before_returns_the_count_from_which_one_fence_leads():
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


def test_a_fence_keeps_the_keys_of_a_partition_below_its_count():
    """PROTOCOL 10.2: a partition at or above the count begins with the fence."""
    config = Log(0, k=4, level=2).state.config
    assert keeps_state(3, config, from_count=2)
    assert not keeps_state(3, config, from_count=4)
    assert not keeps_state(5, config, from_count=2)
    assert not keeps_state(3, None, from_count=2)
    assert keeps_state(5, config, from_count=8)
