"""Calls on threads: bounded, in order, and over when they are over."""

import threading

from kafka_marshal.remote.errands import CALLS_MAX, Errands

WAIT_S = 10


def test_calls_are_made_in_order_by_one_thread():
    errands = Errands("test", threads=1)
    made, done = [], threading.Event()
    for number in range(20):
        assert errands.submit(lambda number=number: made.append(number))
    errands.submit(done.set)
    assert done.wait(WAIT_S)
    assert made == list(range(20))
    errands.close(1_000)


def test_calls_of_several_threads_overlap():
    errands = Errands("test", threads=2)
    both = threading.Barrier(2)
    met = threading.Semaphore(0)

    def meet():
        both.wait(WAIT_S)
        met.release()

    for _ in range(2):
        assert errands.submit(meet)
    assert met.acquire(timeout=WAIT_S)
    assert met.acquire(timeout=WAIT_S)
    errands.close(1_000)


def test_what_is_full_or_closed_takes_nothing():
    errands = Errands("test", threads=1)
    begun, free = threading.Event(), threading.Event()
    made = []

    def hold():
        begun.set()
        assert free.wait(WAIT_S)

    assert errands.submit(hold)
    assert begun.wait(WAIT_S)
    for _ in range(CALLS_MAX):
        assert errands.submit(lambda: made.append(1))
    assert not errands.submit(lambda: None)
    errands.close(0)
    free.set()
    errands.close(WAIT_S * 1_000)
    assert not errands.submit(lambda: None)
    assert made == []


def test_a_call_does_not_wait_for_a_thread_that_has_just_taken_another(monkeypatch):
    errands = Errands("test", threads=2)
    taken, submitted = threading.Event(), threading.Event()
    second, made = threading.Event(), threading.Event()
    plain = errands._queue.get

    def get(*, block=True, timeout=None):
        call = plain(block=block, timeout=timeout)
        taken.set()
        assert submitted.wait(WAIT_S)
        return call

    def first():
        if second.wait(WAIT_S / 2):
            made.set()

    monkeypatch.setattr(errands._queue, "get", get)
    assert errands.submit(first)
    assert taken.wait(WAIT_S)
    assert errands.submit(second.set)
    submitted.set()
    assert made.wait(WAIT_S)
    errands.close(WAIT_S * 1_000)
