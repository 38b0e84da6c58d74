"""NIXL connector that also counts expert choices.

Upstream: `vllm.distributed.kv_transfer.kv_connector.v1.nixl`, vLLM 0.32. Loaded by vLLM through
`kv_connector_module_path`; nothing of vLLM is edited. Why a connector: it is the only plug-in point
that sees the KV slots of a step in the worker and the end of a request in the scheduler, and whose
parameters reach the caller with the prefill's answer.

Settings (`kv_connector_extra_config`):
    eldr_capture: "prefill" (signature of each prompt, from the prefill engine), "decode" (distinct
        experts per step), "trace" (both, and the decode counts of each request; for calibration)
        or "off".
    eldr_progress_thread: whether NIXL's own thread spins. It takes a whole core per engine on CPU.

The payload: `kv_transfer_params["eldr_counts"]`, base64 of little-endian uint16 `[L, E]`, and
`eldr_prompt_tokens`. The orchestrator takes both out before the decode engine sees the parameters.
"""

from __future__ import annotations

import base64
import functools
import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker as nixl_base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
    NixlKVConnectorStats,
    NixlPromMetrics,
)
from vllm.forward_context import get_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.utils import create_metric_per_engine

from deployments.vllm_adapter.bindings import IncompatibleVllm, check_bindings
from deployments.vllm_adapter.capture import (
    BlockCounts,
    active_experts,
    encode_counts,
    stack_ids,
)
from deployments.vllm_adapter.expert_cache import cache_of
from deployments.vllm_adapter.orphan import exit_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from deployments.vllm_adapter.expert_cache import InstalledCache

logger = logging.getLogger(__name__)

CAPTURE_MODES = ("prefill", "decode", "trace", "off")
COUNTS_KEY = "eldr_counts"
PROMPT_TOKENS_KEY = "eldr_prompt_tokens"
TOTAL_COUNTS_KEY = "eldr_total_counts"
_DISTINCT = "eldr_distinct_experts"
# Counters of the expert cache: key of `InstalledCache.stats`, and what it says. Each worker of an
# engine adds its own; rates and ratios do not depend on their number.
CACHE_COUNTERS = {
    "hits": "Experts of a layer and step that were in a slot.",
    "demand_loads": "Experts loaded into a slot because a step needed them.",
    "proactive_loads": "Experts loaded into a slot ahead of the step that may need them.",
    "streamed_loads": "Experts that a long prompt read from the store without a slot.",
    "load_bytes": "Bytes of all loads.",
    "evictions": "Experts that lost their slot.",
    "layer_steps": "MoE layers run, summed over steps.",
    "kernel_calls": "Kernel calls for them; more than layer_steps where experts did not fit.",
}
_CACHE_INTERVAL_S = 0.1


@dataclass
class CountsMeta(KVConnectorWorkerMetadata):
    """Counts that a worker sends to its scheduler after a step."""

    prompt_counts: dict[str, bytes] = field(default_factory=dict)
    total_counts: dict[str, bytes] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> CountsMeta:
        # Routing is replicated over tensor-parallel ranks: all send the same counts.
        return self


@dataclass
class CaptureRequest:
    """What the scheduler asks of the worker for one step: blocks by request id."""

    prompts: dict[str, list[int]] = field(default_factory=dict)
    totals: dict[str, list[int]] = field(default_factory=dict)


class EldrStats(NixlKVConnectorStats):
    """NIXL's transfer statistics and the distinct experts of each decode step (mean of layers)."""

    def reset(self) -> None:
        super().reset()
        self.data[_DISTINCT] = []
        self.data.update({_cache_key(name): [] for name in CACHE_COUNTERS})

    def is_empty(self) -> bool:
        ours = (_DISTINCT, *map(_cache_key, CACHE_COUNTERS))
        return super().is_empty() and not any(self.data[key] for key in ours)

    def reduce(self) -> dict[str, int | float]:
        reduced: dict[str, int | float] = super().reduce()
        if steps := self.data[_DISTINCT]:
            reduced["Avg distinct experts per layer and step"] = round(sum(steps) / len(steps), 2)
        return reduced


