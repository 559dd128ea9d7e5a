"""One thread at a time reads from a consumer; queries and the close may wait."""

import os
import threading
from types import SimpleNamespace

import pytest
from threadkit import in_thread

from kafka_marshal.engine import read_turn
from kafka_marshal.engine.read_turn import ReadTurn
from kafka_marshal.errors import InvalidTransition


@pytest.fixture
def turn():
    return ReadTurn(SimpleNamespace(taken=None), threading.RLock())


def enter(turn):
    with turn:
        return "read"


def is_free(turn):
    with turn.if_free() as free:
        return free


def test_a_second_thread_gets_an_error_until_the_first_has_left(turn):
    with turn, turn:
        assert isinstance(in_thread(lambda: enter(turn)), InvalidTransition)
        assert not in_thread(lambda: is_free(turn))
        assert is_free(turn)
    assert in_thread(lambda: enter(turn)) == "read"
    assert in_thread(lambda: is_free(turn))


def test_a_forked_child_cannot_read(turn, monkeypatch):
    """A thread that it does not have may hold the locks."""
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(InvalidTransition, match="belongs to the parent process"):
        enter(turn)


def test_a_reader_waits_for_the_end_of_a_query(turn, monkeypatch):
    monkeypatch.setattr(read_turn, "QUERY_WAIT_S_MAX", 0.01)
    with turn.if_free():
        assert isinstance(in_thread(lambda: enter(turn)), InvalidTransition)
    monkeypatch.setattr(read_turn, "QUERY_WAIT_S_MAX", 30)
    is_entered, reading = threading.Event(), threading.Event()
    turn_of_question = turn.if_free()

    def ask():
        with turn_of_question:
            is_entered.set()
            return reading.wait(30)

    asker = threading.Thread(target=ask)
    asker.start()
    assert is_entered.wait(30)
    reading.set()
    assert enter(turn) == "read"
    asker.join(30)


def test_a_close_waits_for_the_reader_up_to_its_timeout(turn):
    def close(timeout_ms):
        with turn.after(timeout_ms):
            return is_free(turn)

    with turn:
        assert not in_thread(lambda: close(1))
    assert in_thread(lambda: close(30_000))


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_taken_records_are_kept_if_the_call_raises(turn, error):
    dispatcher = turn._dispatcher
    dispatcher.taken = taken = [object()]
    if error is None:
        enter(turn)
    else:
        with pytest.raises(error), turn:
            raise error
    assert dispatcher.taken is (None if error is None else taken)
    assert in_thread(lambda: is_free(turn))
