"""Requests for offsets at most once: authorization, bounds and repeats."""

from types import SimpleNamespace

import attrs
import msgspec
import pytest
from changekit import Change
from enginekit import KEY, H, fold, of, owning, world
from grantkit import ref_of
from logkit import ident
from sidecarkit import Machine, having

from kafka_marshal.engine.proxy_grants import PendingGrant
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    CoordinationError,
)
from kafka_marshal.protocol.claiming import grant_secret
from kafka_marshal.protocol.granting import GrantRequest, GrantVerdict
from kafka_marshal.protocol.placement import by_partition, partition_of
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.types import Key, OffsetRange, Owner, TopicPartition
from kafka_marshal.remote import api
from kafka_marshal.remote.grants import decode_request, encode_request
from kafka_marshal.sidecar import grants as grants_module
from kafka_marshal.sidecar.grants import (
    GRANTEES_MAX,
    NUMBERS_MAX,
    IdempotencyCache,
    NumberedRequest,
    numbered_request,
)
from kafka_marshal.sidecar.http_errors import WRONG_SECRET

TASK = "7a" * 16
WRONG = "00" * 16


@pytest.fixture
def single():
    return Machine(world(records=(20,)))


def make_request(machine, client, **changes):
    """Return a request of a client, with changes."""
    owner = machine.service.groups[0].session.claimant.owner
    plain = api.GrantRequest(
        client_id=owner.client_id,
        incarnation=owner.incarnation.hex(),
        topic=KEY.topic,
        partition=KEY.partition,
        epoch=client.held[KEY][0],
        grantee=TASK,
        secret=client.secrets[KEY],
        first=0,
        last=4,
        timeout_ms=1_000,
    )
    return msgspec.structs.replace(plain, **changes)


def make_foreign_request(node):
    """Return a request of a task under the claim of another host."""
    ref = ref_of(node)
    return encode_request(
        ref.request(OffsetRange(0, 5), grantee=bytes.fromhex(TASK)),
        secret=bytes.fromhex(ref.secret),
        number=1,
        timeout_ms=1_000,
    )


def requests(machine, client_id="host-1"):
    return of(machine.cluster, client_id, ClaimingMessages)


# --- secrets


def test_the_holder_receives_the_secret_of_its_claim(single):
    a = having(single, count=1, delivery="amo")
    known = fold(single.cluster).keys[KEY]
    assert known.resume_hash is not None
    secret = grant_secret(known.resume_hash, KEY, epoch=known.epoch)
    assert a.secrets == {KEY: secret.hex()}
    assert single.service.grant("g", make_request(single, a)).outcome == "accepted"


def test_a_request_without_the_secret_is_refused():
    """Otherwise any reader of the log could have offsets granted far ahead."""
    machine = Machine(world(records=(0,)))
    a = having(machine, count=1, delivery="amo")
    far = make_request(machine, a, last=100_000)
    for ask in (
        msgspec.structs.replace(far, secret=WRONG),
        msgspec.structs.replace(far, secret=WRONG, request=1),
    ):
        with pytest.raises(ClaimRejected, match="secret of the claim") as caught:
            machine.service.grant("g", ask)
        assert (caught.value.reason, caught.value.holder) == (WRONG_SECRET, "host-1")
        with pytest.raises(ClaimRejected):
            machine.service.begin_grant(numbered_request("g", ask))
    assert not requests(machine)
    assert fold(machine.cluster).keys[KEY].granted is None


def test_each_claim_has_a_secret_of_its_own(single):
    a = having(single, count=1, delivery="amo")
    before, ask = a.secrets[KEY], make_request(single, a)
    a.give_back(KEY, timeout_ms=1_000)
    a = having(single, "b", count=1, delivery="amo")
    assert a.secrets[KEY] != before
    assert single.service.grant("g", ask).reason == "old_epoch"
    with pytest.raises(ClaimRejected):
        single.service.grant("g", make_request(single, a, secret=before))


def test_the_secret_works_for_claims_of_another_host(single):
    """A Spark task requests offsets here under the claim of a driver elsewhere."""
    node = owning(single.cluster, "driver")
    ask = make_foreign_request(node)
    assert single.service.grant("g", ask).last == 4
    with pytest.raises(ClaimRejected):
        single.service.grant("g", msgspec.structs.replace(ask, secret=WRONG))


