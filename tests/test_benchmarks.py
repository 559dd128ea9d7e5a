"""Every benchmark that needs no broker runs and prints one document."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from slices import HANG_S

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"


def module(name):
    """Import a script under ``benchmarks`` as it imports itself."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location(
            f"benchmarks_{name}", BENCHMARKS / f"{name}.py"
        )
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return made


run = module("run")
support = module("support")
BROKERLESS = [name for name in run.names() if not run.needs_broker(name)]


def test_some_need_a_broker_and_some_none():
    assert {"fold", "growth", "state_size"} <= set(BROKERLESS)
    assert {"claim_latency", "gaps", "log_volume"} <= set(run.names()) - set(BROKERLESS)


@pytest.mark.parametrize("name", BROKERLESS)
def test_a_smoke_run_prints_one_document(name, tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--quick", "--out", out]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert json.loads(out.read_text()) == found
    assert (found["schema"], found["benchmark"]) == (support.SCHEMA, name)
    assert found["is_quick"] is True
    assert found["figures"]
    assert all(each["median"] == each["median"] for each in found["figures"])
    assert run.table(found).count("\n") > len(found["figures"])


def test_sides_take_turns_and_begin_in_turn():
    ran = []

    def side(name):
        return lambda: ran.append(name) or len(ran)

    found = support.alternate({"a": side("a"), "b": side("b")}, 3)
    assert ran == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert support.ratios([2, 9], [4, 3]) == [0.5, 3.0]


def test_a_figure_has_its_spread_and_whether_its_target_is_met():
    found = support.figure("x", "ms", [3, 1, 2, 4], target=support.at_most(2.5))
    assert (found["median"], found["min"], found["max"]) == (2.5, 1, 4)
    assert found["quartiles"] == [1.75, 3.25]
    assert found["samples"] == [3, 1, 2, 4]
    assert (found["target"], found["is_met"]) == ("<= 2.5", True)
    missed = support.figure("x", "records/s", [9], target=support.at_least(300_000))
    assert (missed["target"], missed["is_met"]) == (">= 300,000", False)
    assert "target" not in support.figure("x", "ms", [1.0])


PAGE = (
    "before\n<!-- figures: a -->\nold\n<!-- end -->\n<!-- figures: b -->\n<!-- end -->"
)


def document(**change):
    figure = support.figure("x", "ms", [1, 2, 3], target=support.at_most(9))
    made = support.document("a", [figure], settings={}, is_quick=False)
    return made | change


def test_tables_take_the_place_of_older_ones():
    filled = run.fill(PAGE, {"a": document()})
    assert "| x | ms | 2 | 1 to 3 | 3 | <= 9 | met |" in filled
    assert "old" not in filled
    assert filled.endswith("<!-- figures: b -->\n<!-- end -->")
    assert run.fill(filled, {"a": document()}).count("| x | ms |") == 1


def test_figures_of_smoke_runs_get_into_no_table():
    with pytest.raises(ValueError, match="a is of a smoke run"):
        run.fill(PAGE, {"a": document(is_quick=True)})
    with pytest.raises(ValueError, match="no block <!-- figures: c -->"):
        run.fill(PAGE, {"c": document()})


def test_every_benchmark_has_its_place_on_the_page():
    places = {name for _, name, _ in run.BLOCK.findall(run.PAGE.read_text())}
    assert places == set(run.names())


def test_answers_are_figures_that_were_measured():
    results = run.PAGE.read_text()
    blocks = {name: block for block, name, _ in run.BLOCK.findall(results)}
    for name in blocks:
        whole = re.search(
            rf"<!-- figures: {name} -->\n(.*?)<!-- end -->", results, re.DOTALL
        )
        blocks[name] = whole[1]
    page = (ROOT / "docs" / "BENCHMARKS.md").read_text()
    answers = page.partition("<!-- table: answers -->\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in answers.splitlines()[2:]]
    assert len(rows) > 20
    for question, answer, source in rows:
        name, figure = re.fullmatch(r"`(\w+)`: `(.+)`", source).groups()
        median, unit = answer.split(" ", 1)
        assert f"| {figure} | {unit} | {median} |" in blocks[name], question
