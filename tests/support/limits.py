"""The time limit of a test, in seconds of a quiet machine, against tests that hang.

pytest-timeout has the limit (`timeout` in pyproject.toml, or its options) and requests
a timer. The timer here divides the elapsed time by the slowness of the machine, so that
load alone ends no test. Tests that only compute, at low priority, have the limit of
their whole lane. Both conftest.py import the hooks.

A test that exceeds its limit fails, with the stacks of all threads; its teardown has
the same limit again, and the next test runs.
"""

import signal
import threading
import time
from collections.abc import Callable

import pytest
import pytest_timeout
from slowness import factor_now
from test_lanes import COMPUTING, ROOT, RUN_S_MAX

# The interval of measurements: shorter tests are not affected.
LOOK_S = 20.0
LOOK_S_MIN = 0.01
LIMIT = pytest.StashKey["Limit"]()


def pytest_sessionstart() -> None:
    """Let tests send SIGINT to the processes that they start.

    A process that a script starts in the background ignores it, as do its children.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Limit:
    """Calls ``on_over`` on the main thread each time the limit is used up.

    Args:
        limit_s: Seconds of a machine that is not busy.
        on_over: May raise; the next limit starts before the call.
    """

    def __init__(self, limit_s: float, on_over: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._left_s = limit_s
        self._on_over = on_over
        self._since_s = 0.0

    def start(self) -> None:
        """Start or restart; like `cancel`, only on the main thread."""
        self._left_s = self._limit_s
        signal.signal(signal.SIGALRM, lambda *_: self._look())
        self._wait()

    def cancel(self) -> None:
        """Stop measuring."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _wait(self) -> None:
        self._since_s = time.monotonic()
        wait_s = max(LOOK_S_MIN, min(LOOK_S, self._left_s))
        signal.setitimer(signal.ITIMER_REAL, wait_s)

    def _look(self) -> None:
        __tracebackhide__ = True
        factor = factor_now()
        self._left_s -= (time.monotonic() - self._since_s) / factor
        is_over = self._left_s <= 0
        if is_over:
            self._left_s = self._limit_s
        self._wait()
        if is_over:
            self._on_over()


def limit_s_of(item: pytest.Item, asked_s: float) -> float:
    """Return the limit of a test for which pytest-timeout requests ``asked_s``."""
    is_computing = any(item.path.is_relative_to(ROOT / each) for each in COMPUTING)
    return max(asked_s, RUN_S_MAX) if is_computing else asked_s


def pytest_timeout_set_timer(
    item: pytest.Item, settings: pytest_timeout.Settings
) -> bool | None:
    """Set the timer of a test; return None where pytest-timeout must set its own."""
    is_main = threading.current_thread() is threading.main_thread()
    if settings.method != "signal" or not is_main:
        return None
    limit_s = limit_s_of(item, settings.timeout)
    used = settings._replace(timeout=limit_s)

    def on_over() -> None:
        __tracebackhide__ = True
        pytest_timeout.timeout_sigalrm(item, used)

    limit = Limit(limit_s, on_over)
    item.stash[LIMIT] = limit
    item.cancel_timeout = limit.cancel  # type: ignore[attr-defined]
    limit.start()
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Restart the timer: pytest-timeout cancels it when a test fails."""
    if limit := item.stash.get(LIMIT, None):
        limit.start()
