"""``format("marshal")`` over a real cluster: columns, options, triggers, restarts."""

import json
import re
import time
from pathlib import Path

import pytest
from domain import opened
from kafka import KafkaProducer
from kafka import TopicPartition as Place
from sparkkit import RUN_S, Kit, cells, every, failing, keeping
from waiting import eventually, wall_ms

from kafka_marshal import PositionSpec, TopicPartition

H_MS = 2_000
# A task's range takes several requests for offsets.
SPAN, RECORDS = 50, 330
BLOCK = r"^<!-- run: (spark_(?:stream|batch)) -->\n```python\n(.*?)^```$"


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=H_MS) as domain:
        yield domain


@pytest.fixture(scope="module")
def topic(domain):
    """Three partitions of 20 records; no test adds to them."""
    return domain.data_topic(3, records_each=20)


def places(frame):
    return sorted((row.partition, row.offset) for row in frame.collect())


def positions(domain, group):
    return {k.partition: (v.owner, v.position) for k, v in domain.states(group).items()}


def await_positions(domain, group, wanted):
    """Wait for the positions that a query leaves once its process has ended."""
    try:
        eventually(lambda: positions(domain, group) == wanted, f"{wanted} in the log")
    except AssertionError as error:
        raise AssertionError(f"{error}; there is {positions(domain, group)}") from None


# --- batches


def test_the_columns_are_those_of_sparks_own_source(kit, domain, transport):
    topic = domain.data_topic(1)
    # A time of today: retention would delete records older than a week.
    at_ms = wall_ms() // 1_000 * 1_000 + 123
    producer = KafkaProducer(bootstrap_servers=domain.servers)
    producer.send(
        topic,
        key=b"k",
        value=b"v",
        headers=[("a", b"1"), ("b", b"")],
        timestamp_ms=at_ms,
    )
    producer.send(topic, value=b"", timestamp_ms=at_ms)
    producer.close()
    options = {"transport": transport, "includeHeaders": "true"}
    frame = kit.batch(subscribe=topic, includeToken="true", **options)
    assert [f"{f.name} {f.dataType.simpleString()}" for f in frame.schema] == [
        "key binary",
        "value binary",
        "topic string",
        "partition int",
        "offset bigint",
        "timestamp timestamp",
        "timestampType int",
        "headers array<struct<key:string,value:binary>>",
        "token string",
        "topicId string",
    ]
    first, second = frame.orderBy("offset").collect()
    assert (bytes(first.key), bytes(first.value)) == (b"k", b"v")
    assert (first.topic, first.partition, first.offset) == (topic, 0, 0)
    assert first.timestamp.timestamp() == at_ms / 1_000
    assert first.timestampType == 0
    assert [(h.key, h.value) for h in first.headers] == [("a", b"1"), ("b", b"")]
    assert bytes(second.value) == b""
    assert (second.key, second.headers, second.token) == (None, None, None)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        pytest.param({}, every(20, 20, 20), id="everything"),
        pytest.param(
            {"startingOffsets": {"0": 18, "1": -1, "2": 19}},
            [(0, 18), (0, 19), (2, 19)],
            id="json",
        ),
        pytest.param(
            {"endingOffsets": {"0": 1, "1": 2, "2": 3}, "minPartitions": "6"},
            every(1, 2, 3),
            id="ends-in-more-tasks",
        ),
        pytest.param({"startingTimestamp": "1"}, every(20, 20, 20), id="time"),
        pytest.param(
            {
                "startingTimestamp": "9000000000000",
                "startingOffsetsByTimestampStrategy": "latest",
            },
            [],
            id="time-to-come",
        ),
        pytest.param(
            {
                "startingOffsetsByTimestamp": {"0": 0, "1": 0, "2": 0},
                "endingTimestamp": "1",
            },
            [],
            id="times",
        ),
    ],
)
def test_a_batch_reads_the_range_that_options_name(kit, topic, more, wanted):
    given = {
        name: value if isinstance(value, str) else json.dumps({topic: value})
        for name, value in more.items()
    }
    frame = kit.batch(subscribe=topic, **given)
    assert places(frame) == wanted
    if "minPartitions" in more:
        assert frame.rdd.getNumPartitions() == 6


