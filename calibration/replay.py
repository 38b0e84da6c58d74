"""Replay of recorded requests on virtual time, routed by the live router's own core and policies.

A request's first tokens stand in for its prompt: their counts are its signature. The rest is
decoded token by token on the replica the core selects; a step of a replica activates the union of
the experts its requests recorded, and takes what the step-time law says. Requests that join during
a step wait for the next one, as in continuous batching.

All policies see the same requests in the same order, from the same starting state.

Axes: N requests, T tokens, L MoE layers, E experts, W words of 64 experts, K replicas.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from calibration.artifact import Artifact
from calibration.counts import Capture
from calibration.fit import LayerChoice, fit
from calibration.signature import IndexArray
from calibration.step_time import StepTimeLaw
from calibration.traces import IdArray, RoutingTrace, expert_counts
from router.core import RoutingCore
from router.service import heartbeat_s
from router.types import CountArray

BoolArray = NDArray[np.bool_]
BitArray = NDArray[np.uint64]
_WORD = 64
MIN_DECODE = 16
STEP_S = 0.02
"""Length of a decode step, for what goes by the clock: heartbeats."""


def resident_steps(num_replicas: int) -> int:
    """Steps of a replica from one report of what its cache holds to the next."""
    return round(heartbeat_s(num_replicas, tells_residents=True) / STEP_S)


class Observer(Protocol):
    """Sees every decode step, such as an expert cache on each replica."""

    def on_step(self, replica: int, union_LE: BoolArray, num_requests: int) -> float:
        """Take a step's demand.

        Args:
            replica: number of the replica, from 0.
            union_LE: experts that the batch activates; bool (L, E), not to be kept.
            num_requests: requests in the batch; each decodes one token.

        Returns:
            Experts loaded for this step, mean over layers; the step-time law may price them.
        """
        ...


Scenario = Callable[[int, float, RoutingCore], None]
"""Called before each arrival with its number, the time and the core, whose pool it may change."""


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests of a trace, cut into prompt and answer, half for calibration and half to serve.

    Attributes:
        trace: requests longer than the prefix.
        prefix_N: tokens of each request that are, or stand in for, its prompt; int64 (N,).
        calibration: requests to fit on; int64, ascending.
        served: requests to replay; int64, ascending.
        counts_NLE: expert counts of each request's prefix; uint16 (N, L, E).
        bits_TLW: experts of each token as bit sets; uint64 (T, L, W).
    """

    trace: RoutingTrace
    prefix_N: IndexArray
    calibration: IndexArray
    served: IndexArray
    counts_NLE: CountArray
    bits_TLW: BitArray

    @classmethod
    def split(
        cls,
        trace: RoutingTrace,
        prefix_tokens: int | None,
        seed: int,
        min_tokens: int | None = None,
    ) -> Workload:
        """Halve the requests by seed.

        Args:
            trace: recorded requests.
            prefix_tokens: tokens that stand in for the prompt; None: the prompts that the trace
                knows.
            seed: of the halves.
            min_tokens: shortest request to take. Default: twice the prefix, or, where the trace
                knows the prompts, MIN_DECODE tokens after the prompt.

        Raises:
            ValueError: the prefix is below 1 or not known, leaves nothing to decode, or fewer than
                four requests are long enough.
        """
        if prefix_tokens is None:
            if trace.prefix_tokens_N is None:
                raise ValueError("the trace does not know its prompts: give prefix_tokens")
            needed_N = trace.prefix_tokens_N + (MIN_DECODE if min_tokens is None else 1)
            needed_N = np.maximum(needed_N, min_tokens or 0)
            long_enough = np.flatnonzero(trace.num_tokens_N >= needed_N)
            trace = trace.subset(long_enough) if len(long_enough) else trace.subset([0])
            prefix_N = trace.prefix_tokens_N
            assert prefix_N is not None
        else:
            if prefix_tokens < 1:
                raise ValueError(f"prefix_tokens must be >= 1, got {prefix_tokens}")
            min_tokens = 2 * prefix_tokens if min_tokens is None else min_tokens
            if min_tokens <= prefix_tokens:
                raise ValueError(
                    f"min_tokens must be above the {prefix_tokens} tokens of the prefix, got "
                    f"{min_tokens}: a request needs something to decode"
                )
            trace = trace.at_least(min_tokens)
            prefix_N = np.full(len(trace), prefix_tokens, dtype=np.int64)
        if len(trace) < 4:
            raise ValueError(
                f"{len(trace)} requests that are long enough are too few to calibrate and serve: "
                "need 4"
            )
        counts_NLE: NDArray[np.int64] = np.stack(
            [
                expert_counts(trace.tokens(r)[: prefix_N[r]], trace.num_experts)
                for r in range(len(trace))
            ]
        )
        return cls(
            trace,
            prefix_N,
            *_halves(len(trace), seed),
            counts_NLE.astype(np.uint16 if prefix_N.max() < 2**16 else np.uint32),
            expert_bits(trace.ids_TLk, trace.num_experts),
        )

    def halved_by(self, seed: int) -> Workload:
        """The same requests in other halves: what `split` gives with this seed."""
        calibration, served = _halves(len(self.trace), seed)
        return replace(self, calibration=calibration, served=served)

    def decode_counts(self, requests: IndexArray) -> NDArray[np.int64]:
        """Expert counts of what requests decode; int64 (requests, L, E)."""
        decoded = (self.trace.tokens(int(r))[self.prefix_N[r] :] for r in requests)
        return np.stack([expert_counts(ids_TLk, self.trace.num_experts) for ids_TLk in decoded])

    def capture(self) -> Capture:
        """The calibration half, as the engines would have captured it."""
        rows, trace = self.calibration, self.trace
        decode_NLE = self.decode_counts(rows)
        decode_tokens = trace.num_tokens_N[rows] - self.prefix_N[rows]
        return Capture(
            model_id="trace",
            fingerprint="",
            num_layers=trace.num_layers,
            num_experts=trace.num_experts,
            top_k=trace.top_k,
            max_tokens=int(decode_tokens.max()) + 1,
            prompts_sha256="",
            versions={},
            prefill_counts_NLE=self.counts_NLE[rows],
            decode_counts_NLE=decode_NLE.astype(np.uint32),
            prompt_tokens_N=self.prefix_N[rows].astype(np.int32),
            decode_tokens_N=decode_tokens.astype(np.int32),
            domains_N=np.array([trace.domains[int(r)] for r in rows], dtype=np.str_),
            ids_N=np.array([str(r) for r in rows], dtype=np.str_),
        )

    def fit(self, num_clusters: int, seed: int, layers: LayerChoice = "all") -> Artifact:
        """Artifact of the calibration half. See `calibration.fit.fit`."""
        return fit(self.capture(), num_clusters, seed=seed, layers=layers, show_progress=False)


