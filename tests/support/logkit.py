"""Small logs for tests: records with defaults, and a log that folds as it grows.

Every record has the same sender by default, so that a test names only the fields that
matter to it.
"""

from collections.abc import Iterable
from hashlib import sha256

from msgspec import UNSET

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.items import Lock
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    CheckpointBegin,
    CheckpointChunk,
    CheckpointEnd,
    ClaimingMessages,
    ClaimingPartition,
    Config,
    DataGrowth,
    DecidePosition,
    Directive,
    FencingClient,
    ForgettingPartition,
    GroupSettings,
    HandoffOffer,
    HandoffReady,
    Heartbeat,
    ImportedDirective,
    ImportedKey,
    ImportedPrevious,
    ImportedSettings,
    LayoutDone,
    LayoutFence,
    LayoutFinal,
    LayoutGroups,
    LayoutImport,
    Limits,
    Member,
    PauseGroup,
    Plan,
    PlannedMember,
    PlannedTopic,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Reset,
    ResolvePosition,
    Resume,
    ScopedTopic,
    StagedTopic,
    StagePosition,
)
from kafka_marshal.protocol.settings import Settings
from kafka_marshal.protocol.state import KeyState, Transition, Transitions, WorldState
from kafka_marshal.protocol.types import Key, LogEntry

H = 1_000
START_MS = 1_000_000
CREATE_TIME = 0
LOG_APPEND_TIME = 1

KEY = Key("g", "t", 0)
NO_LIMITS = Limits(**dict.fromkeys(Limits.__struct_fields__))


def ident(name: str) -> bytes:
    """Return 16 bytes that are readable in the output of a failure."""
    return name.encode().ljust(16, b".")


INC = ident("c1")
INC_AGAIN = ident("c1 again")
FORMAT_ID = ident("format")
SECRET = ident("secret")
OP = ident("op")
PLAN = ident("plan")
LOCK = Lock(OP, PLAN, 4, None)


def hashed(secret: bytes) -> bytes:
    return sha256(secret).digest()


def limits(**values):
    return Limits(
        **{name: values.pop(name, None) for name in Limits.__struct_fields__}, **values
    )


def sender(client, group="g", *, inc=None, seq=0):
    """Return the *sender* fields, with which every record begins."""
    return {
        "client_id": client,
        "group_id": group,
        "incarnation": ident(client) if inc is None else inc,
        "seq": seq,
    }


def transition(effect=None, *, outcome=None, **fields):
    """Return a transition: accepted if it has an effect, else refused."""
    absent = dict.fromkeys(("reason", "detail", "record"))
    usual = absent | {"offset": 0, "key": KEY, "epoch": 0}
    outcome = outcome or ("accepted" if effect else "refused")
    return Transition(effect=effect, outcome=outcome, **(usual | fields))


def config(
    generation=1,
    *,
    format_id=FORMAT_ID,
    era=1,
    cluster_id="cluster",
    h=H,
    k=1,
    level=1,
    **bounds,
):
    return Config(
        generation=generation,
        format_id=format_id,
        era=era,
        cluster_id=cluster_id,
        heartbeat_interval_ms=h,
        partition_count=k,
        feature_level=level,
        limits=limits(**bounds),
    )


def claim(
    client="c1",
    *,
    key=KEY,
    inc=None,
    seq=0,
    generation=1,
    topic_id=None,
    resume_hash=None,
    expected=None,
    resume=None,
):
    return ClaimingPartition(
        **sender(client, key.group_id, inc=inc, seq=seq),
        generation=generation,
        topic=key.topic,
        partition=key.partition,
        topic_id=topic_id,
        resume_hash=resume_hash,
        expected_epoch=expected,
        resume=resume,
    )


def resume(epoch, *, client="c1", inc=INC_AGAIN, before=INC, secret=SECRET, **rest):
    past = Resume(before, epoch, secret)
    return claim(client, inc=inc, resume=past, **rest)


