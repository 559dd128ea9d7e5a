"""Every benchmark that needs a broker runs and prints one document.

Most do so in ``make proof`` alone.
"""

import json
from pathlib import Path

import forked
import pytest
from slices import HANG_S, slice_of

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
NAMES = [
    path.stem
    for path in sorted(BENCHMARKS.glob("*.py"))
    if path.stem not in {"support", "run"} and "broker_argument(" in path.read_text()
]
# The others take a processor for 6 to 16 s, even with the smallest load.
SHORT = ["commands", "grants", "log_volume"]


@pytest.mark.slow
@pytest.mark.parametrize("name", slice_of(quick=SHORT, full=NAMES))
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
