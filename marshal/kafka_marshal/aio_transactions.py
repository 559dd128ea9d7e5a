"""The transactions of a consumer, and iteration, for an event loop."""

from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

if TYPE_CHECKING:
    # As in ``client``: a program that only names the class does not wait for these.
    from kafka_marshal.transactions import Transaction

T = TypeVar("T")


class Steps(AsyncIterator[T]):
    """Iterates by a function that returns the next value, None at the end.

    A step that is cancelled or fails can be repeated, where an async generator is over.
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
        """End the iteration, as of a generator."""
        self._is_over = True


class AsyncTransaction:
    """A ``Transaction`` for an event loop: an async context manager.

    It commits at the end of its block, and aborts where that raises.
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
        """Whether it was neither committed nor aborted yet."""
        return self._transaction.is_open

    @property
    def is_committed(self) -> bool:
        """Whether Kafka has the output and the progress."""
        return self._transaction.is_committed

    async def commit(self) -> None:
        """Write the output and the progress; see ``Transaction.commit``.

        Where it is cancelled, ``is_committed`` is True once the thread has committed.
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
        """Commit, or abort where the block raised."""
        if error is not None:
            self.abort()
        elif self.is_open:
            await self.commit()
