"""The six signature transforms that the paper compares, as estimators of one family.

    estimator = CountIdf(layers="greedy", random_state=1).fit(calibration)
    signatures_ND = estimator.transform(requests)

All are a value per expert, times a weight per expert, over the kept layers, of unit norm; the last
three steps are `calibration.signature.SignatureTransform`, which the router uses too. They differ
in the value and in the weight: IDF for `CountIdf`, 1 for the others. Routing uses `CountIdf`; the
others show what it gains.

Axes: N requests, T tokens, L MoE layers, E experts, S kept layers, D = S * E signature length.

Source: ELDR (arXiv 2607.00466), comparison of signatures (Figure 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from calibration.counts import Capture
from calibration.layers import LayerSelection, ValueArray, greedy_layer_selection
from calibration.signature import (
    CountArray,
    Float32Array,
    IndexArray,
    SignatureTransform,
    compute_idf,
)
from calibration.traces import RoutingTrace, expert_counts, expert_weights

LayerChoice = Sequence[int] | IndexArray | Literal["greedy"] | None

ALL_EXPERTS = "all experts"
CHOSEN_EXPERTS = "chosen experts only"


class NotRecorded(ValueError):
    """The requests come without the gate values that a transform needs."""


@dataclass(frozen=True, eq=False)
class ExpertUse:
    """What is recorded of N requests: counts always, gate values where the source has them.

    Attributes:
        prefill_counts_NLE: prompt tokens per layer and expert; integers (N, L, E).
        decode_counts_NLE: decoded tokens per layer and expert; integers (N, L, E).
        decode_tokens_N: decoded tokens; integers (N,), >= 1.
        domains_N: label of each request, empty if it has none; unicode (N,).
        gate_prob_NLE: gate probability summed over prompt tokens; float32 (N, L, E), >= 0, or None.
        gate_logit_NLE: gate logit summed over prompt tokens; float32 (N, L, E), or None.
        gates: which experts the probabilities cover: `ALL_EXPERTS`, as in the paper, or
            `CHOSEN_EXPERTS`: what the router gave to experts below the top-k cut is not recorded,
            so each of them counts 0. That is nearer to counts than the paper's signature is.

    Raises:
        ValueError: at construction, if shapes differ or a gate value is NaN or infinite.
    """

    prefill_counts_NLE: CountArray
    decode_counts_NLE: CountArray
    decode_tokens_N: NDArray[np.integer[Any]]
    domains_N: NDArray[np.str_]
    gate_prob_NLE: Float32Array | None = None
    gate_logit_NLE: Float32Array | None = None
    gates: str = "none"

    def __post_init__(self) -> None:
        shape = self.prefill_counts_NLE.shape
        for name in ("decode_counts_NLE", "gate_prob_NLE", "gate_logit_NLE"):
            values_NLE = getattr(self, name)
            if values_NLE is None:
                continue
            if values_NLE.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {values_NLE.shape}")
            if not np.isfinite(values_NLE).all():
                n, layer, _ = np.argwhere(~np.isfinite(values_NLE))[0]
                raise ValueError(f"{name} of request {n}, layer {layer} holds NaN or infinity")

    @classmethod
    def from_capture(cls, capture: Capture) -> Self:
        """The counts of a capture; captures hold no gate values."""
        return cls(
            capture.prefill_counts_NLE,
            capture.decode_counts_NLE,
            capture.decode_tokens_N,
            capture.domains_N,
        )

    @classmethod
    def from_trace(
        cls, trace: RoutingTrace, prefix_tokens: int = 64, min_decode_tokens: int = 32
    ) -> Self:
        """Split every request of a trace into a prompt and a decoded part.

        Args:
            trace: choices by token, with router weights or logits if they were recorded.
            prefix_tokens: how many tokens stand for the prompt, where the trace does not say.
            min_decode_tokens: requests with fewer tokens after that are left out, since so few
                say little about what a request uses.

        Raises:
            ValueError: an argument is below 1, or fewer than two requests are long enough.
        """
        if prefix_tokens < 1 or min_decode_tokens < 1:
            raise ValueError(
                f"prefix_tokens and min_decode_tokens must be >= 1, got {prefix_tokens}, "
                f"{min_decode_tokens}"
            )
        prefix_N = trace.prefix_tokens_N
        if prefix_N is None:
            prefix_N = np.full(len(trace), prefix_tokens)
        decode_N = trace.num_tokens_N - prefix_N
        kept = np.flatnonzero((decode_N >= min_decode_tokens) & (prefix_N > 0))
        if len(kept) < 2:
            raise ValueError(
                f"{len(kept)} of {len(trace)} requests have a prompt and {min_decode_tokens} "
                f"tokens after it (longest request: {trace.num_tokens_N.max()} tokens): lower "
                "prefix_tokens or min_decode_tokens"
            )
        experts = trace.num_experts
        starts, ends = trace.offsets[kept], trace.offsets[kept + 1]
        splits = starts + prefix_N[kept]
        prefixes = [slice(*ends_of) for ends_of in zip(starts, splits, strict=True)]
        rests = [slice(*ends_of) for ends_of in zip(splits, ends, strict=True)]
        prob_NLE: ValueArray | None = None
        logit_NLE: ValueArray | None = None
        gates = "none"
        if trace.logits_TLE is not None:
            logits = [trace.logits_TLE[part].astype(np.float32) for part in prefixes]
            logit_NLE = np.stack([logits_TLE.sum(axis=0) for logits_TLE in logits])
            prob_NLE = np.stack([softmax(logits_TLE, axis=2).sum(axis=0) for logits_TLE in logits])
            gates = ALL_EXPERTS
        elif trace.weights_TLk is not None:
            weights_TLk = trace.weights_TLk
            prob_NLE = np.stack(
                [expert_weights(trace.ids_TLk[p], weights_TLk[p], experts) for p in prefixes]
            ).astype(np.float32)
            gates = CHOSEN_EXPERTS
        return cls(
            np.stack([expert_counts(trace.ids_TLk[part], experts) for part in prefixes]),
            np.stack([expert_counts(trace.ids_TLk[part], experts) for part in rests]),
            decode_N[kept],
            np.array(trace.domains)[kept],
            prob_NLE,
            logit_NLE,
            gates,
        )

    def __len__(self) -> int:
        """N, the number of requests."""
        return len(self.prefill_counts_NLE)

    def subset(self, rows: IndexArray) -> ExpertUse:
        """Some of the requests, in the given order."""
        prob_NLE, logit_NLE = self.gate_prob_NLE, self.gate_logit_NLE
        return ExpertUse(
            self.prefill_counts_NLE[rows],
            self.decode_counts_NLE[rows],
            self.decode_tokens_N[rows],
            self.domains_N[rows],
            None if prob_NLE is None else prob_NLE[rows],
            None if logit_NLE is None else logit_NLE[rows],
            self.gates,
        )


class SignatureEstimator:
    """Base of the six: learns weights and layers from calibration requests.

    Args:
        layers: None keeps all layers; "greedy" selects those that predict decode best; a sequence
            of layers keeps these.
        num_pairs: request pairs drawn for the selection.
        random_state: seed of that draw.

    Attributes after `fit`:
        signature_: values to signature, with the weights and layers learned.
        selection_: the layer selection with its whole curve; None unless layers is "greedy".

    Subclasses say what the value of an expert is (`values`) and, if it is not 1, its weight.
    """

    name: ClassVar[str]
    signature_: SignatureTransform
    selection_: LayerSelection | None

    def __init__(
        self, layers: LayerChoice = None, num_pairs: int = 30_000, random_state: int = 1
    ) -> None:
        self.layers = layers
        self.num_pairs = num_pairs
        self.random_state = random_state

    def fit(self, use: ExpertUse) -> Self:
        """Learn from calibration requests.

        Raises:
            NotRecorded: the requests come without the gate values needed.
            ValueError: there is no request (for layers="greedy": fewer than two), or the layers
                are not what the model has.
        """
        if len(use) == 0:
            raise ValueError(f"{type(self).__name__} needs at least one request, got none")
        values_NLE = self.values(use)
        weights_LE = self._learn_weights(values_NLE)
        self.selection_ = None
        if isinstance(self.layers, str):
            if self.layers != "greedy":
                raise ValueError(
                    f'layers must be None, "greedy" or a sequence of layers, got {self.layers!r}'
                )
            self.selection_ = greedy_layer_selection(
                values_NLE,
                use.decode_counts_NLE,
                self.num_pairs,
                self.random_state,
                weights_LE=weights_LE,
            )
            mask = self.selection_.mask
        else:
            kept = range(values_NLE.shape[1]) if self.layers is None else self.layers
            mask = np.sort(np.asarray(kept, dtype=np.int64))
        self.signature_ = SignatureTransform(weights_LE, mask)
        return self

    def transform(self, use: ExpertUse) -> Float32Array:
        """Signatures; float32 (N, D), of norm 1, or all zeros where nothing is left of a request.

        Raises:
            ValueError: not fitted yet, or the gate values needed are not recorded.
        """
        if not hasattr(self, "signature_"):
            raise ValueError(f"{type(self).__name__} is not fitted: call fit first")
        return self.signature_.batch(self.values(use))

    def fit_transform(self, use: ExpertUse) -> Float32Array:
        """`fit`, then `transform` of the same requests."""
        return self.fit(use).transform(use)

    def values(self, use: ExpertUse) -> ValueArray:
        """The value of each expert before weights, mask and norm; (N, L, E)."""
        raise NotImplementedError

    def _learn_weights(self, values_NLE: ValueArray) -> Float32Array:
        """Weight of each expert; float32 (L, E), >= 0."""
        return np.ones(values_NLE.shape[1:], dtype=np.float32)


class Count(SignatureEstimator):
    """Prompt tokens that chose the expert."""

    name = "count"

    def values(self, use: ExpertUse) -> ValueArray:
        return use.prefill_counts_NLE


class CountIdf(Count):
    """Counts times IDF: the signature that routing uses."""

    name = "count x IDF"

    def _learn_weights(self, values_NLE: ValueArray) -> Float32Array:
        return compute_idf(values_NLE)


class SqrtCount(SignatureEstimator):
    """Square root of the counts: a heavily used expert weighs less."""

    name = "sqrt(count)"

    def values(self, use: ExpertUse) -> ValueArray:
        return np.sqrt(use.prefill_counts_NLE, dtype=np.float32)


class Binary(SignatureEstimator):
    """1 for each expert that any prompt token chose."""

    name = "binary"

    def values(self, use: ExpertUse) -> ValueArray:
        return (use.prefill_counts_NLE > 0).astype(np.float32)


class GateProbability(SignatureEstimator):
    """Gate probability summed over prompt tokens: of all experts, or of the chosen ones only.

    The paper's is over all experts. Where only the chosen ones are recorded (`ExpertUse.gates`),
    this is a version of lower fidelity: mass below the top-k cut, which the paper holds
    responsible for the low rho of this transform, is missing.
    """

    name = "gate probability"

    def values(self, use: ExpertUse) -> ValueArray:
        if use.gate_prob_NLE is None:
            raise NotRecorded("gate probabilities are not recorded")
        return use.gate_prob_NLE


class GateLogit(SignatureEstimator):
    """Gate logit summed over prompt tokens, of all experts; may be negative.

    Weights of the chosen experts do not give it back: they leave the logits of all others unknown,
    and even those of the chosen ones only up to a constant per token.
    """

    name = "gate logit"

    def values(self, use: ExpertUse) -> ValueArray:
        if use.gate_logit_NLE is None:
            raise NotRecorded("gate logits are not recorded")
        return use.gate_logit_NLE


TRANSFORMS: tuple[type[SignatureEstimator], ...] = (
    CountIdf,
    Count,
    SqrtCount,
    GateProbability,
    GateLogit,
    Binary,
)
"""In the order of the paper's figure."""
