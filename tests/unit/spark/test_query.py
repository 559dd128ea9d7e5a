"""How options become partitions and offsets, and how a query opens its client."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    IdentityConflict,
    LogUnreadable,
    PositionError,
)
from kafka_marshal.identity import Identity
from kafka_marshal.ports import LogRange, TopicInfo
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.spark import query
from kafka_marshal.spark.options import EARLIEST, LATEST, Bound, parse
from kafka_marshal.spark.query import Cluster

BASE = {"kafka.bootstrap.servers": "b:1"}
T = [TopicPartition("t", number) for number in range(3)]
TOPICS = {"t": 3, "u": 1, "__marshal": 8, "__other": 1, "log": 2}


class Data:
    def __init__(self, *_):
        pass

    def topics(self, timeout_ms):
        return sorted(TOPICS)

    def describe(self, topics, timeout_ms):
        return {t: TopicInfo(TOPICS[t], None) for t in topics if t in TOPICS}

    def ranges(self, partitions, timeout_ms):
        return dict.fromkeys(partitions, LogRange(10, 25))

    def ends(self, partitions, timeout_ms, *, isolation_level):
        end = {"read_committed": 20, "read_uncommitted": 25}[isolation_level]
        return dict.fromkeys(partitions, end)

    def close(self, timeout_ms):
        pass


class Offsets:
    """Logs from 10 to 20, whose records have the times 100 to 109."""

    def __init__(self, *_, isolation_level):
        self.level = isolation_level

    def starts(self, partitions, timeout_ms):
        return dict.fromkeys(partitions, 10)

    def ends(self, partitions, timeout_ms):
        return dict.fromkeys(partitions, 20)

    def at_times(self, times_ms, timeout_ms):
        return {p: None if ms > 109 else max(10, ms - 90) for p, ms in times_ms.items()}

    def close(self, timeout_ms):
        pass


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(query, "KafkaDataLog", Data)
    monkeypatch.setattr(query, "KafkaOffsets", Offsets)
    return lambda **more: Cluster(parse(BASE | more))


def test_topic_options_are_resolved_to_partitions(cluster):
    assert cluster(subscribe="t").partitions() == T
    assert cluster(subscribe="u,t").partitions() == [*T, TopicPartition("u", 0)]
    found = cluster(subscribePattern=".*").partitions()
    assert {place.topic for place in found} == {"t", "u", "log"}, "never internal ones"
    found = cluster(subscribePattern=".*", coordinationTopic="log").partitions()
    assert {place.topic for place in found} == {"t", "u"}
    assert cluster(assign='{"t": [2, 0]}').partitions() == [T[0], T[2]]


def test_missing_topics_raise(cluster):
    with pytest.raises(LogUnreadable, match="topic 'no' does not exist"):
        cluster(subscribe="t,no").partitions()
    with pytest.raises(LogUnreadable, match="t-7 does not exist"):
        cluster(assign='{"t": [7]}').partitions()


@pytest.mark.parametrize(
    ("bound", "wanted"),
    [
        (Bound(EARLIEST), [10, 10, 10]),
        (Bound(LATEST), [20, 20, 20]),
        (Bound(EARLIEST, offsets={T[0]: 15, T[2]: LATEST}), [15, 10, 20]),
        (Bound(EARLIEST, times_ms={T[1]: 105}), [10, 15, 10]),
        (Bound(EARLIEST, time_ms=103), [13, 13, 13]),
        (Bound(EARLIEST, time_ms=999, is_strict=False), [20, 20, 20]),
    ],
)
def test_a_bound_becomes_offsets(cluster, bound, wanted):
    found = cluster(subscribe="t").resolve(bound, T)
    assert [found[place] for place in T] == wanted


def test_a_start_without_its_partition_or_record_raises(cluster):
    other = cluster(subscribe="t")
    bound = Bound(
        EARLIEST, offsets={TopicPartition("u", 0): 1}, option="startingOffsets"
    )
    with pytest.raises(ConfigurationError, match="startingOffsets names u-0, which"):
        other.resolve(bound, T)
    late = parse(BASE | {"subscribe": "t", "startingTimestamp": "999"}).start
    with pytest.raises(
        ConfigurationError, match="startingTimestamp: t-0 has no record"
    ):
        other.resolve(late, T)
    late = parse(BASE | {"subscribe": "t", "endingTimestamp": "999"}).end
    ends = other.resolve(late, T)
    assert set(ends.values()) == {20}, "an end may be yet to come"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"startingTimestamp": "999"}, [20, 20, 20]),
        ({"startingOffsetsByTimestamp": '{"t": {"0": 999, "9": 1}}'}, [20, 10, 10]),
        ({"startingOffsets": '{"t": {"0": 15}, "deleted": {"0": 1}}'}, [15, 10, 10]),
        ({"startingOffsets": '{"t": {"0": 99}}'}, [99, 10, 10]),
    ],
)
def test_a_restart_tolerates_starts_that_a_new_query_refuses(cluster, given, wanted):
    """Since the first start, records or a topic may have been deleted."""
    given = {"subscribe": "t", **given}
    options, other = parse(BASE | given | {"group": "g"}), cluster(**given)
    with pytest.raises((ConfigurationError, PositionError)):
        query._starts(options, other, is_new=True)
    found = query._starts(options, other, is_new=False)
    assert [found[place] for place in T] == wanted


def test_a_restart_resolves_a_start_at_latest_to_the_log_start(cluster):
    given = {"subscribe": "t", "startingOffsets": '{"t": {"0": -1, "1": 15}}'}
    options, other = parse(BASE | given | {"group": "g"}), cluster(**given)
    found = query._starts(options, other, is_new=True)
    assert [found[place] for place in T] == [20, 15, 10]
    found = query._starts(options, other, is_new=False)
    assert [found[place] for place in T] == [10, 15, 10]


@pytest.mark.parametrize("name", ["startingOffsets", "endingOffsets"])
def test_an_offset_beyond_the_log_raises_or_becomes_its_end(cluster, name):
    """The log ends at 25, of which 20 can be read."""
    text = '{"t": {"0": 25, "1": 26, "2": -1}}'
    options = {"subscribe": "t", name: text}
    strict = cluster(**options)
    found = parse(BASE | options)
    bound = found.start or found.end
    wanted = strict.resolve(bound, T)
    with pytest.raises(PositionError, match=f"{name} has 26 for t-1, .* ends at 25"):
        strict.within(bound, wanted)
    lenient = cluster(**options, failOnDataLoss="false")
    assert lenient.within(bound, wanted) == {T[0]: 25, T[1]: 20, T[2]: 20}
    assert lenient.within(Bound(LATEST), wanted) == wanted, "nothing is named"


def test_an_origin_has_no_coordination_id_if_the_topic_is_not_readable(cluster):
    options = parse(BASE | {"subscribe": "t", "group": "g", "delivery": "amo"})
    found = query._origin(options, cluster(subscribe="t"))
    assert (found.group, found.delivery, found.coordination) == ("g", "amo", "")

    class Refused:
        def topic_ids(self, topics):
            raise CoordinationError("not allowed")

    assert query._origin(options, Refused()) == found

    class Known:
        def topic_ids(self, topics):
            return dict.fromkeys(topics, "0c")

    assert query._origin(options, Known()).coordination == "0c"


def test_the_readable_end_depends_on_the_isolation_level(cluster):
    other = cluster(subscribe="t", **{"kafka.isolation.level": "read_committed"})
    assert other._offsets.level == "read_committed"
    assert (other.ends(T[:1]), other.starts(T[:1])) == ({T[0]: 20}, {T[0]: 10})
    other.close()


class Opened:
    """A client that acquires its identity, as the real one does."""

    conflicts = 0

    def __init__(self, *_, group_id, client_id, state_dir, **rest):
        if Opened.conflicts:
            Opened.conflicts -= 1
            raise IdentityConflict("'c' is in use", holder="c", host="h", age_ms=5)
        self.group_id, self.client_id = group_id, client_id
        settled = SimpleNamespace(format_id=b"\xab")
        self.engine = SimpleNamespace(context=SimpleNamespace(settled=settled))
        self.closers = []
        if state_dir:
            identity = Identity.take(
                Path(state_dir), domain="ab", group_id=group_id, client_id=client_id
            )
            self.closers.append(identity.close)

    def call_on_close(self, function):
        self.closers.append(function)

    def close(self):
        for function in self.closers:
            function()


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """Return a function that opens a client, and waits while its name is in use."""
    monkeypatch.setattr(query, "Marshal", Opened)
    monkeypatch.setattr(Opened, "conflicts", 0)
    monkeypatch.setattr(query, "RETRY_S", 0)
    monkeypatch.setattr(query.tempfile, "gettempdir", lambda: str(tmp_path))

    def open_in_turn(**more):
        options = BASE | {"subscribe": "t", "group": "g"} | more
        return query._opened_in_turn(parse(options))

    return open_in_turn


@pytest.mark.parametrize("more", [{}, {"clientId": "c"}])
def test_only_a_given_client_id_keeps_its_identity_folder(opened, tmp_path, more):
    """Each start under a random name would leave a folder that nobody uses again."""
    client = opened(stateDir=str(tmp_path), **more)
    (folder,) = tmp_path.glob("ab/g=g/c=*")
    client.close()
    assert folder.exists() is bool(more)


def test_a_query_waits_while_its_client_id_is_in_use(opened, monkeypatch):
    """Spark starts a query again without waiting for the end of its earlier process."""
    monkeypatch.setattr(Opened, "conflicts", 2)
    assert opened(clientId="c").client_id == "c"


def test_a_client_id_that_stays_in_use_ends_the_query(opened, monkeypatch):
    monkeypatch.setattr(query, "OPEN_S_MAX", 0)
    monkeypatch.setattr(Opened, "conflicts", 1)
    with pytest.raises(IdentityConflict, match="two sources need a clientId") as error:
        opened(clientId="c")
    assert (error.value.holder, error.value.host) == ("c", "h")


def test_a_client_id_is_locked_also_without_a_state_dir(opened, monkeypatch):
    monkeypatch.setattr(query, "OPEN_S_MAX", 0)
    client = opened(clientId="c", stateDir="")
    with pytest.raises(IdentityConflict, match="clientId each"):
        opened(clientId="c", stateDir="")
    others = [{"clientId": "d"}, {"group": "h"}, {"coordinationTopic": "other"}]
    for more in others:
        opened(**{"clientId": "c", "stateDir": ""} | more).close()
    client.close()
    opened(clientId="c", stateDir="").close()


def test_a_client_id_is_used_even_if_it_cannot_be_locked(opened, monkeypatch, tmp_path):
    """A conflict shows later, in the log."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(query.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    assert opened(clientId="c", stateDir="").client_id == "c"
