"""Names for shell completion, cached by commands that have just read the log.

Completion never asks a broker. The file is small and replaced as a whole; an old,
damaged or missing one does no harm. Only names that the protocol allows
(PROTOCOL 3.5) reach a shell. Only this module reads and writes the file.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.models import ParameterInfo

from kafka_marshal_cli.profiles import SAFE_NAME

if TYPE_CHECKING:
    from kafka_marshal import World

VERSION = 1
DOMAINS_MAX = 8
NAMES_MAX = 1_000
FILE_BYTES_MAX = 4_000_000


def cache_path() -> Path:
    """Return the path of the cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kafka-marshal" / "names.json"


def save(world: "World", servers: str, *, topic: str) -> None:
    """Store the names of a world; a file that cannot be written is ignored."""
    from kafka_marshal.protocol.hashing import RESERVED_TOPICS

    groups, topics, clients = set(), set(), set()
    for state in world.partitions:
        for key, known in state.keys.items():
            if key.topic in RESERVED_TOPICS:
                continue  # the protocol's own key, of a group that nobody uses
            groups.add(key.group_id)
            topics.add(key.topic)
            if known.owner is not None:
                clients.add(known.owner.client_id)
        for member in state.soft.members.values():
            groups.add(member.record.group_id)
            clients.add(member.record.client_id)
    domain = {
        "servers": servers,
        "topic": topic,
        "groups": _sorted(groups),
        "topics": _sorted(topics),
        "clients": _sorted(clients),
    }
    before = _domains()
    others = [
        d for d in before if (d.get("servers"), d.get("topic")) != (servers, topic)
    ]
    domains = [domain, *others][:DOMAINS_MAX]
    if domains != before:
        import json

        with suppress(OSError, RuntimeError):  # also without a home directory
            _write(json.dumps({"version": VERSION, "domains": domains}))


def _sorted(names: Iterable[str]) -> list[str]:
    return sorted(filter(SAFE_NAME.fullmatch, names))[:NAMES_MAX]


def _write(text: str) -> None:
    import tempfile

    path = cache_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=".names-")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _domains() -> list[dict[str, Any]]:
    import json

    try:
        with cache_path().open("rb") as file:
            found = json.loads(file.read(FILE_BYTES_MAX))
        domains = found["domains"] if found["version"] == VERSION else []
        return [domain for domain in domains if isinstance(domain, dict)]
    # RuntimeError: JSON is nested too deeply, or the user has no home directory.
    except (OSError, ValueError, LookupError, TypeError, RuntimeError):
        return []


def _cached(kind: str, context: typer.Context, incomplete: str) -> list[str]:
    """Return names in the cluster of the call, else in the cluster read last."""
    domains = _domains()
    wanted = (
        context.params.get("bootstrap_server"),
        context.params.get("coordination_topic"),
    )
    fitting = [d for d in domains if (d.get("servers"), d.get("topic")) == wanted]
    found: list[str] = []
    for domain in fitting or domains[:1]:
        names = domain.get(kind)
        if isinstance(names, list):
            found += [name for name in names[:NAMES_MAX] if isinstance(name, str)]
    return [n for n in found if n.startswith(incomplete) and SAFE_NAME.fullmatch(n)]


def groups(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a group."""
    return _cached("groups", context, incomplete)


def topics(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a data topic."""
    return _cached("topics", context, incomplete)


def clients(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a client."""
    return _cached("clients", context, incomplete)


_BY_METAVAR = {"GROUP": groups, "TOPIC": topics, "CLIENT": clients}
_BY_NAME = {"client_id": clients}
# Options that have such a placeholder and take names of another kind.
_OTHERS = {"coordination_topic", "socket_group"}
# The first word of a placeholder: [CLIENT], TOPIC[:PARTITION], CLIENT=COUNT.
_KIND = re.compile(r"\[?([A-Z]+)")


def complete(name: str, annotation: object) -> None:
    """Add completion to an option whose name or placeholder shows its kind of names.

    Args:
        name: Name of the parameter.
        annotation: Its type, annotated with typer's description.
    """
    for info in getattr(annotation, "__metadata__", ()):
        if not isinstance(info, ParameterInfo):
            continue
        kind = _KIND.match(info.metavar or "")
        found = _BY_NAME.get(name)
        if found is None and kind is not None and name not in _OTHERS:
            found = _BY_METAVAR.get(kind[1])
        if found is not None and info.autocompletion is None:
            info.autocompletion = found
