"""Run the checks and the tests beside each other: most of what they do is wait.

    python tools/test_lanes.py [ARGUMENTS OF PYTEST]

Two lanes have deadlines in real time, and the processors first: what starts Spark; and
all else that talks to a broker, in three processes with a broker each, and after it the
tests that need nothing. They mostly wait. Two only compute, on virtual clocks, and
take what those leave: the checks, with the tests of the core, and what simulates and
searches. Each is an ordinary command, whose output goes to ``build/tests``; their
output is printed when they have ended, with how long they took, and the worst of their
results is the result. With paths or ``JOBS=1`` the checks come first, then one run of
pytest.

As Kafka's own build does, a few failed tests of the lanes with deadlines in real time
run once more, when nothing else runs. What passes then is printed as flaky, and does
not fail the run. What only computes fails at once: it does the same each time.
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
# `make cover` runs them, each file for the module that it is about.
CORE = "tests/unit/protocol"
CHECKS = ("make", "check", "cover")
# Files one by one, to whichever process is free; of tests that compute, test by test.
BY_FILE = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
BY_TEST = ("-n", "2", "--dist", "loadgroup")
# The last lane, which in the end has all processors.
IN_TWO = ("-n", "2", "--dist", "loadfile")
LANES = {
    "spark": [SPARK],
    "brokers": ["integration", f"--ignore={SPARK}", *BY_FILE],
    "computing": [*COMPUTING, *BY_TEST],
    "checks": [],
    "unit": ["tests", *(f"--ignore={each}" for each in (*COMPUTING, CORE)), *IN_TWO],
}
# Test files of the lane of brokers that take longest, from about 150 to 50 s: were one
# of them the last, the other processes would have nothing to do meanwhile.
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
# With deadlines in real time; more failures than this are not a matter of chance.
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
    """Run one after the other, on this terminal."""
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
    """Start a lane, which says what it has to say in a file of its own."""
    shutil.rmtree(OUT / name, ignore_errors=True)
    command = _pytest(name, *paths, *SLOWEST, *arguments) if paths else [*CHECKS]
    with (OUT / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
    os.setpriority(os.PRIO_PROCESS, process.pid, NICE.get(name, 0))
    return process


def _pytest(name: str, *arguments: str) -> list[str]:
    """Return the command of a lane, with a cache of its own: pytest writes it last."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return [*command, "-o", f"cache_dir={OUT / name}"]


def _retry(name: str, arguments: list[str]) -> int:
    """Run the failed tests of a lane once more, alone; return the code of that."""
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
    """Return the processor time of all that has ended and was waited for."""
    used = os.times()
    return used.children_user + used.children_system


def _end(name: str, process: "subprocess.Popen[bytes]") -> int:
    """Print the output of a lane; return its code, after ending it if it is late."""
    is_late = process.poll() is None
    if is_late:
        process.kill()
        process.wait(timeout=60)
    sys.stdout.write(f"== {name}{', ended: it took too long' if is_late else ''}\n")
    sys.stdout.write((OUT / f"{name}.log").read_text(errors="replace"))
    sys.stdout.flush()
    return 1 if is_late else int(process.returncode)


def main(arguments: list[str]) -> int:
    """Choose by the arguments; return an exit code."""
    # Who starts this in the background may have it ignored, and tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    has_paths = any(Path(each.split("::")[0]).exists() for each in arguments)
    if has_paths or os.environ.get("JOBS") == "1":
        return run_one(arguments)
    return run_lanes(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
