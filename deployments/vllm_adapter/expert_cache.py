"""Puts the experts of a loaded vLLM model behind slots.

Upstream: `vllm.model_executor.layers.fused_moe`, vLLM 0.32. Bound to: the parameters `w13_weight`
and `w2_weight` of `RoutedExperts` ([E, ...], already in the kernel's form), which become the slots;
`apply` of the modular experts object, where logical ids meet the kernel; `select_experts` of the
layer's router, for the native gate's logits. When vLLM can keep single experts off the device by
itself, this file can go.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import psutil
import torch

from app.model_facts import model_facts
from cachemgr.memory import host_memory
from cachemgr.placement_plan import PlacementPlan
from cachemgr.policies import ExpertCache, make_retention
from cachemgr.scores import Scores, load_learned, load_scores
from cachemgr.settings import SETTINGS_KEY, CacheSettings
from cachemgr.types import BoolArray
from deployments.vllm_adapter.bindings import (
    CACHE_BINDINGS,
    IncompatibleVllm,
    check_bindings,
)
from deployments.vllm_adapter.slots import (
    W2,
    W13,
    Copier,
    CudaCopier,
    HostCopier,
    LayerWeights,
    SlotRuntime,
    Tensors,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

Source = dict[str, torch.Tensor | Sequence[torch.Tensor]]  # of one layer: its E experts by name
Router = Callable[[torch.Tensor], torch.Tensor]  # hidden states [T, H] to logits [T, E]

WEIGHTS = (W13, W2)
_SCORED_BY_GATE = ("temporal", "spatio")
_SCORED_BY_FILE = ("static", *_SCORED_BY_GATE)


def settings_of(vllm_config: VllmConfig) -> CacheSettings | None:
    """The cache settings an engine was started with; None: it has no cache."""
    data = dict(vllm_config.additional_config or {}).get(SETTINGS_KEY)
    return None if data is None else CacheSettings.of(data)


def cache_of(vllm_config: VllmConfig) -> InstalledCache | None:
    """The cache that was installed in this worker's model."""
    for runner in moe_runners(vllm_config):
        installed: InstalledCache | None = getattr(runner, "eldr_cache", None)
        return installed
    return None


