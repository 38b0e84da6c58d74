from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import spearmanr

from calibration.layers import draw_pairs, rho_along
from calibration.signature import SignatureTransform, compute_idf
from calibration.traces import RoutingTrace, expert_counts, expert_weights, load_trace
from calibration.transforms import (
    ALL_EXPERTS,
    CHOSEN_EXPERTS,
    TRANSFORMS,
    Binary,
    Count,
    CountIdf,
    ExpertUse,
    GateLogit,
    GateProbability,
    NotRecorded,
    SignatureEstimator,
    SqrtCount,
)
from tests.builders import build_capture, build_trace


@pytest.fixture(scope="module")
def use():
    """24 requests with all gate values."""
    return ExpertUse.from_trace(build_trace(24, gates="logits"), 10, 5)


@pytest.fixture(params=TRANSFORMS, ids=lambda cls: cls.__name__)
def transform(request) -> type[SignatureEstimator]:
    return request.param


class TestAll:
    def test_constructor_only_stores(self, transform):
        layers = object()
        estimator = transform(layers, num_pairs=-1, random_state=7)
        assert estimator.layers is layers
        assert (estimator.num_pairs, estimator.random_state) == (-1, 7)
        with pytest.raises(ValueError, match="not fitted: call fit first"):
            estimator.transform(None)

    def test_unit_rows_of_the_kept_layers(self, transform, use):
        signatures = transform(layers=[2, 0]).fit_transform(use)
        assert signatures.dtype == np.float32
        assert signatures.shape == (24, 2 * 16)
        np.testing.assert_allclose(np.linalg.norm(signatures, axis=1), 1.0, atol=1e-5)

    def test_greedy_curve_is_spearman_of_what_transform_returns(self, transform, use):
        estimator = transform(layers="greedy", num_pairs=400, random_state=3).fit(use)
        kept = len(estimator.selection_.mask)
        signatures = estimator.transform(use).astype(np.float64)
        i_M, j_M = draw_pairs(24, 400, 3)
        profiles = use.decode_counts_NLE.reshape(24, -1).astype(np.float64)
        profiles /= np.linalg.norm(profiles, axis=1, keepdims=True)
        expected = spearmanr(
            1 - (signatures @ signatures.T)[i_M, j_M], 1 - (profiles @ profiles.T)[i_M, j_M]
        ).statistic
        assert estimator.selection_.rho_curve[kept - 1] == pytest.approx(expected, abs=2e-3)

    def test_repeatable_and_seeded(self, transform, use):
        first, second, third = (
            transform("greedy", num_pairs=50, random_state=seed).fit(use).selection_.rho_curve
            for seed in (1, 1, 2)
        )
        np.testing.assert_array_equal(first, second)
        assert not np.array_equal(first, third)

    @pytest.mark.parametrize(
        ("layers", "message"),
        [("best", 'None, "greedy" or a sequence'), ([9], "layers in"), ([1, 1], "ascending")],
    )
    def test_refuses_layers(self, transform, use, layers, message):
        with pytest.raises(ValueError, match=message):
            transform(layers).fit(use)

    def test_refuses_no_requests(self, transform, use):
        with pytest.raises(ValueError, match="at least one request, got none"):
            transform().fit(use.subset(np.arange(0)))


def test_values_by_hand():
    use = ExpertUse(
        prefill_counts_NLE=np.array([[[4, 0, 1]], [[1, 4, 0]]]),
        decode_counts_NLE=np.ones((2, 1, 3), dtype=np.int64),
        decode_tokens_N=np.array([3, 3]),
        domains_N=np.array(["a", "b"]),
        gate_prob_NLE=np.array([[[3, 0, 4]], [[0, 1, 0]]], dtype=np.float32),
        gate_logit_NLE=np.array([[[-3, 0, 4]], [[0, -2, 0]]], dtype=np.float32),
    )
    root = 17**-0.5
    expected = {
        Count: [[4 * root, 0, root], [root, 4 * root, 0]],
        # The first expert is used by both: its IDF is 0. The others have one IDF.
        CountIdf: [[0, 0, 1], [0, 1, 0]],
        SqrtCount: [[2 * 5**-0.5, 0, 5**-0.5], [5**-0.5, 2 * 5**-0.5, 0]],
        Binary: [[2**-0.5, 0, 2**-0.5], [2**-0.5, 2**-0.5, 0]],
        GateProbability: [[0.6, 0, 0.8], [0, 1, 0]],
        GateLogit: [[-0.6, 0, 0.8], [0, -1, 0]],
    }
    assert set(expected) == set(TRANSFORMS)
    for transform, rows in expected.items():
        np.testing.assert_allclose(transform().fit_transform(use), rows, atol=1e-6)


def test_count_idf_is_what_routing_computes():
    capture = build_capture(20)
    estimator = CountIdf("greedy").fit(ExpertUse.from_capture(capture))
    routed = SignatureTransform(
        compute_idf(capture.prefill_counts_NLE), estimator.selection_.mask
    ).batch(capture.prefill_counts_NLE)
    np.testing.assert_array_equal(estimator.transform(ExpertUse.from_capture(capture)), routed)


