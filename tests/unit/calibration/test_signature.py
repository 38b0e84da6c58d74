from __future__ import annotations

import numpy as np
import pytest

from calibration.signature import SignatureTransform, compute_idf
from tests.builders import build_counts


def test_idf_type_and_range():
    idf_LE = compute_idf(build_counts([0, 1, 2], [10, 10, 10]))
    assert (idf_LE.dtype, idf_LE.shape) == (np.float32, (4, 16))
    assert (idf_LE >= 0).all()


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 3)])
def test_idf_refuses(shape):
    with pytest.raises(ValueError, match="must have shape"):
        compute_idf(np.zeros(shape, dtype=np.uint16))


def test_signature_is_unit_and_scale_free():
    counts_LE = build_counts([0], [40])[0]
    transform = SignatureTransform(np.ones((4, 16), np.float32), np.array([1, 3]))
    signature_D = transform(counts_LE)
    assert (signature_D.dtype, signature_D.shape) == (np.float32, (32,))
    assert np.linalg.norm(signature_D) == pytest.approx(1.0)
    np.testing.assert_allclose(transform(counts_LE * 3), signature_D, rtol=1e-6)


def test_only_kept_layers_count():
    counts_LE = build_counts([0], [40])[0]
    transform = SignatureTransform(np.ones((4, 16), np.float32), np.array([1, 3]))
    before = transform(counts_LE)
    counts_LE[[0, 2]] = 0
    np.testing.assert_array_equal(transform(counts_LE), before)


def test_all_zero_stays_zero():
    transform = SignatureTransform(np.ones((2, 3), np.float32), np.array([0, 1]))
    assert not transform(np.zeros((2, 3), np.uint16)).any()


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_batch_equals_single(dtype):
    counts_NLE = build_counts([0, 1, 2, 3], [10, 20, 30, 40]).astype(dtype)
    transform = SignatureTransform(compute_idf(counts_NLE), np.array([0, 2]))
    batch_ND = transform.batch(counts_NLE)
    for signature_D, counts_LE in zip(batch_ND, counts_NLE, strict=True):
        np.testing.assert_array_equal(signature_D, transform(counts_LE))


@pytest.mark.parametrize(
    ("idf", "mask", "message"),
    [
        (np.ones(3), [0], "finite matrix"),
        (np.full((2, 3), np.nan), [0], "finite matrix"),
        (np.full((2, 3), -1.0), [0], "finite matrix"),
        (np.ones((2, 3)), [], "ascending"),
        (np.ones((2, 3)), [1, 0], "ascending"),
        (np.ones((2, 3)), [0, 0], "ascending"),
        (np.ones((2, 3)), [0, 2], r"layers in \[0, 2\), got \[0, 2\]"),
    ],
)
def test_transform_refuses(idf, mask, message):
    with pytest.raises(ValueError, match=message):
        SignatureTransform(idf, np.array(mask, dtype=np.int64))


def test_idf_takes_counts_only():
    with pytest.raises(ValueError, match="must be integers, got float64"):
        compute_idf(np.full((2, 1, 3), np.nan))
