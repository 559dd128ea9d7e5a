"""An offset is granted to at most one of the processes that request it.

Requests go through the product's ``LogGrantClient``, over the log in memory. Appends
are delayed, lost, doubled, or reported as failed although they are written; calls time
out before their verdict. The owner consumes meanwhile and loses its claim; requests
under the old claim continue.
"""

from enginekit import AMO, H, claim_of, owning, spec, values, world
from grantkit import MemoryGrantClient, ref_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_marshal.errors import DeadlineExceeded
from kafka_marshal.protocol.types import OffsetRange
from simulator.fakestore import AppendFate

RECORDS = 24

fates = st.builds(
    AppendFate,
    delay_ms=st.sampled_from([0, 0, 40, 300, 900]),
    is_lost=st.booleans(),
    copies=st.sampled_from([1, 1, 2]),
    fails_after_ms=st.sampled_from([None, None, 20, 150]),
)
attempts = st.tuples(
    st.just("attempt"),
    st.integers(0, 2),  # number of the process
    st.integers(0, RECORDS - 1),
    st.integers(0, 9),
    fates,
    st.sampled_from([60, 400, 5_000]),
)
steps = st.one_of(
    attempts,
    attempts,
    attempts,
    st.tuples(st.just("owner"), fates),
    st.tuples(st.just("run"), st.sampled_from([20, 500, 1_500])),
    st.tuples(st.just("takeover")),
)


class Run:
    """A cluster in memory, and all offsets that were granted or handed out."""

    def __init__(self):
        self.cluster = world(records=(RECORDS + 10,))
        self.owner = owning(self.cluster, delivery=AMO, most=4, batches=2)
        self.refs = [ref_of(self.owner)]
        self.clients = {
            n: MemoryGrantClient(self.cluster, f"task{n}") for n in range(3)
        }
        self.given = []

    def attempt(self, number, first, length, fate, timeout_ms):
        self.cluster.fates[f"task{number}"] = fate
        client = self.clients[number]
        for ref in self.refs:
            try:
                found = client.acquire(
                    ref,
                    OffsetRange.through(first, first + length),
                    timeout_ms=timeout_ms,
                )
            except DeadlineExceeded:
                continue
            if found is not None:
                self.given += range(found.first, found.end)

    def owner_polls(self, fate):
        self.cluster.fates[self.owner.owner.client_id] = fate
        self.given += values(self.owner.consumer.poll(0)).get(0, [])
        self.cluster.run(60)
        self.cluster.fates.pop(self.owner.owner.client_id)

    def takeover(self):
        if len(self.refs) > 2:
            return
        self.cluster.crash(self.owner)
        number = len(self.refs)
        another = spec(delivery=AMO, most=4, batches=2)
        self.owner = self.cluster.node(f"b{number}", spec=another)
        self.cluster.run_until(lambda: len(self.owner.held) == 1, 4 * H)
        assert claim_of(self.owner).epoch is not None
        self.refs.append(ref_of(self.owner))


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, min_size=2, max_size=14))
def test_no_offset_is_granted_or_handed_out_twice(story):
    run = Run()
    for kind, *rest in story:
        if kind == "attempt":
            run.attempt(*rest)
        elif kind == "owner":
            run.owner_polls(*rest)
        elif kind == "run":
            run.cluster.run(*rest)
        else:
            run.takeover()
        assert len(run.given) == len(set(run.given)), run.given


@settings(max_examples=30, deadline=None)
@given(
    st.lists(fates, min_size=1, max_size=5),
    st.integers(0, RECORDS - 8),
)
def test_a_request_after_failed_attempts_gets_all_offsets_left(bad, first):
    """The earlier attempts may have succeeded, failed or timed out."""
    run = Run()
    for fate in bad:
        run.attempt(0, first, 7, fate, 400)
    run.cluster.run(2_000)
    before = set(run.given)
    head = run.clients[1].request(run.refs[0], OffsetRange(0, 1), timeout_ms=5_000)
    run.attempt(1, first, 7, AppendFate(), 5_000)
    after = set(run.given) - before
    assert len(run.given) == len(set(run.given)), run.given
    if not before and head.granted is not None:
        assert after == set(range(1, first + 8))
