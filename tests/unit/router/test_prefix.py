from __future__ import annotations

import pytest

from router.prefix import PrefixRing, hash64
from router.types import NoReplica

REPLICAS = ["p0", "p1", "p2", "p3"]
IDLE = dict.fromkeys(REPLICAS, 0)


def test_same_prefix_same_home():
    ring = PrefixRing(REPLICAS)
    prefix = b"x" * 1024
    homes = {ring.pick(prefix + tail, IDLE) for tail in (b"", b"a", b"b" * 9000)}
    assert len(homes) == 1


def test_byte_1023_counts():
    ring = PrefixRing(REPLICAS)
    homes = {ring.pick(b"x" * 1023 + bytes([i]), IDLE) for i in range(60)}
    assert homes == set(REPLICAS)


def test_bounded_load():
    ring = PrefixRing(REPLICAS)
    home = ring.pick(b"prompt", IDLE)
    # With the request the mean is (5 + 10 + 1) / 4 = 4: the home may hold up to 5.
    others = [replica for replica in REPLICAS if replica != home]
    loads = {home: 5, others[0]: 4, others[1]: 4, others[2]: 2}
    assert ring.pick(b"prompt", loads) == home
    loads[home] = 6  # mean 4.25, bound 5.31
    assert ring.pick(b"prompt", loads) == others[2]


def test_least_loaded_ties_go_to_the_first():
    ring = PrefixRing(REPLICAS)
    home = ring.pick(b"prompt", IDLE)
    first = next(replica for replica in REPLICAS if replica != home)
    assert ring.pick(b"prompt", {**IDLE, home: 9}) == first


def test_excluded_home_passes_to_another():
    ring = PrefixRing(REPLICAS)
    home = ring.pick(b"prompt", IDLE)
    second = ring.pick(b"prompt", IDLE, exclude={home})
    assert second != home
    assert second == PrefixRing([r for r in REPLICAS if r != home]).pick(b"prompt", IDLE)


def test_refusals():
    with pytest.raises(NoReplica, match="no prefill replica is known"):
        PrefixRing([]).pick(b"", {})
    with pytest.raises(NoReplica, match="1 known, all excluded"):
        PrefixRing(["p0"]).pick(b"", {"p0": 0}, exclude={"p0"})
    with pytest.raises(ValueError, match=r"missing \['p1'\]"):
        PrefixRing(["p0", "p1"]).pick(b"", {"p0": 0})
    with pytest.raises(ValueError, match="must be distinct"):
        PrefixRing(["p0", "p0"])


def test_hash_is_fixed():
    assert hash64(b"eldr") == 0xF50431F05DACB247  # b2sum -l 64