def test_a_batch_reads_topics_by_pattern_and_assigned_partitions(kit, topic):
    assert kit.batch(subscribePattern=f"{topic}|no-such").count() == 60
    frame = kit.batch(assign=json.dumps({topic: [0, 2]}))
    assert {row.partition for row in frame.collect()} == {0, 2}


def test_transaction_markers_are_skipped_at_each_isolation_level(
    kit, domain, transport
):
    """A transaction's marker is an offset without a record, also the last one."""
    topic = domain.data_topic(1)
    producer = KafkaProducer(
        bootstrap_servers=domain.servers, transactional_id=domain.unique("tx")
    )
    producer.init_transactions()
    for is_kept in (True, False, True):
        producer.begin_transaction()
        for number in range(3):
            producer.send(topic, value=b"%d" % number)
        producer.flush()
        if is_kept:
            producer.commit_transaction()
        else:
            producer.abort_transaction()
    producer.close()
    options = {"subscribe": topic, "transport": transport}
    frame = kit.batch(**options, **{"kafka.isolation.level": "read_committed"})
    assert [o for _, o in places(frame)] == [0, 1, 2, 8, 9, 10]
    assert [o for _, o in places(kit.batch(**options))] == [0, 1, 2, 4, 5, 6, 8, 9, 10]


def test_deleted_offsets_are_skipped_or_end_the_batch(kit, domain, transport):
    topic = domain.data_topic(1, records_each=10)
    more = {"subscribe": topic, "transport": transport}
    whole = kit.batch(**more, failOnDataLoss="false")
    strict = kit.batch(**more)
    # Planned before the records are deleted.
    assert strict.rdd.getNumPartitions() == whole.rdd.getNumPartitions() == 1
    domain.kafka.delete_records({Place(topic, 0): 6})
    assert [o for _, o in places(whole)] == [6, 7, 8, 9]
    with pytest.raises(Exception, match="set failOnDataLoss to false"):
        strict.collect()
    more["startingOffsets"] = json.dumps({topic: {"0": 2}})
    with pytest.raises(Exception, match="log begins at 6"):
        kit.batch(**more).collect()


@pytest.mark.parametrize("name", ["startingOffsets", "endingOffsets"])
def test_an_option_beyond_the_log_raises_or_means_its_end(kit, topic, name):
    beyond = {name: json.dumps({topic: {"0": 50, "1": -1, "2": -1}})}
    with pytest.raises(Exception, match=f"{name} has 50 for {topic}-0, whose log ends"):
        kit.batch(subscribe=topic, **beyond).count()
    rest = kit.batch(subscribe=topic, **beyond, failOnDataLoss="false")
    assert rest.count() == (60 if name == "endingOffsets" else 0)


# --- streams


def test_available_now_reads_all_records_in_limited_batches(kit, domain, topic, group):
    frame = kit.stream(group, subscribe=topic, maxOffsetsPerTrigger="25")
    found = kit.drained(frame)
    assert cells(found) == every(20, 20, 20)
    assert max(len([1 for row in found if row[0] == n]) for n in range(3)) <= 25
    await_positions(domain, group, dict.fromkeys(range(3), (None, 20)))
    again = kit.drained(kit.stream(group, subscribe=topic))
    assert again == [], "the checkpoint says that all is done"
    again = kit.drained(kit.stream(group, subscribe=topic), name="another")
    assert again == [], "and so does the group's position"


