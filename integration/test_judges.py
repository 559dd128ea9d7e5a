"""The checks of journals find repeats that break the protocol; without a broker."""

from types import SimpleNamespace

import pytest
from history import Tenure
from journal import Journal, judge_duplicates

from kafka_marshal.protocol.types import Key

KEY = Key("g", "t", 0)
H = 2_000
TOKENS = ("0.0.1", "0.0.9")


def history_of(owner, *, renewed_ms):
    """Return a history of two tenures, the first of which was renewed until then."""

    def tenure(token, client_id, begun_ms, last_ms):
        return Tenure(
            key=KEY,
            client_id=client_id,
            epoch=int(token.rpartition(".")[2]),
            token=token,
            effect="claimed",
            begun_ms=begun_ms,
            renewed_ms=last_ms,
            start=0,
            position=0,
        )

    first = tenure(TOKENS[0], owner, 0, renewed_ms)
    second = tenure(TOKENS[1], "other", renewed_ms + H, renewed_ms + 2 * H)
    config = SimpleNamespace(heartbeat_interval_ms=H)
    return SimpleNamespace(
        tenures=lambda _: {KEY: [first, second]},
        worlds={0: SimpleNamespace(keys={KEY: None}, config=config)},
    )


def journal_of(*written):
    """Return a journal; a line without a token is an event, not a processed record."""
    return Journal.merged(
        [
            {
                "event": "handled" if token else "observed",
                "at_ms": at_ms,
                "client_id": client_id,
                "pid": 1,
                "topic": KEY.topic,
                "partition": KEY.partition,
                "offset": offset,
                "token": token,
            }
            for at_ms, client_id, offset, token in written
        ]
    )


FIRST, SECOND = TOKENS
AGAIN = (9 * H, "w2", 5, SECOND)


@pytest.mark.parametrize(
    "later",
    [
        pytest.param((), id="killed"),
        pytest.param([(8 * H, "w1", 6, None)], id="frozen"),
        pytest.param([(H, "w1", 6, None), (8 * H, "w1", 6, None)], id="a-bit-later"),
    ],
)
def test_a_repeat_is_allowed_if_the_client_of_a_sidecar_fell_silent(later):
    journal = journal_of((100, "w1", 5, FIRST), *later, AGAIN)
    assert judge_duplicates(journal, history_of("host", renewed_ms=3 * H), "g") == 1


def test_a_repeat_is_an_error_if_the_client_of_a_sidecar_worked_on():
    steps = [(at_ms, "w1", 6, None) for at_ms in range(200, 4 * H, H // 4)]
    journal = journal_of((100, "w1", 5, FIRST), *steps, AGAIN)
    with pytest.raises(AssertionError, match="an H before the last beat"):
        judge_duplicates(journal, history_of("host", renewed_ms=3 * H), "g")


def test_a_repeat_is_an_error_if_the_owner_renewed_its_claim_later():
    """Heartbeats in the log show that it lives, whatever its journal has."""
    journal = journal_of((100, "w1", 5, FIRST), AGAIN)
    with pytest.raises(AssertionError, match="an H before the last beat"):
        judge_duplicates(journal, history_of("w1", renewed_ms=3 * H), "g")
    assert judge_duplicates(journal, history_of("w1", renewed_ms=H), "g") == 1
