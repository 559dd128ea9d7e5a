"""Output and progress in one transaction, over whole nodes in memory."""

from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from enginekit import AMO, KEY, T0, H, Stepping, fold, held_by, holders, spec, world
from interrupting import interrupted

from kafka_marshal import deadline
from kafka_marshal.batches import Batch
from kafka_marshal.errors import (
    ClaimLost,
    ConfigurationError,
    CoordinationError,
    InvalidTransition,
)
from kafka_marshal.outgoing import SourceProgress
from kafka_marshal.protocol.types import Token, TokenAfterSeek, TopicPartition
from kafka_marshal.transactions import Mark, TransactionalOutput

OUT = TopicPartition("out", 0)
ID = f"{KEY.group_id}.transactions/t/0"
GROUP = f"{KEY.group_id}.transactions"


@pytest.fixture
def cluster():
    found = world()
    found.kafka.create_topic("out", 1)
    return found


def owning(cluster, client_id="a", **rest):
    node = cluster.node(client_id, spec=spec(most=4, **rest))
    cluster.run_until(held_by(node, 1), 4 * H)
    cluster.run(40)
    return node


def outputs(cluster):
    log = cluster.kafka.log(OUT)
    return [record.value for record in log.records]


def copy(transaction):
    for record in transaction.records:
        transaction.send("out", b"%d" % record.offset)


def run(node, count):
    """Copy until so many transactions are committed; return the offsets of each."""
    found = []
    for transaction in node.consumer.transactions():
        with transaction:
            copy(transaction)
        if transaction.is_committed:
            found.append([record.offset for record in transaction.records])
        if len(found) == count:
            return found
    return found


def numbers(first, end):
    return [b"%d" % offset for offset in range(first, end)]


def test_output_and_progress_are_written_then_the_log_has_the_position(cluster):
    node = owning(cluster)
    assert run(node, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert outputs(cluster) == numbers(0, 8)
    assert cluster.kafka.progress[GROUP, T0].position == 8
    assert node.consumer.committed(T0) == 8
    cluster.run(H)
    assert fold(cluster).keys[KEY].position == 8


def test_a_block_that_raises_writes_nothing_and_its_records_are_repeated(cluster):
    node = owning(cluster)

    def fail():
        with next(node.consumer.transactions()) as transaction:
            copy(transaction)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert outputs(cluster) == []
    assert node.consumer.committed(T0) == 0
    assert run(node, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert outputs(cluster) == numbers(0, 10)


def test_iteration_continues_after_a_block_that_raised(cluster):
    transactions = owning(cluster).consumer.transactions()
    failed = next(transactions)

    def fail():
        with failed:
            copy(failed)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with next(transactions) as repeated:
        copy(repeated)
    assert outputs(cluster) == numbers(0, 4)
    with pytest.raises(InvalidTransition, match="has ended"):
        failed.commit()


def test_each_call_has_its_own_timeout(cluster, monkeypatch):
    node = owning(cluster)
    data, given_ms = node.engine.context.ports.data, []
    make = data.transactions

    def transactions(name, *, group_id, timeout_ms):
        given_ms.append(timeout_ms)
        return make(name, group_id=group_id, timeout_ms=timeout_ms)

    monkeypatch.setattr(data, "transactions", transactions)
    for timeout_ms in (1_000, 2_000):
        with next(node.consumer.transactions(timeout_ms=timeout_ms)) as transaction:
            copy(transaction)
    assert given_ms == [1_000, 2_000]
    assert outputs(cluster) == numbers(0, 8)


def test_a_transaction_left_open_raises_and_its_records_are_repeated(cluster):
    node = owning(cluster)
    transactions = node.consumer.transactions()
    left = next(transactions)
    copy(left)
    with pytest.raises(InvalidTransition, match="neither committed"):
        next(transactions)
    with pytest.raises(InvalidTransition, match="has ended"):
        left.commit()
    with pytest.raises(InvalidTransition, match="has ended"):
        left.send("out", b"late")
    assert run(node, 1) == [[0, 1, 2, 3]]
    assert outputs(cluster) == numbers(0, 4)


def test_values_and_keys_must_be_bytes(cluster):
    node = owning(cluster)
    transaction = next(node.consumer.transactions())
    with pytest.raises(TypeError, match="value must be bytes, not str"):
        transaction.send("out", "text")
    with pytest.raises(TypeError, match="key must be bytes, not int"):
        transaction.send("out", b"", key=5)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"topic": None}, "topic must be a text, not NoneType"),
        ({"headers": {"h": "text"}}, "headers are pairs"),
        ({"headers": [(1, b"")]}, "headers are pairs"),
        ({"headers": [("h",)]}, "headers are pairs"),
        ({"partition": -1}, "partition must be at least 0"),
        ({"partition": "1"}, "partition must be a whole number"),
        ({"partition": True}, "partition must be a whole number"),
    ],
)
def test_what_cannot_be_written_is_refused_by_send(cluster, given, error):
    """Else the commit would fail, or depend on the client library."""
    node = owning(cluster)
    with next(node.consumer.transactions()) as transaction:
        with pytest.raises((TypeError, ConfigurationError), match=error):
            transaction.send(**{"topic": "out"} | given)
        headers = [("h", b"v"), ["i", None]]
        transaction.send("out", headers=headers, partition=np.int64(0))
    assert outputs(cluster) == [None]


