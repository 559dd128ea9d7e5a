"""Which keys a change of the partition count moves, and when they are final."""

import msgspec
import pytest
from logkit import (
    KEY,
    LOCK,
    MOVES,
    OP,
    REMAINS,
    STAYS,
    H,
    Log,
    direct,
    ident,
    imported,
    layout_done,
    layout_fence,
    layout_import,
    member,
    release,
    settings,
    source_log,
    target_log,
)

from kafka_marshal.protocol.hashing import coordinating_partition, home_partition
from kafka_marshal.protocol.items import Layout
from kafka_marshal.protocol.layout import (
    Probes,
    config_of,
    digest_of,
    group_items,
    is_final,
    is_home_moving,
    is_importing,
    is_importing_group,
    is_moving,
    is_retired,
    is_step,
    item_of,
    moving_keys,
    place_of,
    sources_of,
    used_count,
)
from kafka_marshal.protocol.records import ImportedPrevious
from kafka_marshal.protocol.state import Previous, WorldState
from kafka_marshal.protocol.types import Key

CHECKPOINT = Key("marshal", "/checkpoint", 0)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        *((1, 2, True), (4, 12, True), (12, 4, True), (4, 6, False), (4, 4, False)),
        *((5_000, 10_000, True), (1, 10_001, False), (2**30, 2**29, False)),
    ],
)
def test_a_change_needs_a_multiple_within_10000_partitions(before, after, expected):
    assert is_step(before, after) is expected


@pytest.mark.parametrize(("before", "after"), [(4, 8), (4, 12), (8, 4), (12, 4)])
def test_the_sources_of_a_partition_are_those_whose_keys_move_to_it(before, after):
    for partition in range(max(before, after) + 1):
        found = {
            place_of(key, partition_count=before)
            for key in (Key("g", "t", n) for n in range(2_000))
            if place_of(key, partition_count=after) == partition
        } - {partition}
        sources = sources_of(partition, from_count=before, to_count=after)
        assert set(sources) == found
        assert list(sources) == sorted(sources)


def test_only_a_target_has_sources():
    for before, after in ((4, 8), (8, 4)):
        less = min(before, after)
        for partition in range(8):
            sources = sources_of(partition, from_count=before, to_count=after)
            assert bool(sources) == ((partition >= less) == (before < after))


def test_the_config_of_a_fence_is_decoded():
    config = config_of(layout_fence(6, keys=7))
    assert (config.partition_count, config.limit("keys")) == (6, 7)


def test_a_key_is_placed_by_its_topic_and_partition():
    place = coordinating_partition("t", 0, partition_count=7)
    assert place_of(KEY, partition_count=7) == place


def test_a_partition_above_the_count_is_retired():
    assert not is_retired(WorldState(3))
    assert not is_retired(Log().state)
    assert is_retired(Log(1).state)


def test_only_keys_of_a_source_that_change_partition_move():
    log, *_ = source_log()
    assert is_moving(log.state, KEY)
    assert not is_moving(log.state, STAYS)
    assert not is_moving(log.state, CHECKPOINT)
    assert not is_moving(Log().state, KEY)
    assert not is_moving(target_log().state, KEY)
    stranger = next(
        key
        for key in (Key("g", "t", n) for n in range(99))
        if place_of(key, partition_count=4) == 3
        and place_of(key, partition_count=2) == 1
    )
    log = Log(0, k=2, level=2)
    log.append(layout_fence(4, 2))
    assert not is_moving(log.state, stranger)
    assert not is_moving(WorldState(0, layout=Layout(OP, 1, 0, ())), KEY)


def test_a_key_is_final_once_nothing_can_change_it():
    log, epoch, _ = source_log()
    assert not is_final(log.state, KEY)
    assert not is_final(log.state, KEY._replace(partition=5))
    log.append(release(epoch))
    assert is_final(log.state, KEY)
    log.key().lock = LOCK
    assert not is_final(log.state, KEY)
    log.key().lock = None
    log.state.quiet_until_ms = log.state.now_ms + 1
    assert not is_final(log.state, KEY)
    log, *_ = source_log()
    log.append(b"", after=2 * H)
    assert not is_final(log.state, KEY)
    log.append(b"", after=1)
    assert is_final(log.state, KEY)
    assert not is_final(log.state, STAYS)