def moe_runners(vllm_config: VllmConfig) -> list[Any]:
    """The model's MoE layers, in order."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    context = vllm_config.compilation_config.static_forward_context
    runners = [module for module in context.values() if isinstance(module, MoERunner)]
    return sorted(runners, key=lambda runner: int(runner.layer_id))


def install(
    vllm_config: VllmConfig, settings: CacheSettings, source: Sequence[Source] = ()
) -> InstalledCache:
    """Leave B slots of each MoE layer of a loaded model.

    Args:
        vllm_config: of the engine.
        settings: of the cache.
        source: experts of each layer that `expert_loading` has mapped; none on a GPU, where they
            are moved to pinned memory.

    Raises:
        IncompatibleVllm: the model's experts cannot be cached.
        ValueError: the settings do not fit the model.
    """
    check_bindings(CACHE_BINDINGS)
    runners = moe_runners(vllm_config)
    check_supported(vllm_config, runners)
    installed = InstalledCache(vllm_config, runners, settings, source or pinned_source(runners))
    for runner in runners:
        runner.eldr_cache = installed
    _return_free_memory()
    logger.info(
        "expert cache: %d of %d experts in each of %d layers, policy %s, %.1f of %.1f MiB",
        installed.runtime.cache.capacity,
        installed.num_experts,
        len(runners),
        settings.policy,
        installed.slot_bytes / 2**20,
        installed.full_bytes / 2**20,
    )
    return installed


class InstalledCache:
    """The expert cache of one worker: store, slots and the wrappers in the model's layers."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        runners: Sequence[Any],
        settings: CacheSettings,
        source: Sequence[Source],
    ) -> None:
        self._runners, self.settings = runners, settings
        self.device: torch.device = runners[0].routed_experts.w13_weight.device
        self.num_experts: int = runners[0].moe_config.num_experts
        self._share = ExpertShare.of(runners[0].routed_experts)
        self._top_k: int = runners[0].moe_config.experts_per_token
        fingerprint = model_fingerprint(vllm_config)
        self._load_scores = functools.partial(
            load_scores,
            fingerprint=fingerprint,
            num_layers=len(runners),
            num_experts=self.num_experts,
            hidden_size=int(runners[0].moe_config.hidden_dim),
        )
        self._load_learned = functools.partial(
            load_learned,
            fingerprint=fingerprint,
            num_layers=len(runners),
            num_experts=self.num_experts,
        )
        self._load_owned = functools.partial(
            owned_experts, self._share, fingerprint, len(runners), self.num_experts
        )
        owned_LE = self._load_owned(settings.placement)
        cache, scoring = self._make_policy(settings, owned_LE)
        self.full_bytes = sum(t.nbytes for r in runners for t in _weights(r).values())
        self.expert_bytes = sum(t[0].nbytes for t in _weights(runners[0]).values())
        self._source = source
        copier: Copier = CudaCopier(self.device) if self.device.type == "cuda" else HostCopier()
        self.runtime = SlotRuntime(
            cache,
            self._allocate(cache.capacity),
            copier,
            exact_tokens=settings.exact_tokens,
            reads_source=self.device.type == "cpu",
            scoring=scoring,
            owned_LE=owned_LE,
        )
        for layer, runner in enumerate(runners):
            _wrap(self.runtime, layer, runner)

    @property
    def slot_bytes(self) -> int:
        """Bytes of expert weights on the device."""
        return sum(t.nbytes for r in self._runners for t in _weights(r).values())

    def _make_policy(
        self, settings: CacheSettings, owned_LE: BoolArray | None
    ) -> tuple[ExpertCache, GateScores | None]:
        """Empty cache and scores of these settings. Raises ValueError: they do not fit."""
        num_layers, scored = len(self._runners), settings.policy in _SCORED_BY_GATE
        if settings.budget and settings.policy != "spatio":
            raise ValueError(
                f"policy {settings.policy} loads nothing ahead: budget must be 0, got "
                f"{settings.budget}; take policy spatio"
            )
        if owned_LE is not None and settings.policy == "spatio":
            raise ValueError(
                "policy spatio does not know ranks: take another with experts on ranks"
            )
        scores, table = Scores(), None
        if settings.policy == "learned":
            table = self._load_learned(settings.score_file)
        elif settings.policy in _SCORED_BY_FILE and settings.score_file is not None:
            scores = self._load_scores(Path(settings.score_file))
        retention = make_retention(
            "given" if scored else settings.policy,
            num_layers,
            self.num_experts,
            lambda_=settings.lrfu_lambda,
            hotness_RE=scores.hotness_LE,
            table=table,
        )
        num_owned = self.num_experts if owned_LE is None else int(owned_LE.sum(axis=1).max())
        cache = ExpertCache(
            num_layers,
            self.num_experts,
            settings.capacity(num_owned),
            self._top_k,
            retention,
            budget=settings.budget,
        )
        scoring = _gate_scores(settings.policy, self._runners, scores, self.device)
        return cache, scoring

    def _allocate(self, capacity: int) -> list[LayerWeights]:
        """Replace each layer's weights by empty slots; the old ones go first, of all layers."""
        for runner, source in zip(self._runners, self._source, strict=True):
            for name, experts in source.items():
                nothing = torch.empty(0, dtype=experts[0].dtype, device=self.device)
                setattr(
                    runner.routed_experts, name, torch.nn.Parameter(nothing, requires_grad=False)
                )
        layers = []
        for runner, source in zip(self._runners, self._source, strict=True):
            slots = {}
            for name, experts in source.items():
                one = experts[0]
                # Zeros, not empty: a slot that is read with weight 0 must hold no NaN.
                slots[name] = torch.zeros(
                    (capacity, *one.shape), dtype=one.dtype, device=self.device
                )
                setattr(
                    runner.routed_experts,
                    name,
                    torch.nn.Parameter(slots[name], requires_grad=False),
                )
            layers.append(LayerWeights(source, slots))
        return layers

    def configure(self, **changes: Any) -> None:
        """Change settings between two steps; another policy or B starts with empty slots.

        Args:
            changes: fields of `CacheSettings`: slots, budget, policy, lrfu_lambda, score_file,
                placement.

        Raises:
            ValueError: they do not fit, and nothing was changed; or there is no memory for them,
                and slots are as before, but empty.
        """
        runtime, before = self.runtime, self.settings
        settings = dataclasses.replace(before, **changes)
        owned_LE = self._load_owned(settings.placement)
        cache, scoring = self._make_policy(settings, owned_LE)
        if set(changes) <= {"budget"}:
            self.settings = settings
            runtime.cache.budget = cache.budget
            return
        capacity = runtime.cache.capacity
        try:
            self._go_on(settings, cache, scoring, owned_LE)
        except (MemoryError, RuntimeError) as err:  # torch's want of memory is a RuntimeError
            if cache.capacity <= capacity:
                raise
            owned_LE = self._load_owned(before.placement)
            self._go_on(before, *self._make_policy(before, owned_LE), owned_LE)
            raise ValueError(
                f"no memory for {cache.capacity} slots in each layer, went on with {capacity}: "
                f"{err}"
            ) from err

    def _go_on(
        self,
        settings: CacheSettings,
        cache: ExpertCache,
        scoring: GateScores | None,
        owned_LE: BoolArray | None,
    ) -> None:
        """Put an empty cache in the place of the one in use; the ledger goes on."""
        runtime = self.runtime
        cache.ledger = runtime.cache.ledger
        if cache.capacity == runtime.cache.capacity and runtime.layers:
            runtime.replace(cache, scoring, owned_LE)
        else:
            runtime.replace(cache, scoring, owned_LE, lambda: self._allocate(cache.capacity))
            _return_free_memory()
        self.settings = settings

    def stats(self) -> dict[str, Any]:
        """Sums since the start of the worker, and what is set now."""
        runtime = self.runtime
        totals, counts = runtime.cache.ledger.totals(), runtime.counts
        loads = totals.demand + totals.proactive + counts.streamed
        return {
            "policy": self.settings.policy,
            "score_file": self.settings.score_file,
            "slots": runtime.cache.capacity,
            "budget": runtime.cache.budget,
            "num_layers": len(self._runners),
            "num_experts": self.num_experts,
            "top_k": self._top_k,
            "expert_bytes": self.expert_bytes,
            "slot_bytes": self.slot_bytes,
            "full_bytes": self.full_bytes,
            "steps": counts.steps,
            "tokens": counts.tokens,
            "layer_steps": counts.layer_steps,
            "kernel_calls": counts.kernel_calls,
            "accesses": totals.accesses,
            "hits": totals.accesses - totals.demand,
            "demand_loads": totals.demand,
            "proactive_loads": totals.proactive,
            "streamed_loads": counts.streamed,
            "load_bytes": loads * self.expert_bytes,
            "copy_s": runtime.copier.busy_s,
            "evictions": totals.evictions,
        }

    def resident(self) -> bytes:
        """Experts in slots, as bits; each layer starts at a byte of its own."""
        return np.packbits(self.runtime.cache.resident_LE, axis=1).tobytes()


