import copy
import pickle
import random
import sys
import threading
from operator import attrgetter

import pytest
from confluent_kafka import TopicPartition as ForeignRecord
from enginekit import KEY, T0, H, fold, held_by, owning, spec, world

from kafka_marshal import batches
from kafka_marshal.batches import Batch, CommitToken, runs_of
from kafka_marshal.errors import ClaimLost, ConfigurationError, InvalidTransition
from kafka_marshal.ports import PlainRecord, Records, SourceKind
from kafka_marshal.protocol.types import (
    Token,
    TokenAfterSeek,
    TopicPartition,
    seek_count_of,
)

OLD, NEW = Token(1, 0, 7), Token(1, 0, 9)
FOREIGN = ForeignRecord("t", 0, 3)


def record(partition, offset, *, token=OLD, topic="t"):
    """Return a stand-in for a record: its commit token."""
    return CommitToken(topic=topic, partition=partition, offset=offset, token=token)


@pytest.mark.parametrize(
    ("records", "runs"),
    [
        pytest.param([], [], id="none"),
        pytest.param([(0, 5)], [(0, 5, 5)], id="one"),
        pytest.param([(0, 5), (0, 6), (0, 7)], [(0, 5, 7)], id="dense"),
        pytest.param([(0, 5), (0, 7), (0, 8)], [(0, 5, 5), (0, 7, 8)], id="hole"),
        pytest.param([(0, 6), (0, 5)], [(0, 6, 6), (0, 5, 5)], id="back"),
        pytest.param([(0, 5), (0, 5)], [(0, 5, 5), (0, 5, 5)], id="twice"),
        pytest.param(
            [(0, 0), (1, 1), (1, 2), (0, 3)],
            [(0, 0, 0), (1, 1, 2), (0, 3, 3)],
            id="partitions-mixed",
        ),
    ],
)
def test_runs_cover_exactly_the_given_records(records, runs):
    given = [record(*each) for each in records]
    found = [(r.partition[1], r.first, r.last) for r in runs_of(iter(given))]
    assert found == runs


def test_a_run_ends_where_the_claim_or_topic_changes():
    given = [record(0, 0), record(0, 1, token=NEW), record(0, 2, token=NEW, topic="u")]
    assert [(r.partition, r.token, r.first, r.last) for r in runs_of(given)] == [
        (("t", 0), OLD, 0, 0),
        (("t", 0), NEW, 1, 1),
        (("u", 0), NEW, 2, 2),
    ]


def test_a_pickled_batch_is_committed_through_the_consumer(cluster):
    """As after work in another process."""
    node = owning(cluster, most=4)
    batch = next(node.consumer.batches())
    there = pickle.loads(pickle.dumps(batch))
    assert (there.partition, there.token) == (batch.partition, batch.token)
    assert (there.records, there.values) == (batch.records, batch.values)
    with pytest.raises(InvalidTransition, match=r"t-0 were pickled.*commit\(batch\)"):
        there.commit()
    node.consumer.commit(pickle.loads(pickle.dumps(there)))
    assert node.consumer.committed(T0) == 4


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copied_batch_has_the_same_records(cluster, duplicate):
    batch = next(owning(cluster, most=4).consumer.batches())
    assert duplicate(batch).records == batch.records
    copy.copy(batch).commit()


def test_records_with_equal_tokens_form_one_run():
    given = [CommitToken.of(record(0, 0)), pickle.loads(pickle.dumps(record(0, 1)))]
    assert [(r.first, r.last) for r in runs_of(given)] == [(0, 1)]


def test_a_run_ends_at_a_seek():
    after = TokenAfterSeek.of(OLD, 1)
    given = [record(0, 0), record(0, 1, token=after), record(0, 2, token=after)]
    found = [(r.first, r.last, seek_count_of(r.token)) for r in runs_of(given)]
    assert found == [(0, 0, 0), (1, 2, 1)]