def beat(epoch, position=None, *, client="c1", key=KEY, inc=None, seq=0, rewind=False):
    return Heartbeat(
        **sender(client, key.group_id, inc=inc, seq=seq),
        topic=key.topic,
        partition=key.partition,
        epoch=epoch,
        position=position,
        rewind=rewind,
    )


def batch(*beats, client="c1", group="g", inc=None, seq=0):
    inc = ident(client) if inc is None else inc
    return BatchHeartbeat(
        client_id=client, group_id=group, incarnation=inc, seq=seq, beats=beats
    )


def release(
    epoch,
    position=None,
    *,
    client="c1",
    key=KEY,
    inc=None,
    seq=0,
    successor=None,
    reason=None,
):
    return ReleasingPartition(
        **sender(client, key.group_id, inc=inc, seq=seq),
        topic=key.topic,
        partition=key.partition,
        epoch=epoch,
        position=position,
        successor=successor,
        reason=reason,
    )


def forgetting(epoch, *, client="admin", key=KEY):
    group, topic, partition = key
    return ForgettingPartition(
        **sender(client, group),
        topic=topic,
        partition=partition,
        epoch=epoch,
    )


def messages(epoch, first, last, *, client="c1", key=KEY, inc=None, seq=0):
    return ClaimingMessages(
        **sender(client, key.group_id, inc=inc, seq=seq),
        topic=key.topic,
        partition=key.partition,
        epoch=epoch,
        grantee=ident("grantee"),
        first=first,
        proposed_last_offset=last,
    )


def pause(until, *, op=OP, group="g", client="admin", inc=None, seq=0):
    return ReleaseGroup(
        **sender(client, group, inc=inc, seq=seq),
        op_id=op,
        msg_expire_time=until,
        reason=None,
    )


def schedule(begin, until, *, op=OP, group="g", client="admin", seq=0, scope=None):
    """Return a PauseGroup record; a scope maps topics to partitions."""
    return PauseGroup(
        **sender(client, group, seq=seq),
        op_id=op,
        begin_time=begin,
        msg_expire_time=until,
        scope=scope_of(scope),
        reason=None,
    )


def scope_of(scope):
    """Return the scope of a record: a map of topics to partitions, () for all."""
    if scope is None:
        return None
    return tuple(ScopedTopic(name, tuple(scope[name])) for name in sorted(scope))


def stage(
    *positions, topic="t", topic_id=None, op=OP, plan=PLAN, client="admin", tags=UNSET
):
    """Return a StagePosition of one topic, from pairs of partition and position."""
    return StagePosition(
        **sender(client, "g", seq=1),
        op_id=op,
        plan_digest=plan,
        topics=(StagedTopic(topic, topic_id, positions),),
        tags=tags,
    )


def decide(key_count=1, *, op=OP, plan=PLAN, group="g"):
    return DecidePosition(
        **sender("admin", group, seq=2),
        op_id=op,
        plan_digest=plan,
        key_count=key_count,
    )


def resolve(*, commit, op=OP, group="g", client="admin"):
    return ResolvePosition(
        **sender(client, group, seq=3),
        op_id=op,
        commit=commit,
        decided=9 if commit else None,
        reason=None,
    )


def fence(client="c1", *, inc=None, group="g", admin="admin", reason=None):
    return FencingClient(
        **sender(admin, group, seq=4),
        fenced=client,
        fenced_incarnation=ident(client) if inc is None else inc,
        reason=reason,
    )


def direct(
    client="c1",
    *,
    host=None,
    action="drain",
    until=2**62,
    op=OP,
    group="g",
    admin="admin",
    inc=None,
    seq=0,
):
    """Return a Directive for a client, or for a host."""
    return Directive(
        **sender(admin, group, inc=inc, seq=seq),
        op_id=op,
        client=None if host else client,
        host=host,
        action=action,
        msg_expire_time=until,
        reason=None,
    )


