"""The invariants of an audit over keys that move to another coordinating partition."""

import pytest
from changekit import Change
from logkit import H, beat, messages

from kafka_marshal.history.historian import Historian
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.spark.audit import check, schema
from kafka_marshal.spark.audit.rows import staged, state_row

pytestmark = pytest.mark.slow


def tables_of(change):
    """Return the rows of each table, as an audit of these logs has them."""
    found = {table.name: [] for table in schema.TABLES}
    for log in change.logs:
        world, historian = WorldState(log.state.partition), Historian(sample_ms=1)
        number = world.partition
        rows = []
        for entry in log.entries:
            transitions = apply(world, entry)
            taken = historian.take(world, entry, transitions=transitions)
            rows += (staged(number, row) for row in taken)
        rows += (staged(number, row, is_open=True) for row in historian.open_rows())
        for row in [*rows, state_row(world, historian)]:
            found[row.table.name].append(row.values)
    return found


def checked(spark, rows):
    """Return the names of the broken invariants."""
    frames = {}
    for table in schema.TABLES:
        values = [tuple(row[name] for name in table.names) for row in rows[table.name]]
        frames[table.name] = spark.createDataFrame(values, table.ddl)
    findings = check(frames)
    assert all(each.count == 1 for each in findings), findings
    return {each.invariant.name for each in findings}


def story(before, after):
    """Return a change in which one owner releases its key, and another one dies."""
    change = Change(before, after)
    released, dead = change.moving(2)
    for key in (released, dead):
        (epoch,) = change.claimed(key)
        log = change.place(key)
        # Makes the offsets of the two partitions differ.
        for _ in range(30):
            log.append(beat(epoch, 3, key=key), after=H // 4)
        log.append(messages(epoch, 3, 9, key=key))
    for log in change.logs:
        log.now_ms = max(each.now_ms for each in change.logs)
    change.fence()
    change.released(released)
    change.tick(3 * H)
    change.imported()
    for key in (released, dead):
        (epoch,) = change.reclaimed(key)
        change.target(key).append(messages(epoch, 10, 19, key=key, client="c2"))
    change.done()
    change.tick(H)
    change.final()
    return change, released


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_a_change_of_the_partition_count_breaks_no_invariant(spark, before, after):
    change, _ = story(before, after)
    rows = tables_of(change)
    assert len(rows["imports"]) == 2
    assert checked(spark, rows) == set()


def of(rows, key, partition):
    """Return the rows of a key in a coordinating partition."""
    wanted = (*key, partition)
    names = ("group_id", "topic", "partition", "coordinating_partition")
    return [row for row in rows if tuple(row[name] for name in names) == wanted]


def test_wrong_imports_and_claims_of_a_moved_key_are_found(spark):
    change, key = story(2, 4)
    source, target = change.place(key).state, change.target(key).state
    rows = tables_of(change)
    (moved,) = of(rows["imports"], key, target.partition)
    (before,) = of(rows["intervals"], key, source.partition)
    (after,) = of(rows["intervals"], key, target.partition)

    def broken(row, **wrong):
        right = {name: row[name] for name in wrong}
        row.update(wrong)
        found = checked(spark, rows)
        row.update(right)
        return found

    assert broken(moved, position=8) == {"imports_agree"}
    assert broken(moved, granted=7, position=7) == {"imports_agree", "grants_disjoint"}
    assert broken(after, token_era=0) == {"tokens_grow"}
    late_ms = after["start_append_ms"] + 2 * H
    assert broken(before, end_append_ms=late_ms) == {"overlap"}
    # A Reset of the source may have taken back what was there.
    state = next(
        row
        for row in rows["partitions"]
        if row["coordinating_partition"] == source.partition
    )
    state["resets_count"] = 1
    assert broken(moved, position=8) == set()
