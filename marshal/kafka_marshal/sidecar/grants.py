"""Checks requests for offsets at most once, and recognizes repeated ones.

PROTOCOL 12: a process touches only what it claimed. So each request shows the secret of
its claim, and reaches no further than the end of the data partition.

If a request is appended twice, two ranges are granted, and no process receives the
range of the lost response. So clients number their requests, and a repeated request is
answered from the record that was appended for it. Each grantee has its own numbers, so
no two processes ever get the same grant (PROTOCOL 6.2).
"""

import hmac
import threading
from collections import OrderedDict
from functools import partial
from typing import Protocol

import attrs

from kafka_marshal.arguments import require_name
from kafka_marshal.engine import Context
from kafka_marshal.engine.proxy_grants import PendingGrant, ProxyGrants
from kafka_marshal.errors import ClaimRejected, ConfigurationError, CoordinationError
from kafka_marshal.ports import DataLog
from kafka_marshal.protocol.claiming import grant_secret
from kafka_marshal.protocol.granting import GrantRequest, GrantVerdict
from kafka_marshal.protocol.state import IGNORED, WorldState
from kafka_marshal.protocol.types import OffsetRange, TopicPartition
from kafka_marshal.remote import api
from kafka_marshal.remote.grants import decode_request
from kafka_marshal.sidecar.http_errors import WRONG_SECRET

ENDS_MAX = 10_000
GRANTEES_MAX = 1_000
NUMBERS_MAX = 64


class OnGranted(Protocol):
    """Records granted ranges."""

    def __call__(self, granted: OffsetRange, *, is_late: bool) -> None:
        """Record a range.

        The range is late if no caller waited for it. If the request is repeated later,
        the range is recorded again, as not late.
        """


Claim = tuple[TopicPartition, int, tuple[int, ...] | None]
Sender = tuple[str, bytes, bytes]
"""Group, grantee, and the secret of the request."""


@attrs.frozen(kw_only=True)
class NumberedRequest:
    """A client's request for offsets at most once.

    Attributes:
        request: The request.
        secret: Secret of the claim, as the client knows it.
        number: Number of the request among those of its grantee, None without one.
    """

    request: GrantRequest
    secret: bytes
    number: int | None

    @property
    def sender(self) -> Sender:
        """The sender that the number belongs to."""
        return self.request.key.group_id, self.request.grantee, self.secret


def numbered_request(group_id: str, message: api.GrantRequest) -> NumberedRequest:
    """Return the request in a message.

    Raises:
        ConfigurationError: It requests nothing, or names no group or token.
    """
    require_name("group_id", group_id)
    try:
        request = decode_request(group_id, message)
    except ValueError as error:
        raise ConfigurationError(str(error), setting="token") from error
    if message.last < message.first:
        raise ConfigurationError(
            f"the range {message.first} to {message.last} is empty: last is below "
            "first",
            setting="last",
        )
    return NumberedRequest(
        request=request,
        secret=bytes.fromhex(message.secret),
        number=message.request,
    )


