"""The table of endpoints, and the OpenAPI description generated from it."""

import json
import re

import msgspec
import pytest
from fakeservice import SNAPSHOT, assigned
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from starlette.routing import Route as Place

from kafka_marshal.remote import api, paths
from kafka_marshal.sidecar import routes
from kafka_marshal.sidecar.http_app import App
from kafka_marshal.sidecar.routes import ROUTES

# --- Routes ---


def test_every_path_has_a_route_and_route_names_are_unique():
    known = {path for name, path in vars(paths).items() if name.isupper()}
    assert {route.path for route in ROUTES} == known
    assert len({route.name for route in ROUTES}) == len(ROUTES)
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)


def test_requests_of_registered_clients_require_their_instance():
    of_client = {route.name for route in ROUTES if route.is_of_client}
    assert of_client == {
        *("leave", "events", "beat", "released", "ready", "children"),
        *("subscribe", "unsubscribe", "claim", "unclaim"),
    }


def test_probes_and_the_openapi_document_need_no_token():
    is_open = {route.name for route in ROUTES if route.is_open}
    assert is_open == {"livez", "readyz", "startupz", "openapi"}


def test_get_requests_have_no_body():
    for route in ROUTES:
        assert route.takes is None or route.method != "GET", route.name


# --- OpenAPI ---


DOCUMENT = routes.openapi_document()


def test_the_openapi_document_is_valid():
    validate(DOCUMENT)
    assert json.loads(routes.openapi_text()) == DOCUMENT


def test_the_openapi_document_describes_exactly_the_served_routes():
    app = App(states=None, metrics=None)
    served = {
        (method, place.path)
        for place in app._asgi.routes  # type: ignore[attr-defined]
        if isinstance(place, Place)
        for method in place.methods
    }
    app.close()
    described = {
        (method.upper(), path)
        for path, operations in DOCUMENT["paths"].items()
        for method in operations
    }
    assert served == described
    assert len(served) == len(ROUTES)


def operations():
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            yield path, operation


def test_each_operation_id_is_the_name_of_a_route():
    names = [operation["operationId"] for _, operation in operations()]
    assert sorted(names) == sorted(route.name for route in ROUTES)


def test_each_variable_of_a_path_is_described_as_a_parameter():
    for path, operation in operations():
        named = {
            each["name"] for each in operation["parameters"] if each["in"] == "path"
        }
        assert named == set(re.findall(r"{(\w+)}", path))


def test_client_operations_need_the_instance_header():
    needing = {
        operation["operationId"]
        for _, operation in operations()
        if any(each["name"] == api.INSTANCE_HEADER for each in operation["parameters"])
    }
    assert needing >= {"beat", "leave", "events", "subscribe", "claim"}
    assert needing.isdisjoint({"register", "grant", "info", "world"})


def test_every_operation_with_a_token_describes_its_failure():
    for _, operation in operations():
        if operation.get("security") != []:
            found = operation["responses"]["default"]["content"]["application/json"]
            assert found["schema"] == {"$ref": "#/components/schemas/Failure"}


def test_each_schema_describes_all_of_its_fields_or_none():
    for name, schema in DOCUMENT["components"]["schemas"].items():
        if name in {"EventBody", "SubscriptionSpec", "SubscribeResponse"}:
            continue  # a union, and types with descriptions of their own
        fields = schema["properties"]
        mute = [
            field
            for field, found in fields.items()
            if "description" not in found and field != "type"
        ]
        # A docstring that lists attributes lists all of them.
        assert mute in ([], [field for field in fields if field != "type"]), name


@pytest.mark.parametrize(
    "body",
    [
        SNAPSHOT,
        assigned(),
        api.Releasing(topic="orders", partition=3, epoch=17, reason="surplus"),
        api.Lost(topic="orders", partition=3, epoch=17, reason="taken_over"),
        api.Paused(is_paused=True, until_wall_ms=1, reason="deploy"),
        api.Failed(failure=api.Failure(error="LogUnreadable", message="gone")),
    ],
    ids=lambda body: type(body).__name__,
)
def test_events_match_the_openapi_schema(body):
    schema = {"$ref": "#/components/schemas/EventBody", **DOCUMENT}
    validator = Draft202012Validator(schema)
    validator.validate(msgspec.json.decode(msgspec.json.encode(body)))
    assert not validator.is_valid({"type": "warm"})


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("RegisterRequest", {"instance": "ab" * 16, "beat_ms": 1}, {"beat_ms": 1}),
        ("Children", {"pids": [1]}, {"pids": [0]}),
        ("SubscriptionSpec", {"topics": ["a"]}, {"topics": ["a/b"]}),
        ("HeartbeatRequest", {}, {"timeout_ms": api.WAIT_MS_MAX + 1}),
    ],
)
def test_the_openapi_schema_refuses_the_same_values_as_decoding(kind, good, bad):
    schema = {"$ref": f"#/components/schemas/{kind}", **DOCUMENT}
    validator = Draft202012Validator(schema)
    assert validator.is_valid(good)
    assert not validator.is_valid(bad)
    known = getattr(api, kind)
    msgspec.convert(good, known)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(bad, known)
