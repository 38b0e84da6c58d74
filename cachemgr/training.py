"""Fits the learned retention score to recorded requests: ridge regression, one a layer.

Axes: N requests of a block, S steps, L MoE layers, E experts, R rows, X features, H half-lives,
W layers of the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from cachemgr.bound import Demands
from cachemgr.joint import batch_demands
from cachemgr.learned import HALF_LIVES, History, ScoreTable
from cachemgr.replay import layer_demands
from cachemgr.types import BoolArray, FloatArray
from calibration.traces import RoutingTrace

WINDOW = 800
GAMMA = 0.85
RIDGE = 0.01
REQUESTS_PER_BLOCK = 32
TOKENS_PER_PRODUCT = 2048


def default_reach(num_layers: int, num_experts: int) -> int:
    """Layers to each side that keep `WINDOW` experts or fewer in the window: it bounds the time."""
    return max(0, min(num_layers - 1, (WINDOW // num_experts - 1) // 2))


def train(
    trace: RoutingTrace,
    model_id: str,
    *,
    fingerprint: str | None = None,
    batch: int = 1,
    seed: int = 0,
    reach: int | None = None,
    gamma: float = GAMMA,
    half_lives: tuple[float, ...] = HALF_LIVES,
    ridge: float = RIDGE,
    progress: Callable[[int], object] | None = None,
) -> ScoreTable:
    """Fit a score to a trace.

    The target of an expert after a step is gamma^(steps until its next use - 1), 0 if the request
    never uses it again.

    Args:
        trace: requests to learn from.
        model_id: name of the model that was traced.
        fingerprint: of that model, where it is known.
        batch: requests that a step decodes; what it executes is the union of their choices.
        seed: of the batches.
        reach: layers of the window to each side of a layer; None takes `default_reach`.
        gamma: discount of the target, in (0, 1).
        half_lives: of the decayed counts, in steps.
        ridge: penalty on squared weights, relative to the number of tokens.
        progress: called with a number of finished tokens.

    Raises:
        ValueError: a parameter out of range.
    """
    num_layers, num_experts = trace.num_layers, trace.num_experts
    reach = default_reach(num_layers, num_experts) if reach is None else reach
    if not 0 <= reach < trace.num_layers:
        raise ValueError(f"reach must be in [0, {trace.num_layers - 1}], got {reach}")
    if not 0 < gamma < 1:
        raise ValueError(f"gamma must be in (0, 1), got {gamma}")
    if not ridge > 0:
        raise ValueError(f"ridge must be above 0, got {ridge}")
    num_own = len(half_lives) * num_experts
    num_features = num_own + (2 * reach + 1) * num_experts + 1
    gram_LXX = np.zeros((num_layers, num_features, num_features))
    moment_LXE = np.zeros((num_layers, num_features, num_experts))
    num_steps = 0
    for demands in _blocks(trace, batch, seed):
        done = int(demands.active_S.sum()) // num_layers
        _accumulate(demands, num_layers, reach, gamma, half_lives, gram_LXX, moment_LXE)
        num_steps += done
        if progress is not None:
            progress(done * batch)
    penalty_X = np.full(num_features, ridge * num_steps)
    penalty_X[-1] = 1e-9 * num_steps  # the bias is free
    own_LHE = np.empty((num_layers, len(half_lives), num_experts), dtype=np.float32)
    others_LXE = np.empty((num_layers, num_features - num_own, num_experts), dtype=np.float32)
    for layer in range(num_layers):
        gram_LXX[layer].flat[:: num_features + 1] += penalty_X
        own_LHE[layer], others_LXE[layer] = _solve(gram_LXX[layer], moment_LXE[layer], num_own)
    return ScoreTable(
        model_id,
        fingerprint,
        half_lives,
        gamma,
        own_LHE,
        # Rounded to what the file keeps, so that a loaded score decides as this one does.
        others_LXE[:, :-1]
        .astype(np.float16)
        .astype(np.float32)
        .reshape(num_layers, -1, num_experts, num_experts),
        others_LXE[:, -1],
        {
            "num_requests": len(trace),
            "num_tokens": len(trace.ids_TLk),
            "batch": batch,
            "ridge": ridge,
            "target": "gamma^(steps until next use - 1)",
        },
    )


def split(trace: RoutingTrace, held_out: int, seed: int) -> tuple[RoutingTrace, RoutingTrace]:
    """Draw requests to measure on; the others are to train on.

    A request recorded twice, token for token, never serves for both.

    Args:
        trace: all requests.
        held_out: how many to measure on.
        seed: of the draw.

    Returns:
        Held-out requests and training requests.

    Raises:
        ValueError: one of the two would be empty.
    """
    if not 1 <= held_out < len(trace):
        raise ValueError(
            f"held-out requests must be in [1, {len(trace) - 1}], below the {len(trace)} of the "
            f"trace, got {held_out}"
        )
    drawn = np.random.default_rng(seed).permutation(len(trace))
    measured, others = np.sort(drawn[:held_out]), np.sort(drawn[held_out:])
    seen = {trace.tokens(int(request)).tobytes() for request in measured}
    kept = [int(r) for r in others if trace.tokens(int(r)).tobytes() not in seen]
    if not kept:
        raise ValueError("every request to train on repeats a held-out one: give another trace")
    return trace.subset(measured), trace.subset(kept)


def _blocks(trace: RoutingTrace, batch: int, seed: int) -> Iterator[Demands]:
    """What is executed step by step: by requests of like length alone, or by one busy replica."""
    if batch > 1:
        yield batch_demands(trace, batch, seed)
        return
    order = np.argsort(-trace.num_tokens_N, kind="stable")  # equal lengths waste no steps
    for first in range(0, len(order), REQUESTS_PER_BLOCK):
        yield layer_demands(trace.subset(order[first : first + REQUESTS_PER_BLOCK]))


def _solve(
    gram_XX: NDArray[np.float64], moment_XE: NDArray[np.float64], num_own: int
) -> tuple[FloatArray, FloatArray]:
    """Weights of a layer, of which each expert sees its own counts alone.

    The window and the bias are the same for all experts: they are eliminated once, and a system of
    the few own counts is left for each expert.

    Args:
        gram_XX: products of the features, the `num_own` = H * E counts first, with the penalty.
        moment_XE: products of features and targets.
        num_own: H * E.

    Returns:
        Of own counts, (H, E), and of the other features, (X - H * E, E).
    """
    num_experts = moment_XE.shape[1]
    cross_XO, moment_OE = gram_XX[num_own:, :num_own], moment_XE[:num_own]
    solved = np.linalg.solve(
        gram_XX[num_own:, num_own:], np.concatenate((cross_XO, moment_XE[num_own:]), axis=1)
    )
    solved_XO, others_XE = solved[:, :num_own], solved[:, num_own:]
    own_HE = np.empty((num_own // num_experts, num_experts))
    for expert in range(num_experts):
        counts = np.arange(expert, num_own, num_experts)
        cross_XH = cross_XO[:, counts]
        own_HE[:, expert] = np.linalg.solve(
            gram_XX[np.ix_(counts, counts)] - cross_XH.T @ solved_XO[:, counts],
            moment_OE[counts, expert] - cross_XH.T @ others_XE[:, expert],
        )
        others_XE[:, expert] -= solved_XO[:, counts] @ own_HE[:, expert]
    return own_HE, others_XE


def _accumulate(
    demands: Demands,
    num_layers: int,
    reach: int,
    gamma: float,
    half_lives: tuple[float, ...],
    gram_LXX: NDArray[np.float64],
    moment_LXE: NDArray[np.float64],
) -> None:
    """Add a block of requests to the normal equations of every layer."""
    num_experts, active_S = demands.num_items, demands.active_S
    num_requests = demands.ids_SRU.shape[1] // num_layers
    targets_SRE = _targets(demands, active_S, gamma)
    history = History(num_requests, num_layers, num_experts, half_lives, reach)
    buffer = TOKENS_PER_PRODUCT + num_requests
    features_LTX = np.ones((num_layers, buffer, gram_LXX.shape[1]), dtype=np.float32)
    targets_LTE = np.empty((num_layers, buffer, num_experts), dtype=np.float32)
    filled = 0
    for s, active in enumerate(active_S.tolist()):
        rows = slice(0, active)
        history.observe(rows, _demand(demands, s, active))
        tokens = slice(filled, filled + active // num_layers)
        for layer in range(num_layers):
            own_NHE, window_NX = history.features(rows, layer)
            num_own = own_NHE[0].size
            features_LTX[layer, tokens, :num_own] = own_NHE.reshape(len(own_NHE), -1)
            features_LTX[layer, tokens, num_own:-1] = window_NX
            targets_LTE[layer, tokens] = targets_SRE[s, layer:active:num_layers]
        filled = tokens.stop
        if filled >= TOKENS_PER_PRODUCT or s == len(active_S) - 1:
            for layer in range(num_layers):
                features_TX = features_LTX[layer, :filled]
                gram_LXX[layer] += features_TX.T @ features_TX
                moment_LXE[layer] += features_TX.T @ targets_LTE[layer, :filled]
            filled = 0


def _targets(demands: Demands, active_S: NDArray[np.int64], gamma: float) -> NDArray[np.float32]:
    """gamma^(steps until the next use - 1) after each step, 0 for never; (S, R, E)."""
    num_steps, num_rows, _ = demands.ids_SRU.shape
    targets_SRE = np.zeros((num_steps, num_rows, demands.num_items), dtype=np.float32)
    for s in range(num_steps - 1, 0, -1):
        active = int(active_S[s])
        np.multiply(targets_SRE[s], np.float32(gamma), out=targets_SRE[s - 1])
        targets_SRE[s - 1, :active][_demand(demands, s, active)] = 1
    return targets_SRE


def _demand(demands: Demands, step: int, active: int) -> BoolArray:
    """Demand of the active rows as booleans; (R, E)."""
    # One more item takes the padding.
    demand_RM = np.zeros((active, demands.num_items + 1), dtype=np.bool_)
    np.put_along_axis(demand_RM, demands.ids_SRU[step, :active].astype(np.int64), True, axis=1)
    return demand_RM[:, :-1]
