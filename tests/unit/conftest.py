"""Fixtures of unit tests of several packages."""

import socket

import pytest


@pytest.fixture
def cluster():
    """A cluster in memory with a topic of records, and no client yet."""
    import enginekit  # here, because it loads most of the product

    return enginekit.world()


@pytest.fixture
def ends():
    """Both ends of a connection; the first one does not block."""
    near, far = socket.socketpair()
    near.setblocking(False)
    far.settimeout(60)
    with near, far:
        yield near, far
