from __future__ import annotations

import dataclasses

import pytest

from calibration.artifact import ArtifactMismatch
from calibration.fit import fit
from calibration.show import describe, project, show
from tests.builders import build_artifact, build_capture


@pytest.fixture(scope="module")
def artifact():
    return fit(build_capture(40), 4, workload="tasks", show_progress=False)


def test_table(artifact):
    text = describe(artifact)
    assert "test/moe" in text
    assert "N = 40" in text
    rows = text.split("cluster  requests")[1].splitlines()[1:5]
    assert [row.split()[:3] for row in rows] == [[str(k), "10", "25.0%"] for k in range(4)]
    assert all("100%" in row for row in rows)
    assert len({row.index("25.0%") for row in rows}) == 1


def test_pictures_without_the_capture(artifact, tmp_path, capsys):
    written = show(artifact, None, tmp_path / "pictures")
    assert [path.name for path in written] == ["projection.png", "clusters.png", "layers.png"]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
    assert "tasks" in capsys.readouterr().out


def test_pictures_of_another_capture(artifact, tmp_path):
    assert len(show(artifact, build_capture(12, seed=0), tmp_path)) == 3


def test_capture_of_another_model_is_refused(artifact, tmp_path):
    other = dataclasses.replace(build_capture(6), fingerprint="other")
    with pytest.raises(ArtifactMismatch, match="other"):
        show(artifact, other, tmp_path)


def test_text_only_writes_nothing(artifact, tmp_path):
    assert show(artifact, None, None) == []


def test_projection_shapes_even_without_points():
    artifact = build_artifact(3)
    points, centroids = project(artifact.reservoir_RD[:0], artifact.centroids_KD)
    assert centroids.shape == (3, 2)
    assert points.shape[1] == 2
