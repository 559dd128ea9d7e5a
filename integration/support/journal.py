"""The journals of workers, and checks of the guarantees against them."""

from bisect import bisect_left
from collections import Counter, defaultdict
from itertools import chain, pairwise
from math import inf
from operator import itemgetter

import attrs
from history import History, Step, Tenure, parsed

from kafka_marshal.protocol.layout import is_final, item_of
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import ACCEPTED, WorldState
from kafka_marshal.protocol.types import Key, TopicPartition


@attrs.frozen
class Handled:
    """One record that a worker processed: the effect that must not be lost or doubled.

    Attributes:
        client_id: The worker.
        pid: Its process.
        place: Data partition.
        offset: Offset.
        token: Fencing token, as text.
        at_ms: Wall time.
    """

    client_id: str
    pid: int
    place: TopicPartition
    offset: int
    token: str
    at_ms: int


@attrs.define
class Journal:
    """Everything that some workers wrote.

    Attributes:
        lines: Every line, oldest first per worker.
    """

    lines: list[dict] = attrs.field(factory=list)

    @classmethod
    def merged(cls, *written: list[dict]) -> "Journal":
        """Return the lines of several workers in order of time."""
        return cls(sorted(chain.from_iterable(written), key=itemgetter("at_ms")))

    def of(self, event: str, **fields: object) -> list[dict]:
        """Return the lines of one event, of those that have these fields."""
        return [
            line
            for line in self.lines
            if line["event"] == event
            and all(line.get(name) == value for name, value in fields.items())
        ]

    @property
    def handled(self) -> list[Handled]:
        """Every record processed, in order of time."""
        return [
            Handled(
                client_id=line["client_id"],
                pid=line["pid"],
                place=TopicPartition(line["topic"], line["partition"]),
                offset=line["offset"],
                token=line["token"],
                at_ms=line["at_ms"],
            )
            for line in self.of("handled")
        ]

    def offsets(self) -> dict[TopicPartition, Counter]:
        """Return how often each offset was processed, by partition."""
        found: dict[TopicPartition, Counter] = defaultdict(Counter)
        for line in self.of("handled"):
            found[TopicPartition(line["topic"], line["partition"])][line["offset"]] += 1
        return dict(found)

    def lost(self, produced: dict[TopicPartition, int]) -> dict[TopicPartition, list]:
        """Return the offsets that no worker processed, by partition."""
        seen = self.offsets()
        gone = {
            place: [n for n in range(count) if not seen.get(place, {}).get(n)]
            for place, count in produced.items()
        }
        return {place: offsets for place, offsets in gone.items() if offsets}

    def duplicated(self) -> dict[TopicPartition, list[int]]:
        """Return the offsets that were processed more than once, by partition."""
        doubled = {
            place: sorted(n for n, times in counts.items() if times > 1)
            for place, counts in self.offsets().items()
        }
        return {place: offsets for place, offsets in doubled.items() if offsets}


def judge_duplicates(
    journal: Journal, history: History, group_id: str, *, has_true_time: bool = True
) -> int:
    """Check PROTOCOL 6.1 for every tenure; return the number of repeats.

    A repeated offset is at or above the last accepted position of the earlier tenure.
    It was first processed at most one interval before the last heartbeat of that
    tenure, or later. A sidecar renews claims of a client that hangs: there the
    client itself must have fallen silent. Times are not checked if the clocks of
    brokers were wrong (``has_true_time``).
    """
    by_token = defaultdict(list)
    for each in journal.handled:
        by_token[each.place, each.token].append(each)
    written = defaultdict(list)
    for line in journal.lines:
        written[line["client_id"], line["pid"]].append(line["at_ms"])
    repeats = 0
    for key, tenures in history.tenures(group_id).items():
        world = next(w for w in history.worlds.values() if key in w.keys)
        interval_ms = world.config.heartbeat_interval_ms
        before: dict[int, tuple[Tenure, Handled]] = {}
        for tenure in tenures:
            for each in by_token[key.topic_partition, tenure.token]:
                if each.offset not in before:
                    before[each.offset] = (tenure, each)
                    continue
                earlier, then = before[each.offset]
                if earlier is tenure:
                    raise AssertionError(f"twice under one claim: {each}")
                repeats += 1
                assert earlier.position is None or each.offset >= earlier.position, (
                    f"{each} repeats what was committed under {earlier}"
                )
                is_late = then.at_ms >= earlier.renewed_ms - interval_ms
                if not is_late and earlier.client_id != then.client_id:
                    own = written[then.client_id, then.pid]
                    is_late = _fell_silent(own, then.at_ms, interval_ms=interval_ms)
                assert is_late or not has_true_time, (
                    f"{then} was processed an H before the last beat of {earlier}, "
                    f"and again: {each}"
                )
    return repeats


