"""Benchmarks that need no broker, and the pages made from results of benchmarks."""

import importlib.util
import json
import os
import re
import socket
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
pages = run.pages
support = module("support")
BROKERLESS = [name for name in run.names() if not run.needs_broker(name)]


def test_benchmarks_with_and_without_a_broker_are_distinguished():
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
    assert pages.table(found).count("\n") > len(found["figures"])


def test_alternate_reverses_the_order_of_sides_in_each_round():
    ran = []

    def side(name):
        return lambda: ran.append(name) or len(ran)

    found = support.alternate({"a": side("a"), "b": side("b")}, 3)
    assert ran == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert support.ratios([2, 9], [4, 3]) == [0.5, 3.0]


def test_a_figure_reports_its_spread_and_whether_it_meets_its_target():
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


def document(name="a", **change):
    figure = support.figure("x", "ms", [1, 2, 3], target=support.at_most(9))
    made = support.document(name, [figure], settings={}, is_quick=False)
    return made | change


def test_a_new_table_replaces_the_old_one():
    filled = pages.fill(PAGE, {"a": document()})
    assert "| x | ms | 2 | 1 to 3 | 3 | <= 9 | met |" in filled
    assert "old" not in filled
    assert filled.endswith("<!-- figures: b -->\n<!-- end -->")
    assert pages.fill(filled, {"a": document()}).count("| x | ms |") == 1


def test_figures_of_smoke_runs_or_without_a_block_are_refused():
    with pytest.raises(ValueError, match="a is of a smoke run"):
        pages.fill(PAGE, {"a": document(is_quick=True)})
    with pytest.raises(ValueError, match="no block <!-- figures: c -->"):
        pages.fill(PAGE, {"c": document()})


def test_every_benchmark_has_a_block_in_results():
    assert set(pages.blocks(pages.RESULTS.read_text())) == set(run.names())


# --- docs/BENCHMARKS.md


def row(**change):
    made = {"question": "How?", "script": "a", "ours": "ours", "why": "the-log"}
    return pages.Row(**(made | change))


def results(*figures):
    made = support.document("a", figures, settings={}, is_quick=False)
    page = "## One part\n\n<!-- figures: a -->\n<!-- end -->\n"
    return pages.fill(page, {"a": made | {"took_s": 90}})


def answered(given, *rows):
    table = pages.answers(results(*given), rows)
    return [
        line.strip("|").split("|") for line in table.splitlines()[2:] if "|" in line
    ]


OURS = support.figure("ours", "ms", [4], target=support.at_most(5))
PEER = support.figure("peer", "ms", [8])
RATIO = support.figure("ratio", "ratio", [0.5], target=support.at_most(0.4))


def test_a_question_has_our_figure_its_peers_and_their_ratio():
    both = row(by="bare", peer="peer", beside="ratio")
    (cells,) = answered([OURS, PEER, RATIO], both)
    assert [each.strip() for each in cells] == [
        "[How?](../benchmarks/RESULTS.md#one-part)",
        "4 ms",
        "bare: 8",
        "0.5",
        "<= 0.4: [missed](#the-log)",
    ]


def test_a_figure_without_a_ratio_has_its_own_target():
    (cells, second) = answered([OURS], row(), row(question="..."))
    assert [each.strip() for each in cells[1:]] == ["4 ms", "", "", "<= 5: met"]
    assert second[0].strip() == "..."  # its benchmark is linked above


def test_a_missing_figure_is_shown_as_not_measured():
    (cells,) = answered([PEER], row(by="bare", peer="other"))
    assert [each.strip() for each in cells[1:3]] == [
        "not measured",
        "bare: not measured",
    ]
    found = {"a": support.document("a", [PEER], settings={}, is_quick=False)}
    rows = [row(peer="peer"), row(script="elsewhere")]
    assert pages.absent(rows, found) == ["a: ours"]


def test_a_unit_chooses_among_figures_of_one_name():
    twice = [support.figure("ours", "s", [7]), OURS]
    (cells,) = answered(twice, row(unit="ms"))
    assert cells[1].strip() == "4 ms"


def test_the_table_states_the_days_and_duration_of_measurements():
    day = document()["finished"][:10]
    text = pages.answers(results(OURS), [row()])
    assert f"Measured from {day} to {day}. The full set took 2 minutes." in text
    assert "Not measured yet." in pages.answers(PAGE.replace("old\n", ""), [])


