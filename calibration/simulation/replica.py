"""One decode replica on virtual time: continuous batching, whole runs of equal steps at once.

Axes: X experts of the averaged layers in one row; B requests of the batch; L MoE layers, W words.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from calibration.simulation.workload import Workload
from calibration.step_time import StepTimeLaw

REFRESH_SHARE = 1 / 12
"""Share of the batch that may have changed before distinct experts are computed anew."""

EPSILON_S = 1e-12


@dataclass(slots=True)
class StepTotals:
    """Sums over decode steps."""

    steps: float = 0.0
    tokens: float = 0.0
    distinct: float = 0.0
    token_distinct: float = 0.0
    """Distinct experts of a step times its requests: what a token meets, not what a step does."""
    loads: float = 0.0

    def minus(self, earlier: StepTotals) -> StepTotals:
        """What came since an earlier copy."""
        return StepTotals(
            *(getattr(self, name) - getattr(earlier, name) for name in self.__slots__)
        )


class DecodeReplica:
    """Batch, queue and clock of one replica.

    Between two changes of the batch all steps take the same time, so they are simulated as one
    run. Distinct experts are the expectation over the requests' profiles: an expert is absent with
    the product of the requests' probabilities not to use it, kept as a sum of logarithms. With
    `exact`, each step takes the union of one token of each request instead.

    Args:
        replica_id: name in the router's pool.
        workload: profiles of the requests.
        law: step time, seconds.
        max_num_seqs: largest batch.
        cache_slots: experts a layer that are held; None for all.
        now: seconds; when the replica becomes ready.
        exact: step by step with unions of tokens.
        seed: seed of the phases at which requests start in their recorded tokens (exact only).
    """

    def __init__(
        self,
        replica_id: str,
        workload: Workload,
        law: StepTimeLaw,
        *,
        max_num_seqs: int,
        cache_slots: int | None,
        now: float,
        exact: bool = False,
        seed: int = 0,
    ) -> None:
        self.replica_id = replica_id
        self.totals = StepTotals()
        self.distinct = 0.0
        self.next_finish = math.inf
        """No request ends before, seconds."""
        self._workload, self._law = workload, law
        self._max, self._slots, self._exact = max_num_seqs, cache_slots, exact
        self._now, self._step = now, 0
        self._waiting: list[tuple[float, int, int, int]] = []  # heap: ready, request, row, steps
        self._batch: list[tuple[int, int, int]] = []  # heap: last step, request, row
        self._log_absent = workload.log_absent
        self._log_absent_X = np.zeros_like(self._log_absent[0])
        self._absent_X = np.empty_like(self._log_absent_X)
        self._num_layers = self._log_absent_X.size // workload.num_experts
        self._changes = math.inf
        self._is_other_batch = True
        self._step_s = self._loads = 0.0
        if exact:
            self._bits_TLW, self._offsets = workload.decode_bits
            self._phases: dict[int, int] = {}
            self._rng = np.random.default_rng([seed, 15])

    @property
    def num_requests(self) -> int:
        """Requests in the batch, and those whose KV is awaited."""
        return len(self._batch) + len(self._waiting)

    def submit(self, request: int, row: int, steps: int, ready: float) -> None:
        """Queue a request whose KV arrives at `ready` and that needs some steps."""
        heapq.heappush(self._waiting, (ready, request, row, steps))
        earliest = ready + steps * self._step_s if self._batch else ready
        if earliest < self.next_finish:
            self.next_finish = earliest

    def abandon(self) -> None:
        """Drop all requests: the replica has died."""
        self._waiting.clear()
        self._batch.clear()
        self.next_finish = math.inf

    def advance(self, until: float) -> list[tuple[int, float]]:
        """Simulate all steps that end by `until`, as far as they change the batch.

        Returns:
            Requests that finished and when, in order of time.
        """
        finished: list[tuple[int, float]] = []
        batch, waiting, is_exact = self._batch, self._waiting, self._exact
        while True:
            if not batch:
                if not waiting or waiting[0][0] > until:
                    break
                self._now = max(self._now, waiting[0][0])
            while waiting and waiting[0][0] <= self._now + EPSILON_S and len(batch) < self._max:
                self._join()
            if is_exact or self._is_other_batch:
                self._price_step()
            run = 1 if is_exact else batch[0][0] - self._step
            if waiting and run > 1 and len(batch) < self._max:
                run = min(run, self._steps_until(waiting[0][0]))
            end = self._now + run * self._step_s
            if end > until:
                break
            self._count(run)
            self._now = end
            self._step = step = self._step + run
            while batch and batch[0][0] <= step:
                finished.append((self._leave(), end))
        if batch:
            self.next_finish = self._now + (batch[0][0] - self._step) * self._step_s
        elif waiting:
            self.next_finish = max(self._now, waiting[0][0])
        else:
            self.next_finish = math.inf
        return finished

    def catch_up(self, now: float) -> None:
        """Count the whole steps of a running run that have ended by `now`, after `advance(now)`."""
        if self._batch and self._step_s > 0:
            run = int((now - self._now) / self._step_s)
            self._count(run)
            self._now += run * self._step_s
            self._step += run

    def _steps_until(self, ready: float) -> int:
        """Steps until a request whose KV arrives at `ready` may join."""
        return max(1, math.ceil((ready - self._now) / self._step_s - EPSILON_S))

    def _join(self) -> None:
        _, request, row, steps = heapq.heappop(self._waiting)
        heapq.heappush(self._batch, (self._step + steps, request, row))
        self._log_absent_X += self._log_absent[row]
        self._changes += 1
        self._is_other_batch = True
        if self._exact:
            length = int(self._offsets[row + 1] - self._offsets[row])
            self._phases[request] = int(self._rng.integers(length)) - self._step

    def _leave(self) -> int:
        _, request, row = heapq.heappop(self._batch)
        self._log_absent_X -= self._log_absent[row]
        self._changes += 1
        self._is_other_batch = True
        if not self._batch:
            self._log_absent_X[:] = 0.0  # no rounding errors stay
            self._changes = math.inf
        if self._exact:
            del self._phases[request]
        return request

    def _price_step(self) -> None:
        """Time of a step of the batch as it is, by its distinct experts of now or of lately."""
        size = len(self._batch)
        if self._exact or self._changes > REFRESH_SHARE * size:
            self._refresh()
        self._step_s = self._law(size, self.distinct, self._loads)
        self._is_other_batch = False

    def _refresh(self) -> None:
        """Distinct experts and loads of the batch as it is."""
        if self._exact:
            self.distinct = self._union()
        else:
            np.exp(self._log_absent_X, out=self._absent_X)
            absent = float(np.add.reduce(self._absent_X))
            self.distinct = self._workload.num_experts - absent / self._num_layers
            if self._slots is not None:
                self._loads = self._expected_loads(self._slots)
        self._changes = 0

    def _union(self) -> float:
        rows_B = np.array([row for _, _, row in self._batch])
        phases_B = np.array([self._phases[request] for _, request, _ in self._batch])
        starts_B = self._offsets[rows_B]
        lengths_B = self._offsets[rows_B + 1] - starts_B
        tokens_B = starts_B + (phases_B + self._step) % lengths_B
        union_LW = np.bitwise_or.reduce(self._bits_TLW[tokens_B], axis=0)
        return int(np.bitwise_count(union_LW).sum()) / self._workload.num_layers

    def _expected_loads(self, slots: int) -> float:
        """Experts a step needs beyond the likeliest `slots` of each layer, which are held."""
        num_layers, num_experts = self._num_layers, self._workload.num_experts
        if slots >= num_experts:
            return 0.0
        present_LE = 1.0 - self._absent_X.reshape(num_layers, num_experts)
        present_LE.partition(num_experts - slots, axis=1)
        return float(present_LE[:, : num_experts - slots].sum()) / num_layers

    def _count(self, run: int) -> None:
        totals, tokens, distinct = self.totals, run * len(self._batch), self.distinct
        totals.steps += run
        totals.tokens += tokens
        totals.distinct += run * distinct
        totals.token_distinct += tokens * distinct
        totals.loads += run * self._loads
