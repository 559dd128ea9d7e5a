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


@pytest.fixture
def held():
    """An event for calls to wait for, set at the latest when the test ends."""
    found = threading.Event()
    yield found
    found.set()


def test_calls_beyond_the_limit_are_refused(executor, held):
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


def test_a_full_executor_refuses_a_call_with_503(executor, held):
    async def main():
        calls = [
            asyncio.create_task(executor.run(held.wait, timeout_s=30)) for _ in range(2)
        ]
        await asyncio.sleep(0)
        with pytest.raises(HttpError) as refused:
            await executor.run(int, timeout_s=30)
        held.set()
        assert await asyncio.gather(*calls) == [True, True]
        assert await executor.run(int, timeout_s=30) == 0
        return refused.value.status

    assert asyncio.run(main()) == 503


def test_a_call_returns_its_result_or_raises_its_error(executor):
    async def main():
        with pytest.raises(ZeroDivisionError):
            await executor.run(lambda: 1 // 0, timeout_s=30)
        return await executor.run(threading.current_thread, timeout_s=30)

    assert asyncio.run(main()) is not threading.current_thread()
    until(lambda: executor._count == 0)


def test_a_call_that_timed_out_counts_until_it_ends(executor, held):
    async def main():
        with pytest.raises(TimeoutError):
            await executor.run(held.wait, timeout_s=0.01)

    asyncio.run(main())
    assert executor._count == 1
    held.set()
    until(lambda: executor._count == 0)


def test_a_closed_executor_refuses_calls_and_counts_none(executor):
    executor.close()
    executor.reserve()
    with pytest.raises(HttpError, match="shutting down"):
        executor.submit(lambda: None)
    assert executor._count == 0