def test_a_later_owner_starts_where_the_output_ends(cluster):
    """The former owner died after its transaction, before its heartbeat."""
    first = owning(cluster)
    run(first, 1)
    cluster.run(H)  # the log has 4
    position = fold(cluster).keys[KEY].position
    assert position == 4
    first.log.cut = True
    run(first, 1)
    cluster.crash(first)
    second = owning(cluster, "b")
    assert fold(cluster).keys[KEY].position == 4
    assert run(second, 1) == [[8, 9]]
    assert outputs(cluster) == numbers(0, 10)


def test_only_the_unwritten_rest_of_a_batch_is_handed_out(cluster):
    node = owning(cluster)
    mark = Mark(topic_id="", set_by="", token="1.0.2", seeks=0)
    metadata = msgspec.json.encode(mark).decode()
    cluster.kafka.progress[GROUP, T0] = SourceProgress(2, metadata)
    assert run(node, 1) == [[2, 3]]
    assert node.consumer.committed(T0) == 4


def test_the_broker_fences_the_former_owner_and_its_batch_is_dropped(cluster):
    first = owning(cluster)
    stream = first.consumer.transactions()
    open_one = next(stream)
    copy(open_one)
    first.log.cut = True
    second = owning(cluster, "b")
    assert run(second, 1) == [[0, 1, 2, 3]]
    assert holders(cluster) == ["b"]
    with open_one:
        pass
    assert not open_one.is_committed
    assert outputs(cluster) == numbers(0, 4)


def test_an_owner_whose_claim_ends_before_it_opens_a_producer_writes_nothing(
    cluster, monkeypatch
):
    """The new owner, whose producer it fenced, opens another and writes on."""
    second = []
    first = owning(cluster)
    data = first.engine.context.ports.data
    plain = data.transactions

    def frozen(*given, **rest):
        monkeypatch.setattr(data, "transactions", plain)
        first.log.cut = True
        second.append(owning(cluster, "b"))
        run(second[0], 1)
        first.consumer.stop()
        return plain(*given, **rest)

    monkeypatch.setattr(data, "transactions", frozen)
    assert list(first.consumer.transactions()) == []
    assert outputs(cluster) == numbers(0, 4)
    assert run(second[0], 2) == [[4, 5, 6, 7], [8, 9]]
    assert outputs(cluster) == numbers(0, 10)


# --- Progress that counts ---


def batch(token):
    return SimpleNamespace(partition=T0, token=token)


def claimed(*, topic_id=b"\x01", set_by="aa"):
    return SimpleNamespace(topic_id=topic_id, set_by=set_by)


def written(mine, other):
    return mine.written(SourceProgress(7, msgspec.json.encode(other).decode()))


