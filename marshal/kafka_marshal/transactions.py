"""Writes output to Kafka exactly once, in one transaction with a batch's progress.

Each source partition has a transactional id. After the partition's owner has won the
claim, it opens a producer with that id. From then on the broker refuses earlier
producers, also that of a suspended process. Opening also ends a transaction that an
earlier owner left open, so the *progress* that is read afterwards is final. Progress is
the next offset of the source partition, stored as a committed offset of a separate
Kafka group, and written in the same transactions as the output. Records below it are
not handed out again, however far the position in the coordination log is behind.

Progress names the topic's id, and the operation that last set the partition's position.
It is valid only for these, so a position that an admin sets later is followed.

Nothing is sent before the commit of a transaction. So an exception in the application
leaves nothing to abort, and a slow application keeps no transaction open in Kafka.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self

import attrs
import msgspec

from kafka_marshal.arguments import to_count
from kafka_marshal.batches import Batch
from kafka_marshal.deadline import Deadline
from kafka_marshal.engine.holding import Holding
from kafka_marshal.errors import ClaimLost, ConfigurationError, InvalidTransition
from kafka_marshal.outgoing import Outgoing, SourceProgress, TransactionalWriter
from kafka_marshal.ports import Record
from kafka_marshal.protocol.types import Token, TopicPartition, seek_count_of

SUFFIX = ".transactions"
"""The group's name followed by this names the Kafka group that stores its progress."""

Headers = Sequence[tuple[str, bytes | None]]


class Source(Protocol):
    """The part of a consumer that is used here."""

    @property
    def is_finished(self) -> bool:
        """Whether iteration is over."""
        ...

    def batches_kept(
        self, max_records: int | None, keep: Callable[[Batch], None]
    ) -> Iterator[Batch]:
        """Iterate over batches of one partition each; each is passed to ``keep``."""
        ...

    def is_handed_out_again(self, batch: Batch) -> bool:
        """Return whether the hand-out of a batch was interrupted."""
        ...

    def holding_of(self, batch: Batch) -> Holding | None:
        """Return the claim of a batch; None if it has ended, or after a seek."""
        ...

    def assignment(self) -> set[TopicPartition]:
        """Return the partitions that are held."""
        ...


class Transaction:
    """Records of one partition and their output, which is written as a whole or not.

    A context manager: it commits at the end of its block, or aborts if that raises.

    Attributes:
        partition: Data partition of the records.
        records: The records, in offset order.
        token: Fencing token of the claim.
        is_open: Whether the transaction is neither committed nor aborted yet.
        is_committed: Whether Kafka has the output and the progress.
    """

    def __init__(
        self, output: "TransactionalOutput", batch: Batch, records: Sequence[Record]
    ) -> None:
        self._output = output
        self._batch = batch
        self._outgoing: list[Outgoing] = []
        self.partition = batch.partition
        self.records = tuple(records)
        self.token = batch.token
        self.is_open = True
        self.is_committed = False

    def send(
        self,
        topic: str,
        value: bytes | None = None,
        *,
        key: bytes | None = None,
        headers: Headers | Mapping[str, bytes | None] = (),
        partition: int | None = None,
    ) -> None:
        """Store a record in memory; the commit of the transaction writes it.

        Args:
            topic: Target topic, on the same cluster.
            value: Value.
            key: Key; it selects the partition, as in Java's clients.
            headers: Headers.
            partition: Partition of the target topic; None lets the key select it.

        Raises:
            InvalidTransition: The transaction has ended.
            ConfigurationError: The partition is no number from 0.
            TypeError: Topic, key, value or headers have the wrong type.
        """
        self._require_open()
        for name, given in {"key": key, "value": value}.items():
            if not isinstance(given, bytes | None):
                raise TypeError(f"{name} must be bytes, not {type(given).__name__}")
        target: object = topic
        if not isinstance(target, str):
            raise TypeError(f"topic must be a text, not {type(target).__name__}")
        if partition is not None:
            partition = to_count("partition", partition, least=0)
        pairs = headers.items() if isinstance(headers, Mapping) else headers
        outgoing = Outgoing(topic, key, value, tuple(map(_header, pairs)), partition)
        self._outgoing.append(outgoing)

    def commit(self) -> None:
        """Write the output and the progress, then commit the records.

        If the claim has ended, nothing is written, and ``is_committed`` stays False:
        the next owner of the partition processes the records.

        Raises:
            InvalidTransition: The transaction has ended.
            ConfigurationError: A record is for the coordination topic.
            MarshalError: The outcome is unknown, or a record was refused. The records
                are handed out again unless their output was written.
        """
        self.end()
        self.write()

    def end(self) -> None:
        """Accept no more records: the first half of ``commit``, which does not wait.

        Raises:
            InvalidTransition: The transaction has ended.
        """
        self._require_open()
        self.is_open = False

    def write(self) -> None:
        """Write the output and the progress, once: the second half of ``commit``."""
        self.is_committed = self._output.write(self._batch, self._outgoing)

    def abort(self) -> None:
        """Write nothing; the records come again. Idempotent until a commit."""
        self.is_open = False

    def require_ended(self) -> None:
        """Abort the transaction if it was neither committed nor aborted.

        Raises:
            InvalidTransition: It was neither.
        """
        if self.is_open:
            self.abort()
            raise InvalidTransition(
                f"the transaction of {self.partition} was neither committed nor "
                "aborted; use it in a with statement"
            )

    def _require_open(self) -> None:
        if not self.is_open:
            raise InvalidTransition(
                f"the transaction of {self.partition} has ended; iterate to the next"
            )

    def __enter__(self) -> Self:
        """Return the transaction itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commit, or abort if the block raised."""
        if error is not None:
            self.abort()
        elif self.is_open:
            self.commit()


