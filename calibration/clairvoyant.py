"""How few distinct experts an assignment could reach that knows every token to come.

A snapshot of N requests in flight is spread over K replicas, as many on each as JSQ would put
there. Local search swaps pairs of requests between replicas while that lowers the number of
distinct experts per layer and step over the next tokens, which no online rule knows. What it finds
is an assignment that exists, so the true optimum is at least as good; it says what is left.

Axes: N requests, T steps, L MoE layers, W words of 64 experts, K replicas.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from calibration.replay import BitArray, Workload
from calibration.signature import IndexArray

DEFAULT_HORIZON = 128


def snapshot(
    workload: Workload, num_requests: int, horizon: int, rng: np.random.Generator
) -> tuple[IndexArray, BitArray]:
    """Requests in flight at some moment, and what each of them activates from there.

    Args:
        workload: where served requests come from, all of them before one comes again.
        num_requests: N.
        horizon: T, steps to look ahead; a request that ends before starts again.
        rng: draws requests and how far each has got.

    Returns:
        The requests, int64 (N,), and the experts of their next tokens, uint64 (N, T, L, W).
    """
    rounds = -(-num_requests // len(workload.served))
    requests_N = np.concatenate([rng.permutation(workload.served) for _ in range(rounds)])
    requests_N = requests_N[:num_requests]
    decode_N = workload.trace.num_tokens_N[requests_N] - workload.prefix_N[requests_N]
    start_N = (rng.random(num_requests) * decode_N).astype(np.int64)
    steps_NT = (start_N[:, None] + np.arange(horizon)) % decode_N[:, None]
    first_N = workload.trace.offsets[requests_N] + workload.prefix_N[requests_N]
    return requests_N, workload.bits_TLW[first_N[:, None] + steps_NT]


def total_distinct(bits_NTLW: BitArray, replica_N: IndexArray, num_replicas: int) -> int:
    """Distinct experts summed over replicas, steps and layers."""
    return sum(
        _count(np.bitwise_or.reduce(bits_NTLW[replica_N == k], axis=0)) for k in range(num_replicas)
    )


def even_assignment(num_requests: int, num_replicas: int, rng: np.random.Generator) -> IndexArray:
    """A random assignment with loads that differ by one at most: what JSQ makes of a snapshot."""
    return rng.permutation(np.arange(num_requests) % num_replicas)


def local_search(bits_NTLW: BitArray, replica_N: IndexArray, num_replicas: int) -> IndexArray:
    """Swap requests between replicas until no swap of two lowers `total_distinct`.

    Loads stay what they are at the start.

    Args:
        bits_NTLW: experts of each request's next tokens; uint64 (N, T, L, W).
        replica_N: the assignment to start from, in [0, K).
        num_replicas: K.

    Returns:
        An assignment that is no worse; int64 (N,).
    """
    groups = [np.flatnonzero(replica_N == k) for k in range(num_replicas)]
    costs = [_count(np.bitwise_or.reduce(bits_NTLW[group], axis=0)) for group in groups]
    rests = [_without_each(bits_NTLW[group]) for group in groups]
    is_better = True
    while is_better:
        is_better = False
        for a in range(num_replicas):
            for b in range(a + 1, num_replicas):
                if not len(groups[a]) or not len(groups[b]):
                    continue
                # Cost of a when its i-th member is replaced by b's j-th, and the other way round.
                cost_a = np.stack([_counts(rest | bits_NTLW[groups[b]]) for rest in rests[a]])
                cost_b = np.stack([_counts(rest | bits_NTLW[groups[a]]) for rest in rests[b]]).T
                gain = costs[a] + costs[b] - cost_a - cost_b
                i, j = np.unravel_index(int(gain.argmax()), gain.shape)
                if gain[i, j] <= 0:
                    continue
                groups[a][i], groups[b][j] = groups[b][j], groups[a][i]
                costs[a], costs[b] = int(cost_a[i, j]), int(cost_b[i, j])
                rests[a] = _without_each(bits_NTLW[groups[a]])
                rests[b] = _without_each(bits_NTLW[groups[b]])
                is_better = True
    found_N = np.empty(len(replica_N), dtype=np.int64)
    for k, group in enumerate(groups):
        found_N[group] = k
    return found_N


def clairvoyant_ratio(
    workload: Workload,
    start: Callable[[IndexArray], IndexArray],
    num_replicas: int,
    num_requests: int,
    seed: int,
    horizon: int = DEFAULT_HORIZON,
) -> float:
    """Distinct experts of the clairvoyant assignment over those of an even random one.

    Args:
        workload: requests to serve.
        start: from requests (N,) to an even assignment from which to search.
        num_replicas: K.
        num_requests: N in flight.
        seed: of the snapshot and the random assignment.
        horizon: steps to look ahead.
    """
    rng = np.random.default_rng([seed, 3])
    requests_N, bits_NTLW = snapshot(workload, num_requests, horizon, rng)
    blind = [
        total_distinct(bits_NTLW, even_assignment(num_requests, num_replicas, rng), num_replicas)
        for _ in range(5)
    ]
    found_N = local_search(bits_NTLW, start(requests_N), num_replicas)
    return total_distinct(bits_NTLW, found_N, num_replicas) / float(np.mean(blind))


def _without_each(bits_BTLW: BitArray) -> BitArray:
    """Union of all members but one, for each of them; same shape."""
    before = np.zeros_like(bits_BTLW)
    after = np.zeros_like(bits_BTLW)
    np.bitwise_or.accumulate(bits_BTLW[:-1], axis=0, out=before[1:])
    np.bitwise_or.accumulate(bits_BTLW[:0:-1], axis=0, out=after[-2::-1])
    return before | after


def _counts(bits_BTLW: BitArray) -> NDArray[np.int64]:
    counts: NDArray[np.int64] = np.bitwise_count(bits_BTLW).sum(axis=(1, 2, 3), dtype=np.int64)
    return counts


def _count(bits: BitArray) -> int:
    return int(np.bitwise_count(bits).sum(dtype=np.int64))
