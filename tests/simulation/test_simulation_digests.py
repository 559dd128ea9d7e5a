import json
from functools import partial

import pytest
import simulation_digests
from simulation_digests import compare, differences, main, transcript, write

from simulator.checkers import Violation
from simulator.outcome import RunFailed
from simulator.simulate import simulate

FEW = {"direct": "3:5", "sidecar": "0:0"}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Run each seed for a fraction of its time."""
    run = partial(simulate, duration_ms=20_000)
    monkeypatch.setattr(simulation_digests, "RUNS", {"direct": run})


def test_compare_runs_the_seeds_of_a_file_again(tmp_path, capsys):
    file = tmp_path / "digests.json"
    write(file, FEW, jobs=1)
    assert json.loads(file.read_text())["digests"]["direct"].keys() == {"3", "4"}
    assert compare(file, jobs=1) == 0
    assert capsys.readouterr().out == "2 of 2 transcripts are identical\n"


def test_compare_lists_a_seed_whose_digest_differs(tmp_path, capsys):
    file = tmp_path / "digests.json"
    write(file, FEW, jobs=1)
    document = json.loads(file.read_text())
    document["digests"]["direct"]["4"] = "0" * 64
    file.write_text(json.dumps(document))
    assert main(["--jobs", "1", "compare", str(file)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "1 of 2 transcripts are identical",
        "differs: simulation_digests.py transcript direct 4",
    ]


def test_differences_lists_kind_and_seed_of_changed_digests():
    before = {"direct": {"0": "a", "1": "b"}, "sidecar": {"0": "c"}}
    after = {"direct": {"0": "a", "1": "x"}, "sidecar": {"0": "y"}}
    assert differences(before, before) == []
    assert differences(before, after) == [("direct", 1), ("sidecar", 0)]


def test_a_transcript_ends_with_the_broken_rule(monkeypatch):
    def broken(seed):
        violation = Violation("S4", "two owners")
        raise RunFailed(seed, violation, repeat="", transcript=["1 a"]) from violation

    monkeypatch.setattr(simulation_digests, "RUNS", {"direct": broken})
    lines = transcript("direct", 7)
    assert lines[0] == "1 a"
    assert lines[1].startswith("broke S4: ")


def test_transcript_prints_the_transcript_of_one_run(capsys):
    assert main(["transcript", "direct", "3"]) == 0
    assert (
        tuple(capsys.readouterr().out.splitlines())
        == simulate(3, duration_ms=20_000).transcript
    )


@pytest.mark.parametrize("words", [[], ["transcript", "other", "1"]])
def test_wrong_arguments_end_the_program(words):
    with pytest.raises(SystemExit):
        main(words)
