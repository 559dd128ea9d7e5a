"""Single flight: one request at a time, whose answer all waiting callers share.

A caller gets the answer of a request that began after its call, so no answer is older
than its call. Callers that arrive during a request share the next one, which asks for
everything that they want to know. Not part of ``topiclog``, its only user, because it
knows nothing of Kafka.
"""

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from kafka_marshal.conditions import Condition
from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import CoordinationError

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Thread-safe. Any number of concurrent callers cost at most two requests."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._started = 0
        # What each waiting caller wants to know.
        self._wanted: list[frozenset[int]] = []
        self._answer: tuple[int, T] | None = None
        self._is_running = False

    def call(
        self,
        request: Callable[[frozenset[int], int], T],
        timeout_ms: int,
        *,
        wanted: Collection[int],
    ) -> T:
        """Return the answer of a request that starts after this call.

        Args:
            request: Gets what to ask about and the remaining milliseconds; runs on the
                thread of one of the callers. Its error is raised to that caller; the
                others retry.
            timeout_ms: Limit for this caller, the wait for an earlier request included.
            wanted: What to ask about; the answer may be about more.

        Raises:
            CoordinationError: An earlier request did not end in time.
        """
        deadline = Deadline(timeout_ms)
        own = frozenset(wanted)
        with self._changed:
            self._wanted.append(own)
        try:
            return self._shared(request, deadline)
        finally:
            with self._changed:
                self._wanted.remove(own)

    def _shared(
        self, request: Callable[[frozenset[int], int], T], deadline: Deadline
    ) -> T:
        with self._changed:
            mine = self._started + 1
            if not self._changed.wait_for(
                lambda: not self._is_running or self._since(mine) is not None,
                timeout=deadline.left_s,
            ):
                raise CoordinationError(
                    f"No answer within {deadline.timeout_ms} ms: an earlier request is "
                    "still without one. Check the brokers with: marshal doctor"
                )
            found = self._since(mine)
            if found is not None:
                return found[1]
            self._started = number = self._started + 1
            self._is_running = True
            # What all callers want that will share the answer.
            asked = frozenset().union(*self._wanted)
        try:
            answer = request(asked, max(1, deadline.left_ms))
            with self._changed:
                self._answer = number, answer
            return answer
        finally:
            with self._changed:
                self._is_running = False
                self._changed.notify_all()

    def _since(self, number: int) -> tuple[int, T] | None:
        """Return the last answer if its request is at least this recent."""
        answer = self._answer
        return answer if answer is not None and answer[0] >= number else None
