"""Event loops on the thread of the caller, and event loops with deadlines."""

import selectors
import signal
import socket
import threading

import pytest
from kafka.errors import KafkaConnectionError
from kafka.future import Future

from kafka_marshal.kafka_io import driving
from kafka_marshal.kafka_io.driving import CallerSelector, TimedSelector


class Clock:
    """A clock that the test sets, in seconds."""

    now_s = 1_000.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(driving, "time", made)
    monkeypatch.setattr("kafka.net.selector.time", made)
    return made


@pytest.fixture
def selector():
    made = CallerSelector({})
    yield made
    made.close()


def test_a_caller_selector_runs_on_the_thread_of_its_caller(selector):
    before = threading.active_count()
    selector.start()
    assert threading.active_count() == before

    async def answer():
        return threading.get_ident()

    assert selector.run(answer) == threading.get_ident()


class OverTimeError(Exception):
    """An exception of an application's signal handler."""


@pytest.fixture(params=[KeyboardInterrupt, SystemExit, OverTimeError])
def interrupt(request):
    """Return a function that sends a signal, and the exception of its handler."""

    def end(*_):
        raise request.param

    before = signal.signal(signal.SIGUSR1, end)
    yield lambda: signal.raise_signal(signal.SIGUSR1), request.param
    signal.signal(signal.SIGUSR1, before)


async def interrupted(selector, interrupt):
    interrupt()


async def interrupted_later(selector, interrupt):
    await selector.sleep(0)
    interrupt()


def add(selector, work):
    selector.call_soon(work)


def add_with_future(selector, work):
    selector.call_soon_with_future(work)


def add_timer(selector, work):
    selector.call_later(0, work)


@pytest.mark.parametrize("schedule", [add, add_with_future, add_timer])
@pytest.mark.parametrize("work", [interrupted, interrupted_later])
def test_an_exception_of_a_signal_handler_in_a_task_is_raised(
    selector, interrupt, schedule, work
):
    """No method waits for such a task, for example one that reads a connection."""
    send, error = interrupt
    schedule(selector, lambda: work(selector, send))
    never = Future()
    selector.call_later(10, lambda: never.success(None))
    with pytest.raises(error):
        selector.poll(future=never)
    selector.drive()  # the exception is raised only once


def test_an_exception_of_a_signal_handler_at_a_task_start_is_raised(
    selector, interrupt, monkeypatch
):
    """The loop then finds its state wrong, and raises another error for it."""
    send, error = interrupt

    async def nothing():
        """Never run."""

    task = selector.call_soon(nothing)
    monkeypatch.setattr(
        type(task), "__call__", lambda self, arg=None: send(), raising=True
    )
    with pytest.raises(error):
        selector.drive()
    monkeypatch.undo()


def test_drive_raises_no_error_of_a_failed_or_cancelled_task(selector):
    def fail():
        raise LookupError

    selector.call_soon(fail)
    future = selector.call_soon_with_future(fail)
    selector.drive()
    assert isinstance(future.exception, LookupError)

    async def wait():
        await Future()

    future = selector.call_soon_with_future(wait)
    selector.drive()
    for task in tuple(selector._pending_tasks):
        selector.cancel(task)
    assert isinstance(future.exception, GeneratorExit)
    selector.drive()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_flush_sends_data_of_pending_tasks(selector, steps):
    near, far = socket.socketpair()

    async def send():
        await selector.wait_write(near)
        near.send(b"x")

    with near, far:
        far.setblocking(False)
        selector.flush()
        selector.call_soon(send)
        for _ in range(steps):
            selector.poll(timeout_ms=0)
        selector.flush()
        assert far.recv(1) == b"x"


def test_drive_receives_available_bytes(selector):
    near, far = socket.socketpair()
    found = []

    async def receive():
        await selector.wait_read(near)
        found.append(near.recv(1))

    with near, far:
        selector.call_soon(receive)
        selector.drive()
        assert found == []
        far.send(b"x")
        selector.drive()
        assert found == [b"x"]