class EldrPromMetrics(NixlPromMetrics):
    """Exports the distinct experts beside NIXL's metrics."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._distinct = create_metric_per_engine(
            self._histogram_cls(
                name="vllm:eldr_step_distinct_experts",
                # vLLM's prefix: it clears only such names when a process starts a second engine.
                documentation="Distinct experts of a decode step, mean over MoE layers.",
                buckets=[4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256],
                labelnames=labelnames,
            ),
            self.per_engine_labelvalues,
        )
        self._cache = {
            name: create_metric_per_engine(
                self._counter_cls(
                    name=f"vllm:eldr_cache_{name}", documentation=text, labelnames=labelnames
                ),
                self.per_engine_labelvalues,
            )
            for name, text in CACHE_COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        for value in transfer_stats_data[_DISTINCT]:
            self._distinct[engine_idx].observe(value)
        for name, counters in self._cache.items():
            if values := transfer_stats_data[_cache_key(name)]:
                counters[engine_idx].inc(sum(values))


def _cache_key(name: str) -> str:
    return f"eldr_cache_{name}"


class EldrConnector(NixlPullConnector):
    """NIXL pull connector with expert capture.

    One object lives in the scheduler (role SCHEDULER) and one in each worker (role WORKER).
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        check_bindings()
        exit_with_parent()
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._mode: str = transfer.get_from_extra_config("eldr_capture", "off")
        if self._mode not in CAPTURE_MODES:
            raise ValueError(
                f"eldr_capture must be one of {', '.join(CAPTURE_MODES)}, got {self._mode!r}"
            )
        progress = bool(transfer.get_from_extra_config("eldr_progress_thread", True))
        with _nixl_progress_thread(progress):
            super().__init__(vllm_config, role, kv_cache_config)
        self._vllm_config = vllm_config
        self._group = _full_attention_group(kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._requests: dict[str, Request] = {}
            self._prompt_counts: dict[str, bytes] = {}
            self._total_counts: dict[str, bytes] = {}
        else:
            self._counts: BlockCounts | None = None
            self._ids_by_layer: dict[int, torch.Tensor] = {}
            self._worker_meta = CountsMeta()
            self._eldr_stats = EldrStats()
            self.step_totals = StepTotals()
            self.expert_uses = ExpertUses()
            self._expert_cache: InstalledCache | None = None
            self._cache_sent = dict.fromkeys(CACHE_COUNTERS, 0)
            self._cache_sent_at = 0.0

    @property
    def _counts_prompts(self) -> bool:
        return self._mode in ("prefill", "trace")

    # ---- worker side -------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Bind to the MoE layers; the model is loaded and its KV cache exists."""
        super().register_kv_caches(kv_caches)
        self._expert_cache = cache_of(self._vllm_config)
        if self._mode == "off":
            return
        num_experts = bind_routers(self._vllm_config, self._ids_by_layer)
        num_layers = len(self._ids_by_layer)
        self._ids_by_layer.update(dict.fromkeys(self._ids_by_layer, _NO_IDS))
        self._num_experts = num_experts
        self.step_totals.start(num_layers)
        if self._counts_prompts:
            group = self.kv_cache_config.kv_cache_groups[self._group]
            self._counts = BlockCounts(
                num_blocks=self.kv_cache_config.num_blocks,
                num_layers=num_layers,
                num_experts=num_experts,
                block_size=group.kv_cache_spec.block_size,
                device=next(iter(kv_caches.values())).device,
            )
        logger.info(
            "expert capture (%s): bound %d MoE layers of %d experts",
            self._mode,
            num_layers,
            num_experts,
        )

    def wait_for_save(self) -> None:
        """End of a step, inside its forward context: count what the step chose."""
        super().wait_for_save()
        if self._expert_cache is not None:
            self._count_cache(self._expert_cache)
        if self._mode == "off":
            return
        slots = self._slots_of_step()
        if slots is None or slots.shape[0] == 0:
            return
        ids_TLk = stack_ids(self._ids_by_layer, slots.shape[0])
        if self._counts is not None:
            self._counts.record(slots, ids_TLk)
            self._sum_finished_prompts(self._counts)
        if self._mode in ("decode", "trace"):
            active_LE = active_experts(ids_TLk, self._num_experts)
            distinct_L = active_LE.sum(1).cpu().numpy()
            self.step_totals.add(distinct_L, slots.shape[0])
            if slots.shape[0] <= self._vllm_config.scheduler_config.max_num_seqs:
                self.expert_uses.add(active_LE)
            self._eldr_stats.data[_DISTINCT].append(float(distinct_L.mean()))

    def _count_cache(self, expert_cache: InstalledCache) -> None:
        """Add what the expert cache did since the last time, ten times a second at most."""
        if (now := time.monotonic()) - self._cache_sent_at < _CACHE_INTERVAL_S:
            return
        self._cache_sent_at = now
        stats = expert_cache.stats()
        for name, sent in self._cache_sent.items():
            if stats[name] > sent:
                self._eldr_stats.data[_cache_key(name)].append(stats[name] - sent)
                self._cache_sent[name] = stats[name]

    def _slots_of_step(self) -> torch.Tensor | None:
        """KV slot of each token of this step, or None when no forward pass ran."""
        context = get_forward_context()
        if not context.attn_metadata or not isinstance(context.slot_mapping, dict):
            return None
        layer = self.kv_cache_config.kv_cache_groups[self._group].layer_names[0]
        return context.slot_mapping.get(layer)

    def _sum_finished_prompts(self, counts: BlockCounts) -> None:
        asked: CaptureRequest | None = getattr(self._connector_metadata, "eldr", None)
        if asked is None:
            return
        for request_id, block_ids in asked.prompts.items():
            self._worker_meta.prompt_counts[request_id] = encode_counts(counts.total(block_ids))
        for request_id, block_ids in asked.totals.items():
            self._worker_meta.total_counts[request_id] = encode_counts(counts.total(block_ids))

    def build_connector_worker_meta(self) -> CountsMeta | None:
        """Counts of the prompts that this step finished, for the scheduler."""
        meta, self._worker_meta = self._worker_meta, CountsMeta()
        return meta if meta.prompt_counts or meta.total_counts else None

    def get_kv_connector_stats(self) -> Any:
        """NIXL's statistics of the step with the distinct experts added."""
        if self.connector_worker is None:
            return super().get_kv_connector_stats()
        stats, self._eldr_stats = self._eldr_stats, EldrStats()
        if (nixl := super().get_kv_connector_stats()) is not None:
            for key, values in nixl.data.items():
                stats.data[key].extend(values)
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> EldrStats:
        return EldrStats(data=data) if data is not None else EldrStats()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> EldrPromMetrics:
        return EldrPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- scheduler side ----------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        if self._counts_prompts:
            self._requests[request.request_id] = request

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """Add the blocks of prompts that end in this step to NIXL's metadata."""
        meta = super().build_connector_meta(scheduler_output)
        if not self._counts_prompts:
            return meta
        asked = CaptureRequest()
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            computed = request.num_computed_tokens  # before this step
            after = computed + num_scheduled
            if computed < request.num_prompt_tokens <= after:
                asked.prompts.setdefault(request_id, self._blocks(request_id, after))
            if self._mode == "trace" and after > request.num_prompt_tokens:
                asked.totals[request_id] = self._blocks(request_id, after)
        if asked.prompts or asked.totals:
            meta.eldr = asked
        return meta

    def _blocks(self, request_id: str, num_tokens: int) -> list[int]:
        group = self.kv_cache_config.kv_cache_groups[self._group]
        num_blocks = -(-num_tokens // group.kv_cache_spec.block_size)
        return list(self._kv_cache_manager.get_block_ids(request_id)[self._group][:num_blocks])

    def take_worker_meta(self, meta: CountsMeta) -> None:
        """Called by the scheduler before it frees what the step finished."""
        for request_id, counts in meta.prompt_counts.items():
            # A request that was preempted after its prompt passes its end twice; the first pass
            # holds the prompt alone.
            self._prompt_counts.setdefault(request_id, counts)
        self._total_counts.update(meta.total_counts)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        delay_free, params = super().request_finished(request, block_ids)
        return delay_free, self._add_counts(request, params)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        delay_free, params = super().request_finished_all_groups(request, block_ids)
        return delay_free, self._add_counts(request, params)

    def _add_counts(self, request: Request, params: dict[str, Any] | None) -> dict[str, Any] | None:
        if not self._counts_prompts:
            return params
        self._requests.pop(request.request_id, None)
        prompt = self._prompt_counts.pop(request.request_id, None)
        total = self._total_counts.pop(request.request_id, None)
        if prompt is None or (params is None and self._mode != "trace"):
            return params
        extra: dict[str, Any] = {
            COUNTS_KEY: base64.b64encode(prompt).decode(),
            PROMPT_TOKENS_KEY: request.num_prompt_tokens,
        }
        if total is not None and self._mode == "trace":
            extra[TOTAL_COUNTS_KEY] = base64.b64encode(total).decode()
        return {**(params or {}), **extra}


class StepTotals:
    """Distinct experts per layer summed over the steps of a worker; read by collective RPC."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tokens = 0
        self.distinct_L: list[int] = []

    def start(self, num_layers: int) -> None:
        self.distinct_L = [0] * num_layers

    def add(self, distinct_L: Any, num_tokens: int) -> None:
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.distinct_L = [a + int(b) for a, b in zip(self.distinct_L, distinct_L, strict=True)]


class ExpertUses:
    """In how many decode steps of a worker each expert was active; read by collective RPC.

    Steps with a prompt, which have more tokens than requests may decode, are left out. Sums stay on
    the device: counting must not wait for it.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._uses_LE: torch.Tensor | None = None

    def add(self, active_LE: torch.Tensor) -> None:
        """Count one step; bool (L, E)."""
        self.num_steps += 1
        if self._uses_LE is None:
            self._uses_LE = torch.zeros_like(active_LE, dtype=torch.int64)
        self._uses_LE += active_LE

    def uses_LE(self) -> list[list[int]]:
        """Steps by layer and expert; empty before the first step."""
        uses: list[list[int]] = [] if self._uses_LE is None else self._uses_LE.tolist()
        return uses


_NO_IDS = torch.empty(0, 1, dtype=torch.int32)


def bind_routers(vllm_config: VllmConfig, ids_by_layer: dict[int, torch.Tensor]) -> int:
    """Let every MoE layer's router leave its top-k ids (by reference) in `ids_by_layer`.

    Returns:
        E, experts per layer.

    Raises:
        IncompatibleVllm: the model has no MoE layer that can be bound, or the layers differ in E.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    num_experts: dict[int, int] = {}
    for name, module in vllm_config.compilation_config.static_forward_context.items():
        if not isinstance(module, MoERunner):
            continue
        if not hasattr(module.router, "set_capture_fn"):
            raise IncompatibleVllm(
                f"router {type(module.router).__name__} of layer {name} has no set_capture_fn: "
                "expert choices of this model cannot be captured; set router.capture to false"
            )
        layer_id = int(module.layer_id)
        module.router.set_capture_fn(_keeper(ids_by_layer, layer_id))
        ids_by_layer[layer_id] = _NO_IDS
        num_experts[layer_id] = int(module.moe_config.num_logical_experts)
    if not num_experts:
        raise IncompatibleVllm(
            f"no MoE layer found in {vllm_config.model_config.model}: expert capture needs a "
            "Mixture-of-Experts model; set router.capture to false to serve a dense one"
        )
    if len(set(num_experts.values())) > 1:
        raise IncompatibleVllm(
            f"MoE layers differ in their number of experts ({sorted(set(num_experts.values()))}): "
            "not supported; set router.capture to false"
        )
    return next(iter(num_experts.values()))


def _keeper(ids_by_layer: dict[int, torch.Tensor], layer_id: int) -> Any:
    # A function of its own: a closure over a loop variable would bind every layer to the last one.
    def keep(topk_ids: torch.Tensor) -> None:
        ids_by_layer[layer_id] = topk_ids

    return keep


def _full_attention_group(kv_cache_config: KVCacheConfig) -> int:
    """Index of the KV cache group whose blocks cover every token of a prompt."""
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return index
    return 0


@contextmanager
def _nixl_progress_thread(enabled: bool) -> Iterator[None]:
    """Build NIXL agents without their spinning thread while the connector is constructed."""
    original = nixl_base_worker.nixl_agent_config
    if not enabled and original is not None:
        nixl_base_worker.nixl_agent_config = functools.partial(original, enable_prog_thread=False)
    try:
        yield
    finally:
        nixl_base_worker.nixl_agent_config = original
