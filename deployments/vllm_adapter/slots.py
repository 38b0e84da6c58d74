"""Slots of expert weights on the device, and the step that runs a layer through them. Pure torch.

Knows nothing of vLLM: a kernel is any callable with the arguments of its modular experts. What is
kept and what leaves is decided by `cachemgr.policies.ExpertCache`; here weights are copied and
ids are mapped.

A step whose experts fit runs the kernel once. When they do not fit:
- few tokens (a decode step) are split by tokens: each group's experts fit, and each token is
  computed in one kernel call, so the result is bit-identical to one with all experts;
- many tokens (a prompt) read the store directly where the device can (CPU), bit-identical too;
- otherwise (GPU) experts are taken in passes of at most B, and a token's parts are added in
  float32. Each part is rounded to the kernel's output type first, so a result may differ from one
  call's by that rounding.

Axes: L MoE layers, E experts, B slots of a layer, T tokens of a step, k experts a token, H hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from cachemgr.policies import ExpertCache
from cachemgr.types import BoolArray, FloatArray, IntArray, Load

W13, W2 = "w13_weight", "w2_weight"  # vLLM's names of an expert's two matrices

# -1 as it lies in memory: the high byte of a slot is below 128, so no slots side by side read so.
# A search in bytes takes a fifth of the time of a minimum.
_NO_SLOT = np.int32(-1).tobytes()

Tensors = dict[str, torch.Tensor]
Kernel = Callable[..., Any]
Jobs = list[tuple[torch.Tensor, torch.Tensor]]  # destination, source


class LayerWeights:
    """The slots of one layer, and where its experts come from.

    Args:
        source: every expert in host memory, [E, ...] by parameter name; or, where no single tensor
            holds them, a sequence of E tensors.
        slots: [B, ...] by parameter name, on the device.
    """

    def __init__(
        self, source: Mapping[str, Sequence[torch.Tensor] | torch.Tensor], slots: Tensors
    ) -> None:
        self.whole = {n: t for n, t in source.items() if isinstance(t, torch.Tensor)}
        self.slots = slots
        # Views made once: indexing costs as much as the copy of a small expert.
        self._from = [list(source[name]) for name in slots]
        self._to = [list(tensor) for tensor in slots.values()]

    def jobs(self, loads: Sequence[Load]) -> Jobs:
        """Copies that carry out what a plan says."""
        return [
            (to[load.slot], source[load.expert])
            for load in loads
            for source, to in zip(self._from, self._to, strict=True)
        ]


class Copier(Protocol):
    """Moves experts into slots."""

    @property
    def busy_s(self) -> float | None:
        """Seconds that copies took since the start; None: not measured on this device."""
        ...

    def copy(self, jobs: Jobs) -> None:
        """Copy; whatever the caller runs next on the device sees the weights."""
        ...

    def start(self, layer: int, jobs: Jobs) -> None:
        """Begin to copy for a layer that runs later, beside the layer that runs now."""
        ...

    def finish(self, layer: int) -> None:
        """Wait until what was started for a layer is there. Raises what the copy raised."""
        ...


class HostCopier:
    """Copies on the CPU; what is started early goes on in one thread, which may wait for a disk."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="eldr-expert-loads")
        self._running: dict[int, Future[None]] = {}
        self.busy_s = 0.0

    def copy(self, jobs: Jobs) -> None:
        """See `Copier.copy`."""
        started = time.perf_counter()
        for destination, source in jobs:
            destination.copy_(source)
        self.busy_s += time.perf_counter() - started

    def start(self, layer: int, jobs: Jobs) -> None:
        """See `Copier.start`."""
        self.finish(layer)  # of a step that broke off: what failed then must not be forgotten
        self._running[layer] = self._thread.submit(self.copy, jobs)

    def finish(self, layer: int) -> None:
        """See `Copier.finish`."""
        if self._running and (future := self._running.pop(layer, None)) is not None:
            future.result()


