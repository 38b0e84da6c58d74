"""One builder per core type; every value a test does not care about has a default.

Axes: N requests, L MoE layers, E experts, K clusters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from calibration.artifact import Artifact
from calibration.counts import Capture
from calibration.signature import SignatureTransform, compute_idf
from calibration.traces import RoutingTrace

DOMAINS = ("code", "math", "medical", "legal")


def build_counts(
    domain_of_N: Sequence[int],
    tokens_N: Sequence[int],
    *,
    num_layers: int = 4,
    num_experts: int = 16,
    top_k: int = 2,
    strength: float = 3.0,
    taste_seed: int = 0,
    seed: int = 0,
) -> NDArray[np.uint16]:
    """Expert counts uint16 (N, L, E) of requests whose domains prefer different experts.

    Every token takes top_k distinct experts per layer (Gumbel top-k over the domain's logits), so
    the counts are conserved. `taste_seed` fixes the preferences, `seed` the draws: the prefill and
    the decode part of a capture share the former.
    """
    taste = np.random.default_rng(taste_seed)
    logits = taste.normal(size=(max(domain_of_N) + 1, num_layers, num_experts)) * strength
    rng = np.random.default_rng(seed)
    counts_NLE = np.zeros((len(domain_of_N), num_layers, num_experts), dtype=np.uint16)
    for n, (domain, tokens) in enumerate(zip(domain_of_N, tokens_N, strict=True)):
        keys = logits[domain] + rng.gumbel(size=(tokens, num_layers, num_experts))
        chosen = np.argpartition(-keys, top_k - 1, axis=2)[:, :, :top_k]
        for layer in range(num_layers):
            counts_NLE[n, layer] = np.bincount(chosen[:, layer].ravel(), minlength=num_experts)
    return counts_NLE


def build_capture(
    num_requests: int = 40,
    *,
    num_domains: int = 4,
    num_layers: int = 4,
    num_experts: int = 16,
    top_k: int = 2,
    seed: int = 0,
) -> Capture:
    """A capture whose requests take the domains in turn; 12 to 20 tokens in each phase."""
    rng = np.random.default_rng(seed)
    domain_of_N = [n % num_domains for n in range(num_requests)]
    shape = {"num_layers": num_layers, "num_experts": num_experts, "top_k": top_k}
    prompt_tokens = rng.integers(12, 21, num_requests).astype(np.int32)
    decode_tokens = rng.integers(12, 21, num_requests).astype(np.int32)
    return Capture(
        model_id="test/moe",
        fingerprint="f" * 16,
        **shape,
        max_tokens=20,
        prompts_sha256="0" * 64,
        versions={"vllm": "0"},
        prefill_counts_NLE=build_counts(
            domain_of_N, prompt_tokens.tolist(), **shape, taste_seed=seed, seed=seed + 1
        ),
        decode_counts_NLE=build_counts(
            domain_of_N, decode_tokens.tolist(), **shape, taste_seed=seed, seed=seed + 2
        ),
        prompt_tokens_N=prompt_tokens,
        decode_tokens_N=decode_tokens,
        domains_N=np.array([DOMAINS[domain] for domain in domain_of_N]),
        ids_N=np.array([f"request-{n}" for n in range(num_requests)]),
    )


def build_artifact(
    k: int = 4,
    *,
    num_layers: int = 4,
    num_experts: int = 16,
    top_k: int = 2,
    layer_mask: Sequence[int] | None = None,
) -> Artifact:
    """An artifact made by hand, without a fit: centroid c is the signature of domain c."""
    shape = {"num_layers": num_layers, "num_experts": num_experts, "top_k": top_k}
    counts_KLE = build_counts(range(k), [40] * k, **shape)
    mask = np.arange(num_layers) if layer_mask is None else np.array(layer_mask)
    idf_LE = compute_idf(counts_KLE)
    centroids_KD = SignatureTransform(idf_LE, mask).batch(counts_KLE)
    return Artifact(
        model_id="test/moe",
        fingerprint="f" * 16,
        **shape,
        workload="test",
        prompts_sha256="0" * 64,
        num_requests=k,
        k=k,
        tau=0.1,
        seed=1,
        scores={"rho": 0.9},
        versions={"vllm": "0"},
        idf_LE=idf_LE,
        layer_mask=mask,
        layer_order=np.arange(num_layers),
        rho_curve_L=np.linspace(0.5, 0.9, num_layers),
        layer_rho_L=np.full(num_layers, 0.5),
        centroids_KD=centroids_KD,
        assignments_N=np.arange(k),
        domains_N=np.array([f"domain-{c}" for c in range(k)]),
        reservoir_RD=centroids_KD.copy(),
        reservoir_rows_R=np.arange(k),
        cluster_activation_KLE=(counts_KLE / 40).astype(np.float32),
        domain_clusters={f"domain-{c}": [c] for c in range(k)},
    )


def build_domain_request(
    domain: int, tokens: int = 40, *, seed: int = 7, num_layers: int = 4, num_experts: int = 16
) -> NDArray[np.uint16]:
    """Counts (L, E) of a fresh request near centroid `domain` of `build_artifact`."""
    counts_NLE = build_counts(
        [domain], [tokens], num_layers=num_layers, num_experts=num_experts, seed=seed
    )
    return counts_NLE[0]


def build_trace(
    num_requests: int = 12,
    *,
    tokens: Sequence[int] | None = None,
    num_layers: int = 4,
    num_experts: int = 16,
    top_k: int = 2,
    gates: str = "none",
    seed: int = 0,
) -> RoutingTrace:
    """A trace whose requests take the domains in turn; 30 to 60 tokens if none are given.

    `gates` is "none", "weights" (softmax over the chosen experts) or "logits" (of all experts).
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(30, 61, num_requests) if tokens is None else np.asarray(tokens)
    taste = rng.normal(size=(len(DOMAINS), num_layers, num_experts)) * 2
    domain_of_T = np.repeat(np.arange(num_requests) % len(DOMAINS), lengths)
    logits_TLE = taste[domain_of_T] + rng.gumbel(size=(len(domain_of_T), num_layers, num_experts))
    ids_TLk = np.argsort(-logits_TLE, axis=2)[:, :, :top_k]
    chosen_TLk = np.exp(np.take_along_axis(logits_TLE, ids_TLk, axis=2))
    weights_TLk = chosen_TLk / chosen_TLk.sum(axis=2, keepdims=True)
    return RoutingTrace(
        ids_TLk.astype(np.uint8),
        np.concatenate([[0], np.cumsum(lengths)]),
        num_experts,
        tuple(DOMAINS[n % len(DOMAINS)] for n in range(num_requests)),
        weights_TLk.astype(np.float32) if gates == "weights" else None,
        logits_TLE.astype(np.float32) if gates == "logits" else None,
    )
