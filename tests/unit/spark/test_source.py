"""The data source with its batch and stream readers."""

import json
import pickle
import signal
import subprocess
import sys
from typing import Any

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxRows,
    ReadMinRows,
)
from pyspark.sql.types import StringType, StructType
from slices import HANG_S

import kafka_marshal.spark as package
from kafka_marshal.errors import ConfigurationError, PositionError
from kafka_marshal.protocol.codec import is_identifier
from kafka_marshal.protocol.types import Owner, Token, TopicPartition
from kafka_marshal.spark import fetch
from kafka_marshal.spark import query as module
from kafka_marshal.spark.claims import Part
from kafka_marshal.spark.options import EARLIEST, LATEST, parse
from kafka_marshal.spark.planning import (
    Limit,
    Mark,
    Origin,
    PlannedRange,
    Task,
    TaskPartition,
    to_offset,
)
from kafka_marshal.spark.source import (
    MarshalBatchReader,
    MarshalDataSource,
    MarshalStreamReader,
)

BASE = {"kafka.bootstrap.servers": "b:1", "subscribe": "t"}
T = [TopicPartition("t", number) for number in range(2)]
STREAM = BASE | {"group": "g"}
T0 = TopicPartition("t", 0)
TOKEN = Token(1, 0, 55)
OWNER = Owner("me", b"i" * 16)
SECRET = "5e" * 16
END = {T0: Mark(TOKEN, 0, 10)}
ORIGIN = Origin(group="g", delivery="alo", coordination="0c")


def test_the_package_exports_the_source_named_marshal():
    assert MarshalDataSource.name() == "marshal"
    assert package.MarshalDataSource is MarshalDataSource
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = package.Nothing


def test_columns_follow_the_options():
    names = ["key", "value", "topic", "partition", "offset", "timestamp"]
    source = MarshalDataSource(BASE)
    assert source.schema().names == [*names, "timestampType"]
    options = BASE | {"includeHeaders": "true", "includeToken": "true"}
    source = MarshalDataSource(options)
    assert source.schema().names == [
        *names,
        "timestampType",
        "headers",
        "token",
        "topicId",
    ]


def test_readers_are_made_without_a_connection_and_can_be_pickled():
    source = pickle.loads(pickle.dumps(MarshalDataSource(BASE)))
    reader = pickle.loads(pickle.dumps(source.reader(source.schema())))
    assert isinstance(reader, MarshalBatchReader)
    source = MarshalDataSource(BASE | {"group": "g"})
    reader = source.streamReader(source.schema())
    assert isinstance(pickle.loads(pickle.dumps(reader)), MarshalStreamReader)


def test_options_are_checked_when_the_source_is_made():
    with pytest.raises(ConfigurationError, match="unknown option"):
        MarshalDataSource(BASE | {"nonsense": "1"})
    source = MarshalDataSource(BASE | {"group": "g"})
    with pytest.raises(ConfigurationError, match="availableNow"):
        source.reader(source.schema())


def test_a_stream_without_a_group_is_refused_on_first_use():
    """PySpark hides what ``streamReader`` raises behind an error of its own."""
    source = MarshalDataSource(BASE)
    reader: Any = source.streamReader(source.schema())
    reader.initialOffset()
    with pytest.raises(ConfigurationError, match="name the group"):
        reader.latestOffset({}, reader.getDefaultReadLimit())
    reader.stop()


def test_another_schema_is_refused():
    own = StructType().add("value", StringType())
    with pytest.raises(ConfigurationError, match=r"leave schema\(\) out"):
        MarshalDataSource(BASE).reader(own)
    reader = MarshalDataSource(STREAM).streamReader(own)
    with pytest.raises(ConfigurationError, match=r"leave schema\(\) out"):
        reader.latestOffset({}, reader.getDefaultReadLimit())


