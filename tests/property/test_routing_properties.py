from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.core import NO_CENTROID, RoutingCore, assign_centroids
from router.ledger import LoadLedger
from router.policy import Band, locality_band, make_policy
from router.prefix import MAX_LOAD_RATIO, PrefixRing
from router.types import NoReplica
from tests.builders import build_artifact, build_domain_request

cosines = st.floats(-1, 1, width=32)
maybe_cosines = st.one_of(cosines, st.just(float("nan")))
REPLICAS = ["a", "b", "c"]
REQUESTS = [f"r{i}" for i in range(6)]
COUNTS = [build_domain_request(domain) for domain in range(4)]
ARTIFACT = build_artifact(4)


@given(st.lists(cosines, min_size=1, max_size=20), st.floats(0, 2))
def test_band_is_never_empty_and_holds_the_best(values, tau):
    scores_K = np.array(values, dtype=np.float32)
    band = locality_band(scores_K, tau)
    assert scores_K.argmax() in band
    assert (scores_K[band] >= scores_K.max() - np.float32(tau) - 1e-6).all()
    outside = np.delete(scores_K, band)
    assert (outside < scores_K.max() - np.float32(tau) + 1e-6).all()


@given(st.lists(cosines, min_size=1, max_size=20), st.floats(0, 1), st.floats(0, 1))
def test_a_wider_band_holds_the_narrower_one(values, first, second):
    scores_K = np.array(values, dtype=np.float32)
    narrow, wide = sorted((first, second))
    assert set(locality_band(scores_K, narrow)) <= set(locality_band(scores_K, wide))


@given(
    st.sampled_from(["random", "rr", "jsq", "p2c", "domain", "band", "soft"]),
    st.lists(st.tuples(maybe_cosines, st.integers(0, 50), st.booleans()), min_size=1, max_size=12),
    st.booleans(),
    st.sampled_from(["code", "math", None]),
)
def test_every_policy_stays_among_the_allowed(name, replicas, has_scores, domain):
    values, loads, is_allowed = zip(*replicas, strict=True)
    allowed = np.flatnonzero(is_allowed) if any(is_allowed) else None
    policy = make_policy(name, domain_replicas={"code": [0, 1, 5]})
    scores_K = np.array(values, dtype=np.float32) if has_scores else None
    for _ in range(3):
        decision = policy.choose(scores_K, np.array(loads), domain, allowed)
        assert 0 <= decision.index < len(loads)
        assert allowed is None or decision.index in allowed
        if decision.band_size is not None:
            assert 1 <= decision.band_size <= len(loads)


@given(
    st.lists(st.sampled_from("abcdefgh"), unique=True),
    st.dictionaries(st.sampled_from("abcdefgh"), st.one_of(st.none(), st.integers(0, 9))),
    st.integers(0, 10),
)
def test_centroids_are_shared_by_nobody_and_left_with_nobody(ids, wanted, num_centroids):
    distinct: dict[str, int | None] = {}
    for replica_id, centroid in wanted.items():
        distinct[replica_id] = None if centroid in distinct.values() else centroid
    given_K = assign_centroids(ids, distinct, num_centroids)
    held = given_K[given_K != NO_CENTROID]
    assert len(set(held.tolist())) == len(held) == min(len(ids), num_centroids)
    for replica_id, centroid in zip(ids, given_K.tolist(), strict=True):
        before = distinct.get(replica_id)
        if before is not None and before < num_centroids:
            assert centroid == before


