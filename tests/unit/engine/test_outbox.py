"""Sent records, and how long they are pending."""

from enginekit import H, owning, world

from kafka_marshal.errors import CoordinationError
from simulator.fakestore import AppendFate


def test_a_lost_record_is_awaited_for_an_interval_and_never_confirmed():
    cluster = world()
    node = owning(cluster)
    seqs = node.session.begin_close(release=True)
    assert node.session.is_pending(seqs, late=False)
    cluster.run_until(lambda: not node.session.is_pending(seqs), H)

    cluster.fates["a"] = AppendFate(is_lost=True)
    lost = node.session.begin_close(release=True)
    cluster.run(H - 50)
    assert node.session.is_pending(lost, late=False)
    cluster.run(100)
    assert not node.session.is_pending(lost, late=False)
    assert node.session.is_pending(lost)


def test_a_record_may_be_written_until_it_is_read_back(monkeypatch):
    cluster = world()
    node = owning(cluster)
    outbox = node.session._outbox
    cluster.fates["a"] = AppendFate(is_lost=True)
    (lost,) = node.session.beat_now()
    cluster.fates.clear()
    (other,) = node.session.beat_now()
    cluster.run(2 * H)
    assert outbox.may_land(0, first=lost, before=other)
    assert not outbox.may_land(1, first=lost, before=other)
    assert not outbox.may_land(0, first=other, before=other + 1)
    assert not outbox.may_land(0, first=0, before=lost)

    monkeypatch.setattr("kafka_marshal.engine.outbox.PENDING_MAX", 1)
    node.session.beat_now()  # the lost one is forgotten
    assert outbox.may_land(0, first=lost, before=other)
    assert not outbox.may_land(0, first=other, before=other + 1)


def test_failed_appends_are_reported_once_in_an_interval():
    cluster = world()
    node = owning(cluster)
    assert node.engine.context.failed_append is None
    cluster.fates["a"] = AppendFate(is_lost=True, fails_after_ms=1)
    cluster.run(H + H // 2)
    failed = node.engine.context.meters.failed_appends
    reported = node.observer.named("append_failed")
    assert failed > len(reported) == 2
    assert isinstance(reported[0].fields["error"], CoordinationError)
    last = node.engine.context.failed_append
    assert last is not None
    assert last.at_ms > last.reported_ms
