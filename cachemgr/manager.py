"""The manager of a node's expert caches: what is set, what is measured, and the control loop.

Plain Python with a given clock; `cachemgr/actor.py` makes a Ray actor of it. Decode replicas report
what their workers count and are told what to change. Replicas carry the targets that they were last
given, so a manager that was started again goes on with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from cachemgr.policies import check_capacity

logger = logging.getLogger(__name__)

REPORT_TIMEOUT_S = 5.0
_SUMS = (
    "steps",
    "tokens",
    "accesses",
    "hits",
    "demand_loads",
    "proactive_loads",
    "streamed_loads",
    "load_bytes",
    "evictions",
)


@dataclass(frozen=True, slots=True)
class Targets:
    """What every expert cache of the node is to run with; a higher version is newer.

    Attributes:
        version: counts changes.
        slots: B.
        max_slots: B as set by the operator; the control loop never goes above it.
        budget: R.
        policy: retention policy.
        score_file: weights the policy scores by; None: the model's gates.
    """

    version: int
    slots: int
    max_slots: int
    budget: int
    policy: str
    score_file: str | None


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Bands of the control loop. Between `low` and `high` nothing changes.

    Attributes:
        interval_s: seconds between two decisions.
        link_low: share of time that loads keep the link busy, below which R may rise.
        link_high: share above which R is halved.
        memory_low: share of free memory below which B shrinks by a tenth.
        memory_high: share above which B may grow again, up to what was set.
        patience: decisions in a row that must agree before anything rises: falling is safe, and
            rising too early would make the loop swing.
    """

    interval_s: float = 2.0
    link_low: float = 0.2
    link_high: float = 0.5
    memory_low: float = 0.05
    memory_high: float = 0.15
    patience: int = 3