ANSWERS = pages.ANSWERS.read_text()
HEADINGS = re.findall(r"^### (.+)$", ANSWERS, re.MULTILINE)


def test_the_table_matches_the_measured_results():
    again = pages.with_answers(ANSWERS, pages.RESULTS.read_text())
    assert again == ANSWERS, "run: benchmarks/run.py --write"


def test_each_question_has_a_benchmark_and_a_section_that_explains_it():
    sections = {each.lower().replace(" ", "-") for each in HEADINGS}
    assert {each.script for each in pages.ROWS} <= set(run.names())
    assert {each.why for each in pages.ROWS} == sections


def test_figures_occur_only_in_the_table():
    prose = pages.TABLE.sub("", ANSWERS)
    measured = r"\d ?(ms|µs|us|s|%|x|MB|KiB|records/s|times)\b"
    assert re.findall(measured, prose) == []


def test_the_page_is_short():
    assert len(ANSWERS.replace("|", "").split()) <= 1_800


# --- make bench-docs


@pytest.fixture
def written(monkeypatch):
    """Benchmarks a, b and c; b fails while it is among ``failing``."""
    ran, failing = [], {"b"}

    def fake(name, extra):
        ran.append(name)
        if name in failing:
            raise run.Failed(f"{name} failed")
        return document(name, took_s=1)

    monkeypatch.setattr(run, "names", lambda: ["a", "b", "c"])
    monkeypatch.setattr(run, "run", fake)
    monkeypatch.setattr(run.pages, "write", lambda found: None)
    return ran, failing


def test_a_failed_benchmark_is_reported_and_repeated(written, tmp_path):
    ran, failing = written
    assert run.run_full([], tmp_path) == ["b failed"]
    assert ran == ["a", "b", "c"]
    assert (tmp_path / "a.json").exists()
    assert not (tmp_path / "b.json").exists()
    failing.clear()
    assert run.run_full([], tmp_path) == []
    assert ran[3:] == ["b"]
    assert run.run_full([], tmp_path) == []
    assert ran[4:] == ["a", "b", "c"]


def test_a_run_that_was_interrupted_continues(written, tmp_path, monkeypatch):
    ran, failing = written
    failing.clear()

    def interrupt(found):
        if "b" in found:
            raise KeyboardInterrupt

    monkeypatch.setattr(run.pages, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.run_full([], tmp_path)
    assert run.Pending(tmp_path).names == ["b", "c"]
    monkeypatch.setattr(run.pages, "write", lambda found: None)
    assert run.run_full(["a"], tmp_path) == []
    assert run.run_full([], tmp_path) == []
    assert ran == ["a", "b", "a", "b", "c"]


def test_a_full_run_reports_that_a_figure_is_missing(written, tmp_path, monkeypatch):
    def refuse(found):
        raise ValueError("not measured")

    monkeypatch.setattr(run.pages, "write", refuse)
    assert run.run_full(["a"], tmp_path) == ["not measured"]
    assert run.Pending(tmp_path).names == []


def test_smoke_runs_do_not_overwrite_documents_of_full_runs(
    written, tmp_path, monkeypatch
):
    monkeypatch.setattr(run, "needs_broker", lambda name: False)
    assert run.run_quick(["a", "b"], tmp_path) == ["b failed"]
    assert [each.name for each in tmp_path.rglob("*.json")] == ["a.json"]
    assert (tmp_path / "smoke" / "a.json").exists()


def test_a_script_that_ends_with_an_error_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "HERE", tmp_path)
    (tmp_path / "bad.py").write_text("raise SystemExit('no broker')")
    with pytest.raises(run.Failed, match=r"bad failed.*bad\.py --quick"):
        run.run("bad", ["--quick"])
    (tmp_path / "mute.py").write_text("")
    with pytest.raises(run.Failed, match="mute failed"):
        run.run("mute", [])


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")
def test_the_process_of_a_local_broker_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert support.broker_pid(f"127.0.0.1:{port}") == os.getpid()
    assert support.broker_pid("kafka.example:9092") is None
    assert support.cpu_s(os.getpid()) > 0
