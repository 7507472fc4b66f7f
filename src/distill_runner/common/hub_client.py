"""The HTTP client of all requests to the hub, whichever library makes them.

It tries again, waits as long as the hub asks it to, and goes on with a file where it was cut off.
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
"""Answers that may be others a moment later."""
FAULTS = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)
TRIES, TRIES_TO_CONNECT = 6, 2
LONGEST_WAIT = 330.0
"""Seconds; the hub counts requests in windows of five minutes."""
GIVEN_UP_SECONDS = 60.0
"""So long after the hub has been given up, a request is tried once: libraries try again by themselves."""
SECONDS_TO_ANSWER = 10.0


class PatientClient(httpx.Client):
    """Raises what the last try came to."""

    given_up: ClassVar[float] = -GIVEN_UP_SECONDS
    """When a request has failed for good."""

    def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        for name in ("connect", "read", "write", "pool"):  # some requests are made without a limit
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
        """Whether there is another try; if so, it is time for it."""
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
    """The contents of a file; where they break off, the rest is asked for."""

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
        """Whether the rest of the same file is there to be read."""
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
    """Seconds, by ``Retry-After`` or by the hub's own header of its rate limit."""
    after, limit = headers.get("Retry-After", ""), re.search(r";t=(\d+)", headers.get("RateLimit", ""))
    return float(after) if re.fullmatch(r"\d+", after) else float(limit[1]) if limit else None


def connect() -> None:
    """See to it that all libraries use such a client."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import hf_request_event_hook

    set_client_factory(
        lambda: PatientClient(event_hooks={"request": [hf_request_event_hook]}, follow_redirects=True, timeout=None)
    )
