"""Clocks, random numbers, and background calls in bounded queues."""

import threading
import time

import pytest
from interrupting import interrupted

from kafka_marshal import clock as module
from kafka_marshal.clock import (
    QUEUE_CALLS_MAX,
    SystemClock,
    SystemEntropy,
    ThreadBackground,
    WorkerPool,
    duration,
    instant,
)
from kafka_marshal.errors import CoordinationError, InvalidTransition

MS = 1_000_000


class Hand:
    """A clock that is set by hand, in nanoseconds."""

    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now


@pytest.fixture
def elapsed():
    monotonic, realtime = Hand(100 * MS), Hand(9_000 * MS)
    return monotonic, realtime, module._Elapsed(monotonic, realtime)


def test_now_ms_is_the_boot_clock_of_the_system():
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // MS
    now = SystemClock().now_ms()
    assert before <= now <= before + 10_000


def test_wall_ms_is_the_wall_clock_of_the_system():
    assert abs(SystemClock().wall_ms() - time.time() * 1000) < 10_000


def test_without_a_boot_clock_another_is_used(monkeypatch):
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    clock = SystemClock()
    first = clock.now_ms()
    assert first <= clock.now_ms() <= first + 10_000


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([(5, 5)], 5, id="both-run"),
        pytest.param([(0, 60)], 60, id="suspended"),
        pytest.param([(5, -60)], 5, id="wall-set-back"),
        pytest.param([(5, 60), (5, -60), (5, 5)], 70, id="ahead-then-back"),
        pytest.param([(0, -60)], 0, id="never-back"),
    ],
)
def test_the_fallback_clock_advances_by_the_larger_elapsed_time(
    elapsed, steps, expected
):
    monotonic, realtime, clock = elapsed
    start = clock()
    for by_monotonic, by_realtime in steps:
        monotonic.now += by_monotonic * MS
        realtime.now += by_realtime * MS
        clock()
    assert clock() - start == expected * MS


def test_random_bytes_are_as_many_as_asked_for():
    entropy = SystemEntropy()
    assert len(entropy.random_bytes(16)) == 16
    assert entropy.random_bytes(16) != entropy.random_bytes(16)


@pytest.mark.parametrize("limit", [-1, 0, 1, 2, 3])
def test_random_integers_are_below_the_limit(limit):
    entropy = SystemEntropy()
    drawn = {entropy.below(limit) for _ in range(200)}
    assert drawn == set(range(max(1, limit)))


@pytest.fixture
def background():
    made = ThreadBackground()
    yield made
    made.close(5_000)


def test_calls_run_in_order_on_another_thread(background):
    seen = []
    futures = [
        background.submit(lambda n=n: seen.append((n, threading.get_ident())))
        for n in range(10)
    ]
    futures[-1].result(timeout=60)
    assert [n for n, _ in seen] == list(range(10))
    assert {ident for _, ident in seen}.isdisjoint({threading.get_ident()})


