"""Event loops of kafka-python: one on the thread of its caller, one with deadlines.

By default kafka-python runs connections on a thread of its own. If the application
computes, this thread waits for the interpreter lock each time it has received
something: for 5 ms, and several times for each fetch. With ``CallerSelector`` there is
no such thread: bytes that arrive between two polls wait in the buffers of the kernel,
and the next poll reads them.

Callers wait for that thread without a deadline; with ``TimedSelector`` they have one.
"""

import threading
import time
from collections.abc import Callable, Mapping
from selectors import DefaultSelector, SelectorKey
from socket import socket
from typing import Any
from weakref import WeakKeyDictionary

from kafka.errors import KafkaConnectionError, KafkaError
from kafka.future import Future
from kafka.net.selector import NetworkSelector, Task, TaskState

from kafka_marshal.kafka_io.faults import is_interrupt
from kafka_marshal.native import Receiver

# Shorter times without a caller count for timers.
_GAP_S = 0.1
_TIMERS_MIN = 64
# Longest wait for the start of a thread.
_START_S = 10.0


class _Sockets(DefaultSelector):
    """Looks sockets up by their number.

    kafka-python looks each socket up before it registers it. If it is not there, the
    error of the base class has its address, which takes two system calls.
    """

    def get_key(self, fileobj: Any) -> SelectorKey:
        number = fileobj.fileno()
        return super().get_key(fileobj if number < 0 else number)


class _WatchedTask(Task):  # type: ignore[misc] # untyped library
    """A task that reports the exception which ends it: the loop would only log it."""

    def __init__(self, work: Any, note: Callable[[BaseException], None]) -> None:
        super().__init__(work)
        self._note = note

    def __call__(self, arg: Any = None) -> Any:
        """Run until it waits, or ends; see ``Task``."""
        try:
            return super().__call__(arg)
        except StopIteration:
            raise
        except BaseException as error:
            self._note(error)
            raise