def test_timers_count_only_time_in_which_the_selector_runs(clock):
    selector = CallerSelector({})
    fired = []
    selector.call_later(10, lambda: fired.append(1))
    clock.now_s += 100
    selector.drive()
    assert fired == []
    for _ in range(99):
        clock.now_s += 0.09
        selector.drive()
    assert fired == []
    for _ in range(20):
        clock.now_s += 0.09
        selector.poll(timeout_ms=0)
    assert fired == [1]
    selector.close()


def test_cancelled_timers_are_discarded(selector):
    for _ in range(1_000):
        selector.cancel(selector.call_later(1_000, lambda: None))
    kept = selector.call_later(1_000, lambda: None)
    assert len(selector._timers) <= driving._TIMERS_MIN
    assert kept in selector._timers


def test_a_closed_socket_keeps_its_key_until_it_is_unregistered():
    near, far = socket.socketpair()
    with driving._Sockets() as sockets, near, far:
        with pytest.raises(KeyError):
            sockets.get_key(near)
        key = sockets.register(near, selectors.EVENT_READ)
        assert sockets.get_key(near) == key
        near.close()
        assert sockets.get_key(near) == key
        with pytest.raises(KeyError):
            sockets.get_key(far)
        sockets.unregister(near)
        with pytest.raises(ValueError, match="Invalid file descriptor"):
            sockets.get_key(near)


def test_a_read_waits_for_the_receiver_set_for_its_socket(selector):
    near, far = socket.socketpair()
    done, signal = socket.socketpair()
    read = []

    async def read_twice():
        for _ in range(2):
            await selector.wait_read(near)
            read.append(near.recv(1))
            selector.set_receiver(near, done)

    with near, far, done, signal:
        selector.set_receiver(near, None)
        selector.call_soon(read_twice)
        far.send(b"ab")
        for _ in range(6):
            selector.drive()
        assert read == [b"a"], "the rest is for the receiver"
        signal.send(b"x")
        for _ in range(3):
            selector.drive()
    assert read == [b"a", b"b"]


class Waiting:
    """The wait of a caller; it raises ``error`` at once if one is set."""

    error = None

    def __call__(self, is_over):
        if self.error is not None:
            raise self.error
        assert is_over.wait(60)


@pytest.fixture
def waiting():
    return Waiting()


@pytest.fixture
def timed(waiting):
    made = TimedSelector({"client_id": "test"}, wait=waiting)
    made.start()
    yield made
    made.close()


def test_a_coroutine_runs_on_the_thread_of_a_timed_selector(timed):
    async def answer(number):
        return number, threading.get_ident()

    number, thread = timed.run(answer, 7)
    assert number == 7
    assert thread != threading.get_ident()


def test_an_error_of_a_coroutine_is_raised(timed):
    async def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        timed.run(fail)


def test_an_error_of_the_wait_function_is_raised_to_the_caller(timed, waiting):
    waiting.error = TimeoutError("late")

    async def last():
        await Future()

    with pytest.raises(TimeoutError, match="late"):
        timed.run(last)


@pytest.mark.parametrize("end", ["stop", "close"])
def test_a_waiting_caller_gets_an_error_when_the_selector_ends(timed, end):
    found, has_begun = [], threading.Event()

    async def last():
        has_begun.set()
        await Future()

    def run():
        try:
            timed.run(last)
        except KafkaConnectionError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert has_begun.wait(60)
    getattr(timed, end)()
    thread.join(60)
    assert not thread.is_alive()
    assert len(found) == 1


def test_a_stopped_selector_refuses_to_run_without_a_wait(timed, waiting):
    timed.stop()
    waiting.error = AssertionError("waits")

    async def answer():
        """Never run."""

    with pytest.raises(KafkaConnectionError):
        timed.run(answer)


def test_a_selector_closes_right_after_its_start(waiting):
    """kafka-python ignores a stop that comes before its thread runs."""
    for _ in range(50):
        made = TimedSelector({"client_id": "test"}, wait=waiting)
        made.start()
        made.close()
