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
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.utils import create_metric_per_engine

from deployments.vllm_adapter.bindings import IncompatibleVllm, check_bindings
from deployments.vllm_adapter.capture import BlockCounts, active_experts, encode_counts
from deployments.vllm_adapter.expert_cache import cache_of
from deployments.vllm_adapter.orphan import exit_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
        # Ray keeps a histogram's sum by the middle of its buckets: the mean comes from these.
        self._sums = [
            create_metric_per_engine(
                self._counter_cls(name=f"vllm:{name}", documentation=text, labelnames=labelnames),
                self.per_engine_labelvalues,
            )
            for name, text in (
                ("eldr_decode_steps", "Decode steps whose experts were counted."),
                ("eldr_distinct_experts", "Distinct experts of those steps, mean over MoE layers."),
            )
        ]
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
        if steps := transfer_stats_data[_DISTINCT]:
            num_steps, num_experts = self._sums
            num_steps[engine_idx].inc(len(steps))
            num_experts[engine_idx].inc(sum(steps))
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
            self._choices: Choices | None = None
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
        self._choices = choices = Choices(self._vllm_config)
        self.step_totals.start(choices.num_layers)
        if self._counts_prompts:
            group = self.kv_cache_config.kv_cache_groups[self._group]
            self._counts = BlockCounts(
                num_blocks=self.kv_cache_config.num_blocks,
                num_layers=choices.num_layers,
                num_experts=choices.num_experts,
                block_size=group.kv_cache_spec.block_size,
                device=next(iter(kv_caches.values())).device,
            )
        logger.info(
            "expert capture (%s): bound %d MoE layers of %d experts",
            self._mode,
            choices.num_layers,
            choices.num_experts,
        )

    def wait_for_save(self) -> None:
        """End of a step, inside its forward context: count what the step chose."""
        super().wait_for_save()
        if self._expert_cache is not None:
            self._count_cache(self._expert_cache)
        if self._choices is None:
            return
        slots_T = self._slots_of_step()
        if slots_T is None or slots_T.shape[0] == 0:
            return
        ids_TLk = self._choices.of_step(slots_T.shape[0])
        if self._counts is not None:
            self._counts.record(slots_T, ids_TLk)
            self._sum_finished_prompts(self._counts)
        if self._mode in ("decode", "trace"):
            self._count_step(slots_T >= 0, ids_TLk, self._choices.num_experts)

    def _count_step(
        self, is_token_T: torch.Tensor, ids_TLk: torch.Tensor, num_experts: int
    ) -> None:
        active_LE = active_experts(ids_TLk, num_experts, is_token_T)
        # Brought to the host together: one wait for the device.
        *distinct_L, num_tokens = torch.cat([active_LE.sum(1), is_token_T.sum()[None]]).tolist()
        self.step_totals.add(distinct_L, num_tokens)
        if num_tokens <= self._vllm_config.scheduler_config.max_num_seqs:
            self.expert_uses.add(active_LE)
        self._eldr_stats.data[_DISTINCT].append(sum(distinct_L) / len(distinct_L))

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

    def add(self, distinct_L: Sequence[int], num_tokens: int) -> None:
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.distinct_L = [a + b for a, b in zip(self.distinct_L, distinct_L, strict=True)]


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


class Choices:
    """Top-k ids of every MoE layer, as its router chose them last; logical ids, on the device.

    vLLM's own capturer keeps them in one buffer of fixed address: a CUDA graph that is replayed
    runs no Python, so what a callback holds by reference would be those of another step.

    Raises:
        IncompatibleVllm: the model has no MoE layer that can be bound, the layers differ in E, or
            the routers are compiled away.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            RoutedExpertsCapturer,
            bind_routed_experts_capturer,
        )

        config = vllm_config.model_config
        layers = _moe_layers(vllm_config)
        sizes = {int(layer.moe_config.num_logical_experts) for layer in layers.values()}
        if not layers:
            raise IncompatibleVllm(
                f"no MoE layer found in {config.model}: expert capture needs a Mixture-of-Experts "
                "model; set router.capture to false to serve a dense one"
            )
        if len(sizes) > 1:
            raise IncompatibleVllm(
                f"MoE layers differ in their number of experts ({sorted(sizes)}): not supported; "
                "set router.capture to false"
            )
        if current_platform.is_cpu() and not config.enforce_eager:
            raise IncompatibleVllm(
                "on CPU vLLM compiles the routers into the graph, and their choices cannot be "
                "seen: set enforce_eager of this phase to true, or router.capture to false"
            )
        capturer = RoutedExpertsCapturer(
            vllm_config.scheduler_config.max_num_batched_tokens, vllm_config
        )
        try:
            bind_routed_experts_capturer(torch.nn.ModuleList(layers.values()), capturer)
        except ValueError as err:
            raise IncompatibleVllm(
                f"expert choices of {config.model} cannot be captured: {err} Set router.capture to "
                "false, or take another MoE backend"
            ) from err
        self.num_experts = sizes.pop()
        self.num_layers = len(layers)
        self._ids_SLk: torch.Tensor = capturer.device_buffer.fill_(
            -1
        )  # S tokens; all layers, dense ones too
        self._columns_L = torch.tensor(list(layers), device=self._ids_SLk.device)
        self._has_all = self.num_layers == self._ids_SLk.shape[1]
        self._is_checked = False

    def of_step(self, num_tokens: int) -> torch.Tensor:
        """Ids of a step's first tokens; int32 (T, L, k), valid until the next step.

        Raises:
            IncompatibleVllm: the first step has left none.
        """
        ids_TLk = self._ids_SLk[:num_tokens]
        if not self._has_all:
            ids_TLk = ids_TLk[:, self._columns_L]
        if not self._is_checked:
            if bool((ids_TLk < 0).any()):
                raise IncompatibleVllm(
                    "vLLM's MoE layers did not report the experts they chose: set router.capture "
                    "to false, or take another MoE backend"
                )
            self._is_checked = True
        return ids_TLk


def _moe_layers(vllm_config: VllmConfig) -> dict[int, Any]:
    """MoE layers of the model by number, ascending; not those of a draft model, which follow."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    modules = vllm_config.compilation_config.static_forward_context.values()
    layers = {int(m.layer_id): m for m in modules if isinstance(m, MoERunner)}
    last = vllm_config.model_config.get_total_num_hidden_layers()
    return {i: layers[i] for i in sorted(layers) if i < last}


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
