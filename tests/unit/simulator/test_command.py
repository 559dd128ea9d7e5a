"""`python -m simulator`: short runs, their reports, and invalid arguments."""

import json

import pytest
import variants
from typer.testing import CliRunner

from simulator.command import app
from simulator.coverage import SET, SITUATIONS

AMO_SEED = "0"  # delivers at most once


def invoke(*arguments):
    return CliRunner().invoke(app, ["--minutes", "1", "--jobs", "1", *arguments])


def test_a_report_lists_the_reached_situations():
    done = invoke("--seeds", "0:2", "--faults", "crash,drift", "-o", "json")
    assert done.exit_code == 0, done.output
    output = json.loads(done.stdout)
    assert (output["held"], output["seeds"], output["broken"]) == (True, 2, 0)
    assert output["simulated_minutes"] >= 2
    assert output["broken_seeds"] == []
    assert [each["situation"] for each in output["situations"]] == list(SITUATIONS)
    assert {each["fault"] for each in output["faults"]} <= {"crash"}


def test_two_runs_of_a_seed_print_the_same_transcript():
    first, second = (invoke("--seed", "5", "--transcript") for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.stdout == second.stdout
    assert "everything is healed" in first.stdout


def test_a_failure_prints_a_command_that_repeats_it(monkeypatch):
    variants.grant_again(monkeypatch)
    done = invoke("--seed", AMO_SEED, "--shrink", "-o", "json")
    assert done.exit_code == 1
    (broken,) = json.loads(done.stdout)["broken_seeds"]
    assert broken["invariant"] == "S3"
    words = broken["repeat"].split()[3:]
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 1
    assert broken["message"] in again.stderr
    assert invoke("--seed", AMO_SEED, "--transcript", "--shrink").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--seeds", "7"], "no range", id="no-range"),
        pytest.param(["--seeds", "7:7"], "no range", id="no-seed"),
        pytest.param(["--faults", "crash,bug"], "does not know bug", id="fault"),
        pytest.param(["--also", "bug"], "--also does not know bug", id="also"),
        pytest.param(["--only", "3"], "needs --seed", id="only-without-seed"),
        pytest.param(["--seed", "1", "--only", "x"], "takes numbers", id="only"),
        pytest.param(["--transcript"], "needs --seed", id="transcript"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_also_adds_set_positions_to_the_drawn_faults(monkeypatch):
    done = invoke("--seed", "2", "--also", "positions", "-o", "json")
    assert done.exit_code == 0, done.output
    output = json.loads(done.stdout)
    assert [each["situation"] for each in output["situations"]] == list(SET)
    assert "positions" in {each["fault"] for each in output["faults"]}
    variants.leave_it_to_the_admin(monkeypatch)
    done = invoke("--seeds", "0:6", "--also", "positions", "-o", "json")
    broken = json.loads(done.stdout)["broken_seeds"]
    assert {each["invariant"] for each in broken} == {"8.5"}
    assert "--also positions" in broken[0]["repeat"]
