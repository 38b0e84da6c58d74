"""Our placement plan through stock vLLM's EPLB: it moves the experts, we say where to.

Upstream: `vllm.distributed.eplb`, vLLM 0.32. vLLM takes no placement from outside (flags for a map
file are open pull requests) and its only policy plans from nothing, by tokens instead of active
experts, without a cost of moving. So `DefaultEplbPolicy.rebalance_experts` is replaced: on the
class, because `EPLB_POLICIES` admits no further key. When vLLM takes a map or a policy by name,
this file can go.

Every rank must return the same map, or experts are sent that nobody receives. Ranks may see
another file at another moment, so only rank 0 reads the plan, and the others get it by one
broadcast on vLLM's EPLB group. That group serves nothing but EPLB, and vLLM calls the policy on
all its ranks in one order, synchronously or in its EPLB thread.

Without a usable plan (none there, damaged, for another model or shape, too old) vLLM's own policy
answers on all ranks, with its usual inputs. A draft model has another shape and so its own policy.

An engine needs `enable_expert_parallel`, `enable_eplb` and an `eplb_config` whose `step_interval`
is the period of control and whose `num_redundant_experts` are the plan's slots beyond its experts.

What has run: the replaced policy in two real processes on CPU, with vLLM's group, and vLLM's own
move of weights between them after our plan. What has not: EPLB inside an engine, which needs two
GPUs; the asynchronous thread; more than one node; elastic EP, where vLLM keeps its policy. On ROCm
in synchronous mode vLLM drops a map that gains less than 5 % by tokens, ours too.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from cachemgr.placement_plan import IntArray, PlacementPlan, PlanMismatch
from deployments.vllm_adapter.bindings import Binding, IncompatibleVllm, check_bindings

PLAN_PATH = "ELDR_EPLB_PLAN"
FINGERPRINT = "ELDR_EPLB_FINGERPRINT"
MAX_AGE_S = "ELDR_EPLB_MAX_AGE_S"

BINDINGS = (
    Binding(
        "vllm.distributed.eplb.policy", "DefaultEplbPolicy.rebalance_experts", "placement plans"
    ),
    Binding("vllm.distributed.eplb.eplb_state", "EplbState.rearrange", "placement plans"),
    Binding("vllm.distributed.parallel_state", "get_eplb_group", "one plan on all ranks"),
)
_PARAMETERS = (
    "weight",
    "num_replicas",
    "num_groups",
    "num_nodes",
    "num_ranks",
    "old_global_expert_indices",
)
_NO_PLAN = -1

logger = logging.getLogger(__name__)


class PlanFallback(StrEnum):
    """Why vLLM's own policy answers."""

    ABSENT = "there is no plan"
    UNREADABLE = "the plan cannot be read"
    MISMATCH = "the plan is for another model or shape"
    STALE = "the plan is too old"


@dataclass(frozen=True, slots=True)
class PlanSource:
    """Where rank 0 finds the plan.

    Attributes:
        path: file written by `PlacementPlan.save`; it may come, change and go at any time.
        fingerprint: of the model that the engine runs.
        max_age_s: a plan made longer ago is stale; None for plans that do not age.
    """

    path: Path
    fingerprint: str
    max_age_s: float | None = None

    def read(
        self, num_layers: int, num_experts: int, num_slots: int, num_ranks: int, now: float
    ) -> tuple[PlacementPlan | None, PlanFallback | None, str]:
        """The plan, or why there is none, and a text for the log. Raises nothing.

        An exception on one rank would leave the others waiting in the broadcast.
        """
        try:
            plan = PlacementPlan.load(self.path)
            plan.verify(self.fingerprint, num_layers, num_experts, num_slots, num_ranks)
        except FileNotFoundError as err:
            return None, PlanFallback.ABSENT, str(err)
        except PlanMismatch as err:
            return None, PlanFallback.MISMATCH, str(err)
        except (ValueError, OSError) as err:
            return None, PlanFallback.UNREADABLE, str(err)
        age_s = now - plan.created_at
        if self.max_age_s is not None and age_s > self.max_age_s:
            text = f"plan {plan.version} is {age_s:.0f} s old, allowed are {self.max_age_s:.0f}"
            return None, PlanFallback.STALE, text
        return plan, None, f"plan {plan.version}"


