"""The order of phases, retries and releases, with parties that do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from app.errors import DeadlineExceeded, DecodeFailed, NoDecodeReplica, PrefillFailed
from app.pd_flow import Handoff, PdFlow, PdRequest, Placement, ReplicaDied, UpstreamRefused

HANDOFF = Handoff({"do_remote_prefill": True}, b"counts", 3)


@dataclass
class Stream:
    status: int = 200
    content_type: str = "text/event-stream"
    num_closed: int = 0

    async def chunks(self) -> AsyncIterator[bytes]:
        yield b"data"

    async def close(self) -> None:
        self.num_closed += 1


@dataclass
class Parties:
    """All three parties: each call pops what it shall do; an exception is raised."""

    prefills: list[Any] = field(default_factory=lambda: [HANDOFF])
    replicas: list[Any] = field(default_factory=lambda: ["a", "b", "c"])
    opens: list[Any] = field(default_factory=lambda: [Stream()])
    log: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)

    async def run(self, request: PdRequest) -> Handoff:
        self.log.append("prefill")
        step = self.prefills.pop(0)
        if isinstance(step, BaseException):
            raise step
        if step == "hang":
            await asyncio.Event().wait()
        assert isinstance(step, Handoff)
        return step

    async def select(
        self, request: PdRequest, handoff: Handoff | None, exclude: frozenset[str]
    ) -> Placement:
        free = [r for r in self.replicas if r not in exclude]
        if not free:
            raise NoDecodeReplica("none")
        self.log.append(f"select {free[0]}")
        return Placement(free[0], f"http://{free[0]}", "jsq")

    def release(self, request_id: str) -> None:
        self.log.append("release")

    def suspect(self, replica_id: str) -> None:
        self.log.append(f"suspect {replica_id}")

    def phase(self, phase: str, seconds: float) -> None:
        assert seconds >= 0
        self.phases.append(phase)

    def retried(self, phase: str) -> None:
        self.phases.append(f"retried {phase}")

    async def open(self, placement: Placement, request: PdRequest, handoff: Any) -> Stream:
        self.log.append("open" if handoff else "open without KV")
        step = self.opens.pop(0)
        if isinstance(step, BaseException):
            raise step
        assert isinstance(step, Stream)
        return step

    def flow(self, timeout_s: float = 5.0) -> PdFlow:
        return PdFlow(self, self, self, timeout_s, max_retries=2, metrics=self)


def request(local_prefill: str | None = None) -> PdRequest:
    return PdRequest("r", "chat", {}, None, local_prefill)


def test_phases_come_in_order_and_release_comes_once() -> None:
    parties = Parties()

    async def run() -> None:
        answer = await parties.flow().open(request())
        assert parties.log == ["prefill", "select a", "open"]
        await answer.close()
        await answer.close()

    asyncio.run(run())
    assert parties.log[3:] == ["release"]


def test_dead_decode_is_excluded_and_prefill_runs_again() -> None:
    stream = Stream()
    parties = Parties(prefills=[HANDOFF] * 2, opens=[ReplicaDied("gone"), stream])
    answer = asyncio.run(parties.flow().open(request()))
    assert answer.placement.replica_id == "b"
    assert answer.num_retries == 1
    assert parties.log == [
        "prefill",
        "select a",
        "open",
        "release",
        "suspect a",
        "prefill",
        "select b",
        "open",
    ]
    once = ["prefill", "route"]
    assert parties.phases == [*once, "retried decode", *once, "first_byte"]


def test_retries_are_bounded() -> None:
    parties = Parties(prefills=[HANDOFF] * 3, opens=[ReplicaDied("gone")] * 3)
    with pytest.raises(DecodeFailed, match="failed 3 times: gone"):
        asyncio.run(parties.flow().open(request()))
    assert parties.log.count("release") == 3


def test_no_replica_left_ends_the_retries() -> None:
    parties = Parties(prefills=[HANDOFF] * 2, replicas=["a"], opens=[ReplicaDied("gone")])
    with pytest.raises(NoDecodeReplica):
        asyncio.run(parties.flow().open(request()))


def test_dead_prefill_is_retried_then_reported() -> None:
    parties = Parties(prefills=[ReplicaDied("x"), HANDOFF])
    assert asyncio.run(parties.flow().open(request())).num_retries == 1
    assert parties.phases == ["retried prefill", "prefill", "route", "first_byte"]
    parties = Parties(prefills=[ReplicaDied("x")] * 3)
    with pytest.raises(PrefillFailed, match="3 times"):
        asyncio.run(parties.flow().open(request()))


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_refusal_is_not_retried_and_leaks_nothing(step: str) -> None:
    refusal = UpstreamRefused(400, b"{}")
    parties = Parties(prefills=[refusal]) if step == "prefill" else Parties(opens=[refusal])
    with pytest.raises(UpstreamRefused):
        asyncio.run(parties.flow().open(request()))
    assert parties.log.count("release") == (step == "decode")


def test_slow_prefill_meets_its_deadline() -> None:
    parties = Parties(prefills=["hang"])
    with pytest.raises(DeadlineExceeded, match=r"longer than 0\.01 s"):
        asyncio.run(parties.flow(timeout_s=0.01).open(request()))


def test_local_prefill_skips_the_first_leg() -> None:
    parties = Parties(prefills=[])
    answer = asyncio.run(parties.flow().open(request(local_prefill="n")))
    assert answer.fallback == "n"
    assert parties.log == ["select a", "open without KV"]
    assert parties.phases == ["route", "first_byte"]


def test_cancel_while_opening_releases() -> None:
    parties = Parties(opens=[asyncio.CancelledError()])

    async def run() -> None:
        with pytest.raises(asyncio.CancelledError):
            await parties.flow().open(request())

    asyncio.run(run())
    assert parties.log[-1] == "release"
