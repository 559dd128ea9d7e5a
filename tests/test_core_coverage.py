"""`make cover` names the lines and branches that a module's own tests do not cover."""

import subprocess
import sys
from pathlib import Path

from slices import HANG_S

TOOLS = Path(__file__).resolve().parent.parent / "tools"
MAIN = """
import pathlib, sys
import core_coverage
core_coverage.ROOT = root = pathlib.Path.cwd()
core_coverage.CORE, core_coverage.TESTS = root / "core", root / "tests"
sys.exit(core_coverage.main())
"""
MODULE = """
def half(number):
    if number % 2:
        return None
    return number // 2
"""
COVERING = """
import pytest
from {name} import half

@pytest.mark.parametrize("number", {numbers})
def test_half(number):
    assert half(number) in {{None, 2}}
"""


def cover(folder, **numbers):
    """Run the check on modules; the test of each one calls it with these numbers."""
    for name in ("core", "tests"):
        (folder / name).mkdir()
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = core\n")
    for name, those in numbers.items():
        (folder / f"core/{name}.py").write_text(MODULE)
        if those:
            text = COVERING.format(name=name, numbers=those)
            (folder / f"tests/test_{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(TOOLS)!r}){MAIN}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    return done, rows


def test_modules_whose_tests_cover_them_pass(tmp_path):
    done, rows = cover(tmp_path, one=[1, 4], two=[4, 5])
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("one", "two"):
        assert rows[name].split() == [name, "4", "2", "0", "100.0%"]


def test_code_that_its_own_tests_do_not_cover_is_named(tmp_path):
    done, rows = cover(tmp_path, broken=[8], gap=[4], good=[1, 4], untested=[])
    assert done.returncode == 1
    assert rows["good"].endswith("100.0%")
    assert rows["gap"].endswith("line 4, branch 3->4")
    assert rows["broken"].endswith("its tests fail, see below")
    assert rows["untested"].endswith("has no test file tests/test_untested.py")
    assert "assert 4 in {" in done.stdout, "what pytest printed"
