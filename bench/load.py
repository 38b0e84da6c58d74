"""Load generator: streamed completions, a burst or one after the other, in a process of its own.

It shares no interpreter lock with Ray's driver, so that its times are those of a client.
`python -m bench.load` reads a job a line (JSON) from stdin and answers each with a line on stdout;
it ends with its stdin. `LoadProcess` is the other end.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median
from types import TracebackType
from typing import Any, Self

import aiohttp

REQUEST_TIMEOUT_S = 120.0
_EVENT = b"data: {"
_TAIL = 4096  # bytes kept of the end of a stream, to see how it finished
_FINISHED = re.compile(rb'"finish_reason":\s*"length"')


class LoadError(RuntimeError):
    """A request was refused, or its stream broke off or was too short."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to ask of one server.

    Attributes:
        url: base URL, without `/v1/...`.
        model: model name to ask for.
        prompts: one request each.
        tokens: length of every answer (`ignore_eos`).
        concurrency: requests in flight; the number of prompts makes a burst.
    """

    url: str
    model: str
    prompts: list[str]
    tokens: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer; times in seconds on the load generator's clock."""

    started: float
    first: float
    last: float
    tokens: int
    events: int

    @property
    def ttft_s(self) -> float:
        """From the start of the request to its first event."""
        return self.first - self.started

    @property
    def tpot_s(self) -> float:
        """Time of a token after the first."""
        return (self.last - self.first) / max(1, self.tokens - 1)


def tokens_per_s(streams: list[Stream]) -> float:
    """Tokens of all streams over the time from the first start to the last event."""
    time_s = max(s.last for s in streams) - min(s.started for s in streams)
    return sum(s.tokens for s in streams) / time_s


def ttft_ms(streams: list[Stream]) -> float:
    """Median time to the first token."""
    return median(s.ttft_s for s in streams) * 1e3


def tpot_ms(streams: list[Stream]) -> float:
    """Median time per token after the first."""
    return median(s.tpot_s for s in streams) * 1e3


class Events:
    """Counts `data: {` in a byte stream, also where a chunk ends inside of one."""

    def __init__(self) -> None:
        self.tail = b""

    def feed(self, chunk: bytes) -> int:
        """Events that begin in this chunk, or that it completes."""
        overlap = self.tail[-(len(_EVENT) - 1) :]
        self.tail = (self.tail + chunk)[-_TAIL:]
        return (overlap + chunk).count(_EVENT)

    @property
    def is_complete(self) -> bool:
        """Whether the stream ended because it had all the tokens that were asked for."""
        return _FINISHED.search(self.tail) is not None


async def run_job(job: Job) -> list[Stream]:
    """Send the prompts, at most `concurrency` at a time.

    A session of its own for each job: no server is met with connections that it has closed.

    Raises:
        LoadError: an answer was not what was asked for.
    """
    gate = asyncio.Semaphore(job.concurrency)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def one(prompt: str) -> Stream:
            async with gate:
                return await _stream(session, job, prompt)

        try:
            return list(await asyncio.gather(*(one(prompt) for prompt in job.prompts)))
        except (aiohttp.ClientError, TimeoutError) as err:
            raise LoadError(f"{job.url}: {err!r}") from err


async def _stream(session: aiohttp.ClientSession, job: Job, prompt: str) -> Stream:
    body = {
        "model": job.model,
        "prompt": prompt,
        "max_tokens": job.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    events, num_events, first, last = Events(), 0, 0.0, 0.0
    started = time.perf_counter()
    async with session.post(f"{job.url}/v1/completions", json=body) as response:
        if response.status != 200:
            text = (await response.text())[:500]
            raise LoadError(f"{job.url} answered HTTP {response.status}: {text}")
        async for chunk in response.content.iter_any():
            if num := events.feed(chunk):
                last = time.perf_counter()
                first = first or last
                num_events += num
    if not events.is_complete:
        raise LoadError(
            f"{job.url} ended a stream after {num_events} events, before {job.tokens} tokens: "
            f"{events.tail[-500:].decode(errors='replace')}"
        )
    # A server may put several tokens into an event when its client is slow.
    return Stream(started, first, last, job.tokens, num_events)


class LoadProcess:
    """The load generator, running; a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )

    def run(self, job: Job) -> list[Stream]:
        """Run one job and wait for it.

        Raises:
            LoadError: a request failed, or the load generator ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise LoadError(f"the load generator ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LoadError(answer["error"])
        return [Stream(**stream) for stream in answer["streams"]]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()


def _answer(line: str) -> dict[str, Any]:
    try:
        streams = asyncio.run(run_job(Job(**json.loads(line))))
    except LoadError as err:
        return {"error": str(err)}
    return {"streams": [asdict(stream) for stream in streams]}


def main() -> None:
    """Answer jobs until stdin ends."""
    try:
        import uvloop
    except ImportError:
        pass
    else:
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    for line in sys.stdin:
        print(json.dumps(_answer(line)), flush=True)


if __name__ == "__main__":
    main()