def test_a_request_waits_briefly_for_an_unread_claim(single):
    single.cluster.nodes.remove(single.node)
    node = owning(single.cluster, "driver")
    single.cluster.nodes.append(single.node)
    ask = make_foreign_request(node)
    with pytest.raises(CoordinationError, match="not read the claim"):
        single.service.begin_grant(numbered_request("g", ask))
    assert single.service.grant("g", ask).last == 4


def test_a_request_for_an_unknown_claim_is_retriable(single):
    a = having(single, count=1, delivery="amo")
    ask = make_request(single, a, epoch=a.held[KEY][0] + 1_000)
    with pytest.raises(CoordinationError, match="ask again in a moment"):
        single.service.grant("g", ask)
    assert not requests(single)


def test_a_claim_without_a_resume_hash_is_granted_nothing(single):
    a = having(single, count=1, delivery="amo")
    context = single.node.engine.context
    context.replica_of(KEY).world.keys[KEY].resume_hash = None
    with pytest.raises(ClaimRejected):
        single.service.grant("g", make_request(single, a))


# --- claims that have ended


def test_a_request_under_an_ended_claim_is_answered_without_a_record(single):
    a = having(single, count=1, delivery="amo")
    ask = make_request(single, a)
    a.give_back(KEY, timeout_ms=1_000)
    single.cluster.run(H)
    for secret in (ask.secret, WRONG):
        late = msgspec.structs.replace(ask, secret=secret)
        got = single.service.grant("g", late)
        assert (got.outcome, got.first, got.offset) == ("ignored", None, None)
        assert got.reason in {"old_epoch", "not_owner"}
    assert not requests(single)


def test_a_repeat_is_answered_after_the_end_of_the_claim(single):
    a = having(single, count=1, delivery="amo")
    ask = make_request(single, a, request=1)
    first = single.service.grant("g", ask)
    a.give_back(KEY, timeout_ms=1_000, done=5)
    assert single.service.grant("g", ask) == first
    stranger = msgspec.structs.replace(ask, secret=WRONG)
    assert single.service.grant("g", stranger).first is None
    assert len(requests(single)) == 1


def test_a_repeat_needs_the_secret(single):
    a = having(single, count=1, delivery="amo")
    ask = make_request(single, a, request=1)
    single.service.grant("g", ask)
    with pytest.raises(ClaimRejected):
        single.service.grant("g", msgspec.structs.replace(ask, secret=WRONG))


# --- the end of the log


def test_offsets_beyond_the_end_are_not_granted(single):
    a = having(single, count=1, delivery="amo")
    with pytest.raises(ConfigurationError, match="whose log ends at 20") as caught:
        single.service.grant("g", make_request(single, a, last=20))
    assert caught.value.setting == "last"
    assert not requests(single)
    assert single.service.grant("g", make_request(single, a, last=19)).last == 19


def test_the_cluster_is_queried_only_beyond_the_known_end(single, monkeypatch):
    a = having(single, count=1, delivery="amo")
    asked, place = [], TopicPartition("t", 0)
    data = single.node.engine.context.ports.data
    plain = data.ends
    monkeypatch.setattr(
        data, "ends", lambda *given: asked.append(given) or plain(*given)
    )
    for last in (4, 9, 19):
        assert (
            single.service.grant("g", make_request(single, a, last=last)).last == last
        )
    assert [partitions for partitions, _ in asked] == [[place]]
    for number in range(20, 25):
        single.cluster.kafka.produce(place, b"%d" % number)
    assert single.service.grant("g", make_request(single, a, last=24)).last == 24
    assert len(asked) == 2


def test_without_an_answer_of_the_cluster_nothing_is_appended(single):
    a = having(single, count=1, delivery="amo")
    single.node.engine.context.ports.data.cut = True
    with pytest.raises(CoordinationError):
        single.service.grant("g", make_request(single, a))
    assert not requests(single)


def test_a_request_for_an_unknown_partition_is_retriable(single):
    """The metadata of a broker that has just started may lack it."""
    a = having(single, count=1, delivery="amo")
    ask = decode_request("g", make_request(single, a, topic="unknown"))
    with pytest.raises(CoordinationError, match="do not know partition") as caught:
        single.service._grants.require_end(ask, timeout_ms=100)
    assert caught.value.retriable


