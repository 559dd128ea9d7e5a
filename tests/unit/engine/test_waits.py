"""An application's thread waits for results in the log, with a deadline."""

import threading
from types import SimpleNamespace

import pytest

from kafka_marshal.engine.waits import await_left, await_news
from kafka_marshal.errors import CoordinationError, DeadlineExceeded, LogUnreadable


class News(threading.Condition):
    """Each wait advances the clock by its timeout."""

    def __init__(self, context):
        super().__init__()
        self._context = context

    def wait(self, timeout):
        self._context.now_ms += round(timeout * 1_000)


@pytest.fixture
def engine():
    context = SimpleNamespace(now_ms=7)
    clock = SimpleNamespace(now_ms=lambda: context.now_ms)
    context.ports = SimpleNamespace(clock=clock)
    context.observe = lambda name, fields: context.reported.append(name)
    context.reported = []
    return SimpleNamespace(context=context, changed=News(context), failure=None)


def test_a_true_condition_is_not_awaited(engine):
    engine.failure = LogUnreadable("gone")
    await_news(engine, lambda: True, timeout_ms=0)
    assert engine.context.now_ms == 7


def test_the_wait_ends_when_the_condition_is_true(engine):
    await_news(engine, lambda: engine.context.now_ms >= 150, timeout_ms=1_000)
    assert 150 <= engine.context.now_ms < 250


def test_a_timeout_names_the_missing_result(engine):
    with pytest.raises(DeadlineExceeded, match="not show it within 130 ms; it may yet"):
        await_news(
            engine,
            lambda: False,
            timeout_ms=130,
            fault="did not show it",
            hope="; it may yet",
        )
    assert engine.context.now_ms == 137


def test_a_failure_ends_the_wait(engine):
    engine.failure = LogUnreadable("gone")
    with pytest.raises(LogUnreadable):
        await_news(engine, lambda: False, timeout_ms=1_000)


@pytest.mark.parametrize(
    ("leaving", "pending", "is_left"),
    [(0, False, True), (1, False, False), (0, True, False)],
)
def test_await_left_returns_whether_the_log_confirmed_the_end(
    engine, leaving, pending, is_left
):
    asked = []

    def is_pending(seqs, *, late):
        asked.append((seqs, late))
        return pending

    session = SimpleNamespace(
        leaving_count=leaving, is_pending=is_pending, require_reachable=lambda: None
    )
    found = await_left(
        engine,
        session,
        seqs=[3],
        wait=lambda is_done, timeout_ms: await_news(
            engine, is_done, timeout_ms=timeout_ms
        ),
        timeout_ms=100,
    )
    assert found is is_left
    assert engine.context.reported == ([] if is_left else ["close_unconfirmed"])
    assert set(map(str, asked)) <= {"([3], False)"}


def test_await_left_does_not_wait_for_a_sidecar_that_is_gone(engine):
    def is_gone():
        raise CoordinationError("no sidecar runs")

    session = SimpleNamespace(leaving_count=1, require_reachable=is_gone)
    found = await_left(
        engine,
        session,
        seqs=[],
        wait=lambda is_done, timeout_ms: await_news(
            engine, is_done, timeout_ms=timeout_ms
        ),
        timeout_ms=60_000,
    )
    assert not found
    assert engine.context.reported == ["close_unconfirmed"]
    assert engine.context.now_ms == 7
