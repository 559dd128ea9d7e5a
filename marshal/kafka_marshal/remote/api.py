"""Messages between a sidecar and its clients: JSON over HTTP, and events.

Both ends use these types, and the published OpenAPI document is generated from them.
All times named ``_ms`` are local time: the boot clock of the host, which both ends
read (PROTOCOL 5.2). Names of wall-clock times contain ``wall``, except in a
``PauseRequest``. Binary identifiers are lower-case hex. Unknown fields are ignored, so
that either end may be of a newer release; only an ``AdminRequest`` refuses them.

In the log a sidecar is one claimant per group, with its own client_id. The tags of a
claim name the client that it is for. Only one client ever uses a token: a key that
moves between two clients is released and claimed again.
"""

from datetime import datetime, timedelta
from typing import Annotated, ClassVar, Literal

import msgspec

from kafka_marshal.config import TOPICS_MAX, ConsumerConfig
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.types import TopicPartition

API_LEVEL = 1
INSTANCE_HEADER = "Marshal-Instance"
EVENT_ID_HEADER = "Last-Event-ID"
# Longest wait of one request; a client that waits longer repeats it.
WAIT_MS_MAX = 60_000
PROGRESS_MAX = 20_000
BEAT_MS_MAX = 1_000
BEATS_PER_H = 6
"""How often clients send heartbeats, per heartbeat interval of the log."""
_NUMBER_MAX = 2**63 - 1