def _halves(number: int, seed: int) -> tuple[IndexArray, IndexArray]:
    order = np.random.default_rng([seed, 0]).permutation(number)
    half = number // 2
    return np.sort(order[:half]), np.sort(order[half:])


def expert_bits(ids_TLk: IdArray, num_experts: int) -> BitArray:
    """Each token's experts as bit sets: expert e is bit e % 64 of word e // 64.

    Returns:
        uint64 (T, L, W), W = ceil(num_experts / 64).
    """
    num_words = -(-num_experts // _WORD)
    bits = np.zeros((*ids_TLk.shape[:2], num_words), dtype=np.uint64)
    for word in range(num_words):
        shift = (ids_TLk.astype(np.int64) - word * _WORD).clip(0, _WORD - 1).astype(np.uint64)
        here = (ids_TLk // _WORD) == word
        bits[:, :, word] = np.bitwise_or.reduce(
            np.where(here, np.uint64(1) << shift, np.uint64(0)), axis=2
        )
    return bits


def unpack_bits(bits_LW: BitArray, num_experts: int) -> BoolArray:
    """Bit sets as booleans; bool (L, E)."""
    as_bytes = np.ascontiguousarray(bits_LW).astype("<u8", copy=False).view(np.uint8)
    return np.unpackbits(as_bytes, axis=1, count=num_experts, bitorder="little").view(np.bool_)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How requests come.

    Attributes:
        kind: "closed" keeps `concurrency` in flight: a request that ends makes room for the next.
            "poisson" and "bursty" are open: they come at `rate`, whatever is in flight.
        concurrency: requests in flight at the start, and in a closed loop throughout.
        rate: requests per unit of time; open loops only.
        burst: for "bursty", squared coefficient of variation of the gaps; 1 would be Poisson.
    """

    kind: str = "closed"
    concurrency: int = 128
    rate: float | None = None
    burst: float = 4.0

    def __post_init__(self) -> None:
        if self.kind not in ("closed", "poisson", "bursty"):
            raise ValueError(f"arrivals must be closed, poisson or bursty, got {self.kind!r}")
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be >= 1, got {self.concurrency}")
        if self.kind != "closed" and not (self.rate is not None and 0 < self.rate < np.inf):
            raise ValueError(f"open arrivals need a rate > 0, got {self.rate}")
        if not 0 < self.burst < np.inf:
            raise ValueError(f"burst must be > 0 and finite, got {self.burst}")

    def gaps(self, number: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Times between arrivals of an open loop; mean 1 / rate. Bursty ones are gamma."""
        assert self.rate is not None
        shape = 1.0 if self.kind == "poisson" else 1.0 / self.burst
        return rng.gamma(shape, 1 / (shape * self.rate), number)


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """What one policy did with one seed. M measured requests, S measured steps.

    Attributes:
        tpot_M: time per decoded token of each request, from its first step to its last.
        replica_M: number of the replica that decoded it.
        step_batch_S: requests in each step.
        step_distinct_S: distinct experts of each step, mean over layers.
        step_loads_S: expert loads of each step as the observer says, mean over layers; else 0.
        step_time_S: duration of each step.
        band_M: replicas in the locality band; NaN for policies without a band.
        largest_M: requests in flight on the fullest replica when each request came.
        mean_M: requests in flight a replica then, mean over replicas.
        best_similarity: mean over requests of the best cosine; None without signatures.
        duration: virtual time measured.
    """

    tpot_M: NDArray[np.float64]
    replica_M: IndexArray
    step_batch_S: IndexArray
    step_distinct_S: NDArray[np.float64]
    step_loads_S: NDArray[np.float64]
    step_time_S: NDArray[np.float64]
    band_M: NDArray[np.float64]
    largest_M: IndexArray
    mean_M: NDArray[np.float64]
    best_similarity: float | None
    duration: float

    def figures(self) -> dict[str, float]:
        """Scalars of the report.

        `distinct` is the mean over decoded tokens, `max_batch` the mean over arrivals of the
        fullest replica's load, `peak_batch` the largest batch of all.
        """
        tokens = self.step_batch_S.sum()
        figures = {
            "distinct": float(self.step_batch_S @ self.step_distinct_S / tokens),
            "distinct_step": float(self.step_distinct_S.mean()),
            "tpot_mean": float(self.tpot_M.mean()),
            **{f"tpot_p{p}": float(np.percentile(self.tpot_M, p)) for p in (50, 95, 99)},
            "max_batch": float(self.largest_M.mean()),
            "peak_batch": float(self.step_batch_S.max()),
            "mean_batch": float(self.step_batch_S.mean()),
            "load_skew": float(self.largest_M.mean() / max(self.mean_M.mean(), 1e-9)),
            "loads_per_token": float(self.step_loads_S.sum() / tokens),
            "tokens_per_time": float(tokens / self.duration),
        }
        if not np.isnan(self.band_M).all():
            figures["band_size"] = float(np.nanmean(self.band_M))
        return figures


class _Replica:
    """Requests of one decode replica: where each stands in the trace, and where it ends."""

    __slots__ = ("end_B", "joined", "number", "pos_B", "requests", "step_time", "steps", "waiting")

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests: list[int] = []
        self.joined: list[float] = []
        self.pos_B: IndexArray = np.empty(0, dtype=np.int64)
        self.end_B: IndexArray = np.empty(0, dtype=np.int64)
        self.waiting: list[tuple[int, int, int]] = []
        self.step_time: float | None = None  # of the step that runs; None while idle
        self.steps = 0

    def admit(self, now: float) -> None:
        """Let waiting requests into the batch."""
        if self.waiting:
            self.requests += [request for request, _, _ in self.waiting]
            self.joined += [now] * len(self.waiting)
            self.pos_B = np.append(self.pos_B, [pos for _, pos, _ in self.waiting])
            self.end_B = np.append(self.end_B, [end for _, _, end in self.waiting])
            self.waiting.clear()

    def advance(self) -> list[tuple[int, float]]:
        """One token for each request; returns and drops those that are done."""
        self.pos_B += 1
        is_done_B = self.pos_B == self.end_B
        if not is_done_B.any():
            return []
        done = [(self.requests[i], self.joined[i]) for i in np.flatnonzero(is_done_B)]
        kept = np.flatnonzero(~is_done_B)
        self.requests = [self.requests[i] for i in kept]
        self.joined = [self.joined[i] for i in kept]
        self.pos_B, self.end_B = self.pos_B[kept], self.end_B[kept]
        return done


class Replay:
    """One run: one policy, one seed. Call `run` once.

    Args:
        workload: what to serve.
        core: the live router's core with policy and artifact; its pool is set here.
        num_replicas: K at the start.
        arrivals: closed or open loop.
        law: time of a decode step.
        num_requests: requests to measure.
        num_warmup: requests before those.
        seed: seed of the order of requests, of arrival times and of the starting phases.
        observer: sees every step.
        residents: experts that the cache of a replica holds, by its number; bool (L, E). The core
            is told as often as heartbeats would (`resident_steps`).
        scenario: may change the pool before an arrival.
        order: requests to serve, in order and with repeats, instead of shuffles of the served half.
        together: start all requests in flight at their first token, and measure from there on,
            without warm-up; otherwise they start spread over their length.
    """

    def __init__(
        self,
        workload: Workload,
        core: RoutingCore,
        *,
        num_replicas: int,
        arrivals: Arrivals,
        law: StepTimeLaw | None = None,
        num_requests: int = 1280,
        num_warmup: int = 256,
        seed: int = 0,
        observer: Observer | None = None,
        residents: Callable[[int], BoolArray] | None = None,
        scenario: Scenario | None = None,
        order: IndexArray | None = None,
        together: bool = False,
    ) -> None:
        if num_replicas < 1 or num_requests < 1 or num_warmup < 0:
            raise ValueError(
                "need at least one replica and one request and no negative warm-up, got "
                f"{num_replicas}, {num_requests}, {num_warmup}"
            )
        self.core = core
        self._workload, self._arrivals = workload, arrivals
        self._law = StepTimeLaw() if law is None else law
        self._observer, self._residents, self._scenario = observer, residents, scenario
        self._resident_steps = resident_steps(num_replicas)
        self._first = 0 if together else arrivals.concurrency + num_warmup
        self._last = self._first + num_requests
        # Requests after the last measured one keep the load up until that one has ended.
        total = self._last + 64 * arrivals.concurrency
        self._order = shuffles(workload.served, total, seed) if order is None else order
        if len(self._order) < self._last:
            raise ValueError(f"order has {len(self._order)} requests, need {self._last}")
        rng = np.random.default_rng([seed, 2])
        first = self._order[: arrivals.concurrency]
        decode = workload.trace.num_tokens_N[first] - workload.prefix_N[first]
        self._phases = (rng.random(len(decode)) * decode).astype(np.int64)
        if together:
            self._phases[:] = 0
        if arrivals.kind != "closed":
            self._times = np.cumsum(arrivals.gaps(len(self._order), rng))
        core.set_replicas([replica_name(k) for k in range(num_replicas)])
        self._replicas: dict[str, _Replica] = {}
        self._events: list[tuple[float, int, str | None]] = []  # (time, tie-break, replica)
        self._num_events = 0
        self._next = 0
        self._where: dict[int, int] = {}
        self._band: dict[int, float] = {}
        self._loads: dict[int, tuple[int, float]] = {}
        self._tpot: dict[int, float] = {}
        self._steps: list[tuple[int, float, float, float]] = []
        self._window = (0.0, np.inf)

    def run(self) -> ReplayResult:
        """Serve until every measured request has ended."""
        for _ in range(self._arrivals.concurrency):
            self._arrive(0.0)
        for known in list(self._replicas):
            self._start_step(known, 0.0)
        if self._arrivals.kind != "closed":
            self._push(float(self._times[0]), None)
        measured = self._last - self._first
        while len(self._tpot) < measured:
            now, _, replica_id = heapq.heappop(self._events)
            if replica_id is None:
                self._arrive(now)
                if self._next < len(self._order):
                    index = self._next - self._arrivals.concurrency
                    self._push(float(self._times[index]), None)
            else:
                self._end_step(replica_id, now)
        return self._result()

    def _arrive(self, now: float) -> None:
        number, self._next = self._next, self._next + 1
        if number == self._first:
            self._window = (now, np.inf)
        elif number == self._last:
            self._window = (self._window[0], now)
        if self._scenario is not None:
            self._scenario(number, now, self.core)
        request = int(self._order[number])
        workload, trace = self._workload, self._workload.trace
        loads = self.core.loads(now)
        self._loads[number] = (int(loads.max()), float(loads.mean()))
        selection = self.core.select(
            str(number),
            workload.counts_NLE[request],
            int(workload.prefix_N[request]),
            trace.domains[request] or None,
            now,
        )
        replica = self._replicas.get(selection.replica_id)
        if replica is None:
            replica = _Replica(replica_number(selection.replica_id))
            self._replicas[selection.replica_id] = replica
        self._where[number] = replica.number
        self._band[number] = np.nan if selection.band_size is None else selection.band_size
        start = int(trace.offsets[request] + workload.prefix_N[request])
        if number < len(self._phases):
            start += int(self._phases[number])
        replica.waiting.append((number, start, int(trace.offsets[request + 1])))
        if replica.step_time is None and self._next > self._arrivals.concurrency:
            self._start_step(selection.replica_id, now)

    def _start_step(self, replica_id: str, now: float) -> None:
        replica = self._replicas[replica_id]
        replica.admit(now)
        batch = len(replica.requests)
        if not batch:
            replica.step_time = None
            return
        union_LW = np.bitwise_or.reduce(self._workload.bits_TLW[replica.pos_B], axis=0)
        trace = self._workload.trace
        distinct = int(np.bitwise_count(union_LW).sum()) / trace.num_layers
        loads = 0.0
        if self._observer is not None:
            union_LE = unpack_bits(union_LW, trace.num_experts)
            loads = self._observer.on_step(replica.number, union_LE, batch)
        if self._residents is not None and replica.steps % self._resident_steps == 0:
            self.core.report_resident(replica_id, self._residents(replica.number))
        replica.steps += 1
        replica.step_time = self._law(batch, distinct, loads)
        if self._window[0] <= now < self._window[1] and self._next > self._first:
            self._steps.append((batch, distinct, loads, replica.step_time))
        self._push(now + replica.step_time, replica_id)

    def _end_step(self, replica_id: str, now: float) -> None:
        replica = self._replicas[replica_id]
        done = replica.advance()
        for number, joined in done:
            self.core.release(str(number))
            if self._first <= number < self._last:
                request = int(self._order[number])
                workload = self._workload
                tokens = workload.trace.num_tokens_N[request] - workload.prefix_N[request]
                self._tpot[number] = (now - joined) / tokens
        if self._arrivals.kind == "closed":
            replica.step_time = 0.0  # not idle: what comes back to it waits for the next step
            for _ in done[: len(self._order) - self._next]:
                self._arrive(now)
        self._start_step(replica_id, now)

    def _push(self, time: float, replica_id: str | None) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, replica_id))

    def _result(self) -> ReplayResult:
        numbers = range(self._first, self._last)
        batch, distinct, loads, times = np.array(self._steps, dtype=np.float64).T
        begin, end = self._window
        if end == np.inf:
            end = begin + float(times.sum()) / max(1, len(self._replicas))
        return ReplayResult(
            tpot_M=np.array([self._tpot[i] for i in numbers]),
            replica_M=np.array([self._where[i] for i in numbers], dtype=np.int64),
            step_batch_S=batch.astype(np.int64),
            step_distinct_S=distinct,
            step_loads_S=loads,
            step_time_S=times,
            band_M=np.array([self._band[i] for i in numbers], dtype=np.float64),
            largest_M=np.array([self._loads[i][0] for i in numbers], dtype=np.int64),
            mean_M=np.array([self._loads[i][1] for i in numbers]),
            best_similarity=self.core.mean_best_similarity,
            duration=end - begin,
        )


def replica_name(number: int) -> str:
    """Id of a replica in replays; sorts by number."""
    return f"decode-{number:04d}"


def replica_number(replica_id: str) -> int:
    """Inverse of `replica_name`."""
    return int(replica_id.rpartition("-")[2])


def shuffles(served: IndexArray, total: int, seed: int) -> IndexArray:
    """The served requests again and again, each time in another order; int64 (total,).

    So no request is in flight twice as long as there are enough of them.
    """
    rng = np.random.default_rng([seed, 1])
    rounds = -(-total // len(served))
    order: IndexArray = np.concatenate([rng.permutation(served) for _ in range(rounds)])
    return order[:total]


def independent_draws(served: IndexArray, total: int, seed: int) -> IndexArray:
    """Served requests drawn with replacement; int64 (total,).

    Copies of one request run at the same time, and locality routing brings them together.
    """
    drawn: IndexArray = np.random.default_rng([seed, 1]).choice(served, total)
    return drawn
