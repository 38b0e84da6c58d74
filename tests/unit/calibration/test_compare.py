from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from calibration.compare import LAYER_CHOICES, Summary, compare
from calibration.compare_html import render
from calibration.layers import rho_along
from calibration.transforms import TRANSFORMS, Count, CountIdf, ExpertUse
from tests.builders import build_capture, build_trace


def build_use(gates="logits", num_requests=32):
    return ExpertUse.from_trace(build_trace(num_requests, gates=gates), 12, 8)


@pytest.fixture(scope="module")
def use():
    return build_use()


@pytest.fixture(scope="module")
def result(use):
    return compare(use, seeds=(1, 2, 3), k=4, num_pairs=500, show_progress=False)


def row(result, transform, layers):
    return next(r for r in result.rows if (r.transform, r.layers) == (transform.name, layers))


def test_every_transform_with_every_choice_of_layers(result):
    assert [(r.transform, r.layers) for r in result.rows] == [
        (transform.name, layers) for transform in TRANSFORMS for layers in LAYER_CHOICES
    ]
    for r in result.rows:
        assert -1 <= r.rho.lo <= r.rho.mean <= r.rho.hi <= 1
        assert 1 <= r.num_layers.lo <= r.num_layers.hi <= 4
    assert row(result, Count, "all").num_layers == Summary(4, 4, 4)
    assert row(result, Count, "best single").num_layers == Summary(1, 1, 1)


def test_rho_is_of_the_half_not_fitted_on(use, result):
    halves = []
    for seed in (1, 2, 3):
        order = np.random.default_rng(seed).permutation(len(use))
        halves.append((use.subset(order[::2]), use.subset(order[1::2])))
    expected, in_fit = [], []
    for seed, (fitted, held_out) in zip((1, 2, 3), halves, strict=True):
        estimator = CountIdf("greedy", 500, random_state=seed).fit(fitted)
        expected.append(
            rho_along(
                estimator.selection_.mask,
                held_out.prefill_counts_NLE,
                held_out.decode_counts_NLE,
                estimator.signature_.idf_LE,
                500,
                seed,
            )[-1]
        )
        in_fit.append(estimator.selection_.rho_curve.max())
    reference = row(result, CountIdf, "selected")
    assert reference.rho.mean == pytest.approx(np.mean(expected))
    assert reference.rho.lo == pytest.approx(np.min(expected))
    assert reference.rho_fitted.mean == pytest.approx(np.mean(in_fit))


def test_gain_is_taken_seed_by_seed(result):
    assert row(result, CountIdf, "selected").gain == Summary(0, 0, 0)
    for r in result.rows:
        reference = row(result, CountIdf, "selected").rho.mean
        assert r.gain.mean == pytest.approx(r.rho.mean - reference)


def test_prefill_that_says_nothing_has_rho_near_zero(use):
    shuffled = np.random.default_rng(5).permutation(len(use))
    null = dataclasses.replace(use, decode_counts_NLE=use.decode_counts_NLE[shuffled])
    result = compare(null, seeds=(1, 2, 3), k=4, num_pairs=500, show_progress=False)
    assert abs(row(result, Count, "all").rho.mean) < 0.3
    assert row(compare_of_same(use), Count, "all").rho.mean > 0.5


def compare_of_same(use):
    return compare(use, seeds=(1,), k=4, num_pairs=500, show_progress=False)


def test_deterministic(use, result):
    again = compare(use, seeds=(1, 2, 3), k=4, num_pairs=500, show_progress=False)
    assert again.as_dict() == result.as_dict()


@pytest.mark.parametrize(
    ("gates", "missing"),
    [("none", ["gate probability", "gate logit"]), ("weights", ["gate logit"]), ("logits", [])],
)
def test_what_is_not_recorded_is_said(gates, missing):
    result = compare(build_use(gates, 12), seeds=(1,), k=2, num_pairs=100, show_progress=False)
    assert list(result.not_recorded) == missing
    lines = {line[0]: line for line in result.table()}
    for name in missing:
        assert lines[name][3] == "not recorded"
    assert len(result.table()) == 1 + 3 * (6 - len(missing)) + len(missing)


def test_picture(use, result):
    picture = result.picture
    assert picture.domains == ["code", "math", "medical", "legal"]
    assert picture.domain_sizes == [8, 8, 8, 8]
    np.testing.assert_allclose(picture.deviation_GLE.mean(axis=0), 0, atol=1e-6)
    of_code = use.domains_N == "code"
    share_LE = use.decode_counts_NLE[of_code].sum(axis=0) / use.decode_tokens_N[of_code].sum()
    others = [
        use.decode_counts_NLE[use.domains_N == name].sum(axis=0)
        / use.decode_tokens_N[use.domains_N == name].sum()
        for name in picture.domains
    ]
    np.testing.assert_allclose(
        picture.deviation_GLE[0], share_LE - np.mean(others, axis=0), atol=1e-6
    )


def test_json(result):
    stored = json.loads(json.dumps(result.as_dict()))
    assert len(stored["rows"]) == 18
    assert stored["rows"][0]["rho"].keys() == {"mean", "lo", "hi"}
    assert len(stored["curves"]["count"]["held_out"]) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": ()}, "at least 4 requests and 1 seed, got 32 and 0"),
        ({"k": 33}, r"k must be in \[1, 32\]"),
        ({"k": 0}, r"k must be in \[1, 32\]"),
    ],
)
def test_refuses(use, options, message):
    with pytest.raises(ValueError, match=message):
        compare(use, show_progress=False, **options)


def test_refuses_too_few_requests(use):
    with pytest.raises(ValueError, match="at least 4 requests and 1 seed, got 3"):
        compare(use.subset(np.arange(3)), k=1, show_progress=False)


def test_refuses_signatures_of_zeros(use):
    same = use.subset(np.zeros(8, dtype=np.int64))
    with pytest.raises(ValueError, match="only 0 of 8 requests have a signature that is not all"):
        compare(same, k=2, num_pairs=100, show_progress=False)


class TestPage:
    @pytest.fixture(scope="class")
    def page(self, result):
        return render(result, "Title <b>", {"prompt": "first & last"})

    def test_is_self_contained(self, page):
        assert "Title &lt;b&gt;" in page
        assert "first &amp; last" in page
        assert page.count("data:image/svg+xml;base64,") == 4
        references = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s]+)""", page)
        assert all(ref.startswith("data:image/svg+xml;base64,") for ref in references)
        assert "http" not in re.sub(r'src="data:[^"]*"', "", page)

    def test_has_every_row(self, page, result):
        for line in result.table():
            assert f"<td>{line[3]}</td>" in page or f"<th>{line[3]}</th>" in page

    def test_without_labels_and_with_one_layer(self):
        use = ExpertUse.from_capture(build_capture(16, num_layers=1))
        use = dataclasses.replace(use, domains_N=np.full(16, ""))
        result = compare(use, seeds=(1,), k=2, num_pairs=100, show_progress=False)
        assert "No request has a label" in render(result, "t", {})
