"""The lanes of `make test` run every test file once, and repeat few failures."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
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


def test_settings_of_lanes_name_existing_lanes():
    assert test_lanes.NICE.keys() <= test_lanes.LANES.keys()
    assert {*test_lanes.AFTER, *test_lanes.AFTER.values()} <= test_lanes.LANES.keys()
    assert set(test_lanes.RETRIED) <= test_lanes.LANES.keys()


def test_the_longest_files_run_first_and_others_keep_their_order():
    names = {path.name for path in (ROOT / "integration").rglob("test_*.py")}
    assert names > set(test_lanes.LONGEST)
    first, second, *_ = test_lanes.LONGEST
    items = [
        SimpleNamespace(path=Path("integration") / name)
        for name in ("test_b.py", second, "test_a.py", first)
    ]
    test_lanes.longest_first(items)
    found = [item.path.name for item in items]
    assert found == [first, second, "test_b.py", "test_a.py"]


SOMETIMES = """
from pathlib import Path
import pytest

def test_flaky():
    tried = Path(__file__).with_name("tried")
    was_tried = tried.exists()
    tried.touch()
    assert was_tried

@pytest.mark.parametrize("n", range({count}))
def test_broken(n):
    raise AssertionError
"""


@pytest.mark.parametrize(("count", "code"), [(0, 0), (2, 1), (3, 1)])
def test_failures_are_repeated_once_if_they_are_few(
    tmp_path, monkeypatch, capfd, count, code
):
    test_file = tmp_path / "test_sometimes.py"
    test_file.write_text(SOMETIMES.format(count=count))
    monkeypatch.setattr(test_lanes, "ROOT", tmp_path)
    monkeypatch.setattr(test_lanes, "OUT", tmp_path / "out")
    monkeypatch.setattr(test_lanes, "LANES", {"unit": [test_file.name]})
    monkeypatch.setattr(test_lanes, "RETRIED", ("unit",))
    monkeypatch.setattr(test_lanes, "AFTER", {})
    assert test_lanes.run_lanes([]) == code
    printed = capfd.readouterr().out
    assert ("once more alone" in printed) is (count < test_lanes.RETRIED_MAX)
    assert printed.count("FLAKY") == (not count)
    kept = json.loads((tmp_path / "out/unit/v/cache/lastfailed").read_bytes())
    assert len(kept) == count + (count == 3)
