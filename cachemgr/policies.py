"""Which experts stay on the device: one retention rule, and the scores that drive it.

Every policy here is U_B (CacheRouter, Algorithm 1) with another score: what a step executes must
be resident, only executed experts enter, and of the others those with the lowest score leave.
LRU scores by last use, LFU by use count, LRFU by a decayed count, the Temporal Router by its
probabilities; the clairvoyant minimum is U_B scored by minus the next use. Pre-access refinement
(Algorithm 2) may precede a step.

The same code serves the runtime, one layer at a time, and replay, thousands of layers at once:
caches are rows, and a call names a slice of them.

Axes: L MoE layers, E experts, B slots of a layer, R rows of a call.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from cachemgr.learned import Learned, ScoreTable
from cachemgr.types import BoolArray, FloatArray, IntArray, Ledger, Load, Pass, StepPlan

NOTHING = StepPlan((Pass(()),))
POLICIES = ("lru", "lfu", "lrfu", "static", "given", "learned")


class Retention(Protocol):
    """Scores experts for retention from what the rows have executed; higher stays longer.

    Not thread-safe. `observe` is called once a row and step, before `scores`.
    """

    @property
    def name(self) -> str:
        """Spelling in configuration, metrics and results."""
        ...

    def observe(self, rows: slice, demand_RE: BoolArray) -> None:
        """Take in what a step executes; changes the state of `rows` only."""
        ...

    def scores(self, rows: slice) -> FloatArray:
        """Scores after the newest step; (R, E), finite. Valid until the next `observe`."""
        ...

    def reset(self, rows: slice) -> None:
        """Forget the history of `rows`."""
        ...


class LRU:
    """Least recently used: the score is the time of the last use, in calls of `observe`."""

    name = "lru"

    def __init__(self, num_rows: int, num_experts: int) -> None:
        self._last_RE = np.zeros((num_rows, num_experts))
        self._now = 0

    def observe(self, rows: slice, demand_RE: BoolArray) -> None:
        """See `Retention.observe`."""
        self._now += 1
        np.putmask(self._last_RE[rows], demand_RE, self._now)

    def scores(self, rows: slice) -> FloatArray:
        """See `Retention.scores`."""
        return self._last_RE[rows]

    def reset(self, rows: slice) -> None:
        """See `Retention.reset`."""
        self._last_RE[rows] = 0


class LRFU:
    """Recency and frequency in one: a count of uses that halves every 1 / lambda steps.

    Args:
        num_rows: caches.
        num_experts: E.
        lambda_: in [0, 1]; near 1 is LRU, 0 is LFU.

    Source: Lee et al. 2001, F(x) = (1/2)^(lambda x), over the history of all experts, resident or
    not.
    """

    name = "lrfu"

    def __init__(self, num_rows: int, num_experts: int, lambda_: float = 0.03) -> None:
        if not 0 <= lambda_ <= 1:
            raise ValueError(f"lambda of LRFU must be in [0, 1], got {lambda_}")
        self._decay = math.pow(0.5, lambda_)
        self._crf_RE = np.zeros((num_rows, num_experts))

    def observe(self, rows: slice, demand_RE: BoolArray) -> None:
        """See `Retention.observe`."""
        crf_RE = self._crf_RE[rows]
        crf_RE *= self._decay
        crf_RE += demand_RE

    def scores(self, rows: slice) -> FloatArray:
        """See `Retention.scores`."""
        return self._crf_RE[rows]

    def reset(self, rows: slice) -> None:
        """See `Retention.reset`."""
        self._crf_RE[rows] = 0


class LFU(LRFU):
    """Least frequently used, without ageing: LRFU with lambda = 0."""

    name = "lfu"

    def __init__(self, num_rows: int, num_experts: int) -> None:
        super().__init__(num_rows, num_experts, lambda_=0.0)


class Static:
    """A fixed order of importance: the hot set stays as far as the executed experts allow.

    Args:
        hotness_RE: higher stays longer, for example counts of earlier traffic; (rows, E), finite.
    """

    name = "static"

    def __init__(self, hotness_RE: FloatArray) -> None:
        if hotness_RE.ndim != 2 or not np.isfinite(hotness_RE).all():
            raise ValueError(
                f"hotness must be finite numbers of shape (layers, experts), got "
                f"{hotness_RE.shape}{' with NaN or infinity' if hotness_RE.ndim == 2 else ''}"
            )
        self._hotness_RE = np.asarray(hotness_RE, dtype=np.float64)

    def observe(self, rows: slice, demand_RE: BoolArray) -> None:
        """See `Retention.observe`; there is no history."""

    def scores(self, rows: slice) -> FloatArray:
        """See `Retention.scores`."""
        return self._hotness_RE[rows]

    def reset(self, rows: slice) -> None:
        """See `Retention.reset`."""


class Given:
    """No score of its own: the caller gives scores with every access.

    For the Temporal Router (p^R + p^T), native gate probabilities, or any other array.
    """

    name = "given"

    def observe(self, rows: slice, demand_RE: BoolArray) -> None:
        """See `Retention.observe`; there is no history."""

    def scores(self, rows: slice) -> FloatArray:
        """Raises ValueError: this retention has no score of its own."""
        raise ValueError("this cache has no score of its own: give `scores` with every access")

    def reset(self, rows: slice) -> None:
        """See `Retention.reset`."""


def make_retention(
    name: str,
    num_rows: int,
    num_experts: int,
    *,
    lambda_: float = 0.03,
    hotness_RE: FloatArray | None = None,
    table: ScoreTable | None = None,
) -> Retention:
    """The retention called `name`.

    Args:
        name: one of `POLICIES`.
        num_rows: caches, L in the runtime.
        num_experts: E.
        lambda_: of LRFU.
        hotness_RE: of `static`, (rows, E).
        table: of `learned`, for a model whose layers the rows are, once or several times.

    Raises:
        ValueError: unknown name, or `static` or `learned` without its scores, or of another shape.
    """
    if name == "lru":
        return LRU(num_rows, num_experts)
    if name == "lfu":
        return LFU(num_rows, num_experts)
    if name == "lrfu":
        return LRFU(num_rows, num_experts, lambda_)
    if name == "given":
        return Given()
    if name == "static":
        if hotness_RE is None or hotness_RE.shape != (num_rows, num_experts):
            found = None if hotness_RE is None else hotness_RE.shape
            raise ValueError(
                f"static needs a hotness of shape {(num_rows, num_experts)}, got {found}"
            )
        return Static(hotness_RE)
    if name == "learned":
        if table is None or num_rows % table.num_layers or num_experts != table.num_experts:
            found = None if table is None else (table.num_layers, table.num_experts)
            raise ValueError(
                f"learned needs a score for {(num_rows, num_experts)}, got one for {found}: train "
                f"it with `eldr cache train`"
            )
        return Learned(table, num_rows // table.num_layers)
    raise ValueError(f"unknown cache policy {name!r}: choose one of {', '.join(POLICIES)}")


def check_capacity(capacity: int, num_experts: int, top_k: int, budget: int = 0) -> None:
    """Refuse capacities at which the rules are not defined.

    Args:
        capacity: B, slots of a layer.
        num_experts: E.
        top_k: k, experts a token executes.
        budget: refinement budget, candidates Algorithm 2 checks before an access.

    Raises:
        ValueError: B < k, B > E, or budget outside [0, B].
    """
    if capacity < top_k:
        raise ValueError(
            f"cache capacity {capacity} is below top-k {top_k}: a token executes {top_k} experts "
            f"of a layer at once, so give at least {top_k} slots"
        )
    if capacity > num_experts:
        raise ValueError(
            f"cache capacity {capacity} exceeds the {num_experts} experts of a layer: give at "
            f"most {num_experts} slots"
        )
    if not 0 <= budget <= capacity:
        raise ValueError(
            f"refinement budget {budget} must be in [0, {capacity}], the capacity: candidates "
            f"beyond it would displace each other"
        )


def retain(
    resident_RE: BoolArray, demand_RE: BoolArray, scores_RE: FloatArray, capacity: int
) -> tuple[BoolArray, IntArray]:
    """Contents after a step (U_B): the executed set, and the best of the other residents.

    A demand within the capacity stays whole, and of the other residents those with the lowest
    score leave as far as slots are missing. A larger demand runs in passes, see `stays`. Equal
    scores: the lower id leaves first.

    Args:
        resident_RE: contents before; bool (R, E), at most `capacity` a row.
        demand_RE: experts to execute; bool (R, E).
        scores_RE: higher stays longer; (R, E), finite.
        capacity: B.

    Returns:
        Contents, bool (R, E), a new array; and passes, int64 (R,).

    Source: CacheRouter (arXiv 2609.04895), Algorithm 1; the paper has no demands beyond B.
    """
    after_RE = resident_RE | demand_RE
    passes_R = np.ones(len(after_RE), dtype=np.int64)
    excess_R = np.count_nonzero(after_RE, axis=1) - capacity
    most = int(excess_R.max(initial=0))
    if most <= 0:
        return after_RE, passes_R
    # The executed set leaves last: it is sorted behind every score.
    keys_RE = np.where(after_RE & ~demand_RE, scores_RE, np.inf)
    order_RE = keys_RE.argsort(axis=1, kind="stable")[:, :most]
    leaves_RE = np.arange(most) < excess_R[:, None]
    rows_V, ranks_V = leaves_RE.nonzero()
    after_RE[rows_V, order_RE[rows_V, ranks_V]] = False
    beyond = np.flatnonzero(np.count_nonzero(demand_RE, axis=1) > capacity)
    if len(beyond):
        resident_BE, demand_BE = resident_RE[beyond], demand_RE[beyond]
        scores_BE = scores_RE[beyond]
        stays_BE, passes_R[beyond] = stays(resident_BE, demand_BE, scores_BE, capacity)
        missing_BE = demand_BE & ~resident_BE
        room_B = capacity - np.count_nonzero(stays_BE, axis=1)
        after_RE[beyond] = stays_BE | _best(missing_BE, scores_BE, room_B)
    return after_RE, passes_R


def stays(
    resident_RE: BoolArray, demand_RE: BoolArray, scores_RE: FloatArray, capacity: int
) -> tuple[BoolArray, IntArray]:
    """Residents that keep their slots through all passes of a demand beyond the capacity.

    What should be resident afterwards are the B best of all that is resident or demanded. Those
    that are resident already stay, except that as many slots as it takes must be left to run the
    missing experts in at most one pass more than ceil(demand / B): on recorded batches that pass
    saves 5 to 8 % of the loads. The first pass runs the demanded residents, and every missing
    expert is loaded once, by ascending score, so that the slots end with the best of them.

    Returns:
        bool (R, E), and the number of passes, int64 (R,).
    """
    asked_R = np.count_nonzero(demand_RE, axis=1)
    hits_R = np.count_nonzero(demand_RE & resident_RE, axis=1)
    later_R = -(-asked_R // capacity)
    best_RE = _best(resident_RE | demand_RE, scores_RE, np.full(len(asked_R), capacity))
    stays_RE = best_RE & resident_RE
    # The first pass may load into the slots that hold neither a hit nor what stays.
    first_R = capacity - hits_R - np.count_nonzero(stays_RE & ~demand_RE, axis=1)
    room_R = np.maximum(1, -(-(asked_R - hits_R - first_R) // later_R))
    stays_RE = _best(stays_RE, scores_RE, capacity - room_R)
    first_R = capacity - hits_R - np.count_nonzero(stays_RE & ~demand_RE, axis=1)
    room_R = capacity - np.count_nonzero(stays_RE, axis=1)
    return stays_RE, 1 + -(-(asked_R - hits_R - first_R) // room_R)


def _best(among_RE: BoolArray, scores_RE: FloatArray, number_R: IntArray) -> BoolArray:
    """The `number_R` best of a set, or all of it; of equals the higher id is better."""
    keys_RE = np.where(among_RE, scores_RE, -np.inf)
    order_RE = keys_RE.argsort(axis=1, kind="stable")[:, ::-1]
    best_RE = np.zeros_like(among_RE)
    taken_RE = np.arange(among_RE.shape[1]) < number_R[:, None]
    np.put_along_axis(best_RE, order_RE, taken_RE, axis=1)
    best_RE &= among_RE
    return best_RE


def refine(resident_RE: BoolArray, scores_RE: FloatArray, capacity: int, budget: int) -> BoolArray:
    """Contents after pre-access refinement (Algorithm 2, steps 1-2).

    The experts with the `budget` highest scores are checked in descending order: an absent one
    replaces the resident with the lowest score if it scores higher. An empty slot counts as a
    resident below every score. Equal scores: the lower id is the better candidate, and leaves
    first as a resident.

    Args:
        resident_RE: contents before; bool (R, E), at most `capacity` a row.
        scores_RE: expected use in the coming step; (R, E), finite.
        capacity: B.
        budget: candidates checked, not loads; in [0, B].

    Returns:
        bool (R, E); a new array.

    Source: CacheRouter (arXiv 2609.04895), Algorithm 2.
    """
    after_RE = resident_RE.copy()
    if not budget:
        return after_RE
    num_rows, num_experts = resident_RE.shape
    # Candidates descend and the lowest resident rises, so swap j takes place when the j-th absent
    # candidate beats the j-th lowest resident, and the first failure is the last test.
    best_RC = (-scores_RE).argsort(axis=1, kind="stable")[:, :budget]
    absent_RC = ~np.take_along_axis(resident_RE, best_RC, axis=1)
    nth_RC = absent_RC.cumsum(axis=1) - 1
    empty_R1 = capacity - np.count_nonzero(resident_RE, axis=1)[:, None]
    worst_RE = np.where(resident_RE, scores_RE, np.inf).argsort(axis=1, kind="stable")
    victims_RC = np.take_along_axis(
        worst_RE, np.clip(nth_RC - empty_R1, 0, num_experts - 1), axis=1
    )
    beats_RC = np.take_along_axis(scores_RE, best_RC, axis=1) > np.take_along_axis(
        scores_RE, victims_RC, axis=1
    )
    swaps_RC = absent_RC & (beats_RC | (nth_RC < empty_R1))
    rows_RC = np.broadcast_to(np.arange(num_rows)[:, None], best_RC.shape)
    evicts_RC = swaps_RC & (nth_RC >= empty_R1)
    after_RE[rows_RC[evicts_RC], victims_RC[evicts_RC]] = False
    after_RE[rows_RC[swaps_RC], best_RC[swaps_RC]] = True
    return after_RE


class RowCaches:
    """Contents and counts of many independent caches of one capacity, stepped together.

    Args:
        num_rows: caches.
        num_experts: E.
        capacity: B, 1 to E.
        retention: scores of the same rows.
    """

    def __init__(
        self, num_rows: int, num_experts: int, capacity: int, retention: Retention
    ) -> None:
        check_capacity(capacity, num_experts, top_k=1)
        self.capacity = capacity
        self.retention = retention
        self.resident_RE = np.zeros((num_rows, num_experts), dtype=np.bool_)
        self.ledger = Ledger.empty(num_rows)

    def access(
        self, rows: slice, demand_RE: BoolArray, scores_RE: FloatArray | None = None
    ) -> IntArray:
        """Execute a demand in each of `rows`, and retain.

        Args:
            rows: which caches.
            demand_RE: experts to execute, the union of a batch; bool (R, E).
            scores_RE: for this step, instead of the retention's own; (R, E).

        Returns:
            Demand misses; int64 (R,).
        """
        before_RE = self.resident_RE[rows]
        self.retention.observe(rows, demand_RE)
        misses_R: IntArray = np.count_nonzero(demand_RE & ~before_RE, axis=1)
        if misses_R.any():
            if scores_RE is None:
                scores_RE = self.retention.scores(rows)
            held_R = np.count_nonzero(before_RE, axis=1)
            after_RE, passes_R = retain(before_RE, demand_RE, scores_RE, self.capacity)
            self.ledger.evictions[rows] += held_R + misses_R - np.count_nonzero(after_RE, axis=1)
            self.ledger.passes[rows] += passes_R
            self.ledger.overflows[rows] += passes_R > 1
            self.resident_RE[rows] = after_RE
        else:
            self.ledger.passes[rows] += 1
        self.ledger.accesses[rows] += np.count_nonzero(demand_RE, axis=1)
        self.ledger.demand[rows] += misses_R
        self.ledger.steps[rows] += 1
        return misses_R

    def refine(self, rows: slice, scores_RE: FloatArray, budget: int) -> IntArray:
        """Pre-access refinement in each of `rows`; see `refine`.

        Returns:
            Proactive loads; int64 (R,).
        """
        before_RE = self.resident_RE[rows]
        after_RE = refine(before_RE, scores_RE, self.capacity, budget)
        loads_R: IntArray = np.count_nonzero(after_RE & ~before_RE, axis=1)
        evicted_R = np.count_nonzero(before_RE & ~after_RE, axis=1)
        self.resident_RE[rows] = after_RE
        self.ledger.proactive[rows] += loads_R
        self.ledger.evictions[rows] += evicted_R
        return loads_R

    def reset(self, rows: slice) -> None:
        """Empty the caches and forget their history; counts stay."""
        self.resident_RE[rows] = False
        self.retention.reset(rows)


class ExpertCache:
    """The resident experts of every layer of one engine, and the slots they are in.

    Owned by one worker, which calls `access` once a layer and step, after the layer's routing is
    known; `refine` may come before. Both only decide: the caller copies weights as told before it
    runs the pass. Ranks that make the same calls get the same plans.

    Args:
        num_layers: L.
        num_experts: E.
        capacity: B, slots of a layer, top_k to E.
        top_k: k, experts a token executes.
        retention: scores of L rows.
        budget: default of `refine`; 0 to B.

    Raises:
        ValueError: capacity or budget outside their range.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        capacity: int,
        top_k: int,
        retention: Retention,
        *,
        budget: int = 0,
    ) -> None:
        check_capacity(capacity, num_experts, top_k, budget)
        self.capacity = capacity
        self.budget = budget
        self.retention = retention
        self.ledger = Ledger.empty(num_layers)
        """Counts, a row a layer."""
        self.resident_LE = np.zeros((num_layers, num_experts), dtype=np.bool_)
        """Contents; not to be written by others."""
        self.slot_LE = np.full((num_layers, num_experts), -1, dtype=np.int64)
        """Slot of each expert, -1 when it is not resident."""
        self.expert_LB = np.full((num_layers, capacity), -1, dtype=np.int64)
        """Expert in each slot, -1 when it is empty."""
        self._num_held = [0] * num_layers
        self._layers = [slice(layer, layer + 1) for layer in range(num_layers)]

    def access(
        self,
        layer: int,
        demand_E: BoolArray,
        scores_E: FloatArray | None = None,
        chosen_E: BoolArray | None = None,
    ) -> StepPlan:
        """Execute the experts a step needs, load the missing ones, and retain (Algorithm 1).

        Args:
            layer: in [0, L).
            demand_E: experts that the batch's tokens chose; bool (E,).
            scores_E: retention scores of this step, instead of the retention's own; (E,), finite.
            chosen_E: what the retention observes, where other ranks execute a part of what was
                chosen; bool (E,); None: the demand.

        Returns:
            Passes to run, in order, each with the loads it needs. A demand beyond the capacity
            takes several passes (`stays`); every missing expert is loaded once.
        """
        # The rule of `retain` for one row: NumPy reduces one axis of two ten times slower.
        rows = self._layers[layer]
        resident_E = self.resident_LE[layer]
        self.retention.observe(rows, (demand_E if chosen_E is None else chosen_E)[None])
        missing = (demand_E > resident_E).nonzero()[0]
        num_asked, num_missing = int(np.count_nonzero(demand_E)), len(missing)
        ledger = self.ledger
        ledger.accesses[layer] += num_asked
        ledger.steps[layer] += 1
        ledger.passes[layer] += 1
        if not num_missing:
            return NOTHING
        ledger.demand[layer] += num_missing
        excess = self._num_held[layer] + num_missing - self.capacity
        if excess <= 0:
            return StepPlan((Pass(self._move(layer, missing, missing[:0])),))
        if scores_E is None:
            scores_E = self.retention.scores(rows)[0]
        if num_asked > self.capacity:
            return self._passes(layer, demand_E, scores_E)
        others = (resident_E > demand_E).nonzero()[0]
        left = others[scores_E[others].argsort(kind="stable")[:excess]]
        return StepPlan((Pass(self._move(layer, missing, left)),))

    def hit_all(self, demand_LE: BoolArray) -> None:
        """What `access` of every layer does when all experts of a step are resident, in one call.

        Args:
            demand_LE: experts that each layer's tokens chose; resident, so within the capacity.
        """
        self.retention.observe(slice(None), demand_LE)
        ledger = self.ledger
        asked_L = np.add.reduce(demand_LE, axis=1, dtype=np.int64)  # half of count_nonzero's time
        np.add(ledger.accesses, asked_L, out=ledger.accesses)
        np.add(ledger.steps, 1, out=ledger.steps)
        np.add(ledger.passes, 1, out=ledger.passes)

    def refine(
        self, layer: int, scores_E: FloatArray, budget: int | None = None
    ) -> tuple[Load, ...]:
        """Load ahead of a layer's access what it is likely to need (Algorithm 2).

        Args:
            layer: in [0, L).
            scores_E: expected use in the coming step; (E,), finite.
            budget: candidates to check, 0 to B; None takes the cache's own.

        Returns:
            Copies to make, at most `budget`.
        """
        before_E = self.resident_LE[layer]
        after_E = refine(
            before_E[None],
            scores_E[None],
            self.capacity,
            self.budget if budget is None else budget,
        )[0]
        entered = (after_E & ~before_E).nonzero()[0]
        if not len(entered):
            return ()
        self.ledger.proactive[layer] += len(entered)
        return self._move(layer, entered, (before_E & ~after_E).nonzero()[0])

    def reset(self) -> None:
        """Empty every slot and forget the history; counts stay."""
        self.retention.reset(slice(None))
        self.resident_LE[:] = False
        self.slot_LE[:] = -1
        self.expert_LB[:] = -1
        self._num_held = [0] * len(self._num_held)

    def _passes(self, layer: int, demand_E: BoolArray, scores_E: FloatArray) -> StepPlan:
        """Passes of a demand beyond the capacity; the contents end up as `retain` says."""
        resident_E = self.resident_LE[layer]
        stays_E = stays(resident_E[None], demand_E[None], scores_E[None], self.capacity)[0][0]
        order = scores_E.argsort(kind="stable")
        hits = (resident_E & demand_E).nonzero()[0]
        missing = order[(demand_E & ~resident_E)[order]]
        # In the order they leave: what is not demanded, the hits of the first pass, the loaded.
        idle = (resident_E & ~demand_E & ~stays_E).nonzero()[0]
        leaving = np.concatenate((idle, hits[~stays_E[hits]], missing))
        room = self.capacity - int(np.count_nonzero(stays_E))
        first = self.capacity - len(hits) - int(np.count_nonzero(stays_E & ~demand_E))
        passes: list[Pass] = []
        done = gone = 0
        while done < len(missing):
            entered = np.sort(missing[done : done + (room if passes else first)])
            experts = entered if passes else np.sort(np.concatenate((hits, entered)))
            excess = max(0, self._num_held[layer] + len(entered) - self.capacity)
            left = leaving[gone : gone + excess]
            passes.append(Pass(self._move(layer, entered, left), tuple(experts.tolist())))
            done, gone = done + len(entered), gone + excess
        self.ledger.passes[layer] += len(passes) - 1
        self.ledger.overflows[layer] += 1
        return StepPlan(tuple(passes))

    def _move(self, layer: int, entered: IntArray, left: IntArray) -> tuple[Load, ...]:
        """Give slots to what enters: the empty ones first, then those of what leaves."""
        slot_E, expert_B = self.slot_LE[layer], self.expert_LB[layer]
        num_empty = len(entered) - len(left)
        slots, evicted = slot_E[left], left
        if num_empty:
            empty = (expert_B < 0).nonzero()[0][:num_empty]
            slots = np.concatenate((empty, slots))
            evicted = np.concatenate((np.full(num_empty, -1), left))
        slot_E[left] = -1
        slot_E[entered] = slots
        expert_B[slots] = entered
        resident_E = self.resident_LE[layer]
        resident_E[left] = False
        resident_E[entered] = True
        self._num_held[layer] += num_empty
        self.ledger.evictions[layer] += len(left)
        moves = zip(entered.tolist(), slots.tolist(), evicted.tolist(), strict=True)
        return tuple(map(Load._make, moves))