def register() -> None:
    """Install the policy where `ELDR_EPLB_PLAN` names a file; called by the plug-in.

    Raises:
        ValueError: the environment is incomplete.
        IncompatibleVllm: see `install`.
    """
    path = os.environ.get(PLAN_PATH)
    if not path:
        return
    fingerprint = os.environ.get(FINGERPRINT)
    if not fingerprint:
        raise ValueError(f"{PLAN_PATH} is set: set {FINGERPRINT} to the model's fingerprint too")
    text = os.environ.get(MAX_AGE_S)
    try:
        max_age_s = None if text is None else float(text)
    except ValueError as err:
        raise ValueError(f"{MAX_AGE_S} must be a number of seconds, got {text!r}") from err
    install(PlanSource(Path(path), fingerprint, max_age_s))


def install(source: PlanSource) -> None:
    """Replace vLLM's policy in this process; a second call replaces the source.

    Raises:
        IncompatibleVllm: this vLLM lacks a name, or the policy takes other arguments.
    """
    check_bindings(BINDINGS)
    from vllm.distributed.eplb.policy import DefaultEplbPolicy

    current = DefaultEplbPolicy.__dict__["rebalance_experts"]
    original = getattr(current.__func__, "eldr_original", current)
    parameters = tuple(inspect.signature(original.__func__).parameters)[1:]
    if parameters != _PARAMETERS:
        raise IncompatibleVllm(
            f"DefaultEplbPolicy.rebalance_experts takes {parameters}, the adapter knows "
            f"{_PARAMETERS}: adapt deployments/vllm_adapter/eplb.py"
        )
    said: list[str] = []

    def rebalance_experts(
        cls: type,
        weight: Any,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: Any = None,
    ) -> Any:
        import torch

        num_layers, num_experts = weight.shape
        agreed_LP = _agree(source, num_layers, num_experts, num_replicas, num_ranks, said)
        if agreed_LP is not None:
            return torch.from_numpy(agreed_LP)
        return original.__func__(
            cls,
            weight,
            num_replicas,
            num_groups,
            num_nodes,
            num_ranks,
            old_global_expert_indices,
        )

    rebalance_experts.eldr_original = original  # type: ignore[attr-defined]
    DefaultEplbPolicy.rebalance_experts = classmethod(rebalance_experts)


def _agree(
    source: PlanSource,
    num_layers: int,
    num_experts: int,
    num_slots: int,
    num_ranks: int,
    said: list[str],
) -> IntArray | None:
    """Rank 0's plan on every rank, or None on every rank."""
    import torch
    from vllm.distributed.parallel_state import get_eplb_group

    group = get_eplb_group().cpu_group
    if group.size() != num_ranks:  # elastic EP is about to change the ranks
        return None
    message = np.full(1 + num_layers * num_slots, _NO_PLAN, dtype=np.int64)
    if group.rank() == 0:
        plan, fallback, text = source.read(
            num_layers, num_experts, num_slots, num_ranks, time.time()
        )
        if plan is not None:
            message[0] = plan.version
            message[1:] = plan.physical_to_logical_LP.ravel()
        if said != [text]:
            said[:] = [text]
            if fallback is None:
                logger.info("EPLB follows %s", text)
            else:
                logger.warning("EPLB uses vLLM's own policy, for %s: %s", fallback, text)
    torch.distributed.broadcast(torch.from_numpy(message), group=group, group_src=0)
    return None if message[0] == _NO_PLAN else message[1:].reshape(num_layers, num_slots)
