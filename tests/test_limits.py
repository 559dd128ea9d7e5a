"""Time limits of tests: a test that hangs fails alone, also on a busy machine."""

import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import limits
import pytest
import test_lanes
from slices import HANG_S
from slowness import until

HANGING = """
import threading
import time

import pytest

def wait_in_a_thread():
    time.sleep(60)

@pytest.fixture
def hangs_in_teardown():
    yield
    threading.Event().wait(60)

def test_hangs():
    threading.Thread(target=wait_in_a_thread, daemon=True, name="beside").start()
    threading.Event().wait(60)

def test_leaves_much(hangs_in_teardown):
    time.sleep(60)

def test_passes():
    pass
"""


@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_test_that_hangs_fails_alone_and_shows_all_stacks(tmp_path, processes):
    (tmp_path / "conftest.py").write_text(
        "from limits import pytest_runtest_teardown, pytest_timeout_set_timer\n"
    )
    (tmp_path / "test_hanging.py").write_text(HANGING)
    options = ("--timeout=2", "-n", processes, "-p", "no:cacheprovider")
    paths = f"pythonpath={test_lanes.ROOT}/tests/support {test_lanes.ROOT}/tools"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", paths, *options, str(tmp_path)],
        cwd=tmp_path,
        timeout=HANG_S,
        capture_output=True,
        text=True,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == test_lanes.FAILED, printed
    assert "2 failed, 1 passed, 1 error" in printed
    assert "Stack of beside" in printed
    assert "in wait_in_a_thread" in printed
    assert "threading.Event().wait(60)" in printed
    assert printed.count("E   Failed: Timeout (>2.0s)") == 3


@pytest.fixture
def clock(monkeypatch):
    """A clock, the alarm that is set, and how slow the machine is."""
    found = SimpleNamespace(now_s=0.0, alarm_s=0.0, factor=1.0)
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: found.now_s))
    monkeypatch.setattr(limits, "factor_now", lambda: found.factor)
    fake = SimpleNamespace(
        SIGALRM=None,
        SIG_DFL=None,
        ITIMER_REAL=None,
        signal=lambda _, handler: setattr(found, "handler", handler),
        setitimer=lambda _, alarm_s: setattr(found, "alarm_s", alarm_s),
    )
    monkeypatch.setattr(limits, "signal", fake)
    return found


def ring(clock):
    clock.now_s += clock.alarm_s
    clock.handler()


def test_time_counts_less_on_a_slow_machine(clock):
    overs = []
    limits.Limit(60.0, lambda: overs.append(clock.now_s)).start()
    clock.factor = 4.0
    for _ in range(8):
        ring(clock)  # 160 s, as 40 s of a quiet machine
    clock.factor = 1.0
    assert overs == []
    ring(clock)
    assert overs == [180.0]
    for _ in range(3):
        ring(clock)
    assert overs == [180.0, 240.0]


def test_a_cancelled_limit_sets_no_alarm(clock):
    limit = limits.Limit(60.0, pytest.fail)
    limit.start()
    assert clock.alarm_s == limits.LOOK_S
    limit.cancel()
    assert clock.alarm_s == 0


def test_a_test_that_computes_has_the_limit_of_its_lane():
    asked_s = 300.0
    for each in ("simulation/test_x.py", "model/test_x.py", "property/test_x.py"):
        item = SimpleNamespace(path=test_lanes.ROOT / "tests" / each)
        assert limits.limit_s_of(item, asked_s) == test_lanes.RUN_S_MAX
        assert limits.limit_s_of(item, 6 * 3_600.0) == 6 * 3_600.0
    item = SimpleNamespace(path=test_lanes.ROOT / "integration" / "test_x.py")
    assert limits.limit_s_of(item, asked_s) == asked_s


def test_another_method_or_thread_is_left_to_pytest_timeout(request):
    settings = SimpleNamespace(method="thread", timeout=300.0)
    assert limits.pytest_timeout_set_timer(request.node, settings) is None
    settings.method = "signal"
    found = []
    thread = threading.Thread(
        target=lambda: found.append(
            limits.pytest_timeout_set_timer(request.node, settings)
        )
    )
    thread.start()
    until(lambda: found)
    assert found == [None]


def test_this_test_has_a_limit(request):
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    assert 0 < left_s <= limits.LOOK_S
    assert request.config.getini("timeout") == "300"
