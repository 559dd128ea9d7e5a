"""Every endpoint of the sidecar: its path, what it takes and what it answers.

The application serves this table and the published description is made of it, so
that neither has what the other lacks.
"""

from typing import Literal

import attrs
import msgspec

from kafka_marshal.remote import api, looking, paths

Method = Literal["GET", "PUT", "POST", "DELETE"]


@attrs.frozen
class Query:
    """A parameter behind the question mark.

    Attributes:
        name: Its name.
        kind: ``boolean`` or ``integer``.
        about: What it does, for people.
        most: Largest integer.
    """

    name: str
    kind: Literal["boolean", "integer"]
    about: str
    most: int = api.WAIT_MS_MAX


@attrs.frozen(kw_only=True)
class Route:
    """One endpoint.

    Attributes:
        method: Method of HTTP.
        path: Path with its parts in braces.
        name: Name of the operation; also that of the handler.
        about: What it does, in a sentence.
        takes: Type of the body, None for none.
        answers: Type of the answer, None for none (204).
        media: Media type of the answer.
        waits: Whether it may wait: for the log, or for others.
        is_open: Whether it is answered without a token, and as long as nothing
            is connected: what probes ask.
        queries: Parameters behind the question mark.
    """

    method: Method
    path: str
    name: str
    about: str
    takes: type[msgspec.Struct] | None = None
    answers: type[msgspec.Struct] | None = None
    media: str = "application/json"
    waits: bool = False
    is_open: bool = False
    queries: tuple[Query, ...] = ()

    @property
    def is_of_client(self) -> bool:
        """Whether a registered client asks, with the header of its instance."""
        return "{client}" in self.path and self.name != "register"


TIMEOUT = Query("timeout_ms", "integer", "How long to wait for the log, in ms.")
KEEP = Query(
    "keep", "boolean", "Leave the claims with the client, for its next subscription."
)
WISH = Query(
    "wish",
    "integer",
    "Number of the wish, growing: whatever is said late of an earlier one is passed "
    "over.",
    most=2**31 - 1,
)
EVENT_STREAM = "text/event-stream"
PLAIN = "text/plain"

ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        path=paths.INFO,
        name="info",
        about="What a client has to know before it registers.",
        answers=api.Info,
    ),
    Route(
        method="PUT",
        path=paths.CLIENT,
        name="register",
        about="Join a group at this sidecar, or join it again.",
        takes=api.Registration,
        answers=api.Registered,
    ),
    Route(
        method="DELETE",
        path=paths.CLIENT,
        name="leave",
        about="Leave; a body is optional.",
        takes=api.Leaving,
        answers=api.Left,
        waits=True,
    ),
    Route(
        method="GET",
        path=paths.EVENTS,
        name="events",
        about="The client's events as server-sent events: a snapshot, then every "
        "change in order; from where it was, with Last-Event-ID.",
        media=EVENT_STREAM,
    ),
    Route(
        method="POST",
        path=paths.BEAT,
        name="beat",
        about="Give a sign of life with positions; take new deadlines.",
        takes=api.Beat,
        answers=api.Beaten,
        waits=True,
    ),
    Route(
        method="POST",
        path=paths.RELEASED,
        name="released",
        about="Confirm to have stopped using partitions, or give them back.",
        takes=api.Release,
        waits=True,
    ),
    Route(
        method="PUT",
        path=paths.CHILDREN,
        name="children",
        about="Name the processes that work for the client.",
        takes=api.Children,
    ),
    Route(
        method="PUT",
        path=paths.SUBSCRIPTION,
        name="subscribe",
        about="Consume topics: claims come as events. Idempotent.",
        takes=api.Wants,
        answers=api.Subscribed,
        waits=True,
    ),
    Route(
        method="POST",
        path=paths.SUBSCRIPTION_END,
        name="unsubscribe",
        about="Consume them no longer, with the final positions.",
        takes=api.Release,
        waits=True,
        queries=(KEEP,),
    ),
    Route(
        method="PUT",
        path=paths.CLAIM,
        name="claim",
        about="Claim one partition without consuming it. Idempotent.",
        queries=(WISH,),
    ),
    Route(
        method="DELETE",
        path=paths.CLAIM,
        name="unclaim",
        about="Claim it no longer.",
        queries=(WISH,),
    ),
    Route(
        method="POST",
        path=paths.GRANTS,
        name="grant",
        about="Ask the log for offsets at most once (PROTOCOL 6.2).",
        takes=api.GrantAsk,
        answers=api.Granted,
        waits=True,
    ),
    Route(
        method="GET",
        path=paths.OWNERS,
        name="owners",
        about="Who owns each partition of a topic, by the log.",
        answers=looking.OwnersNow,
        waits=True,
        queries=(TIMEOUT,),
    ),
    Route(
        method="GET",
        path=paths.FENCE,
        name="fence",
        about="The newest token of a partition: what a sink compares with.",
        answers=looking.FenceNow,
        waits=True,
        queries=(TIMEOUT,),
    ),
    Route(
        method="GET",
        path=paths.WORLD,
        name="world",
        about="The world by the log.",
        answers=looking.WorldNow,
        waits=True,
        queries=(TIMEOUT,),
    ),
    Route(
        method="GET",
        path=paths.GROUPS,
        name="groups",
        about="Every group, in a line each.",
        answers=looking.GroupsNow,
        waits=True,
        queries=(TIMEOUT,),
    ),
    Route(
        method="GET",
        path=paths.GROUP,
        name="group",
        about="Claims and pauses of one group.",
        answers=looking.GroupNow,
        waits=True,
        queries=(TIMEOUT,),
    ),
    Route(
        method="GET",
        path=paths.CLIENTS,
        name="clients",
        about="Who is registered at this sidecar.",
        answers=looking.ClientsNow,
        waits=True,
        queries=(TIMEOUT,),
    ),
    Route(
        method="GET",
        path=paths.LIVEZ,
        name="livez",
        about="Whether the daemon should go on running: 200 or 503, with reasons.",
        answers=looking.Verdict,
        is_open=True,
    ),
    Route(
        method="GET",
        path=paths.READYZ,
        name="readyz",
        about="Whether clients should use it: 200 or 503, with reasons.",
        answers=looking.Verdict,
        is_open=True,
    ),
    Route(
        method="GET",
        path=paths.STARTUPZ,
        name="startupz",
        about="Whether it has come up: 200 or 503, with reasons.",
        answers=looking.Verdict,
        is_open=True,
    ),
    Route(
        method="GET",
        path=paths.METRICS,
        name="metrics",
        about="Figures for Prometheus.",
        media=PLAIN,
    ),
    Route(
        method="GET",
        path=paths.OPENAPI,
        name="openapi",
        about="This description.",
        media="application/json",
        is_open=True,
    ),
)