def test_a_commit_token_survives_pickling():
    token = CommitToken.of(record(3, 12))
    assert pickle.loads(pickle.dumps(token)) == token
    assert (token.topic, token.partition, token.offset) == ("t", 3, 12)
    assert hash(token) == hash(CommitToken.of(record(3, 12)))


def polled(node):
    """Poll once; return the records of the one partition."""
    return node.consumer.poll(0).get(T0, [])


# --- Commit tokens, and threads that commit ---


@pytest.mark.parametrize("given", [None, 5, []])
def test_a_commit_token_needs_a_record(given):
    with pytest.raises(TypeError, match="of one record that was handed out"):
        CommitToken.of(given)


def test_a_pickled_commit_token_commits_its_record(cluster):
    node = owning(cluster, most=4)
    kept = [pickle.dumps(node.consumer.commit_token(record)) for record in polled(node)]
    assert max(len(each) for each in kept) < 300
    tokens = [pickle.loads(each) for each in kept]
    node.consumer.commit(tokens[1])
    assert node.consumer.committed(T0) == 0
    node.consumer.commit(tokens[:1])
    assert node.consumer.committed(T0) == 2
    node.consumer.commit(iter(tokens))
    assert node.consumer.committed(T0) == 4


def test_a_commit_token_is_stale_after_a_takeover(cluster):
    node = owning(cluster, most=4)
    token = node.consumer.commit_token(polled(node)[0])
    node.cut(is_cut=True)
    other = cluster.node("b", spec=spec())
    cluster.run_until(held_by(other, 1), 4 * H)
    node.cut(is_cut=False)
    cluster.run(40)
    with pytest.raises(ClaimLost) as caught:
        node.consumer.commit(token)
    assert caught.value.reason == "lease_expired"
    with pytest.raises(ClaimLost):
        node.consumer.poll(0)
    with pytest.raises(ClaimLost) as caught:
        node.consumer.commit(token)
    assert caught.value.reason == "stale_token"
    assert fold(cluster).keys[KEY].position == 0


def test_a_commit_token_of_a_record_not_handed_out_is_refused(cluster):
    node = owning(cluster, most=4)
    (record, *_) = polled(node)
    token = node.consumer.commit_token(record)
    with pytest.raises(InvalidTransition, match="8"):
        node.consumer.commit(
            CommitToken(topic="t", partition=0, offset=8, token=token.token)
        )
    with pytest.raises(ClaimLost, match="t-7 offset 0"):
        node.consumer.commit(
            CommitToken(topic="t", partition=7, offset=0, token=token.token)
        )
    assert node.consumer.committed(T0) == 0


def test_threads_commit_in_any_order():
    cluster = world(records=[2_000, 2_000])
    node = cluster.node("a", spec=spec(most=500))
    cluster.run_until(held_by(node, 2), H)
    cluster.run(40)
    handed = []
    while len(handed) < 4_000:
        for records in node.consumer.poll(0).values():
            handed += records
    parts = [node.consumer.commit_token(record) for record in handed]
    random.Random(4).shuffle(parts)
    failures = []

    def work(mine):
        try:
            for each in mine:
                node.consumer.commit(each)
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(parts[number::4],)) for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not failures
    assert [node.consumer.committed(tp) for tp in node.consumer.assignment()] == [
        2_000,
        2_000,
    ]
    assert all(h.uncommitted_count == 0 for h in node.session.holdings.values())


@pytest.mark.parametrize("with_holes", [False, True], ids=["dense", "holes"])
def test_a_list_commits_exactly_its_records(cluster, with_holes):
    node = owning(cluster)
    records = polled(node)
    chosen = records[:2] + records[3:5] if with_holes else records[:5]
    node.consumer.commit(chosen)
    assert node.consumer.committed(T0) == (2 if with_holes else 5)
    node.consumer.commit(records[2])
    assert node.consumer.committed(T0) == 5


def test_commit_accepts_batches_and_lists_with_batches(cluster):
    node = owning(cluster, most=2)
    batches = node.consumer.batches()
    node.consumer.commit(next(batches))
    assert node.consumer.committed(T0) == 2
    node.consumer.commit([next(batches), *next(batches).records])
    assert node.consumer.committed(T0) == 6