def test_progress_counts_only_for_its_topic_id_and_set_position():
    old, new = Token(1, 0, 5), Token(1, 0, 9)
    mark = Mark.of(claimed(), batch(old))
    later = Mark.of(claimed(), batch(new))
    assert written(later, mark) == 7
    assert later.written(None) == 0
    assert later.written(SourceProgress(7, "another tool")) == 0
    assert later.written(SourceProgress(7, "")) == 0
    assert written(Mark.of(claimed(topic_id=b"\x02"), batch(new)), mark) == 0
    assert written(Mark.of(claimed(topic_id=None), batch(new)), mark) == 7
    assert written(later, Mark.of(claimed(topic_id=None), batch(old))) == 7
    assert written(Mark.of(claimed(set_by="bb"), batch(new)), mark) == 0
    assert written(Mark.of(claimed(set_by=""), batch(new)), mark) == 0


def test_after_a_seek_only_later_progress_counts():
    token = Token(1, 0, 9)
    before = Mark.of(claimed(), batch(token))
    after = Mark.of(claimed(), batch(TokenAfterSeek.of(token, 1)))
    assert written(after, before) == 0
    assert written(after, after) == 7
    later = Mark.of(claimed(), batch(Token(1, 0, 20)))
    assert written(later, after) == 7


def test_a_sidecar_that_does_not_know_who_set_the_position_is_too_old():
    with pytest.raises(ConfigurationError, match="update the sidecar"):
        Mark.of(claimed(set_by=None), batch(Token(1, 0, 5)))


def test_after_a_seek_back_the_records_are_written_again(cluster):
    node = owning(cluster)
    run(node, 2)
    node.engine.changed = Stepping(cluster)
    node.consumer.seek(T0, 2)
    assert run(node, 2) == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert outputs(cluster) == numbers(0, 8) + numbers(2, 10)
    assert cluster.kafka.progress[GROUP, T0].position == 10


def test_at_most_once_is_refused(cluster):
    node = owning(cluster, delivery=AMO)
    with pytest.raises(InvalidTransition, match="AT_LEAST_ONCE"):
        node.consumer.transactions()


def test_a_consumer_with_transactions_refuses_other_reads_and_commits(cluster):
    node = owning(cluster)
    with next(node.consumer.transactions()) as transaction:
        for call in (
            node.consumer.commit,
            partial(node.consumer.commit, transaction.records),
            node.consumer.poll,
            partial(iter, node.consumer),
            partial(next, node.consumer),
        ):
            with pytest.raises(
                InvalidTransition, match="this consumer has transactions"
            ):
                call()
        transaction.send("out", b"x")
    assert transaction.is_committed


# --- Failures of a producer, with a consumer that only has batches ---


class Claims:
    """A consumer of one partition, whose claim a test ends."""

    is_finished = False

    def __init__(self, *offsets):
        self.token = Token(1, 0, 5)
        self.left = [self.batch(offset) for offset in offsets]
        self.committed = []
        self.is_held = True

    def batch(self, offset):
        record = SimpleNamespace(offset=offset)
        return Batch(
            partition=T0, records=(record,), token=self.token, commit=self.commit
        )

    def commit(self, partition, token, *, first, last):
        if not self.is_held:
            raise ClaimLost("ended", reason="stale_token")
        self.committed.append(last)

    def batches_kept(self, max_records, keep):
        while self.left:
            keep(batch := self.left.pop(0))
            yield batch

    def is_handed_out_again(self, batch):
        return False

    def holding_of(self, batch):
        return claimed() if self.is_held else None

    def assignment(self):
        return {T0} if self.is_held else set()


class Writer:
    """A producer that fails as a test wants it; ``kept`` is what the broker has."""

    def __init__(self, kept, events):
        self.kept, self.events = kept, events
        self.is_outdated = False
        self.fails, self.writes_first = None, False

    def progress(self, partition, *, timeout_ms):
        self.progress_ms = timeout_ms
        return self.kept.get(partition)

    def write(self, records, *, partition, position, metadata):
        fails, self.fails = self.fails, None
        if fails is None or self.writes_first:
            self.kept[partition] = SourceProgress(position, metadata)
            self.events.append(position)
        if fails is not None:
            raise fails

    def close(self):
        self.events.append("close")


