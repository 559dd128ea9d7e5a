"""Check that each module of the core is covered by its own test file.

For every ``marshal/kafka_marshal/protocol/M.py`` this runs
``tests/unit/protocol/test_M.py`` alone and wants 100 % of M's lines and branches.
Alone, because a branch that only some other module's test happens to reach is not
tested: no test states what it should do.

One process per module, as many at a time as there are processors.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "marshal" / "kafka_marshal" / "protocol"
TESTS = ROOT / "tests" / "unit" / "protocol"
TEST_TIMEOUT_S = 1_800
TAIL_LINES_MAX = 40


@dataclass(kw_only=True)
class Verdict:
    """What one module's own tests cover of it."""

    module: str
    lines: int = 0
    branches: int = 0
    excluded: int = 0
    percent: float = 0.0
    gaps: list[str] = field(default_factory=list)
    output: str = ""

    @property
    def is_good(self) -> bool:
        """Return whether nothing is left uncovered and the tests passed."""
        return not self.gaps


def run(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a Python module, its coverage data kept apart in ``directory``."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, "COVERAGE_FILE": str(directory / "data")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TEST_TIMEOUT_S,
        text=True,
        check=False,
    )


def uncovered(report: dict[str, Any]) -> list[str]:
    """Name the lines and branches of a coverage report that were not reached."""
    gaps = [f"line {line}" for line in report["missing_lines"]]
    for start, end in report["missing_branches"]:
        # A branch out of an unreached line says nothing new.
        if start not in report["missing_lines"]:
            gaps.append(f"branch {start}->{end if end > 0 else 'exit'}")
    return gaps


def judge(module: Path) -> Verdict:
    """Run one module's own tests and read what they covered."""
    verdict = Verdict(module=module.stem)
    test = TESTS / f"test_{module.stem}.py"
    if not test.is_file():
        verdict.gaps = [f"has no test file {test.relative_to(ROOT)}"]
        return verdict
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        path = str(module.relative_to(ROOT))
        measure = ("coverage", "run", "--branch", f"--include={path}")
        # Plain output: these runs are only read where they fail.
        pytest = ("-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider")
        try:
            tested = run(directory, *measure, *pytest, str(test.relative_to(ROOT)))
        except subprocess.TimeoutExpired:
            verdict.gaps = [f"its tests took more than {TEST_TIMEOUT_S} s"]
            return verdict
        if tested.returncode != 0:
            verdict.gaps = ["its tests fail, see below"]
            verdict.output = tested.stdout
            return verdict
        target = directory / "report.json"
        reported = run(directory, "coverage", "json", "-q", "-o", str(target))
        if not target.is_file():
            verdict.gaps = [f"coverage reports nothing: {reported.stdout.strip()}"]
            return verdict
        report = json.loads(target.read_text())["files"][path]
    summary = report["summary"]
    verdict.lines = summary["num_statements"]
    verdict.branches = summary["num_branches"]
    verdict.excluded = summary["excluded_lines"]
    verdict.percent = summary["percent_covered"]
    verdict.gaps = uncovered(report)
    return verdict


def orphans(modules: list[Path]) -> list[str]:
    """Name the test files of the core that no module answers to."""
    names = {f"test_{module.stem}.py" for module in modules}
    return sorted(
        test.name for test in TESTS.glob("test_*.py") if test.name not in names
    )


def main() -> int:
    """Print a table of all modules; fail where any has a gap."""
    # The package file holds a docstring and at most re-exports: nothing to test.
    modules = sorted(path for path in CORE.glob("*.py") if path.stem != "__init__")
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        verdicts = list(pool.map(judge, modules))
    print(f"{'module':<16}{'lines':>6}{'branches':>10}{'excluded':>10}{'covered':>9}")
    for verdict in verdicts:
        print(
            f"{verdict.module:<16}{verdict.lines:>6}{verdict.branches:>10}"
            f"{verdict.excluded:>10}{verdict.percent:>8.1f}%"
            + (f"  {', '.join(verdict.gaps)}" if verdict.gaps else "")
        )
    for verdict in verdicts:
        if verdict.output:
            tail = verdict.output.splitlines()[-TAIL_LINES_MAX:]
            print(f"\n-- test_{verdict.module}.py", *tail, sep="\n")
    lost = orphans(modules)
    for name in lost:
        print(f"tests/unit/protocol/{name} tests no module of the core")
    return 1 if lost or not all(verdict.is_good for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
