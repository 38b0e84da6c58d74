"""Expert counts per KV block, and active experts per step. Pure torch: knows nothing of vLLM.

Axes: L MoE layers, E logical experts, T tokens of a step, k experts per token, B KV blocks.

A row `[L, E]` lies beside each KV block and lives and dies with it: the first token written at
offset 0 of a block resets the row, every token adds its choices. The sum over a request's blocks is
therefore the count matrix of the whole prompt, also where a prefix came from the cache (ELDR,
arXiv 2607.00466, signature cache).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

MAX_BLOCK_SIZE = 255  # a row entry is at most block_size and must fit in uint8


class BlockCounts:
    """Expert counts beside the KV cache of one engine. Owned by the worker's forward thread.

    Args:
        num_blocks: B, KV blocks of the engine.
        num_layers: L.
        num_experts: E.
        block_size: tokens per KV block, 1..255.
        device: where the rows live; the device of the top-k ids.

    Raises:
        ValueError: block_size does not fit in a uint8 row.
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_experts: int,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise ValueError(
                f"block_size must be in [1, {MAX_BLOCK_SIZE}] for expert capture (counts are uint8 "
                f"per KV block), got {block_size}: lower block_size or set router.capture to false"
            )
        self.num_layers, self.num_experts, self.block_size = num_layers, num_experts, block_size
        # One row more than there are blocks takes what must go nowhere (padding, other offsets), so
        # that a step needs no data-dependent shape and hence no device synchronisation.
        self._trash = num_blocks
        self.rows_BLE = torch.zeros(
            num_blocks + 1, num_layers, num_experts, dtype=torch.uint8, device=device
        )
        self._flat = self.rows_BLE.view(-1)
        self._layer_offset = (torch.arange(num_layers, device=device) * num_experts)[None, :, None]

    def record(self, slots_T: torch.Tensor, ids_TLk: torch.Tensor) -> None:
        """Add one step's choices to the rows of the blocks it wrote.

        Args:
            slots_T: KV slot of each token; integer, shape (T,); negative for padding.
            ids_TLk: chosen experts; integer, shape (T, L, k), each in [0, E).
        """
        slots_T = slots_T.long()
        block_T = torch.div(slots_T, self.block_size, rounding_mode="floor")
        block_T = torch.where(slots_T < 0, self._trash, block_T)
        is_first = slots_T % self.block_size == 0
        self.rows_BLE.index_fill_(0, torch.where(is_first, block_T, self._trash), 0)
        row_T = block_T * (self.num_layers * self.num_experts)
        flat = (row_T[:, None, None] + self._layer_offset + ids_TLk).reshape(-1)
        ones = torch.ones(1, dtype=torch.uint8, device=flat.device).expand(flat.shape[0])
        self._flat.index_put_((flat,), ones, accumulate=True)

    def total(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint32]:
        """Counts of a request: the sum over its blocks.

        Returns:
            uint32, shape (L, E), on the host.
        """
        rows = self.rows_BLE[torch.as_tensor(block_ids, device=self.rows_BLE.device)]
        counts: npt.NDArray[np.uint32] = (
            rows.sum(0, dtype=torch.int32).cpu().numpy().astype(np.uint32)
        )
        return counts


def active_experts(
    ids_TLk: torch.Tensor, num_experts: int, is_token_T: torch.Tensor
) -> torch.Tensor:
    """Experts that a step's tokens activate; bool (L, E), on the device of the ids.

    Args:
        ids_TLk: chosen experts; integer, shape (T, L, k), each in [0, E).
        num_experts: E.
        is_token_T: False for padding, which a compiled graph computes too; bool (T,).
    """
    num_tokens, num_layers, top_k = ids_TLk.shape
    # Choices of padding go to a column that is cut off: no data-dependent shape.
    ids_TLk = torch.where(is_token_T[:, None, None], ids_TLk, num_experts).long()
    active_LE = torch.zeros(num_layers, num_experts + 1, dtype=torch.bool, device=ids_TLk.device)
    index_LN = ids_TLk.permute(1, 0, 2).reshape(num_layers, num_tokens * top_k)
    return active_LE.scatter_(1, index_LN, True)[:, :num_experts]


def encode_counts(counts_LE: npt.NDArray[np.uint32]) -> bytes:
    """Counts as they travel: little-endian uint16, row-major.

    Raises:
        OverflowError: a count is above 65,535; such a prompt is longer than the format allows.
    """
    if counts_LE.max(initial=0) > np.iinfo(np.uint16).max:
        raise OverflowError(
            f"expert count {int(counts_LE.max())} does not fit in uint16: prompts above 65,535 "
            "tokens carry no signature"
        )
    return counts_LE.astype("<u2").tobytes()


def decode_counts(data: bytes, num_layers: int, num_experts: int) -> npt.NDArray[np.uint16]:
    """Inverse of `encode_counts`.

    Raises:
        ValueError: the payload's length is not 2 * L * E bytes.
    """
    expected = 2 * num_layers * num_experts
    if len(data) != expected:
        raise ValueError(
            f"expert counts must be {expected} bytes ({num_layers} layers x {num_experts} experts "
            f"x 2), got {len(data)}: prefill runs another model than the router's artifact"
        )
    return np.frombuffer(data, dtype="<u2").reshape(num_layers, num_experts)
