"""Threads for requests, with a limit on those that run or queue."""

import asyncio
import threading

import pytest
from slowness import until

from kafka_marshal.sidecar.executors import BoundedExecutor
from kafka_marshal.sidecar.http_errors import HttpError


@pytest.fixture
def executor():
    found = BoundedExecutor("test", threads=1, calls_max=2)
    yield found
    found.close()


def test_calls_beyond_the_limit_are_refused(executor):
    held = threading.Event()
    executor.reserve()
    first = executor.submit(held.wait)
    executor.reserve()
    with pytest.raises(HttpError, match="busy with 2 requests"):
        executor.reserve()
    executor.leave()
    executor.reserve()
    second = executor.submit(lambda: 7)
    held.set()
    assert (first.result(30), second.result(30)) == (True, 7)
    until(lambda: executor._count == 0)


def test_a_call_returns_its_result_or_times_out(executor):
    held = threading.Event()

    async def main():
        assert await executor.run(lambda: 7, timeout_s=30) == 7
        with pytest.raises(TimeoutError):
            await executor.run(held.wait, timeout_s=0.01)

    asyncio.run(main())
    held.set()
    until(lambda: executor._count == 0)


def test_a_closed_executor_refuses_calls_and_counts_none(executor):
    executor.close()
    executor.reserve()
    with pytest.raises(HttpError, match="shutting down"):
        executor.submit(lambda: None)
    assert executor._count == 0
