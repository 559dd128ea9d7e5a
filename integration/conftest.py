"""One real broker for the whole run, and names that no other test uses."""

import itertools
import os
import threading
import uuid
from collections.abc import Callable, Iterator

import classdata
import other_kafka
import pytest
from collecting import pytest_collection_finish  # noqa: F401 - hook
from containers import ContainerBroker
from limits import (  # noqa: F401 - hooks
    pytest_runtest_teardown,
    pytest_sessionstart,
    pytest_timeout_set_timer,
)
from slices import deselect, deselect_proof
from test_lanes import longest_first
from waiting import eventually

from kafka_marshal.errors import MarshalError
from kafka_marshal.testing.broker import EmbeddedBroker

Broker = EmbeddedBroker | ContainerBroker
TRANSPORTS_OF_TESTS = ("fast", "kafka-python")
VIAS = ("direct", "sidecar")
# No test kills the shared broker: if it gets no processor for seconds, its controller
# must not fence it. Rare heartbeats to the controller halve the work of an idle broker.
SHARED_BROKER = {
    "broker.session.timeout.ms": "60000",
    "broker.heartbeat.interval.ms": "5000",
}
# Java processes of tests live for seconds to minutes: they never get back what the
# optimising compiler and the parallel collector take, 40 % of a broker's time.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# Prefixes of threads that the product and kafka-python start.
OWN_THREADS = ("marshal-", "kafka-io-")
# Over a sidecar one transport is enough: it decides who reads the log, not how.
TRANSPORT_OF_SIDECARS = "fast"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--broker",
        choices=["embedded", "container"],
        default="embedded",
        help="where the Kafka broker of the integration tests comes from",
    )
    parser.addoption("--kafka", help="the version of the embedded brokers")
    parser.addoption(
        "--transport",
        choices=["both", *TRANSPORTS_OF_TESTS],
        default="both",
        help="the transports that tests of modules that touch it run over",
    )
    parser.addoption(
        "--via",
        choices=["both", *VIAS],
        default="both",
        help="where the claims of tests that run both ways come from: an engine of "
        "the process, or a sidecar",
    )


def pytest_configure(config: pytest.Config) -> None:
    if version := config.getoption("--kafka"):
        other_kafka.use_version(version)
    if "JDK_JAVA_OPTIONS" not in os.environ:  # processes of pytest-xdist have them
        os.environ["JDK_JAVA_OPTIONS"] = JAVA_OPTIONS
        is_locked = config.getoption("--broker") == "embedded" and not version
        if is_locked and not config.option.collectonly:
            os.environ["JDK_JAVA_OPTIONS"] = classdata.options(JAVA_OPTIONS)
    config.addinivalue_line(
        "markers", "direct: not over a sidecar, though its module runs both ways"
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Sort the longest tests first; deselect those that this run omits."""
    longest_first(items)
    deselect_proof(config, items)
    deselect(config, items, is_direct_over_sidecar)


def is_direct_over_sidecar(item: pytest.Item) -> bool:
    """Return whether a test would run over a sidecar, and must not."""
    if not item.get_closest_marker("direct"):
        return False
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("via") == "sidecar"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test over the transports and ways (``via``) that it requests."""
    wanted = metafunc.config.getoption("--transport")
    transports = TRANSPORTS_OF_TESTS if wanted == "both" else (wanted,)
    wanted = metafunc.config.getoption("--via")
    vias = VIAS if wanted == "both" else (wanted,)
    asked = metafunc.fixturenames
    if "transport" in asked and "via" in asked:
        pairs = [(each, "direct") for each in transports if "direct" in vias]
        if "sidecar" in vias:
            pairs.append((TRANSPORT_OF_SIDECARS, "sidecar"))
        metafunc.parametrize(("transport", "via"), pairs, scope="module")
    elif "transport" in asked:
        metafunc.parametrize("transport", transports, scope="module")
    elif "via" in asked:
        metafunc.parametrize("via", vias, scope="module")


@pytest.fixture(scope="module", autouse=True)
def threads_end() -> Iterator[None]:
    """Check that no thread of a client runs after the last test of a module."""
    before = set(threading.enumerate())
    yield

    def left() -> list[str]:
        later = set(threading.enumerate()) - before
        return [each.name for each in later if each.name.startswith(OWN_THREADS)]

    eventually(lambda: not left(), f"the end of {left()}")


@pytest.fixture(scope="session")
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """The broker that tests share; those that break one start their own."""
    kind = request.config.getoption("--broker")
    try:
        started = (
            EmbeddedBroker(properties=SHARED_BROKER).start()
            if kind == "embedded"
            else ContainerBroker().start()
        )
    except MarshalError as error:
        # A skip would look like a pass: the run fails and says what is missing.
        pytest.fail(f"no broker ({kind}): {error}", pytrace=False)
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="session")
def bootstrap_servers(broker: Broker) -> str:
    return broker.bootstrap_servers


_RUN = uuid.uuid4().hex[:8]
_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def unique() -> Callable[[str], str]:
    """Names for topics and groups that no other test of any run has used."""
    return lambda stem: f"{stem}-{_RUN}-{next(_NUMBERS)}"
