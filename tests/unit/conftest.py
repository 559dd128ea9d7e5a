"""What tests of the engine and of those above it begin with."""

import enginekit
import pytest


@pytest.fixture
def cluster():
    """A cluster in memory with a topic of records, and no client yet."""
    return enginekit.world()