def settings(generation=1, *, group="g", admin="admin", reason=None, **values):
    names = ("policy", "planner_version_max", "debounce_ms", "handoff_ms")
    names = (*names, "handoffs_max", "grace_ms")
    return GroupSettings(
        **sender(admin, group, seq=5),
        generation=generation,
        reason=reason,
        **(dict.fromkeys(names) | values),
    )


def planned(
    follows=0,
    *moves,
    group="g",
    client="c1",
    number=0,
    count=1,
    topics=(("t", 3),),
    vector=((0, 0),),
    digest=OP,
    version=1,
):
    """Return a Plan; a move is a client, the number of a topic, and its partitions."""
    return Plan(
        **sender(client, group),
        follows=follows,
        number=number,
        slice_count=count,
        planner_version=version,
        vector=tuple(vector),
        input_digest=digest,
        topics=tuple(PlannedTopic(*each) for each in topics),
        moves=tuple(
            PlannedMember(name, ((topic, tuple(partitions)),))
            for name, topic, partitions in moves
        ),
    )


def offer(epoch, to="c2", *, within_ms=H, key=KEY, client="c1", inc=None, seq=0):
    return HandoffOffer(
        **sender(client, key.group_id, inc=inc, seq=seq),
        topic=key.topic,
        partition=key.partition,
        epoch=epoch,
        successor=to,
        within_ms=within_ms,
    )


def ready(epoch, *, key=KEY, client="c2", inc=None, seq=0):
    return HandoffReady(
        **sender(client, key.group_id, inc=inc, seq=seq),
        topic=key.topic,
        partition=key.partition,
        epoch=epoch,
    )


def _operation(op):
    return {**sender("admin", "marshal"), "op_id": op}


def growth(new=8, old=4, *, topic="t", topic_id=None, ends=None, seq=0, reason=None):
    """Return a DataGrowth: an announcement, or with ``ends`` the end of a growth."""
    return DataGrowth(
        **sender("admin", "marshal", seq=seq),
        topic=topic,
        topic_id=topic_id,
        old_count=old,
        new_count=new,
        ends=ends,
        reason=reason,
    )


def layout_fence(k, before=1, *, generation=2, era=2, op=OP, level=2, **settings):
    """Return a fence that changes the partition count to ``k``."""
    frame = encode(config(generation, era=era, k=k, level=level, **settings))
    return LayoutFence(**_operation(op), from_count=before, config=frame)


def imported(key=KEY, position=None, granted=None, **rest):
    """Return an ImportedKey."""
    fields = {"topic_id": None, "retired_topic_ids": (), "previous": None}
    return ImportedKey(
        **key._asdict(),
        position=position,
        granted=granted,
        **(fields | {"successor": None} | rest),
    )


def layout_import(*items, source=0, op=OP):
    return LayoutImport(
        **_operation(op), source=source, source_offset=9, items=items or (imported(),)
    )


def imported_settings(group="g", generation=1, **values):
    given = dict.fromkeys(Settings._fields[1:]) | values
    return ImportedSettings(group_id=group, generation=generation, **given)


def imported_directive(group="g", *, op=OP, until=START_MS + 9 * H, **named):
    """Return an ImportedDirective; by default it drains host h1."""
    given = {"client": None, "host": None if "client" in named else "h1"} | named
    return ImportedDirective(
        group_id=group,
        op_id=op,
        client_id="admin",
        incarnation=ident("admin"),
        seq=0,
        until_ms=until,
        action="drain",
        **given,
    )


def layout_groups(*items, source=0, op=OP):
    """Return a LayoutGroups record, from imported settings and directives."""
    settings = tuple(each for each in items if isinstance(each, ImportedSettings))
    directives = tuple(each for each in items if isinstance(each, ImportedDirective))
    return LayoutGroups(
        **_operation(op),
        source=source,
        source_offset=9,
        settings=settings,
        directives=directives,
    )


