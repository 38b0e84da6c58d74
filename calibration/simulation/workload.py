"""Requests to simulate: what the router is fitted on, and the pool that arrivals are drawn from.

Axes: N requests, L MoE layers, E experts, T tokens, W words of 64 experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.counts import Capture
from calibration.replay import BitArray, expert_bits
from calibration.replay import Workload as TraceSplit
from calibration.simulation.config import WorkloadSection
from calibration.simulation.synthetic import (
    MAX_ACTIVATION,
    STRUCTURES,
    SyntheticRequests,
    draw_counts,
    draw_tokens,
    make_requests,
    structure_facts,
)
from calibration.traces import RoutingTrace, expert_counts, load_trace

Float32Array = NDArray[np.float32]
CountArray = NDArray[np.integer[Any]]

MAX_LAYERS = 32
"""Layers over which expected distinct experts are averaged."""

_SYNTHETIC_TOKENS = 96  # drawn of each synthetic request where tokens are needed


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests of one model.

    Attributes:
        source: where the expert choices come from, for the report.
        capture: the calibration requests, as engines would have captured them.
        counts_NLE: prompt counts of the served requests; integers (N, L, E).
        activation_NLE: probability that a decoded token of a served request activates an expert;
            float32 (N, L, E), in [0, 0.999], rows sum to top_k (but for the upper limit).
        prompt_tokens_N: prompt lengths; int32 (N,).
        domains_N: labels; unicode (N,).
        facts: published facts, measured on these requests; see `structure_facts`.
        trace: decoded tokens of the served requests; None where tokens must be drawn.
    """

    source: str
    capture: Capture
    counts_NLE: CountArray
    activation_NLE: Float32Array
    prompt_tokens_N: NDArray[np.int32]
    domains_N: NDArray[np.str_]
    facts: dict[str, float]
    trace: RoutingTrace | None

    def __len__(self) -> int:
        """N, served requests."""
        return len(self.domains_N)

    @property
    def num_layers(self) -> int:
        """L, MoE layers."""
        return self.capture.num_layers

    @property
    def num_experts(self) -> int:
        """E, experts a layer."""
        return self.capture.num_experts

    @cached_property
    def log_absent_NX(self) -> Float32Array:
        """log(1 - activation) of some layers, with their experts in one row; float32 (N, X).

        All layers up to `MAX_LAYERS`, else every second, third, ... one: the mean over layers
        hardly depends on which, and it takes the longest of all that is simulated.
        """
        stride = -(-self.num_layers // MAX_LAYERS)
        return np.log1p(-self.activation_NLE[:, ::stride].reshape(len(self), -1))

    @cached_property
    def log_absent(self) -> list[Float32Array]:
        """Rows of `log_absent_NX`; to take one from the array costs as much as to add it."""
        return list(np.asarray(self.log_absent_NX))  # rows of a memory map would be maps, and slow

    def derive(self, exact: bool) -> None:
        """Compute what all runs need before it is handed to other processes."""
        _ = self.decode_bits if exact else self.log_absent_NX

    @cached_property
    def decode_bits(self) -> tuple[BitArray, NDArray[np.int64]]:
        """Experts of each decoded token as bit sets, uint64 (T, L, W), and offsets (N + 1,).

        Recorded ones, or for synthetic requests ones drawn by their probabilities.
        """
        if self.trace is not None:
            return expert_bits(self.trace.ids_TLk, self.num_experts), self.trace.offsets
        rng = np.random.default_rng(12)
        bits = [
            expert_bits(
                draw_tokens(p_LE, _SYNTHETIC_TOKENS, self.capture.top_k, rng), self.num_experts
            )
            for p_LE in self.activation_NLE
        ]
        return np.concatenate(bits), np.arange(len(self) + 1) * _SYNTHETIC_TOKENS


def make_workload(section: WorkloadSection) -> Workload:
    """Read or make the requests.

    Raises:
        FileNotFoundError: there is no such trace.
        ValueError: the trace is malformed or has too few requests of the wanted length.
    """
    return _from_trace(section) if section.source == "trace" else _synthetic(section)


def _from_trace(section: WorkloadSection) -> Workload:
    assert section.trace is not None
    trace = load_trace(section.trace, section.trace_meta, section.trace_experts)
    prompt = section.trace_prompt_tokens
    split = TraceSplit.split(trace, prompt, section.seed, section.trace_min_tokens)
    long, served = split.trace, split.served
    decode = _decode_part(long.subset(served), prompt)
    counts_NLE = np.stack(
        [expert_counts(decode.tokens(n), decode.num_experts) for n in range(len(decode))]
    )
    share_NLE = counts_NLE / decode.num_tokens_N[:, None, None]
    activation_NLE = np.minimum(share_NLE, MAX_ACTIVATION).astype(np.float32)
    domains_N = np.array(decode.domains)
    prompt_counts_NLE = split.counts_NLE[served]
    source = (
        f"recorded routing trace ({long.num_layers} layers, {long.num_experts} experts, "
        f"top-{long.top_k}): {len(long)} requests, {len(split.calibration)} to fit, {len(served)} "
        f"served and resampled; their first {prompt} tokens stand for the prompt"
    )
    return Workload(
        source,
        split.capture(),
        prompt_counts_NLE,
        activation_NLE,
        np.full(len(served), prompt, dtype=np.int32),
        domains_N,
        structure_facts(prompt_counts_NLE, activation_NLE, domains_N),
        decode,
    )


def _decode_part(trace: RoutingTrace, prompt: int) -> RoutingTrace:
    """The same requests without their first tokens."""
    parts = [trace.tokens(n)[prompt:] for n in range(len(trace))]
    return RoutingTrace(
        np.concatenate(parts),
        np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64),
        trace.num_experts,
        trace.domains,
    )


