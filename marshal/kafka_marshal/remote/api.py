"""What a sidecar and its clients say to each other: JSON over HTTP, and events.

Both ends use these types, and the published OpenAPI document is made of them. All
times named ``_ms`` are local time: the boot clock of the host, which both ends read
(PROTOCOL 5.2); fields of people's time are named ``wall``. Binary identifiers are
lower-case hex. Unknown fields are ignored, so that either end may be newer.

In the log a sidecar is one claimant per group: its own client_id. Which of its
clients a claim is for stands in the claim's tags, and a token is only ever used by
one client: what moves between two of them is released and claimed anew.
"""

from typing import Annotated, ClassVar, Literal

import msgspec

API_LEVEL = 1
INSTANCE_HEADER = "Marshal-Instance"
EVENT_ID_HEADER = "Last-Event-ID"
# Longest wait of one request; whoever would wait longer asks again.
WAIT_MS_MAX = 60_000
PROGRESS_MAX = 20_000
_NUMBER_MAX = 2**63 - 1

# What a client says is checked where it is read; a pattern of Python also matches
# in front of a last line feed, hence the end of each.
Hex16 = Annotated[
    str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$", min_length=32, max_length=32)
]
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9._:-]+$(?!\n)", max_length=200)]
TopicName = Annotated[
    str, msgspec.Meta(pattern=r"^[a-zA-Z0-9._-]+$(?!\n)", max_length=249)
]
Word = Annotated[str, msgspec.Meta(max_length=200)]
Words = Annotated[str, msgspec.Meta(max_length=1_000)]
Number = Annotated[int, msgspec.Meta(ge=0, le=_NUMBER_MAX)]
PartitionNumber = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Pid = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
WaitMs = Annotated[int, msgspec.Meta(ge=0, le=WAIT_MS_MAX)]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything that is said."""


# --- the host


class Info(Message, frozen=True, kw_only=True):
    """``GET /v1/info``: what a client has to know before it registers.

    Attributes:
        level: ``API_LEVEL`` of the sidecar.
        version: Release of the sidecar.
        state: State of row K20, such as ``RUNNING``.
        client_id: Its name in the log.
        incarnation: Its process start: names its events. Claims have one per group.
        boot_id: Which boot its local times belong to.
        cluster_id: Cluster of the coordination topic.
        coordination_topic: Name of the coordination topic.
        bootstrap_servers: Where it found the cluster; what a client may use for
            its data, too, with credentials of its own.
        heartbeat_interval_ms: H, as the log has it.
        client_beat_ms_max: Longest time between two beats of a client.
        span: Most offsets that one request for a grant gets, as the log has it.
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
    """Body of every answer that is no success (4xx and 5xx).

    Attributes:
        error: Name of the error class of ``kafka_marshal.errors``.
        message: What happened, why, and what to do next.
        retriable: Whether the same request may succeed later.
        setting: Setting at fault, of a ``ConfigurationError``.
        reason: Reason in one word, of a ``ClaimLost`` or ``ClaimRejected``.
        holder: Owner by the log, or the other process of an ``IdentityConflict``.
        at_offset: Log offset that decided, where one did.
        requested: Position at fault, of a ``PositionError``; -1 = there is none.
        log_start: First offset of that log.
        log_end: Next offset of that log to be written.
        topic: Topic of that log.
        partition: Partition of that log.
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
        instance: 16 random bytes in hex, drawn once per process: a client that
            comes back with the same one goes on where it was (row KA06); another
            one is another process.
        beat_ms: Time between its beats, at most ``client_beat_ms_max``.
        pid: The client's process, where it is not the one that connects: such as a
            shell whose commands do. Of the same user; without use over TCP.
    """

    instance: Hex16
    beat_ms: Milliseconds
    pid: Pid | None = None


class RegisterResponse(Message, frozen=True, kw_only=True):
    """Answer to a registration.

    Attributes:
        info: What ``GET /v1/info`` says.
        was_known: Whether this instance was here before, and keeps what it has.
    """

    info: Info
    was_known: bool


class Start(Message, frozen=True, kw_only=True):
    """Where to start a partition that the group has no position of.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        offset: First offset to process.
    """

    topic: TopicName
    partition: PartitionNumber
    offset: Number


