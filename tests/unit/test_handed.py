import pickle

import pytest

from kafka_marshal.handed import CommitToken, runs_of
from kafka_marshal.protocol.types import Token

OLD, NEW = Token(1, 0, 7), Token(1, 0, 9)


def record(partition, offset, *, token=OLD, topic="t"):
    """Return what counts of a record here."""
    return CommitToken(topic, partition, offset, token)


@pytest.mark.parametrize(
    ("records", "runs"),
    [
        pytest.param([], [], id="none"),
        pytest.param([(0, 5)], [(0, 5, 5)], id="one"),
        pytest.param([(0, 5), (0, 6), (0, 7)], [(0, 5, 7)], id="dense"),
        pytest.param([(0, 5), (0, 7), (0, 8)], [(0, 5, 5), (0, 7, 8)], id="hole"),
        pytest.param([(0, 6), (0, 5)], [(0, 6, 6), (0, 5, 5)], id="back"),
        pytest.param([(0, 5), (0, 5)], [(0, 5, 5), (0, 5, 5)], id="twice"),
        pytest.param(
            [(0, 0), (1, 1), (1, 2), (0, 3)],
            [(0, 0, 0), (1, 1, 2), (0, 3, 3)],
            id="partitions-mixed",
        ),
    ],
)
def test_runs_hold_exactly_what_was_given(records, runs):
    given = [record(*each) for each in records]
    found = [(r.partition[1], r.first, r.last) for r in runs_of(iter(given))]
    assert found == runs


def test_a_run_ends_where_claim_or_topic_does():
    given = [record(0, 0), record(0, 1, token=NEW), record(0, 2, token=NEW, topic="u")]
    assert [(r.partition, r.token, r.first, r.last) for r in runs_of(given)] == [
        (("t", 0), OLD, 0, 0),
        (("t", 0), NEW, 1, 1),
        (("u", 0), NEW, 2, 2),
    ]


def test_equal_tokens_are_one_claim_whatever_object_they_are():
    given = [CommitToken.of(record(0, 0)), pickle.loads(pickle.dumps(record(0, 1)))]
    assert [(r.first, r.last) for r in runs_of(given)] == [(0, 1)]


def test_a_commit_token_survives_pickling():
    token = CommitToken.of(record(3, 12))
    assert pickle.loads(pickle.dumps(token)) == token
    assert (token.topic, token.partition, token.offset) == ("t", 3, 12)
    assert hash(token) == hash(CommitToken.of(record(3, 12)))