def test_a_query_starts_at_the_position_of_a_plain_consumer_of_its_group(
    kit, domain, topic, group
):
    with domain.marshal(group, "plain") as marshal:
        consumer = marshal.consumer(topic)
        seen = set()
        until = time.monotonic() + RUN_S
        while len(seen) < 30 and time.monotonic() < until:
            for records in consumer.poll(500, 30).values():
                seen |= {(r.partition, r.offset) for r in records}
                consumer.commit(records)
    found = cells(kit.drained(kit.stream(group, subscribe=topic)))
    assert sorted([*seen, *found]) == every(20, 20, 20)


def test_triggers_once_and_processing_time_read_new_records(kit, domain, group, unique):
    topic = domain.data_topic(1, records_each=5)
    frame = kit.stream(unique("once"), subscribe=topic)
    assert cells(kit.drained(frame, name="once", once=True)) == every(5)
    found = []
    frame = kit.stream(group, subscribe=topic)
    query = kit.started(frame, keeping(found), processingTime="200 milliseconds")
    try:
        query.processAllAvailable()
        assert cells(found) == every(5)
        domain.produce(topic, 2)
        query.processAllAvailable()
        assert cells(found) == every(7)
        (progress,) = query.lastProgress["sources"]
        assert json.loads(progress["latestOffset"]) == {f"{topic}:0": 7}
    finally:
        query.stop()
    # Spark never confirmed the last batch; its request for more offsets did.
    await_positions(domain, group, {0: (None, 7)})


@pytest.mark.parametrize(
    ("trigger", "message"),
    [
        ({"continuous": "1 second"}, r"(?i)continuous"),
        ({"realTime": "5 minutes"}, r"(?is)real-time.*PythonMicro"),
    ],
    ids=["continuous", "real time"],
)
def test_other_triggers_are_refused(kit, topic, group, trigger, message):
    frame = kit.stream(group, subscribe=topic)
    writer = frame.writeStream.format("console").outputMode("update").trigger(**trigger)
    writer = writer.option("checkpointLocation", kit.checkpoint())
    with pytest.raises(Exception, match=message):
        writer.start().awaitTermination(RUN_S)


def test_an_unfinished_batch_is_repeated_by_the_next_run(kit, domain, topic, group):
    """No other owner came in between, so the batch keeps its number."""
    frame = kit.stream(group, subscribe=topic)
    with pytest.raises(Exception, match="the sink is down"):
        kit.ended(frame, failing)
    assert {p for _, p in positions(domain, group).values()} == {0}
    found = kit.drained(kit.stream(group, subscribe=topic))
    assert cells(found) == every(20, 20, 20)
    assert {row[0] for row in found} == {0}, "the very same batch"


def test_an_unfinished_batch_omits_ranges_of_another_owner(kit, domain, topic, group):
    frame = kit.stream(group, subscribe=topic)
    with pytest.raises(Exception, match="the sink is down"):
        kit.ended(frame, failing)
    other = []
    with domain.marshal(group, "other") as marshal:
        consumer = marshal.consumer(topic)
        until = time.monotonic() + RUN_S
        while len(other) < 30 and time.monotonic() < until:
            for records in consumer.poll(500, 30).values():
                other += [(r.partition, r.offset) for r in records]
                consumer.commit(records)
    # The rest, without the records that the other owner processed.
    found = cells(kit.drained(kit.stream(group, subscribe=topic)))
    assert sorted([*other, *found]) == every(20, 20, 20)


def reset_to(domain, group, position):
    with domain.admin() as admin:
        plan = admin.plan_reset(group, PositionSpec.to_offset(position))
        assert admin.execute(plan).outcome == "committed"


def test_a_running_query_continues_at_the_positions_of_a_reset(kit, domain, group):
    topic = domain.data_topic(2, records_each=10)
    found = []
    query = kit.started(kit.stream(group, subscribe=topic), keeping(found))
    try:
        query.processAllAvailable()
        assert cells(found) == every(10, 10)
        reset_to(domain, group, 4)
        again = [(p, o) for p in range(2) for o in range(4, 10)]
        eventually(
            lambda: query.isActive and cells(found) == sorted([*every(10, 10), *again]),
            "it reads on from the new positions",
        )
    finally:
        query.stop()


