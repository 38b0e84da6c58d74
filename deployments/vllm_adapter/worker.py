"""Methods added to vLLM workers (`worker_extension_cls`), called by collective RPC."""

from __future__ import annotations

from typing import Any

from deployments.vllm_adapter.expert_cache import anonymous_bytes, cache_of, memory


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

    def eldr_expert_uses(self) -> dict[str, Any]:
        """In how many decode steps each expert was active since the start of this worker.

        Returns:
            {"num_steps", "uses_LE"}; 0 and an empty list where capture is off.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        uses = get_kv_transfer_group().expert_uses
        return {"num_steps": uses.num_steps, "uses_LE": uses.uses_LE()}

    def eldr_cache_stats(self) -> dict[str, Any] | None:
        """Statistics of this worker's expert cache; None without one.

        Returns:
            What `InstalledCache.stats` says, the memory that slots are in (`memory_free`,
            `memory_total`), and `anonymous_bytes` of this process.
        """
        installed = cache_of(self.vllm_config)  # type: ignore[attr-defined]
        if installed is None:
            return None
        return {
            **installed.stats(),
            **memory(installed.device),
            "anonymous_bytes": anonymous_bytes(),
        }

    def eldr_cache_resident(self) -> bytes | None:
        """Experts that this worker's cache holds (`InstalledCache.resident`); None without one."""
        installed = cache_of(self.vllm_config)  # type: ignore[attr-defined]
        return None if installed is None else installed.resident()

    def eldr_cache_configure(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Change settings of the expert cache between two steps (`InstalledCache.configure`).

        Returns:
            The statistics, with the new values; {"error": text} when the values are refused.
        """
        installed = cache_of(self.vllm_config)  # type: ignore[attr-defined]
        if installed is None:
            return {"error": "this engine has no expert cache: set cache.enabled to true"}
        try:
            installed.configure(**changes)
        except (TypeError, ValueError) as err:
            return {"error": str(err)}
        return installed.stats()
