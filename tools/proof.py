"""Runs the long searches and simulations at full size, and reports their results.

    python tools/proof.py [PART ...] [-- ARGUMENTS]

Without PART all parts run, one after the other; a part that fails does not stop the
next. ARGUMENTS are passed to the simulator or to pytest. Output is printed at once. The
report is ``build/proof/report.md``; it has all parts that ran here so far.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import attrs
import chaos_report
import proof_report

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "proof"
CHAOS = ROOT / "build" / "chaos"
SIMULATION = ROOT / "build" / "sim.json"
# 12 hours: 20,000 seeds take more than one hour on two processors.
PART_S_MAX = 12 * 3_600
# Environment of the tests: full size; after six hours a test counts as hanging.
PROOF = {"PROOF": "1", "PYTEST_TIMEOUT": str(6 * 3_600)}


@attrs.frozen(kw_only=True)
class Part:
    """A part of the proof.

    Attributes:
        title: Heading of the part in the report.
        tests: Tests and options for pytest; empty for the simulator.
    """

    title: str
    tests: tuple[str, ...] = ()


PARTS = {
    "sim": Part(title="Simulated fleets"),
    "sidecars": Part(
        title="Simulated sidecars",
        tests=("tests/simulation/test_hosted.py", "-k", "invariant_holds"),
    ),
    "positions": Part(
        title="Simulated set positions",
        tests=("tests/simulation/test_positions.py", "-k", "all_its_keys"),
    ),
    "fences": Part(
        title="Simulated fences and scheduled pauses",
        tests=("tests/simulation/test_fences.py", "-k", "are_replaced"),
    ),
    "resizes": Part(
        title="Simulated changes of the partition count",
        tests=("tests/simulation/test_resizing.py",),
    ),
    "others": Part(
        title="Other simulated faults",
        tests=tuple(
            f"tests/simulation/test_{name}.py"
            for name in [
                "garbage",
                "growths",
                "handoffs",
                "plans",
                "seeks",
                "simulation",
                "standbys",
            ]
        ),
    ),
    "explain": Part(
        title="Answers about the past", tests=("tests/simulation/test_explain.py",)
    ),
    "kills": Part(
        title="Admins and members killed on a broker",
        tests=(
            "integration/test_set_position.py",
            "integration/test_layout_kills.py",
            "integration/test_output_kills.py",
            "-k",
            "killed_at_any_step or admins_are_killed or despite_an_interruption",
        ),
    ),
    "brokers": Part(
        title="Lost ends of logs, and rights, on a broker",
        tests=("integration/test_truncation.py", "integration/test_rights.py"),
    ),
    "machine": Part(
        title="The fold against its twin",
        tests=(
            "tests/property/test_machine.py",
            "tests/property/test_mutants.py",
            "tests/property/test_twin.py",
        ),
    ),
    "native": Part(
        title="The compiled readers against those in Python",
        tests=tuple(
            f"tests/property/test_native_{name}.py"
            for name in ["beats", "columns", "entries", "records"]
        ),
    ),
    "planner": Part(
        title="Plans of groups",
        tests=(
            "tests/property/test_group_plan.py",
            "tests/property/test_key_rows.py",
            "integration/test_plan_simulation.py",
        ),
    ),
    "model": Part(title="Small worlds", tests=("tests", "-m", "model")),
    "chaos": Part(title="Real faults", tests=("integration/chaos",)),
    "storms": Part(
        title="Spark storms",
        tests=(
            "integration/spark/test_delivery_storms.py",
            "integration/spark/test_many_queries.py",
            "integration/spark/test_through_sidecar.py",
        ),
    ),
    "flood": Part(title="Flood", tests=("tests/growth",)),
    "demo": Part(title="The demo", tests=("integration/test_demo.py",)),
    "benchmarks": Part(
        title="Benchmarks, smallest loads", tests=("integration/test_benchmarks.py",)
    ),
}


def simulate(arguments: list[str]) -> int:
    """Run the simulator, which writes its summary to ``SIMULATION``."""
    seeds = os.environ.get("SEEDS", "0:20000")
    command = [sys.executable, "-m", "simulator", "--seeds", seeds, "--shrink"]
    with SIMULATION.open("wb") as out:
        code = run([*command, "-o", "json", *arguments], out=out)
    sys.stdout.write(SIMULATION.read_text())
    return code


def search(name: str, arguments: list[str]) -> int:
    """Run the tests of a part at full size; write their results to ``NAME.xml``."""
    results = OUT / f"{name}.xml"
    results.unlink(missing_ok=True)
    environment = dict(PROOF)
    if name == "chaos":
        CHAOS.mkdir(parents=True, exist_ok=True)
        for old in (CHAOS / "findings").glob("*.json"):
            old.unlink()
        environment["CHAOS_REPORT"] = str(CHAOS)
    pytest = [sys.executable, "-m", "pytest", "-q", *PARTS[name].tests]
    # The newer JUnit format of pytest, xunit2, has no properties of single tests.
    pytest += ["-o", "junit_family=xunit1", f"--junitxml={results}"]
    code = run([*pytest, *arguments], environment)
    if name == "chaos":
        code = chaos_report.main(CHAOS) or code
    return code


def run(
    command: list[str],
    environment: dict[str, str] | None = None,
    *,
    out: IO[bytes] | None = None,
) -> int:
    """Run a command in the repository; return its exit code."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | (environment or {}),
        stdout=out,
        check=False,
        timeout=PART_S_MAX,
    )
    return done.returncode


def run_part(name: str, arguments: list[str]) -> int:
    """Run one part, and write its outcome to ``NAME.json``; return its exit code."""
    print(f"== {PARTS[name].title}", flush=True)
    since = time.monotonic()
    code = simulate(arguments) if name == "sim" else search(name, arguments)
    ended = {
        "title": PARTS[name].title,
        "commit": proof_report.commit(),
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "seconds": round(time.monotonic() - since, 1),
        "code": code,
    }
    (OUT / f"{name}.json").write_text(json.dumps(ended, indent=2) + "\n")
    return code


def main(arguments: list[str]) -> int:
    """Run the named parts, or all; return 0 if all of them passed."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    chosen, more = arguments[:at], arguments[at + 1 :]
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        known = ", ".join(PARTS)
        print(f"no part {', '.join(unknown)}; there are: {known}", file=sys.stderr)
        return 2
    OUT.mkdir(parents=True, exist_ok=True)
    if not chosen:
        for old in OUT.glob("*.json"):
            old.unlink()
    codes = [run_part(name, more) for name in chosen or PARTS]
    report = proof_report.write(OUT, simulation=SIMULATION, chaos=CHAOS)
    print(f"written: {report.relative_to(ROOT)}")
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
