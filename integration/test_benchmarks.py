"""Every benchmark that needs a broker runs and prints one document.

But those that start Spark, each for a minute: `make bench` runs them.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from slices import HANG_S

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
WITH_SPARK = {"audit", "spark_batches", "spark_latency", "spark_source"}
NAMES = [
    path.stem
    for path in sorted(BENCHMARKS.glob("*.py"))
    if path.stem not in {"support", "run", *WITH_SPARK}
    and "broker_argument(" in path.read_text()
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_smoke_run_prints_one_document(name, bootstrap_servers):
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--quick"]
    done = subprocess.run(
        [*command, "--bootstrap-servers", bootstrap_servers],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["benchmark"], found["is_quick"]) == (name, True)
    assert found["figures"]
