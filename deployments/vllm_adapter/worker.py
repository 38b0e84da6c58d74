"""Methods added to vLLM workers (`worker_extension_cls`), called by collective RPC."""

from __future__ import annotations

from typing import Any


class EldrWorkerExtension:
    """Mixed into vLLM's worker class; must not define __init__."""

    def eldr_step_totals(self) -> dict[str, Any]:
        """Distinct experts per layer summed over steps since the start of this worker.

        Returns:
            {"num_steps", "num_tokens", "distinct_L"}; zeros where capture is off.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        totals = get_kv_transfer_group().step_totals
        return {
            "num_steps": totals.num_steps,
            "num_tokens": totals.num_tokens,
            "distinct_L": totals.distinct_L,
        }
