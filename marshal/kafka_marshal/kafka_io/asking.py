"""One question for all who wait for its answer.

Threads that want to know the same thing of a broker need one answer, as long as it
was asked for after each of them came. One asks at a time; who comes meanwhile waits
for the next question, which one of them asks for all.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kafka_marshal.errors import CoordinationError

T = TypeVar("T")


class SharedQuestion(Generic[T]):
    """Asked by any thread; many at once cost two questions at most."""

    def __init__(self) -> None:
        """Start with nothing asked."""
        self._changed = threading.Condition()
        self._begun = 0
        self._answer: tuple[int, T] | None = None
        self._is_asking = False

    def ask(self, ask: Callable[[int], T], timeout_ms: int) -> T:
        """Return an answer to a question that was asked after this call.

        Args:
            ask: Asks it, in so many milliseconds, on the thread of one of those who
                wait. What it raises is raised for that one; the others ask again.
            timeout_ms: When to give up.

        Raises:
            CoordinationError: Another question got no answer in that time.
        """
        deadline = time.monotonic() + timeout_ms / 1000
        with self._changed:
            mine = self._begun + 1
            if not self._changed.wait_for(
                lambda: not self._is_asking or self._since(mine) is not None,
                timeout=timeout_ms / 1000,
            ):
                raise CoordinationError(
                    f"No answer within {timeout_ms} ms: a question before got none "
                    "yet. Check the brokers with: marshal doctor"
                )
            found = self._since(mine)
            if found is not None:
                return found[1]
            self._begun = number = self._begun + 1
            self._is_asking = True
        try:
            answer = ask(max(1, round((deadline - time.monotonic()) * 1000)))
            with self._changed:
                self._answer = number, answer
            return answer
        finally:
            with self._changed:
                self._is_asking = False
                self._changed.notify_all()

    def _since(self, number: int) -> tuple[int, T] | None:
        """Return the last answer, if that question was begun late enough."""
        answer = self._answer
        return answer if answer is not None and answer[0] >= number else None
