"""The consumer: hands out records of the partitions that its claims hold.

It runs on the application's thread. The engine's thread renews the claims, however long
a handler takes. Before every hand-out the lease is checked (PROTOCOL 5.2); records
fetched under a claim that has ended are dropped.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from kafka_marshal.arguments import (
    require_flag,
    to_count,
    to_ms,
    to_offset_in,
    to_partition,
    to_whole,
)
from kafka_marshal.batches import Batch, CommitToken, Processed, runs_of
from kafka_marshal.closing import Closing
from kafka_marshal.config import Callbacks, ConsumerConfig
from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import (
    ClaimLost,
    InvalidTransition,
    MarshalError,
)
from kafka_marshal.ports import DataReader, LogRange, Record, Records
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.types import Token, TopicPartition, seek_count_of

if TYPE_CHECKING:
    # As in ``client``: importing this module does not import these.
    from kafka_marshal.engine import Subscription
    from kafka_marshal.engine.fetch_state import FetchState
    from kafka_marshal.engine.holding import Holding
    from kafka_marshal.engine.holdings import ClaimSession
    from kafka_marshal.engine.interfaces import ClaimEngine
    from kafka_marshal.transactions import Transaction, TransactionalOutput

CLOSE_MS_MAX = 10_000
ASK_MS_MAX = 10_000
TRANSACTION_MS_MAX = 30_000


class _Process:
    """Id of this process, updated after a fork, so that checks need no system call."""

    pid = os.getpid()

    @classmethod
    def refresh(cls) -> None:
        """Read the id again, in a forked child."""
        cls.pid = os.getpid()


os.register_at_fork(after_in_child=_Process.refresh)


_ONE = (Record, CommitToken)


class Consumer(Closing):
    """Consumes topics in a group; made by ``Marshal.consumer``.

    Only one thread at a time may poll, iterate or seek; a second thread gets
    ``InvalidTransition``. Any thread may call the other methods, and signal handlers
    may call ``stop``.

    Attributes:
        is_close_confirmed: False if the log did not confirm the close in time.
    """

    def __init__(
        self,
        engine: "ClaimEngine",
        session: "ClaimSession",
        *,
        subscription: "Subscription",
        reader: DataReader,
        callbacks: Callbacks,
    ) -> None:
        from kafka_marshal.engine.dispatcher import Dispatcher

        self._engine = engine
        self._session = session
        self._subscription = subscription
        self._reader = reader
        self._config = subscription.config
        self._clock = engine.context.ports.clock
        self._dispatcher = Dispatcher(
            engine,
            session,
            subscription=subscription,
            reader=reader,
            callbacks=callbacks,
        )
        self._turn = self._dispatcher.turn
        self._fetch_states = self._dispatcher.fetch_states
        # The same dict: plain tuples are equal to TopicPartition, and cheaper to make.
        self._by_name = cast("dict[tuple[str, int], FetchState]", self._fetch_states)
        self._output: TransactionalOutput | None = None
        self._is_stopped = False
        self._is_closed = False
        self.is_close_confirmed = True
        self._pid = _Process.pid
        # Closing while this exception is still handled is no failure of the work.
        self._caught_before = sys.exc_info()[1]

    def __repr__(self) -> str:
        """Return group, client, topics and state; never waits."""
        state = "stopped" if self._is_stopped else "open"
        return (
            f"<Consumer group_id={self._subscription.group_id!r} "
            f"client_id={self._session.claimant.owner.client_id!r} "
            f"topics={sorted(self._subscription.topics)} "
            f"{'closed' if self._is_closed else state}>"
        )

    # --- reading

    def poll(
        self, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Record]]:
        """Return records that are now handed out to the caller.

        Args:
            timeout_ms: How long to wait for the first record.
            max_records: Most records to return; by default ``max_poll_records``.

        Returns:
            Records by partition, in offset order; empty if none arrived in time, or if
            the group is paused. If a signal handler raises during the call, as Ctrl-C
            does, the next call returns the records, and ``commit`` does not count them
            before. After ``stop`` the consumer requests no more grants, and fetches
            only granted records: calls return records fetched or granted before.

        Raises:
            ClaimLost: A partition with uncommitted records was lost, and there is no
                ``on_lost``. Other partitions are unaffected.
            PositionError: A position lies beyond the end of its log.
            IdentityConflict: Another live process uses this client_id.
            CoordinationError: The engine failed for good.
            InvalidTransition: Another thread polls, iterates or seeks now.
            ConfigurationError: An argument is not a number, or is too small.
        """
        self.require_no_transactions()
        wait_ms = to_ms("timeout_ms", timeout_ms)
        most = self._most(max_records)
        if most == 1 and (record := self._take_fetched()) is not None:
            return {TopicPartition(record.topic, record.partition): [record]}
        self._require_usable()
        with self._turn:
            return _made(self._poll(wait_ms, most))

    def _most(self, max_records: int | None) -> int:
        if max_records is None:
            return self._config.max_poll_records
        return to_count("max_records", max_records)

    def _poll(
        self, timeout_ms: int, most: int, *, partitions_max: int | None = None
    ) -> dict[TopicPartition, Sequence[Record]]:
        deadline = Deadline(timeout_ms, self._clock.now_ms)
        dispatcher = self._dispatcher
        if self.is_closed:  # by another thread, just before
            return {}
        dispatcher.take_back()
        while True:
            # While this call waits, the application counts as polling.
            self._subscription.back_at_ms = self._clock.now_ms()
            self._sync()
            handed = dispatcher.hand_out(most, partitions_max=partitions_max)
            if handed:
                if not self._is_stopped:
                    dispatcher.read_ahead()
                return handed
            try:
                if self._is_stopped:
                    if not dispatcher.fetch_granted(deadline.left_ms):
                        return handed
                else:
                    dispatcher.fetch(deadline.left_ms)
            except MarshalError:
                if not self._is_closed:
                    raise
            if self._is_closed:  # by a signal handler, or another thread
                return handed
            handed = dispatcher.hand_out(most, partitions_max=partitions_max)
            if handed or deadline.is_over:
                return handed

    def poll_fetched(
        self, max_records: int | None = None, *, partitions_max: int | None = None
    ) -> dict[TopicPartition, list[Record]]:
        """Hand out records that are already fetched; never wait.

        For loops that must not block, such as asyncio's, while another thread calls
        ``prefetch``. Calls of the two methods must not overlap.

        Args:
            max_records: Most records to return; by default ``max_poll_records``.
            partitions_max: Most partitions to return records of; None = no limit.

        Returns:
            Records by partition, like ``poll``, whose errors it also raises.
        """
        self.require_no_transactions()
        with self._turn:
            return _made(self._hand_out_fetched(max_records, partitions_max))

    def batch_fetched(
        self, max_records: int | None, keep: Callable[[Batch], None]
    ) -> Batch | None:
        """Hand out a batch that is already fetched; never wait.

        Args:
            max_records: Most records; by default ``max_poll_records``.
            keep: Called with the batch, as in ``batches_kept``.

        Returns:
            None if nothing is fetched.
        """
        with self._turn:
            for partition, records in self._hand_out_fetched(max_records, 1).items():
                batch = self.batch_of(partition, records)
                keep(batch)
                return batch
        return None

    def _hand_out_fetched(
        self, max_records: int | None, partitions_max: int | None
    ) -> dict[TopicPartition, Sequence[Record]]:
        self._dispatcher.take_back()
        self._sync()
        most = self._most(max_records)
        return self._dispatcher.hand_out(most, partitions_max=partitions_max)

    def prefetch(self, timeout_ms: int) -> None:
        """Fetch, or wait for fetches in flight, without handing anything out.

        Args:
            timeout_ms: Longest time; it returns after at most 100 ms.

        Raises:
            PositionError: A position lies beyond the end of its log.
            CoordinationError: The engine failed for good.
        """
        self._require_usable()
        if not self._is_stopped:
            self._dispatcher.fetch(timeout_ms)
        elif not self._dispatcher.fetch_granted(timeout_ms):
            self._dispatcher.wait(timeout_ms)

    def report_here(self) -> None:
        """Apply changes of the claims, and call callbacks, on this thread alone."""
        self._dispatcher.thread = threading.get_ident()

    def report_closed(self) -> None:
        """Report to ``on_topics`` that no topic is held any more, after the close."""
        self._dispatcher.notify_topics(())

    @property
    def is_finished(self) -> bool:
        """Whether iteration is over: stopped, and no granted records are left."""
        # No other process gets the granted records, so a stop still hands them out.
        return self._is_stopped and (
            self._is_closed or not self._dispatcher.holds_grants()
        )

    def __iter__(self) -> Iterator[Record]:
        """Iterate over records, one hand-out at a time, until ``stop``.

        Under at most once, records granted before the stop are still handed out.
        """
        self.require_no_transactions()
        return self

    def __next__(self) -> Record:
        """Return the next record; its lease is checked now, not when it was fetched."""
        self.require_no_transactions()
        record = self._take_fetched()
        if record is not None:
            return record
        with self._turn:
            found = self._await_next(1)
            if found is not None:
                return found[1][0]
        raise StopIteration

    def next_fetched(self) -> Record | None:
        """Hand out one record that is already fetched, by a fast path.

        Returns:
            None if the fast path does not apply and ``poll`` must be called: nothing
            is fetched, claims have changed, or the guarantee is at most once.
        """
        self.require_no_transactions()
        return self._take_fetched()

    def _take_fetched(self) -> Record | None:
        if self._is_stopped or self._pid != _Process.pid:
            return None
        return self._dispatcher.hand_out_one()

    def batches(self, max_records: int | None = None) -> Iterator[Batch]:
        """Iterate over batches of one partition each, until ``stop``.

        A batch is handed out when the iterator advances to it, not before.
        """
        return self.batches_kept(max_records, lambda _: None)

    def batches_kept(
        self, max_records: int | None, keep: Callable[[Batch], None]
    ) -> Iterator[Batch]:
        """Iterate like ``batches``; pass each to ``keep`` before it counts as received.

        If a signal handler raises, ``keep`` has got the batch, or the records of the
        batch are handed out again, or both: see ``is_handed_out_again``.
        """
        most = self._most(max_records)
        while True:
            with self._turn:
                found = self._await_next(most)
                if found is None:
                    return
                batch = self.batch_of(*found)
                keep(batch)
            yield batch

    def is_handed_out_again(self, batch: Batch) -> bool:
        """Return whether the hand-out of a batch was interrupted and is repeated."""
        return any(
            state.partition == batch.partition for state in self._dispatcher.taken or ()
        )

    def batch_of(self, partition: TopicPartition, records: Sequence[Record]) -> Batch:
        """Return a batch of the records that one poll handed out of a partition."""
        if not isinstance(records, Records):
            records = tuple(records)
        token = records.token if isinstance(records, Records) else records[0].token
        assert token is not None, "records are fetched under a claim"
        return Batch(
            partition=partition,
            records=records,
            token=token,
            commit=self._commit_range,
        )

    def _await_next(self, most: int) -> tuple[TopicPartition, Sequence[Record]] | None:
        """Wait for the next records of the iteration; return None at its end."""
        from kafka_marshal.engine.dispatcher import FETCH_SLICE_MS

        timeout_ms = self._config.consumer_timeout_ms
        since_ms = self._clock.now_ms()
        while not self.is_finished:
            handed = self._poll(FETCH_SLICE_MS, most, partitions_max=1)
            for found in handed.items():
                return found
            if timeout_ms is not None and self._clock.now_ms() - since_ms >= timeout_ms:
                return None
        return None

    def transactions(
        self,
        max_records: int | None = None,
        *,
        timeout_ms: int = TRANSACTION_MS_MAX,
    ) -> "Iterator[Transaction]":
        """Iterate over batches whose output is written to Kafka exactly once.

        Each batch is a transaction: a context manager with ``records`` and ``send``. At
        the end of its block the output and the progress of the partition are written in
        one transaction of Kafka, and then the records are committed. If the block
        raises, or the transaction fails, nothing is written, and the same records come
        again first. Iteration ends after ``stop``.

        After the first use ``poll``, iteration over the consumer and ``commit`` raise
        ``InvalidTransition``. Do not use ``batches`` any more, either: the output may
        lack the records that it hands out.

        Args:
            max_records: Most records of a transaction; by default ``max_poll_records``.
            timeout_ms: Limit for opening a partition's producer, and for each
                transaction. After a crash readers of the output wait this long, unless
                another member takes the partition over.

        Raises:
            InvalidTransition: The guarantee is at most once; or the previous
                transaction was neither committed nor aborted; or records that other
                calls returned are not committed.
            ConfigurationError: The sidecar is too old.
            MarshalError: A producer could not be opened, or an error of ``poll``.
                Nothing is lost: iterate again.
        """
        wait_ms = to_ms("timeout_ms", timeout_ms)
        return self.open_output().transactions(max_records, timeout_ms=wait_ms)

    def open_output(self) -> "TransactionalOutput":
        """Return the writer of transactions; only it hands out and commits from now on.

        Raises:
            InvalidTransition: See ``transactions``.
        """
        if self._output is not None:
            return self._output
        from kafka_marshal.transactions import TransactionalOutput

        if self._config.is_at_most_once:
            raise InvalidTransition(
                "transactions need delivery at least once: under at most once, granted "
                "records are never handed out again; use "
                "delivery=Delivery.AT_LEAST_ONCE"
            )
        with self._turn:
            self._require_all_committed()
            self._output = TransactionalOutput(
                self,
                group_id=self._subscription.group_id,
                open_writer=self._engine.context.ports.data.transactions,
            )
            return self._output

    def _require_all_committed(self) -> None:
        self._dispatcher.recover()
        with self._engine.lock:
            for partition, state in self._fetch_states.items():
                progress = state.holding.progress
                if isinstance(progress, AtLeastOnce) and progress.uncommitted_count:
                    raise InvalidTransition(
                        f"records of {partition} were handed out and not committed; "
                        "transactions of later ones would skip them: commit them "
                        "first, or open another consumer"
                    )

    def require_no_transactions(self) -> None:
        """Raise if this consumer hands out and commits by transactions.

        Raises:
            InvalidTransition: It does.
        """
        if self._output is not None:
            raise InvalidTransition(
                "this consumer has transactions: to read or commit without them could "
                "lose output; open another consumer for that"
            )

    # --- committing

    def commit(self, records: Processed | None = None) -> None:
        """Mark records as processed; the next heartbeat carries the position.

        Records may be committed out of order: the position moves over the contiguous
        prefix (PROTOCOL 6.1). Under at most once, the grant was the commit: this call
        writes nothing, and only raises if a claim has ended. Any thread may commit.

        Args:
            records: The processed records: a record, its ``commit_token``, a batch, or
                several of these; or the result of ``poll``. None = all records that
                calls have returned so far.

        Raises:
            ClaimLost: A record was handed out under a claim that has ended; another
                process may process it again.
            InvalidTransition: A record was never handed out by this consumer.
            TypeError: The argument is something else, such as an offset.
        """
        self.require_no_transactions()
        if records is None:
            self._require_usable()
            self._commit_everything()
        elif isinstance(records, _ONE):
            self._commit_range(
                (records.topic, records.partition),
                records.token,
                first=records.offset,
                last=records.offset,
            )
        else:
            for partition, token, first, last in runs_of(records):
                self._commit_range(partition, token, first=first, last=last)

    def commit_token(self, record: Record) -> CommitToken:
        """Return a small token that ``commit`` accepts instead of the record.

        Raises:
            TypeError: The argument is not a record.
        """
        return CommitToken.of(record)

    def _commit_range(
        self, partition: tuple[str, int], token: Token | None, *, first: int, last: int
    ) -> None:
        """Commit a range that was handed out of one partition, both ends inclusive."""
        self._require_usable()
        with self._engine.lock:
            holding = self._holding_of(partition, token, first)
            progress = holding.progress
            if isinstance(progress, AtLeastOnce):
                progress.commit(first, last)
                self._session.end_drain(holding)

    def holding_of(self, batch: Batch) -> "Holding | None":
        """Return the claim of a batch; None if it has ended, or after a seek."""
        self._require_usable()
        with self._engine.lock, suppress(ClaimLost):
            return self._holding_of(batch.partition, batch.token, batch.first_offset)
        return None

    def _holding_of(
        self, partition: tuple[str, int], token: Token | None, first: int
    ) -> "Holding":
        """Return the claim under which an offset was handed out, if it is valid."""
        state = self._by_name.get(partition)
        if state is None or state.holding.claim.token != token:
            raise ClaimLost(
                f"{TopicPartition(*partition)} offset {first} was handed out under "
                f"token {token}, which has ended; do not count it as processed",
                reason="stale_token",
            )
        if state.holding.seek_count != seek_count_of(token):
            raise ClaimLost(
                f"{TopicPartition(*partition)} offset {first} was handed out "
                "before a seek; do not count it as processed",
                reason="seek",
            )
        self._require_valid(state, self._clock.now_ms())
        return state.holding

    def _commit_everything(self) -> None:
        now_ms = self._clock.now_ms()
        with self._engine.lock:
            taken = self._dispatcher.taken or ()
            for state in list(self._fetch_states.values()):
                progress = state.holding.progress
                if isinstance(progress, AtLeastOnce) and progress.tracked_count:
                    self._require_valid(state, now_ms)
                    progress.commit_all(
                        below=state.taken_at if state in taken else None
                    )
                    self._session.end_drain(state.holding)
            if self._dispatcher.lost:
                raise self._dispatcher.lost.pop(0)

    def _require_valid(self, state: "FetchState", now_ms: int) -> None:
        claim = state.holding.claim
        if not claim.is_valid(now_ms):
            from kafka_marshal.engine.dispatcher import lost_claim

            # End the claim: otherwise a heartbeat that is read back later would revive
            # it, and the records reported as lost would never be committed.
            with self._engine.changed:
                self._session.check_lease(state.holding, now_ms)
            raise lost_claim(state.partition, claim.ending or Ending("lease_expired"))

    def flush(self, timeout_ms: int = CLOSE_MS_MAX) -> None:
        """Write every position to the log and wait until it is read back.

        Raises:
            ClaimLost: A claim ended meanwhile; its position was not recorded.
            DeadlineExceeded: The positions were not read back in time; the log may
                still get them.
        """
        wait_ms = to_ms("timeout_ms", timeout_ms)
        self._require_usable()
        with self._engine.changed:
            held = list(self._fetch_states.values())
            seqs = self._session.beat_now()
        self._await(lambda: not self._session.is_pending(seqs), wait_ms)
        now_ms = self._clock.now_ms()
        for state in held:
            if state.holding.drain is None:
                self._require_valid(state, now_ms)

    # --- seeking

    def seek(
        self, partition: TopicPartition, offset: int, *, timeout_ms: int = ASK_MS_MAX
    ) -> None:
        """Move the position of a held partition back or forward.

        Only under at least once. Returns once the log has the new position, so that any
        later owner starts there (PROTOCOL 6.6). Records that were handed out before the
        seek can no longer be committed, even if they are handed out again.

        Args:
            partition: A partition that this consumer holds.
            offset: The next offset to hand out, from the start to the end of the log.
            timeout_ms: Longest wait for the log.

        Raises:
            InvalidTransition: The partition is not held, or the guarantee is at most
                once: granted offsets are never handed out again.
            PositionError: The offset lies outside the log; nothing has changed.
            ClaimLost: The claim ended; the position may not have changed. The reason
                is ``seek_unconfirmed`` if an earlier heartbeat, whose append failed,
                may still reach the log: seek again once the partition is assigned.
            DeadlineExceeded: The log did not confirm the seek in time. No records of
                the partition are handed out until it does.
        """
        wanted = to_whole("offset", offset)
        self._seek([to_partition(partition)], lambda _: wanted, timeout_ms)

    def seek_to_beginning(
        self, *partitions: TopicPartition, timeout_ms: int = ASK_MS_MAX
    ) -> None:
        """Seek to the log start in these partitions, or in all held; see ``seek``."""
        wanted = self._named_or_all(partitions)
        self._seek(wanted, lambda found: found.start, timeout_ms)

    def seek_to_end(
        self, *partitions: TopicPartition, timeout_ms: int = ASK_MS_MAX
    ) -> None:
        """Seek to the log end in these partitions, or in all held; see ``seek``."""
        wanted = self._named_or_all(partitions)
        self._seek(wanted, lambda found: found.end, timeout_ms)

    def _named_or_all(self, named: Sequence[TopicPartition]) -> list[TopicPartition]:
        return [to_partition(each) for each in named] or list(self.assignment())

    def _seek(
        self,
        wanted: Sequence[TopicPartition],
        choose: Callable[[LogRange], int],
        timeout_ms: int,
    ) -> None:
        timeout_ms = to_ms("timeout_ms", timeout_ms)
        with self._turn:
            self._seek_to(wanted, choose, timeout_ms)

    def _seek_to(
        self,
        wanted: Sequence[TopicPartition],
        choose: Callable[[LogRange], int],
        timeout_ms: int,
    ) -> None:
        self._dispatcher.recover()
        self._look()
        if self._config.is_at_most_once:
            group_id, first = self._subscription.group_id, next(iter(wanted), None)
            topic = "TOPIC" if first is None else first.topic
            raise InvalidTransition(
                "a consumer cannot seek under at most once: granted records are not "
                "handed out again; to repeat them all the same, run: marshal groups "
                f"reset {group_id} --topic {topic} --to-earliest --allow-reprocess"
            )
        deadline = Deadline(timeout_ms, self._clock.now_ms)
        offsets = self._chosen(wanted, choose, timeout_ms)
        self._look()
        with self._engine.changed:
            states = [self._held_state(each) for each in offsets]
            for state in states:
                self._dispatcher.seek(state, offsets[state.partition])
        held = [state.holding for state in states]
        self._await(
            lambda: all(h.rewind is None or h.claim.ending is not None for h in held),
            deadline.left_ms,
        )
        for state in states:
            if state.holding.rewind is not None:
                from kafka_marshal.engine.dispatcher import lost_claim

                ending = state.holding.claim.ending or Ending("lease_expired")
                raise lost_claim(state.partition, ending)

    def _chosen(
        self,
        wanted: Sequence[TopicPartition],
        choose: Callable[[LogRange], int],
        timeout_ms: int,
    ) -> dict[TopicPartition, int]:
        """Return the offset to seek to in each partition, checked against its log."""
        data, level = self._engine.context.ports.data, self._config.isolation_level
        with self._engine.changed:
            for each in wanted:
                self._held_state(each)
        ranges = data.ranges(wanted, timeout_ms, isolation_level=level)
        found = {each: ranges.get(each) for each in wanted}
        return {
            each: to_offset_in(each, choose(log or LogRange(0, 0)), log=log)
            for each, log in found.items()
        }

    def _held_state(self, partition: TopicPartition) -> "FetchState":
        state = self._fetch_states.get(partition)
        if state is None:
            raise InvalidTransition(
                f"{partition} is not held by this consumer: only held partitions can "
                "be sought; list them with assignment()"
            )
        self._require_valid(state, self._clock.now_ms())
        return state

    # --- questions

    def assignment(self) -> set[TopicPartition]:
        """Return the partitions that this consumer holds now."""
        self._look()
        return set(self._fetch_states)

    def tokens(self) -> dict[TopicPartition, Token]:
        """Return the fencing token of every partition held."""
        self._look()
        states = self._fetch_states.copy()  # another thread reads
        return {
            partition: state.holding.claim.token
            for partition, state in states.items()
            if state.holding.claim.token is not None
        }

    def position(self, partition: TopicPartition) -> int | None:
        """Return the next offset to hand out, None if the partition is not held."""
        self._look()
        state = self._fetch_states.get(to_partition(partition))
        if state is None:
            return None
        is_back = state in (self._dispatcher.taken or ()) and state.taken_at is not None
        return state.taken_at if is_back else state.next_offset

    def committed(self, partition: TopicPartition) -> int | None:
        """Return the position of the partition: all offsets below are processed."""
        self._look()
        state = self._fetch_states.get(to_partition(partition))
        if state is None:
            return None
        progress = state.holding.progress
        if isinstance(progress, AtLeastOnce):
            return progress.position
        glance = self._engine.context.glance(state.holding.key)
        return None if glance is None else glance.position

    def lag(self, timeout_ms: int = ASK_MS_MAX) -> dict[TopicPartition, int]:
        """Return how many offsets each held partition's position is behind its log.

        As with Kafka's consumer groups, the lag is log end less position. Under
        ``read_committed`` the end is the last stable offset. The ends are looked up in
        the cluster.

        Raises:
            DeadlineExceeded: The cluster did not answer in time.
            CoordinationError: The look-up failed.
        """
        timeout_ms = to_ms("timeout_ms", timeout_ms)
        positions = {
            partition: position
            for partition in self.assignment()
            if (position := self.committed(partition)) is not None
        }
        data = self._engine.context.ports.data
        level = self._config.isolation_level
        partitions = list(positions)
        ranges = data.ranges(partitions, timeout_ms, isolation_level=level)
        return {
            partition: max(0, ranges[partition].end - position)
            for partition, position in positions.items()
            if partition in ranges
        }

    def load(self) -> int:
        """Return the number of partitions held."""
        return len(self.assignment())

    def pause(self, *partitions: TopicPartition) -> None:
        """Stop handing out records of these partitions; the claims are kept."""
        self._require_usable()
        self._dispatcher.pause([to_partition(each) for each in partitions])

    def resume(self, *partitions: TopicPartition) -> None:
        """Undo ``pause``."""
        self._require_usable()
        self._dispatcher.resume([to_partition(each) for each in partitions])

    def paused(self) -> set[TopicPartition]:
        """Return the partitions that ``pause`` holds back."""
        return set(self._dispatcher.paused)

    # --- ending

    @property
    def config(self) -> ConsumerConfig:
        """The settings of this consumer."""
        return self._config

    def abandon(self) -> None:
        """Mark the uncommitted records as not processed, for good.

        Under at most once, the log then counts them as not processed (PROTOCOL 6.3).
        """
        self._dispatcher.end_polling(is_done=False)

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    def stop(self) -> None:
        """End iteration and polling soon. For signal handlers and other threads."""
        self._is_stopped = True

    def close(self, *, release: bool = True, timeout_ms: int = CLOSE_MS_MAX) -> None:
        """Release every partition at its committed position. Idempotent.

        Args:
            release: False keeps the claims for a restart of the same client_id within
                one heartbeat interval: a last heartbeat is sent, nothing is released.
                The claims are renewed until the ``Marshal`` closes.
            timeout_ms: How long to wait for the confirmation of the log.

        Raises:
            ConfigurationError: An argument has the wrong type; nothing is closed.
        """
        require_flag("release", release)
        timeout_ms = to_ms("timeout_ms", timeout_ms)
        if self._is_closed or self._pid != _Process.pid:
            return
        self._is_stopped = True
        if self._output is not None:
            self._output.close()
        self._subscription.is_closing = True
        if self._subscription.warming is not None:
            self._subscription.warming.close(0)
        if self._subscription.standby is not None:
            self._subscription.standby.close()
        if self._subscription.warm_fetcher is not None:
            self._subscription.warm_fetcher.close()
        with self._turn.after(timeout_ms):
            seqs = self._unsubscribe(release=release)
        from kafka_marshal.engine.waits import await_left

        try:
            self.is_close_confirmed = await_left(
                self._engine,
                self._session,
                seqs=seqs,
                wait=self._await,
                timeout_ms=timeout_ms,
            )
        finally:
            self._fetch_states.clear()
            self._reader.close(timeout_ms)
        self.report_closed()

    def _unsubscribe(self, *, release: bool) -> list[int]:
        self._dispatcher.recover()
        self._dispatcher.pass_over()
        with self._engine.changed:
            # On an error, the uncommitted records are not finished.
            error = sys.exc_info()[1]
            is_done = error is None or error is self._caught_before
            self._dispatcher.end_polling(is_done=is_done)
            # Set only now: after an earlier exception ``close`` can be repeated.
            self._is_closed = True
            return self._session.unsubscribe(self._subscription, release=release)

    # --- following the session

    def _require_usable(self) -> None:
        if self._pid != _Process.pid:
            from kafka_marshal.engine.read_turn import forked_error

            raise forked_error()
        failure = self._engine.failure or self._session.failure
        if failure is not None:
            raise failure
        if self._is_closed:
            raise InvalidTransition("the consumer is closed")

    def _sync(self) -> None:
        """Apply changes of the claims; called while reading."""
        self._require_usable()
        self._dispatcher.follow()
        if self._dispatcher.lost:
            raise self._dispatcher.lost.pop(0)

    def _look(self) -> None:
        """Apply changes of the claims, unless a thread that reads now does it."""
        self._require_usable()
        with self._turn.if_free() as is_free:
            if is_free:
                self._dispatcher.follow()

    def _await(self, is_done: Callable[[], bool], timeout_ms: int) -> None:
        from kafka_marshal.engine.waits import await_news

        await_news(self._engine, is_done, timeout_ms=timeout_ms)


def _made(
    handed: Mapping[TopicPartition, Sequence[Record]],
) -> dict[TopicPartition, list[Record]]:
    return {
        partition: records if isinstance(records, list) else list(records)
        for partition, records in handed.items()
    }
