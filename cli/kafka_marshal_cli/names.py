"""Names that shells complete: kept by commands that have just read the world.

Completing never asks a broker. The file is a cache: small, replaced as a whole,
and of no consequence when it is old, damaged or gone. Nothing goes into a shell
from it but names as the protocol has them (PROTOCOL 3.5).
"""

import json
import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from typer.models import ParameterInfo

from kafka_marshal import ConfigurationError, World
from kafka_marshal_cli import profiles

VERSION = 1
DOMAINS_MAX = 8
NAMES_MAX = 1_000
FILE_BYTES_MAX = 4_000_000
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,249}", re.ASCII)


def cache_path() -> Path:
    """Return where the names are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kafka-marshal" / "names.json"


def keep(world: World, servers: str, *, topic: str) -> None:
    """Keep the names of a world; where that cannot be, nothing happens."""
    groups, topics, clients = set(), set(), set()
    for state in world.partitions:
        for key, known in state.keys.items():
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
        with suppress(OSError):
            _write(json.dumps({"version": VERSION, "domains": domains}))


def _sorted(names: Iterable[str]) -> list[str]:
    # What no topic or group can be called (the protocol's own keys) drops out, too.
    return sorted(filter(_NAME.fullmatch, names))[:NAMES_MAX]


def _write(text: str) -> None:
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
    try:
        with cache_path().open("rb") as file:
            found = json.loads(file.read(FILE_BYTES_MAX))
        domains = found["domains"] if found["version"] == VERSION else []
        return [domain for domain in domains if isinstance(domain, dict)]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []


def _kept(kind: str, context: typer.Context, incomplete: str) -> list[str]:
    """Return names of the cluster that is meant, as far as that can be told."""
    domains = _domains()
    meant = (
        context.params.get("bootstrap_server"),
        context.params.get("coordination_topic"),
    )
    fitting = [d for d in domains if (d.get("servers"), d.get("topic")) == meant]
    found: list[str] = []
    for domain in fitting or domains[:1]:
        names = domain.get(kind)
        if isinstance(names, list):
            found += [name for name in names[:NAMES_MAX] if isinstance(name, str)]
    return [n for n in found if n.startswith(incomplete) and _NAME.fullmatch(n)]


def groups(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a group."""
    return _kept("groups", context, incomplete)


def topics(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a data topic."""
    return _kept("topics", context, incomplete)


def clients(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a client."""
    return _kept("clients", context, incomplete)


def profile_names(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a profile, out of the file itself."""
    given = context.params.get("config")
    try:
        found = profiles.load(given if isinstance(given, str) else None, None).names
    except ConfigurationError:
        return []
    return [n for n in found if n.startswith(incomplete) and _NAME.fullmatch(n)]


_BY_METAVAR = {"GROUP": groups, "TOPIC": topics}
_BY_NAME = {"client_id": clients}


def complete(name: str, annotation: object) -> None:
    """Have an option completed that says by its placeholder what it takes.

    Args:
        name: Of the parameter.
        annotation: Its type, with typer's own description in it.
    """
    for info in getattr(annotation, "__metadata__", ()):
        if not isinstance(info, ParameterInfo):
            continue
        found = _BY_NAME.get(name) or _BY_METAVAR.get(str(info.metavar))
        if found is not None and info.autocompletion is None:
            info.autocompletion = found
