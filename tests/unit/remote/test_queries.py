"""What a client asks its sidecar of the log."""

from contextlib import closing

import pytest
from enginekit import T0
from fakesidecar import FakeSidecar, connected, failure

from kafka_marshal.engine.replica import LastClaim
from kafka_marshal.errors import CoordinationError
from kafka_marshal.protocol.types import Key, TopicPartition
from kafka_marshal.remote.answers import (
    AsOf,
    ClientsNow,
    GroupNow,
    LocalClient,
    OwnersNow,
    WorldNow,
)
from kafka_marshal.remote.queries import SidecarQueries

KEY = Key("g", "t", 0)
AS_OF = AsOf(time_ms=1, offsets={})
UNKNOWN = (503, failure("CoordinationError", retriable=True))
# A sidecar has an incarnation in the log of its own, for each group.
HERE = {"client_id": "host-a", "incarnation": "cd" * 16}
THERE = {"client_id": "host-b", "incarnation": "ef" * 16}


@pytest.fixture
def sidecar():
    return FakeSidecar()


@pytest.fixture
def queries(sidecar):
    with closing(connected(sidecar)) as connection:
        yield SidecarQueries(connection, sidecar.info)


def claim(owner, partition=0, **rest):
    return {
        "topic": "t",
        "partition": partition,
        "owner": owner,
        "freshness": "fresh",
        "age_ms": 3,
        "position": None,
        "epoch": 5,
    } | rest


def report(sidecar, *claims, count=1):
    """Have the sidecar report these claims of the group."""
    group = GroupNow(as_of=AS_OF, group="g", claims=claims, pauses=())
    sidecar.answers["GET", "g"] = [group] * count


def row_of(client, *places, group="g"):
    row = LocalClient(
        group=group,
        client=client,
        pid=1,
        state="ready",
        beat_age_ms=1,
        subscriptions=(),
        assigned=places,
        lease_until_ms=None,
    )
    return ClientsNow(as_of=AS_OF, clients=(row,))


def test_a_key_of_a_neighbour_names_the_neighbour(sidecar, queries):
    report(sidecar, claim(HERE), count=3)
    nobody = ClientsNow(as_of=AS_OF, clients=())
    sidecar.answers["GET", "clients"] = [row_of("b", "t-0"), nobody, UNKNOWN]
    asked = [queries.glance(KEY).holder for _ in range(3)]
    assert asked == ["b", "host-a", "host-a"]


def test_what_is_not_known_is_no_glance(sidecar, queries):
    report(sidecar, claim(HERE, partition=1))
    assert queries.glance(KEY) is None
    sidecar.answers["GET", "g"] = [UNKNOWN]
    assert queries.glance(KEY) is None


@pytest.mark.parametrize(
    ("clients", "may_be_ours"),
    [
        pytest.param(ClientsNow(as_of=AS_OF, clients=()), True, id="of-nobody-yet"),
        pytest.param(row_of("c", "t-0"), True, id="ours"),
        pytest.param(row_of("b", "t-0"), False, id="a-neighbour-s"),
        pytest.param(row_of("b", "t-1"), True, id="a-neighbour-has-another"),
        pytest.param(row_of("b", "t-0", group="h"), True, id="of-another-group"),
    ],
)
def test_a_claim_that_no_other_client_has_may_be_of_this_process(
    sidecar, queries, clients, may_be_ours
):
    report(sidecar, claim(HERE))
    sidecar.answers["GET", "clients"] = [clients]
    assert queries.last_claims(1_000) == {T0: LastClaim("host-a", 5, may_be_ours)}


def test_claims_of_others_ask_nobody_for_neighbours(sidecar, queries):
    report(sidecar, claim(THERE), claim(None, 1, epoch=7))
    assert queries.last_claims(1_000) == {
        T0: LastClaim("host-b", 5),
        TopicPartition("t", 1): LastClaim(None, 7),
    }
    assert sidecar.named("GET", "clients") == []


def test_claims_that_are_not_known_are_an_error(sidecar, queries):
    sidecar.answers["GET", "g"] = [UNKNOWN]
    with pytest.raises(CoordinationError):
        queries.last_claims(1_000)


def test_the_world_and_its_owners(sidecar, queries):
    sidecar.answers["GET", "world"] = [
        WorldNow(as_of=AS_OF, schema=1, partitions={"0": {"next_offset": 3}})
    ]
    sidecar.answers["GET", "t"] = [OwnersNow(as_of=AS_OF, owners={0: "host-a"})]
    found = queries.world(1_000)
    assert found == {"schema": 1, "partitions": {"0": {"next_offset": 3}}}
    assert queries.owners("t", 1_000) == {T0: "host-a"}