# Requests are validated when they are decoded. In Python ``$`` also matches before a
# trailing line feed, hence ``(?!\n)``.
Hex16 = Annotated[
    str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$", min_length=32, max_length=32)
]
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9._:-]+$(?!\n)", max_length=200)]
TopicName = Annotated[
    str, msgspec.Meta(pattern=r"^[a-zA-Z0-9._-]+$(?!\n)", max_length=249)
]
Word = Annotated[str, msgspec.Meta(max_length=200)]
Words = Annotated[str, msgspec.Meta(max_length=1_000)]
TokenText = Annotated[
    str, msgspec.Meta(pattern=r"^[0-9]{1,10}\.[0-9]{1,10}\.[0-9]{1,20}$(?!\n)")
]
Number = Annotated[int, msgspec.Meta(ge=0, le=_NUMBER_MAX)]
PartitionNumber = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Pid = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
WaitMs = Annotated[int, msgspec.Meta(ge=0, le=WAIT_MS_MAX)]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages."""


# --- the host


class Info(Message, frozen=True, kw_only=True):
    """``GET /v1/info``: what a client must know before it registers.

    Attributes:
        level: ``API_LEVEL`` of the sidecar.
        version: Release of the sidecar.
        state: Its state, such as ``RUNNING``.
        client_id: Its name in the log.
        incarnation: Identifies its process in ids of events; its claims have others.
        boot_id: Id of the boot that its local times belong to.
        cluster_id: Cluster of the coordination topic.
        coordination_topic: Name of the coordination topic.
        bootstrap_servers: Brokers that the sidecar connects to; a client may use them
            for its data, with its own credentials.
        heartbeat_interval_ms: Heartbeat interval of the log.
        client_beat_ms_max: Longest time between two beats of a client.
        span: Most offsets that one request for a grant gets, by the log's Config.
        now_ms: Local time of the answer.
    """

    level: int
    version: str
    state: str
    client_id: str
    incarnation: str
    boot_id: str
    cluster_id: str
    coordination_topic: str
    bootstrap_servers: tuple[str, ...]
    heartbeat_interval_ms: int
    client_beat_ms_max: int
    span: int
    now_ms: int


class Failure(Message, frozen=True, kw_only=True):
    """Body of every error response (4xx and 5xx).

    Attributes:
        error: Name of the error class of ``kafka_marshal.errors``.
        message: What happened, why, and what to do next.
        retriable: Whether the same request may succeed later.
        setting: Setting at fault, of a ``ConfigurationError``.
        reason: Reason in one word, of a ``ClaimLost`` or ``ClaimRejected``; the reason
            that the admin gave, of a ``ClientFenced``.
        holder: Owner by the log, the other process of an ``IdentityConflict``, or the
            admin of a ``ClientFenced`` or ``GroupPaused``.
        at_offset: Log offset of the deciding record, if there is one.
        requested: Position at fault, of a ``PositionError``; -1 = there is none.
        log_start: First offset of the log of ``topic`` and ``partition``.
        log_end: Next offset of that log to be written.
        topic: Data topic of a ``PositionError``.
        partition: Data partition of a ``PositionError``.
    """

    error: str
    message: str
    retriable: bool = False
    setting: str | None = None
    reason: str | None = None
    holder: str | None = None
    at_offset: int | None = None
    requested: int | None = None
    log_start: int | None = None
    log_end: int | None = None
    topic: str | None = None
    partition: int | None = None


# --- clients


class RegisterRequest(Message, frozen=True, kw_only=True):
    """``PUT /v1/groups/{group}/clients/{client}``: join, or join again.

    Attributes:
        instance: 16 random bytes in hex, drawn once per process. A client that
            registers again with the same value resumes where it was;
            another value means another process.
        beat_ms: Time between its beats, at most ``client_beat_ms_max``.
        pid: The client's process, if another process connects for it, such as a
            command for its shell. It must be of the same user; ignored over TCP.
    """

    instance: Hex16
    beat_ms: Milliseconds
    pid: Pid | None = None


class RegisterResponse(Message, frozen=True, kw_only=True):
    """Answer to a registration.

    Attributes:
        info: As ``GET /v1/info`` returns it.
        was_known: Whether this instance was registered before and keeps its claims.
    """

    info: Info
    was_known: bool


class Start(Message, frozen=True, kw_only=True):
    """Where to start a partition without a position in the group.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        offset: First offset to process.
    """

    topic: TopicName
    partition: PartitionNumber
    offset: Number


class SubscriptionSpec(Message, frozen=True, kw_only=True):
    """``PUT .../subscriptions/{name}``: the subscription of a consumer.

    The fields are those of ``Marshal.consumer``; policies are given by name. Clients
    of one group whose topics overlap must agree in all fields except ``claims_max``,
    ``warms`` (the client gets events ``warm``) and ``standbys`` (its host is among this
    many standbys of a partition, with events ``standby`` for the client; 0 = never).
    A pattern has the syntax of RE2 and matches whole names.
    """

    topics: Annotated[tuple[TopicName, ...], msgspec.Meta(max_length=1_000)] = ()
    pattern: Words | None = None
    delivery: Literal["alo", "amo"] = "alo"
    policy: Word = "fair"
    claims_max: PartitionNumber = 0
    auto_offset_reset: Word = "earliest"
    isolation_level: Word = "read_uncommitted"
    metadata_refresh_ms: Milliseconds = 30_000
    release_behind: bool = True
    warms: bool = False
    standbys: PartitionNumber = 0
    starts: Annotated[tuple[Start, ...], msgspec.Meta(max_length=PROGRESS_MAX)] = ()

    @classmethod
    def of(cls, config: ConsumerConfig) -> "SubscriptionSpec":
        """Return the settings that the sidecar needs.

        Raises:
            ConfigurationError: They cannot be sent to another process.
        """
        if not isinstance(config.policy, str):
            raise ConfigurationError(
                "with a sidecar a policy is given by name, because the sidecar runs it "
                f"for all its clients; {config.policy!r} is an object of this process",
                setting="policy",
            )
        return cls(
            topics=config.topics,
            pattern=config.pattern,
            delivery=config.delivery.value,
            policy=config.policy,
            claims_max=config.claims_max,
            auto_offset_reset=config.auto_offset_reset,
            isolation_level=config.isolation_level,
            metadata_refresh_ms=config.metadata_refresh_ms,
            release_behind=config.release_behind,
            starts=tuple(
                Start(topic=topic, partition=number, offset=offset)
                for (topic, number), offset in sorted(config.starts.items())
            ),
        )

    def config(self) -> ConsumerConfig:
        """Return the checked settings.

        There is no limit to the handling time, because the client itself checks that
        its application polls.

        Raises:
            ConfigurationError: A setting is invalid.
        """
        return ConsumerConfig(
            topics=self.topics,
            pattern=self.pattern,
            delivery=self.delivery,
            policy=self.policy,
            claims_max=self.claims_max,
            auto_offset_reset=self.auto_offset_reset,
            isolation_level=self.isolation_level,
            metadata_refresh_ms=self.metadata_refresh_ms,
            release_behind=self.release_behind,
            starts={
                TopicPartition(s.topic, s.partition): s.offset for s in self.starts
            },
            max_handling_ms=0,
        )


class SubscribeResponse(Message, frozen=True, kw_only=True):
    """Answer to ``SubscriptionSpec``: the matching topics, with partition counts."""

    topics: dict[str, int]
    counts_topics: bool


class Progress(Message, frozen=True, kw_only=True):
    """Progress of a client in one partition that it holds.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        epoch: Epoch of the claim under which it holds the partition.
        position: All offsets below are processed; None while there is no position.
        uncommitted_count: Records handed out and not yet processed.
        handed: Records handed out under this claim.
        done: At most once: all granted offsets below are processed, else None.
        grantee: The process to which these were granted, as in ``GrantRequest``.
        seek_count: Seeks under this claim. After a new seek the position may be lower
            than before; a report with a smaller count is outdated.
    """

    topic: TopicName
    partition: PartitionNumber
    epoch: Number
    position: Number | None
    uncommitted_count: Number = 0
    handed: Number = 0
    done: Number | None = None
    grantee: Hex16 | None = None
    seek_count: Number = 0


ProgressList = Annotated[tuple[Progress, ...], msgspec.Meta(max_length=PROGRESS_MAX)]


class HeartbeatRequest(Message, frozen=True, kw_only=True):
    """``POST .../beat``: a heartbeat, with the positions.

    Attributes:
        progress: What changed since the last beat, or more; everything with ``flush``.
        flush: Whether to answer only once these positions are in the log.
        timeout_ms: How long a flush may take.
        generation: Config generation that the client acts on (PROTOCOL 10.7), from the
            last snapshot or event ``layout`` that it has applied. Sent until a beat
            with it is answered. For a client that never sends one, the sidecar's
            generation counts.
    """

    progress: ProgressList = ()
    flush: bool = False
    timeout_ms: WaitMs = 0
    generation: Number | None = None


class Lease(Message, frozen=True, kw_only=True):
    """Deadlines of a client's use of one partition (PROTOCOL 5.2).

    Attributes:
        topic: Data topic.
        partition: Data partition.
        epoch: Epoch of the claim.
        soft_until_ms: From this time on no new records are handed out.
        hard_until_ms: At this time all processing stops.
    """

    topic: str
    partition: int
    epoch: int
    soft_until_ms: int
    hard_until_ms: int


class HeartbeatResponse(Message, frozen=True, kw_only=True):
    """Answer to a beat: the deadlines of all partitions that the client holds.

    For a client that falls silent, the sidecar keeps each claim up to its deadline.

    Attributes:
        deadlines: One for each partition.
        now_ms: Local time of the answer.
        topics_with_takers: Topics of which another live member could take partitions.
            Only for them does it help to release partitions that are not polled.
    """

    deadlines: tuple[Lease, ...]
    now_ms: int
    topics_with_takers: tuple[str, ...] = ()


class Release(Message, frozen=True, kw_only=True):
    """One partition that a client releases, or confirms to have stopped using.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        epoch: Epoch of the claim under which it held the partition.
        position: All offsets below are processed.
        reason: Reason in one word, if the sidecar did not ask for the release.
        detail: Figures that explain the reason.
        done: As in ``Progress``.
        grantee: As in ``Progress``.
    """

    topic: TopicName
    partition: PartitionNumber
    epoch: Number
    position: Number | None
    reason: Word = "closed"
    detail: Words = ""
    done: Number | None = None
    grantee: Hex16 | None = None


Releases = Annotated[tuple[Release, ...], msgspec.Meta(max_length=PROGRESS_MAX)]


class ReleaseRequest(Message, frozen=True, kw_only=True):
    """``POST .../released``: partitions that the client does not use any more.

    Attributes:
        returned: The partitions.
        timeout_ms: How long to wait for the releases in the log; 0 = do not wait.
    """

    returned: Releases
    timeout_ms: WaitMs = 0


class ReadyRequest(Message, frozen=True, kw_only=True):
    """``POST .../ready``: the client has warmed up, as an event ``warm`` asked it to.

    May be repeated. If it has no effect, it is refused with 409 and a reason:
    ``no_offer``, ``not_successor`` (another client was asked), ``old_epoch`` (the owner
    has changed, also to this client) or ``late``.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        epoch: Epoch of the present owner's claim, as in the event.
    """

    topic: TopicName
    partition: PartitionNumber
    epoch: Number


class GrantRequest(Message, frozen=True, kw_only=True):
    """``POST /v1/groups/{group}/grants``: ask for offsets at most once (PROTOCOL 6.2).

    Any process of the host may ask under any current claim of the group whose secret
    it sends: a Spark task asks under the claim of its query's driver, which may run on
    another host.

    Attributes:
        client_id: Owner of the claim, as in the log.
        incarnation: Incarnation of the owner.
        topic: Data topic.
        partition: Data partition.
        epoch: Epoch of the claim.
        grantee: 16 random bytes in hex: the process that will process the offsets.
        secret: Secret of the claim, in hex.
        first: First offset wanted.
        last: Last offset wanted; not beyond the end of the partition's log.
        done: As in ``Progress``; for the tags.
        timeout_ms: How long to wait for the verdict.
        token: Token of the claim, None if the client does not know it. Claims in two
            coordinating partitions may have the same epoch.
        request: Number of the request among those of the grantee. A repeated number
            returns the original answer and grants nothing more, until the sidecar
            restarts, and for the last 64 requests of the grantee.
    """

    client_id: Name
    incarnation: Hex16
    topic: TopicName
    partition: PartitionNumber
    epoch: Number
    grantee: Hex16
    secret: Hex16
    first: Number
    last: Number
    timeout_ms: WaitMs
    done: Number | None = None
    request: Number | None = None
    token: TokenText | None = None


class GrantResponse(Message, frozen=True, kw_only=True):
    """The fold's verdict on a request.

    Attributes:
        outcome: ``accepted``, ``refused`` or ``ignored``.
        reason: Why it was not accepted.
        first: First offset granted, None if no offset is.
        last: Last offset granted.
        head: Next offset that is not granted, after this request.
        offset: Log offset of the request; None if the claim had ended before.
    """

    outcome: str
    reason: str | None
    first: int | None
    last: int | None
    head: int | None
    offset: int | None


class Children(Message, frozen=True, kw_only=True):
    """``PUT .../children``: processes that work for the client.

    The client is considered dead only once they have ended too (PROTOCOL 12).
    """

    pids: Annotated[tuple[Pid, ...], msgspec.Meta(max_length=1_000)]


class LeaveRequest(Message, frozen=True, kw_only=True):
    """``DELETE /v1/groups/{group}/clients/{client}``: the client leaves.

    Attributes:
        returned: Final positions of the partitions that it holds.
        release: False keeps the claims for a restart of the same name within one
            heartbeat interval.
        reason: ``shutdown``, ``restart`` or ``downscale``.
        timeout_ms: How long to wait for the releases in the log.
    """

    returned: Releases = ()
    release: bool = True
    reason: Literal["shutdown", "restart", "downscale"] = "shutdown"
    timeout_ms: WaitMs = 0


class LeaveResponse(Message, frozen=True, kw_only=True):
    """Whether to end now, or to keep working until all partitions are released."""

    action: Literal["shutdown_now", "wait_for_drain"]


# --- events


class Assignment(Message, frozen=True, kw_only=True, tag="assigned"):
    """The client holds a partition from now on.

    Attributes:
        subscription: Name of its subscription; "" = a claim without consumption.
        topic: Data topic.
        partition: Data partition.
        epoch: Epoch of the claim.
        token: Fencing token, dotted.
        client_id: Owner in the log: the sidecar.
        incarnation: Incarnation of the owner.
        secret: Sent with requests for offsets at most once under this claim, in hex;
            for this client and the processes that work for it.
        position: Where to begin, None = unknown (claims without consumption).
        is_anchored: Whether the log has this position, so that grants are safe.
        soft_until_ms: As in ``Lease``.
        hard_until_ms: As in ``Lease``.
        why: Why it was claimed.
        stuck: How many owners in a row were stuck at this position.
        follows: Epoch of the claim before this one, None = not known.
        topic_id: Kafka's id of the claimed topic, in hex. Only records of that topic
            may be processed under the claim. None = not known.
        set_by: The last operation that set the position before the claim, in hex; empty
            = there was none, None = not known.
        request: For a claim without consumption, the number of the request that it
            answers, None = no number. Ignore the event if that request was ended.
    """

    subscription: str
    topic: str
    partition: int
    epoch: int
    token: str
    client_id: str
    incarnation: str
    secret: str
    position: int | None
    is_anchored: bool
    soft_until_ms: int
    hard_until_ms: int
    why: str = ""
    stuck: int = 0
    follows: int | None = None
    topic_id: str | None = None
    set_by: str | None = None
    request: int | None = None


class Releasing(Message, frozen=True, kw_only=True, tag="release"):
    """Hand out no new records of a partition, finish the uncommitted ones, confirm.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        epoch: Epoch of the claim.
        reason: Why: ``surplus``, ``moved``, ``paused``, ``lagging``, ``shutdown``...
        successor: client_id that should claim it next, if any.
        until_ms: When it is released even with uncommitted records; None = only when
            the client confirms, or its deadline passes.
    """

    topic: str
    partition: int
    epoch: int
    reason: str
    successor: str | None = None
    until_ms: int | None = None


class Warm(Message, frozen=True, kw_only=True, tag="warm", rename={"owner": "from"}):
    """A partition is offered to the client: warm up for it, then answer ``ready``.

    The client does not hold it yet, and perhaps never will; its owner continues. An
    offer that ends without ``assigned`` has no event of its own.

    Attributes:
        subscription: Name of the client's subscription.
        topic: Data topic.
        partition: Data partition.
        epoch: Epoch of its owner's claim; identifies the offer.
        from: The owner: a client of this sidecar, or a client_id in the log. In Python
            the attribute is ``owner``.
        position: The next offset to process, None if unknown.
        until_ms: End of the offer, local time.
        topic_id: Kafka's id of the topic in hex, None if unknown.
    """

    subscription: str
    topic: str
    partition: int
    epoch: int
    owner: str
    position: int | None
    until_ms: int
    topic_id: str | None = None


class Standby(
    Message, frozen=True, kw_only=True, tag="standby", rename={"owner": "from"}
):
    """The client stands by for a partition of another host, or does so no longer.

    It loads the state of the partition, and gets the partition if its owner dies. No
    answer is expected.

    Attributes:
        subscription: Name of the client's subscription.
        topic: Data topic.
        partition: Data partition.
        from: The owner, a client_id in the log; None: the client may forget what it
            loaded. In Python the attribute is ``owner``.
        position: The next offset to process when this began, None if unknown.
    """

    subscription: str
    topic: str
    partition: int
    owner: str | None
    position: int | None = None


class Lost(Message, frozen=True, kw_only=True, tag="lost"):
    """The client no longer holds a partition; it must stop at once.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        epoch: Epoch of the claim that ended.
        reason: As in ``Ending``.
        winner: New owner, if known.
        at_offset: Log offset of the record that ended it.
        was_lost: Whether the claim was lost rather than released.
        token: Its fencing token, dotted; None if it is not known. Epochs of a
            partition that moved to another coordinating partition do not compare.
    """

    topic: str
    partition: int
    epoch: int
    reason: str
    winner: str | None = None
    at_offset: int | None = None
    was_lost: bool = True
    token: str | None = None


class PausedTopic(Message, frozen=True, kw_only=True):
    """A topic of which partitions are paused.

    Attributes:
        topic: The topic.
        partitions: The paused partitions, ascending; none for the whole topic.
    """

    topic: str
    partitions: tuple[int, ...] = ()


class Paused(Message, frozen=True, kw_only=True, tag="paused"):
    """The group or some of its topics are paused, or no longer (PROTOCOL 4.8, 4.15).

    Attributes:
        is_paused: Whether the whole group is paused.
        topics: Topics, or some of their partitions, that are paused separately.
        until_wall_ms: Latest end of the pause, epoch ms; None if not paused.
        reason: Names the client_id that paused the group; None if not paused.
    """

    is_paused: bool
    topics: tuple[PausedTopic, ...] = ()
    until_wall_ms: int | None = None
    reason: str | None = None


class Layout(Message, frozen=True, kw_only=True, tag="layout"):
    """The sidecar acts on a later generation of the Config (PROTOCOL 10.8).

    The events ``release`` that the change causes at once come before it. A client that
    has applied them acknowledges the generation with its next beat.

    Attributes:
        generation: The generation.
    """

    generation: int


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """The sidecar cannot hold claims of the group any more; all of them have ended."""

    failure: Failure


class Snapshot(Message, frozen=True, kw_only=True, tag="snapshot"):
    """All partitions of the client; always the first event of a stream.

    Sent again when missed events cannot be replayed: after a restart of the sidecar, or
    when a client fell too far behind.

    Attributes:
        assigned: Partitions that it holds.
        releasing: Partitions among them that it must give back.
        paused: As in the event ``paused``.
        subscriptions: Names of its subscriptions.
        warming: Partitions that it warms up for.
        standbys: Partitions that it stands by for.
        generation: As in the event ``layout``; None from an earlier sidecar release.
    """

    assigned: tuple[Assignment, ...]
    releasing: tuple[Releasing, ...]
    paused: Paused
    subscriptions: tuple[str, ...]
    warming: tuple[Warm, ...] = ()
    standbys: tuple[Standby, ...] = ()
    generation: int | None = None


EventBody = (
    Snapshot | Assignment | Warm | Standby | Releasing | Lost | Paused | Layout | Failed
)
"""Body of an event. Clients ignore tags that they do not know."""


class Frame(msgspec.Struct, frozen=True):
    """One event of a client's stream.

    Attributes:
        id: ``INCARNATION.NUMBER.PARTITION.OFFSET``: the sidecar's process start (8 hex
            digits), the number of the event for this client, and the coordinating
            partition and offset of the log entry that caused it. Clients send it as
            ``Last-Event-ID``.
        body: The event.
    """

    SEPARATOR: ClassVar[str] = "."

    id: str
    body: EventBody

    def is_of(self, incarnation: str) -> bool:
        """Return whether the process of the sidecar with this incarnation sent it."""
        return not self.id or self.id.startswith(incarnation[:8] + self.SEPARATOR)


def frame_id(incarnation: str, number: int, *, t: int, offset: int) -> str:
    """Return the id of an event (see ``Frame``)."""
    return Frame.SEPARATOR.join((incarnation[:8], str(number), str(t), str(offset)))


# --- admins

RESET_PARTITIONS_MAX = 20_000

# Topic and partition numbers in it are checked where it is parsed.
TopicChoice = Annotated[str, msgspec.Meta(max_length=10_000)]
WallMs = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class AdminRequest(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of requests that act on a group.

    Unknown fields are refused: otherwise a pause with a misspelled ``topics`` would
    pause the whole group.
    """


