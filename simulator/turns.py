"""Runs code that waits for the log, on virtual time.

A program has its own thread, and takes turns with the loop: either the loop runs, or
one program, never two at a time. So a run stays repeatable, byte for byte.
"""

import threading
from collections.abc import Callable, Sequence

from kafka_marshal.engine.kept_states import LogView
from kafka_marshal.errors import MarshalError
from kafka_marshal.ports import Append, CoordinationLog
from kafka_marshal.protocol.types import LogEntry
from simulator.loop import Loop

TURN_S_MAX = 600.0


class Killed(BaseException):
    """The process of a program was killed; its code must not catch this."""


class Program:
    """Production code that waits, as one process of a simulated world.

    Attributes:
        error: The error with which it ended, None while it runs and if it returned.
        is_done: Whether it has ended.
        is_killed: Whether it was killed, or killed itself.
    """

    def __init__(
        self, loop: Loop, call: Callable[[], None], *, on_end: Callable[[], None]
    ) -> None:
        """Prepare to call; ``start`` gives it its first turn.

        Args:
            loop: The loop with which it takes turns.
            call: Its code.
            on_end: Called by the loop's thread once the code has ended.
        """
        self.error: BaseException | None = None
        self.is_done = False
        self.is_killed = False
        self._on_end = on_end
        self._loop = loop
        self._call = call
        self._its_turn, self._our_turn = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, at_ms: int) -> None:
        """Begin at a true time."""
        self._thread.start()
        self._loop.at(at_ms, self._resume)

    def sleep(self, for_ms: int) -> None:
        """Let the loop run for a time; call this only in the program's own thread.

        Raises:
            Killed: The process was killed meanwhile.
        """
        self._loop.at(self._loop.clock.at_ms + for_ms, self._resume)
        self._our_turn.release()
        self._await_turn()

    def kill(self) -> None:
        """End the program while it waits; its appends in flight still land."""
        self.is_killed = True
        self._resume()

    def close(self) -> None:
        """Kill the program if it runs, without ``on_end``, and wait for its thread."""
        self._on_end = _nothing
        self.kill()
        self._thread.join(TURN_S_MAX)

    def _resume(self) -> None:
        """Let the program run until it waits or ends."""
        if not self.is_done:
            self._its_turn.release()
            self._wait(self._our_turn)
            self._after_turn()

    def _after_turn(self) -> None:
        if self.is_done:
            self._on_end()

    def _run(self) -> None:
        try:
            self._await_turn()
            self._call()
        except Killed:
            self.is_killed = True
        except BaseException as error:  # noqa: BLE001 - the loop's thread judges it
            self.error = error
        self.is_done = True
        self._our_turn.release()

    def _await_turn(self) -> None:
        self._wait(self._its_turn)
        if self.is_killed:
            raise Killed

    @staticmethod
    def _wait(turn: threading.Semaphore) -> None:
        if not turn.acquire(timeout=TURN_S_MAX):
            raise TimeoutError(f"no turn within {TURN_S_MAX} s")


class WaitingLog(LogView):
    """A session with the log whose reads wait on virtual time."""

    def __init__(
        self,
        log: CoordinationLog,
        *,
        wait: Callable[[int], None],
        on_append: Callable[[int, bytes], None],
    ) -> None:
        """Wrap a session.

        Args:
            log: The session.
            wait: Called with the timeout of each read.
            on_append: Called before each append; may raise.
        """
        super().__init__(log)
        self._wait = wait
        self._on_append = on_append

    def append(self, partition: int, value: bytes) -> Append:
        """Append a record."""
        self._on_append(partition, value)
        return super().append(partition, value)

    def poll(self, timeout_ms: int) -> Sequence[tuple[int, LogEntry]]:
        """Return the entries that arrived within the timeout."""
        self._wait(timeout_ms)
        return super().poll(0)


def refusal_of(program: Program) -> MarshalError | None:
    """Return the error with which a program was refused, None if it succeeded.

    Raises:
        BaseException: The program ended with another error, which is a bug.
    """
    error = program.error
    if error is None or isinstance(error, MarshalError):
        return error
    raise error


def _nothing() -> None:
    """Do nothing at the end of a program."""