@pytest.fixture
def rig():
    claims, kept, events, opened = Claims(3, 4), {}, [], []
    found = SimpleNamespace(claims=claims, kept=kept, events=events, opened=opened)

    def open_writer(name, *, group_id, timeout_ms):
        opened.append((name, group_id))
        found.timeout_ms = timeout_ms
        events.append("open")
        found.writer = Writer(kept, events)
        return found.writer

    found.output = TransactionalOutput(claims, group_id="g", open_writer=open_writer)
    return found


def finish(rig):
    for transaction in rig.output.transactions(timeout_ms=1_000):
        with transaction:
            pass


def test_transactional_ids_name_group_topic_and_partition(rig):
    finish(rig)
    assert rig.opened == [("g.transactions/t/0", "g.transactions")]
    assert rig.claims.committed == [3, 4]


def test_opening_a_producer_and_reading_its_progress_share_a_deadline(rig, monkeypatch):
    """Else a broker that answers the first request late would double the wait."""
    now_s = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr(deadline, "time", clock)
    plain = rig.claims.holding_of

    def holding_of(batch):  # called before and after the opening
        now_s[0] += 3
        return plain(batch)

    rig.claims.holding_of = holding_of
    next(rig.output.transactions(timeout_ms=5_000))
    assert rig.writer.progress_ms == 2_000


def test_another_timeout_opens_another_producer(rig):
    for timeout_ms in (1_000, 2_000):
        with next(rig.output.transactions(timeout_ms=timeout_ms)):
            pass
        assert rig.timeout_ms == timeout_ms
    assert rig.events == ["open", 4, "close", "open", 5]


def test_an_outdated_producer_is_replaced_before_it_fails(rig):
    """It cannot connect again; a new producer loads the renewed TLS files."""
    stream = rig.output.transactions(timeout_ms=1_000)
    with next(stream):
        pass
    rig.writer.is_outdated = True
    with next(stream) as transaction:
        pass
    assert transaction.is_committed
    assert rig.events == ["open", 4, "close", "open", 5]


def test_a_fenced_owner_with_a_valid_claim_opens_a_producer_and_repeats(rig):
    stream = rig.output.transactions(timeout_ms=1_000)
    with next(stream) as transaction:
        rig.writer.fails = ClaimLost("fenced", reason="fenced")
    assert not transaction.is_committed
    with next(stream) as again:
        pass
    assert again.is_committed
    assert rig.events == ["open", "close", "open", 4]
    assert rig.claims.committed == [3]


@pytest.mark.parametrize("is_written", [False, True])
def test_the_progress_decides_after_an_unknown_outcome(rig, is_written):
    stream = rig.output.transactions(timeout_ms=1_000)

    def fail():
        with next(stream):
            rig.writer.fails = CoordinationError("no answer")
            rig.writer.writes_first = is_written

    with pytest.raises(CoordinationError):
        fail()
    finish(rig)
    assert [each for each in rig.events if isinstance(each, int)] == [4, 5]
    assert rig.claims.committed == [3, 4]


def test_a_batch_whose_claim_ends_in_the_block_is_not_written(rig):
    stream = rig.output.transactions(timeout_ms=1_000)
    with next(stream) as transaction:
        rig.claims.is_held = False
    assert not transaction.is_committed
    assert list(stream) == []
    assert rig.events == ["open"]


def test_a_claim_that_ends_after_the_write_is_no_error(rig):
    stream = rig.output.transactions(timeout_ms=1_000)
    transaction = next(stream)
    plain = rig.writer.write

    def write(records, **rest):
        plain(records, **rest)
        rig.claims.is_held = False

    rig.writer.write = write
    with transaction:
        pass
    assert transaction.is_committed
    assert rig.claims.committed == []


