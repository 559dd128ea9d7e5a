"""Lets one thread at a time read from a consumer."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from kafka_marshal.errors import InvalidTransition

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

# A question of another thread applies changes of the claims, which calls callbacks.
QUESTION_S_MAX = 60.0


class ReadTurn:
    """Held by the thread that polls, iterates or seeks; a second one gets an error.

    Two at a time would hand out records twice, or commit some that neither received.
    A thread may enter it again, as a callback does that seeks. At the end of the block
    the caller has what was handed out, unless an exception, also of a signal handler,
    ends it.

    Attributes:
        depth: How often it is entered; changed from 0 under the engine's lock.
    """

    __slots__ = ("_dispatcher", "_engine_lock", "_lock", "depth")

    def __init__(
        self, dispatcher: "Dispatcher", engine_lock: AbstractContextManager[bool]
    ) -> None:
        self.depth = 0
        self._dispatcher = dispatcher
        self._engine_lock = engine_lock
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Begin reading.

        Raises:
            InvalidTransition: Another thread reads.
        """
        if not self._lock.acquire(blocking=False) and (
            self.depth or not self._lock.acquire(timeout=QUESTION_S_MAX)
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
        """Make threads that begin reading wait for the end of a block.

        Yields False, and makes none wait, if another thread reads or is in such a
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
        """Make threads that begin reading wait for the end of a block.

        It begins once no other thread reads, and at the latest after the timeout.
        """
        is_free = self._lock.acquire(timeout=timeout_ms / 1000)
        try:
            yield
        finally:
            if is_free:
                self._lock.release()
