"""A claim that has ended in a client stays ended, whatever events a sidecar sends."""

from hypothesis import given
from hypothesis import strategies as st
from remotekit import RemoteRig, key, lost, releasing

PARTITIONS = st.integers(0, 1)
EPOCHS = st.integers(1, 4)


@st.composite
def events(draw):
    """Draw an event of the sidecar, or an action of the application."""
    what = draw(
        st.sampled_from(["assigned", "lost", "releasing", "snapshot", "poll", "tick"])
    )
    return what, draw(PARTITIONS), draw(EPOCHS)


def apply(rig, consumer, event):
    what, partition, epoch = event
    match what:
        case "assigned":
            rig.send(rig.assigned(partition, epoch=epoch))
        case "lost":
            rig.send(lost(partition, epoch=epoch, was_lost=False))
        case "releasing":
            rig.send(releasing(partition, epoch=epoch))
        case "snapshot":
            rig.send(rig.snapshot(rig.assigned(partition, epoch=epoch)))
        case "poll":
            consumer.poll()
            consumer.commit()
        case "tick":
            rig.tick(1)


def having(rig):
    """Return epoch, position, and whether it is not draining, of each holding."""
    return {
        place: (holding.claim.epoch, holding.position, holding.drain is None)
        for place, holding in rig.session.holdings.items()
    }


def opened():
    rig = RemoteRig(records=(6, 6))
    # Claims are lost on purpose: with a callback, a loss raises no error.
    return rig, rig.consumer(most=2, on_lost=lambda *_: None)


@given(st.lists(events(), min_size=6, max_size=30))
def test_a_repeated_event_changes_nothing(course):
    (once, reader), (twice, other) = opened(), opened()
    for event in course:
        apply(once, reader, event)
        apply(twice, other, event)
        if event[0] in {"assigned", "lost", "releasing", "snapshot"}:
            apply(twice, other, event)
        assert having(once) == having(twice)


@given(st.lists(events(), min_size=6, max_size=30))
def test_the_epoch_of_a_key_never_falls(course):
    rig, consumer = opened()
    newest = {}
    for event in course:
        apply(rig, consumer, event)
        for place, (epoch, *_) in having(rig).items():
            assert epoch >= newest.get(place, 0)
        for fields in rig.events("claim_ended"):
            newest[fields["key"]] = max(newest.get(fields["key"], 0), fields["epoch"])
            held = rig.session.holdings.get(fields["key"])
            assert held is None or held.claim.epoch > fields["epoch"]


@given(st.lists(events(), min_size=6, max_size=30), EPOCHS)
def test_a_snapshot_ends_each_claim_that_it_does_not_list(course, epoch):
    rig, consumer = opened()
    for event in course:
        apply(rig, consumer, event)
    rig.send(rig.snapshot(rig.assigned(0, epoch=epoch)))
    assert set(having(rig)) <= {key(0)}
    assert all(found == epoch for found, *_ in having(rig).values())
