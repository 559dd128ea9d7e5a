"""What a ``with`` block holds is closed at its end."""

import pytest

from kafka_marshal.closing import Closing


class Door(Closing):
    def __init__(self):
        self.closed_count = 0

    def close(self):
        self.closed_count += 1


def test_it_is_closed_at_the_end():
    with Door() as door:
        assert door.closed_count == 0
    assert door.closed_count == 1


def test_an_error_goes_on_after_it_was_closed():
    door = Door()
    with pytest.raises(KeyError), door:
        raise KeyError("x")
    assert door.closed_count == 1
