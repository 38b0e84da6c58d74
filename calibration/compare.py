"""How well each signature transform predicts decode, on requests it was not fitted on.

Half of the requests, drawn anew with every seed, teaches weights and layers; rho is measured on the
other half. The seeds share the requests, so their range shows how much the split matters, not how
another sample of traffic would differ.

Axes: N requests, L MoE layers, E experts, K clusters, G domains, D signature length, S seeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from calibration.clustering import BalancedSphericalKMeans
from calibration.fit import cluster_activation
from calibration.layers import rho_along
from calibration.signature import Float32Array
from calibration.transforms import TRANSFORMS, CountIdf, ExpertUse, NotRecorded, SignatureEstimator

Float64Array = NDArray[np.float64]

LAYER_CHOICES = ("all", "selected", "best single")
REFERENCE = (CountIdf.name, "selected")
"""Transform and layers that routing uses; gains are taken against it."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A value per seed, summed up."""

    mean: float
    lo: float
    hi: float

    @classmethod
    def of(cls, values: NDArray[Any]) -> Summary:
        """Mean, least and greatest of at least one value."""
        return cls(float(np.mean(values)), float(np.min(values)), float(np.max(values)))

    def text(self, digits: int = 3, sign: str = "") -> str:
        """The mean, and least and greatest in brackets."""
        mean, lo, hi = (f"{x:{sign}.{digits}f}" for x in (self.mean, self.lo, self.hi))
        return f"{mean} ({lo} to {hi})"


@dataclass(frozen=True, slots=True)
class Row:
    """One transform with one choice of layers.

    Attributes:
        transform: name of the transform.
        layers: one of `LAYER_CHOICES`.
        num_layers: layers kept.
        rho: Spearman's rho on the half that was not fitted on.
        rho_fitted: the same on the half that was.
        gain: rho less that of `REFERENCE`, seed by seed.
    """

    transform: str
    layers: str
    num_layers: Summary
    rho: Summary
    rho_fitted: Summary
    gain: Summary


@dataclass(frozen=True, eq=False)
class Curves:
    """rho of the first 1 to L layers that a transform's greedy search took; float64 (S, L)."""

    held_out_SL: Float64Array
    fitted_SL: Float64Array


@dataclass(frozen=True, eq=False)
class Picture:
    """What the plots show of all requests, by the signature that routing uses.

    Attributes:
        layers: layers kept, in the order they were taken.
        signatures_ND: unit signatures; those of all zeros are left out.
        domains_N: their labels.
        centroids_KD: centroids of balanced k-means on them.
        domains: labels, the one with most requests first.
        domain_sizes: requests of each.
        deviation_GLE: choices of each expert per decoded token in a domain, less the mean over
            domains.
    """

    layers: list[int]
    signatures_ND: Float32Array
    domains_N: NDArray[np.str_]
    centroids_KD: Float32Array
    domains: list[str]
    domain_sizes: list[int]
    deviation_GLE: Float32Array


@dataclass(frozen=True, eq=False)
class Comparison:
    """Result of `compare`.

    Attributes:
        num_requests: N.
        num_layers: L.
        num_experts: E.
        gates: experts that gate probabilities cover, see `ExpertUse`.
        seeds: seeds of split, pair draw and clustering.
        num_pairs: pairs drawn for each rho.
        rows: transforms times choices of layers, in the order of the paper's figure.
        not_recorded: transforms that the requests lack the values for, and why.
        curves: by transform.
        picture: what the plots show.
    """

    num_requests: int
    num_layers: int
    num_experts: int
    gates: str
    seeds: tuple[int, ...]
    num_pairs: int
    rows: list[Row]
    not_recorded: dict[str, str]
    curves: dict[str, Curves]
    picture: Picture

    def as_dict(self) -> dict[str, Any]:
        """Everything but the points of the plots, ready for JSON."""
        return {
            "num_requests": self.num_requests,
            "num_layers": self.num_layers,
            "num_experts": self.num_experts,
            "gates": self.gates,
            "seeds": list(self.seeds),
            "num_pairs": self.num_pairs,
            "domains": dict(zip(self.picture.domains, self.picture.domain_sizes, strict=True)),
            "layers_selected_on_all": self.picture.layers,
            "rows": [asdict(row) for row in self.rows],
            "not_recorded": self.not_recorded,
            "curves": {
                name: {
                    "held_out": curves.held_out_SL.mean(axis=0).round(4).tolist(),
                    "fitted": curves.fitted_SL.mean(axis=0).round(4).tolist(),
                }
                for name, curves in self.curves.items()
            },
        }

    def table(self) -> list[tuple[str, ...]]:
        """Header and rows as text, transforms that are not recorded last in their place."""
        lines: list[tuple[str, ...]] = [
            ("transform", "layers", "kept", "rho held out", "rho in fit", "less reference")
        ]
        for transform in TRANSFORMS:
            if transform.name in self.not_recorded:
                lines.append((transform.name, "-", "-", "not recorded", "-", "-"))
            for row in self.rows:
                if row.transform == transform.name:
                    is_reference = (row.transform, row.layers) == REFERENCE
                    lines.append(
                        (
                            row.transform,
                            row.layers,
                            f"{row.num_layers.mean:.3g}",
                            row.rho.text(),
                            f"{row.rho_fitted.mean:.3f}",
                            "reference" if is_reference else row.gain.text(sign="+"),
                        )
                    )
        return lines


