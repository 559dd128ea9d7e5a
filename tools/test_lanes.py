"""Run the checks and the tests beside each other: most of what they do is wait.

    python tools/test_lanes.py [ARGUMENTS OF PYTEST]

One lane has what takes a cluster or Spark to itself, one all else that talks to a
broker, and two what only computes, which gives way to the others: the checks, and the
tests that need nothing. Each is an ordinary command, whose output goes to
``build/tests``; what they said is printed when they have ended, and the worst of their
results is the result. With paths or ``JOBS=1`` the checks come first, then one run of
pytest.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "tests"
HEAVY = ("integration/spark", "integration/chaos")
CHECKS = ("make", "check", "cover")
LANES = {
    "heavy": [*HEAVY],
    "brokers": ["integration", *(f"--ignore={each}" for each in HEAVY)],
    # They wait for nobody, so they take what the others leave, and longer for it; and
    # both processors once those have ended.
    "computing": ["tests", "--timeout=1800", "-n", "2", "--dist", "loadscope"],
    "checks": [],
}
NICE = {"computing": 15, "checks": 10}
RUN_S_MAX = 5_000
LOOK_S = 0.5
NOTHING_RAN = 5


def run_one(arguments: list[str]) -> int:
    """Run one after the other, on this terminal."""
    pytest = [sys.executable, "-m", "pytest", "-q", *arguments]
    for command in ([*CHECKS], pytest):
        done = subprocess.run(command, cwd=ROOT, check=False, timeout=RUN_S_MAX)
        if done.returncode:
            return done.returncode
    return 0


def run_lanes(arguments: list[str]) -> int:
    """Run every lane, and say what each said; return the worst code."""
    OUT.mkdir(parents=True, exist_ok=True)
    running = {}
    for name, paths in LANES.items():
        with (OUT / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", "pytest", "-q", *paths, *arguments]
            # A cache of its own: pytest writes it at its end.
            command += ["-o", f"cache_dir={OUT / name}"]
            if not paths:
                command = [*CHECKS]
            running[name] = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )
        os.setpriority(os.PRIO_PROCESS, running[name].pid, NICE.get(name, 0))
    codes = {}
    late = time.monotonic() + RUN_S_MAX
    try:
        while running:
            for name, process in list(running.items()):
                if process.poll() is None and time.monotonic() < late:
                    continue
                del running[name]
                codes[name] = _end(name, process)
            time.sleep(LOOK_S)
    finally:
        for process in running.values():
            process.terminate()
    tests = [code for name, code in codes.items() if LANES[name]]
    if set(tests) == {NOTHING_RAN}:
        return NOTHING_RAN
    return max(abs(code) for code in codes.values() if code != NOTHING_RAN)


def _end(name: str, process: "subprocess.Popen[bytes]") -> int:
    """Say what a lane said; return its code, after ending it where it is late."""
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
    has_paths = any(Path(each.split("::")[0]).exists() for each in arguments)
    if has_paths or os.environ.get("JOBS") == "1":
        return run_one(arguments)
    return run_lanes(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
