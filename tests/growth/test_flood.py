"""What a reader keeps stays within the limits, whatever it reads (S9).

``make flood`` runs ten million records; here it is fewer.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from slices import HANG_S, slice_of

FLOOD = Path(__file__).parents[1] / "support" / "flood.py"
RECORDS = slice_of(quick=100_000, full=10_000_000)
# The allocator keeps some memory of a peak; a leak would be far larger.
SLACK_BYTES = 6 << 20


@pytest.fixture(scope="module", params=[1, 2])
def flooded(request):
    command = [sys.executable, str(FLOOD), str(RECORDS), str(request.param)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# All tests run in one process, so that each flood runs once.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("flood"),
]


def test_the_folded_state_stays_within_its_limits(flooded):
    limits = flooded["limits"]
    for when in ("half", "end"):
        found = flooded[when]
        assert 0 < found["keys"] <= limits["keys"]
        assert 0 < found["groups"] <= limits["groups"]
        assert found["operations"] <= limits["operations"]
        assert found["locks"] <= limits["locks"]
        assert 0 < found["fences"] == found["fences_known"] <= limits["operations"]
        assert found["verdicts"] <= found["groups"]


def test_the_flood_reaches_the_limits_of_keys_and_locks(flooded):
    """Otherwise the other tests of this module prove nothing."""
    assert flooded["half"]["keys"] == flooded["limits"]["keys"]
    assert flooded["most_locks"] == flooded["limits"]["locks"]
    for name, count in flooded["effects"].items():
        assert count > 20, name


def test_soft_state_stays_within_its_limits(flooded):
    limits, found = flooded["limits"], flooded["end"]
    assert found["members"] <= limits["keys"]
    assert found["notes"] <= limits["keys"]
    assert found["forgettable"] <= limits["keys"]
    assert found["undecodable"] <= 32
    assert found["counters"] <= 60


def test_memory_does_not_grow_in_the_second_half(flooded, record_property):
    half, end = flooded["half"], flooded["end"]
    grown = end["resident_bytes"] - half["resident_bytes"]
    record_property("records", RECORDS)
    record_property("bytes grown", max(0, grown))
    assert grown <= SLACK_BYTES
    assert end["state_bytes"] <= 1.2 * half["state_bytes"]
