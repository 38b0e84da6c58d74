"""The order of a request's phases: prefill, select, decode, release. Talks to Protocols only.

A retry starts over at prefill, where the prefix cache makes it cheap: KV that a dead decode replica
had begun to pull may be freed already, and pulling it again could read another request's blocks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.errors import DeadlineExceeded, DecodeFailed, EldrError, PrefillFailed
from app.requests import RequestKind

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PdRequest:
    """One checked request.

    Attributes:
        request_id: id for headers, logs and both engines.
        kind: "chat" or "completion".
        body: the client's body.
        domain: label of the traffic, if the client sent one.
        local_prefill: why the decode replica must compute the prompt itself, or None.
    """

    request_id: str
    kind: RequestKind
    body: Mapping[str, Any]
    domain: str | None
    local_prefill: str | None


@dataclass(frozen=True, slots=True)
class Handoff:
    """What prefill hands over: where the KV lies, and which experts the prompt used."""

    kv_transfer_params: Mapping[str, Any]
    counts: bytes | None
    prompt_tokens: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request decodes, and why there."""

    replica_id: str
    url: str
    policy: str
    similarity: float | None = None
    fallback: str | None = None


class UpstreamRefused(Exception):
    """vLLM answered with an error that no retry will change; it is passed on as it is."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"engine answered HTTP {status}")
        self.status = status
        self.body = body


class ReplicaDied(Exception):
    """A replica could not be reached or broke off before it answered; another may serve."""


class DecodeStream(Protocol):
    """An open answer of a decode replica."""

    @property
    def status(self) -> int: ...

    @property
    def content_type(self) -> str: ...

    def chunks(self) -> AsyncIterator[bytes]:
        """Bytes as they come. Raises ReplicaDied when the connection breaks off."""
        ...

    async def close(self) -> None:
        """End it; the engine aborts the request if it still runs."""
        ...


class Prefill(Protocol):
    async def run(self, request: PdRequest) -> Handoff:
        """Raises UpstreamRefused, ReplicaDied, PrefillFailed."""
        ...


class Router(Protocol):
    async def select(
        self, request: PdRequest, handoff: Handoff | None, exclude: frozenset[str]
    ) -> Placement:
        """Chooses and reserves. Raises NoDecodeReplica."""
        ...

    def release(self, request_id: str) -> None: ...

    def suspect(self, replica_id: str) -> None: ...


class Decode(Protocol):
    async def open(
        self, placement: Placement, request: PdRequest, handoff: Handoff | None
    ) -> DecodeStream:
        """Raises UpstreamRefused, ReplicaDied."""
        ...


class FlowMetrics(Protocol):
    """Takes how long phases took; `app.metrics.IngressMetrics` is one."""

    def phase(self, phase: str, seconds: float) -> None:
        """One attempt at a phase succeeded: prefill, route, first_byte (of decode's answer)."""
        ...

    def retried(self, phase: str) -> None:
        """An attempt failed in prefill or decode, and another follows."""
        ...


@dataclass(slots=True)
class Answer:
    """An open stream with its placement; must be closed exactly once."""

    placement: Placement
    fallback: str | None
    stream: DecodeStream
    router: Router
    request_id: str
    num_retries: int
    _closed: bool = field(default=False)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.router.release(self.request_id)
        await self.stream.close()


@dataclass(frozen=True, slots=True)
class PdFlow:
    """Runs requests. Holds no state of its own.

    Args:
        prefill, router, decode: the three parties.
        prefill_timeout_s: limit of one prefill attempt.
        max_retries: further attempts before the first token went out.
        metrics: told of phases and retries.
    """

    prefill: Prefill
    router: Router
    decode: Decode
    prefill_timeout_s: float
    max_retries: int
    metrics: FlowMetrics

    async def open(self, request: PdRequest) -> Answer:
        """Prefill, choose a decode replica, and get its answer's headers.

        The caller sets the deadline around this call and the stream that follows.

        Raises:
            EldrError: no replica, or all attempts failed.
            UpstreamRefused: vLLM refused the request.
        """
        excluded: frozenset[str] = frozenset()
        for attempt in range(self.max_retries + 1):
            try:
                began = time.perf_counter()
                handoff = await self._prefill(request)
                if handoff is not None:
                    began = self._passed("prefill", began)
                placement = await self.router.select(request, handoff, excluded)
                began = self._passed("route", began)
            except ReplicaDied as err:
                if attempt == self.max_retries:
                    raise PrefillFailed(f"prefill failed {attempt + 1} times: {err}") from err
                self.metrics.retried("prefill")
                logger.warning("%s: prefill attempt %d: %s", request.request_id, attempt + 1, err)
                continue
            try:
                stream = await self.decode.open(placement, request, handoff)
            except ReplicaDied as err:
                self.router.release(request.request_id)
                self.router.suspect(placement.replica_id)
                excluded |= {placement.replica_id}
                if attempt == self.max_retries:
                    raise DecodeFailed(f"decode failed {attempt + 1} times: {err}") from err
                self.metrics.retried("decode")
                logger.warning(
                    "%s: decode replica %s: %s", request.request_id, placement.replica_id, err
                )
                continue
            except BaseException:
                self.router.release(request.request_id)
                raise
            self._passed("first_byte", began)
            return Answer(
                placement=placement,
                fallback=request.local_prefill or placement.fallback,
                stream=stream,
                router=self.router,
                request_id=request.request_id,
                num_retries=attempt,
            )
        raise AssertionError("every attempt returns or raises")

    def _passed(self, phase: str, began: float) -> float:
        """Tell how long a phase took; returns when it ended."""
        now = time.perf_counter()
        self.metrics.phase(phase, now - began)
        return now

    async def _prefill(self, request: PdRequest) -> Handoff | None:
        if request.local_prefill is not None:
            return None
        try:
            async with asyncio.timeout(self.prefill_timeout_s):
                return await self.prefill.run(request)
        except TimeoutError as err:
            raise DeadlineExceeded(
                f"prefill took longer than {self.prefill_timeout_s:g} s: send a shorter prompt, or "
                "raise limits.prefill_timeout_s or prefill.num_replicas"
            ) from err


def is_expected(error: BaseException) -> bool:
    """Whether an error is one a client may see; others are bugs and logged with their trace."""
    return isinstance(error, EldrError | UpstreamRefused)
