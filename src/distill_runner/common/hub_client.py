"""HTTP client for all requests to the hub, whichever library makes them.

The client retries, waits as long as the hub asks it to, and resumes a file where its download was cut off.
"""

import logging
import re
import time
from collections.abc import Iterator
from itertools import count
from typing import Any, ClassVar

from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

from distill_runner.common.errors import brief

log = logging.getLogger(__name__)

STATUSES = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses of temporary failures, which are retried."""
FAULTS = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)
TRIES, TRIES_TO_CONNECT = 6, 2
LONGEST_WAIT = 330.0
"""Longest wait before a retry, in seconds. The hub counts requests in windows of five minutes."""
GIVEN_UP_SECONDS = 60.0
"""Seconds after a final failure during which requests are not retried, since the libraries retry by themselves."""
SECONDS_TO_ANSWER = 10.0


class PatientClient(httpx.Client):
    """Client that retries failed requests, and returns the response or raises the error of the last try."""

    given_up: ClassVar[float] = -GIVEN_UP_SECONDS
    """Time (``time.monotonic``) at which a request failed for good."""

    def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        for name in ("connect", "read", "write", "pool"):  # some requests are made without a timeout
            request.extensions.setdefault("timeout", {}).setdefault(name, None)
            request.extensions["timeout"][name] = request.extensions["timeout"][name] or SECONDS_TO_ANSWER
        response = self._send_again(request, stream, options)
        if stream and request.method == "GET" and "content-encoding" not in response.headers and response.is_success:
            response.stream = _Resumed(self, request, response, options)
        return response

    def _send_again(self, request: Any, stream: bool, options: dict[str, Any]) -> Any:
        for tried in count(1):
            try:
                response = super().send(request, stream=stream, **options)
            except FAULTS as error:
                tries = TRIES_TO_CONNECT if isinstance(error, httpx.ConnectError | httpx.TimeoutException) else TRIES
                if not self._waits(tried, tries, None, brief(error)):
                    raise
            else:
                if response.status_code not in STATUSES:
                    return response
                if not self._waits(
                    tried, TRIES, _asked_to_wait(response.headers), f"it answers {response.status_code}"
                ):
                    return response
                response.close()

    @classmethod
    def _waits(cls, tried: int, tries: int, asked: float | None, why: str) -> bool:
        """Return whether to try again, after waiting for the time that has to pass before the next try."""
        seconds = min(2.0 ** (tried - 1), 8.0) if asked is None else asked
        given_up = time.monotonic() - cls.given_up < GIVEN_UP_SECONDS
        if given_up or tried >= tries or seconds > LONGEST_WAIT:
            cls.given_up = time.monotonic() if not given_up else cls.given_up
            return False
        if seconds >= 2:
            log.info("the hub: %s; trying again in %.0f s", why, seconds)
        time.sleep(seconds)
        return True


class _Resumed(httpx.SyncByteStream):
    """Stream of a file's contents that requests the rest of the file when the connection breaks off."""

    def __init__(self, client: PatientClient, request: Any, response: Any, options: dict[str, Any]) -> None:
        self.client, self.request, self.response, self.options = client, request, response, options
        self.stream = response.stream
        asked = re.match(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        self.start, self.end = (int(asked[1]), asked[2]) if asked else (0, "")

    def __iter__(self) -> Iterator[bytes]:
        tried = 0
        while True:
            try:
                for chunk in self.stream:
                    self.start, tried = self.start + len(chunk), 0
                    yield chunk
                return
            except FAULTS as error:
                tried += 1
                if not self.client._waits(tried, TRIES, None, brief(error)) or not self._reopen():
                    raise

    def _reopen(self) -> bool:
        """Request the rest of the file; return whether the answer is the rest of the same file."""
        self.stream.close()
        headers = {**self.request.headers, "Range": f"bytes={self.start}-{self.end}"}
        extensions = {"timeout": self.request.extensions["timeout"]}
        rest = self.client.build_request("GET", self.request.url, headers=headers, extensions=extensions)
        response = self.client._send_again(rest, True, self.options)
        self.stream = response.stream
        return response.status_code == 206 and response.headers.get("etag") == self.response.headers.get("etag")

    def close(self) -> None:
        self.stream.close()


def _asked_to_wait(headers: Any) -> float | None:
    """Return the seconds to wait, from ``Retry-After`` or the hub's own rate limit header; None if neither says."""
    after, limit = headers.get("Retry-After", ""), re.search(r";t=(\d+)", headers.get("RateLimit", ""))
    return float(after) if re.fullmatch(r"\d+", after) else float(limit[1]) if limit else None


def connect() -> None:
    """Make all libraries use a ``PatientClient`` for the hub."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import hf_request_event_hook

    set_client_factory(
        lambda: PatientClient(event_hooks={"request": [hf_request_event_hook]}, follow_redirects=True, timeout=None)
    )