def compare(
    use: ExpertUse,
    *,
    seeds: Sequence[int] = (1, 2, 3, 4, 5),
    k: int = 8,
    num_pairs: int = 30_000,
    show_progress: bool = True,
) -> Comparison:
    """Compare the transforms on what was recorded of some requests. Deterministic.

    Args:
        use: expert use of N >= 4 requests.
        seeds: one split, and one draw of pairs, for each.
        k: clusters in the projection.
        num_pairs: request pairs drawn for each rho.
        show_progress: draw a progress bar on stderr.

    Raises:
        ValueError: the requests are too few, there is no seed, or k is out of range.
    """
    if len(use) < 4 or not seeds:
        raise ValueError(
            f"a comparison needs at least 4 requests and 1 seed, got {len(use)} and {len(seeds)}"
        )
    if not 1 <= k <= len(use):
        raise ValueError(f"k must be in [1, {len(use)}], the number of requests, got {k}")
    transforms, not_recorded = _available(use)
    curves = {transform.name: _empty_curves(use, len(seeds)) for transform in transforms}
    kept: dict[str, list[int]] = {transform.name: [] for transform in transforms}
    with tqdm(
        total=len(seeds) * len(transforms), desc="compare", unit="fit", disable=not show_progress
    ) as bar:
        for s, seed in enumerate(seeds):
            rows_N = np.random.default_rng(seed).permutation(len(use))
            fitted, held_out = use.subset(rows_N[::2]), use.subset(rows_N[1::2])
            for transform in transforms:
                estimator = transform("greedy", num_pairs, random_state=seed).fit(fitted)
                assert estimator.selection_ is not None
                curves[transform.name].fitted_SL[s] = estimator.selection_.rho_curve
                curves[transform.name].held_out_SL[s] = rho_along(
                    estimator.selection_.order,
                    estimator.values(held_out),
                    held_out.decode_counts_NLE,
                    estimator.signature_.idf_LE,
                    num_pairs,
                    seed,
                )
                kept[transform.name].append(len(estimator.selection_.mask))
                bar.update()
    _, num_layers, num_experts = use.prefill_counts_NLE.shape
    return Comparison(
        num_requests=len(use),
        num_layers=num_layers,
        num_experts=num_experts,
        gates=use.gates,
        seeds=tuple(seeds),
        num_pairs=num_pairs,
        rows=_rows(curves, kept),
        not_recorded=not_recorded,
        curves=curves,
        picture=_picture(use, k, num_pairs, seeds[0]),
    )


def _available(use: ExpertUse) -> tuple[list[type[SignatureEstimator]], dict[str, str]]:
    transforms, not_recorded = [], {}
    for transform in TRANSFORMS:
        try:
            transform().values(use)
        except NotRecorded as err:
            not_recorded[transform.name] = str(err)
        else:
            transforms.append(transform)
    return transforms, not_recorded


def _empty_curves(use: ExpertUse, num_seeds: int) -> Curves:
    shape = (num_seeds, use.prefill_counts_NLE.shape[1])
    return Curves(np.empty(shape), np.empty(shape))


def _rows(curves: dict[str, Curves], kept: dict[str, list[int]]) -> list[Row]:
    def rho_at(sizes_S: NDArray[np.int64], rho_SL: Float64Array) -> Float64Array:
        rho_S: Float64Array = rho_SL[np.arange(len(rho_SL)), sizes_S - 1]
        return rho_S

    reference_S = rho_at(np.array(kept[CountIdf.name]), curves[CountIdf.name].held_out_SL)
    rows = []
    for name, curve in curves.items():
        num_seeds, num_layers = curve.held_out_SL.shape
        choices = (np.full(num_seeds, num_layers), np.array(kept[name]), np.full(num_seeds, 1))
        for layers, sizes_S in zip(LAYER_CHOICES, choices, strict=True):
            rho_S = rho_at(sizes_S, curve.held_out_SL)
            rows.append(
                Row(
                    transform=name,
                    layers=layers,
                    num_layers=Summary.of(sizes_S),
                    rho=Summary.of(rho_S),
                    rho_fitted=Summary.of(rho_at(sizes_S, curve.fitted_SL)),
                    gain=Summary.of(rho_S - reference_S),
                )
            )
    return rows


def _picture(use: ExpertUse, k: int, num_pairs: int, seed: int) -> Picture:
    estimator = CountIdf("greedy", num_pairs, random_state=seed).fit(use)
    assert estimator.selection_ is not None
    signatures_ND = estimator.transform(use)
    is_kept_N = signatures_ND.any(axis=1)
    signatures_ND = signatures_ND[is_kept_N]
    if len(signatures_ND) < k:
        raise ValueError(
            f"only {len(signatures_ND)} of {len(use)} requests have a signature that is not all "
            f"zeros, too few for k={k} clusters: lower k, or use more varied requests"
        )
    clusters = BalancedSphericalKMeans(k, random_state=seed).fit(signatures_ND)
    sizes = Counter(use.domains_N.tolist()).most_common()
    domains = [domain for domain, _ in sizes]
    domain_of_N = np.array([domains.index(domain) for domain in use.domains_N.tolist()])
    activation_GLE = cluster_activation(
        use.decode_counts_NLE, use.decode_tokens_N.astype(np.int32), domain_of_N, len(domains)
    )
    return Picture(
        layers=estimator.selection_.order[: len(estimator.selection_.mask)].tolist(),
        signatures_ND=signatures_ND,
        domains_N=use.domains_N[is_kept_N],
        centroids_KD=clusters.cluster_centers_,
        domains=domains,
        domain_sizes=[size for _, size in sizes],
        deviation_GLE=activation_GLE - activation_GLE.mean(axis=0),
    )
