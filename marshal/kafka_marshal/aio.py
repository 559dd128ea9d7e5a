"""The asyncio API: the same client, consumers and claims, for an event loop.

It wraps the synchronous classes. Fetched records are handed out on the event loop, with
the same check of the lease (PROTOCOL 5.2). Only waiting runs on a thread, one for each
consumer, in slices of at most 100 ms. The thread hands out no records, so cancelling a
call that waits loses none.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager, suppress
from functools import partial, wraps
from inspect import signature
from signal import SIGINT, SIGTERM, Signals
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
)

from kafka_marshal.arguments import require_flag, to_ms
from kafka_marshal.batches import Batch, CommitToken, Processed
from kafka_marshal.claims import HeldClaim
from kafka_marshal.client import CLOSE_MS_MAX, OPEN_MS_MAX, Marshal
from kafka_marshal.consumer import ASK_MS_MAX, TRANSACTION_MS_MAX, Consumer
from kafka_marshal.deadline import Deadline
from kafka_marshal.engine.dispatcher import FETCH_SLICE_MS
from kafka_marshal.errors import ClaimLost, InvalidTransition, MarshalError
from kafka_marshal.ports import Record
from kafka_marshal.protocol.types import Token, TopicPartition
from kafka_marshal.stopping import forget, stop_on

if TYPE_CHECKING:
    # As in ``client``: importing this module does not import these.
    from kafka_marshal.transactions import Transaction, TransactionalOutput

P = ParamSpec("P")
T = TypeVar("T")

SETTLE_SLICE_S = 1.0


class _Hop(Generic[T]):
    """A thread that makes blocking calls for an event loop, one at a time."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        # A thread's future, not an event loop's: the next caller may run on another.
        self._running: Future[T] | None = None
        self._has_ended = False

    @property
    def is_busy(self) -> bool:
        """Whether a call is running, or its outcome is not yet retrieved."""
        return self._running is not None

    async def run(self, call: Callable[[], T]) -> T:
        """Make a blocking call on the thread, without blocking the loop.

        If the caller is cancelled, the call runs to its end, and the next caller gets
        its error, if it raised one.

        Raises:
            InvalidTransition: ``end`` was called.
        """
        await self.settle()
        if self._has_ended:
            raise InvalidTransition("the consumer is closed")
        self._running = self._executor.submit(call)
        found = await self.settle()
        return found[0]

    async def settle(self) -> tuple[T, ...]:
        """Wait for the running call, if there is one, and return its outcome."""
        running = self._running
        if running is None:
            return ()
        ended = _end_of(running)
        while not ended.done():  # other tasks run at least once
            await asyncio.wait((ended,), timeout=SETTLE_SLICE_S)
        if self._running is running:  # else another task has begun a call since
            self._running = None
        return (running.result(timeout=0),)

    def end(self, call: Callable[[], T] | None = None) -> Future[T] | None:
        """Accept no more calls; make a last one after the others, return its future."""
        self._has_ended = True
        last = None if call is None else self._executor.submit(call)
        self._executor.shutdown(wait=False)
        return last


def _repr_of(wrapping: object, wrapped: object) -> str:
    if wrapped is None:
        return f"<{type(wrapping).__name__} not open>"
    return f"<Async{repr(wrapped).removeprefix('<')}"


