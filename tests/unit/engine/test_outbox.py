"""Sent records, and how long they are pending."""

from enginekit import H, owning, world

from kafka_marshal.testing.fakestore import AppendFate


def test_a_lost_record_is_neither_awaited_nor_confirmed():
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
