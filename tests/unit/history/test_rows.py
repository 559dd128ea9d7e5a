from typing import get_args

import msgspec
import pytest
from logkit import KEY, ident

from kafka_marshal.history.rows import (
    OPEN,
    RAN_OUT,
    UNPAUSED,
    Interval,
    Moment,
    PauseRow,
    Row,
)
from kafka_marshal.protocol.losses import RELEASED, RESUMED, TAKEN_OVER
from kafka_marshal.protocol.types import Token

AT = Moment(3, 1_000, 2_000)


@pytest.mark.parametrize("kind", get_args(Row), ids=lambda kind: kind.__name__)
def test_rows_hold_plain_data_only(kind):
    """So that a row goes through MessagePack and comes back as it was."""
    assert issubclass(kind, msgspec.Struct)
    assert msgspec.json.schema(kind)


def test_open_rows_stay_open_after_a_round_trip():
    interval = Interval(
        key=KEY,
        client_id="c1",
        incarnation=ident("c1"),
        token=Token(1, 0, 3),
        effect="claimed",
        why=None,
        start=AT,
        heartbeat_interval_ms=1_000,
        renewed_offset=3,
        renewed_ms=1_000,
    )
    pause = PauseRow(
        group_id="g",
        op_id=ident("op"),
        client_id="admin",
        reason=None,
        start=AT,
        until_ms=9_000,
    )
    for row in (interval, pause):
        assert (row.ending, row.end) == (OPEN, None)
        back = msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=type(row))
        assert back == row
        assert type(back.start) is Moment


def test_endings_have_names_of_their_own():
    names = (OPEN, UNPAUSED, RAN_OUT, RELEASED, RESUMED, TAKEN_OVER)
    assert len({*names}) == len(names)
