"""PROTOCOL 4.10: tokens, and the eras that they need."""

from logkit import KEY, Log, config, release

from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.types import Token


def test_4_10_a_token_is_ordered_and_sixteen_bytes():
    log = Log(era=3)
    log.claimed()
    first = log.state.token(KEY)
    assert (str(first), len(bytes(first))) == ("3.0.1", 16)
    log.append(release(1), epoch=2)
    log.claimed()
    second = log.state.token(KEY)
    assert second == Token(3, 2, 3)
    assert bytes(first) < bytes(second)
    log.append(config(2, era=4))
    third = log.claimed("c2", generation=2, key=KEY._replace(partition=1))
    assert log.state.token(KEY._replace(partition=1)) == Token(4, 2, third)


def test_4_10_a_config_does_not_change_the_tokens_of_standing_claims():
    log = Log(era=3)
    log.claimed()
    standing = log.state.token(KEY)
    assert log.outcome_of(config(2, era=4)) == "configured"
    assert log.state.token(KEY) == standing == Token(3, 0, 1)
    # Both the state and its canonical bytes have the eras.
    back = from_bytes(to_bytes(log.state))
    assert back.token(KEY) == standing
    assert back.eras == log.state.eras == ((2, 3),)
    log.append(release(1))
    log.claimed("c2", generation=2)
    assert log.state.token(KEY) == Token(4, 0, 4)


def test_4_10_an_era_is_kept_while_an_owned_key_has_an_epoch_in_it():
    log = Log()
    log.claimed()
    for generation in range(2, 200):
        log.append(config(generation, era=generation))
    assert len(log.state.eras) == 64
    assert log.state.token(KEY) == Token(1, 0, 1)
    back = from_bytes(to_bytes(log.state))
    assert (back.eras, back.token(KEY)) == (log.state.eras, Token(1, 0, 1))
    # No owned key has an epoch of that era once the key is released.
    log.append(release(1))
    log.append(config(200, era=200))
    assert log.state.eras[0][1] > 1


def test_4_10_a_token_becomes_larger_where_claims_have_more_than_64_eras():
    log = Log()
    first = KEY._replace(partition=0)
    for number in range(65):
        log.claimed(generation=number + 1, key=KEY._replace(partition=number))
        assert log.state.token(first) == Token(1, 0, 1)
        log.append(config(number + 2, era=number + 2))
    assert len(log.state.eras) == 64
    assert log.state.token(first) == Token(2, 0, 1)
    assert log.state.token(KEY._replace(partition=1)) == Token(2, 0, 3)


def test_4_eras_are_in_canonical_bytes_only_after_a_second_config():
    log = Log()
    plain = to_bytes(log.state)
    assert plain.endswith(b"\x90")  # no operations
    log.append(config(2, era=2))
    assert digest(from_bytes(to_bytes(log.state))) == digest(log.state)
    assert to_bytes(log.state).endswith(b"\x91\x92\xa4eras\x91\x92\x01\x01")