def _synthetic(section: WorkloadSection) -> Workload:
    structure = STRUCTURES[section.structure]
    requests = make_requests(
        structure,
        section.num_requests,
        num_layers=section.num_layers,
        num_experts=section.num_experts,
        top_k=section.top_k,
        seed=section.seed,
    )
    num_fitted = section.num_requests // 2
    rng = np.random.default_rng([section.seed, 14])
    counts_NLE = draw_counts(requests.prefill_NLE, requests.prompt_tokens_N, section.top_k, rng)
    served = slice(num_fitted, None)
    source = (
        f"synthetic requests of Qwen3-30B-A3B's shape ({section.num_layers} layers, "
        f"{section.num_experts} experts, top-{section.top_k}), structure '{section.structure}' "
        f"calibrated to published facts: {num_fitted} to fit, "
        f"{section.num_requests - num_fitted} served and resampled"
    )
    return Workload(
        source,
        _synthetic_capture(requests, counts_NLE, num_fitted, section, rng),
        counts_NLE[served],
        requests.decode_NLE[served],
        requests.prompt_tokens_N[served],
        requests.domains_N[served],
        structure_facts(
            requests.prefill_NLE[served], requests.decode_NLE[served], requests.domains_N[served]
        ),
        None,
    )


def _synthetic_capture(
    requests: SyntheticRequests,
    counts_NLE: NDArray[np.uint32],
    num_fitted: int,
    section: WorkloadSection,
    rng: np.random.Generator,
) -> Capture:
    decoded = section.output_tokens - 1
    decode_tokens_N = np.full(num_fitted, decoded, dtype=np.int32)
    return Capture(
        model_id=f"synthetic/{section.structure}",
        fingerprint="",
        num_layers=section.num_layers,
        num_experts=section.num_experts,
        top_k=section.top_k,
        max_tokens=section.output_tokens,
        prompts_sha256="",
        versions={},
        prefill_counts_NLE=counts_NLE[:num_fitted],
        decode_counts_NLE=draw_counts(
            requests.decode_NLE[:num_fitted], decode_tokens_N, section.top_k, rng
        ),
        prompt_tokens_N=requests.prompt_tokens_N[:num_fitted],
        decode_tokens_N=decode_tokens_N,
        domains_N=requests.domains_N[:num_fitted],
        ids_N=np.array([str(n) for n in range(num_fitted)]),
    )
