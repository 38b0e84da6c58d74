"""The learned retention score: what it sees, what it learns, and its file."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from app.cli import main
from cachemgr.joint import Cell, batch_demands, fill
from cachemgr.learned import History, Learned, ScoreTable
from cachemgr.policies import ExpertCache
from cachemgr.replay import layer_demands, replay, run
from cachemgr.training import split, train
from calibration.traces import RoutingTrace

LAYERS, EXPERTS = 3, 9


def echo_trace(num_requests: int = 30, length: int = 40) -> RoutingTrace:
    """A trace whose last layer announces what its first layer chooses two tokens later."""
    rng = np.random.default_rng(7)
    tokens = []
    for _ in range(num_requests):
        ids = np.stack(
            [[rng.permutation(EXPERTS)[:2] for _ in range(LAYERS)] for _ in range(length)]
        )
        ids[2:, 0] = ids[:-2, 2]
        tokens.append(ids)
    return RoutingTrace(
        np.concatenate(tokens).astype(np.uint8),
        np.arange(num_requests + 1) * length,
        EXPERTS,
        ("",) * num_requests,
    )


@pytest.fixture(scope="module")
def trained():
    trace = echo_trace()
    held_out, training = split(trace, 8, seed=0)
    return held_out, training, train(training, "echo", reach=2)


def test_learns_what_other_layers_announce(trained):
    held_out, _, table = trained
    outcomes = replay(held_out, ["lrfu", "learned", "min"], 4, learned=lambda n: Learned(table, n))
    first = {name: int(outcome.loads_L[0]) for name, outcome in outcomes.items()}
    last = {name: int(outcome.loads_L[2]) for name, outcome in outcomes.items()}
    # The first layer is told its next step; the last one chooses at random.
    assert first["lrfu"] - first["learned"] > 0.4 * (first["lrfu"] - first["min"])
    assert abs(last["lrfu"] - last["learned"]) < 0.3 * (last["lrfu"] - last["min"])


def test_layers_in_turn_see_what_all_at_once_see(trained):
    """The runtime, layer by layer, makes the decisions of the replay."""
    held_out, _, table = trained
    one = held_out.subset([0])
    totals = run(layer_demands(one), 4, Learned(table)).totals()
    cache = ExpertCache(LAYERS, EXPERTS, 4, 2, Learned(table))
    for ids_Lk in one.ids_TLk:
        for layer in range(LAYERS):
            cache.access(layer, np.isin(np.arange(EXPERTS), ids_Lk[layer]))
    assert cache.ledger.totals() == totals


def test_a_score_is_the_weighted_sum_of_what_it_looks_at(trained):
    """Layer by layer, rows of a matrix picked and added: the plain products of all at once."""
    _, _, table = trained
    in_turn, at_once = Learned(table), Learned(table)
    rng = np.random.default_rng(3)
    for tokens in (1, 1, 3, 20):  # of a batch: the union of their choices
        demand_LE = rng.random((LAYERS, tokens, EXPERTS)).argsort(axis=2).min(axis=1) < 2
        at_once.observe(slice(0, LAYERS), demand_LE)
        expected_LE = at_once.scores(slice(0, LAYERS))
        for layer in range(LAYERS):
            row = slice(layer, layer + 1)
            in_turn.observe(row, demand_LE[layer : layer + 1])
            assert in_turn.scores(row)[0] == pytest.approx(expected_LE[layer], abs=1e-5)
    assert np.ptp(expected_LE) > 0.01


def test_window_shows_this_token_below_and_the_last_token_above():
    history = History(1, LAYERS, EXPERTS, (2.0,), reach=1)
    for token in range(2):
        demand_RE = np.eye(EXPERTS, dtype=bool)[[3 * token, 3 * token + 1, 3 * token + 2]]
        history.observe(slice(0, LAYERS), demand_RE)
    own, window = history.features(slice(0, LAYERS), 1)
    assert history.window(0, 1).nonzero()[0].tolist() == [3, EXPERTS + 4, 2 * EXPERTS + 5]
    assert own[0, 0, 4] == 1
    assert own[0, 0, 1] == pytest.approx(0.5**0.25)
    assert window.reshape(3, EXPERTS).argmax(axis=1).tolist() == [3, 4, 2]
    top = history.features(slice(0, LAYERS), 2)[1].reshape(3, EXPERTS)
    assert top[2].sum() == 0  # above the last layer
    history.reset(slice(0, LAYERS))
    assert history.features(slice(0, LAYERS), 1)[1].sum() == 0
    with pytest.raises(ValueError, match="rows 1 to 3 must be one layer, or all 3"):
        history.observe(slice(1, 3), demand_RE[1:])


def test_ridge_matches_its_definition():
    """Weights of one layer equal those of the plain formula on features built by hand."""
    trace = echo_trace(3, 12)
    table = train(trace, "echo", reach=0, half_lives=(2.0,), gamma=0.5, ridge=0.1)
    counted, chosen_around, targets = [], [], []
    for request in range(3):
        chosen = np.zeros((12, EXPERTS))
        np.put_along_axis(chosen, trace.tokens(request)[:, 1].astype(int), 1, axis=1)
        counts = np.zeros(EXPERTS)
        for t in range(12):
            counts = counts * 0.5**0.5 + chosen[t]
            counted.append(np.sqrt(counts))
            chosen_around.append([*chosen[t], 1])
            later = [np.flatnonzero(chosen[t + 1 :, e]) for e in range(EXPERTS)]
            targets.append([0.5 ** when[0] if len(when) else 0 for when in later])
    y, penalty = np.array(targets), np.diag([0.1 * 36] * (1 + EXPERTS) + [1e-9 * 36])
    for e in range(EXPERTS):
        x = np.column_stack((np.array(counted)[:, e], np.array(chosen_around)))
        weights = np.linalg.solve(x.T @ x + penalty, x.T @ y[:, e])
        assert table.own_LHE[1, 0, e] == pytest.approx(weights[0], abs=1e-4)
        # Rounded to float16, as it is stored.
        stored = table.window_LWEE[1, 0, :, e]
        assert stored == pytest.approx(weights[1:-1], rel=2**-11, abs=1e-4)
        assert table.bias_LE[1, e] == pytest.approx(weights[-1], abs=1e-4)


def test_batches_execute_the_union_of_their_lanes():
    trace = echo_trace(4, 12)
    demands = batch_demands(trace, 3, seed=0)
    assert demands.ids_SRU.shape[:2] == (16, LAYERS)
    order = np.random.default_rng(0).permutation(4)
    tokens = np.concatenate([trace.tokens(int(r)) for r in order])
    for step, layer in ((0, 0), (15, 2)):
        ids = demands.ids_SRU[step, layer]
        assert set(ids[ids >= 0]) == {
            int(e) for lane in range(3) for e in tokens[16 * lane + step, layer]
        }
    with pytest.raises(ValueError, match="a batch of 49 needs as many tokens, the trace has 48"):
        batch_demands(trace, 49, seed=0)


def test_a_score_of_batches_saves_loads_of_batches(trained):
    held_out, training, _ = trained
    table = train(training, "echo", batch=3, reach=2)
    cell = Cell([], [], [])
    demands = batch_demands(held_out, 3, seed=1)
    for name in ("learned", "lrfu"):
        fill(cell, demands, 3 * len(demands.ids_SRU), name, 6, 0.03, table)
    assert cell.loads_per_token[0] < 0.97 * cell.loads_per_token[1]
    assert table.provenance["batch"] == 3


def test_a_repeated_request_is_not_on_both_sides():
    trace = echo_trace(6).subset([0, 1, 2, 0, 1, 2])
    held_out, training = split(trace, 2, seed=3)
    measured = {held_out.tokens(r).tobytes() for r in range(len(held_out))}
    assert not measured & {training.tokens(r).tobytes() for r in range(len(training))}
    with pytest.raises(ValueError, match="repeats a held-out one"):
        split(trace.subset([0, 3]), 1, seed=0)
    with pytest.raises(ValueError, match=r"must be in \[1, 5\]"):
        split(trace, 6, seed=0)


def test_file_keeps_the_table(trained, tmp_path):
    _, _, table = trained
    table.save(tmp_path / "score")
    again = ScoreTable.load(tmp_path / "score")
    assert (again.window_LWEE == table.window_LWEE).all()
    assert (again.own_LHE == table.own_LHE).all()
    assert (again.model_id, again.gamma, again.reach) == ("echo", table.gamma, 2)


def test_file_of_another_model_or_damaged_is_refused(trained, tmp_path):
    _, _, table = trained
    with pytest.raises(ValueError, match="3 layers x 9 experts \\(echo\\), not 4 x 9"):
        table.check(4, 9)
    table.check(3, 9, "f" * 16)  # the score does not know its model's fingerprint
    known = dataclasses.replace(table, fingerprint="0" * 16)
    known.check(3, 9, None)
    with pytest.raises(ValueError, match=r"echo with fingerprint 0{16}, not f{16}: train one"):
        known.check(3, 9, "f" * 16)
    folder = tmp_path / "score"
    table.save(folder)
    text = (folder / "score.json").read_text()
    for change, message in (
        ({"format_version": 99}, "format_version 99"),
        ({"gamma": 2.0}, "gamma must be in"),
        ({"half_lives": [1.0]}, "do not belong together"),
        ({"half_lives": ["a"] * 4}, "half_lives must be numbers"),
        ({"model_id": 3}, "model_id must be str"),
        ({"fingerprint": 3}, "fingerprint must be str"),
    ):
        (folder / "score.json").write_text(json.dumps({**json.loads(text), **change}))
        with pytest.raises(ValueError, match=message):
            ScoreTable.load(folder)
    (folder / "score.json").write_text(text)
    with (folder / "score.npz").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(ValueError, match="SHA-256"):
        ScoreTable.load(folder)
    bad = np.full_like(table.bias_LE, np.nan)
    with pytest.raises(ValueError, match="bias_LE must be finite"):
        dataclasses.replace(table, bias_LE=bad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reach": 3}, r"reach must be in \[0, 2\]"),
        ({"gamma": 1.0}, r"gamma must be in \(0, 1\)"),
        ({"ridge": 0.0}, "ridge must be above 0"),
    ],
)
def test_training_options(options, message):
    with pytest.raises(ValueError, match=message):
        train(echo_trace(2, 5), "echo", **options)


def test_train_and_replay_commands(tmp_path, capsys):
    trace = echo_trace(12)
    ids, out = tmp_path / "ids.npz", tmp_path / "score"
    np.savez(ids, ids=trace.ids_TLk.transpose(1, 2, 0), offsets=trace.offsets)
    command = ["cache", "train", "--ids", str(ids), "--model", "echo", "--out", str(out)]
    assert main([*command, "--held-out", "12"]) == 2
    assert main([*command, "--held-out", "4", "--capacity", "1"]) == 2
    assert not out.exists()
    capsys.readouterr()
    assert main([*command, "--held-out", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"closed", "lru", "lfu", "lrfu", "learned", "min"}
    assert main([*command, "--held-out", "4", "--batch", "0"]) == 2
    assert main([*command, "--held-out", "4", "--batch", "3", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(report)
    replayed = ["cache", "replay", "--ids", str(ids), "--score", str(out), "--capacity", "4"]
    assert main([*replayed, "--policies", "learned,min"]) == 0
    assert "learned" in capsys.readouterr().out
    wrong = tmp_path / "wrong.npz"
    np.savez(wrong, ids=trace.ids_TLk[:, :2].transpose(1, 2, 0), offsets=trace.offsets)
    replayed[3] = str(wrong)
    assert main([*replayed, "--policies", "learned"]) == 2
    assert "3 layers x 9 experts (echo), not 2 x 9" in capsys.readouterr().err