class LedgerMachine(RuleBasedStateMachine):
    """Any interleaving of operations, against a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = LoadLedger()
        self.replicas: list[str] = []
        self.held: dict[str, tuple[str, int]] = {}
        self.now = 0

    @rule(replicas=st.lists(st.sampled_from(REPLICAS), unique=True))
    def set_replicas(self, replicas):
        gone = sorted(r for r, (holder, _) in self.held.items() if holder not in replicas)
        assert self.ledger.set_replicas(replicas) == gone
        self.replicas = replicas
        for request in gone:
            del self.held[request]

    @rule(request=st.sampled_from(REQUESTS), replica=st.sampled_from(REPLICAS))
    def reserve(self, request, replica):
        self.now += 1
        try:
            self.ledger.reserve(request, replica, float(self.now))
        except ValueError:
            assert request in self.held or replica not in self.replicas
        else:
            assert request not in self.held
            self.held[request] = (replica, self.now)

    @rule(request=st.sampled_from(REQUESTS))
    def release(self, request):
        assert self.ledger.release(request) == (self.held.pop(request, None) is not None)

    @rule(max_age=st.integers(0, 10))
    def expire(self, max_age):
        old = [r for r, (_, at) in self.held.items() if self.now - at > max_age]
        assert self.ledger.expire(float(self.now), float(max_age)) == old
        for request in old:
            del self.held[request]

    @rule()
    def restore(self):
        fresh = LoadLedger()
        fresh.restore(self.ledger.snapshot())
        self.ledger = fresh

    @invariant()
    def loads_agree(self):
        self.ledger.check_integrity()
        holders = [holder for holder, _ in self.held.values()]
        expected = [holders.count(replica) for replica in self.replicas]
        assert self.ledger.loads().tolist() == expected
        assert [self.ledger.load(replica) for replica in self.replicas] == expected

    def teardown(self):
        for request in REQUESTS:
            self.ledger.release(request)
        assert all(self.ledger.load(replica) == 0 for replica in self.replicas)
        assert len(self.ledger) == 0


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_ledger = LedgerMachine.TestCase


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("select"), st.sampled_from(REQUESTS), st.integers(0, 4)),
            st.tuples(st.just("release"), st.sampled_from(REQUESTS)),
            st.tuples(st.just("pool"), st.lists(st.sampled_from("abcdef"), unique=True)),
            st.tuples(st.just("restore")),
        ),
        max_size=40,
    )
)
def test_core_keeps_its_books(steps):
    core = RoutingCore(Band(0.1), ARTIFACT, seed=1)
    for now, step in enumerate(steps):
        if step[0] == "select":
            counts_LE = COUNTS[step[2]] if step[2] < 4 else None
            try:
                selection = core.select(step[1], counts_LE, 40, None, float(now))
                assert selection.replica_id in core.replica_ids
                assert (selection.fallback is None) == (selection.similarity is not None)
            except NoReplica:
                assert core.replica_ids == []
        elif step[0] == "release":
            core.release(step[1])
        elif step[0] == "pool":
            core.set_replicas(step[1])
        else:
            core.restore(core.snapshot())
        core.ledger.check_integrity()
        assert core.loads(float(now)).sum() == len(core.ledger)
    for request in REQUESTS:
        core.release(request)
    assert not core.loads(0.0).any()


@settings(max_examples=20)
@given(st.integers(2, 12), st.integers(0, 11))
def test_ring_moves_only_the_keys_of_the_replica_that_left(num_replicas, gone):
    replicas = [f"prefill-{i}" for i in range(num_replicas)]
    lost = replicas[gone % num_replicas]
    rest = [replica for replica in replicas if replica != lost]
    idle = dict.fromkeys(replicas, 0)
    before, after = PrefixRing(replicas), PrefixRing(rest)
    keys = [f"prompt {i}".encode() for i in range(300)]
    moved = 0
    for key in keys:
        home = before.pick(key, idle)
        if home == lost:
            moved += 1
            assert before.pick(key, idle, exclude={lost}) == after.pick(key, idle)
        else:
            assert after.pick(key, idle) == home
    assert moved <= 2.0 * len(keys) / num_replicas + 15


@settings(max_examples=50)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.binary(max_size=20))
def test_ring_never_picks_above_the_bound(loads, key):
    replicas = [f"p{i}" for i in range(len(loads))]
    by_replica = dict(zip(replicas, loads, strict=True))
    picked = by_replica[PrefixRing(replicas).pick(key, by_replica)]
    assert picked <= MAX_LOAD_RATIO * (sum(loads) + 1) / len(loads)