def test_the_cache_of_log_ends_is_bounded(single, monkeypatch):
    monkeypatch.setattr(grants_module, "ENDS_MAX", 2)
    a = having(single, count=1, delivery="amo")
    grants = single.service._grants
    for number in range(4):
        single.cluster.fill(f"other{number}", (5,))
        far = make_request(single, a, topic=f"other{number}")
        grants.require_end(decode_request("g", far), timeout_ms=100)
    assert [place for place, *_ in grants._ends] == [("other2", 0), ("other3", 0)]


def test_a_known_end_counts_only_under_its_claim(single):
    """Another claim may be of a topic that was created again, and is shorter."""
    a = having(single, count=1, delivery="amo")
    grants = single.service._grants
    ask = decode_request("g", make_request(single, a, last=19))
    grants.require_end(ask, timeout_ms=100)
    single.cluster.kafka.delete_topic("t")
    single.cluster.fill("t", (5,))
    later = attrs.evolve(ask, epoch=ask.epoch + 1)
    with pytest.raises(ConfigurationError, match="whose log ends at 5"):
        grants.require_end(later, timeout_ms=100)
    assert not grants.is_sendable(later)


# --- request numbers


class Requests:
    """Records the requests that are appended."""

    def __init__(self):
        self.pending = []

    def send(self, request, *, on_granted=None):
        self.pending.append(
            PendingGrant(
                request=request,
                sent_ms=0,
                append=SimpleNamespace(error=lambda: None),
                on_granted=on_granted,
            )
        )
        return self.pending[-1]


