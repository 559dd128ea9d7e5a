"""Drains and cordons, as an admin writes them."""

import numpy as np
import pytest
from adminkit import InMemory
from enginekit import H, fold, lines, spec, world, write
from logkit import config, direct, ident

from kafka_marshal.admin import draining
from kafka_marshal.admin.draining import Draining
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    DeadlineExceeded,
    LogUnwritable,
)
from kafka_marshal.protocol.codec import person_of
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.records import Directive
from simulator.fakestore import AppendFate

K = 2
HOME = home_partition("g", partition_count=K)
FOR_MS = 30 * H


@pytest.fixture(name="cluster")
def _cluster():
    return world(partitions=K, records=(5,) * 4)


class DrainingAdmin(InMemory, Draining):
    """An admin that drains and cordons."""


def pair(cluster):
    a, b = (cluster.node(name, spec=spec()) for name in "ab")
    cluster.run_until(lambda: len(a.held) == len(b.held) == 2, 8 * H)
    return a, b


def host_of(cluster, name):
    members = fold(cluster, HOME).live_members("g")
    return next(m.record.host for m in members if m.record.client_id == name)


def written(cluster):
    return {
        t: [x.record for x in lines(cluster, t) if isinstance(x.record, Directive)]
        for t in range(K)
    }


def test_a_drain_waits_until_the_client_holds_no_keys(cluster):
    a, b = pair(cluster)
    counts = []
    result = DrainingAdmin(cluster, person="ada").drain(
        "a",
        group_id="g",
        for_ms=FOR_MS,
        reason="reboot",
        wait_ms=9 * H,
        on_progress=counts.append,
    )
    assert (result.held, result.members, result.action) == ((), (("g", "a"),), "drain")
    assert not a.held
    cluster.run_until(lambda: len(b.held) == 4, H)
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (2, 0)
    found = written(cluster)
    (record,) = found[HOME]
    assert found[1 - HOME] == []
    assert (record.reason, person_of(record)) == ("reboot", "ada")
    assert record.op_id.hex() == result.operation
    (standing,) = fold(cluster, HOME).groups["g"].directives
    assert standing.until_ms == result.until_ms


def test_numpy_arguments_are_written_as_python_values(cluster):
    """A record with values of numpy cannot be encoded."""
    a, _ = pair(cluster)
    admin = DrainingAdmin(cluster)
    result = admin.drain(
        np.str_("a"),
        group_id=np.str_("g"),
        for_ms=np.int64(FOR_MS),
        reason=np.str_("reboot"),
    )
    (record,) = written(cluster)[HOME]
    assert (record.client, record.reason) == ("a", "reboot")
    assert type(result.until_ms) is int
    assert admin.uncordon(np.str_("a"), operation=np.str_(result.operation)) == 1
    assert a.engine.failure is None


def test_a_reason_that_is_too_long_is_refused_before_any_write(cluster):
    pair(cluster)
    with pytest.raises(ConfigurationError, match="give a shorter one"):
        DrainingAdmin(cluster).drain("a", for_ms=FOR_MS, reason="x" * 1_025)
    assert written(cluster) == {t: [] for t in range(K)}


def test_a_drain_of_a_host_is_written_to_every_partition(cluster):
    a, _ = pair(cluster)
    admin = DrainingAdmin(cluster)
    host = host_of(cluster, "a")
    assert host != host_of(cluster, "b")
    counts = []
    result = admin.drain(
        host=host, for_ms=FOR_MS, wait_ms=9 * H, on_progress=counts.append
    )
    assert [len(each) for each in written(cluster).values()] == [1] * K
    assert (result.members, result.held) == ((("g", "a"),), ())
    assert (counts[0], counts[-1]) == (2, 0)
    assert str(result.subject) == f"host {host!r}"
    assert not a.held


def test_a_drain_without_a_wait_returns_the_held_keys(cluster):
    pair(cluster)
    result = DrainingAdmin(cluster).drain("a", for_ms=FOR_MS)
    assert len(result.held) == 2
    assert str(result.subject) == "client 'a'"


def test_a_dry_run_writes_nothing_and_does_not_wait(cluster):
    pair(cluster)
    admin = DrainingAdmin(cluster)
    for act, wait in ((admin.drain, {"wait_ms": 9 * H}), (admin.cordon, {})):
        result = act("a", for_ms=FOR_MS, dry_run=True, **wait)
        assert (result.operation, result.members) == ("", (("g", "a"),))
        assert len(result.held) == 2
        assert result.until_ms == admin._clock.wall_ms() + FOR_MS
        with pytest.raises(ConfigurationError, match="lasts 1ms to 1d, not 0ms"):
            act("a", for_ms=0, dry_run=True)
        with pytest.raises(ConfigurationError, match="whole number"):
            act("a", for_ms="1h", dry_run=True)
        with pytest.raises(ClaimRejected, match="no live member"):
            act("nobody", for_ms=FOR_MS, dry_run=True)
    assert written(cluster) == {t: [] for t in range(K)}


