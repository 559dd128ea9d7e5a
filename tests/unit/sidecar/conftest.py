"""The world that most tests of the service run in."""

import pytest
from enginekit import world
from sidecarkit import Machine


@pytest.fixture
def cluster():
    """A simulated broker: two partitions of ``__marshal``, eight of data."""
    return world(partitions=2, records=[5] * 8)


@pytest.fixture
def machine(cluster):
    """A host of that cluster, with its service."""
    return Machine(cluster)
