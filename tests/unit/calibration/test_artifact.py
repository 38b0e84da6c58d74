from __future__ import annotations

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from calibration.artifact import Artifact, ArtifactMismatch
from tests.builders import build_artifact, build_domain_request


def test_round_trip(tmp_path):
    artifact = build_artifact(4, layer_mask=[0, 2])
    artifact.save(tmp_path / "a")
    loaded = Artifact.load(tmp_path / "a")
    for field in dataclasses.fields(Artifact):
        np.testing.assert_array_equal(getattr(loaded, field.name), getattr(artifact, field.name))
    assert loaded.domain_clusters == artifact.domain_clusters
    counts_LE = build_domain_request(1)
    np.testing.assert_array_equal(loaded.transform(counts_LE), artifact.transform(counts_LE))


def test_json_is_for_people(tmp_path):
    build_artifact(4).save(tmp_path / "a")
    meta = json.loads((tmp_path / "a" / "calibration.json").read_text())
    assert (meta["model_id"], meta["k"], meta["tau"]) == ("test/moe", 4, 0.1)
    assert len(meta["arrays_sha256"]) == 64


def test_same_artifact_same_bytes(tmp_path):
    for name in ("a", "b"):
        build_artifact(4).save(tmp_path / name)
    for name in ("calibration.json", "arrays.npz"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_arrays_of_another_run_are_refused(tmp_path):
    build_artifact(4).save(tmp_path / "a")
    build_artifact(3).save(tmp_path / "b")
    (tmp_path / "b" / "arrays.npz").replace(tmp_path / "a" / "arrays.npz")
    with pytest.raises(ValueError, match="damaged or from another run"):
        Artifact.load(tmp_path / "a")


def test_other_version_is_refused(tmp_path):
    build_artifact(4).save(tmp_path / "a")
    path = tmp_path / "a" / "calibration.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(ValueError, match="format_version 2 is not supported, this code reads 1"):
        Artifact.load(tmp_path / "a")


def test_failed_save_leaves_the_old_one(tmp_path, monkeypatch):
    build_artifact(4).save(tmp_path / "a")

    def disk_full(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez_compressed", disk_full)
    with pytest.raises(OSError, match="no space"):
        build_artifact(3).save(tmp_path / "a")
    assert Artifact.load(tmp_path / "a").k == 4
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_missing_array_is_named(tmp_path):
    build_artifact(4).save(tmp_path / "a")
    arrays = tmp_path / "a" / "arrays.npz"
    with np.load(arrays) as stored:
        np.savez(arrays, **{name: stored[name] for name in stored.files if name != "idf_LE"})
    path = tmp_path / "a" / "calibration.json"
    meta = json.loads(path.read_text())
    meta["arrays_sha256"] = hashlib.sha256(arrays.read_bytes()).hexdigest()
    path.write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=r"arrays\.npz has no array idf_LE"):
        Artifact.load(tmp_path / "a")


def test_other_folders_are_not_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(FileExistsError, match=r"holds no calibration\.json"):
        build_artifact(4).save(tmp_path / "mine")


class TestVerifyModel:
    def test_same_model_under_another_name(self):
        build_artifact(4).verify_model("f" * 16, "other/name", 4, 16, 2)

    @pytest.mark.parametrize(
        "model",
        [("0" * 16, 4, 16, 2), ("f" * 16, 5, 16, 2), ("f" * 16, 4, 8, 2), ("f" * 16, 4, 16, 4)],
    )
    def test_another_model(self, model):
        fingerprint, *shape = model
        with pytest.raises(ArtifactMismatch, match=f"(?s){'f' * 16}.*{fingerprint}") as info:
            build_artifact(4).verify_model(fingerprint, "other/name", *shape)
        assert isinstance(info.value, ValueError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 5}, r"centroids_KD must have dtype kind 'f' and shape \(5, 64\)"),
        ({"layer_mask": np.array([0, 1])}, "centroids_KD"),
        ({"idf_LE": np.full((4, 16), np.nan, np.float32)}, "idf_LE must be finite"),
        ({"rho_curve_L": np.full(4, np.nan)}, "rho_curve_L must be finite"),
        ({"centroids_KD": np.full((4, 64), np.nan, np.float32)}, "centroids_KD must be finite"),
        ({"assignments_N": np.array([0, 1, 2, 4])}, r"assignments_N must be in \[0, 4\)"),
        ({"domain_clusters": {"code": [7]}}, r"domain_clusters\['code'\] must be in \[0, 4\)"),
        ({"tau": 1.5}, r"tau must be in \[0, 1\], got 1.5"),
        ({"top_k": 0}, "top_k >= 1"),
        ({"centroids_KD": np.ones((4, 64), np.float32)}, "norm 1"),
        ({"num_layers": 3}, "must have dtype kind"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(build_artifact(4), **changes)
