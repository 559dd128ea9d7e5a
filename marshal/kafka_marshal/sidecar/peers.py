"""Who is at the other end of a connection, and whether that may be.

Over a Unix socket the kernel tells: process, user and group of whoever connected,
at the moment of connecting. A process id can be used again by another process, so
it goes with the time at which its process started. Over TCP nobody tells; a token
takes its place, and there is no process that could be watched.
"""

import hmac
import os
import socket
import struct
from pathlib import Path

import attrs

_UCRED = struct.Struct("3i")
# Of Linux; the module socket does not name it.
_SO_PEERGROUPS = 59
_GROUPS_MAX = 256
_START_FIELD = 19  # the 22nd of proc(5), counted behind the command's name


@attrs.frozen
class Peer:
    """The process at the other end.

    Attributes:
        pid: Its id, None where nobody tells (TCP, another namespace).
        uid: Its user, None where nobody tells.
        started: When it started, in clock ticks since the boot; with it a ``pid``
            that was used again is another process. None where it is gone.
        gids: Its groups.
    """

    pid: int | None
    uid: int | None
    started: int | None
    gids: frozenset[int] = attrs.field(default=frozenset(), eq=False)


@attrs.frozen
class Caller:
    """Which client asks: what its requests say of it.

    Attributes:
        group_id: Its group.
        client_id: Its name in the group, known to this sidecar only.
        instance: Which process of that name it is, 16 bytes in hex.
    """

    group_id: str
    client_id: str
    instance: str


NOBODY = Peer(None, None, None)


def started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot, None if gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command stands in parentheses and may hold any byte, these as well.
    fields = text.rpartition(b")")[2].split()
    return int(fields[_START_FIELD]) if len(fields) > _START_FIELD else None


def peer_of(connection: socket.socket) -> Peer:
    """Return who connected, as the kernel saw it; ``NOBODY`` over TCP."""
    if connection.family != socket.AF_UNIX:
        return NOBODY
    try:
        found = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size
        )
    except OSError:
        return NOBODY
    pid, uid, gid = _UCRED.unpack(found)
    gids = _groups_of(connection) | {gid}
    # The kernel says 0 of a process that this one's namespace cannot see.
    return Peer(pid or None, uid, started(pid) if pid else None, gids)


def _groups_of(connection: socket.socket) -> frozenset[int]:
    """Return the supplementary groups of a peer; none where the kernel names none."""
    size = _GROUPS_MAX * 4
    try:
        found = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, size)
    except OSError:  # not Linux, or more groups than that
        return frozenset()
    return frozenset(gid for (gid,) in struct.iter_unpack("I", found))


def stood_for(peer: Peer, pid: int) -> Peer | None:
    """Return the process that a peer speaks for, None where it may not.

    That is a process of its own user; the superuser may speak for any. Otherwise
    somebody could have a stranger's life stand for a client's.
    """
    found_at = started(pid)
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
    if found_at is None or peer.uid not in {uid, 0}:
        return None
    return Peer(pid, uid, found_at)


def may_use(peer: Peer, gid: int | None = None) -> bool:
    """Return whether a peer of the Unix socket may use this sidecar.

    Its user must be ours, or the superuser, who could do anything anyhow.

    Args:
        peer: The peer.
        gid: Group whose members may use it as well.
    """
    return peer.uid in {os.geteuid(), 0} or gid in peer.gids


def is_same(given: bytes, secret: bytes) -> bool:
    """Return whether a token is the right one, in time that tells nothing of it."""
    return hmac.compare_digest(given, secret)