def test_a_producer_that_is_opened_after_the_claim_ended_is_closed(rig):
    stream = rig.output.transactions(timeout_ms=1_000)
    plain = rig.claims.assignment

    def assignment():
        found = plain()
        rig.claims.is_held = False
        return found

    rig.claims.assignment = assignment
    assert list(stream) == []
    assert rig.events == ["open", "close"]


def test_iteration_continues_after_a_claim_is_lost(rig):
    plain, lost = rig.claims.batches_kept, [ClaimLost("ended", reason="taken_over")]

    def batches(max_records, keep):
        for batch in plain(max_records, keep):
            yield batch
            if lost:
                raise lost.pop()

    rig.claims.batches_kept = batches
    finish(rig)
    assert rig.claims.committed == [3, 4]


def test_closing_closes_producers_once(rig):
    next(rig.output.transactions(timeout_ms=1_000))
    rig.output.close()
    rig.output.close()
    assert rig.events == ["open", "close"]


def test_the_next_claim_has_a_producer_of_its_own(rig):
    finish(rig)
    rig.claims.token = Token(1, 0, 9)
    rig.claims.left = [rig.claims.batch(5)]
    finish(rig)
    assert rig.events == ["open", 4, 5, "close", "open", 6]


def test_a_producer_of_a_partition_that_was_lost_is_closed_at_the_next_opening(rig):
    finish(rig)
    elsewhere = TopicPartition("t", 1)
    rig.claims.assignment = lambda: {elsewhere}
    batch = Batch(
        partition=elsewhere,
        records=(SimpleNamespace(offset=0),),
        token=rig.claims.token,
        commit=rig.claims.commit,
    )
    rig.claims.left = [batch]
    finish(rig)
    assert rig.events == ["open", 4, 5, "close", "open", 1]


def test_closing_the_consumer_closes_its_producers(cluster, monkeypatch):
    node = owning(cluster)
    closed = []
    run(node, 1)
    monkeypatch.setattr(cluster.kafka.writers[ID], "close", lambda: closed.append(ID))
    node.engine.changed = Stepping(cluster)
    node.consumer.close()
    assert closed == [ID]


def test_of_two_transactions_of_a_batch_only_the_later_one_is_written(rig):
    """As when iteration was left and begins again."""
    former = next(rig.output.transactions(timeout_ms=1_000))
    later = next(rig.output.transactions(timeout_ms=1_000))
    with pytest.raises(InvalidTransition, match="has ended"):
        former.commit()
    with later:
        pass
    assert rig.claims.committed == [3]
    assert [each for each in rig.events if isinstance(each, int)] == [4]


def test_an_interrupt_anywhere_neither_repeats_nor_loses_output():
    """And the position does not stay behind the output."""
    at, is_interrupted = 0, True
    while is_interrupted:
        cluster = world()
        cluster.kafka.create_topic("out", 1)
        node = owning(cluster)
        run(node, 1)
        is_interrupted, _ = interrupted(lambda it=node: run(it, 1), at, everywhere=True)
        while len(outputs(cluster)) < 10:
            run(node, 1)
        assert node.consumer.committed(T0) == 10, at
        assert outputs(cluster) == numbers(0, 10), at
        at += 1
    assert at > 30


def test_polled_records_must_be_committed_before_transactions(cluster):
    """Else later progress would skip them after a crash."""
    node = owning(cluster)
    polled = node.consumer.poll()
    assert polled[T0]
    with pytest.raises(InvalidTransition, match="commit them first"):
        node.consumer.transactions()
    node.consumer.commit(polled)
    assert run(node, 1) == [[4, 5, 6, 7]]


def test_a_batch_that_another_task_has_written_is_not_written_again(rig):
    """As when both tasks were about to commit, and waited for the same thread."""
    stream = rig.output.transactions(timeout_ms=1_000)
    first = next(stream)
    first.end()
    second = next(rig.output.transactions(timeout_ms=1_000))
    first.write()
    assert first.is_committed
    with pytest.raises(InvalidTransition, match="another task has written"):
        second.commit()
    assert rig.events == ["open", 4]
