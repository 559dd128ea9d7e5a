"""Runs the checks and the tests in parallel lanes, because most tests mostly wait.

    python tools/test_lanes.py [ARGUMENTS OF PYTEST]

Three lanes have deadlines in real time, and the higher priority: tests that start
Spark; all other tests with a broker, in three processes with a broker each; and after
these the tests that need no broker. They mostly wait. Two lanes only compute, on
virtual clocks, with a lower priority: the checks, with the tests of the core; and
simulations and searches. Each lane is an ordinary command, whose output goes to
``build/tests``. It is printed when the lane ends, with the time that it took. The worst
exit code is the result. With paths or ``JOBS=1`` the checks run first, then pytest.

As in Kafka's own build, a few failed tests of lanes with deadlines in real time run
once more, when nothing else runs. A test that passes then is printed as flaky, and does
not fail the run. Tests that only compute have no second run: they always do the same.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "tests"
SPARK = "integration/spark"
COMPUTING = tuple(
    f"tests/{each}"
    # The longest test comes first.
    for each in ("simulation", "model", "growth", "property", "spec", "transcripts")
)
# `make cover` runs these tests, each file for its own module.
CORE = "tests/unit/protocol"
CHECKS = ("make", "check", "cover")
# A free process gets the next file; in the lane that computes, the next test.
BY_FILE = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
BY_TEST = ("-n", "2", "--dist", "loadgroup")
# For the last lane, which at the end has all processors.
IN_TWO = ("-n", "2", "--dist", "loadfile")
LANES = {
    "spark": [SPARK],
    "brokers": ["integration", f"--ignore={SPARK}", *BY_FILE],
    "computing": [*COMPUTING, *BY_TEST],
    "checks": [],
    "unit": ["tests", *(f"--ignore={each}" for each in (*COMPUTING, CORE)), *IN_TWO],
}
# Longest test files of the lane ``brokers``, from about 150 to 50 s. They run first: if
# one ran last, the other processes would wait for it.
LONGEST = tuple(
    f"test_{each}.py"
    for each in (
        *("delivery", "takeover", "rights", "benchmarks", "sidecar_handoff", "demo"),
        *("truncation", "sidecar_client", "docs", "sidecar", "layout_kills"),
        *("security", "faults", "cli", "pause", "conformance", "consumer"),
        *("resized_readers", "set_position", "client_death", "cluster_faults"),
    )
)
NICE = {"computing": 15, "checks": 12}
AFTER = {"unit": "brokers"}
# Lanes with deadlines in real time. More failures than this are not due to chance.
RETRIED = ("spark", "brokers", "unit")
RETRIED_MAX = 3
FAILED = 1
SLOWEST = ("--durations=12", "--durations-min=10")
RUN_S_MAX = 5_000
LOOK_S = 0.5
NOTHING_RAN = 5


def longest_first(items: list[Any]) -> None:
    """Sort tests of pytest: those in the longest files first, else as they were.

    The order of paths on the command line does not do that: pytest collects a folder
    once, in its own order.
    """
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def run_one(arguments: list[str]) -> int:
    """Run the checks, then pytest, on this terminal; return an exit code."""
    pytest = [sys.executable, "-m", "pytest", "-q", *arguments]
    for command in ([*CHECKS], pytest):
        done = subprocess.run(command, cwd=ROOT, check=False, timeout=RUN_S_MAX)
        if done.returncode:
            return done.returncode
    return 0


def run_lanes(arguments: list[str]) -> int:
    """Run every lane, and print the output of each; return the worst code."""
    OUT.mkdir(parents=True, exist_ok=True)
    waiting = dict(LANES)
    running: dict[str, subprocess.Popen[bytes]] = {}
    codes: dict[str, int] = {}
    since = {}
    late = time.monotonic() + RUN_S_MAX
    try:
        while waiting or running:
            for name, paths in list(waiting.items()):
                if name not in AFTER or AFTER[name] in codes:
                    del waiting[name]
                    running[name] = _start(name, paths, arguments)
                    since[name] = time.monotonic()
            for name, process in list(running.items()):
                before_s = _cpu_s()
                if process.poll() is None and time.monotonic() < late:
                    continue
                del running[name]
                codes[name] = _end(name, process)
                took_s = time.monotonic() - since[name]
                cpu_s = _cpu_s() - before_s
                print(f"-- {name}: {took_s:.0f} s, {cpu_s:.0f} s of processors\n")
            time.sleep(LOOK_S)
        for name in RETRIED:
            if codes[name] == FAILED:
                codes[name] = _retry(name, arguments)
    finally:
        for process in running.values():
            process.terminate()
    tests = [code for name, code in codes.items() if LANES[name]]
    if set(tests) == {NOTHING_RAN}:
        return NOTHING_RAN
    return max(abs(code) for code in codes.values() if code != NOTHING_RAN)


def _start(
    name: str, paths: list[str], arguments: list[str]
) -> "subprocess.Popen[bytes]":
    """Start a lane, with its output in a file of its own."""
    shutil.rmtree(OUT / name, ignore_errors=True)
    command = _pytest(name, *paths, *SLOWEST, *arguments) if paths else [*CHECKS]
    with (OUT / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
    os.setpriority(os.PRIO_PROCESS, process.pid, NICE.get(name, 0))
    return process


def _pytest(name: str, *arguments: str) -> list[str]:
    """Return the command of a lane, with a cache of its own for its failed tests."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return [*command, "-o", f"cache_dir={OUT / name}"]


def _retry(name: str, arguments: list[str]) -> int:
    """Run the failed tests of a lane once more, alone; return the exit code."""
    failed = list(json.loads((OUT / name / "v/cache/lastfailed").read_bytes()))
    if len(failed) > RETRIED_MAX:
        return FAILED
    print(f"== {name}: {len(failed)} failed, once more alone", flush=True)
    command = _pytest(name, *failed, *arguments)
    done = subprocess.run(command, cwd=ROOT, check=False, timeout=RUN_S_MAX)
    if not done.returncode:
        print("".join(f"FLAKY {each}: it failed, then passed\n" for each in failed))
    return done.returncode


def _cpu_s() -> float:
    """Return the processor time of child processes that have ended, in seconds."""
    used = os.times()
    return used.children_user + used.children_system


def _end(name: str, process: "subprocess.Popen[bytes]") -> int:
    """Print a lane's output; return its exit code. End the lane first if it is late."""
    is_late = process.poll() is None
    if is_late:
        process.kill()
        process.wait(timeout=60)
    sys.stdout.write(f"== {name}{', ended: it took too long' if is_late else ''}\n")
    sys.stdout.write((OUT / f"{name}.log").read_text(errors="replace"))
    sys.stdout.flush()
    return 1 if is_late else int(process.returncode)


def main(arguments: list[str]) -> int:
    """Run lanes, or a single run, depending on the arguments; return an exit code."""
    # A shell that starts this in the background makes it ignore SIGINT, but tests
    # send that signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    has_paths = any(Path(each.split("::")[0]).exists() for each in arguments)
    if has_paths or os.environ.get("JOBS") == "1":
        return run_one(arguments)
    return run_lanes(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