def _header(given: object) -> tuple[str, bytes | None]:
    """Return a pair of name and value.

    Raises:
        TypeError: It is something else.
    """
    match given:
        case (str(name), bytes() | None as value):
            return name, value
    raise TypeError(f"headers are pairs like ('name', b'value'), not {given!r}")


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Written with the progress, as JSON: states what the progress is valid for.

    Attributes:
        topic_id: Kafka's id of the source topic in hex, empty if unknown.
        set_by: The operation that last set the position before the claim, in hex; empty
            without one.
        token: Token of the claim.
        seeks: Number of seeks under the claim before the output was written.
    """

    topic_id: str
    set_by: str
    token: str
    seeks: int

    @classmethod
    def of(cls, holding: Holding, batch: Batch) -> Self:
        """Return the mark of transactions with records of a batch.

        Raises:
            ConfigurationError: The claim comes from a sidecar that is too old.
        """
        if holding.set_by is None:
            raise ConfigurationError(
                "the sidecar does not report who set the position of "
                f"{batch.partition}, without which transactions are not safe; update "
                "the sidecar: pip install -U 'kafka-marshal[sidecar]', and restart it",
                setting="sidecar",
            )
        return cls(
            topic_id="" if holding.topic_id is None else holding.topic_id.hex(),
            set_by=holding.set_by,
            token=str(batch.token),
            seeks=seek_count_of(batch.token),
        )

    def written(self, progress: SourceProgress | None) -> int:
        """Return the offset below which all output is written; 0 if none is known.

        The progress is valid if its topic, and the operation that last set the
        position, are the same. After a seek under this claim, it is valid only if it
        was written after that seek.
        """
        if progress is None:
            return 0
        try:
            mark = msgspec.json.decode(progress.metadata, type=Mark)
        except msgspec.DecodeError:  # another tool has written it
            return 0
        topic_ids = {self.topic_id, mark.topic_id} - {""}
        here, there = (self.token, self.seeks), (mark.token, mark.seeks)
        counts = (
            len(topic_ids) < 2  # noqa: PLR2004 - not of two topics
            and mark.set_by == self.set_by
            and (self.seeks == 0 or here == there)
        )
        return progress.position if counts else 0


@attrs.frozen(kw_only=True)
class _Open:
    """The producer of a partition, for one claim; each seek needs another one."""

    token: Token
    mark: Mark
    written: int
    writer: TransactionalWriter
    timeout_ms: int

    def is_of(self, batch: Batch, timeout_ms: int) -> bool:
        """Return whether it may write the records of a batch, with that timeout."""
        wanted = batch.token, seek_count_of(batch.token), timeout_ms
        return (self.token, self.mark.seeks, self.timeout_ms) == wanted


class TransactionalOutput:
    """The producers of a consumer's partitions. For one thread at a time.

    ``transactions`` is for a thread that may wait. An event loop takes the same steps
    itself, and has a thread call ``open_producer`` and ``write``.

    Args:
        source: The consumer.
        group_id: Its group.
        open_writer: Opens a producer of a transactional id, whose progress is kept in a
            Kafka group: ``open_writer(id, group_id=..., timeout_ms=...)``.
    """

    def __init__(
        self,
        source: Source,
        *,
        group_id: str,
        open_writer: Callable[..., TransactionalWriter],
    ) -> None:
        self._source = source
        self._name = f"{group_id}{SUFFIX}"
        self._open_writer = open_writer
        self._open: dict[TopicPartition, _Open] = {}
        # A batch that may not be written: handed out again before any other one.
        self._unwritten: Batch | None = None
        # The transaction that ``begin`` returned last.
        self._latest: Transaction | None = None

    def transactions(
        self, max_records: int | None = None, *, timeout_ms: int
    ) -> Iterator[Transaction]:
        """Iterate over transactions until the consumer stops.

        Args:
            max_records: Most records of each; by default ``max_poll_records``.
            timeout_ms: Limit of each transaction, and for opening a producer.

        Raises:
            InvalidTransition: The previous one was neither committed nor aborted.
        """
        batches = self._source.batches_kept(max_records, self.keep)
        while not self._source.is_finished:
            batch = self.unwritten()
            if batch is None:
                try:
                    batch = next(batches, None)
                except ClaimLost:  # the partition's next owner reads the progress
                    batches = self._source.batches_kept(max_records, self.keep)
                    continue
            if batch is None:
                return
            if self.lacks_producer(batch, timeout_ms):
                self.open_producer(batch, timeout_ms)
                continue
            transaction = self.begin(batch)
            if transaction is None:
                continue
            yield transaction
            transaction.require_ended()

    def unwritten(self) -> Batch | None:
        """Return the batch that must be written before another one is handed out."""
        batch = self._unwritten
        if batch is not None and self._source.is_handed_out_again(batch):
            self._unwritten = None
        return self._unwritten

    def keep(self, batch: Batch) -> None:
        """Keep a batch until its output is written, or its claim ends."""
        self._unwritten = batch

    def lacks_producer(self, batch: Batch, timeout_ms: int) -> bool:
        """Return whether the transaction of a batch needs ``open_producer`` first."""
        found = self._open.get(batch.partition)
        is_open = (
            found is not None
            and found.is_of(batch, timeout_ms)
            and not found.writer.is_outdated
        )
        return not is_open and self._source.holding_of(batch) is not None

    def begin(self, batch: Batch) -> Transaction | None:
        """Return the transaction of a batch, None if it needs none."""
        found = self._open.get(batch.partition)
        if found is None or self._source.holding_of(batch) is None:
            self._unwritten = None  # the next owner processes it
            return None
        if batch.last_offset < found.written:
            self._commit(batch)
            return None
        records: Sequence[Record] = batch.records
        if batch.first_offset < found.written:
            records = [each for each in records if each.offset >= found.written]
        if self._latest is not None:
            # It may be left open by another iterator, with the same batch.
            self._latest.abort()
        self._latest = Transaction(self, batch, records)
        return self._latest

    def write(self, batch: Batch, outgoing: Sequence[Outgoing]) -> bool:
        """Write the output of a batch with its progress; return whether it is written.

        Raises:
            MarshalError: The outcome is unknown, or a record was refused.
        """
        found = self._open.get(batch.partition)
        if found is None or self._source.holding_of(batch) is None:
            return False
        if batch is not self._unwritten:
            raise InvalidTransition(
                f"another task has written the transaction of {batch.partition}; "
                "iterate over the transactions of a consumer in one task"
            )
        try:
            found.writer.write(
                outgoing,
                partition=batch.partition,
                position=batch.last_offset + 1,
                metadata=msgspec.json.encode(found.mark).decode(),
            )
            # If a signal handler raises here, the batch comes again. The producer that
            # is then opened for it reads from the progress that it is written.
            self._commit(batch)
        except ClaimLost:
            # Fenced by a later owner, or by an earlier one that opened its producer
            # late. In the second case the claim is still held, and the next attempt
            # fences that producer.
            self._forget(batch.partition)
            return False
        except BaseException:
            self._forget(batch.partition)
            raise
        return True

    def close(self) -> None:
        """Close every producer. Idempotent."""
        self._unwritten = None
        for partition in list(self._open):
            self._forget(partition)

    def _commit(self, batch: Batch) -> None:
        # If the claim has ended, the next owner reads the progress.
        with suppress(ClaimLost):
            batch.commit()
        self._unwritten = None

    def open_producer(self, batch: Batch, timeout_ms: int) -> None:
        """Open the producer for a batch, unless its claim has ended by then.

        Raises:
            ConfigurationError: The claim comes from a sidecar that is too old.
            MarshalError: The cluster did not answer in time, or a right is missing.
        """
        with suppress(ClaimLost):  # fenced while it was opened: see ``write``
            self._renew(batch, timeout_ms)

    def _renew(self, batch: Batch, timeout_ms: int) -> None:
        partition = batch.partition
        for other in self._open.keys() - self._source.assignment() | {partition}:
            self._forget(other)
        deadline = Deadline(timeout_ms)
        writer = self._open_writer(
            f"{self._name}/{partition.topic}/{partition.partition}",
            group_id=self._name,
            timeout_ms=timeout_ms,
        )
        try:
            # Check the claim after opening: as long as it is held, no process has won a
            # later claim. A process that wins one opens a later producer, which fences
            # this one.
            holding = self._source.holding_of(batch)
            if holding is None:
                writer.close()
                return
            mark = Mark.of(holding, batch)
            found = writer.progress(partition, timeout_ms=deadline.left_ms)
        except BaseException:
            writer.close()
            raise
        self._open[partition] = _Open(
            token=batch.token,
            mark=mark,
            written=mark.written(found),
            writer=writer,
            timeout_ms=timeout_ms,
        )

    def _forget(self, partition: TopicPartition) -> None:
        found = self._open.pop(partition, None)
        if found is not None:
            found.writer.close()
