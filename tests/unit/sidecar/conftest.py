"""Fixtures of most tests of the service: cluster, host and server."""

import pytest
from enginekit import world
from servedkit import Served
from sidecarkit import Machine


@pytest.fixture
def cluster():
    """A simulated broker: two partitions of ``__marshal``, eight of data."""
    return world(partitions=2, records=[5] * 8)


@pytest.fixture
def machine(cluster):
    """A host of that cluster, with the service of its sidecar."""
    return Machine(cluster)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server in a thread, over a Unix socket and over TCP."""
    found = Served(tmp_path_factory.mktemp("s") / "own" / "sidecar.sock")
    yield found
    found.close()
