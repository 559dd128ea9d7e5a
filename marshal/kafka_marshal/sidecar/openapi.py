"""The published description of the sidecar's API, made of what the code uses."""

import inspect
import re
from functools import cache
from typing import Any

import msgspec

from kafka_marshal import __version__
from kafka_marshal.remote import api, looking, paths
from kafka_marshal.sidecar.routes import EVENT_STREAM, ROUTES, Route

PATH = paths.OPENAPI
VERSION = "3.1.0"
_TEMPLATE = "#/components/schemas/{name}"
_ABOUT = """\
Holds claims of Kafka partitions for the processes of one host. Served over a Unix \
socket to the user that runs it, and to its socket-group; over loopback \
TCP with a token, where that is on: \
there the `Host` must be a loopback address or `localhost`, and a connection that has \
not shown the token gets one answer. \
Each answer that is no success is a `Failure`. Events come as server-sent events: \
`id` is what to show as `Last-Event-ID`, `event` the tag of the body, `data` the body \
(schema `EventBody`); unknown events are to be passed over. An event may come twice."""
_NAMES = {
    "group": "Group: 1 to 200 of A-Z a-z 0-9 . _ : -, not . or ..",
    "client": "Name of the client, unique in the group at this sidecar.",
    "name": "Name of the subscription, chosen by the client.",
    "topic": "Data topic.",
    "partition": "Data partition.",
}


@cache
def text() -> bytes:
    """Return the description as it is served."""
    return msgspec.json.format(msgspec.json.encode(document()), indent=2)


def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    found: dict[str, Any] = {}
    for route in ROUTES:
        found.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": VERSION,
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
                    "description": "Over TCP only; the Unix socket knows its user.",
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
            "required": route.name != "leave",
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
        "description": "No success; what happened, why, and what to do next.",
        "content": {"application/json": {"schema": _reference(api.Failure)}},
    }
    content: dict[str, Any] = {"schema": {"type": "string"}}
    if route.answers is not None:
        content = {"schema": _reference(route.answers)}
    elif route.path == PATH:
        content = {"schema": {"type": "object"}}
    is_empty = route.answers is None and route.media == "application/json"
    if is_empty and route.path != PATH:
        return {"204": {"description": "Done."}, "default": failure}
    success = {"description": "Done.", "content": {route.media: content}}
    if route.is_open and route.path != PATH:
        return {"200": success, "503": {**success, "description": "Not so."}}
    return {"200": success, "default": failure}


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _TEMPLATE.format(name=kind.__name__)}


def _schemas() -> dict[str, Any]:
    kinds = {route.takes for route in ROUTES} | {route.answers for route in ROUTES}
    named = sorted((kind for kind in kinds if kind), key=lambda kind: kind.__name__)
    references, components = msgspec.json.schema_components(
        [*named, api.Failure, api.EventBody], ref_template=_TEMPLATE
    )
    # As JSON has it: no tuples among the defaults.
    components, events = msgspec.json.decode(
        msgspec.json.encode([components, references[-1]])
    )
    for name, schema in components.items():
        _describe(schema, getattr(api, name, None) or vars(looking)[name])
    return {**dict(sorted(components.items())), "EventBody": events}


def _describe(schema: dict[str, Any], kind: object) -> None:
    """Put what a docstring says of each attribute where readers look for it."""
    about, _, attributes = (inspect.getdoc(kind) or "").partition("\n\nAttributes:\n")
    schema["description"] = about
    for found in re.finditer(
        r"^    (\w+): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE
    ):
        name, words = found.groups()
        told = schema.get("properties", {}).get(name)
        if told is not None:
            told["description"] = " ".join(words.split())
