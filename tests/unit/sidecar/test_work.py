"""Bounded pools: a call that finds one full is told to come again."""

import asyncio
import threading

import pytest

from kafka_marshal.sidecar.failures import Answered
from kafka_marshal.sidecar.work import Pool


def test_a_call_runs_on_another_thread():
    async def main():
        pool = Pool("p", threads=1, calls_max=2)
        try:
            return await pool.run(threading.current_thread, timeout_s=10)
        finally:
            pool.close()

    assert asyncio.run(main()) is not threading.current_thread()


def test_a_full_pool_refuses_and_then_takes_again():
    async def main():
        pool = Pool("p", threads=1, calls_max=2)
        hold = threading.Event()
        tasks = [
            asyncio.create_task(pool.run(lambda: hold.wait(30), timeout_s=60))
            for _ in range(2)
        ]
        await asyncio.sleep(0)
        with pytest.raises(Answered) as refused:
            await pool.run(int, timeout_s=10)
        hold.set()
        assert await asyncio.gather(*tasks) == [True, True]
        assert pool.count == 0
        assert await pool.run(int, timeout_s=10) == 0
        pool.close()
        return refused.value

    assert asyncio.run(main()).status == 503


def test_a_call_has_a_deadline_and_counts_until_it_ends():
    async def main():
        pool = Pool("p", threads=1, calls_max=2)
        hold = threading.Event()
        with pytest.raises(TimeoutError):
            await pool.run(lambda: hold.wait(30), timeout_s=0.01)
        assert pool.count == 1
        hold.set()
        assert await pool.run(int, timeout_s=10) == 0
        pool.close()

    asyncio.run(main())


def test_an_error_of_the_call_comes_out():
    async def main():
        pool = Pool("p", threads=1, calls_max=2)
        try:
            with pytest.raises(ZeroDivisionError):
                await pool.run(lambda: 1 // 0, timeout_s=10)
        finally:
            pool.close()

    asyncio.run(main())


def test_a_closed_pool_takes_nothing():
    async def main():
        pool = Pool("p", threads=1, calls_max=2)
        pool.close()
        with pytest.raises(Answered):
            await pool.run(int, timeout_s=10)
        assert pool.count == 0

    asyncio.run(main())
