from __future__ import annotations

import json

import pytest

from router.ledger import LoadLedger


@pytest.fixture
def ledger() -> LoadLedger:
    ledger = LoadLedger()
    ledger.set_replicas(["a", "b"])
    return ledger


def test_reserve_and_release(ledger):
    ledger.reserve("r1", "a", 0.0)
    ledger.reserve("r2", "a", 0.0)
    assert (ledger.load("a"), ledger.load("b"), len(ledger)) == (2, 0, 2)
    assert ledger.loads().tolist() == [2, 0]
    assert ledger.release("r1")
    assert ledger.load("a") == 1


def test_release_counts_only_once(ledger):
    ledger.reserve("r1", "a", 0.0)
    assert [ledger.release("r1"), ledger.release("r1"), ledger.release("never")] == [
        True,
        False,
        False,
    ]
    assert (ledger.load("a"), ledger.num_unknown_releases) == (0, 2)


def test_double_reservation_is_refused(ledger):
    ledger.reserve("r1", "a", 0.0)
    with pytest.raises(ValueError, match="'r1' already holds a reservation on 'a'"):
        ledger.reserve("r1", "b", 0.0)
    assert ledger.load("b") == 0


def test_unknown_replica_is_refused(ledger):
    with pytest.raises(ValueError, match=r"unknown replica 'c' \(known: a, b\)"):
        ledger.reserve("r1", "c", 0.0)
    with pytest.raises(ValueError, match="unknown replica 'c'"):
        ledger.load("c")
    assert "r1" not in ledger


def test_removed_replica_takes_its_reservations_along(ledger):
    ledger.reserve("r1", "a", 0.0)
    ledger.reserve("r2", "b", 0.0)
    assert ledger.set_replicas(["b"]) == ["r1"]
    assert ledger.set_replicas(["b"]) == []
    assert not ledger.release("r1")
    assert ledger.set_replicas(["a", "b"]) == []
    assert (ledger.load("a"), ledger.load("b")) == (0, 1)
    ledger.check_integrity()


def test_another_order_of_replicas_moves_their_loads(ledger):
    ledger.reserve("r1", "a", 0.0)
    ledger.set_replicas(["c", "b", "a"])
    assert ledger.loads().tolist() == [0, 0, 1]
    assert ledger.release("r1")
    assert ledger.loads().tolist() == [0, 0, 0]


def test_loads_are_a_copy(ledger):
    loads = ledger.loads()
    loads += 1
    assert ledger.load("a") == 0


def test_expire_frees_only_the_old(ledger):
    ledger.reserve("old", "a", 0.0)
    ledger.reserve("new", "a", 50.0)
    assert ledger.expire(now=100.0, max_age_s=60.0) == ["old"]
    assert not ledger.release("old")
    assert (ledger.load("a"), ledger.release("new")) == (1, True)


def test_snapshot_survives_json(ledger):
    ledger.reserve("r1", "a", 1.5)
    ledger.release("nothing")
    copy = LoadLedger()
    copy.restore(json.loads(json.dumps(ledger.snapshot())))
    assert copy.snapshot() == ledger.snapshot()
    assert copy.release("r1")
    assert ledger.load("a") == 1


@pytest.mark.parametrize(
    "snapshot",
    [
        {},
        {"replicas": ["a"], "reservations": [["r", "b", 0.0]], "num_unknown_releases": 0},
        {"replicas": ["a"], "reservations": [["r"]], "num_unknown_releases": 0},
    ],
)
def test_malformed_snapshot_changes_nothing(ledger, snapshot):
    ledger.reserve("r1", "a", 0.0)
    with pytest.raises(ValueError, match="ledger snapshot is malformed"):
        ledger.restore(snapshot)
    assert ledger.load("a") == 1


def test_integrity_error_holds_the_numbers(ledger):
    ledger.reserve("r1", "a", 0.0)
    ledger._loads_K[0] = 0
    with pytest.raises(RuntimeError, match="replica 'a': load 0, reservations 1"):
        ledger.check_integrity()