def test_a_future_has_the_result_or_exception_of_its_call(background):
    assert background.submit(lambda: 7).result(timeout=60) == 7
    failed = background.submit(lambda: 1 // 0)
    assert isinstance(failed.exception(timeout=60), ZeroDivisionError)
    # A call that fails does not end the thread.
    assert background.submit(lambda: 8).result(timeout=60) == 8


def test_a_full_queue_refuses_a_call_at_once(background):
    let_go = threading.Event()
    running = threading.Event()

    def block():
        running.set()
        let_go.wait(60)

    first = background.submit(block)
    assert running.wait(60)
    waiting = [background.submit(int) for _ in range(QUEUE_CALLS_MAX)]
    refused = background.submit(int)
    assert refused.done()
    assert isinstance(refused.exception(timeout=0), CoordinationError)
    let_go.set()
    first.result(timeout=60)
    assert [future.result(timeout=60) for future in waiting] == [0] * QUEUE_CALLS_MAX


def test_close_fails_queued_calls_and_is_idempotent():
    background = ThreadBackground()
    let_go, running = threading.Event(), threading.Event()

    def block():
        running.set()
        let_go.wait(60)

    first = background.submit(block)
    assert running.wait(60)
    waiting = background.submit(int)
    start = time.monotonic()
    background.close(50)
    background.close(0)
    assert time.monotonic() - start < 30
    assert isinstance(waiting.exception(timeout=60), InvalidTransition)
    let_go.set()
    assert first.result(timeout=60) is None
    late = background.submit(int)
    assert isinstance(late.exception(timeout=0), InvalidTransition)


def test_a_call_after_an_early_close_ends_at_once():
    background = ThreadBackground()
    background.close(0)
    assert background.submit(int).done()


# --- Worker pools ---


def test_calls_are_made_in_order_by_one_thread():
    workers = WorkerPool("test", threads=1, calls_max=QUEUE_CALLS_MAX)
    made, done = [], threading.Event()
    for number in range(20):
        assert workers.submit(lambda number=number: made.append(number))
    workers.submit(done.set)
    assert done.wait(60)
    assert made == list(range(20))
    workers.close(1_000)


def test_calls_of_several_threads_overlap():
    workers = WorkerPool("test", threads=2, calls_max=QUEUE_CALLS_MAX)
    both = threading.Barrier(2)
    met = threading.Semaphore(0)

    def meet():
        both.wait(60)
        met.release()

    for _ in range(2):
        assert workers.submit(meet)
    assert met.acquire(timeout=60)
    assert met.acquire(timeout=60)
    workers.close(1_000)


def test_a_full_or_closed_pool_refuses_calls():
    workers = WorkerPool("test", threads=1, calls_max=QUEUE_CALLS_MAX)
    begun, free = threading.Event(), threading.Event()
    made = []

    def hold():
        begun.set()
        assert free.wait(60)

    assert workers.submit(hold)
    assert begun.wait(60)
    for _ in range(QUEUE_CALLS_MAX):
        assert workers.submit(lambda: made.append(1))
    assert not workers.submit(lambda: None)
    workers.close(0)
    free.set()
    workers.close(60 * 1_000)
    assert not workers.submit(lambda: None)
    assert made == []


def test_a_call_does_not_wait_for_a_thread_that_has_just_taken_another(monkeypatch):
    workers = WorkerPool("test", threads=2, calls_max=QUEUE_CALLS_MAX)
    taken, submitted = threading.Event(), threading.Event()
    second, made = threading.Event(), threading.Event()
    plain = workers._next_call

    def next_call():
        call = plain()
        taken.set()
        assert submitted.wait(60)
        return call

    def first():
        if second.wait(60 / 2):
            made.set()

    monkeypatch.setattr(workers, "_next_call", next_call)
    assert workers.submit(first)
    assert taken.wait(60)
    assert workers.submit(second.set)
    submitted.set()
    assert made.wait(60)
    workers.close(60 * 1_000)


def test_calls_run_after_an_interrupted_submit():
    """Else the queue would stay locked, and block the next caller."""
    at, is_interrupted = 0, True
    while is_interrupted:
        workers, made = WorkerPool("test", threads=1, calls_max=9), threading.Event()
        is_interrupted, _ = interrupted(
            lambda it=workers: it.submit(lambda: None), at, everywhere=True
        )
        assert workers._changed.acquire(timeout=60), at
        workers._changed.release()
        assert workers.submit(made.set)
        assert made.wait(60), at
        workers.close(60 * 1_000)
        at += 1
    assert at > 10


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (1_700_000_000_123, "2023-11-14T22:13:20.123Z"),
        (2**62, f"{2**62} ms"),
    ],
)
def test_instant_formats_a_time_in_utc(value, shown):
    assert instant(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0ms"),
        (999, "999ms"),
        (1_000, "1s"),
        (12_345, "12.3s"),
        (60_000, "1m"),
        (90_000, "1m30s"),
        (7_260_000, "2h1m"),
        (2 * 86_400_000, "2d"),
        (-1_500, "-1.5s"),
    ],
)
def test_duration_is_formatted_with_units(value, shown):
    assert duration(value) == shown