class Controller:
    """Sets R by the link's headroom and B by memory pressure. Pure: the caller gives measurements.

    Args:
        settings: bands.
        top_k: k; B never falls below it.
    """

    def __init__(self, settings: ControlSettings, top_k: int) -> None:
        self._settings, self._top_k = settings, top_k
        self._idle = self._roomy = 0  # decisions in a row with headroom

    def decide(
        self, targets: Targets, link_busy: float | None, free_memory: float | None
    ) -> Targets:
        """One decision.

        Args:
            targets: what is set.
            link_busy: share of time since the last decision that loads kept the link busy; None:
                not measured, R stays.
            free_memory: free share of the memory that slots are in; None: B stays.

        Returns:
            `targets`, or a newer version.
        """
        slots = self._slots(targets, free_memory)
        budget = min(slots, self._budget(targets, link_busy))
        if (slots, budget) == (targets.slots, targets.budget):
            return targets
        return replace(targets, version=targets.version + 1, slots=slots, budget=budget)

    def _budget(self, targets: Targets, link_busy: float | None) -> int:
        if targets.policy != "spatio" or link_busy is None:
            return targets.budget
        settings = self._settings
        self._idle = self._idle + 1 if link_busy < settings.link_low else 0
        if link_busy > settings.link_high:
            return max(1, targets.budget // 2)
        if self._idle >= settings.patience:
            self._idle = 0
            return targets.budget + max(1, self._top_k // 2)
        return targets.budget

    def _slots(self, targets: Targets, free_memory: float | None) -> int:
        if free_memory is None:
            return targets.slots
        settings = self._settings
        self._roomy = self._roomy + 1 if free_memory > settings.memory_high else 0
        step = max(1, targets.max_slots // 10)
        if free_memory < settings.memory_low:
            return max(self._top_k, targets.slots - step)
        if self._roomy >= settings.patience and targets.slots < targets.max_slots:
            self._roomy = 0
            return min(targets.max_slots, targets.slots + step)
        return targets.slots


@dataclass(slots=True)
class _Member:
    stats: dict[str, Any]
    seen_at: float
    link_busy: float | None = None
    free_memory: float | None = None
    refused: str | None = None


class CacheManager:
    """State of one node's manager. One event loop or thread; no method awaits.

    Args:
        control: bands of the control loop; None switches it off.
        clock: seconds, monotonic.
    """

    def __init__(self, control: ControlSettings | None, clock: Callable[[], float]) -> None:
        self._control, self._clock = control, clock
        self._members: dict[str, _Member] = {}
        self._targets: Targets | None = None
        self._controller: Controller | None = None
        self._decided_at = clock()

    def configure(self, control: ControlSettings | None) -> None:
        """Take new bands, or switch the control loop off."""
        if control != self._control:
            self._control, self._controller = control, None

    def report(
        self,
        replica_id: str,
        stats: Mapping[str, Any],
        known: Mapping[str, Any] | None,
        refused: str | None = None,
    ) -> dict[str, Any]:
        """Take a replica's statistics; say what it should run with.

        Args:
            replica_id: who reports.
            stats: what `eldr_cache_stats` of one of its workers says; all have the same settings.
            known: the targets it was last given.
            refused: why its engine did not take them.

        Returns:
            {"targets": for its next report, "changes": settings its engine is to change}.
        """
        now = self._clock()
        self._adopt(stats, known)
        targets = self._targets
        assert targets is not None
        if refused is not None and known is not None and known["version"] == targets.version:
            # What no engine takes must not be asked for for ever.
            logger.warning("%s refused %s: %s", replica_id, targets, refused)
            has = _settings_in(stats)
            max_slots = targets.max_slots if has["slots"] == targets.slots else has["slots"]
            self._targets = targets = replace(
                targets, version=targets.version + 1, max_slots=max_slots, **has
            )
        self._measure(replica_id, stats, now, refused)
        if self._control is not None and now - self._decided_at >= self._control.interval_s:
            self._decided_at = now
            targets = self._targets = self._decide(self._control, targets, now)
        wanted = asdict(targets)
        has = _settings_in(stats)
        changes = {name: wanted[name] for name in has if wanted[name] != has[name]}
        return {"targets": wanted, "changes": changes}

    def set_targets(self, **changes: Any) -> Targets:
        """What an operator wants: slots, budget, policy, score_file.

        Raises:
            ValueError: no replica has reported yet, or the values do not fit the model; nothing
                was changed.
        """
        if self._targets is None or not self._members:
            raise ValueError("no decode replica of this node has reported yet: try again later")
        if unknown := set(changes) - {"slots", "budget", "policy", "score_file"}:
            raise ValueError(f"unknown settings {', '.join(sorted(unknown))} of an expert cache")
        stats = next(iter(self._members.values())).stats
        if "slots" in changes:
            changes["max_slots"] = changes["slots"]
        new = replace(self._targets, **changes)
        check_capacity(new.slots, stats["num_experts"], stats["top_k"], new.budget)
        if new != self._targets:
            self._targets = replace(new, version=new.version + 1)
        return self._targets

    def forget(self, replica_id: str) -> None:
        """A replica stops."""
        self._members.pop(replica_id, None)

    def status(self) -> dict[str, Any]:
        """Targets, what each replica runs with, and sums over them."""
        self._expire(self._clock())
        members = self._members.items()
        return {
            "targets": None if self._targets is None else asdict(self._targets),
            "control": self._control is not None,
            "replicas": {
                i: {
                    **_settings_in(m.stats),
                    "link_busy": m.link_busy,
                    "free_memory": m.free_memory,
                    "refused": m.refused,
                }
                for i, m in members
            },
            "totals": {name: sum(m.stats[name] for _, m in members) for name in _SUMS},
        }

    def _adopt(self, stats: Mapping[str, Any], known: Mapping[str, Any] | None) -> None:
        """Keep the newest targets: our own, or those of before a restart."""
        if known is not None and (
            self._targets is None or known["version"] > self._targets.version
        ):
            self._targets = Targets(**known)
        if self._targets is None:
            self._targets = Targets(version=0, max_slots=stats["slots"], **_settings_in(stats))

    def _measure(
        self, replica_id: str, stats: Mapping[str, Any], now: float, refused: str | None
    ) -> None:
        before = self._members.get(replica_id)
        member = _Member(dict(stats), now, refused=refused)
        if stats.get("memory_total"):
            member.free_memory = stats["memory_free"] / stats["memory_total"]
        busy = stats.get("copy_s")
        # A worker that was started again counts from zero: nothing is known about it yet.
        if before is not None and busy is not None and busy >= (before.stats["copy_s"] or 0.0):
            elapsed = max(now - before.seen_at, 1e-3)
            member.link_busy = (busy - (before.stats["copy_s"] or 0.0)) / elapsed
        self._members[replica_id] = member

    def _decide(self, control: ControlSettings, targets: Targets, now: float) -> Targets:
        self._expire(now)
        members = list(self._members.values())
        if self._controller is None:
            self._controller = Controller(control, members[0].stats["top_k"])
        busy = [m.link_busy for m in members if m.link_busy is not None]
        free = [m.free_memory for m in members if m.free_memory is not None]
        new = self._controller.decide(
            targets, max(busy) if busy else None, min(free) if free else None
        )
        if new != targets:
            logger.info("expert cache control: %s -> %s", targets, new)
        return new

    def _expire(self, now: float) -> None:
        late = [i for i, m in self._members.items() if now - m.seen_at > REPORT_TIMEOUT_S]
        for replica_id in late:
            del self._members[replica_id]


def _settings_in(stats: Mapping[str, Any]) -> dict[str, Any]:
    return {name: stats[name] for name in ("slots", "budget", "policy", "score_file")}