class SubscriptionSpec(Message, frozen=True, kw_only=True):
    """``PUT .../subscriptions/{name}``: what a consumer pursues.

    The fields are those of ``Marshal.consumer``; policies go by name only. Clients
    of one group whose topics overlap must agree in all but ``claims_max``. A
    pattern has the syntax of RE2 and matches whole names.
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
    starts: Annotated[tuple[Start, ...], msgspec.Meta(max_length=PROGRESS_MAX)] = ()


class SubscribeResponse(Message, frozen=True, kw_only=True):
    """Answer to ``SubscriptionSpec``: the topics that it means now, with their size."""

    topics: dict[str, int]
    counts_topics: bool


class Progress(Message, frozen=True, kw_only=True):
    """What a client says of one partition that it has.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        epoch: Claim that it has it under.
        position: Everything below is processed; None as long as nobody knows one.
        in_hand: Records handed out and not done with.
        handed: Records handed out under this claim.
        done: At most once: everything granted below is done with, else None.
    """

    topic: TopicName
    partition: PartitionNumber
    epoch: Number
    position: Number | None
    in_hand: Number = 0
    handed: Number = 0
    done: Number | None = None


ProgressList = Annotated[tuple[Progress, ...], msgspec.Meta(max_length=PROGRESS_MAX)]


class HeartbeatRequest(Message, frozen=True, kw_only=True):
    """``POST .../beat``: a sign of life, with the positions.

    Attributes:
        standings: What changed since the last beat, at least; all with ``flush``.
        flush: Whether to answer only once the log holds these positions.
        timeout_ms: How long a flush may take.
    """

    standings: ProgressList = ()
    flush: bool = False
    timeout_ms: WaitMs = 0


class Lease(Message, frozen=True, kw_only=True):
    """Until when a client may use one partition (PROTOCOL 5.2).

    Attributes:
        topic: Data topic.
        partition: Data partition.
        epoch: Claim.
        soft_until_ms: Nothing new is handed out from then on.
        hard_until_ms: Everything stops then.
    """

    topic: str
    partition: int
    epoch: int
    soft_until_ms: int
    hard_until_ms: int


class HeartbeatResponse(Message, frozen=True, kw_only=True):
    """Answer to a beat: the deadlines of everything the client has.

    None is longer than the sidecar keeps it for a client that falls silent.

    Attributes:
        deadlines: One of each partition.
        now_ms: Local time of the answer.
        takers: Topics that another live member could take partitions of: only
            there is anything gained by giving up what one does not come back for.
    """

    deadlines: tuple[Lease, ...]
    now_ms: int
    takers: tuple[str, ...] = ()


class Release(Message, frozen=True, kw_only=True):
    """One partition that a client gives back, or one it confirms to have stopped.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        epoch: Claim that it had it under.
        position: Everything below is processed.
        reason: Why, in one word, where nobody asked for it (such as ``wedged``).
        detail: Why, in figures.
        done: As in ``Progress``.
    """

    topic: TopicName
    partition: PartitionNumber
    epoch: Number
    position: Number | None
    reason: Word = "closed"
    detail: Words = ""
    done: Number | None = None


Releases = Annotated[tuple[Release, ...], msgspec.Meta(max_length=PROGRESS_MAX)]


class ReleaseRequest(Message, frozen=True, kw_only=True):
    """``POST .../released``: what the client has stopped to use.

    Attributes:
        returned: What it gives back.
        timeout_ms: How long to wait until the log shows it; 0 = do not wait.
    """

    returned: Releases
    timeout_ms: WaitMs = 0


class GrantRequest(Message, frozen=True, kw_only=True):
    """``POST /v1/groups/{group}/grants``: ask for offsets at most once (PROTOCOL 6.2).

    Any process of the host may ask, under any claim of the group that stands and
    whose secret it shows: a task of Spark asks under the claim of its query's driver,
    on another host.

    Attributes:
        client_id: Owner of the claim, as in the log.
        incarnation: Its process start.
        topic: Data topic.
        partition: Data partition.
        epoch: Claim.
        grantee: 16 random bytes in hex, of whoever will process what is granted.
        secret: Secret of the claim, in hex.
        first: First offset wanted.
        last: Last offset wanted; not beyond the end of the partition's log.
        done: As in ``Progress``; for the tags.
        timeout_ms: How long to wait for the verdict.
        request: Number of the request among those of the grantee. One that comes again
            under its number, because its answer was lost, is answered like the first
            time and granted nothing more, as long as the sidecar runs on and among the
            last 64 requests of the grantee.
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


class GrantResponse(Message, frozen=True, kw_only=True):
    """The fold's verdict on a request.

    Attributes:
        outcome: ``accepted``, ``refused`` or ``ignored``.
        reason: Why not.
        first: First offset granted, None where none is.
        last: Last offset granted.
        head: Next offset that nobody was granted, after it.
        offset: Log offset of the request; None where the claim had ended before.
    """

    outcome: str
    reason: str | None
    first: int | None
    last: int | None
    head: int | None
    offset: int | None


class Children(Message, frozen=True, kw_only=True):
    """``PUT .../children``: processes that work for the client.

    It is known dead only when they are, too (PROTOCOL 12).
    """

    pids: Annotated[tuple[Pid, ...], msgspec.Meta(max_length=1_000)]


