"""The three parties of `app.pd_flow`, bound to Ray handles, the router actor and HTTP."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from ray.exceptions import RayActorError, RayError
from ray.serve.handle import DeploymentHandle

from app.errors import NoDecodeReplica, PrefillFailed
from app.pd_flow import DecodeStream, Handoff, PdRequest, Placement, ReplicaDied, UpstreamRefused
from app.prefill_request import decode_body, prefill_body, rendered_output_fields
from deployments.decode import INTERNAL_KEY_HEADER
from router.actor import create_router, forget_handle, router_handle
from router.prefix import PREFIX_BYTES
from router.service import RouterSettings
from router.types import FallbackReason

logger = logging.getLogger(__name__)

VIEW_INTERVAL_S = 2.0
CONNECT_TIMEOUT_S = 5.0
_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


class PrefillClient:
    """Calls a prefill replica through Serve, which picks it by prefix and cancels with us."""

    def __init__(self, handle: DeploymentHandle[Any], model_type: str | None) -> None:
        self._handle = handle
        self._keep = rendered_output_fields(model_type)

    async def run(self, request: PdRequest) -> Handoff:
        body = prefill_body(request.body, request.kind, self._keep)
        raw = json.dumps(body, separators=(",", ":")).encode()
        prompt = request.body.get("messages") or request.body.get("prompt")
        key = json.dumps(prompt, ensure_ascii=False).encode()[:PREFIX_BYTES]
        try:
            answer = await self._handle.prefill.remote(key, request.kind, raw, request.request_id)
        except RayActorError as err:
            raise ReplicaDied(f"prefill replica died ({type(err).__name__})") from err
        except RayError as err:
            raise PrefillFailed("the prefill replica failed: see its log") from err
        if (error := answer.get("error")) is not None:
            status = answer["status"]
            if status >= 500:
                raise ReplicaDied(f"prefill engine answered HTTP {status}")
            raise UpstreamRefused(status, json.dumps({"error": error}).encode())
        return split_handoff(answer["kv_transfer_params"], answer["prompt_tokens"])


def split_handoff(params: Mapping[str, Any] | None, prompt_tokens: int) -> Handoff:
    """Separate our payload from NIXL's fields.

    Raises:
        PrefillFailed: the answer carries no transfer parameters; decoding would silently compute
            the prompt again.
    """
    if not params or not params.get("do_remote_prefill"):
        raise PrefillFailed("the prefill replica handed over no KV: see its log")
    rest = {k: v for k, v in params.items() if not k.startswith("eldr_")}
    counts = None
    if (text := params.get("eldr_counts")) is not None:
        try:
            counts = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            counts = b""  # not conserved: the router counts it and routes by load
    return Handoff(rest, counts, params.get("eldr_prompt_tokens", prompt_tokens))


class RouterClient:
    """Asks the router actor; chooses by own least load while it is away.

    Owned by one ingress replica's event loop. Own in-flight counts are kept in any case, so that a
    fall-back starts from the truth.
    """

    def __init__(self, app_name: str, settings: RouterSettings, timeout_s: float) -> None:
        self._app_name, self._settings, self._timeout_s = app_name, settings, timeout_s
        self._version = -1
        self._replicas: dict[str, dict[str, str | None]] = {"prefill": {}, "decode": {}}
        self._own: dict[str, str] = {}  # request id -> replica id
        self._is_away = False
        self._viewing: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self.num_fallbacks = 0

    async def start(self) -> None:
        """Create the actor if needed, give it our settings, and follow its replica map."""
        await create_router(self._app_name, self._settings).configure.remote(self._settings)
        self._viewing = asyncio.create_task(self._follow())

    def num_replicas(self, role: str) -> int:
        return len(self._replicas[role])

    async def stats(self) -> dict[str, Any]:
        """The actor's statistics and our own.

        Raises:
            NoDecodeReplica: the router does not answer.
        """
        try:
            async with asyncio.timeout(5):
                stats: dict[str, Any] = await router_handle(self._app_name).stats.remote()
        except (RayError, TimeoutError, ValueError) as err:
            raise NoDecodeReplica(f"the router does not answer ({type(err).__name__})") from err
        return {**stats, "own_in_flight": len(self._own), "own_fallbacks": self.num_fallbacks}

    def url_of_any(self) -> str | None:
        """URL of some decode replica, for requests that need no routing (tokenize)."""
        return next(iter(self._replicas["decode"].values()), None)

    async def select(
        self, request: PdRequest, handoff: Handoff | None, exclude: frozenset[str]
    ) -> Placement:
        counts = handoff.counts if handoff is not None else None
        tokens = handoff.prompt_tokens if handoff is not None else None
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await router_handle(self._app_name).select.remote(
                    request.request_id,
                    counts,
                    tokens,
                    request.domain,
                    exclude,
                    self._version,
                )
        except (RayError, TimeoutError, ValueError) as err:
            return self._select_alone(request, exclude, err)
        self._note_back()
        if (text := answer.get("error")) is not None:
            raise NoDecodeReplica(text)
        if "replicas" in answer:
            self._take_view(answer["version"], answer["replicas"])
        self._own[request.request_id] = answer["replica_id"]
        return Placement(
            answer["replica_id"],
            answer["url"],
            answer["policy"],
            answer["similarity"],
            answer["fallback"],
        )

    def release(self, request_id: str) -> None:
        if self._own.pop(request_id, None) is not None:
            self._tell("release", request_id)

    def suspect(self, replica_id: str) -> None:
        self._replicas["decode"].pop(replica_id, None)
        self._version = -1
        self._tell("suspect", replica_id)

    def _select_alone(
        self, request: PdRequest, exclude: frozenset[str], reason: BaseException
    ) -> Placement:
        self.num_fallbacks += 1
        if not self._is_away:
            self._is_away = True
            logger.warning("router away (%r): routing by least load", reason)
        candidates = {i: u for i, u in self._replicas["decode"].items() if i not in exclude and u}
        if not candidates:
            raise NoDecodeReplica("no decode replica is known and the router does not answer")
        loads = Counter(self._own.values())
        replica_id = min(candidates, key=lambda i: (loads[i], i))
        self._own[request.request_id] = replica_id
        url = candidates[replica_id]
        assert url is not None
        return Placement(replica_id, url, "least_load", fallback=str(FallbackReason.ROUTER_AWAY))

    def _note_back(self) -> None:
        if self._is_away:
            self._is_away = False
            logger.info("router answers again")

    def _take_view(self, version: int, replicas: dict[str, dict[str, str | None]]) -> None:
        self._version, self._replicas = version, replicas

    def _tell(self, method: str, *args: Any) -> None:
        """Call without waiting; a router that is away gets the truth from heartbeats."""

        async def call() -> None:
            try:
                await getattr(router_handle(self._app_name), method).remote(*args)
            except (RayError, ValueError):
                logger.debug("router is away: %s not delivered", method)

        task = asyncio.create_task(call())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _follow(self) -> None:
        while True:
            try:
                view = await router_handle(self._app_name).view.remote()
                if view["replicas"]["decode"]:  # a restarted router fills up within a second
                    self._take_view(view["version"], view["replicas"])
                self._note_back()
            except RayActorError as err:
                logger.warning("router actor is gone (%r): starting it again", err)
                forget_handle(self._app_name)
                create_router(self._app_name, self._settings)
            except (RayError, ValueError) as err:
                logger.warning("router does not answer: %r", err)
            await asyncio.sleep(VIEW_INTERVAL_S)


class HttpStream:
    """A decode replica's HTTP answer, and the Serve call that lasts as long."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.content_type = response.headers.get("content-type", "application/json")

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except aiohttp.ClientError as err:
            raise ReplicaDied(f"decode replica broke off ({type(err).__name__})") from err

    async def close(self) -> None:
        self._response.close()


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that was not streamed, read to its end, so that a death before it is retried."""

    status: int
    content_type: str
    body: bytes

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.body

    async def close(self) -> None:
        pass


class DecodeClient:
    """Opens streams at decode replicas over HTTP."""

    def __init__(
        self, handle: DeploymentHandle[Any], internal_key: str, router: RouterClient
    ) -> None:
        self._handle, self._key, self._router = handle, internal_key, router
        self._session: aiohttp.ClientSession | None = None
        self._attending: set[asyncio.Task[None]] = set()

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:  # must be made on the event loop that uses it
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                auto_decompress=False,
            )
        return self._session

    async def post(self, url: str, path: str, body: bytes, request_id: str) -> HttpStream:
        """Raises ReplicaDied when no answer comes."""
        headers = {
            "content-type": "application/json",
            "x-request-id": request_id,
            INTERNAL_KEY_HEADER: self._key,
        }
        try:
            response = await self.session.post(url + path, data=body, headers=headers)
        except aiohttp.ClientError as err:
            raise ReplicaDied(f"no answer ({type(err).__name__})") from err
        return HttpStream(response)

    async def open(
        self, placement: Placement, request: PdRequest, handoff: Handoff | None
    ) -> DecodeStream:
        params = handoff.kv_transfer_params if handoff is not None else None
        body = decode_body(request.body, params)
        self._attend(placement.replica_id, request.request_id)
        stream = await self.post(placement.url, _PATHS[request.kind], body, request.request_id)
        if stream.status < 400 and request.body.get("stream"):
            return stream
        try:
            text = b"".join([chunk async for chunk in stream.chunks()])
        finally:
            await stream.close()
        if stream.status < 400:
            return WholeAnswer(stream.status, stream.content_type, text)
        if stream.status >= 500:
            raise ReplicaDied(f"decode engine answered HTTP {stream.status}")
        raise UpstreamRefused(stream.status, text)

    def _attend(self, replica_id: str, request_id: str) -> None:
        async def attend() -> None:
            try:
                if not await self._handle.attend.remote(replica_id, request_id):
                    self._router.suspect(replica_id)
            except RayActorError:
                self._router.suspect(replica_id)
            except RayError as err:
                logger.warning("%s: attend failed: %r", request_id, err)

        task = asyncio.create_task(attend())
        self._attending.add(task)
        task.add_done_callback(self._attending.discard)
