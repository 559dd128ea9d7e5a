"""``marshal demo`` as users run it: to its end, interrupted, and killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slices import HANG_S
from slowness import until

COMMAND = [sys.executable, "-m", "kafka_marshal_cli", "demo"]
H_MS = 2_000
LATE_MS_MAX = 30_000


def children(pid: int) -> set[int]:
    """Return all descendants of a process, from Linux's /proc."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | children(child)
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.slow
def test_the_demo_ends_with_a_verdict_of_checks_that_hold():
    done = subprocess.run(
        [*COMMAND, "-o", "json", "--heartbeat-interval", f"{H_MS}ms", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    verdict = json.loads(done.stdout)
    alo, amo = verdict["rounds"]
    checks = alo["checks"] + amo["checks"]
    late = [check for check in checks if not check["held"] and check["unit"] == "ms"]
    # On a busy machine checks of times may fail; checks of records hold on any machine.
    assert [c for c in checks if not c["held"] and c not in late] == []
    assert all(c["bound"] < c["measured"] < LATE_MS_MAX for c in late)
    assert (done.returncode, verdict["held"]) == (int(bool(late)), not late)
    # Text for people goes to stderr, without control characters if it is no terminal.
    assert done.stderr.isascii()
    assert "\x1b" not in done.stderr
    assert "took over payments-" in done.stderr
    assert "Paused the group" in done.stderr
    assert (alo["delivery"], amo["delivery"]) == ("alo", "amo")
    assert alo["records"]["produced"] == alo["records"]["processed"] > 3_000
    assert alo["records"]["lost"] == 0
    assert amo["records"]["duplicated"] == 0
    assert len(amo["lost"]) == amo["records"]["lost"]
    for each in (alo, amo):
        replaced = [c for c in each["checks"] if "replaced" in c["name"]]
        assert replaced
        assert all(c["measured"] > 2 * H_MS for c in replaced)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads processes from /proc")
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 1, id="interrupt"),
        pytest.param(signal.SIGTERM, 1, id="terminate", marks=pytest.mark.proof),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, id="kill"),
    ],
)
def test_no_process_and_no_file_outlives_an_interrupted_demo(number, code, tmp_path):
    report_path = tmp_path / "told"
    environment = dict(os.environ, TMPDIR=str(tmp_path))
    with report_path.open("wb") as out:
        demo = subprocess.Popen(COMMAND, stdout=out, stderr=out, env=environment)
    try:
        until(
            lambda: b"Killed worker-" in report_path.read_bytes(),
            timeout_s=200,
        )
        started = children(demo.pid)
        # The supervisor, the broker, and two consumers that are left.
        assert len([pid for pid in started if is_alive(pid)]) >= 4
        demo.send_signal(number)
        assert demo.wait(timeout=HANG_S) == code
        until(lambda: not any(map(is_alive, started)), timeout_s=200)
    finally:
        demo.kill()
        demo.wait(timeout=HANG_S)
    if number is not signal.SIGKILL:
        assert b"Interrupted: everything that was started is stopped" in (
            report_path.read_bytes()
        )
        assert [path.name for path in tmp_path.iterdir()] == ["told"]


def test_an_invalid_heartbeat_interval_is_refused_at_once():
    done = subprocess.run(
        [*COMMAND, "--heartbeat-interval", "1ms"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 2
    assert "--heartbeat-interval must be 500 ms to 60 s, not 1 ms" in done.stderr
