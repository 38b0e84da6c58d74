"""Made-up requests with the expert statistics that were published for Qwen3-30B-A3B.

No recorded trace of that model is public, so its routing cannot be replayed. What is public are a
few facts about it; the generator has as few knobs as reproduce them, and `structure_facts` measures
them on the result, for the report and for the tests:

* batches of one domain touch 17-21 % (tasks) or 3-10 % (languages) fewer distinct experts than
  mixed ones;
* activation of experts in prefill and decode correlates at 0.90.

A request's taste is a sum of normal terms per layer and expert: general popularity, domain, topic
(three to a domain, as the paper's tasks come from twelve data sets), the request itself. Tokens
then choose top-k by Gumbel noise, for which the probability that expert e is among the chosen is
1 - exp(-s w_e) to a good approximation, with w the exponential of the taste and s such that they
sum to k. All that follows uses these probabilities; tokens are drawn only where they are asked for.

What is *not* published and therefore assumed: how much of the difference lies in topics and single
requests rather than in domains. The gain of routing depends on it.

Axes: N requests, L MoE layers, E experts, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.traces import IdArray

Float32Array = NDArray[np.float32]
CountArray = NDArray[np.integer[Any]]

MAX_ACTIVATION = 0.999
"""No expert is certain: its complement is a factor of every batch's product."""

FACT_BATCH = 32
PROMPT_TOKENS = (16, 1024)
MEDIAN_PROMPT_TOKENS = 130
SIGMA_PROMPT_TOKENS = 0.7


@dataclass(frozen=True, slots=True)
class Structure:
    """Standard deviations of the terms of a taste, and shares of the domains.

    Attributes:
        domains: name and share of each domain.
        topics: topics of each domain.
        popularity, domain, topic, request: spread of each term.
        phase: spread of what prefill and decode of one domain do not share.
    """

    domains: dict[str, float]
    topics: int
    popularity: float
    domain: float
    topic: float
    request: float
    phase: float


STRUCTURES = {
    # Shares as in the paper's workloads: 3600 / 2779 / 2744 / 2545 prompts; four most frequent
    # languages of WildChat, English and Chinese three quarters of all.
    "tasks": Structure(
        {"legal": 0.308, "code": 0.238, "math": 0.235, "medical": 0.218},
        topics=3,
        popularity=0.6,
        domain=1.3,
        topic=0.6,
        request=0.7,
        phase=0.58,
    ),
    "languages": Structure(
        {"en": 0.52, "zh": 0.34, "ru": 0.08, "fr": 0.06},
        topics=3,
        popularity=0.6,
        domain=0.65,
        topic=0.6,
        request=0.7,
        phase=0.4,
    ),
}


@dataclass(frozen=True, eq=False)
class SyntheticRequests:
    """Requests of the generator.

    Attributes:
        domains_N: domain of each request; unicode (N,).
        topics_N: topic of each request, numbered over all domains; int64 (N,).
        prompt_tokens_N: prompt length; int32 (N,).
        prefill_NLE: probability that a prompt token chooses an expert; float32 (N, L, E).
        decode_NLE: the same for decoded tokens; each row over E sums to top_k.
    """

    domains_N: NDArray[np.str_]
    topics_N: NDArray[np.int64]
    prompt_tokens_N: NDArray[np.int32]
    prefill_NLE: Float32Array
    decode_NLE: Float32Array


def make_requests(
    structure: Structure,
    number: int,
    *,
    num_layers: int,
    num_experts: int,
    top_k: int,
    seed: int,
) -> SyntheticRequests:
    """Draw requests. Deterministic in its arguments."""
    rng = np.random.default_rng([seed, 10])
    names = list(structure.domains)
    shares = np.array(list(structure.domains.values()))
    domain_N = rng.choice(len(names), size=number, p=shares / shares.sum())
    topic_N = domain_N * structure.topics + rng.integers(structure.topics, size=number)
    shape = (num_layers, num_experts)

    def terms(count: int, spread: float) -> Float32Array:
        return rng.standard_normal((count, *shape), dtype=np.float32) * np.float32(spread)

    shared_TLE = terms(len(names), structure.domain).repeat(structure.topics, axis=0)
    shared_TLE += terms(len(shared_TLE), structure.topic) + terms(1, structure.popularity)
    phase_DLE = terms(len(names), structure.phase)
    taste_NLE = shared_TLE[topic_N] + terms(number, structure.request)
    decode_NLE = inclusion_probabilities(taste_NLE, top_k)
    # The request's own term is drawn anew in part: a prompt is not its answer.
    taste_NLE += phase_DLE[domain_N] + terms(number, structure.request * 0.7)
    prefill_NLE = inclusion_probabilities(taste_NLE, top_k)
    lengths = rng.lognormal(np.log(MEDIAN_PROMPT_TOKENS), SIGMA_PROMPT_TOKENS, number)
    return SyntheticRequests(
        np.array(names)[domain_N],
        topic_N,
        np.clip(lengths, *PROMPT_TOKENS).astype(np.int32),
        prefill_NLE,
        decode_NLE,
    )


