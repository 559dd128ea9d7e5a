"""Surplus stays until members have stayed the same for a while."""

from kafka_marshal.engine.debounce import Debounce
from kafka_marshal.protocol.planner import MemberView


def test_joins_without_an_end_do_not_keep_surplus_for_ever():
    debounce = Debounce()
    one, two = ([MemberView(client_id=name, topics=frozenset())] for name in "ab")
    assert debounce.update(two, 100, debounce_ms=1_000) is None
    for now_ms in range(1_000, 6_000, 500):
        members = two if now_ms // 500 % 2 else one
        changed = debounce.update(members, now_ms, debounce_ms=1_000)
    assert changed == 6_000
    assert debounce.is_on(5_999)
    assert not debounce.is_on(6_000)
