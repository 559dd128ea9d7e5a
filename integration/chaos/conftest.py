"""A cluster of three brokers, which scenarios of a module break in turn.

Findings go to the directory ``$CHAOS_REPORT``, if it is set. At full size all scenarios
run, as often as figures need it; otherwise a slice, once each.
Each finding is written when its scenario ends, with a report of all so far. The
cluster is repaired before the next scenario, so that one failure does not end the run.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
from embedded_cluster import EmbeddedCluster
from ordeal import Finding
from slices import IS_PROOF, slice_of

from kafka_marshal.errors import MarshalError

REPORT = os.environ.get("CHAOS_REPORT", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In a full run, sort tests that make findings first."""
    here = Path(__file__).parent
    if IS_PROOF:
        items.sort(key=lambda item: item.path.parent == here and not finds(item))


def finds(item: pytest.Item) -> bool:
    return "record" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster() as started:
        yield started


@pytest.fixture(autouse=True)
def mended(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have all nodes of the shared cluster run again, or start the cluster again."""
    is_shared = "cluster" in request.fixturenames
    cluster = request.getfixturevalue("cluster") if is_shared else None
    yield
    if cluster is None:
        return
    try:
        running = [n for n, node in cluster.nodes.items() if node.is_running]
        cluster.resume(*running)
        cluster.restart(*(n for n in cluster.nodes if n not in running))
    except MarshalError:
        cluster.stop()
        cluster.start()


@pytest.fixture(scope="session")
def times() -> Callable[[int], int]:
    """Return a function of the repetitions of a full run; in a slice it returns 1."""
    factor = float(os.environ.get("CHAOS_FACTOR", "1"))
    return lambda count: slice_of(quick=1, full=max(1, round(count * factor)))


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., Finding]:
    """Make a finding, which is written whether the test passes or fails."""
    made: list[Finding] = []

    def make(name: str, title: str, h_ms: int = 2_000) -> Finding:
        made.append(Finding(name, title, h_ms))
        return made[-1]

    yield make
    for finding in made:
        verdict = getattr(request.node, "verdict", "failed: see the console")
        write(finding.name, attrs.asdict(finding) | {"verdict": verdict})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """Keep the outcome of a scenario, also of one that is skipped or fails early."""
    report = yield
    if report.when == "call":
        text = "passed" if report.passed else f"failed: {call.excinfo.value}"
        item.verdict = text[:2_000]  # type: ignore[attr-defined]
    if report.skipped or (report.when == "setup" and report.failed):
        name = item.name.removeprefix("test_")
        why = str(call.excinfo.value) if call.excinfo else ""
        text = item.function.__doc__ or name  # type: ignore[attr-defined]
        doc = text.strip().splitlines()[0]
        text = f"{'skipped' if report.skipped else 'failed'}: {why}"
        write(name, {"name": name, "title": doc, "verdict": text[:2_000]})
    return report


def write(name: str, found: dict) -> None:
    if REPORT:
        folder = Path(REPORT) / "findings"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(found, indent=2))
        # A page of the findings so far, in case the run is interrupted.
        import chaos_report

        chaos_report.make(folder.parent)
