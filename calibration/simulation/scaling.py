"""How many decode replicas a load needs: up at once, down only after a while."""

from __future__ import annotations

import math

from calibration.simulation.config import AutoscalingSection


class LoadScaler:
    """Follows the requests in flight.

    Args:
        settings: target load, bounds, delay.
    """

    def __init__(self, settings: AutoscalingSection) -> None:
        self._settings = settings
        self._below_since: float | None = None
        self._most_wanted = 0

    def wanted(self, in_flight: int, current: int, now: float) -> int:
        """Replicas wanted.

        Args:
            in_flight: requests in the decode phase.
            current: replicas that serve or start.
            now: seconds.

        Returns:
            ceil(in_flight / target_load) within the bounds if that is more than there are; if it
            has been less for `down_delay_s`, the most it was in that time; else `current`.
        """
        settings = self._settings
        wanted = math.ceil(in_flight / settings.target_load)
        wanted = min(max(wanted, settings.min_replicas), settings.max_replicas)
        if wanted >= current:
            self._below_since = None
            return wanted
        if self._below_since is None:
            self._below_since, self._most_wanted = now, wanted
        self._most_wanted = max(self._most_wanted, wanted)
        if now - self._below_since < settings.down_delay_s:
            return current
        self._below_since = None
        return self._most_wanted
