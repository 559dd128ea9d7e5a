"""The table of endpoints: one line each, by the paths that both ends name."""

from kafka_marshal.remote import paths
from kafka_marshal.sidecar.routes import ROUTES


def test_each_path_is_used_and_each_name_once():
    known = {path for name, path in vars(paths).items() if name.isupper()}
    assert {route.path for route in ROUTES} == known
    assert len({route.name for route in ROUTES}) == len(ROUTES)
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)


def test_clients_ask_as_themselves_once_they_are_registered():
    of_client = {route.name for route in ROUTES if route.is_of_client}
    assert of_client == {
        *("leave", "events", "beat", "released", "children"),
        *("subscribe", "unsubscribe", "claim", "unclaim"),
    }


def test_probes_need_nothing():
    is_open = {route.name for route in ROUTES if route.is_open}
    assert is_open == {"livez", "readyz", "startupz", "openapi"}


def test_what_may_change_something_is_no_get():
    for route in ROUTES:
        assert route.takes is None or route.method != "GET", route.name
