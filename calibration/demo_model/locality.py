"""Measures of routing structure: how alike two phases route, how far a batch spreads.

Array legend: L MoE layers, E experts, K experts a token (top-k), T tokens, N requests, R batches
drawn, B requests a batch, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ChoicesLTK = NDArray[np.int64]
"""Expert ids chosen in each layer for each token; shape (L, T, K), values in [0, E)."""

UseLE = NDArray[np.float64]
"""Mean choices of each expert per token; shape (L, E), values in [0, 1], each row sums to K."""


def expert_use(choices_LTK: ChoicesLTK, num_experts: int) -> UseLE:
    """Share of tokens that chose each expert, per layer.

    Raises:
        ValueError: there is no token.
    """
    num_layers, num_tokens, _ = choices_LTK.shape
    if num_tokens == 0:
        raise ValueError("expert use needs at least one token, got none")
    counts_LE = np.stack(
        [
            np.bincount(choices_LTK[layer].ravel(), minlength=num_experts)
            for layer in range(num_layers)
        ]
    )
    return np.asarray(counts_LE / num_tokens, dtype=np.float64)


def pearson(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Pearson correlation of all entries of two arrays of one shape; in [-1, 1]."""
    return float(np.corrcoef(first.ravel(), second.ravel())[0, 1])


def distinct_experts(
    requests: Sequence[ChoicesLTK],
    batch_size: int,
    num_experts: int,
    repeats: int,
    rng: np.random.Generator,
) -> float:
    """Mean number of distinct experts a layer needs in one decode step of a random batch.

    A batch is `batch_size` different requests, each with one of its tokens, as in one decode step.

    Args:
        requests: choices of each request, N arrays of shape (L, T, K) with T >= 1.
        batch_size: requests in a batch, at most N.
        num_experts: E.
        repeats: number of random batches.
        rng: source of randomness.

    Returns:
        Experts per layer, in [K, min(E, batch_size * K)].

    Raises:
        ValueError: fewer requests than a batch holds.
    """
    if len(requests) < batch_size:
        raise ValueError(
            f"a batch of {batch_size} needs as many requests, got {len(requests)}: use more rows "
            "a group or smaller batches"
        )
    lengths_N = np.array([request.shape[1] for request in requests])
    starts_N = np.cumsum(lengths_N) - lengths_N
    # Different requests for each batch: the first places of a random order.
    order_RN = rng.random((repeats, len(requests))).argsort(axis=1)
    picked_RB = order_RN[:, :batch_size]
    offsets_RB = (rng.random(picked_RB.shape) * lengths_N[picked_RB]).astype(np.int64)
    choices_LRBK = np.concatenate(requests, axis=1)[:, starts_N[picked_RB] + offsets_RB]

    num_layers = choices_LRBK.shape[0]
    used_LRE = np.zeros((num_layers, repeats, num_experts), dtype=bool)
    np.put_along_axis(used_LRE, choices_LRBK.reshape(num_layers, repeats, -1), True, axis=-1)
    return float(used_LRE.sum(axis=-1).mean())


def mixed_requests(
    groups: Sequence[Sequence[ChoicesLTK]], rng: np.random.Generator
) -> list[ChoicesLTK]:
    """As many random requests of each group, so that a batch drawn from them mixes groups evenly.

    Args:
        groups: G lists of requests.
        rng: source of randomness.
    """
    smallest = min(len(group) for group in groups)
    return [
        group[index]
        for group in groups
        for index in rng.choice(len(group), size=smallest, replace=False)
    ]