def test_idf_is_that_of_the_requests_fitted_on(use):
    half = use.subset(np.arange(6))
    np.testing.assert_array_equal(
        CountIdf().fit(half).signature_.idf_LE, compute_idf(half.prefill_counts_NLE)
    )


def test_rho_along_judges_other_requests(use):
    estimator = Count("greedy", num_pairs=300).fit(use)
    weights_LE = estimator.signature_.idf_LE
    values_NLE, decode_NLE = estimator.values(use), use.decode_counts_NLE
    order = estimator.selection_.order
    again = rho_along(order, values_NLE, decode_NLE, weights_LE, 300)
    np.testing.assert_allclose(again, estimator.selection_.rho_curve, atol=1e-12)
    shuffled = np.random.default_rng(0).permutation(24)
    null = rho_along(order, values_NLE, decode_NLE[shuffled], weights_LE, 300)
    assert abs(null).max() < 0.4 < again.min()


class TestExpertUse:
    def test_prompt_and_rest_of_a_trace(self):
        trace = build_trace(6, tokens=[8, 30, 14, 20, 15, 40])
        use = ExpertUse.from_trace(trace, prefix_tokens=10, min_decode_tokens=5)
        assert use.decode_tokens_N.tolist() == [20, 10, 5, 30]
        assert use.domains_N.tolist() == [trace.domains[n] for n in (1, 3, 4, 5)]
        np.testing.assert_array_equal(
            use.prefill_counts_NLE[0], expert_counts(trace.tokens(1)[:10], 16)
        )
        np.testing.assert_array_equal(
            use.decode_counts_NLE[3], expert_counts(trace.tokens(5)[10:], 16)
        )
        assert use.gates == "none"

    def test_recorded_prompt_lengths_win(self):
        trace = dataclasses.replace(
            build_trace(3, tokens=[20, 20, 20]), prefix_tokens_N=np.array([4, 0, 15])
        )
        use = ExpertUse.from_trace(trace, prefix_tokens=10, min_decode_tokens=5)
        assert use.decode_tokens_N.tolist() == [16, 5]

    def test_chosen_weights_alone(self):
        trace = build_trace(4, gates="weights")
        use = ExpertUse.from_trace(trace, 10, 5)
        assert use.gates == CHOSEN_EXPERTS
        assert ((use.gate_prob_NLE > 0) == (use.prefill_counts_NLE > 0)).all()
        np.testing.assert_allclose(
            use.gate_prob_NLE[0, 1].sum(), trace.weights_TLk[:10, 1].sum(), rtol=1e-5
        )
        with pytest.raises(NotRecorded, match="logits are not recorded"):
            GateLogit().fit(use)

    def test_logits_give_the_probability_of_all_experts(self):
        trace = build_trace(4, gates="logits")
        use = ExpertUse.from_trace(trace, 10, 5)
        assert use.gates == ALL_EXPERTS
        np.testing.assert_allclose(use.gate_prob_NLE.sum(axis=2), 10.0, rtol=1e-4)
        np.testing.assert_allclose(
            use.gate_prob_NLE[0], softmax(trace.logits_TLE[:10], axis=2).sum(axis=0), rtol=1e-4
        )

    def test_captures_have_counts_alone(self):
        use = ExpertUse.from_capture(build_capture(4))
        for transform in (GateProbability, GateLogit):
            with pytest.raises(NotRecorded, match="are not recorded"):
                transform().fit(use)

    def test_refuses(self):
        trace = build_trace(4)
        with pytest.raises(ValueError, match=r"0 of 4 requests have a prompt and 500 tokens"):
            ExpertUse.from_trace(trace, 10, 500)
        with pytest.raises(ValueError, match="must be >= 1, got 0, 5"):
            ExpertUse.from_trace(trace, 0, 5)
        use = ExpertUse.from_trace(build_trace(4, gates="logits"), 10, 5)
        spoiled = use.gate_prob_NLE.copy()
        spoiled[2, 1, 0] = np.nan
        with pytest.raises(ValueError, match="gate_prob_NLE of request 2, layer 1 holds NaN"):
            dataclasses.replace(use, gate_prob_NLE=spoiled)
        with pytest.raises(ValueError, match="gate_logit_NLE must have shape"):
            dataclasses.replace(use, gate_logit_NLE=spoiled[:2])


