"""The three parties of `app.pd_flow`, bound to HTTP, the router actor and Serve handles."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from ray.exceptions import RayActorError, RayError
from ray.serve.handle import DeploymentHandle

from app.errors import NoDecodeReplica, NoPrefillReplica, PrefillFailed
from app.pd_flow import DecodeStream, Handoff, PdRequest, Placement, ReplicaDied, UpstreamRefused
from app.prefill_request import decode_body, prefill_body, rendered_output_fields
from deployments.gate import INTERNAL_KEY_HEADER
from router.actor import create_router, forget_handle, router_handle
from router.prefix import PREFIX_BYTES, PrefixRing, hash64
from router.service import RouterSettings, WireRequest
from router.types import FallbackReason

logger = logging.getLogger(__name__)

VIEW_INTERVAL_S = 2.0
RELEASE_INTERVAL_S = 0.02  # a burst's end is one call to the router, not one for each request
CONNECT_TIMEOUT_S = 5.0
MAX_CALLS = 4  # single selections on their way to the router before others wait for each other
MAX_BATCH = 64
MAX_PART_BYTES = 64_000  # Ray takes a detour with arguments above 100 KB
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


class EngineClient:
    """HTTP requests to replicas of one deployment, and the Serve call that marks them as busy."""

    def __init__(
        self, handle: DeploymentHandle[Any], internal_key: str, router: RouterClient
    ) -> None:
        self._handle, self._key, self._router = handle, internal_key, router
        self._session: aiohttp.ClientSession | None = None
        self._attending: dict[str, asyncio.Task[None]] = {}

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:  # must be made on the event loop that uses it
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                auto_decompress=False,
            )
        return self._session

    async def post(
        self, replica_id: str, url: str, path: str, body: bytes, request_id: str
    ) -> HttpStream:
        """Raises ReplicaDied when no answer comes."""
        headers = {
            "content-type": "application/json",
            "x-request-id": request_id,
            INTERNAL_KEY_HEADER: self._key,
        }
        self._attend(replica_id)
        try:
            response = await self.session.post(url + path, data=body, headers=headers)
        except aiohttp.ClientError as err:
            raise ReplicaDied(f"no answer ({type(err).__name__})") from err
        return HttpStream(response)

    def _attend(self, replica_id: str) -> None:
        """Keep one call open at a replica for as long as it has requests."""
        if replica_id in self._attending:
            return

        async def attend() -> None:
            try:
                if not await self._handle.attend.remote(replica_id):
                    self._router.suspect(replica_id)
            except RayActorError:
                self._router.suspect(replica_id)
            except RayError as err:
                logger.warning("attending %s failed: %r", replica_id, err)
            finally:
                del self._attending[replica_id]

        self._attending[replica_id] = asyncio.create_task(attend())


class PrefillClient:
    """Runs prompts at a prefill replica: same beginning, same replica, unless it is overloaded.

    Source: ELDR's artifact, prefix-hash router with bounded load (all policies alike).
    """

    def __init__(self, engines: EngineClient, router: RouterClient, model_type: str | None) -> None:
        self._engines, self._router = engines, router
        self._keep = rendered_output_fields(model_type)
        self._loads: Counter[str] = Counter()
        self._ring = PrefixRing([])

    async def run(self, request: PdRequest) -> Handoff:
        body = prefill_body(request.body, request.kind, self._keep)
        raw = json.dumps(body, separators=(",", ":")).encode()
        replica_id, url = self._choose(request)
        self._loads[replica_id] += 1
        try:
            stream = await self._engines.post(
                replica_id, url, PATHS[request.kind], raw, request.request_id
            )
            try:
                text = await stream.read()
            finally:
                await stream.close()
        except ReplicaDied:
            self._router.suspect(replica_id)
            raise
        finally:
            self._loads[replica_id] -= 1
        if stream.status >= 500:
            raise ReplicaDied(f"prefill engine answered HTTP {stream.status}")
        if stream.status >= 400:
            raise UpstreamRefused(stream.status, text)
        answer = json.loads(text)
        return split_handoff(answer["kv_transfer_params"], answer["usage"]["prompt_tokens"])

    def _choose(self, request: PdRequest) -> tuple[str, str]:
        replicas = self._router.replicas("prefill")
        if not replicas:
            raise NoPrefillReplica("no prefill replica is running: wait for /ready")
        if set(replicas) != set(self._ring.replica_ids):
            self._ring = PrefixRing(sorted(replicas))
        if len(replicas) == 1:
            return next(iter(replicas.items()))
        prompt = request.body.get("messages") or request.body.get("prompt")
        key = json.dumps(prompt, ensure_ascii=False).encode()[:PREFIX_BYTES]
        replica_id = self._ring.pick(key, {i: self._loads[i] for i in replicas})
        return replica_id, replicas[replica_id]


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

    A selection is a call of its own, sent at once, while few are on their way. Beyond MAX_CALLS
    they gather until one comes back, and go as one call; from then on one such batch is under way
    at a time, with all that has gathered since the last, until nobody waits any more. So few
    requests wait for nobody, and many cost the router little more than their decisions.

    Args:
        app_name: application whose router to ask.
        settings: given to the router at the start.
        timeout_s: longest wait for an answer.
        seed: order in which equally loaded replicas are taken while the router is away; None draws
            one, so that several ingress replicas do not all begin with the same.
    """

    def __init__(
        self, app_name: str, settings: RouterSettings, timeout_s: float, seed: int | None = None
    ) -> None:
        self._app_name, self._settings, self._timeout_s = app_name, settings, timeout_s
        self._salt = random.getrandbits(64) if seed is None else seed
        self._num_calls = 0
        self._is_batching = False
        self._waiting: list[tuple[WireRequest, asyncio.Future[dict[str, Any]]]] = []
        self._version = -1
        self._replicas: dict[str, dict[str, str]] = {"prefill": {}, "decode": {}}
        self._own: dict[str, str] = {}  # request id -> replica id
        self._released: list[str] = []
        self._flushing: asyncio.TimerHandle | None = None
        self._is_away = False
        self._viewing: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self.num_fallbacks = 0

    async def start(self) -> None:
        """Create the actor if needed, give it our settings, and follow its replica map."""
        await create_router(self._app_name, self._settings).configure.remote(self._settings)
        self._viewing = asyncio.create_task(self._follow())

    def replicas(self, role: str) -> dict[str, str]:
        """Replicas of a role that are thought to live: URL by id."""
        return self._replicas[role]

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

    async def select(
        self, request: PdRequest, handoff: Handoff | None, exclude: frozenset[str]
    ) -> Placement:
        counts = handoff.counts if handoff is not None else None
        tokens = handoff.prompt_tokens if handoff is not None else None
        wire = (request.request_id, counts, tokens, request.domain, exclude)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._ask(wire)
        except (RayError, TimeoutError, ValueError) as err:
            return self._select_alone(request, exclude, err)
        except asyncio.CancelledError:
            self._release(request.request_id)  # the router may have reserved, or be about to
            raise
        self._note_back()
        if (text := answer.get("error")) is not None:
            raise NoDecodeReplica(text)
        self._own[request.request_id] = answer["replica_id"]
        return Placement(
            answer["replica_id"],
            answer["url"],
            answer["policy"],
            answer["similarity"],
            answer["fallback"],
        )

    async def _ask(self, wire: WireRequest) -> dict[str, Any]:
        """The router's answer; raises what the call to it raises."""
        if self._is_batching or self._num_calls >= MAX_CALLS:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((wire, future))
            answer: dict[str, Any] = await future
            return answer
        self._num_calls += 1
        released, self._released = self._released, []
        try:
            answer = await router_handle(self._app_name).select.remote(
                *wire, self._version, released
            )
        except BaseException:
            self._released += released  # a slow router would keep them until they expire
            raise
        finally:
            self._num_calls -= 1
            if self._waiting and not self._is_batching:
                self._is_batching = True
                self._in_background(self._ask_for_all())
        if "view" in answer:
            self._take_view(answer["view"])
        return answer

    async def _ask_for_all(self) -> None:
        """Ask for those that wait, and those that come to wait meanwhile, batch by batch."""
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
                await self._ask_many([item for item in batch if not item[1].done()])
        finally:
            self._is_batching = False

    async def _ask_many(
        self, batch: Sequence[tuple[WireRequest, asyncio.Future[dict[str, Any]]]]
    ) -> None:
        if not batch:
            return  # all of them gave up
        released, self._released = self._released, []
        parts = in_parts([wire for wire, _ in batch], MAX_PART_BYTES)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await router_handle(self._app_name).select_many.remote(
                    self._version, released, *parts
                )
        except (RayError, TimeoutError, ValueError) as err:
            self._released += released
            for _, future in batch:
                if not future.done():
                    future.set_exception(err)
        else:
            if "view" in answer:
                self._take_view(answer["view"])
            for (_, future), one in zip(batch, answer["answers"], strict=True):
                if not future.done():
                    future.set_result(one)

    def release(self, request_id: str) -> None:
        if self._own.pop(request_id, None) is not None:
            self._release(request_id)

    def _release(self, request_id: str) -> None:
        self._released.append(request_id)
        if self._flushing is None:
            loop = asyncio.get_running_loop()
            self._flushing = loop.call_later(RELEASE_INTERVAL_S, self._flush)

    def _flush(self) -> None:
        """Tell the router of releases that no selection has carried meanwhile."""
        self._flushing = None
        if self._released:
            released, self._released = self._released, []
            self._tell("release", released)

    def suspect(self, replica_id: str) -> None:
        for known in self._replicas.values():
            known.pop(replica_id, None)
        self._version = -1
        self._tell("suspect", replica_id)

    def _select_alone(
        self, request: PdRequest, exclude: frozenset[str], reason: BaseException
    ) -> Placement:
        self.num_fallbacks += 1
        if not self._is_away:
            self._is_away = True
            logger.warning("router away (%r): routing by least load", reason)
        candidates = {i: u for i, u in self._replicas["decode"].items() if i not in exclude}
        if not candidates:
            raise NoDecodeReplica("no decode replica is known and the router does not answer")
        loads = Counter(self._own.values())
        replica_id = min(candidates, key=lambda i: (loads[i], hash64(f"{self._salt}/{i}".encode())))
        self._own[request.request_id] = replica_id
        url = candidates[replica_id]
        assert url is not None
        return Placement(replica_id, url, "least_load", fallback=str(FallbackReason.ROUTER_AWAY))

    def _note_back(self) -> None:
        if self._is_away:
            self._is_away = False
            logger.info("router answers again")

    def _take_view(self, view: Mapping[str, Any]) -> None:
        """Take the router's map; what a router that has just started lacks stays as it was."""
        known = {} if view["is_complete"] else self._replicas
        self._version = view["version"]
        self._replicas = {
            role: {**known.get(role, {}), **replicas} for role, replicas in view["replicas"].items()
        }

    def _tell(self, method: str, *args: Any) -> None:
        """Call without waiting; a router that is away gets the truth from heartbeats."""

        async def call() -> None:
            try:
                await getattr(router_handle(self._app_name), method).remote(*args)
            except (RayError, ValueError):
                logger.debug("router is away: %s not delivered", method)

        self._in_background(call())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _follow(self) -> None:
        while True:
            try:
                self._take_view(await router_handle(self._app_name).view.remote())
                self._note_back()
            except RayActorError as err:
                logger.warning("router actor is gone (%r): starting it again", err)
                forget_handle(self._app_name)
                create_router(self._app_name, self._settings)
            except (RayError, ValueError) as err:
                logger.warning("router does not answer: %r", err)
            await asyncio.sleep(VIEW_INTERVAL_S)


