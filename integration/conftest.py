"""One real broker for the whole run, and names that no other test uses."""

import itertools
import uuid
from collections.abc import Callable, Iterator

import pytest

from kafka_marshal.errors import MarshalError
from kafka_marshal.testing.broker import (
    ContainerBroker,
    EmbeddedBroker,
    start_container_broker,
)

Broker = EmbeddedBroker | ContainerBroker
TRANSPORTS_OF_TESTS = ("fast", "kafka-python")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--broker",
        choices=["embedded", "container"],
        default="embedded",
        help="where the Kafka broker of the integration tests comes from",
    )
    parser.addoption(
        "--transport",
        choices=["both", *TRANSPORTS_OF_TESTS],
        default="both",
        help="the transports that tests of modules that touch it run over",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that asks for a transport over each of them."""
    if "transport" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("--transport")
        chosen = TRANSPORTS_OF_TESTS if wanted == "both" else (wanted,)
        metafunc.parametrize("transport", chosen, scope="module")


@pytest.fixture(scope="session")
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """The broker that tests share; those that break one start their own."""
    kind = request.config.getoption("--broker")
    try:
        started = (
            EmbeddedBroker().start() if kind == "embedded" else start_container_broker()
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
