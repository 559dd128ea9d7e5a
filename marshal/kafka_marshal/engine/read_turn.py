"""Lets one thread at a time read from a consumer."""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from kafka_marshal.errors import InvalidTransition

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

# How long a query on another thread may delay a read: it may run callbacks.
QUERY_WAIT_S_MAX = 60.0


def forked_error() -> InvalidTransition:
    """Return the error of a forked child, which inherits no claims (PROTOCOL 1.7)."""
    return InvalidTransition(
        "this consumer belongs to the parent process; open a Marshal after the fork "
        "and consume there"
    )


class ReadTurn:
    """Held by the thread that polls, iterates or seeks; a second one gets an error.

    Two threads at a time could be handed the same records, or commit records that
    neither received. The same thread may enter again, for example in a callback that
    seeks. At the end of the block the handed-out records have reached the caller,
    unless an exception, which may be that of a signal handler, ends the block.

    Attributes:
        depth: How often it is entered; changed from 0 under the engine's lock.
    """

    __slots__ = ("_dispatcher", "_engine_lock", "_lock", "_pid", "depth")

    def __init__(
        self, dispatcher: "Dispatcher", engine_lock: AbstractContextManager[bool]
    ) -> None:
        self.depth = 0
        self._dispatcher = dispatcher
        self._engine_lock = engine_lock
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def __enter__(self) -> None:
        """Begin reading.

        Raises:
            InvalidTransition: Another thread reads, or this is a forked child.
        """
        if os.getpid() != self._pid:
            # A thread that the child does not have may hold these locks.
            raise forked_error()
        if not self._lock.acquire(blocking=False) and (
            self.depth or not self._lock.acquire(timeout=QUERY_WAIT_S_MAX)
        ):
            raise InvalidTransition(
                "another thread is reading from this consumer: poll, iterate and seek "
                "on one thread at a time, and hand the records to others, which may "
                "commit them"
            )
        with self._engine_lock:
            self.depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End reading."""
        dispatcher = self._dispatcher
        taken = dispatcher.taken
        try:
            self.depth -= 1
            if kind is None:
                dispatcher.taken = None
            self._lock.release()
        except BaseException:
            dispatcher.taken = taken
            raise

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Make other threads wait to begin reading until the block ends.

        Yields False, and makes no thread wait, if another thread reads or is in such a
        block.
        """
        is_free = self._lock.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self._lock.release()

    @contextmanager
    def after(self, timeout_ms: int) -> Iterator[None]:
        """Make other threads wait to begin reading until the block ends.

        The block begins once no other thread reads, or after the timeout.
        """
        is_free = self._lock.acquire(timeout=max(0.0, timeout_ms / 1000))
        try:
            yield
        finally:
            if is_free:
                self._lock.release()