def test_a_stopped_query_restarts_at_the_positions_of_a_reset(kit, domain, group):
    """Not from its checkpoint, although no other owner was in between."""
    topic = domain.data_topic(2, records_each=10)
    assert cells(kit.drained(kit.stream(group, subscribe=topic))) == every(10, 10)
    reset_to(domain, group, 4)
    found = cells(kit.drained(kit.stream(group, subscribe=topic)))
    assert found == [(p, o) for p in range(2) for o in range(4, 10)]


def test_a_query_below_the_log_continues_after_the_reset_named_in_its_error(
    kit, domain, group
):
    topic = domain.data_topic(1, records_each=10)
    frame = kit.stream(group, subscribe=topic)
    assert len(kit.drained(frame)) == 10
    domain.produce(topic, 10)
    domain.kafka.delete_records({Place(topic, 0): 15})
    reset = f"groups reset GROUP --topic {topic}:0 --to-earliest"
    for name in ("checkpoint", "another"):
        with pytest.raises(Exception, match=f"its log begins at 15.*{reset}"):
            kit.drained(frame, name=name)
    with domain.admin() as admin:
        plan = admin.plan_reset(group, PositionSpec.earliest())
        assert admin.execute(plan).outcome == "committed"
    assert cells(kit.drained(frame)) == every(20)[15:]


def test_a_stream_at_latest_reads_only_later_records(kit, domain, group):
    topic = domain.data_topic(2, records_each=5)
    found = []
    frame = kit.stream(group, subscribe=topic, startingOffsets="latest")
    query = kit.started(frame, keeping(found))
    try:
        query.processAllAvailable()
        assert found == []
        domain.produce_to(TopicPartition(topic, 1), 2)
        query.processAllAvailable()
        assert cells(found) == [(1, 5), (1, 6)]
    finally:
        query.stop()


def test_available_now_at_latest_reads_records_since_the_first_run(kit, domain, group):
    topic = domain.data_topic(2, records_each=5)
    frame = kit.stream(group, subscribe=topic, startingOffsets="latest")
    assert kit.drained(frame) == []
    domain.produce_to(TopicPartition(topic, 1), 2)
    assert cells(kit.drained(frame)) == [(1, 5), (1, 6)]


def test_at_most_once_a_batch_beyond_the_span_is_read_once(
    spark, broker, unique, tmp_path, via
):
    """One micro-batch of one task, granted in pieces: each record comes once."""
    with opened(broker, unique, h_ms=H_MS, via=via, limits={"span": SPAN}) as domain:
        topic = domain.data_topic(1, records_each=RECORDS)
        group = unique("span")
        through = {} if via == "direct" else {"sidecar": domain.sidecar_address}
        kit = Kit(spark, domain, tmp_path)
        frame = kit.stream(group, subscribe=topic, delivery="amo", **through)
        found = kit.drained(frame)
        assert cells(found) == every(RECORDS)
        assert {batch for batch, _, _ in found} == {0}, "there was more than one batch"
        history = domain.history()
        (grants,) = history.grants(group).values()
        wanted = [(n, min(n + SPAN, RECORDS) - 1) for n in range(0, RECORDS, SPAN)]
        assert [(each.first, each.last) for each in grants] == wanted
        assert history.reasons() == [], "nothing that was asked for was refused"
        if via == "sidecar":
            assert domain.sidecar.answered("grant") == len(grants)