def _end_of(running: Future[Any]) -> asyncio.Future[None]:
    """Return a future of this event loop that is done once a thread's call is."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def note() -> None:
        if not ended.done():
            ended.set_result(None)

    def notify(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(note)

    running.add_done_callback(notify)
    return ended


class Steps(AsyncIterator[T]):
    """Iterates over the results of an async function, which returns None at the end.

    A step that is cancelled or fails can be repeated; an async generator would be over.
    """

    def __init__(self, advance: Callable[[], Awaitable[T | None]]) -> None:
        self._advance = advance
        self._is_over = False

    async def __anext__(self) -> T:
        """Return the next value."""
        found = None if self._is_over else await self._advance()
        if found is None:
            raise StopAsyncIteration
        return found

    async def aclose(self) -> None:
        """End the iteration, like the method of an async generator."""
        self._is_over = True


class AsyncTransaction:
    """A ``Transaction`` for an event loop: an async context manager.

    It commits at the end of its block, or aborts if the block raises.
    """

    def __init__(
        self,
        transaction: "Transaction",
        write: "Callable[[Transaction], Awaitable[None]]",
    ) -> None:
        self._transaction = transaction
        self._write = write
        self.partition = transaction.partition
        self.records = transaction.records
        self.token = transaction.token
        self.send = transaction.send
        self.abort = transaction.abort

    @property
    def is_open(self) -> bool:
        """Whether the transaction is neither committed nor aborted yet."""
        return self._transaction.is_open

    @property
    def is_committed(self) -> bool:
        """Whether Kafka has the output and the progress."""
        return self._transaction.is_committed

    async def commit(self) -> None:
        """Write the output and the progress; see ``Transaction.commit``.

        If the call is cancelled, a thread may still commit: see ``is_committed``.
        """
        self._transaction.end()
        await self._write(self._transaction)

    async def __aenter__(self) -> Self:
        """Return the transaction itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commit, or abort if the block raised."""
        if error is not None:
            self.abort()
        elif self.is_open:
            await self.commit()


class AsyncConsumer:
    """A ``Consumer`` for an event loop; made by ``AsyncMarshal.consumer``.

    Entering the consumer, or its first use, opens it. Tasks of one event loop may share
    it; each record goes to one of them. ``Batch.commit`` and ``commit`` never wait for
    the log, and may be called from any thread.
    """

    def __init__(self, make: Callable[[], Consumer]) -> None:
        self._make = make
        self._consumer: Consumer | None = None
        self._hop: _Hop[Any] = _Hop("marshal-consumer")
        self._turn = asyncio.Lock()
        self._is_stopped = False
        self._is_closing = False
        self._is_closed = False

    def __repr__(self) -> str:
        """Return a description of the consumer; never waits."""
        return _repr_of(self, self._consumer)

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has ended."""
        return self._is_closed

    # --- reading

    def __aiter__(self) -> Self:
        """Iterate over records; each is handed out when the iterator advances to it."""
        return self

    async def __anext__(self) -> Record:
        """Return the next record; its lease is checked now, not when it was fetched."""
        consumer = self._consumer
        if consumer is not None and not self._hop.is_busy:
            record = consumer.next_fetched()
            if record is not None:
                return record
        handed = await self._next(lambda c: c.poll_fetched(1, partitions_max=1))
        for records in (handed or {}).values():
            return records[0]
        raise StopAsyncIteration

    def batches(self, max_records: int | None = None) -> AsyncIterator[Batch]:
        """Iterate over batches of one partition each, until ``stop``."""

        def take(consumer: Consumer) -> Batch | None:
            consumer.require_no_transactions()
            return consumer.batch_fetched(max_records, lambda _: None)

        return Steps(lambda: self._next(take))

    def transactions(
        self, max_records: int | None = None, *, timeout_ms: int = TRANSACTION_MS_MAX
    ) -> AsyncIterator[AsyncTransaction]:
        """Iterate over transactions until ``stop``; see ``Consumer.transactions``.

        For one task. A thread opens the producers and writes the transactions. If the
        task is cancelled, the thread finishes its call; unwritten records come again.
        """
        wait_ms = to_ms("timeout_ms", timeout_ms)
        latest: Transaction | None = None

        async def advance() -> AsyncTransaction | None:
            nonlocal latest
            former, latest = latest, None
            if former is not None:
                former.require_ended()
            latest = await self._begin(max_records, wait_ms)
            return None if latest is None else AsyncTransaction(latest, self._write)

        return Steps(advance)

    async def _begin(
        self, max_records: int | None, timeout_ms: int
    ) -> "Transaction | None":
        """Return the next transaction, None at the end."""
        while True:
            async with self._turn:
                consumer = await self._opened()
                await self._hop.settle()
                output = consumer.open_output()
                batch = output.unwritten()
                if consumer.is_finished:
                    return None
                if batch is not None:
                    if output.lacks_producer(batch, timeout_ms):
                        opening = partial(output.open_producer, batch, timeout_ms)
                        await self._hop.run(opening)
                    elif (begun := output.begin(batch)) is not None:
                        return begun
                    continue

            def take(
                consumer: Consumer, output: "TransactionalOutput" = output
            ) -> Batch | None:
                # Another task may have taken a batch that is not written yet.
                found = output.unwritten()
                return found or consumer.batch_fetched(max_records, output.keep)

            with suppress(ClaimLost):  # the partition's next owner reads the progress
                if await self._next(take) is None:
                    return None

    async def _write(self, transaction: "Transaction") -> None:
        async with self._turn:
            if not self._is_closed:  # else the next owner processes the records
                await self._hop.run(transaction.write)

    async def poll(
        self, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Record]]:
        """Return records that are now handed out; see ``Consumer.poll``."""
        wait_ms = to_ms("timeout_ms", timeout_ms)
        found = await self._hand_out(
            lambda consumer: consumer.poll_fetched(max_records), timeout_ms=wait_ms
        )
        return found or {}

    async def _next(self, take: Callable[[Consumer], T]) -> T | None:
        """Wait for the next records; return None, or an empty result, at the end."""
        consumer = await self._opened()
        timeout_ms = consumer.config.consumer_timeout_ms
        return await self._hand_out(take, timeout_ms=timeout_ms, iterates=True)

    async def _hand_out(
        self,
        take: Callable[[Consumer], T],
        *,
        timeout_ms: int | None,
        iterates: bool = False,
    ) -> T | None:
        deadline = None if timeout_ms is None else Deadline(timeout_ms)
        is_last = False
        while True:
            left_ms = FETCH_SLICE_MS if deadline is None else deadline.left_ms
            slice_ms = min(left_ms, FETCH_SLICE_MS)
            async with self._turn:
                consumer = await self._opened()
                await self._hop.settle()
                if iterates and consumer.is_finished:
                    return None
                # No await from here to the return, so that records that are handed out
                # always reach the caller.
                handed = take(consumer)
                if handed or is_last or consumer.is_finished:
                    return handed
                is_last = slice_ms == 0
                await self._hop.run(partial(consumer.prefetch, slice_ms))

    # --- committing

    async def commit(self, records: Processed | None = None) -> None:
        """Mark records as processed; see ``Consumer.commit``."""
        # Not ``_opened``: this thread need not be the event loop's.
        (await self._made()).commit(records)

    async def flush(self, timeout_ms: int = CLOSE_MS_MAX) -> None:
        """Wait until every position is in the log; see ``Consumer.flush``."""
        consumer = await self._opened()
        await asyncio.to_thread(consumer.flush, timeout_ms)

    def commit_token(self, record: Record) -> CommitToken:
        """Return a small token that ``commit`` accepts instead of the record."""
        return CommitToken.of(record)

    # --- questions

    async def assignment(self) -> set[TopicPartition]:
        """Return the partitions that this consumer holds now."""
        return await self._ask(Consumer.assignment)

    async def tokens(self) -> dict[TopicPartition, Token]:
        """Return the fencing token of every partition held."""
        return await self._ask(Consumer.tokens)

    async def position(self, partition: TopicPartition) -> int | None:
        """Return the next offset to hand out, None if the partition is not held."""
        return await self._ask(lambda consumer: consumer.position(partition))

    async def committed(self, partition: TopicPartition) -> int | None:
        """Return the position of the partition: all offsets below are processed."""
        return await self._ask(lambda consumer: consumer.committed(partition))

    async def lag(self, timeout_ms: int = ASK_MS_MAX) -> dict[TopicPartition, int]:
        """Return how many offsets each partition is behind; see ``Consumer.lag``."""
        async with self._turn:
            consumer = await self._opened()
            await self._hop.settle()
            consumer.assignment()  # callbacks about claims run here, on the loop
            ask = partial(consumer.lag, timeout_ms)
            lag: dict[TopicPartition, int] = await self._hop.run(ask)
            return lag

    async def load(self) -> int:
        """Return the number of partitions held."""
        return await self._ask(Consumer.load)

    async def pause(self, *partitions: TopicPartition) -> None:
        """Stop handing out records of these partitions; the claims are kept."""
        await self._ask(lambda consumer: consumer.pause(*partitions))

    async def resume(self, *partitions: TopicPartition) -> None:
        """Undo ``pause``."""
        await self._ask(lambda consumer: consumer.resume(*partitions))

    async def paused(self) -> set[TopicPartition]:
        """Return the partitions that ``pause`` holds back."""
        return await self._ask(Consumer.paused)

    async def seek(
        self, partition: TopicPartition, offset: int, *, timeout_ms: int = ASK_MS_MAX
    ) -> None:
        """Move the position of a held partition; see ``Consumer.seek``."""
        await self._move(lambda c: c.seek(partition, offset, timeout_ms=timeout_ms))

    async def seek_to_beginning(
        self, *partitions: TopicPartition, timeout_ms: int = ASK_MS_MAX
    ) -> None:
        """Seek to the log starts; see ``Consumer.seek_to_beginning``."""
        await self._move(
            lambda c: c.seek_to_beginning(*partitions, timeout_ms=timeout_ms)
        )

    async def seek_to_end(
        self, *partitions: TopicPartition, timeout_ms: int = ASK_MS_MAX
    ) -> None:
        """Seek to the log ends; see ``Consumer.seek_to_end``."""
        await self._move(lambda c: c.seek_to_end(*partitions, timeout_ms=timeout_ms))

    async def _move(self, seek: Callable[[Consumer], None]) -> None:
        async with self._turn:
            consumer = await self._opened()
            await self._hop.settle()
            consumer.assignment()  # callbacks about claims run here, on the loop
            await self._hop.run(partial(seek, consumer))

    async def _ask(self, question: Callable[[Consumer], T]) -> T:
        async with self._turn:
            consumer = await self._opened()
            await self._hop.settle()
            return question(consumer)

    # --- beginning and ending

    def abandon(self) -> None:
        """Mark the uncommitted records as not processed; see ``Consumer.abandon``."""
        if self._consumer is not None:
            self._consumer.abandon()

    def stop(self) -> None:
        """End the iteration soon. For signal handlers and other threads."""
        self._is_stopped = True
        if self._consumer is not None:
            self._consumer.stop()

    async def close(
        self, *, release: bool = True, timeout_ms: int = CLOSE_MS_MAX
    ) -> None:
        """Release every partition at its committed position. Idempotent."""
        require_flag("release", release)
        timeout_ms = to_ms("timeout_ms", timeout_ms)
        self._begin_close()
        async with self._turn:
            if self._is_closed:
                return
            await self._settle()
            close = partial(self._close, release=release, timeout_ms=timeout_ms)
            await self._hop.run(close)
            self._hop.end()
            self._is_closed = True
            if self._consumer is not None:
                self._consumer.report_closed()

    def close_on_thread(self, *, release: bool, timeout_ms: int) -> Future[None] | None:
        """Start to close on the consumer's thread, after the call that it makes now.

        Returns:
            A future that is done once the consumer is closed; None if it was closed.
        """
        self._begin_close()
        if self._is_closed:
            return None
        self._is_closed = True
        return self._hop.end(
            partial(self._close, release=release, timeout_ms=timeout_ms)
        )

    def _begin_close(self) -> None:
        self._is_closing = True
        self.stop()

    def _close(self, *, release: bool, timeout_ms: int) -> None:
        consumer = self._consumer
        if consumer is not None and not consumer.is_closed:
            consumer.close(release=release, timeout_ms=timeout_ms)

    async def _settle(self) -> None:
        """Wait for the thread's call; ignore its error, because this is closing."""
        with suppress(MarshalError):
            await self._hop.settle()

    async def _opened(self) -> Consumer:
        """Return the open consumer, which calls callbacks on this thread alone."""
        consumer = await self._made()
        consumer.report_here()
        return consumer

    async def _made(self) -> Consumer:
        if self._consumer is None:
            await self._hop.settle()
        if self._consumer is None:
            if self._is_closing:
                raise InvalidTransition("the consumer is closed")
            await self._hop.run(self._open)
        assert self._consumer is not None
        return self._consumer

    def _open(self) -> None:
        self._consumer = self._make()
        if self._is_stopped:
            self._consumer.stop()

    async def __aenter__(self) -> Self:
        """Open the consumer and return it."""
        await self._opened()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; uncommitted records are handed out again, here or elsewhere."""
        if kind is not None:
            self.abandon()
        await self.close()


_Prepare = Callable[["AsyncMarshal", Callable[[], Marshal]], None]


def _taking_what_marshal_takes(
    make: Callable[P, Marshal],
) -> Callable[[_Prepare], Callable[Concatenate["AsyncMarshal", P], None]]:
    """Return a decorator for a constructor with ``Marshal``'s arguments.

    The constructor opens nothing. With an assigned ``__init__`` instead of a decorated
    one, type checkers would not know its arguments.
    """
    taken = signature(make)

    def decorate(
        prepare: _Prepare,
    ) -> Callable[Concatenate["AsyncMarshal", P], None]:
        def init(self: "AsyncMarshal", /, *args: P.args, **kwargs: P.kwargs) -> None:
            taken.bind(*args, **kwargs)  # else unknown arguments fail only on entering
            prepare(self, lambda: make(*args, **kwargs))

        return wraps(Marshal.__init__)(init)

    return decorate


def _making_what_marshal_makes(
    method: Callable[Concatenate[Marshal, P], Consumer],
) -> Callable[Concatenate["AsyncMarshal", P], AsyncConsumer]:
    """Return a method with the arguments of ``Marshal.consumer``."""
    taken = signature(method)

    def make(
        self: "AsyncMarshal", /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncConsumer:
        taken.bind(self, *args, **kwargs)
        return self.adopt(lambda: method(self.marshal, *args, **kwargs))

    return wraps(method)(make)


class AsyncMarshal:
    """A ``Marshal`` for an event loop, with the same arguments.

    Entering it opens it::

        async with AsyncMarshal("localhost:9092", group_id="g", client_id="c") as m:
            async for record in m.consumer("payments"):
                ...
    """

    @_taking_what_marshal_takes(Marshal)
    def __init__(self, make: Callable[[], Marshal]) -> None:
        self.prepare(make)

    consumer = _making_what_marshal_makes(Marshal.consumer)
    open_consumer = _making_what_marshal_makes(Marshal.open_consumer)

    def __repr__(self) -> str:
        """Return a description of the client; never waits."""
        return _repr_of(self, self._marshal)

    def prepare(self, make: Callable[[], Marshal]) -> None:
        """Store how to open the client."""
        self._make = make
        self._marshal: Marshal | None = None
        self._hop: _Hop[Any] = _Hop("marshal-aio")
        self._consumers: list[AsyncConsumer] = []
        self._is_stopped = False
        self._is_closed = False
        self._is_ended = False
        self._closing = asyncio.Lock()

    @property
    def marshal(self) -> Marshal:
        """The synchronous client, for calls that do not wait.

        Raises:
            InvalidTransition: The client is not open.
        """
        self._require_not_closed()
        if self._marshal is None:
            raise InvalidTransition(
                "this AsyncMarshal is not open; open it with: async with "
                "AsyncMarshal(...)"
            )
        return self._marshal

    def adopt(self, make: Callable[[], Consumer]) -> AsyncConsumer:
        """Return a consumer that opens later, and closes with this client."""
        consumer = AsyncConsumer(make)
        open_ones = [other for other in self._consumers if not other.is_closed]
        self._consumers = [*open_ones, consumer]
        if self._is_stopped:
            consumer.stop()
        return consumer

    @asynccontextmanager
    async def claim(
        self, topic: str, partition: int, *, timeout_ms: int = OPEN_MS_MAX
    ) -> AsyncIterator[HeldClaim]:
        """Claim one partition without consuming it; see ``Marshal.claim``.

        The methods of the claim do not wait, except ``release``, which runs on a thread
        at the end of the block.
        """
        hop: _Hop[None] = _Hop("marshal-claim")
        won: list[HeldClaim] = []
        marshal = self.marshal

        def win() -> None:
            won.append(marshal.claim(topic, partition, timeout_ms=timeout_ms))

        def release() -> None:
            for claim in won:
                claim.release()

        try:
            await hop.run(win)
            yield won[0]
            await hop.run(release)
        finally:
            # Releasing is idempotent. After an error or a cancelled wait the thread
            # releases the claim, which may still be won.
            hop.end(release)

    async def world(self, *, timeout_ms: int = OPEN_MS_MAX) -> dict[str, Any]:
        """Return the world as plain data; see ``Marshal.world``."""
        return await asyncio.to_thread(self.marshal.world, timeout_ms=timeout_ms)

    async def owners(
        self, topic: str, *, timeout_ms: int = OPEN_MS_MAX
    ) -> dict[TopicPartition, str | None]:
        """Return the owner of each partition of a topic; see ``Marshal.owners``."""
        ask = partial(self.marshal.owners, topic, timeout_ms=timeout_ms)
        return await asyncio.to_thread(ask)

    def stop(self) -> None:
        """End the iteration of every consumer soon; see ``Marshal.stop``."""
        self._is_stopped = True
        for consumer in self._consumers:
            consumer.stop()

    def stop_on_signals(self, signals: Sequence[Signals] = (SIGTERM, SIGINT)) -> None:
        """Call ``stop`` when a signal arrives; see ``Marshal.stop_on_signals``."""
        self._require_not_closed()
        stop_on(signals, self)

    async def close(
        self,
        *,
        release: bool = True,
        restarts: bool = False,
        timeout_ms: int = CLOSE_MS_MAX,
    ) -> None:
        """Close every consumer and claim, and leave the group. Idempotent.

        If the call is cancelled or fails, threads still close everything, but no caller
        waits for them. For the arguments see ``Marshal.close``.
        """
        require_flag("release", release)
        require_flag("restarts", restarts)
        timeout_ms = to_ms("timeout_ms", timeout_ms)
        self._is_closed = True
        self.stop()
        if restarts and self._marshal is not None:
            self._marshal.expect_restart()
        forget(self)
        async with self._closing:
            if not self._is_ended:
                await self._close_all(release=release, timeout_ms=timeout_ms)

    async def _close_all(self, *, release: bool, timeout_ms: int) -> None:
        close = partial(self._close, release=release, timeout_ms=timeout_ms)
        try:
            for consumer in self._consumers:
                await consumer.close(release=release, timeout_ms=timeout_ms)
            with suppress(MarshalError):
                await self._hop.settle()
            await self._hop.run(close)
        except BaseException:
            # Close on threads: otherwise the engine would go on renewing the claims.
            closing = [
                each.close_on_thread(release=release, timeout_ms=timeout_ms)
                for each in self._consumers
            ]
            self._end(partial(self._close_after, closing, close))
            raise
        self._end()

    def _close(self, *, release: bool = True, timeout_ms: int = CLOSE_MS_MAX) -> None:
        marshal, self._marshal = self._marshal, None
        if marshal is not None:
            marshal.close(release=release, timeout_ms=timeout_ms)

    @staticmethod
    def _close_after(
        consumers: Sequence[Future[None] | None], close: Callable[[], None]
    ) -> None:
        # Each close of a consumer has its own time limit.
        wait([each for each in consumers if each is not None])
        close()

    def _end(self, call: Callable[[], None] | None = None) -> None:
        self._is_ended = True
        self._hop.end(call)

    def _open(self) -> None:
        self._marshal = self._make()

    def _require_not_closed(self) -> None:
        if self._is_closed:
            raise InvalidTransition(
                "this AsyncMarshal is closed, or did not open; make another one"
            )

    async def __aenter__(self) -> Self:
        """Open the client and return it.

        Raises:
            MarshalError: Opening failed; see ``Marshal``.
            InvalidTransition: The client was closed, or opening it failed before.
        """
        self._require_not_closed()
        try:
            if self._marshal is None:
                await self._hop.run(self._open)
        except BaseException:
            self._is_closed = True
            self._end(self._close)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the client; see ``close``."""
        if kind is not None:
            for consumer in self._consumers:
                consumer.abandon()
        await self.close()