class PauseRequest(AdminRequest, frozen=True, kw_only=True):
    """``POST /v1/groups/{group}/pause``, as ``marshal groups pause``.

    Attributes:
        for_ms: Length of the pause; either this or ``until_ms``.
        until_ms: End of the pause, epoch ms.
        begin_ms: Begin of the pause, epoch ms; by default it begins at once.
        topics: Pause only these topics, or partitions such as ``orders:0,1``; null for
            the whole group.
        wait: Whether to wait until no client of the group holds a claim, at most for
            ``timeout_ms``, and renew the pause meanwhile.
        dry_run: Write nothing, and wait for nothing: only check, and return what would
            be paused.
        reason: Stored in the log, for people.
        person: Person for whom the request is made; stored in the log.
    """

    for_ms: Milliseconds | None = None
    until_ms: WallMs | None = None
    begin_ms: WallMs | None = None
    topics: (
        Annotated[tuple[TopicChoice, ...], msgspec.Meta(max_length=TOPICS_MAX)] | None
    ) = None
    wait: bool = False
    dry_run: bool = False
    reason: Words | None = None
    person: Word = ""


class ResumeRequest(AdminRequest, frozen=True, kw_only=True):
    """``POST /v1/groups/{group}/resume``, as ``marshal groups resume``.

    Attributes:
        operation: End only this pause, which may be scheduled.
        dry_run: Write nothing: only check, and count where a pause would end.
        reason: Stored in the log, for people.
        person: Person for whom the request is made; stored in the log.
    """

    operation: Hex16 | None = None
    dry_run: bool = False
    reason: Words | None = None
    person: Word = ""