PLANNERS = ("kafka_marshal.spark.source",)
READERS = ("kafka_marshal.spark.fetch", "kafka_marshal.grants")


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (PLANNERS, ["kafka", "kafka_marshal.engine"]),
        (READERS, ["kafka_marshal.client", "kafka_marshal.engine.engine"]),
    ],
)
def test_a_worker_loads_only_what_it_uses(modules, unwanted):
    """Spark starts processes that only plan; each pays for all that it loads."""
    program = (
        f"import sys, {', '.join(modules)}\n"
        f"print(*(name for name in {unwanted!r} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.stdout.strip() == ""


class Logs:
    """Two logs, from 10 to 20 and from 10 to 12."""

    is_closed = False

    def __init__(self, options):
        Logs.is_closed = False

    def partitions(self):
        return T

    def resolve(self, bound, partitions):
        at = {EARLIEST: [10, 10], LATEST: [20, 12]}[bound.everywhere]
        return {p: bound.offsets.get(p, at[p.partition]) for p in partitions}

    def within(self, bound, offsets):
        return offsets

    def topic_ids(self, topics):
        return dict.fromkeys(topics, "ab")

    def close(self):
        Logs.is_closed = True


@pytest.fixture
def planned(monkeypatch):
    monkeypatch.setattr(module, "Cluster", Logs)

    def plan(**more):
        reader = MarshalBatchReader(parse(BASE | more), None)
        return [each.task for each in reader.partitions()]

    return plan


def task(partition, first, end):
    return Task(partition=partition, first=first, end=end, topic_id="ab")


def test_each_partition_is_a_task_unless_min_partitions_splits_it(planned):
    assert planned() == [task(T[0], 10, 20), task(T[1], 10, 12)]
    assert Logs.is_closed
    assert planned(minPartitions="4") == [
        task(T[0], 10, 13),
        task(T[0], 13, 16),
        task(T[0], 16, 20),
        task(T[1], 10, 12),
    ]


def test_nothing_to_read_is_one_task_without_a_range(planned):
    assert planned(startingOffsets="latest") == [None]
    reader = MarshalBatchReader(parse(BASE), None)
    assert list(reader.read(TaskPartition(None))) == []
    assert list(reader.read(InputPartition(None))) == []


def test_a_start_below_the_log_fails_or_is_moved(planned):
    below = {"startingOffsets": json.dumps({"t": {"0": 3}})}
    with pytest.raises(PositionError, match="log begins at 10"):
        planned(**below)
    assert Logs.is_closed
    assert planned(**below, failOnDataLoss="false")[0] == task(T[0], 10, 20)


def test_a_task_is_read_with_its_options_and_schema(monkeypatch):
    seen = []
    monkeypatch.setattr(fetch, "read", lambda *a, **k: iter([seen.append((a, k))]))
    options, one = parse(BASE), task(T[0], 1, 2)
    list(MarshalBatchReader(options, "schema").read(TaskPartition(one)))
    assert seen == [((one, options), {"schema": "schema"})]


class Claims:
    """Records the calls, and plans ten offsets."""

    def __init__(self):
        self.calls = []
        self.ends = {T0: 12}

    def without_unread(self, marks):
        return marks

    def latest(self, start, limit):
        self.calls.append(("latest", start, limit))
        return END

    def parts(self, start, end):
        self.calls.append(("parts", start, end))
        return [
            Part(
                PlannedRange(partition=T0, token=TOKEN, first=0, end=10), OWNER, SECRET
            )
        ]

    def confirm(self, marks):
        self.calls.append(("confirm", marks))

    def fix_target(self):
        self.calls.append(("aim",))


class Query:
    closed = 0

    origin = ORIGIN

    class marshal:  # noqa: N801
        group_id = "g"

    def __init__(self):
        self.claims = Claims()

    def close(self):
        self.closed += 1


@pytest.fixture
def reader(monkeypatch):
    """A reader whose query opens without a cluster."""
    made = []

    def open_query(options, *, is_new):
        made.append((Query(), is_new))
        return made[-1][0]

    monkeypatch.setattr(module.Query, "open", open_query)

    def read(**more):
        source = MarshalDataSource(STREAM | more)
        reader = source.streamReader(source.schema())
        reader.made = made  # type: ignore[attr-defined]
        return reader

    return read


def test_connections_open_on_first_use(reader):
    one = reader()
    assert one.initialOffset() == {}
    assert isinstance(one.getDefaultReadLimit(), ReadAllAvailable)
    assert one.reportLatestOffset() is None
    one.stop()
    assert one.made == []
    one.latestOffset({}, ReadAllAvailable())
    assert [is_new for _, is_new in one.made] == [True]
    one = reader()
    one.commit(to_offset(END, ORIGIN))
    assert one.made[-1][1] is False, "a restart: there was no initial offset"


@pytest.mark.parametrize(
    ("options", "limit", "wanted"),
    [
        ({}, ReadAllAvailable(), Limit()),
        ({"maxOffsetsPerTrigger": "9"}, ReadMaxRows(9), Limit(9)),
        ({"minOffsetsPerTrigger": "3"}, ReadMinRows(3), Limit(None, 3)),
        (
            {"maxOffsetsPerTrigger": "9", "minOffsetsPerTrigger": "3"},
            ReadMaxRows(9),
            Limit(9, 3),
        ),
    ],
)
def test_limits_are_those_of_the_options(reader, options, limit, wanted):
    one = reader(**options)
    assert one.getDefaultReadLimit() == limit
    assert one.latestOffset({}, limit) == to_offset(END, ORIGIN)
    query, _ = one.made[0]
    assert query.claims.calls == [("latest", {}, wanted)]
    assert one.reportLatestOffset() == {"t:0": 12}


def test_an_offset_stays_the_same_if_nothing_is_planned(reader):
    """Spark compares texts, and would run an empty batch."""
    one = reader()
    old = {name: text for name, text in to_offset(END, ORIGIN).items() if ":" in name}
    assert one.latestOffset(old, ReadAllAvailable()) == old
    assert one.latestOffset({}, ReadAllAvailable()) == to_offset(END, ORIGIN)


def test_the_checkpoint_of_another_group_is_refused(reader):
    one = reader()
    other = to_offset(END, ORIGIN) | {"group": "h"}
    for use in (
        lambda: one.latestOffset(other, ReadAllAvailable()),
        lambda: one.partitions({}, other),
        lambda: one.commit(other),
    ):
        with pytest.raises(ConfigurationError, match="written with group h"):
            use()
    assert one.made[0][0].claims.calls == []


def test_read_all_available_overrides_the_limits(reader):
    one = reader(maxOffsetsPerTrigger="1", minOffsetsPerTrigger="1")
    one.latestOffset({}, ReadAllAvailable())
    assert one.made[0][0].claims.calls == [("latest", {}, Limit())]


def test_tasks_carry_their_range_and_claim(reader):
    one = reader(minPartitions="2")
    tasks = [each.task for each in one.partitions({}, to_offset(END, ORIGIN))]
    assert [(task.first, task.end) for task in tasks] == [(0, 5), (5, 10)]
    claim = tasks[0].claim
    assert (claim.group_id, claim.topic, claim.partition) == ("g", "t", 0)
    assert (claim.client_id, claim.incarnation) == ("me", OWNER.incarnation)
    assert (claim.epoch, claim.token, claim.secret) == (55, "1.0.55", SECRET)
    assert pickle.loads(pickle.dumps(tasks)) == tasks
    one = reader(maxRecordsPerPartition="4")
    tasks = [each.task for each in one.partitions({}, to_offset(END, ORIGIN))]
    assert [(task.first, task.end) for task in tasks] == [(0, 3), (3, 6), (6, 10)]
    one = reader(minPartitions="2", maxRecordsPerPartition="4", delivery="amo")
    (task,) = [each.task for each in one.partitions({}, to_offset(END, ORIGIN))]
    assert (task.first, task.end) == (0, 10), "a range is granted as a whole"


def test_at_most_once_a_second_use_of_a_batch_is_refused(reader):
    """Spark plans a batch for each use of a frame, such as a branch of a union."""
    end = to_offset(END, ORIGIN)
    one = reader(delivery="amo")
    assert len(one.partitions({}, end)) == 1
    with pytest.raises(ConfigurationError, match=r"reads one load\(\) in two places"):
        one.partitions({}, dict(end))
    assert len(one.partitions(end, end | {"t:1": end["t:0"]})) == 1
    one = reader()
    assert one.partitions({}, end) != []
    assert one.partitions({}, end) != [], "at least once each use reads it all"


def test_committed_batches_are_confirmed_and_stop_closes_the_query(reader):
    one = reader()
    one.prepareForTriggerAvailableNow()
    one.commit(to_offset(END, ORIGIN))
    query, _ = one.made[0]
    assert query.claims.calls == [("aim",), ("confirm", END)]
    one.stop()
    one.stop()
    assert query.closed == 1


def test_an_unparsable_offset_raises_an_error_about_the_checkpoint(reader):
    """PySpark calls ``stop`` while its own parse error is handled."""
    one = reader()
    one.latestOffset({}, ReadAllAvailable())

    def parse_offset():
        try:
            json.loads('{"orders:0": "1.0.5 0 1')
        finally:
            one.stop()

    with pytest.raises(ConfigurationError, match=r"has '.*5 0 1' as the end of an off"):
        parse_offset()
    ((query, _),) = one.made
    assert query.closed == 1


def test_available_now_does_not_hide_that_a_query_is_new(reader):
    """Spark calls it before the initial offset, which a start at latest depends on."""
    one = reader()
    one.prepareForTriggerAvailableNow()
    one.initialOffset()
    one.latestOffset({}, ReadAllAvailable())
    ((query, is_new),) = one.made
    assert is_new
    assert [name for name, *_ in query.claims.calls] == ["aim", "latest"]


def test_sigterm_does_not_interrupt_stop(reader, monkeypatch):
    """Spark sends SIGTERM again and again, and closes the connection."""
    ours = signal.getsignal(signal.SIGTERM)
    module._handle_termination()
    try:
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        module._handle_termination()
        one = reader()
        one.latestOffset({}, ReadAllAvailable())
        query, _ = one.made[0]
        ended = []
        monkeypatch.setattr(
            query,
            "close",
            lambda: ended.append(signal.raise_signal(signal.SIGTERM)),
        )
        one.stop()
    finally:
        signal.signal(signal.SIGTERM, ours)
    assert ended == [None]


def test_a_sigterm_just_before_it_is_ignored_still_closes_the_query(
    reader, monkeypatch
):
    """Spark closes the connection; a signal may arrive while that ends the query."""
    ours = signal.getsignal(signal.SIGTERM)
    module._handle_termination()
    plain = module.ignore_termination

    def ignore():
        signal.raise_signal(signal.SIGTERM)
        plain()

    monkeypatch.setattr(module, "ignore_termination", ignore)
    try:
        one = reader()
        one.latestOffset({}, ReadAllAvailable())
        query, _ = one.made[0]
        with pytest.raises(SystemExit):
            one.stop()
    finally:
        signal.signal(signal.SIGTERM, ours)
    assert query.closed == 1
    one.stop()
    assert query.closed == 1


def test_a_worker_gets_options_without_connections(reader):
    one = reader()
    one.latestOffset({}, ReadAllAvailable())
    del one.made
    other = pickle.loads(pickle.dumps(one))
    assert other._query is None
    assert one._query is not None


class Starts:
    def partitions(self):
        return [T0]

    def resolve(self, bound, partitions):
        return {T0: bound.everywhere}

    def within(self, bound, offsets):
        return offsets


@pytest.mark.parametrize(
    ("more", "is_new", "wanted"),
    [
        ({}, True, {T0: LATEST}),
        ({}, False, {}),
        ({"startingOffsets": "earliest"}, True, {}),
        ({"startingOffsets": "latest"}, True, {T0: LATEST}),
        ({"startingTimestamp": "5"}, False, {T0: EARLIEST}),
    ],
)
def test_starts_are_queried_only_if_needed(more, is_new, wanted):
    found = module._starts(parse(STREAM | more), Starts(), is_new=is_new)
    assert found == wanted


def test_a_random_name_is_valid_and_unique(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "my höst!")
    one, other = module._random_name(), module._random_name()
    assert one.startswith("spark-my-h-st--")
    assert is_identifier(one)
    assert one != other
