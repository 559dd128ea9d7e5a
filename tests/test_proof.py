"""The report of a proof: how much ran, how it ended, and how to repeat a failure."""

import json
import re
from pathlib import Path

import proof
import proof_report
import pytest
import slices

SIMULATED = {
    "seeds": 20_000,
    "simulated_minutes": 210_000,
    "never_reached": ["reset"],
    "broken_seeds": [
        {
            "seed": 7,
            "invariant": "S4",
            "message": "two hold a|key",
            "repeat": "python -m simulator --seed 7 --minutes 10",
        }
    ],
    "situations": [
        {"situation": "claimed", "count": 9_000, "meaning": "a claim was accepted"},
        {"situation": "reset", "count": 0, "meaning": "an admin replaced a state"},
    ],
    "faults": [{"fault": "crash", "count": 1_200}, {"fault": "stop", "count": 34}],
}
TESTS = """<?xml version="1.0"?>
<testsuites><testsuite>
<testcase classname="tests.model.test_model" name="test_one_holder[pauses]" time="3.5">
<properties><property name="states" value="1200"/></properties></testcase>
<testcase classname="tests.model.test_model" name="test_twice[tasks]" time="70">
<properties><property name="states" value="34"/><property name="x" value="y"/>
</properties>
<failure message="S3: granted twice">a long text</failure></testcase>
<testcase classname="tests.model.test_model" name="test_broken" time="1">
<error>no broker</error></testcase>
</testsuite></testsuites>
"""
FAULTS = {
    "rows": [
        {
            "name": "leader_kill",
            "title": "the leader is killed",
            "runs": 60,
            "records": 1_000,
            "verdict": "passed",
        },
        {"name": "disk", "title": "full", "runs": "-", "records": "-", "verdict": ""},
    ],
    "totals": {"losses": 0, "violations": 0},
}


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "proof"
    found.mkdir()
    return found


@pytest.fixture
def report(folder, tmp_path):
    def make(*parts, code=0):
        for name in parts:
            ended = {
                "title": proof.PARTS[name].title,
                "at": "2026-11-23 06:00 UTC",
                "commit": "61e53ef",
                "seconds": 4_000.0,
                "code": code,
            }
            (folder / f"{name}.json").write_text(json.dumps(ended))
        simulation = tmp_path / "sim.json"
        path = proof_report.write(folder, simulation=simulation, chaos=tmp_path)
        return path.read_text()

    return make


def test_the_report_of_seeds_shows_how_to_repeat_a_failure(report, tmp_path):
    (tmp_path / "sim.json").write_text(json.dumps(SIMULATED))
    page = report("sim", code=1)
    assert "**Something did not hold.**" in page
    assert (
        "| Simulated fleets | 20,000 seeds, 210,000 simulated minutes, 1,234 faults, "
        "2 situations | **failed** | 1 h 6 min | 2026-11-23 06:00 UTC | 61e53ef |"
        in page
    )
    assert "**seed 7: S4**" in page
    assert "```sh\npython -m simulator --seed 7 --minutes 10\n```" in page
    assert "never reached: reset" in page
    # What was reached least comes first.
    assert page.index("| reset | 0 |") < page.index("| claimed | 9,000 |")


def test_the_report_of_tests_shows_counts_and_how_to_repeat_a_failure(report, folder):
    (folder / "model.xml").write_text(TESTS)
    page = report("model", code=1)
    assert "| Small worlds | 3 tests, 1,234 states | **failed** |" in page
    assert "| twice[tasks] | 34 states | **failed** | 1 min 10 s |" in page
    assert "| one_holder[pauses] | 1,200 states | passed | 4 s |" in page
    assert "**twice[tasks]**\n\n```text\nS3: granted twice\n```" in page
    assert "```text\nno broker\n```" in page
    repeat = "PROOF=1 .venv/bin/python -m pytest 'tests/model/test_model.py::test_twice"
    assert repeat in page


def test_real_faults_are_read_from_the_chaos_report(report, tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(FAULTS))
    page = report("chaos")
    assert "Everything held." in page
    amount = "2 faults in 60 runs, 1,000 records, 0 losses, 0 violations"
    assert f"| Real faults | {amount} | held |" in page
    assert "| leader_kill: the leader is killed | 60 | 1000 | passed |" in page


@pytest.mark.parametrize("name", proof.PARTS)
def test_a_part_that_ended_without_results_is_listed(report, name):
    assert "it ended before its first result" in report(name, code=2)


def test_parts_run_in_turn_though_one_fails(monkeypatch, folder, tmp_path, capsys):
    ran = []

    def run(command, environment=None, *, out=None):
        ran.append((command[2], environment, command[-1]))
        return 1 if command[2] == "simulator" else 0

    monkeypatch.setattr(proof, "ROOT", tmp_path)
    monkeypatch.setattr(proof, "OUT", folder)
    monkeypatch.setattr(proof, "SIMULATION", tmp_path / "sim.json")
    monkeypatch.setattr(proof, "CHAOS", tmp_path / "chaos")
    monkeypatch.setattr(proof, "run", run)
    assert proof.main(["sim", "model", "--", "-x"]) == 1
    assert ran == [("simulator", None, "-x"), ("pytest", proof.PROOF, "-x")]
    assert json.loads((folder / "sim.json").read_text())["code"] == 1
    assert json.loads((folder / "model.json").read_text())["code"] == 0
    assert "written: proof/report.md" in capsys.readouterr().out
    (folder / "old.json").write_text("{}")
    assert proof.main([]) == 1
    assert {path.stem for path in folder.glob("*.json")} == set(proof.PARTS)
    assert proof.main(["floods"]) == 2
    assert "no part floods; there are: sim, " in capsys.readouterr().err


def test_a_slice_is_quick_unless_it_is_a_proof(monkeypatch):
    monkeypatch.setattr(slices, "IS_PROOF", False)
    monkeypatch.delenv("SIMULATION_SEEDS", raising=False)
    assert slices.slice_of(quick=1, full=2) == 1
    assert slices.seeds_of(quick=[3, 7], full=400) == [3, 7]
    monkeypatch.setattr(slices, "IS_PROOF", True)
    assert slices.slice_of(quick=1, full=2) == 2
    assert slices.seeds_of(quick=[3, 7], full=400) == range(400)
    monkeypatch.setenv("SIMULATION_SEEDS", "1000:1200")
    assert slices.seeds_of(quick=[3, 7], full=400) == range(1000, 1200)


def test_each_test_with_a_full_size_is_in_a_part():
    wanted = re.compile(r"\b(slice_of|seeds_of)\(|mark\.proof")
    parts = [part.tests for name, part in proof.PARTS.items() if name != "model"]
    paths = [word for words in parts for word in words if "/" in word]
    missing = [
        name
        for folder in ("tests", "integration")
        for path in sorted((proof.ROOT / folder).rglob("test_*.py"))
        if wanted.search(text := path.read_text())
        and path != Path(__file__)
        and "mark.model" not in text
        and not (name := str(path.relative_to(proof.ROOT))).startswith(tuple(paths))
    ]
    assert missing == []


@pytest.mark.parametrize("name", [n for n, p in proof.PARTS.items() if "-k" in p.tests])
def test_a_part_that_selects_by_names_has_a_test_of_each_file(name):
    *paths, _, selection = proof.PARTS[name].tests
    wanted = re.compile("|".join(selection.split(" or ")))
    missing = [
        path
        for path in paths
        if not any(
            wanted.search(found)
            for found in re.findall(r"def (test_\w+)", (proof.ROOT / path).read_text())
        )
    ]
    assert missing == []