class CallerSelector(NetworkSelector):  # type: ignore[misc] # untyped library
    """Runs while a method waits for something, or ``drive`` is called.

    Time in between does not count for timers: a request does not time out while nobody
    reads its response. One thread at a time.

    On the main thread, signal handlers run within tasks. An exception of a handler ends
    such a task, for instance the one that reads a connection. kafka-python would only
    log it; here the call that ran the tasks raises it.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        # Reading a large response may take long: do not report the task as slow.
        ours = {"slow_task_threshold_secs": 0, "selector": _Sockets}
        self._interrupt: BaseException | None = None
        super().__init__(**{**options, **ours})
        self._timers: list[Any] = []
        self._timers_max = _TIMERS_MIN
        self._driven_s = time.monotonic()
        # Whether a task waits, or has waited, to send.
        self._has_output = False
        # Receivers that now read a socket, each on a thread of its own.
        self._receivers: WeakKeyDictionary[socket, Receiver] = WeakKeyDictionary()

    def start(self) -> None:
        """Start no thread."""

    def wakeup(self) -> None:
        """Wake no thread: none waits while another one calls."""

    def call_soon(self, task: Any) -> Any:
        """Add a task; see ``NetworkSelector``."""
        return super().call_soon(self._watched(task))

    def call_soon_with_future(self, coro: Any, *args: object) -> Future:
        """Add a task with a result; see ``NetworkSelector``."""
        future = super().call_soon_with_future(coro, *args)
        future.add_errback(self._note)
        return future

    def call_later(self, delay: float, task: Any) -> Any:
        """Schedule a task; see ``NetworkSelector``."""
        return super().call_later(delay, self._watched(task))

    def call_at(self, when: float, task: Any) -> Any:
        """Schedule a task; see ``NetworkSelector``."""
        found = super().call_at(when, self._watched(task))
        if len(self._timers) >= self._timers_max:
            self._timers = [each for each in self._timers if _is_scheduled(each)]
            self._timers_max = max(_TIMERS_MIN, 2 * len(self._timers))
        self._timers.append(found)
        return found

    def set_receiver(self, sock: socket, receiver: Receiver | None) -> None:
        """Wait for a receiver in place of its socket; None: for the socket again."""
        if receiver is None:
            self._receivers.pop(sock, None)
        else:
            self._receivers[sock] = receiver

    def wait_read(self, fileobj: Any, timeout_at: float | None = None) -> Any:
        """Wait until there is something to read; see ``NetworkSelector``."""
        return super().wait_read(self._receivers.get(fileobj, fileobj), timeout_at)

    def wait_write(self, fileobj: Any, timeout_at: float | None = None) -> Any:
        """Wait until a socket can send; see ``NetworkSelector``."""
        self._has_output = True
        return super().wait_write(fileobj, timeout_at)

    def poll(self, timeout_ms: float | None = None, future: Any = None) -> None:
        """Run tasks; see ``NetworkSelector``."""
        self._skip_gap()
        try:
            super().poll(timeout_ms, future)
        finally:
            self._driven_s = time.monotonic()

    def drive(self) -> None:
        """Send and receive what is possible at once.

        Raises:
            RuntimeError: It is closed.
        """
        self._skip_gap()
        # A task that was just added waits for its socket only after its first step.
        self.drain()
        self.poll(timeout_ms=0)

    def flush(self) -> None:
        """Send requests that no call has waited for; see ``drive``."""
        if self._ready or self._has_output:
            self._has_output = False
            self.drive()

    def _poll_once(self, timeout: float | None = None) -> None:
        try:
            super()._poll_once(timeout)
        except BaseException as error:
            # An error of the loop itself, if a task was interrupted at its first step.
            self._note(error.__context__)
            raise
        finally:
            interrupt, self._interrupt = self._interrupt, None
            if interrupt is not None:
                raise interrupt

    def _watched(self, task: Any) -> Task:
        return task if isinstance(task, Task) else _WatchedTask(task, self._note)

    def _note(self, error: BaseException | None) -> None:
        # Cancelled tasks end with GeneratorExit, and each poll that finds nothing with
        # an error of kafka-python: do not search the signal handlers for those.
        if error is None or isinstance(error, GeneratorExit | KafkaError):
            return
        if is_interrupt(error):
            self._interrupt = error

    def _skip_gap(self) -> None:
        gap_s = time.monotonic() - self._driven_s
        if gap_s < _GAP_S:
            return
        self._driven_s += gap_s
        timers, self._timers = self._timers, []
        for each in filter(_is_scheduled, timers):
            self.reschedule(each.scheduled_at + gap_s, each)


class TimedSelector(NetworkSelector):  # type: ignore[misc] # untyped library
    """Runs on a thread of its own; callers may stop waiting for it."""

    def __init__(
        self, options: Mapping[str, Any], *, wait: Callable[[threading.Event], None]
    ) -> None:
        """Make it; ``start`` starts the thread.

        Args:
            options: Configuration of the client.
            wait: Waits for an event on the caller's thread, and raises to give up.
        """
        super().__init__(**options)
        self._wait = wait
        self._awaited: set[threading.Event] = set()
        self._has_ended = False

    def start(self) -> None:
        """Start the thread, and wait until it runs: a stop before has no effect."""
        has_begun = threading.Event()
        self.call_soon(has_begun.set)
        super().start()
        has_begun.wait(_START_S)

    def run_forever(self) -> None:
        """Run until it is stopped; see ``NetworkSelector``."""
        try:
            super().run_forever()
        finally:
            self._has_ended = True
            for each in tuple(self._awaited):
                each.set()

    def run(self, coro: Any, *args: object) -> Any:
        """Run a coroutine and return its result; it continues if the caller gives up.

        Raises:
            KafkaConnectionError: The thread has ended.
            Exception: The coroutine failed, or the caller gave up.
        """
        is_over = threading.Event()
        self._awaited.add(is_over)
        try:
            future = self.call_soon_with_future(coro, *args)
            future.add_both(lambda _: is_over.set())
            if not self._has_ended:
                self._wait(is_over)
        finally:
            self._awaited.discard(is_over)
        error = future.exception
        # Closing cancels tasks with an exception that callers must not get.
        if not future.is_done or not isinstance(error, Exception | None):
            raise KafkaConnectionError("the connection was closed")
        if error is not None:
            raise error
        return future.value


def _is_scheduled(task: Any) -> bool:
    return bool(task.state is TaskState.SCHEDULED)