def test_an_unknown_key_is_importing_until_its_source_is_done():
    log = target_log()
    assert is_importing(log.state, KEY)
    assert not is_importing(log.state, CHECKPOINT)
    assert not is_importing(source_log()[0].state, KEY)
    assert not is_importing(Log().state, KEY)
    log.append(layout_done(0))
    assert not is_importing(log.state, KEY)


def test_settings_and_directives_move_to_the_new_home_of_their_group():
    log = Log(level=2)
    groups = (MOVES, REMAINS, "marshal")
    for group in groups:
        log.append(direct(group=group))
        log.append(settings(group=group))
    assert not is_home_moving(log.state, MOVES)
    assert not is_home_moving(WorldState(0, layout=Layout(OP, 1, 0, ())), MOVES)
    log.append(layout_fence(4))
    homes = {group: home_partition(group, partition_count=4) for group in groups}
    for group in groups:
        assert is_home_moving(log.state, group) == (homes[group] > 0)
    for target in (1, 2, 3):
        found, directives = group_items(log.state, target)
        mine = sorted(group for group, home in homes.items() if home == target)
        assert [each.group_id for each in found] == mine
        assert [each.group_id for each in directives] == sorted({*mine, "marshal"})


def test_a_group_is_importing_until_its_source_is_done():
    log = target_log()
    assert is_importing_group(log.state, MOVES)
    assert is_importing_group(log.state, "marshal")
    log.append(layout_done(0))
    assert not is_importing_group(log.state, MOVES)
    assert not is_importing_group(log.state, "marshal")
    assert not is_importing_group(Log().state, MOVES)
    fewer = Log(0, k=2, level=2)
    fewer.append(layout_fence(1, 2))
    assert is_importing_group(fewer.state, MOVES)
    assert not is_importing_group(fewer.state, REMAINS)


def test_moving_keys_are_those_that_the_new_count_places_elsewhere():
    log, *_ = source_log()
    assert moving_keys(log.state) == [KEY]


def test_the_item_of_an_imported_key_equals_the_import():
    log = target_log()
    item = imported(
        position=5,
        granted=7,
        topic_id=ident("topic"),
        retired_topic_ids=(ident("before"),),
        previous=ImportedPrevious(OP, 1, None),
        successor="c2",
    )
    log.append(layout_import(item))
    assert item_of(KEY, log.key()) == item
    log.key().handoff = log.key().previous = None
    bare = item_of(KEY, log.key())
    assert (bare.previous, bare.successor) == (None, None)
    log.key().previous = Previous(OP, None, 4)
    assert item_of(KEY, log.key()).previous == ImportedPrevious(OP, None, 4)


def test_the_digest_depends_on_the_items_and_their_order():
    one, other = imported(), imported(STAYS)
    assert len(digest_of([one])) == 16
    assert digest_of([one, other]) != digest_of([other, one])
    assert digest_of([]) != digest_of([one])


# --- logs whose start is missing


def test_the_larger_count_is_in_use_while_it_changes():
    log = Log(k=2, level=2)
    assert (used_count(WorldState(0)), used_count(log.state)) == (None, 2)
    log.append(layout_fence(1, 2))
    assert used_count(log.state) == 2
    log = Log(k=1, level=2)
    log.append(layout_fence(4))
    assert used_count(log.state) == 4


def probe(op=OP, *, group="marshal"):
    return msgspec.structs.replace(member("admin", group=group), incarnation=op)


def known_from(*records, partition=1, configured=False, k=1):
    """Return the number of the record from which on the state is known, or None."""
    log, probes = Log(partition, configured=configured, k=k, level=2), Probes(partition)
    for number, record in enumerate(records):
        (transition,) = log.append(record)
        if probes.take(transition):
            return number
    return None


OTHERS = [probe(ident(f"op {n}")) for n in range(64)]


def test_the_state_is_known_from_the_first_fence_after_its_probe():
    fence = layout_fence(2)
    assert known_from(probe(), fence) == 1
    assert known_from(b"given up", probe(), probe(ident("other")), fence) == 3
    assert known_from(fence) is None
    assert known_from(fence, probe(), fence) is None, "it has come again"
    assert known_from(probe(ident("other")), fence) is None
    assert known_from(probe(group="g"), fence) is None
    assert known_from(probe(), layout_fence(2, level=1), fence) is None, "refused"
    assert known_from(probe(), *OTHERS[:63], fence) == 64
    assert known_from(probe(), *OTHERS, fence) is None, "so many are not remembered"
    shrinks = layout_fence(1, 2)
    assert known_from(probe(), shrinks, configured=True, k=2) is None, "in use before"
