"""A cluster of three brokers, which a module breaks in turn and leaves whole.

What scenarios find goes to ``$CHAOS_REPORT``, a directory, where that is set. At full
size all of them run, and as often as figures need it; otherwise a slice, once each.
Each finding is written when its scenario ends, with a report of all so far, and
whatever a scenario leaves broken is mended before the next: no run is lost to one.
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
    """In a full run, sort what makes findings first."""
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
    """How often to repeat what a full run does so often: once in a slice."""
    factor = float(os.environ.get("CHAOS_FACTOR", "1"))
    return lambda count: slice_of(quick=1, full=max(1, round(count * factor)))


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., Finding]:
    """Make a finding, which is written down whatever becomes of the test."""
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
    """Keep how a scenario ended, also of those that never began."""
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
        # The page of what there is, should the run go no further.
        import chaos_report

        chaos_report.make(folder.parent)