class CudaCopier:
    """Copies from pinned memory; what is started early overlaps with compute, on its own stream.

    Written against CUDA's stream rules and not run: no GPU was at hand.
    """

    busy_s = None  # the host does not wait for copies

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._events: dict[int, Any] = {}

    def copy(self, jobs: Jobs) -> None:
        """See `Copier.copy`: in the order of the stream that computes."""
        for destination, source in jobs:
            destination.copy_(source, non_blocking=True)

    def start(self, layer: int, jobs: Jobs) -> None:
        """See `Copier.start`."""
        # Kernels of earlier steps may still read the slots that are written here.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self.copy(jobs)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._events[layer] = event

    def finish(self, layer: int) -> None:
        """See `Copier.finish`: the stream that computes waits, the host does not."""
        if (event := self._events.pop(layer, None)) is not None:
            torch.cuda.current_stream().wait_event(event)


class Scoring(Protocol):
    """Scores of experts from what the model computes, for policies without a score of their own."""

    def retention(self, layer: int, hidden_TH: torch.Tensor, logits_TE: torch.Tensor) -> FloatArray:
        """How much each expert is expected in the next step; (E,), finite."""
        ...

    def next_layer(self, layer: int, hidden_TH: torch.Tensor) -> FloatArray | None:
        """How much each expert is expected in the next layer; (E,), or None without prediction."""
        ...


@dataclass
class Counts:
    """What the cache's own ledger does not say; sums since the start of the worker.

    Attributes:
        steps: forward passes of the model.
        tokens: their tokens.
        layer_steps: MoE layers run.
        kernel_calls: calls of the kernel for them.
        streamed: experts read from the store without a slot.
    """

    steps: int = 0
    tokens: int = 0
    layer_steps: int = 0
    kernel_calls: int = 0
    streamed: int = 0


