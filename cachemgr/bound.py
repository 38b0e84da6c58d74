"""The least expert loads any cache can need for a given trace, with a proof that can be checked.

Between two uses of an expert a cache either keeps it, or loads it again. Keeping it occupies a
slot at every point between the uses, and slots are limited, so the fewest loads come from the
most intervals (pairs of consecutive uses) that fit: at each point p, at most cap[p] kept intervals
may cover it. Prefetching does not help: it moves a load, it does not remove one. The matrix of
this packing has consecutive ones, so its linear program is integral, and by duality any prices
y >= 0 on the points show that no cache keeps more intervals than

    sum_p cap[p] y[p] + sum_i max(0, 1 - sum of y over the points of interval i).

`minimum` finds the best schedule (of those that do not fit, the interval that ends last goes:
Belady's rule with the executed set protected) and prices for which the two sides meet. `certify`
shares no code with it: it counts what the schedule keeps, checks that it fits, and evaluates the
prices. Equal sides are a proof of optimality that needs no trust in `minimum`.

A cache starts empty. Points: 2s is step s itself, 2s + 1 lies between the steps s and s + 1. The
variants differ in their capacities, for a demand of u experts and B slots:

    forced   what a step executes must be resident:   cap[2s] = B - u,  u <= B
    union    the same for batches of any size; a demand beyond B runs in passes, which take at
             least one slot from what it does not execute:  cap[2s] = B - 1 if u > B
    shared   one pool for the layers of a token: `forced`, with (layer, expert) as the items and
             the layers of all tokens in turn as the steps
    bypass   a missing expert may be used from a staging buffer and not kept:  cap[2s] = B

and cap[2s + 1] = B. For demands beyond B, `union` is a lower bound for any number of passes: it
lets a step leave any B of the experts it executed, where passes may force some of them.

Axes: S steps, R rows (independent caches), U experts of a demand, P = 2S points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cachemgr.types import BoolArray, IntArray

Variant = Literal["forced", "union", "shared", "bypass"]
Progress = Callable[[int], object]
IdArray = NDArray[np.signedinteger[Any]]

NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Demands:
    """What independent caches must execute, step by step.

    Attributes:
        ids_SRU: items of each step, -1 where a demand is smaller than U or a row has ended;
            signed integers, distinct within a demand. Rows are ordered by descending length.
        num_items: ids are below it.

    Raises:
        ValueError: at construction, if rows are not ordered by length.
    """

    ids_SRU: IdArray
    num_items: int

    def __post_init__(self) -> None:
        if self.ids_SRU.ndim != 3 or self.ids_SRU.dtype.kind != "i":
            raise ValueError(
                f"demands must be signed integers of shape (steps, rows, items), got "
                f"{self.ids_SRU.dtype} {self.ids_SRU.shape}"
            )
        ended_SR: BoolArray = np.logical_and.reduce(self.ids_SRU < 0, axis=2)
        if (ended_SR[:, :-1] & ~ended_SR[:, 1:]).any() or (ended_SR[:-1] & ~ended_SR[1:]).any():
            raise ValueError("rows must be ordered by length, the longest first, without gaps")
        if self.ids_SRU.size and int(self.ids_SRU.max()) >= self.num_items:
            raise ValueError(f"item {self.ids_SRU.max()} is outside [0, {self.num_items})")

    @property
    def sizes_SR(self) -> IntArray:
        """u, items of each demand."""
        sizes_SR: IntArray = np.count_nonzero(self.ids_SRU >= 0, axis=2)
        return sizes_SR

    @property
    def active_S(self) -> IntArray:
        """Rows that have a demand in each step; they are the first ones."""
        active_S: IntArray = np.count_nonzero((self.ids_SRU >= 0).any(axis=2), axis=1)
        return active_S


@dataclass(frozen=True)
class Bound:
    """A best schedule, and the prices that prove it best.

    Attributes:
        loads_R: loads of each row.
        accesses_R: items asked for in each row.
        kept_SRU: whether the item was kept since its previous use.
        prices_PR: dual prices of the points, non-negative integers; None when no proof was asked
            for.
    """

    loads_R: IntArray
    accesses_R: IntArray
    kept_SRU: BoolArray
    prices_PR: NDArray[np.int32] | None


def minimum(
    demands: Demands,
    capacity: int,
    variant: Variant = "forced",
    *,
    prove: bool = True,
    progress: Progress | None = None,
) -> Bound:
    """The fewest loads, over every policy, prefetching included.

    Args:
        demands: what must be executed; for `shared`, all layers of a token in turn.
        capacity: B, slots; of the pool for `shared`.
        variant: see the top of this file.
        prove: also find the prices, which takes about ten times as long as the schedule.
        progress: called with a number of finished steps, for a progress bar.

    Raises:
        ValueError: unknown variant, no slots, or a demand beyond the capacity where the variant
            does not allow one.
    """
    caps_PR = _capacities(demands, capacity, variant)
    kept_SRU, previous_SRU = _pack(demands, caps_PR, progress)
    accesses_R = demands.sizes_SR.sum(axis=0)
    loads_R = accesses_R - np.count_nonzero(kept_SRU, axis=(0, 2))
    prices_PR = _prices(demands, kept_SRU, previous_SRU, caps_PR) if prove else None
    return Bound(loads_R, accesses_R, kept_SRU, prices_PR)


def certify(demands: Demands, capacity: int, variant: Variant, bound: Bound) -> IntArray:
    """Check a bound without the code that found it.

    Args:
        demands: as given to `minimum`.
        capacity: as given to `minimum`.
        variant: as given to `minimum`.
        bound: the claim.

    Returns:
        Loads proven minimal, a row each; int64 (R,).

    Raises:
        ValueError: the schedule keeps what it never had or more than fits, its loads are not the
            claimed ones, or the prices do not prove them minimal; the message names the row.
    """
    num_steps, num_rows, width = demands.ids_SRU.shape
    num_points = 2 * num_steps
    if bound.prices_PR is None:
        raise ValueError("the bound has no prices: ask `minimum` to prove it")
    if bound.kept_SRU.shape != demands.ids_SRU.shape or bound.prices_PR.shape != (
        num_points,
        num_rows,
    ):
        raise ValueError(
            f"bound of shapes {bound.kept_SRU.shape}, {bound.prices_PR.shape} does not belong to "
            f"demands of shape {demands.ids_SRU.shape}"
        )
    if bound.prices_PR.min(initial=0) < 0:
        raise ValueError("prices must not be negative")
    caps_PR = _capacities(demands, capacity, variant)
    lower_R = np.zeros(num_rows, dtype=np.int64)
    upper_R = np.zeros(num_rows, dtype=np.int64)
    # A block of rows at a time, to bound memory. Intervals are found by sorting uses.
    block = max(1, 2_000_000 // max(1, num_steps * width))
    for first in range(0, num_rows, block):
        rows = slice(first, min(first + block, num_rows))
        ids_SRU, kept_SRU = demands.ids_SRU[:, rows], bound.kept_SRU[:, rows]
        count = ids_SRU.shape[1]
        steps, row, column = np.nonzero(ids_SRU >= 0)
        kept = kept_SRU[steps, row, column]
        if int(kept_SRU.sum()) != int(kept.sum()):
            raise ValueError(f"rows {rows.start}-{rows.stop - 1}: keeps items nobody asked for")
        series = row * demands.num_items + ids_SRU[steps, row, column]
        order = np.lexsort((steps, series))
        steps, row, kept, series = steps[order], row[order], kept[order], series[order]
        again = np.append(False, series[1:] == series[:-1])
        if (kept & ~again).any():
            bad = rows.start + row[(kept & ~again).argmax()]
            raise ValueError(f"row {bad}: keeps an item before its first use")
        start, end = np.append(0, 2 * steps[:-1] + 1)[again], 2 * steps[again]
        row_i, kept_i = row[again], kept[again]
        # Kept intervals at each point: +1 at the first, -1 after the last.
        change = np.bincount(
            start[kept_i] * count + row_i[kept_i], minlength=(num_points + 1) * count
        ) - np.bincount(end[kept_i] * count + row_i[kept_i], minlength=(num_points + 1) * count)
        cover_PR = change.reshape(num_points + 1, count).cumsum(axis=0)[:-1]
        if (cover_PR > caps_PR[:, rows]).any():
            point, bad = np.argwhere(cover_PR > caps_PR[:, rows])[0]
            raise ValueError(
                f"row {rows.start + bad}, step {point // 2}: keeps {cover_PR[point, bad]} items "
                f"where {caps_PR[point, rows.start + bad]} fit"
            )
        prices_PR = bound.prices_PR[:, rows].astype(np.int64)
        paid_PR = np.vstack((np.zeros((1, count), np.int64), prices_PR.cumsum(axis=0)))
        gain_i = np.maximum(0, 1 - (paid_PR[end, row_i] - paid_PR[start, row_i]))
        most_R = (prices_PR * caps_PR[:, rows]).sum(axis=0)
        most_R += np.bincount(row_i, gain_i, minlength=count).astype(np.int64)
        asked_R = np.bincount(row, minlength=count)
        lower_R[rows] = asked_R - most_R
        upper_R[rows] = asked_R - np.bincount(row[kept], minlength=count)
    for what, found_R in (("schedule has", upper_R), ("prices prove", lower_R)):
        if (found_R != bound.loads_R).any():
            bad = int((found_R != bound.loads_R).argmax())
            raise ValueError(
                f"row {bad}: the {what} {found_R[bad]} loads, the bound says {bound.loads_R[bad]}"
            )
    return lower_R


def _capacities(demands: Demands, capacity: int, variant: Variant) -> NDArray[np.int32]:
    """Kept intervals that may cover each point; int32 (P, R)."""
    if variant not in get_args(Variant):
        raise ValueError(f"unknown bound {variant!r}: choose one of {', '.join(get_args(Variant))}")
    if capacity < 1:
        raise ValueError(f"cache capacity must be at least 1, got {capacity}")
    sizes_SR = demands.sizes_SR
    caps_PR = np.full((2 * len(sizes_SR), sizes_SR.shape[1]), capacity, dtype=np.int32)
    if variant == "bypass":
        return caps_PR
    largest = int(sizes_SR.max(initial=0))
    if largest > capacity and variant != "union":
        raise ValueError(
            f"a step demands {largest} experts, more than the capacity {capacity}: bound `union` "
            f"covers such steps"
        )
    caps_PR[::2] -= np.where(sizes_SR > capacity, 1, sizes_SR).astype(np.int32)
    return caps_PR


def _pack(
    demands: Demands, caps_PR: NDArray[np.int32], progress: Progress | None
) -> tuple[BoolArray, NDArray[np.int32]]:
    """The most intervals that fit: whenever too many are open, those that end last go.

    Returns:
        kept_SRU, and the step of each item's previous use, -1 at the first, (S, R, U).
    """
    ids_SRU, active_S = demands.ids_SRU, demands.active_S
    num_steps, num_rows, _ = ids_SRU.shape
    # One more item takes the padding.
    table_RM = np.full((num_rows, demands.num_items + 1), NEVER, dtype=np.int32)
    next_SRU = np.empty(ids_SRU.shape, dtype=np.int32)
    rows_R1 = np.arange(num_rows)[:, None]
    for s in range(num_steps - 1, -1, -1):
        here = (rows_R1[: active_S[s]], ids_SRU[s, : active_S[s]])
        next_SRU[s, : active_S[s]] = table_RM[here]
        table_RM[here] = s
        table_RM[:, -1] = NEVER
    open_RM, last_RM = np.full_like(table_RM, -1), np.full_like(table_RM, -1)
    num_open_R = np.zeros(num_rows, dtype=np.int32)
    kept_SRU = np.zeros(ids_SRU.shape, dtype=np.bool_)
    previous_SRU = np.full(ids_SRU.shape, -1, dtype=np.int32)
    for s in range(num_steps):
        num = int(active_S[s])
        here = (rows_R1[:num], ids_SRU[s, :num])
        kept_SRU[s, :num] = open_RM[here] == s
        previous_SRU[s, :num] = last_RM[here]
        last_RM[here] = s
        last_RM[:, -1] = -1
        open_RM[here] = -1
        num_open_R[:num] -= np.count_nonzero(kept_SRU[s, :num], axis=1)
        _drop(open_RM, num_open_R[:num], caps_PR[2 * s, :num])
        soon_RU = next_SRU[s, :num] != NEVER
        open_RM[here] = np.where(soon_RU, next_SRU[s, :num], -1)
        open_RM[:, -1] = -1
        num_open_R[:num] += np.count_nonzero(soon_RU, axis=1)
        _drop(open_RM, num_open_R[:num], caps_PR[2 * s + 1, :num])
        if progress is not None:
            progress(1)
    return kept_SRU, previous_SRU


def _drop(
    open_RM: NDArray[np.int32], num_open_R: NDArray[np.int32], caps_R: NDArray[np.int32]
) -> None:
    """Close intervals that do not fit, the last to end first."""
    over = np.flatnonzero(num_open_R > caps_R)
    while len(over):
        open_RM[over, open_RM[over].argmax(axis=1)] = -1
        num_open_R[over] -= 1
        over = over[num_open_R[over] > caps_R[over]]


def _prices(
    demands: Demands,
    kept_SRU: BoolArray,
    previous_SRU: NDArray[np.int32],
    caps_PR: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Prices that prove the schedule: on full points only, together at least 1 over an interval
    that was dropped and at most 1 over one that was kept (complementary slackness).

    Those are difference constraints on the sums of prices up to each point. Their least solution
    is reached by raising sums until nothing is violated: forward for the dropped intervals,
    backward for the kept ones.
    """
    num_points, num_rows = caps_PR.shape
    change_PR = np.zeros((num_points + 1, num_rows), dtype=np.int32)
    steps, rows, _ = np.nonzero(kept_SRU)
    np.add.at(change_PR, (2 * previous_SRU[kept_SRU] + 1, rows), 1)
    np.subtract.at(change_PR, (2 * steps, rows), 1)
    full_PR = change_PR.cumsum(axis=0)[:-1] == caps_PR
    dropped_SRU = (previous_SRU >= 0) & ~kept_SRU
    sums_PR = np.zeros((num_points, num_rows), dtype=np.int32)
    todo = np.arange(num_rows)
    while len(todo):
        sums, before = sums_PR[:, todo], sums_PR[:, todo]
        # Padding has no previous use: neither dropped nor kept, whatever its -1 points at.
        starts = 2 * previous_SRU[:, todo]
        _raise_forward(sums, dropped_SRU[:, todo], starts)
        _raise_backward(sums, kept_SRU[:, todo], starts, full_PR[:, todo])
        sums_PR[:, todo] = sums
        todo = todo[(sums != before).any(axis=0)]
    return np.diff(sums_PR, axis=0, prepend=0).astype(np.int32)


