"""Waiting on an application's thread for what the log is to show."""

from collections.abc import Callable, Iterable

from kafka_marshal.errors import DeadlineExceeded, MarshalError

from .interfaces import ClaimEngine, ClaimSession

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
    """Wait until the engine's news make something true.

    Args:
        engine: Whose news; its lock is held while ``is_done`` looks.
        is_done: What to wait for; what it raises ends the wait.
        timeout_ms: How long at most.
        fault: What the log did not do, for the error.
        hope: What may still come, for the error.

    Raises:
        DeadlineExceeded: It did not come in time.
        MarshalError: The engine failed.
    """
    deadline_ms = engine.context.now_ms + timeout_ms
    late = f"{fault} within {timeout_ms} ms{hope}"
    with engine.changed:
        while not is_done():
            wait_for_news(engine, deadline_ms, late=late)


def wait_for_news(engine: ClaimEngine, deadline_ms: int, *, late: str) -> None:
    """Wait for one round of the engine, or a moment; its lock is held.

    Args:
        engine: Whose rounds.
        deadline_ms: When to give up, by its clock.
        late: What the log did not do until then, for the error.

    Raises:
        DeadlineExceeded: It is later than that.
        MarshalError: The engine failed.
    """
    if engine.failure is not None:
        raise engine.failure
    left_ms = deadline_ms - engine.context.now_ms
    if left_ms <= 0:
        raise DeadlineExceeded(
            f"the log {late}; check the brokers with: marshal doctor"
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
    """Wait until the log shows that a subscription is over; return whether it does.

    Where it does not, claims run out by themselves, and somebody takes them after 2H.

    Args:
        engine: Tells the observer.
        session: What gives the claims up.
        seqs: What ``unsubscribe`` said to wait for.
        wait: Waits for a condition, for so many milliseconds, and raises if in vain.
        timeout_ms: How long at most.
    """
    try:
        wait(
            lambda: (
                not session.leaving_count and not session.is_pending(seqs, late=False)
            ),
            timeout_ms,
        )
    except MarshalError:
        engine.context.observe("close_unconfirmed", {})
        return False
    return True
