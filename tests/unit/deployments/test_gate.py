"""The gate with a plain ASGI app behind it."""

import asyncio
from typing import Any

import pytest

from deployments.gate import Gate


def scope(path: str = "/v1/completions", key: str | None = "secret") -> dict[str, Any]:
    headers = [] if key is None else [(b"x-eldr-internal", key.encode())]
    return {"type": "http", "path": path, "headers": headers}


async def answer(gate: Gate, request: dict[str, Any]) -> int:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await gate(request, None, send)
    return int(sent[0]["status"])


async def ok(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (scope(), 200),
        (scope(key="wrong"), 403),
        (scope(key=None), 403),
        (scope("/metrics"), 403),
        (scope("/v1/load_lora_adapter"), 403),
    ],
)
def test_only_the_ingress_and_only_its_paths(request_: dict[str, Any], status: int) -> None:
    async def run() -> int:
        return await answer(Gate(ok, "secret"), request_)

    assert asyncio.run(run()) == status


def test_quiet_time_is_not_over_while_a_request_runs() -> None:
    async def run() -> None:
        release = asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            await release.wait()
            await ok(scope, receive, send)

        gate = Gate(slow, "secret")
        idle = asyncio.create_task(gate.wait_idle(0.02))
        await asyncio.sleep(0)
        task = asyncio.create_task(answer(gate, scope()))
        await asyncio.sleep(0.05)
        assert not idle.done()
        release.set()
        await task
        await asyncio.wait_for(idle, 1)

    asyncio.run(run())


def test_counts_requests_also_when_they_fail() -> None:
    async def run() -> None:
        release = asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            await release.wait()
            raise RuntimeError("engine died")

        gate = Gate(slow, "secret")
        await asyncio.wait_for(gate.wait_idle(), 1)
        task = asyncio.create_task(answer(gate, scope()))
        await asyncio.sleep(0)
        assert gate.num_running == 1
        idle = asyncio.create_task(gate.wait_idle())
        await asyncio.sleep(0)
        assert not idle.done()
        release.set()
        with pytest.raises(RuntimeError, match="engine died"):
            await task
        await asyncio.wait_for(idle, 1)
        assert gate.num_running == 0

    asyncio.run(run())