class Bench:
    """Sends numbered requests as a service does; records what is granted."""

    def __init__(self):
        self.requests = Requests()
        self.cache = IdempotencyCache(self.requests)
        self.noted, self.late = [], []

    def note(self, granted, *, is_late):
        (self.late if is_late else self.noted).append(granted)

    def ask(self, number=1, *, first=0, grantee=1, group="g", mark=None, secret=b"5e"):
        request = GrantRequest(
            key=Key(group, "t", 0),
            owner=Owner("host", bytes(16)),
            epoch=5,
            grantee=bytes([grantee % 256, grantee // 256]),
            first=first,
            last=first + 9,
            mark=mark,
        )
        asked = NumberedRequest(request=request, secret=secret, number=number)
        return self.cache.send(asked, note=self.note)

    def grant(self, pending):
        run = OffsetRange.through(pending.request.first, pending.request.last)
        pending.verdict = GrantVerdict(
            outcome="accepted", reason=None, granted=run, head=run.end, offset=40
        )
        pending.on_granted(run)


@pytest.fixture
def bench():
    return Bench()


def test_a_repeated_number_returns_the_same_request(bench):
    first = bench.ask(mark=3)
    assert bench.ask(mark=4) is first
    bench.grant(first)
    assert bench.ask() is first
    assert len(bench.requests.pending) == 1
    assert bench.noted == [OffsetRange(0, 10)]


def test_a_late_grant_is_recorded_for_the_repeated_request(bench):
    """Whether the verdict arrives before or after the repeat."""
    late, early = bench.ask(1), bench.ask(2, first=10)
    for each in (late, early):
        each.on_granted = each.on_late
    bench.grant(early)
    bench.ask(1)
    bench.ask(2, first=10)
    bench.grant(late)
    assert bench.noted == [OffsetRange(10, 20), OffsetRange(0, 10)]
    assert bench.late == [OffsetRange(10, 20)]


@pytest.mark.parametrize(
    "other",
    [{"number": 2}, {"grantee": 2}, {"group": "h"}, {"secret": b"6f"}],
    ids=str,
)
def test_a_request_that_differs_is_appended(bench, other):
    assert bench.ask() is not bench.ask(**other)
    assert len(bench.requests.pending) == 2


def test_each_request_without_a_number_is_appended(bench):
    assert bench.ask(None) is not bench.ask(None)


def test_a_number_reused_for_other_offsets_is_refused(bench):
    bench.ask()
    with pytest.raises(ConfigurationError, match="request number 1 was"):
        bench.ask(first=1)


def test_a_failed_append_is_repeated(bench):
    first = bench.ask()
    first.append.error = lambda: CoordinationError("no leader")
    second = bench.ask()
    assert second is not first
    assert bench.ask() is second


def test_a_failed_append_that_was_granted_answers_the_repeat(bench):
    first = bench.ask()
    first.append.error = lambda: CoordinationError("late")
    bench.grant(first)
    assert bench.ask() is first


def test_requests_per_grantee_are_bounded(bench):
    for number in range(NUMBERS_MAX + 1):
        bench.ask(number)
    count = len(bench.requests.pending)
    bench.ask(1)
    assert len(bench.requests.pending) == count
    bench.ask(0)
    assert len(bench.requests.pending) == count + 1


def test_grantees_are_bounded_by_last_use(bench):
    for grantee in range(GRANTEES_MAX):
        bench.ask(grantee=grantee)
    bench.ask(grantee=0)
    bench.ask(grantee=GRANTEES_MAX)
    count = len(bench.requests.pending)
    bench.ask(grantee=0)
    assert len(bench.requests.pending) == count
    bench.ask(grantee=1)
    assert len(bench.requests.pending) == count + 1


# --- while the partition count changes (PROTOCOL 10)


def test_a_claim_is_over_once_the_target_has_imported_its_key():
    change = Change(2, 4)
    (key,) = change.moving()
    change.place(key).append(
        b""
    )  # so that its epoch is above the offsets of the target
    (epoch,) = change.claimed(key)
    owner = Owner("c1", ident("c1"))
    request = GrantRequest(
        key=key, owner=owner, epoch=epoch, grantee=ident("task"), first=0, last=4
    )
    replicas = {t: SimpleNamespace(world=s) for t, s in enumerate(change.states)}

    def place(key):
        return replicas[partition_of(by_partition(change.states), key)]

    context = SimpleNamespace(replicas=replicas, replica_of=place, now_ms=0)
    grants = grants_module.Grants(context, requests=None, data=None)
    assert grants.has_read(request)
    assert not grants.is_over(request)
    change.fence()
    change.tick(3 * H)
    assert not grants.is_over(request), "the log refuses it as moving"
    change.imported(key)
    change.place(key).state.keys[key].owner = None
    assert grants.is_over(request)
    numbered = NumberedRequest(request=request, secret=b"", number=None)
    del change.place(key).state.keys[key]
    target = change.target(key)
    while target.state.next_offset <= epoch:
        assert not grants.has_read(request)
        target.append(b"")
    assert grants.has_read(request)
    pending = grants.send(numbered, note=lambda _, *, is_late: None)
    assert pending.verdict.reason == "not_owner"


def test_a_claim_in_the_source_is_over_even_if_the_target_has_its_epoch():
    """The log would grant it to the new claim, which did not ask for it."""
    change = Change(2, 4)
    (key,) = change.moving()
    source, target = change.place(key), change.target(key)
    (epoch,) = change.claimed(key)
    owner, before = Owner("c1", ident("c1")), source.state.token(key)
    replicas = {t: SimpleNamespace(world=s) for t, s in enumerate(change.states)}

    def place(key):
        return replicas[partition_of(by_partition(change.states), key)]

    context = SimpleNamespace(replicas=replicas, replica_of=place, now_ms=0)
    grants = grants_module.Grants(context, requests=None, data=None)

    def asked(token):
        return GrantRequest(
            key=key,
            owner=owner,
            epoch=epoch,
            grantee=ident("task"),
            first=0,
            last=4,
            token=token,
        )

    assert not grants.is_over(asked(before))
    later = before._replace(era=before.era + 1)
    assert not grants.is_over(asked(later))
    assert not grants.has_read(asked(later))
    numbered = NumberedRequest(request=asked(later), secret=b"", number=None)
    with pytest.raises(CoordinationError, match="has not read the claim"):
        grants.require_secret(numbered)
    change.fence()
    change.released(key)
    change.imported(key)
    known = target.state.keys[key]
    known.owner, known.epoch = owner, epoch
    now = target.state.token(key)
    assert (now.offset, now > before) == (epoch, True)
    assert not grants.is_over(asked(now))
    assert grants.is_over(asked(before))
    numbered = NumberedRequest(request=asked(before), secret=b"", number=None)
    pending = grants.send(numbered, note=lambda _, *, is_late: None)
    assert pending.verdict.reason == "not_owner"