def layout_done(key_count=1, *, source=0, op=OP):
    return LayoutDone(
        **_operation(op),
        source=source,
        source_offset=9,
        key_count=key_count,
        digest=ident("items"),
    )


def layout_final(op=OP):
    return LayoutFinal(**_operation(op))


def member(client="c1", *, group="g", inc=None, seq=0, plan_generation=None, **given):
    """Return a Member record; other fields by name."""
    given = {"topics": ("t",), "host": "host", "capacity": 1, "labels": {}} | given
    return Member(
        **sender(client, group, inc=inc, seq=seq),
        topics=given["topics"],
        host=given["host"],
        capacity=given["capacity"],
        load=0,
        labels=given["labels"],
        draining=given.get("draining", False),
        feature_level_max=1,
        plan_generation=plan_generation,
    )


CHECKPOINT = ident("checkpoint")
DIGEST = ident("digest")


def begin(epoch=0, *, client="c1", inc=None, seq=0, checkpoint=CHECKPOINT):
    return CheckpointBegin(
        **sender(client, "marshal", inc=inc, seq=seq),
        epoch=epoch,
        checkpoint_id=checkpoint,
    )


def chunk(data, number=0, *, epoch=0, client="c1", seq=0, checkpoint=CHECKPOINT):
    return CheckpointChunk(
        **sender(client, "marshal", seq=seq),
        epoch=epoch,
        checkpoint_id=checkpoint,
        number=number,
        data=data,
    )


def finish(
    begin_offset,
    *,
    epoch=0,
    leader_epoch=0,
    parts=1,
    size=1,
    digest=DIGEST,
    client="c1",
    seq=0,
    checkpoint=CHECKPOINT,
):
    return CheckpointEnd(
        **sender(client, "marshal", seq=seq),
        epoch=epoch,
        checkpoint_id=checkpoint,
        begin_offset=begin_offset,
        begin_leader_epoch=leader_epoch,
        part_count=parts,
        size_bytes=size,
        digest=digest,
    )


def resets(value, digest, *, bytes_max=100, op=OP, client="admin"):
    """Return the Reset records that replace a state by these canonical bytes."""
    parts = [value[at : at + bytes_max] for at in range(0, len(value), bytes_max)]
    return [
        Reset(
            **sender(client, "marshal", seq=number),
            op_id=op,
            number=number,
            part_count=len(parts),
            size_bytes=len(value),
            digest=bytes.fromhex(digest),
            data=part,
        )
        for number, part in enumerate(parts)
    ]


class Log:
    """The log of one coordinating partition, and its folded state.

    Time passes only through arguments: ``after`` adds to the last append time, ``at``
    sets it.
    """

    def __init__(self, partition=0, *, configured=True, **settings):
        self.state = WorldState(partition)
        self.entries = []
        self.now_ms = START_MS
        self.leader_epoch = 0
        if configured:
            assert self.one(config(**settings)).effect == "configured"

    def append(
        self, what, *, after=0, at=None, epoch=None, kind=LOG_APPEND_TIME, offset=None
    ) -> Transitions:
        """Append a record or raw bytes; return the transitions."""
        self.now_ms = self.now_ms + after if at is None else at
        self.leader_epoch = self.leader_epoch if epoch is None else epoch
        value = what if isinstance(what, bytes | None) else encode(what)
        entry = LogEntry(
            offset=self.state.next_offset if offset is None else offset,
            leader_epoch=self.leader_epoch,
            timestamp_ms=self.now_ms,
            timestamp_type=kind,
            value=value,
        )
        self.entries.append(entry)
        return apply(self.state, entry)

    def one(self, what, **where) -> Transition:
        (transition,) = self.append(what, **where)
        return transition

    def outcome_of(self, what, **where) -> str:
        """Append a record; return its effect, or the reason of its refusal."""
        transition = self.one(what, **where)
        return transition.effect or transition.reason

    def claimed(self, client="c1", **claiming) -> int:
        """Append a claim that must be accepted; return its epoch."""
        transition = self.one(claim(client, **claiming))
        assert transition.outcome == "accepted", transition
        return transition.epoch

    def key(self, key=KEY) -> KeyState:
        return self.state.keys[key]