class TestTraceGates:
    def test_expert_weights_by_hand(self):
        ids_TLk = np.array([[[0, 2]], [[2, 1]]], dtype=np.uint8)
        weights_TLk = np.array([[[0.75, 0.25]], [[0.5, 0.5]]], dtype=np.float32)
        assert expert_weights(ids_TLk, weights_TLk, 4).tolist() == [[0.75, 0.5, 0.75, 0.0]]

    def test_subset_carries_everything(self):
        trace = dataclasses.replace(
            build_trace(4, gates="logits"), prefix_tokens_N=np.array([1, 2, 3, 4])
        )
        weighted = build_trace(4, gates="weights")
        part, weighted_part = trace.subset([3, 1]), weighted.subset([3, 1])
        start = trace.offsets[3]
        np.testing.assert_array_equal(part.logits_TLE[0], trace.logits_TLE[start])
        np.testing.assert_array_equal(weighted_part.weights_TLk[0], weighted.weights_TLk[start])
        assert part.prefix_tokens_N.tolist() == [4, 2]
        np.testing.assert_array_equal(part.tokens(1), trace.tokens(1))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"weights_TLk": np.zeros((1, 4, 2), np.float32)}, "router weights must be floats of"),
            ({"logits_TLE": np.zeros((1, 4, 2), np.float32)}, "router logits must be floats of"),
            ({"prefix_tokens_N": np.array([1, 2])}, "prompt lengths have shape"),
            ({"prefix_tokens_N": np.array([1, 999, 1])}, "request 1: a prompt of 999 tokens"),
        ],
    )
    def test_refuses(self, change, message):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(build_trace(3), **change)

    def test_refuses_values(self):
        trace = build_trace(3, gates="weights")
        spoiled = trace.weights_TLk.copy()
        spoiled[trace.offsets[1], 2] = np.nan
        with pytest.raises(ValueError, match="request 1, layer 2: router weights hold NaN"):
            dataclasses.replace(trace, weights_TLk=spoiled)
        with pytest.raises(ValueError, match=r"router weights must be in \[0, 1\]"):
            dataclasses.replace(trace, weights_TLk=trace.weights_TLk + 1)


class TestFiles:
    """Traces as files; what `load_trace` makes of gate values."""

    def write(self, path, trace: RoutingTrace, **arrays):
        ids = trace.ids_TLk.transpose(1, 2, 0)
        np.savez(path, **{"ids": ids, "offsets": trace.offsets, **arrays})
        return path

    def test_weights_and_logits_in_one_file(self, tmp_path):
        trace = build_trace(3, gates="logits")
        weights_TLk = np.random.default_rng(0).integers(0, 256, trace.ids_TLk.shape, np.uint8)
        path = self.write(
            tmp_path / "t.npz",
            trace,
            weights_u8=weights_TLk.transpose(1, 2, 0),
            logits=trace.logits_TLE.transpose(1, 2, 0),
            prefix_tokens=np.array([3, 4, 5]),
        )
        loaded = load_trace(path)
        assert loaded.num_experts == 16
        np.testing.assert_array_equal(loaded.logits_TLE, trace.logits_TLE)
        np.testing.assert_allclose(loaded.weights_TLk, weights_TLk / 255, rtol=1e-6)
        assert loaded.prefix_tokens_N.tolist() == [3, 4, 5]

    def test_weights_of_some_requests(self, tmp_path):
        trace = build_trace(4, gates="weights")
        path = self.write(tmp_path / "t.npz", trace)
        chosen = trace.subset([1, 3])
        probs = np.round(chosen.weights_TLk * 255).astype(np.uint8).transpose(1, 2, 0)
        arrays = {"trace": np.array([1, 3]), "offsets": chosen.offsets, "probs_u8": probs}
        np.savez(tmp_path / "p.npz", **arrays)
        loaded = load_trace(path, probs=tmp_path / "p.npz", num_experts=16)
        assert len(loaded) == 2
        np.testing.assert_array_equal(loaded.tokens(1), trace.tokens(3))
        np.testing.assert_allclose(loaded.weights_TLk, chosen.weights_TLk, atol=0.5 / 255 + 1e-6)
        for change, message in [
            ({"trace": np.array([1, 4])}, r"must name requests in \[0, 4\)"),
            ({"offsets": chosen.offsets + 1}, "differ from the token numbers"),
            ({"probs_u8": probs[:, :1]}, r"p\.npz: `probs_u8` must be uint8 of shape"),
        ]:
            np.savez(tmp_path / "p.npz", **{**arrays, **change})
            with pytest.raises(ValueError, match=message):
                load_trace(path, probs=tmp_path / "p.npz")
        arrays.pop("probs_u8")
        np.savez(tmp_path / "p.npz", **arrays)
        with pytest.raises(ValueError, match="needs weights_u8 or probs_u8, has neither"):
            load_trace(path, probs=tmp_path / "p.npz")

    def test_bad_logits_are_named(self, tmp_path):
        trace = build_trace(3, gates="logits")
        logits = trace.logits_TLE.transpose(1, 2, 0).copy()
        for spoiled, message in [
            (logits[0], r"t\.npz: `logits` must be \(layers, experts, tokens\)"),
            (np.where(logits > 0, np.nan, logits), "router logits hold NaN"),
        ]:
            with pytest.raises(ValueError, match=message):
                load_trace(self.write(tmp_path / "t.npz", trace, logits=spoiled))