class Grants:
    """Checks requests for offsets, and appends those that are allowed.

    Args:
        context: State of the coordination log.
        requests: Appends requests.
        data: Looks up where data partitions end.
    """

    def __init__(
        self, context: Context, requests: ProxyGrants, *, data: DataLog
    ) -> None:
        self._context = context
        self._data = data
        self._cache = IdempotencyCache(requests)
        self._lock = threading.Lock()
        self._ends: OrderedDict[Claim, int] = OrderedDict()

    def has_read(self, request: GrantRequest) -> bool:
        """Return whether the claim has been read. Under the engine's lock."""
        return not self._is_unread(request)

    def is_over(self, request: GrantRequest) -> bool:
        """Return whether the claim has ended. Under the engine's lock."""
        return self._verdict_if_over(request) is not None

    def is_sendable(self, request: GrantRequest) -> bool:
        """Return whether ``send`` may be called without a wait for the claim or an end.

        Called under the engine's lock.
        """
        if self._is_unread(request):
            return False
        with self._lock:
            end = self._ends.get(_claim_of(request), 0)
        return request.last < end or self.is_over(request)

    def send(self, numbered: NumberedRequest, *, note: OnGranted) -> PendingGrant:
        """Append a request, or return the earlier one with the same number.

        Called under the engine's lock. A request under a claim that has ended is
        answered at once, without a record in the log.

        Args:
            numbered: The request.
            note: Called with the granted range.

        Raises:
            ClaimRejected: It does not show the secret of the claim.
            ConfigurationError: Its number was used for another request.
            CoordinationError: The claim is not read yet; or too many requests have no
                verdict.
        """
        request = numbered.request
        verdict = self._verdict_if_over(request)
        if verdict is None:
            self.require_secret(numbered)
            return self._cache.send(numbered, note=note)
        before = self._cache.find(numbered)
        if before is not None:
            return before
        now_ms = self._context.now_ms
        return PendingGrant(
            request=request, sent_ms=now_ms, append=None, verdict=verdict
        )

    def require_secret(self, numbered: NumberedRequest) -> None:
        """Require that a request shows the secret of its claim.

        Called under the engine's lock.

        Raises:
            ClaimRejected: It does not.
            CoordinationError: The claim is not read yet.
        """
        request = numbered.request
        key, client_id = request.key, request.owner.client_id
        world = self._place(request)
        known = world.keys.get(key)
        if known is None or known.epoch < request.epoch or _is_later(request, world):
            raise CoordinationError(
                f"this sidecar has not read the claim of {key.topic_partition} at log "
                f"offset {request.epoch} yet; ask again in a moment"
            )
        known_hash = known.resume_hash
        if known_hash is None or not hmac.compare_digest(
            numbered.secret, grant_secret(known_hash, key, epoch=request.epoch)
        ):
            raise ClaimRejected(
                f"the request does not show the secret of the claim of "
                f"{key.topic_partition} that {client_id!r} holds; take it from the "
                "event 'assigned', or from the ClaimRef of the claim's holder",
                holder=client_id,
                at_offset=request.epoch,
                reason=WRONG_SECRET,
            )

    def require_end(self, request: GrantRequest, *, timeout_ms: int) -> None:
        """Require that a request ends within the data partition.

        The cluster is only asked about offsets beyond the known end, because an end
        only grows under one claim: that of a topic created again is another. Blocks;
        called without the engine's lock.

        Raises:
            ConfigurationError: It reaches beyond the end.
            CoordinationError: The cluster did not answer, or does not know the
                partition, at the moment.
        """
        place, last = request.key.topic_partition, request.last
        claim = _claim_of(request)
        with self._lock:
            if last < self._ends.get(claim, 0):
                return
        end = self._data.ends([place], timeout_ms).get(place)
        if end is None:
            raise CoordinationError(
                f"the brokers do not know partition {place}, so its end is unknown; "
                "check the topic with: marshal doctor, and try again"
            )
        with self._lock:
            self._ends[claim] = end
            self._ends.move_to_end(claim)
            while len(self._ends) > ENDS_MAX:
                self._ends.popitem(last=False)
        if last >= end:
            raise ConfigurationError(
                f"the request reaches offset {last} of {place}, whose log ends at "
                f"{end}: offsets granted before they are written are lost for the "
                "group; request only what was fetched",
                setting="last",
            )

    def _verdict_if_over(self, request: GrantRequest) -> GrantVerdict | None:
        """Return the verdict if the claim has ended, None if the log must decide."""
        world = self._place(request)
        known = world.keys.get(request.key)
        if _is_later(request, world):
            return None
        verdict = request.verdict_if_over(known)
        if verdict is not None or known is None:
            return verdict
        if known.epoch == request.epoch:
            if request.token in {None, world.token(request.key)}:
                return None
        elif self._is_unread(request):
            return None
        # The claim is of the coordinating partition that the key has moved from.
        return GrantVerdict(
            outcome=IGNORED,
            reason="not_owner",
            head=known.next_unclaimed(),
            offset=None,
        )

    def _is_unread(self, request: GrantRequest) -> bool:
        """Return whether the claim may be in a part of the log that is not read yet."""
        key, world = request.key, self._place(request)
        known = world.keys.get(key)
        if _is_later(request, world):
            return True
        if known is not None and known.epoch >= request.epoch:
            return False
        # Epochs of two coordinating partitions do not compare (PROTOCOL 10).
        world = self._context.replica_of(key).world
        has_moved = known is not None and (world.layout is not None or not known.epoch)
        return not has_moved or world.next_offset <= request.epoch

    def _place(self, request: GrantRequest) -> WorldState:
        """Return the world that has the claim, else the one that has the key now."""
        key, claim = request.key, (request.epoch, request.owner)
        for replica in self._context.replicas.values():
            known = replica.world.keys.get(key)
            if known is None or (known.epoch, known.owner) != claim:
                continue
            if request.token in {None, replica.world.token(key)}:
                return replica.world
        return self._context.replica_of(key).world