class SlotRuntime:
    """Runs MoE layers on their slots. Owned by the worker's forward thread.

    Args:
        cache: decides what is resident; its tables are the only record of it.
        layers: weights of each layer.
        copier: moves experts on this device.
        exact_tokens: steps up to this size are split by tokens when their experts do not fit.
        reads_source: whether kernels can read the store itself.
        scoring: for policies that take scores from the model; None for the others.
        owned_LE: experts that this rank computes, under expert parallelism; None: all.
    """

    def __init__(
        self,
        cache: ExpertCache,
        layers: Sequence[LayerWeights],
        copier: Copier,
        *,
        exact_tokens: int,
        reads_source: bool,
        scoring: Scoring | None = None,
        owned_LE: BoolArray | None = None,
    ) -> None:
        self.cache, self.layers, self.counts = cache, layers, Counts()
        self.copier, self._exact_tokens, self._reads_source = copier, exact_tokens, reads_source
        self._scoring, self._owned_LE = scoring, owned_LE
        self._num_experts = cache.slot_LE.shape[1]
        # Slots as the kernel takes them. Only what was copied is in here.
        self._ready_LE = np.full(cache.slot_LE.shape, -1, dtype=np.int32)
        self._hits: dict[int, IntArray] = {}  # layers of this step that lacked nothing: their ids
        self._first_L1 = (np.arange(len(self._ready_LE)) * self._num_experts)[:, None]
        # Temporal scores of each layer's last step, for refinement (s^ST's terms of t - 1).
        self._temporal_LE = np.zeros(cache.slot_LE.shape)

    def run(
        self,
        layer: int,
        kernel: Kernel,
        output_TH: torch.Tensor,
        hidden_TH: torch.Tensor,
        weights_Tk: torch.Tensor,
        ids_Tk: torch.Tensor,
        logits_TE: torch.Tensor | None = None,
    ) -> None:
        """Compute one layer of one step.

        Args:
            layer: in [0, L).
            kernel: called with output, hidden_states, w1, w2, topk_weights and topk_ids.
            output_TH: written.
            hidden_TH: input of the experts.
            weights_Tk: weights of the chosen experts.
            ids_Tk: chosen experts, logical ids.
            logits_TE: the native router's logits; for policies that score by them.
        """
        ids: IntArray = (ids_Tk if ids_Tk.is_cpu else ids_Tk.cpu()).numpy()
        counts = self.counts
        if layer == 0:
            counts.steps += 1
            counts.tokens += len(ids)
        counts.layer_steps += 1
        try:
            slots_Tk = self._ready_LE[layer].take(ids)
            if self._can_hit and _NO_SLOT not in slots_Tk.tobytes():
                # The path of most steps: nothing to decide, so the policy hears of it later.
                if layer in self._hits:
                    self._tell_hits()  # of a step that broke off
                self._hits[layer] = ids
                counts.kernel_calls += 1
                weights = self.layers[layer].slots
                slots = torch.from_numpy(slots_Tk)
                kernel(
                    output=output_TH,
                    hidden_states=hidden_TH,
                    w1=weights[W13],
                    w2=weights[W2],
                    topk_weights=weights_Tk,
                    topk_ids=slots if ids_Tk.is_cpu else slots.to(ids_Tk.device, ids_Tk.dtype),
                )
            else:
                call = _Call(kernel, output_TH, hidden_TH, weights_Tk, ids_Tk)
                self._miss(layer, call, ids, logits_TE)
            if layer == len(self.layers) - 1:
                self._tell_hits()
        except BaseException:
            # A plan's slots count as filled before they are: after a failure none may be trusted.
            self._reset()
            raise

    @property
    def _can_hit(self) -> bool:
        """Whether a layer that lacks nothing needs no decision at all."""
        return self._owned_LE is None and not self.cache.budget

    def _own(self, layer: int, chosen_E: BoolArray) -> BoolArray:
        """What this rank executes of what was chosen."""
        return chosen_E if self._owned_LE is None else chosen_E & self._owned_LE[layer]

    def _tell_hits(self) -> None:
        """Let the policy count the layers of this step that lacked nothing."""
        if not self._hits:
            return
        num_layers, num_experts = self._ready_LE.shape
        if len(self._hits) == num_layers:
            # All of one step, in order: what it left out was told when its layer ran again.
            ids_LN = np.concatenate(list(self._hits.values())).reshape(num_layers, -1)
            demand = np.zeros(num_layers * num_experts, dtype=np.bool_)
            demand[ids_LN + self._first_L1] = True
            self.cache.hit_all(demand.reshape(num_layers, num_experts))
        else:
            for layer, ids in self._hits.items():
                demand_E = np.zeros(num_experts, dtype=np.bool_)
                demand_E[ids] = True
                self.cache.access(layer, demand_E)
        self._hits.clear()

    def _reset(self) -> None:
        self.cache.reset()
        self._ready_LE[:] = -1
        self._hits.clear()

    def _miss(self, layer: int, call: _Call, ids: IntArray, logits_TE: torch.Tensor | None) -> None:
        """Decide, load and compute."""
        self._tell_hits()  # the decision may look at the layers below
        hidden_TH = call.hidden_TH
        chosen_E = np.zeros(self._num_experts, dtype=np.bool_)
        chosen_E[ids] = True
        demand_E = self._own(layer, chosen_E)
        self.copier.finish(layer)
        scores_E = self._scores(layer, demand_E, hidden_TH, logits_TE)
        if np.count_nonzero(demand_E) <= self.cache.capacity:
            self._run_whole(layer, call, ids, chosen_E, scores_E)
        elif len(ids) <= self._exact_tokens:
            self._run_by_tokens(layer, call, ids, scores_E)
        elif self._reads_source and self._owned_LE is None:
            self._run_from_source(layer, call, demand_E)
        else:
            self._run_by_experts(layer, call, ids, chosen_E, scores_E)
        self._ready_LE[layer] = self.cache.slot_LE[layer]
        self._refine_next(layer, hidden_TH)

    def replace(
        self,
        cache: ExpertCache,
        scoring: Scoring | None,
        owned_LE: BoolArray | None = None,
        allocate: Callable[[], Sequence[LayerWeights]] | None = None,
    ) -> None:
        """Go on with another, empty cache; where slots are allocated, the old ones go first."""
        for layer in range(len(self.layers)):
            self.copier.finish(layer)
        self.cache, self._scoring, self._owned_LE = cache, scoring, owned_LE
        self._ready_LE[:] = -1
        self._hits.clear()  # of a step that broke off: the new cache would take them for loaded
        if allocate is not None:
            self.layers = ()
            self.layers = allocate()

    def _run_whole(
        self,
        layer: int,
        call: _Call,
        ids: IntArray,
        chosen_E: BoolArray,
        scores_E: FloatArray | None,
    ) -> None:
        plan = self.cache.access(layer, self._own(layer, chosen_E), scores_E, chosen_E)
        loads = plan.passes[0].loads
        if loads:
            self.copier.copy(self.layers[layer].jobs(loads))
        slots_Tk = self.cache.slot_LE[layer][ids]
        if self._owned_LE is None:
            self._call(layer, call, slots_Tk)
        else:
            self._call_part(layer, call, slots_Tk, self._owned_LE[layer][ids])

    def _run_by_tokens(
        self, layer: int, call: _Call, ids: IntArray, scores_E: FloatArray | None
    ) -> None:
        owned_E = None if self._owned_LE is None else self._owned_LE[layer]
        groups = token_groups(ids, self.cache.resident_LE[layer], self.cache.capacity, owned_E)
        for tokens in groups:
            chosen_E = np.zeros(self._num_experts, dtype=np.bool_)
            chosen_E[ids[tokens]] = True
            part = call.rows(tokens)
            self._run_whole(layer, part, ids[tokens], chosen_E, scores_E)
            call.output_TH[_index(tokens, call.output_TH)] = part.output_TH

    def _run_from_source(self, layer: int, call: _Call, demand_E: BoolArray) -> None:
        """The store as weights: a long prompt neither waits for slots nor empties them."""
        self.counts.streamed += int(np.count_nonzero(demand_E))
        self.counts.kernel_calls += 1
        call(call.ids_Tk, self.layers[layer].whole)

    def _run_by_experts(
        self,
        layer: int,
        call: _Call,
        ids: IntArray,
        chosen_E: BoolArray,
        scores_E: FloatArray | None,
    ) -> None:
        total_TH = torch.zeros_like(call.output_TH, dtype=torch.float32)
        slot_E = self.cache.slot_LE[layer].copy()  # the cache's own is that after the last pass
        demand_E = self._own(layer, chosen_E)
        for one in self.cache.access(layer, demand_E, scores_E, chosen_E).passes:
            self.copier.copy(self.layers[layer].jobs(one.loads))
            for load in one.loads:
                if load.evicted >= 0:
                    slot_E[load.evicted] = -1
                slot_E[load.expert] = load.slot
            in_pass_E = np.zeros(self._num_experts, dtype=np.bool_)
            in_pass_E[list(one.experts or ())] = True
            rows = np.flatnonzero(in_pass_E[ids].any(axis=1))
            part = call.rows(rows)
            self._call_part(layer, part, slot_E[ids[rows]], in_pass_E[ids[rows]])
            total_TH[_index(rows, total_TH)] += part.output_TH.float()
        call.output_TH.copy_(total_TH)

    def _call(self, layer: int, call: _Call, slots_Tk: IntArray) -> None:
        self.counts.kernel_calls += 1
        slots = torch.from_numpy(slots_Tk)
        call(slots.to(call.ids_Tk.device, call.ids_Tk.dtype), self.layers[layer].slots)

    def _call_part(
        self, layer: int, call: _Call, slots_Tk: IntArray, included_Tk: BoolArray
    ) -> None:
        """Compute the parts of the tokens' sums that the included experts give."""
        rows = np.flatnonzero(included_Tk.any(axis=1))
        if len(rows) < len(included_Tk):
            call.output_TH.zero_()
            if not len(rows):
                return
            part = call.rows(rows)
            self._call_part(layer, part, slots_Tk[rows], included_Tk[rows])
            call.output_TH[_index(rows, call.output_TH)] = part.output_TH
            return
        # Others get weight 0 in a slot that the token uses anyway: no weights are read for them.
        own_T1 = slots_Tk[np.arange(len(rows)), included_Tk.argmax(axis=1)][:, None]
        mask_Tk = torch.from_numpy(included_Tk).to(call.weights_Tk.device)
        part = call.weighted(torch.where(mask_Tk, call.weights_Tk, 0.0))
        self._call(layer, part, np.where(included_Tk, slots_Tk, own_T1))

    def _scores(
        self,
        layer: int,
        demand_E: BoolArray,
        hidden_TH: torch.Tensor,
        logits_TE: torch.Tensor | None,
    ) -> FloatArray | None:
        """Scores of this step, if the policy needs any now."""
        if self._scoring is None or logits_TE is None:
            return None
        if not self.cache.budget and not (demand_E & ~self.cache.resident_LE[layer]).any():
            return None  # nothing is loaded, so nothing leaves
        scores_E = self._scoring.retention(layer, hidden_TH, logits_TE)
        self._temporal_LE[layer] = scores_E
        return scores_E

    def _refine_next(self, layer: int, hidden_TH: torch.Tensor) -> None:
        """Load ahead for the layer that runs next, beside what runs until then."""
        if self._scoring is None or not self.cache.budget:
            return
        predicted_E = self._scoring.next_layer(layer, hidden_TH)
        if predicted_E is None:
            return
        following = (layer + 1) % len(self.layers)
        loads = self.cache.refine(following, self._temporal_LE[following] + predicted_E)
        if loads:
            self._ready_LE[following] = -1  # on their way
            self.copier.start(following, self.layers[following].jobs(loads))


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a layer's kernel, or of a part of its tokens."""

    kernel: Kernel
    output_TH: torch.Tensor
    hidden_TH: torch.Tensor
    weights_Tk: torch.Tensor
    ids_Tk: torch.Tensor

    def __call__(self, ids_Tk: torch.Tensor, weights: Tensors) -> None:
        self.kernel(
            output=self.output_TH,
            hidden_states=self.hidden_TH,
            w1=weights[W13],
            w2=weights[W2],
            topk_weights=self.weights_Tk,
            topk_ids=ids_Tk,
        )

    def rows(self, rows: IntArray) -> _Call:
        """The same for some tokens, with an output of its own."""
        index = _index(rows, self.hidden_TH)
        return _Call(
            self.kernel,
            torch.empty_like(self.output_TH[: len(rows)]),
            self.hidden_TH[index],
            self.weights_Tk[index],
            self.ids_Tk[index],
        )

    def weighted(self, weights_Tk: torch.Tensor) -> _Call:
        """The same with other weights."""
        return _Call(self.kernel, self.output_TH, self.hidden_TH, weights_Tk, self.ids_Tk)


