"""Which rows reach a sink: those whose claim is still held."""

import pickle
from types import SimpleNamespace

import pyarrow as pa
import pytest
from sinkkit import Frame as SinkFrame

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.grants import ClaimState
from kafka_marshal.protocol.types import Owner
from kafka_marshal.spark import fencing
from kafka_marshal.spark.fencing import Fence, fenced, fenced_by, write_by_claim

OPTIONS = {
    "kafka.bootstrap.servers": "localhost:1",
    "subscribe": "t",
    "group": "g",
    "includeToken": "true",
}
OWNER = Owner("a", b"i" * 16)
LIVE, OLD = "1.0.7", "1.0.3"


class FakeGrants:
    """Returns the newest claim of a key, and counts the requests."""

    def __init__(self):
        self.known = {("t", 0): ClaimState(LIVE, 7, OWNER)}
        self.asked = 0

    def newest(self, key, *, timeout_ms):
        self.asked += 1
        assert key.group_id == "g"
        return self.known.get((key.topic, key.partition))


@pytest.fixture
def grants(monkeypatch):
    found = FakeGrants()
    monkeypatch.setattr(fencing, "open_grant_client", lambda *_, **__: found)
    return found


class Frame:
    """The part of a DataFrame that is used."""

    schema = "a schema"

    def __init__(self, columns=fencing.COLUMNS):
        self.columns = list(columns)

    def mapInArrow(self, function, schema):  # noqa: N802 - Spark's name
        assert schema is self.schema
        return SimpleNamespace(function=function)


def batch(*rows):
    names = ("topic", "partition", "offset", "token")
    columns = list(zip(*rows, strict=True)) or [[], [], [], []]
    types = (pa.string(), pa.int32(), pa.int64(), pa.string())
    arrays = [pa.array(c, t) for c, t in zip(columns, types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names)


def passed(*batches):
    """Return the offsets that a fenced frame lets pass."""
    function = fenced(Frame(), 5, options=OPTIONS).function
    # As Spark sends it to its workers.
    function = pickle.loads(pickle.dumps(function))
    return [b.column("offset").to_pylist() for b in function(iter(batches))]


def test_rows_of_a_current_claim_pass(grants):
    assert passed(batch(("t", 0, 1, LIVE), ("t", 0, 2, LIVE))) == [[1, 2]]
    assert grants.asked == 1


def test_a_batch_of_an_ended_claim_is_dropped(grants, caplog):
    assert passed(batch(("t", 0, 1, OLD)), batch(("t", 0, 2, OLD))) == []
    assert "batch 5: rows of t-0 under token 1.0.3 are dropped" in caplog.text


def test_only_stale_rows_are_dropped(grants):
    grants.known["t", 1] = ClaimState("1.0.9", 9, OWNER)
    rows = (("t", 0, 1, LIVE), ("t", 1, 2, OLD), ("t", 0, 3, OLD), ("t", 1, 4, "1.0.9"))
    assert passed(batch(*rows)) == [[1, 4]]


@pytest.mark.parametrize(
    "known",
    [
        pytest.param(None, id="never claimed"),
        pytest.param(ClaimState(LIVE, 7, None), id="released"),
        pytest.param(ClaimState("1.1.7", 7, OWNER), id="the log went back"),
    ],
)
def test_rows_are_dropped_if_no_claim_with_their_token_is_held(grants, known):
    grants.known = {("t", 0): known} if known else {}
    assert passed(batch(("t", 0, 1, LIVE))) == []


def test_rows_without_a_token_raise(grants):
    """Nobody holds a claim for them, so no owner would process them."""
    with pytest.raises(ConfigurationError, match=r"offset 1 of t-0.*no token") as why:
        passed(batch(("t", 0, 2, LIVE), ("t", 0, 1, None)))
    assert why.value.setting == "token"


def test_sinks_raise_for_rows_without_a_token():
    frame = SinkFrame([SimpleNamespace(topic="t", partition=0, offset=1, token=None)])
    with pytest.raises(ConfigurationError, match=r"offset 1 of t-0.*no token"):
        write_by_claim(frame, pytest.fail)


def test_a_claim_is_checked_for_each_arrow_batch(grants):
    rows = batch(("t", 0, 1, LIVE))

    def batches():
        yield rows
        grants.known = {}
        yield rows

    function = fenced(Frame(), 5, options=OPTIONS).function
    assert len(list(function(batches()))) == 1


@pytest.mark.parametrize("missing", fencing.COLUMNS)
def test_a_missing_column_raises(missing):
    columns = [name for name in fencing.COLUMNS if name != missing]
    with pytest.raises(ConfigurationError, match=f"no column {missing}.*includeToken"):
        fenced(Frame(columns), 5, options=OPTIONS)


def test_a_fence_requires_a_group():
    options = {name: value for name, value in OPTIONS.items() if name != "group"}
    with pytest.raises(ConfigurationError) as raised:
        Fence.of(options)
    assert raised.value.setting == "group"


def test_a_fence_does_not_show_passwords():
    secret = {
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.username": "me",
        "kafka.sasl.password": "hush",
    }
    assert "hush" not in repr(Fence.of(OPTIONS | secret))


def test_fenced_by_decorates_a_writer_function(grants):
    seen = []

    @fenced_by(OPTIONS)
    def write(df, batch_id):
        """Write it."""
        seen.append((df, batch_id))

    write(Frame(), 9)
    ((df, batch_id),) = seen
    assert batch_id == 9
    assert list(df.function(iter([batch(("t", 0, 1, OLD))]))) == []
    assert write.__doc__ == "Write it."
