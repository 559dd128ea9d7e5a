"""The lanes of `make test` run every test file once."""

from pathlib import Path

import test_lanes

ROOT = test_lanes.ROOT


def runs(arguments, path):
    """Whether pytest with these arguments collects a file."""
    ignored = [each.partition("=")[2] for each in arguments if "--ignore=" in each]
    paths = [each for each in arguments if not each.startswith("-") and "/" in each]
    paths += [each for each in arguments if each in {"tests", "integration"}]
    return any(map(path.is_relative_to, paths)) and not any(
        map(path.is_relative_to, ignored)
    )


def test_every_test_file_is_in_one_lane():
    found = [
        path.relative_to(ROOT)
        for root in ("tests", "integration")
        for path in (ROOT / root).rglob("test_*.py")
    ]
    assert len(found) > 300
    core = Path(test_lanes.CORE)
    for path in found:
        lanes = [
            name for name, lane in test_lanes.LANES.items() if lane and runs(lane, path)
        ]
        # `make cover`, in the lane of checks, runs the tests of the core.
        assert len(lanes) == (0 if path.is_relative_to(core) else 1), (path, lanes)


def test_each_lane_is_niced_or_follows_one_that_exists():
    assert test_lanes.NICE.keys() <= test_lanes.LANES.keys()
    assert {*test_lanes.AFTER, *test_lanes.AFTER.values()} <= test_lanes.LANES.keys()