def _claim_of(request: GrantRequest) -> Claim:
    return request.key.topic_partition, request.epoch, request.token


def _is_later(request: GrantRequest, world: WorldState) -> bool:
    """Return whether a request's claim is later than the key's claim in a world."""
    token = world.token(request.key)
    return request.token is not None and token is not None and token < request.token


@attrs.define(eq=False, kw_only=True)
class _Appended:
    """A request that was appended.

    Attributes:
        pending: The request in flight.
        note: Called with the granted range.
        is_noted: Whether ``note`` was called.
        is_late: Whether no caller waited for the range.
    """

    pending: PendingGrant
    note: OnGranted
    is_noted: bool = False
    is_late: bool = False

    @property
    def is_failed(self) -> bool:
        """Whether its append failed, so far without a verdict (PROTOCOL 1.4)."""
        return self.pending.verdict is None and self.pending.error is not None

    def report(self, granted: OffsetRange) -> None:
        """Report the granted range to a caller, once."""
        if self.is_late or not self.is_noted:
            self.is_noted, self.is_late = True, False
            self.note(granted, is_late=False)

    def report_late(self, granted: OffsetRange) -> None:
        """Report the granted range, which no caller waits for."""
        self.is_noted = self.is_late = True
        self.note(granted, is_late=True)

    def repeat(self) -> PendingGrant:
        """Return the original request for a repeated one."""
        verdict = self.pending.verdict
        if verdict is None:
            self.pending.on_granted = self.report
        elif verdict.granted is not None:
            self.report(verdict.granted)
        return self.pending


class IdempotencyCache:
    """The last numbered requests of each grantee. Used under the engine's lock.

    A repeated request that the cache no longer has is appended again: that costs the
    range of the lost response, and never hands out an offset twice.
    """

    def __init__(self, requests: ProxyGrants) -> None:
        self._requests = requests
        self._senders: OrderedDict[Sender, OrderedDict[int, _Appended]] = OrderedDict()

    def send(self, numbered: NumberedRequest, *, note: OnGranted) -> PendingGrant:
        """Append a request, or return the earlier one with the same number.

        Args:
            numbered: The request.
            note: Called with the granted range.

        Raises:
            ConfigurationError: Its number was used for another request.
            CoordinationError: As ``ProxyGrants.send``.
        """
        if numbered.number is None:
            on_granted = partial(note, is_late=False)
            return self._requests.send(numbered.request, on_granted=on_granted)
        before = self.find(numbered)
        if before is not None:
            return before
        numbers = self._numbers_of(numbered.sender)
        # A failed append may still be written; its range is lost, as without numbers.
        appended = _Appended(pending=self._requests.send(numbered.request), note=note)
        appended.pending.on_granted = appended.report
        appended.pending.on_late = appended.report_late
        numbers[numbered.number] = appended
        while len(numbers) > NUMBERS_MAX:
            numbers.popitem(last=False)
        return appended.pending

    def find(self, numbered: NumberedRequest) -> PendingGrant | None:
        """Return the earlier request of this number, None without one.

        Raises:
            ConfigurationError: Its number was used for another request.
        """
        numbers = self._senders.get(numbered.sender)
        if numbers is None or numbered.number is None:
            return None
        before = numbers.get(numbered.number)
        if before is None:
            return None
        if not _is_same(before.pending.request, numbered.request):
            raise ConfigurationError(
                f"request number {numbered.number} was already used for another range; "
                "use a new number for each request",
                setting="request",
            )
        if before.is_failed:
            return None
        self._senders.move_to_end(numbered.sender)
        return before.repeat()

    def _numbers_of(self, sender: Sender) -> OrderedDict[int, _Appended]:
        numbers = self._senders.setdefault(sender, OrderedDict())
        self._senders.move_to_end(sender)
        while len(self._senders) > GRANTEES_MAX:
            self._senders.popitem(last=False)
        return numbers


def _is_same(one: GrantRequest, other: GrantRequest) -> bool:
    """Return whether two requests are equal apart from their marks."""
    return attrs.evolve(one, mark=None) == attrs.evolve(other, mark=None)