def _index(rows: IntArray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(rows).to(like.device)


def token_groups(
    ids_Tk: IntArray, resident_E: BoolArray, capacity: int, owned_E: BoolArray | None = None
) -> list[IntArray]:
    """Split a step's tokens so that the experts of each group fit in the slots.

    Tokens that lack the fewest experts come first, and a group takes every later token that still
    fits: what is resident is used before it leaves.

    Args:
        ids_Tk: chosen experts.
        resident_E: experts in slots now.
        capacity: B >= k.
        owned_E: experts that count; None: all.

    Returns:
        Ascending token indices of each group.
    """
    allowed = ~0 if owned_E is None else _mask(owned_E.nonzero()[0].tolist())
    resident = _mask(resident_E.nonzero()[0].tolist())
    masks = [_mask(chosen) & allowed for chosen in ids_Tk.tolist()]
    rest = sorted(range(len(masks)), key=lambda t: (masks[t] & ~resident).bit_count())
    groups = []
    while rest:
        used, taken, left = 0, [], []
        for token in rest:
            if (used | masks[token]).bit_count() <= capacity:
                used |= masks[token]
                taken.append(token)
            else:
                left.append(token)
        groups.append(np.array(sorted(taken), dtype=np.int64))
        rest = left
    return groups


def _mask(experts: Sequence[int]) -> int:
    mask = 0
    for expert in experts:
        mask |= 1 << expert
    return mask
