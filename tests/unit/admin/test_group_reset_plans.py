"""Plans of killed resets are removed once no command needs them."""

import json
import os
from pathlib import Path

import pytest
from enginekit import fold
from positionkit import (
    FOR_MS,
    HOME,
    OP,
    TIMEOUT_MS,
    K,
    die_at,
    operation,
    plan,
    written,
)

from kafka_marshal.admin.group_reset import (
    PLAN_KEPT_S,
    PLANS_FOLDER,
    remove_finished,
    write_plan,
)
from kafka_marshal.admin.set_position import format_of
from kafka_marshal.protocol.records import (
    DecidePosition,
    ReleaseGroup,
    ResolvePosition,
    StagePosition,
)

UNKNOWN_OP = "1f" * 16
NOW_S = 2_000_000_000


@pytest.fixture(name="cluster")
def _cluster():
    return written()


def worlds(cluster):
    return [fold(cluster, t) for t in range(K)]


def stored(home, wanted, *, age_s=0.0):
    path = home / PLANS_FOLDER / f"{wanted.op_id}.json"
    write_plan(path, wanted)
    os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return path


def is_kept(cluster, path):
    remove_finished(path.parent.parent, worlds(cluster), wall_s=NOW_S)
    return path.exists()


def own_plan(cluster, **rest):
    """Return a plan with the format_id of this coordination topic."""
    found = json.loads(plan(**rest).to_bytes())
    found["format_id"] = format_of(worlds(cluster))
    return type(plan()).from_bytes(json.dumps(found).encode())


@pytest.mark.parametrize(
    "kind", [ReleaseGroup, StagePosition, DecidePosition, ResolvePosition]
)
@pytest.mark.parametrize("age_s", [0, 9 * PLAN_KEPT_S])
def test_the_plan_of_an_open_operation_is_kept_at_any_age(
    cluster, tmp_path, kind, age_s
):
    """Whichever record the command died at, if it had written one before."""
    # The home is paused first.
    other = next(t for t in range(K) if t != HOME)
    die_at(cluster, kind, at=other if kind is ReleaseGroup else None)
    assert is_kept(cluster, stored(tmp_path, own_plan(cluster), age_s=age_s))


@pytest.mark.parametrize("has_format", [True, False])
def test_the_plan_of_an_ended_operation_is_removed(cluster, tmp_path, has_format):
    die_at(cluster, ResolvePosition)
    path = stored(tmp_path, own_plan(cluster) if has_format else plan())
    assert is_kept(cluster, path)
    operation(cluster, "other").finish(TIMEOUT_MS)
    assert not is_kept(cluster, path)


def test_the_plan_of_an_aborted_operation_is_removed(cluster, tmp_path):
    die_at(cluster, DecidePosition)
    path = stored(tmp_path, own_plan(cluster))
    cluster.run(3 * FOR_MS)
    assert is_kept(cluster, path), "its keys are locked"
    operation(cluster, "other").finish(TIMEOUT_MS)
    assert not is_kept(cluster, path)


def test_the_plan_of_an_unknown_operation_is_kept_for_a_time(cluster, tmp_path):
    """Its command may be about to write the first record."""
    wanted = own_plan(cluster, op=UNKNOWN_OP)
    path = stored(tmp_path, wanted, age_s=PLAN_KEPT_S - 1)
    assert is_kept(cluster, path)
    os.utime(path, (NOW_S - PLAN_KEPT_S - 1,) * 2)
    assert not is_kept(cluster, path)


@pytest.mark.parametrize("format_id", [None, "2f" * 16])
def test_the_plan_of_another_coordination_topic_is_kept(cluster, tmp_path, format_id):
    """Its operation may be open there."""
    found = json.loads(plan(op=UNKNOWN_OP).to_bytes())
    found["format_id"] = format_id
    wanted = type(plan()).from_bytes(json.dumps(found).encode())
    assert is_kept(cluster, stored(tmp_path, wanted, age_s=9 * PLAN_KEPT_S))


def test_files_and_folders_that_are_not_plans_are_kept(cluster, tmp_path):
    die_at(cluster, ResolvePosition)
    operation(cluster, "other").finish(TIMEOUT_MS)
    folder = tmp_path / PLANS_FOLDER
    folder.mkdir()
    names = {"notes.json": "{}", f"{OP}.txt": plan().to_bytes().decode()}
    for name, text in names.items():
        (folder / name).write_text(text)
        os.utime(folder / name, (0, 0))
    (folder / "folder.json").mkdir()
    remove_finished(tmp_path, worlds(cluster), wall_s=NOW_S)
    remove_finished(tmp_path / "missing", worlds(cluster), wall_s=NOW_S)
    assert {each.name for each in folder.iterdir()} == {*names, "folder.json"}


def test_a_folder_of_another_user_is_left_as_it_is(cluster, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("Permission denied")

    monkeypatch.setattr(Path, "glob", refuse)
    remove_finished(tmp_path, worlds(cluster), wall_s=NOW_S)
