from __future__ import annotations

import dataclasses
import json
import logging

import numpy as np
import pytest

from calibration.counts import Capture
from tests.builders import build_capture


def spoiled(**changes):
    return dataclasses.replace(build_capture(6), **changes)


def test_round_trip(tmp_path):
    capture = build_capture(6)
    capture.save(tmp_path / "capture")
    loaded = Capture.load(tmp_path / "capture")
    for field in dataclasses.fields(Capture):
        np.testing.assert_array_equal(getattr(loaded, field.name), getattr(capture, field.name))
    assert sorted(path.name for path in (tmp_path / "capture").iterdir()) == [
        "capture.json",
        "capture.npz",
    ]
    assert len(loaded) == 6


def test_save_replaces_a_capture_and_nothing_else(tmp_path):
    build_capture(6).save(tmp_path / "capture")
    build_capture(8).save(tmp_path / "capture")
    assert len(Capture.load(tmp_path / "capture")) == 8
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match=r"holds no capture\.json"):
        build_capture(6).save(tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_failed_save_leaves_the_old_one(tmp_path, monkeypatch):
    build_capture(6).save(tmp_path / "capture")

    def disk_full(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez_compressed", disk_full)
    with pytest.raises(OSError, match="no space"):
        build_capture(8).save(tmp_path / "capture")
    assert len(Capture.load(tmp_path / "capture")) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["capture"]


def test_damaged_file_is_refused(tmp_path):
    build_capture(6).save(tmp_path / "c")
    arrays = tmp_path / "c" / "capture.npz"
    data = bytearray(arrays.read_bytes())
    data[len(data) // 2] ^= 1
    arrays.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"capture\.npz is damaged"):
        Capture.load(tmp_path / "c")


def test_other_versions_and_bad_fields_are_refused(tmp_path):
    build_capture(6).save(tmp_path / "c")
    path = tmp_path / "c" / "capture.json"
    meta = json.loads(path.read_text())
    for change, message in [
        ({"format_version": 99}, "format_version 99 is not supported"),
        ({"top_k": "2"}, "top_k must be int, got '2'"),
        ({"versions": None}, "versions must be dict, got None"),
    ]:
        path.write_text(json.dumps({**meta, **change}))
        with pytest.raises(ValueError, match=message):
            Capture.load(tmp_path / "c")
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        Capture.load(tmp_path / "c")
    with pytest.raises(FileNotFoundError, match=r"no file capture\.json"):
        Capture.load(tmp_path / "nowhere")


def test_pickled_arrays_are_refused(tmp_path):
    import hashlib

    build_capture(6).save(tmp_path / "c")
    arrays = tmp_path / "c" / "capture.npz"
    with np.load(arrays) as stored:
        content = {name: stored[name] for name in stored.files}
    content["ids"] = np.array([{"a": 1}] * 6, dtype=object)
    np.savez(arrays, **content)
    path = tmp_path / "c" / "capture.json"
    meta = json.loads(path.read_text())
    meta["arrays_sha256"] = hashlib.sha256(arrays.read_bytes()).hexdigest()
    path.write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=r"not a readable \.npz"):
        Capture.load(tmp_path / "c")


def test_lost_tokens_are_named():
    counts = build_capture(6).prefill_counts_NLE.copy()
    counts[3, 2, 5] += 1
    with pytest.raises(
        ValueError, match=r"prefill counts of request 'request-3' sum to .* layer 2"
    ):
        spoiled(prefill_counts_NLE=counts)


def test_decode_is_checked_too():
    tokens = build_capture(6).decode_tokens_N + 1
    with pytest.raises(ValueError, match="decode counts of request 'request-0'"):
        spoiled(decode_tokens_N=tokens)


def test_empty_prompt_is_refused():
    tokens = build_capture(6).prompt_tokens_N.copy()
    tokens[4] = 0
    with pytest.raises(ValueError, match="'request-4' has 0 prefill tokens"):
        spoiled(prompt_tokens_N=tokens)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("prefill_counts_NLE", lambda a: a[:, :2], "of shape"),
        ("decode_counts_NLE", lambda a: np.full(a.shape, np.nan), "float64 with NaN"),
        ("decode_counts_NLE", lambda a: a.astype(np.int64), "uint16 or uint32"),
        ("prompt_tokens_N", lambda a: a[:3], "of shape"),
        ("decode_tokens_N", lambda a: a.astype(np.float32), "int32"),
        ("domains_N", lambda a: np.arange(len(a)), "must be str"),
        ("ids_N", lambda a: a[:0], "at least one request"),
    ],
)
def test_wrong_arrays_are_refused(name, change, message):
    with pytest.raises(ValueError, match=message):
        spoiled(**{name: change(getattr(build_capture(6), name))})


def test_repeats_are_allowed_and_logged(caplog):
    capture = build_capture(6)
    rows = np.array([0, 0, 1, 2])
    with caplog.at_level(logging.WARNING):
        dataclasses.replace(
            capture,
            **{name: getattr(capture, name)[rows] for name in Capture._ARRAYS},
        )
    assert "1 request ids occur more than once, first 'request-0'" in caplog.text
    assert "1 of 4 requests repeat the prefill counts" in caplog.text