def _fell_silent(moments: list[int], since_ms: int, *, interval_ms: int) -> bool:
    """Return whether a process soon wrote nothing for a heartbeat interval.

    The silence begins within one interval: the process was stopped or killed, or lost
    its partitions. A process that wrote more had time to report its progress.

    Args:
        moments: When it wrote, sorted.
        since_ms: The moment from which silence counts, one of these.
        interval_ms: The heartbeat interval.
    """
    rest = moments[bisect_left(moments, since_ms) :]
    return any(
        two - one > interval_ms
        for one, two in pairwise([*rest, inf])
        if one <= since_ms + interval_ms
    )


def judge_grants(journal: Journal, history: History, group_id: str) -> dict[Key, set]:
    """Check PROTOCOL 6.2 over the whole log; return granted, unprocessed offsets.

    Grants of a key are contiguous and disjoint; no record is processed twice, and each
    only under the claim to which it was granted.
    """
    assert journal.duplicated() == {}
    unprocessed = {}
    for key, grants in history.grants(group_id).items():
        for one, two in pairwise(grants):
            assert two.first == one.last + 1, f"{one} then {two}"
        given = {}
        for grant in grants:
            for offset in range(grant.first, grant.last + 1):
                given[offset] = grant.token
        for each in journal.handled:
            if each.place == key.topic_partition:
                assert given.pop(each.offset, None) == each.token, f"not granted {each}"
        unprocessed[key] = set(given)
    return {key: offsets for key, offsets in unprocessed.items() if offsets}


def judge_moves(history: History) -> int:
    """Check PROTOCOL 10.3 and 10.4 for every imported key; return how many there were.

    At the source offset of the import, the key's state there was final, and it was
    imported with that state; no record changes it there until the next change of the
    layout begins. So no key has owners in two partitions.
    """
    imports: dict[int, list[Step]] = defaultdict(list)
    for step in history.of("imported"):
        imports[step.record.source].append(step)
    for source, steps in imports.items():
        steps.sort(key=lambda step: step.record.source_offset, reverse=True)
        world, moved = WorldState(source), set()
        for entry in (*history.entries[source], None):
            while steps and (
                entry is None or steps[-1].record.source_offset <= entry.offset
            ):
                step = steps.pop()
                assert is_final(world, step.key), (source, step)
                item = item_of(step.key, world.keys[step.key])
                assert item in step.record.items, (source, item, step)
                moved.add(step.key)
            for transition in () if entry is None else apply(world, entry):
                if transition.effect == "layout_fenced":
                    moved.clear()
                is_change = transition.outcome == ACCEPTED and transition.key in moved
                assert not is_change, f"in {source}, after it moved: {transition}"
    return len(history.of("imported"))


def judge_overlaps(
    journal: Journal, history: History, group_id: str, *, late_max: int | None = 1
) -> int:
    """Check S4 and S7; return how many records were processed under stale tokens.

    A process whose lease was checked before a newer token was used may finish at most
    ``late_max`` records. None only counts them: for clocks that violate the
    assumptions of S4.
    """
    tokens = {
        key.topic_partition: [tenure.token for tenure in tenures]
        for key, tenures in history.tenures(group_id).items()
    }
    for place, found in tokens.items():
        ranks = map(parsed, found)
        assert all(one < two for one, two in pairwise(ranks)), (place, found)
    newest: dict[TopicPartition, int] = {}
    late: Counter = Counter()
    for each in journal.handled:
        rank = tokens[each.place].index(each.token)
        if rank < newest.setdefault(each.place, rank):
            late[each.place, each.token] += 1
            is_in_hand = late_max is None or late[each.place, each.token] <= late_max
            assert is_in_hand, f"an owner that was: {each}"
        newest[each.place] = max(newest[each.place], rank)
    return late.total()