def test_the_documented_examples_work(kit, domain, unique):
    root = Path(__file__).parents[2]
    section = (root / "README.md").read_text().partition("\n## Spark\n")[2]
    page = section.partition("\n## ")[0] + (root / "docs" / "SPARK.md").read_text()
    blocks = dict(re.findall(BLOCK, page, re.MULTILINE | re.DOTALL))
    assert {"spark_stream", "spark_batch"} <= blocks.keys()
    topic = domain.data_topic(3, records_each=10)
    named = {
        '"payments"': f'"{topic}"',
        '"group", "billing"': f'"group", "{unique("billing")}").option('
        f'"coordinationTopic", "{domain.topic}").option("stateDir", ""',
    }
    scope = {}
    for code in blocks.values():
        for name, other in named.items():
            code = code.replace(name, other)  # noqa: PLW2901
        exec(code, scope)
    found = []
    query = scope["run"](kit.spark, keeping(found), kit.checkpoint(), domain.servers)
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    assert cells(found) == every(10, 10, 10)
    rows = scope["totals"](kit.spark, domain.servers).collect()
    assert {row["partition"]: row["count"] for row in rows} == {0: 5, 1: 10, 2: 10}


# --- refused options and checkpoints


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"subcribe": "t"}, r"did you mean subscribe\?"),
        ({"subscribe": "t", "subscribePattern": "t"}, "exactly one of"),
        ({"subscribe": "t", "transport": "slow"}, "transport is 'slow'"),
    ],
)
def test_invalid_options_are_refused_at_once(kit, group, more, message):
    with pytest.raises(Exception, match=message):
        kit.stream(group, **more)


def test_a_stream_without_a_group_and_a_batch_with_one_are_refused(kit, topic):
    reader = kit.spark.readStream.format("marshal").options(**kit.cluster)
    frame = reader.option("subscribe", topic).load()
    with pytest.raises(Exception, match="name the group") as raised:
        kit.ended(frame, failing)
    assert "UnboundLocalError" not in str(raised.value), "PySpark's own hides ours"
    with pytest.raises(Exception, match="availableNow=True"):
        kit.batch(subscribe=topic, group="g").collect()


def test_the_checkpoint_of_another_query_is_refused(kit, domain, topic, group, unique):
    assert len(kit.drained(kit.stream(group, subscribe=topic))) == 60
    other = domain.data_topic(1, records_each=7)
    for given, more, message in [
        (unique("audit"), {"subscribe": topic}, f"written with group {group}"),
        (group, {"subscribe": topic, "delivery": "amo"}, "written with delivery alo"),
        (group, {"subscribe": other}, "the query does not read it"),
    ]:
        with pytest.raises(Exception, match=message):
            kit.drained(kit.stream(given, **more))
    lenient = {"subscribe": other, "failOnDataLoss": "false"}
    assert cells(kit.drained(kit.stream(group, **lenient))) == every(7)
    both = f"{topic},{other}"
    domain.produce(other, 1)
    found = kit.drained(kit.stream(group, subscribe=both))
    assert cells(found) == [(0, 7)], "the first is at the group's position"


def test_a_half_written_offset_raises_with_the_files_to_delete(kit, domain, group):
    topic = domain.data_topic(1, records_each=20)
    frame = kit.stream(group, subscribe=topic, maxOffsetsPerTrigger="15")
    assert cells(kit.drained(frame)) == every(20)
    home = Path(kit.checkpoint())
    written = home / "offsets" / "1"
    written.write_text(written.read_text()[:-20])
    with pytest.raises(Exception, match="Delete that file, that of the same number in"):
        kit.drained(frame)
    for folder in ("offsets", "commits"):
        (home / folder / "1").unlink()
        (home / folder / ".1.crc").unlink()
    domain.produce(topic, 5)
    found = cells(kit.drained(frame))
    assert set(found) >= {(0, offset) for offset in range(20, 25)}


def test_an_unreachable_topic_or_broker_is_an_error(kit, topic):
    with pytest.raises(Exception, match="topic 'no-such' does not exist"):
        kit.batch(subscribe="no-such").collect()
    kit.cluster["kafka.bootstrap.servers"] = "127.0.0.1:1"
    with pytest.raises(Exception, match=r"127\.0\.0\.1:1"):
        kit.batch(subscribe=topic).collect()
