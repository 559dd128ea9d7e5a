"""The endpoints of the API, and the OpenAPI document generated from them.

The application serves this table, and the published description is generated from it,
so both always have the same endpoints.
"""

import inspect
import re
from functools import cache
from typing import Any, Literal

import attrs
import msgspec

from kafka_marshal import __version__
from kafka_marshal.remote import answers, api, paths

# --- Routes ----------------------------------------------------------------------


Method = Literal["GET", "PUT", "POST", "DELETE"]


@attrs.frozen
class Query:
    """A query parameter; ``most`` bounds an integer."""

    name: str
    kind: Literal["boolean", "integer"]
    about: str
    most: int = attrs.field(default=api.WAIT_MS_MAX, kw_only=True)


@attrs.frozen(kw_only=True)
class Route:
    """One endpoint.

    Attributes:
        name: Name of the operation, and of its handler.
        about: Summary in the OpenAPI document.
        takes: Type of the request body, None for none.
        answers: Type of the response body, None for none (204).
        waits: Whether it may wait for the log or for other processes.
        is_open: Whether it needs no token and no connected service, such as probes.
        is_admin: Whether it acts on a group, which a setting must allow.
        is_body_optional: Whether a request without a body means all defaults.
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
    is_admin: bool = False
    is_body_optional: bool = False
    queries: tuple[Query, ...] = ()

    @property
    def is_of_client(self) -> bool:
        """Whether a registered client calls it, with the header of its instance."""
        return "{client}" in self.path and self.name != "register"


TIMEOUT = Query("timeout_ms", "integer", "How long to wait for the log, in ms.")
KEEP = Query(
    "keep", "boolean", "Keep the leases with the client, for its next subscription."
)
REQUEST = Query(
    "request",
    "integer",
    "Increasing number of the request: an older one that arrives late is ignored.",
    most=2**31 - 1,
)
STEP_TIMEOUT = Query(
    "timeout_ms", "integer", "Longest time of each step of the action, in ms."
)
HISTORY_MAX = 10_000
LIMIT = Query(
    "limit",
    "integer",
    "Most actions to return, the last ones; 0 for all.",
    most=HISTORY_MAX,
)
EVENT_STREAM = "text/event-stream"
PLAIN = "text/plain"


def _view(name: str, path: str, found: type[msgspec.Struct], about: str) -> Route:
    """Return the endpoint of a query that waits for the end of the log."""
    return Route(
        method="GET",
        path=path,
        name=name,
        about=about,
        answers=found,
        waits=True,
        queries=(TIMEOUT,),
    )


def _action(
    name: str,
    path: str,
    *,
    takes: type[msgspec.Struct],
    answers: type[msgspec.Struct],
    about: str,
    is_body_optional: bool = False,
) -> Route:
    """Return the endpoint of an action on a group."""
    return Route(
        method="POST",
        path=path,
        name=name,
        about=about,
        takes=takes,
        answers=answers,
        waits=True,
        is_admin=True,
        is_body_optional=is_body_optional,
        queries=(STEP_TIMEOUT,),
    )


def _probe(name: str, path: str, what: str) -> Route:
    return Route(
        method="GET",
        path=path,
        name=name,
        about=f"{what}: 200 or 503, with reasons.",
        answers=answers.Verdict,
        is_open=True,
    )


ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        path=paths.INFO,
        name="info",
        about="What a client needs before it registers.",
        answers=api.Info,
    ),
    Route(
        method="PUT",
        path=paths.CLIENT,
        name="register",
        about="Join a group at this sidecar, or join it again.",
        takes=api.RegisterRequest,
        answers=api.RegisterResponse,
    ),
    Route(
        method="DELETE",
        path=paths.CLIENT,
        name="leave",
        about="Leave; a body is optional.",
        takes=api.LeaveRequest,
        answers=api.LeaveResponse,
        waits=True,
        is_body_optional=True,
    ),
    Route(
        method="GET",
        path=paths.EVENTS,
        name="events",
        about="The client's events as server-sent events: a snapshot, then every "
        "change in order; with Last-Event-ID, from that event on.",
        media=EVENT_STREAM,
    ),
    Route(
        method="POST",
        path=paths.BEAT,
        name="beat",
        about="Send a heartbeat with positions; get new deadlines.",
        takes=api.HeartbeatRequest,
        answers=api.HeartbeatResponse,
        waits=True,
        is_body_optional=True,
    ),
    Route(
        method="POST",
        path=paths.RELEASED,
        name="released",
        about="Confirm that the client has stopped using partitions.",
        takes=api.ReleaseRequest,
        waits=True,
    ),
    Route(
        method="POST",
        path=paths.READY,
        name="ready",
        about="Report that the client has warmed up for a partition. Idempotent.",
        takes=api.ReadyRequest,
    ),
    Route(
        method="PUT",
        path=paths.CHILDREN,
        name="children",
        about="Replace the processes that work for the client.",
        takes=api.Children,
    ),
    Route(
        method="PUT",
        path=paths.SUBSCRIPTION,
        name="subscribe",
        about="Consume topics; assignments come as events. Idempotent.",
        takes=api.SubscriptionSpec,
        answers=api.SubscribeResponse,
        waits=True,
    ),
    Route(
        method="POST",
        path=paths.SUBSCRIPTION_END,
        name="unsubscribe",
        about="End the subscription, with the final positions.",
        takes=api.ReleaseRequest,
        waits=True,
        queries=(KEEP,),
    ),
    Route(
        method="PUT",
        path=paths.CLAIM,
        name="claim",
        about="Claim one partition without consuming it. Idempotent. Once it is given "
        "back without an event `release`, or lost, it is not claimed again by itself.",
        queries=(REQUEST,),
    ),
    Route(
        method="DELETE",
        path=paths.CLAIM,
        name="unclaim",
        about="End the claim of one partition.",
        queries=(REQUEST,),
    ),
    Route(
        method="POST",
        path=paths.GRANTS,
        name="grant",
        about="Request a grant of offsets, for at most once (PROTOCOL 6.2).",
        takes=api.GrantRequest,
        answers=api.GrantResponse,
        waits=True,
    ),
    _view(
        "owners",
        paths.OWNERS,
        answers.OwnersNow,
        "The owner of each partition of a topic, by the log.",
    ),
    _view(
        "fence",
        paths.FENCE,
        answers.FenceNow,
        "The newest token of a partition, for sinks to compare with.",
    ),
    _view(
        "world",
        paths.WORLD,
        answers.WorldNow,
        "The whole state of the coordination log.",
    ),
    _view("groups", paths.GROUPS, answers.GroupsNow, "All groups, one entry each."),
    _view("group", paths.GROUP, answers.GroupNow, "Claims and pauses of one group."),
    _view(
        "plan",
        paths.PLAN,
        answers.PlanNow,
        "The plan of one group, and what became of it.",
    ),
    _action(
        "pause",
        paths.PAUSE,
        takes=api.PauseRequest,
        answers=answers.PauseNow,
        about="Pause a group.",
    ),
    _action(
        "resume",
        paths.RESUME,
        takes=api.ResumeRequest,
        answers=answers.ResumeNow,
        about="End a group's pause.",
        is_body_optional=True,
    ),
    _action(
        "reset",
        paths.RESET,
        takes=api.ResetRequest,
        answers=answers.ResetNow,
        about="Plan new positions of a group, or set them.",
    ),
    _action(
        "undo",
        paths.UNDO,
        takes=api.UndoRequest,
        answers=answers.ResetNow,
        about="Plan the undo of a reset, or execute it.",
    ),
    _action(
        "finish",
        paths.FINISH,
        takes=api.FinishRequest,
        answers=answers.FinishNow,
        about="End a reset whose admin died, as the log decided it.",
        is_body_optional=True,
    ),
    Route(
        method="GET",
        path=paths.HISTORY,
        name="history",
        about="What admins did to a group, from the log.",
        answers=answers.HistoryNow,
        waits=True,
        is_admin=True,
        queries=(STEP_TIMEOUT, LIMIT),
    ),
    _view(
        "clients",
        paths.CLIENTS,
        answers.ClientsNow,
        "The clients that are registered at this sidecar.",
    ),
    _probe("livez", paths.LIVEZ, "Liveness"),
    _probe("readyz", paths.READYZ, "Readiness"),
    _probe("startupz", paths.STARTUPZ, "Startup"),
    Route(
        method="GET",
        path=paths.METRICS,
        name="metrics",
        about="Metrics for Prometheus.",
        media=PLAIN,
    ),
    Route(
        method="GET",
        path=paths.OPENAPI,
        name="openapi",
        about="This OpenAPI document.",
        media="application/json",
        is_open=True,
    ),
)


# --- OpenAPI ---------------------------------------------------------------------


OPENAPI_PATH = paths.OPENAPI
OPENAPI_VERSION = "3.1.0"
_TEMPLATE = "#/components/schemas/{name}"
_ABOUT = """\
Holds claims of Kafka partitions for the processes of one host. Served over a Unix \
socket to the user that runs it, and to its socket-group; over loopback \
TCP with a token, where that is on: \
there the `Host` must be a loopback address or `localhost`, and a connection without \
the token gets one response. \
Every error response is a `Failure`. Events come as server-sent events: \
`id` goes into `Last-Event-ID`, `event` is the tag of the body, `data` the body \
(schema `EventBody`); ignore unknown events. An event may come twice."""
_NAMES = {
    "group": "Group: 1 to 200 of A-Z a-z 0-9 . _ : -, not . or ..",
    "client": "Name of the client, unique in the group at this sidecar.",
    "name": "Name of the subscription, chosen by the client.",
    "topic": "Data topic.",
    "partition": "Data partition.",
}


@cache
def openapi_text() -> bytes:
    """Return the OpenAPI document as it is served."""
    return msgspec.json.format(msgspec.json.encode(openapi_document()), indent=2)


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    found: dict[str, Any] = {}
    for route in ROUTES:
        found.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "kafka-marshal sidecar",
            "version": __version__,
            "summary": "Claims for the processes of one host.",
            "description": _ABOUT,
        },
        "servers": [{"url": "http://localhost", "description": "The Unix socket."}],
        "paths": found,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Over TCP only; the Unix socket checks the user.",
                }
            },
        },
        "security": [{}, {"token": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.about,
        "parameters": _parameters(route),
        "responses": _responses(route),
    }
    if route.takes is not None:
        operation["requestBody"] = {
            "required": not route.is_body_optional,
            "content": {"application/json": {"schema": _reference(route.takes)}},
        }
    if route.is_open:
        operation["security"] = []
    return operation


def _parameters(route: Route) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in re.findall(r"{(\w+)}", route.path):
        is_number = name == "partition"
        schema = {"type": "integer", "minimum": 0} if is_number else {"type": "string"}
        found.append(
            {
                "name": name,
                "in": "path",
                "required": True,
                "description": _NAMES[name],
                "schema": schema,
            }
        )
    if route.is_of_client:
        found.append(
            {
                "name": api.INSTANCE_HEADER,
                "in": "header",
                "required": True,
                "description": "The instance that was registered.",
                "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
            }
        )
    if route.media == EVENT_STREAM:
        found.append(
            {
                "name": api.EVENT_ID_HEADER,
                "in": "header",
                "required": False,
                "description": "Id of the last event that was seen.",
                "schema": {"type": "string"},
            }
        )
    found += [
        {
            "name": query.name,
            "in": "query",
            "required": False,
            "description": query.about,
            "schema": {"type": query.kind},
        }
        for query in route.queries
    ]
    return found


def _responses(route: Route) -> dict[str, Any]:
    failure = {
        "description": "Error: what happened, why, and what to do next.",
        "content": {"application/json": {"schema": _reference(api.Failure)}},
    }
    content: dict[str, Any] = {"schema": {"type": "string"}}
    if route.answers is not None:
        content = {"schema": _reference(route.answers)}
    elif route.path == OPENAPI_PATH:
        content = {"schema": {"type": "object"}}
    is_empty = route.answers is None and route.media == "application/json"
    if is_empty and route.path != OPENAPI_PATH:
        return {"204": {"description": "Done."}, "default": failure}
    success = {"description": "Done.", "content": {route.media: content}}
    if route.is_open and route.path != OPENAPI_PATH:
        return {
            "200": success,
            "503": {**success, "description": "The check failed, with reasons."},
        }
    return {"200": success, "default": failure}


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _TEMPLATE.format(name=kind.__name__)}


def _schemas() -> dict[str, Any]:
    kinds = {route.takes for route in ROUTES} | {route.answers for route in ROUTES}
    named = sorted((kind for kind in kinds if kind), key=lambda kind: kind.__name__)
    references, components = msgspec.json.schema_components(
        [*named, api.Failure, api.EventBody], ref_template=_TEMPLATE
    )
    # Encoded and decoded as JSON, so that defaults contain no tuples.
    components, events = msgspec.json.decode(
        msgspec.json.encode([components, references[-1]])
    )
    for name, schema in components.items():
        _describe(schema, getattr(api, name, None) or vars(answers)[name])
    return {**dict(sorted(components.items())), "EventBody": events}


def _describe(schema: dict[str, Any], kind: object) -> None:
    """Copy the descriptions of attributes from a docstring into a schema."""
    about, _, attributes = (inspect.getdoc(kind) or "").partition("\n\nAttributes:\n")
    schema["description"] = about
    for found in re.finditer(
        r"^    (\w+): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE
    ):
        name, words = found.groups()
        described = schema.get("properties", {}).get(name)
        if described is not None:
            described["description"] = " ".join(words.split())
