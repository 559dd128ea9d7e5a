"""Fences of a client's processes in all partitions, as an admin writes them."""

import pytest
from adminkit import InMemory
from enginekit import H, fold, held_by, lines, spec, world, write
from logkit import claim, config, fence, ident

from kafka_marshal.admin.fencing import (
    ClientProcess,
    FenceResult,
    Fencing,
    require_fencing,
)
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    DeadlineExceeded,
    LogUnwritable,
)
from kafka_marshal.protocol.codec import person_of
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.records import FencingClient
from kafka_marshal.protocol.types import Key
from simulator.fakestore import AppendFate

K = 4
HOME = home_partition("g", partition_count=K)
OWNER = ("g", "a")
PROCESS = ClientProcess(
    incarnation="ab" * 16,
    host=None,
    is_announced=True,
    owned=(),
    fenced={},
    is_fenced=False,
)


@pytest.fixture(name="cluster")
def _cluster():
    return world(partitions=K, records=(5,) * 6, groups=3)


def owning(cluster, name="a"):
    node = cluster.node(name, spec=spec())
    cluster.run_until(held_by(node, 6), 3 * H)
    cluster.run(40)
    return node


class FencingAdmin(InMemory, Fencing):
    """An admin that fences client a of group g."""

    def processes(self):
        return self.client_processes(*OWNER)

    def fence(self, incarnations=None):
        result = self.fence_client(*OWNER, incarnations=incarnations, reason="hung")
        return result.is_changed


def fences(cluster):
    return {
        t: [
            line for line in lines(cluster, t) if isinstance(line.record, FencingClient)
        ]
        for t in range(K)
    }


def test_a_process_is_fenced_in_all_partitions(cluster):
    a = owning(cluster)
    assert FencingAdmin(cluster, person="alice").fence()
    found = fences(cluster)
    assert [len(found[t]) for t in range(K)] == [1] * K
    for (line,) in found.values():
        assert line.record.fenced_incarnation == a.owner.incarnation
        assert (line.record.reason, person_of(line.record)) == ("hung", "alice")


def test_the_result_names_the_host_of_a_fenced_process(cluster):
    owning(cluster)
    admin = FencingAdmin(cluster)
    (before,) = admin.processes()
    (fenced,) = admin.fence_client(*OWNER).processes
    assert (fenced.is_fenced, fenced.host) == (True, before.host)
    assert before.host is not None


