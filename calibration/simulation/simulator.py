"""Discrete-event simulation of one deployment: arrivals, prefill, routing, decode, failures.

The life of a simulated request: it arrives, waits for a prefill replica and gets its first token
there; the router's core chooses a decode replica and reserves a slot; the KV arrives a little
later; the request joins the batch at the next step, takes part in one step a token, and frees its
slot. If its replica dies, it starts over with prefill.

Decode replicas are advanced only when something may look at them: before each routing decision
those are brought up to date on which a request may have ended.

Axes: N requests of the run, M measured ones.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.simulation.arrivals import arrival_times, draw_requests, output_lengths
from calibration.simulation.config import SimulationConfig
from calibration.simulation.replica import DecodeReplica, StepTotals
from calibration.simulation.routing import FittedRouter, PooledCore
from calibration.simulation.scaling import LoadScaler
from calibration.simulation.workload import Workload
from calibration.step_time import StepTimeLaw
from router.prefix import PrefixRing
from router.refit import RefitReason
from router.types import NoReplica

FloatArray = NDArray[np.float64]

NUM_SAMPLES = 400
"""Points of the time series of a run."""


@dataclass(frozen=True, slots=True)
class Sample:
    """State of the deployment at one time.

    Attributes:
        at_s: virtual seconds.
        replicas: decode replicas in the router's pool.
        in_flight: requests routed and not ended.
        skew: largest load over mean load; NaN without load.
        distinct: distinct experts of a step, mean over busy replicas; NaN if none is.
    """

    at_s: float
    replicas: int
    in_flight: int
    skew: float
    distinct: float


@dataclass(frozen=True, eq=False)
class RunResult:
    """What one policy did at one rate with one seed.

    Attributes:
        tpot_M: (end - first token) / (tokens - 1) of the measured requests that ended, seconds.
        ttft_M: arrival to first token of the same requests, seconds.
        e2e_M: arrival to end of the same requests, seconds.
        arrived_M: arrival of the same requests, virtual seconds.
        num_requests: all requests, warm-up included.
        num_failed: requests that were given up.
        num_retries: attempts after the first, over all requests.
        num_tokens: tokens decoded.
        steps: decode steps of the measured time.
        replica_seconds: time that decode replicas were in the pool.
        mean_band: replicas in the locality band; NaN for policies without one.
        counters: of the router's core.
        num_refits: refits that were taken.
        samples: course of the run.
        virtual_s: virtual time simulated.
        wall_s: time it took.
    """

    tpot_M: FloatArray
    ttft_M: FloatArray
    e2e_M: FloatArray
    arrived_M: FloatArray
    num_requests: int
    num_failed: int
    num_retries: int
    num_tokens: int
    steps: StepTotals
    replica_seconds: float
    mean_band: float
    counters: dict[str, int]
    num_refits: int
    samples: list[Sample]
    virtual_s: float
    wall_s: float

    @property
    def speedup(self) -> float:
        """Virtual over wall time."""
        return self.virtual_s / self.wall_s

    def figures(self) -> dict[str, float]:
        """Scalars of the report; times in milliseconds, NaN where nothing was measured."""
        steps = max(self.steps.steps, 1.0)
        skews = [sample.skew for sample in self.samples if sample.skew == sample.skew]
        figures = {
            **{f"tpot_p{p}": _percentile_ms(self.tpot_M, p) for p in (50, 95, 99)},
            **{f"ttft_p{p}": _percentile_ms(self.ttft_M, p) for p in (50, 99)},
            "distinct": self.steps.distinct / steps,
            "token_distinct": self.steps.token_distinct / max(self.steps.tokens, 1.0),
            "batch": self.steps.tokens / steps,
            "loads": self.steps.loads / steps,
            "skew": float(np.mean(skews)) if skews else math.nan,
            "band": self.mean_band,
            "failed": float(self.num_failed),
            "retries": float(self.num_retries),
            "refits": float(self.num_refits),
            "replicas": self.replica_seconds / max(self.virtual_s, 1e-9),
            "speedup": self.speedup,
        }
        return figures


class _Prefill:
    """One prefill replica: what waits is computed in one step."""

    __slots__ = ("is_busy", "name", "queue", "seen")

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: list[int] = []
        self.is_busy = False
        self.seen: set[int] = set()


class Simulator:
    """One run. Call `run` once.

    Args:
        config: the deployment; sweeps are resolved before.
        workload: its requests.
        router: artifact and signatures, with as many centroids as there are decode replicas.
        law: step time, seconds.
        policy: name of the routing policy.
        rate: requests per second.
        seed: seed of arrivals, draws and the policy; the same for all policies, so that they see
            the same requests at the same times.
    """

    def __init__(
        self,
        config: SimulationConfig,
        workload: Workload,
        router: FittedRouter,
        law: StepTimeLaw,
        policy: str,
        rate: float,
        seed: int,
    ) -> None:
        self._config, self._workload, self._law, self._seed = config, workload, law, seed
        rng = np.random.default_rng([seed, 1])
        times_N = arrival_times(config.traffic, rate, rng)
        rows_N = draw_requests(times_N, workload.domains_N, config.traffic.mix, rng)
        section = config.workload
        lengths_N = output_lengths(len(times_N), section.output_tokens, section.output_lengths, rng)
        prefixes = config.prefill.num_prefixes
        self._prefix_of = rng.integers(prefixes, size=len(times_N)).tolist() if prefixes else None
        self._times_N, self._lengths_N = times_N, lengths_N
        # Plain lists: an element of an array costs five times as much.
        self._times, self._rows = times_N.tolist(), rows_N.tolist()
        self._lengths = lengths_N.tolist()
        prompts_N = workload.prompt_tokens_N[rows_N].astype(np.int64)
        self._prompts = prompts_N.tolist()
        transfer = config.transfer
        self._transfer_s = ((transfer.base_ms + transfer.per_token_ms * prompts_N) / 1e3).tolist()
        self._domains = workload.domains_N[rows_N].tolist()
        self._ids = [str(number) for number in range(len(times_N))]
        self._first = [math.nan] * len(times_N)
        self._end = [math.nan] * len(times_N)
        self._attempts = [0] * len(times_N)
        self._failed: set[int] = set()
        self._core = PooledCore(config.router, policy, router, seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0
        self._pool: dict[str, DecodeReplica] = {}
        self._draining: list[DecodeReplica] = []
        self._gone = StepTotals()
        self._num_made = self._num_starting = 0
        self._next_finish = math.inf
        self._scaler = LoadScaler(config.autoscaling) if config.autoscaling else None
        self._band_sum, self._num_banded = 0.0, 0
        self._pool_since, self._replica_seconds = 0.0, 0.0
        self._samples: list[Sample] = []
        self._marks: list[StepTotals] = []
        ids = [f"prefill-{k:04d}" for k in range(config.prefill.replicas)]
        self._ring = PrefixRing(ids)
        self._prefill = {name: _Prefill(name) for name in ids}
        self._prefill_loads = dict.fromkeys(ids, 0)

    def run(self) -> RunResult:
        """Simulate until every request has ended or been given up."""
        started = time.perf_counter()
        traffic = self._config.traffic
        end = traffic.warm_up_s + traffic.duration_s
        for _ in range(self._config.decode.replicas):
            self._add_replica(0.0)
        self._core.change_pool(list(self._pool), None)
        self._schedule(end)
        overhead = self._config.prefill.overhead_ms / 1e3
        events, times = self._events, self._times
        number, last = 0, 0.0
        while number < len(times) or events:
            arrival = times[number] + overhead if number < len(times) else math.inf
            if events and events[0][0] <= arrival:
                last, _, handle, args = heapq.heappop(events)
                handle(last, *args)
            else:
                last = arrival
                self._arrive(arrival, number)
                number += 1
        self._settle(math.inf)
        self._check_conservation()
        ended = [at for at in self._end if at == at]
        return self._result(max(end, last, max(ended, default=0.0)), started)

    # ---- events

    def _push(self, at: float, handle: Callable[..., None], *args: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at, self._num_events, handle, args))

    def _schedule(self, end: float) -> None:
        """Events known from the start."""
        config = self._config
        self._push(config.traffic.warm_up_s, self._mark)
        self._push(end, self._mark)
        for i in range(1, NUM_SAMPLES):
            self._push(end * i / NUM_SAMPLES, self._sample)
        for index, failure in enumerate(config.failures):
            self._push(failure.at_s, self._kill, index)
        if interval := config.router.refit_every_s:
            for i in range(1, math.ceil(end / interval)):
                self._push(i * interval, self._refit)
        if (scaling := config.autoscaling) is None:
            return
        for point in scaling.schedule:
            self._push(point.at_s, self._scale_to, point.replicas)
        if not scaling.schedule:
            for i in range(1, math.ceil(end / scaling.interval_s)):
                self._push(i * scaling.interval_s, self._follow_load)

    def _arrive(self, now: float, request: int) -> None:
        """A prompt reaches the prefill pool."""
        prefix = self._prefix_of
        key = self._ids[request] if prefix is None else f"prefix {prefix[request]}"
        name = self._ring.pick(key.encode(), self._prefill_loads)
        self._prefill_loads[name] += 1
        replica = self._prefill[name]
        replica.queue.append(request)
        if not replica.is_busy:
            self._start_prefill(now, replica)

    def _start_prefill(self, now: float, replica: _Prefill) -> None:
        settings = self._config.prefill
        tokens, number = 0, 0
        for request in replica.queue:
            prompt = self._prompts[request]
            if self._prefix_of is not None:
                prefix = self._prefix_of[request]
                prompt += 0 if prefix in replica.seen else settings.prefix_tokens
                replica.seen.add(prefix)
            if number and tokens + prompt > settings.max_batched_tokens:
                break
            tokens += prompt
            number += 1
        batch, replica.queue = replica.queue[:number], replica.queue[number:]
        replica.is_busy = True
        took = (settings.base_ms + settings.per_token_ms * tokens) / 1e3
        self._push(now + took, self._end_prefill, replica, batch)

    def _end_prefill(self, now: float, replica: _Prefill, batch: list[int]) -> None:
        self._prefill_loads[replica.name] -= len(batch)
        for request in batch:
            if self._first[request] != self._first[request]:
                self._first[request] = now
            self._route(now, request)
        replica.is_busy = False
        if replica.queue:
            self._start_prefill(now, replica)

    def _route(self, now: float, request: int) -> None:
        """The core chooses a decode replica and reserves; the KV follows."""
        if now >= self._next_finish:
            self._settle(now)
        row = self._rows[request]
        try:
            selection = self._core.select_row(self._ids[request], row, self._domains[request], now)
        except NoReplica:
            self._start_over(now, request)
            return
        if selection.band_size is not None:
            self._band_sum += selection.band_size
            self._num_banded += 1
        replica = self._pool[selection.replica_id]
        ready = now + self._transfer_s[request]
        replica.submit(request, row, self._lengths[request] - 1, ready)
        if replica.next_finish < self._next_finish:
            self._next_finish = replica.next_finish

    def _settle(self, now: float) -> None:
        """Bring replicas up to date on which requests may have ended by now."""
        next_finish = math.inf
        for replica in (*self._pool.values(), *self._draining):
            if replica.next_finish <= now:
                self._advance(replica, now)
            if replica.next_finish < next_finish:
                next_finish = replica.next_finish
        self._next_finish = next_finish

    def _advance(self, replica: DecodeReplica, now: float) -> None:
        for request, at in replica.advance(now):
            self._end[request] = at
            self._core.release(self._ids[request])

    # ---- the pool

    def _add_replica(self, now: float) -> None:
        decode = self._config.decode
        replica_id = f"decode-{self._num_made:04d}"
        self._pool_counts(now)
        self._pool[replica_id] = DecodeReplica(
            replica_id,
            self._workload,
            self._law,
            max_num_seqs=decode.max_num_seqs,
            cache_slots=decode.cache_slots,
            now=now,
            exact=self._config.fidelity == "exact",
            seed=self._seed * 10_000 + self._num_made,
        )
        self._num_made += 1

    def _join_pool(self, now: float) -> None:
        """A replica has started."""
        self._num_starting -= 1
        self._add_replica(now)
        self._core.change_pool(list(self._pool), now)

    def _pool_counts(self, now: float) -> None:
        """Account for the pool's size until now."""
        self._replica_seconds += (now - self._pool_since) * len(self._pool)
        self._pool_since = now

    def _kill(self, now: float, index: int) -> None:
        failure = self._config.failures[index]
        self._settle(now)
        if not self._pool:
            return
        replica_id = list(self._pool)[failure.replica % len(self._pool)]
        self._pool_counts(now)
        replica = self._pool.pop(replica_id)
        replica.abandon()
        self._gone = _sum([self._gone, replica.totals])
        dropped = self._core.change_pool(list(self._pool), now)
        for request in map(int, dropped):
            self._start_over(now, request)
        if failure.restart_after_s is not None:
            self._num_starting += 1
            self._push(now + failure.restart_after_s, self._join_pool)

    def _start_over(self, now: float, request: int) -> None:
        """The request's decode side is lost: prefill again, or give up."""
        self._attempts[request] += 1
        if self._attempts[request] > self._config.retry.max_retries:
            self._failed.add(request)
        else:
            self._push(now + self._config.retry.delay_s, self._arrive, request)

    def _follow_load(self, now: float) -> None:
        assert self._scaler is not None
        self._settle(now)
        in_flight = sum(replica.num_requests for replica in self._pool.values())
        current = len(self._pool) + self._num_starting
        self._scale_to(now, self._scaler.wanted(in_flight, current, now))

    def _scale_to(self, now: float, wanted: int) -> None:
        assert self._config.autoscaling is not None
        missing = wanted - len(self._pool) - self._num_starting
        for _ in range(missing):
            self._num_starting += 1
            self._push(now + self._config.autoscaling.start_delay_s, self._join_pool)
        if missing < 0:
            self._settle(now)
            self._drain(now, min(-missing, len(self._pool) - 1))

    def _drain(self, now: float, number: int) -> None:
        """Take the least loaded replicas out of the pool; their requests run on."""
        by_load = sorted(self._pool.values(), key=lambda replica: replica.num_requests)
        self._pool_counts(now)
        for replica in by_load[:number]:
            del self._pool[replica.replica_id]
            self._draining.append(replica)
        if number:
            self._core.change_pool(list(self._pool), now)

    def _refit(self, now: float) -> None:
        if self._pool:
            self._core.refit(RefitReason.DRIFT)

    # ---- figures

    def _sample(self, now: float) -> None:
        self._settle(now)
        for replica in list(self._draining):
            if not replica.num_requests:
                self._draining.remove(replica)
                self._gone = _sum([self._gone, replica.totals])
        if now < self._config.traffic.warm_up_s:
            return
        loads = [replica.num_requests for replica in self._pool.values()]
        busy = [replica.distinct for replica in self._pool.values() if replica.num_requests]
        total = sum(loads)
        self._samples.append(
            Sample(
                now,
                len(loads),
                total,
                max(loads) * len(loads) / total if total else math.nan,
                sum(busy) / len(busy) if busy else math.nan,
            )
        )

    def _mark(self, now: float) -> None:
        """Begin and end of the measured time."""
        replicas = (*self._pool.values(), *self._draining)
        for replica in replicas:
            self._advance(replica, now)
            replica.catch_up(now)
        self._marks.append(_sum([self._gone, *(replica.totals for replica in replicas)]))

    def _check_conservation(self) -> None:
        """Every request ended once, or was given up, and no reservation is left."""
        num_ended = sum(at == at for at in self._end)
        left = len(self._core.ledger)
        if num_ended + len(self._failed) != len(self._ids) or left:
            raise RuntimeError(
                f"simulation lost requests: {len(self._ids)} arrived, {num_ended} ended, "
                f"{len(self._failed)} failed, {left} reservations left"
            )
        self._core.ledger.check_integrity()

    def _result(self, virtual_s: float, started: float) -> RunResult:
        arrived_N, first_N, end_N = self._times_N, np.array(self._first), np.array(self._end)
        is_measured_N = (arrived_N >= self._config.traffic.warm_up_s) & (end_N == end_N)
        arrived_M, first_M, end_M = (a[is_measured_N] for a in (arrived_N, first_N, end_N))
        self._pool_counts(virtual_s)
        begin, end = self._marks
        return RunResult(
            tpot_M=(end_M - first_M) / (self._lengths_N[is_measured_N] - 1),
            ttft_M=first_M - arrived_M,
            e2e_M=end_M - arrived_M,
            arrived_M=arrived_M,
            num_requests=len(self._ids),
            num_failed=len(self._failed),
            num_retries=sum(self._attempts) - len(self._failed),
            num_tokens=int((self._lengths_N - 1)[end_N == end_N].sum()),
            steps=end.minus(begin),
            replica_seconds=self._replica_seconds,
            mean_band=self._band_sum / self._num_banded if self._num_banded else math.nan,
            counters=self._core.counters,
            num_refits=self._core.num_refits,
            samples=self._samples,
            virtual_s=virtual_s,
            wall_s=time.perf_counter() - started,
        )


def _sum(parts: Sequence[StepTotals]) -> StepTotals:
    names = StepTotals.__slots__
    return replace(
        StepTotals(), **{name: sum(getattr(part, name) for part in parts) for name in names}
    )


def _percentile_ms(values: FloatArray, percent: float) -> float:
    return float(np.percentile(values, percent)) * 1e3 if len(values) else math.nan
