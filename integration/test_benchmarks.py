"""Every benchmark that needs a broker runs and prints one document.

Those that take longest, or start Spark, do so in ``make proof``.
"""

import json
from pathlib import Path

import forked
import pytest
from slices import HANG_S, slice_of

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
# Each takes a processor for 6 to 16 s, even with the smallest load.
LONG = {
    *("claim_latency", "cold_start", "consume", "gaps", "handoff", "polls", "reset"),
    *("resize", "sidecar", "takeover"),
}
WITH_SPARK = {"audit", "spark_batches", "spark_latency", "spark_source"}
NAMES = [
    path.stem
    for path in sorted(BENCHMARKS.glob("*.py"))
    if path.stem not in {"support", "run", *slice_of(quick=LONG | WITH_SPARK, full=())}
    and "broker_argument(" in path.read_text()
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_smoke_run_prints_one_document(name, bootstrap_servers, tmp_path):
    command = [BENCHMARKS / f"{name}.py", "--quick"]
    output, errors = tmp_path / "output", tmp_path / "errors"
    with output.open("wb") as stdout, errors.open("wb") as stderr:
        process = forked.start(
            [*command, "--bootstrap-servers", bootstrap_servers],
            stdout=stdout,
            stderr=stderr,
        )
    try:
        assert process.wait(HANG_S) == 0, errors.read_text()
    finally:
        process.kill()
    found = json.loads(output.read_text())
    assert (found["benchmark"], found["is_quick"]) == (name, True)
    assert found["figures"]