class PartitionOffset(AdminRequest, frozen=True, kw_only=True):
    """New position of one partition.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        offset: Its new position.
    """

    topic: TopicName
    partition: PartitionNumber
    offset: Number


class ResetRequest(AdminRequest, frozen=True, kw_only=True):
    """``POST /v1/groups/{group}/reset``, as ``marshal groups reset``.

    Exactly one field from ``to_earliest`` to ``offsets`` gives the new positions.

    Attributes:
        topics: Topics, or partitions such as ``orders:0,1``.
        all_topics: All topics of the group, instead of ``topics``.
        to_earliest: The log start.
        to_latest: The log end.
        to_current: The present positions; the log end if there is none.
        to_offset: This offset.
        shift_by: This many records forward, or back if negative.
        to_datetime: The first record at or after a time; UTC without a zone.
        by_duration: The first record at or after this long ago, such as ``PT10M``.
        offsets: An offset for each partition, without ``topics``.
        execute: Whether to set the positions; by default the answer is the plan.
        clamp: Whether a position outside of its log is replaced by the nearest one
            inside; otherwise it is refused.
        allow_reprocess: Whether partitions at most once may go back.
        reason: Stored in the log, for people.
        person: Person for whom the request is made; stored in the log.
    """

    topics: Annotated[tuple[TopicChoice, ...], msgspec.Meta(max_length=TOPICS_MAX)] = ()
    all_topics: bool = False
    to_earliest: bool = False
    to_latest: bool = False
    to_current: bool = False
    to_offset: Number | None = None
    shift_by: Annotated[int, msgspec.Meta(ge=-_NUMBER_MAX, le=_NUMBER_MAX)] | None = (
        None
    )
    to_datetime: datetime | None = None
    by_duration: timedelta | None = None
    offsets: Annotated[
        tuple[PartitionOffset, ...], msgspec.Meta(max_length=RESET_PARTITIONS_MAX)
    ] = ()
    execute: bool = False
    clamp: bool = False
    allow_reprocess: bool = False
    reason: Words | None = None
    person: Word = ""


class UndoRequest(AdminRequest, frozen=True, kw_only=True):
    """``POST /v1/groups/{group}/undo``, as ``marshal groups undo``.

    Attributes:
        op_id: The reset to undo.
        execute: Whether to set the positions; by default the answer is the plan.
        partial: Whether to undo only the remaining partitions, if some were set again,
            recreated or forgotten meanwhile.
        allow_reprocess: Whether partitions at most once may go back.
        reason: Stored in the log, for people.
        person: Person for whom the request is made; stored in the log.
    """

    op_id: Hex16
    execute: bool = False
    partial: bool = False
    allow_reprocess: bool = False
    reason: Words | None = None
    person: Word = ""


class FinishRequest(AdminRequest, frozen=True, kw_only=True):
    """``POST /v1/groups/{group}/finish``, as ``marshal groups finish``.

    Attributes:
        reason: Stored in the log, for people.
        person: Person for whom the request is made; stored in the log.
    """

    reason: Words | None = None
    person: Word = ""
