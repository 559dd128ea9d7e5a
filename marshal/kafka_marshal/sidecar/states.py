"""What a sidecar is doing, in the words of Kafka's own brokers.

::

    NOT_RUNNING -> STARTING -> RECOVERY -> RUNNING
                      |           |      /    |
                      |           |     /     v
                      |           |    /  PENDING_CONTROLLED_SHUTDOWN
                      v           v   v       |
    NOT_RUNNING <---- SHUTTING_DOWN <---------+

A state is left only along these lines; anything else is a bug of the caller, raises,
and changes nothing. Each change has a reason, which people get to see.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial

import attrs

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.observability.logs import LOGGER_NAME
from kafka_marshal.ports import Clock

CHANGES_MAX = 32


class State(Enum):
    """What a sidecar is doing; the value is what people and clients read.

    Attributes:
        NOT_RUNNING: Not yet started, or stopped.
        STARTING: Reading its settings, connecting.
        RECOVERY: Reading the log to its end, and old promises (PROTOCOL 12).
        RUNNING: Serving.
        PENDING_CONTROLLED_SHUTDOWN: Every client was asked to give back what it has.
        SHUTTING_DOWN: Releasing what is left, closing.
    """

    NOT_RUNNING = "NOT_RUNNING"
    STARTING = "STARTING"
    RECOVERY = "RECOVERY"
    RUNNING = "RUNNING"
    PENDING_CONTROLLED_SHUTDOWN = "PENDING_CONTROLLED_SHUTDOWN"
    SHUTTING_DOWN = "SHUTTING_DOWN"


# What is asked to drain before it serves has nothing to drain: it shuts down.
NEXT: dict[State, frozenset[State]] = {
    State.NOT_RUNNING: frozenset({State.STARTING}),
    State.STARTING: frozenset({State.RECOVERY, State.SHUTTING_DOWN}),
    State.RECOVERY: frozenset({State.RUNNING, State.SHUTTING_DOWN}),
    State.RUNNING: frozenset({State.PENDING_CONTROLLED_SHUTDOWN, State.SHUTTING_DOWN}),
    State.PENDING_CONTROLLED_SHUTDOWN: frozenset({State.SHUTTING_DOWN}),
    State.SHUTTING_DOWN: frozenset({State.NOT_RUNNING}),
}


@attrs.frozen
class Change:
    """One change of state.

    Attributes:
        before: State that was left.
        after: State from then on.
        reason: Why, for people.
        at_ms: Local time.
    """

    before: State
    after: State
    reason: str
    at_ms: int


Observer = Callable[[Change], None]


class States:
    """The state of one sidecar, and who is told of its changes. Thread-safe.

    Observers are called in the order of the changes, one at a time and without the
    lock, on the thread of whoever made a change; they must not block. An observer
    may itself change the state: the others hear of that afterwards.

    Args:
        clock: Local time of the changes.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._state = State.NOT_RUNNING
        self._reason = "not started"
        self._since_ms = clock.now_ms()
        self._observers: tuple[Observer, ...] = ()
        self._untold: deque[Change] = deque()
        self._is_telling = False
        self._history: deque[Change] = deque(maxlen=CHANGES_MAX)

    @property
    def state(self) -> State:
        """Return the state of this moment."""
        return self._state

    @property
    def reason(self) -> str:
        """Return why it is in this state, or what it waits for there."""
        return self._reason

    @property
    def since_ms(self) -> int:
        """Return since when, in local time."""
        return self._since_ms

    @property
    def history(self) -> tuple[Change, ...]:
        """Return the latest changes, oldest first, at most ``CHANGES_MAX``."""
        with self._changed:
            return tuple(self._history)

    def move(self, to: State, *, reason: str) -> Change:
        """Change the state.

        Raises:
            InvalidTransition: No line leads there; the state is kept.
        """
        with self._changed:
            before = self._state
            if to not in NEXT[before]:
                legal = " or ".join(sorted(state.value for state in NEXT[before]))
                raise InvalidTransition(
                    f"a sidecar in {before.value} cannot become {to.value} "
                    f"({reason}); only {legal} follows it"
                )
            now_ms = self._clock.now_ms()
            change = Change(before, to, reason, now_ms)
            self._state, self._reason, self._since_ms = to, reason, now_ms
            self._history.append(change)
            self._untold.append(change)
            self._changed.notify_all()
        self._tell()
        return change

    def explain(self, reason: str) -> None:
        """Say anew why it is in this state: such as how far it has read."""
        with self._changed:
            self._reason = reason

    def on_change(self, observer: Observer) -> Callable[[], None]:
        """Have a function told of every change; returns what ends that."""
        with self._changed:
            self._observers = (*self._observers, observer)
        return partial(self._remove, observer)

    def wait_for(self, *wanted: State, timeout_ms: int) -> bool:
        """Wait until it is in one of these states; False if it took too long."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._state in wanted, timeout_ms / 1000
            )

    def _remove(self, observer: Observer) -> None:
        with self._changed:
            kept = list(self._observers)
            if observer in kept:
                kept.remove(observer)
            self._observers = tuple(kept)

    def _tell(self) -> None:
        """Tell what is untold, unless somebody is at it: they will tell this too."""
        while True:
            with self._changed:
                if self._is_telling or not self._untold:
                    return
                self._is_telling = True
                change, observers = self._untold.popleft(), self._observers
            try:
                for observer in observers:
                    _call(observer, change)
            finally:
                with self._changed:
                    self._is_telling = False


def _call(observer: Observer, change: Change) -> None:
    """Call one observer; one that raises does not stop the others, or the sidecar."""
    try:
        observer(change)
    except Exception:
        logging.getLogger(LOGGER_NAME).exception(
            "an observer of the change to %s failed", change.after.value
        )
