"""Counts per KV block against a plain Python model of the KV cache."""

import numpy as np
import pytest
import torch

from deployments.vllm_adapter.capture import (
    BlockCounts,
    active_experts,
    decode_counts,
    encode_counts,
)

L, E, K, BLOCK = 3, 8, 2, 4


def random_ids(rng: np.random.Generator, num_tokens: int) -> torch.Tensor:
    ids = np.stack([[rng.choice(E, K, replace=False) for _ in range(L)] for _ in range(num_tokens)])
    return torch.from_numpy(ids)


def expected(ids: torch.Tensor) -> np.ndarray:
    counts = np.zeros((L, E), dtype=np.uint32)
    for token in ids.numpy():
        for layer, experts in enumerate(token):
            counts[layer, experts] += 1
    return counts


def slots(block_ids: list[int], start: int, stop: int) -> torch.Tensor:
    return torch.tensor([block_ids[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, stop)])


def test_total_is_the_count_of_all_tokens_however_they_are_chunked() -> None:
    rng = np.random.default_rng(0)
    ids, blocks = random_ids(rng, 11), [5, 2, 7]
    rows = BlockCounts(10, L, E, BLOCK)
    for start, stop in ((0, 3), (3, 4), (4, 9), (9, 11)):
        rows.record(slots(blocks, start, stop), ids[start:stop])
    assert (rows.total(blocks) == expected(ids)).all()


def test_prefix_rows_of_another_request_count() -> None:
    rng = np.random.default_rng(1)
    shared, own = random_ids(rng, 8), random_ids(rng, 3)
    rows = BlockCounts(10, L, E, BLOCK)
    rows.record(slots([1, 2], 0, 8), shared)
    rows.record(slots([1, 2, 3], 8, 11), own)
    assert (rows.total([1, 2, 3]) == expected(torch.cat([shared, own]))).all()


def test_reused_block_starts_at_zero() -> None:
    rng = np.random.default_rng(2)
    rows = BlockCounts(4, L, E, BLOCK)
    rows.record(slots([3], 0, 4), random_ids(rng, 4))
    again = random_ids(rng, 2)
    rows.record(slots([3], 0, 2), again)
    assert (rows.total([3]) == expected(again)).all()


def test_padding_tokens_count_nowhere() -> None:
    rng = np.random.default_rng(3)
    ids = random_ids(rng, 4)
    rows = BlockCounts(4, L, E, BLOCK)
    rows.record(torch.tensor([0, 1, -1, -1]), ids)
    assert (rows.total([0]) == expected(ids[:2])).all()
    assert rows.total([1, 2, 3]).sum() == 0


def test_block_size_must_fit_in_a_byte() -> None:
    with pytest.raises(ValueError, match=r"block_size must be in \[1, 255\].*got 256"):
        BlockCounts(2, L, E, 256)


def test_active_experts_per_layer() -> None:
    ids = torch.tensor([[[0, 1], [2, 3], [4, 5]], [[1, 2], [2, 3], [6, 7]]], dtype=torch.int32)
    active = active_experts(ids, E, torch.tensor([True, True]))
    assert [row.nonzero().flatten().tolist() for row in active] == [[0, 1, 2], [2, 3], [4, 5, 6, 7]]
    active = active_experts(ids, E, torch.tensor([True, False]))
    assert [row.nonzero().flatten().tolist() for row in active] == [[0, 1], [2, 3], [4, 5]]


def test_counts_survive_the_wire() -> None:
    counts = expected(random_ids(np.random.default_rng(4), 9))
    assert (decode_counts(encode_counts(counts), L, E) == counts).all()


def test_wrong_payloads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be 48 bytes.*got 10"):
        decode_counts(b"0" * 10, L, E)
    with pytest.raises(OverflowError, match="70000"):
        encode_counts(np.array([[70000]], dtype=np.uint32))