STAYS = Key("g", "t", 1)
"""A key that a second partition leaves where it is; KEY moves to that one."""

MOVES, REMAINS = (
    next(f"g{n}" for n in range(99) if home_partition(f"g{n}", partition_count=2) == t)
    for t in (1, 0)
)
"""Groups: a second partition becomes the home of the first, and not of the other."""


def source_log(**settings) -> tuple[Log, int, int]:
    """Return partition 0 with a fence to count 2, and the epochs of KEY and STAYS."""
    log = Log(level=2, **settings)
    epochs = log.claimed(resume_hash=hashed(SECRET)), log.claimed(key=STAYS)
    assert log.outcome_of(layout_fence(2, **settings)) == "layout_fenced"
    return log, *epochs


def target_log(**settings) -> Log:
    """Return partition 1, which the fence of ``source_log`` brings into use."""
    log = Log(1, configured=False)
    assert log.outcome_of(layout_fence(2, **settings)) == "layout_fenced"
    return log


def fold(entries: Iterable[LogEntry], partition=0) -> WorldState:
    state = WorldState(partition)
    for entry in entries:
        apply(state, entry)
    return state


def sound_log() -> Log:
    """Return a log with most types of records and no violation."""
    log = Log()
    epoch = log.claimed()
    log.append(beat(epoch, 5))
    log.append(messages(epoch, 5, 9))
    log.append(batch((epoch, 12)))
    log.append(messages(epoch, 12, 20))
    log.append(claim("c2"))
    log.append(beat(epoch, 3, rewind=True))
    log.append(release(epoch, 4))
    log.append(b"\xff garbage")
    epoch = log.claimed("c2", topic_id=ident("topic"))
    log.append(messages(epoch, 0, 30, client="c2"))
    log.append(release(epoch, client="c2"))
    epoch = log.claimed("c1", topic_id=ident("other"), expected=epoch)
    log.append(messages(epoch, 0, 3))
    return log


def all_records() -> list[Record]:
    """Return one record of every type, with all optional fields."""
    past = Resume(INC, 7, SECRET)
    return [
        beat(7, 8, rewind=True),
        claim(
            topic_id=ident("topic"),
            resume_hash=hashed(SECRET),
            expected=7,
            resume=past,
        ),
        release(7, 8, successor="c2"),
        messages(7, 8, 9),
        pause(2_000),
        batch((7, 8), (9, None)),
        stage((0, 8), (1, 0), topic_id=ident("topic")),
        decide(),
        resolve(commit=True),
        schedule(1_000, 2_000),
        offer(7),
        ready(7),
        config(span=10, forget_ms=5),
        *resets(b"state", ident("digest").hex()),
        layout_fence(2),
        layout_import(
            imported(
                position=8,
                granted=9,
                topic_id=ident("topic"),
                retired_topic_ids=(ident("before"),),
                previous=ImportedPrevious(OP, 3, None),
                successor="c2",
            )
        ),
        layout_done(),
        forgetting(7),
        fence(reason="hung"),
        layout_final(),
        growth(topic_id=ident("topic"), ends=(7, 0, 3, 9)),
        direct(),
        settings(policy="fair", debounce_ms=0, handoff_ms=9, reason="slow"),
        layout_groups(
            imported_settings(policy="fair", debounce_ms=0, handoff_ms=9),
            imported_directive(),
        ),
        member(plan_generation=3),
        planned(0, ("c2", 0, (1, 2))),
        begin(),
        chunk(b"state"),
        finish(7),
    ]
