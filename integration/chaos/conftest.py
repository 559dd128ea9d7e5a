"""One cluster of three brokers, which scenarios break in turn and leave whole."""

from collections.abc import Iterator

import pytest

from kafka_marshal.testing.cluster import EmbeddedCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster() as started:
        yield started
