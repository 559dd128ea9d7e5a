"""Tokens for logins by OAUTHBEARER: those of a user's provider, or of a token endpoint.

Client libraries request a token for each connection, on threads that must not block for
long, so a wait for a token takes a few seconds at most.
"""

import base64
import binascii
import json
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_plus, urlencode, urlsplit

from kafka_marshal.closing import begin
from kafka_marshal.errors import CoordinationError

if TYPE_CHECKING:
    from concurrent.futures import Future

REQUEST_TIMEOUT_S = 5.0
# Time between two requests for a new token while the last one is still valid.
RETRY_S = 5.0
# Requests that may go on after their deadline, each on a thread.
LATE_MAX = 4
# Lifetime of tokens without an expiry.
TOKEN_LIFE_S = 300.0
# The part of its life after which a token is renewed: before librdkafka requests one.
_RENEWED_AT = 0.75
_RESPONSE_BYTES_MAX = 1024 * 1024
_SHOWN_MAX = 200
# What a request that gets no token raises, or reading an answer without one.
_NO_TOKEN = (OSError, RuntimeError, KeyError, TypeError, ValueError, AttributeError)


def expiry_of(token: str) -> float:
    """Return the expiry of a JWT in epoch seconds; a default for other tokens."""
    unknown = time.time() + TOKEN_LIFE_S
    try:
        part = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        return float(claims["exp"])
    except (IndexError, KeyError, TypeError, ValueError, binascii.Error):
        return unknown


def _post(
    url: str, body: bytes, *, headers: dict[str, str], cafile: str | None
) -> bytes:
    """Send a request to a token endpoint; return the body of its response.

    Raises:
        OSError: There is no answer, or it is a refusal or no HTTP.
    """
    # Their import takes longer than most programs take to connect.
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import HTTPSHandler, Request, build_opener

    # The settings allow http and https alone.
    request = Request(url, body, headers, method="POST")  # noqa: S310
    context = ssl.create_default_context()
    if cafile is not None:
        context.load_verify_locations(cafile)
    opener = build_opener(HTTPSHandler(context=context))
    try:
        with opener.open(request, timeout=REQUEST_TIMEOUT_S) as response:
            answer: bytes = response.read(_RESPONSE_BYTES_MAX)
            return answer
    except HTTPError as error:
        with error:
            shown = error.read(_SHOWN_MAX).decode(errors="replace")
        raise OSError(f"{error}: {' '.join(shown.split())}") from error
    except HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


class ClientCredentials:
    """Tokens of the client credentials flow (RFC 6749, 4.4). Thread-safe.

    A token is used until three quarters of its life are over, and until its end while
    the endpoint does not answer. Callers wait for a new one only if the last one has
    expired, except the one that requests it.

    Attributes:
        expires_at_s: When the last token expires, in epoch seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        client_id: str,
        client_secret: str,
        scope: str = "",
        cafile: str | None = None,
        now_s: Callable[[], float] = time.time,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; the first call of ``token`` requests one.

        Args:
            url: The token endpoint, http or https.
            client_id: Id of the client there.
            client_secret: Its secret, sent by HTTP's basic authentication.
            scope: Requested scope; empty for that of the client.
            cafile: Certificates to trust besides those of the system.
            now_s: The wall clock, in seconds.
            clock_s: A clock that is never set, for when that one is set back.
        """
        self._url = url
        self._login = f"{quote_plus(client_id)}:{quote_plus(client_secret)}"
        self._scope = scope
        self._cafile = cafile
        self._now_s, self._clock_s = now_s, clock_s
        self._lock = threading.Lock()
        self._token = ""
        self._late: list[Future[bytes]] = []
        # When the token is to be renewed, by either clock.
        self._renewed_at_s = self._renewed_clock_s = 0.0
        self.expires_at_s = 0.0

    def token(self) -> str:
        """Return a valid token; request one if it is time.

        Raises:
            CoordinationError: The endpoint gave none.
        """
        has_expired = self._now_s() >= self.expires_at_s
        if not self._is_due() or not self._lock.acquire(blocking=has_expired):
            return self._token
        try:
            if self._is_due():  # no other thread has renewed it
                self._renew()
        except CoordinationError:
            if self._now_s() >= self.expires_at_s:
                raise
            self._renew_within(RETRY_S, since_s=self._now_s())
        finally:
            self._lock.release()
        return self._token

    def _is_due(self) -> bool:
        is_late = self._now_s() >= self._renewed_at_s
        return is_late or self._clock_s() >= self._renewed_clock_s

    def _renew_within(self, wait_s: float, *, since_s: float) -> None:
        self._renewed_at_s = min(self.expires_at_s, since_s + wait_s)
        self._renewed_clock_s = self._clock_s() + wait_s

    def _renew(self) -> None:
        fields = {"grant_type": "client_credentials"}
        if self._scope:
            fields["scope"] = self._scope
        login = base64.b64encode(self._login.encode()).decode()
        headers = {"Authorization": f"Basic {login}", "Accept": "application/json"}
        body = urlencode(fields).encode()
        sent_s = self._now_s()
        try:
            found = self._post_in_time(body, headers)
            answer = json.loads(found)
            token = answer["access_token"]
            life_s = float(answer.get("expires_in") or TOKEN_LIFE_S)
        except _NO_TOKEN as error:
            raise CoordinationError(
                f"The token endpoint {urlsplit(self._url).netloc} returned no token: "
                f"{_reason(error)}"
            ) from error
        self._token = str(token)
        self.expires_at_s = sent_s + life_s
        self._renew_within(_RENEWED_AT * life_s, since_s=sent_s)

    def _post_in_time(self, body: bytes, headers: dict[str, str]) -> bytes:
        """Call ``_post`` with a deadline for the whole.

        The timeout of a socket is for each of its calls, and none is for the look-up of
        a name. Such a request goes on after the deadline.

        Raises:
            OSError: There is no answer in time, or it is a refusal or no HTTP; or too
                many earlier requests go on.
            RuntimeError: No thread can be started.
        """
        self._late = [each for each in self._late if not each.done()]
        if len(self._late) >= LATE_MAX:
            raise TimeoutError(f"{LATE_MAX} earlier requests have no answer yet")
        post = partial(_post, self._url, body, headers=headers, cafile=self._cafile)
        asked = begin(post, name="marshal-token")
        try:
            return asked.result(REQUEST_TIMEOUT_S)
        except TimeoutError as error:
            self._late.append(asked)
            raise TimeoutError(
                str(error) or f"no answer within {REQUEST_TIMEOUT_S:g} s"
            ) from error


def _reason(error: Exception) -> str:
    """Return why a request for a token failed."""
    return str(error) if type(error) is OSError else f"{type(error).__name__}: {error}"


def extensions_of(provider: Any) -> dict[str, str]:
    """Return the SASL extensions of a provider, which need not have any."""
    return dict(getattr(provider, "extensions", dict)())