class LeaveRequest(Message, frozen=True, kw_only=True):
    """``DELETE /v1/groups/{group}/clients/{client}``: the process goes.

    Attributes:
        returned: Final positions of what it has.
        release: False keeps the claims for a restart of the same name within H.
        reason: ``shutdown``, ``restart`` or ``downscale`` (row KA23).
        timeout_ms: How long to wait until the log shows it.
    """

    returned: Releases = ()
    release: bool = True
    reason: Literal["shutdown", "restart", "downscale"] = "shutdown"
    timeout_ms: WaitMs = 0


class LeaveResponse(Message, frozen=True, kw_only=True):
    """Answer: whether to end now, or to go on working until all was handed over."""

    action: Literal["shutdown_now", "wait_for_drain"]


# --- events


class Assignment(Message, frozen=True, kw_only=True, tag="assigned"):
    """A partition is the client's from now on.

    Attributes:
        subscription: Which wish it serves; "" = a claim without consumption.
        topic: Data topic.
        partition: Data partition.
        epoch: Claim.
        token: Fencing token, dotted.
        client_id: Owner in the log: the sidecar.
        incarnation: Its process start.
        secret: Shown with requests for offsets at most once under this claim, in hex;
            for this client and those who work for it.
        position: Where to begin, None = nobody knows (claims without consumption).
        is_anchored: Whether the log has this position, so that grants are safe.
        soft_until_ms: As in ``Lease``.
        hard_until_ms: As in ``Lease``.
        why: Why it was claimed.
        stuck: How many owners in a row were wedged at this very position.
        follows: Epoch of the claim before this one, None = not known.
        topic_id: Kafka's id of the topic that the claim is of, hex. Only records of
            that topic may be processed under it. None = not known.
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


class Releasing(Message, frozen=True, kw_only=True, tag="release"):
    """Hand out nothing new of a partition, finish what is in hand, then confirm.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        epoch: Claim.
        reason: Why: ``surplus``, ``moved``, ``paused``, ``behind``, ``shutdown``...
        successor: Who should have it next, if any.
        until_ms: It is released whatever is in hand then; None = not before the
            client confirms, or its deadline.
    """

    topic: str
    partition: int
    epoch: int
    reason: str
    successor: str | None = None
    until_ms: int | None = None


class Lost(Message, frozen=True, kw_only=True, tag="lost"):
    """A partition is the client's no more; stop at once.

    Attributes:
        topic: Data topic.
        partition: Data partition.
        epoch: Claim that ended.
        reason: As in ``Ending``.
        winner: New owner, where one is known.
        at_offset: Log offset that ended it.
        was_lost: Whether it was taken rather than given up.
    """

    topic: str
    partition: int
    epoch: int
    reason: str
    winner: str | None = None
    at_offset: int | None = None
    was_lost: bool = True


class Paused(Message, frozen=True, kw_only=True, tag="paused"):
    """The group is paused, or no longer (PROTOCOL 4.8).

    Attributes:
        is_paused: Whether it is.
        until_wall_ms: Until when at the longest, epoch ms; None where it is not.
        reason: Why, by whoever paused it.
    """

    is_paused: bool
    until_wall_ms: int | None = None
    reason: str | None = None


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """The sidecar can hold nothing for the group any more; all of it is over."""

    failure: Failure


class Snapshot(Message, frozen=True, kw_only=True, tag="snapshot"):
    """Everything the client has; always the first event of a stream (row FR01).

    Sent anew wherever what was missed cannot be told event by event: after a
    restart of the sidecar, or when a client fell too far behind.
    """

    assigned: tuple[Assignment, ...]
    releasing: tuple[Releasing, ...]
    paused: Paused
    subscriptions: tuple[str, ...]


EventBody = Snapshot | Assignment | Releasing | Lost | Paused | Failed
"""What an event may say. A client passes over tags that it does not know."""


class Frame(msgspec.Struct, frozen=True):
    """One event of a client's stream.

    Attributes:
        id: ``INCARNATION.NUMBER.T.OFFSET``: the sidecar's process start (8 hex
            digits), which event of it this is for this client, and which entry of
            the log it follows from. What a client shows as ``Last-Event-ID``.
        body: What it says.
    """

    SEPARATOR: ClassVar[str] = "."

    id: str
    body: EventBody

    def is_of(self, incarnation: str) -> bool:
        """Return whether this life of the sidecar has said it."""
        return not self.id or self.id.startswith(incarnation[:8] + self.SEPARATOR)


def frame_id(incarnation: str, number: int, *, t: int, offset: int) -> str:
    """Return the id of an event (see ``Frame``)."""
    return Frame.SEPARATOR.join((incarnation[:8], str(number), str(t), str(offset)))