def test_commit_accepts_the_result_of_poll():
    cluster = world(records=[3, 3])
    node = cluster.node("a", spec=spec())
    cluster.run_until(held_by(node, 2), 3 * H)
    node.consumer.commit(node.consumer.poll(0))
    assert {node.consumer.committed(each) for each in node.consumer.assignment()} == {3}
    node.consumer.commit({})


@pytest.mark.parametrize(
    "given",
    [
        {T0: 3},
        [T0],
        {T0: {"offset": 3}},
        [b"t"],
        b"t",
        "t",
        3,
        [FOREIGN],
        {T0: [FOREIGN]},
    ],
)
def test_commit_refuses_other_types_and_names_the_accepted_ones(cluster, given):
    node = owning(cluster)
    polled(node)
    with pytest.raises(TypeError, match=r"or what poll returned, not .* seek"):
        node.consumer.commit(given)
    assert node.consumer.committed(T0) == 0


def test_commit_without_arguments_raises_after_the_claim_is_lost(cluster):
    node = owning(cluster, most=4)
    polled(node)
    node.cut(is_cut=True)
    cluster.run(2 * H)
    assert node.consumer.assignment() == set()
    with pytest.raises(ClaimLost, match="lease_expired"):
        node.consumer.commit()


def batch_of(records):
    return Batch(
        partition=TopicPartition("t", 0), records=records, token=OLD, commit=None
    )


def plain(offset):
    return PlainRecord("t", 0, offset, 90 + offset, 0, b"k", b"v%d" % offset, token=OLD)


def lazily(records, *, made):
    """Return records that are created when they are read; note the created ones."""

    def make(sources, token):
        assert token == OLD
        for each in sources:
            made.append(each.offset)
            yield each

    kind = SourceKind(
        make=make,
        offset=attrgetter("offset"),
        timestamp_ms=attrgetter("timestamp_ms"),
        key=attrgetter("key"),
        value=attrgetter("value"),
    )
    return Records.of_sources(list(records), token=OLD, kind=kind)


@pytest.mark.parametrize("offsets", [[5, 6, 7], [5, 7, 9]])
def test_columns_of_a_batch_create_no_records(offsets):
    records = [plain(each) for each in offsets]
    made = []
    for batch in (batch_of(records), batch_of(lazily(records, made=made))):
        assert (len(batch), batch.first_offset) == (3, 5)
        assert batch.last_offset == offsets[-1]
        assert list(batch.offsets) == offsets
        assert batch.timestamps_ms == [90 + each for each in offsets]
        assert batch.keys == [b"k"] * 3
        assert batch.values == [b"v%d" % each for each in offsets]
        table = batch.to_arrow()
        assert table.column_names == ["offset", "timestamp", "key", "value"]
        assert table.column("offset").to_pylist() == offsets
        assert table.column("value").to_pylist() == batch.values
        assert str(table.schema.field("timestamp").type) == "timestamp[ms, tz=UTC]"
    assert made == [], "columns make no record"
    assert batch.records == tuple(records)
    assert batch.records is batch.records
    assert made == offsets


def test_null_keys_and_values_stay_null():
    record = PlainRecord("t", 0, 5, 1, 0, None, None, token=OLD)
    table = batch_of([record]).to_arrow()
    assert table.column("key").to_pylist() == [None]
    assert table.column("value").to_pylist() == [None]


def test_without_pyarrow_the_error_names_it(monkeypatch):
    batches._arrow.cache_clear()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match="pip install pyarrow"):
        batch_of([plain(5)]).to_arrow()


def test_a_batch_shows_its_offsets_and_not_its_records():
    """Else one line of the application's log would have all its records."""
    cluster = world(records=(10,))
    node = owning(cluster, "a")
    batch = next(node.consumer.batches(4))
    assert repr(batch) == f"<Batch t-0 offsets 0 to 3 token={batch.token}>"