def test_a_fenced_process_that_is_healthy_releases_its_keys(cluster):
    a = owning(cluster)
    admin = FencingAdmin(cluster)
    (before,) = admin.processes()
    assert (len(before.owned), before.is_announced, before.is_live) == (6, True, True)
    assert not before.is_fenced
    admin.fence()
    cluster.run(H // 4)
    assert a.held == {}
    (after,) = admin.processes()
    assert (after.owned, after.is_live, after.is_fenced) == ((), False, True)
    assert sorted(after.fenced) == list(range(K))


def test_a_fenced_process_that_hangs_holds_keys_until_they_are_stale(cluster):
    a = owning(cluster)
    admin = FencingAdmin(cluster)
    a.cut(is_cut=True)
    admin.fence()
    (process,) = admin.processes()
    assert len(process.held) == 6
    assert all(0 < each.remaining_ms <= 2 * H + 1 for each in process.held)
    result = FenceResult(
        group_id="g", client_id="a", is_changed=True, processes=(process,)
    )
    assert result.held == process.held
    cluster.run(2 * H + 40)
    (process,) = admin.processes()
    assert (len(process.owned), process.held, process.is_live) == (6, (), False)


def test_a_second_fence_writes_nothing(cluster):
    owning(cluster)
    admin = FencingAdmin(cluster)
    assert admin.fence()
    cluster.run(H)
    before = {t: fold(cluster, t).next_offset for t in range(K)}
    assert not admin.fence()
    assert not FencingAdmin(cluster, "another").fence()
    assert {t: fold(cluster, t).next_offset for t in range(K)} == before


def test_a_fence_that_was_interrupted_is_completed(cluster):
    a = owning(cluster)
    a.cut(is_cut=True)
    write(cluster, fence("a", inc=a.owner.incarnation), HOME)
    admin = FencingAdmin(cluster)
    (process,) = admin.processes()
    assert (list(process.fenced), process.is_fenced) == ([HOME], False)
    assert admin.fence()
    assert [len(each) for each in fences(cluster).values()] == [1] * K


def test_a_fence_of_one_incarnation_leaves_other_processes_alone(cluster):
    owning(cluster)
    admin = FencingAdmin(cluster)
    admin.fence()
    cluster.run(H)
    again = owning(cluster)
    (first,) = [p.incarnation for p in admin.processes() if p.is_fenced]
    assert not admin.fence([first])
    assert again.session.failure is None
    assert admin.fence()
    cluster.run(H)
    assert again.held == {}


@pytest.mark.parametrize(
    ("known", "incarnations", "text"),
    [
        pytest.param(False, None, "knows no client 'a' in group 'g'", id="client"),
        pytest.param(True, ["00" * 16], "knows no process '0000", id="process"),
    ],
)
def test_a_fence_of_an_unknown_client_or_process_is_refused(
    cluster, known, incarnations, text
):
    if known:
        owning(cluster)
    with pytest.raises(ClaimRejected, match=text) as caught:
        FencingAdmin(cluster).fence(incarnations)
    assert caught.value.reason == "unknown_client"
    assert "fence the sidecar" in str(caught.value)
    assert not any(fences(cluster).values())


def test_a_process_without_keys_is_live_for_two_intervals(cluster):
    """The command asks for confirmation before it fences a live process."""
    a, _ = cluster.node("a"), cluster.node("b")  # records of b advance log time
    cluster.run(H)
    (idle,) = FencingAdmin(cluster).processes()
    assert (idle.owned, idle.is_announced, idle.is_live) == ((), True, True)
    cluster.crash(a)
    cluster.run(H)
    (silent,) = FencingAdmin(cluster).processes()
    assert silent.is_live
    cluster.run(H + H // 3)
    assert FencingAdmin(cluster).processes() == ()


def test_in_an_idle_log_only_the_wall_clock_shows_a_dead_process(cluster):
    a = owning(cluster)
    (process,) = FencingAdmin(cluster).processes()
    assert (process.is_live, process.is_silent) == (True, False)
    cluster.crash(a)
    cluster.run(3 * H)
    admin = FencingAdmin(cluster)
    (process,) = admin.processes()
    assert (process.is_live, process.is_silent) == (True, True)
    admin.fence()
    (process,) = admin.processes()
    assert not process.is_live, "the fences moved log time"
    assert process.is_silent


def test_a_client_that_has_left_is_not_fenced(cluster):
    a = owning(cluster)
    a.leave()
    cluster.run_until(lambda: a.has_left, H)
    (process,) = FencingAdmin(cluster).processes()
    assert not process.is_live
    assert not FencingAdmin(cluster).fence()


def test_an_owner_that_never_announced_itself_is_listed(cluster):
    key = Key("g", "t", 0)
    for t in range(K):
        write(cluster, claim("a", key=key), t)
    admin = FencingAdmin(cluster)
    (process,) = admin.processes()
    assert (process.host, process.is_announced) == (None, False)
    assert process.incarnation == ident("a").hex()
    assert [each.key for each in process.owned] == [key]


def test_a_fence_that_the_home_refuses_is_written_to_no_other_partition(cluster):
    for number in range(3):
        write(cluster, fence(f"x{number}", group=f"full-{number}"), HOME)
    admin = FencingAdmin(cluster)
    admin._read()
    with pytest.raises(
        LogUnwritable, match=r"refused the fence of client 'a' \(limits\)"
    ):
        admin._write_fences([PROCESS], OWNER, count=K, reason=None)
    assert not any(found for t, found in fences(cluster).items() if t != HOME)


def test_a_fence_without_an_answer_ends_at_its_deadline(cluster):
    owning(cluster)
    admin = FencingAdmin(cluster)
    cluster.fates["admin"] = AppendFate(is_lost=True)
    with pytest.raises(DeadlineExceeded):
        admin.fence()


def test_a_fence_in_group_marshal_or_below_level_2_is_refused():
    require_fencing("g", config(level=2))
    with pytest.raises(ConfigurationError, match="owns nothing but checkpoints"):
        require_fencing("marshal", config(level=2))
    with pytest.raises(ConfigurationError, match="marshal topic upgrade"):
        require_fencing("g", config(level=1))