def model_fingerprint(vllm_config: VllmConfig) -> str:
    """Of the model folder; of a hub model, of its name and revision."""
    model = vllm_config.model_config
    if Path(model.model).is_dir():
        return model_facts(model.model).fingerprint
    return hashlib.sha256(f"{model.model}@{model.revision}".encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """Which experts a rank has loaded: all of them, or with expert parallelism a run of ids.

    Attributes:
        rank: of this worker among those that share the experts.
        size: their number; 1 without expert parallelism.
        num_local: experts that each has loaded.
    """

    rank: int
    size: int
    num_local: int

    @classmethod
    def of(cls, experts: Any) -> Self:
        """Of one layer's experts, which stand for all.

        Raises:
            IncompatibleVllm: experts are not split evenly in runs.
        """
        num_local, num_experts = experts.local_num_experts, experts.moe_config.num_experts
        if not experts.use_ep:
            return cls(0, 1, num_local)
        parallel = experts.moe_config.moe_parallel_config
        share = cls(parallel.ep_rank, parallel.ep_size, num_local)
        first = share.rank * num_local
        local = (experts.expert_map >= 0).nonzero().flatten().tolist()
        if local != list(range(first, first + num_local)) or num_local * share.size != num_experts:
            raise IncompatibleVllm(
                "the expert cache needs experts that are split evenly and in order over the ranks: "
                "set expert_placement_strategy linear and a number of ranks that divides "
                f"{num_experts}"
            )
        return share


def owned_experts(
    share: ExpertShare,
    fingerprint: str,
    num_layers: int,
    num_experts: int,
    placement: str | None,
) -> BoolArray | None:
    """Experts that this rank computes; bool (L, E). None: all, without expert parallelism.

    Args:
        share: what the rank has loaded.
        fingerprint: of the model.
        num_layers: L.
        num_experts: E.
        placement: file of a `PlacementPlan`; None: each rank computes what it has loaded.

    Raises:
        ValueError: the plan is for another model or number of ranks, or has copies of experts.
    """
    if share.size == 1:
        if placement is not None:
            raise ValueError("placement.plan is for experts on several ranks, this engine has one")
        return None
    rank_LE = np.tile(np.arange(num_experts) // share.num_local, (num_layers, 1))
    if placement is not None:
        plan = PlacementPlan.load(placement)
        plan.verify(fingerprint, num_layers, num_experts, num_experts, share.size)
        for layer, experts in enumerate(plan.physical_to_logical_LP):
            rank_LE[layer, experts] = plan.rank_of_slot_P
    owned_LE: BoolArray = rank_LE == share.rank
    return owned_LE


def pinned_source(runners: Sequence[Any]) -> list[Source]:
    """Experts in pinned host memory, which a GPU copies from by itself. Not run: no GPU here."""
    return [
        {name: tensor.cpu().pin_memory() for name, tensor in _weights(runner).items()}
        for runner in runners
    ]


def _weights(runner: Any) -> Tensors:
    return {name: getattr(runner.routed_experts, name).data for name in WEIGHTS}


def _wrap(runtime: SlotRuntime, layer: int, runner: Any) -> None:
    """Send one layer's kernel calls through the runtime. A function of its own for its closures."""
    fused = runner._quant_method.moe_kernel.impl.fused_experts
    original: Callable[..., Any] = fused.apply
    kept: list[torch.Tensor | None] = [None]

    def apply(
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        **rest: Any,
    ) -> None:
        # Ids are mapped to slots before the kernel sees them: to it, slots are all experts.
        kernel = functools.partial(
            original,
            global_num_experts=runtime.cache.capacity,
            expert_map=None,
            **rest,
        )
        runtime.run(layer, kernel, output, hidden_states, topk_weights, topk_ids, kept[0])

    fused.apply = apply
    select = runner.router.select_experts

    def select_experts(
        hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        kept[0] = router_logits
        return select(hidden_states, router_logits, *args, **kwargs)

    runner.router.select_experts = select_experts


class GateScores:
    """Scores from the model's gates, and from trained routers where there are any.

    A batch's scores are the mean over its tokens: the expected uses of a token of the next step.

    Args:
        temporal_L: logits of W^T in each layer; None: p^R counts alone (p^T = p^R at W^T's start).
        spatio_L: logits of W^S in each layer; None: no prediction of the next layer.

    Source: CacheRouter (arXiv 2609.04895), s^T = p^R + p^T; the paper has one token a step.
    """

    def __init__(
        self, temporal_L: Sequence[Router] | None, spatio_L: Sequence[Router] | None
    ) -> None:
        self._temporal_L, self._spatio_L = temporal_L, spatio_L

    def retention(
        self, layer: int, hidden_TH: torch.Tensor, logits_TE: torch.Tensor
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """See `Scoring.retention`."""
        scores_E = _mean_probability(logits_TE)
        if self._temporal_L is not None:
            scores_E += _mean_probability(self._temporal_L[layer](hidden_TH))
        return scores_E

    def next_layer(
        self, layer: int, hidden_TH: torch.Tensor
    ) -> np.ndarray[Any, np.dtype[np.float32]] | None:
        """See `Scoring.next_layer`."""
        if self._spatio_L is None:
            return None
        return _mean_probability(self._spatio_L[layer](hidden_TH))


def _mean_probability(logits_TE: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    mean: np.ndarray[Any, np.dtype[np.float32]] = (
        torch.softmax(logits_TE, dim=-1, dtype=torch.float32).mean(0).cpu().numpy()
    )
    return mean


def _gate_scores(
    policy: str, runners: Sequence[Any], scores: Scores, device: torch.device
) -> GateScores | None:
    if policy not in _SCORED_BY_GATE:
        return None
    dtype = runners[0].moe_config.in_dtype

    def routers(array_LEH: np.ndarray[Any, Any] | None) -> list[Router] | None:
        if array_LEH is None:
            return None
        weights_LEH = torch.from_numpy(array_LEH).to(device, dtype)
        return [functools.partial(torch.nn.functional.linear, weight=w_EH) for w_EH in weights_LEH]

    spatio = None
    if policy == "spatio":
        spatio = routers(scores.spatio_LEH) or _gates_of_next_layers(runners)
    return GateScores(routers(scores.temporal_LEH), spatio)


def _gates_of_next_layers(runners: Sequence[Any]) -> list[Router]:
    """W^S at its start: each layer is asked with the gate of the one after it."""
    if any(runner.gate is None for runner in runners):
        raise IncompatibleVllm(
            "policy spatio needs the gates of the model's MoE layers and vLLM keeps them outside "
            "of its MoE runner for this model: give spatio_LEH in cache.score_file, or take policy "
            "temporal"
        )
    # The modules, not their weights: on a CPU those are packed.
    routers = [_gate_logits(runner.gate) for runner in runners]
    return routers[1:] + routers[:1]


def _gate_logits(gate: Any) -> Router:
    def logits(hidden_TH: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = gate(hidden_TH)[0]
        return result

    return logits


def check_supported(vllm_config: VllmConfig, runners: Sequence[Any]) -> None:
    """Refuse models and engine settings whose experts the slots cannot stand for."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    problems = []
    if not runners:
        problems.append(f"{vllm_config.model_config.model} has no MoE layer")
    for runner in runners:
        method, experts = runner._quant_method, runner.routed_experts
        name = runner.layer_name
        if not isinstance(method, UnquantizedFusedMoEMethod):
            problems.append(f"{name} is quantized ({type(method).__name__})")
        elif method.experts_cls is None or method.is_monolithic:
            problems.append(f"{name} has a kernel that routes by itself")
        elif runner.moe_config.has_bias:
            problems.append(f"the experts of {name} have biases")
        elif runner.router.eplb_state is not None and vllm_config.parallel_config.enable_eplb:
            problems.append("EPLB moves experts itself")
        elif experts.local_num_experts != runner.moe_config.num_experts and not experts.use_ep:
            problems.append(f"{name} has redundant experts")
    shapes = {
        (e.local_num_experts, e.hidden_size, e.intermediate_size_per_partition)
        for e in (runner.routed_experts for runner in runners)
    }
    if len(shapes) > 1:
        problems.append(f"MoE layers differ in shape ({sorted(shapes)})")
    if vllm_config.parallel_config.data_parallel_size > 1:
        problems.append("data parallelism sends tokens between ranks")
    if (
        runners
        and runners[0].routed_experts.use_ep
        and vllm_config.device_config.device_type != "cpu"
    ):
        problems.append("experts on several ranks are cached on CPUs alone")
    if not vllm_config.model_config.enforce_eager:
        problems.append("compiled graphs cannot wait for loads (set decode.enforce_eager)")
    if problems:
        raise IncompatibleVllm(
            f"the expert cache cannot serve this model: {'; '.join(sorted(set(problems)))}; set "
            "cache.enabled to false"
        )


def memory(device: torch.device) -> dict[str, int]:
    """Free and total bytes of the memory that slots are in."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    else:
        free, total = host_memory()
    return {"memory_free": free, "memory_total": total}


def anonymous_bytes() -> int:
    """Memory of this process that no file backs: the mapped store is not in it."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def _return_free_memory() -> None:
    """Give freed weights back to the system: glibc keeps what is below its mmap threshold."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        logger.debug("no malloc_trim here: freed weights may stay in the process")