def test_a_dry_run_with_a_late_clock_shows_an_end_by_append_time(cluster):
    pair(cluster)
    admin = DrainingAdmin(cluster)
    admin._clock = cluster.clock.view(wall_offset_ms=-100 * H)
    until_ms = admin.drain("a", for_ms=FOR_MS, dry_run=True).until_ms
    last_ms = max(fold(cluster, t).append_time_ms for t in range(K))
    assert until_ms == last_ms + FOR_MS


def test_in_an_idle_log_the_directive_shows_which_members_are_dead(cluster):
    for node in pair(cluster):
        cluster.crash(node)
    cluster.run(3 * H)
    shown = DrainingAdmin(cluster).drain("a", for_ms=FOR_MS, dry_run=True)
    assert (shown.members, len(shown.held)) == ((("g", "a"),), 2), "by log time"
    result = DrainingAdmin(cluster).drain("a", for_ms=FOR_MS, wait_ms=H)
    assert (result.members, result.held) == ((), ())
    assert cluster.clock.wall_ms() < result.until_ms - FOR_MS + H, "nothing to wait for"


def test_a_wait_ends_at_its_time_if_no_other_member_takes_the_keys(cluster):
    a = cluster.node("a", spec=spec())
    cluster.run_until(lambda: len(a.held) == 4, 3 * H)
    result = DrainingAdmin(cluster).drain("a", for_ms=FOR_MS, wait_ms=2 * H)
    assert len(result.held) == 4, "nor is the claim of the planner among them"


def test_an_uncordon_ends_a_drain_and_keys_are_shared_again(cluster):
    a, b = pair(cluster)
    admin = DrainingAdmin(cluster)
    result = admin.drain("a", for_ms=FOR_MS, wait_ms=9 * H)
    assert not a.held
    assert admin.uncordon("a", dry_run=True) == K
    assert sum(map(len, written(cluster).values())) == K
    assert DrainingAdmin(cluster, "other").uncordon(operation=result.operation) == K
    cluster.run_until(lambda: len(a.held) == len(b.held) == 2, 8 * H)
    with pytest.raises(
        ClaimRejected, match="no drain or cordon of operation"
    ) as caught:
        admin.uncordon(operation=result.operation)
    assert caught.value.reason == "not_directed"
    with pytest.raises(ClaimRejected, match="is over; leave --operation out"):
        admin.drain("a", for_ms=FOR_MS, operation=result.operation)


def test_a_cordoned_client_keeps_its_keys_and_claims_no_others(cluster):
    a, b = pair(cluster)
    result = DrainingAdmin(cluster).cordon("a", group_id="g", for_ms=FOR_MS)
    assert (result.action, len(result.held)) == ("cordon", 2)
    cluster.crash(b)
    cluster.run(6 * H)
    assert len(a.held) == 2
    assert str(result.subject) == "client 'a' in group 'g'"


def test_an_interrupted_drain_is_completed_and_extended(cluster):
    pair(cluster)
    until_ms = cluster.clock.wall_ms() + FOR_MS
    op = ident("torn")
    write(cluster, direct("a", until=until_ms, group="marshal", op=op), 0)
    admin = DrainingAdmin(cluster)
    admin.drain("a", for_ms=2 * FOR_MS, operation=op.hex())
    for t in range(K):
        (standing,) = fold(cluster, t).groups["marshal"].directives
        assert standing.until_ms > until_ms, "and extended"
    with pytest.raises(ClaimRejected, match="begun with other arguments") as caught:
        admin.cordon("a", for_ms=FOR_MS, operation=op.hex())
    assert caught.value.reason == "busy"


def test_an_uncordon_ends_directives_by_client_group_or_host(cluster):
    pair(cluster)
    admin = DrainingAdmin(cluster)
    for action in (admin.drain, admin.cordon):
        action("a", for_ms=FOR_MS)
    admin.cordon("a", group_id="g", for_ms=FOR_MS)
    admin.cordon("b", for_ms=FOR_MS)
    admin.cordon(host=host_of(cluster, "a"), for_ms=FOR_MS)
    with pytest.raises(ClaimRejected, match="no drain or cordon of client 'c' is in"):
        admin.uncordon("c")
    with pytest.raises(ClaimRejected, match="of client 'a' in group 'h' is in force"):
        admin.uncordon("a", group_id="h")
    assert admin.uncordon("a", group_id="g") == 1
    assert admin.uncordon("a") == K  # the drain and the cordon, in each
    assert admin.uncordon(host=host_of(cluster, "a")) == K
    left = [each for t in range(K) for each in fold(cluster, t).directed]
    assert {group for group, _ in left} == {"marshal"}
    assert admin.uncordon("b") == K
    assert not any(fold(cluster, t).directed for t in range(K))
    with pytest.raises(ConfigurationError, match="name either a client, or a host"):
        admin.uncordon()


