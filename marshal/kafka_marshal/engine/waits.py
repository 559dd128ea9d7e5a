"""Waits on an application's thread for results in the log.

A module of its own: the engine, consumers and claims outside of it all wait this way.
"""

from collections.abc import Callable, Iterable

from kafka_marshal.deadline import Deadline
from kafka_marshal.errors import DeadlineExceeded, MarshalError

from .holdings import ClaimSession
from .interfaces import ClaimEngine

WAIT_SLICE_MS = 50

Wait = Callable[[Callable[[], bool], int], None]


def await_news(
    engine: ClaimEngine,
    is_done: Callable[[], bool],
    *,
    timeout_ms: int,
    fault: str = "did not confirm",
    hope: str = "",
) -> None:
    """Wait until a condition is true, checked after each round of the engine.

    Args:
        engine: The engine; its lock is held during ``is_done``.
        is_done: The condition; an exception from it ends the wait.
        timeout_ms: Timeout of the wait.
        fault: What the log did not do, for the error message.
        hope: What may still happen, for the error message.

    Raises:
        DeadlineExceeded: The condition was not true in time.
        MarshalError: The engine failed.
    """
    deadline = Deadline(timeout_ms, engine.context.ports.clock.now_ms)
    late = f"{fault} within {timeout_ms} ms{hope}"
    with engine.changed:
        while not is_done():
            wait_for_news(engine, deadline, late=late)


def wait_for_news(engine: ClaimEngine, deadline: Deadline, *, late: str) -> None:
    """Wait for one round of the engine, or for a slice; its lock is held.

    Args:
        engine: The engine.
        deadline: When to give up.
        late: What the log did not do until then, for the error message.

    Raises:
        DeadlineExceeded: The deadline has passed.
        MarshalError: The engine failed.
    """
    if engine.failure is not None:
        raise engine.failure
    left_ms = deadline.require_ms(
        lambda: DeadlineExceeded(
            f"the coordination log {late}; check the brokers with: marshal doctor"
        )
    )
    engine.changed.wait(min(left_ms, WAIT_SLICE_MS) / 1000)


def await_left(
    engine: ClaimEngine,
    session: ClaimSession,
    *,
    seqs: Iterable[int],
    wait: Wait,
    timeout_ms: int,
) -> bool:
    """Wait until the log shows the end of a subscription; return whether it does.

    Otherwise the claims expire, and others take them over after two heartbeat
    intervals. Does not wait for a sidecar that is gone.

    Args:
        engine: The engine, for its observer.
        session: The session that releases the claims.
        seqs: Sequence numbers from ``unsubscribe``.
        wait: Waits for a condition, for a time in milliseconds; raises on timeout.
        timeout_ms: Timeout of the wait.
    """

    def has_left() -> bool:
        if session.leaving_count or session.is_pending(seqs, late=False):
            session.require_reachable()
            return False
        return True

    try:
        wait(has_left, timeout_ms)
    except MarshalError:
        engine.context.observe("close_unconfirmed", {})
        return False
    return True