def in_parts(requests: Sequence[WireRequest], max_bytes: int) -> list[list[WireRequest]]:
    """Cut a batch into parts of at most `max_bytes` of counts, or of one request."""
    parts: list[list[WireRequest]] = [[]]
    size = 0
    for request in requests:
        num_bytes = len(request[1] or b"")
        if parts[-1] and size + num_bytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(request)
        size += num_bytes
    return parts


class HttpStream:
    """A replica's HTTP answer."""

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

    async def read(self) -> bytes:
        """All of it. Raises ReplicaDied when the connection breaks off."""
        try:
            return await self._response.read()
        except aiohttp.ClientError as err:
            raise ReplicaDied(f"replica broke off ({type(err).__name__})") from err

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
    """Opens streams at decode replicas."""

    def __init__(self, engines: EngineClient) -> None:
        self._engines = engines

    async def open(
        self, placement: Placement, request: PdRequest, handoff: Handoff | None
    ) -> DecodeStream:
        params = handoff.kv_transfer_params if handoff is not None else None
        stream = await self._engines.post(
            placement.replica_id,
            placement.url,
            PATHS[request.kind],
            decode_body(request.body, params),
            request.request_id,
        )
        if stream.status < 400 and request.body.get("stream"):
            return stream
        try:
            text = await stream.read()
        finally:
            await stream.close()
        if stream.status < 400:
            return WholeAnswer(stream.status, stream.content_type, text)
        if stream.status >= 500:
            raise ReplicaDied(f"decode engine answered HTTP {stream.status}")
        raise UpstreamRefused(stream.status, text)
