"""Calls on another thread."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kafka_marshal.errors import InvalidTransition

CALL_S = 30.0
T = TypeVar("T")


def in_thread(call: Callable[[], T]) -> T | InvalidTransition:
    """Call a function on another thread; return its result or its error."""
    with ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(call).result(CALL_S)
        except InvalidTransition as error:
            return error
