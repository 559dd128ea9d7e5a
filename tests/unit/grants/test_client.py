"""What all grant clients share: claim references, and queries of the newest claim."""

import pickle

from enginekit import KEY, owning, world
from grantkit import MemoryGrantClient, ref_of

from kafka_marshal.grants import ClaimRef, ClaimState

REF = ClaimRef(
    group_id="g",
    client_id="a",
    incarnation=b"i" * 16,
    topic="t",
    partition=0,
    epoch=7,
    token="1.0.7",
    secret="5e" * 16,
)


def test_a_claim_ref_can_be_pickled():
    assert pickle.loads(pickle.dumps(REF)) == REF
    assert REF.key == KEY
    assert REF.owner == ("a", b"i" * 16)


def test_the_repr_of_a_claim_ref_hides_its_secret():
    assert REF.secret not in repr(REF)


def test_the_newest_claim_keeps_its_token_after_its_release():
    cluster = world(records=(5,))
    client = MemoryGrantClient(cluster)
    assert client.newest(KEY, timeout_ms=5_000) is None
    node = owning(cluster)
    ref = ref_of(node)
    assert client.newest(KEY, timeout_ms=5_000) == ClaimState(
        ref.token, ref.epoch, ref.owner
    )
    node.leave()
    cluster.run_until(lambda: node.has_left, 10_000)
    assert client.newest(KEY, timeout_ms=5_000) == ClaimState(
        ref.token, ref.epoch, None
    )