def test_an_uncordon_ends_a_directive_that_only_one_partition_has(cluster):
    op = ident("torn")
    until_ms = cluster.clock.wall_ms() + FOR_MS
    write(cluster, direct("a", until=until_ms, group="marshal", op=op), 1)
    assert DrainingAdmin(cluster).uncordon(operation=op.hex(), reason="done") == 1
    assert not fold(cluster, 1).directed


def test_a_drain_that_matches_no_live_member_is_refused(cluster):
    a, b = pair(cluster)
    admin = DrainingAdmin(cluster)
    for words in ({"client_id": "c"}, {"client_id": "a", "group_id": "h"}):
        with pytest.raises(
            ClaimRejected, match="no live member matches client"
        ) as caught:
            admin.drain(**words, for_ms=FOR_MS)
        assert caught.value.reason == "unknown_client"
    a.leave()
    cluster.run_until(lambda: a.has_left, H)
    with pytest.raises(ClaimRejected):
        admin.drain("a", for_ms=FOR_MS)
    cluster.crash(b)
    cluster.run(2 * H + H // 3)
    with pytest.raises(ClaimRejected):
        admin.drain("b", for_ms=FOR_MS)
    assert not any(written(cluster).values())


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        pytest.param({}, "client_id", id="nobody"),
        pytest.param({"client_id": "a", "host": "h"}, "client_id", id="both"),
        pytest.param({"client_id": "../a"}, "client_id", id="client"),
        pytest.param({"client_id": "a", "group_id": "a b"}, "group_id", id="group"),
        pytest.param({"host": ""}, "host", id="no-host"),
        pytest.param({"host": 5}, "host", id="number"),
        pytest.param({"host": "h" * 256}, "host", id="long-host"),
        pytest.param({"client_id": "a", "group_id": "marshal"}, "group_id", id="own"),
        pytest.param({"client_id": "a", "for_ms": 0}, "for_ms", id="short"),
        pytest.param({"client_id": "a", "for_ms": 10**9}, "for_ms", id="long"),
        pytest.param({"client_id": "a", "operation": "x"}, "operation", id="op"),
    ],
)
def test_invalid_arguments_are_refused_before_any_write(cluster, words, setting):
    pair(cluster)
    with pytest.raises(ConfigurationError) as caught:
        DrainingAdmin(cluster).drain(**{"for_ms": FOR_MS, **words})
    assert caught.value.setting == setting
    assert not any(written(cluster).values())


def test_a_drain_below_level_2_is_refused(cluster):
    admin = DrainingAdmin(cluster)
    admin._settled = lambda: config(level=1)
    with pytest.raises(ConfigurationError, match="marshal topic upgrade"):
        admin.drain("a", for_ms=FOR_MS)


def test_a_directive_beyond_the_limit_is_refused(cluster):
    pair(cluster)
    until_ms = cluster.clock.wall_ms() + FOR_MS
    for number in range(64):
        write(
            cluster, direct(f"x{number}", until=until_ms, op=bytes([number] * 16)), HOME
        )
    with pytest.raises(ClaimRejected, match="there are too many directives") as caught:
        DrainingAdmin(cluster).drain("a", group_id="g", for_ms=FOR_MS)
    assert caught.value.reason == "limits"


def test_a_directive_that_expires_before_it_is_appended_is_refused(cluster):
    pair(cluster)
    admin = DrainingAdmin(cluster)
    append = admin.follower.append

    def late(*words):
        cluster.run(50)
        return append(*words)

    admin.follower.append = late
    with pytest.raises(ClaimRejected, match="choose a longer time") as caught:
        admin.drain("a", for_ms=1)
    assert caught.value.reason == "expired"


def test_an_unexpected_refusal_of_a_directive_is_an_error(cluster, monkeypatch):
    pair(cluster)
    admin = DrainingAdmin(cluster)
    result = admin.drain("a", group_id="g", for_ms=FOR_MS)
    admin._sender._seq = 0
    with pytest.raises(LogUnwritable, match=r"the end of the directive \(old_seq\)"):
        admin.uncordon(operation=result.operation)
    monkeypatch.setattr(draining, "home_partition", lambda *_, **__: 1 - HOME)
    with pytest.raises(LogUnwritable, match=r"directive \(wrong_partition\)"):
        admin.drain("a", group_id="g", for_ms=FOR_MS)


def test_a_drain_without_an_answer_names_its_operation(cluster):
    pair(cluster)
    admin = DrainingAdmin(cluster)
    cluster.fates["admin"] = AppendFate(is_lost=True)
    with pytest.raises(DeadlineExceeded, match=r"with the operation [0-9a-f]"):
        admin.drain("a", for_ms=FOR_MS)