def inclusion_probabilities(taste_NLE: Float32Array, top_k: int) -> Float32Array:
    """Probability of each expert to be among a token's top-k.

    Args:
        taste_NLE: log weights; float32 (N, L, E).
        top_k: experts a token chooses, < E.

    Returns:
        float32 (N, L, E), in (0, 0.999]; each row sums to top_k, to about 1e-3.
    """
    probabilities_NLE = np.empty_like(taste_NLE)
    for taste_LE, row_LE in zip(taste_NLE, probabilities_NLE, strict=True):
        weights_LE = np.exp(taste_LE - taste_LE.max(axis=1, keepdims=True))
        scale_L1 = top_k / weights_LE.sum(axis=1, keepdims=True)
        for _ in range(12):  # Newton from below: the sum is concave in the scale
            absent_LE = np.exp(-scale_L1 * weights_LE)
            missing_L1 = top_k - (1 - absent_LE).sum(axis=1, keepdims=True)
            slope_L1 = (weights_LE * absent_LE).sum(axis=1, keepdims=True)
            scale_L1 = scale_L1 + missing_L1 / slope_L1
        row_LE[:] = np.minimum(1 - np.exp(-scale_L1 * weights_LE), MAX_ACTIVATION)
    return probabilities_NLE


def draw_counts(
    probabilities_NLE: Float32Array,
    tokens_N: NDArray[np.integer[Any]],
    top_k: int,
    rng: np.random.Generator,
) -> NDArray[np.uint32]:
    """Expert counts of some tokens a request; each row over E sums to tokens * top_k.

    Multinomial, so a count may in rare cases exceed the tokens by a few.

    Returns:
        uint32 (N, L, E).
    """
    counts_NLE = np.empty(probabilities_NLE.shape, dtype=np.uint32)
    for counts_LE, p_LE, tokens in zip(counts_NLE, probabilities_NLE, tokens_N, strict=True):
        shares_LE = p_LE.astype(np.float64)
        shares_LE /= shares_LE.sum(axis=1, keepdims=True)
        counts_LE[:] = rng.multinomial(int(tokens) * top_k, shares_LE)
    return counts_NLE


def draw_tokens(
    probabilities_LE: Float32Array, number: int, top_k: int, rng: np.random.Generator
) -> IdArray:
    """Tokens with exactly the given probabilities and exactly top-k distinct experts.

    Systematic sampling: top_k equidistant points from a random start fall into the cumulated
    probabilities. Experts of one token are not independent, those of different tokens are; the
    union of a batch depends on nothing else.

    Returns:
        uint16 (T, L, k).
    """
    num_layers, num_experts = probabilities_LE.shape
    order_E = rng.permutation(num_experts)
    ids_TLk = np.empty((number, num_layers, top_k), dtype=np.uint16)
    for layer in range(num_layers):
        edges_E = np.cumsum(probabilities_LE[layer, order_E], dtype=np.float64)
        edges_E *= top_k / edges_E[-1]
        points_Tk = rng.random((number, 1)) + np.arange(top_k)
        places_Tk = np.searchsorted(edges_E, points_Tk, side="right")
        ids_TLk[:, layer] = order_E[np.minimum(places_Tk, num_experts - 1)]
    return ids_TLk


def expected_distinct(activation_BLE: Float32Array) -> float:
    """Distinct experts that one token of each request of a batch activates, mean over layers."""
    absent_LE = np.exp(np.log1p(-activation_BLE.astype(np.float64)).sum(axis=0))
    return float((1 - absent_LE).sum(axis=1).mean())


def structure_facts(
    prefill_NLE: NDArray[Any],
    decode_NLE: Float32Array,
    domains_N: NDArray[np.str_],
    *,
    batch: int = FACT_BATCH,
    num_batches: int = 60,
    seed: int = 0,
) -> dict[str, float]:
    """The published facts, measured.

    Args:
        prefill_NLE: prompt use per expert, counts or probabilities; (N, L, E).
        decode_NLE: probability that a decoded token activates an expert; float32 (N, L, E).
        domains_N: label of each request.
        batch: requests in a batch; drawn with replacement.
        num_batches: batches drawn of the mix, and of each domain.
        seed: seed of the draws.

    Returns:
        mixed: distinct experts of a mixed batch, mean over layers; same_domain_change: relative
        change of that in batches of one domain, mean over domains as frequent as they are;
        prefill_decode_pearson: over domains, layers and experts, of mean activation.
    """
    rng = np.random.default_rng([seed, 11])
    rows = np.arange(len(domains_N))

    def distinct(rows: NDArray[np.int64]) -> float:
        draws = [decode_NLE[rng.choice(rows, batch)] for _ in range(num_batches)]
        return float(np.mean([expected_distinct(draw_BLE) for draw_BLE in draws]))

    mixed = distinct(rows)
    same, prefill, decode = 0.0, [], []
    for domain in np.unique(domains_N):
        members = rows[domains_N == domain]
        same += distinct(members) * len(members) / len(rows)
        use_NLE = prefill_NLE[members].astype(np.float64)
        use_NLE /= use_NLE.sum(axis=2, keepdims=True)
        prefill.append(use_NLE.mean(axis=0).ravel())
        decode.append(decode_NLE[members].mean(axis=0).ravel())
    pearson = np.corrcoef(np.concatenate(prefill), np.concatenate(decode))[0, 1]
    return {
        "mixed": mixed,
        "same_domain_change": same / mixed - 1,
        "prefill_decode_pearson": float(pearson),
    }