def _raise_forward(
    sums_PR: NDArray[np.int32], dropped_SRU: BoolArray, starts_SRU: NDArray[np.int32]
) -> None:
    """Let sums not fall, and rise by 1 over a dropped interval."""
    columns = np.arange(sums_PR.shape[1])[:, None]
    for s in range(1, len(dropped_SRU)):
        least_RU = np.where(dropped_SRU[s], sums_PR[starts_SRU[s], columns] + 1, 0)
        np.maximum(sums_PR[2 * s - 1], least_RU.max(axis=1), out=sums_PR[2 * s - 1])
        np.maximum(sums_PR[2 * s - 1], sums_PR[2 * s - 2], out=sums_PR[2 * s - 1])
        np.maximum(sums_PR[2 * s], sums_PR[2 * s - 1], out=sums_PR[2 * s])
    np.maximum(sums_PR[-1], sums_PR[-2], out=sums_PR[-1])


def _raise_backward(
    sums_PR: NDArray[np.int32],
    kept_SRU: BoolArray,
    starts_SRU: NDArray[np.int32],
    full_PR: BoolArray,
) -> None:
    """Let sums stay equal at points that are not full, and rise at most by 1 while kept."""
    num_steps = len(kept_SRU)
    for p in range(len(sums_PR) - 1, 0, -1):
        s = (p + 1) // 2
        if p % 2 and s < num_steps:  # the last point of the intervals that end at step s
            rows, columns = np.nonzero(kept_SRU[s])
            np.maximum.at(sums_PR, (starts_SRU[s][rows, columns], rows), sums_PR[p, rows] - 1)
        np.maximum(sums_PR[p - 1], np.where(full_PR[p], 0, sums_PR[p]), out=sums_PR[p - 1])
