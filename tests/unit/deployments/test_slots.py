"""Slot runtime with a kernel in plain torch: the same numbers as with all experts in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cachemgr.learned import ScoreTable
from cachemgr.policies import LRU, ExpertCache, Retention, make_retention
from cachemgr.types import BoolArray
from deployments.vllm_adapter.slots import (
    HostCopier,
    Jobs,
    LayerWeights,
    SlotRuntime,
    token_groups,
)

L, E, K, H, N = 3, 16, 2, 8, 12


def kernel(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> None:
    """Sum over the chosen experts, in their order, token by token."""
    assert int(topk_ids.max()) < len(w1)
    for t, ids in enumerate(topk_ids.tolist()):
        total = torch.zeros(H)
        for weight, e in zip(topk_weights[t], ids, strict=True):
            total += weight * (w2[e].float() @ torch.relu(w1[e].float() @ hidden_states[t].float()))
        output[t] = total.to(output.dtype)


def make_source(dtype: torch.dtype = torch.float32) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "w13_weight": torch.randn(E, N, H, generator=generator).to(dtype),
            "w2_weight": torch.randn(E, H, N, generator=generator).to(dtype),
        }
        for _ in range(L)
    ]


def make_runtime(
    capacity: int,
    source: list[dict[str, torch.Tensor]],
    *,
    exact_tokens: int = 1000,
    reads_source: bool = False,
    budget: int = 0,
    **kwargs: Any,
) -> SlotRuntime:
    name = "given" if "scoring" in kwargs else "lru"
    retention = kwargs.pop("retention", None) or make_retention(name, L, E)
    cache = ExpertCache(L, E, capacity, K, retention, budget=budget)
    layers = [
        LayerWeights(
            of, {n: torch.zeros(capacity, *t.shape[1:], dtype=t.dtype) for n, t in of.items()}
        )
        for of in source
    ]
    return SlotRuntime(
        cache,
        layers,
        kwargs.pop("copier", HostCopier()),
        exact_tokens=exact_tokens,
        reads_source=reads_source,
        **kwargs,
    )


class Batches:
    """Random steps, and what all experts in place make of them."""

    def __init__(self, source: list[dict[str, torch.Tensor]], seed: int = 0) -> None:
        self._rng, self._source = np.random.default_rng(seed), source

    def step(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = torch.from_numpy(self._rng.normal(size=(tokens, H))).to(
            self._source[0]["w13_weight"].dtype
        )
        weights = torch.from_numpy(self._rng.random((tokens, K))).float()
        ids = np.argsort(self._rng.random((tokens, E)), axis=1)[:, :K].astype(np.int32)
        return hidden, weights, torch.from_numpy(ids)

    def expected(self, layer: int, step: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Any:
        output = torch.empty_like(step[0])
        kernel(output, step[0], *self._source[layer].values(), *step[1:])
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_results_are_those_of_all_experts(tokens: int, dtype: torch.dtype) -> None:
    source = make_source(dtype)
    runtime, batches = make_runtime(5, source), Batches(source)
    for _ in range(15):
        for layer in range(L):
            step = batches.step(tokens)
            output = torch.empty_like(step[0])
            runtime.run(layer, kernel, output, *step)
            assert torch.equal(output, batches.expected(layer, step))
    assert runtime.counts.steps == 15
    assert runtime.counts.kernel_calls > 45 if tokens > 1 else runtime.counts.kernel_calls == 45


def test_long_prompt_reads_the_store_and_leaves_the_slots() -> None:
    source = make_source(torch.bfloat16)
    runtime = make_runtime(5, source, exact_tokens=4, reads_source=True)
    batches = Batches(source)
    runtime.run(0, kernel, torch.empty(2, H, dtype=torch.bfloat16), *batches.step(2))
    resident_E = runtime.cache.resident_LE[0].copy()
    step = batches.step(40)
    output = torch.empty_like(step[0])
    runtime.run(0, kernel, output, *step)
    assert torch.equal(output, batches.expected(0, step))
    assert (runtime.cache.resident_LE[0] == resident_E).all()
    assert runtime.counts.streamed == len(step[2].unique())


def test_long_prompt_in_passes_of_experts_is_right_up_to_rounding() -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        source = make_source(dtype)
        runtime, batches = make_runtime(5, source, exact_tokens=4), Batches(source)
        for _ in range(5):
            step = batches.step(40)
            output = torch.empty_like(step[0])
            runtime.run(1, kernel, output, *step)
            torch.testing.assert_close(
                output, batches.expected(1, step), rtol=tolerance, atol=tolerance * 10
            )
        # Each pass loads what it lacks once: at most all experts a step.
        assert runtime.cache.ledger.totals().demand <= 5 * E
        assert runtime.counts.kernel_calls == runtime.cache.ledger.totals().passes >= 5 * 4


def test_ranks_add_up_to_the_whole() -> None:
    source, batches = make_source(), Batches(make_source())
    owned_LE = np.random.default_rng(3).random((L, E)) < 0.4
    ranks = [
        make_runtime(capacity, source, owned_LE=owned)
        for owned, capacity in ((owned_LE, 4), (~owned_LE, 6))
    ]
    for tokens in (1, 3, 30):
        for layer in range(L):
            step = batches.step(tokens)
            parts = [torch.full_like(step[0], torch.nan) for _ in ranks]
            for rank, part in zip(ranks, parts, strict=True):
                rank.run(layer, kernel, part, *step)
            torch.testing.assert_close(parts[0] + parts[1], batches.expected(layer, step))
    assert not (ranks[0].cache.resident_LE & ~owned_LE).any()


class Hearing(LRU):
    """Remembers what it last heard of."""

    heard: tuple[int, ...] = ()

    def observe(self, rows: slice, demand_RE: BoolArray) -> None:
        self.heard = tuple(demand_RE[0].nonzero()[0])
        super().observe(rows, demand_RE)


@pytest.mark.parametrize(
    ("ids", "exact_tokens"),
    [([[0, 1], [2, 3], [1, 3]], 1000), ([[0, 2], [0, 4], [6, 1]], 0)],  # in one call, in passes
)
def test_policy_of_a_rank_hears_what_all_ranks_execute(
    ids: list[list[int]], exact_tokens: int
) -> None:
    owned_LE = np.tile(np.arange(E) % 2 == 0, (L, 1))
    retention = Hearing(L, E)
    runtime = make_runtime(
        2, make_source(), owned_LE=owned_LE, retention=retention, exact_tokens=exact_tokens
    )
    hidden, weights, _ = Batches(make_source()).step(3)
    chosen = torch.tensor(ids, dtype=torch.int32)
    runtime.run(1, kernel, torch.empty(3, H), hidden, weights, chosen)
    assert set(retention.heard) == {expert for token in ids for expert in token}
    assert not (runtime.cache.resident_LE & ~owned_LE).any()


class Scores:
    """Retention by the logits; predicts the experts given for each layer."""

    def __init__(self, predicted_LE: np.ndarray[Any, Any]) -> None:
        self._predicted_LE = predicted_LE

    def retention(self, layer: int, hidden: torch.Tensor, logits: torch.Tensor) -> Any:
        return logits.mean(0).numpy()

    def next_layer(self, layer: int, hidden: torch.Tensor) -> Any:
        return self._predicted_LE[(layer + 1) % L]


def test_what_is_predicted_is_loaded_ahead() -> None:
    source, batches = make_source(), Batches(make_source())
    predicted_LE = np.zeros((L, E))
    predicted_LE[1, [3, 9]] = 5.0
    runtime = make_runtime(4, source, budget=2, scoring=Scores(predicted_LE))
    step = batches.step(1)
    logits = torch.zeros(1, E)
    runtime.run(0, kernel, torch.empty(1, H), *step, logits)
    assert runtime.cache.ledger.proactive.tolist() == [0, 2, 0]
    ids = torch.tensor([[9, 3]], dtype=torch.int32)
    output = torch.empty(1, H)
    runtime.run(1, kernel, output, step[0], step[1], ids, logits)
    assert torch.equal(output, batches.expected(1, (step[0], step[1], ids)))
    assert runtime.cache.ledger.demand[1] == 0


def test_scores_of_the_model_decide_what_leaves() -> None:
    source = make_source()
    runtime = make_runtime(3, source, scoring=Scores(np.zeros((L, E))))
    hidden, weights = torch.zeros(1, H), torch.ones(1, K)
    for ids, wanted in (([0, 1], 1), ([2, 1], 0), ([5, 6], 2)):
        logits = torch.zeros(1, E)
        logits[0, wanted] = 1.0
        step = (hidden, weights, torch.tensor([ids], dtype=torch.int32))
        runtime.run(0, kernel, torch.empty(1, H), *step, logits)
    assert runtime.cache.resident_LE[0].nonzero()[0].tolist() == [2, 5, 6]


class Failing(HostCopier):
    """Breaks off in the middle of a copy when told to."""

    fails = False

    def copy(self, jobs: Jobs) -> None:
        if self.fails:
            destination, source = jobs[0]
            destination[: len(destination) // 2].copy_(source[: len(destination) // 2])
            raise OSError("read error")
        super().copy(jobs)


@pytest.mark.parametrize("ahead", [False, True])
def test_half_copied_slot_is_never_used(ahead: bool) -> None:
    source, batches, copier = make_source(), Batches(make_source()), Failing()
    predicted_LE = np.zeros((L, E))
    predicted_LE[1, [3, 9]] = 5.0
    runtime = make_runtime(4, source, copier=copier, budget=2 * ahead, scoring=Scores(predicted_LE))
    logits = torch.zeros(1, E)

    def run(layer: int, step: Any) -> torch.Tensor:
        output = torch.empty(1, H)
        runtime.run(layer, kernel, output, *step, logits)
        return output

    step = batches.step(1)
    run(0, step)
    copier.fails = True
    other = (*step[:2], (step[2] + 5) % E)
    with pytest.raises(OSError, match="read error"):
        run(1, other) if not ahead else (run(0, step), run(1, other))
    assert not runtime.cache.resident_LE.any()
    copier.fails = False
    for layer in (0, 1):
        for again in (step, other):
            assert torch.equal(run(layer, again), batches.expected(layer, again))


def looking_around() -> Retention:
    """A score that depends on what the layers below chose in this step."""
    window_LWEE = np.random.default_rng(0).normal(size=(L, 3, E, E)).astype(np.float32)
    bias_LE = np.zeros((L, E), dtype=np.float32)
    table = ScoreTable("m", None, (4.0,), 0.5, window_LWEE[:, :1, 0], window_LWEE, bias_LE, {})
    return make_retention("learned", L, E, table=table)


@pytest.mark.parametrize("make", [lambda: make_retention("lru", L, E), looking_around])
def test_policy_hears_of_every_step_in_order(make: Callable[[], Retention]) -> None:
    """Layers that lack nothing are told of later: contents and counts are as if at once."""
    source, batches = make_source(), Batches(make_source(), seed=5)
    runtime = make_runtime(6, source, retention=make())
    told = ExpertCache(L, E, 6, K, make())
    for _ in range(200):
        for layer in range(L):
            step = batches.step(2)
            step = (*step[:2], step[2] % 8)  # few experts: hits and misses in one step
            if len(step[2].unique()) < 2:
                continue
            runtime.run(layer, kernel, torch.empty(2, H), *step)
            demand_E = np.zeros(E, dtype=bool)
            demand_E[step[2].numpy()] = True
            told.access(layer, demand_E)
    runtime.run(L - 1, kernel, torch.empty(2, H), *step)
    told.access(L - 1, demand_E)
    assert (runtime.cache.resident_LE == told.resident_LE).all()
    assert runtime.cache.ledger.totals() == told.ledger.totals()
    assert 0.3 < told.ledger.totals().hit < 0.95


def test_budget_that_is_taken_away_leaves_no_stale_slot() -> None:
    source, batches = make_source(), Batches(make_source())
    predicted_LE = np.zeros((L, E))
    predicted_LE[1, [3, 9]] = 5.0
    runtime = make_runtime(2, source, budget=2, scoring=Scores(predicted_LE))
    logits = torch.zeros(1, E)
    step = (*batches.step(1)[:2], torch.tensor([[0, 1]], dtype=torch.int32))
    runtime.run(1, kernel, torch.empty(1, H), *step, logits)
    runtime.run(0, kernel, torch.empty(1, H), *step, logits)  # loads 3 and 9 over 0 and 1
    runtime.cache.budget = 0
    output = torch.empty(1, H)
    runtime.run(1, kernel, output, *step, logits)
    assert torch.equal(output, batches.expected(1, step))


def test_another_capacity_starts_empty_and_goes_on() -> None:
    source, batches = make_source(), Batches(make_source())
    runtime, small = make_runtime(6, source), make_runtime(3, source)
    run = run_of(runtime)
    run(0, batches.step(4))
    runtime.replace(small.cache, None, allocate=lambda: small.layers)
    step = batches.step(4)
    assert torch.equal(run(0, step), batches.expected(0, step))
    assert runtime.cache.capacity == 3


def test_hits_of_a_broken_step_do_not_reach_another_cache() -> None:
    source, batches = make_source(), Batches(make_source())
    runtime, other = make_runtime(6, source), make_runtime(6, source)
    run, step = run_of(runtime), batches.step(1)
    run(0, step)
    run(0, step)  # a hit, and no layer after it
    runtime.replace(other.cache, None, allocate=lambda: other.layers)
    assert torch.equal(run(0, step), batches.expected(0, step))


def test_failed_copy_of_a_broken_step_is_told_at_the_next() -> None:
    copier, slot, expert = HostCopier(), torch.zeros(2), torch.ones(2)
    copier.start(0, [(slot, torch.ones(3))])  # and nobody waits for it
    with pytest.raises(RuntimeError, match="size"):
        copier.start(0, [(slot, expert)])
    copier.start(0, [(slot, expert)])
    copier.finish(0)
    assert torch.equal(slot, expert)


def run_of(runtime: SlotRuntime) -> Callable[[int, Any], torch.Tensor]:
    def run(layer: int, step: Any) -> torch.Tensor:
        output = torch.empty_like(step[0])
        runtime.run(layer, kernel, output, *step)
        return output

    return run


def test_token_groups_fit_and_use_residents_first() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = np.argsort(rng.random((20, E)), axis=1)[:, :4]
        resident_E = np.zeros(E, dtype=bool)
        resident_E[ids[7]] = True
        groups = token_groups(ids, resident_E, capacity=6)
        assert sorted(np.concatenate(groups)) == list(range(20))
        assert all(len(np.unique(ids[tokens])) <= 6 for tokens in groups)
        assert 7 in groups[0]
