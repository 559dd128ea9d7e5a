"""Checks that each module of the core is covered by its own test file.

For every ``marshal/kafka_marshal/protocol/M.py`` this runs
``tests/unit/protocol/test_M.py`` alone and requires 100 % of M's lines and branches.
Alone, because a branch that only the tests of other modules reach by chance is not
tested: no test states what it should do.

Each module has its own process, as many at a time as there are processors. Each is
forked from this process, which has imported pytest and Hypothesis, but nothing of the
product: importing these two takes longer than most of the tests.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage
import hypothesis.strategies  # noqa: F401 - for the forks of this process
import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "marshal" / "kafka_marshal" / "protocol"
TESTS = ROOT / "tests" / "unit" / "protocol"
TIMEOUT_S = 1_800
TAIL_LINES_MAX = 40
# The plugins that these tests use; no other installed plugin is loaded.
PLUGINS = ("-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin")


@dataclass(kw_only=True)
class Verdict:
    """The coverage of one module by its own tests."""

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


def run(path: str, test: str, directory: Path) -> int:
    """Run the tests of a file in this process; return pytest's exit code.

    Writes their output to ``output`` in the directory and, if they pass, the coverage
    of the module to ``report.json``. The module must not have been imported before.
    """
    os.chdir(ROOT)
    with (directory / "output").open("wb") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    measured = coverage.Coverage(data_file=None, branch=True, include=[path])
    measured.start()
    # Plain output: it is only read if tests fail.
    options = ("-q", "--no-header", "-p", "no:cacheprovider", *PLUGINS)
    code = pytest.main([*options, test])
    measured.stop()
    sys.stdout.flush()
    if code == 0:
        measured.json_report(outfile=str(directory / "report.json"))
    return code


def uncovered(report: dict[str, Any]) -> list[str]:
    """Name the lines and branches of a coverage report that were not reached."""
    gaps = [f"line {line}" for line in report["missing_lines"]]
    for start, end in report["missing_branches"]:
        # A branch from a line that was not reached adds nothing.
        if start not in report["missing_lines"]:
            gaps.append(f"branch {start}->{end if end > 0 else 'exit'}")
    return gaps


def judge(module: Path) -> Verdict:
    """Run one module's own tests and read their coverage; call it in a new process."""
    verdict = Verdict(module=module.stem)
    test = TESTS / f"test_{module.stem}.py"
    if not test.is_file():
        verdict.gaps = [f"has no test file {test.relative_to(ROOT)}"]
        return verdict
    path = str(module.relative_to(ROOT))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if run(path, str(test.relative_to(ROOT)), directory) != 0:
            verdict.gaps = ["its tests fail, see below"]
            verdict.output = (directory / "output").read_text(errors="replace")
            return verdict
        report = json.loads((directory / "report.json").read_text())["files"][path]
    summary = report["summary"]
    verdict.lines = summary["num_statements"]
    verdict.branches = summary["num_branches"]
    verdict.excluded = summary["excluded_lines"]
    verdict.percent = summary["percent_covered"]
    verdict.gaps = uncovered(report)
    return verdict


def judge_all(modules: list[Path]) -> list[Verdict]:
    """Judge each module in a process of its own.

    Raises:
        multiprocessing.TimeoutError: The tests took too long, and were ended.
    """
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    context = multiprocessing.get_context("fork")
    with context.Pool(maxtasksperchild=1) as pool:
        return pool.map_async(judge, modules, chunksize=1).get(TIMEOUT_S)


def orphans(modules: list[Path]) -> list[str]:
    """Name the test files of the core that have no module."""
    names = {f"test_{module.stem}.py" for module in modules}
    return sorted(
        test.name for test in TESTS.glob("test_*.py") if test.name not in names
    )


def main() -> int:
    """Print a table of all modules; return 1 if any has a gap."""
    # ``__init__.py`` has a docstring and at most re-exports: nothing to test.
    modules = sorted(path for path in CORE.glob("*.py") if path.stem != "__init__")
    try:
        verdicts = judge_all(modules)
    except multiprocessing.TimeoutError:
        print(f"the tests of the core took more than {TIMEOUT_S} s", file=sys.stderr)
        return 1
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
