"""Which members stand by for a key: they warm up before its owner dies (PROTOCOL 9.9).

A pure function that every member computes for itself; no record names standbys.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from kafka_marshal.protocol.types import Key

_DIGEST_BYTES = 8


class Candidate(NamedTuple):
    """A live member that may stand by for the keys of its topics.

    Attributes:
        name: client_id.
        host: Its machine, "" = unknown.
        number: Rank among a key's standbys up to which it stands by, at least 1.
    """

    name: str
    host: str
    number: int


def standbys_of(
    key: Key, *, owner: str, host: str, candidates: Iterable[Candidate]
) -> tuple[str, ...]:
    """Return the standbys of a key, in the order in which they take it over.

    One member of each host comes first, then the others; members on the owner's host
    come last. Among equals, digests of key and member decide.

    Args:
        key: The key.
        owner: Its owner, which is no standby of its own key.
        host: Host of the owner, "" = unknown, which counts as a host like any other.
        candidates: Members that subscribe to the topic, and may take keys.
    """
    rows = sorted(
        (_digest(key, each.name), each) for each in candidates if each.name != owner
    )
    firsts: list[Candidate] = []
    others: list[Candidate] = []
    beside: list[Candidate] = []
    hosts = {host}
    for _, each in rows:
        if each.host == host:
            beside.append(each)
        elif each.host in hosts:
            others.append(each)
        else:
            hosts.add(each.host)
            firsts.append(each)
    ranked = enumerate((*firsts, *others, *beside))
    return tuple(each.name for rank, each in ranked if rank < each.number)


def _digest(key: Key, name: str) -> bytes:
    text = f"{key.group_id}\0{key.topic}\0{key.partition}\0{name}"
    return blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
