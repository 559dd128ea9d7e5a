"""Soft state survives a file, and damage of it does no harm."""

import pytest
from enginekit import fold, owning, world, write
from hypothesis import given
from hypothesis import strategies as st

from kafka_marshal.engine.soft import soft_from_bytes, soft_to_bytes
from kafka_marshal.protocol.state import SoftState


@pytest.fixture(scope="module")
def soft():
    cluster = world()
    owning(cluster)
    write(cluster, b"undecodable")
    return fold(cluster).soft


def test_it_comes_back_as_it_was(soft):
    assert soft.members
    assert soft.notes
    assert soft.counters
    assert soft.undecodable
    assert soft_from_bytes(soft_to_bytes(soft)) == soft
    assert soft_from_bytes(soft_to_bytes(SoftState())) == SoftState()


def test_another_version_is_nothing(soft):
    value = soft_to_bytes(soft)
    assert value[1] == 1
    assert soft_from_bytes(value[:1] + b"\x02" + value[2:]) == SoftState()


@given(st.binary(max_size=64))
def test_rubbish_is_nothing(value):
    assert soft_from_bytes(value) == SoftState()


def test_what_is_cut_off_is_nothing(soft):
    value = soft_to_bytes(soft)
    for size in range(len(value)):
        assert soft_from_bytes(value[:size]) == SoftState()


def test_a_member_that_is_none_is_left_out(soft):
    value = soft_to_bytes(soft)
    (member,) = soft.members.values()
    name = member.record.client_id.encode()
    assert name in value
    frame = value.index(b"\x01\x80\x01\x00")  # frame, type 128 as two bytes, version
    bad = value[:frame] + b"\x07" + value[frame + 1 :]
    assert soft_from_bytes(bad).members == {}
    assert soft_from_bytes(bad).notes == soft.notes
